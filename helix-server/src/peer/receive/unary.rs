//! Answers unary requests of peers: heartbeats, votes, leadership transfers and records; and
//! installs snapshots. Invalid requests are refused before openraft sees them.

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use helix_proto::raft::v1 as pb;
use helix_wal::Wal;
use openraft::async_runtime::WatchReceiver;
use openraft::raft::AppendEntriesResponse;
use pb::answer::Result as UnaryResult;
use pb::question::Question as UnaryRequest;
use tokio::sync::oneshot;

use super::epoch::IN_REPAIR;
use crate::peer::served::{HeldLog, ServedReplica, ShardRaft};
use crate::peer::snapshot::assembly::ReceivedSnapshot;
use crate::peer::snapshot::records;
use crate::peer::table::PeerTable;
use crate::peer::wire::{self, WireError};
use crate::raft::{RaftLogId, RepairGuard, Vote, decode_checkpoint};

pub(super) type UnaryResponseFuture = BoxFuture<'static, pb::Answer>;

fn respond_with<F>(id: u64, future: F) -> UnaryResponseFuture
where
    F: Future<Output = Result<UnaryResult, String>> + Send + 'static,
{
    async move {
        let failure = |why| UnaryResult::Failure(wire::failure(why, true));
        let result = future.await.unwrap_or_else(failure);
        pb::Answer { id, result: Some(result) }
    }
    .boxed()
}

/// Returns the future response to a request.
///
/// # Errors
/// Returns an error if the request is invalid.
pub(super) fn respond(
    table: &Arc<PeerTable>,
    route: &pb::Route,
    served: &ServedReplica,
    request: Option<UnaryRequest>,
) -> Result<UnaryResponseFuture, WireError> {
    let (id, source, raft) = (route.id, route.source_replica, served.raft.clone());
    let request = request.ok_or(WireError::Missing { what: "the content of a request" })?;
    if !is_admitted(&served.repair_guard, &request) {
        return Ok(respond_with(id, async { Err(IN_REPAIR.to_owned()) }));
    }
    Ok(match request {
        UnaryRequest::Beat(beat) => {
            let request = wire::read_append(beat, source)?;
            if !request.entries.is_empty() {
                return Err(WireError::HeartbeatWithEntries);
            }
            let fetcher = served.fetcher.clone();
            respond_with(id, async move {
                let previous = request.prev_log_id;
                let _permit = match &fetcher {
                    Some(fetcher) => Some(fetcher.append_permit().await),
                    None => None,
                };
                let response = raft.append_entries(request).await.map_err(|e| e.to_string())?;
                let conflict = previous.as_ref().map(wire::log_id);
                Ok(match response {
                    AppendEntriesResponse::Success => {
                        UnaryResult::Matched(wire::matched(previous.as_ref()))
                    }
                    AppendEntriesResponse::PartialSuccess(last) => {
                        UnaryResult::Matched(wire::matched(last.as_ref()))
                    }
                    AppendEntriesResponse::Conflict => UnaryResult::Conflict(
                        conflict.ok_or("openraft reported a conflict without a previous entry")?,
                    ),
                    AppendEntriesResponse::HigherVote(vote) => {
                        UnaryResult::HigherVote(wire::vote(&vote))
                    }
                })
            })
        }
        UnaryRequest::Vote(request) => {
            let request = wire::read_vote_request(request, source)?;
            respond_with(id, async move {
                let response = raft.vote(request).await.map_err(|error| error.to_string())?;
                Ok(UnaryResult::Vote(wire::vote_response(&response)))
            })
        }
        UnaryRequest::PreVote(request) => {
            let request = wire::read_vote_request(request, source)?;
            let (last, outranked) = (request.last_log_id, served.outranked.clone());
            respond_with(id, async move {
                let response = raft.pre_vote(request).await.map_err(|error| error.to_string())?;
                if !response.vote_granted && response.last_log_id > last {
                    outranked.notify_waiters();
                }
                Ok(UnaryResult::Vote(wire::vote_response(&response)))
            })
        }
        UnaryRequest::Transfer(request) => {
            let request = wire::read_transfer_request(request, source)?;
            respond_with(id, async move {
                let response = raft.handle_transfer_leader(request).await;
                let response = response.map_err(|error| error.to_string())?;
                Ok(UnaryResult::Transfer(wire::transfer_response(&response)))
            })
        }
        UnaryRequest::Records(request) => {
            let (fetcher, table) = (served.fetcher.clone(), table.clone());
            if request.with_all_entries {
                let (wal, reads) = (served.wal.clone(), served.reads.clone());
                return Ok(respond_with(id, async move {
                    let records = records::read_all(&wal, &reads, &table.throttle, request);
                    records.await.map(UnaryResult::Records)
                }));
            }
            respond_with(id, async move {
                let store = fetcher.as_ref().map(|fetcher| &fetcher.store);
                let store = store.ok_or("the shard has no records")?;
                let records = records::read(&raft, store, &table.throttle, request);
                records.await.map(UnaryResult::Records)
            })
        }
    })
}

