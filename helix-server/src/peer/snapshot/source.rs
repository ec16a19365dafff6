//! The replicas from which records are fetched, over the catch-up lane. A request goes to another
//! replica after a refusal, a lost connection or a long wait.
//!
//! Any voter may serve a range that it has applied, which it checks (`records::read`). Committed
//! entries are equal everywhere, and the receiver checks each one (`records::read_live_entry`): the
//! checksums of head and payload, and the placement against the head. What compaction by key has
//! removed from one replica only is covered by `compacted_upto` of each response.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use helix_proto::raft::v1 as pb;
use pb::answer::Result as UnaryResult;
use pb::exchange_request::Message;
use pb::question::Question as UnaryRequest;
use tokio::time::{sleep, timeout};

use super::records::records_bytes;
use crate::peer::connection::lane::PeerLane;
use crate::peer::limits::{FETCH_PAUSE, RECORDS_BYTES, RECORDS_WAIT_MAX};
use crate::peer::table::PeerTable;
use crate::raft::{ReplicaId, node_of};

/// Fetches records of one shard from several replicas.
///
/// The replica that served the last range is asked for the next one, until it refuses: damage of a
/// source is local, and another replica has the range.
pub(super) struct RecordSource<'a> {
    table: &'a Arc<PeerTable>,
    shard_id: u64,
    ours: ReplicaId,
    theirs: Vec<ReplicaId>,
    /// Number of the replica that is asked first.
    current: AtomicUsize,
}

/// Reason why a request for records has no response.
enum FetchError {
    /// The next connection may bring one.
    Lost(String),
    Refused(String),
}

impl<'a> RecordSource<'a> {
    /// Creates a source from the route of a snapshot.
    pub(super) fn new(
        table: &'a Arc<PeerTable>,
        from: &pb::Route,
        voters: impl IntoIterator<Item = ReplicaId>,
    ) -> Self {
        let theirs = in_turn(from, voters);
        let pb::Route { shard_id, target_replica: ours, .. } = *from;
        Self { table, shard_id, ours, theirs, current: AtomicUsize::new(0) }
    }

    /// Returns the node that is asked first.
    pub(super) fn node(&self) -> u64 {
        self.theirs.get(self.current.load(Ordering::Relaxed)).map_or(0, |id| node_of(*id))
    }

    /// Fetches the next live entries above `after`, up to `upto`. Retries lost connections until
    /// there is a response, and passes the reason of each retry to `on_wait`.
    ///
    /// # Errors
    /// The reasons of all replicas if each of them refuses.
    pub(super) async fn fetch(
        &self,
        after: u64,
        upto: u64,
        on_wait: &(dyn Fn(&str) + Sync),
    ) -> Result<pb::Records, String> {
        loop {
            let (mut refusals, mut lost) = (Vec::new(), None);
            for _ in 0..self.theirs.len() {
                let at = self.current.load(Ordering::Relaxed);
                let Some(theirs) = self.theirs.get(at).copied() else { break };
                match self.fetch_once(theirs, after, upto).await {
                    Ok(records) => return Ok(records),
                    Err(FetchError::Refused(why)) => {
                        tracing::debug!(shard_id = self.shard_id, after, why, "fetch was refused");
                        refusals.push(why);
                    }
                    Err(FetchError::Lost(why)) => lost = Some(why),
                }
                self.current.store((at + 1) % self.theirs.len(), Ordering::Relaxed);
            }
            match lost {
                // A replica that cannot be reached now may have what the others refuse.
                Some(why) => {
                    on_wait(&why);
                    sleep(FETCH_PAUSE).await;
                }
                None => return Err(refusals.join("; ")),
            }
        }
    }

    async fn fetch_once(
        &self,
        theirs: ReplicaId,
        after: u64,
        upto: u64,
    ) -> Result<pb::Records, FetchError> {
        let request = live_request(after, upto);
        request_records(self.table, self.shard_id, self.ours, theirs, request).await
    }
}

/// Returns the replicas in the order in which they are asked.
///
/// The sender of the snapshot is the leader, which appends and replicates already, so the other
/// voters come first. Shards begin with different ones, so the copies to a node come from all.
fn in_turn(from: &pb::Route, voters: impl IntoIterator<Item = ReplicaId>) -> Vec<ReplicaId> {
    let pb::Route { shard_id, source_replica, target_replica, .. } = *from;
    let is_other =
        |id: &ReplicaId| *id != source_replica && node_of(*id) != node_of(target_replica);
    let others: BTreeSet<ReplicaId> = voters.into_iter().filter(is_other).collect();
    let mut replicas: Vec<_> = others.into_iter().collect();
    let turn = usize::try_from(shard_id).unwrap_or(0) % replicas.len().max(1);
    replicas.rotate_left(turn);
    replicas.push(source_replica);
    replicas
}

