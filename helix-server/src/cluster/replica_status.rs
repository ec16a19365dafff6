//! Status of a replica, exchanged between nodes for repair. A node with a damaged replica asks the
//! other nodes about theirs and learns all that it must know before it takes part again.

use bytes::Bytes;

use super::client::Cluster;
use super::member_addresses::MemberAddresses;
use super::peer_messages::{
    EntryRange, PeerRequest, PeerResponse, ReplicaStatusReport, ReplicaStatusRequest,
};
use crate::limits;
use crate::peer::{HeldLog, Hub};
use crate::raft::{ElectionState, Replica, ReplicaId, ReplicaRole, decode_vote};

/// Asks a node for the status of its replica of a shard. `resetting_replica` is the replica of this
/// node if it has lost its log and starts again. Returns `None` if the node does not respond or
/// does not serve the shard.
pub async fn ask_replica_status(
    hub: &Hub,
    node: u64,
    shard_id: u64,
    resetting_replica: Option<ReplicaId>,
) -> Option<ReplicaStatusReport> {
    let resetting_replica = resetting_replica.unwrap_or_default();
    let request = ReplicaStatusRequest { shard_id, resetting_replica };
    let request = PeerRequest::ReplicaStatus(request).encode();
    let response = hub.call(node, request, limits::PROGRESS_WAIT_MAX).await;
    match response.map(PeerResponse::decode) {
        Ok(Ok(PeerResponse::ReplicaStatus(report))) => Some(report),
        Ok(Ok(_) | Err(_)) | Err(_) => None,
    }
}

/// Answers a request of another node while this node has no cluster state yet: only the status of
/// a log that cannot be replayed is known.
///
/// # Errors
/// The reason why there is no answer, as text for operators.
pub fn answer_without_node(hub: &Hub, request: Bytes) -> Result<Bytes, String> {
    let PeerRequest::ReplicaStatus(request) = PeerRequest::decode(request)? else {
        return Err("the node is not serving yet".to_owned());
    };
    let report = report_held(hub, request.shard_id);
    let report = report.ok_or("the node is not serving this shard yet")?;
    Ok(PeerResponse::ReplicaStatus(report).encode())
}

impl Cluster {
    /// As [`ask_replica_status`].
    pub async fn ask_replica_status(
        &self,
        node: u64,
        shard_id: u64,
        resetting_replica: Option<ReplicaId>,
    ) -> Option<ReplicaStatusReport> {
        ask_replica_status(&self.hub, node, shard_id, resetting_replica).await
    }

    pub(super) async fn local_replica_status(
        &self,
        request: &ReplicaStatusRequest,
    ) -> PeerResponse {
        let ReplicaStatusRequest { shard_id, resetting_replica } = *request;
        if shard_id == 0 {
            let addresses = Some(self.machine().read(MemberAddresses::of));
            return match report(&self.replica(), resetting_replica).await {
                Ok(report) => {
                    PeerResponse::ReplicaStatus(ReplicaStatusReport { addresses, ..report })
                }
                Err(why) => self.held_replica_status(shard_id, why),
            };
        }
        let report = match self.shard(shard_id) {
            Ok(shard) => report(shard.replica(), resetting_replica).await.map(|report| {
                let is_fetching = self.hub.fetching(shard_id).is_some();
                let (cleanup_index, behind) = shard.cleanup_report();
                let (not_clean, clean_offsets) = behind.into_iter().unzip();
                let blocked_partitions = shard.blocked_partitions();
                let cleaned =
                    ReplicaStatusReport { cleanup_index, not_clean, clean_offsets, ..report };
                ReplicaStatusReport { is_fetching, blocked_partitions, ..cleaned }
            }),
            Err(error) => Err(error.to_string()),
        };
        match report {
            Ok(report) => PeerResponse::ReplicaStatus(report),
            Err(why) => self.held_replica_status(shard_id, why),
        }
    }

    /// Returns the status of a log whose replica does not run, or the reason why it does not.
    fn held_replica_status(&self, shard_id: u64, why: String) -> PeerResponse {
        match report_held(&self.hub, shard_id) {
            Some(report) => PeerResponse::ReplicaStatus(report),
            None => PeerResponse::Unknown(why),
        }
    }
}

/// Reads the status of a log whose replica does not run: it is damaged and does not vote, but sends
/// entries to repairs. Its vote is durable, so its term is the one of its last vote.
fn report_held(hub: &Hub, shard_id: u64) -> Option<ReplicaStatusReport> {
    let HeldLog { replica_id, wal, reads, in_repair, vote_lost } = hub.held_log(shard_id)?;
    let state = wal.state();
    let vote = state.vote.map(|bytes| decode_vote(&bytes)).transpose().ok()?;
    let synced = state.synced.unwrap_or_default();
    let damage = reads.damage();
    let ranges = damage.iter().filter_map(|found| wal.entries_of_file(&found.file));
    Some(ReplicaStatusReport {
        term: vote.map_or(0, |vote| vote.leader_id.term),
        last_index: state.last.map_or(0, |id| id.index),
        is_damaged: true,
        in_repair,
        vote_lost,
        replica_id,
        synced_term: synced.term,
        synced_index: synced.index,
        damaged_ranges: ranges.map(|(first, last)| EntryRange { first, last }).collect(),
        ..ReplicaStatusReport::default()
    })
}

/// Reads the status of a replica of this node.
///
/// # Errors
/// The reason why the status is not available, as text for operators.
async fn report(
    replica: &Replica,
    resetting_replica: ReplicaId,
) -> Result<ReplicaStatusReport, String> {
    if let Some(why) = replica.stopped() {
        return Err(why);
    }
    if resetting_replica != 0 && replica.is_leader() {
        replica.allow_reset(resetting_replica).await;
    }
    // The last index is read after the reset is allowed. A leader's log only grows, so every entry
    // that the leader believes the asking replica to have is at or below this index.
    let Some(ElectionState { role, last_index }) = replica.election_state().await else {
        return Err("the replica is stopping".to_owned());
    };
    let ReplicaRole { term, is_leader, voters, is_settled } = role;
    let repair_of = replica.repair_of();
    let (wal, damage) = (replica.wal(), replica.found_damage());
    let synced = wal.state().synced.unwrap_or_default();
    let ranges = damage.iter().filter_map(|found| wal.entries_of_file(&found.file));
    Ok(ReplicaStatusReport {
        term,
        is_leader,
        last_index,
        voters: voters.into_iter().collect(),
        is_settled,
        in_repair: repair_of.is_some(),
        vote_lost: repair_of.is_some_and(|quarantined| quarantined.vote.is_none()),
        is_damaged: !damage.is_empty(),
        addresses: None,
        replica_id: replica.id(),
        synced_term: synced.term,
        synced_index: synced.index,
        applied_index: replica.applied(),
        is_fetching: false,
        cleanup_index: 0,
        not_clean: Vec::new(),
        clean_offsets: Vec::new(),
        blocked_partitions: 0,
        damaged_ranges: ranges.map(|(first, last)| EntryRange { first, last }).collect(),
        unwritable: replica.writable().err().map(|error| error.to_string()).unwrap_or_default(),
    })
}
