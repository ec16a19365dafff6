//! Random sequences of all operations, with crashes in between, compared with the model.
//! Single-threaded and stepped manually: a seed decides everything.

use std::sync::Arc;

use bytes::Bytes;
use helix_wal::storage::{CacheMode, Crash, DiskOperation, SimulatedDisk};
use helix_wal::{
    DurableCallback, Entry, Error, LiveEntry, LogId, Options, Placement, Preparation, ReadMode,
    Wal, verify,
};

use crate::common::{ManualWal, PrintOnPanic, TestRng, entry, rounds, seed, small_options};
use crate::truth::{CallbackResults, QueuedOp, Truth};

/// Streams in use. A dropped one is replaced by a new one.
const STREAMS: u64 = 3;

/// A log, its model, and the random numbers that choose the next action.
pub struct ModelDriver {
    pub disk: SimulatedDisk,
    pub options: Options,
    pub manual: Option<ManualWal>,
    pub truth: Truth,
    pub acks: CallbackResults,
    pub rng: TestRng,
    pub term: u64,
    streams: Vec<u64>,
    next_stream: u64,
    /// Allowed staged entries at the next open: (after index, last index).
    staged: Vec<Option<(u64, u64)>>,
    /// Operations may fail without a crash.
    pub may_fail: bool,
    /// The disk has had limited space since the log was opened.
    full: bool,
    /// Bytes rewritten by compaction.
    pub rewritten: u64,
    /// Prints every action.
    pub verbose: bool,
    /// Actions so far, to debug a failure.
    pub action_log: Vec<String>,
}

impl ModelDriver {
    pub fn new(seed: u64, options: Options) -> Self {
        let disk = SimulatedDisk::new(seed);
        disk.set_cache(CacheMode::Sometimes);
        Self {
            disk,
            options,
            manual: None,
            truth: Truth::default(),
            acks: CallbackResults::default(),
            rng: TestRng::new(seed),
            term: 1,
            streams: (1..=STREAMS).collect(),
            next_stream: STREAMS + 1,
            staged: vec![None],
            may_fail: false,
            full: false,
            rewritten: 0,
            verbose: false,
            action_log: Vec::new(),
        }
    }

    /// Returns a closed copy of the log on its own disk, with another seed.
    pub fn fork(&self, seed: u64) -> Self {
        let disk = self.disk.fork();
        disk.reseed(seed);
        Self {
            disk,
            options: self.options.clone(),
            manual: None,
            truth: self.truth.clone(),
            acks: CallbackResults::default(),
            rng: TestRng::new(seed),
            term: self.term,
            streams: self.streams.clone(),
            next_stream: self.next_stream,
            staged: self.staged.clone(),
            may_fail: false,
            full: false,
            rewritten: 0,
            verbose: false,
            action_log: self.action_log.clone(),
        }
    }

    /// Limits the free space of the disk, or removes the limit.
    fn resize_disk(&mut self) {
        // Settles first, because appends larger than a segment may be written in part.
        self.settle();
        if self.full && self.rng.one_in(2) {
            self.disk.set_free_bytes(None);
        } else {
            self.full = true;
            let free = self.rng.below(3) * self.options.segment_bytes;
            self.disk.set_free_bytes(Some(free));
        }
    }

    /// Opens the log and compares it with the model.
    pub fn open(&mut self) {
        self.acks = CallbackResults::default();
        let mut opened = ManualWal::open(Arc::new(self.disk.clone()), self.options.clone());
        if self.full && matches!(opened, Err(Error::DiskFull { .. })) {
            // The failed open loses nothing: the next one has enough space.
            self.disk.set_free_bytes(None);
            opened = ManualWal::open(Arc::new(self.disk.clone()), self.options.clone());
        }
        self.disk.set_free_bytes(None);
        self.full = false;
        self.adopt(opened.unwrap());
    }

