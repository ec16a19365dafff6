//! Search in a partition: by key, and by a text in key, value or headers. A page reads a bounded
//! part of the partition and has a link that goes on.

use std::time::Duration;

use bytes::Bytes;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{OutOfRangePolicy, PartitionRecords, StoredRecord};
use tokio::time::Instant;

use super::PageRequest;
use super::caller::FailedCall;
use super::form::encode;
use super::records::PartitionQuery;

/// Bounds of the search of one page. One call may exceed those of bytes and time.
const RECORDS_MAX: u64 = 50_000;
const BYTES_MAX: usize = 16 << 20;
const TIME_MAX: Duration = Duration::from_secs(2);

/// Records of one call.
const RECORDS_PER_CALL: u64 = 5_000;

/// Bytes of a searched text.
const TEXT_BYTES_MAX: usize = 1_024;

/// Conditions of a search.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct RecordFilter {
    /// The whole key.
    key: Option<String>,
    /// A part of the key, the value, or a header.
    text: Option<String>,
}

/// The matches of a search.
#[derive(Debug, Default)]
pub(super) struct FoundMatches {
    /// Watermarks and offsets of what was read, with the matching records only.
    pub(super) found: PartitionRecords,
    /// Records that were read.
    pub(super) searched: u64,
    /// True if the search has reached the end.
    pub(super) is_whole: bool,
}

impl RecordFilter {
    /// Reads the fields `key` and `text`.
    ///
    /// # Errors
    /// A text that is too long.
    pub(super) fn parse(page: &PageRequest) -> Result<Self, String> {
        let field = |name: &str| {
            let text = page.query.raw(name);
            match text.len() {
                0 => Ok(None),
                bytes if bytes <= TEXT_BYTES_MAX => Ok(Some(text.to_owned())),
                bytes => Err(format!("{name} has {bytes} bytes; the limit is {TEXT_BYTES_MAX}")),
            }
        };
        Ok(Self { key: field("key")?, text: field("text")? })
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn key(&self) -> &str {
        self.key.as_deref().unwrap_or_default()
    }

    pub(super) fn text(&self) -> &str {
        self.text.as_deref().unwrap_or_default()
    }

    /// Returns the fields of a link; empty without a filter.
    pub(super) fn link(&self) -> String {
        let field = |name: &str, text: &str| match text {
            "" => String::new(),
            text => format!("&{name}={}", encode(text)),
        };
        field("key", self.key()) + &field("text", self.text())
    }

    fn matches(&self, stored: &StoredRecord) -> bool {
        let Some(record) = &stored.record else { return false };
        let is_key = |key: &String| record.key.as_ref().is_some_and(|it| it == key.as_bytes());
        let contains = |text: &String| {
            let is_in = |bytes: &Bytes| has_part(bytes, text.as_bytes());
            let of_header = |header: &helix_proto::log::v1::Header| {
                header.name.contains(text.as_str()) || is_in(&header.value)
            };
            record.key.iter().chain(&record.value).any(is_in)
                || record.headers.iter().any(of_header)
        };
        self.key.as_ref().is_none_or(is_key) && self.text.as_ref().is_none_or(contains)
    }
}

fn has_part(bytes: &[u8], part: &[u8]) -> bool {
    let [first, ..] = part else { return true };
    let mut rest = bytes;
    while let Some(at) = rest.iter().position(|byte| byte == first) {
        rest = &rest[at..];
        if rest.starts_with(part) {
            return true;
        }
        rest = &rest[1..];
    }
    false
}

/// Searches from a position on, until `count` records match or a bound is reached.
pub(super) async fn search(
    page: &PageRequest,
    query: &PartitionQuery,
    filter: &RecordFilter,
    position: Position,
    count: u64,
) -> Result<FoundMatches, FailedCall> {
    let deadline = Instant::now() + TIME_MAX;
    let mut matches = FoundMatches::default();
    let (mut next, mut bytes) = (position, 0);
    loop {
        let read = query.fetch(page, next, RECORDS_PER_CALL, OutOfRangePolicy::Clamp).await?;
        let is_first = matches.searched == 0;
        let end = read.watermarks.unwrap_or_default().high_watermark;
        let (read_count, next_offset) = (read.records.len() as u64, read.next_offset);
        if is_first {
            matches.found.start_offset = read.start_offset;
        }
        matches.found.watermarks = read.watermarks;
        matches.found.next_offset = next_offset;
        for stored in read.records {
            matches.searched += 1;
            bytes += size(&stored);
            if filter.matches(&stored) {
                let offset = stored.offset;
                matches.found.records.push(stored);
                if matches.found.records.len() as u64 == count {
                    matches.found.next_offset = offset + 1;
                    matches.is_whole = offset + 1 >= end;
                    return Ok(matches);
                }
            }
        }
        matches.is_whole = next_offset >= end || read_count == 0 && is_first;
        let is_over = matches.searched >= RECORDS_MAX
            || bytes >= BYTES_MAX
            || Instant::now() >= deadline
            || read_count == 0;
        if matches.is_whole || is_over {
            return Ok(matches);
        }
        next = Position::Offset(next_offset);
    }
}

fn size(stored: &StoredRecord) -> usize {
    let Some(record) = &stored.record else { return 0 };
    record.key.iter().chain(&record.value).map(Bytes::len).sum()
}

#[cfg(test)]
mod tests {
    use helix_proto::log::v1::{Header, Record};

    use super::*;

    #[test]
    fn parts_are_found_anywhere() {
        for (bytes, part, expected) in [
            ("aab", "ab", true),
            ("abc", "abc", true),
            ("abc", "bc", true),
            ("abc", "abcd", false),
            ("", "a", false),
            ("aaa", "b", false),
        ] {
            assert_eq!(has_part(bytes.as_bytes(), part.as_bytes()), expected, "{bytes} {part}");
        }
    }

    #[test]
    fn a_filter_needs_the_whole_key_and_a_part_of_the_rest() {
        let header = Header { name: "source".to_owned(), value: Bytes::from("web") };
        let stored = StoredRecord {
            record: Some(Record {
                key: Some(Bytes::from("customer-7")),
                value: Some(Bytes::from("bought 3 apples")),
                headers: vec![header],
                ..Record::default()
            }),
            ..StoredRecord::default()
        };
        let filter = |key: &str, text: &str| {
            let of = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            RecordFilter { key: of(key), text: of(text) }.matches(&stored)
        };
        assert!(filter("customer-7", "") && filter("", "apples") && filter("", "web"));
        assert!(filter("", "omer") && filter("customer-7", "3 a") && filter("", "source"));
        assert!(!filter("customer", "") && !filter("customer-8", "apples") && !filter("", "pears"));
        let link = RecordFilter { key: Some("a&b".to_owned()), text: Some("c d".to_owned()) };
        assert_eq!(link.link(), "&key=a%26b&text=c%20d");
        assert!(RecordFilter::default().link().is_empty());
    }
}
