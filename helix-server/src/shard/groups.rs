//! Consumer groups of a shard: proposals, reads, and notifications of changes.
//! The leader of the shard coordinates its groups.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::{Notify, watch as channel};
use tokio::time::Instant;

use super::Shard;
use super::gateway_groups::GatewayGroups;
use super::group_sessions::{GroupSessions, HeartbeatDetails};
use crate::error::{Error, Result};
use crate::flow::FlowShare;
use crate::limits;
use crate::log::{
    GroupChange, GroupCommand, GroupRefusal, GroupTable, MemberReport, MemberView, ReportStep,
    ShardCommand, TopicOffsets,
};
use crate::sync;

/// Memory of a group's entry without its texts and rows.
const ENTRY_BYTES: usize = 128;

/// A group with watches.
#[derive(Debug)]
struct WatchedGroup {
    sender: channel::Sender<()>,
    watch_count: usize,
}

/// Notifies watchers of changes of groups, except commits and seeks.
#[derive(Debug, Default)]
pub(super) struct GroupWatchers {
    by_group: Mutex<BTreeMap<Arc<str>, WatchedGroup>>,
    /// Groups that have changed since the coordinator last took this set.
    changed: Mutex<BTreeSet<Arc<str>>>,
    notify: Notify,
}

impl GroupWatchers {
    /// Notifies the watchers of these groups. Called once their new state can be read.
    pub(super) fn wake(&self, groups: impl IntoIterator<Item = Arc<str>>) {
        let by_group = sync::lock(&self.by_group);
        let mut changed = sync::lock(&self.changed);
        for group in groups {
            if let Some(watched) = by_group.get(&group) {
                watched.sender.send_replace(());
            }
            changed.insert(group);
        }
        self.notify.notify_one();
    }

    /// Notifies all watchers: the state was replaced.
    pub(super) fn wake_all(&self, groups: impl IntoIterator<Item = Arc<str>>) {
        self.wake(groups);
        self.wake_watchers();
    }

    /// Notifies all watchers, which then check whether this replica is still the leader.
    pub(super) fn wake_watchers(&self) {
        for watched in sync::lock(&self.by_group).values() {
            watched.sender.send_replace(());
        }
    }

    fn watch(self: &Arc<Self>, group: &str) -> GroupWatch {
        let mut by_group = sync::lock(&self.by_group);
        let name =
            by_group.get_key_value(group).map_or_else(|| group.into(), |(name, _)| name.clone());
        let watched = by_group
            .entry(Arc::clone(&name))
            .or_insert_with(|| WatchedGroup { sender: channel::channel(()).0, watch_count: 0 });
        watched.watch_count += 1;
        let changes = watched.sender.subscribe();
        GroupWatch { watchers: self.clone(), name, changes }
    }
}

/// Watches one group.
#[derive(Debug)]
pub struct GroupWatch {
    watchers: Arc<GroupWatchers>,
    name: Arc<str>,
    changes: channel::Receiver<()>,
}

impl GroupWatch {
    /// Waits until the group has changed since the last call.
    pub async fn changed(&mut self) {
        // The sender stays in the table while there are watchers.
        let _ = self.changes.changed().await;
    }

    /// Returns whether the group has changed since the last call.
    pub fn take_changed(&mut self) -> bool {
        let has_changed = self.changes.has_changed().unwrap_or(false);
        // Only then: a change since that moment must be seen by the next call.
        if has_changed {
            self.changes.mark_unchanged();
        }
        has_changed
    }
}

impl Drop for GroupWatch {
    fn drop(&mut self) {
        let mut by_group = sync::lock(&self.watchers.by_group);
        let Some(watched) = by_group.get_mut(&self.name) else { return };
        watched.watch_count -= 1;
        if watched.watch_count == 0 {
            by_group.remove(&self.name);
        }
    }
}

impl Shard {
    /// Proposes a change of a group, and waits until it is applied.
    ///
    /// # Errors
    /// As [`Self::permit`] and [`Self::command`], and [`GroupRefusal::BytesReached`].
    pub async fn change_group(&self, group: &str, change: GroupChange) -> Result<()> {
        // Held until the entry is applied, so that groups cannot take more memory than batches.
        let _permit = self.permit(FlowShare::INTERNAL, entry_bytes(&change)).await?;
        let is_ordered = self.machine.orders_commits();
        let command = GroupCommand { group: group.to_owned(), change, is_ordered };
        self.check_growth(&command)?;
        self.command(ShardCommand::Group(Box::new(command))).await
    }

