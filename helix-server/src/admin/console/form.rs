//! Fields of a query or of a form, `application/x-www-form-urlencoded`. Pure.

/// Fields, more than any form has.
const FIELDS_MAX: usize = 64;

/// The decoded fields of a query or of a form.
#[derive(Debug, Default)]
pub(super) struct FormFields(Vec<(String, String)>);

impl FormFields {
    /// Decodes a text; fields beyond the limit are left out.
    pub(super) fn parse(text: &str) -> Self {
        let pairs = text.split('&').filter(|pair| !pair.is_empty()).take(FIELDS_MAX);
        let field = |pair: &str| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(name), decode(value))
        };
        Self(pairs.map(field).collect())
    }

    /// Returns a field without the blanks around it; empty if it is missing.
    pub(super) fn get(&self, name: &str) -> &str {
        self.raw(name).trim()
    }

    /// Returns a field as it was sent.
    pub(super) fn raw(&self, name: &str) -> &str {
        self.0.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }

    /// Returns a number.
    ///
    /// # Errors
    /// A text that names the field, the value and the valid ones.
    pub(super) fn number(&self, name: &str, default: u64, max: u64) -> Result<u64, String> {
        let text = self.get(name);
        if text.is_empty() {
            return Ok(default);
        }
        let number = text.parse().ok().filter(|number| *number <= max);
        number.ok_or_else(|| {
            let shown = crate::quote::quote(text);
            format!("{name} {shown} is not a number in 0..={max}")
        })
    }
}

/// Decodes one name or value. Bytes that are not UTF-8 become replacement characters.
fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let escaped = match (first, after) {
            (b'%', [high, low, ..]) => hex(*high).zip(hex(*low)),
            _ => None,
        };
        rest = match escaped {
            Some((high, low)) => {
                bytes.push(high << 4 | low);
                &after[2..]
            }
            None => {
                bytes.push(if *first == b'+' { b' ' } else { *first });
                after
            }
        };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

/// Encodes a text as the value of a query's field.
pub(super) fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                encoded.push(char::from(byte));
            }
            _ => encoded += &format!("%{byte:02X}"),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_decoded() {
        let form = FormFields::parse("a=1+2&b=%3Cscript%3E&c&d=%zz%4&e=%ff&a=3&");
        assert_eq!(form.get("a"), "1 2", "the first of several");
        assert_eq!(form.get("b"), "<script>");
        assert_eq!((form.get("c"), form.get("none")), ("", ""));
        assert_eq!(form.get("d"), "%zz%4");
        assert_eq!(form.get("e"), "\u{fffd}");
        let many = "x=1&".repeat(10_000);
        assert_eq!(FormFields::parse(&many).0.len(), FIELDS_MAX);
    }

    #[test]
    fn encoded_texts_are_decoded_to_the_same() {
        for text in ["", "orders", "a b&c=d", "größe", "%41", "<\"'>", "\n\0"] {
            let encoded = encode(text);
            assert!(encoded.bytes().all(|byte| byte.is_ascii_graphic()), "{encoded}");
            assert_eq!(decode(&encoded), text);
        }
    }

    #[test]
    fn numbers_have_a_limit() {
        let form = FormFields::parse("a=7&b=-1&c=99999999999999999999&d=x&e=+8+");
        assert_eq!(form.number("a", 0, 10), Ok(7));
        assert_eq!(form.number("e", 0, 10), Ok(8));
        assert_eq!(form.number("none", 3, 10), Ok(3));
        for name in ["b", "c", "d"] {
            let error = form.number(name, 0, 10).unwrap_err();
            assert!(error.contains("0..=10"), "{error}");
        }
        assert!(form.number("a", 0, 6).is_err());
    }
}
