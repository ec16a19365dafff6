//! Limits of a node: the work that clients may cause, and its waits. Each with its reason.
//!
//! A request beyond a limit is rejected with an error that names the limit. `docs/limits.md` lists
//! the limits that are defined elsewhere: those of `log/`, and those between nodes.

use std::time::Duration;

/// Largest gRPC message from a client. Above the largest batch, so that an oversized batch gets
/// Helix's own error; gRPC rejects anything larger.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Largest batch that a topic can allow: well under half a segment, so that any batch fits.
pub const BATCH_BYTES_MAX: u32 = 8 << 20;

/// Largest batch that is decompressed on an async thread: up to some 0.1 ms.
pub const DECOMPRESS_IN_PLACE_BYTES: usize = 128 << 10;

/// Time that a compressed batch waits for the protocol version that allows it. A new cluster
/// reaches it within that time; a cluster with older nodes does not.
pub const COMPRESSION_WAIT_MAX: Duration = Duration::from_secs(1);

/// Time that a change of tokens or rules waits for the protocol version that has them.
pub const ACCESS_WAIT_MAX: Duration = Duration::from_secs(5);

/// Pages of tokens, of principals with their rules, and of quotas.
pub const TOKENS_PER_PAGE_MAX: usize = 1_000;
pub const TOKENS_PER_PAGE_DEFAULT: usize = 100;
pub const PRINCIPALS_PER_PAGE_MAX: usize = 100;
pub const PRINCIPALS_PER_PAGE_DEFAULT: usize = 50;

/// Longest wait of an append stream for its quota; a longer one ends the stream.
pub const QUOTA_DELAY_MAX: Duration = Duration::from_secs(2);

/// Longest time for which the refusal of a call over its quota is held back. It is a part of the
/// time that the caller has to wait anyway; a caller that does not wait cannot call faster.
pub const QUOTA_REFUSAL_DELAY_MAX: Duration = Duration::from_millis(250);

/// Longest time until a delayed subscription learns of a changed quota.
pub const QUOTA_POLL_MAX: Duration = Duration::from_secs(1);

pub const QUOTAS_PER_PAGE_MAX: usize = 1_000;
pub const QUOTAS_PER_PAGE_DEFAULT: usize = 100;

/// Memory of a token, of a quota, and of a principal with its rules, in a response.
pub const TOKEN_DESCRIBED_BYTES: usize = 512;
pub const QUOTA_LISTED_BYTES: usize = 512;
pub const PRINCIPAL_LISTED_BYTES: usize = 16 << 10;

/// Longest text of a client's user agent in the audit log.
pub const USER_AGENT_BYTES_MAX: usize = 128;

/// Shortest time between two requests to shard 0's leader for tokens that this node does not know.
pub const TOKEN_REFRESH_INTERVAL: Duration = Duration::from_millis(100);

/// Longest time between two checks of the expiry of an open stream's token or JWT.
pub const TOKEN_EXPIRY_POLL_MAX: Duration = Duration::from_secs(30);

/// Default limits of a topic. A response with the largest such batch stays below 4 MiB, the largest
/// message that most gRPC libraries take by default.
pub const BATCH_BYTES_DEFAULT: u32 = 3 << 20;
pub const RECORD_BYTES_DEFAULT: u32 = 1 << 20;

/// Batches in flight of one append stream. Equal to a producer's dedup window, so that every batch
/// that a broken stream may send again is recognized.
pub const STREAM_BATCHES_IN_FLIGHT_MAX: usize = 64;

/// Bytes in flight of one append stream. At the limit the stream is not read: TCP slows the client.
pub const STREAM_BYTES_IN_FLIGHT_MAX: usize = 8 << 20;

/// Bytes of batches in flight in one shard: proposed, not yet both committed and synced here.
///
/// At most the memory that a log keeps for its newest entries (`memory.rs`).
pub const SHARD_BYTES_IN_FLIGHT_MAX: usize = 16 << 20;

