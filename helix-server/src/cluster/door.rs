//! The door to shard 0: commands go to its leader, wherever that is, and come back with a reply.
//! Reading is local; what may be too old is brought up to date by asking the leader first.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use bytes::Bytes;
use tokio::time::Instant;

use super::admin::TopicSpec;
use super::calls::{Answer, Question};
use super::machine::ClusterMachine;
use super::reconcile::ShardProgress;
use super::state::{ClusterState, Reply};
use super::whereabouts::Whereabouts;
use crate::clock::Clock;
use crate::error::{Error, LeaderHint, Result};
use crate::limits;
use crate::log::{ClusterCommand, Head, Verdict};
use crate::peer::{Hub, PeerError, PeerStatus};
use crate::raft::{Command, LeadershipWatch, ProposeError, Replica, node_of};
use crate::shard::{Shard, unwell};

/// What a fresh cluster begins with.
#[derive(Debug, Clone)]
pub struct Bootstrap {
    pub shard_count: u64,
    pub topics: Vec<TopicSpec>,
}

/// Producer ids that this node may hand out.
#[derive(Debug, Default)]
struct Lease {
    next: u64,
    end: u64,
}

/// Shard 0 as this node has it.
#[derive(Debug)]
pub struct Cluster {
    /// Another one after a restart of the shard.
    replica: RwLock<Arc<Replica>>,
    machine: Arc<ClusterMachine>,
    pub(super) hub: Arc<Hub>,
    /// Where this node was told to find others.
    pub(super) seeds: BTreeMap<u64, String>,
    shards: RwLock<BTreeMap<u64, Arc<Shard>>>,
    pub(super) clock: Arc<dyn Clock>,
    lease: Mutex<Lease>,
    /// When the last look at the leader began that brought this node up to date.
    up_to_date: tokio::sync::Mutex<Option<Instant>>,
    /// How far the shards that are led from here are with their replicas.
    progress: Mutex<BTreeMap<u64, ShardProgress>>,
    /// Why a new node could not be called in yet.
    pub(super) joining: Mutex<String>,
    /// Where others say that the members are: more than this node's own state says while that is
    /// lost, or is old and not brought up to date before the members are found.
    pub(super) told: Mutex<Whereabouts>,
}

