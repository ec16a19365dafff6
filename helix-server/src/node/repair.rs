//! Keeps the shards of a node going. One that has stopped is opened again. One whose log is damaged
//! gets a new log in place of it, which the others fill; until that has all that the old one had
//! acknowledged, the replica takes part in nothing that depends on it: it does not vote, and is not
//! elected. Why that is enough stands in docs/decisions/0018.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::logs::{Identity, Logs};
use super::open::{House, directory, open_or_rebuild, open_own};
use super::slots::Slot;
use super::{Node, NodeStorage};
use crate::cluster::Standing;
use crate::error::{Error, Result};
use crate::raft::{Replica, node_of};

/// How often a shard is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// At least so long between two attempts to open a shard.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);

pub(super) fn start(node: &Arc<Node>) {
    for shard_id in node.shards.ids().into_iter().chain([0]) {
        let keeping = Keeping { shard_id, repair: None, reopened: None, said: String::new() };
        tokio::spawn(keeping.run(Arc::downgrade(node)));
    }
}

/// What is known of one shard between two looks at it.
struct Keeping {
    shard_id: u64,
    repair: Option<Repair>,
    reopened: Option<Instant>,
    /// The last complaint, so that it is logged once.
    said: String,
}

impl Keeping {
    async fn run(mut self, node: Weak<Node>) {
        let Some(draining) = node.upgrade().map(|node| node.draining.clone()) else { return };
        loop {
            tokio::select! {
                biased;
                () = draining.cancelled() => return,
                () = tokio::time::sleep(LOOK_INTERVAL) => {}
            }
            let Some(node) = node.upgrade() else { return };
            if let Err(error) = self.look(&node).await {
                self.say(&error.to_string());
            }
        }
    }

    fn say(&mut self, what: &str) {
        if self.said != what {
            tracing::warn!(shard_id = self.shard_id, "{what}");
            what.clone_into(&mut self.said);
        }
    }

    async fn look(&mut self, node: &Arc<Node>) -> Result<()> {
        let shard_id = self.shard_id;
        let own = node.cluster.replica();
        let shard = node.shard(shard_id);
        let replica = match &shard {
            Some(shard) => shard.replica(),
            None if shard_id == 0 => &*own,
            None => match node.shards.get(shard_id) {
                Some(Slot::Stopped(why)) => return self.reopen(node, &why, false).await,
                _ => return Ok(()),
            },
        };
        if let Some(why) = replica.stopped() {
            // After a failed write the whole node stops.
            if matches!(replica.wal().writable(), Err(helix_wal::Error::Poisoned { .. })) {
                return Ok(());
            }
            let damage = replica.damage();
            let rebuild = !damage.is_empty() && has_others(replica);
            let why = if rebuild { damage.join("; ") } else { why };
            self.say(&format!("the replica has stopped, and is started again: {why}"));
            return self.reopen(node, &why, rebuild).await;
        }
        if replica.repair_of().is_some() {
            let repair = self.repair.get_or_insert_default();
            let waits_for = repair.step(node, shard_id, replica).await?;
            node.note_repair(shard_id, waits_for.clone());
            match waits_for {
                Some(why) => self.say(&format!("in repair: {why}")),
                None => self.repair = None,
            }
            return Ok(());
        }
        self.repair = None;
        let damage = replica.damage();
        if damage.is_empty() || !has_others(replica) {
            return Ok(());
        }
        match may_rebuild(node, shard_id, replica).await {
            Ok(()) => {
                let why = damage.join("; ");
                self.say(&format!("the log is damaged, and is fetched anew: {why}"));
                self.reopen(node, &why, true).await
            }
            Err(why) => {
                self.say(&format!("the log is damaged; the repair has to wait: {why}"));
                Ok(())
            }
        }
    }

    async fn reopen(&mut self, node: &Arc<Node>, why: &str, rebuild: bool) -> Result<()> {
        if self.reopened.is_some_and(|at| at.elapsed() < REOPEN_PAUSE) {
            return Ok(());
        }
        self.repair = None;
        let opened = node.reopen(self.shard_id, why, rebuild).await;
        self.reopened = Some(Instant::now());
        if opened.is_ok() {
            let mut restarts = node.restarts.lock().expect("no panic while it is held");
            *restarts.entry(self.shard_id).or_default() += 1;
            drop(restarts);
            self.said.clear();
            tracing::info!(shard_id = self.shard_id, "the shard is open again");
        }
        opened
    }
}

