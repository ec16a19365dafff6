//! A node inside the program's own process, without a port: [`Embedded`].
//!
//! Appends and reads are direct calls of the node. Records pass no HTTP/2, no socket and no copy,
//! and each batch stays one `Bytes`.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream};
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{
    AppendRequest, Batch, CreateTopicRequest, Durability as WireDurability, EncodedBatch,
    StoredBatch,
};
use tokio::time::Instant;

use crate::api::{Decompressors, ProduceHandler, TopicHandler, stored_batch};
use crate::call::ClientLoad;
use crate::config::{ConfigError, ServerConfig};
use crate::error::{Error, Result};
use crate::limits::{FETCH_BYTES_DEFAULT, FETCH_BYTES_MAX};
use crate::log::Watermarks;
use crate::node::{LocatedPartition, Node};
use crate::server::{self, StartError};
use crate::shard::{ReadBatch, ReadFrom, WatchGuard, Watcher};

/// A node in this process: the only one of its cluster, and without a port.
///
/// Its storage is that of a server: in memory, or a data directory, which a server can open later
/// and which has one program at a time. Calls need no token. Share it with `Arc`.
///
/// The node's tasks run on the runtime that opens it. A call from a task of that runtime takes the
/// least time; a call from `block_on` of another thread wakes threads twice. Dropping the value
/// does not stop the tasks: [`Embedded::close`] does.
pub struct Embedded {
    node: Arc<Node>,
    produce: ProduceHandler,
    topics: TopicHandler,
}

