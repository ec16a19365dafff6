//! Reads records from any number of partitions: fetches, long polls and subscriptions.
//!
//! The client verifies the checksum of every batch over the bytes that the producer sent.

pub(crate) mod decode;
mod node_groups;
mod read_turns;
mod replica_selector;
mod subscription;

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::try_join_all;
use helix_proto::log::v1::start_position::Position as WirePosition;
use helix_proto::log::v1::{
    FetchRequest, FetchResponse, Header, NamedPosition, OutOfRangePolicy, PartitionStart,
    ReadLimits, StartPosition, StoredBatch, Watermarks,
};

use crate::call_spec::{CallSpec, Repeat};
use crate::client::{CallAttempts, Client};
use crate::compression;
use crate::error::{Error, Result};
use crate::routing::{LeaderProbe, ProbePace, Route};
pub(crate) use node_groups::{NodeGroup, NodeGroups};
use read_turns::{PARTITIONS_READ_MAX, ReadTurns};
use replica_selector::ReplicaSelector;
pub use subscription::{Event, Subscription};

/// Bytes of a partition in a request without its names: tags, lengths and numbers.
const START_BYTES: usize = 44;

/// Start position in a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Position {
    /// The first readable record.
    Earliest,
    /// The end: only records committed from now on.
    Latest,
    /// This offset.
    Offset(u64),
    /// The first record whose append time is at or after this.
    Timestamp(SystemTime),
    /// This many records before the end.
    Tail(u64),
    /// The committed offset of this group, or the first readable record if it has none.
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
        StartPosition { position: Some(position), ..StartPosition::default() }
    }
}

/// A partition and the range to read in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadStart {
    /// Topic.
    pub topic: String,
    /// Partition.
    pub partition: u32,
    /// Start position.
    pub position: Position,
    /// Exclusive end offset. If it is at or below the start, nothing is read and a subscription
    /// ends at once. Default: none, no end.
    pub until: Option<u64>,
    /// Id that the topic must have, else the read fails with `TOPIC_RECREATED`. State it with an
    /// offset from an earlier read. Default: 0, any.
    pub topic_id: u64,
}

impl ReadStart {
    /// Returns a start without an end.
    pub fn new(topic: impl Into<String>, partition: u32, position: Position) -> Self {
        Self { topic: topic.into(), partition, position, until: None, topic_id: 0 }
    }

    /// Sets the exclusive end offset.
    pub fn until(mut self, offset: u64) -> Self {
        self.until = Some(offset);
        self
    }

    /// Returns an upper bound of its bytes in a request.
    fn wire_bytes(&self) -> usize {
        let group = if let Position::Committed(group) = &self.position { group.len() } else { 0 };
        START_BYTES + self.topic.len() + group
    }

    /// Sets the id that the topic must have.
    pub fn in_topic(mut self, topic_id: u64) -> Self {
        self.topic_id = topic_id;
        self
    }

    fn to_wire(&self) -> PartitionStart {
        PartitionStart {
            topic: self.topic.clone(),
            partition: self.partition,
            start: Some(self.position.to_wire()),
            until_offset: self.until,
            topic_id: self.topic_id,
        }
    }
}

/// Nodes that may serve a read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReadSource {
    /// The leader, which has everything acked before the call.
    #[default]
    Leader,
    /// Any replica, even while there is no leader. Reads committed records in order, but may lag.
    /// After a failure another replica is used.
    AnyReplica,
}

/// Reaction of a subscription to a topic that was deleted and created again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnRecreate {
    /// End with `TOPIC_RECREATED`.
    #[default]
    Fail,
    /// Report [`Event::Restarted`] and read the new topic from its first readable record. Waits for
    /// the new topic up to the request timeout after the deletion.
    /// Partitions that the new topic lacks end; with
    /// [`ReadOptions::new_partitions`], they continue once they are added to it.
    Restart,
}

/// Source of a read, and the handling of unreadable starts and of recreated topics.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReadOptions {
    /// Move an unreadable start to the nearest readable offset instead of failing. Default: no.
    pub clamp: bool,
    /// Nodes that may serve the read. Default: the leader.
    pub source: ReadSource,
    /// Node id to prefer with `AnyReplica`, as long as it has a replica and does not fail.
    /// Default: none, readers rotate over the nodes, first over those in the
    /// [rack](crate::Config::rack) of the client.
    pub preferred_node: Option<u64>,
    /// Longest time without records after which a subscription with `AnyReplica` and an end fails
    /// if no replica has the records up to that end. Meanwhile it moves from replica to replica.
    /// Default: none, it waits until the records exist.
    pub lag_max: Option<Duration>,
    /// Also subscribe to partitions that are added to the topics of the starts, from their
    /// beginning. Partitions of a topic above the highest start count as added. Such a
    /// subscription has no end. Default: no.
    pub new_partitions: bool,
    /// Skip batches whose content is not records, and list them in [`Records::undecodable`].
    /// Default: no, reads fail with `UNDECODABLE_BATCH` after the records before.
    pub skip_undecodable: bool,
    /// Reaction of a subscription to a recreated topic; a fetch always fails. Default: fail.
    pub on_recreate: OnRecreate,
}

