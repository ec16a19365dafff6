//! Prints records to standard output: plain values, a custom format, or one JSON object per line.
//! Output is buffered; the caller flushes it.

use std::borrow::Cow;
use std::io::{IsTerminal, stdout};
use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use helix_client::ConsumedRecord;
use helix_client::proto::log::v1::Header as WireHeader;
use helix_proto::shown;
use prost_types::Timestamp;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Serialize, Serializer};

use crate::args::GlobalArgs;
use crate::exit::{CliError, Exit};
use crate::format::OutputFormat;
use crate::output;
use crate::style::Style;
use crate::template::Template;

/// Buffer size that triggers a flush.
const BUFFER_BYTES: usize = 64 << 10;

/// Prints records.
#[derive(Debug)]
pub(crate) struct RecordPrinter {
    form: RecordForm,
    buffer: Vec<u8>,
}

/// Output form of a record.
#[derive(Debug)]
enum RecordForm {
    /// The value and a newline.
    Value,
    Template(Template),
    /// The template of `-o wide` on a terminal: a line for each record, bytes that control the
    /// terminal are escaped.
    WideLine(Template),
    /// A line with all fields, for a terminal: bytes that control it are escaped.
    Columns,
    /// A line of JSON; not a JSON list, because a topic has no end.
    Json,
}

impl RecordPrinter {
    /// # Errors
    /// Fails if both a format string and JSON output are requested.
    pub(crate) fn new(global: &GlobalArgs, template: Option<&Template>) -> anyhow::Result<Self> {
        let form = match (global.output, template) {
            (OutputFormat::Json | OutputFormat::Jsonl, Some(_)) => {
                let failure = CliError::new(Exit::Usage, "--format does not apply to JSON output");
                return Err(failure.hint("use either --format or -o json").into());
            }
            (OutputFormat::Json | OutputFormat::Jsonl, None) => RecordForm::Json,
            (OutputFormat::Table | OutputFormat::Wide, Some(template)) => {
                RecordForm::Template(template.clone())
            }
            (OutputFormat::Wide, None) if stdout().is_terminal() => {
                RecordForm::WideLine(Template::wide())
            }
            (OutputFormat::Wide, None) => RecordForm::Template(Template::wide()),
            (OutputFormat::Table, None) if stdout().is_terminal() => RecordForm::Columns,
            (OutputFormat::Table, None) => RecordForm::Value,
        };
        let mut buffer = Vec::new();
        if matches!(form, RecordForm::Columns) {
            let style = Style::of_stdout();
            buffer.extend_from_slice(style.label(COLUMNS_HEADING).as_bytes());
            buffer.push(b'\n');
        }
        Ok(Self { form, buffer })
    }

    pub(crate) fn print(
        &mut self,
        topic: &str,
        partition: u32,
        record: &ConsumedRecord,
    ) -> anyhow::Result<()> {
        write(&mut self.buffer, &self.form, topic, partition, record)?;
        if self.buffer.len() >= BUFFER_BYTES { self.flush() } else { Ok(()) }
    }

    pub(crate) fn flush(&mut self) -> anyhow::Result<()> {
        if !self.buffer.is_empty() {
            output::write(&self.buffer)?;
            self.buffer.clear();
        }
        Ok(())
    }
}

fn write(
    buffer: &mut Vec<u8>,
    form: &RecordForm,
    topic: &str,
    partition: u32,
    record: &ConsumedRecord,
) -> anyhow::Result<()> {
    match form {
        RecordForm::Value => {
            buffer.extend_from_slice(record.value.as_deref().unwrap_or_default());
            buffer.push(b'\n');
            Ok(())
        }
        RecordForm::Template(template) => {
            template.render(buffer, topic, partition, record);
            Ok(())
        }
        RecordForm::WideLine(template) => {
            let mut line = Vec::new();
            template.render(&mut line, topic, partition, record);
            let line = line.strip_suffix(b"\n").unwrap_or(&line);
            // Tabs separate the fields.
            let fields: Vec<_> = line.split(|byte| *byte == b'\t').map(printable).collect();
            buffer.extend_from_slice(fields.join("\t").as_bytes());
            buffer.push(b'\n');
            Ok(())
        }
        RecordForm::Columns => {
            columns(buffer, partition, record);
            Ok(())
        }
        RecordForm::Json => output::json_line(buffer, &RecordRow::new(topic, partition, record)),
    }
}

