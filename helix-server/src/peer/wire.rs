//! Converts openraft's types to protobuf messages and back.
//! Incoming messages are checked here, since openraft trusts its peers.

use bytes::{BufMut, Bytes};
use helix_proto::raft::v1 as pb;
use openraft::EntryPayload;
use openraft::alias::SnapshotOf;
use openraft::errors::{RPCError, Unreachable};
use openraft::impls::leader_id_std::LeaderId;
use openraft::raft::{
    AppendEntriesRequest, StreamAppendError, StreamAppendResult, TransferLeaderError,
    TransferLeaderRequest, TransferLeaderResponse, VoteRequest, VoteResponse,
};

use super::limits::{ENTRY_COST, HEAD_BYTES_MAX, REQUEST_COST};
use crate::log::Head;
use crate::raft::{
    RaftEntry, RaftLogId, ReplicaId, SnapshotData, TypeConfig, Vote, from_wal, raft_id, to_wal,
    wal_id,
};

pub(super) type RaftSnapshot = SnapshotOf<TypeConfig, SnapshotData>;
pub(super) type AppendRequest = AppendEntriesRequest<TypeConfig>;
pub(super) type AppendResult = StreamAppendResult<TypeConfig>;
pub(super) type RpcError = RPCError<TypeConfig>;

/// Refusal by a node that has not formed or joined a cluster, after its name.
pub(super) const IN_NO_CLUSTER: &str = "is in no cluster yet";

/// Refusal by a node that has not opened a shard, or has closed it, after the shard's name.
pub(super) const NOT_OPEN: &str = "is not open here";

/// Returns true for refusals that are normal while nodes start or stop: the peer tries again.
pub(super) fn is_of_start_or_stop(why: &str) -> bool {
    [IN_NO_CLUSTER, NOT_OPEN].iter().any(|text| why.contains(text))
}

