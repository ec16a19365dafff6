//! The records browser: some records of one partition from a position, and the download of one
//! value. One call, or a few for a search: any replica serves them, at this node if it has one.

use askama::Template;
use bytes::Bytes;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{
    ErrorReason, FetchRequest, OutOfRangePolicy, PartitionRecords, PartitionStart, ReadLimits,
    ReadSource, StoredRecord, Watermarks,
};
use helix_proto::units;
use hyper::header::{CONTENT_DISPOSITION, HeaderValue};
use hyper::{Response, StatusCode};

use super::PageRequest;
use super::caller::{self, FailedCall};
use super::form::encode;
use super::page::{AdminBody, PageFailure, PageFrame, full, html, response, shown, time};
use super::position;
use super::record_search::{self, FoundMatches, RecordFilter};
use super::record_text::{self, ShownBytes, TextView};
use crate::clock::Clock;

/// Records of a page.
const COUNT_DEFAULT: u64 = 25;
const COUNT_MAX: u64 = 50;

/// Bytes of records that a page reads; one larger record is read whole.
const PAGE_BYTES_MAX: u64 = 4 << 20;

/// Length of all keys, values and headers of a page, as they are escaped.
const PAGE_TEXT_MAX: usize = 110 << 10;

/// Length of one value among others, and of a value that is alone.
const VALUE_TEXT_MAX: usize = 4 << 10;
const SINGLE_TEXT_MAX: usize = 96 << 10;
const KEY_TEXT_MAX: usize = 512;
const HEADER_TEXT_MAX: usize = 256;

/// Headers of a record that are shown.
const HEADERS_MAX: usize = 16;

#[derive(Template)]
#[template(path = "records.html")]
struct RecordsPage {
    frame: PageFrame,
    name: String,
    partition: u32,
    from: String,
    key: String,
    text: String,
    count: u64,
    view: &'static str,
    views: [&'static str; 4],
    start: String,
    end: String,
    rows: Vec<ShownRecord>,
    forms: &'static str,
    earlier: String,
    later: String,
    /// Text of the link to later records.
    later_name: &'static str,
    newest: String,
    /// Explanation in place of records.
    note: String,
    command: String,
}

/// One record of a page.
pub(super) struct ShownRecord {
    pub(super) offset: u64,
    pub(super) appended: String,
    pub(super) event_time: String,
    /// `None` without a key.
    pub(super) key: Option<ShownBytes>,
    /// `None` for a tombstone.
    pub(super) value: Option<ShownBytes>,
    pub(super) bytes: String,
    pub(super) headers: Vec<(String, String)>,
    /// Headers that are not shown.
    pub(super) more_headers: usize,
    pub(super) link: String,
    pub(super) download: String,
}

/// The part of a topic that a request reads.
pub(super) struct PartitionQuery {
    pub(super) topic: String,
    pub(super) partition: u32,
    pub(super) view: TextView,
}

impl PartitionQuery {
    /// Reads the fields `partition` and `view`.
    pub(super) fn parse(page: &PageRequest, topic: &str) -> Result<Self, PageFailure> {
        let partition = page.query.number("partition", 0, u32::MAX.into());
        let partition = partition.map_err(PageFailure::bad)?;
        Ok(Self {
            topic: topic.to_owned(),
            partition: u32::try_from(partition).unwrap_or(u32::MAX),
            view: TextView::parse(page.query.get("view")).map_err(PageFailure::bad)?,
        })
    }

    pub(super) fn start(&self, position: Position) -> PartitionStart {
        PartitionStart {
            topic: self.topic.clone(),
            partition: self.partition,
            start: position::start(position),
            ..PartitionStart::default()
        }
    }

