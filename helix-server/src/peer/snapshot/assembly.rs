//! Assembles incoming snapshots from their chunks.

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use helix_proto::raft::v1 as pb;
use openraft::storage::{Snapshot, SnapshotMeta};

use crate::peer::limits::SNAPSHOT_BYTES_MAX;
use crate::peer::wire::{self, RaftSnapshot};
use crate::raft::{Vote, decode_checkpoint};

/// Reason why a chunk is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(in crate::peer) enum ChunkError {
    #[error("snapshot of {0} bytes exceeds the limit of {SNAPSHOT_BYTES_MAX}")]
    TooLarge(u64),
    #[error("snapshot chunk at byte {offset} instead of {expected}")]
    Order { offset: u64, expected: u64 },
    #[error("the snapshot does not match its checksum")]
    Checksum,
    #[error("{0}")]
    Content(String),
}

/// A complete and checked snapshot.
pub(in crate::peer) struct ReceivedSnapshot {
    pub(in crate::peer) vote: Vote,
    pub(in crate::peer) snapshot: RaftSnapshot,
}

/// The incomplete snapshots of one stream, at most one per shard.
#[derive(Default)]
pub(in crate::peer) struct SnapshotAssembly {
    partial: BTreeMap<u64, PartialSnapshot>,
}

struct PartialSnapshot {
    id: u64,
    bytes: BytesMut,
}

impl SnapshotAssembly {
    /// Adds a chunk of a snapshot for a local replica. Returns the snapshot once it is complete.
    /// An error discards it.
    pub(in crate::peer) fn add(
        &mut self,
        route: &pb::Route,
        chunk: pb::SnapshotChunk,
    ) -> Result<Option<ReceivedSnapshot>, ChunkError> {
        let added = self.add_bytes(route, &chunk);
        if !matches!(added, Ok(None)) {
            self.partial.remove(&route.shard_id);
        }
        match added? {
            Some(bytes) => check(route, &chunk, bytes).map(Some),
            None => Ok(None),
        }
    }

    /// Returns the bytes once they are complete.
    /// Allocates memory for received bytes only, not for the announced total.
    fn add_bytes(
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
            .or_insert_with(|| PartialSnapshot { id: route.id, bytes: BytesMut::new() });
        if partial.id != route.id {
            *partial = PartialSnapshot { id: route.id, bytes: BytesMut::new() };
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

    /// Discards a snapshot that its sender abandoned.
    pub(in crate::peer) fn discard(&mut self, route: &pb::Route) {
        if self.partial.get(&route.shard_id).is_some_and(|partial| partial.id == route.id) {
            self.partial.remove(&route.shard_id);
        }
    }
}

/// Checks a complete snapshot.
fn check(
    route: &pb::Route,
    chunk: &pb::SnapshotChunk,
    bytes: Bytes,
) -> Result<ReceivedSnapshot, ChunkError> {
    let content = |error: &dyn std::fmt::Display| ChunkError::Content(error.to_string());
    if crc32fast::hash(&bytes) != chunk.crc32 {
        return Err(ChunkError::Checksum);
    }
    let vote = wire::read_own_vote(chunk.vote, route.source_replica, true);
    let vote = vote.map_err(|error| content(&error))?;
    let last = chunk.last.ok_or_else(|| content(&"snapshot without a last entry"))?;
    // openraft panics on a snapshot of a term after its leader's.
    if last.term > vote.leader_id.term {
        return Err(content(&format!(
            "snapshot of term {} from a leader of term {}",
            last.term, vote.leader_id.term
        )));
    }
    let last = wire::read_log_id(last).map_err(|error| content(&error))?;
    let (last_membership, _) = decode_checkpoint(bytes.clone()).map_err(|e| content(&e))?;
    let meta = SnapshotMeta { last_log_id: Some(last), last_membership };
    Ok(ReceivedSnapshot { vote, snapshot: Snapshot { meta, snapshot: bytes } })
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

    fn add(assembly: &mut SnapshotAssembly, chunk: pb::SnapshotChunk) -> Result<bool, ChunkError> {
        let route = chunk.route.expect("set above");
        assembly.add(&route, chunk).map(|received| received.is_some())
    }

    #[test]
    fn rejects_chunks_out_of_order() {
        let mut assembly = SnapshotAssembly::default();
        assert_eq!(add(&mut assembly, chunk(1, 9, 0, b"abc")), Ok(false));
        let gap = ChunkError::Order { offset: 4, expected: 3 };
        assert_eq!(add(&mut assembly, chunk(1, 9, 4, b"efg")), Err(gap));
        let lost = ChunkError::Order { offset: 3, expected: 0 };
        assert_eq!(add(&mut assembly, chunk(1, 9, 3, b"def")), Err(lost));
    }

    #[test]
    fn newer_snapshot_replaces_incomplete_one() {
        let mut assembly = SnapshotAssembly::default();
        assert_eq!(add(&mut assembly, chunk(1, 9, 0, b"abc")), Ok(false));
        assert_eq!(add(&mut assembly, chunk(2, 9, 0, b"abc")), Ok(false));
        assert_eq!(assembly.partial[&0].bytes.len(), 3);
    }

    #[test]
    fn rejects_more_bytes_than_announced() {
        let mut assembly = SnapshotAssembly::default();
        let order = ChunkError::Order { offset: 0, expected: 0 };
        assert_eq!(add(&mut assembly, chunk(1, 2, 0, b"abc")), Err(order));
        let huge = SNAPSHOT_BYTES_MAX + 1;
        let too_large = ChunkError::TooLarge(huge);
        assert_eq!(add(&mut assembly, chunk(1, huge, 0, b"abc")), Err(too_large));
    }

    #[test]
    fn rejects_flipped_bit() {
        let mut assembly = SnapshotAssembly::default();
        let mut last = chunk(1, 3, 0, b"abc");
        last.crc32 = crc32fast::hash(b"abd");
        assert_eq!(add(&mut assembly, last), Err(ChunkError::Checksum));
        assert!(assembly.partial.is_empty());
    }
}
