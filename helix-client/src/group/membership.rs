//! State of a member, shared by its heartbeats, its commits and the consumer. Performs no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use helix_proto::log::v1::{HeartbeatResponse, TopicPartition};
use helix_proto::time;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::warn;

use super::{AssignedPartition, GroupKey, OwnershipId};
use crate::client::Client;
use crate::error::Error;

/// A member of a group.
#[derive(Debug)]
pub(super) struct MemberHandle {
    pub(super) client: Client,
    pub(super) group: String,
    pub(super) member_id: String,
    release_timeout: Duration,
    state: Mutex<MemberState>,
    /// Wakes the consumer.
    pub(super) changed: Notify,
    /// Wakes the heartbeats.
    pub(super) reported: Notify,
    /// True once no more heartbeats are sent.
    pub(super) stopping: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct MemberState {
    /// Epoch of the last response; 0 until the member has joined.
    epoch: u64,
    /// Partitions that the service assigns to this member, until the member releases them.
    held: BTreeMap<GroupKey, HeldPartition>,
    last_ownership: u64,
    /// Lost partitions that the application knows of, until it learns of the loss.
    lost: Vec<AssignedPartition>,
    paused: BTreeSet<GroupKey>,
    /// Time when the session expires, unless the service responds again.
    session_ends: Option<Instant>,
    unmatched_topics: Vec<String>,
    /// True if the last response marked the assignment as current and complete.
    is_settled: bool,
    /// Errors that were not yet reported to the application.
    errors: Vec<Error>,
    /// The last error was final: the member does not join again.
    has_failed: bool,
    /// Number of changes of the report so far.
    revision: u64,
    /// True if there may be a change for the application. Checked by every call, so the cost must
    /// not depend on the number of partitions.
    has_news: bool,
    /// True if a partition may be revoked.
    has_revoked: bool,
}

#[derive(Debug)]
struct HeldPartition {
    topic: String,
    ownership: OwnershipId,
    stage: HeldStage,
    /// Time when the service revoked the partition.
    revoked_at: Option<Instant>,
}

/// Stage of a partition, as the application knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeldStage {
    /// Assigned, but not yet reported to the application.
    New,
    /// The application reads it.
    Active,
    /// Revoked, and reported to the application.
    Revoked,
}

/// Content of a heartbeat.
#[derive(Debug)]
pub(super) struct HeartbeatContent {
    pub(super) epoch: u64,
    pub(super) owned: Vec<TopicPartition>,
    pub(super) paused: Vec<TopicPartition>,
    pub(super) revision: u64,
    /// True if the report states the last assignment, so that the service can wait for a change.
    pub(super) is_settled: bool,
}

/// A change to report to the application.
#[derive(Debug)]
pub(super) enum AssignmentChange {
    Assigned(Vec<(AssignedPartition, OwnershipId)>),
    Revoked(Vec<AssignedPartition>),
    Lost(Vec<AssignedPartition>),
    /// An error. The second field is true if it is final.
    Failed(Error, bool),
}

impl MemberHandle {
    pub(super) fn new(
        client: Client,
        group: String,
        member_id: String,
        release_timeout: Duration,
    ) -> Self {
        Self {
            client,
            group,
            member_id,
            release_timeout,
            state: Mutex::default(),
            changed: Notify::new(),
            reported: Notify::new(),
            stopping: watch::Sender::new(false),
        }
    }

    /// Returns the next heartbeat's content.
    pub(super) fn report(&self) -> HeartbeatContent {
        let state = self.state();
        // Without names, which would make a report of many partitions exceed the request limit.
        let wire = |key: &GroupKey| TopicPartition::from(key.with_topic(""));
        let held = || state.held.iter();
        HeartbeatContent {
            epoch: state.epoch,
            owned: held().map(|(key, _)| wire(key)).collect(),
            paused: held()
                .filter(|(key, _)| state.paused.contains(key))
                .map(|(key, _)| wire(key))
                .collect(),
            revision: state.revision,
            is_settled: held().all(|(_, it)| it.revoked_at.is_none()),
        }
    }