/// Largest small batch. Small batches do not wait behind large ones for their share of the bytes
/// in flight. They may have half of all bytes; one part in `SMALL_BATCHES_RESERVE_PART` is theirs
/// alone.
pub const SMALL_BATCH_BYTES: usize = 16 << 10;
pub const SMALL_BATCHES_RESERVE_PART: usize = 16;

/// In-flight limit for large batches while small ones are arriving, as a multiple of the log's
/// bandwidth-delay product. A log writes one group and collects the next, so less than 2 is too
/// little.
pub const PACE: u32 = 2;

/// Time after a small batch during which large batches are paced. Otherwise a small batch would
/// wait longer for the bytes in flight than for all of its own processing.
pub const PACED_AFTER_SMALL: Duration = Duration::from_secs(10);

/// Lower bound of the pace: two or three batches, so that one is written while the next arrives.
pub const PACED_BYTES_MIN: usize = 256 << 10;

/// Interval between measurements of a batch's latency without a queue, which need the lowest pace;
/// the number of batches that a measurement needs; its longest duration.
pub const PACE_PROBE_INTERVAL: Duration = Duration::from_secs(5);
pub const PACE_PROBE_BATCHES: u32 = 16;
pub const PACE_PROBE_MAX: Duration = Duration::from_secs(1);

/// Shortest span over which a log's bandwidth is measured, and the time for which the highest one
/// counts.
pub const PACE_RATE_SPAN_MIN: Duration = Duration::from_millis(20);
pub const PACE_RATE_SPAN_MAX: Duration = Duration::from_millis(500);

/// Time after a batch of another principal during which the small batches in flight are limited to
/// [`PACE`] times what keeps the log busy, and at least to `SHARED_BATCHES_MIN`; the number of
/// small batches that a principal may have in flight in any case.
pub const SHARED_AFTER_COMPETITION: Duration = Duration::from_secs(10);
pub const SHARED_BATCHES_MIN: usize = 8;
pub const SHARE_BATCHES_MIN: usize = 4;

/// Bytes that a principal's waiting batches get in one turn.
pub const SHARE_TURN_BYTES: usize = 256 << 10;

/// Time that a unary append waits for its share of the bytes in flight before it is THROTTLED.
pub const PERMIT_WAIT_MAX: Duration = Duration::from_secs(2);

/// Retry hint of THROTTLED.
pub const THROTTLED_RETRY_AFTER: Duration = Duration::from_millis(100);

/// Time that an append waits for its commit before it fails with OUTCOME_UNKNOWN.
pub const COMMIT_WAIT_MAX: Duration = Duration::from_secs(20);

/// Bytes of one fetch response or one subscription message: the limit and the default.
pub const FETCH_BYTES_MAX: usize = 8 << 20;
pub const FETCH_BYTES_DEFAULT: usize = 1 << 20;

/// Longest long poll.
pub const FETCH_WAIT_MAX: Duration = Duration::from_secs(60);

/// Partitions named in one fetch, subscription or resolve call.
pub const PARTITIONS_PER_CALL_MAX: usize = 10_000;

/// Interval of heartbeats on an idle subscription, less up to a fifth at random.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);

/// Largest message of a call that carries no records: ten thousand partitions with their names.
pub const CONTROL_MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Upper bound of the memory that such a message takes decoded, as a multiple of its encoded size.
/// An empty element of a list is two bytes encoded and a struct decoded, in a list that grows by
/// doubling.
pub const DECODED_FACTOR: usize = 64;

/// Concurrent HTTP/2 streams of one connection.
pub const STREAMS_PER_CONNECTION_MAX: u32 = 1024;

/// Bounds of a connection's HTTP/2 windows.
///
/// The upper one exceeds the bytes in flight on a fast path. The lower one is HTTP/2's default. A
/// new connection gets one part in `WINDOW_PART` of the free window bytes, so that few connections
/// are fast and many cannot fill the memory.
pub const WINDOW_BYTES_MAX: u64 = 8 << 20;
pub const WINDOW_BYTES_MIN: u64 = 65_535;
pub const WINDOW_PART: u64 = 8;

