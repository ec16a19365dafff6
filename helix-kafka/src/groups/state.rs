//! The state of one group of Kafka's classic protocol. It performs no I/O and has no clock.
//!
//! Members join, the gateway makes one of them the leader, the leader computes an assignment, and
//! the gateway hands it out. Each round is a generation. This is soft state: after a restart of the
//! gateway the members join again.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Most members of a group.
pub(crate) const MEMBERS_MAX: usize = 1_000;

/// Bounds of a session timeout.
const SESSION_MIN: Duration = Duration::from_secs(1);
const SESSION_MAX: Duration = Duration::from_secs(1_800);

/// Wait for further members before the first generation of a group.
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// Progress of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RebalanceState {
    /// No members.
    Empty,
    /// Members have to join again.
    Joining,
    /// The leader computes the assignment.
    Syncing,
    /// Every member has its assignment.
    Stable,
}

impl RebalanceState {
    /// Returns the name that Kafka's tools show.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Empty => "Empty",
            Self::Joining => "PreparingRebalance",
            Self::Syncing => "CompletingRebalance",
            Self::Stable => "Stable",
        }
    }
}

/// A request to join.
#[derive(Debug, Clone)]
pub(crate) struct JoinSpec {
    /// Empty for a new member.
    pub(crate) member_id: String,
    /// Id that a new member gets.
    pub(crate) new_id: String,
    /// A new member has to ask again with its id, so that lost responses leave none behind.
    pub(crate) must_know_id: bool,
    pub(crate) instance_id: Option<String>,
    pub(crate) client_id: String,
    pub(crate) client_host: String,
    pub(crate) session_timeout: Duration,
    pub(crate) rebalance_timeout: Duration,
    pub(crate) protocol_type: String,
    /// Names and metadata, the preferred one first.
    pub(crate) protocols: Vec<(String, Bytes)>,
}

/// Response to a member that has joined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Joined {
    pub(crate) generation: i32,
    pub(crate) protocol_type: String,
    pub(crate) protocol: String,
    pub(crate) leader: String,
    pub(crate) member_id: String,
    /// For the leader: ids, static names and metadata of all members.
    pub(crate) members: Vec<(String, Option<String>, Bytes)>,
}

/// Response to a member that has joined, or the code of a failure with the id of the member.
pub(crate) type JoinResult = Result<Joined, (ResponseError, String)>;

/// The assignment of a member.
pub(crate) type SyncResult = Result<Bytes, ResponseError>;

/// Response now, or later.
#[derive(Debug)]
pub(crate) enum Reply<T> {
    Now(T),
    Later(oneshot::Receiver<T>),
}

/// A member.
#[derive(Debug)]
pub(crate) struct KafkaMember {
    pub(crate) instance_id: Option<String>,
    pub(crate) client_id: String,
    pub(crate) client_host: String,
    session_timeout: Duration,
    rebalance_timeout: Duration,
    protocols: Vec<(String, Bytes)>,
    pub(crate) assignment: Bytes,
    /// Waits for the generation.
    joining: Option<oneshot::Sender<JoinResult>>,
    /// Waits for its assignment.
    syncing: Option<oneshot::Sender<SyncResult>>,
    expires_at: Instant,
}

impl KafkaMember {
    fn bytes(&self) -> usize {
        let protocols = self.protocols.iter().map(|(name, metadata)| name.len() + metadata.len());
        protocols.sum::<usize>() + self.assignment.len() + 512
    }

    fn metadata(&self, protocol: &str) -> Bytes {
        let found = self.protocols.iter().find(|(name, _)| name == protocol);
        found.map(|(_, metadata)| metadata.clone()).unwrap_or_default()
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct KafkaGroup {
    pub(crate) state: RebalanceState,
    pub(crate) generation: i32,
    pub(crate) protocol_type: String,
    pub(crate) protocol: String,
    leader: String,
    pub(crate) members: BTreeMap<String, KafkaMember>,
    /// New members that have to ask again, until their times.
    expected: HashMap<String, Instant>,
    /// End of the round of joins, and its earliest end.
    join_deadline: Instant,
    join_not_before: Instant,
}

impl KafkaGroup {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            state: RebalanceState::Empty,
            generation: 0,
            protocol_type: String::new(),
            protocol: String::new(),
            leader: String::new(),
            members: BTreeMap::new(),
            expected: HashMap::new(),
            join_deadline: now,
            join_not_before: now,
        }
    }

