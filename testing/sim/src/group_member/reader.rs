//! Reads of a member: from the group's offsets, through Fetch or Subscribe, from any replica.

use std::time::Duration;

use futures_util::future::join_all;
use helix_checker::{GroupPartitionKey, GroupStart};
use helix_client::Error;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    CommitFallback, ErrorReason, FetchRequest, GroupMembership, PartitionRecords, PartitionStart,
    ReadLimits, ReadSource, StartPosition, SubscribeRequest, SubscribeResponse,
};
use rand::RngExt;
use tokio::time::{Instant, timeout, timeout_at};
use tonic::Streaming;

use super::{Member, MemberSlot, RESPONSE_TIMEOUT, Reading, call, to_proto};
use crate::coverage::CoverageMark;
use crate::shard_growth;

/// Longest wait for a message of a subscription, which has arrived already.
const MESSAGE_TIMEOUT: Duration = Duration::from_millis(1);

/// Longest wait for a message that the node sends once an absent member reads again: until then the
/// stream's window is full. The end of the stream comes after it.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(300);

/// Most messages of a subscription that a member takes at once.
const MESSAGES_MAX: u32 = 50;

/// Most messages that an absent member may have left unread in a subscription.
const DRAINED_MAX: u32 = 5_000;

/// Most records of a fetch.
const RECORDS_MAX: u64 = 2_000;

/// Longest wait of a fetch for new records.
const FETCH_WAIT: Duration = Duration::from_millis(150);

/// Returns whether members own the partitions of a topic, but do not read them: their writers are
/// too many for members that ask one node after the other.
fn is_unread(topic: &str) -> bool {
    topic.starts_with(shard_growth::NAME_PREFIX)
}

impl MemberSlot {
    fn start_of(&self, key: GroupPartitionKey, reading: &Reading) -> PartitionStart {
        let position = match reading.next {
            Some(next) => Position::Offset(next),
            None => Position::CommittedGroup(self.context.group.name().to_owned()),
        };
        PartitionStart {
            topic: reading.topic.clone(),
            partition: key.number,
            start: Some(StartPosition {
                position: Some(position),
                commit_fallback: match reading.next {
                    Some(_) => CommitFallback::Unspecified.into(),
                    None => reading.fallback.into(),
                },
                ..StartPosition::default()
            }),
            until_offset: None,
            topic_id: key.topic_id,
        }
    }

    fn draw_source(&mut self) -> i32 {
        match self.rng.random_bool(0.6) {
            true => ReadSource::AnyReplica.into(),
            false => ReadSource::Unspecified.into(),
        }
    }

    /// Fetches from all partitions at once.
    pub(super) async fn fetch(&mut self, member: &mut Member) {
        let mut calls = Vec::new();
        for (key, reading) in &member.readings {
            if !reading.is_claimed || is_unread(&reading.topic) {
                continue;
            }
            let start = self.start_of(*key, reading);
            let source = self.draw_source();
            let mut node = self.random_node();
            let floor = self.context.group.checker().floor(*key);
            let request = FetchRequest {
                partitions: vec![start],
                limits: Some(ReadLimits {
                    max_records: Some(RECORDS_MAX),
                    ..ReadLimits::default()
                }),
                max_wait: Some(to_proto(FETCH_WAIT)),
                source,
                ..FetchRequest::default()
            };
            let key = *key;
            calls.push(async move {
                (key, floor, call(RESPONSE_TIMEOUT, node.consume.fetch(request)).await)
            });
        }
        for (key, floor, response) in join_all(calls).await {
            self.suspend_if_expired(member);
            match response {
                Ok(mut response) => {
                    let records = response.partitions.pop().unwrap_or_default();
                    self.take(member, key, floor, records);
                }
                Err(Some(error)) => self.read_failed(member, key, floor, &error),
                Err(None) => {}
            }
        }
    }

    /// Receives what the subscriptions of all partitions have, and opens those that are missing.
    pub(super) async fn receive(&mut self, member: &mut Member) {
        let read = member.readings.iter().filter(|(_, reading)| !is_unread(&reading.topic));
        let keys: Vec<GroupPartitionKey> = read.map(|(key, _)| *key).collect();
        for key in keys {
            let mut left = MESSAGES_MAX;
            while left > 0 && self.receive_one(member, key).await {
                left -= 1;
            }
        }
    }

