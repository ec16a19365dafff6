//! Format strings for records: `%p %o %t %k %v\n`. Parsed once, then rendered for each record.
//! Invalid format strings are rejected with the syntax.

use std::str::FromStr;
use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use helix_client::ConsumedRecord;
use helix_client::proto::log::v1::Header;
use prost_types::Timestamp;
use serde_json::{Map, Value, json};

/// Syntax of a format string.
pub(crate) const HELP: &str = "\
\x20 %p  partition             %o  offset
  %t  append time           %e  event time, set by the producer
  %k  key                   %v  value
  %K  bytes of the key      %V  bytes of the value
  %h  headers: a=1,b=2      %T  topic
  %%  a percent sign
%k, %v and %h accept {hex}, {base64} or {json}: %v{json}. {json} is for text: bytes that are not
UTF-8 become U+FFFD, where `-o json` has base64. %t and %e accept {ms}: milliseconds since 1970.
The escapes \\n, \\t, \\r, \\0, \\\\ and \\xHH are supported; no newline is added.";

/// Format of `-o wide`: all fields of a record except its headers.
const WIDE: &str = "%p\\t%o\\t%t\\t%k\\t%v\\n";

/// A format string.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template {
    parts: Vec<TemplatePart>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TemplatePart {
    Text(Vec<u8>),
    TemplateField(TemplateField, TemplateForm),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TemplateField {
    Topic,
    Partition,
    Offset,
    AppendTime,
    EventTime,
    Key,
    Value,
    KeyBytes,
    ValueBytes,
    Headers,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TemplateForm {
    Plain,
    Hex,
    Base64,
    Json,
    Millis,
}

impl Template {
    /// Returns the texts and fields, in order.
    pub(crate) fn into_parts(self) -> Vec<TemplatePart> {
        self.parts
    }

    /// Returns the template of `-o wide`.
    pub(crate) fn wide() -> Self {
        WIDE.parse().expect("a valid format string")
    }

    /// Renders a record and appends it to `out`.
    pub(crate) fn render(
        &self,
        out: &mut Vec<u8>,
        topic: &str,
        partition: u32,
        record: &ConsumedRecord,
    ) {
        for part in &self.parts {
            match part {
                TemplatePart::Text(text) => out.extend_from_slice(text),
                TemplatePart::TemplateField(TemplateField::Topic, _) => {
                    out.extend_from_slice(topic.as_bytes())
                }
                TemplatePart::TemplateField(TemplateField::Partition, _) => {
                    number(out, partition.into())
                }
                TemplatePart::TemplateField(field, form) => render(out, *field, *form, record),
            }
        }
    }
}

fn render(out: &mut Vec<u8>, field: TemplateField, form: TemplateForm, record: &ConsumedRecord) {
    let length = |bytes: Option<&[u8]>| bytes.map_or(0, <[u8]>::len) as u64;
    match field {
        TemplateField::Topic | TemplateField::Partition => {}
        TemplateField::Offset => number(out, record.offset),
        TemplateField::AppendTime => time(out, form, Some(record.append_time)),
        TemplateField::EventTime => time(out, form, record.event_time),
        TemplateField::Key => bytes(out, form, record.key.as_deref()),
        TemplateField::Value => bytes(out, form, record.value.as_deref()),
        TemplateField::KeyBytes => number(out, length(record.key.as_deref())),
        TemplateField::ValueBytes => number(out, length(record.value.as_deref())),
        TemplateField::Headers => headers(out, form, &record.headers),
    }
}

fn number(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(number.to_string().as_bytes());
}

/// Appends a time; an absent time is empty.
fn time(out: &mut Vec<u8>, form: TemplateForm, time: Option<SystemTime>) {
    let Some(time) = time else { return };
    match form {
        TemplateForm::Millis => {
            out.extend_from_slice(millis(time).to_string().as_bytes());
        }
        _ => out.extend_from_slice(Timestamp::from(time).to_string().as_bytes()),
    }
}

/// Returns the milliseconds since the Unix epoch, rounded down; negative before it.
fn millis(time: SystemTime) -> i128 {
    let Timestamp { seconds, nanos } = Timestamp::from(time);
    i128::from(seconds) * 1_000 + i128::from(nanos.div_euclid(1_000_000))
}

/// Appends bytes. Absent bytes are null in JSON and empty in the other forms.
fn bytes(out: &mut Vec<u8>, form: TemplateForm, bytes: Option<&[u8]>) {
    let present = bytes.unwrap_or_default();
    match form {
        TemplateForm::Plain | TemplateForm::Millis => out.extend_from_slice(present),
        TemplateForm::Hex => out.extend(present.iter().flat_map(|byte| {
            let digit = |digit: u8| b"0123456789abcdef"[usize::from(digit)];
            [digit(byte >> 4), digit(byte & 15)]
        })),
        TemplateForm::Base64 => out.extend_from_slice(BASE64.encode(present).as_bytes()),
        TemplateForm::Json => out.extend_from_slice(json_text(bytes).to_string().as_bytes()),
    }
}

/// Returns a JSON string; invalid UTF-8 is replaced.
fn json_text(bytes: Option<&[u8]>) -> Value {
    bytes.map_or(Value::Null, |bytes| json!(String::from_utf8_lossy(bytes)))
}

fn headers(out: &mut Vec<u8>, form: TemplateForm, headers: &[Header]) {
    if form == TemplateForm::Json {
        let object = |header: &Header| {
            let mut fields = Map::new();
            fields.insert("name".to_owned(), json!(header.name));
            fields.insert("value".to_owned(), json_text(Some(&header.value)));
            Value::Object(fields)
        };
        let list = Value::Array(headers.iter().map(object).collect());
        out.extend_from_slice(list.to_string().as_bytes());
        return;
    }
    for (index, header) in headers.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        out.extend_from_slice(header.name.as_bytes());
        out.push(b'=');
        bytes(out, form, Some(&header.value));
    }
}

impl FromStr for Template {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut literal = Vec::new();
        let mut rest = text;
        while let Some(letter) = rest.chars().next() {
            rest = &rest[letter.len_utf8()..];
            match letter {
                '\\' => rest = escape(rest, &mut literal)?,
                '%' if rest.starts_with('%') => {
                    literal.push(b'%');
                    rest = &rest[1..];
                }
                '%' => {
                    if !literal.is_empty() {
                        parts.push(TemplatePart::Text(std::mem::take(&mut literal)));
                    }
                    let (field, after) = field(rest)?;
                    let (form, after) = form(field, after)?;
                    parts.push(TemplatePart::TemplateField(field, form));
                    rest = after;
                }
                letter => literal.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        if !literal.is_empty() {
            parts.push(TemplatePart::Text(literal));
        }
        Ok(Self { parts })
    }
}

fn escape<'a>(text: &'a str, literal: &mut Vec<u8>) -> Result<&'a str, String> {
    let mut letters = text.chars();
    let byte = match letters.next() {
        Some('n') => b'\n',
        Some('t') => b'\t',
        Some('r') => b'\r',
        Some('0') => 0,
        Some('\\') => b'\\',
        Some('x') => {
            let digits = text.get(1..3).filter(|it| it.bytes().all(|it| it.is_ascii_hexdigit()));
            let digits = digits.ok_or_else(|| "\\x needs two hex digits: \\x1f".to_owned())?;
            literal.push(u8::from_str_radix(digits, 16).map_err(|error| error.to_string())?);
            return Ok(&text[3..]);
        }
        other => {
            let other = other.map(String::from).unwrap_or_default();
            return Err(format!("unknown escape \\{other}; use \\\\ for a backslash\n{HELP}"));
        }
    };
    literal.push(byte);
    Ok(letters.as_str())
}