/// Returns the future response to a request for records of a log whose replica does not run.
pub(super) fn respond_from(
    table: &Arc<PeerTable>,
    id: u64,
    log: HeldLog,
    request: pb::RecordsRequest,
) -> UnaryResponseFuture {
    let table = table.clone();
    respond_with(id, async move {
        let HeldLog { wal, reads, .. } = log;
        let records = match request.with_all_entries {
            true => records::read_all(&wal, &reads, &table.throttle, request).await,
            // The log refuses a range beyond what was applied before its replica stopped.
            false => records::read_live(&wal, &reads, &table.throttle, request).await,
        };
        records.map(UnaryResult::Records)
    })
}

/// Returns `true` if the repair guard admits a request.
/// A replica that may lack acknowledged entries does not vote, but serves the records that it has.
fn is_admitted(repair_guard: &RepairGuard, request: &UnaryRequest) -> bool {
    match request {
        UnaryRequest::Beat(beat) => repair_guard.accepts(beat.vote.map_or(0, |vote| vote.term)),
        UnaryRequest::Vote(_) | UnaryRequest::PreVote(_) | UnaryRequest::Transfer(_) => {
            repair_guard.is_open()
        }
        UnaryRequest::Records(_) => true,
    }
}

/// Installs a snapshot. Returns the future response to its sender.
pub(super) fn install(
    table: &Arc<PeerTable>,
    route: pb::Route,
    served: &ServedReplica,
    received: ReceivedSnapshot,
) -> UnaryResponseFuture {
    let id = route.id;
    if !served.repair_guard.accepts(received.vote.leader_id.term) {
        return respond_with(id, async { Err(IN_REPAIR.to_owned()) });
    }
    // openraft stops if it cannot install a snapshot.
    let read = decode_checkpoint(received.snapshot.snapshot.clone());
    if let Err(error) = read.and_then(|(_, machine)| served.machine.check(&machine)) {
        let why = format!("cannot read the snapshot: {error}");
        return respond_with(id, async { Err(why) });
    }
    let (raft, wal) = (served.raft.clone(), served.wal.clone());
    let (vote, last) = (received.vote, received.snapshot.meta.last_log_id);
    let installing = match &served.fetcher {
        Some(fetcher) => {
            let (fetcher, stopped) = (fetcher.clone(), served.stopped.clone());
            fetcher.install(table.clone(), raft.clone(), stopped, route, received).boxed()
        }
        None => install_without_records(raft.clone(), received).boxed(),
    };
    respond_with(id, async move {
        let own = installing.await?;
        if own == vote {
            until_durable(&raft, &wal, last).await?;
        }
        Ok(UnaryResult::Snapshot(wire::vote(&own)))
    })
}

/// Passes a snapshot to openraft. Returns the replica's vote.
async fn install_without_records(
    raft: ShardRaft,
    received: ReceivedSnapshot,
) -> Result<Vote, String> {
    let ReceivedSnapshot { vote, snapshot } = received;
    // openraft panics on two entries at one committed index.
    let last = snapshot.meta.last_log_id;
    let committed = raft.data_metrics().borrow_watched().local_committed;
    let index = |id: Option<RaftLogId>| id.map(|id| id.index);
    if last > committed && index(last) <= index(committed) {
        return Err("the snapshot contradicts entries that are committed here".to_owned());
    }
    let response = raft.install_full_snapshot(vote, snapshot).await;
    Ok(response.map_err(|error| error.to_string())?.vote)
}

/// Waits until the replica has every entry up to `last` on its disk.
///
/// The leader counts a response to a snapshot as a match up to its last entry. But openraft
/// responds at once if it has accepted those entries already, even if they are not synced yet. A
/// crash would then move the log back, and the leader panics when it sees that.
async fn until_durable(raft: &ShardRaft, wal: &Wal, last: Option<RaftLogId>) -> Result<(), String> {
    // An applied entry is in an installed snapshot, or it was given to the log before.
    let applied = raft.watch_apply_progress().wait_until_ge(&last).await;
    applied.map_err(|_| "the replica stopped".to_owned())?;
    let (sender, synced) = oneshot::channel();
    // Ignored: the sender of the snapshot may have closed its stream.
    wal.sync(Box::new(move |result| drop(sender.send(result))));
    let synced = synced.await.map_err(|_| "the log was closed".to_owned())?;
    synced.map_err(|error| error.to_string())
}
