//! Changing who is a member: checks first, then a command to the cluster's state, then work that
//! goes on until it is done, whoever leads by then. Each shard's leader brings its replicas to the
//! target (`reconcile`); shard 0's leader calls in who joins, and ends the change when every shard
//! has done its part.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;
use tokio::time::Instant;

use super::calls::{Answer, Question};
use super::door::{Cluster, unexpected};
use super::members::{Change, ChangeKind, Member, Members};
use super::reconcile::{Phase, ShardProgress, reconcile};
use super::state::{ClusterState, Reply};
use super::whereabouts::{Whereabouts, address};
use crate::error::{Error, Result};
use crate::limits;
use crate::log::{
    AddMember, ClusterCommand, Joined, MemberCommand, RemoveMember, ReplaceMember, SetDraining,
    TakeUp,
};
use crate::peer::{Hello, Join, PeerError};
use crate::raft::{Replica, ReplicaId, node_of, replica_id};

/// How far a change is, as far as the nodes that answer can say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangeProgress {
    pub change: Change,
    /// As far as the shard that is least far.
    pub phase: Phase,
    /// Why it does not go on; empty while it does.
    pub blocked: String,
    /// Every shard, in the order of their ids.
    pub shards: Vec<ShardProgress>,
}

impl ChangeProgress {
    fn over(change: Change, phase: Phase, blocked: String) -> Self {
        Self { change, phase, blocked, shards: Vec::new() }
    }
}

/// A change as it was asked for.
struct Asked {
    command: MemberCommand,
    /// Who has to vote for it to go on, and who must be reached beside the peers.
    voters: BTreeSet<u64>,
    newcomer: Option<u64>,
}

impl Cluster {
    /// Adds a node that waits at `peer_addr`; for a member, changes its address. `None` where only
    /// the checks were asked for.
    pub async fn add_node(
        &self,
        node_id: u64,
        peer_addr: String,
        validate_only: bool,
    ) -> Result<Option<Change>> {
        self.catch_up().await?;
        let command = MemberCommand::Add(AddMember { node_id, peer_addr: peer_addr.clone() });
        let members = self.preview(&command)?;
        let is_member = self.members_now().get(node_id).is_some();
        if !is_member {
            self.check_newcomer(node_id, &peer_addr).await?;
            let voters = members.iter().map(|it| it.node_id).collect();
            self.check(Asked { command: command.clone(), voters, newcomer: Some(node_id) })?;
        }
        self.unless_validating(command, validate_only).await
    }

    /// Removes a node; one that does not answer only where it is said to be lost.
    pub async fn remove_node(
        &self,
        node_id: u64,
        lost: bool,
        validate_only: bool,
    ) -> Result<Option<Change>> {
        self.catch_up().await?;
        let command = MemberCommand::Remove(RemoveMember { node_id });
        self.preview(&command)?;
        let members = self.members_now();
        if let Some(member) = members.get(node_id).filter(|it| it.generation > 0 && !it.leaving) {
            if !lost && let Some(why) = self.unreached(member.node_id) {
                let what = format!(
                    "node {node_id} does not answer ({why}); if it will not come back, say that \
                     it is lost"
                );
                return Err(Error::ChangeRefused { what });
            }
            let stays = members.iter().filter(|it| it.node_id != node_id && it.generation > 0);
            let voters = stays.map(|it| it.node_id).collect();
            self.check(Asked { command: command.clone(), voters, newcomer: None })?;
        }
        self.unless_validating(command, validate_only).await
    }

    /// Puts `node_id`, which may be the same, with empty data in the place of a lost node.
    pub async fn replace_node(
        &self,
        lost_node_id: u64,
        node_id: u64,
        peer_addr: String,
        validate_only: bool,
    ) -> Result<Option<Change>> {
        self.catch_up().await?;
        let members = self.members_now();
        let address = match peer_addr.as_str() {
            "" if node_id == lost_node_id => self.address_of(node_id).unwrap_or_default(),
            given => given.to_owned(),
        };
        if node_id == self.node_id() {
            // It serves as a member, so it has its data. It need not be able to dial itself.
            return replaced_before(&members, lost_node_id, node_id, validate_only);
        }
        let hello = match self.ask_newcomer(node_id, &address).await {
            Ok(hello) => hello,
            // Refusals of the command itself say more.
            Err(refused) => {
                let emptied = false;
                let replace = ReplaceMember { lost_node_id, node_id, peer_addr, emptied };
                self.preview(&MemberCommand::Replace(replace))?;
                return Err(refused);
            }
        };
        if hello.cluster.is_some() && hello.cluster == self.hub.cluster() {
            return replaced_before(&members, lost_node_id, node_id, validate_only);
        }
        check_empty(node_id, &address, &hello)?;
        let emptied = members.get(node_id).is_some_and(|it| it.joining.is_none());
        let replace = ReplaceMember { lost_node_id, node_id, peer_addr, emptied };
        let command = MemberCommand::Replace(replace);
        let after = self.preview(&command)?;
        // Both the voters before, of whom the lost one is none any more, and those after have to
        // agree.
        let goes = |it: &&Member| it.node_id != lost_node_id || node_id == lost_node_id;
        let voters = after.iter().filter(goes).map(|it| it.node_id).collect();
        self.check(Asked { command: command.clone(), voters, newcomer: Some(node_id) })?;
        let before = members.iter().filter(|it| it.generation > 0).map(|it| it.node_id);
        let before: BTreeSet<u64> = before.collect();
        let gone = Some(lost_node_id);
        self.check_majority(&before, None, gone)?;
        self.unless_validating(command, validate_only).await
    }