/// Sends one request for records and waits for its response. This node pays for the bytes too: it
/// writes them, beside the appends to its other shards.
async fn request_records(
    table: &PeerTable,
    shard_id: u64,
    ours: ReplicaId,
    theirs: ReplicaId,
    request: pb::RecordsRequest,
) -> Result<pb::Records, FetchError> {
    let node = node_of(theirs);
    let unknown = || FetchError::Refused(format!("node {node} is not one of the peers"));
    let peer = table.peer(node).ok_or_else(unknown)?;
    let lost = |why: &dyn ToString| FetchError::Lost(why.to_string());
    table.throttle.wait().await;
    let session = peer.session(PeerLane::CatchUp).map_err(|why| lost(&why))?;
    let id = table.local.next_id();
    let pending = session.expect_response(id).map_err(|why| lost(&why))?;
    let route =
        pb::Route { shard_id, source_replica: ours, target_replica: theirs, id: pending.id() };
    let request = Some(UnaryRequest::Records(request));
    let message = Message::Question(pb::Question { route: Some(route), question: request });
    session.send(message).map_err(|why| lost(&why))?;
    let waited = timeout(RECORDS_WAIT_MAX, pending).await;
    let response = waited
        .map_err(|_| lost(&format!("node {node} has not responded within {RECORDS_WAIT_MAX:?}")))?;
    match response.map_err(|why| lost(&why))? {
        UnaryResult::Records(records) => {
            table.throttle.spend(records_bytes(&records) as u64);
            Ok(records)
        }
        UnaryResult::Failure(failure) => {
            Err(FetchError::Refused(format!("node {node}: {}", failure.text)))
        }
        other => Err(FetchError::Refused(format!(
            "node {node} sent an unexpected kind of response: {other:?}"
        ))),
    }
}

/// Requests the live entries above `after`, up to `upto`.
fn live_request(after: u64, upto: u64) -> pb::RecordsRequest {
    let bytes_max = RECORDS_BYTES as u64;
    pb::RecordsRequest { after, upto, bytes_max, ..pb::RecordsRequest::default() }
}

/// Fetches entries of the range from one replica, also those without live records, for a repair in
/// place. The response may be partial, and leaves out what the replica no longer has.
///
/// # Errors
/// The reason of the refusal or of the lost connection.
pub(in crate::peer) async fn fetch_entries(
    table: &PeerTable,
    shard_id: u64,
    ours: ReplicaId,
    theirs: ReplicaId,
    range: RangeInclusive<u64>,
) -> Result<pb::Records, String> {
    let (first, upto) = range.into_inner();
    let request = pb::RecordsRequest {
        with_all_entries: true,
        from_first: first == 0,
        ..live_request(first.saturating_sub(1), upto)
    };
    fetch_one(table, shard_id, ours, theirs, request).await
}

/// Fetches the live entries of the range from one replica, as [`fetch_entries`].
pub(in crate::peer) async fn fetch_live(
    table: &PeerTable,
    shard_id: u64,
    ours: ReplicaId,
    theirs: ReplicaId,
    after: u64,
    upto: u64,
) -> Result<pb::Records, String> {
    fetch_one(table, shard_id, ours, theirs, live_request(after, upto)).await
}

async fn fetch_one(
    table: &PeerTable,
    shard_id: u64,
    ours: ReplicaId,
    theirs: ReplicaId,
    request: pb::RecordsRequest,
) -> Result<pb::Records, String> {
    match request_records(table, shard_id, ours, theirs, request).await {
        Ok(records) => Ok(records),
        Err(FetchError::Lost(why)) => Err(format!("node {}: {why}", node_of(theirs))),
        Err(FetchError::Refused(why)) => Err(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raft::replica_id;

    #[test]
    fn leader_is_asked_last_and_shards_begin_with_different_followers() {
        let on = |node| replica_id(node, 1);
        let route =
            |shard_id| pb::Route { shard_id, source_replica: on(2), target_replica: on(4), id: 9 };
        let nodes = |shard_id, voters: &[u64]| -> Vec<u64> {
            let voters = voters.iter().map(|node| on(*node));
            in_turn(&route(shard_id), voters).into_iter().map(node_of).collect()
        };
        assert_eq!(nodes(4, &[1, 2, 3, 4]), [1, 3, 2]);
        assert_eq!(nodes(5, &[1, 2, 3, 4]), [3, 1, 2]);
        assert_eq!(nodes(5, &[2]), [2]);
        assert_eq!(nodes(5, &[]), [2], "a leader that is about to leave");
    }
}
