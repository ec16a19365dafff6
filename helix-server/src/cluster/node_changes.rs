//! Membership changes as operators request them: add, remove, replace and drain a node. A request
//! is checked first, then submitted as a command to the cluster's state. `change_driver` carries
//! out the change that the command starts.

use std::collections::BTreeSet;

use tokio::time::Instant;

use super::client::{Cluster, unexpected};
use super::members::{Member, Members};
use super::obstacle::removal_obstacle;
use super::state::ClusterState;
use crate::error::{Error, Result};
use crate::limits;
use crate::log::{
    AddMember, ChangeKind, ClusterCommand, ClusterReply, InitMembers, MemberChange, MemberCommand,
    RemoveMember, ReplaceMember, SetDraining,
};
use crate::peer::{Hello, PeerError};
use crate::raft::{Replica, node_of};

/// A requested removal of a node.
#[derive(Debug, Clone, Copy)]
pub struct NodeRemoval {
    pub node_id: u64,
    /// The node does not respond and will not return.
    pub is_lost: bool,
    /// The other nodes need not take all of its replicas.
    pub allow_fewer_replicas: bool,
}

/// A requested change with the nodes that it depends on.
struct CheckedChange {
    command: MemberCommand,
    /// Voters, a majority of which must be reachable.
    voters: BTreeSet<u64>,
    /// The joining node. It counts as reachable, because its response is checked separately.
    newcomer: Option<u64>,
}

impl Cluster {
    /// Adds a node that waits at `peer_addr`; for a member, changes its address. Returns `None` if
    /// `validate_only` is set.
    ///
    /// # Errors
    /// [`Error::ChangeInProgress`], [`Error::NotEnoughNodes`] or [`Error::ChangeRefused`] with the
    /// check that failed, and the errors of [`Self::catch_up`] and [`Self::command`].
    pub async fn add_node(
        &self,
        node_id: u64,
        peer_addr: String,
        validate_only: bool,
    ) -> Result<Option<MemberChange>> {
        self.catch_up().await?;
        let command = MemberCommand::Add(AddMember { node_id, peer_addr: peer_addr.clone() });
        let members = self.preview(&command)?;
        let is_member = self.members_now().get(node_id).is_some();
        if !is_member {
            let newcomer = self.check_newcomer(node_id, &peer_addr).await;
            let voters = members.iter().map(|it| it.node_id).collect();
            let change =
                CheckedChange { command: command.clone(), voters, newcomer: Some(node_id) };
            all_of([newcomer, self.check_change(change)])?;
        }
        self.submit_unless_validating(command, validate_only).await
    }

    /// Removes a node. An unreachable node is removed only if it is declared lost.
    ///
    /// # Errors
    /// As [`Self::add_node`]; [`Error::NodeNotFound`] for an unknown node, and
    /// [`Error::NotEnoughNodes`] if the other nodes cannot take the replicas of a node that is not
    /// lost.
    pub async fn remove_node(
        &self,
        removal: NodeRemoval,
        validate_only: bool,
    ) -> Result<Option<MemberChange>> {
        let NodeRemoval { node_id, is_lost, allow_fewer_replicas } = removal;
        self.catch_up().await?;
        let command = MemberCommand::Remove(RemoveMember { node_id });
        self.preview(&command)?;
        let members = self.members_now();
        if let Some(member) = members.get(node_id).filter(|it| it.generation > 0 && !it.leaving) {
            if !is_lost && let Some(why) = self.unreachable_reason(member.node_id) {
                let what = format!(
                    "node {node_id} does not respond ({why}); if it will not return, say that it \
                     is lost"
                );
                return Err(Error::ChangeRefused { what });
            }
            let stays = members.iter().filter(|it| it.node_id != node_id && it.generation > 0);
            let voters = stays.map(|it| it.node_id).collect();
            self.check_change(CheckedChange { command: command.clone(), voters, newcomer: None })?;
            if !is_lost
                && !allow_fewer_replicas
                && let Some(obstacle) = removal_obstacle(&members, node_id)
            {
                let what = format!("{}; {}", obstacle.what, obstacle.next_step);
                return Err(Error::NotEnoughNodes { what });
            }
        }
        self.submit_unless_validating(command, validate_only).await
    }

