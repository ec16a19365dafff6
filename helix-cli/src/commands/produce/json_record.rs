//! Records as JSON lines, in the form that `consume -o jsonl` prints.

use bytes::Bytes;
use helix_client::proto::log::v1::{Header, Record};
use prost_types::Timestamp;
use serde_json::{Map, Value};

use super::input::{InputRecord, decode_base64};

/// Fields that the service sets; the input may have them.
const SET_BY_SERVICE: [&str; 3] = ["topic", "offset", "append_time"];

/// Parses one JSON object.
///
/// # Errors
/// Fails if it is no record.
pub(super) fn parse(line: &[u8]) -> Result<InputRecord, String> {
    let parsed = serde_json::from_slice(line);
    let mut fields: Map<String, Value> =
        parsed.map_err(|error| format!("the line is not a JSON object: {error}"))?;
    for field in SET_BY_SERVICE {
        fields.remove(field);
    }
    let key = bytes(&mut fields, "key")?.flatten();
    let value = bytes(&mut fields, "value")?
        .ok_or_else(|| "the record has no value; a tombstone has \"value\": null".to_owned())?;
    let partition = match fields.remove("partition") {
        None | Some(Value::Null) => None,
        Some(number) => Some(partition(&number)?),
    };
    let event_time = match fields.remove("event_time") {
        None | Some(Value::Null) => None,
        Some(text) => Some(event_time(&text)?),
    };
    let headers = match fields.remove("headers") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(list)) => list.into_iter().map(header).collect::<Result<_, _>>()?,
        Some(other) => return Err(format!("headers must be a list, not {other}")),
    };
    check_empty(&fields, "a record")?;
    Ok(InputRecord { partition, record: Record { key, value, headers, event_time } })
}

/// Removes the bytes of a field: text under its name, or base64 under another one. The outer
/// option is None if the field is absent, the inner one if it is null.
fn bytes(fields: &mut Map<String, Value>, name: &str) -> Result<Option<Option<Bytes>>, String> {
    let text = fields.remove(name);
    if let Some(encoded) = fields.remove(&format!("{name}_base64")) {
        let Value::String(encoded) = &encoded else {
            return Err(format!("{name}_base64 must be a string, not {encoded}"));
        };
        return match text {
            None | Some(Value::Null) => decode_base64(encoded.as_bytes()).map(|it| Some(Some(it))),
            Some(_) => Err(format!("the record has both {name} and {name}_base64")),
        };
    }
    match text {
        None => Ok(None),
        Some(Value::Null) => Ok(Some(None)),
        Some(Value::String(text)) => Ok(Some(Some(text.into()))),
        Some(other) => Err(format!("{name} must be a string or null, not {other}")),
    }
}

fn partition(number: &Value) -> Result<u32, String> {
    let parsed = number.as_u64().and_then(|number| u32::try_from(number).ok());
    parsed.ok_or_else(|| format!("partition must be a number from 0 on, not {number}"))
}

fn event_time(text: &Value) -> Result<Timestamp, String> {
    let parsed = text.as_str().and_then(|text| text.parse().ok());
    parsed.ok_or_else(|| format!("event_time must be like \"2026-01-31T10:00:00Z\", not {text}"))
}

fn header(header: Value) -> Result<Header, String> {
    let Value::Object(mut fields) = header else {
        return Err(format!("a header must be an object, not {header}"));
    };
    let Some(Value::String(name)) = fields.remove("name") else {
        return Err("a header must have a name".to_owned());
    };
    let value = bytes(&mut fields, "value")?.flatten();
    let value = value.ok_or_else(|| format!("the header {name:?} has no value"))?;
    check_empty(&fields, "a header")?;
    Ok(Header { name, value })
}

fn check_empty(fields: &Map<String, Value>, of: &str) -> Result<(), String> {
    match fields.keys().next() {
        Some(unknown) => Err(format!("{of} has no field {unknown:?}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_what_consume_prints() {
        let line = concat!(
            r#"{"topic":"orders","partition":2,"offset":7,"#,
            r#""append_time":"1970-01-01T00:00:01.500Z","#,
            r#""event_time":"1970-01-01T00:00:00Z","key":null,"value_base64":"/wA=","#,
            r#""headers":[{"name":"trace","value":"abc"},{"name":"raw","value_base64":"/g=="}]}"#,
        );
        let InputRecord { partition, record } = parse(line.as_bytes()).unwrap();
        assert_eq!((partition, record.key), (Some(2), None));
        assert_eq!(record.value.as_deref(), Some(&b"\xFF\0"[..]));
        assert_eq!(record.event_time, Some(Timestamp::default()));
        assert_eq!(record.headers[1].value, &b"\xFE"[..]);
        let tombstone = parse(br#"{"key":"k","value":null}"#).unwrap().record;
        assert_eq!((tombstone.key, tombstone.value), (Some("k".into()), None));
    }

    #[test]
    fn rejects_lines_that_are_no_records() {
        for (line, why) in [
            ("", "JSON object"),
            ("[]", "JSON object"),
            ("{}", "no value"),
            (r#"{"value":7}"#, "value must be"),
            (r#"{"value":"a","value_base64":"YQ=="}"#, "both"),
            (r#"{"value_base64":"*"}"#, "base64"),
            (r#"{"value":"a","partition":-1}"#, "partition"),
            (r#"{"value":"a","event_time":"noon"}"#, "event_time"),
            (r#"{"value":"a","headers":[{"value":"x"}]}"#, "name"),
            (r#"{"value":"a","valu":"b"}"#, "no field"),
        ] {
            let error = parse(line.as_bytes()).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
    }
}