impl Cluster {
    pub fn new(
        replica: Replica,
        machine: Arc<ClusterMachine>,
        hub: Arc<Hub>,
        seeds: BTreeMap<u64, String>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            replica: RwLock::new(Arc::new(replica)),
            machine,
            hub,
            seeds,
            shards: RwLock::default(),
            clock,
            lease: Mutex::default(),
            up_to_date: tokio::sync::Mutex::default(),
            progress: Mutex::default(),
            joining: Mutex::default(),
            told: Mutex::default(),
        }
    }

    /// Forms the cluster of this node alone, or takes up the one that it is. A node that listens
    /// for others may have got some since.
    pub async fn form_alone(&self, listens: bool) -> io::Result<()> {
        if !self.replica().is_formed().await? {
            self.replica().form([self.replica().id()].into()).await?;
            self.replica().known_voters().await;
            return Ok(());
        }
        if self.replica().known_voters().await == [self.replica().id()] {
            return self.replica().elect().await;
        }
        if listens {
            return Ok(());
        }
        let what =
            format!("this is one of the nodes {:?}: name the others with --peer", self.nodes());
        Err(io::Error::other(what))
    }

    /// Whether others have replicas of what is here: also while this node's own view is in repair,
    /// which it could not be without them.
    pub async fn has_others(&self) -> bool {
        let replica = self.replica();
        if replica.repair_of().is_some() {
            return true;
        }
        let is_formed = replica.is_formed().await.unwrap_or(false);
        is_formed && replica.known_voters().await != [replica.id()]
    }

    /// Why shard 0's log takes nothing now, if it does not.
    pub fn unwell(&self) -> Option<Error> {
        unwell(self.replica().wal())
    }

    /// Whether this node is a cluster of its own.
    pub fn is_alone(&self) -> bool {
        self.replica().voters() == [self.replica().id()]
    }

    pub fn node_id(&self) -> u64 {
        node_of(self.replica().id())
    }

    pub(super) fn lock_progress(&self) -> MutexGuard<'_, BTreeMap<u64, ShardProgress>> {
        self.progress.lock().expect("no panic while it is held")
    }

    /// The data shards that are served here.
    pub(super) fn open_shards(&self) -> Vec<Arc<Shard>> {
        self.shards.read().expect("no panic while it is held").values().cloned().collect()
    }

    /// Names a data shard that is served here from now on, or, with none, is not any more.
    pub fn set_shard(&self, id: u64, shard: Option<Arc<Shard>>) {
        let mut shards = self.shards.write().expect("no panic while it is held");
        match shard {
            Some(shard) => shards.insert(id, shard),
            None => shards.remove(&id),
        };
    }

    pub(super) fn shard(&self, id: u64) -> Result<Arc<Shard>> {
        let shards = self.shards.read().expect("no panic while it is held");
        shards.get(&id).cloned().ok_or_else(|| Error::CorruptLog {
            what: format!("shard {id} is not open on this node"),
        })
    }

    /// Takes another replica of shard 0 for the one before, which is closed.
    pub fn set_replica(&self, replica: Replica) {
        *self.replica.write().expect("no panic while it is held") = Arc::new(replica);
    }

    pub fn machine(&self) -> &Arc<ClusterMachine> {
        &self.machine
    }

    pub fn replica(&self) -> Arc<Replica> {
        self.replica.read().expect("no panic while it is held").clone()
    }

    /// Nodes that vote on the cluster's state; none before the cluster is formed.
    pub fn nodes(&self) -> Vec<u64> {
        self.replica().voters().into_iter().map(node_of).collect()
    }

    /// Nodes that follow the cluster's state without a vote.
    pub fn learners(&self) -> Vec<u64> {
        self.replica().membership().learners.into_iter().map(node_of).collect()
    }

    pub fn leads(&self) -> bool {
        self.replica().leads()
    }

    pub fn watch_leadership(&self) -> LeadershipWatch {
        self.replica().watch_leadership()
    }

    /// Where shard 0's leader is, as far as this node knows and reaches it.
    pub fn leader_hint(&self) -> Option<LeaderHint> {
        let leadership = self.replica().leadership();
        let node_id = node_of(leadership.leader?);
        let is_cut_off = self.leads()
            && self.nodes().len() > 1
            && self.replica().confirmed_ago().is_none_or(|ago| ago > limits::CUT_OFF_AFTER);
        let is_lost = |peer: &PeerStatus| peer.node_id == node_id && !peer.connected;
        if is_cut_off || self.hub.peers().iter().any(is_lost) {
            return None;
        }
        let endpoint = self.machine.read(|state| state.node(node_id).map(|n| n.endpoint.clone()));
        let endpoint = endpoint.unwrap_or_default();
        Some(LeaderHint { node_id, endpoint, term: leadership.term })
    }

    /// Hands the lead of shard 0 to `node`, or to whoever is most caught up.
    pub async fn transfer(&self, node: Option<u64>) -> Result<()> {
        let hint = || match self.leader_hint() {
            Some(hint) => Error::NotLeader { shard: 0, leader: Some(hint) },
            None => Error::NoLeader { shard: 0 },
        };
        if !self.leads() {
            return Err(hint());
        }
        let handed = self.replica().hand_over(node, &self.hub.connected()).await;
        handed.map_err(|error| Error::of_hand_over(0, error))
    }

    /// Has a command carried out by shard 0's leader and waits for its reply. Where the leader
    /// changes under it the command is repeated, if it may be.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] where an attempt was made and its answer is missing: what any
    /// attempt may yet change is never denied. [`Error::NoLeader`] where nothing was done.
    pub async fn command(&self, command: ClusterCommand) -> Result<Reply> {
        match self.ask(Question::Command(command)).await? {
            Answer::Reply(reply) => Ok(reply),
            other => Err(unexpected(&other)),
        }
    }

    /// Brings this node's view to what the cluster's state was when this was called.
    pub async fn catch_up(&self) -> Result<()> {
        let asked = Instant::now();
        let mut up_to_date = self.up_to_date.lock().await;
        // Those who wait here together are served by one look.
        if up_to_date.is_some_and(|began| began >= asked) {
            return Ok(());
        }
        let began = Instant::now();
        let version = match self.ask(Question::Version).await? {
            Answer::Version(version) => version,
            other => return Err(unexpected(&other)),
        };
        self.wait_version(version).await?;
        *up_to_date = Some(began);
        Ok(())
    }

    /// Waits until this node has seen this version of the metadata.
    pub(super) async fn wait_version(&self, version: u64) -> Result<()> {
        let mut versions = self.machine.watch();
        let seen = versions.wait_for(|seen| *seen >= version);
        match tokio::time::timeout(limits::READY_WAIT_MAX, seen).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(Error::Draining),
            Err(_) => Err(Error::NoLeader { shard: 0 }),
        }
    }

    /// Asks the leader, which may be this node, and the next one if it is none any more.
    async fn ask(&self, question: Question) -> Result<Answer> {
        let deadline = Instant::now() + limits::READY_WAIT_MAX;
        // Why it is not known what became of an attempt. Another one's answer settles that.
        let mut open = None;
        loop {
            let answer = match self.replica().leadership().leader {
                Some(leader) if leader == self.replica().id() => self.carry_out(&question).await,
                Some(leader) => match self.forward(node_of(leader), &question).await {
                    Ok(answer) => answer,
                    Err(error) => {
                        if error.is_open() && question.is_change() {
                            open = Some(error.to_string());
                        }
                        Answer::NotLeader
                    }
                },
                None => Answer::NotLeader,
            };
            match answer {
                Answer::NotLeader => {}
                Answer::Unknown(reason) => return Err(Error::OutcomeUnknown { reason }),
                answer => return Ok(answer),
            }
            match open.take() {
                Some(reason) if Instant::now() >= deadline || !question.may_be_repeated() => {
                    return Err(Error::OutcomeUnknown { reason });
                }
                None if Instant::now() >= deadline => return Err(Error::NoLeader { shard: 0 }),
                still => open = still,
            }
            tokio::time::sleep(limits::LEADER_LOOK_INTERVAL).await;
        }
    }

    async fn forward(&self, node: u64, question: &Question) -> Result<Answer, PeerError> {
        let answer = self.hub.call(node, question.encode(), limits::COMMIT_WAIT_MAX).await;
        // What cannot be read may be the answer to something that was done.
        let unread = |why| PeerError::Lost { node, why };
        answer
            .and_then(|bytes| Answer::decode(bytes).map_err(unread))
            .inspect_err(|error| tracing::debug!(node, %error, "shard 0's leader gave no answer"))
    }

    /// Answers another node.
    pub async fn answer(&self, question: Bytes) -> Result<Bytes, String> {
        let question = Question::decode(question)?;
        Ok(self.carry_out(&question).await.encode())
    }

    async fn carry_out(&self, question: &Question) -> Answer {
        match question {
            Question::Progress => Answer::Progress(self.own_progress()),
            Question::Standing(asked) => self.own_standing(asked).await,
            Question::Balance => Answer::Moved(self.balance_own().await),
            // What is left is for the leader alone.
            _ if !self.replica().wait_ready(limits::READY_WAIT_MAX).await => Answer::NotLeader,
            Question::Version => {
                let replica = self.replica();
                let confirmed = replica.read_index();
                match tokio::time::timeout(limits::READ_INDEX_WAIT_MAX, confirmed).await {
                    Ok(Ok(())) => Answer::Version(self.machine.read(ClusterState::version)),
                    Ok(Err(_)) | Err(_) => Answer::NotLeader,
                }
            }
            Question::Command(command) => self.propose(command.clone()).await,
        }
    }

    async fn propose(&self, command: ClusterCommand) -> Answer {
        let command = Command::control(Head::Cluster(command));
        let outcome = match self.replica().propose(command, None).await {
            Ok(outcome) => tokio::time::timeout(limits::COMMIT_WAIT_MAX, outcome).await,
            Err(error) => Ok(Err(error)),
        };
        match outcome {
            Ok(Ok(Verdict::Cluster(reply))) => Answer::Reply(reply),
            Ok(Ok(other)) => Answer::Unknown(format!("shard 0 said {other:?}")),
            Ok(Err(ProposeError::NotLeader { .. })) => Answer::NotLeader,
            Ok(Err(ProposeError::Unknown(reason) | ProposeError::Stopped(reason))) => {
                Answer::Unknown(reason)
            }
            Err(_) => {
                Answer::Unknown(format!("not committed within {:?}", limits::COMMIT_WAIT_MAX))
            }
        }
    }

    /// Gives a fresh cluster its shards and topics. For shard 0's leader; may be repeated.
    pub async fn bootstrap(&self, bootstrap: &Bootstrap) -> Result<()> {
        if !self.replica().wait_ready(limits::READY_WAIT_MAX).await {
            return Err(Error::NoLeader { shard: 0 });
        }
        self.begin_protocol().await?;
        if self.machine.read(|state| state.shards().is_empty()) {
            let shards = (1..=bootstrap.shard_count).collect();
            self.command(ClusterCommand::RegisterShards { shards }).await?;
        }
        if !self.machine.read(ClusterState::has_had_topics) {
            for spec in &bootstrap.topics {
                self.create_topic(spec.clone(), false).await?;
            }
        }
        Ok(())
    }

    /// Gives a named producer its id and the next epoch, which fences the earlier ones.
    pub async fn init_producer(&self, name: &str) -> Result<(u64, u32)> {
        let command = ClusterCommand::InitProducer { name: name.to_owned() };
        match self.command(command).await? {
            Reply::Producer { producer_id, epoch } => Ok((producer_id, epoch)),
            Reply::Invalid { field, what } => Err(Error::InvalidArgument { field, what }),
            other => Err(unexpected(&other)),
        }
    }

    /// A producer id that nobody else has or gets, greater than those that were handed out before
    /// as far as this node knows: shards take lower ones for forgotten.
    pub async fn next_producer_id(&self) -> Result<u64> {
        let newest = self.machine.read(ClusterState::next_producer_id);
        {
            let mut lease = self.lease.lock().expect("no panic while it is held");
            // Where another node has taken some since, what is left of the lease is lost.
            if lease.next < lease.end && lease.end >= newest {
                lease.next += 1;
                return Ok(lease.next - 1);
            }
        }
        self.lease_producer_ids().await
    }

    /// Takes ids that this node may hand out. The first is the caller's; those below were given
    /// away.
    async fn lease_producer_ids(&self) -> Result<u64> {
        let command = ClusterCommand::LeaseProducerIds { count: limits::PRODUCER_IDS_PER_LEASE };
        let reply = self.command(command).await.map_err(|error| match error {
            // Ids that were leased and never heard of are nobody's: the asker has done nothing.
            Error::OutcomeUnknown { .. } => Error::NoLeader { shard: 0 },
            other => other,
        })?;
        match reply {
            Reply::ProducerIds { first, count } => {
                let mut lease = self.lease.lock().expect("no panic while it is held");
                *lease = Lease { next: first + 1, end: first + u64::from(count) };
                Ok(first)
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Whether a producer id was handed out, by whichever node.
    pub async fn has_given(&self, producer_id: u64) -> Result<bool> {
        if producer_id < self.machine.read(ClusterState::next_producer_id) {
            return Ok(true);
        }
        // By another one a moment ago, perhaps, which this one has not heard of.
        Ok(producer_id < self.lease_producer_ids().await?)
    }
}

pub(super) fn unexpected(what: &dyn std::fmt::Debug) -> Error {
    Error::OutcomeUnknown { reason: format!("shard 0 answered {what:?}") }
}
