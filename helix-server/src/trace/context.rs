//! The trace context of a caller: the header `traceparent` of W3C Trace Context, level 1.

/// Name of the metadata of a call, and of the header of a record.
pub const TRACEPARENT: &str = "traceparent";

/// Bytes of a `traceparent` of version 00.
const BYTES: usize = 55;

/// Trace and span that a caller works in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    pub trace_id: [u8; 16],
    pub span_id: [u8; 8],
    pub is_sampled: bool,
}

impl TraceContext {
    /// Parses a header. `None` for an invalid header, which the specification says to ignore.
    pub fn parse(header: &[u8]) -> Option<Self> {
        let fits = header.len() == BYTES || header.len() > BYTES && header[BYTES] == b'-';
        let dashes = [2, 35, 52];
        if !fits || dashes.iter().any(|at| header[*at] != b'-') {
            return None;
        }
        let [version] = hex(&header[..2])?;
        // Later versions may be longer, and begin alike; 255 is invalid.
        if version == 255 || version == 0 && header.len() > BYTES {
            return None;
        }
        let (trace_id, span_id) = (hex(&header[3..35])?, hex(&header[36..52])?);
        let [flags] = hex(&header[53..55])?;
        let is_valid = trace_id != [0; 16] && span_id != [0; 8];
        is_valid.then_some(Self { trace_id, span_id, is_sampled: flags & 1 == 1 })
    }
}

/// Parses lower-case digits.
fn hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn parses_the_example_of_the_specification() {
        let context = TraceContext::parse(VALID.as_bytes()).unwrap();
        assert_eq!(context.trace_id[..3], [0x0a, 0xf7, 0x65]);
        assert_eq!(context.span_id, [0xb7, 0xad, 0x6b, 0x71, 0x69, 0x20, 0x33, 0x31]);
        assert!(context.is_sampled);
        let unsampled = VALID.replace("-01", "-00");
        assert!(!TraceContext::parse(unsampled.as_bytes()).unwrap().is_sampled);
        let later = format!("{}-more", VALID.replacen("00", "cc", 1));
        assert!(TraceContext::parse(later.as_bytes()).is_some(), "a later version");
    }

    #[test]
    fn ignores_invalid_headers() {
        let invalid = [
            String::new(),
            VALID[..54].to_owned(),
            format!("{VALID}-more"),
            format!("{VALID}x"),
            VALID.replacen("00", "ff", 1),
            VALID.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            VALID.replace("b7ad6b7169203331", &"0".repeat(16)),
            VALID.to_uppercase(),
            VALID.replace('-', "_"),
            VALID.replace("0a", "0g"),
            "\u{e9}".repeat(30),
        ];
        for header in invalid {
            assert_eq!(TraceContext::parse(header.as_bytes()), None, "{header}");
        }
    }
}
