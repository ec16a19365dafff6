//! The live tail of one partition: a page with the newest records, and the stream of events that a
//! script adds to it. A tail under load stays at the end and says what it left out.

use std::convert::Infallible;
use std::time::Duration;

use askama::Template;
use bytes::Bytes;
use futures_util::stream;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    OutOfRangePolicy, PartitionRecords, ReadSource, StoredRecord, SubscribeRequest,
    SubscribeResponse,
};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper::{Response, StatusCode};
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tonic::codec::Streaming;
use tonic::{Request, Status};

use super::PageRequest;
use super::caller;
use super::page::{AdminBody, EVENTS, PageFailure, PageFrame, html, plain, response, shown};
use super::record_text::{self, TextView};
use super::records::{PartitionQuery, ShownRecord, rows};
use crate::admin::TAIL_WAIT_MAX;

/// Records that the page begins with.
const BEGIN_RECORDS: u64 = 20;

/// Records of one event; of more, the newest.
const EVENT_RECORDS_MAX: usize = 50;

/// Records behind the end from which on a tail continues near the end.
const BEHIND_MAX: u64 = 5_000;

/// Length of a shown value and key.
const VALUE_TEXT_MAX: usize = 2 << 10;
const KEY_TEXT_MAX: usize = 256;

/// Time between two events, and of silence after which one without records is sent.
const EVENT_PAUSE: Duration = Duration::from_millis(200);
const SILENCE_MAX: Duration = Duration::from_secs(10);

#[derive(Template)]
#[template(path = "tail.html")]
struct TailPage {
    frame: PageFrame,
    name: String,
    partition: u32,
    view: &'static str,
    views: [&'static str; 4],
    rows: Vec<ShownRecord>,
    events: String,
    command: String,
}

/// Shows the page.
pub(super) async fn show(
    page: &PageRequest,
    name: &str,
) -> Result<Response<AdminBody>, PageFailure> {
    let query = PartitionQuery::parse(page, name)?;
    let begin = Position::TailRecords(BEGIN_RECORDS);
    let found = query.fetch(page, begin, BEGIN_RECORDS, OutOfRangePolicy::Clamp).await;
    let found = found.map_err(|failed| {
        PageFailure::from(failed).back_to(format!("/console/topics/{name}"), "the topic")
    })?;
    let mut rows = rows(&query, &found.records, false);
    rows.reverse();
    let PartitionQuery { partition, view, .. } = query;
    let shown_page = TailPage {
        frame: page.frame(format!("Tail of {}", shown(name)), "topics"),
        name: shown(name),
        partition,
        view: view.name(),
        views: TextView::NAMES,
        rows,
        events: format!(
            "/console/topics/{name}/events?partition={partition}&view={}&from={}",
            view.name(),
            found.next_offset
        ),
        command: format!("helix tail {} -p {partition} -F", super::page::argument(name)),
    };
    html(StatusCode::OK, &shown_page)
}

/// Sends the records from an offset on as server-sent events.
pub(super) async fn events(
    page: &PageRequest,
    name: &str,
) -> Result<Response<AdminBody>, PageFailure> {
    let query = PartitionQuery::parse(page, name)?;
    let from = page.query.number("from", 0, u64::MAX).map_err(PageFailure::bad)?;
    // A browser that connects again continues after its last event.
    let from = page.last_event.map_or(from, |offset| offset.saturating_add(1).max(from));
    let Ok(permit) = page.console.tails.clone().try_acquire_owned() else {
        let what = "too many live tails are open at this node; close one, or wait";
        return Ok(plain(StatusCode::TOO_MANY_REQUESTS, what));
    };
    let opened = subscribe(page, &query, Position::Offset(from)).await;
    let (channel, subscription) = opened?;
    let tail = TailEvents {
        query,
        subscription,
        channel,
        authorization: page.caller.stream_request(()).metadata().clone(),
        next_offset: from,
        ends_at: Instant::now() + TAIL_WAIT_MAX,
        closing: page.console.closing.clone(),
        has_ended: false,
        _permit: permit,
    };
    let events = stream::unfold(tail, |mut tail| async move {
        let event = tail.next().await?;
        Some((Ok::<_, Infallible>(Frame::data(Bytes::from(event))), tail))
    });
    Ok(response(StatusCode::OK, EVENTS, StreamBody::new(events).boxed_unsync()))
}

type Subscription = Streaming<SubscribeResponse>;

/// Opens the subscription at this node, which has a replica of each shard.
async fn subscribe(
    page: &PageRequest,
    query: &PartitionQuery,
    position: Position,
) -> Result<(tonic::transport::Channel, Subscription), PageFailure> {
    let channel = page.caller.local();
    let request = page.caller.stream_request(subscription_request(query, position));
    let opened = caller::consume(channel.clone()).subscribe(request).await;
    Ok((channel, opened?.into_inner()))
}

fn subscription_request(query: &PartitionQuery, position: Position) -> SubscribeRequest {
    SubscribeRequest {
        partitions: vec![query.start(position)],
        source: ReadSource::AnyReplica.into(),
        out_of_range: OutOfRangePolicy::Clamp.into(),
        ..SubscribeRequest::default()
    }
}

/// The events of one tail.
struct TailEvents {
    query: PartitionQuery,
    subscription: Subscription,
    channel: tonic::transport::Channel,
    authorization: tonic::metadata::MetadataMap,
    next_offset: u64,
    ends_at: Instant,
    closing: CancellationToken,
    has_ended: bool,
    _permit: OwnedSemaphorePermit,
}

impl TailEvents {
    /// Returns the next event; `None` at the end.
    async fn next(&mut self) -> Option<String> {
        if self.has_ended {
            return None;
        }
        let closing = self.closing.clone();
        let silence = sleep(SILENCE_MAX);
        tokio::pin!(silence);
        loop {
            let message = tokio::select! {
                message = self.subscription.message() => message,
                () = &mut silence => return Some(": nothing new\n\n".to_owned()),
                () = tokio::time::sleep_until(self.ends_at) => return None,
                () = closing.cancelled() => return None,
            };
            let data = match message {
                Ok(Some(SubscribeResponse { message: Some(Message::Data(data)) })) => data,
                Ok(Some(_)) => continue,
                Ok(None) => return None,
                Err(status) => {
                    self.has_ended = true;
                    return Some(failure(&status));
                }
            };
            if data.records.is_empty() {
                continue;
            }
            let event = self.event(&data);
            if let Err(status) = self.catch_up(&data).await {
                self.has_ended = true;
                return Some(failure(&status));
            }
            // Limits the events, and lets a burst become one message of the subscription.
            sleep(EVENT_PAUSE).await;
            return Some(event);
        }
    }

