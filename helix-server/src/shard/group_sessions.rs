//! Sessions of the groups' members: soft state of a shard's leader.
//! They decide what the leader proposes; apply never sees them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;

use crate::log::{ConsumerGroup, GroupTable, MemberView, PartitionKey, SortedMap, SortedSet};
use crate::sync;

/// Leader's record of a member, beyond the group's state.
///
/// Takes 80 bytes of memory with the member's id, which it shares with the group.
#[derive(Debug, Clone)]
pub struct MemberSession {
    pub expires: Instant,
    /// `None` until this leader has heard from the member.
    pub last_heartbeat: Option<Instant>,
    /// Epoch of the last heartbeat.
    pub epoch: u64,
    /// Details of the last heartbeat, shared by members of a group with equal details.
    pub details: Arc<HeartbeatDetails>,
    /// Epoch at which the member joined.
    joined_epoch: u64,
    /// True once the removal of the member was proposed. The removal may be applied at any time, so
    /// heartbeats no longer count.
    is_ending: bool,
}

/// Part of a heartbeat that is not in the group's state.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HeartbeatDetails {
    /// Partitions that the application has paused. A session keeps only assigned ones.
    pub paused: SortedSet<PartitionKey>,
    /// Principal of the heartbeat, if any.
    pub principal: Option<Arc<str>>,
}

impl MemberSession {
    /// Returns the time since the last heartbeat of a member with this session timeout.
    ///
    /// Without a heartbeat: the time since this leader began the session.
    pub fn silence(&self, timeout: Duration) -> Duration {
        let began = || self.expires.checked_sub(timeout);
        self.last_heartbeat.or_else(began).map(|since| since.elapsed()).unwrap_or_default()
    }
}

impl HeartbeatDetails {
    /// Returns the details without paused partitions that are not assigned to the member: a request
    /// may name any partition.
    fn of_assigned(&self, view: &MemberView) -> Cow<'_, Self> {
        // The view has them in order.
        let is_assigned = |key: &&PartitionKey| view.assigned.binary_search(key).is_ok();
        if self.paused.iter().all(|key| is_assigned(&key)) {
            return Cow::Borrowed(self);
        }
        let paused = self.paused.iter().filter(is_assigned).copied().collect();
        Cow::Owned(Self { paused, principal: self.principal.clone() })
    }
}

/// Sessions of one group, by member id.
type SessionsById = SortedMap<Arc<str>, MemberSession>;

/// Returns the details in the form that other members of the group share.
fn shared_details(members: &SessionsById, details: &HeartbeatDetails) -> Arc<HeartbeatDetails> {
    let mut known = members.values().map(|session| &session.details);
    let shared = known.find(|known| ***known == *details);
    shared.map_or_else(|| Arc::new(details.clone()), Arc::clone)
}

/// Sessions of all members of a shard's groups.
#[derive(Debug, Default)]
pub struct GroupSessions {
    groups: Mutex<BTreeMap<Arc<str>, SessionsById>>,
    /// Time when the last member of each group left, for groups that this leader has seen.
    empty_since: Mutex<BTreeMap<Arc<str>, Instant>>,
}

impl GroupSessions {
    /// Records a heartbeat of a member with this view. Returns `false` if the member is about to be
    /// removed, so that no response may say that its session continues.
    #[must_use]
    pub fn touch(&self, group: &str, view: &MemberView, details: &HeartbeatDetails) -> bool {
        let now = Instant::now();
        // Computed before the lock is taken.
        let details = details.of_assigned(view);
        let mut groups = sync::lock(&self.groups);
        let members = match groups.get_mut(group) {
            Some(members) => members,
            None => groups.entry(group.into()).or_default(),
        };
        let known = members.get(&*view.member_id);
        if known.is_some_and(|it| it.is_ending && it.joined_epoch == view.joined_epoch) {
            return false;
        }
        // Most heartbeats change none.
        let unchanged = known.map(|known| &known.details).filter(|known| ***known == *details);
        let details = unchanged.cloned().unwrap_or_else(|| shared_details(members, &details));
        let session = MemberSession {
            expires: now + Duration::from_millis(view.session_timeout_ms.into()),
            last_heartbeat: Some(now),
            epoch: view.epoch,
            details,
            joined_epoch: view.joined_epoch,
            is_ending: false,
        };
        members.insert(view.member_id.clone(), session);
        true
    }

