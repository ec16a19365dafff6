//! What openraft answers to a peer's questions: beats, votes, transfers, snapshots; and the log to
//! those for records. A question that makes no sense is refused before openraft sees it.

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use helix_proto::raft::v1 as pb;
use openraft::async_runtime::WatchReceiver;
use openraft::raft::AppendEntriesResponse;
use pb::answer::Result as Answer;
use pb::question::Question;

use super::follow::IN_REPAIR;
use super::hub::{Roster, Served};
use super::records;
use super::snapshot::Arrived;
use super::wire::{self, WireError};
use crate::raft::{Gate, decode_checkpoint};

type Answering = BoxFuture<'static, pb::Answer>;

fn answering<F>(id: u64, future: F) -> Answering
where
    F: Future<Output = Result<Answer, String>> + Send + 'static,
{
    async move {
        let result = future.await.unwrap_or_else(|why| Answer::Failure(wire::failure(why, true)));
        pb::Answer { id, result: Some(result) }
    }
    .boxed()
}

/// The answer to come.
pub(super) fn answer(
    roster: &Arc<Roster>,
    route: &pb::Route,
    served: &Served,
    question: Option<Question>,
) -> Result<Answering, WireError> {
    let (id, source, raft) = (route.id, route.source_replica, served.raft.clone());
    let question = question.ok_or(WireError::Missing { what: "a question" })?;
    if !is_let_in(&served.gate, &question) {
        return Ok(answering(id, async { Err(IN_REPAIR.to_owned()) }));
    }
    Ok(match question {
        Question::Beat(beat) => {
            let request = wire::read_append(beat, source)?;
            if !request.entries.is_empty() {
                return Err(WireError::BeatWithEntries);
            }
            let fetch = served.fetch.clone();
            answering(id, async move {
                let previous = request.prev_log_id;
                let _pass = match &fetch {
                    Some(fetch) => Some(fetch.pass().await),
                    None => None,
                };
                let response = raft.append_entries(request).await.map_err(|e| e.to_string())?;
                let conflict = previous.as_ref().map(wire::log_id);
                Ok(match response {
                    AppendEntriesResponse::Success => {
                        Answer::Matched(wire::matched(previous.as_ref()))
                    }
                    AppendEntriesResponse::PartialSuccess(last) => {
                        Answer::Matched(wire::matched(last.as_ref()))
                    }
                    AppendEntriesResponse::Conflict => {
                        Answer::Conflict(conflict.ok_or("a conflict with nothing")?)
                    }
                    AppendEntriesResponse::HigherVote(vote) => {
                        Answer::HigherVote(wire::vote(&vote))
                    }
                })
            })
        }
        Question::Vote(request) => {
            let request = wire::read_vote_request(request, source)?;
            answering(id, async move {
                let response = raft.vote(request).await.map_err(|error| error.to_string())?;
                Ok(Answer::Vote(wire::vote_response(&response)))
            })
        }
        Question::PreVote(request) => {
            let request = wire::read_vote_request(request, source)?;
            answering(id, async move {
                let response = raft.pre_vote(request).await.map_err(|error| error.to_string())?;
                Ok(Answer::Vote(wire::vote_response(&response)))
            })
        }
        Question::Transfer(request) => {
            let request = wire::read_transfer_request(request, source)?;
            answering(id, async move {
                let response = raft.handle_transfer_leader(request).await;
                let response = response.map_err(|error| error.to_string())?;
                Ok(Answer::Transfer(wire::transfer_response(&response)))
            })
        }
        Question::Records(request) => {
            let (served, roster) = (served.clone(), roster.clone());
            answering(id, async move {
                let store = served.fetch.as_ref().map(|fetch| &fetch.store);
                let store = store.ok_or("the shard has no records")?;
                let read = records::read(&served, store, &roster.throttle, request);
                read.await.map(Answer::Records)
            })
        }
    })
}

/// A replica that may lack what it acknowledged has no say in who leads. Others may have of it what
/// it has.
fn is_let_in(gate: &Gate, question: &Question) -> bool {
    match question {
        Question::Beat(beat) => gate.lets_in(beat.vote.map_or(0, |vote| vote.term)),
        Question::Vote(_) | Question::PreVote(_) | Question::Transfer(_) => gate.is_open(),
        Question::Records(_) => true,
    }
}

/// The answer once the snapshot is installed.
pub(super) fn install(
    roster: &Arc<Roster>,
    route: pb::Route,
    served: &Served,
    arrived: Arrived,
) -> Answering {
    let id = route.id;
    if !served.gate.lets_in(arrived.vote.leader_id.term) {
        return answering(id, async { Err(IN_REPAIR.to_owned()) });
    }
    // What openraft fails to install ends it.
    let read = decode_checkpoint(arrived.snapshot.snapshot.clone());
    if let Err(error) = read.and_then(|(_, machine)| served.machine.check(&machine)) {
        let why = format!("the snapshot cannot be read here: {error}");
        return answering(id, async { Err(why) });
    }
    if let Some(fetch) = &served.fetch {
        let installing = fetch.clone().install(roster.clone(), served.clone(), route, arrived);
        return answering(id, async move { Ok(Answer::Snapshot(wire::vote(&installing.await?))) });
    }
    let raft = served.raft.clone();
    let Arrived { vote, snapshot } = arrived;
    answering(id, async move {
        // openraft takes two entries in one committed place for a broken promise, and panics.
        let last = snapshot.meta.last_log_id;
        let committed = raft.data_metrics().borrow_watched().local_committed;
        let place = |id: Option<crate::raft::LogId>| id.map(|id| id.index);
        if last > committed && place(last) <= place(committed) {
            return Err("the snapshot contradicts what is committed here".to_owned());
        }
        let response = raft.install_full_snapshot(vote, snapshot).await;
        let response = response.map_err(|error| error.to_string())?;
        Ok(Answer::Snapshot(wire::vote(&response.vote)))
    })
}