    /// Reads up to `count` records from a position.
    pub(super) async fn fetch(
        &self,
        page: &PageRequest,
        position: Position,
        count: u64,
        out_of_range: OutOfRangePolicy,
    ) -> Result<PartitionRecords, FailedCall> {
        let limits = ReadLimits {
            max_records: Some(count),
            max_bytes: Some(PAGE_BYTES_MAX),
            ..ReadLimits::default()
        };
        let request = FetchRequest {
            partitions: vec![self.start(position)],
            limits: Some(limits),
            source: ReadSource::AnyReplica.into(),
            out_of_range: out_of_range.into(),
            ..FetchRequest::default()
        };
        let fetched = page.caller.routed(request, |channel, request| async move {
            caller::consume(channel).fetch(request).await
        });
        Ok(fetched.await?.partitions.pop().unwrap_or_default())
    }
}

/// Shows the page.
pub(super) async fn show(
    page: &PageRequest,
    name: &str,
) -> Result<Response<AdminBody>, PageFailure> {
    let back =
        |failure: PageFailure| failure.back_to(format!("/console/topics/{name}"), "the topic");
    let query = PartitionQuery::parse(page, name).map_err(back)?;
    let count = page.query.number("count", COUNT_DEFAULT, COUNT_MAX);
    let count = count.map_err(|what| back(PageFailure::bad(what)))?.max(1);
    let filter = RecordFilter::parse(page).map_err(|what| back(PageFailure::bad(what)))?;
    let default = if filter.is_empty() { format!("-{count}") } else { "earliest".to_owned() };
    let from = Some(page.query.get("from")).filter(|it| !it.is_empty()).unwrap_or(&default);
    let now_us = page.node.clock().now_us();
    let position = position::parse(from, now_us).map_err(|what| back(PageFailure::bad(what)))?;
    let fetched = match filter.is_empty() {
        true => query
            .fetch(page, position, count, OutOfRangePolicy::Clamp)
            .await
            .map(|found| FoundMatches { found, ..FoundMatches::default() }),
        false => record_search::search(page, &query, &filter, position, count).await,
    };
    let mut search = None;
    let (found, note) = match fetched {
        Ok(matches) if !filter.is_empty() => {
            let note = search_note(&matches);
            search = Some(matches.is_whole);
            (matches.found, note)
        }
        Ok(matches) => (matches.found, String::new()),
        Err(failed) if failed.detail == Some(ErrorReason::UndecodableBatch) => {
            let note = format!("{}. Choose an offset after the batch.", shown(&failed.message));
            (PartitionRecords::default(), note)
        }
        Err(failed) => return Err(back(failed.into())),
    };
    let Watermarks { log_start_offset: start, high_watermark: end } =
        found.watermarks.unwrap_or_default();
    let link = |from: &str, count: u64| {
        let PartitionQuery { topic, partition, view } = &query;
        let (from, view) = (encode(from), view.name());
        let path = format!("/console/topics/{topic}/records?partition={partition}");
        let filter = if count == 1 { String::new() } else { filter.link() };
        format!("{path}&from={from}&count={count}&view={view}{filter}")
    };
    let first = found.records.first().map_or(found.start_offset, |record| record.offset);
    let earlier = (first > start && search.is_none())
        .then(|| link(&first.saturating_sub(count).to_string(), count));
    let has_later = match search {
        Some(is_whole) => !is_whole,
        None => found.next_offset < end && !found.records.is_empty(),
    };
    let later = has_later.then(|| link(&found.next_offset.to_string(), count));
    let is_single = count == 1;
    let mut rows = rows(&query, &found.records, is_single);
    rows.iter_mut().for_each(|row| row.link = link(&row.offset.to_string(), 1));
    let note = match (found.records.is_empty(), note.is_empty()) {
        (true, true) if start == end => "The partition has no records.".to_owned(),
        (true, true) => "There are no records from this position on.".to_owned(),
        _ => note,
    };
    let shown_page = RecordsPage {
        frame: page.frame(format!("Records of {}", shown(name)), "topics"),
        name: shown(name),
        partition: query.partition,
        from: from.to_owned(),
        key: filter.key().to_owned(),
        text: filter.text().to_owned(),
        count,
        view: query.view.name(),
        views: TextView::NAMES,
        start: units::count(start),
        end: units::count(end),
        rows,
        forms: position::FORMS,
        earlier: earlier.unwrap_or_default(),
        later: later.unwrap_or_default(),
        later_name: if search.is_some() { "Go on with the search" } else { "Later" },
        newest: link(&format!("-{count}"), count),
        note,
        command: format!(
            "helix consume {} -p {} --from={} -n {count}",
            super::page::argument(name),
            query.partition,
            super::page::argument(from)
        ),
    };
    html(StatusCode::OK, &shown_page)
}

/// Says what a search has read.
fn search_note(matches: &FoundMatches) -> String {
    let searched = units::counted(matches.searched, "record");
    let found = units::counted(matches.found.records.len() as u64, "match");
    let next = units::count(matches.found.next_offset);
    let found = found.replace("matchs", "matches");
    match matches.is_whole {
        true => format!("{found} among {searched} up to the end."),
        false => format!("{found} among {searched} before offset {next}. The search can go on."),
    }
}

/// Returns the rows of records. Together they have a limited length.
pub(super) fn rows(
    query: &PartitionQuery,
    records: &[StoredRecord],
    is_single: bool,
) -> Vec<ShownRecord> {
    let mut left = PAGE_TEXT_MAX;
    let value_max = if is_single { SINGLE_TEXT_MAX } else { VALUE_TEXT_MAX };
    records.iter().map(|stored| row(query, stored, value_max, &mut left)).collect()
}

fn row(
    query: &PartitionQuery,
    stored: &StoredRecord,
    value_max: usize,
    left: &mut usize,
) -> ShownRecord {
    let record = stored.record.clone().unwrap_or_default();
    let mut text = |bytes: &Bytes, view: TextView, chars_max: usize| {
        let text = record_text::show(bytes, view, chars_max.min(*left));
        *left = left.saturating_sub(record_text::page_length(&text.text));
        text
    };
    let headers = record.headers.iter().take(HEADERS_MAX).map(|header| {
        let name = text(&Bytes::from(header.name.clone()), TextView::Text, HEADER_TEXT_MAX).text;
        (shown(&name), shown(&text(&header.value, TextView::Auto, HEADER_TEXT_MAX).text))
    });
    let headers = headers.collect();
    let key_view = if query.view == TextView::Hex { TextView::Hex } else { TextView::Auto };
    let bytes = record.value.as_ref().map_or(0, Bytes::len);
    ShownRecord {
        offset: stored.offset,
        appended: time(stored.append_time.as_ref()),
        event_time: time(record.event_time.as_ref()),
        key: record.key.as_ref().map(|key| text(key, key_view, KEY_TEXT_MAX)),
        value: record.value.as_ref().map(|value| text(value, query.view, value_max)),
        bytes: units::bytes(bytes as u64),
        headers,
        more_headers: record.headers.len().saturating_sub(HEADERS_MAX),
        link: String::new(),
        download: format!(
            "/console/topics/{}/value?partition={}&offset={}",
            query.topic, query.partition, stored.offset
        ),
    }
}

/// Sends the value of one record as a file, which no browser shows.
pub(super) async fn download(
    page: &PageRequest,
    name: &str,
) -> Result<Response<AdminBody>, PageFailure> {
    let query = PartitionQuery::parse(page, name)?;
    let offset = page.query.number("offset", 0, u64::MAX).map_err(PageFailure::bad)?;
    let policy = OutOfRangePolicy::Unspecified;
    let found = query.fetch(page, Position::Offset(offset), 1, policy).await?;
    let partition = query.partition;
    let missing = |what: &str| PageFailure {
        title: "No such record",
        message: format!("{name}/{partition} has {what} at offset {offset}"),
        ..PageFailure::of(StatusCode::NOT_FOUND)
    };
    let stored = found.records.into_iter().find(|stored| stored.offset == offset);
    let record = stored.and_then(|stored| stored.record).ok_or_else(|| missing("no record"))?;
    let value = record.value.ok_or_else(|| missing("a record without a value"))?;
    let mut response = response(StatusCode::OK, "application/octet-stream", full(value));
    // Names of topics have no character that needs quotes.
    let file = format!("attachment; filename=\"{name}-{partition}-{offset}.bin\"");
    let file = HeaderValue::from_str(&file).unwrap_or(HeaderValue::from_static("attachment"));
    response.headers_mut().insert(CONTENT_DISPOSITION, file);
    Ok(response)
}

#[cfg(test)]
mod tests {
    use helix_proto::log::v1::{Header, Record};