    /// Records that a heartbeat is answered now, after it was held back: that time is not the
    /// member's silence. Returns `false` as [`Self::touch`] does.
    #[must_use]
    pub fn answer(&self, group: &str, view: &MemberView) -> bool {
        let mut groups = sync::lock(&self.groups);
        let session = groups.get_mut(group).and_then(|members| members.get_mut(&*view.member_id));
        let Some(session) = session.filter(|it| it.joined_epoch == view.joined_epoch) else {
            // The leader or its term has changed, and has given the member a whole timeout.
            return true;
        };
        if session.is_ending {
            return false;
        }
        let timeout = Duration::from_millis(view.session_timeout_ms.into());
        session.expires = session.expires.max(Instant::now() + timeout);
        true
    }

    /// Gives every member a whole session timeout from now. Called by a new leader.
    pub fn begin(&self, groups: &GroupTable) {
        let now = Instant::now();
        for (name, group) in groups.iter() {
            self.sync_with(name, Some(group));
        }
        // Members may have joined and left under another leader.
        sync::lock(&self.empty_since).clear();
        for (name, members) in sync::lock(&self.groups).iter_mut() {
            let Some(group) = groups.get(name) else { continue };
            for (id, session) in members.iter_mut() {
                let timeout = group.member(id).map(timeout_of).unwrap_or_default();
                session.expires = session.expires.max(now + timeout);
                // A removal that an earlier term proposed is either applied or lost.
                session.is_ending = false;
            }
        }
    }

