//! The replica that records are fetched from: asked piece by piece over the catch-up lane, again
//! when a connection was lost.

use std::sync::Arc;

use helix_proto::raft::v1 as pb;
use pb::answer::Result as Answer;
use pb::exchange_request::Message;
use pb::question::Question;
use tokio::time::sleep;

use super::connection::Lane;
use super::hub::Roster;
use super::limits::{FETCH_PAUSE, RECORDS_BYTES};
use crate::raft::{ReplicaId, node_of};

pub(super) struct Source<'a> {
    roster: &'a Arc<Roster>,
    shard_id: u64,
    ours: ReplicaId,
    theirs: ReplicaId,
}

/// Why there is no answer.
enum Unanswered {
    /// It may come over the next connection.
    Lost(String),
    Refused(String),
}

impl<'a> Source<'a> {
    /// The replica that a message came from.
    pub(super) fn new(roster: &'a Arc<Roster>, from: &pb::Route) -> Self {
        let pb::Route { shard_id, source_replica, target_replica, .. } = *from;
        Self { roster, shard_id, ours: target_replica, theirs: source_replica }
    }

    pub(super) fn node(&self) -> u64 {
        node_of(self.theirs)
    }

    /// Some of the live entries above `after`, up to `upto`. Asks until it has an answer, and tells
    /// `waits` why there is none yet.
    pub(super) async fn ask(
        &self,
        after: u64,
        upto: u64,
        waits: &(dyn Fn(&str) + Sync),
    ) -> Result<pb::Records, String> {
        loop {
            match self.ask_once(after, upto).await {
                Ok(records) => return Ok(records),
                Err(Unanswered::Refused(why)) => return Err(why),
                Err(Unanswered::Lost(why)) => {
                    waits(&why);
                    sleep(FETCH_PAUSE).await;
                }
            }
        }
    }

    async fn ask_once(&self, after: u64, upto: u64) -> Result<pb::Records, Unanswered> {
        let node = self.node();
        let unknown = || Unanswered::Refused(format!("node {node} is not one of the peers"));
        let peer = self.roster.peer(node).ok_or_else(unknown)?;
        let lost = |why: &dyn ToString| Unanswered::Lost(why.to_string());
        let session = peer.session(Lane::CatchUp).map_err(|why| lost(&why))?;
        let expected = session.expect_answer(self.roster.next_id()).map_err(|why| lost(&why))?;
        let route = pb::Route {
            shard_id: self.shard_id,
            source_replica: self.ours,
            target_replica: self.theirs,
            id: expected.id(),
        };
        let request = pb::RecordsRequest { after, upto, bytes_max: RECORDS_BYTES as u64 };
        let question = Some(Question::Records(request));
        let question = Message::Question(pb::Question { route: Some(route), question });
        session.send(question).map_err(|why| lost(&why))?;
        match expected.await.map_err(|why| lost(&why))? {
            Answer::Records(records) => Ok(records),
            Answer::Failure(failure) => {
                Err(Unanswered::Refused(format!("node {node}: {}", failure.text)))
            }
            other => {
                Err(Unanswered::Refused(format!("node {node} answered something else: {other:?}")))
            }
        }
    }
}