fn field(text: &str) -> Result<(TemplateField, &str), String> {
    let mut letters = text.chars();
    let field = match letters.next() {
        Some('T') => TemplateField::Topic,
        Some('p') => TemplateField::Partition,
        Some('o') => TemplateField::Offset,
        Some('t') => TemplateField::AppendTime,
        Some('e') => TemplateField::EventTime,
        Some('k') => TemplateField::Key,
        Some('v') => TemplateField::Value,
        Some('K') => TemplateField::KeyBytes,
        Some('V') => TemplateField::ValueBytes,
        Some('h') => TemplateField::Headers,
        other => {
            let other = other.map(String::from).unwrap_or_default();
            return Err(format!("unknown field %{other}; use\n{HELP}"));
        }
    };
    Ok((field, letters.as_str()))
}

fn form(field: TemplateField, text: &str) -> Result<(TemplateForm, &str), String> {
    let named = text.strip_prefix('{').and_then(|text| text.split_once('}'));
    let Some((name, after)) = named else { return Ok((TemplateForm::Plain, text)) };
    let form = match (field, name) {
        (TemplateField::Key | TemplateField::Value | TemplateField::Headers, "hex") => {
            TemplateForm::Hex
        }
        (TemplateField::Key | TemplateField::Value | TemplateField::Headers, "base64") => {
            TemplateForm::Base64
        }
        (TemplateField::Key | TemplateField::Value | TemplateField::Headers, "json") => {
            TemplateForm::Json
        }
        (TemplateField::AppendTime | TemplateField::EventTime, "ms") => TemplateForm::Millis,
        _ => return Err(format!("invalid form {{{name}}} for this field; use\n{HELP}")),
    };
    Ok((form, after))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn record() -> ConsumedRecord {
        ConsumedRecord {
            offset: 7,
            append_time: SystemTime::UNIX_EPOCH + Duration::from_millis(1500),
            key: Some("k\"1".into()),
            value: Some(vec![0x00, 0xFF, b'a'].into()),
            headers: vec![
                Header { name: "a".to_owned(), value: "1".into() },
                Header { name: "b".to_owned(), value: "2".into() },
            ],
            event_time: None,
        }
    }

    fn rendered(template: &str, record: &ConsumedRecord) -> Vec<u8> {
        let mut out = Vec::new();
        template.parse::<Template>().unwrap().render(&mut out, "orders", 2, record);
        out
    }

    #[test]
    fn renders_every_field_of_the_help() {
        for (template, expected) in [
            ("%T/%p@%o", "orders/2@7"),
            ("%t %t{ms}", "1970-01-01T00:00:01.500Z 1500"),
            ("[%e]", "[]"),
            ("%k %k{json} %K", "k\"1 \"k\\\"1\" 3"),
            ("%v{hex} %v{base64} %V", "00ff61 AP9h 3"),
            ("%h %h{hex}", "a=1,b=2 a=31,b=32"),
            ("%h{json}", r#"[{"name":"a","value":"1"},{"name":"b","value":"2"}]"#),
            ("100%%\\t\\x41\\\\\\n", "100%\tA\\\n"),
            ("é%o{", "é7{"),
            ("", ""),
        ] {
            assert_eq!(String::from_utf8(rendered(template, &record())).unwrap(), expected);
        }
        assert_eq!(rendered("%v", &record()), [0x00, 0xFF, b'a']);
        for letter in "poteTkvKVh%".chars() {
            assert!(HELP.contains(&format!("%{letter}  ")), "{letter}");
        }
    }

    #[test]
    fn milliseconds_count_from_the_epoch_in_both_directions() {
        let time = |text: &str| text.parse::<Timestamp>().unwrap().try_into().ok();
        for (text, expected) in [
            ("1960-01-01T00:00:00Z", "-315619200000"),
            ("1969-12-31T23:59:59.9995Z", "-1"),
            ("1969-12-31T23:59:58.500Z", "-1500"),
            ("1970-01-01T00:00:00Z", "0"),
            ("2026-01-31T10:00:00.123Z", "1769853600123"),
            ("9999-12-31T23:59:59.999Z", "253402300799999"),
            ("0001-01-01T00:00:00Z", "-62135596800000"),
        ] {
            let record = ConsumedRecord { event_time: time(text), ..record() };
            assert_eq!(String::from_utf8(rendered("%e{ms}", &record)).unwrap(), expected);
        }
    }

    #[test]
    fn absent_fields_are_empty() {
        let bare = ConsumedRecord { key: None, value: None, headers: Vec::new(), ..record() };
        assert_eq!(rendered("%k|%v|%h|%K|%V|%k{json}", &bare), b"|||0|0|null");
        assert_eq!(rendered(WIDE, &bare), b"2\t7\t1970-01-01T00:00:01.500Z\t\t\n");
    }

    #[test]
    fn rejects_invalid_format_strings_with_the_syntax() {
        for template in ["%z", "%", "\\q", "\\", "\\x1", "\\xzz", "%o{hex}", "%v{ms}", "%v{xml}"] {
            let error = template.parse::<Template>().unwrap_err();
            assert!(error.contains(HELP) || error.contains("hex digits"), "{error}");
        }
    }
}
