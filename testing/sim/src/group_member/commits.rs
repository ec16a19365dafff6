//! A member's commits, late copies of them, and the offsets that they leave.

use std::collections::BTreeSet;

use helix_checker::{GroupPartitionKey, SentCommit};
use helix_client::Error;
use helix_proto::log::v1::{
    CommitOffsetsRequest, CommitOffsetsResponse, CommittedOffset, DescribeGroupRequest,
    ErrorReason, GetOffsetsRequest, TopicPartition,
};
use rand::RngExt;
use tokio::time::{Instant, sleep};

use super::{
    ATTEMPTS_MAX, Member, MemberSlot, RESPONSE_TIMEOUT, Reading, call, is_fenced, key_of, millis,
};
use crate::coverage::CoverageMark;

/// Probability that a copy of a commit is kept.
const COPIED: f64 = 0.3;

/// Copies that a slot keeps.
const COPIES_MAX: usize = 8;

/// Copy of a commit that was applied, or may have been. It arrives again after others.
pub(super) struct CommitCopy {
    request: CommitOffsetsRequest,
    sent: Vec<(String, SentCommit)>,
}

impl MemberSlot {
    /// Commits what was read in these partitions, or in all.
    pub(super) async fn commit(
        &mut self,
        member: &mut Member,
        only: Option<&BTreeSet<GroupPartitionKey>>,
    ) {
        for _ in 0..ATTEMPTS_MAX {
            let is_due = |(key, reading): &(&GroupPartitionKey, &Reading)| {
                only.is_none_or(|only| only.contains(key)) && reading.next > reading.committed
            };
            let rows = member.readings.iter().filter(is_due).filter_map(|(key, reading)| {
                let topic = reading.topic.clone();
                Some((*key, topic, reading.next?, reading.is_claimed))
            });
            let rows: Vec<(GroupPartitionKey, String, u64, bool)> = rows.collect();
            if rows.is_empty() || self.try_commit(member, rows).await {
                return;
            }
            sleep(millis(&mut self.rng, 5..=100)).await;
        }
    }

    /// Returns whether there is nothing left to retry.
    async fn try_commit(
        &mut self,
        member: &mut Member,
        rows: Vec<(GroupPartitionKey, String, u64, bool)>,
    ) -> bool {
        let sent: Vec<(String, SentCommit, bool)> = {
            let mut checker = self.context.group.checker();
            let send = |(key, topic, offset, is_claimed)| {
                (topic, checker.send_commit(member.id, key, offset), is_claimed)
            };
            rows.into_iter().map(send).collect()
        };
        let offsets = sent.iter().map(|(topic, commit, _)| CommittedOffset {
            partition: Some(TopicPartition {
                topic: topic.clone(),
                partition: commit.key.number,
                topic_id: commit.key.topic_id,
            }),
            offset: commit.offset,
            metadata: String::new(),
        });
        let request = CommitOffsetsRequest {
            group: self.context.group.name().to_owned(),
            member_id: member.member_id.clone(),
            member_epoch: member.epoch,
            offsets: offsets.collect(),
            // Each request is a commit of its own: none is repeated unchanged.
            sequence: self.context.group.next_commit(),
            offsets_epoch: None,
        };
        let mut node = self.node();
        let response = call(RESPONSE_TIMEOUT, node.group.commit_offsets(request.clone())).await;
        self.keep_copy(request, &sent, &response);
        let mut checker = self.context.group.checker();
        let error = match response {
            Ok(_) => {
                for (topic, commit, _) in &sent {
                    checker.commit_acked(topic, *commit);
                    if let Some(reading) = member.readings.get_mut(&commit.key) {
                        reading.committed = Some(commit.offset);
                    }
                }
                drop(checker);
                let committed: Vec<_> =
                    sent.iter().map(|(_, commit, _)| (commit.key, commit.offset)).collect();
                self.note(member, &format!("committed {committed:?}"));
                return true;
            }
            Err(error) => error,
        };
        drop(checker);
        let text = error.as_ref().map_or("no response".to_owned(), ToString::to_string);
        self.note(member, &format!("commit failed: {text}"));
        let Some(error) = error else {
            self.reroute(None);
            return false;
        };
        if is_fenced(&error) {
            self.context.marks.hit(CoverageMark::GroupCommitFenced);
            self.rejoin(member, &error);
            return true;
        }
        let failed = error.topic_partition.clone();
        let is_failed = |(topic, commit, _): &&(String, SentCommit, bool)| {
            failed.as_ref().is_some_and(|it| it.0 == *topic && it.1 == commit.key.number)
        };
        match error.reason {
            Some(ErrorReason::PartitionNotOwned) => {
                self.context.marks.hit(CoverageMark::GroupCommitFenced);
                let is_wrong =
                    sent.iter().find(is_failed).is_some_and(|(_, _, is_claimed)| *is_claimed);
                if is_wrong && Instant::now() < member.expires && self.static_name.is_empty() {
                    self.found(member, &format!("reads a partition that it does not own: {error}"));
                }
                member.next_heartbeat = Instant::now();
                true
            }
            // The topic was deleted.
            Some(
                ErrorReason::TopicNotFound
                | ErrorReason::TopicDeleted
                | ErrorReason::TopicRecreated
                | ErrorReason::PartitionNotFound,
            ) => {
                let gone: Vec<_> = sent.iter().filter(is_failed).map(|it| it.1.key).collect();
                for key in &gone {
                    if let Some(reading) = member.readings.get_mut(key) {
                        reading.committed = reading.next;
                    }
                }
                gone.is_empty()
            }
            _ => {
                self.reroute(Some(&error));
                false
            }
        }
    }