    fn adopt(&mut self, manual: ManualWal) {
        self.truth.recover(&manual.wal, &manual.recovered);
        let found = manual.wal.take_staged();
        let found = found.map(|(after, segments)| (after, segments.last().unwrap()));
        assert!(self.staged.contains(&found), "{found:?} is none of {:?}", self.staged);
        self.staged = vec![found];
        self.manual = Some(manual);
        self.replay_placements();
    }

    /// Opens the log on a disk that may stop. Returns whether it succeeded.
    pub fn try_open(&mut self) -> bool {
        match ManualWal::open(Arc::new(self.disk.clone()), self.options.clone()) {
            Ok(manual) => {
                self.acks = CallbackResults::default();
                self.adopt(manual);
                true
            }
            Err(error) => {
                assert!(self.disk.stopped(), "open: {error}");
                false
            }
        }
    }

    /// Drops the log with requests in flight, and collects their results.
    pub fn drop_log(&mut self) {
        self.collect_results();
        if let Some(manual) = self.manual.take() {
            self.rewritten += manual.wal.stats().rewritten_bytes;
        }
        // A dropped writer fails its callers, which changes nothing.
        self.truth.collect_results(&self.acks, true, self.full);
    }

    /// Repeats trims and placements after an open, as the owner of a log does.
    fn replay_placements(&mut self) {
        if self.disk.stopped() {
            return;
        }
        let wal = self.wal();
        for (stream, position) in &self.truth.trims {
            wal.trim(*stream, *position);
        }
        for stream in &self.truth.dropped {
            wal.drop_stream(*stream);
        }
        let first = self.truth.placed_upto.map_or(0, |placed_upto| placed_upto + 1);
        for (index, (_, placement)) in self.truth.placed.range(first..) {
            wal.place(*index, *placement).unwrap();
        }
        let placed = self.truth.placed.last_key_value().map(|(index, _)| *index);
        self.truth.placed_upto = self.truth.placed_upto.max(placed);
        // The snapshot was stored, but the log was not purged up to it.
        if let Some((at, _)) = self.truth.checkpoint.clone()
            && self.truth.queued.purged.is_none_or(|purged| purged.index < at.index)
            && self.truth.queued.entries.get(&at.index).is_none_or(|entry| entry.id != at)
        {
            let number = self.truth.queue(QueuedOp::Purge(at));
            wal.purge(at, self.result_callback(number));
        }
    }

    pub fn wal(&self) -> Wal {
        self.manual.as_ref().expect("open").wal.clone()
    }

    pub fn manual(&mut self) -> &mut ManualWal {
        self.manual.as_mut().expect("open")
    }

    fn result_callback(&self, number: usize) -> DurableCallback {
        let acks = Arc::clone(&self.acks);
        Box::new(move |result| acks.lock().unwrap().push((number, result)))
    }

    fn is_failing(&self) -> bool {
        self.may_fail || self.disk.stopped()
    }

    pub fn collect_results(&mut self) {
        let may_fail = self.is_failing();
        if self.truth.collect_results(&self.acks, may_fail, self.full) {
            // Replacements of rejected entries must differ.
            self.term += 1;
        }
    }

    pub fn append(&mut self, sizes: &[usize]) {
        let mut entries = Vec::new();
        for (size, index) in sizes.iter().zip(self.truth.queued.next()..) {
            let id = LogId { term: self.term, index };
            let stream = match self.rng.below(STREAMS + 1) {
                0 => 0,
                n => self.streams[n as usize - 1],
            };
            let head = self.rng.below(60) as usize;
            let entry = entry(id, stream, head, *size);
            entries.push(entry);
        }
        let number = self.truth.queue_all(entries.iter().cloned().map(QueuedOp::Append));
        self.wal().append(entries, self.result_callback(number));
    }

    pub fn vote(&mut self) {
        let vote = Bytes::from(format!("vote {} {}", self.term, self.rng.below(1000)));
        let number = self.truth.queue(QueuedOp::Vote(vote.clone()));
        self.wal().save_vote(vote, self.result_callback(number));
    }