impl Embedded {
    /// Opens a node, and waits until it serves.
    ///
    /// Uses the settings of storage, memory, topics and shards: a new node creates
    /// [`ServerConfig::topics`]. Settings of ports, TLS and access have no effect.
    ///
    /// # Errors
    /// [`StartError`] names the setting or the data that prevented the start. A node with peers
    /// needs a port, so [`ServerConfig::peers`] must be empty.
    pub fn open(config: ServerConfig) -> BoxFuture<'static, Result<Self, StartError>> {
        // Boxed, so that only this crate compiles the future.
        Self::open_unboxed(config).boxed()
    }

    async fn open_unboxed(config: ServerConfig) -> Result<Self, StartError> {
        config.validate()?;
        if !config.peers.is_empty() {
            let problem = "--peer: an embedded node has no port for other nodes; start a server";
            return Err(ConfigError { problems: vec![problem.to_owned()] }.into());
        }
        let files = server::file_budget(&config)?;
        let node = Node::open(server::node_settings(&config, &files)).await?;
        // Topics need a registered node. It has no address, since no client can dial it.
        if let Err(error) = node.announce(String::new()).await {
            node.close().await;
            return Err(error.into());
        }
        server::warn_of_log_memory(&config, node.shards().len() as u64);
        let load = ClientLoad::new(*node.shares());
        let decompressors = Decompressors::new(node.shares().decompressors);
        let produce = ProduceHandler::new(&node, &load, &decompressors);
        let topics = TopicHandler::new(&node);
        Ok(Self { node, produce, topics })
    }

    /// Creates a topic. Succeeds if it exists with the same settings.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a name or a number that is not valid,
    /// [`Error::TopicAlreadyExists`] for a topic with other settings, and the errors of storage.
    pub async fn create_topic(&self, name: &str, partition_count: u32) -> Result<()> {
        let name = name.to_owned();
        let request = CreateTopicRequest { name, partition_count, ..CreateTopicRequest::default() };
        self.topics.create(request, None).await.map(drop)
    }

    /// Appends a batch, and returns the offset of its first record once the batch is durable:
    /// synced to disk, or applied if the storage is memory.
    ///
    /// `helix_proto::batch::encode` makes a batch of records. Concurrent appends share syncs, and
    /// have no order among each other.
    ///
    /// # Errors
    /// [`Error::TopicNotFound`], [`Error::PartitionNotFound`], [`Error::CorruptBatch`] and the
    /// other errors of batches, [`Error::Throttled`] while too much is in flight. After
    /// [`Error::OutcomeUnknown`] the batch may be in the log.
    pub async fn append(&self, topic: &str, partition: u32, batch: EncodedBatch) -> Result<u64> {
        let request = AppendRequest {
            topic: topic.to_owned(),
            partition,
            batch: Some(Batch { form: Some(Form::Encoded(batch)) }),
            durability: WireDurability::QuorumSynced.into(),
            ..AppendRequest::default()
        };
        let response = self.produce.append(request, None, None).await?;
        response.ack.and_then(|ack| ack.first_offset).ok_or_else(|| Error::OutcomeUnknown {
            reason: "the batch was acknowledged without its offset".to_owned(),
        })
    }

    /// Reads the batches from the one with `offset` on: at least one if there is any, and then up
    /// to `bytes_max`, at most 8 MiB.
    ///
    /// # Errors
    /// [`Error::OffsetOutOfRange`], [`Error::TopicNotFound`], [`Error::PartitionNotFound`],
    /// [`Error::CorruptLog`] where stored bytes do not verify.
    pub async fn read(
        &self,
        topic: &str,
        partition: u32,
        offset: u64,
        bytes_max: usize,
    ) -> Result<Vec<EmbeddedBatch>> {
        let LocatedPartition { shard, partition, .. } = self.node.find(topic, 0, partition).await?;
        let bytes_max = bytes_max.clamp(1, FETCH_BYTES_MAX);
        let (since, mut offset) = (Instant::now(), offset);
        loop {
            let read = shard.read(partition, offset, None, bytes_max, ReadFrom::Leader).await?;
            if !read.batches.is_empty() || read.next_offset <= offset {
                self.node.metrics().on_fetch(since.elapsed());
                count_read(&self.node, &read.batches);
                return Ok(read.batches.into_iter().map(EmbeddedBatch::from).collect());
            }
            // A gap that compaction has left: the records are behind it.
            offset = read.next_offset;
        }
    }

    /// Returns the batches from the one with `offset` on, and then each new one once it is durable.
    ///
    /// The stream ends with its first error; subscribe again from the next offset to resume.
    ///
    /// # Errors
    /// [`Error::TopicNotFound`] and [`Error::PartitionNotFound`]. The stream fails with
    /// [`Error::OffsetOutOfRange`], also if retention removes what it has not read,
    /// [`Error::PartitionDeleted`], [`Error::CorruptLog`], and [`Error::Draining`] once the node is
    /// closed.
    pub async fn subscribe(
        &self,
        topic: &str,
        partition: u32,
        offset: u64,
    ) -> Result<BoxStream<'static, Result<EmbeddedBatch>>> {
        let located = self.node.find(topic, 0, partition).await?;
        let watcher = Watcher::new();
        let guard = located.shard.watch(located.partition, 0, &watcher)?;
        let tail = PartitionTail {
            node: self.node.clone(),
            located,
            next_offset: offset,
            unread: VecDeque::new(),
            watcher,
            _guard: guard,
        };
        Ok(Box::pin(stream::try_unfold(tail, |mut tail| async {
            let batch = tail.next().await?;
            Ok::<_, Error>(Some((batch, tail)))
        })))
    }

    /// Returns the first offset that can be read, and the offset after the last durable record.
    ///
    /// # Errors
    /// [`Error::TopicNotFound`], [`Error::PartitionNotFound`].
    pub async fn watermarks(&self, topic: &str, partition: u32) -> Result<Watermarks> {
        let LocatedPartition { shard, partition, .. } = self.node.find(topic, 0, partition).await?;
        shard.ready().await?;
        shard.watermarks_for(partition, ReadFrom::Leader)
    }

    /// Returns the node, for everything else: its status, its metrics, and
    /// [`Node::failed`], which reports a failed disk. Appends and reads count in the metrics as
    /// those of clients do, except that they are no calls.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Closes the node. Ends subscriptions with [`Error::Draining`], and releases the data
    /// directory. Later calls fail.
    pub async fn close(&self) {
        self.node.close().await;
    }
}

impl fmt::Debug for Embedded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Embedded").field("node", &self.node.info()).finish_non_exhaustive()
    }
}

