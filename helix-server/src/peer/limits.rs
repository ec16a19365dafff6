//! Bounds of the peer transport, each with its reason.
//! A peer that exceeds a bound loses its epoch or its stream, and nothing else.

use std::time::Duration;

use crate::limits::{BATCH_BYTES_MAX, GROUPS_BYTES_MAX, SHARD_BYTES_IN_FLIGHT_MAX};

/// Maximum bytes of appends in flight per shard and target. A single request may be larger.
/// A follower syncs about as much in 2 ms; more would only queue.
pub(super) const WINDOW_BYTES: u64 = 4 << 20;

/// Maximum delay of a commit index that is sent without entries.
/// The next append carries the index too, and arrives well within this delay while a client appends
/// in a loop. That saves half of the messages between leader and follower. Appends do not wait for
/// it; readers of a follower do.
pub(super) const COMMIT_WAIT: Duration = Duration::from_millis(1);

/// Fixed cost of a request, so that the window bounds the number of requests too.
pub(super) const REQUEST_COST: u64 = 1 << 10;
/// Fixed cost of an entry, for the same reason.
pub(super) const ENTRY_COST: u64 = 64;

/// Largest message: fits the largest batch, its head, and the fields around them.
pub(super) const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Largest head of an entry, which is also the limit of the log.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 10;

/// Maximum unary requests in flight per stream. Each shard has one or two.
pub(super) const UNARY_REQUESTS_MAX: usize = 4096;

/// Maximum epochs per stream that wait for openraft, including replaced ones.
/// Each shard has one, or a few while its disk stalls.
pub(super) const EPOCHS_MAX: usize = 4096;

/// Messages read from a stream before results are collected.
pub(super) const MESSAGES_PER_POLL: usize = 32;

/// Lag in bytes above which a follower moves to the catch-up lane.
pub(super) const BEHIND_BYTES: u64 = 48 << 20;
/// Lag in entries above which a follower moves to the catch-up lane.
pub(super) const BEHIND_ENTRIES: u64 = 1 << 18;
/// Lag in bytes up to which a follower moves back to the live lane.
/// Well below [`BEHIND_BYTES`], so that it does not alternate; above the bytes that a leader may
/// have in flight. Otherwise the throttle would delay the commits that free these, and the follower
/// would never catch up.
pub(super) const CLOSE_BYTES: u64 = 24 << 20;
/// Lag in entries up to which a follower moves back to the live lane.
pub(super) const CLOSE_ENTRIES: u64 = 1 << 17;
const _: () = assert!(CLOSE_BYTES > SHARD_BYTES_IN_FLIGHT_MAX as u64);

/// Bytes that a node may copy at once after a pause.
/// Live appends queue behind a burst on disks and in sockets.
pub(super) const COPY_BURST: u64 = 512 << 10;

/// Snapshot bytes per message.
pub(super) const CHUNK_BYTES: usize = 1 << 20;
/// Largest accepted snapshot.
/// All producers of a shard take at most about 17 MiB, a partition less than 100 bytes, and groups
/// at most 7/4 of [`GROUPS_BYTES_MAX`] before they are refused growth. So this suffices for 150,000
/// partitions beside as many groups as possible, and for more than a million beside few.
pub(super) const SNAPSHOT_BYTES_MAX: u64 = 256 << 20;
const _: () = assert!(GROUPS_BYTES_MAX as u64 / 4 * 7 + (32 << 20) <= SNAPSHOT_BYTES_MAX);

/// Bytes per request for the records of a snapshot. A single batch may be larger.
/// The next chunk is requested while one is written, so this size and the catch-up rate decide the
/// speed, also between sites that are milliseconds apart. It is small enough that appends hardly
/// notice the read and the write of a chunk.
pub(super) const RECORDS_BYTES: usize = 512 << 10;
const _: () = assert!(RECORDS_BYTES + (BATCH_BYTES_MAX as usize) < MESSAGE_BYTES_MAX);
/// Maximum requests for records in flight per stream. A shard has one.
pub(super) const RECORDS_REQUESTS_MAX: usize = 64;
/// Shards of a node that may fetch records at the same time. Each holds a few chunks in memory.
pub(super) const FETCHES_MAX: usize = 4;
/// Wait for the response to a request for records, after which another replica is asked: a source
/// whose disk hangs never responds. At the least rate of copies, the largest batch takes 8 s.
pub(super) const RECORDS_WAIT_MAX: Duration = Duration::from_secs(30);
/// Pause before a fetch repeats a request after a lost connection.
pub(super) const FETCH_PAUSE: Duration = Duration::from_millis(100);
/// Delay of the response of a failed fetch, after which the leader sends the snapshot again.
pub(super) const FETCH_FAILED_PAUSE: Duration = Duration::from_secs(1);
/// Interval at which a fetch that waits for disk space retries.
pub(super) const FETCH_DISK_FULL_PAUSE: Duration = Duration::from_secs(1);

/// Timeout of a TCP connect. A peer in the same network answers within a millisecond.
pub(super) const CONNECT_WAIT_MAX: Duration = Duration::from_millis(500);
/// Timeout of the handshakes: of both for the dialing node, of the first for the accepting one.
pub(super) const HANDSHAKE_WAIT_MAX: Duration = Duration::from_secs(1);
/// Interval of HTTP/2 keepalive pings from the dialing node.
pub(super) const KEEPALIVE_INTERVAL: Duration = Duration::from_millis(500);
/// Time without a ping response after which a connection is closed.
pub(super) const KEEPALIVE_WAIT_MAX: Duration = Duration::from_secs(2);
/// Interval of keepalive pings from the accepting node.
/// Longer, since they only clean up after a node that has vanished.
pub(super) const ACCEPTED_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// Interval of checks for a stalled stream: a message that is incomplete at two checks ends it.
/// 16 MiB arrive in this time at 13 Mbit/s. A slower stream has lost track of message boundaries.
pub(super) const MESSAGE_WAIT: Duration = Duration::from_secs(10);

/// First pause between attempts to connect; it doubles up to [`RECONNECT_PAUSE_MAX`].
/// A peer that dials this node is dialed at once.
pub(super) const RECONNECT_PAUSE_MIN: Duration = Duration::from_millis(50);
pub(super) const RECONNECT_PAUSE_MAX: Duration = Duration::from_millis(500);

/// Pauses of openraft between requests to an unreachable replica; the last one repeats.
/// Short, since a leader may need a restarted replica and learns of it only by these requests.
/// Without a connection they fail within this process.
pub(super) const BACKOFF_MS: [u64; 3] = [10, 20, 50];

/// Timeout of a hello call.
pub(super) const HELLO_WAIT_MAX: Duration = Duration::from_secs(1);
/// Timeout of form and join calls, in which a node creates its data directories.
pub(super) const FORM_WAIT_MAX: Duration = Duration::from_secs(10);

/// Grace period for connections when the peer port closes.
pub(super) const CLOSE_WAIT_MAX: Duration = Duration::from_millis(500);

/// HTTP/2 flow control window of a stream: fits several windows of several shards.
pub(super) const STREAM_WINDOW_BYTES: u32 = 16 << 20;
pub(super) const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
pub(super) const FRAME_BYTES: u32 = 1 << 20;
/// Maximum concurrent HTTP/2 streams of a connection, which carries one lane or calls.
pub(super) const STREAMS_PER_CONNECTION_MAX: u32 = 256;

/// Largest text of a refusal, which is sent in a header.
pub(super) const REFUSAL_BYTES_MAX: usize = 1024;