/// Bounds of the largest HTTP/2 frame from a client.
///
/// A whole frame is in memory before anything counts it, so it is a part of the connection's
/// window. A batch in a log's tail is a slice of its frame and may keep the whole frame in memory.
/// The lower bound is HTTP/2's. Frames of 1 MiB would gain 5 % for batches of 1 MB, and nothing
/// for batches that fit into one frame.
pub const FRAME_BYTES_MAX: u64 = 256 << 10;
pub const FRAME_BYTES_MIN: u64 = 16_384;

/// Largest frame of a connection, as a part of its window. A batch that needs several frames is
/// copied together; with this part, batches of 100 KiB fit on the first 18 connections.
pub const FRAME_PART: u64 = 4;

/// Headers of a request, decoded. Helix's clients send some hundred bytes.
pub const HEADER_LIST_BYTES_MAX: u32 = 8 << 10;

/// Streams that a client may reset before the server has accepted them, and protocol errors that it
/// may cause, before its connection is closed (CVE-2023-44487, CVE-2025-8671).
///
/// A connection is read in turns of `TURN_FRAMES_MAX` frames, between which all streams are
/// accepted, so no client reaches the first one.
pub const RESETS_PENDING_MAX: usize = STREAMS_PER_CONNECTION_MAX as usize;
pub const RESETS_BY_ERROR_MAX: usize = 1_024;

/// Frames other than DATA that a connection's task reads before others have their turns. Each may
/// begin a call or wake one. With 64, calls of one principal waited for 512 calls of another.
pub const TURN_FRAMES_MAX: usize = 4;

/// Bytes that a connection's task reads before others have their turns.
pub const TURN_BYTES_MAX: usize = 128 << 10;

/// Accepted calls of a connection whose tasks have not run: with this many it is not read. They
/// have no permit yet.
pub const CALLS_UNBEGUN_MAX: usize = 4;

/// Calls that a connection accepts while its client takes no responses: the socket is full. Their
/// responses have no permit.
pub const CALLS_UNREAD_MAX: u64 = 16;

/// Calls that a client may cancel on one connection: the rate, and the time for which a burst may
/// be above it. Beyond that the connection is not read until the rate is met again.
pub const CANCELLED_PER_SECOND: u32 = 5_000;
pub const CANCELLED_BURST: Duration = Duration::from_secs(1);

/// The same for all connections that cancel more than `CANCELLED_UNPACED` calls in a second, which
/// do not count. A client ends subscriptions and long polls this way.
pub const CANCELLED_PER_SECOND_OF_NODE: u32 = 5_000;
pub const CANCELLED_UNPACED: u32 = 256;

/// Time and bytes for the rest of a request whose call has ended. The rest is discarded; without
/// it, a part that arrives after the end would count as a protocol error.
pub const DISCARD_WAIT_MAX: Duration = Duration::from_secs(1);
pub const DISCARD_BYTES_MAX: usize = WINDOW_BYTES_MAX as usize;

/// Open calls that a connection may always have, even while other connections have nearly all. It
/// may have more only if as many are free.
pub const CALLS_PER_CONNECTION_MIN: usize = 16;

/// Reserve of calls that one principal, or one address of clients without credentials, leaves free
/// for others: one part of all. It is small because a single tenant never gets it.
///
/// Within the reserve a principal may have as many calls as are free after them, and always
/// `CALLS_PER_PRINCIPAL_MIN` while one is free.
pub const CALLS_RESERVE_PART: usize = 8;
pub const CALLS_PER_PRINCIPAL_MIN: usize = 16;

/// Time for the HTTP/2 handshake, and its bytes: the preface and the header of the first frame.
pub const HANDSHAKE_WAIT_MAX: Duration = Duration::from_secs(10);
pub const HANDSHAKE_BYTES: u64 = 24 + 9;

/// Time for a TLS handshake, and the open handshakes of the clients' port: a further one ends the
/// oldest. Each takes up to some 80 KiB. With 500 new handshakes a second each gets half a second.
pub const TLS_HANDSHAKE_WAIT_MAX: Duration = Duration::from_secs(10);
pub const TLS_HANDSHAKES_MAX: usize = 256;

/// Open TLS handshakes of the peer port and of the admin port. A node makes four for each peer.
pub const TLS_HANDSHAKES_OF_NODES_MAX: usize = 64;

