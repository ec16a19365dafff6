//! How a replica stands, as its node says it to one that has a damaged replica of the same shard:
//! all that this one has to know before it takes part again.

use prost::Message;

use super::calls::{Answer, Question};
use super::door::Cluster;
use super::whereabouts::Whereabouts;
use crate::limits;
use crate::raft::{Replica, ReplicaId, Role, Stance};

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(super) struct AskStanding {
    #[prost(uint64, tag = "1")]
    pub(super) shard_id: u64,
    /// The replica that asks, if it has lost what it acknowledged and will begin anew; else 0.
    #[prost(uint64, tag = "2")]
    pub(super) begins_anew: u64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct Standing {
    /// Of its vote.
    #[prost(uint64, tag = "1")]
    pub term: u64,
    #[prost(bool, tag = "2")]
    pub leads: bool,
    /// Index of the last entry in its log.
    #[prost(uint64, tag = "3")]
    pub last_index: u64,
    /// Replicas that vote, as far as it knows: also those that do only until a change of them is
    /// committed.
    #[prost(uint64, repeated, tag = "4")]
    pub voters: Vec<u64>,
    /// It is in repair itself, and does not vote.
    #[prost(bool, tag = "5")]
    pub in_repair: bool,
    /// It is in repair, and does not know what it has voted for: its term says nothing.
    #[prost(bool, tag = "6")]
    pub vote_lost: bool,
    /// It has damage that is not repaired.
    #[prost(bool, tag = "7")]
    pub is_damaged: bool,
    /// The voters do not change just now.
    #[prost(bool, tag = "8")]
    pub is_settled: bool,
    /// Where the members are: of shard 0, whose state says so.
    #[prost(message, optional, tag = "9")]
    pub whereabouts: Option<Whereabouts>,
}

impl Cluster {
    /// Asks a node how its replica of a shard stands; `begins_anew` is this node's replica, if it
    /// will begin anew. `None` where the node does not answer, or does not serve the shard.
    pub async fn ask_standing(
        &self,
        node: u64,
        shard_id: u64,
        begins_anew: Option<ReplicaId>,
    ) -> Option<Standing> {
        let asked = AskStanding { shard_id, begins_anew: begins_anew.unwrap_or_default() };
        let question = Question::Standing(asked).encode();
        let answer = self.hub.call(node, question, limits::PROGRESS_WAIT_MAX).await;
        match answer.map(Answer::decode) {
            Ok(Ok(Answer::Standing(standing))) => Some(standing),
            Ok(Ok(_) | Err(_)) | Err(_) => None,
        }
    }

    pub(super) async fn own_standing(&self, asked: &AskStanding) -> Answer {
        let AskStanding { shard_id, begins_anew } = *asked;
        if shard_id == 0 {
            let whereabouts = Some(self.machine().read(Whereabouts::of));
            return match standing(&self.replica(), begins_anew).await {
                Ok(standing) => Answer::Standing(Standing { whereabouts, ..standing }),
                Err(why) => Answer::Unknown(why),
            };
        }
        let standing = match self.shard(shard_id) {
            Ok(shard) => standing(shard.replica(), begins_anew).await,
            Err(error) => Err(error.to_string()),
        };
        standing.map_or_else(Answer::Unknown, Answer::Standing)
    }
}

/// # Errors
/// Why it cannot be said, for people.
async fn standing(replica: &Replica, begins_anew: ReplicaId) -> Result<Standing, String> {
    if let Some(why) = replica.stopped() {
        return Err(why);
    }
    if begins_anew != 0 && replica.leads() {
        replica.let_begin_anew(begins_anew).await;
    }
    // After that: a leader's log only grows, so nothing that it believes the other one to have lies
    // beyond what it ends with now.
    let Some(Stance { role, last_index }) = replica.stance().await else {
        return Err("it is being stopped".to_owned());
    };
    let Role { term, leads, voters, is_settled } = role;
    let repair_of = replica.repair_of();
    Ok(Standing {
        term,
        leads,
        last_index,
        voters: voters.into_iter().collect(),
        is_settled,
        in_repair: repair_of.is_some(),
        vote_lost: repair_of.is_some_and(|aside| aside.vote.is_none()),
        is_damaged: !replica.damage().is_empty(),
        whereabouts: None,
    })
}