    /// Has a node lead nothing, or lets it lead again; waits until it leads nothing.
    pub async fn set_draining(
        &self,
        node_id: u64,
        draining: bool,
        validate_only: bool,
    ) -> Result<()> {
        self.catch_up().await?;
        let command = MemberCommand::SetDraining(SetDraining { node_id, draining });
        let members = self.preview(&command)?;
        if draining {
            let could = |it: &&Member| {
                it.node_id != node_id && it.generation > 0 && !members.is_draining(it.node_id)
            };
            let is_here = |it: &Member| self.unreached(it.node_id).is_none();
            if !members.iter().filter(could).any(is_here) {
                let what = format!("no node that answers could lead what node {node_id} leads");
                return Err(Error::NotEnoughNodes { what });
            }
        }
        if validate_only {
            return Ok(());
        }
        self.change_members(command).await?;
        if draining { self.drained(node_id).await } else { Ok(()) }
    }

    async fn drained(&self, node_id: u64) -> Result<()> {
        let deadline = Instant::now() + limits::DRAIN_WAIT_MAX;
        loop {
            let led = self.led_by(node_id);
            if led.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let what = format!(
                    "node {node_id} drains from now on, but after {:?} it still leads the shards \
                     {led:?}: no other node could take over, see the cluster's health",
                    limits::DRAIN_WAIT_MAX
                );
                return Err(Error::ChangeRefused { what });
            }
            tokio::time::sleep(limits::LEADER_LOOK_INTERVAL).await;
        }
    }

    /// Shards that this node believes are led by `node_id`.
    fn led_by(&self, node_id: u64) -> Vec<u64> {
        let leads = |replica: &Replica| replica.leadership().leader.map(node_of) == Some(node_id);
        let own = leads(&self.replica()).then_some(0);
        let shards = self.open_shards();
        let led = shards.iter().filter(|shard| leads(shard.replica())).map(|shard| shard.id());
        own.into_iter().chain(led).collect()
    }

    /// The members; while nobody has changed them, those that vote.
    pub(super) fn members_now(&self) -> Members {
        let mut members = self.machine().read(|state| state.members().clone());
        if !members.is_known() {
            members.take_up(&TakeUp { replicas: self.replica().voters() });
        }
        members
    }

    /// The members as they would be after this command; the error that it would get.
    fn preview(&self, command: &MemberCommand) -> Result<Members> {
        let version = self.machine().read(ClusterState::version);
        let mut members = self.members_now();
        members.apply(version + 1, command).map_err(refusal)?;
        Ok(members)
    }

    async fn unless_validating(
        &self,
        command: MemberCommand,
        validate_only: bool,
    ) -> Result<Option<Change>> {
        if validate_only {
            return Ok(None);
        }
        match self.change_members(command).await? {
            Reply::Change(change) => Ok(Some(change)),
            other => Err(unexpected(&other)),
        }
    }

    /// Has a command to the members carried out. Their list begins with the first one.
    async fn change_members(&self, command: MemberCommand) -> Result<Reply> {
        if !self.machine().read(|state| state.members().is_known()) {
            let replicas = self.replica().voters();
            let take_up = MemberCommand::TakeUp(TakeUp { replicas });
            self.command(ClusterCommand::Members(take_up)).await?;
        }
        match self.command(ClusterCommand::Members(command)).await? {
            reply @ (Reply::Change(_) | Reply::Done) => Ok(reply),
            refused => Err(refusal(refused)),
        }
    }

    /// Why a node does not answer this one; none for itself.
    fn unreached(&self, node_id: u64) -> Option<String> {
        if node_id == self.node_id() {
            return None;
        }
        let peers = self.hub.peers();
        let Some(peer) = peers.into_iter().find(|peer| peer.node_id == node_id) else {
            return Some("its address is not known".to_owned());
        };
        (!peer.connected).then(|| peer.last_error.unwrap_or_else(|| "not connected".to_owned()))
    }

    fn check(&self, asked: Asked) -> Result<()> {
        let Asked { command, voters, newcomer } = asked;
        let own = self.address_of(self.node_id());
        if newcomer.is_some() && voters.len() > 1 && own.is_none() && self.nodes().len() == 1 {
            let node_id = self.node_id();
            let what = format!(
                "{}: node {node_id} does not listen for other nodes; start it again with --peer \
                 {node_id}=HOST:PORT, where they will dial it",
                command.name()
            );
            return Err(Error::ChangeRefused { what });
        }
        self.check_majority(&voters, newcomer, None)
    }

    fn check_majority(
        &self,
        voters: &BTreeSet<u64>,
        newcomer: Option<u64>,
        gone: Option<u64>,
    ) -> Result<()> {
        let is_lost = |node: &u64| {
            gone == Some(*node) || newcomer != Some(*node) && self.unreached(*node).is_some()
        };
        let lost: Vec<u64> = voters.iter().copied().filter(is_lost).collect();
        let (count, well) = (voters.len(), voters.len() - lost.len());
        let needed = count / 2 + 1;
        if well >= needed {
            return Ok(());
        }
        let what = format!(
            "it would leave {well} of {count} voters reachable, {needed} are needed; those that \
             do not answer: {lost:?}"
        );
        Err(Error::NotEnoughNodes { what })
    }

    async fn ask_newcomer(&self, node_id: u64, address: &str) -> Result<Hello> {
        let hello = self.hub.hello_at(node_id, address).await.map_err(|error| {
            let why = match error {
                PeerError::Unreachable { why, .. } | PeerError::Lost { why, .. } => why,
                other => other.to_string(),
            };
            let what = format!(
                "node {node_id} cannot be reached at {address:?}: {why}; start it with an empty \
                 data folder, --peer-addr, and --peer for each node of this cluster"
            );
            Error::ChangeRefused { what }
        })?;
        let (theirs, protocol) = (hello.versions, self.protocol());
        if !theirs.contains(protocol) {
            let what = format!(
                "node {node_id} speaks protocol {theirs}, and the cluster uses version {protocol}: \
                 start it with a Helix that speaks {protocol}, as the other nodes do"
            );
            return Err(Error::ChangeRefused { what });
        }
        Ok(hello)
    }

    async fn check_newcomer(&self, node_id: u64, address: &str) -> Result<()> {
        let hello = self.ask_newcomer(node_id, address).await?;
        check_empty(node_id, address, &hello)
    }

    /// Where this node dials another one, or, of itself, where it says that it can be dialled.
    fn address_of(&self, node_id: u64) -> Option<String> {
        self.machine().read(|state| address(state, &self.seeds, node_id))
    }

    /// Keeps the connections to what the cluster's state says of its members: this node's own, or
    /// a newer one that it was told of.
    pub fn dial_members(&self) {
        let own = self.machine().read(Whereabouts::of);
        let told = self.told.lock().expect("no panic while it is held").clone();
        let newest = if told.is_newer(&own) { told } else { own };
        let mut addresses = newest.addresses(&self.seeds);
        addresses.remove(&self.node_id());
        if addresses != self.hub.addresses() {
            self.hub.set_peers(&addresses);
        }
    }

    /// Takes another node's word for where the members are, for as long as this node's own state
    /// is older.
    pub fn hear(&self, whereabouts: &Whereabouts) {
        let mut told = self.told.lock().expect("no panic while it is held");
        if !whereabouts.is_newer(&told) {
            return;
        }
        told.clone_from(whereabouts);
        drop(told);
        self.dial_members();
    }

    /// For the leader of `replica`'s shard: one round of bringing its replicas to what the
    /// cluster's state says. Whether it is done.
    pub async fn reconcile(&self, shard_id: u64, replica: &Replica) -> bool {
        let asked_for = || self.machine().read(|state| (state.version(), state.members().target()));
        let (mut version, mut target) = asked_for();
        if target.is_empty() || !replica.is_ready() {
            return target.is_empty();
        }
        if !replica.membership().is(&target) {
            // This node may lead the shard and be behind with shard 0: an old state would turn
            // back what has been changed since.
            if let Err(error) = self.catch_up().await {
                let blocked = format!("who the replicas should be is not known: {error}");
                let (phase, entries) = (Phase::Pending, 0);
                let row = ShardProgress { shard_id, version, phase, entries, blocked };
                self.lock_progress().insert(shard_id, row);
                return false;
            }
            (version, target) = asked_for();
        }
        let waiting = if shard_id == 0 { self.leaving_last().await } else { BTreeSet::new() };
        target.extend(&waiting);
        let row =
            |phase, entries, blocked| ShardProgress { shard_id, version, phase, entries, blocked };
        let row = match reconcile(replica, &self.hub, shard_id, &target).await {
            Ok((Phase::Done, ..)) if !waiting.is_empty() => {
                row(Phase::Pending, 0, "the other shards go first".to_owned())
            }
            Ok((phase, entries, blocked)) => row(phase, entries, blocked),
            Err(why) => {
                tracing::debug!(shard_id, %why, "the shard's replicas are not changed yet");
                row(Phase::ChangingVoters, 0, why)
            }
        };
        let is_done = row.phase == Phase::Done;
        self.lock_progress().insert(shard_id, row);
        is_done
    }

    /// Replicas of shard 0 whose node leaves, until all other shards have let it go. Through shard
    /// 0 it hears that it has to hand over what it leads; cut off from that it might never.
    async fn leaving_last(&self) -> BTreeSet<ReplicaId> {
        let members = self.members_now();
        let Some(change) = members.running().filter(|it| it.kind == ChangeKind::Remove) else {
            return BTreeSet::new();
        };
        let rows = self.all_progress(change).await;
        if rows.iter().all(|row| row.shard_id == 0 || row.phase == Phase::Done) {
            return BTreeSet::new();
        }
        let leaving = members.iter().filter(|it| it.leaving && it.generation > 0);
        leaving.map(|it| replica_id(it.node_id, it.generation)).collect()
    }

    /// Says nothing of a shard any more, which somebody else leads.
    pub fn forget_progress(&self, shard_id: u64) {
        self.lock_progress().remove(&shard_id);
    }

    /// What this node says of the shards that it leads.
    pub(super) fn own_progress(&self) -> Vec<ShardProgress> {
        let mut rows: Vec<ShardProgress> = self.lock_progress().values().cloned().collect();
        let joining = self.joining.lock().expect("no panic while it is held").clone();
        // Who is to join waits for shard 0's leader alone.
        if let Some(row) = rows.iter_mut().find(|row| row.shard_id == 0)
            && !joining.is_empty()
        {
            (row.phase, row.blocked) = (Phase::Pending, joining);
        }
        rows
    }

    /// For shard 0's leader: one step of the change that runs. Whether there is none.
    pub async fn drive_change(&self) -> bool {
        if !self.replica().is_ready() {
            return false;
        }
        let members = self.members_now();
        let running = members.running();
        let joining = running.and_then(|it| members.get(it.node_id)?.joining);
        if joining.is_none() {
            self.set_joining("");
        }
        let Some(change) = running else { return true };
        let command = match joining {
            Some(generation) => match self.call_in(change.node_id, generation).await {
                Ok(()) => {
                    let node_id = change.node_id;
                    MemberCommand::Joined(Joined { node_id, generation })
                }
                Err(error) => {
                    self.set_joining(&error.to_string());
                    return false;
                }
            },
            None => {
                let rows = self.all_progress(change).await;
                if rows.iter().any(|row| row.phase != Phase::Done) {
                    return false;
                }
                MemberCommand::Finish(change.id)
            }
        };
        let is_end = matches!(command, MemberCommand::Finish(_));
        match self.command(ClusterCommand::Members(command)).await {
            Ok(_) if is_end => tracing::info!("{}: done", change.describe()),
            Ok(_) => {}
            Err(error) => tracing::debug!(%error, "a change of the members does not go on yet"),
        }
        false
    }

    async fn call_in(&self, node_id: u64, generation: u32) -> Result<(), PeerError> {
        let cluster = self.hub.cluster().ok_or(PeerError::Closed)?;
        let (shards, neighbours) = self.machine().read(|state| {
            let members = state.members().iter().map(|member| member.node_id);
            let others = members.filter(|id| *id != node_id);
            let address = |id| Some((id, address(state, &self.seeds, id)?));
            (state.shards().iter().copied().collect(), others.filter_map(address).collect())
        });
        self.hub.join(node_id, Join { cluster, generation, shards, neighbours }).await
    }

    fn set_joining(&self, why: &str) {
        let mut joining = self.joining.lock().expect("no panic while it is held");
        if *joining != why && !why.is_empty() {
            tracing::info!("the new node does not join yet: {why}");
        }
        why.clone_into(&mut joining);
    }

    /// How far each shard is with a change, in the order of their ids.
    async fn all_progress(&self, change: &Change) -> Vec<ShardProgress> {
        let own = self.node_id();
        let others = self.members_now();
        let others = others.iter().map(|it| it.node_id).filter(|node| *node != own);
        let asked = others.filter(|node| self.hub.is_connected(*node)).map(|node| async move {
            let wait = limits::PROGRESS_WAIT_MAX;
            let answer = self.hub.call(node, Question::Progress.encode(), wait).await.ok()?;
            match Answer::decode(answer) {
                Ok(Answer::Progress(rows)) => Some(rows),
                _ => None,
            }
        });
        let told = join_all(asked).await.into_iter().flatten().flatten();
        let shards = self.machine().read(|state| state.shards().clone());
        let pending = |shard_id| ShardProgress {
            shard_id,
            version: 0,
            phase: Phase::Pending,
            entries: 0,
            blocked: String::new(),
        };
        let mut rows: BTreeMap<u64, ShardProgress> =
            shards.into_iter().chain([0]).map(|id| (id, pending(id))).collect();
        for row in told.chain(self.own_progress()).filter(|row| row.version >= change.version) {
            // A deposed leader may still tell what was so.
            if let Some(known) = rows.get_mut(&row.shard_id)
                && (row.version, row.phase) >= (known.version, known.phase)
            {
                *known = row;
            }
        }
        rows.into_values().collect()
    }

    /// How far a change is; 0: the one that runs, or the last one.
    pub async fn change_progress(&self, id: u64) -> Result<ChangeProgress> {
        self.catch_up().await?;
        let members = self.members_now();
        let unknown = || Error::InvalidArgument {
            field: "id",
            what: format!("there is no change {id} of the cluster's nodes"),
        };
        let last = members.last_change().ok_or_else(unknown)?.clone();
        if id > last.id {
            return Err(unknown());
        }
        if id != 0 && id < last.id {
            // Of one that is over nothing is kept but that it is.
            let change = Change { id, done: true, ..last.clone() };
            return Ok(if members.is_given_up(id) {
                let blocked = format!("given up for {}", last.describe());
                ChangeProgress::over(change, Phase::Failed, blocked)
            } else {
                ChangeProgress::over(change, Phase::Done, String::new())
            });
        }
        if last.done {
            return Ok(ChangeProgress::over(last, Phase::Done, String::new()));
        }
        let shards = self.all_progress(&last).await;
        let is_joining = members.get(last.node_id).is_some_and(|it| it.joining.is_some());
        let phase = shards.iter().map(|row| row.phase).min().filter(|_| !is_joining);
        let phase = phase.unwrap_or(Phase::Pending);
        let blocked = shards.iter().find(|row| !row.blocked.is_empty());
        let blocked = blocked.map(|row| format!("shard {}: {}", row.shard_id, row.blocked));
        // Shards that are done are not yet a change that is.
        let phase = phase.min(Phase::ChangingVoters);
        Ok(ChangeProgress { change: last, phase, blocked: blocked.unwrap_or_default(), shards })
    }
}

