//! What clients may make a node do, and how long it waits for what, each with its reason. A request
//! beyond a bound is refused with an error that names the bound. `docs/limits.md` says which bounds
//! stand elsewhere: those of the domain, which knows nothing of a node, and those between nodes.

use std::time::Duration;

/// Largest gRPC message taken in. Above the largest batch, so that an oversized batch gets our
/// own error; gRPC refuses anything larger by itself.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Largest batch that a topic can allow: well under half a segment, so that any batch fits.
pub const BATCH_BYTES_MAX: u32 = 8 << 20;

/// How long a log's writer stays awake for the next batch, in microseconds. A producer with one
/// request in flight comes back within 150 to 190; where two of three nodes have to have synced, on
/// the same machine, within about 500.
pub const IDLE_POLL_US: u32 = 500;

/// Default limits of a topic.
pub const BATCH_BYTES_DEFAULT: u32 = 4 << 20;
pub const RECORD_BYTES_DEFAULT: u32 = 1 << 20;

/// Batches in flight of one append stream: the dedup window of a producer, so that everything a
/// broken stream may have to send again is still recognised.
pub const STREAM_BATCHES_IN_FLIGHT_MAX: usize = 64;

/// Bytes in flight of one append stream. Above it the stream is not read: TCP slows the client.
pub const STREAM_BYTES_IN_FLIGHT_MAX: usize = 8 << 20;

/// Bytes of batches in flight in one shard, at most: proposed, not yet both committed and synced
/// here. No more than what a log keeps in memory of its newest entries: see `memory.rs`.
pub const SHARD_BYTES_IN_FLIGHT_MAX: usize = 16 << 20;

/// A batch up to this size is small: it does not wait behind large ones for its share of the bytes
/// in flight. Small ones may have half of all, and this part of all is kept for them alone.
pub const SMALL_BATCH_BYTES: usize = 16 << 10;
pub const SMALL_BATCHES_RESERVE_PART: usize = 16;

/// How many times what the log does while one batch is under way large ones may have in flight
/// while small ones come: a log that writes one group and gathers the next has no use for less.
pub const PACE: u32 = 2;

/// For so long after a small batch the large ones are held back to what keeps the log busy; else
/// the wait for whatever is in flight is longer than all that a small one needs for itself.
pub const PACED_AFTER_SMALL: Duration = Duration::from_secs(10);

/// Large batches in flight are not held back to less than this many bytes: two or three batches, so
/// that one is written while the next comes.
pub const PACED_BYTES_MIN: usize = 256 << 10;

/// How often it is measured what a batch takes when there is no queue before it, which holds the
/// large ones back to the least; how many batches that needs, and how long it may last.
pub const PACE_PROBE_INTERVAL: Duration = Duration::from_secs(5);
pub const PACE_PROBE_BATCHES: u32 = 16;
pub const PACE_PROBE_MAX: Duration = Duration::from_secs(1);

/// Over how long the rate of a log is measured, at least; and how long the highest counts.
pub const PACE_RATE_SPAN_MIN: Duration = Duration::from_millis(20);
pub const PACE_RATE_SPAN_MAX: Duration = Duration::from_millis(500);

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

/// Largest message of a call that carries no records: ten thousand partitions with their names.
pub const CONTROL_MESSAGE_BYTES_MAX: usize = 1 << 20;

/// How many times what it took on the wire such a message may take once it is decoded: an unset
/// element of a list is two bytes there and a whole struct here, in a list that grows by doubling.
pub const DECODED_FACTOR: usize = 64;

/// Concurrent HTTP/2 streams of one connection.
pub const STREAMS_PER_CONNECTION_MAX: u32 = 1024;

/// HTTP/2 windows of one connection, at most: larger than what is in flight on a fast path. Each
/// connection gets an eighth of what is left of all windows, and never less than the least that
/// HTTP/2 has, so that few connections are fast and many cannot fill the memory.
pub const WINDOW_BYTES_MAX: u64 = 8 << 20;
pub const WINDOW_BYTES_MIN: u64 = 65_535;
pub const WINDOW_PART: u64 = 8;

/// Largest HTTP/2 frame taken in: a frame is in memory as a whole before anything counts it, so
/// it is a part of the connection's window. It is also what a batch in a log's tail, which is a
/// slice of its frame, may hold in memory. The lower bound is HTTP/2's, the upper one ours: frames
/// of 1 MiB gain 5 % for batches of 1 MB, and nothing for those that fit into one.
pub const FRAME_BYTES_MAX: u64 = 256 << 10;
pub const FRAME_BYTES_MIN: u64 = 16_384;

