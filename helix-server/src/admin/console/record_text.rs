//! Bytes of a record as text: JSON, text or hexadecimal, with a limit. Templates escape the result,
//! so that it never becomes markup. Pure.

use std::fmt::Write;

use helix_proto::shown;

/// Bytes of a value that are parsed as JSON.
const JSON_BYTES_MAX: usize = 256 << 10;

/// Bytes of one line of hexadecimal.
const HEX_LINE: usize = 16;

/// How bytes are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TextView {
    /// JSON if it is an object or a list, else text if it is UTF-8, else hexadecimal.
    Auto,
    Text,
    Json,
    Hex,
}

impl TextView {
    pub(super) const NAMES: [&'static str; 4] = ["auto", "text", "json", "hex"];

    /// Parses a name; an empty one is `auto`.
    ///
    /// # Errors
    /// A text with the valid names.
    pub(super) fn parse(name: &str) -> Result<Self, String> {
        match name {
            "" | "auto" => Ok(Self::Auto),
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            "hex" => Ok(Self::Hex),
            _ => {
                let shown = crate::quote::quote(name);
                Err(format!("{shown} is not a view; use auto, text, json or hex"))
            }
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Text => "text",
            Self::Json => "json",
            Self::Hex => "hex",
        }
    }
}

/// Bytes as text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ShownBytes {
    pub(super) text: String,
    /// "json", "text" or "hex".
    pub(super) kind: &'static str,
    /// True if the text has not all of the bytes.
    pub(super) is_cut: bool,
}

/// Returns bytes as text of at most about `chars_max` bytes after it was escaped for a page.
pub(super) fn show(bytes: &[u8], view: TextView, chars_max: usize) -> ShownBytes {
    let utf8 = std::str::from_utf8(bytes).ok();
    if matches!(view, TextView::Auto | TextView::Json)
        && let Some(text) = utf8.filter(|text| is_json(text, view))
    {
        return cut(&indented(text), "json", chars_max);
    }
    match (view, utf8) {
        // Most of a binary value that happens to be UTF-8 would be escapes.
        (TextView::Auto, Some(text)) if is_readable(text) => cut(text, "text", chars_max),
        (TextView::Text | TextView::Json, _) => {
            cut(&String::from_utf8_lossy(bytes), "text", chars_max)
        }
        _ => hex(bytes, chars_max),
    }
}

fn is_json(text: &str, view: TextView) -> bool {
    let is_structured = text.trim_start().starts_with(['{', '[']);
    let is_wanted = view == TextView::Json || is_structured;
    // The parser limits the depth.
    let parse = || serde_json::from_str::<serde_json::Value>(text).is_ok();
    is_wanted && text.len() <= JSON_BYTES_MAX && parse()
}

fn is_readable(text: &str) -> bool {
    let is_odd = |c: &char| c.is_control() && !c.is_whitespace();
    text.chars().filter(is_odd).count() * 8 <= text.len()
}

