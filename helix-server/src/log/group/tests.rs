//! A log with one group, for tests.

mod cases;
mod model;
mod order;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rand::RngExt;
use rand::rngs::StdRng;

use super::*;
use crate::log::testing::seeded;
use crate::log::{CheckpointError, Effects, Head, ShardCommand, ShardState, StateLimits, Verdict};

const GROUP: &str = "readers";

fn key(topic_id: u64, number: u32) -> PartitionKey {
    PartitionKey { topic_id, number }
}

fn spec(member_id: &str, topics: &[&str]) -> MemberSpec {
    MemberSpec {
        member_id: member_id.to_owned(),
        session_timeout_ms: 10_000,
        topics: topics.iter().map(|topic| (*topic).to_owned()).collect(),
        ..MemberSpec::default()
    }
}

fn topic(topic_id: u64, partition_count: u32) -> MatchedTopic {
    MatchedTopic { topic_id, name: format!("t{topic_id}"), partition_count }
}

fn offsets(rows: &[(PartitionKey, Option<u64>)]) -> Vec<TopicOffsets> {
    let topic = |(key, offset): &(PartitionKey, Option<u64>)| TopicOffsets {
        topic_id: key.topic_id,
        name: format!("t{}", key.topic_id),
        offsets: vec![OffsetUpdate {
            number: key.number,
            offset: *offset,
            metadata: String::new(),
        }],
    };
    rows.iter().map(topic).collect()
}

/// A shard's state with one group, at a growing index.
struct Log {
    state: ShardState,
    index: u64,
}

impl Log {
    fn new() -> Self {
        Self { state: ShardState::new(StateLimits::default()), index: 0 }
    }

    fn apply(&mut self, change: GroupChange) -> Result<(), GroupRefusal> {
        self.index += 1;
        let command = GroupCommand { group: GROUP.to_owned(), change, is_ordered: true };
        let head = Head::Shard(ShardCommand::Group(Box::new(command)));
        let head = Head::decode(&head.encode()).unwrap();
        match self.state.apply(self.index, &head, &mut Effects::default()) {
            Verdict::Changed => Ok(()),
            Verdict::Refused(crate::log::Refusal::Group(refusal)) => Err(*refusal),
            other => panic!("{other:?}"),
        }
    }

    fn group(&self) -> &ConsumerGroup {
        self.state.groups().get(GROUP).expect("the group exists")
    }

    /// Judges a report and applies what follows, as the coordinator does.
    fn heartbeat(&mut self, report: &MemberReport) -> Result<MemberView, GroupRefusal> {
        let mut may_put = true;
        loop {
            match self.state.groups().judge(GROUP, report, may_put)? {
                ReportStep::Propose(change) => {
                    may_put &= !matches!(change, GroupChange::PutMember { .. });
                    self.apply(change)?;
                }
                ReportStep::Settled(view) => return Ok(view),
            }
        }
    }

    fn assign(&mut self, topics: &[MatchedTopic]) -> bool {
        let next = self.state.groups().get(GROUP).and_then(|it| it.next_assignment(topics));
        let is_due = next.is_some();
        if let Some(next) = next {
            self.apply(GroupChange::Assign(next)).unwrap();
        }
        is_due
    }

    fn join(&mut self, id: &str, topics: &[&str]) -> MemberView {
        let spec = spec(id, topics);
        self.heartbeat(&MemberReport { spec, ..MemberReport::default() }).unwrap()
    }

    /// Reports these partitions at an epoch.
    fn report(&mut self, id: &str, epoch: u64, owned: &[PartitionKey]) -> MemberView {
        let spec = MemberSpec { member_id: id.to_owned(), ..MemberSpec::default() };
        let owned = owned.iter().copied().collect();
        self.heartbeat(&MemberReport { spec, epoch, owned, take_over: false }).unwrap()
    }

    fn commit(
        &mut self,
        id: &str,
        epoch: u64,
        at: PartitionKey,
        offset: u64,
    ) -> Result<(), GroupRefusal> {
        let member = Some(CommittingMember { member_id: id.to_owned(), epoch, sequence: 0 });
        let topics = offsets(&[(at, Some(offset))]);
        self.apply(GroupChange::Commit { member, offsets_epoch: None, topics, at_us: self.index })
    }

    fn restart(&mut self) -> Result<(), CheckpointError> {
        let bytes = self.state.encode();
        let restored = ShardState::decode(&bytes)?;
        assert_eq!(restored, self.state);
        assert_eq!(restored.encode(), bytes);
        self.state = restored;
        Ok(())
    }
}