    /// Truncates above the placed entries, which are committed and never conflict.
    pub fn truncate(&mut self) {
        let placed = self.truth.placed.last_key_value().map(|(index, _)| *index);
        let committed = self.truth.committed.last_key_value().map(|(index, _)| *index);
        let floor = placed
            .max(committed)
            .max(self.truth.placed_upto)
            .max(self.truth.queued.purged.map(|purged| purged.index));
        let first = floor.map_or(0, |floor| floor + 1);
        let next = self.truth.queued.next();
        if first >= next {
            return;
        }
        let first = first + self.rng.below(next - first);
        let last = first.checked_sub(1);
        let number = self.truth.queue(QueuedOp::Truncate(last));
        self.wal().truncate_after(last, self.result_callback(number));
        self.term += 1;
    }

    /// Places up to `count` acknowledged entries.
    pub fn place(&mut self, count: u64) {
        self.collect_results();
        let wal = self.wal();
        for _ in 0..count {
            let index = self.truth.placed_upto.map_or(0, |placed_upto| placed_upto + 1);
            let Some(entry) = self.truth.durable.entries.get(&index).cloned() else { return };
            // A queued truncation may remove the entry.
            if self.truth.queued.entries.get(&index).map(|e| e.id) != Some(entry.id) {
                return;
            }
            let stays = self.streams.contains(&entry.stream) && !self.rng.one_in(6);
            let placement = stays.then(|| self.placement(entry.stream, index));
            match wal.place(index, placement) {
                Ok(()) => {}
                Err(_) if self.is_failing() => return,
                Err(error) => panic!("place {index}: {error}"),
            }
            self.truth.placed.insert(index, (entry, placement));
            self.truth.placed_upto = Some(index);
        }
    }

    fn placement(&mut self, stream: u64, index: u64) -> Placement {
        let placed = self.truth.placed.values().rev().filter_map(|(_, placement)| *placement);
        let last = placed.into_iter().find(|placement| placement.stream == stream);
        let first = last.map_or(0, |last| last.first + u64::from(last.count));
        let count = 1 + self.rng.below(5) as u32;
        Placement { stream, first, count, time: 10 * (index / 3) }
    }

    /// Commits a random entry: a majority may have it before this disk does.
    pub fn commit(&mut self) {
        let next = self.truth.queued.next();
        let first = self.truth.queued.first();
        if first == next {
            return;
        }
        let index = first + self.rng.below(next - first);
        let id = self.truth.queued.entries[&index].id;
        self.truth.commit(id);
        self.wal().set_committed(id);
    }

    pub fn checkpoint(&mut self) {
        if self.truth.checkpoint_open.is_some() {
            // The disk failed during the last checkpoint.
            return;
        }
        let Some(placed_upto) = self.truth.placed_upto else { return };
        let Some((entry, _)) = self.truth.placed.get(&placed_upto) else { return };
        if self.truth.checkpoint.as_ref().is_some_and(|(at, _)| at.index >= placed_upto) {
            return;
        }
        let len = self.rng.below(6000) as usize;
        let state = Bytes::from(vec![placed_upto as u8; len]);
        let checkpoint = (entry.id, state.clone());
        self.truth.checkpoint_open = Some(checkpoint.clone());
        match self.wal().checkpoint(checkpoint.0, state) {
            Ok(()) => {
                self.truth.checkpoint = Some(checkpoint);
                self.truth.checkpoint_open = None;
            }
            Err(Error::DiskFull { .. }) if self.full => self.truth.checkpoint_open = None,
            Err(error) => assert!(self.is_failing(), "checkpoint: {error}"),
        }
    }

    pub fn purge(&mut self) {
        let Some((at, _)) = self.truth.checkpoint.clone() else { return };
        let first = self.truth.queued.first();
        if at.index < first {
            return;
        }
        let index = at.index - self.rng.below(at.index - first + 1);
        let Some(upto) = self.truth.queued.entries.get(&index).map(|entry| entry.id) else {
            return;
        };
        let number = self.truth.queue(QueuedOp::Purge(upto));
        self.wal().purge(upto, self.result_callback(number));
    }

