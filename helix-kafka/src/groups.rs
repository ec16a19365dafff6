//! Consumer groups of Kafka's clients: members and generations.
//!
//! Offsets are those of Helix's groups. Members are soft state of the gateway that the group's name
//! selects. Another one takes its place when it does not answer, and the members join there.

mod report;
mod state;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use helix_client::proto::log::v1::ReportGatewayMembersRequest;
use kafka_protocol::error::ResponseError;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

pub(crate) use report::{gateway_name, is_unknown_call, report_of};
pub(crate) use state::{JoinSpec, Joined, KafkaGroup, KafkaMember, RebalanceState, Reply};

use crate::upstream::Upstream;

/// Most groups with members.
const GROUPS_MAX: usize = 10_000;

/// Most bytes of metadata and assignments of one group.
const GROUP_BYTES_MAX: usize = 8 << 20;

/// Interval between checks of timeouts.
const TICK: Duration = Duration::from_millis(100);

/// Age up to which a confirmation that this gateway coordinates a group is used.
const CONFIRMED_AGE_MAX: Duration = Duration::from_secs(2);

/// Groups with members at this gateway.
#[derive(Debug, Default)]
pub(crate) struct GroupRegistry {
    groups: Mutex<HashMap<String, CoordinatedGroup>>,
    /// Groups without members, of which the cluster has to learn.
    ended: Mutex<Vec<(String, Arc<Upstream>)>>,
    ended_notify: Notify,
}

#[derive(Debug)]
struct CoordinatedGroup {
    group: KafkaGroup,
    /// The cluster with the credentials of the member that was heard last.
    upstream: Arc<Upstream>,
    /// Time when this gateway was last found to coordinate the group.
    confirmed_at: Instant,
    offsets: Arc<GroupOffsetsState>,
}

/// State of the offsets that the members of the current generation follow.
#[derive(Debug, Default)]
pub(crate) struct GroupOffsetsState {
    /// Held during a commit, so that each one follows the state after the last one.
    pub(crate) epoch: tokio::sync::Mutex<Option<u64>>,
}

impl GroupRegistry {
    /// Runs `change` on a group with members. Fails with UNKNOWN_MEMBER_ID if there is none.
    ///
    /// # Errors
    /// The code of `change`.
    pub(crate) fn with<T>(
        &self,
        group: &str,
        change: impl FnOnce(&mut KafkaGroup, Instant) -> Result<T, ResponseError>,
    ) -> Result<T, ResponseError> {
        let mut groups = self.lock();
        let coordinated = groups.get_mut(group).ok_or(ResponseError::UnknownMemberId)?;
        let result = change(&mut coordinated.group, Instant::now());
        if coordinated.group.is_unused()
            && let Some(removed) = groups.remove(group)
        {
            self.end(group.to_owned(), removed.upstream);
        }
        result
    }

    /// Lets a member join; creates the group if there is none.
    pub(crate) fn join(
        &self,
        group: &str,
        spec: JoinSpec,
        upstream: &Arc<Upstream>,
    ) -> Reply<state::JoinResult> {
        let now = Instant::now();
        let mut groups = self.lock();
        let is_full = groups.len() >= GROUPS_MAX && !groups.contains_key(group);
        let coordinated = groups.entry(group.to_owned()).or_insert_with(|| CoordinatedGroup {
            group: KafkaGroup::new(now),
            upstream: upstream.clone(),
            confirmed_at: now,
            offsets: Arc::default(),
        });
        coordinated.upstream = upstream.clone();
        let bytes: usize = spec.protocols.iter().map(|(_, metadata)| metadata.len()).sum();
        let reply = match is_full || coordinated.group.bytes() + bytes > GROUP_BYTES_MAX {
            true => Reply::Now(Err((ResponseError::GroupMaxSizeReached, spec.member_id))),
            false => coordinated.group.join(spec, now),
        };
        if coordinated.group.is_unused() {
            groups.remove(group);
        }
        reply
    }

