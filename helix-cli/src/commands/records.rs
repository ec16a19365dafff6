//! Records on standard output: values as they are, one per line, or a JSON object per line.
//! Buffers; who reads decides when a reader at the other end should see them.

use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use helix_client::ConsumedRecord;
use prost_types::Timestamp;
use serde_json::{Map, Value, json};

use crate::output::{self, Format};

/// Bytes after which the buffer is written out in any case.
const BUFFER_BYTES: usize = 64 << 10;

/// Prints records.
#[derive(Debug)]
pub(crate) struct Printer {
    format: Format,
    buffer: Vec<u8>,
}

impl Printer {
    pub(crate) fn new(format: Format) -> Self {
        Self { format, buffer: Vec::new() }
    }

    pub(crate) fn print(
        &mut self,
        topic: &str,
        partition: u32,
        record: &ConsumedRecord,
    ) -> anyhow::Result<()> {
        write(&mut self.buffer, self.format, topic, partition, record)?;
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
    format: Format,
    topic: &str,
    partition: u32,
    record: &ConsumedRecord,
) -> anyhow::Result<()> {
    match format {
        Format::Table => {
            buffer.extend_from_slice(record.value.as_deref().unwrap_or_default());
            buffer.push(b'\n');
            Ok(())
        }
        Format::Json => output::json_line(buffer, &object(topic, partition, record)),
    }
}

/// A record under the names of the API. What is not UTF-8 stands as base64 under a name that says
/// so: `value_base64` in place of `value`.
fn object(topic: &str, partition: u32, record: &ConsumedRecord) -> Value {
    let mut fields = Map::new();
    fields.insert("topic".to_owned(), json!(topic));
    fields.insert("partition".to_owned(), json!(partition));
    fields.insert("offset".to_owned(), json!(record.offset));
    fields.insert("append_time".to_owned(), time(record.append_time));
    if let Some(event_time) = record.event_time {
        fields.insert("event_time".to_owned(), time(event_time));
    }
    insert_bytes(&mut fields, "key", record.key.as_deref());
    insert_bytes(&mut fields, "value", record.value.as_deref());
    if !record.headers.is_empty() {
        let header = |header: &helix_client::proto::log::v1::Header| {
            let mut fields = Map::new();
            fields.insert("name".to_owned(), json!(header.name));
            insert_bytes(&mut fields, "value", Some(&header.value));
            Value::Object(fields)
        };
        let headers: Vec<_> = record.headers.iter().map(header).collect();
        fields.insert("headers".to_owned(), Value::Array(headers));
    }
    Value::Object(fields)
}

fn insert_bytes(fields: &mut Map<String, Value>, name: &str, bytes: Option<&[u8]>) {
    match bytes.map(std::str::from_utf8) {
        None => fields.insert(name.to_owned(), Value::Null),
        Some(Ok(text)) => fields.insert(name.to_owned(), json!(text)),
        Some(Err(_)) => {
            let text = BASE64.encode(bytes.unwrap_or_default());
            fields.insert(format!("{name}_base64"), json!(text))
        }
    };
}

fn time(time: SystemTime) -> Value {
    json!(Timestamp::from(time).to_string())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use helix_client::proto::log::v1::Header;

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

    fn printed(format: Format, record: &ConsumedRecord) -> String {
        let mut buffer = Vec::new();
        write(&mut buffer, format, "orders", 2, record).unwrap();
        String::from_utf8(buffer).unwrap()
    }

    #[test]
    fn values_are_printed_as_they_are() {
        assert_eq!(printed(Format::Table, &record(Some(b"k"), Some(b"hello"))), "hello\n");
        assert_eq!(printed(Format::Table, &record(None, None)), "\n");
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
        assert_eq!(printed(Format::Json, &record), expected);
    }

    #[test]
    fn bytes_that_are_no_text_are_marked() {
        let mut record = record(None, Some(&[0xFF, 0x00]));
        record.headers = vec![
            Header { name: "trace".to_owned(), value: "abc".into() },
            Header { name: "raw".to_owned(), value: vec![0xFE].into() },
        ];
        record.event_time = Some(SystemTime::UNIX_EPOCH);
        let expected = concat!(
            r#"{"topic":"orders","partition":2,"offset":7,"#,
            r#""append_time":"1970-01-01T00:00:01.500Z","#,
            r#""event_time":"1970-01-01T00:00:00Z","key":null,"value_base64":"/wA=","#,
            r#""headers":[{"name":"trace","value":"abc"},{"name":"raw","value_base64":"/g=="}]}"#,
            "\n"
        );
        assert_eq!(printed(Format::Json, &record), expected);
    }

    #[test]
    fn a_tombstone_is_null() {
        let text = printed(Format::Json, &record(Some(b"k"), None));
        assert!(text.ends_with("\"key\":\"k\",\"value\":null}\n"), "{text}");
    }
}
