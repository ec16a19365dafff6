//! Spans of finished traces, made from their times.

use std::sync::Arc;

use tokio::time::Instant;

use super::{TracedBatch, micros_between};
use crate::stages::{AppendTimes, BatchStamps};

/// Trace, span and parent of a span.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpanIds {
    pub trace_id: [u8; 16],
    pub parent: Option<[u8; 8]>,
    pub span_id: [u8; 8],
}

/// A finished trace, before its spans are made.
#[derive(Debug)]
pub enum FinishedTrace {
    Append(Box<AppendTrace>),
    Delivery(Box<DeliveryTrace>),
}

/// The append of a batch.
#[derive(Debug)]
pub struct AppendTrace {
    pub(super) ids: SpanIds,
    pub(super) started_us: u64,
    /// The leader's own sync may end after the acknowledgement.
    pub(super) stamps: Arc<BatchStamps>,
    pub(super) acked: Instant,
    pub(super) batch: TracedBatch,
}

/// The first read of a batch.
#[derive(Debug)]
pub struct DeliveryTrace {
    pub(super) ids: SpanIds,
    pub(super) started_us: u64,
    pub(super) ended_us: u64,
    pub(super) topic: String,
    pub(super) partition: u32,
    pub(super) offset: u64,
}

/// Value of a span's attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpanValue {
    Text(String),
    Number(u64),
}

/// A span with its times in nanoseconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceSpan {
    pub ids: SpanIds,
    pub name: String,
    /// True for the span of a call, whose parent may be in another process.
    pub is_call: bool,
    pub start_ns: u64,
    pub end_ns: u64,
    pub attributes: Vec<(&'static str, SpanValue)>,
    pub error: Option<String>,
}

impl FinishedTrace {
    /// Returns the spans, the parent first. `new_id` makes the ids of further spans.
    pub fn spans(self, new_id: &mut dyn FnMut() -> [u8; 8]) -> Vec<TraceSpan> {
        match self {
            Self::Append(append) => append.spans(new_id),
            Self::Delivery(delivery) => vec![delivery.span()],
        }
    }
}

impl AppendTrace {
    fn spans(self, new_id: &mut dyn FnMut() -> [u8; 8]) -> Vec<TraceSpan> {
        let Self { ids, started_us, stamps, acked, batch } = self;
        let started = stamps.started();
        let times = AppendTimes {
            started,
            ack: batch.ack,
            log_base: batch.log_base,
            stamps: Some(&stamps),
            acked,
        };
        let start_ns = started_us * 1_000;
        let nanos = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let mut attributes = place(&batch.topic, batch.partition);
        attributes.push(("messaging.batch.message_count", SpanValue::Number(batch.records.into())));
        attributes.push(("messaging.message.body.size", SpanValue::Number(batch.bytes)));
        attributes.push(("helix.shard_id", SpanValue::Number(batch.shard_id)));
        if let Some((first, _)) = batch.offsets {
            attributes.push(("helix.first_offset", SpanValue::Number(first)));
        }
        let mut spans = vec![TraceSpan {
            name: format!("append {}", batch.topic),
            is_call: true,
            start_ns,
            end_ns: start_ns + micros_between(started, acked) * 1_000,
            attributes,
            error: batch.error,
            ids: ids.clone(),
        }];
        let children = times.stages().into_iter().map(|stage| TraceSpan {
            ids: SpanIds { trace_id: ids.trace_id, parent: Some(ids.span_id), span_id: new_id() },
            name: stage.stage.name().to_owned(),
            is_call: false,
            start_ns: start_ns + nanos(stage.start),
            end_ns: start_ns + nanos(stage.start + stage.took),
            attributes: Vec::new(),
            error: None,
        });
        spans.extend(children);
        spans
    }
}

impl DeliveryTrace {
    fn span(self) -> TraceSpan {
        let mut attributes = place(&self.topic, self.partition);
        attributes.push(("helix.first_offset", SpanValue::Number(self.offset)));
        TraceSpan {
            ids: self.ids,
            name: "delivery".to_owned(),
            is_call: false,
            start_ns: self.started_us * 1_000,
            end_ns: self.ended_us * 1_000,
            attributes,
            error: None,
        }
    }
}

/// Returns the attributes of a partition, by the messaging conventions of OpenTelemetry 1.45.
fn place(topic: &str, partition: u32) -> Vec<(&'static str, SpanValue)> {
    vec![
        ("messaging.system", SpanValue::Text("helix".to_owned())),
        ("messaging.destination.name", SpanValue::Text(topic.to_owned())),
        ("messaging.destination.partition.id", SpanValue::Text(partition.to_string())),
    ]
}