    /// Replaces a lost node with `node_id`, which may be the same id, with an empty data directory.
    ///
    /// # Errors
    /// As [`Self::add_node`]; [`Error::NodeNotFound`] if the lost node is unknown.
    pub async fn replace_node(
        &self,
        lost_node_id: u64,
        node_id: u64,
        peer_addr: String,
        validate_only: bool,
    ) -> Result<Option<MemberChange>> {
        self.catch_up().await?;
        let members = self.members_now();
        let address = match peer_addr.as_str() {
            "" if node_id == lost_node_id => self.address_of(node_id).unwrap_or_default(),
            given => given.to_owned(),
        };
        if node_id == self.node_id() {
            // This node serves as a member, so it has its data. It may be unable to dial itself.
            return previous_replace(&members, lost_node_id, node_id, validate_only);
        }
        let hello = self.ask_newcomer(node_id, &address).await;
        if hello.as_ref().is_ok_and(|it| it.cluster.is_some() && it.cluster == self.hub.cluster()) {
            return previous_replace(&members, lost_node_id, node_id, validate_only);
        }
        let newcomer = hello.and_then(|hello| check_empty(node_id, &address, &hello));
        let has_joined = members.get(node_id).is_some_and(|it| it.joining.is_none());
        let emptied = newcomer.is_ok() && has_joined;
        let replace = ReplaceMember { lost_node_id, node_id, peer_addr, emptied };
        let command = MemberCommand::Replace(replace);
        // A rejection of the command itself is more specific than the checks.
        let after = self.preview(&command)?;
        // A majority of the current voters, without the lost one, and of the new voters must be
        // reachable.
        let remains = |it: &&Member| it.node_id != lost_node_id || node_id == lost_node_id;
        let voters = after.iter().filter(remains).map(|it| it.node_id).collect();
        let change = CheckedChange { command: command.clone(), voters, newcomer: Some(node_id) };
        let before = members.iter().filter(|it| it.generation > 0).map(|it| it.node_id);
        let before: BTreeSet<u64> = before.collect();
        let of_current_voters = self.check_majority(&before, None, Some(lost_node_id));
        all_of([newcomer, self.check_change(change), of_current_voters])?;
        self.submit_unless_validating(command, validate_only).await
    }

    /// Drains a node and waits until it leads no shards, or stops draining it.
    ///
    /// # Errors
    /// [`Error::NodeNotFound`] for an unknown node, [`Error::NotEnoughNodes`] if no other reachable
    /// node may lead, [`Error::ChangeRefused`] if the node still leads shards after a wait, and the
    /// errors of [`Self::catch_up`] and [`Self::command`].
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
            let may_lead = |it: &&Member| {
                it.node_id != node_id && it.generation > 0 && !members.is_draining(it.node_id)
            };
            let is_reachable = |it: &Member| self.unreachable_reason(it.node_id).is_none();
            if !members.iter().filter(may_lead).any(is_reachable) {
                let what = format!("no reachable node may lead the shards of node {node_id}");
                return Err(Error::NotEnoughNodes { what });
            }
        }
        if validate_only {
            return Ok(());
        }
        self.change_members(command).await?;
        if draining { self.wait_drained(node_id).await } else { Ok(()) }
    }

    async fn wait_drained(&self, node_id: u64) -> Result<()> {
        let deadline = Instant::now() + limits::DRAIN_WAIT_MAX;
        loop {
            let led = self.led_by(node_id);
            if led.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let what = format!(
                    "node {node_id} is draining, but after {:?} it still leads the shards {led:?}: \
                     no other node could take over; see the cluster's health",
                    limits::DRAIN_WAIT_MAX
                );
                return Err(Error::ChangeRefused { what });
            }
            tokio::time::sleep(limits::LEADER_POLL_INTERVAL).await;
        }
    }

    /// Returns the shards that `node_id` leads, as far as this node knows.
    fn led_by(&self, node_id: u64) -> Vec<u64> {
        let is_leader =
            |replica: &Replica| replica.leadership().leader.map(node_of) == Some(node_id);
        let own = is_leader(&self.replica()).then_some(0);
        let shards = self.open_shards();
        let led = shards.iter().filter(|shard| is_leader(shard.replica())).map(|shard| shard.id());
        own.into_iter().chain(led).collect()
    }

    /// Returns the members; while they have never been changed, the voters.
    pub(super) fn members_now(&self) -> Members {
        let mut members = self.machine().read(|state| state.members().clone());
        if !members.is_known() {
            members.init(&InitMembers { replicas: self.replica().voters() });
        }
        members
    }

    /// Returns the members as they would be after this command, or the error that it would get.
    fn preview(&self, command: &MemberCommand) -> Result<Members> {
        let version = self.machine().read(ClusterState::version);
        let mut members = self.members_now();
        members.apply(version + 1, command).map_err(refusal)?;
        Ok(members)
    }

    async fn submit_unless_validating(
        &self,
        command: MemberCommand,
        validate_only: bool,
    ) -> Result<Option<MemberChange>> {
        if validate_only {
            return Ok(None);
        }
        match self.change_members(command).await? {
            ClusterReply::MemberChange(change) => Ok(Some(change)),
            other => Err(unexpected(&other)),
        }
    }

    /// Submits a member command. The first one is preceded by the initialization of the members.
    async fn change_members(&self, command: MemberCommand) -> Result<ClusterReply> {
        if !self.machine().read(|state| state.members().is_known()) {
            let replicas = self.replica().voters();
            let take_up = MemberCommand::InitMembers(InitMembers { replicas });
            self.command(ClusterCommand::Members(take_up)).await?;
        }
        match self.command(ClusterCommand::Members(command)).await? {
            reply @ (ClusterReply::MemberChange(_) | ClusterReply::Done) => Ok(reply),
            refused => Err(refusal(refused)),
        }
    }

    /// Returns why this node is not connected to another one; `None` if it is, and for itself.
    fn unreachable_reason(&self, node_id: u64) -> Option<String> {
        if node_id == self.node_id() {
            return None;
        }
        let peers = self.hub.peers();
        let Some(peer) = peers.into_iter().find(|peer| peer.node_id == node_id) else {
            return Some("its address is not known".to_owned());
        };
        (!peer.connected).then(|| peer.last_error.unwrap_or_else(|| "not connected".to_owned()))
    }

    fn check_change(&self, change: CheckedChange) -> Result<()> {
        let CheckedChange { command, voters, newcomer } = change;
        let own = self.address_of(self.node_id());
        if newcomer.is_some() && voters.len() > 1 && own.is_none() && self.nodes().len() == 1 {
            let node_id = self.node_id();
            let what = format!(
                "{}: node {node_id} has no peer port; restart it with --peer {node_id}=HOST:PORT, \
                 the address that other nodes dial",
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
            gone == Some(*node)
                || newcomer != Some(*node) && self.unreachable_reason(*node).is_some()
        };
        let lost: Vec<u64> = voters.iter().copied().filter(is_lost).collect();
        let (count, reachable) = (voters.len(), voters.len() - lost.len());
        let needed = count / 2 + 1;
        if reachable >= needed {
            return Ok(());
        }
        let what = format!(
            "it would leave {reachable} of {count} voters reachable, {needed} are needed; \
             unreachable: {lost:?}"
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
                 data directory, --peer-addr, and --peer for each node of this cluster"
            );
            Error::ChangeRefused { what }
        })?;
        let (theirs, protocol) = (hello.versions, self.protocol());
        if !theirs.contains(protocol) {
            let what = format!(
                "node {node_id} speaks protocol {theirs}, but the cluster uses version {protocol}; \
                 start it with a release that speaks {protocol}, as the other nodes do"
            );
            return Err(Error::ChangeRefused { what });
        }
        Ok(hello)
    }

    async fn check_newcomer(&self, node_id: u64, address: &str) -> Result<()> {
        let hello = self.ask_newcomer(node_id, address).await?;
        check_empty(node_id, address, &hello)
    }
}