/// A batch of an embedded node's log.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddedBatch {
    /// Offset of the first record.
    pub first_offset: u64,
    /// Distances of the records' offsets from the first one; empty if there are no gaps between
    /// them. Compaction by key leaves gaps.
    pub offset_deltas: Vec<u32>,
    /// Time of the append in microseconds since the Unix epoch; never decreases within a partition.
    pub append_time_us: u64,
    /// The batch as it was appended, or with fewer records after compaction by key.
    /// `helix_proto::batch::decode` returns its records.
    pub batch: EncodedBatch,
    next_offset: u64,
}

impl EmbeddedBatch {
    /// Returns the offset after the last one of the batch, from which to read on.
    pub fn next_offset(&self) -> u64 {
        self.next_offset
    }
}

impl From<ReadBatch> for EmbeddedBatch {
    fn from(read: ReadBatch) -> Self {
        let (next_offset, append_time_us) = (read.end_offset(), read.append_time_us);
        let StoredBatch { first_offset, offset_deltas, batch, .. } = stored_batch(read);
        let batch = batch.unwrap_or_default();
        Self { first_offset, offset_deltas, append_time_us, batch, next_offset }
    }
}

/// Counts batches as those that Fetch and Subscribe send.
fn count_read(node: &Node, batches: &[ReadBatch]) {
    let records = batches.iter().map(|batch| u64::from(batch.record_count)).sum();
    let bytes = batches.iter().map(|batch| batch.payload.len() as u64).sum();
    node.metrics().on_read(records, bytes);
}

/// Position of a subscription.
struct PartitionTail {
    node: Arc<Node>,
    located: LocatedPartition,
    next_offset: u64,
    /// Batches of the last read, all before `next_offset`.
    unread: VecDeque<ReadBatch>,
    watcher: Arc<Watcher>,
    _guard: WatchGuard,
}

impl PartitionTail {
    async fn next(&mut self) -> Result<EmbeddedBatch> {
        loop {
            if let Some(batch) = self.unread.pop_front() {
                return Ok(batch.into());
            }
            if self.node.shutdown_token().is_cancelled() {
                return Err(Error::Draining);
            }
            // Before the read, so that a later change is reported.
            self.watcher.take_ready();
            let LocatedPartition { shard, partition, .. } = &self.located;
            let (offset, from) = (self.next_offset, ReadFrom::Leader);
            let read = shard.read(*partition, offset, None, FETCH_BYTES_DEFAULT, from).await?;
            // Without batches, it is behind a gap that compaction has left.
            if read.next_offset > offset {
                count_read(&self.node, &read.batches);
                self.next_offset = read.next_offset;
                self.unread = read.batches.into();
                continue;
            }
            tokio::select! {
                () = self.watcher.changed() => {}
                () = self.node.shutdown_token().cancelled() => return Err(Error::Draining),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use helix_proto::batch;
    use helix_proto::log::v1::Record;

    use super::*;

    #[test]
    fn a_compacted_batch_states_the_offsets_of_its_records() {
        let encoded = batch::encode(&[Record::default(), Record::default()]);
        let read = ReadBatch {
            log_id: helix_wal::LogId::default(),
            first_offset: 10,
            append_time_us: 5,
            version: encoded.version,
            record_count: encoded.record_count,
            offset_count: 2,
            offset_deltas: None,
            compression: encoded.compression,
            crc: encoded.crc32,
            uncompressed_bytes: 0,
            payload: encoded.payload,
        };
        let whole = EmbeddedBatch::from(read.clone());
        assert_eq!((whole.first_offset, whole.next_offset()), (10, 12));
        assert!(whole.offset_deltas.is_empty());
        let compacted = ReadBatch { offset_count: 9, offset_deltas: Some([3, 7].into()), ..read };
        let compacted = EmbeddedBatch::from(compacted);
        assert_eq!((compacted.first_offset, compacted.next_offset()), (13, 19));
        assert_eq!(compacted.offset_deltas, [0, 4]);
        assert_eq!(batch::decode(&compacted.batch).unwrap().records.len(), 2);
    }
}
