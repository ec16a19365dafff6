//! Every bound of the peer transport in one place, each with its reason.
//! A peer that breaks a bound loses its epoch or its stream, never more.

use std::time::Duration;

use crate::limits::{BATCH_BYTES_MAX, SHARD_BYTES_IN_FLIGHT_MAX};

/// Bytes of appends in flight per shard and target. About what a follower syncs in 2 ms: more
/// would only queue. A single request may be larger.
pub(super) const WINDOW_BYTES: u64 = 4 << 20;

/// How long a follower may be left without the news that what it has is committed, for the sake of
/// sending it with the next entries: while a client appends in a loop these come well within that,
/// and half of the messages between leader and follower are saved. Nobody who appends waits for
/// it; a reader at a follower does.
pub(super) const COMMIT_WAIT: Duration = Duration::from_millis(1);

/// What a request and an entry count beside their bytes, so that the window bounds how many
/// there are as well.
pub(super) const REQUEST_COST: u64 = 1 << 10;
pub(super) const ENTRY_COST: u64 = 64;

/// Largest message: the largest batch, its head, and what else comes with them.
pub(super) const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Largest head of an entry; the log takes no larger one.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 10;

/// Questions that one stream may have open. Each shard has one or two at a time.
pub(super) const QUESTIONS_MAX: usize = 4096;

/// Epochs that one stream may have with openraft, with those that were replaced and still wait
/// for its responses. Each shard has one, and while its disk is stuck a few.
pub(super) const EPOCHS_MAX: usize = 4096;

/// Messages taken from a stream before results are looked at.
pub(super) const MESSAGES_PER_POLL: usize = 32;

/// A follower whose next entry is further behind than this is fed over the catch-up lane ...
pub(super) const BEHIND_BYTES: u64 = 48 << 20;
pub(super) const BEHIND_ENTRIES: u64 = 1 << 18;
/// ... and goes back to the live one when it is this close, which is well below, so that it does
/// not go back and forth. What a leader may have in flight is close: were it throttled, so would be
/// the commits that free it, and the leader would never slow down enough to be caught up with.
pub(super) const CLOSE_BYTES: u64 = 24 << 20;
pub(super) const CLOSE_ENTRIES: u64 = 1 << 17;
const _: () = assert!(CLOSE_BYTES > SHARD_BYTES_IN_FLIGHT_MAX as u64);

/// Catch-up of all shards of this node together, bytes per second: a small part of what a disk
/// gives a sequential reader, for the sake of those who write meanwhile.
pub(super) const CATCH_UP_RATE: u64 = 146 << 20;
/// Bytes that catch-up may send at once after a rest. What is sent at once is in front of the
/// live tail on disks and in sockets, and is felt by those who write.
pub(super) const CATCH_UP_BURST: u64 = 512 << 10;

/// Bytes of a snapshot in one message.
pub(super) const CHUNK_BYTES: usize = 1 << 20;
/// Largest snapshot taken in. All the producers that a shard may know take some 17 MiB at most, a
/// partition less than 100 bytes: room for a million partitions and more.
pub(super) const SNAPSHOT_BYTES_MAX: u64 = 256 << 20;

/// Records asked for at once where a snapshot speaks of them. The next piece is on its way while
/// one is written, so that this and the catch-up rate decide how fast it goes: also between
/// places that are milliseconds apart. Small enough that those who write hardly feel a piece that
/// is read and written beside them. A single batch may be larger.
pub(super) const RECORDS_BYTES: usize = 512 << 10;
const _: () = assert!(RECORDS_BYTES + (BATCH_BYTES_MAX as usize) < MESSAGE_BYTES_MAX);
/// Requests for records that one stream may have open: a shard has one at a time.
pub(super) const RECORDS_REQUESTS_MAX: usize = 64;
/// Shards of a node that fetch records at the same time: each holds a few pieces in memory.
pub(super) const FETCHES_MAX: usize = 4;
/// How long a fetch waits before it asks again over a connection that was lost.
pub(super) const FETCH_PAUSE: Duration = Duration::from_millis(100);
/// How long a fetch that cannot go on holds the answer back: with it the whole snapshot comes
/// again.
pub(super) const FETCH_FAILED_PAUSE: Duration = Duration::from_secs(1);
/// How often a fetch that waits for room on the disk looks for it.
pub(super) const FETCH_DISK_FULL_PAUSE: Duration = Duration::from_secs(1);

/// Until a TCP connection is made; a peer in the same network answers in a millisecond.
pub(super) const CONNECT_WAIT_MAX: Duration = Duration::from_millis(500);
/// Until both handshakes are exchanged, and until a dialing node has said its own.
pub(super) const HANDSHAKE_WAIT_MAX: Duration = Duration::from_secs(1);
/// The node that has dialed asks a silent connection this often ...
pub(super) const KEEPALIVE_INTERVAL: Duration = Duration::from_millis(500);
/// ... and gives it up after this long without an answer.
pub(super) const KEEPALIVE_WAIT_MAX: Duration = Duration::from_secs(2);
/// The other end asks by itself, more seldom: nothing waits for it but what a node that has
/// vanished leaves behind.
pub(super) const ACCEPTED_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// A message that has begun has come as a whole by the second time that its stream is looked at,
/// this far apart: 16 MiB at 13 Mbit/s. Else where messages begin has been lost sight of.
pub(super) const MESSAGE_WAIT: Duration = Duration::from_secs(10);

/// Pauses between attempts to connect: from, to, and doubling in between. A node that connects
/// by itself is connected to at once.
pub(super) const RECONNECT_PAUSE_MIN: Duration = Duration::from_millis(50);
pub(super) const RECONNECT_PAUSE_MAX: Duration = Duration::from_millis(500);

/// What openraft waits before it asks an unreachable replica again; the last one repeats. Short,
/// since a restarted replica is heard of by nothing else, and its leader may need it; while
/// there is no connection the question ends within this process.
pub(super) const BACKOFF_MS: [u64; 3] = [10, 20, 50];

/// Longest wait for an answer to a hello.
pub(super) const HELLO_WAIT_MAX: Duration = Duration::from_secs(1);
/// Longest wait until a node has made its folders for a new cluster.
pub(super) const FORM_WAIT_MAX: Duration = Duration::from_secs(10);

/// How long connections get to end when the peer port closes.
pub(super) const CLOSE_WAIT_MAX: Duration = Duration::from_millis(500);

/// HTTP/2 flow control: several windows of several shards.
pub(super) const STREAM_WINDOW_BYTES: u32 = 16 << 20;
pub(super) const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
pub(super) const FRAME_BYTES: u32 = 1 << 20;
/// Streams of one connection: a lane, or calls.
pub(super) const STREAMS_PER_CONNECTION_MAX: u32 = 256;

/// Text of a refusal: it travels in a header.
pub(super) const REFUSAL_BYTES_MAX: usize = 1024;