    /// Checks that a change does not make the shard's groups larger than a snapshot may be. Apply
    /// does not: it decides the same in every version.
    fn check_growth(&self, command: &GroupCommand) -> Result<()> {
        let limit = self.log_limits.groups_bytes;
        // Only at the limit: tries the change on a copy, without the lock.
        let tried = self.read_groups(|groups| {
            (groups.estimated_len() >= limit).then(|| groups.only(&command.group))
        });
        if tried.is_some_and(|group| group.grows_with(command)) {
            return Err(crate::log::Refusal::from(GroupRefusal::BytesReached { limit }).into());
        }
        Ok(())
    }

    /// Runs `read` on the groups as applied here.
    pub fn read_groups<T>(&self, read: impl FnOnce(&GroupTable) -> T) -> T {
        self.machine.read_state(|state| read(state.groups()))
    }

    /// Watches a group, which need not exist yet.
    pub fn watch_group(&self, group: &str) -> GroupWatch {
        self.machine.group_watchers().watch(group)
    }

    /// Returns the sessions of members, which are valid while this replica is the leader.
    pub fn group_sessions(&self) -> &GroupSessions {
        &self.sessions
    }

    /// Returns what gateways have reported while this replica is the leader.
    pub fn gateway_groups(&self) -> &GatewayGroups {
        &self.gateway_groups
    }

    /// Waits until a group has changed since the last [`Self::take_changed_groups`].
    pub async fn groups_changed(&self) {
        self.machine.group_watchers().notify.notified().await;
    }

    pub fn take_changed_groups(&self) -> BTreeSet<Arc<str>> {
        std::mem::take(&mut *sync::lock(&self.machine.group_watchers().changed))
    }

    /// Handles a heartbeat of a member on the leader, and returns the member's view.
    ///
    /// Proposes the changes that the report asks for. While the view equals the report, waits for
    /// at most `wait` and at most a third of the session timeout. A join also waits for its first
    /// partitions.
    ///
    /// # Errors
    /// The error of a refused change or of `rights_lost`, and as [`Self::ready`] and
    /// [`Self::change_group`].
    pub async fn report(
        &self,
        group: &str,
        report: &MemberReport,
        details: &HeartbeatDetails,
        wait: Duration,
        rights_lost: impl Future<Output = Error>,
    ) -> Result<MemberView> {
        let mut rights_lost = pin!(rights_lost);
        let since = Instant::now();
        // A lost leadership and a closed replica also wake the watch, so a waiting heartbeat needs
        // no other registration.
        let leadership_token = self.leadership_token();
        let mut watch = self.watch_group(group);
        let mut may_put = true;
        loop {
            if self.closed.is_cancelled() {
                return Err(Error::Draining);
            }
            if leadership_token.is_cancelled() {
                return Err(self.not_leader());
            }
            self.ready().await?;
            watch.changes.mark_unchanged();
            // After the mark, or a wake-up in between would be lost.
            if leadership_token.is_cancelled() || self.closed.is_cancelled() {
                continue;
            }
            let judged = self.read_groups(|groups| groups.judge(group, report, may_put));
            let view = match judged.map_err(crate::log::Refusal::from)? {
                ReportStep::Propose(change) => {
                    if let Some(error) = rights_lost.as_mut().now_or_never() {
                        return Err(error);
                    }
                    // The heartbeat counts even if the proposal takes long or fails.
                    self.touch_known(group, report, details);
                    may_put &= !matches!(change, GroupChange::PutMember { .. });
                    self.change_group(group, change).await?;
                    continue;
                }
                ReportStep::Settled(view) => view,
            };
            let timeout = Duration::from_millis(view.session_timeout_ms.into());
            if !self.sessions.touch(group, &view, details) {
                // A response would extend a session that is ending, so wait for the outcome of the
                // removal.
                tokio::select! {
                    () = watch.changed() => continue,
                    error = &mut rights_lost => return Err(error),
                    () = tokio::time::sleep_until(since + limits::READY_WAIT_MAX) => {
                        return Err(Error::NoLeader { shard: self.id() });
                    }
                }
            }
            may_put = false;
            let deadline = wait_end(self.opened_at, since, wait.min(timeout / 3));
            let is_known =
                view.epoch == report.epoch && view.assigned.iter().eq(report.owned.iter());
            // A join waits for its first partitions, unless its assignment is complete without any.
            let awaits_partitions =
                report.epoch == 0 && view.assigned.is_empty() && !view.is_settled;
            if (!is_known && !awaits_partitions) || wait.is_zero() {
                return Ok(view);
            }
            tokio::select! {
                () = watch.changed() => {}
                error = &mut rights_lost => return Err(error),
                () = tokio::time::sleep_until(deadline) => {
                    if self.sessions.answer(group, &view) {
                        return Ok(view);
                    }
                    // Wait for the outcome of the removal.
                }
            }
        }
    }

