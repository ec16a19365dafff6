//! Reads records by offset, by time, by long poll or as a stream, from any number of partitions.
//! Every batch's checksum is verified here, over the bytes that the producer sent.

mod decode;
mod source;
mod subscription;

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::try_join_all;
use helix_proto::log::v1::start_position::Position as WirePosition;
use helix_proto::log::v1::{
    FetchRequest, FetchResponse, Header, NamedPosition, OutOfRangePolicy, PartitionStart,
    ReadLimits, StartPosition, StoredBatch, Watermarks,
};

use crate::client::{Call, Client, Series};
use crate::error::{Error, Result};
use crate::retry::Repeat;
use crate::routing::{Lookout, Pace, Route};
use source::Source;
pub use subscription::{Event, Subscription};

/// Where to begin in a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Position {
    /// The first readable record.
    Earliest,
    /// Only what is committed from now on.
    Latest,
    /// This offset.
    Offset(u64),
    /// The first record whose append time is at or after this.
    Timestamp(SystemTime),
    /// This many records before the end.
    Tail(u64),
    /// Where this group has committed; else the first readable record.
    Committed(String),
}

impl Position {
    pub(crate) fn to_wire(&self) -> StartPosition {
        let position = match self {
            Self::Earliest => WirePosition::Named(NamedPosition::Earliest.into()),
            Self::Latest => WirePosition::Named(NamedPosition::Latest.into()),
            Self::Offset(offset) => WirePosition::Offset(*offset),
            Self::Timestamp(time) => WirePosition::Timestamp((*time).into()),
            Self::Tail(records) => WirePosition::TailRecords(*records),
            Self::Committed(group) => WirePosition::CommittedGroup(group.clone()),
        };
        StartPosition { position: Some(position) }
    }
}

/// A partition and where to begin in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// Topic.
    pub topic: String,
    /// Partition.
    pub partition: u32,
    /// Where to begin.
    pub position: Position,
    /// Offset to stop before. At or below where the start is, there is nothing to read, and a
    /// subscription ends at once. Default: none, no end.
    pub until: Option<u64>,
}

impl Start {
    /// A start without an end.
    pub fn new(topic: impl Into<String>, partition: u32, position: Position) -> Self {
        Self { topic: topic.into(), partition, position, until: None }
    }

    /// The same start with an offset to stop before.
    pub fn until(mut self, offset: u64) -> Self {
        self.until = Some(offset);
        self
    }

    fn to_wire(&self) -> PartitionStart {
        PartitionStart {
            topic: self.topic.clone(),
            partition: self.partition,
            start: Some(self.position.to_wire()),
            until_offset: self.until,
        }
    }
}

/// Which node may answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReadSource {
    /// The leader: everything that was acked before the call is there.
    #[default]
    Leader,
    /// Any node that has a copy, also while there is no leader. Committed records only, and in
    /// order, but it may lag. One that fails is left for another.
    AnyReplica,
}

/// Which node may answer, and what to do when a start is not readable.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReadOptions {
    /// Move an unreadable start to the nearest readable offset instead of failing. Default: no.
    pub clamp: bool,
    /// Which node may answer. Default: the leader.
    pub source: ReadSource,
    /// Node id to read from with `AnyReplica`, as long as it has a copy and does not fail.
    /// Default: none, readers take turns over the nodes.
    pub preferred_node: Option<u64>,
}

impl ReadOptions {
    fn out_of_range(self) -> OutOfRangePolicy {
        if self.clamp { OutOfRangePolicy::Clamp } else { OutOfRangePolicy::Unspecified }
    }
}

/// Bounds of one fetch.
#[derive(Debug, Clone, Copy)]
pub struct FetchOptions {
    /// Most records over all partitions of one node; rounded up to a batch. Default: no bound.
    pub records_max: Option<u64>,
    /// Most payload bytes over all partitions of one node; at least one batch comes. The service
    /// has a bound of its own. Default: 4 MiB.
    pub bytes_max: Option<u64>,
    /// Longest wait for `bytes_min`; the service may cap it. Default: zero, no wait.
    pub wait_max: Duration,
    /// Payload bytes worth waiting for; 0 is as 1. Default: 1.
    pub bytes_min: u32,
    /// See [`ReadOptions`].
    pub read: ReadOptions,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self {
            records_max: None,
            bytes_max: Some(4 << 20),
            wait_max: Duration::ZERO,
            bytes_min: 1,
            read: ReadOptions::default(),
        }
    }
}