fn has_others(replica: &Replica) -> bool {
    replica.voters().into_iter().any(|id| id != replica.id())
}

/// Whether a replica that takes part although some of its log is damaged may give all of it up for
/// a new one: the others have to be well, and it is one at a time.
///
/// # Errors
/// What it has to wait for, in words.
async fn may_rebuild(node: &Node, shard_id: u64, replica: &Replica) -> Result<(), String> {
    let own = node_of(replica.id());
    let voters = replica.membership().configs.into_iter().flatten().map(node_of);
    let others: BTreeSet<u64> = voters.filter(|id| *id != own).collect();
    let answers = ask(node, shard_id, others.iter().copied()).await;
    if let Some(lost) = others.iter().find(|id| !answers.contains_key(id)) {
        return Err(format!("node {lost} does not serve the shard"));
    }
    if let Some((id, _)) = answers.iter().find(|(_, it)| it.in_repair) {
        return Err(format!("node {id} is in repair"));
    }
    if replica.leads() {
        let heir = answers.iter().find(|(_, it)| !it.is_damaged).map(|(id, _)| *id);
        let heir = heir.ok_or("no other replica is undamaged")?;
        tracing::info!(shard_id, heir, "handing over before the log is fetched anew");
        let handed = replica.hand_over(Some(heir), &[]).await;
        handed.map_err(|error| format!("node {heir} should lead meanwhile: {error}"))?;
        return Err(format!("node {heir} has just taken over"));
    }
    if let Some((id, _)) = answers.iter().find(|(id, it)| it.is_damaged && **id < own) {
        return Err(format!("node {id} has damage too, and goes first"));
    }
    match answers.iter().find(|(_, it)| it.leads) {
        Some((_, leader)) if !leader.is_damaged => Ok(()),
        Some((id, _)) => Err(format!("node {id}, which leads, has damage too")),
        None => Err("there is no leader".to_owned()),
    }
}

async fn ask(
    node: &Node,
    shard_id: u64,
    nodes: impl Iterator<Item = u64>,
) -> BTreeMap<u64, Standing> {
    let asked = nodes
        .map(|id| async move { Some((id, node.cluster.ask_standing(id, shard_id, None).await?)) });
    futures_util::future::join_all(asked).await.into_iter().flatten().collect()
}

/// How far a replica with a new log is.
#[derive(Debug, Default)]
struct Repair {
    /// The highest term that each other node has told since this replica was opened. Whoever this
    /// one voted for was in that term before it asked.
    terms: BTreeMap<u64, u64>,
    /// A leader's term, and up to where this replica needs its log: where that ended after this
    /// replica had begun anew. No leader of that term can believe this one to have more than that.
    target: Option<(u64, u64)>,
}

impl Repair {
    /// What it waits for; `None`: nothing any more.
    async fn step(
        &mut self,
        node: &Node,
        shard_id: u64,
        replica: &Replica,
    ) -> Result<Option<String>> {
        let peers = node.hub.peers().into_iter().map(|peer| peer.node_id);
        let answers = ask(node, shard_id, peers).await;
        for (id, standing) in &answers {
            if let Some(whereabouts) = &standing.whereabouts {
                node.cluster.hear(whereabouts);
            }
            if !standing.vote_lost {
                let term = self.terms.entry(*id).or_default();
                *term = standing.term.max(*term);
            }
        }
        let leaders = answers.iter().filter(|(_, it)| it.leads);
        let Some((leader, standing)) = leaders.max_by_key(|(_, it)| it.term) else {
            return Ok(Some("no node that answers leads the shard".to_owned()));
        };
        let (leader, term) = (*leader, standing.term);
        if replica.repair_of().is_some_and(|aside| aside.vote.is_none())
            && let Err(why) = self.check_vote(node_of(replica.id()), standing, &answers)
        {
            return Ok(Some(why));
        }
        let target = match self.target.filter(|(of, _)| *of == term) {
            Some((_, target)) => target,
            None => {
                let begins_anew = Some(replica.id());
                let asked = node.cluster.ask_standing(leader, shard_id, begins_anew).await;
                let Some(standing) = asked.filter(|it| it.leads && it.term == term) else {
                    return Ok(Some(format!("node {leader} does not answer as the leader")));
                };
                self.target = Some((term, standing.last_index));
                replica.gate().admit(term);
                standing.last_index
            }
        };
        let status = replica.status();
        let follows = replica.follows().is_some_and(|(_, of)| of == term);
        if !follows || status.applied < target || status.synced < target {
            let has = status.applied.min(status.synced);
            return Ok(Some(format!("it has entries up to {has} of {target} of node {leader}")));
        }
        node.logs().end_repair(shard_id).await?;
        replica.rejoin();
        tracing::info!(shard_id, "repaired: the replica has all that it had, and votes again");
        Ok(None)
    }