/// Reason why a message is rejected: a faulty sender, or corruption in transit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum WireError {
    #[error("{what} is missing")]
    Missing { what: &'static str },
    #[error("the vote has term 0")]
    TermZero,
    #[error("{what} {number} exceeds the limit of {NUMBER_MAX}")]
    Number { what: &'static str, number: u64 },
    #[error("vote for replica {voted_for} from replica {source_replica}")]
    ForeignVote { voted_for: ReplicaId, source_replica: ReplicaId },
    #[error("the vote is {} committed", if *.committed { "already" } else { "not" })]
    WrongVote { committed: bool },
    #[error("entry {index} of term {term} is out of order")]
    Order { term: u64, index: u64 },
    #[error("the head of entry {index} has {bytes} bytes; the limit is {HEAD_BYTES_MAX}")]
    HeadBytes { index: u64, bytes: usize },
    #[error("the head of entry {index} does not match its checksum")]
    HeadChecksum { index: u64 },
    #[error("the payload of entry {index} does not match its checksum")]
    PayloadChecksum { index: u64 },
    #[error("the payload of entry {index} does not have the length in its head")]
    Payload { index: u64 },
    #[error("{0}")]
    Head(String),
    #[error("heartbeat with entries")]
    HeartbeatWithEntries,
    #[error("the placement of entry {index} does not match its checksum")]
    PlacementChecksum { index: u64 },
    #[error("the placement of entry {index} does not match its head")]
    Placement { index: u64 },
}

pub(super) fn cluster_bytes(cluster: u128) -> Bytes {
    Bytes::copy_from_slice(&cluster.to_be_bytes())
}

pub(super) fn read_cluster(bytes: &[u8]) -> Option<u128> {
    bytes.try_into().ok().map(u128::from_be_bytes)
}

pub(super) fn log_id(id: &RaftLogId) -> pb::LogId {
    let id = wal_id(id);
    pb::LogId { term: id.term, index: id.index }
}

/// Largest term and index: openraft counts on from those that it receives, without a check.
const NUMBER_MAX: u64 = i64::MAX as u64;

fn check_number(what: &'static str, number: u64) -> Result<(), WireError> {
    if number > NUMBER_MAX { Err(WireError::Number { what, number }) } else { Ok(()) }
}

/// Decodes a log id. Only the entry that creates a shard, at index 0, has term 0.
pub(super) fn read_log_id(id: pb::LogId) -> Result<RaftLogId, WireError> {
    let pb::LogId { term, index } = id;
    check_number("term", term)?;
    check_number("index", index)?;
    if term == 0 && index > 0 {
        return Err(WireError::Order { term, index });
    }
    Ok(raft_id(helix_wal::LogId { term, index }))
}

pub(super) fn vote(vote: &Vote) -> pb::Vote {
    let LeaderId { term, voted_for } = vote.leader_id;
    pb::Vote { term, voted_for, committed: vote.committed }
}

pub(super) fn read_vote(vote: Option<pb::Vote>) -> Result<Vote, WireError> {
    let pb::Vote { term, voted_for, committed } =
        vote.ok_or(WireError::Missing { what: "a vote" })?;
    if term == 0 {
        return Err(WireError::TermZero);
    }
    check_number("term", term)?;
    Ok(Vote { leader_id: LeaderId { term, voted_for }, committed })
}

/// Decodes the vote of `source_replica` for itself, as a leader or as a candidate.
pub(super) fn read_own_vote(
    vote: Option<pb::Vote>,
    source_replica: ReplicaId,
    is_leader: bool,
) -> Result<Vote, WireError> {
    let vote = read_vote(vote)?;
    let voted_for = vote.leader_id.voted_for;
    if voted_for != source_replica {
        return Err(WireError::ForeignVote { voted_for, source_replica });
    }
    if vote.committed != is_leader {
        return Err(WireError::WrongVote { committed: vote.committed });
    }
    Ok(vote)
}

/// Returns the bytes for which a request counts in its window.
pub(super) fn cost(entries: &pb::AppendEntries) -> u64 {
    let entries = entries.entries.iter();
    entries.fold(REQUEST_COST, |sum, entry| {
        sum + ENTRY_COST + (entry.head.len() + entry.payload.len()) as u64
    })
}

pub(super) fn append_entries(request: &AppendRequest) -> pb::AppendEntries {
    pb::AppendEntries {
        vote: Some(vote(&request.vote)),
        previous: request.prev_log_id.as_ref().map(log_id),
        committed: request.leader_commit.as_ref().map(log_id),
        entries: request.entries.iter().map(entry).collect(),
    }
}

fn entry(entry: &RaftEntry) -> pb::Entry {
    wal_entry(to_wal(entry))
}

/// Encodes an entry in the form of the log.
pub(super) fn wal_entry(entry: helix_wal::Entry) -> pb::Entry {
    let helix_wal::Entry { id, head, payload, .. } = entry;
    let mut message = pb::Entry {
        id: Some(pb::LogId { term: id.term, index: id.index }),
        head,
        payload: payload.bytes,
        payload_crc32: payload.crc,
        payload_crc32_seed: payload.crc_seed,
        head_crc32: 0,
    };
    message.head_crc32 = head_crc(&message);
    message
}

/// Returns the CRC-32 of an entry without its payload.
fn head_crc(entry: &pb::Entry) -> u32 {
    let mut fixed = [0; 24];
    let id = entry.id.unwrap_or_default();
    let mut fields = &mut fixed[..];
    fields.put_u64_le(id.term);
    fields.put_u64_le(id.index);
    fields.put_u32_le(entry.payload_crc32);
    fields.put_u32_le(entry.payload_crc32_seed);
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&fixed);
    hasher.update(&entry.head);
    hasher.finalize()
}

/// Decodes a leader's append. Checks that its entries are contiguous and match their checksums.
pub(super) fn read_append(
    message: pb::AppendEntries,
    source_replica: ReplicaId,
) -> Result<AppendRequest, WireError> {
    let vote = read_own_vote(message.vote, source_replica, true)?;
    let prev_log_id = message.previous.map(read_log_id).transpose()?;
    let leader_commit = message.committed.map(read_log_id).transpose()?;
    for id in prev_log_id.iter().chain(&leader_commit) {
        let helix_wal::LogId { term, index } = wal_id(id);
        if term > vote.leader_id.term {
            return Err(WireError::Order { term, index });
        }
    }
    let mut last = prev_log_id.as_ref().map(wal_id);
    let mut entries = Vec::with_capacity(message.entries.len());
    for entry in message.entries {
        let entry = read_entry(entry)?;
        let id = wal_id(&entry.log_id);
        let follows = match last {
            None => id.index == 0,
            Some(last) => Some(id.index) == last.index.checked_add(1) && id.term >= last.term,
        };
        if !follows || id.term > vote.leader_id.term {
            return Err(WireError::Order { term: id.term, index: id.index });
        }
        last = Some(id);
        entries.push(entry);
    }
    Ok(AppendEntriesRequest { vote, prev_log_id, entries, leader_commit })
}

