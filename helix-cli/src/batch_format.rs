//! Formats of batches that a topic takes: their names on the command line and in results.

use helix_proto::log::v1::BatchFormat;

const FORMATS: [(&str, BatchFormat); 3] =
    [("helix", BatchFormat::Helix), ("kafka", BatchFormat::Kafka), ("any", BatchFormat::Any)];

/// Parses the format of a topic's batches.
pub(crate) fn parse_format(text: &str) -> Result<BatchFormat, String> {
    let known = FORMATS.into_iter().find(|(name, _)| *name == text);
    known.map(|(_, format)| format).ok_or_else(|| "use helix, kafka or any".to_owned())
}

/// Returns the name of a format. Servers before the setting report none, and take Helix's own.
pub(crate) fn format_name(format: BatchFormat) -> &'static str {
    let known = FORMATS.into_iter().find(|(_, known)| *known == format);
    known.map_or("helix", |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_formats_round_trip() {
        for (name, format) in FORMATS {
            assert_eq!(parse_format(name), Ok(format));
            assert_eq!(format_name(format), name);
        }
        assert_eq!(parse_format("json").unwrap_err(), "use helix, kafka or any");
        assert_eq!(format_name(BatchFormat::Unspecified), "helix");
    }
}
