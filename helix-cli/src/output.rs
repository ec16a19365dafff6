//! Formats the results of all commands: serializable values, printed in the selected format.
//! Standard output carries data only; messages go to standard error.
//!
//! The reader of the output may close it: `helix consume orders | head`. That turns a success into
//! a success without output, and changes no failure.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, ErrorKind, Write};

use anyhow::Context;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::format::OutputFormat;
use crate::{schema, units};

/// Prints results to standard output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    pub(crate) format: OutputFormat,
}

impl Output {
    /// Prints one result.
    pub(crate) fn show<T: Serialize + JsonSchema>(self, result: &T) -> anyhow::Result<()> {
        let result = serde_json::to_value(result)?;
        let text = match self.format {
            OutputFormat::Table => table(&result, &schema::wide_fields(&schema::of::<T>())),
            OutputFormat::Wide => table(&result, &BTreeSet::new()),
            OutputFormat::Json => format!("{result:#}\n"),
            OutputFormat::Jsonl => lines(&result),
        };
        write(text.as_bytes())
    }

    /// Prints one result and returns the verdict on it. A failed verdict is returned even if
    /// standard output is closed or cannot be written.
    pub(crate) fn show_with_verdict<T: Serialize + JsonSchema>(
        self,
        result: &T,
        verdict: anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let shown = self.show(result);
        verdict.and(shown)
    }

    /// Prints one result that has a human-readable text instead of a table.
    pub(crate) fn show_as<T: Serialize + JsonSchema>(
        self,
        result: &T,
        text: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        if self.format.is_json() { self.show(result) } else { write(text().as_bytes()) }
    }
}

/// The reader of standard output has closed it. The exit code of a command that has nothing else to
/// do is 0.
#[derive(Debug)]
pub(crate) struct StdoutClosed;

impl fmt::Display for StdoutClosed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("standard output is closed")
    }
}

impl std::error::Error for StdoutClosed {}

/// Writes data to standard output and flushes it.
///
/// # Errors
/// [`StdoutClosed`], or another failure of the write.
pub(crate) fn write(data: &[u8]) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(data).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(StdoutClosed.into()),
        written => written.context("write to standard output"),
    }
}

/// Ignores a closed standard output, for commands that have more to do than to print.
pub(crate) fn unless_closed(written: anyhow::Result<()>) -> anyhow::Result<()> {
    match written {
        Err(error) if error.is::<StdoutClosed>() => Ok(()),
        written => written,
    }
}

/// Writes a message to standard error. A message that cannot be written is dropped: `eprint!` would
/// panic.
pub(crate) fn write_message(message: fmt::Arguments<'_>) {
    let _ = io::stderr().write_fmt(message);
}

/// Prints a line to standard error, if it can be written.
macro_rules! message {
    ($($part:tt)*) => {
        $crate::output::write_message(format_args!("{}\n", format_args!($($part)*)))
    };
}
pub(crate) use message;

/// Appends an item to `line` as one line of JSON.
pub(crate) fn json_line(line: &mut Vec<u8>, item: &impl Serialize) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *line, item)?;
    line.push(b'\n');
    Ok(())
}

/// Returns a line for each element of a list, or one line for another value.
fn lines(result: &Value) -> String {
    match result {
        Value::Array(items) => items.iter().map(|item| format!("{item}\n")).collect(),
        item => format!("{item}\n"),
    }
}

/// Names of the fields that a table hides.
type Hidden = BTreeSet<String>;

/// Formats a value for people. A list becomes columns. An object becomes one line for each field,
/// with its lists below. Objects that contain lists are printed one after the other.
fn table(result: &Value, hidden: &Hidden) -> String {
    match result {
        Value::Array(rows) if rows.iter().any(has_lists) => {
            let objects: Vec<_> = rows.iter().map(|row| table(row, hidden)).collect();
            objects.join("\n")
        }
        Value::Array(rows) => columns(rows, hidden),
        Value::Object(fields) => object(fields, hidden),
        other => format!("{}\n", cell("", other)),
    }
}

fn object(fields: &Map<String, Value>, hidden: &Hidden) -> String {
    let mut leaves = Vec::new();
    let mut lists = Vec::new();
    flatten(fields, hidden, &mut leaves, &mut lists);
    let name_width = leaves.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in leaves {
        text += format!("{name:name_width$}  {value}").trim_end();
        text.push('\n');
    }
    for (name, rows) in lists {
        if !text.is_empty() {
            text.push('\n');
        }
        text += &format!("{name}\n{}", columns(rows, hidden));
    }
    text
}

/// Collects the leaves of an object, including nested objects, and its lists of objects.
fn flatten<'a>(
    fields: &'a Map<String, Value>,
    hidden: &Hidden,
    leaves: &mut Vec<(&'a str, String)>,
    lists: &mut Vec<(&'a str, &'a [Value])>,
) {
    for (name, value) in fields {
        match value {
            _ if hidden.contains(name) => {}
            Value::Object(inner) => flatten(inner, hidden, leaves, lists),
            Value::Array(rows) if rows.iter().any(Value::is_object) => lists.push((name, rows)),
            leaf => leaves.push((name, cell(name, leaf))),
        }
    }
}

fn has_lists(value: &Value) -> bool {
    let Value::Object(fields) = value else { return false };
    let mut lists = Vec::new();
    flatten(fields, &Hidden::new(), &mut Vec::new(), &mut lists);
    !lists.is_empty()
}