/// Time before a certificate expires from which on the health of the node warns.
pub const CERTIFICATE_WARNING: Duration = Duration::from_secs(14 * 24 * 3600);

/// Interval of pings on an idle connection, and the time for a ping's response. Each end of a dead
/// connection notices within the sum.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
pub const KEEPALIVE_WAIT_MAX: Duration = Duration::from_secs(10);

/// Time from a message's first byte to its last. The message holds its share of the memory.
pub const MESSAGE_WAIT_MAX: Duration = Duration::from_secs(30);

/// Interval at which a message that has arrived in part must have grown, and by how much, while
/// other requests wait for memory. Also the part from which on it is checked.
pub const ARRIVAL_CHECK_INTERVAL: Duration = Duration::from_secs(1);
pub const ARRIVAL_BYTES_MIN: usize = 64 << 10;

/// Part of a message that has no permit of its own: the memory of its call covers it.
pub const ARRIVAL_UNCOUNTED_BYTES: usize = 2 << 10;

/// Time that a client may leave a response unread. Then its connection is closed.
pub const STALLED_READER_MAX: Duration = Duration::from_secs(60);

/// The same while other readers wait for that memory; the longest stalled are closed first.
pub const STALLED_READER_PRESSED_MAX: Duration = Duration::from_secs(5);

/// Interval of the check for stalled readers.
pub const STALLED_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Time that a reader waits for response bytes before it is THROTTLED: long enough to close
/// stalled readers.
pub const RESPONSE_WAIT_MAX: Duration = Duration::from_secs(15);

/// Reserve of response bytes for short messages (one part of the share), and the bytes that a
/// message may always have. With both, readers that keep up make progress beside many stalled ones.
pub const RESPONSE_RESERVE_PART: usize = 4;
pub const RESPONSE_BYTES_MIN: usize = 64 << 10;

/// Smallest response that is counted; the share of the call covers smaller ones.
pub const RESPONSE_COUNTED_BYTES: usize = 16 << 10;

/// Memory that decoded records take, as a multiple of their size in the log.
pub const PLAIN_FACTOR: usize = 4;

/// Pause after a failed accept, for example if there is no free file descriptor.
pub const ACCEPT_RETRY_WAIT: Duration = Duration::from_millis(100);

/// Shortest interval between log messages about refused connections.
pub const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// File descriptors beside those of logs and clients: peers, listeners, timers, the admin port.
pub const FILES_RESERVED: u64 = 64;

/// Least files of sealed segments that a node keeps open, the most per log, and the part of the
/// descriptors that they may take. More would only save opening a file.
pub const CACHED_FILES_MIN: u64 = 16;
pub const CACHED_FILES_PER_LOG_MAX: u64 = 64;
pub const CACHED_FILES_PART: u64 = 4;

/// Least file descriptors for connections of clients.
pub const CLIENT_FILES_MIN: u64 = 16;

/// Memory of a connection whose data is all unread, beyond its larger window: the smallest window,
/// one frame, and the connection's state.
pub const CONNECTION_BYTES: u64 = 96 << 10;

/// Memory that TLS adds to a connection whose client does not read: 32 KiB of outgoing records, a
/// record that arrives, and the session.
pub const TLS_CONNECTION_BYTES: u64 = 56 << 10;

/// Memory of a call without its data: headers, stream, task.
pub const CALL_BYTES: u64 = 8 << 10;

/// Memory of a partition that is being read or followed: name, position, watch.
pub const PARTITION_READ_BYTES: u64 = 512;

/// Memory of a log's writer: one group, aligned.
pub const LOG_BUFFER_BYTES: u64 = 4 << 20;

/// Time for open calls to end at shutdown, and then for each log.
pub const SHUTDOWN_WAIT_MAX: Duration = Duration::from_secs(10);

/// Time for a connection without open calls to end at shutdown: for its client to take the last
/// response and the GOAWAY. A connection without the HTTP/2 handshake is closed at once.
pub const SHUTDOWN_IDLE_WAIT_MAX: Duration = Duration::from_millis(500);

