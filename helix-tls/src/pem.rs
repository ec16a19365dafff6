//! Blocks of PEM files (RFC 7468), with nothing left out in silence.
//!
//! A parser that skips what it does not know loses a CA whose first line is damaged, without a
//! word. Here each line of a file belongs to a block or is certainly a comment; any other line
//! is an error that names it. Blanks and byte order marks around lines are ignored.

use rustls::pki_types::pem::{PemObject, SectionKind};

/// Shortest line that looks like the contents of a block. Lines of a block have 64 characters.
const CONTENTS_CHARS_MIN: usize = 40;

/// Longest name of a block that an error shows.
const LABEL_CHARS_MAX: usize = 40;

const BEGIN: &str = "-----BEGIN ";
const END: &str = "-----END ";
const DASHES: &str = "-----";

/// A block of a PEM file.
pub(crate) struct PemBlock<'a> {
    /// Name in its markers, such as `CERTIFICATE`.
    pub(crate) label: &'a str,
    /// Line of the first marker; the first line of a file is 1.
    pub(crate) line: usize,
    /// Base64 contents, without line breaks.
    contents: String,
}

impl PemBlock<'_> {
    /// Decodes the contents.
    ///
    /// # Errors
    /// They are not base64.
    pub(crate) fn decode(&self) -> Result<(SectionKind, Vec<u8>), String> {
        let Self { label, line, contents } = self;
        let text = format!("{BEGIN}{label}{DASHES}\n{contents}\n{END}{label}{DASHES}\n");
        // The parser's error is not shown, because it may have contents of the file.
        let decoded = <(SectionKind, Vec<u8>)>::from_pem_slice(text.as_bytes());
        decoded.map_err(|_| format!("line {line}: the contents of the block are not base64"))
    }
}

/// Splits a file into its blocks.
///
/// # Errors
/// The first line that is part of no block and looks as if it should be, or that does not belong
/// into its block. The text never has contents of the file except for the name of a block.
pub(crate) fn blocks(file: &[u8]) -> Result<Vec<PemBlock<'_>>, String> {
    if file.starts_with(b"\xff\xfe") || file.starts_with(b"\xfe\xff") || file.contains(&0) {
        return Err("is not a text file, or one of UTF-16; write PEM as ASCII or UTF-8".to_owned());
    }
    let mut blocks = Vec::new();
    let mut open: Option<PemBlock<'_>> = None;
    for (number, bytes) in lines(file) {
        let wrong = |what: &str| Err(format!("line {number}: {what}"));
        let text = std::str::from_utf8(bytes).map(trimmed);
        let Some(block) = &mut open else {
            // Comments may have any bytes.
            let Ok(text) = text else { continue };
            match marker(text, BEGIN) {
                Some(label) => {
                    open = Some(PemBlock { label, line: number, contents: String::new() })
                }
                None if is_marker_like(text) => {
                    return wrong(
                        "looks like a marker of PEM, but is none; each marker has a line of its \
                         own, as in -----BEGIN CERTIFICATE-----",
                    );
                }
                None if is_contents_like(text) => {
                    return wrong(
                        "looks like the contents of a block of PEM, but no block has begun; write \
                         its -----BEGIN line",
                    );
                }
                None => {}
            }
            continue;
        };
        let Ok(text) = text else { return wrong("is not part of a block of PEM") };
        if marker(text, END) == Some(block.label) {
            blocks.extend(open.take());
        } else if is_marker_like(text) {
            let (label, line) = (shown(block.label), block.line);
            return wrong(&format!(
                "the block {label} of line {line} must end with a line -----END {label}-----"
            ));
        } else if text.contains(':') {
            // Headers of RFC 1421, as of encrypted keys.
            return wrong(
                "the block has headers, as an encrypted one; write it without a password",
            );
        } else if !text.bytes().all(is_base64) {
            return wrong("is not base64");
        } else {
            block.contents.push_str(text);
        }
    }
    match open {
        None => Ok(blocks),
        Some(block) => {
            let (label, line) = (shown(block.label), block.line);
            Err(format!("line {line}: the block {label} has no -----END {label}----- line"))
        }
    }
}

/// Returns the lines of a file with their numbers. A line ends with LF, CR, or both.
fn lines(file: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let mut number = 0;
    file.split(|byte| *byte == b'\n')
        .flat_map(move |line| {
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            line.split(|byte| *byte == b'\r')
        })
        .map(move |line| {
            number += 1;
            (number, line)
        })
}

/// Removes blanks and byte order marks, which files have in their middle if they were joined.
fn trimmed(line: &str) -> &str {
    line.trim_matches(|c: char| c.is_whitespace() || c == '\u{feff}')
}

/// Returns the name in a line that is a marker and nothing else.
fn marker<'a>(line: &'a str, prefix: &str) -> Option<&'a str> {
    let label = line.strip_prefix(prefix)?.strip_suffix(DASHES)?;
    (!label.is_empty() && !label.contains('-')).then_some(label)
}

