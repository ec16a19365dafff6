//! Records on standard output: values as they are, one per line, in a form of the user's, or a
//! JSON object per line.
//! Buffers; who reads decides when a reader at the other end should see them.

use std::borrow::Cow;
use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use helix_client::ConsumedRecord;
use helix_client::proto::log::v1::Header as WireHeader;
use prost_types::Timestamp;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Serialize, Serializer};

use crate::args::Global;
use crate::exit::{Exit, Failure};
use crate::output::{self, Format};
use crate::template::Template;

/// Bytes after which the buffer is written out in any case.
const BUFFER_BYTES: usize = 64 << 10;

/// Prints records.
#[derive(Debug)]
pub(crate) struct Printer {
    form: Form,
    buffer: Vec<u8>,
}

/// How each record is written.
#[derive(Debug)]
enum Form {
    /// Its value, and the end of the line.
    Value,
    Template(Template),
    /// A line of JSON. A topic has no end, so a list of its records would have none either.
    Json,
}

impl Printer {
    /// # Errors
    /// A format string was given, and JSON was asked for.
    pub(crate) fn new(global: &Global, template: Option<&Template>) -> anyhow::Result<Self> {
        let form = match (global.output, template) {
            (Format::Json | Format::Jsonl, Some(_)) => {
                let failure = Failure::new(Exit::Usage, "JSON has a form of its own");
                return Err(failure.hint("--format, or -o json").into());
            }
            (Format::Json | Format::Jsonl, None) => Form::Json,
            (Format::Table | Format::Wide, Some(template)) => Form::Template(template.clone()),
            (Format::Wide, None) => Form::Template(Template::wide()),
            (Format::Table, None) => Form::Value,
        };
        Ok(Self { form, buffer: Vec::new() })
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
    form: &Form,
    topic: &str,
    partition: u32,
    record: &ConsumedRecord,
) -> anyhow::Result<()> {
    match form {
        Form::Value => {
            buffer.extend_from_slice(record.value.as_deref().unwrap_or_default());
            buffer.push(b'\n');
            Ok(())
        }
        Form::Template(template) => {
            template.render(buffer, topic, partition, record);
            Ok(())
        }
        Form::Json => output::json_line(buffer, &Row::new(topic, partition, record)),
    }
}

/// A record. What is not UTF-8 stands as base64 under a name that says so: `value_base64` in place
/// of `value`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Row<'a> {
    topic: &'a str,
    partition: u32,
    offset: u64,
    /// When the service appended it
    append_time: String,
    /// Time that the producer set
    #[serde(skip_serializing_if = "Option::is_none")]
    event_time: Option<String>,
    /// Null: it has none
    #[serde(skip_serializing_if = "Text::is_elsewhere")]
    key: Text<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_base64: Option<String>,
    /// Null: it has none, which marks a deleted key
    #[serde(skip_serializing_if = "Text::is_elsewhere")]
    value: Text<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_base64: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    headers: Vec<Header<'a>>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Header<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Text::is_elsewhere")]
    value: Text<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_base64: Option<String>,
}

/// Bytes, if they are text.
#[derive(Debug)]
enum Text<'a> {
    Absent,
    Present(&'a str),
    /// They are not, and stand as base64 beside it.
    Elsewhere,
}

impl<'a> Row<'a> {
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
    fn is_elsewhere(&self) -> bool {
        matches!(self, Self::Elsewhere)
    }
}

impl Serialize for Text<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Present(text) => serializer.serialize_str(text),
            Self::Absent | Self::Elsewhere => serializer.serialize_none(),
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
        Some((bytes, Err(_))) => (Text::Elsewhere, Some(BASE64.encode(bytes))),
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

    fn printed(form: &Form, record: &ConsumedRecord) -> String {
        let mut buffer = Vec::new();
        write(&mut buffer, form, "orders", 2, record).unwrap();
        String::from_utf8(buffer).unwrap()
    }

    #[test]
    fn values_are_printed_as_they_are() {
        assert_eq!(printed(&Form::Value, &record(Some(b"k"), Some(b"hello"))), "hello\n");
        assert_eq!(printed(&Form::Value, &record(None, None)), "\n");
        let wide = printed(&Form::Template(Template::wide()), &record(Some(b"k"), Some(b"v")));
        assert_eq!(wide, "2\t7\t1970-01-01T00:00:01.500Z\tk\tv\n");
    }

    #[test]
    fn json_has_the_names_of_the_api() {
        let expected = concat!(
            r#"{"topic":"orders","partition":2,"offset":7,"#,
            r#""append_time":"1970-01-01T00:00:01.500Z","#,
            r#""key":"k","value":"hello \"you\""}"#,
            "\n"
        );
        let record = record(Some(b"k"), Some(b"hello \"you\""));
        assert_eq!(printed(&Form::Json, &record), expected);
    }

    #[test]
    fn bytes_that_are_no_text_are_marked() {
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
        assert_eq!(printed(&Form::Json, &record), expected);
    }

    #[test]
    fn a_tombstone_is_null() {
        let text = printed(&Form::Json, &record(Some(b"k"), None));
        assert!(text.ends_with("\"key\":\"k\",\"value\":null}\n"), "{text}");
    }
}