/// Interval of the check for such connections.
pub const SHUTDOWN_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Time for connections to end after they were closed.
pub const ABORT_WAIT_MAX: Duration = Duration::from_secs(1);

/// Topics in one page of a list.
pub const TOPICS_PER_PAGE_MAX: usize = 1_000;
pub const TOPICS_PER_PAGE_DEFAULT: usize = 100;

/// Limits of a cluster's state: partitions of a topic, partitions of all topics, named producers.
///
/// A cluster's state has them from its creation; another value applies to new clusters only.
pub const PARTITIONS_PER_TOPIC_MAX: u32 = 100_000;
pub const PARTITIONS_MAX: u64 = 1_000_000;
pub const NAMED_PRODUCERS_MAX: u32 = 16_384;

/// Limits of a command to the cluster's state: bytes of a topic name, shards of a topic, nodes of
/// the cluster, bytes of an address.
///
/// More than five replicas cost every write and survive no likelier loss. A topic's shards must
/// fit into one entry; a host name has at most 253 bytes. These limits decide how an entry is
/// applied, so another value needs a new protocol version between nodes.
///
/// While every shard has a replica on every node, a cluster has at most [`REPLICAS_MAX`] nodes.
pub const TOPIC_NAME_BYTES_MAX: usize = 249;
pub const SHARDS_PER_TOPIC_MAX: usize = 4_096;
pub const MEMBERS_MAX: usize = 32;
pub const REPLICAS_MAX: usize = 5;

/// Moves of replicas that run at once in the whole cluster, and one at most in a shard.
///
/// Each copies a replica's data, and the copies of a node share one rate. More would finish no
/// earlier and hold back more logs. Decides how an entry is applied.
pub const MOVES_MAX: usize = 4;
/// Longest name of a rack. Decides how an entry is applied.
pub const RACK_BYTES_MAX: usize = 64;
pub const ADDRESS_BYTES_MAX: usize = helix_proto::address::ADDRESS_BYTES_MAX;

/// Client text that an error repeats, and the whole text of an error, in bytes.
///
/// A message is in the trailers twice, once percent-encoded. With the details it must fit into the
/// 8 KiB of headers that gRPC libraries accept; otherwise they replace the error with one of their
/// own, without reason and details.
pub const QUOTE_BYTES_MAX: usize = TOPIC_NAME_BYTES_MAX;
pub const ERROR_TEXT_BYTES_MAX: usize = 1_024;

/// Partitions in one page of a list. The page ends before the topic that would exceed it, unless
/// that is its first topic.
pub const PARTITIONS_PER_PAGE_MAX: u64 = 10_000;

/// Memory of a partition in a response, with its encoded form: in a description of the partition,
/// in a list of offsets, and in routing data.
pub const PARTITION_DESCRIBED_BYTES: usize = 352;
pub const PARTITION_RESOLVED_BYTES: usize = 96;
pub const PARTITION_ROUTED_BYTES: usize = 12;

/// Memory of a topic in routing data, without its name and its partitions.
pub const TOPIC_ROUTED_BYTES: usize = 128;

/// Rate of the routing data that all watchers get together; the time for which a watcher waits at
/// most for its part of it; and the largest message that does not wait.
pub const METADATA_BYTES_PER_SECOND: f64 = 67_108_864.0;
pub const METADATA_LATE_MAX: Duration = Duration::from_secs(5);
pub const METADATA_UNPACED_BYTES: usize = 32 << 10;

/// Time for which an encoded message is kept for further watchers.
pub const METADATA_KEPT: Duration = Duration::from_secs(1);

/// Partitions that a call handles before it yields to other tasks: some 0.3 ms.
pub const PARTITIONS_PER_TURN: usize = 1_000;

/// Longest producer name. It decides how an entry is applied, so another value needs a new
/// protocol version between nodes.
pub const PRODUCER_NAME_BYTES_MAX: usize = 255;

/// Concurrent reads from disk, per shard. More would take the device queue from the writer.
pub const COLD_READS_PER_SHARD_MAX: usize = 1;

