//! Text of other users as programs show it: nothing in it controls a terminal or breaks a line.
//! Pure.

use std::borrow::Cow;

/// Returns a text as one line, with each character escaped that controls the terminal, ends the
/// line, or changes the direction of the text around it: `\n`, `\u{1b}`, `\u{202e}`.
pub fn one_line(text: &str) -> Cow<'_, str> {
    escape(text, |_| false)
}

/// Like [`one_line`] for a text of several lines, which a program has composed itself: newlines
/// stay.
pub fn lines(text: &str) -> Cow<'_, str> {
    escape(text, |character| character == '\n')
}

/// Returns true for a character that is escaped: controls (C0, DEL, C1), line and paragraph
/// separators, marks and overrides of the direction of writing (Unicode, UAX #9), and invisible
/// marks that begin or annotate a text.
pub fn is_escaped(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'
                | '\u{200e}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

fn escape(text: &str, is_kept: impl Fn(char) -> bool) -> Cow<'_, str> {
    let is_wrong = |character: char| is_escaped(character) && !is_kept(character);
    let Some(first) = text.find(is_wrong) else { return Cow::Borrowed(text) };
    let (before, rest) = text.split_at(first);
    let mut shown = before.to_owned();
    for character in rest.chars() {
        match character {
            _ if !is_wrong(character) => shown.push(character),
            '\n' | '\r' | '\t' => shown.extend(character.escape_default()),
            _ => shown.extend(character.escape_unicode()),
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_without_controls_is_borrowed() {
        for text in ["", "orders", "größe 大小 👩‍🚀", "a\\u{1b}"] {
            assert!(matches!(one_line(text), Cow::Borrowed(same) if same == text), "{text}");
        }
    }

    #[test]
    fn controls_separators_and_overrides_are_escaped() {
        for (text, shown) in [
            ("a\u{1b}[2Jb", "a\\u{1b}[2Jb"),
            ("a\r\nb\tc", "a\\r\\nb\\tc"),
            ("\0\u{7f}\u{9b}31m", "\\u{0}\\u{7f}\\u{9b}31m"),
            ("a\u{2028}b\u{2029}c\u{85}d", "a\\u{2028}b\\u{2029}c\\u{85}d"),
            (
                "\u{202e}abc\u{202c}\u{2066}\u{200f}\u{61c}",
                "\\u{202e}abc\\u{202c}\\u{2066}\\u{200f}\\u{61c}",
            ),
        ] {
            assert_eq!(one_line(text), shown, "{text:?}");
            assert_eq!(one_line(shown), shown, "an escaped text is shown as it is");
        }
        assert_eq!(lines("a\nb\r\n"), "a\nb\\r\n");
        let every: String = ('\0'..=char::MAX).filter(|it| is_escaped(*it)).collect();
        assert!(!one_line(&every).contains(is_escaped) && lines(&every).contains('\n'));
    }
}