    /// Records the heartbeat of a member that belongs to the group.
    fn touch_known(&self, group: &str, report: &MemberReport, details: &HeartbeatDetails) {
        let member_id = report.spec.member_id.as_str();
        let view = self.read_groups(|groups| {
            let group = groups.get(group)?;
            let (id, member) = group.member_entry(member_id)?;
            Some(group.view(id, member))
        });
        let Some(view) = view else { return };
        // Ignored: a member that is being removed is found when the report is judged again.
        let _ = self.sessions.touch(group, &view, details);
    }

    /// Waits until this replica has applied the entry at `index`.
    ///
    /// # Errors
    /// [`Error::NoLeader`] after [`limits::READY_WAIT_MAX`].
    pub async fn wait_applied(&self, index: u64) -> Result<()> {
        let deadline = Instant::now() + limits::READY_WAIT_MAX;
        while self.applied() < index {
            if Instant::now() >= deadline {
                return Err(Error::NoLeader { shard: self.id() });
            }
            tokio::time::sleep(limits::APPLIED_POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Returns an index that covers everything acknowledged before the call; on the leader only.
    ///
    /// # Errors
    /// As [`Self::ready`].
    pub async fn confirmed_index(&self) -> Result<u64> {
        self.ready().await?;
        Ok(self.applied())
    }

    /// Returns the index of the last entry whose effects can be read here.
    pub fn applied(&self) -> u64 {
        self.machine.applied().max(self.replica.applied())
    }
}

/// Returns the end of a heartbeat's wait, at most `wait` after `since`.
///
/// Rounds long waits down to a multiple of [`limits::GROUP_WAIT_STEP`] after `base`. Many waits
/// then share an end, and one timer wakes the node for all of them. The next heartbeats of these
/// members also arrive together.
fn wait_end(base: Instant, since: Instant, wait: Duration) -> Instant {
    let end = since + wait;
    if wait < limits::GROUP_WAIT_STEP * 10 {
        return end;
    }
    let surplus =
        end.saturating_duration_since(base).as_nanos() % limits::GROUP_WAIT_STEP.as_nanos();
    end - Duration::from_nanos(u64::try_from(surplus).unwrap_or(0))
}

/// Returns about how much memory an entry takes.
fn entry_bytes(change: &GroupChange) -> usize {
    let topics_bytes = |topics: &[TopicOffsets]| -> usize {
        let rows = topics.iter().flat_map(|topic| &topic.offsets);
        let names: usize = topics.iter().map(|topic| topic.name.len() + 16).sum();
        names + rows.map(|row| row.metadata.len() + 16).sum::<usize>()
    };
    ENTRY_BYTES
        + match change {
            GroupChange::PutMember { member, .. } => {
                member.topics.iter().map(|topic| topic.len() + 24).sum()
            }
            GroupChange::RemoveMembers { members } => members.len() * 88,
            GroupChange::Assign(assignment) => {
                assignment.topics.len() * 16 + assignment.owners.len() * 4
            }
            GroupChange::Release { partitions, .. } => partitions.len() * 16,
            GroupChange::Commit { topics, .. } | GroupChange::Seek { topics, .. } => {
                topics_bytes(topics)
            }
            GroupChange::ForgetTopics { topic_ids } => topic_ids.len() * 8,
            GroupChange::ForgetTopic { topic, .. } => topic.len(),
            GroupChange::Delete { .. } => 0,
        }
}

/// Returns about how many bytes a change of a group takes in the log.
pub(super) fn logged_bytes(change: &GroupChange) -> u64 {
    entry_bytes(change) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_end_together_and_never_late() {
        let base = Instant::now();
        let end = |since_ms, wait_ms| {
            let since = base + Duration::from_millis(since_ms);
            (wait_end(base, since, Duration::from_millis(wait_ms)) - base).as_micros()
        };
        assert_eq!([end(1, 3_000), end(9, 3_000), end(6, 3_003)], [3_000_000; 3]);
        assert_eq!([end(10, 3_000), end(14, 3_005)], [3_010_000; 2]);
        assert_eq!([end(1, 0), end(1, 99), end(1, 100)], [1_000, 100_000, 100_000]);
    }
}
