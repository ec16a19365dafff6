//! Parses lines of a format, for `helix produce -f`: the reverse of rendering a record.

use std::str::FromStr;

use bytes::Bytes;
use helix_client::proto::log::v1::Header;
use prost_types::Timestamp;

use crate::commands::produce::input::{InputRecord, decode_base64};
use crate::template::{HELP, Template, TemplateField, TemplateForm, TemplatePart};

/// A format whose lines are records. Fields that the service sets are skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LineParser {
    parts: Vec<TemplatePart>,
}

impl FromStr for LineParser {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.parse::<Template>()?.into_parts();
        // The end of the line is not part of it.
        if let Some(TemplatePart::Text(last)) = parts.last_mut() {
            if matches!(last.last(), Some(b'\n' | 0)) {
                last.pop();
            }
            if last.is_empty() {
                parts.pop();
            }
        }
        let is_field = |part: &TemplatePart| matches!(part, TemplatePart::TemplateField(..));
        if parts.windows(2).any(|pair| is_field(&pair[0]) && is_field(&pair[1])) {
            return Err("two fields need a text between them: '%k %v\\n'".to_owned());
        }
        if !parts
            .iter()
            .any(|part| matches!(part, TemplatePart::TemplateField(TemplateField::Value, _)))
        {
            return Err(format!("the format has no value %v\n{HELP}"));
        }
        Ok(Self { parts })
    }
}

impl LineParser {
    /// Parses a line without its end.
    ///
    /// # Errors
    /// Fails if the line does not have the format.
    pub(crate) fn parse(&self, line: &[u8]) -> Result<InputRecord, String> {
        let mut input = InputRecord::default();
        let mut rest = line;
        for (index, part) in self.parts.iter().enumerate() {
            match part {
                TemplatePart::Text(text) => {
                    let after = rest.strip_prefix(text.as_slice());
                    rest = after.ok_or_else(|| lacks(text))?;
                }
                TemplatePart::TemplateField(field, form) => {
                    let length = match self.parts.get(index + 1) {
                        Some(TemplatePart::Text(text)) => {
                            let found = rest.windows(text.len()).position(|it| it == text);
                            found.ok_or_else(|| lacks(text))?
                        }
                        _ => rest.len(),
                    };
                    set(&mut input, *field, *form, &rest[..length])?;
                    rest = &rest[length..];
                }
            }
        }
        if rest.is_empty() {
            Ok(input)
        } else {
            Err("the line goes on after the format".to_owned())
        }
    }
}

fn lacks(text: &[u8]) -> String {
    format!("the line lacks the text \"{}\" of the format", text.escape_ascii())
}

fn set(
    input: &mut InputRecord,
    field: TemplateField,
    form: TemplateForm,
    text: &[u8],
) -> Result<(), String> {
    let record = &mut input.record;
    match field {
        TemplateField::Key => record.key = bytes(form, text)?,
        TemplateField::Value => record.value = bytes(form, text)?,
        TemplateField::Headers => record.headers = headers(form, text)?,
        TemplateField::Partition => input.partition = Some(number(text, "partition")?),
        TemplateField::EventTime if text.is_empty() => {}
        TemplateField::EventTime => record.event_time = Some(event_time(form, text)?),
        TemplateField::Topic
        | TemplateField::Offset
        | TemplateField::AppendTime
        | TemplateField::KeyBytes
        | TemplateField::ValueBytes => {}
    }
    Ok(())
}

fn bytes(form: TemplateForm, text: &[u8]) -> Result<Option<Bytes>, String> {
    match form {
        TemplateForm::Plain | TemplateForm::Millis => Ok(Some(Bytes::copy_from_slice(text))),
        TemplateForm::Base64 => decode_base64(text).map(Some),
        TemplateForm::Hex => hex(text).map(Some),
        TemplateForm::Json => {
            let parsed: Result<Option<String>, _> = serde_json::from_slice(text);
            let parsed = parsed.map_err(|error| format!("not a JSON string or null: {error}"))?;
            Ok(parsed.map(Bytes::from))
        }
    }
}

fn hex(text: &[u8]) -> Result<Bytes, String> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|it| u8::try_from(it).ok());
    let pairs = text.chunks(2).map(|pair| match pair {
        [high, low] => Some(digit(high)? << 4 | digit(low)?),
        _ => None,
    });
    let bytes: Option<Vec<u8>> = pairs.collect();
    bytes.map(Bytes::from).ok_or_else(|| "the text is not hexadecimal".to_owned())
}

fn headers(form: TemplateForm, text: &[u8]) -> Result<Vec<Header>, String> {
    if form == TemplateForm::Json {
        return Err("headers as JSON are read with --jsonl".to_owned());
    }
    let pieces = text.split(|byte| *byte == b',').filter(|piece| !piece.is_empty());
    let header = |piece: &[u8]| {
        let end = piece.iter().position(|byte| *byte == b'=');
        let end = end.ok_or_else(|| "a header must be NAME=VALUE".to_owned())?;
        let name = std::str::from_utf8(&piece[..end]);
        let name = name.map_err(|_| "a header's name is not UTF-8".to_owned())?.to_owned();
        Ok(Header { name, value: bytes(form, &piece[end + 1..])?.unwrap_or_default() })
    };
    pieces.map(header).collect()
}

fn number<T: FromStr>(text: &[u8], what: &str) -> Result<T, String> {
    let parsed = std::str::from_utf8(text).ok().and_then(|text| text.trim().parse().ok());
    parsed.ok_or_else(|| format!("\"{}\" is no {what}", text.escape_ascii()))
}

fn event_time(form: TemplateForm, text: &[u8]) -> Result<Timestamp, String> {
    if form != TemplateForm::Millis {
        return number(text, "time, such as 2026-01-31T10:00:00Z");
    }
    let millis: i64 = number(text, "time in milliseconds")?;
    let nanos = i32::try_from(millis.rem_euclid(1000)).unwrap_or(0) * 1_000_000;
    Ok(Timestamp { seconds: millis.div_euclid(1000), nanos })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(format: &str, line: &str) -> Result<InputRecord, String> {
        format.parse::<LineParser>()?.parse(line.as_bytes())
    }

    #[test]
    fn parses_every_field() {
        let format = "%T/%p@%o %t %e{ms} %K %V [%h{hex}] %k{json} %v{base64}\\n";
        let line = "orders/2@7 2026-01-31T10:00:00Z 1500 1 2 [a=31,b=] \"k\\te\" /wA=";
        let InputRecord { partition, record } = parse(format, line).unwrap();
        assert_eq!(partition, Some(2));
        assert_eq!(record.event_time, Some(Timestamp { seconds: 1, nanos: 500_000_000 }));
        assert_eq!(record.headers.len(), 2);
        assert_eq!(record.headers[0].value, "1");
        // The separator inside a key ends it.
        assert!(parse("%k %v\\n", "a b c").unwrap().record.value.unwrap() == "b c");
        assert_eq!(
            parse("%k{json}\\t%v{hex}", "null\tff0").unwrap_err(),
            "the text is not hexadecimal"
        );
        assert_eq!(record.key.as_deref(), Some(&b"k\te"[..]));
    }

    #[test]
    fn rejects_formats_that_cannot_be_read() {
        for format in ["%k%v", "%k\\n", "", "%z %v"] {
            assert!(format.parse::<LineParser>().is_err(), "{format}");
        }
        assert!(parse("%v;\\n", "a;b").is_err());
        assert!(parse("<%v>", "a>").is_err());
    }
}
