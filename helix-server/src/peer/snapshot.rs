//! Snapshots, which are bookkeeping, in chunks over the catch-up lane. Those of shard 0 are all
//! there is to it; to one of a data shard the receiver fetches the records that it speaks of.

use std::collections::BTreeMap;

use bytes::{Buf, Bytes, BytesMut};
use helix_proto::raft::v1 as pb;
use openraft::alias::SnapshotOf;
use openraft::raft::SnapshotResponse;
use openraft::storage::{Snapshot, SnapshotMeta};
use pb::answer::Result as Answer;
use pb::exchange_request::Message;
use tokio::time::sleep_until;

use super::connection::Lane;
use super::limits::{CHUNK_BYTES, SNAPSHOT_BYTES_MAX};
use super::link::{Route, answered, unfitting};
use super::session::Session;
use super::wire::{self, RpcError};
use crate::raft::{SnapshotData, TypeConfig, Vote, decode_checkpoint};

pub(super) type WholeSnapshot = SnapshotOf<TypeConfig, SnapshotData>;

/// Sends a snapshot and waits until it is installed, or refused by a later vote: for as long as
/// the receiver fetches what it speaks of. With the connection it is lost, and sent again.
pub(super) async fn send(
    route: &Route,
    vote: Vote,
    snapshot: WholeSnapshot,
) -> Result<SnapshotResponse<TypeConfig>, RpcError> {
    let session = route.session(Lane::CatchUp)?;
    let expected = session.expect_answer(route.roster.next_id()).map_err(wire::unreachable)?;
    let unfinished = Unfinished { session: &session, route: route.to_wire(expected.id()) };
    send_chunks(route, &unfinished, &vote, &snapshot).await?;
    let answer = answered(expected.await)?;
    drop(unfinished);
    match answer {
        Answer::Snapshot(vote) => {
            wire::read_vote(Some(vote)).map(SnapshotResponse::new).map_err(wire::network)
        }
        other => Err(unfitting(&other)),
    }
}

async fn send_chunks(
    route: &Route,
    sending: &Unfinished<'_>,
    vote: &Vote,
    snapshot: &WholeSnapshot,
) -> Result<(), RpcError> {
    let mut rest = snapshot.snapshot.clone();
    let (total_bytes, crc32) = (rest.len() as u64, crc32fast::hash(&rest));
    let mut offset = 0;
    loop {
        while let Some(until) = route.roster.throttle.wait_until() {
            sleep_until(until).await;
        }
        let data = rest.copy_to_bytes(rest.len().min(CHUNK_BYTES));
        let sent = data.len() as u64;
        route.roster.throttle.spend(sent);
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

/// Lets the receiver forget what has come of a snapshot that is given up.
struct Unfinished<'a> {
    session: &'a Session,
    route: pb::Route,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        let ending = pb::Ending { route: Some(self.route) };
        // Ignored: with the connection the snapshot has ended too.
        let _ = self.session.send(Message::Ending(ending));
    }
}

/// Why a chunk is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ChunkError {
    #[error("a snapshot of {0} bytes is too large")]
    TooLarge(u64),
    #[error("a chunk out of order, at byte {offset} instead of {expected}")]
    Order { offset: u64, expected: u64 },
    #[error("the snapshot does not have its checksum")]
    Checksum,
    #[error("{0}")]
    Content(String),
}

/// A snapshot that is complete and can be installed.
pub(super) struct Arrived {
    pub(super) vote: Vote,
    pub(super) snapshot: WholeSnapshot,
}

/// What has come of the snapshots of one stream: at most one per shard.
#[derive(Default)]
pub(super) struct Assembly {
    partial: BTreeMap<u64, Partial>,
}

struct Partial {
    id: u64,
    bytes: BytesMut,
}

impl Assembly {
    /// Adds a chunk for the shard that `route` names, which is one that is answered for.
    pub(super) fn take(
        &mut self,
        route: &pb::Route,
        chunk: pb::SnapshotChunk,
    ) -> Result<Option<Arrived>, ChunkError> {
        let taken = self.add(route, &chunk);
        if !matches!(taken, Ok(None)) {
            self.partial.remove(&route.shard_id);
        }
        match taken? {
            Some(bytes) => whole(route, &chunk, bytes).map(Some),
            None => Ok(None),
        }
    }

