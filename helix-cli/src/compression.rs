//! Compressions: their names on the command line and in results.

use clap::ValueEnum;
use helix_client::Compression;
use helix_proto::compression::BatchCodec;
use helix_proto::log::v1::AllowedCompression;

/// Compression of produced batches as a command-line value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompressionArg {
    /// Uncompressed
    None,
    /// LZ4: fast
    Lz4,
    /// Zstandard: smaller, at more CPU time
    Zstd,
    /// LZ4 for batches that shrink by an eighth
    Adaptive,
}

impl From<CompressionArg> for Compression {
    fn from(name: CompressionArg) -> Self {
        match name {
            CompressionArg::None => Self::None,
            CompressionArg::Lz4 => Self::Lz4,
            CompressionArg::Zstd => Self::Zstd,
            CompressionArg::Adaptive => Self::Adaptive,
        }
    }
}

const ALLOWED: [(&str, AllowedCompression); 4] = [
    ("any", AllowedCompression::Any),
    ("none", AllowedCompression::None),
    ("lz4", AllowedCompression::Lz4),
    ("zstd", AllowedCompression::Zstd),
];

/// Parses the compressions that a topic allows.
pub(crate) fn parse_allowed(text: &str) -> Result<AllowedCompression, String> {
    let known = ALLOWED.into_iter().find(|(name, _)| *name == text);
    known.map(|(_, allowed)| allowed).ok_or_else(|| "use any, none, lz4 or zstd".to_owned())
}

/// Returns the name of the compressions that a topic allows. Servers before compression report
/// none, and allow uncompressed batches only.
pub(crate) fn allowed_name(allowed: AllowedCompression) -> &'static str {
    let known = ALLOWED.into_iter().find(|(_, known)| *known == allowed);
    known.map_or("none", |(name, _)| name)
}

/// Returns the name of a batch's compression.
pub(crate) fn codec_name(wire: i32) -> String {
    match BatchCodec::from_wire(wire) {
        Ok(None) => "none".to_owned(),
        Ok(Some(BatchCodec::Lz4)) => "lz4".to_owned(),
        Ok(Some(BatchCodec::Zstd)) => "zstd".to_owned(),
        Err(_) => format!("unknown ({wire})"),
    }
}

/// Returns the uncompressed bytes for each stored byte, to two decimals.
pub(crate) fn ratio(uncompressed_bytes: u64, stored_bytes: u64) -> Option<f64> {
    let ratio = uncompressed_bytes as f64 / stored_bytes as f64;
    (stored_bytes > 0).then(|| (ratio * 100.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_allowed_compressions_round_trip() {
        for (name, allowed) in ALLOWED {
            assert_eq!(parse_allowed(name), Ok(allowed));
            assert_eq!(allowed_name(allowed), name);
        }
        assert!(parse_allowed("gzip").is_err());
        assert_eq!(allowed_name(AllowedCompression::Unspecified), "none");
        // Both wire values of uncompressed batches have one name.
        assert_eq!([0, 1, 2, 3].map(codec_name), ["none", "none", "lz4", "zstd"]);
        assert_eq!(codec_name(9), "unknown (9)");
    }

    #[test]
    fn ratio_of_nothing_is_unknown() {
        assert_eq!((ratio(10, 3), ratio(0, 0)), (Some(3.33), None));
    }
}