/// Headings of the lines on a terminal.
const COLUMNS_HEADING: &str = "PART  OFFSET    APPENDED                 KEY           VALUE";

/// Appends a line with all fields. An absent key is `-`, a tombstone is shown as such.
fn columns(buffer: &mut Vec<u8>, partition: u32, record: &ConsumedRecord) {
    let time = time(record.append_time).replace('T', " ");
    // Milliseconds: "2026-01-31 10:00:00.000".
    let time = time.trim_end_matches('Z').chars().take(23).collect::<String>();
    let key = record.key.as_deref().map_or_else(|| "-".to_owned(), printable);
    let value = record.value.as_deref().map_or_else(|| "(tombstone)".to_owned(), printable);
    let line = format!("{partition:>4}  {:<8}  {time:<23}  {key:<12}  {value}", record.offset);
    buffer.extend_from_slice(line.trim_end().as_bytes());
    buffer.push(b'\n');
}

/// Returns bytes as text for a terminal.
fn printable(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => shown::one_line(text).into_owned(),
        Err(_) => bytes.escape_ascii().to_string(),
    }
}

/// A record. Bytes that are not UTF-8 are base64 under another key: `value_base64` instead of
/// `value`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RecordRow<'a> {
    topic: &'a str,
    partition: u32,
    offset: u64,
    /// Time of the append, set by the service
    append_time: String,
    /// Time set by the producer
    #[serde(skip_serializing_if = "Option::is_none")]
    event_time: Option<String>,
    /// Null if the record has no key
    #[serde(skip_serializing_if = "Text::is_base64")]
    key: Text<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_base64: Option<String>,
    /// Null for a tombstone, which marks a deleted key
    #[serde(skip_serializing_if = "Text::is_base64")]
    value: Text<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_base64: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    headers: Vec<Header<'a>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Header<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Text::is_base64")]
    value: Text<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_base64: Option<String>,
}

/// Bytes as JSON text.
#[derive(Debug)]
enum Text<'a> {
    Absent,
    Present(&'a str),
    /// Not UTF-8; another field has the bytes as base64.
    Base64,
}

impl<'a> RecordRow<'a> {
    fn new(topic: &'a str, partition: u32, record: &'a ConsumedRecord) -> Self {
        let (key, key_base64) = text(record.key.as_deref());
        let (value, value_base64) = text(record.value.as_deref());
        Self {
            topic,
            partition,
            offset: record.offset,
            append_time: time(record.append_time),
            event_time: record.event_time.map(time),
            key,
            key_base64,
            value,
            value_base64,
            headers: record.headers.iter().map(Header::from).collect(),
        }
    }
}

impl<'a> From<&'a WireHeader> for Header<'a> {
    fn from(header: &'a WireHeader) -> Self {
        let (value, value_base64) = text(Some(&header.value));
        Self { name: &header.name, value, value_base64 }
    }
}

impl Text<'_> {
    fn is_base64(&self) -> bool {
        matches!(self, Self::Base64)
    }
}

impl Serialize for Text<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Present(text) => serializer.serialize_str(text),
            Self::Absent | Self::Base64 => serializer.serialize_none(),
        }
    }
}

impl JsonSchema for Text<'_> {
    fn schema_name() -> Cow<'static, str> {
        Option::<String>::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        Option::<String>::json_schema(generator)
    }

    fn inline_schema() -> bool {
        true
    }
}