/// A record as it was read.
#[derive(Debug, Clone, PartialEq)]
pub struct ConsumedRecord {
    /// Offset in its partition.
    pub offset: u64,
    /// When the service appended it.
    pub append_time: SystemTime,
    /// Key, if it has one. A slice of the answer that it came in, which it keeps in memory.
    pub key: Option<Bytes>,
    /// Value; None is a tombstone. A slice, as the key.
    pub value: Option<Bytes>,
    /// Headers, in order.
    pub headers: Vec<Header>,
    /// Time set by the producer.
    pub event_time: Option<SystemTime>,
}

/// Records of one partition, oldest first.
#[derive(Debug, Clone, PartialEq)]
pub struct Records {
    /// Topic.
    pub topic: String,
    /// Partition.
    pub partition: u32,
    /// Records; may be none.
    pub records: Vec<ConsumedRecord>,
    /// Offset to read next.
    pub next_offset: u64,
    /// State of the partition.
    pub watermarks: Watermarks,
}

/// Batches of one partition as they are stored, oldest first, checksums verified.
#[derive(Debug, Clone, PartialEq)]
pub struct Batches {
    /// Topic.
    pub topic: String,
    /// Partition.
    pub partition: u32,
    /// First offset that was asked for: what the first batch has below it is to be skipped.
    pub start_offset: u64,
    /// Offset to stop before: what the last batch has from there on is to be skipped.
    pub until: Option<u64>,
    /// Batches; may be none.
    pub batches: Vec<StoredBatch>,
    /// Offset to read next.
    pub next_offset: u64,
    /// State of the partition.
    pub watermarks: Watermarks,
}

impl Batches {
    /// The records that were asked for.
    ///
    /// # Errors
    /// `CORRUPT_LOG` if a payload is not what its batch says.
    pub fn decode(self) -> Result<Records> {
        decode::records(self)
    }
}

/// Reads. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Consumer {
    client: Client,
}

impl Client {
    /// A consumer.
    pub fn consumer(&self) -> Consumer {
        Consumer { client: self.clone() }
    }
}

impl Consumer {
    /// Reads what is there, or waits for it as the options say. One entry for each start, in
    /// their order. Partitions with different leaders are asked at the same time, and the answer
    /// comes when all of them have answered.
    ///
    /// # Errors
    /// The service's refusal (`OFFSET_OUT_OF_RANGE`, ..), `CORRUPT_LOG` for damaged bytes, or why
    /// a leader could not be reached.
    pub async fn fetch(&self, starts: &[Start], options: &FetchOptions) -> Result<Vec<Records>> {
        let fetched = self.fetch_encoded(starts, options).await?;
        fetched.into_iter().map(Batches::decode).collect()
    }

    /// As [`Consumer::fetch`], leaving the batches as they are stored.
    ///
    /// # Errors
    /// As [`Consumer::fetch`].
    pub async fn fetch_encoded(
        &self,
        starts: &[Start],
        options: &FetchOptions,
    ) -> Result<Vec<Batches>> {
        let call = Call { wait: options.wait_max, ..Call::new("fetch", Repeat::Read) };
        let mut series = Series::new(&self.client.shared, call);
        let mut source = Source::new(options.read, self.client.shared.routing.next_turn());
        loop {
            // Groups are made anew for each attempt: a leader may have moved.
            let fetch = Fetch { consumer: self, series: &series, source: &source, starts, options };
            let error = match fetch.groups().await {
                Ok(groups) => match fetch.all(&groups).await {
                    Ok(fetched) => return Ok(fetched),
                    Err((error, route)) => {
                        let (error, has_others) = source.on_failure(&route, error);
                        series.judge_with(error, Some(&route), has_others)?
                    }
                },
                Err(error) => series.judge(error, None)?,
            };
            series.pause(error).await?;
        }
    }