/// Formats rows below headings, with numbers right-aligned. No rows give an empty text.
fn columns(rows: &[Value], hidden: &Hidden) -> String {
    let mut names: Vec<&str> = Vec::new();
    let mut lines: Vec<Vec<(&str, String)>> = Vec::new();
    for row in rows {
        let mut leaves = Vec::new();
        match row {
            Value::Object(fields) => flatten(fields, hidden, &mut leaves, &mut Vec::new()),
            other => leaves.push(("value", cell("", other))),
        }
        for (name, _) in &leaves {
            if !names.contains(name) {
                names.push(name);
            }
        }
        lines.push(leaves);
    }
    let columns: Vec<_> = names.iter().map(|name| Column::new(name, &lines)).collect();
    let mut text = String::new();
    for line in 0..=rows.len() {
        let cells: Vec<_> = columns.iter().map(|column| column.padded(line)).collect();
        if !cells.is_empty() {
            text += cells.join("  ").trim_end();
            text.push('\n');
        }
    }
    text
}

/// A column: its heading, followed by its cells.
struct Column {
    cells: Vec<String>,
    width: usize,
    is_numeric: bool,
}

impl Column {
    fn new(name: &str, lines: &[Vec<(&str, String)>]) -> Self {
        let heading = name.to_uppercase().replace('_', " ");
        let of_line = |line: &Vec<(&str, String)>| {
            let found = line.iter().find(|(field, _)| *field == name);
            found.map_or_else(|| "-".to_owned(), |(_, value)| value.clone())
        };
        let mut cells: Vec<String> = lines.iter().map(of_line).collect();
        let is_numeric =
            is_size(name) || cells.iter().all(|cell| cell.parse::<f64>().is_ok() || cell == "-");
        cells.insert(0, heading);
        let width = cells.iter().map(|cell| cell.chars().count()).max().unwrap_or(0);
        Self { cells, width, is_numeric }
    }

    fn padded(&self, line: usize) -> String {
        let (cell, width) = (&self.cells[line], self.width);
        if self.is_numeric { format!("{cell:>width$}") } else { format!("{cell:width$}") }
    }
}

/// Returns true if a field is a number of bytes, judging by its name.
fn is_size(name: &str) -> bool {
    name.ends_with("_bytes")
}

fn cell(name: &str, value: &Value) -> String {
    match value {
        Value::Number(bytes) if is_size(name) && bytes.is_u64() => {
            units::bytes(bytes.as_u64().unwrap_or_default())
        }
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(values) if values.is_empty() => "-".to_owned(),
        Value::Array(values) => {
            values.iter().map(|value| cell(name, value)).collect::<Vec<_>>().join(",")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize, JsonSchema)]
    struct Topic {
        name: &'static str,
        watermarks: Watermarks,
        retention_time: Option<&'static str>,
        #[schemars(extend("x-wide" = true))]
        held_bytes: u64,
        partitions: Vec<Partition>,
    }

    #[derive(Serialize, JsonSchema)]
    struct Partition {
        partition: u32,
        leader: Option<&'static str>,
        watermarks: Watermarks,
        replicas: Vec<u64>,
    }

    #[derive(Serialize, JsonSchema)]
    struct Watermarks {
        log_start_offset: u64,
        high_watermark: u64,
    }

    fn topic() -> Topic {
        let watermarks = |high_watermark| Watermarks { log_start_offset: 0, high_watermark };
        let partition = |partition, leader, replicas| Partition {
            partition,
            leader,
            watermarks: watermarks(1000 * u64::from(partition)),
            replicas,
        };
        Topic {
            name: "orders",
            watermarks: watermarks(12),
            retention_time: None,
            held_bytes: 3 << 20,
            partitions: vec![
                partition(0, Some("127.0.0.1:9092"), vec![1, 2]),
                partition(1, None, vec![]),
            ],
        }
    }

    #[test]
    fn table_shows_object_as_lines_and_its_lists_as_columns() {
        let value = serde_json::to_value(topic()).unwrap();
        let expected = "\
name              orders
log_start_offset  0
high_watermark    12
retention_time    -

partitions
PARTITION  LEADER          LOG START OFFSET  HIGH WATERMARK  REPLICAS
        0  127.0.0.1:9092                 0               0  1,2
        1  -                              0            1000  -
";
        let hidden = schema::wide_fields(&schema::of::<Topic>());
        assert_eq!(table(&value, &hidden), expected);
        let wide = table(&value, &Hidden::new());
        let line = "retention_time    -\nheld_bytes        3 MiB\n";
        assert_eq!(wide, expected.replace("retention_time    -\n", line));
    }

    #[test]
    fn jsonl_prints_one_line_per_list_element() {
        let value = serde_json::json!([{"a": 1}, {"a": [2]}]);
        assert_eq!(lines(&value), "{\"a\":1}\n{\"a\":[2]}\n");
        assert_eq!(lines(&value[0]), "{\"a\":1}\n");
        assert_eq!(lines(&Value::Array(Vec::new())), "");
    }

    #[test]
    fn table_separates_objects_that_contain_lists() {
        let one = table(&serde_json::to_value(topic()).unwrap(), &Hidden::new());
        let two = table(&serde_json::to_value([topic(), topic()]).unwrap(), &Hidden::new());
        assert_eq!(two, format!("{one}\n{one}"));
    }

    #[test]
    fn table_of_an_empty_list_is_empty() {
        assert_eq!(table(&Value::Array(Vec::new()), &Hidden::new()), "");
    }

    #[test]
    fn json_preserves_nesting_numbers_and_field_order() {
        let mut line = Vec::new();
        json_line(&mut line, &topic().partitions[0]).unwrap();
        let expected = concat!(
            r#"{"partition":0,"leader":"127.0.0.1:9092","#,
            r#""watermarks":{"log_start_offset":0,"high_watermark":0},"replicas":[1,2]}"#,
            "\n"
        );
        assert_eq!(String::from_utf8(line).unwrap(), expected);
    }
}
