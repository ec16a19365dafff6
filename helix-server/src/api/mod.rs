//! The public gRPC API: one file per service, and what the services share.
//! Knows tonic and the wire; not Raft, not files.

mod append_stream;
mod batch;
mod cluster;
mod consume;
mod group;
mod health;
mod membership;
mod meter;
mod positions;
mod produce;
mod reader;
mod services;
mod settings;
mod status;
mod subscribe;
mod time;
mod topic;

use std::sync::Arc;

use helix_proto::log::v1::{self as wire};

use crate::error::{LeaderHint, Result};
use crate::limits::ANSWER_COUNTED_BYTES;
use crate::load::Call;
use crate::log::Watermarks;
pub use health::health;
pub use meter::{Meter, MeterLayer};
pub use services::Services;

/// What the call holds of the node's memory; nothing counts where it did not come in by the gate.
fn call_of<T>(request: &tonic::Request<T>) -> Option<Arc<Call>> {
    request.extensions().get::<Arc<Call>>().cloned()
}

/// Takes room for an answer of about so many bytes before it is built; its call has it until the
/// answer is taken. What is small is part of its call.
///
/// # Errors
/// [`crate::error::Error::Throttled`] where none came free in time.
async fn make_room(call: Option<&Call>, bytes: usize) -> Result<()> {
    if let Some(call) = call.filter(|_| bytes >= ANSWER_COUNTED_BYTES) {
        call.hold(call.load().answer(bytes).await?);
    }
    Ok(())
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

/// Shards are few; the wire has 32 bits for their ids.
fn wire_shard_id(shard: u64) -> u32 {
    u32::try_from(shard).expect("shard ids are counted from 0")
}

/// Checks that what a handler keeps while it waits leaves most of what a call may take to its
/// headers, its stream and its task.
#[cfg(test)]
fn expect_small<A, F: Future>(_handler: impl FnOnce(A) -> F) {
    let bytes = size_of::<F>() as u64;
    assert!(bytes <= crate::limits::CALL_BYTES / 3, "{bytes} bytes: is what is rare boxed?");
}
