//! Members of the cluster, their replica generations, and the membership change in progress.
//! Part of the cluster's state, and like it a pure function of shard 0's log.
//!
//! Without a [`ReplicaPlacement`], every shard has one replica on every member, and all replicas
//! of a node have its generation. With one, the node's generation is that of its replica of shard
//! 0, and each other replica gets a new one. An emptied or returning node gets a new generation,
//! because a replica id must never vote after it has lost its earlier votes. For the same reason
//! the replicas of a generation are created only once. Until the node has [`Joined`], its
//! generation is `joining` and no shard depends on it. Afterwards the replicas of that generation
//! are never created again.

use std::collections::{BTreeMap, BTreeSet};

use super::placement::ReplicaPlacement;
use crate::limits::{ADDRESS_BYTES_MAX, MEMBERS_MAX, RACK_BYTES_MAX, REPLICAS_MAX};
use crate::log::{
    AddMember, ChangeKind, ClusterReply, InitMembers, Joined, MemberChange, MemberCommand,
    ReplaceMember, SetDraining, SetRack,
};
use crate::quote::quote;
use crate::raft::{ReplicaId, node_of, replica_id};

/// Generation of the nodes that form a cluster together. Nodes that join later start with the next.
pub const FIRST_GENERATION: u32 = 1;

/// A node of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub node_id: u64,
    /// Generation of its replicas; 0 while it has none that take part.
    pub generation: u32,
    /// Generation of the replicas that it is about to create.
    pub joining: Option<u32>,
    /// Address that other nodes dial; empty if it was never set by a command.
    pub peer_addr: String,
    /// It must not lead any shard.
    pub draining: bool,
    /// Its replicas are being removed.
    pub leaving: bool,
    /// It gets no new replicas.
    pub cordoned: bool,
    /// Rack or zone; empty if it states none.
    pub rack: String,
}

impl Member {
    fn latest_generation(&self) -> u32 {
        self.joining.unwrap_or(self.generation)
    }
}

/// Members of the cluster and the last membership change.
///
/// Invariants: every member's generations are in `generations`, which never forgets a node;
/// `joining` and `leaving` are set only by the change in progress.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Members {
    pub(super) members: BTreeMap<u64, Member>,
    /// Latest generation of each node that ever was a member, of all its replicas.
    pub(super) generations: BTreeMap<u64, u32>,
    /// The change in progress, or the last one.
    pub(super) change: Option<MemberChange>,
    /// Id of the last change that was abandoned for another one; 0 if there was none.
    pub(super) abandoned: u64,
    /// Replicas of each shard; `None` while every shard has one on every member.
    pub(super) placement: Option<ReplicaPlacement>,
}

/// Result of a member command.
pub(super) struct MembersUpdate {
    pub(super) reply: ClusterReply,
    pub(super) is_changed: bool,
    /// Nodes that are no longer members.
    pub(super) removed: Vec<u64>,
}

impl Members {
    /// Returns `false` in a cluster whose members never changed; there the voters are the members.
    pub fn is_known(&self) -> bool {
        !self.members.is_empty()
    }

    pub fn get(&self, node_id: u64) -> Option<&Member> {
        self.members.get(&node_id)
    }