    /// Installs a snapshot of another replica without records. The log continues after it.
    pub fn install(&mut self) {
        // On a full disk, queued requests may be lost to the snapshot.
        if self.truth.checkpoint_open.is_some() || self.full {
            return;
        }
        let checkpoint = self.truth.checkpoint.as_ref().map_or(0, |(at, _)| at.index);
        let index = self.truth.queued.next().max(checkpoint) + self.rng.below(3);
        let at = LogId { term: self.term, index };
        let checkpoint = (at, Bytes::from_static(b"snapshot"));
        self.truth.checkpoint_open = Some(checkpoint.clone());
        match self.wal().checkpoint(at, checkpoint.1.clone()) {
            Ok(()) => {
                self.truth.checkpoint = Some(checkpoint);
                self.truth.checkpoint_open = None;
            }
            Err(Error::DiskFull { .. }) if self.full => {
                self.truth.checkpoint_open = None;
                // The install is retried; the entries before it no longer count.
                self.truth.placed_upto = Some(index);
                return;
            }
            Err(error) => {
                assert!(self.is_failing(), "checkpoint: {error}");
                return;
            }
        }
        self.truth.placed_upto = Some(index);
        let number = self.truth.queue(QueuedOp::Purge(at));
        self.wal().purge(at, self.result_callback(number));
    }

    /// Stages entries of these sizes for a snapshot. They survive the process.
    pub fn retain_with(&mut self, sizes: &[usize]) {
        let after = self.truth.placed_upto.unwrap_or(0);
        let Some(mut writer) = self.expect_unless_failing(self.wal().cold_writer()) else { return };
        let mut last = after + 1000;
        for size in sizes {
            last += 1;
            let id = LogId { term: self.term, index: last };
            let Entry { head, payload, .. } = entry(id, 99, 10, *size);
            let placement = Placement { stream: 99, first: last, count: 1, time: last };
            if self
                .expect_unless_failing(writer.write(LiveEntry { id, placement, head, payload }))
                .is_none()
            {
                return;
            }
        }
        let Some(mut cold) = self.expect_unless_failing(writer.finish()) else { return };
        self.staged.push(Some((after, last)));
        if self.expect_unless_failing(self.wal().retain(after, &mut cold)).is_some() {
            self.staged = vec![Some((after, last))];
        }
    }

    /// Installs a snapshot with entries of these sizes that streams still need.
    pub fn install_with(&mut self, sizes: &[usize]) {
        // Entries placed here are equal on the other replica.
        if self.truth.checkpoint_open.is_some() || self.full || self.disk.stopped() {
            return;
        }
        self.collect_results();
        let placed = self.truth.placed.last_key_value().map(|(index, _)| *index);
        if self.truth.placed_upto < placed {
            return;
        }
        let Some(mut writer) = self.expect_unless_failing(self.wal().cold_writer()) else { return };
        let mut index = self.truth.placed_upto.map_or(1, |placed_upto| placed_upto + 1);
        for size in sizes {
            index += self.rng.below(3);
            let stream = self.streams[self.rng.below(STREAMS) as usize];
            let made = entry(LogId { term: self.term, index }, stream, 10, *size);
            let placement = self.next_placement(stream, index);
            let (id, head, payload) = (made.id, made.head.clone(), made.payload.clone());
            self.truth.arriving.insert(index, (made, Some(placement)));
            if self
                .expect_unless_failing(writer.write(LiveEntry { id, placement, head, payload }))
                .is_none()
            {
                return;
            }
            index += 1;
        }
        if self.rng.one_in(8) {
            // Discards the prepared entries.
            self.truth.arriving.clear();
            return;
        }
        let Some(mut cold) = self.expect_unless_failing(writer.finish()) else { return };
        let at = LogId { term: self.term, index: index + self.rng.below(3) };
        let checkpoint = (at, Bytes::from_static(b"snapshot with records"));
        self.truth.checkpoint_open = Some(checkpoint.clone());
        let number = self.truth.queue(QueuedOp::Purge(at));
        self.staged.push(None);
        let installed = self.wal().install(at, checkpoint.1.clone(), &mut cold);
        if self.expect_unless_failing(installed).is_none() {
            return;
        }
        self.staged = vec![None];
        self.truth.checkpoint = Some(checkpoint);
        self.truth.checkpoint_open = None;
        let arrived = std::mem::take(&mut self.truth.arriving);
        self.truth.placed.extend(arrived);
        self.truth.placed_upto = Some(at.index);
        self.term += 1;
        // As Raft does, although the install has purged already.
        self.wal().purge(at, self.result_callback(number));
    }

