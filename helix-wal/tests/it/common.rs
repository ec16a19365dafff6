//! Small things that all tests need: seeded draws, entries, and a log driven by hand.
//! No expectations; those are in `truth`.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use helix_wal::storage::Storage;
use helix_wal::{Entry, Error, Keeper, LogId, NextStep, Options, Payload, Recovered, Wal, Writer};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

/// Seeded draws.
pub struct TestRng(StdRng);

impl TestRng {
    pub fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0.random_range(0..end)
    }

    /// True once in `n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn seed(&mut self) -> u64 {
        self.0.next_u64()
    }
}

/// The seed of a randomized test: `HELIX_SEED`, or a fixed one. Printed either way, so that a
/// failure can be run again.
pub fn seed(test: &str) -> u64 {
    let seed = match std::env::var("HELIX_SEED") {
        Ok(text) => text.parse().expect("HELIX_SEED is a number"),
        Err(_) => 20_260_101,
    };
    println!("{test}: HELIX_SEED={seed}");
    seed
}

/// How often the long tests go round: 1, or `HELIX_ROUNDS`.
pub fn rounds() -> u64 {
    std::env::var("HELIX_ROUNDS").map_or(1, |text| text.parse().expect("a number of rounds"))
}

/// Prints what was going on if the test fails while this is alive.
pub struct PrintOnPanic(pub String);

impl Drop for PrintOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// Settings under which every mechanism shows within a few kilobytes.
pub fn small_options() -> Options {
    Options {
        segment_bytes: 64 << 10,
        group_bytes: 16 << 10,
        tail_bytes: 8 << 10,
        ready_segments: 1,
        reserve_bytes: 0,
        footer_cache_bytes: 64 << 10,
        mark_delay: Duration::from_millis(5),
        idle_poll: Duration::ZERO,
        identity: Bytes::from_static(b"replica one"),
        compaction_bytes_per_second: u64::MAX,
        compaction_slack_bytes: 0,
    }
}

/// An entry whose bytes follow from its identity, the stream and the lengths alone.
pub fn entry(id: LogId, stream: u64, head_len: usize, payload_len: usize) -> Entry {
    let mix = id.term.wrapping_mul(0x9e37_79b9).wrapping_add(id.index.wrapping_mul(0x85eb_ca6b));
    let bytes = |salt: u64, len: usize| -> Bytes {
        let mut state = mix.wrapping_add(salt).wrapping_mul(0x2545_f491_4f6c_dd1d) | 1;
        let mut out = Vec::with_capacity(len);
        while out.len() < len {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let word = state.to_le_bytes();
            out.extend_from_slice(&word[..word.len().min(len - out.len())]);
        }
        out.into()
    };
    // A checksum that goes on from something before the payload, as the batches of a server do.
    let crc_seed = mix as u32;
    let payload = bytes(1, payload_len);
    let mut hasher = crc32fast::Hasher::new_with_initial(crc_seed);
    hasher.update(&payload);
    let payload = Payload { bytes: payload, crc: hasher.finalize(), crc_seed };
    Entry { id, stream, head: bytes(2, head_len), payload }
}

/// Whether two entries are the same to the last byte.
pub fn same_entry(a: &Entry, b: &Entry) -> bool {
    a.id == b.id
        && a.stream == b.stream
        && a.head == b.head
        && a.payload.bytes == b.payload.bytes
        && a.payload.crc == b.payload.crc
        && a.payload.crc_seed == b.payload.crc_seed
}

/// A log with its writer and keeper in hand and a clock of its own: nothing runs unless told to.
pub struct ManualWal {
    pub wal: Wal,
    pub writer: Writer,
    pub keeper: Keeper,
    pub recovered: Recovered,
    pub now: Duration,
}

impl ManualWal {
    pub fn open(storage: Arc<dyn Storage>, options: Options) -> Result<Self, Error> {
        let (wal, writer, keeper, recovered) = Wal::open(storage, options)?;
        Ok(Self { wal, writer, keeper, recovered, now: Duration::ZERO })
    }

    pub fn step_writer(&mut self) -> NextStep {
        self.writer.step(self.now)
    }

    pub fn step_keeper(&mut self) -> NextStep {
        self.keeper.step(self.now)
    }

    /// Runs both until neither has anything to do at once.
    pub fn settle(&mut self) {
        for _ in 0..10_000 {
            let writer = self.step_writer();
            let keeper = self.step_keeper();
            if writer != NextStep::Now && keeper != NextStep::Now {
                return;
            }
        }
        panic!("the log does not come to rest");
    }

    /// The same after a while of idleness: the last group gets its mark, late work is done.
    pub fn idle(&mut self) {
        self.settle();
        self.now += Duration::from_millis(20);
        self.settle();
    }
}
