//! Encodes Raft values for the WAL: entry heads, votes, memberships and checkpoints.
//! Everything from disk is checked, and an unknown kind is an error.

use std::collections::BTreeSet;
use std::io;

use bytes::{BufMut, Bytes, BytesMut};
use openraft::{EntryPayload, Membership};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint};

use super::types::{Command, RaftEntry, RaftLogId, ReplicaId, StoredMembership, TypeConfig, Vote};
use crate::log::Head;
use crate::records::{CheckpointRecord, LogIdRecord, MembershipRecord, VoterSet};

// Kinds of entries: the first byte of a head in the WAL.
const BLANK: u8 = 0;
const MEMBERSHIP: u8 = 1;
const COMMAND: u8 = 2;

/// Number of the last field of a `CheckpointRecord`, the state of the machine.
const MACHINE_FIELD: u32 = 3;

pub(crate) fn damaged(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

pub(crate) fn wal_id(id: &RaftLogId) -> helix_wal::LogId {
    helix_wal::LogId { term: **id.committed_leader_id(), index: id.index }
}

pub(crate) fn raft_id(id: helix_wal::LogId) -> RaftLogId {
    RaftLogId::new(openraft::alias::CommittedLeaderIdOf::<TypeConfig>::from(id.term), id.index)
}

/// Encodes an entry for the WAL.
pub(crate) fn to_wal(entry: &RaftEntry) -> helix_wal::Entry {
    let (stream, head, payload) = match &entry.payload {
        EntryPayload::Blank => (0, Bytes::from_static(&[BLANK]), helix_wal::Payload::default()),
        EntryPayload::Membership(membership) => {
            let mut head = BytesMut::new();
            head.put_u8(MEMBERSHIP);
            MembershipRecord::from(membership).encode(&mut head).expect("BytesMut grows");
            (0, head.freeze(), helix_wal::Payload::default())
        }
        EntryPayload::Normal(command) => {
            (command.head.stream(), encode_head(&command.head), command.payload.clone())
        }
    };
    helix_wal::Entry { id: wal_id(&entry.log_id), stream, head, payload }
}

/// Decodes an entry that [`to_wal`] encoded.
pub(crate) fn from_wal(entry: helix_wal::Entry) -> io::Result<RaftEntry> {
    let id = raft_id(entry.id);
    let broken = |what: &str| damaged(format!("head of entry {} in the log: {what}", id.index));
    let (&kind, rest) = entry.head.split_first().ok_or_else(|| broken("empty"))?;
    let payload = match kind {
        BLANK => EntryPayload::Blank,
        MEMBERSHIP => {
            let record = MembershipRecord::decode(rest).map_err(|e| broken(&e.to_string()))?;
            EntryPayload::Membership(record.into_membership()?)
        }
        COMMAND => {
            let head = Head::decode(rest).map_err(|e| broken(&e.to_string()))?;
            EntryPayload::Normal(Command { head, payload: entry.payload, guard: None })
        }
        other => return Err(broken(&format!("kind {other} is unknown to this version"))),
    };
    Ok(RaftEntry { log_id: id, payload })
}

/// Encodes the head of a command for the WAL.
pub fn encode_head(head: &Head) -> Bytes {
    let mut bytes = BytesMut::with_capacity(96);
    bytes.put_u8(COMMAND);
    head.encode_to(&mut bytes);
    bytes.freeze()
}

/// Decodes the head of a command in a stored entry.
///
/// # Errors
/// Fails where the bytes are not the head of a command.
pub fn decode_head(bytes: &[u8]) -> io::Result<Head> {
    match bytes.split_first() {
        Some((&COMMAND, rest)) => Head::decode(rest).map_err(damaged),
        _ => Err(damaged("a stored record's entry is not a command")),
    }
}

pub(crate) fn encode_vote(vote: &Vote) -> Bytes {
    let mut bytes = BytesMut::with_capacity(17);
    bytes.put_u64_le(vote.leader_id.term);
    bytes.put_u64_le(vote.leader_id.voted_for);
    bytes.put_u8(u8::from(vote.committed));
    bytes.freeze()
}

pub(crate) fn decode_vote(bytes: &[u8]) -> io::Result<Vote> {
    let bytes: &[u8; 17] = bytes.try_into().map_err(|_| damaged("vote does not have 17 bytes"))?;
    let number = |at: usize| {
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes within seventeen"))
    };
    let committed = match bytes[16] {
        0 => false,
        1 => true,
        other => return Err(damaged(format!("vote has an unknown flag {other}"))),
    };
    let leader_id =
        openraft::impls::leader_id_std::LeaderId { term: number(0), voted_for: number(8) };
    Ok(Vote { leader_id, committed })
}

/// Returns a stored vote as not committed: without the flag that its candidate was elected.
///
/// It binds as much. A replica with an empty log that found its own vote committed would take
/// itself for the leader.
pub(crate) fn as_uncommitted_vote(vote: &[u8]) -> io::Result<Bytes> {
    Ok(encode_vote(&Vote { committed: false, ..decode_vote(vote)? }))
}

/// Returns the vote of a new replica whose log begins in `term`, in place of the vote that it has;
/// `None` if that one is later.
///
/// It names no candidate, so no replica is elected in that term, in which the log has entries.
pub(crate) fn initial_vote(term: u64, known: Option<&[u8]>) -> io::Result<Option<Bytes>> {
    let known = known.map(decode_vote).transpose()?;
    if known.is_some_and(|known| known.leader_id.term >= term) {
        return Ok(None);
    }
    let leader_id = openraft::impls::leader_id_std::LeaderId { term, voted_for: 0 };
    Ok(Some(encode_vote(&Vote { leader_id, committed: false })))
}

/// Returns the checkpoint with which a shard of these voters begins after entry `at`.
pub(crate) fn initial_checkpoint(
    at: helix_wal::LogId,
    voters: BTreeSet<ReplicaId>,
    machine: Bytes,
) -> io::Result<Bytes> {
    let membership = Membership::new(vec![voters.clone()], voters).map_err(damaged)?;
    let membership = StoredMembership::new(Some(raft_id(at)), membership);
    Ok(encode_checkpoint(&membership, machine))
}

impl From<&Membership<ReplicaId, ()>> for MembershipRecord {
    fn from(membership: &Membership<ReplicaId, ()>) -> Self {
        let configs = membership.get_joint_config().iter();
        Self {
            configs: configs
                .map(|set| VoterSet { voters: set.iter().copied().collect() })
                .collect(),
            nodes: membership.nodes().map(|(id, ())| *id).collect(),
        }
    }
}

impl MembershipRecord {
    fn into_membership(self) -> io::Result<Membership<ReplicaId, ()>> {
        let configs: Vec<BTreeSet<u64>> =
            self.configs.into_iter().map(|set| set.voters.into_iter().collect()).collect();
        if configs.is_empty() && self.nodes.is_empty() {
            return Ok(Membership::default());
        }
        let nodes: BTreeSet<u64> = self.nodes.into_iter().collect();
        Membership::new(configs, nodes).map_err(|e| damaged(format!("membership: {e}")))
    }
}

/// Encodes a checkpoint. The state may be large, so its buffer is used if nothing else has it.
pub(crate) fn encode_checkpoint(membership: &StoredMembership, machine: Bytes) -> Bytes {
    let at = membership.log_id().as_ref().map(wal_id);
    let record = CheckpointRecord {
        membership_at: at.map(|id| LogIdRecord { term: id.term, index: id.index }),
        membership: Some(MembershipRecord::from(membership.membership())),
        machine: Bytes::new(),
    };
    let mut head = record.encode_to_vec();
    if !machine.is_empty() {
        encode_key(MACHINE_FIELD, WireType::LengthDelimited, &mut head);
        encode_varint(machine.len() as u64, &mut head);
    }
    if !machine.is_unique() {
        // One copy, into a buffer that does not grow a second time.
        head.reserve_exact(machine.len());
        head.extend_from_slice(&machine);
        return head.into();
    }
    let mut bytes = Vec::from(machine);
    bytes.reserve_exact(head.len());
    drop(bytes.splice(0..0, head));
    bytes.into()
}

pub(crate) fn decode_checkpoint(bytes: Bytes) -> io::Result<(StoredMembership, Bytes)> {
    let record =
        CheckpointRecord::decode(bytes).map_err(|e| damaged(format!("checkpoint: {e}")))?;
    let at =
        record.membership_at.map(|id| raft_id(helix_wal::LogId { term: id.term, index: id.index }));
    let membership = match record.membership {
        Some(membership) => membership.into_membership()?,
        None => Membership::default(),
    };
    Ok((StoredMembership::new(at, membership), record.machine))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoint_has_the_bytes_of_its_record() {
        for len in [0, 1, 200, 70_000] {
            let machine = Bytes::from(vec![7; len]);
            // The first one is shared.
            for state in [machine.clone(), Bytes::from(vec![7; len])] {
                let bytes = encode_checkpoint(&StoredMembership::default(), state);
                let record = CheckpointRecord::decode(bytes.clone()).unwrap();
                assert_eq!(record.machine, machine);
                assert_eq!(record.encode_to_vec(), bytes);
            }
        }
    }

    #[test]
    fn checkpoint_uses_the_buffer_of_the_state() {
        let mut state = Vec::with_capacity(1000);
        state.resize(800, 7_u8);
        let at = state.as_ptr();
        let bytes = encode_checkpoint(&StoredMembership::default(), state.into());
        assert_eq!(bytes.as_ptr(), at);
    }
}
