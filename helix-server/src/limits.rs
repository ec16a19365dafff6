//! Every bound of the server in one place, each with its reason.
//! A request beyond a bound is refused with an error that names the bound.

use std::time::Duration;

/// Largest gRPC message taken in. Above the largest batch, so that an oversized batch gets our
/// own error; gRPC refuses anything larger by itself.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Largest batch that a topic can allow: well under half a segment, so that any batch fits.
pub const BATCH_BYTES_MAX: u32 = 8 << 20;

/// Default limits of a topic.
pub const BATCH_BYTES_DEFAULT: u32 = 4 << 20;
pub const RECORD_BYTES_DEFAULT: u32 = 1 << 20;

/// Batches in flight of one append stream: the dedup window of a producer, so that everything a
/// broken stream may have to send again is still recognised.
pub const STREAM_BATCHES_IN_FLIGHT_MAX: usize = 64;

/// Bytes in flight of one append stream. Above it the stream is not read: TCP slows the client.
pub const STREAM_BYTES_IN_FLIGHT_MAX: usize = 8 << 20;

/// Bytes of batches in flight in one shard: proposed, not yet both committed and synced here. No
/// more than the default of what a log keeps in memory of its newest entries, from which followers
/// are served: beyond it they would have to be read back from the disk that is written to.
pub const SHARD_BYTES_IN_FLIGHT_MAX: usize = 16 << 20;

/// How long a unary append may wait for its share of the bytes in flight before it is THROTTLED.
pub const PERMIT_WAIT_MAX: Duration = Duration::from_secs(2);

/// Hint with THROTTLED.
pub const THROTTLED_RETRY_AFTER: Duration = Duration::from_millis(100);

/// How long an append waits for its commit before its outcome is called unknown.
pub const COMMIT_WAIT_MAX: Duration = Duration::from_secs(20);

/// Bytes of one fetch answer or one subscription message, and what is asked for by default.
pub const FETCH_BYTES_MAX: usize = 8 << 20;
pub const FETCH_BYTES_DEFAULT: usize = 1 << 20;

/// Longest long poll.
pub const FETCH_WAIT_MAX: Duration = Duration::from_secs(60);

/// Partitions named in one fetch, subscription or resolve call.
pub const PARTITIONS_PER_CALL_MAX: usize = 10_000;

/// A subscription that has nothing to say says so this often, less up to a fifth at random.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);

/// Concurrent HTTP/2 streams of one connection.
pub const STREAMS_PER_CONNECTION_MAX: u32 = 1024;

/// HTTP/2 flow-control windows: larger than what is in flight on a fast path.
pub const STREAM_WINDOW_BYTES: u32 = 8 << 20;
pub const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
pub const FRAME_BYTES: u32 = 1 << 20;

/// How long open calls get to end at shutdown.
pub const SHUTDOWN_WAIT_MAX: Duration = Duration::from_secs(10);

/// Topics in one page of a list.
pub const TOPICS_PER_PAGE_MAX: usize = 1_000;
pub const TOPICS_PER_PAGE_DEFAULT: usize = 100;

/// Longest producer name.
pub const PRODUCER_NAME_BYTES_MAX: usize = 255;

/// Reads that may wait for the disk at the same time, per shard: more would only cut into the
/// writer, which shares the device queue.
pub const COLD_READS_PER_SHARD_MAX: usize = 1;

const _: () = assert!(BATCH_BYTES_MAX as usize <= SHARD_BYTES_IN_FLIGHT_MAX / 2);
const _: () = assert!((BATCH_BYTES_MAX as usize) < MESSAGE_BYTES_MAX);

/// How often retention by time is looked at, and how many appended bytes ask for a look at once.
pub const UPKEEP_INTERVAL: Duration = Duration::from_secs(1);
pub const UPKEEP_BYTES: u64 = 32 << 20;

/// Log between two checkpoints of a shard's bookkeeping, at least.
pub const CHECKPOINT_BYTES: u64 = 64 << 20;

/// How long a call waits for a shard to have a leader that may serve it.
pub const READY_WAIT_MAX: Duration = Duration::from_secs(5);

/// How long a leader goes on without a majority's confirmation until it counts as cut off: an
/// election timeout, after which somebody else may lead.
pub const CUT_OFF_AFTER: Duration = Duration::from_millis(700);

/// How often a shard looks whether it is cut off, and whether its disk stalls.
pub const PULSE_INTERVAL: Duration = Duration::from_millis(100);
pub const DISK_LOOK_INTERVAL: Duration = Duration::from_millis(300);

/// How long a disk may take for a sync until its node hands leadership over: an election timeout.
pub const STALLED_AFTER: Duration = Duration::from_millis(600);

/// How long a transfer of leadership may take.
pub const TRANSFER_WAIT_MAX: Duration = Duration::from_secs(2);

/// How long replicas that are not to lead a new shard first wait for the one that is.
pub const FORM_WAIT: Duration = Duration::from_secs(3);

/// Log that is kept for replicas that are behind, per shard. One that lacks more cannot catch up
/// from the log alone.
pub const CATCH_UP_BYTES_MAX: u64 = 4 << 30;

/// A leader hands over to the node that should lead only when that node lacks fewer entries.
pub const BALANCE_LAG_MAX: u64 = 1_000;

/// How long all must have been well before a leader hands over to the node that should lead.
pub const BALANCE_AFTER: Duration = Duration::from_secs(10);

/// How long a read of the latest offset waits for a majority to confirm the leader.
pub const READ_INDEX_WAIT_MAX: Duration = Duration::from_secs(2);

/// How often a call looks for shard 0's leader while there is none.
pub const LEADER_LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Entries of the cluster's own log between two checkpoints, and kept behind one for replicas
/// that are a little behind.
pub const CLUSTER_CHECKPOINT_ENTRIES: u64 = 1_000;

/// Producer ids that a node takes from the cluster's state at once. Unused ones are lost with the
/// process; there are 2^64.
pub const PRODUCER_IDS_PER_LEASE: u32 = 1_000;

/// Segments and groups of the cluster's own log, whose entries are small.
pub const CLUSTER_SEGMENT_BYTES: u64 = 4 << 20;
pub const CLUSTER_GROUP_BYTES: usize = 256 << 10;

/// Syncs measured at start.
pub const SYNC_PROBES: usize = 64;

/// Data shards of a cluster: more cost more than they give.
pub const SHARDS_MAX: u64 = 64;