const _: () = assert!(BATCH_BYTES_MAX as usize <= SHARD_BYTES_IN_FLIGHT_MAX / 2);
const _: () = assert!((BATCH_BYTES_MAX as usize) < MESSAGE_BYTES_MAX);

/// Interval of the check for retention by time, and the appended bytes after which it runs early.
pub const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
pub const MAINTENANCE_BYTES: u64 = 32 << 20;

/// Interval of the check for rounds of compaction by key, and between proposals of a leader.
pub const CLEANER_INTERVAL: Duration = Duration::from_secs(1);
/// Delay before a partition whose pass failed is tried again; others do not wait.
pub const CLEANER_RETRY_DELAY: Duration = Duration::from_secs(10);
/// Time that a decided round waits for its segment to become full and for the next checkpoint.
/// Then a replica begins a segment early, at most as often.
pub const CLEANER_SEAL_DELAY: Duration = Duration::from_secs(5);
/// Bytes per read into the map, and per second. Reads are small, because appends that arrive
/// meanwhile wait for the device and for a CPU.
pub const CLEANER_READ_BYTES: usize = 256 << 10;
pub const CLEANER_READ_RATE: u64 = 64 << 20;
/// Largest number of partitions that one pass cleans. Each rewrite of a segment is for all of them.
pub const CLEANER_STREAMS_MAX: usize = 1_000;
/// Most partitions that a replica reports as not compacted yet, also of topics that are no longer
/// compacted. With more it reports nothing, and tombstones stay.
pub const CLEANUP_REPORT_MAX: usize = 10_000;
/// Share of a partition's sealed bytes that is new when a round begins; the default of a node.
pub const CLEANER_DIRTY_PERCENT: u32 = 50;
/// Longest time that records wait for a round although they are few, and that a leader waits for an
/// open round before it begins another one; the default of a node.
pub const CLEANER_LAG: Duration = Duration::from_secs(3600);
/// Memory of the maps from keys to offsets of a node, at the default memory limit. More keys need
/// more passes.
pub const CLEANER_MAP_BYTES: usize = 8 << 20;

/// Interval between comparisons of the members' clocks.
pub const CLOCK_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The same until the first comparison with a majority: a leader must not stamp with its own clock
/// for longer than necessary.
pub const CLOCK_FIRST_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Least log between two checkpoints of a shard's bookkeeping; the default of a node.
pub const CHECKPOINT_BYTES: u64 = 64 << 20;

/// Time that a call waits for a shard to have a leader that can serve it.
pub const READY_WAIT_MAX: Duration = Duration::from_secs(5);

/// Time that a call waits for the next leader, so that its error can name it.
///
/// A transfer of leadership takes some milliseconds. An election takes longer; the client waits
/// for it.
pub const LEADER_WAIT_MAX: Duration = Duration::from_millis(100);

/// Election timeout of a node: the default and the bounds. `raft/timing.rs` derives from it the
/// heartbeat, the lease of reads, and when a leader counts as partitioned or its disk as stalled.
pub const ELECTION_TIMEOUT_MS: u32 = 400;
pub const ELECTION_TIMEOUT: Duration = Duration::from_millis(ELECTION_TIMEOUT_MS as u64);
/// Election timeout of releases that do not tell theirs.
pub const ELECTION_TIMEOUT_UNTOLD: Duration = Duration::from_millis(600);
pub const ELECTION_TIMEOUT_MS_MIN: u32 = 150;
pub const ELECTION_TIMEOUT_MS_MAX: u32 = 3_000;

/// Time for open appends to be applied, and to reach the next leader, before leadership is
/// transferred. New appends are refused meanwhile.
pub const SETTLE_WAIT_MAX: Duration = Duration::from_secs(1);

/// Time for a transfer of leadership.
pub const TRANSFER_WAIT_MAX: Duration = Duration::from_secs(2);

/// Time that the other replicas of a new shard wait for its preferred leader.
pub const FORM_WAIT: Duration = Duration::from_secs(3);

/// Log kept for replicas that are behind, per shard; the default of a node. A replica that lacks
/// more gets a snapshot, and the records that the snapshot names.
pub const CATCH_UP_BYTES: u64 = 4 << 30;

