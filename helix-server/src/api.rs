//! The public gRPC API: one file per service, and their shared conversions.
//! Uses tonic and the wire types; neither Raft nor files.

mod access;
mod access_quotas;
mod access_rules;
mod append_stream;
mod authorize;
mod batch;
mod batch_part;
mod batch_signer;
mod batch_size;
mod batch_watch;
mod cluster;
mod compressed;
mod consume;
mod decompressors;
mod delivery_reason;
mod group;
mod group_describe;
mod group_gateway;
mod group_lag;
mod group_list;
mod group_offsets;
mod group_pages;
mod health;
mod health_issues;
mod kafka_batch;
mod keys;
mod lag_history;
mod member_changes;
mod metadata;
mod page;
mod placement;
mod positions;
mod probe;
mod produce;
mod read_form;
mod reader;
mod recheck;
mod reflection;
mod settings;
mod slow_calls;
mod status;
mod subscribe;
mod time;
mod topic;

use std::sync::Arc;

use helix_proto::log::v1::{self as wire};

use crate::call::{CallMemory, LoadPermit};
use crate::error::{LeaderHint, Result};
use crate::limits::RESPONSE_COUNTED_BYTES;
use crate::log::Watermarks;
use crate::shard::BatchAck;
pub(crate) use access::AccessHandler;
pub(crate) use authorize::{GuardedRequest, is_open, method_row, reauthorize};
pub(crate) use batch_part::stored_batch;
pub(crate) use cluster::ClusterHandler;
pub(crate) use consume::ConsumeHandler;
pub(crate) use decompressors::Decompressors;
pub(crate) use group::GroupHandler;
pub use health::health;
pub(crate) use produce::ProduceHandler;
pub(crate) use recheck::AccessChanges;
pub(crate) use reflection::add_reflection;
pub(crate) use status::early_end;
pub(crate) use topic::TopicHandler;

/// Returns the memory of a request's call; `None` if it did not pass the admission.
fn call_memory<T>(request: &tonic::Request<T>) -> Option<Arc<CallMemory>> {
    request.extensions().get::<Arc<CallMemory>>().cloned()
}

/// Acquires the permit for a response of about `bytes` before it is built; the call keeps it.
///
/// The call's own share covers a small response.
///
/// # Errors
/// [`crate::error::Error::Throttled`] if response bytes stay at their limit.
async fn reserve_response(call: Option<&CallMemory>, bytes: usize) -> Result<()> {
    if let (Some(permit), Some(call)) = (acquire_response(call, bytes).await?, call) {
        call.keep_response(permit);
    }
    Ok(())
}

/// Like [`reserve_response`]; returns the permit, `None` for a small response.
async fn acquire_response(call: Option<&CallMemory>, bytes: usize) -> Result<Option<LoadPermit>> {
    match call.filter(|_| bytes >= RESPONSE_COUNTED_BYTES) {
        Some(call) => call.load().acquire_response(bytes).await.map(Some),
        None => Ok(None),
    }
}

/// Converts an ack. A batch acked before its verdict has no offsets.
fn wire_ack(ack: &BatchAck) -> wire::AppendAck {
    wire::AppendAck {
        first_offset: ack.offsets.map(|(first, _)| first),
        next_offset: ack.offsets.map(|(_, next)| next),
        duplicate: ack.duplicate,
        durability: settings::to_wire_durability(ack.durability).into(),
    }
}

fn wire_watermarks(watermarks: Watermarks) -> wire::Watermarks {
    wire::Watermarks {
        log_start_offset: watermarks.log_start,
        high_watermark: watermarks.high_watermark,
    }
}

fn wire_leader(leader: LeaderHint) -> wire::LeaderHint {
    wire::LeaderHint { node_id: leader.node_id, endpoint: leader.endpoint, term: leader.term }
}

/// Converts a shard id; the wire has 32 bits for it.
fn wire_shard_id(shard: u64) -> u32 {
    u32::try_from(shard).expect("shard ids are counted from 0")
}

/// Asserts that a handler's future takes at most a third of a call's memory.
///
/// The rest is for the headers, the stream and the task.
#[cfg(test)]
fn assert_small_future<A, F: Future>(_handler: impl FnOnce(A) -> F) {
    let bytes = size_of::<F>() as u64;
    assert!(bytes <= crate::limits::CALL_BYTES / 3, "{bytes} bytes; box its cold futures");
}