    /// Returns the number of changes of the report so far.
    pub(super) fn revision(&self) -> u64 {
        self.state().revision
    }

    /// Stores the response to a heartbeat with this epoch that was sent at this time.
    pub(super) fn on_response(&self, epoch: u64, sent_at: Instant, response: HeartbeatResponse) {
        let now = Instant::now();
        let mut state = self.state();
        // The membership was lost or renewed after the heartbeat was sent.
        if state.epoch != epoch {
            return;
        }
        if state.epoch != response.member_epoch {
            state.epoch = response.member_epoch;
            state.revision += 1;
        }
        let session = response.session_timeout.and_then(|it| time::duration(it).ok());
        state.session_ends = session.and_then(|session| sent_at.checked_add(session));
        state.is_settled = response.settled;
        let has_unmatched = state.unmatched_topics != response.unmatched_topics;
        if has_unmatched {
            state.unmatched_topics.clone_from(&response.unmatched_topics);
        }
        let MemberState { held, last_ownership, revision, .. } = &mut *state;
        let mut assigned = BTreeMap::new();
        for partition in response.assigned {
            let partition = AssignedPartition::from(partition);
            assigned.insert(partition.key(), partition.topic);
        }
        let before = *revision;
        held.retain(|key, partition| {
            if assigned.contains_key(key) {
                if partition.stage != HeldStage::Revoked {
                    partition.revoked_at = None;
                }
                return true;
            }
            partition.revoked_at.get_or_insert(now);
            // A partition that the application does not know was never read, so it is released at
            // once.
            let is_kept = partition.stage != HeldStage::New;
            *revision += u64::from(!is_kept);
            is_kept
        });
        for (key, topic) in assigned {
            held.entry(key).or_insert_with(|| {
                *last_ownership += 1;
                *revision += 1;
                let ownership = OwnershipId(*last_ownership);
                HeldPartition { topic, ownership, stage: HeldStage::New, revoked_at: None }
            });
        }
        let has_revoked = held.values().any(|it| it.revoked_at.is_some());
        let has_changed = *revision != before || has_revoked;
        state.has_revoked = has_revoked;
        state.has_news |= has_changed;
        drop(state);
        if has_changed {
            self.changed.notify_one();
        }
        if has_unmatched && !response.unmatched_topics.is_empty() {
            let topics = &response.unmatched_topics;
            warn!(group = self.group, ?topics, "subscribed topics do not exist");
        }
    }

    /// Loses all partitions if `epoch` is still current. The member then joins again.
    pub(super) fn lose(&self, epoch: u64, why: &Error) {
        let mut state = self.state();
        if state.epoch == 0 || state.epoch != epoch {
            return;
        }
        state.lose_all();
        drop(state);
        self.changed.notify_one();
        self.reported.notify_one();
        let (group, member) = (&self.group, &self.member_id);
        warn!(group, member, %why, "lost the membership, joining again");
    }

    /// Expires the session and overdue releases. Called before records are delivered.
    pub(super) fn expire(&self, now: Instant) {
        let mut state = self.state();
        let has_ended = state.session_ends.is_some_and(|ends| now >= ends);
        if has_ended {
            state.lose_all();
        }
        if !state.has_revoked && !has_ended {
            return;
        }
        let mut released = Vec::new();
        let release_timeout = self.release_timeout;
        // A deadline beyond the range of the clock never passes.
        let is_overdue = |revoked_at: Instant| {
            revoked_at.checked_add(release_timeout).is_some_and(|due| now >= due)
        };
        let MemberState { held, lost, revision, .. } = &mut *state;
        held.retain(|key, partition| {
            let is_kept = !partition.revoked_at.is_some_and(is_overdue);
            if !is_kept {
                released.push((partition.topic.clone(), key.partition));
                lost.push(key.with_topic(&partition.topic));
                *revision += 1;
            }
            is_kept
        });
        let has_changed = has_ended || !released.is_empty();
        state.has_news |= has_changed;
        drop(state);
        if has_changed {
            self.changed.notify_one();
            self.reported.notify_one();
        }
        let (group, member) = (&self.group, &self.member_id);
        if has_ended {
            warn!(group, member, "no response for the session timeout, joining again");
        }
        for (topic, number) in released {
            warn!(group, %topic, number, "released without the application");
        }
    }

