//! Small closed logs, with everything that was ever written to them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use helix_wal::storage::{Crash, SimulatedDisk, Storage};
use helix_wal::{Entry, Error, Keeper, LogId, NextStep, Options, Payload, Placement, Wal, Writer};

pub(crate) const VOTES: [&[u8]; 3] = [b"first vote", b"second vote", b"third vote"];

pub(crate) fn options() -> Options {
    Options {
        segment_bytes: 64 << 10,
        group_bytes: 16 << 10,
        tail_bytes: 0,
        ready_segments: 0,
        preparation: helix_wal::Preparation::Allocate,
        reserve_bytes: 0,
        footer_cache_bytes: 64 << 10,
        mark_delay: Duration::from_millis(5),
        busy_poll: false,
        identity: Bytes::from_static(b"replica one"),
        compaction_bytes_per_second: u64::MAX,
        compaction_slack_bytes: 0,
        files: helix_wal::FileCache::default(),
    }
}

/// A log whose writer, keeper and clock are stepped manually.
pub(crate) struct FuzzWal {
    pub(crate) wal: Wal,
    writer: Writer,
    keeper: Keeper,
    now: Duration,
}

impl FuzzWal {
    pub(crate) fn open(disk: &SimulatedDisk) -> Result<Self, Error> {
        let storage: Arc<dyn Storage> = Arc::new(disk.clone());
        let (wal, writer, keeper, _) = Wal::open(storage, options())?;
        Ok(Self { wal, writer, keeper, now: Duration::ZERO })
    }

    /// Runs the writer and the keeper until neither has work that is due.
    pub(crate) fn settle(&mut self) {
        for _ in 0..2_000 {
            let writer = self.writer.step(self.now);
            let keeper = self.keeper.step(self.now);
            if writer != NextStep::Now && keeper != NextStep::Now {
                return;
            }
        }
        panic!("the log does not settle");
    }

    pub(crate) fn idle(&mut self) {
        self.settle();
        self.now += Duration::from_millis(20);
        self.settle();
    }
}

/// A closed log.
pub(crate) struct LogFixture {
    pub(crate) files: Vec<(String, Vec<u8>)>,
    /// All entries that were ever appended.
    pub(crate) written: Vec<Entry>,
    /// Placements by index.
    pub(crate) placed: BTreeMap<u64, Placement>,
}

struct Builder {
    disk: SimulatedDisk,
    manual: FuzzWal,
    written: Vec<Entry>,
    placed: BTreeMap<u64, Placement>,
    next: [u64; 4],
    term: u64,
}

impl Builder {
    fn new() -> Self {
        let disk = SimulatedDisk::new(1);
        let manual = FuzzWal::open(&disk).unwrap();
        let (written, placed) = (Vec::new(), BTreeMap::new());
        Self { disk, manual, written, placed, next: [0; 4], term: 1 }
    }

    fn append(&mut self, size: usize) {
        let index = self.manual.wal.state().last.map_or(0, |last| last.index + 1);
        let entry = entry(LogId { term: self.term, index }, 1 + index % 3, size);
        self.written.push(entry.clone());
        self.manual.wal.append(vec![entry], Box::new(|result| result.unwrap()));
    }

    fn vote(&mut self, vote: usize) {
        self.manual.wal.save_vote(Bytes::from_static(VOTES[vote]), Box::new(|it| it.unwrap()));
    }

    fn place_up_to(&mut self, last: u64) {
        let first = self.placed.last_key_value().map_or(0, |(index, _)| index + 1);
        for index in first..=last {
            let stream = 1 + index % 3;
            let count = 1 + (index % 2) as u32;
            let at = self.next[stream as usize];
            let placement = Placement { stream, first: at, count, time: 10 * index };
            self.next[stream as usize] = at + u64::from(count);
            self.manual.wal.place(index, Some(placement)).unwrap();
            self.placed.insert(index, placement);
        }
    }

    fn purge(&mut self, index: u64, checkpoint: u64) {
        let id = |index| self.written.iter().rev().find(|e| e.id.index == index).unwrap().id;
        self.manual.wal.checkpoint(id(checkpoint), Bytes::from_static(b"state machine")).unwrap();
        self.manual.wal.purge(id(index), Box::new(|result| result.unwrap()));
    }

    fn close(mut self) -> LogFixture {
        self.manual.idle();
        drop(self.manual);
        self.disk.crash(Crash::LoseAll);
        let names = self.disk.files().into_iter().filter(|name| !name.starts_with("state."));
        let files = names.map(|name| (name.clone(), self.disk.read_file(&name).unwrap()));
        LogFixture { files: files.collect(), written: self.written, placed: self.placed }
    }
}

/// Builds an entry whose bytes are derived from its id.
pub(crate) fn entry(id: LogId, stream: u64, size: usize) -> Entry {
    let mut bytes = format!("entry {} of term {}, ", id.index, id.term).into_bytes();
    bytes.resize(size, id.index as u8);
    let crc_seed = (id.index as u32).wrapping_add(1000);
    let mut hasher = crc32fast::Hasher::new_with_initial(crc_seed);
    hasher.update(&bytes);
    let payload = Payload { bytes: bytes.into(), crc: hasher.finalize(), crc_seed };
    Entry { id, stream, head: Bytes::from(format!("head {}", id.index)), payload }
}

/// Builds a log with entries, votes and a truncation in one segment.
fn open() -> LogFixture {
    let mut log = Builder::new();
    log.vote(0);
    for size in [0, 40, 700, 3000] {
        log.append(size);
        log.manual.settle();
    }
    log.term = 2;
    log.vote(1);
    log.manual.wal.truncate_after(Some(2), Box::new(|result| result.unwrap()));
    log.append(90);
    log.append(5);
    log.manual.settle();
    log.place_up_to(1);
    log.close()
}

/// Builds a log with sealed segments, a checkpoint, a purge, and an active segment.
fn sealed() -> LogFixture {
    let mut log = Builder::new();
    log.vote(0);
    for size in [200, 21_000, 20, 27_000, 16_000, 33, 14_000, 20_000] {
        log.append(size);
        log.manual.settle();
    }
    log.vote(1);
    log.place_up_to(6);
    log.purge(2, 5);
    log.manual.idle();
    log.vote(2);
    log.append(30);
    log.close()
}

/// Builds a log with the live older entries in a cold segment.
fn compacted() -> LogFixture {
    let mut log = Builder::new();
    log.vote(2);
    for _ in 0..24 {
        for size in [2500, 700, 3100, 40] {
            log.append(size);
        }
        log.manual.settle();
    }
    log.place_up_to(95);
    log.manual.idle();
    log.purge(90, 95);
    log.manual.idle();
    for (stream, kept) in [(1, 2), (2, 9), (3, 30)] {
        let trim = log.next[stream as usize] - kept;
        log.manual.wal.trim(stream, trim);
    }
    log.manual.idle();
    log.manual.idle();
    log.append(100);
    let fixture = log.close();
    assert!(fixture.files.iter().any(|(name, _)| name.ends_with(".cold")), "nothing was compacted");
    fixture
}

pub(crate) fn fixtures() -> [LogFixture; 3] {
    [open(), sealed(), compacted()]
}
