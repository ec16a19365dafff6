//! Sends a snapshot in chunks over the catch-up lane.

use bytes::Buf;
use helix_proto::raft::v1 as pb;
use openraft::raft::SnapshotResponse;
use pb::answer::Result as UnaryResult;
use pb::exchange_request::Message;

use super::route::{ReplicaRoute, received, unexpected};
use crate::peer::connection::lane::PeerLane;
use crate::peer::connection::session::PeerSession;
use crate::peer::limits::CHUNK_BYTES;
use crate::peer::wire::{self, RaftSnapshot, RpcError};
use crate::raft::{TypeConfig, Vote};

/// Sends a snapshot and waits until it is installed or refused with a later vote.
/// The wait includes the receiver's fetch of records. A lost connection loses the snapshot, which
/// openraft then sends again.
pub(super) async fn send(
    route: &ReplicaRoute,
    vote: Vote,
    snapshot: RaftSnapshot,
) -> Result<SnapshotResponse<TypeConfig>, RpcError> {
    let session = route.session(PeerLane::CatchUp)?;
    let id = route.table.local.next_id();
    let pending = session.expect_response(id).map_err(wire::unreachable)?;
    let unfinished = UnfinishedSnapshot { session: &session, route: route.to_wire(pending.id()) };
    send_chunks(route, &unfinished, &vote, &snapshot).await?;
    let result = received(pending.await)?;
    drop(unfinished);
    match result {
        UnaryResult::Snapshot(vote) => {
            wire::read_vote(Some(vote)).map(SnapshotResponse::new).map_err(wire::network)
        }
        other => Err(unexpected(&other)),
    }
}

async fn send_chunks(
    route: &ReplicaRoute,
    sending: &UnfinishedSnapshot<'_>,
    vote: &Vote,
    snapshot: &RaftSnapshot,
) -> Result<(), RpcError> {
    let mut rest = snapshot.snapshot.clone();
    let (total_bytes, crc32) = (rest.len() as u64, crc32fast::hash(&rest));
    let mut offset = 0;
    loop {
        route.table.throttle.wait().await;
        let data = rest.copy_to_bytes(rest.len().min(CHUNK_BYTES));
        let sent = data.len() as u64;
        route.table.throttle.spend(sent);
        let chunk = pb::SnapshotChunk {
            route: Some(sending.route),
            vote: Some(wire::vote(vote)),
            last: snapshot.meta.last_log_id.as_ref().map(wire::log_id),
            total_bytes,
            crc32,
            offset,
            data,
        };
        sending.session.send(Message::Chunk(chunk)).map_err(wire::network)?;
        offset += sent;
        if rest.is_empty() {
            return Ok(());
        }
    }
}

/// Sends [`pb::Ending`] on drop, so that the receiver discards an abandoned snapshot.
struct UnfinishedSnapshot<'a> {
    session: &'a PeerSession,
    route: pb::Route,
}

impl Drop for UnfinishedSnapshot<'_> {
    fn drop(&mut self) {
        let ending = pb::Ending { route: Some(self.route) };
        // Ignored: a lost connection ends the snapshot too.
        let _ = self.session.send(Message::Ending(ending));
    }
}
