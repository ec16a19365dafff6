//! Decides what a heartbeat of a member changes, before anything is proposed.

use std::sync::Arc;

use super::command::{GroupChange, MemberSpec};
use super::{ConsumerGroup, GroupMember, GroupRefusal, GroupTable, PartitionKey, SortedSet};
use crate::log::ROWS_PER_ENTRY_MAX;

/// Default session timeout of a member.
const SESSION_TIMEOUT_MS_DEFAULT: u32 = 30_000;

/// A heartbeat of a member.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemberReport {
    /// Settings of the member. Empty fields and 0 keep the current value.
    pub spec: MemberSpec,
    /// Epoch of the last response; 0 joins.
    pub epoch: u64,
    /// Partitions that the member still reads.
    pub owned: SortedSet<PartitionKey>,
    pub take_over: bool,
}

/// Next step for a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReportStep {
    /// The change has to be applied. Then the report is judged again.
    Propose(GroupChange),
    /// The group's state already includes the whole report.
    Settled(MemberView),
}

/// View of the group that a heartbeat response gives a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberView {
    pub member_id: Arc<str>,
    /// Subscribed names and patterns.
    pub topics: Arc<[String]>,
    pub epoch: u64,
    pub joined_epoch: u64,
    /// Partitions that it may read.
    pub assigned: Vec<PartitionKey>,
    /// Partitions that it gets once others have released them.
    pub pending: Vec<PartitionKey>,
    pub session_timeout_ms: u32,
    /// True if the assignment is current and complete, and the member has nothing to release.
    pub is_settled: bool,
}

impl GroupTable {
    /// Returns the next step for a report.
    ///
    /// Without `may_put`, never proposes a member or its settings. A request may propose them only
    /// once: a second time would undo later changes.
    ///
    /// # Errors
    /// [`GroupRefusal`] if the member has to join again, or may not join.
    pub fn judge(
        &self,
        group: &str,
        report: &MemberReport,
        may_put: bool,
    ) -> Result<ReportStep, GroupRefusal> {
        let MemberReport { spec, epoch, owned, take_over } = report;
        let group = self.get(group);
        let Some((group, (id, member))) =
            group.and_then(|group| Some((group, group.member_entry(&spec.member_id)?)))
        else {
            if *epoch != 0 || !may_put {
                return Err(GroupRefusal::UnknownMember { member_id: spec.member_id.clone() });
            }
            // Apply decides. This check keeps retries of a refused join out of the log.
            let holder = group.and_then(|group| group.holder(&spec.static_name));
            if let Some(holder) = holder.filter(|_| !*take_over) {
                let static_name = spec.static_name.clone();
                return Err(GroupRefusal::NameInUse { static_name, holder });
            }
            let mut member = spec.clone();
            if member.session_timeout_ms == 0 {
                member.session_timeout_ms = SESSION_TIMEOUT_MS_DEFAULT;
            }
            let (take_over, joined_epoch) = (*take_over, 0);
            let join = GroupChange::PutMember { member, take_over, joined_epoch };
            return Ok(ReportStep::Propose(join));
        };
        let current = group.member_epoch(member);
        if *epoch > current || (*epoch != 0 && *epoch < member.joined_epoch) {
            return Err(GroupRefusal::StaleEpoch { epoch: *epoch, current });
        }
        if may_put && let Some(settings) = updated(member, spec)? {
            let joined_epoch = member.joined_epoch;
            let update =
                GroupChange::PutMember { member: settings, take_over: false, joined_epoch };
            return Ok(ReportStep::Propose(update));
        }
        if *epoch == current {
            let is_released =
                |it: &&PartitionKey| !member.target.contains(it) && !owned.contains(it);
            let released = member.owned.keys().filter(is_released);
            let partitions: Vec<_> = released.copied().take(ROWS_PER_ENTRY_MAX).collect();
            if !partitions.is_empty() {
                let (member_id, epoch) = (spec.member_id.clone(), *epoch);
                return Ok(ReportStep::Propose(GroupChange::Release {
                    member_id,
                    epoch,
                    partitions,
                }));
            }
        }
        Ok(ReportStep::Settled(group.view(id, member)))
    }
}

impl ConsumerGroup {
    /// Returns the current view of a member.
    pub fn view(&self, id: &Arc<str>, member: &GroupMember) -> MemberView {
        let GroupMember { owned, target, .. } = member;
        let assigned: Vec<_> = owned.keys().filter(|it| target.contains(it)).copied().collect();
        let pending: Vec<_> = target.iter().filter(|it| !owned.contains_key(it)).copied().collect();
        MemberView {
            member_id: id.clone(),
            topics: member.settings.topics.clone(),
            epoch: self.member_epoch(member),
            joined_epoch: member.joined_epoch,
            is_settled: self.is_assigned() && pending.is_empty() && assigned.len() == owned.len(),
            assigned,
            pending,
            session_timeout_ms: member.settings.session_timeout_ms,
        }
    }

    /// Returns whether a member has lost the partition permanently, as far as this state knows.
    ///
    /// True if the member neither owns the partition nor has it in its target. `epoch` is the last
    /// epoch that the member has received; an older state decides nothing.
    pub fn has_lost(&self, member_id: &str, epoch: u64, partition: PartitionKey) -> bool {
        match self.member(member_id) {
            Some(member) if self.member_epoch(member) >= epoch => {
                !member.owned.contains_key(&partition) && !member.target.contains(&partition)
            }
            Some(_) => false,
            None => self.epoch >= epoch,
        }
    }
}

/// Returns the settings that a report changes; `None` if it changes none.
fn updated(known: &GroupMember, said: &MemberSpec) -> Result<Option<MemberSpec>, GroupRefusal> {
    if !said.static_name.is_empty() && *said.static_name != *known.static_name {
        return Err(GroupRefusal::StaticNameFixed { current: known.static_name.to_string() });
    }
    // Compared before any clone: most heartbeats change nothing and must not allocate.
    let settings = &*known.settings;
    let has_topics = !said.topics.is_empty() && *said.topics != *settings.topics;
    let has_name = !said.client_name.is_empty() && *said.client_name != *settings.client_name;
    let timeout_ms = Some(said.session_timeout_ms).filter(|it| *it != 0);
    if !has_topics && !has_name && timeout_ms.is_none_or(|it| it == settings.session_timeout_ms) {
        return Ok(None);
    }
    let MemberSpec { member_id, mut topics, mut client_name, .. } = said.clone();
    if !has_topics {
        topics = settings.topics.to_vec();
    }
    if !has_name {
        client_name = settings.client_name.to_string();
    }
    Ok(Some(MemberSpec {
        member_id,
        static_name: known.static_name.to_string(),
        client_name,
        session_timeout_ms: timeout_ms.unwrap_or(settings.session_timeout_ms),
        topics,
    }))
}
