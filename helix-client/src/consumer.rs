//! Reads records by offset, by time, by long poll or as a stream, from any number of partitions.
//! Every batch's checksum is verified here, over the bytes that the producer sent.

mod decode;
mod subscription;

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::try_join_all;
use helix_proto::log::v1::start_position::Position as WirePosition;
use helix_proto::log::v1::{
    FetchRequest, FetchResponse, Header, NamedPosition, OutOfRangePolicy, PartitionStart,
    ReadLimits, ReadSource, StartPosition, StoredBatch, Watermarks,
};

use crate::client::{Call, Client, Series};
use crate::error::{Error, Result};
use crate::retry::Repeat;
use crate::routing::Route;
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
    /// Offset to stop before. None: no end.
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

/// Which replica may answer, and what to do when a start is not readable.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReadOptions {
    /// Move an unreadable start to the nearest readable offset instead of failing.
    pub clamp: bool,
    /// Let any replica answer; it may lag.
    pub any_replica: bool,
}

impl ReadOptions {
    fn source(self) -> ReadSource {
        if self.any_replica { ReadSource::AnyReplica } else { ReadSource::Unspecified }
    }

    fn out_of_range(self) -> OutOfRangePolicy {
        if self.clamp { OutOfRangePolicy::Clamp } else { OutOfRangePolicy::Unspecified }
    }
}

/// Bounds of one fetch.
#[derive(Debug, Clone, Copy)]
pub struct FetchOptions {
    /// Most records over all partitions of one node; rounded up to a batch.
    pub records_max: Option<u64>,
    /// Most payload bytes over all partitions of one node; at least one batch comes.
    pub bytes_max: Option<u64>,
    /// Longest wait for `bytes_min`. Zero: no wait.
    pub wait_max: Duration,
    /// Payload bytes worth waiting for.
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
        let call = Call { name: "fetch", repeat: Repeat::Read, wait: options.wait_max };
        let mut series = Series::new(&self.client.shared, call);
        loop {
            // Groups are made anew for each attempt: a leader may have moved.
            let error = match self.groups(&series, starts).await {
                Ok(groups) => match self.fetch_groups(&series, &groups, starts, options).await {
                    Ok(fetched) => return Ok(fetched),
                    Err((error, route)) => series.judge(error, Some(&route))?,
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

    /// Asks every leader at the same time.
    async fn fetch_groups(
        &self,
        series: &Series<'_>,
        groups: &[Group],
        starts: &[Start],
        options: &FetchOptions,
    ) -> std::result::Result<Vec<Batches>, (Error, Route)> {
        let calls = groups.iter().map(|group| async {
            let starts = group.members.iter().map(|&member| &starts[member]);
            let fetched = fetch_group(series, &group.route, starts, options).await;
            fetched.map_err(|error| (error, group.route.clone()))
        });
        let mut fetched: Vec<Option<Batches>> = starts.iter().map(|_| None).collect();
        for (group, answers) in groups.iter().zip(try_join_all(calls).await?) {
            for (&member, batches) in group.members.iter().zip(answers) {
                fetched[member] = Some(batches);
            }
        }
        Ok(fetched.into_iter().map(|batches| batches.expect("in one group each")).collect())
    }

    async fn groups(&self, series: &Series<'_>, starts: &[Start]) -> Result<Vec<Group>> {
        let mut groups = Groups::default();
        for (member, start) in starts.iter().enumerate() {
            let route = series.route((&start.topic, start.partition)).await?;
            groups.add(route, member);
        }
        Ok(groups.list)
    }
}

/// Starts that have the same leader.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) route: Route,
    /// Places in the list that was grouped.
    pub(crate) members: Vec<usize>,
}

/// Groups in the order in which their leaders came up.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    pub(crate) list: Vec<Group>,
    by_node: HashMap<u64, usize>,
}

impl Groups {
    pub(crate) fn add(&mut self, route: Route, member: usize) {
        let place = *self.by_node.entry(route.node_id).or_insert(self.list.len());
        if place == self.list.len() {
            self.list.push(Group { route, members: Vec::new() });
        }
        self.list[place].members.push(member);
    }
}

async fn fetch_group(
    series: &Series<'_>,
    route: &Route,
    starts: impl Iterator<Item = &Start> + Clone,
    options: &FetchOptions,
) -> Result<Vec<Batches>> {
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
        source: options.read.source().into(),
        out_of_range: options.read.out_of_range().into(),
        accept_encoded: true,
    };
    let mut consume = route.connection.consume();
    let answer: FetchResponse = series.attempt(consume.fetch(request)).await?;
    decode::answers(answer, starts)
}
