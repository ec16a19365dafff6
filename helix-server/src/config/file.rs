//! Reads the configuration file: TOML without tables, one key for each setting.
//! Reports all problems at once, each with its line.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::settings::{Setting, SettingKind, removed};

/// Least similarity of a key that is suggested for an unknown one; the same as clap's.
const SIMILARITY_MIN: f64 = 0.7;

/// Characters of an invalid value that an error shows.
const VALUE_CHARS_MAX: usize = 60;

/// The values of one key, and their line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileValue {
    pub(super) line: usize,
    pub(super) values: Vec<OsString>,
}

/// Contents of a file: values by key, and the problems with the others.
#[derive(Debug, Default)]
pub(super) struct FileValues {
    pub(super) values: BTreeMap<String, FileValue>,
    pub(super) problems: Vec<String>,
}

pub(super) fn read(path: &Path, settings: &[Setting]) -> FileValues {
    // The only file that helix-wal does not own.
    #[allow(clippy::disallowed_methods)]
    let text = std::fs::read_to_string(path);
    match text {
        Ok(text) => parse(&path.display().to_string(), &text, settings),
        Err(error) => {
            let problem = format!("--config {}: cannot be read: {error}", path.display());
            FileValues { problems: vec![problem], ..FileValues::default() }
        }
    }
}

fn parse(name: &str, text: &str, settings: &[Setting]) -> FileValues {
    let (table, errors) = DeTable::parse_recoverable(text);
    let mut found = FileValues::default();
    let at = |span: Range<usize>| format!("{name}:{}", line_of(text, span.start));
    for error in errors {
        let line = error.span().map_or_else(|| name.to_owned(), at);
        found.problems.push(format!("{line}: {}", error.message()));
    }
    for (key, value) in table.get_ref() {
        let line = at(key.span());
        let named = settings.iter().find(|setting| setting.key() == **key.get_ref());
        let Some(setting) = named else {
            found.problems.push(format!("{line}: {}", unknown(key.get_ref(), value, settings)));
            continue;
        };
        match values(setting, value) {
            Ok(values) => {
                let value = FileValue { line: line_of(text, key.span().start), values };
                found.values.insert(setting.key(), value);
            }
            Err((span, what)) => {
                let (line, shown) = (at(span.clone()), shown(text, span));
                found.problems.push(format!("{line}: {} = {shown}: {what}", setting.key()));
            }
        }
    }
    found
}

fn unknown(key: &str, value: &Spanned<DeValue<'_>>, settings: &[Setting]) -> String {
    if let Some(why) = removed(key) {
        return format!("{key} {why}");
    }
    if value.get_ref().is_table() {
        return format!("tables are not supported; write the keys of [{key}] at the top level");
    }
    let wanted = key.replace('-', "_").to_lowercase();
    let similarity = |setting: &Setting| strsim::jaro_winkler(&wanted, &setting.key());
    let best = settings.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)));
    match best.filter(|setting| similarity(setting) > SIMILARITY_MIN) {
        Some(setting) => format!("unknown key {key:?}; did you mean {:?}?", setting.key()),
        None => format!("unknown key {key:?}; --print-config shows all keys"),
    }
}

/// Converts a value to the form of the command line; an error has its span and the reason.
fn values(
    setting: &Setting,
    value: &Spanned<DeValue<'_>>,
) -> Result<Vec<OsString>, (Range<usize>, String)> {
    let DeValue::Array(list) = value.get_ref() else {
        return Ok(vec![single(setting, value)?]);
    };
    if setting.kind() != SettingKind::List {
        return Err((value.span(), format!("write {}", setting.expected())));
    }
    if list.is_empty() && !setting.default_values().is_empty() {
        return Err((value.span(), "list at least one, or omit the key".to_owned()));
    }
    list.iter().map(|value| single(setting, value)).collect()
}

fn single(
    setting: &Setting,
    value: &Spanned<DeValue<'_>>,
) -> Result<OsString, (Range<usize>, String)> {
    let wrong = |what: String| (value.span(), what);
    let text = match (setting.kind(), value.get_ref()) {
        (SettingKind::Switch, DeValue::Boolean(is_on)) => is_on.to_string(),
        (SettingKind::Number | SettingKind::Size, DeValue::Integer(number)) => {
            let number = u64::from_str_radix(number.as_str(), number.radix());
            number.map_err(|_| wrong(format!("write {}", setting.expected())))?.to_string()
        }
        (SettingKind::Share, DeValue::Integer(number)) => number.as_str().to_owned(),
        (SettingKind::Share, DeValue::Float(number)) => number.as_str().to_owned(),
        (SettingKind::Time, DeValue::Integer(number)) if number.as_str() == "0" => "0".to_owned(),
        (
            SettingKind::Size
            | SettingKind::Time
            | SettingKind::Choice
            | SettingKind::Text
            | SettingKind::List,
            DeValue::String(text),
        ) => text.clone().into_owned(),
        _ => return Err(wrong(format!("write {}", setting.expected()))),
    };
    setting.check(OsStr::new(&text)).map_err(wrong)?;
    Ok(text.into())
}

fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count() + 1
}

fn shown(text: &str, span: Range<usize>) -> String {
    let value = text.get(span).unwrap_or_default();
    let line = value.lines().next().unwrap_or_default();
    if line.chars().count() <= VALUE_CHARS_MAX && line.len() == value.len() {
        return line.to_owned();
    }
    line.chars().take(VALUE_CHARS_MAX).chain("...".chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::settings::settings;
    use super::*;

    fn parsed(text: &str) -> FileValues {
        parse("helix.toml", text, &settings())
    }

    #[test]
    fn converts_values_to_the_form_of_the_command_line() {
        let text = "# A node.\nnode_id = 2\nsegment_bytes = '32MiB'\ntail_bytes = 1_048_576\n\
                    topic = [\"a:1\",\n  'b:2']\ninsecure = true\ndefault_retention_time = 0\n\
                    shards = 0x3\n";
        let found = parsed(text);
        assert_eq!(found.problems, Vec::<String>::new());
        let value = |key: &str| {
            let FileValue { line, values } = &found.values[key];
            (*line, values.iter().map(|it| it.to_str().unwrap()).collect::<Vec<_>>())
        };
        assert_eq!(value("node_id"), (2, vec!["2"]));
        assert_eq!(value("segment_bytes"), (3, vec!["32MiB"]));
        assert_eq!(value("tail_bytes"), (4, vec!["1048576"]));
        assert_eq!(value("topic"), (5, vec!["a:1", "b:2"]));
        assert_eq!(value("insecure"), (7, vec!["true"]));
        assert_eq!(value("default_retention_time"), (8, vec!["0"]));
        assert_eq!(value("shards"), (9, vec!["3"]));
    }

    #[test]
    fn explains_a_removed_key() {
        let problems = parse("helix.toml", "idle_poll_us = 0", &settings()).problems;
        assert!(
            problems[0].starts_with("helix.toml:1: idle_poll_us was removed: "),
            "{problems:?}"
        );
    }

    #[test]
    fn rejects_an_unknown_key_with_a_suggestion() {
        let said = |text: &str| parsed(text).problems.join("\n");
        assert_eq!(
            said("\nnodeid = 2"),
            "helix.toml:2: unknown key \"nodeid\"; did you mean \"node_id\"?"
        );
        assert_eq!(
            said("listen-addr = ''"),
            "helix.toml:1: unknown key \"listen-addr\"; did you mean \"listen_addr\"?"
        );
        assert!(said("zzz = 1").contains("--print-config shows all keys"));
        assert!(said("[server]\nnode_id = 1").contains("tables are not supported"));
    }

    #[test]
    fn an_error_names_the_expected_type() {
        let rows = [
            ("node_id = '2'", "node_id = '2': write a whole number, without quotes"),
            ("node_id = -2", "node_id = -2: write a whole number"),
            ("node_id = 2.5", "node_id = 2.5: write a whole number"),
            ("node_id = [2]", "node_id = [2]: write a whole number"),
            ("insecure = 'true'", "insecure = 'true': write true or false"),
            ("storage = 'papyrus'", "write one of \"durable\", \"memory\""),
            ("data_dir = 5", "data_dir = 5: write a string"),
            ("segment_bytes = '5q'", "segment_bytes = '5q': write a number of bytes"),
            ("default_retention_time = 5", "default_retention_time = 5: write a duration"),
            ("topic = 5", "topic = 5: write a list of strings"),
            ("topic = ['a:1', 'b']", "topic = 'b': write name:partitions"),
            ("data_dir = 1979-05-27", "data_dir = 1979-05-27: write a string"),
            ("storage = {a = 1}", "write one of"),
        ];
        for (text, wanted) in rows {
            let problems = parsed(text).problems;
            assert_eq!(problems.len(), 1, "{text}: {problems:?}");
            assert!(problems[0].starts_with("helix.toml:1: "), "{problems:?}");
            assert!(problems[0].contains(wanted), "{problems:?}");
        }
        assert_eq!(parsed("topic = []").problems, [""; 0]);
    }

    #[test]
    fn reports_all_problems_at_once() {
        let text = "node_id = 'x'\nshard = 1\nstorage = 'memory'\nlisten_addr = 'here'\n";
        let found = parsed(text);
        assert_eq!(found.problems.len(), 3, "{:?}", found.problems);
        assert_eq!(found.values.keys().collect::<Vec<_>>(), ["storage"]);
    }

    #[test]
    fn a_syntax_error_has_its_line() {
        for text in ["node_id = 1\nnode_id = 2\n", "\nnode_id =\n", "\n= 5", "\n\"abc"] {
            let problems = parsed(text).problems;
            assert!(!problems.is_empty(), "{text:?}");
            assert!(problems[0].starts_with("helix.toml:2: "), "{text:?}: {problems:?}");
        }
    }
}