fn text(bytes: Option<&[u8]>) -> (Text<'_>, Option<String>) {
    match bytes.map(|bytes| (bytes, std::str::from_utf8(bytes))) {
        None => (Text::Absent, None),
        Some((_, Ok(text))) => (Text::Present(text), None),
        Some((bytes, Err(_))) => (Text::Base64, Some(BASE64.encode(bytes))),
    }
}

fn time(time: SystemTime) -> String {
    Timestamp::from(time).to_string()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn record(key: Option<&'static [u8]>, value: Option<&'static [u8]>) -> ConsumedRecord {
        ConsumedRecord {
            offset: 7,
            append_time: SystemTime::UNIX_EPOCH + Duration::from_micros(1_500_000),
            key: key.map(Into::into),
            value: value.map(Into::into),
            headers: Vec::new(),
            event_time: None,
        }
    }

    fn printed(form: &RecordForm, record: &ConsumedRecord) -> String {
        let mut buffer = Vec::new();
        write(&mut buffer, form, "orders", 2, record).unwrap();
        String::from_utf8(buffer).unwrap()
    }

    #[test]
    fn prints_plain_values() {
        assert_eq!(printed(&RecordForm::Value, &record(Some(b"k"), Some(b"hello"))), "hello\n");
        assert_eq!(printed(&RecordForm::Value, &record(None, None)), "\n");
        let wide =
            printed(&RecordForm::Template(Template::wide()), &record(Some(b"k"), Some(b"v")));
        assert_eq!(wide, "2\t7\t1970-01-01T00:00:01.500Z\tk\tv\n");
    }

    #[test]
    fn terminal_shows_all_fields_and_escapes_controls() {
        let shown = printed(&RecordForm::Columns, &record(Some(b"k"), Some(b"a\x1b[2Jb\nc")));
        let expected = "   2  7         1970-01-01 00:00:01.500  k             a\\u{1b}[2Jb\\nc\n";
        assert_eq!(shown, expected);
        let wide = RecordForm::WideLine(Template::wide());
        let shown = printed(&wide, &record(Some(b"k\n"), Some("a\x1b[2J\u{202e}\nb".as_bytes())));
        let expected = "2\t7\t1970-01-01T00:00:01.500Z\tk\\n\ta\\u{1b}[2J\\u{202e}\\nb\n";
        assert_eq!(shown, expected);
        let bare = printed(&RecordForm::Columns, &record(None, None));
        assert!(bare.ends_with("-             (tombstone)\n"), "{bare}");
    }

    #[test]
    fn json_uses_api_field_names() {
        let expected = concat!(
            r#"{"topic":"orders","partition":2,"offset":7,"#,
            r#""append_time":"1970-01-01T00:00:01.500Z","#,
            r#""key":"k","value":"hello \"you\""}"#,
            "\n"
        );
        let record = record(Some(b"k"), Some(b"hello \"you\""));
        assert_eq!(printed(&RecordForm::Json, &record), expected);
    }

    #[test]
    fn non_utf8_bytes_are_base64() {
        let mut record = record(None, Some(&[0xFF, 0x00]));
        record.headers = vec![
            WireHeader { name: "trace".to_owned(), value: "abc".into() },
            WireHeader { name: "raw".to_owned(), value: vec![0xFE].into() },
        ];
        record.event_time = Some(SystemTime::UNIX_EPOCH);
        let expected = concat!(
            r#"{"topic":"orders","partition":2,"offset":7,"#,
            r#""append_time":"1970-01-01T00:00:01.500Z","#,
            r#""event_time":"1970-01-01T00:00:00Z","key":null,"value_base64":"/wA=","#,
            r#""headers":[{"name":"trace","value":"abc"},{"name":"raw","value_base64":"/g=="}]}"#,
            "\n"
        );
        assert_eq!(printed(&RecordForm::Json, &record), expected);
    }

    #[test]
    fn tombstone_value_is_null() {
        let text = printed(&RecordForm::Json, &record(Some(b"k"), None));
        assert!(text.ends_with("\"key\":\"k\",\"value\":null}\n"), "{text}");
    }
}