    /// Returns the state of the offsets of a group with members.
    pub(crate) fn offsets(&self, group: &str) -> Option<Arc<GroupOffsetsState>> {
        self.lock().get(group).map(|coordinated| coordinated.offsets.clone())
    }

    /// Keeps the credentials of a member for reports.
    pub(crate) fn heard(&self, group: &str, upstream: &Arc<Upstream>) {
        if let Some(coordinated) = self.lock().get_mut(group) {
            coordinated.upstream = upstream.clone();
        }
    }

    /// Returns a report about a group, which need not have members yet.
    pub(crate) fn report(&self, group: &str, gateway: String) -> ReportGatewayMembersRequest {
        let groups = self.lock();
        report_of(group, gateway, groups.get(group).map(|coordinated| &coordinated.group))
    }

    /// Returns reports about all groups with members, and the credentials for them.
    fn reports(&self, gateway: &str) -> Vec<(ReportGatewayMembersRequest, Arc<Upstream>)> {
        let groups = self.lock();
        let report = |(name, coordinated): (&String, &CoordinatedGroup)| {
            let report = report_of(name, gateway.to_owned(), Some(&coordinated.group));
            (report, coordinated.upstream.clone())
        };
        groups.iter().filter(|(_, it)| !it.group.members.is_empty()).map(report).collect()
    }

    fn end(&self, group: String, upstream: Arc<Upstream>) {
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // While the cluster does not answer, the reports end with their times.
        if ended.len() < GROUPS_MAX {
            ended.push((group, upstream));
        }
        self.ended_notify.notify_one();
    }

    fn take_ended(&self) -> Vec<(String, Arc<Upstream>)> {
        std::mem::take(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns true if the group has members here.
    pub(crate) fn has_members(&self, group: &str) -> bool {
        self.lock().get(group).is_some_and(|coordinated| !coordinated.group.members.is_empty())
    }

    /// Returns the groups with members, and their states.
    pub(crate) fn list(&self) -> Vec<(String, String, RebalanceState)> {
        let groups = self.lock();
        let entry = |(name, coordinated): (&String, &CoordinatedGroup)| {
            let group = &coordinated.group;
            (name.clone(), group.protocol_type.clone(), group.state)
        };
        groups.iter().filter(|(_, it)| !it.group.members.is_empty()).map(entry).collect()
    }

    /// Returns the number of groups with members, and of these members.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let groups = self.lock();
        let counts = groups.values().map(|it| it.group.members.len()).filter(|it| *it > 0);
        counts.fold((0, 0), |(groups, members), count| (groups + 1, members + count))
    }

    /// Returns true if the cluster has to be asked again who coordinates the group.
    pub(crate) fn needs_confirmation(&self, group: &str) -> bool {
        let groups = self.lock();
        groups.get(group).is_some_and(|it| it.confirmed_at.elapsed() >= CONFIRMED_AGE_MAX)
    }

    /// Notes that this gateway coordinates the group.
    pub(crate) fn confirm(&self, group: &str) {
        if let Some(coordinated) = self.lock().get_mut(group) {
            coordinated.confirmed_at = Instant::now();
        }
    }

    /// Gives up a group that another gateway coordinates. Waiting members ask again.
    pub(crate) fn give_up(&self, group: &str) {
        if self.lock().remove(group).is_some() {
            tracing::info!(group, "another gateway coordinates the group");
        }
    }

    /// Makes all members of a group join again and read their offsets again.
    pub(crate) fn restart(&self, group: &str) {
        if let Some(coordinated) = self.lock().get_mut(group) {
            coordinated.group.restart(Instant::now());
        }
    }

    /// Watches timeouts until it is dropped.
    pub(crate) async fn watch(&self) {
        loop {
            sleep(TICK).await;
            let now = Instant::now();
            self.lock().retain(|name, coordinated| {
                coordinated.group.tick(now);
                let is_unused = coordinated.group.is_unused();
                if is_unused {
                    self.end(name.clone(), coordinated.upstream.clone());
                }
                !is_unused
            });
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, CoordinatedGroup>> {
        // No code under the lock can panic in the middle of a change.
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