/// Returns the first error with the texts of all others, so that one correction is enough.
fn all_of<const N: usize>(checks: [Result<()>; N]) -> Result<()> {
    let mut failed = checks.into_iter().filter_map(Result::err);
    let Some(first) = failed.next() else { return Ok(()) };
    let join = |what: String| {
        failed.fold(what, |said, error| match error {
            Error::NotEnoughNodes { what } if said.contains(&what) => said,
            other => format!("{said}; {other}"),
        })
    };
    Err(match first {
        Error::ChangeRefused { what } => Error::ChangeRefused { what: join(what) },
        Error::NotEnoughNodes { what } => Error::NotEnoughNodes { what: join(what) },
        other => other,
    })
}

fn check_empty(node_id: u64, address: &str, hello: &Hello) -> Result<()> {
    let Some(cluster) = hello.cluster else { return Ok(()) };
    let what = format!(
        "node {node_id} at {address} already belongs to cluster {cluster:032x}; only a node with \
         an empty data directory can join"
    );
    Err(Error::ChangeRefused { what })
}

/// Responds to a replacement by a node that already has the cluster's data.
/// Returns the last change if it is this replacement.
fn previous_replace(
    members: &Members,
    lost_node_id: u64,
    node_id: u64,
    validate_only: bool,
) -> Result<Option<MemberChange>> {
    let replaces = |it: &&MemberChange| {
        it.kind == ChangeKind::Replace && (it.lost_node_id, it.node_id) == (lost_node_id, node_id)
    };
    match members.last_change().filter(replaces) {
        Some(same) => Ok(Some(same.clone()).filter(|_| !validate_only)),
        None => Err(Error::ChangeRefused {
            what: format!(
                "node {node_id} is a member of the cluster and has its data; there is nothing to \
                 replace"
            ),
        }),
    }
}

pub(super) fn refusal(reply: ClusterReply) -> Error {
    match reply {
        ClusterReply::NodeNotFound { node_id } => Error::NodeNotFound { node_id },
        ClusterReply::ChangeInProgress { what } => Error::ChangeInProgress { what },
        ClusterReply::NotEnoughNodes { what } => Error::NotEnoughNodes { what },
        ClusterReply::Invalid { field, what } => Error::InvalidArgument { field, what },
        other => unexpected(&other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_failed_checks_are_reported_once() {
        let refused = || Error::ChangeRefused { what: "node 4 cannot be reached".to_owned() };
        let lacking = || Error::NotEnoughNodes { what: "1 of 3 voters".to_owned() };
        assert!(all_of([Ok(()), Ok(())]).is_ok());
        let error = all_of([Err(refused()), Err(lacking()), Err(lacking())]).unwrap_err();
        let Error::ChangeRefused { what } = error else { panic!("{error}") };
        assert_eq!(what, "node 4 cannot be reached; not enough nodes: 1 of 3 voters");
        let error = all_of([Ok(()), Err(lacking()), Err(lacking())]).unwrap_err();
        let Error::NotEnoughNodes { what } = error else { panic!("{error}") };
        assert_eq!(what, "1 of 3 voters");
    }
}
