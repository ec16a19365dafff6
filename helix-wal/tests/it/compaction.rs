//! Compaction keeps live entries readable, frees the space of dead ones, and does not rewrite
//! segments that become free without it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{
    Entry, Error, LogId, NextStep, Options, Placement, ReadMode, SegmentState, Wal, WalStats,
    inspect, verify,
};

use crate::common::{ManualWal, PrintOnPanic, entry, small_options};

/// A log with appends, placements, checkpoints and purges, and its expected contents.
pub(crate) struct CompactedLog {
    pub(crate) disk: SimulatedDisk,
    options: Options,
    manual: Option<ManualWal>,
    /// Placed entries by stream and position.
    pub(crate) kept: BTreeMap<(u64, u64), (Entry, Placement)>,
    next: BTreeMap<u64, u64>,
    trims: BTreeMap<u64, u64>,
    pub(crate) index: u64,
    /// Entries to append together, because an append alone fills a whole block.
    batch: Vec<(u64, usize)>,
    batch_max: usize,
}

impl CompactedLog {
    pub(crate) fn new(options: Options) -> Self {
        let disk = SimulatedDisk::new(5);
        let manual = Some(ManualWal::open(Arc::new(disk.clone()), options.clone()).unwrap());
        let (kept, next, trims) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self {
            disk,
            options,
            manual,
            kept,
            next,
            trims,
            index: 0,
            batch: Vec::new(),
            batch_max: 10,
        }
    }

    pub(crate) fn manual(&mut self) -> &mut ManualWal {
        self.manual.as_mut().unwrap()
    }

    pub(crate) fn wal(&self) -> Wal {
        self.manual.as_ref().unwrap().wal.clone()
    }

    pub(crate) fn stats(&self) -> WalStats {
        self.wal().stats()
    }