    use super::*;

    fn query() -> PartitionQuery {
        PartitionQuery { topic: "orders".to_owned(), partition: 2, view: TextView::Auto }
    }

    fn stored(offset: u64, value: Option<&[u8]>) -> StoredRecord {
        let record = Record { value: value.map(Bytes::copy_from_slice), ..Record::default() };
        StoredRecord { offset, record: Some(record), ..StoredRecord::default() }
    }

    #[test]
    fn a_page_of_large_values_stays_small() {
        let large = "<".repeat(1 << 20);
        let records: Vec<_> = (0..50).map(|at| stored(at, Some(large.as_bytes()))).collect();
        let shown = rows(&query(), &records, false);
        let length = |row: &ShownRecord| {
            row.value.as_ref().map_or(0, |it| record_text::page_length(&it.text))
        };
        let all: usize = shown.iter().map(length).sum();
        assert!(all <= PAGE_TEXT_MAX, "{all}");
        assert!(shown.iter().all(|row| row.value.as_ref().unwrap().is_cut));
        let single = rows(&query(), &records[..1], true);
        assert!(length(&single[0]) > VALUE_TEXT_MAX);
    }

    #[test]
    fn tombstones_and_headers_are_shown() {
        let mut record = stored(7, None);
        let header = |name: &str| Header { name: name.to_owned(), value: Bytes::from("a\nb") };
        let headers = (0..20).map(|number| header(&format!("h{number}"))).collect();
        record.record.as_mut().unwrap().headers = headers;
        let row = rows(&query(), &[record], false).remove(0);
        assert!(row.value.is_none() && row.key.is_none());
        assert_eq!((row.headers.len(), row.more_headers), (HEADERS_MAX, 4));
        assert_eq!(row.headers[0], ("h0".to_owned(), "a\\nb".to_owned()));
        assert_eq!(row.download, "/console/topics/orders/value?partition=2&offset=7");
    }
}