    /// The bytes, once they are complete. What is allocated is what has come, never what was
    /// announced.
    fn add(
        &mut self,
        route: &pb::Route,
        chunk: &pb::SnapshotChunk,
    ) -> Result<Option<Bytes>, ChunkError> {
        if chunk.total_bytes > SNAPSHOT_BYTES_MAX {
            return Err(ChunkError::TooLarge(chunk.total_bytes));
        }
        let partial = self
            .partial
            .entry(route.shard_id)
            .or_insert_with(|| Partial { id: route.id, bytes: BytesMut::new() });
        if partial.id != route.id {
            *partial = Partial { id: route.id, bytes: BytesMut::new() };
        }
        let (offset, expected) = (chunk.offset, partial.bytes.len() as u64);
        let end = expected + chunk.data.len() as u64;
        let is_last = end == chunk.total_bytes;
        if offset != expected || end > chunk.total_bytes || (chunk.data.is_empty() && !is_last) {
            return Err(ChunkError::Order { offset, expected });
        }
        partial.bytes.extend_from_slice(&chunk.data);
        Ok(is_last.then(|| partial.bytes.split().freeze()))
    }

    /// Forgets a snapshot that its sender has given up.
    pub(super) fn forget(&mut self, route: &pb::Route) {
        if self.partial.get(&route.shard_id).is_some_and(|partial| partial.id == route.id) {
            self.partial.remove(&route.shard_id);
        }
    }
}

fn whole(
    route: &pb::Route,
    chunk: &pb::SnapshotChunk,
    bytes: Bytes,
) -> Result<Arrived, ChunkError> {
    let content = |error: &dyn std::fmt::Display| ChunkError::Content(error.to_string());
    if crc32fast::hash(&bytes) != chunk.crc32 {
        return Err(ChunkError::Checksum);
    }
    let vote = wire::read_own_vote(chunk.vote, route.source_replica, true);
    let vote = vote.map_err(|error| content(&error))?;
    let last = chunk.last.ok_or_else(|| content(&"a snapshot without a last entry"))?;
    // openraft takes a snapshot from beyond its leader's term for a broken promise, and panics.
    if last.term > vote.leader_id.term {
        return Err(content(&format!("a snapshot of term {} from before", last.term)));
    }
    let last = wire::read_log_id(last).map_err(|error| content(&error))?;
    let (last_membership, _) = decode_checkpoint(bytes.clone()).map_err(|e| content(&e))?;
    let meta = SnapshotMeta { last_log_id: Some(last), last_membership };
    Ok(Arrived { vote, snapshot: Snapshot { meta, snapshot: bytes } })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(id: u64, total_bytes: u64, offset: u64, data: &'static [u8]) -> pb::SnapshotChunk {
        let route = pb::Route { shard_id: 0, source_replica: 1 << 32, target_replica: 0, id };
        pb::SnapshotChunk {
            route: Some(route),
            total_bytes,
            offset,
            data: Bytes::from_static(data),
            ..Default::default()
        }
    }

    fn take(assembly: &mut Assembly, chunk: pb::SnapshotChunk) -> Result<bool, ChunkError> {
        let route = chunk.route.expect("set above");
        assembly.take(&route, chunk).map(|arrived| arrived.is_some())
    }

    #[test]
    fn chunks_have_to_follow_each_other() {
        let mut assembly = Assembly::default();
        assert_eq!(take(&mut assembly, chunk(1, 9, 0, b"abc")), Ok(false));
        let gap = ChunkError::Order { offset: 4, expected: 3 };
        assert_eq!(take(&mut assembly, chunk(1, 9, 4, b"efg")), Err(gap));
        let lost = ChunkError::Order { offset: 3, expected: 0 };
        assert_eq!(take(&mut assembly, chunk(1, 9, 3, b"def")), Err(lost));
    }

    #[test]
    fn a_newer_snapshot_takes_the_place_of_an_unfinished_one() {
        let mut assembly = Assembly::default();
        assert_eq!(take(&mut assembly, chunk(1, 9, 0, b"abc")), Ok(false));
        assert_eq!(take(&mut assembly, chunk(2, 9, 0, b"abc")), Ok(false));
        assert_eq!(assembly.partial[&0].bytes.len(), 3);
    }

    #[test]
    fn more_than_was_announced_is_refused() {
        let mut assembly = Assembly::default();
        let order = ChunkError::Order { offset: 0, expected: 0 };
        assert_eq!(take(&mut assembly, chunk(1, 2, 0, b"abc")), Err(order));
        let huge = SNAPSHOT_BYTES_MAX + 1;
        let too_large = ChunkError::TooLarge(huge);
        assert_eq!(take(&mut assembly, chunk(1, huge, 0, b"abc")), Err(too_large));
    }

    #[test]
    fn a_flipped_bit_is_found() {
        let mut assembly = Assembly::default();
        let mut last = chunk(1, 3, 0, b"abc");
        last.crc32 = crc32fast::hash(b"abd");
        assert_eq!(take(&mut assembly, last), Err(ChunkError::Checksum));
        assert!(assembly.partial.is_empty());
    }
}