    /// Iterates over the members, sorted by node id.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Member> {
        self.members.values()
    }

    pub fn is_draining(&self, node_id: u64) -> bool {
        self.get(node_id).is_some_and(|member| member.draining || member.leaving)
    }

    /// Returns the voters that every shard should have without a placement; empty while the members
    /// are not known.
    pub fn target(&self) -> BTreeSet<ReplicaId> {
        let stays = self.members.values().filter(|it| !it.leaving && it.generation > 0);
        stays.map(|it| replica_id(it.node_id, it.generation)).collect()
    }

    /// Returns the change in progress.
    pub fn running(&self) -> Option<&MemberChange> {
        self.change.as_ref().filter(|change| !change.done)
    }

    /// Returns whether other nodes have replicas of a data shard of node `own`; `None` if unknown.
    ///
    /// `of_shard0` is the result for shard 0, which holds for data shards while no change is in
    /// progress. During a change, each shard changes its voters at a different time. So only nodes
    /// that vote both before and after the change count.
    pub fn others_have_data(&self, own: u64, of_shard0: Option<bool>) -> Option<bool> {
        let (Some(change), Some(_)) = (self.running(), of_shard0) else { return of_shard0 };
        let others = || self.members.values().filter(|it| it.node_id != own && it.generation > 0);
        let is_new =
            |it: &Member| change.kind != ChangeKind::Remove && it.node_id == change.node_id;
        let votes_throughout = |it: &Member| {
            let is_replaced_in_place = it.node_id == change.lost_node_id;
            !it.leaving && (!is_new(it) || is_replaced_in_place)
        };
        match (others().any(votes_throughout), others().next()) {
            (true, _) => Some(true),
            (false, Some(_)) => None,
            (false, None) => of_shard0,
        }
    }

    /// Returns the change in progress, or else the last one.
    pub fn last_change(&self) -> Option<&MemberChange> {
        self.change.as_ref()
    }

    /// Returns whether this change was abandoned for another one.
    pub fn is_abandoned(&self, id: u64) -> bool {
        id != 0 && id == self.abandoned
    }

    /// Returns why a node with replicas of this generation (0 if unknown) is not a member. A later
    /// generation than this state knows is not rejected: the node was added again meanwhile.
    pub fn refusal(&self, node_id: u64, generation: u32) -> Option<String> {
        let last = self.generations.get(&node_id).copied();
        match self.get(node_id) {
            None if last.is_some_and(|last| generation <= last) => {
                Some(format!("node {node_id} was removed from this cluster"))
            }
            Some(member) if generation > 0 && generation < member.latest_generation() => {
                Some(format!(
                    "node {node_id} was replaced: its replicas have generation {generation}, the \
                 current one is {}",
                    member.latest_generation()
                ))
            }
            _ => None,
        }
    }

    /// Applies a command. `version` is the version that the state gets if this changes anything.
    pub(super) fn apply(
        &mut self,
        version: u64,
        command: &MemberCommand,
    ) -> Result<MembersUpdate, ClusterReply> {
        let mut removed = Vec::new();
        let before = self.clone();
        let reply = match command {
            MemberCommand::InitMembers(init) => self.init(init),
            MemberCommand::Add(add) => self.add(version, add)?,
            MemberCommand::Remove(remove) => self.remove(version, remove.node_id)?,
            MemberCommand::Replace(replace) => self.replace(version, replace)?,
            MemberCommand::SetDraining(set) => self.set_draining(*set)?,
            MemberCommand::Joined(joined) => self.joined(version, *joined),
            MemberCommand::Finish(id) => {
                removed = self.finish(*id);
                ClusterReply::Done
            }
            MemberCommand::TakePlacement(take) => self.take_placement(take),
            MemberCommand::SetCordoned(set) => self.set_cordoned(*set)?,
            MemberCommand::SetReplicas(count) => self.set_replicas(*count)?,
            MemberCommand::PlanMove(plan) => self.plan_move(version, *plan)?,
            MemberCommand::ReplicaCreated(created) => self.replica_created(*created),
            MemberCommand::FinishMove(finish) => self.finish_move(*finish),
            MemberCommand::CancelMove(cancel) => self.cancel_move(*cancel),
            MemberCommand::AddShards(add) => self.add_shards(*add)?,
            MemberCommand::SetRack(set) => self.set_rack(set)?,
            MemberCommand::PauseMoves(paused) => self.pause_moves(*paused)?,
            MemberCommand::CancelSplit(cancel) => self.cancel_split(*cancel),
            MemberCommand::EndSplit(end) => self.end_split(*end),
            // `ClusterState` applies these commands, because they also change topics.
            MemberCommand::PlanSplit(_) | MemberCommand::SplitProgress(_) => ClusterReply::Done,
        };
        Ok(MembersUpdate { reply, is_changed: *self != before, removed })
    }

    pub(super) fn init(&mut self, init: &InitMembers) -> ClusterReply {
        if !self.is_known() {
            for &replica in &init.replicas {
                let node_id = node_of(replica);
                let generation = u32::try_from(replica & u64::from(u32::MAX)).unwrap_or(0);
                let member = Member {
                    node_id,
                    generation,
                    joining: None,
                    peer_addr: String::new(),
                    draining: false,
                    leaving: false,
                    cordoned: false,
                    rack: String::new(),
                };
                self.members.insert(node_id, member);
                self.generations.insert(node_id, generation);
            }
        }
        ClusterReply::Done
    }

    fn add(&mut self, version: u64, add: &AddMember) -> Result<ClusterReply, ClusterReply> {
        let AddMember { node_id, ref peer_addr } = *add;
        check_node(node_id)?;
        check_address(peer_addr)?;
        self.check_known()?;
        if let Some(member) = self.members.get_mut(&node_id) {
            if member.leaving {
                return Err(self.busy());
            }
            member.peer_addr.clone_from(peer_addr);
            let own_change = self.change.clone().filter(|it| it.node_id == node_id);
            let no_op = || MemberChange::no_op(ChangeKind::Add, node_id);
            return Ok(ClusterReply::MemberChange(own_change.unwrap_or_else(no_op)));
        }
        if self.running().is_some() {
            return Err(self.busy());
        }
        let most = if self.placement.is_some() { MEMBERS_MAX } else { REPLICAS_MAX };
        if self.members.len() >= most {
            let what = format!("the cluster has {most} nodes, which is the limit");
            return Err(invalid("node_id", what));
        }
        self.insert_joining(node_id, peer_addr)?;
        Ok(self.begin(version, ChangeKind::Add, node_id, 0))
    }

    fn remove(&mut self, version: u64, node_id: u64) -> Result<ClusterReply, ClusterReply> {
        self.check_known()?;
        let Some(member) = self.members.get(&node_id) else {
            if self.generations.contains_key(&node_id) {
                let last = self.change.clone().filter(|it| it.node_id == node_id);
                let no_op = || MemberChange::no_op(ChangeKind::Remove, node_id);
                return Ok(ClusterReply::MemberChange(last.unwrap_or_else(no_op)));
            }
            return Err(ClusterReply::NodeNotFound { node_id });
        };
        if let Some(running) = self.running() {
            if running.kind == ChangeKind::Remove && running.node_id == node_id {
                return Ok(ClusterReply::MemberChange(running.clone()));
            }
            if running.kind == ChangeKind::Remove || running.node_id != node_id {
                return Err(self.busy());
            }
        }
        let stays = self.members.values().filter(|it| it.node_id != node_id && it.generation > 0);
        if stays.count() == 0 {
            let what = format!("node {node_id} is the only node of the cluster");
            return Err(ClusterReply::NotEnoughNodes { what });
        }
        let has_replicas = member.generation > 0;
        self.abandon_running();
        if has_replicas && let Some(member) = self.members.get_mut(&node_id) {
            member.leaving = true;
            member.joining = None;
        } else {
            // It never had replicas that took part.
            self.members.remove(&node_id);
        }
        Ok(self.begin(version, ChangeKind::Remove, node_id, 0))
    }

    fn replace(
        &mut self,
        version: u64,
        replace: &ReplaceMember,
    ) -> Result<ClusterReply, ClusterReply> {
        let ReplaceMember { lost_node_id, node_id, ref peer_addr, emptied } = *replace;
        check_node(node_id)?;
        self.check_known()?;
        if !peer_addr.is_empty() {
            check_address(peer_addr)?;
        }
        let last = self.change.clone();
        let is_this = |it: &MemberChange| {
            it.kind == ChangeKind::Replace
                && (it.lost_node_id, it.node_id) == (lost_node_id, node_id)
        };
        let is_joining = self.members.get(&node_id).is_some_and(|it| it.joining.is_some());
        let repeated = last.filter(|it| is_this(it) && (!emptied || is_joining));
        if let Some(same) = repeated {
            return Ok(ClusterReply::MemberChange(same));
        }
        if !self.members.contains_key(&lost_node_id) {
            return Err(ClusterReply::NodeNotFound { node_id: lost_node_id });
        }
        let is_same_node = lost_node_id == node_id;
        if let Some(running) = self.running() {
            let is_lost_again = is_same_node
                && running.node_id == node_id
                && running.kind != ChangeKind::Remove
                && !is_joining;
            if !is_lost_again {
                return Err(self.busy());
            }
        }
        if !is_same_node {
            if self.members.contains_key(&node_id) {
                let what = format!("node {node_id} is already a member");
                return Err(invalid("node_id", what));
            }
            check_address(peer_addr)?;
            self.insert_joining(node_id, peer_addr)?;
            return Ok(self.begin(version, ChangeKind::Replace, node_id, lost_node_id));
        }
        let generation = self.next_generation(node_id)?;
        self.abandon_running();
        if let Some(member) = self.members.get_mut(&node_id) {
            member.joining = Some(generation);
            if !peer_addr.is_empty() {
                member.peer_addr.clone_from(peer_addr);
            }
        }
        Ok(self.begin(version, ChangeKind::Replace, node_id, lost_node_id))
    }

    fn set_draining(&mut self, set: SetDraining) -> Result<ClusterReply, ClusterReply> {
        let SetDraining { node_id, draining } = set;
        self.check_known()?;
        let can_lead = |it: &&Member| {
            it.node_id != node_id && it.generation > 0 && !it.draining && !it.leaving
        };
        let others = self.members.values().filter(can_lead).count();
        let Some(member) = self.members.get_mut(&node_id) else {
            return Err(ClusterReply::NodeNotFound { node_id });
        };
        if draining && !member.draining && others == 0 {
            let what = format!("no other node may lead the shards of node {node_id}");
            return Err(ClusterReply::NotEnoughNodes { what });
        }
        member.draining = draining;
        Ok(ClusterReply::Done)
    }

    fn set_rack(&mut self, set: &SetRack) -> Result<ClusterReply, ClusterReply> {
        let SetRack { node_id, ref rack } = *set;
        self.check_known()?;
        if rack.len() > RACK_BYTES_MAX {
            let what = format!("{} bytes, at most {RACK_BYTES_MAX} are allowed", rack.len());
            return Err(invalid("rack", what));
        }
        let Some(member) = self.members.get_mut(&node_id) else {
            return Err(ClusterReply::NodeNotFound { node_id });
        };
        member.rack.clone_from(rack);
        Ok(ClusterReply::Done)
    }

    fn joined(&mut self, version: u64, joined: Joined) -> ClusterReply {
        let Joined { node_id, generation } = joined;
        let Some(member) = self.members.get_mut(&node_id) else { return ClusterReply::Done };
        if member.joining != Some(generation) {
            return ClusterReply::Done;
        }
        member.joining = None;
        member.generation = generation;
        if let Some(placement) = &mut self.placement {
            placement.renew_vote(node_id, generation);
        }
        if let Some(change) = self.change.as_mut().filter(|it| it.node_id == node_id) {
            change.version = version;
            let lost = change.lost_node_id;
            if lost != node_id
                && let Some(lost) = self.members.get_mut(&lost)
            {
                lost.leaving = true;
            }
        }
        ClusterReply::Done
    }

    fn finish(&mut self, id: u64) -> Vec<u64> {
        if self.members.values().any(|member| member.joining.is_some()) {
            return Vec::new();
        }
        let leaving = self.members.values().filter(|member| member.leaving);
        if leaving.into_iter().any(|member| self.has_replicas(member.node_id)) {
            return Vec::new();
        }
        let is_this = |change: &&mut MemberChange| change.id == id && !change.done;
        let Some(change) = self.change.as_mut().filter(is_this) else { return Vec::new() };
        change.done = true;
        let kind = change.kind;
        let node_id = change.node_id;
        let mut removed: Vec<u64> =
            self.members.values().filter(|it| it.leaving).map(|it| it.node_id).collect();
        self.members.retain(|_, member| !member.leaving);
        if kind == ChangeKind::Remove && !removed.contains(&node_id) {
            removed.push(node_id);
        }
        removed
    }

    fn insert_joining(&mut self, node_id: u64, peer_addr: &str) -> Result<(), ClusterReply> {
        let generation = self.next_generation(node_id)?;
        let member = Member {
            node_id,
            generation: 0,
            joining: Some(generation),
            peer_addr: peer_addr.to_owned(),
            draining: false,
            leaving: false,
            cordoned: false,
            rack: String::new(),
        };
        self.members.insert(node_id, member);
        Ok(())
    }

    /// Returns a generation that the node never had.
    pub(super) fn next_generation(&mut self, node_id: u64) -> Result<u32, ClusterReply> {
        let last = self.generations.get(&node_id).copied().unwrap_or(FIRST_GENERATION);
        let next = last.max(FIRST_GENERATION).checked_add(1);
        let next =
            next.ok_or_else(|| invalid("node_id", "the node has used up its generations"))?;
        self.generations.insert(node_id, next);
        Ok(next)
    }

    /// Marks the change in progress as abandoned; the node that it was to replace stays a member.
    fn abandon_running(&mut self) {
        let Some(change) = self.running().cloned() else { return };
        self.abandoned = change.id;
        if let Some(lost) = self.members.get_mut(&change.lost_node_id) {
            lost.leaving = false;
        }
    }

    fn begin(&mut self, version: u64, kind: ChangeKind, node_id: u64, lost: u64) -> ClusterReply {
        let id = self.change.as_ref().map_or(1, |change| change.id + 1);
        let change = MemberChange { id, kind, node_id, lost_node_id: lost, version, done: false };
        self.change = Some(change.clone());
        ClusterReply::MemberChange(change)
    }

    pub(super) fn busy(&self) -> ClusterReply {
        let what = self.running().map_or_else(String::new, MemberChange::describe);
        ClusterReply::ChangeInProgress { what }
    }

    pub(super) fn check_known(&self) -> Result<(), ClusterReply> {
        if self.is_known() {
            return Ok(());
        }
        Err(invalid("node_id", "the members of the cluster are not initialized yet"))
    }
}

pub(super) fn invalid(field: &'static str, what: impl Into<String>) -> ClusterReply {
    ClusterReply::Invalid { field, what: what.into() }
}

fn check_node(node_id: u64) -> Result<(), ClusterReply> {
    // A replica id has 32 bits for the node id.
    if node_id == 0 || node_id > u64::from(u32::MAX) {
        return Err(invalid("node_id", "a node id must be in 1..=4294967295"));
    }
    Ok(())
}

fn check_address(address: &str) -> Result<(), ClusterReply> {
    let parts = address.rsplit_once(':');
    let is_address =
        parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if is_address && address.len() <= ADDRESS_BYTES_MAX {
        return Ok(());
    }
    Err(invalid("peer_endpoint", format!("{} is not of the form host:port", quote(address))))
}

#[cfg(test)]
mod tests;
