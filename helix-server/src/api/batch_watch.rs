//! Measurements of one batch, from its arrival to its acknowledgement: metrics, slow calls, its
//! trace and the stages that its caller asks for.

use std::sync::Arc;

use helix_proto::batch;
use helix_proto::kafka::{KAFKA_BATCH_VERSION, KafkaBatch, KafkaCodec};
use helix_proto::log::v1 as wire;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;

use super::batch_size::BatchSize;
use super::slow_calls::wire_stages;
use crate::clock::Clock;
use crate::error::Error;
use crate::limits::TRACED_RECORDS_MAX;
use crate::node::{LocatedPartition, Node};
use crate::shard::{BatchAck, NewBatch};
use crate::slow::{SlowCall, SlowKind};
use crate::stages::{AppendTimes, BatchStamps};
use crate::trace::{TRACEPARENT, TraceContext, TraceGuard, TracedBatch};

/// Returns the trace context in a call's metadata. `None` if this node traces nothing.
///
/// Boxed, so that a call without one keeps 8 bytes for it.
pub(super) fn call_context(node: &Node, metadata: &MetadataMap) -> Option<Box<TraceContext>> {
    node.tracer()?;
    TraceContext::parse(metadata.get(TRACEPARENT)?.as_bytes()).map(Box::new)
}

/// Trace and stages of one batch.
#[derive(Debug)]
pub(super) struct BatchWatch {
    trace: Option<TraceGuard>,
    stamps: Arc<BatchStamps>,
}

impl BatchWatch {
    /// Begins to watch a batch, if a trace or its caller asks for it, and puts the stamps into it.
    ///
    /// The context of the call comes before those of records.
    pub(super) fn begin(
        node: &Node,
        context: Option<Box<TraceContext>>,
        is_asked: bool,
        started: Instant,
        batch: &mut NewBatch,
    ) -> Option<Box<Self>> {
        let trace = node.tracer().and_then(|tracer| {
            let context = context.map(|context| *context).or_else(|| record_context(batch));
            TraceGuard::begin(tracer, context, started)
        });
        let stamps = match &trace {
            Some(trace) => trace.stamps().cloned(),
            None if is_asked => Some(Arc::new(BatchStamps::new(started))),
            None => None,
        };
        let stamps = stamps?;
        batch.stamps = Some(stamps.clone());
        Some(Box::new(Self { trace, stamps }))
    }

    /// Ends the trace of an acknowledged batch. Returns its stages.
    pub(super) fn acked(
        self,
        size: &BatchSize,
        located: &LocatedPartition,
        ack: &BatchAck,
    ) -> Vec<wire::StageTime> {
        let stages = AppendTimes {
            started: self.stamps.started(),
            ack: ack.times,
            log_base: located.shard.log_base(),
            stamps: Some(&self.stamps),
            acked: Instant::now(),
        };
        let stages = wire_stages(&stages.stages());
        if let Some(trace) = self.trace {
            let times = (ack.times, located.shard.log_base());
            trace.finish(TracedBatch {
                ack: times.0,
                log_base: times.1,
                offsets: ack.offsets,
                ..traced_batch(size, located)
            });
        }
        stages
    }

    /// Ends the trace of a batch whose append failed.
    pub(super) fn failed(&mut self, size: &BatchSize, located: &LocatedPartition, error: &Error) {
        if let Some(trace) = self.trace.take() {
            let error = Some(error.to_string());
            trace.finish(TracedBatch { error, ..traced_batch(size, located) });
        }
    }
}

fn traced_batch(size: &BatchSize, located: &LocatedPartition) -> TracedBatch {
    TracedBatch {
        topic: located.topic.name.clone(),
        partition: located.number,
        partition_id: located.partition.0,
        shard_id: located.shard.id(),
        records: size.records,
        bytes: size.bytes as u64,
        offsets: None,
        ack: None,
        log_base: None,
        error: None,
    }
}

/// Returns the first trace context in the headers of a batch's first records. Reads no compressed
/// bytes.
fn record_context(batch: &NewBatch) -> Option<TraceContext> {
    let payload = &batch.payload;
    if batch.version == KAFKA_BATCH_VERSION {
        let kafka = KafkaBatch::parse_unverified(payload).ok()?;
        if kafka.codec() != KafkaCodec::None {
            return None;
        }
        let records = kafka.records(kafka.record_section());
        let headers = records.take(TRACED_RECORDS_MAX).map_while(Result::ok);
        let mut headers = headers.flat_map(|record| record.headers);
        return TraceContext::parse(headers.find(|header| header.name == TRACEPARENT)?.value?);
    }
    if !batch::is_uncompressed(batch.compression) {
        return None;
    }
    TraceContext::parse(batch::find_header(payload, TRACEPARENT, TRACED_RECORDS_MAX)?)
}

/// Counts an acknowledged batch, and keeps it if it is among the slowest ones.
pub(super) fn count_ack(node: &Node, located: &LocatedPartition, size: &BatchSize, ack: &BatchAck) {
    let took = size.count_ack(node.metrics(), ack.duplicate);
    let acked = size.since + took;
    if node.slow_calls().is_slow(SlowKind::Append, acked, took) {
        keep_slow_append(node, located, size, ack, acked);
    }
}

#[cold]
fn keep_slow_append(
    node: &Node,
    located: &LocatedPartition,
    size: &BatchSize,
    ack: &BatchAck,
    acked: Instant,
) {
    let log_base = located.shard.log_base();
    let (started, ack) = (size.since, ack.times);
    let stages = AppendTimes { started, ack, log_base, stamps: None, acked }.stages();
    let call = SlowCall {
        kind: SlowKind::Append,
        at_us: node.clock().now_us(),
        took: acked.duration_since(started),
        topic: located.topic.name.clone(),
        partition: located.number,
        shard_id: located.shard.id(),
        records: size.records.into(),
        bytes: size.bytes as u64,
        stages,
    };
    node.slow_calls().keep(acked, call);
}