    /// Returns true if nothing is left to remember.
    pub(crate) fn is_unused(&self) -> bool {
        self.members.is_empty() && self.expected.is_empty()
    }

    /// Returns the memory of the group, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.members.values().map(KafkaMember::bytes).sum::<usize>() + self.expected.len() * 128
    }

    /// Returns the metadata of a member for the group's protocol.
    pub(crate) fn metadata_of(&self, member: &KafkaMember) -> Bytes {
        member.metadata(&self.protocol)
    }

    /// Adds a member, or lets one join again.
    pub(crate) fn join(&mut self, spec: JoinSpec, now: Instant) -> Reply<JoinResult> {
        let refuse = |code| Reply::Now(Err((code, spec.member_id.clone())));
        if !(SESSION_MIN..=SESSION_MAX).contains(&spec.session_timeout) {
            return refuse(ResponseError::InvalidSessionTimeout);
        }
        if !self.supports(&spec) {
            return refuse(ResponseError::InconsistentGroupProtocol);
        }
        if let Some(old) = spec.instance_id.as_ref().and_then(|name| self.member_named(name)) {
            if spec.member_id.is_empty() {
                return self.replace(&old, spec, now);
            }
            if old != spec.member_id {
                return refuse(ResponseError::FencedInstanceId);
            }
        }
        if spec.member_id.is_empty() {
            if self.members.len() + self.expected.len() >= MEMBERS_MAX {
                return refuse(ResponseError::GroupMaxSizeReached);
            }
            if spec.must_know_id && spec.instance_id.is_none() {
                self.expected.insert(spec.new_id.clone(), now + spec.session_timeout);
                return Reply::Now(Err((ResponseError::MemberIdRequired, spec.new_id)));
            }
            let member_id = spec.new_id.clone();
            return self.add(member_id, spec, now);
        }
        if !self.members.contains_key(&spec.member_id) {
            return match self.expected.remove(&spec.member_id) {
                Some(_) => {
                    let member_id = spec.member_id.clone();
                    self.add(member_id, spec, now)
                }
                None => refuse(ResponseError::UnknownMemberId),
            };
        }
        self.rejoin(spec, now)
    }

    /// Returns true if the member has a protocol that all others have.
    fn supports(&self, spec: &JoinSpec) -> bool {
        if spec.protocols.is_empty() || spec.protocol_type.is_empty() {
            return false;
        }
        let mut others = self.members.iter().filter(|(id, _)| **id != spec.member_id).peekable();
        if others.peek().is_none() {
            return true;
        }
        let others: Vec<_> = others.map(|(_, member)| member).collect();
        let is_common = |name: &String| {
            others.iter().all(|member| member.protocols.iter().any(|(other, _)| other == name))
        };
        spec.protocol_type == self.protocol_type
            && spec.protocols.iter().any(|(name, _)| is_common(name))
    }

    fn member_named(&self, name: &str) -> Option<String> {
        let is_named =
            |(_, member): &(&String, &KafkaMember)| member.instance_id.as_deref() == Some(name);
        self.members.iter().find(is_named).map(|(id, _)| id.clone())
    }

    fn add(&mut self, member_id: String, spec: JoinSpec, now: Instant) -> Reply<JoinResult> {
        let is_first = self.members.is_empty();
        if is_first {
            self.protocol_type.clone_from(&spec.protocol_type);
        }
        let (joining, joined) = oneshot::channel();
        let member = KafkaMember {
            instance_id: spec.instance_id,
            client_id: spec.client_id,
            client_host: spec.client_host,
            session_timeout: spec.session_timeout,
            rebalance_timeout: spec.rebalance_timeout,
            protocols: spec.protocols,
            assignment: Bytes::new(),
            joining: Some(joining),
            syncing: None,
            expires_at: now + spec.session_timeout,
        };
        self.members.insert(member_id, member);
        self.begin_round(now, if is_first { FIRST_WAIT } else { Duration::ZERO });
        self.try_complete(now);
        Reply::Later(joined)
    }

    /// Lets a static member continue under a new id.
    fn replace(&mut self, old: &str, spec: JoinSpec, now: Instant) -> Reply<JoinResult> {
        let Some(mut member) = self.members.remove(old) else {
            return Reply::Now(Err((ResponseError::UnknownMemberId, String::new())));
        };
        if let Some(joining) = member.joining.take() {
            let _ = joining.send(Err((ResponseError::FencedInstanceId, old.to_owned())));
        }
        if let Some(syncing) = member.syncing.take() {
            let _ = syncing.send(Err(ResponseError::FencedInstanceId));
        }
        let is_unchanged = member.protocols == spec.protocols;
        let was_leader = self.leader == old;
        let member_id = spec.new_id.clone();
        if was_leader {
            self.leader.clone_from(&member_id);
        }
        member.expires_at = now + spec.session_timeout;
        member.session_timeout = spec.session_timeout;
        member.rebalance_timeout = spec.rebalance_timeout;
        member.client_id.clone_from(&spec.client_id);
        member.client_host.clone_from(&spec.client_host);
        member.protocols.clone_from(&spec.protocols);
        self.members.insert(member_id.clone(), member);
        if self.state == RebalanceState::Stable && is_unchanged {
            // It only fetches its assignment. Named as the leader, it would compute another one.
            let leader = if was_leader { old.to_owned() } else { self.leader.clone() };
            return Reply::Now(Ok(Joined { leader, ..self.joined(&member_id) }));
        }
        self.rejoin(JoinSpec { member_id, ..spec }, now)
    }

    fn rejoin(&mut self, spec: JoinSpec, now: Instant) -> Reply<JoinResult> {
        let is_leader = spec.member_id == self.leader;
        let Some(member) = self.members.get_mut(&spec.member_id) else {
            return Reply::Now(Err((ResponseError::UnknownMemberId, spec.member_id)));
        };
        let is_unchanged = member.protocols == spec.protocols;
        member.protocols = spec.protocols;
        member.session_timeout = spec.session_timeout;
        member.rebalance_timeout = spec.rebalance_timeout;
        member.expires_at = now + spec.session_timeout;
        let is_repeated = match self.state {
            // The response to its join was lost.
            RebalanceState::Syncing => is_unchanged,
            // A leader that joins again asks for another assignment.
            RebalanceState::Stable => is_unchanged && !is_leader,
            RebalanceState::Joining | RebalanceState::Empty => false,
        };
        if is_repeated {
            return Reply::Now(Ok(self.joined(&spec.member_id)));
        }
        let (joining, joined) = oneshot::channel();
        member.joining = Some(joining);
        self.begin_round(now, Duration::ZERO);
        self.try_complete(now);
        Reply::Later(joined)
    }

    /// Begins a round of joins, unless one is under way.
    fn begin_round(&mut self, now: Instant, wait_min: Duration) {
        if self.state == RebalanceState::Joining {
            return;
        }
        self.state = RebalanceState::Joining;
        let timeouts = self.members.values().map(|member| member.rebalance_timeout);
        self.join_deadline = now + timeouts.max().unwrap_or_default();
        self.join_not_before = now + wait_min;
        for member in self.members.values_mut() {
            if let Some(syncing) = member.syncing.take() {
                let _ = syncing.send(Err(ResponseError::RebalanceInProgress));
            }
        }
    }

    /// Makes every member join again and read its offsets again: they were changed.
    pub(crate) fn restart(&mut self, now: Instant) {
        self.generation = next_generation(self.generation);
        if !self.members.is_empty() {
            self.begin_round(now, Duration::ZERO);
        }
    }

    /// Ends the round of joins once every member is there, or its time is over.
    fn try_complete(&mut self, now: Instant) {
        if self.state != RebalanceState::Joining || now < self.join_not_before {
            return;
        }
        let are_all_there = self.expected.is_empty()
            && self.members.values().all(|member| member.joining.is_some());
        if !are_all_there && now < self.join_deadline {
            return;
        }
        // A static member may come back within its session.
        self.members.retain(|_, member| member.joining.is_some() || member.instance_id.is_some());
        self.generation = next_generation(self.generation);
        if self.members.values().all(|member| member.joining.is_none()) {
            let is_empty = self.members.is_empty();
            self.state = if is_empty { RebalanceState::Empty } else { RebalanceState::Syncing };
            return;
        }
        self.protocol = self.choose_protocol();
        let is_there =
            |id: &String| self.members.get(id).is_some_and(|member| member.joining.is_some());
        if !is_there(&self.leader) {
            let first = self.members.iter().find(|(_, member)| member.joining.is_some());
            self.leader = first.map(|(id, _)| id.clone()).unwrap_or_default();
        }
        self.state = RebalanceState::Syncing;
        let ids: Vec<String> = self.members.keys().cloned().collect();
        for id in ids {
            let joined = self.joined(&id);
            let Some(member) = self.members.get_mut(&id) else { continue };
            member.expires_at = now + member.session_timeout.max(member.rebalance_timeout);
            if let Some(joining) = member.joining.take() {
                // A client that has gone does not come to its sync, and expires.
                let _ = joining.send(Ok(joined));
            }
        }
    }

    /// Returns the protocol that all members have and most prefer.
    fn choose_protocol(&self) -> String {
        let is_common = |name: &str| {
            let has =
                |member: &KafkaMember| member.protocols.iter().any(|(other, _)| other == name);
            self.members.values().all(has)
        };
        let mut votes: BTreeMap<&str, usize> = BTreeMap::new();
        for member in self.members.values() {
            let preferred = member.protocols.iter().find(|(name, _)| is_common(name));
            if let Some((name, _)) = preferred {
                *votes.entry(name).or_default() += 1;
            }
        }
        let most = votes.into_iter().max_by_key(|(_, count)| *count);
        most.map(|(name, _)| name.to_owned()).unwrap_or_default()
    }

    fn joined(&self, member_id: &str) -> Joined {
        let members = match member_id == self.leader {
            false => Vec::new(),
            true => {
                let entry = |(id, member): (&String, &KafkaMember)| {
                    (id.clone(), member.instance_id.clone(), member.metadata(&self.protocol))
                };
                self.members.iter().map(entry).collect()
            }
        };
        Joined {
            generation: self.generation,
            protocol_type: self.protocol_type.clone(),
            protocol: self.protocol.clone(),
            leader: self.leader.clone(),
            member_id: member_id.to_owned(),
            members,
        }
    }

    /// Checks that a member is one of the current generation.
    ///
    /// # Errors
    /// The code of the difference.
    pub(crate) fn check_member(
        &self,
        member_id: &str,
        instance_id: Option<&str>,
        generation: i32,
    ) -> Result<(), ResponseError> {
        if let Some(current) = instance_id.and_then(|name| self.member_named(name))
            && current != member_id
        {
            return Err(ResponseError::FencedInstanceId);
        }
        if !self.members.contains_key(member_id) {
            return Err(ResponseError::UnknownMemberId);
        }
        match generation == self.generation {
            true => Ok(()),
            false => Err(ResponseError::IllegalGeneration),
        }
    }

    /// Returns true if this member leads the current generation, and its assignment is awaited.
    pub(crate) fn awaits_assignment_of(&self, member_id: &str) -> bool {
        self.state == RebalanceState::Syncing && self.leader == member_id
    }

    /// Hands out assignments: those of the leader, or the one of a member.
    pub(crate) fn sync(
        &mut self,
        member_id: &str,
        assignments: Vec<(String, Bytes)>,
        now: Instant,
    ) -> Reply<SyncResult> {
        match self.state {
            RebalanceState::Empty => return Reply::Now(Err(ResponseError::UnknownMemberId)),
            RebalanceState::Joining => return Reply::Now(Err(ResponseError::RebalanceInProgress)),
            RebalanceState::Stable | RebalanceState::Syncing => {}
        }
        if self.awaits_assignment_of(member_id) {
            for member in self.members.values_mut() {
                member.assignment = Bytes::new();
            }
            for (id, assignment) in assignments {
                if let Some(member) = self.members.get_mut(&id) {
                    member.assignment = assignment;
                }
            }
            self.state = RebalanceState::Stable;
            for member in self.members.values_mut() {
                if let Some(syncing) = member.syncing.take() {
                    member.expires_at = now + member.session_timeout;
                    let _ = syncing.send(Ok(member.assignment.clone()));
                }
            }
        }
        let is_stable = self.state == RebalanceState::Stable;
        let Some(member) = self.members.get_mut(member_id) else {
            return Reply::Now(Err(ResponseError::UnknownMemberId));
        };
        member.expires_at = now + member.session_timeout;
        if is_stable {
            return Reply::Now(Ok(member.assignment.clone()));
        }
        let (syncing, synced) = oneshot::channel();
        member.syncing = Some(syncing);
        Reply::Later(synced)
    }

    /// Keeps a member alive.
    ///
    /// # Errors
    /// REBALANCE_IN_PROGRESS if the member has to join again.
    pub(crate) fn heartbeat(&mut self, member_id: &str, now: Instant) -> Result<(), ResponseError> {
        let state = self.state;
        if let Some(member) = self.members.get_mut(member_id) {
            member.expires_at = now + member.session_timeout;
        }
        match state {
            RebalanceState::Joining => Err(ResponseError::RebalanceInProgress),
            _ => Ok(()),
        }
    }

    /// Removes a member, which a static name may name.
    ///
    /// # Errors
    /// The group does not know it.
    pub(crate) fn leave(
        &mut self,
        member_id: &str,
        instance_id: Option<&str>,
        now: Instant,
    ) -> Result<(), ResponseError> {
        let named = instance_id.and_then(|name| self.member_named(name));
        let id = match named {
            Some(current) if !member_id.is_empty() && current != member_id => {
                return Err(ResponseError::FencedInstanceId);
            }
            Some(current) => current,
            None => member_id.to_owned(),
        };
        if self.expected.remove(&id).is_some() {
            self.try_complete(now);
            return Ok(());
        }
        let Some(member) = self.members.remove(&id) else {
            return Err(ResponseError::UnknownMemberId);
        };
        drop(member);
        self.on_removed(now);
        Ok(())
    }

    fn on_removed(&mut self, now: Instant) {
        if self.members.is_empty() {
            self.state = RebalanceState::Empty;
            self.generation = next_generation(self.generation);
            return;
        }
        self.begin_round(now, Duration::ZERO);
        self.try_complete(now);
    }

    /// Removes silent members, and ends rounds whose time is over.
    pub(crate) fn tick(&mut self, now: Instant) {
        self.expected.retain(|_, until| *until > now);
        for member in self.members.values_mut() {
            // The client has gone while it waited.
            if member.joining.as_ref().is_some_and(oneshot::Sender::is_closed) {
                member.joining = None;
                member.expires_at = now + member.session_timeout;
            }
            if member.syncing.as_ref().is_some_and(oneshot::Sender::is_closed) {
                member.syncing = None;
            }
        }
        let count = self.members.len();
        self.members.retain(|_, member| {
            member.joining.is_some() || member.syncing.is_some() || member.expires_at > now
        });
        if self.members.len() < count {
            self.on_removed(now);
        }
        self.try_complete(now);
    }
}

/// Returns the generation after this one. Generations are positive.
fn next_generation(generation: i32) -> i32 {
    generation.checked_add(1).unwrap_or(1)
}

#[cfg(test)]
mod tests;