/// Indents valid JSON. Numbers, the order of names and repeated names stay as they are.
fn indented(json: &str) -> String {
    let mut out = String::with_capacity(json.len() * 2);
    let mut depth = 0_usize;
    let mut chars = json.chars().peekable();
    let newline = |out: &mut String, depth: usize| {
        out.push('\n');
        out.extend(std::iter::repeat_n("  ", depth));
    };
    while let Some(c) = chars.next() {
        match c {
            '"' => {
                out.push(c);
                while let Some(inner) = chars.next() {
                    out.push(inner);
                    match inner {
                        '\\' => out.extend(chars.next()),
                        '"' => break,
                        _ => {}
                    }
                }
            }
            '{' | '[' => {
                out.push(c);
                while chars.next_if(|c| c.is_whitespace()).is_some() {}
                match chars.next_if(|c| matches!(c, '}' | ']')) {
                    Some(end) => out.push(end),
                    None => {
                        depth += 1;
                        newline(&mut out, depth);
                    }
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                newline(&mut out, depth);
                out.push(c);
            }
            ',' => {
                out.push(c);
                newline(&mut out, depth);
            }
            ':' => out.push_str(": "),
            _ if c.is_whitespace() => {}
            _ => out.push(c),
        }
    }
    out
}

fn hex(bytes: &[u8], chars_max: usize) -> ShownBytes {
    // A line has an offset, the digits and the characters.
    const LINE_CHARS: usize = 8 + 3 * HEX_LINE + 3 * HEX_LINE;
    let lines_max = (chars_max / LINE_CHARS).max(1);
    let mut text = String::new();
    for (number, line) in bytes.chunks(HEX_LINE).take(lines_max).enumerate() {
        let digits: Vec<String> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        let printed = |byte: &u8| match *byte {
            byte if byte.is_ascii_graphic() || byte == b' ' => char::from(byte),
            _ => '.',
        };
        let printed: String = line.iter().map(printed).collect();
        let digits = digits.join(" ");
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{:06x}  {digits:47}  {printed}", number * HEX_LINE);
    }
    let is_cut = bytes.len() > lines_max * HEX_LINE;
    ShownBytes { text, kind: "hex", is_cut }
}

/// Returns the beginning of a text, with the characters escaped that could deceive a reader.
fn cut(text: &str, kind: &'static str, chars_max: usize) -> ShownBytes {
    let mut kept = text.len();
    let mut length = 0;
    for (at, c) in text.char_indices() {
        length += escaped_length(c);
        if length > chars_max {
            kept = at;
            break;
        }
    }
    let shown = shown::lines(&text[..kept]).into_owned();
    ShownBytes { text: shown, kind, is_cut: kept < text.len() }
}

/// Returns about how long a character is in a page.
fn escaped_length(c: char) -> usize {
    match c {
        '<' | '>' | '&' | '"' | '\'' => 5,
        '\n' => 1,
        c if shown::is_escaped(c) => 10,
        c => c.len_utf8(),
    }
}

/// Returns about how long a text is in a page.
pub(super) fn page_length(text: &str) -> usize {
    text.chars().map(escaped_length).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn auto(bytes: &[u8]) -> ShownBytes {
        show(bytes, TextView::Auto, 1_000)
    }

    #[test]
    fn the_form_of_a_value_is_found() {
        assert_eq!(auto(br#"{"a":[1,{}],"b":"x:y,\"}"}"#).kind, "json");
        assert_eq!(auto(b"17").kind, "text", "valid JSON, but not a structure");
        assert_eq!(auto(b"{not json").kind, "text");
        assert_eq!(auto("größe\nline".as_bytes()).text, "größe\nline");
        assert_eq!(auto(&[0xff, 0]).kind, "hex");
        assert_eq!(auto(&[1, 2, 3, 4]).kind, "hex");
        assert_eq!(show(&[0xff, b'a'], TextView::Text, 100).text, "\u{fffd}a");
        assert_eq!(show(b"17", TextView::Json, 100).kind, "json");
        assert_eq!(show(b"abc", TextView::Hex, 100).kind, "hex");
    }

    #[test]
    fn json_keeps_its_numbers_and_the_order_of_names() {
        let json = br#" {"b" : 12345678901234567890123, "a":[ ], "s":"\"{,:", "b":{"c":null} } "#;
        let expected = [
            "{",
            "  \"b\": 12345678901234567890123,",
            "  \"a\": [],",
            "  \"s\": \"\\\"{,:\",",
            "  \"b\": {",
            "    \"c\": null",
            "  }",
            "}",
        ]
        .join("\n");
        assert_eq!(auto(json).text, expected);
        let deep = "[".repeat(100_000);
        assert_eq!(auto(deep.as_bytes()).kind, "text");
    }

    #[test]
    fn long_values_are_cut() {
        let long = "é<".repeat(1_000);
        let shown = show(long.as_bytes(), TextView::Auto, 100);
        assert!(shown.is_cut && page_length(&shown.text) <= 100 && shown.text.starts_with("é<"));
        let dump = show(&[7; 1_000], TextView::Hex, 200);
        assert!(dump.is_cut && dump.text.lines().count() == 1, "{}", dump.text);
        assert!(!show(&[7; 16], TextView::Hex, 200).is_cut);
    }

    #[test]
    fn hexadecimal_has_offsets_and_characters() {
        let shown = show(b"<script>alert(1)</script>\0", TextView::Hex, 10_000);
        let lines: Vec<&str> = shown.text.lines().collect();
        assert_eq!(
            lines[0],
            "000000  3c 73 63 72 69 70 74 3e 61 6c 65 72 74 28 31 29  <script>alert(1)"
        );
        assert!(lines[1].starts_with("000010  3c 2f") && lines[1].ends_with("</script>."));
    }

    #[test]
    fn controls_are_escaped_and_lines_stay() {
        assert_eq!(auto("a\u{202e}b\u{1b}[2J\nc long text".as_bytes()).text, {
            "a\\u{202e}b\\u{1b}[2J\nc long text"
        });
    }
}