/// Entries that the preferred leader may lack when leadership is transferred to it.
pub const BALANCE_LAG_MAX: u64 = 1_000;

/// Entries that a learner may lack when it becomes a voter: those that are in flight.
pub const LEARNER_LAG_MAX: u64 = 1_000;

/// Time that an append time may be in the future before health reports it. Clocks of healthy nodes
/// differ by less.
pub const APPEND_TIME_AHEAD_MAX: Duration = Duration::from_secs(120);

/// Entries that a replica may lack before health reports it as behind: those that are in flight.
pub const BEHIND_LAG_MAX: u64 = 1_000;

/// Time that a drain call waits for the node to lead no shard.
pub const DRAIN_WAIT_MAX: Duration = Duration::from_secs(30);

/// Time for another node to report the progress of its shards.
pub const PROGRESS_WAIT_MAX: Duration = Duration::from_secs(2);

/// Time that all nodes must be healthy before a leader transfers to the preferred leader.
pub const BALANCE_AFTER: Duration = Duration::from_secs(10);

/// Time that a read of the latest offset waits for a majority to confirm the leader.
pub const READ_INDEX_WAIT_MAX: Duration = Duration::from_secs(2);

/// Interval at which a call polls a follower for an applied entry.
pub const APPLIED_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Interval at which a call polls for shard 0's leader.
pub const LEADER_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Interval at which a call polls for an entry that was committed and that this node applies soon.
pub const APPLY_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Entries of the cluster's own log between two checkpoints, and kept behind a checkpoint for
/// replicas that are slightly behind.
pub const CLUSTER_CHECKPOINT_ENTRIES: u64 = 1_000;

/// Producer ids that a node leases from the cluster's state at once. The process loses unused ones
/// when it ends; there are 2^64.
pub const PRODUCER_IDS_PER_LEASE: u32 = 1_000;

/// Bytes of a segment and of a group of the cluster's own log, whose entries are small.
pub const CLUSTER_SEGMENT_BYTES: u64 = 4 << 20;
pub const CLUSTER_GROUP_BYTES: usize = 256 << 10;

/// Limits of requests about consumer groups: names, texts, and rows of one request.
/// `log/group/` has those that apply enforces.
pub const MEMBER_ID_BYTES_MAX: usize = 64;
pub const CLIENT_NAME_BYTES_MAX: usize = 128;
pub const SUBSCRIBED_TOPICS_MAX: usize = 200;
pub const OFFSETS_PER_COMMIT_MAX: usize = 1_000;
pub const COMMIT_METADATA_BYTES_MAX: usize = 4 << 10;
/// Names and metadata of one commit, which is one entry of the log.
pub const COMMIT_BYTES_MAX: usize = 48 << 10;

/// Bounds of a member's session timeout.
pub const SESSION_TIMEOUT_MIN: Duration = Duration::from_secs(1);
pub const SESSION_TIMEOUT_MAX: Duration = Duration::from_secs(600);

/// Bounds of a gateway's report of a group's members: texts, the time for which it counts, and the
/// bytes of all reports of a shard. Ids of Kafka's members are longer than ours.
pub const GATEWAY_TEXT_BYTES_MAX: usize = 128;
pub const GATEWAY_REPORT_MIN: Duration = Duration::from_secs(1);
pub const GATEWAY_REPORT_MAX: Duration = Duration::from_secs(60);
pub const GATEWAY_REPORTS_BYTES_MAX: usize = 16 << 20;

/// Bounds of the interval between heartbeats: a tenth of the session timeout within these.
pub const GROUP_HEARTBEAT_MIN: Duration = Duration::from_millis(100);
pub const GROUP_HEARTBEAT_MAX: Duration = Duration::from_secs(3);
/// Interval between heartbeats of a member whose assignment is changing.
pub const GROUP_HEARTBEAT_SOON: Duration = Duration::from_millis(250);

/// Interval of the times at which waits of heartbeats end. Waits of less than ten of it are exact.
pub const GROUP_WAIT_STEP: Duration = Duration::from_millis(10);