/// The part of its window that a connection's largest frame is. A batch that does not fit into one
/// frame is copied together: by this part batches of 100 KiB fit on the first 18 connections.
pub const FRAME_PART: u64 = 4;

/// Headers of a request, unpacked. Ours have some hundred bytes.
pub const HEADER_LIST_BYTES_MAX: u32 = 8 << 10;

/// Streams that a client may have reset before the server came to them, and errors that it may
/// have made, until its connection is closed: cheap for the client, work for the server.
pub const RESETS_PENDING_MAX: usize = 20;
pub const RESETS_BY_ERROR_MAX: usize = 256;

/// How long a connection may be silent before it has said that it speaks HTTP/2, and how many
/// bytes that takes: the preface and the head of the first frame.
pub const HANDSHAKE_WAIT_MAX: Duration = Duration::from_secs(10);
pub const HANDSHAKE_BYTES: u64 = 24 + 9;

/// How often an idle connection is probed, and how long its answer may take. Each end of a dead
/// connection notices within the sum.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
pub const KEEPALIVE_WAIT_MAX: Duration = Duration::from_secs(10);

/// How long a message may take from its first byte to its last: it holds its share of the memory.
pub const MESSAGE_WAIT_MAX: Duration = Duration::from_secs(30);

/// How long a client may leave untaken what it has asked to read. Then its connection is closed.
pub const STALLED_READER_MAX: Duration = Duration::from_secs(60);

/// The same while other readers wait because of it; the ones that stall for longest go first.
pub const STALLED_READER_PRESSED_MAX: Duration = Duration::from_secs(5);

/// How often stalled readers are looked for.
pub const STALLED_LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// How long a reader waits for room for its answer before it is THROTTLED: long enough for the
/// stalled ones to be ended.
pub const ANSWER_WAIT_MAX: Duration = Duration::from_secs(15);

/// Room for answers that is not given to long messages: with it, and messages of this least size,
/// readers that take their data go on beside many that do not.
pub const ANSWERS_RESERVE_PART: usize = 4;
pub const ANSWER_BYTES_MIN: usize = 64 << 10;

/// Answers from this size on are counted; smaller ones are part of their call.
pub const ANSWER_COUNTED_BYTES: usize = 16 << 10;

/// Decoded records take about so many times what they take in the log.
pub const PLAIN_FACTOR: usize = 4;

/// How long the accepting of connections rests when the system has no file descriptor left.
pub const ACCEPT_REST: Duration = Duration::from_millis(100);

/// How often the log says that connections are refused.
pub const REFUSALS_TOLD_INTERVAL: Duration = Duration::from_secs(10);

/// File descriptors that are not left to clients: logs, peers, timers.
pub const FILES_RESERVED: u64 = 256;

/// What a connection takes at most while all of its data is unread, beyond its larger window: the
/// least window, one frame, and the state of the connection itself.
pub const CONNECTION_BYTES: u64 = 96 << 10;

/// What a call takes beside its data: its headers, its stream, its task.
pub const CALL_BYTES: u64 = 8 << 10;

/// What a partition takes that is being read or followed: its name, its place, its watch.
pub const PARTITION_READ_BYTES: u64 = 512;

/// What a log's writer needs: one group, aligned.
pub const LOG_BUFFER_BYTES: u64 = 4 << 20;

/// How long open calls get to end at shutdown, and then each log.
pub const SHUTDOWN_WAIT_MAX: Duration = Duration::from_secs(10);

/// How long connections get to notice that they are cut off.
pub const CUT_WAIT_MAX: Duration = Duration::from_secs(1);

/// Topics in one page of a list.
pub const TOPICS_PER_PAGE_MAX: usize = 1_000;
pub const TOPICS_PER_PAGE_DEFAULT: usize = 100;

/// What a cluster's state may hold: partitions of a topic, of all topics, and producers with names.
/// Each is in that state from its beginning on: another value would hold for new clusters only.
pub const PARTITIONS_PER_TOPIC_MAX: u32 = 100_000;
pub const PARTITIONS_MAX: u64 = 1_000_000;
pub const NAMED_PRODUCERS_MAX: u32 = 16_384;