    /// Receives one message of a partition. Returns whether there may be another one.
    async fn receive_one(&mut self, member: &mut Member, key: GroupPartitionKey) -> bool {
        self.suspend_if_expired(member);
        let Some(reading) = member.readings.get_mut(&key).filter(|it| it.is_claimed) else {
            return false;
        };
        let floor = self.context.group.checker().floor(key);
        let Some(stream) = &mut reading.stream else {
            self.subscribe(member, key, floor).await;
            return false;
        };
        let received = timeout(MESSAGE_TIMEOUT, stream.message()).await;
        self.suspend_if_expired(member);
        match received {
            Ok(Ok(Some(response))) => {
                self.take_message(member, key, floor, response);
                return true;
            }
            Ok(Ok(None)) => self.drop_stream(member, key),
            Ok(Err(status)) => {
                self.drop_stream(member, key);
                self.read_failed(member, key, floor, &Error::from_status(&status));
            }
            Err(_) => {}
        }
        false
    }

    pub(super) fn take_streams(&self, member: &mut Member) -> Vec<Streaming<SubscribeResponse>> {
        member.readings.values_mut().filter_map(|reading| reading.stream.take()).collect()
    }

    /// Receives and drops what a subscription has sent meanwhile.
    pub(super) async fn drain(&self, member: &Member, stream: &mut Streaming<SubscribeResponse>) {
        for _ in 0..DRAINED_MAX {
            let until = Instant::now() + DRAIN_TIMEOUT;
            if !self.drain_one(member, stream, until).await {
                return;
            }
        }
    }

    /// Receives and drops what a subscription sends until then, or until it ends.
    pub(super) async fn drain_until(
        &self,
        member: &Member,
        stream: &mut Streaming<SubscribeResponse>,
        until: Instant,
    ) {
        while self.drain_one(member, stream, until).await {}
    }

    /// Drops one message. Returns whether there may be another one.
    async fn drain_one(
        &self,
        member: &Member,
        stream: &mut Streaming<SubscribeResponse>,
        until: Instant,
    ) -> bool {
        match timeout_at(until, stream.message()).await {
            Ok(Ok(Some(_))) => true,
            Ok(Err(status)) => {
                let error = Error::from_status(&status);
                self.note(member, &format!("subscription ended: {error}"));
                if error.is(ErrorReason::PartitionNotOwned) || error.is(ErrorReason::UnknownMember)
                {
                    self.context.marks.hit(CoverageMark::GroupReaderEnded);
                }
                false
            }
            Ok(Ok(None)) | Err(_) => false,
        }
    }

    fn drop_stream(&self, member: &mut Member, key: GroupPartitionKey) {
        if let Some(reading) = member.readings.get_mut(&key) {
            reading.stream = None;
        }
    }

    async fn subscribe(&mut self, member: &mut Member, key: GroupPartitionKey, floor: Option<u64>) {
        let Some(reading) = member.readings.get(&key) else { return };
        let start = self.start_of(key, reading);
        let mut node = self.random_node();
        let request = SubscribeRequest {
            partitions: vec![start],
            source: self.draw_source(),
            membership: Some(GroupMembership {
                group: self.context.group.name().to_owned(),
                member_id: member.member_id.clone(),
                member_epoch: member.epoch,
            }),
            ..SubscribeRequest::default()
        };
        // With the first message: the start was resolved after `floor` was known.
        let opened = async {
            let mut stream = call(RESPONSE_TIMEOUT, node.consume.subscribe(request)).await?;
            match timeout(RESPONSE_TIMEOUT, stream.message()).await {
                Ok(Ok(message)) => Ok((stream, message)),
                Ok(Err(status)) => Err(Some(Error::from_status(&status))),
                Err(_) => Err(None),
            }
        };
        let opened = opened.await;
        self.suspend_if_expired(member);
        match opened {
            Ok((stream, message)) => {
                if let Some(reading) = member.readings.get_mut(&key).filter(|it| it.is_claimed) {
                    reading.stream = Some(stream);
                }
                if let Some(message) = message {
                    self.take_message(member, key, floor, message);
                }
            }
            Err(Some(error)) => self.read_failed(member, key, floor, &error),
            Err(None) => {}
        }
    }