impl ReadOptions {
    fn out_of_range(self) -> OutOfRangePolicy {
        if self.clamp { OutOfRangePolicy::Clamp } else { OutOfRangePolicy::Unspecified }
    }
}

/// Limits of one fetch.
#[derive(Debug, Clone, Copy)]
pub struct FetchOptions {
    /// Most records over all partitions of one node, rounded up to a batch. Default: no limit.
    pub records_max: Option<u64>,
    /// Most payload bytes over all partitions of one node, but at least one batch. The service has
    /// a limit of its own. Default: 4 MiB.
    pub bytes_max: Option<u64>,
    /// Longest wait for `bytes_min`; the service may cap it. Default: zero, no wait.
    pub wait_max: Duration,
    /// Payload bytes that end the wait; 0 means 1. Default: 1.
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

/// A record with its offset and times.
#[derive(Debug, Clone, PartialEq)]
pub struct ConsumedRecord {
    /// Offset in its partition.
    pub offset: u64,
    /// Time of the append, set by the service.
    pub append_time: SystemTime,
    /// Key, if it has one. A slice that keeps the whole response in memory.
    pub key: Option<Bytes>,
    /// Value; None is a tombstone. A slice like the key.
    pub value: Option<Bytes>,
    /// Headers, in order.
    pub headers: Vec<Header>,
    /// Time set by the producer; None also if the platform cannot represent it.
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
    /// Id of the topic; 0 if the service does not state it.
    pub topic_id: u64,
    /// Batches that were skipped, with [`ReadOptions::skip_undecodable`] or
    /// [`GroupConsumerBuilder::skip_undecodable`](crate::GroupConsumerBuilder::skip_undecodable).
    pub undecodable: Vec<UndecodableBatch>,
}

/// A batch whose content is not records, although its checksum is right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UndecodableBatch {
    /// Offset of its first record.
    pub first_offset: u64,
    /// Number of its records, as its producer stated it.
    pub record_count: u32,
    /// Description for humans.
    pub message: String,
}

/// Stored batches of one partition, oldest first, with verified checksums.
///
/// A compressed batch is as its producer sent it; [`Batches::decode`] decompresses it.
#[derive(Debug, Clone, PartialEq)]
pub struct Batches {
    /// Topic.
    pub topic: String,
    /// Partition.
    pub partition: u32,
    /// Requested first offset: records of the first batch below it are to be skipped.
    pub start_offset: u64,
    /// Exclusive end offset: records of the last batch from there on are to be skipped.
    pub until: Option<u64>,
    /// Batches; may be none.
    pub batches: Vec<StoredBatch>,
    /// Offset to read next.
    pub next_offset: u64,
    /// State of the partition.
    pub watermarks: Watermarks,
    /// Id of the topic; 0 if the service does not state it.
    pub topic_id: u64,
}

impl Batches {
    /// Decodes the requested records.
    ///
    /// # Errors
    /// `UNDECODABLE_BATCH` if a producer wrote other bytes than records, with the right checksum.
    pub fn decode(self) -> Result<Records> {
        decode::records(self)
    }
}

/// Reads records. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Consumer {
    client: Client,
}

impl Client {
    /// Returns a consumer.
    pub fn consumer(&self) -> Consumer {
        Consumer { client: self.clone() }
    }
}

impl Consumer {
    /// Reads available records, or waits for them as the options specify.
    ///
    /// Returns one entry per start, in order. Requests to different leaders run concurrently; the
    /// call returns when all of them have responded. Many partitions of one leader are several
    /// requests, which share the limits of the options; beyond 20,000 partitions they also run one
    /// after the other and share `wait_max`.
    ///
    /// # Errors
    /// `OFFSET_OUT_OF_RANGE` (use another position or `clamp`), `TOPIC_RECREATED` if a topic does
    /// not have the stated id, another rejection of the service, `CORRUPT_LOG` for corrupt bytes,
    /// or the last failure if a leader is unreachable. `UNDECODABLE_BATCH` if a partition begins
    /// with a batch whose content is not records, unless [`ReadOptions::skip_undecodable`] is set;
    /// records before such a batch are returned.
    pub async fn fetch(
        &self,
        starts: &[ReadStart],
        options: &FetchOptions,
    ) -> Result<Vec<Records>> {
        let fetched = self.fetch_encoded(starts, options).await?;
        let skips = options.read.skip_undecodable;
        fetched.into_iter().map(|batches| decode::available(batches, skips)).collect()
    }

