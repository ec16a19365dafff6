//! Formats the results of all commands: serializable values, printed in the selected format.
//! Standard output carries data only; messages go to standard error.
//!
//! Text of other users controls no terminal and breaks no line: cells of tables, texts and messages
//! are escaped here ([`shown`]). JSON has its own escapes.
//!
//! The reader of the output may close it: `helix consume orders | head`. That turns a success into
//! a success without output, and changes no failure.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use helix_proto::shown;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::format::OutputFormat;
use crate::style::Style;
use crate::{api_duration, schema, units};

/// Prints results to standard output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    pub(crate) format: OutputFormat,
}

impl Output {
    /// Prints one result.
    pub(crate) fn show<T: Serialize + JsonSchema>(self, result: &T) -> anyhow::Result<()> {
        let mut result = serde_json::to_value(result)?;
        let schema = (!self.format.is_json()).then(schema::of::<T>).unwrap_or_default();
        api_duration::humanize(&mut result, &schema::duration_fields(&schema));
        let text = match self.format {
            OutputFormat::Table => {
                let hidden = schema::wide_fields(&schema);
                let form = TableForm { hidden, drops_empty: true, ..TableForm::of_stdout() };
                table(&result, &form)
            }
            OutputFormat::Wide => {
                table(&result, &TableForm { width_max: None, ..TableForm::of_stdout() })
            }
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
        match self.format.is_json() {
            true => self.show(result),
            false => write(escaped_text(&text(), Style::of_stdout()).as_bytes()),
        }
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
    clear_last_line();
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

/// Returns a text of several lines with its controls escaped, except for the program's own colours.
/// A part that another user may have written must be escaped before, or it could break a line.
fn escaped_text(text: &str, style: Style) -> String {
    if !style.is_coloured {
        return shown::lines(text).into_owned();
    }
    let mut parts = text.split("\x1b[");
    let mut escaped = shown::lines(parts.next().unwrap_or_default()).into_owned();
    for part in parts {
        let digits = part.find(|c: char| !c.is_ascii_digit() && c != ';').unwrap_or(part.len());
        let is_colour = part[digits..].starts_with('m');
        escaped += if is_colour { "\x1b[" } else { "\\u{1b}[" };
        escaped += &shown::lines(part);
    }
    escaped
}

/// Writes a line to standard error, with controls escaped.
pub(crate) fn write_message_line(message: fmt::Arguments<'_>) {
    let text = message.to_string();
    write_message(format_args!("{}\n", shown::lines(&text)));
}

/// Writes a message to standard error as it is. A message that cannot be written is dropped:
/// `eprint!` would panic.
pub(crate) fn write_message(message: fmt::Arguments<'_>) {
    clear_last_line();
    let _ = io::stderr().write_fmt(message);
}

/// State of the terminal's last line, which stays below everything that is printed.
#[derive(Debug)]
struct LastLine {
    /// Text about a wait of the command; it hides the progress.
    note: Option<String>,
    progress: Option<String>,
    is_shown: bool,
}

static LAST_LINE: Mutex<LastLine> =
    Mutex::new(LastLine { note: None, progress: None, is_shown: false });

/// Replaces the note on the terminal's last line, or removes it.
pub(crate) fn set_note(note: Option<&str>) {
    change_last_line(|line| line.note = note.map(str::to_owned));
}

/// Replaces the progress on the terminal's last line, or removes it.
pub(crate) fn set_progress(progress: Option<String>) {
    change_last_line(|line| line.progress = progress);
}

/// Removes the last line before something is printed. The next change shows it again.
fn clear_last_line() {
    change_last_line(|line| (line.note, line.progress) = (None, None));
}

fn change_last_line(change: impl FnOnce(&mut LastLine)) {
    let mut line = LAST_LINE.lock().unwrap_or_else(PoisonError::into_inner);
    change(&mut line);
    let text = line.note.as_deref().or(line.progress.as_deref());
    if line.is_shown || text.is_some() {
        // A wrapped line could not be replaced.
        let text = shown::one_line(text.unwrap_or_default());
        let text: String = text.chars().take(terminal_width() - 1).collect();
        let _ = io::stderr().write_fmt(format_args!("\r\x1b[K{text}"));
    }
    line.is_shown = line.note.is_some() || line.progress.is_some();
}

/// Prints a line to standard error, if it can be written.
macro_rules! message {
    ($($part:tt)*) => {
        $crate::output::write_message_line(format_args!($($part)*))
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

/// Width of tables on a terminal of unknown width.
const WIDTH_DEFAULT: usize = 80;

/// Width below which a column is not cut.
pub(crate) const CUT_WIDTH_MIN: usize = 12;

/// How tables are printed.
#[derive(Debug, Clone, Default)]
struct TableForm {
    /// Names of the fields that are not shown.
    hidden: BTreeSet<String>,
    /// Columns without any value are not shown.
    drops_empty: bool,
    /// Width at which long texts are cut. None where a program reads the table.
    width_max: Option<usize>,
    style: Style,
}

impl TableForm {
    fn of_stdout() -> Self {
        let width_max = io::stdout().is_terminal().then(terminal_width);
        Self { width_max, style: Style::of_stdout(), ..Self::default() }
    }
}

/// Returns COLUMNS, or the width of the terminal that the program runs on.
fn terminal_width() -> usize {
    let set = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse::<usize>().ok());
    let own = || ratatui::crossterm::terminal::size().ok().map(|(columns, _)| columns.into());
    set.or_else(own).filter(|width| *width >= 40).unwrap_or(WIDTH_DEFAULT)
}

/// Headings of fields whose names are long.
const HEADINGS: [(&str, &str); 38] = [
    ("log_start_offset", "START"),
    ("high_watermark", "END"),
    ("partition_count", "PARTITIONS"),
    ("replication_factor", "REPLICAS"),
    ("record_count", "RECORDS"),
    ("live_bytes", "SIZE"),
    ("held_bytes", "ON DISK"),
    ("free_bytes", "FREE"),
    ("rss_bytes", "MEMORY"),
    ("fetched_bytes", "FETCHED"),
    ("total_bytes", "TO FETCH"),
    ("used_bytes", "USED"),
    ("torn_bytes", "TORN"),
    ("retention_time", "RETENTION"),
    ("retention_bytes", "MAX SIZE"),
    ("node_id", "NODE"),
    ("shard_id", "SHARD"),
    ("is_reachable", "UP"),
    ("shards_led", "LEADS"),
    ("synced_index", "SYNCED"),
    ("committed_index", "COMMIT"),
    ("sync_p50", "P50"),
    ("sync_p99", "P99"),
    ("fencing_token", "FENCE"),
    ("member_count", "MEMBERS"),
    ("draining", "DRAIN"),
    ("bytes_in_per_second", "BYTES IN/S"),
    ("bytes_out_per_second", "BYTES OUT/S"),
    ("requests_per_second", "CALLS/S"),
    ("connections_max", "MAX CONNS"),
    ("connections", "CONNS"),
    ("missing_offsets", "MISSING"),
    ("new_records", "NEW"),
    ("first_offset", "FIRST"),
    ("next_offset", "NEXT"),
    ("file_bytes", "FILE"),
    ("backup_start_offset", "SAVED FROM"),
    ("compacted_batches", "COMPACTED"),
];

/// Fields whose absence is news: a table has their columns also if no row has a value.
const UNKNOWN_AS_DASH: [&str; 2] = ["record_count", "live_bytes"];

pub(crate) fn heading(name: &str) -> String {
    let short = HEADINGS.iter().find(|(field, _)| *field == name);
    short.map_or_else(|| name.to_uppercase().replace('_', " "), |(_, short)| (*short).to_owned())
}

/// Formats a value for people. A list becomes columns. An object becomes one line for each field,
/// with its lists below. Objects that contain lists are printed one after the other.
fn table(result: &Value, form: &TableForm) -> String {
    match result {
        Value::Array(rows) if rows.iter().any(has_lists) => {
            let objects: Vec<_> = rows.iter().map(|row| table(row, form)).collect();
            objects.join("\n")
        }
        Value::Array(rows) => columns(rows, form),
        Value::Object(fields) => object(fields, form),
        other => format!("{}\n", cell("", other)),
    }
}

fn object(fields: &Map<String, Value>, form: &TableForm) -> String {
    let mut leaves = Vec::new();
    let mut lists = Vec::new();
    flatten(fields, form, &mut leaves, &mut lists);
    let name_width = leaves.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in leaves {
        let name = shown::one_line(name);
        text += format!("{name:name_width$}  {value}").trim_end();
        text.push('\n');
    }
    for (name, rows) in lists {
        if !text.is_empty() {
            text.push('\n');
        }
        text += &format!("{}\n{}", shown::one_line(name), columns(rows, form));
    }
    text
}

/// Collects the leaves of an object, including nested objects, and its lists of objects.
fn flatten<'a>(
    fields: &'a Map<String, Value>,
    form: &TableForm,
    leaves: &mut Vec<(&'a str, String)>,
    lists: &mut Vec<(&'a str, &'a [Value])>,
) {
    for (name, value) in fields {
        match value {
            _ if form.hidden.contains(name) => {}
            Value::Object(inner) => flatten(inner, form, leaves, lists),
            Value::Array(rows) if rows.iter().any(Value::is_object) => lists.push((name, rows)),
            leaf => leaves.push((name, cell(name, leaf))),
        }
    }
}

fn has_lists(value: &Value) -> bool {
    let Value::Object(fields) = value else { return false };
    let mut lists = Vec::new();
    flatten(fields, &TableForm::default(), &mut Vec::new(), &mut lists);
    !lists.is_empty()
}

/// Formats rows below headings, with numbers right-aligned. No rows give an empty text.
fn columns(rows: &[Value], form: &TableForm) -> String {
    let mut names: Vec<&str> = Vec::new();
    let mut lines: Vec<Vec<(&str, String)>> = Vec::new();
    for row in rows {
        let mut leaves = Vec::new();
        match row {
            Value::Object(fields) => flatten(fields, form, &mut leaves, &mut Vec::new()),
            other => leaves.push(("value", cell("", other))),
        }
        for (name, _) in &leaves {
            if !names.contains(name) {
                names.push(name);
            }
        }
        lines.push(leaves);
    }
    let is_shown = |column: &Column, name: &str| {
        !form.drops_empty || !column.is_empty() || UNKNOWN_AS_DASH.contains(&name)
    };
    let columns = names.iter().map(|name| (Column::new(name, &lines), *name));
    let mut columns: Vec<_> =
        columns.filter(|(column, name)| is_shown(column, name)).map(|(column, _)| column).collect();
    if let Some(width_max) = form.width_max {
        cut(&mut columns, width_max);
    }
    let mut text = String::new();
    for line in 0..=rows.len() {
        let cells: Vec<_> = columns.iter().map(|column| column.padded(line, form.style)).collect();
        if !cells.is_empty() {
            text += cells.join("  ").trim_end();
            text.push('\n');
        }
    }
    text
}

/// Cuts the texts of the widest columns until a row fits.
fn cut(columns: &mut [Column], width_max: usize) {
    loop {
        let gaps = 2 * columns.len().saturating_sub(1);
        let width = gaps + columns.iter().map(|column| column.width).sum::<usize>();
        let widest = columns.iter_mut().filter(|column| !column.is_numeric);
        match widest.max_by_key(|column| column.width) {
            Some(column) if width > width_max && column.width > CUT_WIDTH_MIN => {
                column
                    .cut((column.width - (width - width_max).min(column.width)).max(CUT_WIDTH_MIN));
            }
            _ => return,
        }
    }
}

/// A column: its heading, followed by its cells.
struct Column {
    cells: Vec<String>,
    width: usize,
    is_numeric: bool,
}

impl Column {
    fn new(name: &str, lines: &[Vec<(&str, String)>]) -> Self {
        let heading = shown::one_line(&heading(name)).into_owned();
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

    /// Returns true if no row has a value.
    fn is_empty(&self) -> bool {
        self.cells.len() > 1 && self.cells[1..].iter().all(|cell| cell == "-")
    }

    /// Cuts longer cells to this width.
    fn cut(&mut self, width: usize) {
        for cell in &mut self.cells {
            if cell.chars().count() > width {
                *cell = cell.chars().take(width.saturating_sub(1)).chain(['…']).collect();
            }
        }
        self.width = width;
    }

    fn padded(&self, line: usize, style: Style) -> String {
        let (cell, width) = (&self.cells[line], self.width);
        let padded =
            if self.is_numeric { format!("{cell:>width$}") } else { format!("{cell:width$}") };
        if line == 0 { style.label(&padded) } else { style.state(cell, &padded) }
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
        Value::String(text) => shown::one_line(text).into_owned(),
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
PARTITION  LEADER          START   END  REPLICAS
        0  127.0.0.1:9092      0     0  1,2
        1  -                   0  1000  -
";
        let hidden = schema::wide_fields(&schema::of::<Topic>());
        let form = TableForm { hidden, ..TableForm::default() };
        assert_eq!(table(&value, &form), expected);
        let wide = table(&value, &TableForm::default());
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
        let one = table(&serde_json::to_value(topic()).unwrap(), &TableForm::default());
        let two = table(&serde_json::to_value([topic(), topic()]).unwrap(), &TableForm::default());
        assert_eq!(two, format!("{one}\n{one}"));
    }

    #[test]
    fn text_of_other_users_breaks_no_line_and_controls_no_terminal() {
        let rogue = "x\x1b[2J\r\nm-2  orders/0  forged\u{202e}\u{2028}";
        let escaped = "x\\u{1b}[2J\\r\\nm-2  orders/0  forged\\u{202e}\\u{2028}";
        let rows = serde_json::json!([{"member": "m-1", "names": [rogue]}, {"member": rogue}]);
        let text = table(&rows, &TableForm::default());
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.lines().skip(1).all(|line| line.contains(escaped)), "{text}");
        let fields = serde_json::json!({"client_name": rogue, rogue: 1, "lists": [{rogue: 1}]});
        let text = table(&fields, &TableForm::default());
        assert_eq!(text.lines().count(), 6, "{text}");
        assert!(!text.contains(['\x1b', '\r', '\u{202e}']), "{text}");
        assert_eq!(lines(&rows[0]), format!("{}\n", rows[0]), "JSON is as it was");
        for is_coloured in [false, true] {
            let text = escaped_text("a\x1b[2Jb\rc\n\x1b", Style { is_coloured });
            assert_eq!(text, "a\\u{1b}[2Jb\\rc\n\\u{1b}");
        }
        let colours = "\x1b[1;31mbad\x1b[0m\n";
        assert_eq!(escaped_text(colours, Style { is_coloured: true }), colours);
    }

    #[test]
    fn columns_without_values_are_dropped_and_long_texts_cut() {
        let rows = serde_json::json!([
            {"node_id": 1, "endpoint": "n1.example:9092", "failure": null},
            {"node_id": 2, "endpoint": "x".repeat(200), "failure": null},
        ]);
        let form = TableForm { drops_empty: true, width_max: Some(80), ..TableForm::default() };
        let text = table(&rows, &form);
        assert!(text.starts_with("NODE  ENDPOINT"), "{text}");
        assert!(!text.contains("FAILURE") && text.contains('…'), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let whole = table(&rows, &TableForm::default());
        assert!(whole.contains("FAILURE") && whole.contains(&"x".repeat(200)), "{whole}");
    }

    #[test]
    fn states_are_coloured() {
        let rows = serde_json::json!([{"role": "unreachable"}, {"role": "follower"}]);
        let form = TableForm { style: Style { is_coloured: true }, ..TableForm::default() };
        let text = table(&rows, &form);
        assert!(text.contains("\x1b[31munreachable\x1b[0m"), "{text}");
        assert!(text.contains("\nfollower"), "{text}");
    }

    #[test]
    fn table_of_an_empty_list_is_empty() {
        assert_eq!(table(&Value::Array(Vec::new()), &TableForm::default()), "");
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