/// What the names and lists of a command to the cluster's state may be, and how many nodes there
/// are: more replicas cost every write and survive no likelier loss. A topic's shards have to fit
/// into an entry, and a host name has at most 253 bytes. All of these decide what an entry means,
/// so that another value needs another version of the protocol between nodes.
pub const TOPIC_NAME_BYTES_MAX: usize = 249;
pub const SHARDS_PER_TOPIC_MAX: usize = 4_096;
pub const MEMBERS_MAX: usize = 5;
pub const ADDRESS_BYTES_MAX: usize = 260;

/// Partitions in one page of a list: it ends before the topic that would bring more, unless that is
/// its first one.
pub const PARTITIONS_PER_PAGE_MAX: u64 = 10_000;

/// What a partition takes in an answer that describes it: before that is written for the wire, and
/// while it is. In an answer that only says its offsets, and in one that says where it is.
pub const PARTITION_DESCRIBED_BYTES: usize = 320;
pub const PARTITION_RESOLVED_BYTES: usize = 96;
pub const PARTITION_ROUTED_BYTES: usize = 12;

/// What a topic takes beside its name and its partitions in such an answer.
pub const TOPIC_ROUTED_BYTES: usize = 128;

/// Partitions that a call looks at until others have their turn: some 0.3 ms.
pub const PARTITIONS_PER_TURN: usize = 1_000;

/// Longest producer name. As above: it decides what an entry means.
pub const PRODUCER_NAME_BYTES_MAX: usize = 255;

/// Reads that may wait for the disk at the same time, per shard: more would only cut into the
/// writer, which shares the device queue.
pub const COLD_READS_PER_SHARD_MAX: usize = 1;

const _: () = assert!(BATCH_BYTES_MAX as usize <= SHARD_BYTES_IN_FLIGHT_MAX / 2);
const _: () = assert!((BATCH_BYTES_MAX as usize) < MESSAGE_BYTES_MAX);

/// How often retention by time is looked at, and how many appended bytes ask for a look at once.
pub const UPKEEP_INTERVAL: Duration = Duration::from_secs(1);
pub const UPKEEP_BYTES: u64 = 32 << 20;

/// Log between two checkpoints of a shard's bookkeeping, at least; the default of a node.
pub const CHECKPOINT_BYTES: u64 = 64 << 20;

/// How long a call waits for a shard to have a leader that may serve it.
pub const READY_WAIT_MAX: Duration = Duration::from_secs(5);

/// How long a call that finds no leader, or loses the one that it had, waits for the next one, so
/// that it can say where that is: a hand-over takes some milliseconds. An election takes longer,
/// and is waited for by the client.
pub const LEADER_WAIT_MAX: Duration = Duration::from_millis(100);

/// How long a leader goes on without a majority's confirmation until it counts as cut off: an
/// election timeout, after which somebody else may lead.
pub const CUT_OFF_AFTER: Duration = Duration::from_millis(700);

/// For so long after a majority confirmed it a leader serves reads without asking it again: less
/// than the longest election timeout (600 ms), for which those who confirmed it elect nobody else,
/// so that clocks may run apart by a fifth.
pub const CONFIRMED_FOR: Duration = Duration::from_millis(500);

/// How often a shard looks whether it is cut off, and whether its disk stalls.
pub const PULSE_INTERVAL: Duration = Duration::from_millis(100);
pub const DISK_LOOK_INTERVAL: Duration = Duration::from_millis(300);

/// How long a disk may take for a sync until its node hands leadership over: an election timeout.
pub const STALLED_AFTER: Duration = Duration::from_millis(600);

/// How long a transfer of leadership may take.
pub const TRANSFER_WAIT_MAX: Duration = Duration::from_secs(2);

/// How long replicas that are not to lead a new shard first wait for the one that is.
pub const FORM_WAIT: Duration = Duration::from_secs(3);

/// Log that is kept for replicas that are behind, per shard; the default of a node. One that lacks
/// more gets a snapshot, and the records that it speaks of.
pub const CATCH_UP_BYTES: u64 = 4 << 30;

/// A leader hands over to the node that should lead only when that node lacks fewer entries.
pub const BALANCE_LAG_MAX: u64 = 1_000;

/// A new replica votes once it lacks no more entries than this: what is on its way.
pub const LEARNER_LAG_MAX: u64 = 1_000;

/// A replica that lacks more entries than this is behind, as health has it; fewer are on their way.
pub const BEHIND_LAG_MAX: u64 = 1_000;

/// How long a call to drain a node waits until the node leads nothing.
pub const DRAIN_WAIT_MAX: Duration = Duration::from_secs(30);

/// How long another node may take to say how far its shards are.
pub const PROGRESS_WAIT_MAX: Duration = Duration::from_secs(2);

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