/// Shortest time between two computations of a group's assignment.
pub const GROUP_ASSIGNMENT_INTERVAL: Duration = Duration::from_millis(100);

/// Time for which a group keeps the offsets of a deleted topic, as TOPIC_DELETED, from when its
/// coordinator has noticed the deletion.
pub const DELETED_OFFSETS_KEPT: Duration = Duration::from_secs(3600);

/// Deleted topics of all groups of a shard whose offsets are kept, and offsets of a group above
/// which it keeps none of deleted topics.
pub const DELETED_TOPICS_KEPT_MAX: usize = 1_000;
pub const DELETED_OFFSETS_ROWS_MAX: usize = 10_000;

/// Entries of a shard's coordinator in flight.
pub const GROUP_PROPOSALS_MAX: usize = 32;

/// Estimated bytes of a shard's groups in a checkpoint. Beyond them the leader refuses what makes a
/// group larger, so that replicas accept the shard's snapshots. The bytes of a checkpoint are at
/// most 7/4 of the estimate.
pub const GROUPS_BYTES_MAX: usize = 128 << 20;

/// Patterns whose match with the cluster's topics a node remembers.
pub const REMEMBERED_PATTERNS_MAX: usize = 10_000;

/// Groups in one page of a list.
pub const GROUPS_PER_PAGE_MAX: usize = 1_000;
pub const GROUPS_PER_PAGE_DEFAULT: usize = 100;

/// Members and partitions of a group in one page, and its encoded size. The page ends before the
/// row that would exceed it, unless that is its first row.
///
/// Clients in most languages receive up to 4 MiB. The memory of a page is twice its size.
pub const GROUP_ROWS_PER_PAGE_MAX: usize = 10_000;
pub const GROUP_PAGE_BYTES_MAX: usize = 2 << 20;

/// Size of a member, of a partition, and of a remembered change in a page, without topic names,
/// metadata and other free text. The largest ids fit.
pub const GROUP_MEMBER_BYTES: usize = 512;
pub const GROUP_PARTITION_BYTES: usize = 768;
pub const OFFSET_CHANGE_BYTES: usize = 80;

/// Rows of subscribed partitions that do not fit into an assignment.
pub const GROUP_LEFT_OUT_MAX: usize = 10_000;

/// Groups of a shard with metrics of their own, and their partitions together.
pub const GROUP_SERIES_MAX: usize = 100;
pub const GROUP_LAG_SERIES_MAX: usize = 1_000;

/// Appends and reads that a node keeps of each minute, the slowest ones, and the minutes.
pub const SLOW_CALLS_PER_MINUTE: usize = 8;
pub const SLOW_MINUTES: u64 = 15;

/// Refused calls that a node keeps, and bytes of each of their six texts.
pub const REFUSED_CALLS_MAX: usize = 256;
pub const REFUSED_CALL_TEXT_BYTES: usize = 256;

/// Groups whose lag a coordinator samples, and the samples of each: 15 minutes.
pub const LAG_GROUPS_MAX: usize = 2_000;
pub const LAG_SAMPLES_MAX: usize = 60;
pub const LAG_SAMPLE_INTERVAL: Duration = Duration::from_secs(15);

/// Committed offsets that a node reads for one round of these samples.
pub const LAG_PARTITIONS_MAX: usize = 50_000;

/// Records of a batch that are searched for a trace context.
pub const TRACED_RECORDS_MAX: usize = 64;

/// Finished traces that wait for the exporter; more are dropped.
pub const TRACES_QUEUED_MAX: usize = 2_048;

/// Syncs measured at start.
pub const SYNC_PROBES: usize = 64;

/// Default of the largest rate at which a node copies records, in bytes per second: a small part
/// of a disk's sequential bandwidth, so that appends keep theirs.
pub const COPY_RATE_MAX: u64 = 146 << 20;

/// Least rate of copies, in bytes per second, so that a copy always progresses. The largest batch
/// takes 8 s.
pub const COPY_RATE_LEAST: u64 = 1 << 20;

/// Data shards of a cluster. More shards cost more than they gain.
pub const SHARDS_MAX: u64 = 64;