    /// Unwraps a result, unless the disk has stopped or may fail.
    fn expect_unless_failing<T>(&self, result: Result<T, Error>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                assert!(self.is_failing(), "{error}");
                None
            }
        }
    }

    /// Returns the next placement in a stream, after placed and arriving entries.
    fn next_placement(&mut self, stream: u64, index: u64) -> Placement {
        let arriving = self.truth.arriving.values().rev().filter_map(|(_, placement)| *placement);
        let before = arriving.into_iter().find(|placement| placement.stream == stream);
        let mut placement = self.placement(stream, index);
        if let Some(before) = before {
            placement.first = before.first + u64::from(before.count);
        }
        placement
    }

    /// Purges all entries that the checkpoint covers.
    pub fn purge_all(&mut self) {
        let Some((at, _)) = self.truth.checkpoint.clone() else { return };
        if self.truth.queued.entries.get(&at.index).is_some_and(|entry| entry.id == at) {
            let number = self.truth.queue(QueuedOp::Purge(at));
            self.wal().purge(at, self.result_callback(number));
        }
    }

    /// Trims all streams but the first to their ends.
    pub fn trim_but_one(&mut self) {
        let kept = self.streams[0];
        let ends: Vec<(u64, u64)> = self
            .truth
            .streams()
            .iter()
            .filter(|(stream, _)| **stream != kept)
            .filter_map(|(stream, rows)| {
                rows.last().map(|(_, last)| (*stream, last.first + u64::from(last.count)))
            })
            .collect();
        for (stream, end) in ends {
            self.truth.trims.insert(stream, end);
            self.wal().trim(stream, end);
        }
    }

    /// Trims every stream to its end.
    pub fn trim_all(&mut self) {
        let streams = self.truth.streams();
        let lasts = streams.iter().filter_map(|(stream, rows)| Some((*stream, rows.last()?.1)));
        let ends: Vec<(u64, u64)> =
            lasts.map(|(stream, last)| (stream, last.first + u64::from(last.count))).collect();
        for (stream, end) in ends {
            self.truth.trims.insert(stream, end);
            self.wal().trim(stream, end);
        }
    }

    pub fn trim(&mut self) {
        let streams = self.truth.streams();
        let mut ends = streams.iter().filter_map(|(stream, rows)| {
            rows.last().map(|(_, last)| (*stream, last.first + u64::from(last.count)))
        });
        let Some((stream, end)) = ends.nth(self.rng.below(STREAMS) as usize) else { return };
        let old = self.truth.trims.get(&stream).copied().unwrap_or(0);
        // Often trims everything, so that segments become free.
        let position = if self.rng.one_in(2) { end } else { old + self.rng.below(end - old + 1) };
        self.truth.trims.insert(stream, position);
        self.wal().trim(stream, position);
    }

    pub fn drop_stream(&mut self) {
        let at = self.rng.below(STREAMS) as usize;
        let stream = std::mem::replace(&mut self.streams[at], self.next_stream);
        self.next_stream += 1;
        self.truth.dropped.insert(stream);
        self.wal().drop_stream(stream);
    }

    /// Loses power with requests in flight and reopens the log.
    pub fn crash(&mut self) {
        self.drop_log();
        let crash = match self.rng.below(6) {
            0 => Crash::KeepAll,
            1 => Crash::LoseAll,
            _ => Crash::Seeded(self.rng.seed()),
        };
        self.disk.crash(crash);
        self.disk = self.disk.reopen();
        self.may_fail = false;
        // The next leader has a new term.
        self.term += 1;
        self.open();
    }

    /// Closes cleanly and reopens: nothing may be missing.
    pub fn close(&mut self) {
        self.disk.set_free_bytes(None);
        self.manual().idle();
        self.manual().idle();
        self.collect_results();
        assert!(self.truth.open.is_empty(), "operations never ended");
        self.drop_log();
        // Unsynced data is irrelevant after a clean close.
        self.disk.crash(Crash::LoseAll);
        self.disk = self.disk.reopen();
        self.open();
    }

    pub fn settle(&mut self) {
        self.manual().settle();
        self.collect_results();
    }

    pub fn check(&mut self) {
        self.disk.set_free_bytes(None);
        self.settle();
        self.manual().idle();
        self.collect_results();
        if self.disk.stopped() {
            return;
        }
        self.truth.check(&self.wal(), true);
        self.check_cached();
    }

    /// Checks that non-blocking reads return the same bytes or nothing.
    fn check_cached(&mut self) {
        let (first, next) = (self.truth.queued.first(), self.truth.queued.next());
        if first == next {
            return;
        }
        let from = first + self.rng.below(next - first);
        let got = self.wal().read(from..next, 5000, ReadMode::CachedOnly).unwrap();
        for (got, wanted) in got.iter().flatten().zip(self.truth.queued.entries.range(from..)) {
            assert!(crate::common::same_entry(got, wanted.1), "a cached read differs");
        }
    }

    fn run_action(&mut self) {
        let action = self.rng.below(100);
        self.action_log.push(format!("{action}@{}", self.disk.changes()));
        if self.verbose {
            println!("{action} at change {}: {:?}", self.disk.changes(), self.wal().state());
        }
        match action {
            0..30 => {
                let count = 1 + self.rng.below(if self.full { 2 } else { 4 });
                let sizes: Vec<usize> = (0..count).map(|_| self.size()).collect();
                self.append(&sizes);
            }
            30..36 => self.vote(),
            36..41 => self.truncate(),
            41..52 => {
                let count = 1 + self.rng.below(8);
                self.place(count);
            }
            52..55 => self.commit(),
            55..60 => self.checkpoint(),
            60..65 => self.purge(),
            65..69 => self.trim(),
            69 if self.rng.one_in(2) => self.install(),
            69 => {
                let count = self.rng.below(6);
                let sizes: Vec<usize> = (0..count).map(|_| self.size()).collect();
                self.install_with(&sizes);
            }
            70 => self.drop_stream(),
            71 => self.resize_disk(),
            72..80 => {
                self.manual().step_writer();
                // A rejected append must be known before the next one.
                self.collect_results();
            }
            80..85 => {
                self.manual().step_keeper();
            }
            85..91 => self.settle(),
            91..94 => {
                self.manual().idle();
                self.collect_results();
            }
            94..96 => {
                let at = self.disk.changes() + self.rng.below(12);
                self.disk.stop_at_change(Some(at));
            }
            96..99 => self.crash(),
            _ => self.check(),
        }
    }

    fn size(&mut self) -> usize {
        match self.rng.below(10) {
            0 => 0,
            1..6 => self.rng.below(300) as usize,
            6..9 => self.rng.below(4000) as usize,
            _ => self.rng.below(20_000) as usize,
        }
    }

    /// Runs one sequence: random actions, a crash, and a final check.
    pub fn sequence(&mut self, actions: u64) {
        self.open();
        for _ in 0..actions {
            self.run_action();
            if self.disk.stopped() && self.rng.one_in(3) {
                self.crash();
            }
        }
        self.crash();
        self.check();
        if self.rng.one_in(4) {
            self.close();
            self.check();
            self.drop_log();
            let findings = verify(&self.disk);
            assert!(findings.is_empty(), "found in an undamaged log: {findings:?}");
        }
    }
}

