//! The replica from which records are fetched, over the catch-up lane. Requests are repeated after
//! a lost connection.

use std::sync::Arc;

use helix_proto::raft::v1 as pb;
use pb::answer::Result as UnaryResult;
use pb::exchange_request::Message;
use pb::question::Question as UnaryRequest;
use tokio::time::sleep;

use crate::peer::connection::lane::PeerLane;
use crate::peer::limits::{FETCH_PAUSE, RECORDS_BYTES};
use crate::peer::table::PeerTable;
use crate::raft::{ReplicaId, node_of};

/// Fetches records from the replica that sent a snapshot.
pub(super) struct RecordSource<'a> {
    table: &'a Arc<PeerTable>,
    shard_id: u64,
    ours: ReplicaId,
    theirs: ReplicaId,
}

/// Reason why a request for records has no response.
enum FetchError {
    /// The next connection may bring one.
    Lost(String),
    Refused(String),
}

impl<'a> RecordSource<'a> {
    /// Creates a source from the route of the snapshot.
    pub(super) fn new(table: &'a Arc<PeerTable>, from: &pb::Route) -> Self {
        let pb::Route { shard_id, source_replica, target_replica, .. } = *from;
        Self { table, shard_id, ours: target_replica, theirs: source_replica }
    }

    pub(super) fn node(&self) -> u64 {
        node_of(self.theirs)
    }

    /// Fetches the next live entries above `after`, up to `upto`.
    /// Retries until there is a response, and passes the reason of each retry to `on_wait`.
    pub(super) async fn fetch(
        &self,
        after: u64,
        upto: u64,
        on_wait: &(dyn Fn(&str) + Sync),
    ) -> Result<pb::Records, String> {
        loop {
            match self.fetch_once(after, upto).await {
                Ok(records) => return Ok(records),
                Err(FetchError::Refused(why)) => return Err(why),
                Err(FetchError::Lost(why)) => {
                    on_wait(&why);
                    sleep(FETCH_PAUSE).await;
                }
            }
        }
    }

    async fn fetch_once(&self, after: u64, upto: u64) -> Result<pb::Records, FetchError> {
        let node = self.node();
        let unknown = || FetchError::Refused(format!("node {node} is not one of the peers"));
        let peer = self.table.peer(node).ok_or_else(unknown)?;
        let lost = |why: &dyn ToString| FetchError::Lost(why.to_string());
        let session = peer.session(PeerLane::CatchUp).map_err(|why| lost(&why))?;
        let id = self.table.local.next_id();
        let pending = session.expect_response(id).map_err(|why| lost(&why))?;
        let route = pb::Route {
            shard_id: self.shard_id,
            source_replica: self.ours,
            target_replica: self.theirs,
            id: pending.id(),
        };
        let request = pb::RecordsRequest { after, upto, bytes_max: RECORDS_BYTES as u64 };
        let request = Some(UnaryRequest::Records(request));
        let message = Message::Question(pb::Question { route: Some(route), question: request });
        session.send(message).map_err(|why| lost(&why))?;
        match pending.await.map_err(|why| lost(&why))? {
            UnaryResult::Records(records) => Ok(records),
            UnaryResult::Failure(failure) => {
                Err(FetchError::Refused(format!("node {node}: {}", failure.text)))
            }
            other => Err(FetchError::Refused(format!(
                "node {node} sent an unexpected kind of response: {other:?}"
            ))),
        }
    }
}