    /// Takes a message of a subscription.
    fn take_message(
        &self,
        member: &mut Member,
        key: GroupPartitionKey,
        floor: Option<u64>,
        response: SubscribeResponse,
    ) {
        match response.message {
            Some(Message::Data(records)) => self.take(member, key, floor, records),
            Some(Message::CaughtUp(_)) => {
                if member.readings.get(&key).is_some_and(|reading| reading.is_claimed) {
                    self.context.group.checker().caught_up(key);
                }
            }
            _ => {}
        }
    }

    /// Takes the records of a response.
    fn take(
        &self,
        member: &mut Member,
        key: GroupPartitionKey,
        floor: Option<u64>,
        records: PartitionRecords,
    ) {
        let (id, member_id) = (member.id, member.member_id.clone());
        let Some(reading) = member.readings.get_mut(&key).filter(|it| it.is_claimed) else {
            return;
        };
        let mut checker = self.context.group.checker();
        if records.topic_id != key.topic_id {
            checker.found(format!("records of {key:?} are of topic id {}", records.topic_id));
        }
        if reading.next.is_none() {
            let log_start = records.watermarks.unwrap_or_default().log_start_offset;
            let is_fallback = reading.fallback != CommitFallback::Unspecified;
            let start = GroupStart { offset: records.start_offset, log_start, is_fallback };
            let text = format!("{member_id}: starts {key:?} at {start:?}, floor {floor:?}");
            self.context.recorder.note(&text);
            checker.start(&reading.topic, key, floor, start);
            (reading.next, reading.committed) =
                (Some(start.offset), Some(start.offset).filter(|_| !is_fallback));
        }
        let first = reading.next.unwrap_or(0);
        let mut next = first;
        for record in &records.records {
            if record.offset != next {
                checker.found(format!("{key:?}: record {} instead of {next}", record.offset));
            }
            next = record.offset + 1;
        }
        let repeated = checker.counts().repeated;
        checker.deliver(id, key, first, next);
        if checker.counts().repeated > repeated {
            self.context.marks.hit(CoverageMark::GroupRecordRepeated);
        }
        reading.next = Some(next);
    }

    fn read_failed(
        &self,
        member: &mut Member,
        key: GroupPartitionKey,
        floor: Option<u64>,
        error: &Error,
    ) {
        self.note(member, &format!("cannot read {key:?}: {error}"));
        let Some(reading) = member.readings.get_mut(&key) else { return };
        let log_start = error.watermarks.unwrap_or_default().log_start_offset;
        match error.reason {
            Some(ErrorReason::OffsetOutOfRange) => {
                let mut checker = self.context.group.checker();
                match reading.next {
                    None => {
                        checker.out_of_range(key, floor, log_start);
                        reading.fallback = CommitFallback::Earliest;
                        self.context.marks.hit(CoverageMark::GroupCommitOutOfRange);
                    }
                    // Retention overtook the reader.
                    Some(next) if next < log_start => {
                        checker.starts(key, log_start);
                        reading.next = Some(log_start);
                    }
                    Some(_) => {}
                }
            }
            Some(ErrorReason::TopicRecreated) => {
                // Else the topic itself is gone, and the next heartbeat says so.
                if error.recreated.as_ref().is_some_and(|it| it.id == key.topic_id) {
                    reading.fallback = CommitFallback::Earliest;
                    self.context.marks.hit(CoverageMark::GroupTopicRecreated);
                }
            }
            Some(ErrorReason::NoCommittedOffset) => {
                self.context.group.checker().found(format!("{key:?} cannot be read: {error}"));
            }
            Some(ErrorReason::PartitionNotOwned | ErrorReason::UnknownMember) => {
                self.context.marks.hit(CoverageMark::GroupReaderEnded);
                member.next_heartbeat = Instant::now();
            }
            _ => {}
        }
    }
}
