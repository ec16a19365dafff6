//! Quotes of a client's text in errors. They are short, since gRPC libraries replace an error whose
//! trailers are too large for them. Pure.

use std::fmt::{self, Display, Write};

use crate::limits::QUOTE_BYTES_MAX;

/// Returns the text in quotation marks and escaped, cut to [`QUOTE_BYTES_MAX`].
///
/// Names the length of a text that was cut.
pub(crate) fn quote(text: &str) -> impl Display {
    Quote(text)
}

/// Returns the beginning of the text, at most `bytes_max` bytes.
pub(crate) fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

struct Quote<'a>(&'a str);

impl Display for Quote<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(text) = self;
        let mut bytes = 0;
        f.write_char('"')?;
        for (at, character) in text.char_indices() {
            let escaped = character.escape_debug();
            bytes += escaped.clone().map(char::len_utf8).sum::<usize>();
            if bytes > QUOTE_BYTES_MAX {
                return write!(f, "\" (the first {at} of {} bytes)", text.len());
            }
            write!(f, "{escaped}")?;
        }
        f.write_char('"')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_of_the_limit_is_quoted_as_it_is() {
        for text in ["", "orders", "a\"b\u{0}\u{e4}", &"x".repeat(QUOTE_BYTES_MAX)] {
            assert_eq!(quote(text).to_string(), format!("{text:?}"));
            assert_eq!(cut(text, QUOTE_BYTES_MAX), text);
        }
    }

    #[test]
    fn a_longer_text_is_cut_between_two_characters() {
        let long = "x".repeat(3_000);
        let quoted = quote(&long).to_string();
        assert_eq!(quoted, format!("{:?} (the first 249 of 3000 bytes)", &long[..249]));
        for text in ["\u{e4}".repeat(1_000), "\u{1}".repeat(1_000), "\u{10FFFF}".repeat(1_000)] {
            let quoted = quote(&text).to_string();
            assert!(quoted.len() < QUOTE_BYTES_MAX + 40, "{quoted}");
            assert!(cut(&text, QUOTE_BYTES_MAX).len() <= QUOTE_BYTES_MAX);
        }
    }
}