    /// Like [`Consumer::fetch`], but returns the stored batches.
    ///
    /// # Errors
    /// As [`Consumer::fetch`].
    pub async fn fetch_encoded(
        &self,
        starts: &[ReadStart],
        options: &FetchOptions,
    ) -> Result<Vec<Batches>> {
        let call = CallSpec { wait: options.wait_max, ..CallSpec::new("fetch", Repeat::Read) };
        let mut attempts = CallAttempts::new(&self.client.shared, call);
        let mut selector =
            ReplicaSelector::new(options.read, self.client.shared.routing.next_turn());
        loop {
            // Each attempt groups the starts again, since a leader may have moved.
            let fetch =
                Fetch { consumer: self, attempts: &attempts, selector: &selector, starts, options };
            let error = match fetch.groups().await {
                Ok(groups) => match fetch.all(&groups).await {
                    Ok(fetched) => return Ok(fetched),
                    Err((error, route)) => {
                        let (error, has_others) = selector.on_failure(&route, error);
                        attempts.judge_with(error, Some(&route), has_others)?
                    }
                },
                Err(error) => attempts.judge(error, None)?,
            };
            attempts.pause(error).await?;
        }
    }

    /// Subscribes to partitions: existing records, then new ones as they are committed.
    ///
    /// Resumes automatically after a broken stream or a change of leader. More than 20,000
    /// partitions take turns of about a second.
    pub fn subscribe(&self, starts: Vec<ReadStart>, options: ReadOptions) -> Subscription {
        Subscription::new(self.client.clone(), starts, options)
    }
}

/// One attempt of a fetch.
struct Fetch<'a> {
    consumer: &'a Consumer,
    attempts: &'a CallAttempts<'a>,
    selector: &'a ReplicaSelector,
    starts: &'a [ReadStart],
    options: &'a FetchOptions,
}

impl Fetch<'_> {
    async fn groups(&self) -> Result<Vec<NodeGroup>> {
        let mut groups = NodeGroups::default();
        let routing = &self.consumer.client.shared.routing;
        for (member, start) in self.starts.iter().enumerate() {
            let route = self.selector.route(routing, &start.topic, start.partition);
            groups.add(self.attempts.within(route).await?, member, start.wire_bytes());
        }
        Ok(groups.list)
    }

    /// Requests from all nodes concurrently, as far as the partitions may be read at once.
    async fn all(&self, groups: &[NodeGroup]) -> std::result::Result<Vec<Batches>, (Error, Route)> {
        let turns = ReadTurns::default();
        let calls = groups.iter().map(|group| async {
            let _turn = turns.take(group.members.len()).await;
            let of_node = groups.iter().filter(|it| it.route.node_id == group.route.node_id);
            let fetched = self.group(group, of_node.count() as u64).await;
            fetched.map_err(|error| (error, group.route.clone()))
        });
        let mut fetched: Vec<Option<Batches>> = self.starts.iter().map(|_| None).collect();
        for (group, responses) in groups.iter().zip(try_join_all(calls).await?) {
            for (&member, batches) in group.members.iter().zip(responses) {
                fetched[member] = Some(batches);
            }
        }
        Ok(fetched
            .into_iter()
            .map(|batches| batches.expect("each start is in one group"))
            .collect())
    }

    /// Requests the partitions of one group; `parts` groups share the limits of their node.
    async fn group(&self, group: &NodeGroup, parts: u64) -> Result<Vec<Batches>> {
        let starts = group.members.iter().map(|&member| &self.starts[member]);
        let options = self.options;
        let part = |limit: u64| if limit == 0 { 0 } else { (limit / parts).max(1) };
        let limits = ReadLimits {
            max_records: options.records_max.map(part),
            max_bytes: options.bytes_max.map(part),
            until_timestamp: None,
        };
        let rounds = self.starts.len().div_ceil(PARTITIONS_READ_MAX).max(1);
        let wait_max = options.wait_max / u32::try_from(rounds).unwrap_or(u32::MAX);
        let request = FetchRequest {
            partitions: starts.clone().map(ReadStart::to_wire).collect(),
            limits: Some(limits),
            max_wait: wait_max.try_into().ok(),
            min_bytes: options.bytes_min,
            source: self.selector.to_wire().into(),
            out_of_range: options.read.out_of_range().into(),
            accept_encoded: true,
            accept_kafka_batches: true,
            accept_compression: compression::accepted(),
        };
        let mut consume = group.route.connection.consume();
        let fetching = consume.fetch(request);
        let response: FetchResponse = if self.selector.is_leader() {
            let topic = &self.starts[group.members[0]].topic;
            let routing = &self.consumer.client.shared.routing;
            let pace =
                if options.wait_max.is_zero() { ProbePace::Expected } else { ProbePace::Patient };
            let probe = LeaderProbe::new(routing, topic, &group.shard_ids, &group.route, pace);
            self.attempts.attempt_while(probe, fetching).await?
        } else {
            self.attempts.attempt(fetching).await?
        };
        decode::response(response, starts)
    }
}
