//! Who is a member of the cluster, with which replicas, and the one change of it that runs.
//! A part of the cluster's state, as pure as the rest of it.
//!
//! Every shard has one replica on every member. A node's replicas all have its generation; an
//! emptied or returning node gets a later one, because a replica id must never vote with a lost
//! memory of what it voted for. For the same reason a generation is made once: until the node
//! [`Joined`] it is `joining`, and no shard counts on it; afterwards nobody has it made again.

use std::collections::{BTreeMap, BTreeSet};

use super::state::Reply;
use crate::limits::{ADDRESS_BYTES_MAX, MEMBERS_MAX};
use crate::log::{AddMember, Joined, MemberCommand, ReplaceMember, SetDraining, TakeUp};
use crate::raft::{ReplicaId, node_of, replica_id};

/// Every replica of a cluster that was formed together has the first generation. Nodes that join
/// later begin with the next one.
pub const FIRST_GENERATION: u32 = 1;

/// A node of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub node_id: u64,
    /// Of its replicas; 0 while it has none that take part.
    pub generation: u32,
    /// Of the replicas that it is to make.
    pub joining: Option<u32>,
    /// Where other nodes dial it; empty: as they were told at their start.
    pub peer_addr: String,
    /// It should lead nothing.
    pub draining: bool,
    /// Its replicas are to be dropped.
    pub leaving: bool,
}

impl Member {
    fn newest(&self) -> u32 {
        self.joining.unwrap_or(self.generation)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    Add,
    Remove,
    Replace,
}

/// A change of the members: one at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// From 1; 0 stands for a change that was none.
    pub id: u64,
    pub kind: ChangeKind,
    /// Who joins, or leaves where nobody joins.
    pub node_id: u64,
    /// Whose place is taken; 0 if nobody's.
    pub lost_node_id: u64,
    /// Version of the cluster's state that it last changed: shards that have done what that says
    /// have done it all.
    pub version: u64,
    pub done: bool,
}

impl Change {
    /// What is asked for is so already.
    fn nothing(kind: ChangeKind, node_id: u64) -> Self {
        Self { id: 0, kind, node_id, lost_node_id: 0, version: 0, done: true }
    }

    /// In words, for whoever has to wait for it.
    pub fn describe(&self) -> String {
        let Self { id, node_id, lost_node_id, .. } = self;
        match self.kind {
            ChangeKind::Add => format!("change {id}: node {node_id} is being added"),
            ChangeKind::Remove => format!("change {id}: node {node_id} is being removed"),
            ChangeKind::Replace => {
                format!("change {id}: node {lost_node_id} is being replaced by node {node_id}")
            }
        }
    }
}

/// Invariants: every member's generations are in `generations`, which never forgets a node;
/// `joining` and `leaving` are set only by the change that runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Members {
    pub(super) members: BTreeMap<u64, Member>,
    /// The last generation given to each node that ever was a member.
    pub(super) generations: BTreeMap<u64, u32>,
    /// The one that runs, or the last one.
    pub(super) change: Option<Change>,
    /// The last change that another one took the place of.
    pub(super) given_up: u64,
}

/// What came of a command.
pub(super) struct Outcome {
    pub(super) reply: Reply,
    pub(super) is_changed: bool,
    /// Nodes that are members no more.
    pub(super) gone: Vec<u64>,
}

impl Members {
    /// None in a cluster whose members have never been changed: then those that vote are members.
    pub fn is_known(&self) -> bool {
        !self.members.is_empty()
    }

    pub fn get(&self, node_id: u64) -> Option<&Member> {
        self.members.get(&node_id)
    }