/// Returns true if a line may be meant as a marker: with dashes of any kind, or in small letters.
fn is_marker_like(line: &str) -> bool {
    let is_dash = |c: char| matches!(c, '-' | '\u{2010}'..='\u{2015}' | '\u{2212}' | '\u{fe58}');
    let upper = line.to_uppercase();
    let has = |words: &[&str]| words.iter().any(|word| upper.contains(word));
    let is_of_block = has(&["CERTIFICATE", "KEY", "X509", "PKCS", "CMS", "PARAMETERS"]);
    let has_dash = line.starts_with(is_dash) || line.ends_with(is_dash);
    has(&["BEGIN", "END "]) && (line.contains(DASHES) || is_of_block && has_dash)
}

fn is_contents_like(line: &str) -> bool {
    let bare = line.trim_end_matches('=');
    bare.len() >= CONTENTS_CHARS_MIN && line.len() - bare.len() <= 2 && bare.bytes().all(is_base64)
}

fn is_base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=')
}

/// Returns the name of a block for an error.
pub(crate) fn shown(label: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == ' ';
    match label.len() <= LABEL_CHARS_MAX && label.chars().all(is_plain) {
        true => label.to_owned(),
        false => "of an unknown name".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "-----BEGIN CERTIFICATE-----\nAAAA\nBBBB\n-----END CERTIFICATE-----\n";
    const B: &str = "-----BEGIN CERTIFICATE-----\nCCCC\n-----END CERTIFICATE-----\n";

    /// Decoded contents of the blocks, or the error.
    fn taken(text: impl AsRef<[u8]>) -> Result<Vec<Vec<u8>>, String> {
        blocks(text.as_ref())?.iter().map(|block| Ok(block.decode()?.1)).collect()
    }

    #[test]
    fn blocks_are_taken_whatever_surrounds_their_lines() {
        let both = taken(format!("{A}{B}")).unwrap();
        assert_eq!((both.len(), both[0].len(), both[1].len()), (2, 6, 3));
        let indented = |text: &str| text.lines().map(|line| format!(" \t{line} \n")).collect();
        let indented: String = indented(A);
        for same in [
            format!("\u{feff}{A}{B}"),
            format!("{A}\u{feff}{B}"),
            format!("{indented}{B}"),
            format!("{A}{B}").replace('\n', "\r\n"),
            format!("{A}{B}").replace('\n', "\r"),
            format!("{A}\n\n{}", B.trim_end()),
            format!("# the first\n{A}Certificate chain\n---\n 1 s:CN=x\n   i:CN=y\n{B}"),
            format!("=====================================\n{A}\n--------\n{B}-- the end --"),
            format!("Issuer: CN=Legend of BEGINNERS\n        30:45:02:20\n{A}{B}"),
        ] {
            assert_eq!(taken(&same).unwrap(), both, "{same:?}");
        }
    }

    #[test]
    fn a_line_that_is_left_out_is_an_error_with_its_number() {
        let joined = format!("{}{B}", A.trim_end());
        let first = A.lines().count();
        for (text, line) in [
            (joined, first),
            (format!("{A}# {B}"), first + 1),
            (format!("x{A}{B}"), 1),
            (A.replacen("-----BEGIN", "----BEGIN", 1), 1),
            (A.replacen("-----BEGIN", "\u{2014}BEGIN", 1), 1),
            (format!("{A}{}", B.replacen("BEGIN", "begin", 1)), first + 1),
            (format!("{A}{}", B.replacen("CERTIFICATE-----", "CERTIFICATE----", 1)), first + 1),
            (format!("{A}{}\n", "M".repeat(64)), first + 1),
            (format!("{A}{}==\n", "M".repeat(62)), first + 1),
            (format!("{A}-----END CERTIFICATE-----\n"), first + 1),
            (format!("{A}{}", B.replace("END CERT", "END X CERT")), first + 3),
            (A.replace("-----END CERTIFICATE-----\n", ""), 1),
            (format!("{}{B}", A.replace("-----END CERTIFICATE-----\n", "")), first),
            (A.replace("AAAA", "AA A"), 2),
            (A.replace("AAAA", "Proc-Type: 4,ENCRYPTED"), 2),
            (A.replace("AAAA", "A"), 1),
        ] {
            let said = taken(&text).unwrap_err();
            assert!(said.starts_with(&format!("line {line}: ")), "{text:?}: {said}");
            assert!(!said.contains("BBBB") && !said.contains("CCCC"), "{said}");
        }
        let wide: Vec<u8> = A.bytes().flat_map(|byte| [byte, 0]).collect();
        for not_text in [&[b"\xff\xfe", &wide[..]].concat()[..], &wide, b"\xfe\xff"] {
            assert!(taken(not_text).unwrap_err().contains("UTF-16"));
        }
    }

    #[test]
    fn a_name_of_a_block_is_shown_only_if_it_is_one() {
        assert_eq!(shown("X509 CRL"), "X509 CRL");
        for odd in ["A\u{1b}[2J", "A:B", &"A".repeat(41)] {
            assert_eq!(shown(odd), "of an unknown name");
        }
    }
}