    /// Follows partitions: what is there, and then what is committed. Goes on by itself after a
    /// broken stream or a change of leader.
    pub fn subscribe(&self, starts: Vec<Start>, options: ReadOptions) -> Subscription {
        Subscription::new(self.client.clone(), starts, options)
    }
}

/// One attempt of a fetch.
struct Fetch<'a> {
    consumer: &'a Consumer,
    series: &'a Series<'a>,
    source: &'a Source,
    starts: &'a [Start],
    options: &'a FetchOptions,
}

impl Fetch<'_> {
    async fn groups(&self) -> Result<Vec<Group>> {
        let mut groups = Groups::default();
        let routing = &self.consumer.client.shared.routing;
        for (member, Start { topic, partition, .. }) in self.starts.iter().enumerate() {
            let route = self.series.within(self.source.route(routing, topic, *partition)).await?;
            groups.add(route, member);
        }
        Ok(groups.list)
    }

    /// Asks every node at the same time.
    async fn all(&self, groups: &[Group]) -> std::result::Result<Vec<Batches>, (Error, Route)> {
        let calls = groups.iter().map(|group| async {
            let fetched = self.group(group).await;
            fetched.map_err(|error| (error, group.route.clone()))
        });
        let mut fetched: Vec<Option<Batches>> = self.starts.iter().map(|_| None).collect();
        for (group, answers) in groups.iter().zip(try_join_all(calls).await?) {
            for (&member, batches) in group.members.iter().zip(answers) {
                fetched[member] = Some(batches);
            }
        }
        Ok(fetched.into_iter().map(|batches| batches.expect("in one group each")).collect())
    }

    async fn group(&self, group: &Group) -> Result<Vec<Batches>> {
        let starts = group.members.iter().map(|&member| &self.starts[member]);
        let options = self.options;
        let limits = ReadLimits {
            max_records: options.records_max,
            max_bytes: options.bytes_max,
            until_timestamp: None,
        };
        let request = FetchRequest {
            partitions: starts.clone().map(Start::to_wire).collect(),
            limits: Some(limits),
            max_wait: options.wait_max.try_into().ok(),
            min_bytes: options.bytes_min,
            source: self.source.to_wire().into(),
            out_of_range: options.read.out_of_range().into(),
            accept_encoded: true,
        };
        let mut consume = group.route.connection.consume();
        let fetching = consume.fetch(request);
        let answer: FetchResponse = if self.source.is_leader() {
            let topic = &self.starts[group.members[0]].topic;
            let routing = &self.consumer.client.shared.routing;
            let pace = if options.wait_max.is_zero() { Pace::Due } else { Pace::Patient };
            let lookout = Lookout::new(routing, topic, &group.shard_ids, &group.route, pace);
            self.series.attempt_while(lookout, fetching).await?
        } else {
            self.series.attempt(fetching).await?
        };
        decode::answers(answer, starts)
    }
}

/// Starts that go to the same node.
#[derive(Debug)]
pub(crate) struct Group {
    /// The way to the first one's.
    pub(crate) route: Route,
    /// Shards of all of them, each once.
    pub(crate) shard_ids: Vec<u32>,
    /// Places in the list that was grouped.
    pub(crate) members: Vec<usize>,
}

/// Groups in the order in which their nodes came up.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    pub(crate) list: Vec<Group>,
    by_node: HashMap<u64, usize>,
}

impl Groups {
    pub(crate) fn add(&mut self, route: Route, member: usize) {
        let place = *self.by_node.entry(route.node_id).or_insert(self.list.len());
        if place == self.list.len() {
            let (shard_ids, members) = (Vec::new(), Vec::new());
            self.list.push(Group { route: route.clone(), shard_ids, members });
        }
        let group = &mut self.list[place];
        group.members.push(member);
        if !group.shard_ids.contains(&route.shard_id) {
            group.shard_ids.push(route.shard_id);
        }
    }
}
