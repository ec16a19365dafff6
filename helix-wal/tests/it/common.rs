//! Helpers of all tests: seeded random numbers, entries, and a log whose threads are stepped
//! manually. Expectations are in `truth`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use helix_wal::storage::Storage;
use helix_wal::{
    Entry, Error, FileCache, Keeper, LogId, NextStep, Options, Payload, Preparation, Recovered,
    Wal, Writer,
};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

/// Seeded random numbers.
pub struct TestRng(StdRng);

impl TestRng {
    pub fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0.random_range(0..end)
    }

    /// Returns true with probability 1/`n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn seed(&mut self) -> u64 {
        self.0.next_u64()
    }
}

/// Returns the seed of a randomized test: `HELIX_SEED` or a fixed one. Prints it, so that a failure
/// can be reproduced.
pub fn seed(test: &str) -> u64 {
    let seed = match std::env::var("HELIX_SEED") {
        Ok(text) => text.parse().expect("HELIX_SEED is a number"),
        Err(_) => 20_260_101,
    };
    println!("{test}: HELIX_SEED={seed}");
    seed
}

/// Returns the number of rounds of long tests: `HELIX_ROUNDS`, or 1.
pub fn rounds() -> u64 {
    std::env::var("HELIX_ROUNDS").map_or(1, |text| text.parse().expect("a number of rounds"))
}

/// Guard that prints its text if the test panics while it is alive.
pub struct PrintOnPanic(pub String);

impl Drop for PrintOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// Returns options with which a few kilobytes exercise every mechanism.
pub fn small_options() -> Options {
    Options {
        segment_bytes: 64 << 10,
        group_bytes: 16 << 10,
        tail_bytes: 8 << 10,
        ready_segments: 1,
        preparation: Preparation::Auto,
        reserve_bytes: 0,
        footer_cache_bytes: 64 << 10,
        mark_delay: Duration::from_millis(5),
        busy_poll: false,
        identity: Bytes::from_static(b"replica one"),
        compaction_bytes_per_second: u64::MAX,
        compaction_slack_bytes: 0,
        files: FileCache::default(),
    }
}

/// Builds an entry whose bytes are derived from its id, stream and lengths.
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
    // A checksum with a seed, as the server has for its batches.
    let crc_seed = mix as u32;
    let payload = bytes(1, payload_len);
    let mut hasher = crc32fast::Hasher::new_with_initial(crc_seed);
    hasher.update(&payload);
    let payload = Payload { bytes: payload, crc: hasher.finalize(), crc_seed };
    Entry { id, stream, head: bytes(2, head_len), payload }
}

/// Returns whether two entries are equal in all bytes.
pub fn same_entry(a: &Entry, b: &Entry) -> bool {
    a.id == b.id
        && a.stream == b.stream
        && a.head == b.head
        && a.payload.bytes == b.payload.bytes
        && a.payload.crc == b.payload.crc
        && a.payload.crc_seed == b.payload.crc_seed
}

/// Results of appended entries, in the order of the callbacks.
pub type AppendResults = Arc<Mutex<Vec<Result<(), Error>>>>;

/// Appends the next entry of stream 1; its result is added to `results`.
pub fn append(wal: &Wal, results: &AppendResults, payload: usize) -> Entry {
    let state = wal.state();
    let id = LogId { term: 1, index: state.last.map_or(0, |last| last.index + 1) };
    let entry = entry(id, 1, 10, payload);
    let results = Arc::clone(results);
    let done = Box::new(move |result| results.lock().unwrap().push(result));
    wal.append(vec![entry.clone()], done);
    entry
}

/// Takes the results since the last call.
pub fn take(results: &AppendResults) -> Vec<Result<(), Error>> {
    std::mem::take(&mut results.lock().unwrap())
}

/// A log whose writer, keeper and clock are stepped by the test.
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

    /// Runs writer and keeper until neither has work that is due.
    pub fn settle(&mut self) {
        for _ in 0..10_000 {
            let writer = self.step_writer();
            let keeper = self.step_keeper();
            if writer != NextStep::Now && keeper != NextStep::Now {
                return;
            }
        }
        panic!("the log does not settle");
    }

    /// Settles twice with 20 ms between: the last group gets its sync marker, deferred work is
    /// done.
    pub fn idle(&mut self) {
        self.settle();
        self.now += Duration::from_millis(20);
        self.settle();
    }
}