    /// Returns the event of some records.
    fn event(&mut self, data: &PartitionRecords) -> String {
        let first = data.records.len().saturating_sub(EVENT_RECORDS_MAX);
        let newest = &data.records[first..];
        let begin = newest.first().map_or(self.next_offset, |record| record.offset);
        // Gaps of compaction by key are counted too: there is nothing to show in either case.
        let skipped = begin.saturating_sub(self.next_offset);
        let view = self.query.view;
        let records: Vec<_> = newest.iter().map(|stored| record_json(stored, view)).collect();
        let last = newest.last().map_or(begin, |record| record.offset);
        self.next_offset = data.next_offset.max(last + 1);
        let body = json!({ "skipped": skipped.to_string(), "records": records });
        format!("id: {last}\ndata: {body}\n\n")
    }

    /// Continues near the end if the tail is far behind it.
    async fn catch_up(&mut self, data: &PartitionRecords) -> Result<(), Status> {
        let end = data.watermarks.unwrap_or_default().high_watermark;
        if end.saturating_sub(self.next_offset) < BEHIND_MAX {
            return Ok(());
        }
        let newest = Position::TailRecords(EVENT_RECORDS_MAX as u64);
        let mut request = Request::new(subscription_request(&self.query, newest));
        *request.metadata_mut() = self.authorization.clone();
        let opened = caller::consume(self.channel.clone()).subscribe(request).await?;
        self.subscription = opened.into_inner();
        Ok(())
    }
}

fn failure(status: &Status) -> String {
    let body = json!({ "message": shown(status.message()) });
    format!("event: failure\ndata: {body}\n\n")
}

fn record_json(stored: &StoredRecord, view: TextView) -> serde_json::Value {
    let record = stored.record.clone().unwrap_or_default();
    let text = |bytes: &Bytes, chars_max| record_text::show(bytes, view, chars_max);
    let value = record.value.as_ref().map(|value| text(value, VALUE_TEXT_MAX));
    json!({
        "offset": stored.offset.to_string(),
        "time": super::page::time(stored.append_time.as_ref()),
        "key": record.key.as_ref().map(|key| text(key, KEY_TEXT_MAX).text),
        "value": value.as_ref().map(|value| &value.text),
        "kind": value.as_ref().map(|value| value.kind),
        "cut": value.as_ref().is_some_and(|value| value.is_cut),
    })
}

#[cfg(test)]
mod tests {
    use helix_proto::log::v1::Record;

    use super::*;

    #[test]
    fn an_event_is_one_line_of_data() {
        let value = Bytes::from("a\n\ndata: forged\r\nid: 9");
        let record = Record { value: Some(value), ..Record::default() };
        let stored = StoredRecord { offset: 7, record: Some(record), ..StoredRecord::default() };
        let line = record_json(&stored, TextView::Auto).to_string();
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(failure(&Status::internal("a\nb")).contains("a\\\\nb"));
    }
}