    /// Whether a leader may be listened to although this replica does not know what it has voted
    /// for: not unless it is sure that nobody whom it voted for later leads, or yet may.
    ///
    /// Only those that vote now, by what the leader says, are asked. A node that was removed may be
    /// gone for good, and what it says is of the past.
    fn check_vote(
        &self,
        own: u64,
        leader: &Standing,
        answers: &BTreeMap<u64, Standing>,
    ) -> Result<(), String> {
        let voters: BTreeSet<u64> = leader.voters.iter().map(|id| node_of(*id)).collect();
        let others = || voters.iter().copied().filter(|id| *id != own);
        let untold: Vec<u64> = others().filter(|id| !self.terms.contains_key(id)).collect();
        // One that has lost its own vote does not lead, and whatever it stood for is over with it.
        let is_lost = |id: &u64| answers.get(id).is_some_and(|it| it.vote_lost);
        if let Some(silent) = untold.iter().find(|id| !is_lost(id)) {
            return Err(format!(
                "whom it voted for is lost with its log; it waits for node {silent} to say in \
                 which term that is"
            ));
        }
        // Yet they may have elected somebody together: of every majority one has to know its term.
        let forgetful = untold.len() + 1;
        if !untold.is_empty() && (!leader.is_settled || forgetful > voters.len() / 2) {
            return Err(format!(
                "whom it voted for is lost with its log, and so it is on the nodes {untold:?}: of \
                 the voters {voters:?} too few know in which term that is"
            ));
        }
        let told = others().filter_map(|id| Some((id, *self.terms.get(&id)?)));
        match told.max_by_key(|(_, of)| *of).filter(|(_, of)| *of > leader.term) {
            Some((id, of)) => Err(format!("node {id} is in term {of}, which has no leader yet")),
            None => Ok(()),
        }
    }
}

