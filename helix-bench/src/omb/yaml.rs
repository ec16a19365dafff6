//! Reads a YAML file of one flat mapping, with the line of each key.

use std::borrow::Cow;

use anyhow::{Context, Result, bail, ensure};
use saphyr_parser::{Event, Parser, ScalarStyle};

/// Value of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct YamlEntry {
    pub(super) key: String,
    /// Line of the key, counted from 1.
    pub(super) line: usize,
    /// `None` for an empty value, `null` and `~`.
    pub(super) value: Option<String>,
}

/// Returns the entries of the mapping, in the order of the file.
///
/// # Errors
/// The text is no YAML, or has another form. The message names the line.
pub(super) fn flat_mapping(text: &str) -> Result<Vec<YamlEntry>> {
    let mut entries: Vec<YamlEntry> = Vec::new();
    let mut key: Option<(String, usize)> = None;
    let mut has_mapping = false;
    for event in Parser::new_from_str(text) {
        let (event, span) = event.context("not YAML")?;
        let line = span.start.line();
        match event {
            Event::MappingStart(..) if !has_mapping => has_mapping = true,
            Event::Scalar(text, style, ..) if has_mapping => match key.take() {
                None => key = Some((text.into_owned(), line)),
                Some((key, line)) => {
                    if let Some(earlier) = entries.iter().find(|entry| entry.key == key) {
                        bail!("line {line}: {key} is given twice, first in line {}", earlier.line);
                    }
                    entries.push(YamlEntry { key, line, value: value(text, style) });
                }
            },
            Event::Nothing
            | Event::StreamStart
            | Event::StreamEnd
            | Event::DocumentEnd
            | Event::MappingEnd => {}
            Event::DocumentStart(_) if !has_mapping => {}
            Event::DocumentStart(_) => bail!("line {line}: a second document is not supported"),
            Event::Scalar(..)
            | Event::Alias(_)
            | Event::MappingStart(..)
            | Event::SequenceStart(..)
            | Event::SequenceEnd => match &key {
                Some((key, line)) => bail!("line {line}: {key} must have a single value"),
                None => bail!("line {line}: expected `key: value`"),
            },
        }
    }
    ensure!(has_mapping, "expected lines of `key: value`");
    Ok(entries)
}

fn value(text: Cow<'_, str>, style: ScalarStyle) -> Option<String> {
    let is_null =
        style == ScalarStyle::Plain && ["", "~", "null", "Null", "NULL"].contains(&&*text);
    (!is_null).then(|| text.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        format!("{:#}", flat_mapping(text).unwrap_err())
    }

    #[test]
    fn entries_have_their_lines() {
        let text = "# comment\nname: 1 topic / 2 kb\n\ntopics: 1 # one\nfile: \"a: b\"\nempty:\n";
        let entries = flat_mapping(text).unwrap();
        let found: Vec<_> = entries
            .iter()
            .map(|entry| (entry.line, entry.key.as_str(), entry.value.as_deref()))
            .collect();
        assert_eq!(
            found,
            [
                (2, "name", Some("1 topic / 2 kb")),
                (4, "topics", Some("1")),
                (5, "file", Some("a: b")),
                (6, "empty", None),
            ]
        );
        assert_eq!(flat_mapping("---\na: 1\n...\n").unwrap().len(), 1);
        assert_eq!(flat_mapping("{a: 'null'}").unwrap()[0].value.as_deref(), Some("null"));
    }

    #[test]
    fn other_forms_are_rejected_with_their_line() {
        for (text, expected) in [
            ("a: 1\nb: [1, 2]\n", "line 2: b must have a single value"),
            ("a: 1\nb:\n  c: 1\n", "line 2: b must have a single value"),
            ("a: 1\n\na: 2\n", "line 3: a is given twice, first in line 1"),
            ("- 1\n", "line 1: expected `key: value`"),
            ("just text\n", "line 1: expected `key: value`"),
            ("a: &x 1\nb: *x\n", "line 2: b must have a single value"),
            ("a: 1\n---\nb: 1\n", "a second document is not supported"),
            ("", "expected lines of `key: value`"),
            ("a: \"open\n", "not YAML"),
        ] {
            let error = error(text);
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}