    /// In the order of their ids.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Member> {
        self.members.values()
    }

    pub fn is_draining(&self, node_id: u64) -> bool {
        self.get(node_id).is_some_and(|member| member.draining || member.leaving)
    }

    /// The replicas that every shard should have as voters; empty while members are not known.
    pub fn target(&self) -> BTreeSet<ReplicaId> {
        let stays = self.members.values().filter(|it| !it.leaving && it.generation > 0);
        stays.map(|it| replica_id(it.node_id, it.generation)).collect()
    }

    /// The change that runs.
    pub fn running(&self) -> Option<&Change> {
        self.change.as_ref().filter(|change| !change.done)
    }

    /// The change that runs, or the last one.
    pub fn last_change(&self) -> Option<&Change> {
        self.change.as_ref()
    }

    /// Whether this change was given up in favour of another.
    pub fn is_given_up(&self, id: u64) -> bool {
        id != 0 && id == self.given_up
    }

    /// Why replicas of this generation (0: not told) of a node have no place here (any more). Of a
    /// later one than is known here this state has not heard yet: the node was taken in again.
    pub fn refusal(&self, node_id: u64, generation: u32) -> Option<String> {
        let last = self.generations.get(&node_id).copied();
        match self.get(node_id) {
            None if last.is_some_and(|last| generation <= last) => {
                Some(format!("node {node_id} was removed from this cluster"))
            }
            Some(member) if generation > 0 && generation < member.newest() => Some(format!(
                "node {node_id} was replaced: its replicas are of generation {generation}, now {} \
                 counts",
                member.newest()
            )),
            _ => None,
        }
    }

    /// `version` is the one that the state gets if this changes anything.
    pub(super) fn apply(
        &mut self,
        version: u64,
        command: &MemberCommand,
    ) -> Result<Outcome, Reply> {
        let mut gone = Vec::new();
        let before = self.clone();
        let reply = match command {
            MemberCommand::TakeUp(take_up) => self.take_up(take_up),
            MemberCommand::Add(add) => self.add(version, add)?,
            MemberCommand::Remove(remove) => self.remove(version, remove.node_id)?,
            MemberCommand::Replace(replace) => self.replace(version, replace)?,
            MemberCommand::SetDraining(set) => self.set_draining(*set)?,
            MemberCommand::Joined(joined) => self.joined(version, *joined),
            MemberCommand::Finish(id) => {
                gone = self.finish(*id);
                Reply::Done
            }
        };
        Ok(Outcome { reply, is_changed: *self != before, gone })
    }

    pub(super) fn take_up(&mut self, take_up: &TakeUp) -> Reply {
        if !self.is_known() {
            for &replica in &take_up.replicas {
                let node_id = node_of(replica);
                let generation = u32::try_from(replica & u64::from(u32::MAX)).unwrap_or(0);
                let member = Member {
                    node_id,
                    generation,
                    joining: None,
                    peer_addr: String::new(),
                    draining: false,
                    leaving: false,
                };
                self.members.insert(node_id, member);
                self.generations.insert(node_id, generation);
            }
        }
        Reply::Done
    }

    fn add(&mut self, version: u64, add: &AddMember) -> Result<Reply, Reply> {
        let AddMember { node_id, ref peer_addr } = *add;
        check_node(node_id)?;
        check_address(peer_addr)?;
        self.check_known()?;
        if let Some(member) = self.members.get_mut(&node_id) {
            if member.leaving {
                return Err(self.busy());
            }
            member.peer_addr.clone_from(peer_addr);
            let about = self.change.clone().filter(|it| it.node_id == node_id);
            let nothing = || Change::nothing(ChangeKind::Add, node_id);
            return Ok(Reply::Change(about.unwrap_or_else(nothing)));
        }
        if self.running().is_some() {
            return Err(self.busy());
        }
        if self.members.len() >= MEMBERS_MAX {
            let what = format!("a cluster has at most {MEMBERS_MAX} nodes, and this one has them");
            return Err(invalid("node_id", what));
        }
        self.insert_joining(node_id, peer_addr)?;
        Ok(self.begin(version, ChangeKind::Add, node_id, 0))
    }

    fn remove(&mut self, version: u64, node_id: u64) -> Result<Reply, Reply> {
        self.check_known()?;
        let Some(member) = self.members.get(&node_id) else {
            if self.generations.contains_key(&node_id) {
                let last = self.change.clone().filter(|it| it.node_id == node_id);
                let nothing = || Change::nothing(ChangeKind::Remove, node_id);
                return Ok(Reply::Change(last.unwrap_or_else(nothing)));
            }
            return Err(Reply::NodeNotFound { node_id });
        };
        if let Some(running) = self.running() {
            if running.kind == ChangeKind::Remove && running.node_id == node_id {
                return Ok(Reply::Change(running.clone()));
            }
            if running.kind == ChangeKind::Remove || running.node_id != node_id {
                return Err(self.busy());
            }
        }
        let stays = self.members.values().filter(|it| it.node_id != node_id && it.generation > 0);
        if stays.count() == 0 {
            let what = format!("node {node_id} is the only one that the cluster has");
            return Err(Reply::NotEnoughNodes { what });
        }
        let has_replicas = member.generation > 0;
        self.give_up();
        if has_replicas && let Some(member) = self.members.get_mut(&node_id) {
            member.leaving = true;
            member.joining = None;
        } else {
            // It never took part in anything.
            self.members.remove(&node_id);
        }
        Ok(self.begin(version, ChangeKind::Remove, node_id, 0))
    }

    fn replace(&mut self, version: u64, replace: &ReplaceMember) -> Result<Reply, Reply> {
        let ReplaceMember { lost_node_id, node_id, ref peer_addr, emptied } = *replace;
        check_node(node_id)?;
        self.check_known()?;
        if !peer_addr.is_empty() {
            check_address(peer_addr)?;
        }
        let last = self.change.clone();
        let is_this = |it: &Change| {
            it.kind == ChangeKind::Replace
                && (it.lost_node_id, it.node_id) == (lost_node_id, node_id)
        };
        let still_joins = self.members.get(&node_id).is_some_and(|it| it.joining.is_some());
        let asked_before = last.filter(|it| is_this(it) && (!emptied || still_joins));
        if let Some(same) = asked_before {
            return Ok(Reply::Change(same));
        }
        if !self.members.contains_key(&lost_node_id) {
            return Err(Reply::NodeNotFound { node_id: lost_node_id });
        }
        let stays_itself = lost_node_id == node_id;
        if let Some(running) = self.running() {
            let is_lost_again = stays_itself
                && running.node_id == node_id
                && running.kind != ChangeKind::Remove
                && !still_joins;
            if !is_lost_again {
                return Err(self.busy());
            }
        }
        if !stays_itself {
            if self.members.contains_key(&node_id) {
                let what = format!("node {node_id} is a member already");
                return Err(invalid("node_id", what));
            }
            check_address(peer_addr)?;
            self.insert_joining(node_id, peer_addr)?;
            return Ok(self.begin(version, ChangeKind::Replace, node_id, lost_node_id));
        }
        let generation = self.next_generation(node_id)?;
        self.give_up();
        if let Some(member) = self.members.get_mut(&node_id) {
            member.joining = Some(generation);
            if !peer_addr.is_empty() {
                member.peer_addr.clone_from(peer_addr);
            }
        }
        Ok(self.begin(version, ChangeKind::Replace, node_id, lost_node_id))
    }

    fn set_draining(&mut self, set: SetDraining) -> Result<Reply, Reply> {
        let SetDraining { node_id, draining } = set;
        self.check_known()?;
        let can_lead = |it: &&Member| {
            it.node_id != node_id && it.generation > 0 && !it.draining && !it.leaving
        };
        let others = self.members.values().filter(can_lead).count();
        let Some(member) = self.members.get_mut(&node_id) else {
            return Err(Reply::NodeNotFound { node_id });
        };
        if draining && !member.draining && others == 0 {
            let what = format!("no other node could lead what node {node_id} leads");
            return Err(Reply::NotEnoughNodes { what });
        }
        member.draining = draining;
        Ok(Reply::Done)
    }

    fn joined(&mut self, version: u64, joined: Joined) -> Reply {
        let Joined { node_id, generation } = joined;
        let Some(member) = self.members.get_mut(&node_id) else { return Reply::Done };
        if member.joining != Some(generation) {
            return Reply::Done;
        }
        member.joining = None;
        member.generation = generation;
        if let Some(change) = self.change.as_mut().filter(|it| it.node_id == node_id) {
            change.version = version;
            let lost = change.lost_node_id;
            if lost != node_id
                && let Some(lost) = self.members.get_mut(&lost)
            {
                lost.leaving = true;
            }
        }
        Reply::Done
    }

    fn finish(&mut self, id: u64) -> Vec<u64> {
        if self.members.values().any(|member| member.joining.is_some()) {
            return Vec::new();
        }
        let is_this = |change: &&mut Change| change.id == id && !change.done;
        let Some(change) = self.change.as_mut().filter(is_this) else { return Vec::new() };
        change.done = true;
        let kind = change.kind;
        let node_id = change.node_id;
        let mut gone: Vec<u64> =
            self.members.values().filter(|it| it.leaving).map(|it| it.node_id).collect();
        self.members.retain(|_, member| !member.leaving);
        if kind == ChangeKind::Remove && !gone.contains(&node_id) {
            gone.push(node_id);
        }
        gone
    }

    fn insert_joining(&mut self, node_id: u64, peer_addr: &str) -> Result<(), Reply> {
        let generation = self.next_generation(node_id)?;
        let member = Member {
            node_id,
            generation: 0,
            joining: Some(generation),
            peer_addr: peer_addr.to_owned(),
            draining: false,
            leaving: false,
        };
        self.members.insert(node_id, member);
        Ok(())
    }

    /// A generation that the node never had.
    fn next_generation(&mut self, node_id: u64) -> Result<u32, Reply> {
        let last = self.generations.get(&node_id).copied().unwrap_or(FIRST_GENERATION);
        let next = last.max(FIRST_GENERATION).checked_add(1);
        let next = next.ok_or_else(|| invalid("node_id", "its generations are used up"))?;
        self.generations.insert(node_id, next);
        Ok(next)
    }

    /// Undoes what the change that runs began and has not come far enough to count on.
    fn give_up(&mut self) {
        let Some(change) = self.running().cloned() else { return };
        self.given_up = change.id;
        if let Some(lost) = self.members.get_mut(&change.lost_node_id) {
            lost.leaving = false;
        }
    }

    fn begin(&mut self, version: u64, kind: ChangeKind, node_id: u64, lost: u64) -> Reply {
        let id = self.change.as_ref().map_or(1, |change| change.id + 1);
        let change = Change { id, kind, node_id, lost_node_id: lost, version, done: false };
        self.change = Some(change.clone());
        Reply::Change(change)
    }

    fn busy(&self) -> Reply {
        let what = self.running().map_or_else(String::new, Change::describe);
        Reply::ChangeInProgress { what }
    }

    fn check_known(&self) -> Result<(), Reply> {
        if self.is_known() {
            return Ok(());
        }
        Err(invalid("node_id", "the cluster's members have not been taken up yet"))
    }
}

fn invalid(field: &'static str, what: impl Into<String>) -> Reply {
    Reply::Invalid { field, what: what.into() }
}

fn check_node(node_id: u64) -> Result<(), Reply> {
    // A replica id has 32 bits for the node.
    if node_id == 0 || node_id > u64::from(u32::MAX) {
        return Err(invalid("node_id", "a node's number is in 1..=4294967295"));
    }
    Ok(())
}

fn check_address(address: &str) -> Result<(), Reply> {
    let parts = address.rsplit_once(':');
    let is_address =
        parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if is_address && address.len() <= ADDRESS_BYTES_MAX {
        return Ok(());
    }
    Err(invalid("peer_endpoint", format!("give it as host:port, not {address:?}")))
}

#[cfg(test)]
mod tests;