impl Node {
    pub(super) fn logs(&self) -> Logs<'_> {
        Logs { settings: &self.settings, failed: self.failed.clone() }
    }

    /// Closes a shard, and opens it again: on a new log where it is to be rebuilt.
    async fn reopen(self: &Arc<Self>, shard_id: u64, why: &str, rebuild: bool) -> Result<()> {
        let _turn = self.reopening.lock().await;
        if self.draining.is_cancelled() {
            return Err(Error::Draining);
        }
        if matches!(self.settings.storage, NodeStorage::Memory) {
            // What it has voted for would be gone with its log.
            let what = format!("a replica in memory cannot be opened again: {why}");
            return Err(Error::StorageFailed { what, may_have_applied: false });
        }
        if shard_id == 0 {
            return self.reopen_own(rebuild.then_some(why)).await;
        }
        if let Some(shard) = self.shard(shard_id) {
            self.shards.set(shard_id, Slot::Stopped(why.to_owned()));
            self.cluster.set_shard(shard_id, None);
            self.routes.send_modify(|count| *count += 1);
            shard.close().await;
        }
        let logs = self.logs();
        let identity = Identity { shard_id, ..self.identity.clone() };
        if rebuild {
            logs.put_aside(shard_id, why, Some(&identity)).await?;
        }
        let house = House {
            members: self.front.replica_ids(),
            hub: &self.hub,
            directory: directory(&self.cluster),
            draining: &self.draining,
            metrics: &self.metrics,
        };
        let is_alone = !self.cluster.has_others().await;
        match open_or_rebuild(&logs, None, identity, &house, is_alone).await {
            Ok(shard) => {
                self.shards.set(shard_id, Slot::Open(shard.clone()));
                self.cluster.set_shard(shard_id, Some(shard.clone()));
                super::tend::start_shard(self, shard.clone());
                super::membership::start_shard(self, shard);
                self.routes.send_modify(|count| *count += 1);
                Ok(())
            }
            Err(Error::CorruptLog { what }) => {
                self.shards.set(shard_id, Slot::Withheld(what.clone()));
                Err(Error::CorruptLog { what })
            }
            Err(error) => {
                self.shards.set(shard_id, Slot::Stopped(error.to_string()));
                Err(error)
            }
        }
    }

    async fn reopen_own(self: &Arc<Self>, damage: Option<&str>) -> Result<()> {
        let before = self.cluster.replica();
        let is_alone = !has_others(&before);
        self.hub.stop_shard(0);
        before.close().await;
        let logs = self.logs();
        if let Some(why) = damage {
            logs.put_aside(0, why, Some(&self.identity)).await?;
        }
        let log = logs.open_or_put_aside(self.identity.clone(), is_alone).await?;
        let machine = self.cluster.machine();
        machine.begin_anew(log.wal.clone());
        let replica = open_own(&logs, log, &self.hub, machine).await?;
        self.cluster.set_replica(replica);
        if is_alone {
            let elected = self.cluster.replica().elect().await;
            elected.map_err(|error| logs.damaged(0, &error.to_string()))?;
        }
        super::tend::start_cluster(self);
        super::membership::start_cluster(self);
        self.routes.send_modify(|count| *count += 1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raft::replica_id;

    /// What node 1 says of a leader of term 5 that has these voters, after these nodes have told
    /// their terms, and those that they have lost their votes.
    fn check(voters: &[u64], terms: &[(u64, u64)], lost: &[u64], is_settled: bool) -> bool {
        let repair = Repair { terms: terms.iter().copied().collect(), target: None };
        let voters = voters.iter().map(|node| replica_id(*node, 1)).collect();
        let leader = Standing { term: 5, leads: true, voters, is_settled, ..Standing::default() };
        let lost = lost.iter().map(|id| (*id, Standing { vote_lost: true, ..Standing::default() }));
        repair.check_vote(1, &leader, &lost.collect()).is_ok()
    }

    #[test]
    fn a_replica_without_a_vote_listens_to_no_leader_that_it_may_have_voted_against() {
        let check = |terms: &[(u64, u64)]| check(&[1, 2, 3], terms, &[], true);
        assert!(!check(&[(2, 5)]), "node 3 has not said its term");
        assert!(!check(&[(2, 5), (3, 6)]), "it may have voted for 3");
        assert!(check(&[(2, 5), (3, 5)]));
        assert!(check(&[(2, 5), (3, 4)]));
        assert!(check(&[(2, 5), (3, 4), (4, 6)]), "node 4 was removed");
    }

    #[test]
    fn replicas_without_a_vote_wait_for_each_other_only_where_they_could_elect_somebody() {
        assert!(!check(&[1, 2, 3], &[(2, 5)], &[3], true), "they are a majority");
        assert!(!check(&[1, 2, 3, 4, 5], &[(2, 5), (3, 5)], &[4], true), "node 5 is silent");
        assert!(!check(&[1, 2, 3, 4, 5], &[(2, 5), (3, 6), (4, 5)], &[5], true), "3 knows more");
        assert!(!check(&[1, 2, 3, 4, 5], &[(2, 5), (3, 5)], &[4, 5], true), "three of five");
        assert!(!check(&[1, 2, 3, 4, 5], &[(2, 5), (3, 5), (4, 5)], &[5], false), "or of fewer");
        assert!(check(&[1, 2, 3, 4, 5], &[(2, 5), (3, 5), (4, 5)], &[5], true));
    }
}