    /// Keeps some copies of the commits that were applied, or may have been.
    fn keep_copy(
        &mut self,
        request: CommitOffsetsRequest,
        sent: &[(String, SentCommit, bool)],
        response: &Result<CommitOffsetsResponse, Option<Error>>,
    ) {
        let is_refused =
            |error: &Option<Error>| error.as_ref().is_some_and(|error| !error.may_have_applied);
        if response.as_ref().is_err_and(is_refused) || !self.rng.random_bool(COPIED) {
            return;
        }
        if self.copies.len() == COPIES_MAX {
            self.copies.pop_front();
        }
        let sent = sent.iter().map(|(topic, commit, _)| (topic.clone(), *commit)).collect();
        self.copies.push_back(CommitCopy { request, sent });
    }

    /// Sends one of the copies, also of an earlier member of the slot. It must have no effect if a
    /// later commit was acknowledged, or if another member reads.
    pub(super) async fn send_copy(&mut self) {
        if self.copies.is_empty() {
            return;
        }
        let at = self.rng.random_range(0..self.copies.len());
        let Some(CommitCopy { request, sent }) = self.copies.remove(at) else { return };
        let sent: Vec<(String, SentCommit)> = {
            let mut checker = self.context.group.checker();
            sent.into_iter().map(|(topic, commit)| (topic, checker.send_copy(commit))).collect()
        };
        let mut node = match self.rng.random_bool(0.2) {
            true => self.random_node(),
            false => self.node(),
        };
        match call(RESPONSE_TIMEOUT, node.group.commit_offsets(request)).await {
            Ok(_) => {
                let mut checker = self.context.group.checker();
                for (topic, commit) in &sent {
                    checker.commit_acked(topic, *commit);
                }
            }
            Err(Some(error)) if error.is(ErrorReason::StaleCommit) => {
                self.context.marks.hit(CoverageMark::GroupLateCommitRefused);
            }
            Err(_) => {}
        }
    }

    /// Reads the group's offsets, which must have all acknowledged commits.
    pub(super) async fn check_offsets(&mut self) {
        let floors = self.context.group.checker().floors();
        let group = self.context.group.name().to_owned();
        let mut node = self.node();
        let request = GetOffsetsRequest { group: group.clone(), ..Default::default() };
        let Ok(response) = call(RESPONSE_TIMEOUT, node.group.get_offsets(request)).await else {
            return;
        };
        for committed in response.offsets.into_iter().filter_map(|row| row.committed) {
            let Some(key) = committed.partition.as_ref().map(key_of) else { continue };
            if let Some(floor) = floors.get(&key).filter(|floor| committed.offset < **floor) {
                let offset = committed.offset;
                let what = format!("GetOffsets has {offset} of {key:?}, after a commit of {floor}");
                self.context.group.checker().found(what);
            }
        }
        let request = DescribeGroupRequest { group, include_history: true, ..Default::default() };
        // Called for its failures only, which are panics.
        let _ = call(RESPONSE_TIMEOUT, node.group.describe_group(request)).await;
    }
}