fn check_empty(node_id: u64, address: &str, hello: &Hello) -> Result<()> {
    let Some(cluster) = hello.cluster else { return Ok(()) };
    let what = format!(
        "node {node_id} at {address} belongs to cluster {cluster:032x} already: only a node with \
         an empty data folder can be taken in"
    );
    Err(Error::ChangeRefused { what })
}

/// The answer where a node that has the cluster's data is to take a lost one's place: the change
/// that it came by, if that is the last one.
fn replaced_before(
    members: &Members,
    lost_node_id: u64,
    node_id: u64,
    validate_only: bool,
) -> Result<Option<Change>> {
    let replaces = |it: &&Change| {
        it.kind == ChangeKind::Replace && (it.lost_node_id, it.node_id) == (lost_node_id, node_id)
    };
    match members.last_change().filter(replaces) {
        Some(same) => Ok(Some(same.clone()).filter(|_| !validate_only)),
        None => Err(Error::ChangeRefused {
            what: format!(
                "node {node_id} is part of the cluster and has its data: there is nothing to \
                 replace"
            ),
        }),
    }
}

fn refusal(reply: Reply) -> Error {
    match reply {
        Reply::NodeNotFound { node_id } => Error::NodeNotFound { node_id },
        Reply::ChangeInProgress { what } => Error::ChangeInProgress { what },
        Reply::NotEnoughNodes { what } => Error::NotEnoughNodes { what },
        Reply::Invalid { field, what } => Error::InvalidArgument { field, what },
        other => unexpected(&other),
    }
}