fn run(
    test: &str,
    salt: u64,
    sequences: u64,
    actions: u64,
    options: impl Fn(&mut TestRng) -> Options,
) {
    let base = seed(test);
    let mut rewritten = 0;
    let only: Option<u64> = std::env::var("HELIX_SEQUENCE").ok().map(|n| n.parse().unwrap());
    for n in 0..sequences * rounds() {
        if only.is_some_and(|only| only != n) {
            continue;
        }
        let mut rng = TestRng::new(base ^ salt ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let options = options(&mut rng);
        let _context = PrintOnPanic(format!("{test}: HELIX_SEED={base} HELIX_SEQUENCE={n}"));
        let mut driver = ModelDriver::new(rng.seed(), options);
        // With a selected sequence, prints its actions.
        driver.verbose = only.is_some();
        driver.sequence(actions);
        driver.drop_log();
        rewritten += u64::from(driver.rewritten > 0);
    }
    println!("{test}: compactions in {rewritten} sequences");
    assert!(
        only.is_some() || rewritten > sequences / 200,
        "{rewritten} sequences with compactions"
    );
}

fn varied(rng: &mut TestRng) -> Options {
    const PREPARATIONS: [Preparation; 3] =
        [Preparation::Auto, Preparation::Zero, Preparation::Allocate];
    Options {
        segment_bytes: [64 << 10, 80 << 10, 128 << 10][rng.below(3) as usize],
        group_bytes: [4 << 10, 8 << 10, 16 << 10][rng.below(3) as usize],
        tail_bytes: [0, 4 << 10, 1 << 20][rng.below(3) as usize],
        ready_segments: rng.below(3) as usize,
        preparation: PREPARATIONS[rng.below(3) as usize],
        footer_cache_bytes: [0, 8 << 10, 1 << 20][rng.below(3) as usize],
        ..small_options()
    }
}

// Two tests, so that two cores share the work.

#[test]
fn short_random_sequences_agree_with_the_model() {
    run("short sequences", 1, 14_000, 16, varied);
}

#[test]
fn long_random_sequences_agree_with_the_model() {
    run("long sequences", 2, 6_000, 40, varied);
}

#[test]
fn equal_seeds_give_equal_disk_operations() {
    let base = seed("determinism");
    let trace = |seed: u64| -> (Vec<DiskOperation>, Vec<String>) {
        let mut rng = TestRng::new(seed);
        let options = varied(&mut rng);
        let mut driver = ModelDriver::new(rng.seed(), options);
        driver.disk.record(true);
        driver.sequence(60);
        (driver.disk.trace(), driver.action_log)
    };
    for n in 0..40 {
        let (a, b) = (trace(base + n), trace(base + n));
        assert_eq!(a.1, b.1, "different actions");
        let differs = a.0.iter().zip(&b.0).position(|(a, b)| a != b);
        assert_eq!(differs, None, "seed {}", base + n);
        assert_eq!(a.0.len(), b.0.len());
    }
}

#[test]
fn memory_log_agrees_with_the_model() {
    let base = seed("memory");
    for n in 0..500 {
        let _context = PrintOnPanic(format!("memory: HELIX_SEED={base}, sequence {n}"));
        let mut driver = ModelDriver::new(base + n, small_options());
        let wal = Wal::open_memory(driver.options.clone());
        driver.memory_sequence(&wal);
    }
}

impl ModelDriver {
    /// Runs a sequence on a log in memory, whose callbacks run before `append` returns.
    fn memory_sequence(&mut self, wal: &Wal) {
        for _ in 0..60 {
            match self.rng.below(10) {
                0..4 => self.memory_append(wal),
                4 => {
                    let vote = Bytes::from(self.rng.seed().to_string());
                    let number = self.truth.queue(QueuedOp::Vote(vote.clone()));
                    wal.save_vote(vote, self.result_callback(number));
                }
                5..7 => self.memory_place(wal),
                7 => self.memory_checkpoint(wal),
                8 => {
                    let next = self.truth.queued.next();
                    if self.truth.placed.len() as u64 == next || next == 0 {
                        continue;
                    }
                    let last = self.truth.placed.last_key_value().map(|(index, _)| *index);
                    let number = self.truth.queue(QueuedOp::Truncate(last));
                    wal.truncate_after(last, self.result_callback(number));
                    self.term += 1;
                }
                _ => self.memory_trim(wal),
            }
            self.truth.collect_results(&self.acks, false, false);
            self.truth.check(wal, true);
        }
    }

    fn memory_append(&mut self, wal: &Wal) {
        let id = LogId { term: self.term, index: self.truth.queued.next() };
        let stream = self.rng.below(STREAMS + 1);
        let entry = entry(id, stream, 20, self.rng.below(9000) as usize);
        let number = self.truth.queue(QueuedOp::Append(entry.clone()));
        wal.append(vec![entry], self.result_callback(number));
        assert_eq!(self.acks.lock().unwrap().len(), 1, "done before it returns");
    }

    fn memory_place(&mut self, wal: &Wal) {
        let index = self.truth.placed_upto.map_or(0, |placed_upto| placed_upto + 1);
        let Some(entry) = self.truth.durable.entries.get(&index).cloned() else { return };
        let placement = (entry.stream > 0).then(|| self.placement(entry.stream, index));
        wal.place(index, placement).unwrap();
        self.truth.placed.insert(index, (entry, placement));
        self.truth.placed_upto = Some(index);
    }

    fn memory_checkpoint(&mut self, wal: &Wal) {
        let Some(placed_upto) = self.truth.placed_upto else { return };
        let at = self.truth.placed[&placed_upto].0.id;
        if self.truth.queued.purged.is_some_and(|purged| purged >= at) {
            return;
        }
        wal.checkpoint(at, Bytes::new()).unwrap();
        let number = self.truth.queue(QueuedOp::Purge(at));
        wal.purge(at, self.result_callback(number));
    }

    fn memory_trim(&mut self, wal: &Wal) {
        let Some((stream, rows)) = self.truth.streams().pop_last() else { return };
        let Some((_, last)) = rows.last() else { return };
        let position = last.first;
        self.truth.trims.insert(stream, position);
        wal.trim(stream, position);
    }
}

/// A caller that waits for the last callback of a group has then waited for all of them.
#[test]
fn callbacks_of_a_group_run_newest_first() {
    let mut driver = ModelDriver::new(1, small_options());
    driver.open();
    for _ in 0..5 {
        driver.append(&[10]);
    }
    driver.manual().settle();
    let order: Vec<usize> = driver.acks.lock().unwrap().iter().map(|(n, _)| *n).collect();
    assert_eq!(order, [5, 4, 3, 2, 1]);
}

#[test]
fn reads_outside_the_log_are_errors_that_say_so() {
    let mut driver = ModelDriver::new(1, small_options());
    driver.open();
    for _ in 0..6 {
        driver.append(&[100]);
        driver.settle();
    }
    driver.place(6);
    driver.checkpoint();
    let id = driver.truth.durable.entries[&2].id;
    let number = driver.truth.queue(QueuedOp::Purge(id));
    driver.wal().purge(id, driver.result_callback(number));
    driver.settle();
    let wal = driver.wal();
    assert!(matches!(
        wal.read(1..4, 1000, ReadMode::Blocking),
        Err(Error::Trimmed { asked: 1, first: 3 })
    ));
    assert_eq!(wal.log_id(1, ReadMode::Blocking).unwrap(), Some(None));
    assert_eq!(wal.log_id(6, ReadMode::Blocking).unwrap(), Some(None));
    // Streams are served below the purge point too.
    driver.truth.check(&wal, true);
}