    /// Returns the next time at which [`MemberHandle::expire`] has work.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        let state = self.state();
        if !state.has_revoked {
            return state.session_ends;
        }
        let releases = state.held.values().filter_map(|it| it.revoked_at);
        let releases =
            releases.filter_map(|revoked_at| revoked_at.checked_add(self.release_timeout));
        releases.chain(state.session_ends).min()
    }

    /// Takes the next change to report to the application.
    pub(super) fn take_change(&self) -> Option<AssignmentChange> {
        let mut state = self.state();
        if !state.has_news {
            return None;
        }
        if !state.lost.is_empty() {
            return Some(AssignmentChange::Lost(std::mem::take(&mut state.lost)));
        }
        if !state.errors.is_empty() {
            let error = state.errors.remove(0);
            return Some(AssignmentChange::Failed(
                error,
                state.has_failed && state.errors.is_empty(),
            ));
        }
        let revoked: Vec<_> = take_stage(&mut state.held, HeldStage::Active, HeldStage::Revoked)
            .map(|(partition, _)| partition)
            .collect();
        if !revoked.is_empty() {
            return Some(AssignmentChange::Revoked(revoked));
        }
        let assigned: Vec<_> =
            take_stage(&mut state.held, HeldStage::New, HeldStage::Active).collect();
        state.has_news = !assigned.is_empty();
        (!assigned.is_empty()).then_some(AssignmentChange::Assigned(assigned))
    }

    /// Releases revoked partitions. The next heartbeat reports that.
    pub(super) fn release(&self, partitions: &[(GroupKey, OwnershipId)]) {
        let mut state = self.state();
        let before = state.held.len();
        for (key, ownership) in partitions {
            if state.held.get(key).is_some_and(|held| held.ownership == *ownership) {
                state.held.remove(key);
            }
        }
        if state.held.len() != before {
            state.revision += 1;
            drop(state);
            self.reported.notify_one();
        }
    }

    pub(super) fn set_paused(&self, paused: BTreeSet<GroupKey>) {
        let mut state = self.state();
        if state.paused != paused {
            state.paused = paused;
            state.revision += 1;
            drop(state);
            self.reported.notify_one();
        }
    }

    /// Returns true if the member still has this ownership of a partition.
    pub(super) fn holds(&self, key: GroupKey, ownership: OwnershipId) -> bool {
        self.state().held.get(&key).is_some_and(|held| held.ownership == ownership)
    }

    /// Returns the epoch for commits; 0 if the member has not joined.
    pub(super) fn epoch(&self) -> u64 {
        self.state().epoch
    }

    /// Returns true if the member has all of its partitions of the current assignment.
    pub(super) fn is_settled(&self) -> bool {
        self.state().is_settled
    }

    pub(super) fn has_failed(&self) -> bool {
        self.state().has_failed
    }

    pub(super) fn unmatched_topics(&self) -> Vec<String> {
        self.state().unmatched_topics.clone()
    }

    /// Reports an error to the application. A final one ends the consumer.
    pub(super) fn fail(&self, error: Error, is_final: bool) {
        let mut state = self.state();
        state.errors.push(error);
        state.has_news = true;
        state.has_failed |= is_final;
        drop(state);
        self.changed.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, MemberState> {
        // No code under the lock can panic in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemberState {
    fn lose_all(&mut self) {
        (self.epoch, self.session_ends, self.is_settled) = (0, None, false);
        (self.has_news, self.has_revoked) = (true, false);
        self.revision += 1;
        for (key, partition) in std::mem::take(&mut self.held) {
            if partition.stage != HeldStage::New {
                self.lost.push(key.with_topic(&partition.topic));
            }
        }
    }
}

/// Moves partitions to the next stage and returns them. From `Active`, moves only revoked ones.
fn take_stage(
    held: &mut BTreeMap<GroupKey, HeldPartition>,
    from: HeldStage,
    to: HeldStage,
) -> impl Iterator<Item = (AssignedPartition, OwnershipId)> {
    held.iter_mut().filter_map(move |(key, partition)| {
        let is_due = from != HeldStage::Active || partition.revoked_at.is_some();
        (partition.stage == from && is_due).then(|| {
            partition.stage = to;
            (key.with_topic(&partition.topic), partition.ownership)
        })
    })
}

#[cfg(test)]
mod tests {
    use helix_proto::log::v1::ErrorReason;

    use super::*;
    use crate::config::Config;

    const SESSION: Duration = Duration::from_secs(30);

    fn membership() -> MemberHandle {
        let client = Client::new(Config::new(["n1:9092"])).unwrap();
        MemberHandle::new(client, "g".to_owned(), "m".to_owned(), Duration::from_secs(60))
    }

    fn response(member_epoch: u64, partitions: &[u32]) -> HeartbeatResponse {
        let topic = || "orders".to_owned();
        let assigned = partitions
            .iter()
            .map(|&partition| TopicPartition { topic: topic(), partition, topic_id: 1 })
            .collect();
        let session_timeout = SESSION.try_into().ok();
        HeartbeatResponse { member_epoch, assigned, session_timeout, ..Default::default() }
    }

    fn owned(membership: &MemberHandle) -> Vec<u32> {
        membership.report().owned.iter().map(|it| it.partition).collect()
    }

    /// Returns the kind and the partitions of the next change.
    fn change(membership: &MemberHandle) -> Option<(&'static str, Vec<u32>)> {
        let numbers = |list: Vec<AssignedPartition>| list.iter().map(|it| it.partition).collect();
        membership.take_change().map(|change| match change {
            AssignmentChange::Assigned(list) => {
                ("assigned", numbers(list.into_iter().map(|it| it.0).collect()))
            }
            AssignmentChange::Revoked(list) => ("revoked", numbers(list)),
            AssignmentChange::Lost(list) => ("lost", numbers(list)),
            AssignmentChange::Failed(..) => ("failed", Vec::new()),
        })
    }

    fn ownership(membership: &MemberHandle, partition: u32) -> (GroupKey, OwnershipId) {
        let key = GroupKey { topic_id: 1, partition };
        (key, membership.state().held[&key].ownership)
    }

    #[tokio::test]
    async fn revoked_partition_is_reported_until_it_is_released() {
        let membership = membership();
        membership.on_response(0, Instant::now(), response(5, &[0, 1]));
        assert_eq!(change(&membership), Some(("assigned", vec![0, 1])));
        membership.on_response(5, Instant::now(), response(7, &[0]));
        assert_eq!((owned(&membership), membership.report().is_settled), (vec![0, 1], false));
        assert_eq!(change(&membership), Some(("revoked", vec![1])));
        let first = ownership(&membership, 1);
        // It is assigned again before the release, which still happens: its offset was committed.
        membership.on_response(7, Instant::now(), response(9, &[0, 1]));
        assert_eq!(change(&membership), None);
        membership.release(&[first]);
        assert_eq!(owned(&membership), [0]);
        membership.on_response(9, Instant::now(), response(9, &[0, 1]));
        assert_eq!(change(&membership), Some(("assigned", vec![1])));
        // A late release of the earlier ownership changes nothing.
        membership.release(&[first]);
        assert_eq!(owned(&membership), [0, 1]);
    }

    /// The conversion of `prost_types` panics for -2^63 seconds.
    #[tokio::test]
    async fn session_timeouts_without_equivalent_are_ignored() {
        for seconds in [i64::MIN, -1, i64::MAX] {
            let membership = membership();
            let session_timeout = Some(prost_types::Duration { seconds, nanos: 0 });
            let response = HeartbeatResponse { session_timeout, ..response(5, &[0]) };
            membership.on_response(0, Instant::now(), response);
            membership.expire(Instant::now());
            assert_eq!(change(&membership), Some(("assigned", vec![0])), "{seconds}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_end_as_the_test_vectors_say() {
        let vectors = include_str!("../../../docs/client-vectors.json");
        let vectors: serde_json::Value = serde_json::from_str(vectors).unwrap();
        let vectors = vectors["sessions"].as_array().unwrap();
        assert!(!vectors.is_empty());
        for vector in vectors {
            let ms = |name: &str| Duration::from_millis(vector[name].as_u64().unwrap());
            let (begin, membership) = (Instant::now(), membership());
            let session_timeout = ms("session_timeout_ms").try_into().ok();
            let response = HeartbeatResponse { session_timeout, ..response(5, &[0]) };
            tokio::time::advance(ms("answered_at_ms")).await;
            membership.on_response(0, begin + ms("sent_at_ms"), response);
            assert_eq!(membership.next_expiry(), Some(begin + ms("stops_at_ms")), "{vector}");
        }
    }

    #[tokio::test]
    async fn reports_name_partitions_by_id_alone() {
        let membership = membership();
        let partitions: Vec<u32> = (0..10_000).collect();
        membership.on_response(0, Instant::now(), response(5, &partitions));
        // With the names of topics, a report of many partitions would exceed the request limit.
        let report = membership.report();
        assert_eq!(report.owned.len(), 10_000);
        assert!(report.owned.iter().all(|it| it.topic.is_empty() && it.topic_id == 1));
    }

    #[tokio::test]
    async fn unknown_partitions_are_released_at_once() {
        let membership = membership();
        membership.on_response(0, Instant::now(), response(5, &[0, 1]));
        membership.on_response(5, Instant::now(), response(7, &[0]));
        assert_eq!(owned(&membership), [0]);
        assert_eq!(change(&membership), Some(("assigned", vec![0])));
        // Revoked and back before the application learns of it.
        membership.on_response(7, Instant::now(), response(8, &[]));
        membership.on_response(8, Instant::now(), response(9, &[0]));
        assert_eq!((change(&membership), membership.report().is_settled), (None, true));
    }

    #[tokio::test]
    async fn is_settled_as_the_last_response_of_the_membership_says() {
        let membership = membership();
        let settled =
            |partitions: &[u32]| HeartbeatResponse { settled: true, ..response(5, partitions) };
        membership.on_response(0, Instant::now(), response(5, &[]));
        assert!(!membership.is_settled(), "joined before the assignment");
        membership.on_response(5, Instant::now(), settled(&[0]));
        assert!(membership.is_settled());
        membership.lose(5, &Error::known(ErrorReason::UnknownMember, ""));
        assert!(!membership.is_settled());
        membership.on_response(0, Instant::now(), settled(&[]));
        assert!(membership.is_settled(), "without partitions");
    }

    #[tokio::test]
    async fn late_responses_and_errors_of_a_lost_membership_are_ignored() {
        let membership = membership();
        membership.on_response(0, Instant::now(), response(5, &[0]));
        assert_eq!(change(&membership), Some(("assigned", vec![0])));
        let first = ownership(&membership, 0);
        let unknown = Error::known(ErrorReason::UnknownMember, "");
        membership.lose(4, &unknown);
        assert_eq!(change(&membership), None, "an error of an earlier epoch");
        membership.lose(5, &unknown);
        membership.on_response(5, Instant::now(), response(5, &[0]));
        assert_eq!((membership.epoch(), change(&membership)), (0, Some(("lost", vec![0]))));
        membership.on_response(0, Instant::now(), response(8, &[0]));
        assert!(!membership.holds(first.0, first.1), "another ownership");
    }

    #[tokio::test]
    async fn session_and_releases_expire() {
        let membership = membership();
        let begin = Instant::now();
        membership.on_response(0, begin, response(5, &[0, 1]));
        assert_eq!(change(&membership), Some(("assigned", vec![0, 1])));
        membership.on_response(5, begin, response(7, &[0]));
        assert_eq!(membership.next_expiry(), Some(begin + SESSION));
        let later = begin + 3 * SESSION;
        membership.on_response(7, later, response(7, &[0]));
        membership.expire(later);
        assert_eq!(change(&membership), Some(("lost", vec![1])));
        assert_eq!(owned(&membership), [0]);
        membership.expire(later + SESSION);
        assert_eq!((membership.epoch(), change(&membership)), (0, Some(("lost", vec![0]))));
    }
}