fn read_entry(message: pb::Entry) -> Result<RaftEntry, WireError> {
    let stored = read_wal_entry(message)?;
    let (index, payload_bytes) = (stored.id.index, stored.payload.bytes.len());
    let entry = from_wal(stored).map_err(|error| WireError::Head(error.to_string()))?;
    let expected = match &entry.payload {
        EntryPayload::Normal(command) => match &command.head {
            Head::Batch(batch) => batch.payload_bytes as usize,
            Head::Shard(_) | Head::Cluster(_) => 0,
        },
        EntryPayload::Blank | EntryPayload::Membership(_) => 0,
    };
    if payload_bytes != expected {
        return Err(WireError::Payload { index });
    }
    Ok(entry)
}

/// Decodes an entry in the form of the log. Checks its checksums.
pub(super) fn read_wal_entry(message: pb::Entry) -> Result<helix_wal::Entry, WireError> {
    let wire_id = message.id.ok_or(WireError::Missing { what: "the id of an entry" })?;
    let index = wire_id.index;
    let id = wal_id(&read_log_id(wire_id)?);
    if message.head.len() > HEAD_BYTES_MAX {
        return Err(WireError::HeadBytes { index, bytes: message.head.len() });
    }
    if message.head_crc32 != head_crc(&message) {
        return Err(WireError::HeadChecksum { index });
    }
    let payload = helix_wal::Payload {
        bytes: message.payload,
        crc: message.payload_crc32,
        crc_seed: message.payload_crc32_seed,
    };
    let mut hasher = crc32fast::Hasher::new_with_initial(payload.crc_seed);
    hasher.update(&payload.bytes);
    if hasher.finalize() != payload.crc {
        return Err(WireError::PayloadChecksum { index });
    }
    // The stream is part of the head. The log sets its own field when it stores the entry.
    Ok(helix_wal::Entry { id, stream: 0, head: message.head, payload })
}

pub(super) fn matched(last: Option<&RaftLogId>) -> pb::Matched {
    pb::Matched { last: last.map(log_id) }
}

pub(super) fn ack_result(result: &AppendResult) -> pb::ack::Result {
    match result {
        Ok(last) => pb::ack::Result::Matched(matched(last.as_ref())),
        Err(StreamAppendError::Conflict(id)) => pb::ack::Result::Conflict(log_id(id)),
        Err(StreamAppendError::HigherVote(higher)) => pb::ack::Result::HigherVote(vote(higher)),
    }
}

pub(super) fn read_matched(matched: pb::Matched) -> Result<AppendResult, WireError> {
    Ok(Ok(matched.last.map(read_log_id).transpose()?))
}

pub(super) fn read_conflict(id: pb::LogId) -> Result<AppendResult, WireError> {
    Ok(Err(StreamAppendError::Conflict(read_log_id(id)?)))
}

pub(super) fn read_higher_vote(vote: pb::Vote) -> Result<AppendResult, WireError> {
    Ok(Err(StreamAppendError::HigherVote(read_vote(Some(vote))?)))
}

pub(super) fn vote_request(request: &VoteRequest<TypeConfig>) -> pb::VoteRequest {
    pb::VoteRequest {
        vote: Some(vote(&request.vote)),
        last: request.last_log_id.as_ref().map(log_id),
        leadership_transfer: request.leadership_transfer,
    }
}

pub(super) fn read_vote_request(
    message: pb::VoteRequest,
    source_replica: ReplicaId,
) -> Result<VoteRequest<TypeConfig>, WireError> {
    let vote = read_own_vote(message.vote, source_replica, false)?;
    let last_log_id = message.last.map(read_log_id).transpose()?;
    Ok(VoteRequest { vote, last_log_id, leadership_transfer: message.leadership_transfer })
}

pub(super) fn vote_response(response: &VoteResponse<TypeConfig>) -> pb::VoteResponse {
    pb::VoteResponse {
        vote: Some(vote(&response.vote)),
        last: response.last_log_id.as_ref().map(log_id),
        granted: response.vote_granted,
    }
}

