//! Sessions of the groups' members: soft state of a shard's leader.
//! They decide what the leader proposes; apply never sees them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::log::{ConsumerGroup, GroupTable, PartitionKey};
use crate::sync;

/// A leader's knowledge of a member, beyond the group's state.
#[derive(Debug, Clone)]
pub struct MemberSession {
    pub expires: Instant,
    /// `None` until this leader has heard from the member.
    pub last_heartbeat: Option<Instant>,
    /// Epoch of the last heartbeat.
    pub epoch: u64,
    /// Partitions that the application has paused.
    pub paused: BTreeSet<PartitionKey>,
}

/// Sessions of one group, by member id.
type SessionsById = BTreeMap<Arc<str>, MemberSession>;

/// Sessions of all members of a shard's groups.
#[derive(Debug, Default)]
pub struct GroupSessions {
    groups: Mutex<BTreeMap<Arc<str>, SessionsById>>,
}

impl GroupSessions {
    /// Records a heartbeat.
    pub fn touch(
        &self,
        group: &str,
        member_id: &str,
        timeout: Duration,
        epoch: u64,
        paused: BTreeSet<PartitionKey>,
    ) {
        let now = Instant::now();
        let session =
            MemberSession { expires: now + timeout, last_heartbeat: Some(now), epoch, paused };
        let mut groups = sync::lock(&self.groups);
        match groups.get_mut(group) {
            Some(members) => members.insert(member_id.into(), session),
            None => groups.entry(group.into()).or_default().insert(member_id.into(), session),
        };
    }

    /// Gives every member a whole session timeout from now: this leader is new.
    pub fn begin(&self, groups: &GroupTable) {
        let now = Instant::now();
        for (name, group) in groups.iter() {
            self.sync_with(name, Some(group));
        }
        for (name, members) in sync::lock(&self.groups).iter_mut() {
            let Some(group) = groups.get(name) else { continue };
            for (id, session) in members {
                let timeout = group.member(id).map(timeout_of).unwrap_or_default();
                session.expires = session.expires.max(now + timeout);
            }
        }
    }

    /// Adds sessions for new members of a group, and removes those of former members.
    pub fn sync_with(&self, name: &Arc<str>, group: Option<&ConsumerGroup>) {
        let mut groups = sync::lock(&self.groups);
        let Some(group) = group.filter(|group| group.members().len() > 0) else {
            groups.remove(name);
            return;
        };
        let members = groups.entry(name.clone()).or_default();
        members.retain(|id, _| group.member(id).is_some());
        let now = Instant::now();
        for (id, member) in group.members() {
            members.entry(id.clone()).or_insert_with(|| MemberSession {
                expires: now + timeout_of(member),
                last_heartbeat: None,
                epoch: 0,
                paused: BTreeSet::new(),
            });
        }
    }

    /// Returns the members whose sessions have expired, by group.
    pub fn expired(&self) -> Vec<(Arc<str>, Vec<String>)> {
        let now = Instant::now();
        let expired = |members: &SessionsById| {
            let expired = members.iter().filter(|(_, session)| session.expires <= now);
            expired.map(|(id, _)| id.to_string()).collect::<Vec<_>>()
        };
        let groups = sync::lock(&self.groups);
        let groups = groups.iter().map(|(name, members)| (name.clone(), expired(members)));
        groups.filter(|(_, members)| !members.is_empty()).collect()
    }

    /// Returns when the next session expires.
    pub fn next_expiry(&self) -> Option<Instant> {
        let groups = sync::lock(&self.groups);
        groups.values().flat_map(BTreeMap::values).map(|session| session.expires).min()
    }

    /// Returns whether a member's session has expired.
    pub fn is_expired(&self, group: &str, member_id: &str) -> bool {
        let groups = sync::lock(&self.groups);
        let session = groups.get(group).and_then(|members| members.get(member_id));
        session.is_some_and(|session| session.expires <= Instant::now())
    }

    /// Returns the sessions of a group's members, by member id.
    pub fn of_group(&self, group: &str) -> BTreeMap<Arc<str>, MemberSession> {
        sync::lock(&self.groups).get(group).cloned().unwrap_or_default()
    }

    pub fn clear(&self) {
        sync::lock(&self.groups).clear();
    }
}

fn timeout_of(member: &crate::log::GroupMember) -> Duration {
    Duration::from_millis(member.spec.session_timeout_ms.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::{GroupChange, GroupCommand, MemberSpec};

    fn table(ids: &[&str]) -> GroupTable {
        let mut table = GroupTable::default();
        for (id, index) in ids.iter().zip(1..) {
            let member = MemberSpec {
                member_id: (*id).to_owned(),
                session_timeout_ms: 10_000,
                topics: vec!["t".to_owned()],
                ..MemberSpec::default()
            };
            let change = GroupChange::PutMember { member, take_over: false, joined_epoch: 0 };
            let command = GroupCommand { group: "g".to_owned(), change };
            table.apply(index, &command, &mut Vec::new()).unwrap();
        }
        table
    }

    #[tokio::test(start_paused = true)]
    async fn silent_member_expires_and_a_heard_one_does_not() {
        let sessions = GroupSessions::default();
        let groups = table(&["a", "b"]);
        sessions.begin(&groups);
        tokio::time::advance(Duration::from_secs(9)).await;
        assert!(sessions.expired().is_empty());
        sessions.touch("g", "a", Duration::from_secs(10), 4, BTreeSet::new());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(sessions.expired(), [("g".into(), vec!["b".to_owned()])]);
        assert!(sessions.is_expired("g", "b") && !sessions.is_expired("g", "a"));
        let members = sessions.of_group("g");
        assert_eq!(members["a"].epoch, 4);
        assert!(members["b"].last_heartbeat.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn new_leader_gives_every_member_a_whole_timeout() {
        let sessions = GroupSessions::default();
        let groups = table(&["a"]);
        sessions.begin(&groups);
        tokio::time::advance(Duration::from_secs(8)).await;
        sessions.begin(&groups);
        tokio::time::advance(Duration::from_secs(9)).await;
        assert!(sessions.expired().is_empty());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(sessions.expired().len(), 1);
        let name: Arc<str> = "g".into();
        sessions.sync_with(&name, None);
        assert!(sessions.expired().is_empty() && sessions.next_expiry().is_none());
    }
}