    /// Adds sessions for new members of a group and removes sessions of former members.
    pub fn sync_with(&self, name: &Arc<str>, group: Option<&ConsumerGroup>) {
        let is_deleted = group.is_none();
        let Some(group) = group.filter(|group| group.members().len() > 0) else {
            let had_members = sync::lock(&self.groups).remove(name).is_some();
            if is_deleted {
                sync::lock(&self.empty_since).remove(name);
            } else if had_members {
                sync::lock(&self.empty_since).insert(name.clone(), Instant::now());
            }
            return;
        };
        sync::lock(&self.empty_since).remove(name);
        let mut groups = sync::lock(&self.groups);
        let members = groups.entry(name.clone()).or_default();
        members.retain(|id, session| {
            group.member(id).is_some_and(|member| member.joined_epoch == session.joined_epoch)
        });
        let now = Instant::now();
        let details = shared_details(members, &HeartbeatDetails::default());
        for (id, member) in group.members() {
            members.get_or_insert_with(id.clone(), || MemberSession {
                expires: now + timeout_of(member),
                last_heartbeat: None,
                epoch: 0,
                details: details.clone(),
                joined_epoch: member.joined_epoch,
                is_ending: false,
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
        groups.values().flat_map(SortedMap::values).map(|session| session.expires).min()
    }

    /// Ends the sessions of these members that have expired, and returns them: the caller proposes
    /// their removal. Later heartbeats do not extend their sessions.
    pub fn end_expired(&self, group: &str, member_ids: &[String]) -> Vec<String> {
        let now = Instant::now();
        let mut groups = sync::lock(&self.groups);
        let Some(members) = groups.get_mut(group) else { return Vec::new() };
        let mut ended = Vec::new();
        for id in member_ids {
            if let Some(session) = members.get_mut(id.as_str()).filter(|it| it.expires <= now) {
                session.is_ending = true;
                ended.push(id.clone());
            }
        }
        ended
    }

    /// Returns the sessions of a group's members, by member id.
    pub fn of_group(&self, group: &str) -> SortedMap<Arc<str>, MemberSession> {
        sync::lock(&self.groups).get(group).cloned().unwrap_or_default()
    }

    /// Returns when the last member of a group left.
    ///
    /// `None` if the group has members, or if this leader has not seen the last one leave.
    pub fn empty_since(&self, group: &str) -> Option<Instant> {
        sync::lock(&self.empty_since).get(group).copied()
    }

    pub fn clear(&self) {
        sync::lock(&self.groups).clear();
        sync::lock(&self.empty_since).clear();
    }
}

fn timeout_of(member: &crate::log::GroupMember) -> Duration {
    Duration::from_millis(member.settings.session_timeout_ms.into())
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
            let command = GroupCommand { group: "g".to_owned(), change, is_ordered: true };
            table.apply(index, &command, &mut Vec::new()).unwrap();
        }
        table
    }

    /// Records a heartbeat of a member that joined at this epoch.
    fn hear(sessions: &GroupSessions, id: &str, joined_epoch: u64) -> bool {
        hear_with(sessions, id, joined_epoch, &HeartbeatDetails::default())
    }

    fn hear_with(
        sessions: &GroupSessions,
        id: &str,
        joined_epoch: u64,
        details: &HeartbeatDetails,
    ) -> bool {
        let view = MemberView { member_id: id.into(), ..view(joined_epoch) };
        sessions.touch("g", &view, details)
    }

    /// Returns the view of the member "a" that joined at this epoch.
    fn view(joined_epoch: u64) -> MemberView {
        MemberView {
            member_id: "a".into(),
            topics: Arc::default(),
            epoch: 4,
            joined_epoch,
            assigned: [0, 1].map(|number| PartitionKey { topic_id: 1, number }).to_vec(),
            pending: Vec::new(),
            session_timeout_ms: 10_000,
            is_settled: true,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn heartbeat_replaces_the_details_of_the_last_one() {
        let sessions = GroupSessions::default();
        sessions.begin(&table(&["a"]));
        let details = |numbers: &[u32], principal: Option<&str>| HeartbeatDetails {
            paused: numbers
                .iter()
                .map(|number| PartitionKey { topic_id: 1, number: *number })
                .collect(),
            principal: principal.map(Into::into),
        };
        let said = [
            details(&[], None),
            details(&[0, 1], Some("p")),
            details(&[0, 1], Some("p")),
            details(&[1], Some("q")),
            details(&[], None),
        ];
        for details in said {
            assert!(hear_with(&sessions, "a", 1, &details));
            assert_eq!(*sessions.of_group("g").get("a").unwrap().details, details);
        }
        let (foreign, own) = (details(&[1, 2, 3], Some("p")), details(&[1], Some("p")));
        assert!(hear_with(&sessions, "a", 1, &foreign));
        assert_eq!(*sessions.of_group("g").get("a").unwrap().details, own);
    }

    #[tokio::test(start_paused = true)]
    async fn silent_member_expires_and_a_heard_one_does_not() {
        let sessions = GroupSessions::default();
        let groups = table(&["a", "b"]);
        sessions.begin(&groups);
        tokio::time::advance(Duration::from_secs(9)).await;
        assert!(sessions.expired().is_empty());
        let silence = |id: &str| {
            sessions.of_group("g").get(id).unwrap().silence(Duration::from_secs(10)).as_secs()
        };
        assert_eq!(silence("a"), 9, "it counts from the begin of the leader");
        assert!(hear(&sessions, "a", 1));
        assert_eq!((silence("a"), silence("b")), (0, 9));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(sessions.expired(), [("g".into(), vec!["b".to_owned()])]);
        let members = sessions.of_group("g");
        assert_eq!(members.get("a").unwrap().epoch, 4);
        assert!(members.get("b").unwrap().last_heartbeat.is_none());
        assert!(size_of::<(Arc<str>, MemberSession)>() <= 80);
        let details = |id| &members.get(id).unwrap().details;
        assert!(Arc::ptr_eq(details("a"), details("b")), "members share equal details");
    }

    #[tokio::test(start_paused = true)]
    async fn heartbeat_does_not_extend_a_session_whose_removal_is_proposed() {
        let sessions = GroupSessions::default();
        sessions.begin(&table(&["a", "b"]));
        tokio::time::advance(Duration::from_secs(10)).await;
        // "b" is heard after it was found silent, but before its removal is proposed.
        let silent = ["a".to_owned(), "b".to_owned()];
        assert!(hear(&sessions, "b", 2));
        assert_eq!(sessions.end_expired("g", &silent), ["a"]);
        assert!(!hear(&sessions, "a", 1));
        // A retry of the removal has the same member.
        assert_eq!(sessions.expired(), [("g".into(), vec!["a".to_owned()])]);
        // The member has joined again since.
        assert!(hear(&sessions, "a", 7));
        assert!(sessions.expired().is_empty());
        // A new leader does not know of the removal.
        let sessions = GroupSessions::default();
        sessions.begin(&table(&["a"]));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(sessions.end_expired("g", &silent), ["a"]);
        sessions.begin(&table(&["a"]));
        assert!(hear(&sessions, "a", 1));
    }

    /// Two owners would overlap if the coordinator moved a partition before its last owner stops.
    #[tokio::test(start_paused = true)]
    async fn members_stop_before_their_partitions_move() {
        let ms = Duration::from_millis;
        // Network delays of a heartbeat and of its response, and the time it is held back.
        for (there, held, back) in [(0, 0, 0), (3, 3_000, 3), (900, 0, 900), (20, 3_333, 800)] {
            let sessions = GroupSessions::default();
            sessions.begin(&table(&["a"]));
            let sent = Instant::now();
            tokio::time::advance(ms(there)).await;
            assert!(hear(&sessions, "a", 1));
            tokio::time::advance(ms(held)).await;
            assert!(sessions.answer("g", &view(1)));
            let answered = Instant::now();
            let stops = sent + ms(10_000);
            let moves = sessions.next_expiry().unwrap();
            assert!(stops <= moves, "overlap of {:?}", stops - moves);
            // This also holds for a member that counts from the response, except for its network
            // delay.
            assert!(answered + ms(10_000) <= moves);
            let received = answered + ms(back);
            assert!((received + ms(10_000)).saturating_duration_since(moves) <= ms(back));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn answer_extends_no_session_that_ends() {
        let sessions = GroupSessions::default();
        sessions.begin(&table(&["a"]));
        assert!(hear(&sessions, "a", 1));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(sessions.end_expired("g", &["a".to_owned()]), ["a"]);
        assert!(!sessions.answer("g", &view(1)));
        assert_eq!(sessions.expired().len(), 1);
        assert!(sessions.answer("g", &view(7)), "of another membership");
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

    #[tokio::test(start_paused = true)]
    async fn empty_groups_know_when_their_last_member_left() {
        let sessions = GroupSessions::default();
        let name: Arc<str> = "g".into();
        let (full, empty) = (table(&["a"]), ConsumerGroup::default());
        sessions.sync_with(&name, Some(&empty));
        assert_eq!(sessions.empty_since("g"), None, "it was empty before");
        sessions.begin(&full);
        assert_eq!(sessions.empty_since("g"), None);
        let left = Instant::now();
        sessions.sync_with(&name, Some(&empty));
        tokio::time::advance(Duration::from_secs(9)).await;
        // A later change of the empty group.
        sessions.sync_with(&name, Some(&empty));
        assert_eq!(sessions.empty_since("g"), Some(left));
        sessions.sync_with(&name, full.get(&name));
        assert_eq!(sessions.empty_since("g"), None, "it has a member");
        let forget_all: [fn(&GroupSessions); 3] = [
            |it| it.sync_with(&"g".into(), None),
            |it| it.begin(&GroupTable::default()),
            GroupSessions::clear,
        ];
        for forget in forget_all {
            sessions.sync_with(&name, full.get(&name));
            sessions.sync_with(&name, Some(&empty));
            assert!(sessions.empty_since("g").is_some());
            forget(&sessions);
            assert_eq!(sessions.empty_since("g"), None);
        }
    }
}