/// Decodes a vote response. A replica that never voted answers a pre-vote with term 0.
pub(super) fn read_vote_response(
    message: pb::VoteResponse,
) -> Result<VoteResponse<TypeConfig>, WireError> {
    let pb::Vote { term, voted_for, committed } =
        message.vote.ok_or(WireError::Missing { what: "a vote" })?;
    check_number("term", term)?;
    Ok(VoteResponse {
        vote: Vote { leader_id: LeaderId { term, voted_for }, committed },
        last_log_id: message.last.map(read_log_id).transpose()?,
        vote_granted: message.granted,
    })
}

pub(super) fn transfer_request(request: &TransferLeaderRequest<TypeConfig>) -> pb::TransferRequest {
    pb::TransferRequest {
        from_leader: Some(vote(request.from_leader())),
        to_replica: *request.to_node_id(),
        last: request.last_log_id().map(log_id),
    }
}

pub(super) fn read_transfer_request(
    message: pb::TransferRequest,
    source_replica: ReplicaId,
) -> Result<TransferLeaderRequest<TypeConfig>, WireError> {
    let from = read_own_vote(message.from_leader, source_replica, true)?;
    let last = message.last.map(read_log_id).transpose()?;
    Ok(TransferLeaderRequest::new(from, message.to_replica, last))
}

pub(super) fn transfer_response(
    response: &TransferLeaderResponse<TypeConfig>,
) -> pb::TransferResponse {
    use pb::transfer_response::Refusal;
    let refusal = response.as_ref().err().map(|error| match error {
        TransferLeaderError::VoteChanged { actual, .. } => Refusal::VoteChanged(vote(actual)),
        TransferLeaderError::LogNotFlushed { actual, .. } => {
            Refusal::LogNotFlushed(matched(actual.as_ref()))
        }
    });
    pb::TransferResponse { refusal }
}

/// Decodes the response to `request`, whose expectations a refusal repeats.
pub(super) fn read_transfer_response(
    message: pb::TransferResponse,
    request: &TransferLeaderRequest<TypeConfig>,
) -> Result<TransferLeaderResponse<TypeConfig>, WireError> {
    use pb::transfer_response::Refusal;
    Ok(match message.refusal {
        None => Ok(()),
        Some(Refusal::VoteChanged(actual)) => Err(TransferLeaderError::VoteChanged {
            expected: *request.from_leader(),
            actual: read_vote(Some(actual))?,
        }),
        Some(Refusal::LogNotFlushed(actual)) => Err(TransferLeaderError::LogNotFlushed {
            expected: request.last_log_id().copied(),
            actual: actual.last.map(read_log_id).transpose()?,
        }),
    })
}

pub(super) fn failure(text: impl Into<String>, back_off: bool) -> pb::Failure {
    pb::Failure { text: text.into(), back_off }
}

/// Returns an error after which openraft retries at once, a few times.
pub(super) fn network(text: impl ToString) -> RpcError {
    RPCError::Network(openraft::errors::NetworkError::from_string(text))
}

/// Returns an error after which openraft backs off.
pub(super) fn unreachable(text: impl ToString) -> RpcError {
    RPCError::Unreachable(Unreachable::from_string(text))
}

pub(super) fn failed(failure: pb::Failure) -> RpcError {
    if failure.back_off { unreachable(failure.text) } else { network(failure.text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_numbers_that_openraft_cannot_count_on_from() {
        for number in [NUMBER_MAX + 1, u64::MAX] {
            let is_rejected =
                |result| matches!(result, Err(WireError::Number { number: n, .. }) if n == number);
            assert!(is_rejected(read_log_id(pb::LogId { term: 1, index: number }).map(drop)));
            assert!(is_rejected(read_log_id(pb::LogId { term: number, index: 1 }).map(drop)));
            let vote = pb::Vote { term: number, voted_for: 1, committed: false };
            assert!(is_rejected(read_vote(Some(vote)).map(drop)));
            let response = pb::VoteResponse { vote: Some(vote), last: None, granted: false };
            assert!(is_rejected(read_vote_response(response).map(drop)));
        }
        let last = pb::LogId { term: NUMBER_MAX, index: NUMBER_MAX };
        assert_eq!(log_id(&read_log_id(last).unwrap()), last);
    }
}
