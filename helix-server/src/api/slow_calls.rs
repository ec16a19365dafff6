//! ListSlowCalls, and the descriptions of slow reads.

use std::time::Duration;

use helix_proto::log::v1 as wire;
use tokio::time::Instant;

use super::authorize::Visibility;
use super::reader::PartitionReader;
use super::{time, wire_shard_id};
use crate::call::CallMemory;
use crate::clock::Clock;
use crate::error::Result;
use crate::node::Node;
use crate::slow::{SlowCall, SlowKind};
use crate::stages::{Stage, StageSpan};

/// Converts stages to the wire.
pub(super) fn wire_stages(stages: &[StageSpan]) -> Vec<wire::StageTime> {
    let duration = |time: Duration| {
        let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        let nanos = i32::try_from(time.subsec_nanos()).unwrap_or_default();
        Some(prost_types::Duration { seconds, nanos })
    };
    let stage = |span: &StageSpan| wire::StageTime {
        stage: wire_stage(span.stage).into(),
        start: duration(span.start),
        duration: duration(span.took),
    };
    stages.iter().map(stage).collect()
}

/// Moments of a read.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadTimes {
    pub(super) started: Instant,
    pub(super) opened: Instant,
    pub(super) ended: Instant,
}

/// Returns the description of a slow read.
#[cold]
pub(super) fn slow_read(
    node: &Node,
    reader: &PartitionReader,
    times: ReadTimes,
    records: u64,
    bytes: u64,
) -> SlowCall {
    let ReadTimes { started, opened, ended } = times;
    let span = |stage, from: Instant, to: Instant| StageSpan {
        stage,
        start: from.duration_since(started),
        took: to.duration_since(from),
    };
    let open = (opened > started).then(|| span(Stage::Open, started, opened));
    SlowCall {
        kind: SlowKind::Read,
        at_us: node.clock().now_us(),
        took: ended.duration_since(started),
        topic: reader.topic().name.clone(),
        partition: reader.number(),
        shard_id: reader.shard().id(),
        records,
        bytes,
        stages: open.into_iter().chain([span(Stage::Read, opened, ended)]).collect(),
    }
}

fn wire_stage(stage: Stage) -> wire::Stage {
    match stage {
        Stage::Queue => wire::Stage::Queue,
        Stage::LogWait => wire::Stage::LogWait,
        Stage::LogWrite => wire::Stage::LogWrite,
        Stage::Sync => wire::Stage::Sync,
        Stage::Quorum => wire::Stage::Quorum,
        Stage::Apply => wire::Stage::Apply,
        Stage::WakeUp => wire::Stage::WakeUp,
        Stage::Settle => wire::Stage::Settle,
        Stage::Open => wire::Stage::Open,
        Stage::Read => wire::Stage::Read,
    }
}

/// Returns the slowest calls of this node, without the names of topics that the caller may not
/// describe.
pub(super) fn list(node: &Node, call: Option<&CallMemory>) -> Result<wire::ListSlowCallsResponse> {
    let visible = Visibility::of(node, call)?;
    let calls = node.slow_calls().list(Instant::now()).into_iter().map(|mut slow| {
        if !visible.sees_topic(&slow.topic) {
            slow.topic.clear();
        }
        wire_slow_call(slow)
    });
    Ok(wire::ListSlowCallsResponse { calls: calls.collect(), node_id: node.cluster().node_id() })
}

/// Converts a slow call to the wire.
fn wire_slow_call(call: SlowCall) -> wire::SlowCall {
    let kind = match call.kind {
        SlowKind::Append => wire::SlowCallKind::Append,
        SlowKind::Read => wire::SlowCallKind::Read,
    };
    let took_us = u64::try_from(call.took.as_micros()).unwrap_or(u64::MAX);
    wire::SlowCall {
        kind: kind.into(),
        time: Some(time::to_timestamp(call.at_us)),
        duration: Some(time::to_duration(took_us)),
        topic: call.topic,
        partition: call.partition,
        shard_id: wire_shard_id(call.shard_id),
        records: call.records,
        bytes: call.bytes,
        stages: wire_stages(&call.stages),
    }
}