    pub(crate) fn append(&mut self, stream: u64, size: usize) {
        self.batch.push((stream, size));
        if self.batch.len() >= self.batch_max {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let mut entries = Vec::new();
        for (stream, size) in std::mem::take(&mut self.batch) {
            self.index += 1;
            entries.push(entry(LogId { term: 1, index: self.index }, stream, 12, size));
        }
        if entries.is_empty() {
            return;
        }
        self.wal().append(entries.clone(), Box::new(|result| result.unwrap()));
        self.manual().settle();
        for made in entries {
            let (stream, time) = (made.stream, made.id.index);
            let first = self.next.entry(stream).or_default();
            let placement = Placement { stream, first: *first, count: 3, time };
            *first += 3;
            self.wal().place(made.id.index, Some(placement)).unwrap();
            self.kept.insert((stream, placement.first), (made, placement));
        }
    }

    pub(crate) fn checkpoint_and_purge(&mut self) {
        let at = self.checkpoint();
        self.wal().purge(at, Box::new(|result| result.unwrap()));
        self.manual().idle();
    }

    /// Takes a checkpoint of everything, and returns its id.
    pub(crate) fn checkpoint(&mut self) -> LogId {
        self.flush();
        self.manual().idle();
        let at = LogId { term: 1, index: self.index };
        self.wal().checkpoint(at, Bytes::from_static(b"state")).unwrap();
        at
    }

    /// Trims a stream to its newest entries.
    pub(crate) fn retain(&mut self, stream: u64, entries: u64) {
        self.flush();
        let trim = self.next[&stream].saturating_sub(3 * entries);
        self.trims.insert(stream, trim);
        self.kept.retain(|(s, _), (_, p)| *s != stream || p.first + 3 > trim);
        self.wal().trim(stream, trim);
    }

    pub(crate) fn drop_stream(&mut self, stream: u64) {
        self.kept.retain(|(s, _), _| *s != stream);
        self.wal().drop_stream(stream);
    }

    /// Runs the log until no work is left.
    pub(crate) fn finish_work(&mut self) {
        for _ in 0..40 {
            self.manual().idle();
        }
    }

    pub(crate) fn reopen(&mut self) {
        self.manual = None;
        self.disk.crash(Crash::LoseAll);
        self.disk = self.disk.reopen();
        assert_eq!(verify(&self.disk), []);
        self.manual =
            Some(ManualWal::open(Arc::new(self.disk.clone()), self.options.clone()).unwrap());
        assert!(self.manual().recovered.quarantined.is_empty());
        for (stream, trim) in self.trims.clone() {
            self.wal().trim(stream, trim);
        }
    }

    /// Reads every kept entry by stream, by time and by index.
    pub(crate) fn check(&self) {
        self.check_streams();
        self.check_indexes();
    }

    /// Reads every kept entry by stream and by time.
    pub(crate) fn check_streams(&self) {
        let wal = self.wal();
        for (made, placement) in self.kept.values() {
            let Placement { stream, first, time, .. } = *placement;
            let got = wal.read_stream(stream, first + 2, first + 3, 1, ReadMode::Blocking);
            let got = got.unwrap().unwrap();
            assert_eq!((got.len(), got[0].id, got[0].placement), (1, made.id, *placement));
            assert_eq!((&got[0].head, &got[0].payload.bytes), (&made.head, &made.payload.bytes));
            let found = wal.search_time(stream, time, ReadMode::Blocking).unwrap().unwrap();
            assert!(found.is_some_and(|found| (first..first + 3).contains(&found)), "{found:?}");
        }
    }

    /// Reads all entries by index, in live segments also those of dropped streams.
    fn check_indexes(&self) {
        let wal = self.wal();
        let mut by_index: Vec<_> = self.kept.values().collect();
        by_index.sort_unstable_by_key(|(made, _)| made.id.index);
        let even = |stream: u64| stream.is_multiple_of(2);
        for wants in [&|_| true, &even as &dyn Fn(u64) -> bool] {
            let (mut after, mut found) = (0, Vec::new());
            while after < self.index {
                let some = wal.read_live_of(after, self.index, 10_000, wants).unwrap();
                after = some.upto;
                found.extend(some.entries.into_iter().map(|live| live.id));
            }
            let wanted = by_index.iter().filter(|(_, placement)| wants(placement.stream));
            assert_eq!(found, Vec::from_iter(wanted.map(|(made, _)| made.id)));
        }
    }

    /// Returns the held bytes beyond 1.5 times the live bytes.
    fn excess(&self) -> u64 {
        let WalStats { held_bytes, live_bytes, .. } = self.stats();
        held_bytes.saturating_sub(live_bytes * 3 / 2)
    }
}

pub(crate) fn options() -> Options {
    Options { tail_bytes: 0, ..small_options() }
}

/// Ten streams with different retention.
#[test]
fn space_follows_live_bytes_with_ten_retentions() {
    let mut log = CompactedLog::new(Options { segment_bytes: 256 << 10, ..options() });
    let kept = |stream: u64| 10 << (stream / 2);
    let mut worst = 0;
    for round in 0..2400 {
        log.append(round % 10, 2000);
        if round % 40 == 39 {
            log.checkpoint_and_purge();
            for stream in 0..10 {
                log.retain(stream, kept(stream));
            }
            log.finish_work();
            if round > 400 {
                worst = worst.max(log.excess());
            }
        }
    }
    let stats = log.stats();
    println!(
        "held {}, live {}, {} segments, {} cold, rewritten {} of {}, worst excess {worst}",
        stats.held_bytes,
        stats.live_bytes,
        stats.segments,
        stats.cold_segments,
        stats.rewritten_bytes,
        stats.group_bytes
    );
    assert!(stats.rewritten_bytes > 0, "nothing was rewritten");
    // The active segment, the one before it, and the overhead of small segments.
    assert!(worst < 6 * (256 << 10), "{worst}");
    log.check();
    log.reopen();
    log.check();
    log.finish_work();
    log.check();
    assert!(log.excess() < 6 * (256 << 10));
}

/// Whole segments become free, so nothing is rewritten.
#[test]
fn streams_with_equal_retention_are_never_rewritten() {
    // Two segments, as in the server: the first and the last one of the kept range.
    let (segment_bytes, slack) = (256 << 10, 512 << 10);
    let bounds = Options { segment_bytes, compaction_slack_bytes: slack, ..options() };
    let mut log = CompactedLog::new(bounds);
    for round in 0..1500 {
        log.append(round % 3, 1500);
        if round % 10 == 9 {
            log.checkpoint_and_purge();
            for stream in 0..3 {
                log.retain(stream, 60);
            }
            log.finish_work();
        }
    }
    let stats = log.stats();
    assert_eq!((stats.rewritten_bytes, stats.cold_segments), (0, 0));
    assert!(stats.segments < 16, "{}", stats.segments);
    log.check();
}

#[test]
fn dropped_stream_frees_its_space() {
    let mut log = CompactedLog::new(options());
    for round in 0..600 {
        log.append(round % 6, 1500);
    }
    log.checkpoint_and_purge();
    log.finish_work();
    let before = log.stats();
    for stream in 1..6 {
        log.drop_stream(stream);
    }
    log.finish_work();
    let after = log.stats();
    assert!(after.held_bytes < before.held_bytes / 2, "{before:?} {after:?}");
    assert!(after.rewritten_bytes >= after.live_bytes - (128 << 10));
    log.check();
    for stream in 1..6 {
        let read = log.wal().read_stream(stream, 0, 9, 1, ReadMode::Blocking);
        assert!(matches!(read, Err(Error::Trimmed { .. })));
    }
    log.drop_stream(0);
    log.finish_work();
    assert!(log.stats().segments <= 4, "{:?}", log.stats());
}

/// With hundreds of streams in every segment, each ends up in few segments, and files stay few.
#[test]
fn scattered_streams_are_gathered() {
    const STREAMS: u64 = 300;
    let options = Options { segment_bytes: 256 << 10, ..options() };
    let mut log = CompactedLog::new(options);
    log.batch_max = 300;
    // About eighteen segments.
    for round in 0..18 * 1100 {
        log.append(round * 7 % STREAMS, 40);
        if round % 600 == 599 {
            log.checkpoint_and_purge();
            log.finish_work();
        }
    }
    log.finish_work();
    log.check();
    let report = inspect(&log.disk).unwrap();
    let cold = report.segments.iter().filter(|segment| segment.state == SegmentState::Cold);
    let few = cold.filter(|segment| {
        let mut streams: Vec<u64> = segment.streams.iter().map(|(stream, _)| *stream).collect();
        streams.dedup();
        streams.len() < STREAMS as usize / 4
    });
    let few = few.count();
    assert!(few >= 4, "{few} of {}: {:?}", report.segments.len(), log.stats());
    assert!(log.stats().segments < 30);
    let rewritten = log.stats().rewritten_bytes;
    assert!(rewritten < 3 * log.stats().live_bytes, "{rewritten}");
    log.reopen();
    log.check();
    log.finish_work();
    // One more segment may have been sealed; the others are not rewritten again.
    assert!(log.stats().rewritten_bytes < 256 << 10, "segments are rewritten once");
}

/// Reads return the same before, during and after every step.
#[test]
fn reads_are_unaffected_at_every_step() {
    let mut log = CompactedLog::new(options());
    for round in 0..200 {
        log.append(round % 5, 1500);
    }
    log.checkpoint_and_purge();
    for stream in 0..4 {
        log.retain(stream, 3);
    }
    let (mut steps, mut rewritten) = (0, 0);
    loop {
        let next = log.manual().step_keeper();
        log.check();
        // A trim during compaction.
        if steps % 9 == 4 && log.kept.len() > 30 {
            let left = log.kept.keys().filter(|(stream, _)| *stream == 4).count() as u64;
            log.retain(4, left - 1);
        }
        steps += 1;
        rewritten = rewritten.max(log.stats().rewritten_bytes);
        match next {
            NextStep::Now => {}
            NextStep::After(time) if time < Duration::from_millis(400) => log.manual().now += time,
            _ => break,
        }
    }
    assert!(rewritten > 0 && steps > 20, "{rewritten} in {steps}");
    log.finish_work();
    log.check();
    log.reopen();
    log.check();
}

#[test]
fn damaged_entries_are_not_rewritten_and_others_are_served() {
    let mut log = CompactedLog::new(options());
    for round in 0..240 {
        log.append(round % 4, 1500);
    }
    log.checkpoint_and_purge();
    let (_, (damaged, placement)) = log.kept.iter().find(|((s, _), _)| *s == 3).unwrap();
    let (damaged, placement) = (damaged.clone(), *placement);
    let needle = &damaged.payload.bytes[100..116];
    let files: Vec<String> =
        log.disk.files().into_iter().filter(|name| name.ends_with(".seg")).collect();
    let (file, at) = files
        .iter()
        .find_map(|file| {
            let bytes = log.disk.read_file(file).unwrap();
            Some((file.clone(), bytes.windows(16).position(|window| window == needle)?))
        })
        .unwrap();
    log.disk.flip_bit(&file, 8 * at as u64);
    for stream in 0..3 {
        log.retain(stream, 2);
    }
    log.finish_work();
    assert!(log.stats().rewritten_bytes > 0, "other segments are compacted");
    let still = log.disk.files().contains(&file);
    assert!(still, "{file} is kept");
    let read = |first: u64| log.wal().read_stream(3, first, first + 1, 1, ReadMode::Blocking);
    match read(placement.first) {
        Err(Error::Damaged { file: named, bytes, .. }) => {
            assert!(named == file && bytes.contains(&(at as u64)), "{named} {bytes:?}");
        }
        other => panic!("{other:?}"),
    }
    let mut others = 0;
    for ((stream, first), (made, _)) in &log.kept {
        if made.id != damaged.id && *stream == 3 {
            assert_eq!(read(*first).unwrap().unwrap()[0].id, made.id);
            others += 1;
        }
    }
    assert!(others > 40);
}

#[test]
fn compaction_leaves_the_reserve_free() {
    let reserve_bytes = 1 << 20;
    let mut log = CompactedLog::new(Options { reserve_bytes, ready_segments: 0, ..options() });
    for round in 0..240 {
        log.append(round % 4, 1500);
    }
    log.checkpoint_and_purge();
    log.disk.set_free_bytes(Some(reserve_bytes + (12 << 10)));
    for stream in 0..3 {
        log.retain(stream, 2);
    }
    log.finish_work();
    assert_eq!(log.stats().cold_segments, 0, "not even the smallest segment fits");
    log.check();
    // Space for one small segment is enough, because each frees more.
    log.disk.set_free_bytes(Some(reserve_bytes + (64 << 10)));
    let mut least = u64::MAX;
    for _ in 0..2000 {
        log.manual().step_keeper();
        log.manual().now += Duration::from_millis(100);
        least = least.min(log.stats().free_bytes);
    }
    assert!(log.stats().cold_segments > 0);
    assert!(least >= reserve_bytes, "{least}");
    log.check();
}

#[test]
fn compaction_respects_its_rate() {
    let rate = 100_000;
    let mut log = CompactedLog::new(Options { compaction_bytes_per_second: rate, ..options() });
    for round in 0..240 {
        log.append(round % 4, 1500);
    }
    log.checkpoint_and_purge();
    for stream in 0..3 {
        log.retain(stream, 2);
    }
    let start = log.manual().now;
    while log.stats().cold_segments == 0 {
        match log.manual().step_keeper() {
            NextStep::After(time) => log.manual().now += time,
            NextStep::Now => {}
            other => panic!("{other:?}"),
        }
    }
    let (took, bytes) = (log.manual().now - start, log.stats().rewritten_bytes);
    let least = Duration::from_secs_f64(bytes as f64 / rate as f64);
    assert!(bytes > 10_000 && took >= least, "{bytes} bytes in {took:?}");
    let mut disabled = CompactedLog::new(Options { compaction_bytes_per_second: 0, ..options() });
    for round in 0..240 {
        disabled.append(round % 4, 1500);
    }
    disabled.checkpoint_and_purge();
    for stream in 0..3 {
        disabled.retain(stream, 2);
    }
    disabled.finish_work();
    let _context = PrintOnPanic(format!("{:?}", disabled.stats()));
    assert_eq!(disabled.stats().cold_segments, 0);
}
