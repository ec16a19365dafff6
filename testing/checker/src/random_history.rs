//! Random histories of a correct log, and single corruptions of them, to test the checker.
//! Like a real run they have streams, unary appends, unknown outcomes, lagging replicas and trims.

use std::collections::{BTreeMap, VecDeque};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use super::{BatchKey, HistoryEvent, HistoryLine, ViolationClass};

const PARTITIONS: u32 = 2;
const REPLICAS: u64 = 3;

/// First reader id of final reads.
const FINALS: u32 = 1000;

struct Writer {
    producer: u32,
    partition: u32,
    next: u64,
    stream: Option<u32>,
    /// Batches without an outcome, oldest first: records, and the offset once they are applied.
    pending: VecDeque<(BatchKey, u32, Option<u64>)>,
}

struct Model {
    rng: StdRng,
    events: Vec<HistoryEvent>,
    logs: BTreeMap<u32, Vec<(u64, BatchKey, u32)>>,
    /// Trimmed batches by partition.
    trimmed: BTreeMap<u32, usize>,
    writers: Vec<Writer>,
    /// Abandoned unary appends that are not applied yet: they may still be.
    strays: Vec<(BatchKey, u32, u32)>,
    /// Batches read so far, by reader and partition.
    readers: BTreeMap<(u32, u32), usize>,
    watermarks: BTreeMap<(u32, u32), u64>,
    session: u32,
    streams: u32,
    is_down: bool,
}

/// Generates a correct history.
pub(super) fn correct_history(seed: u64, steps: usize) -> Vec<HistoryEvent> {
    let mut model = Model::new(seed);
    for _ in 0..steps {
        model.step();
    }
    model.settle();
    model.events
}

pub(super) fn lines(events: &[HistoryEvent]) -> Vec<HistoryLine> {
    events.iter().map(|event| HistoryLine { at_us: 0, event: event.clone() }).collect()
}

impl Model {
    fn new(seed: u64) -> Self {
        let writer = |producer: u32| Writer {
            producer,
            partition: producer % PARTITIONS,
            next: 0,
            stream: (producer % 4 >= 2).then_some(producer),
            pending: VecDeque::new(),
        };
        let mut model = Self {
            rng: StdRng::seed_from_u64(seed),
            events: Vec::new(),
            logs: (0..PARTITIONS).map(|partition| (partition, Vec::new())).collect(),
            trimmed: (0..PARTITIONS).map(|partition| (partition, 0)).collect(),
            writers: (0..8).map(writer).collect(),
            strays: Vec::new(),
            readers: BTreeMap::new(),
            watermarks: BTreeMap::new(),
            session: 0,
            streams: 100,
            is_down: false,
        };
        for reader in 0..3 {
            for partition in 0..PARTITIONS {
                model.readers.insert((reader, partition), 0);
                model.events.push(HistoryEvent::Opened { reader, partition, offset: 0 });
            }
        }
        model
    }

    fn end(&self, partition: u32) -> u64 {
        let last = self.logs[&partition].last();
        last.map_or(0, |(offset, _, records)| offset + u64::from(*records))
    }

    fn apply(&mut self, partition: u32, key: BatchKey, records: u32) -> u64 {
        let offset = self.end(partition);
        self.logs.get_mut(&partition).unwrap().push((offset, key, records));
        offset
    }

    fn step(&mut self) {
        let at = self.rng.random_range(0..self.writers.len());
        match self.rng.random_range(0..100) {
            0..30 => self.invoke(at),
            30..50 => self.apply_next(at),
            50..68 => self.ack(at),
            68..71 => self.give_up(at),
            71..73 => self.apply_stray(),
            73..93 => self.read(),
            93..96 => self.report_watermark(),
            96..98 => self.probe_latest(),
            98 => self.trim(),
            _ => self.flip_quorum(),
        }
    }

    fn invoke(&mut self, at: usize) {
        let records = self.rng.random_range(1..4);
        let writer = &mut self.writers[at];
        let limit = if writer.stream.is_some() { 4 } else { 1 };
        if writer.pending.len() >= limit {
            return;
        }
        let key = BatchKey { producer: writer.producer, number: writer.next };
        writer.next += 1;
        writer.pending.push_back((key, records, None));
        let (partition, stream) = (writer.partition, writer.stream);
        self.events.push(HistoryEvent::Invoked { key, partition, records, stream });
    }

    fn apply_next(&mut self, at: usize) {
        let writer = &self.writers[at];
        let next = writer.pending.iter().position(|(_, _, offset)| offset.is_none());
        let Some(next) = next.filter(|_| !self.is_down) else { return };
        let (key, records, _) = writer.pending[next];
        let offset = self.apply(writer.partition, key, records);
        self.writers[at].pending[next].2 = Some(offset);
    }

    fn ack(&mut self, at: usize) {
        let pending = &mut self.writers[at].pending;
        if let Some((key, _, Some(offset))) = pending.front().copied() {
            pending.pop_front();
            self.events.push(HistoryEvent::Acked { key, offset });
        }
    }

    /// Ends all batches in flight without an ack. A stream continues as a new one.
    fn give_up(&mut self, at: usize) {
        let pending: Vec<_> = self.writers[at].pending.drain(..).collect();
        let (partition, stream) = (self.writers[at].partition, self.writers[at].stream);
        for (key, records, offset) in pending {
            if offset.is_none() && self.rng.random_bool(0.5) {
                self.events.push(HistoryEvent::Failed { key });
                continue;
            }
            self.events.push(HistoryEvent::Unknown { key });
            if offset.is_none() && stream.is_none() {
                self.strays.push((key, partition, records));
            }
        }
        if stream.is_some() {
            self.streams += 1;
            self.writers[at].stream = Some(self.streams);
        }
    }

    fn apply_stray(&mut self) {
        if let Some((key, partition, records)) = self.strays.pop().filter(|_| !self.is_down) {
            self.apply(partition, key, records);
        }
    }

    fn read(&mut self) {
        let places: Vec<_> = self.readers.keys().copied().collect();
        let by = *places.choose(&mut self.rng).unwrap();
        let next = self.readers[&by];
        let Some((offset, key, records)) = self.logs[&by.1].get(next).copied() else { return };
        if next < self.trimmed[&by.1] {
            let (reader, partition) = by;
            self.events.push(HistoryEvent::OutOfRange { reader, partition, offset });
            let offset = self.start(partition);
            self.events.push(HistoryEvent::Starts { partition, offset });
            self.events.push(HistoryEvent::Opened { reader, partition, offset });
            self.readers.insert(by, self.trimmed[&by.1]);
            return;
        }
        *self.readers.get_mut(&by).unwrap() += 1;
        self.events.push(HistoryEvent::Read {
            reader: by.0,
            partition: by.1,
            offset,
            key,
            records,
        });
    }

    fn report_watermark(&mut self) {
        let partition = self.rng.random_range(0..PARTITIONS);
        if self.rng.random_bool(0.2) {
            self.session += 1;
        }
        let low = self.watermarks.get(&(self.session, partition)).copied().unwrap_or(0);
        let high_watermark = self.rng.random_range(low..=self.end(partition));
        self.watermarks.insert((self.session, partition), high_watermark);
        let session = self.session;
        self.events.push(HistoryEvent::Watermark { session, partition, high_watermark });
    }

    fn probe_latest(&mut self) {
        let partition = self.rng.random_range(0..PARTITIONS);
        self.events.push(HistoryEvent::LatestAsked { probe: 0, partition });
        if self.rng.random_bool(0.2) {
            return;
        }
        let low = self.end(partition);
        for _ in 0..self.rng.random_range(0..4) {
            let at = self.rng.random_range(0..self.writers.len());
            self.apply_next(at);
            self.ack(at);
        }
        let offset = self.rng.random_range(low..=self.end(partition));
        self.events.push(HistoryEvent::Latest { probe: 0, partition, offset });
    }

    /// Returns the log start of a partition.
    fn start(&self, partition: u32) -> u64 {
        let first = self.logs[&partition].get(self.trimmed[&partition]);
        first.map_or_else(|| self.end(partition), |(offset, _, _)| *offset)
    }

    /// Trims to a random batch, with or without an ack.
    fn trim(&mut self) {
        let partition = self.rng.random_range(0..PARTITIONS);
        if self.is_down {
            return;
        }
        let trimmed = self.rng.random_range(self.trimmed[&partition]..=self.logs[&partition].len());
        self.trimmed.insert(partition, trimmed);
        let offset = self.start(partition);
        self.events.push(HistoryEvent::MayTrim { partition, offset });
        if self.rng.random_bool(0.7) {
            self.events.push(HistoryEvent::Trimmed { partition, offset });
        }
    }

    fn flip_quorum(&mut self) {
        self.events.push(if self.is_down {
            HistoryEvent::QuorumBack
        } else {
            HistoryEvent::QuorumLost
        });
        self.is_down = !self.is_down;
    }

    fn settle(&mut self) {
        if self.is_down {
            self.flip_quorum();
        }
        for at in 0..self.writers.len() {
            while self.writers[at].pending.iter().any(|(_, _, offset)| offset.is_none()) {
                self.apply_next(at);
            }
            while !self.writers[at].pending.is_empty() {
                self.ack(at);
            }
        }
        for (reader, replica) in (FINALS..).zip(1..=REPLICAS) {
            for (partition, log) in &self.logs {
                let (partition, round) = (*partition, 1);
                self.events.push(HistoryEvent::FinalOpened { reader, partition, round, replica });
                let offset = self.start(partition);
                if offset > 0 {
                    self.events.push(HistoryEvent::FinalStarts { reader, partition, offset });
                }
                for &(offset, key, records) in &log[self.trimmed[&partition]..] {
                    self.events.push(HistoryEvent::Read {
                        reader,
                        partition,
                        offset,
                        key,
                        records,
                    });
                }
                let end = log.last().map_or(0, |(at, _, records)| at + u64::from(*records));
                self.events.push(HistoryEvent::FinalEnded {
                    reader,
                    partition,
                    high_watermark: end,
                });
            }
        }
    }
}

/// Corrupts a history once. Returns `None` if it has no event that can be corrupted so.
pub(super) fn corrupt(
    events: &mut Vec<HistoryEvent>,
    class: ViolationClass,
    rng: &mut StdRng,
) -> Option<()> {
    match class {
        ViolationClass::AckedLost => drop_acked(events, rng),
        ViolationClass::Duplicated => duplicate_batch(events, rng),
        ViolationClass::NotDense => drop_read(events, rng),
        ViolationClass::Reordered => swap_acks(events, rng),
        ViolationClass::Diverged => swap_keys(events, rng),
        ViolationClass::Unwritten => {
            let key = BatchKey { producer: 99, number: 7 };
            let at = pick(events, rng, |event| matches!(event, HistoryEvent::Read { .. }))?;
            if let HistoryEvent::Read { key: there, .. } = &mut events[at] {
                *there = key;
            }
            Some(())
        }
        ViolationClass::Torn => {
            let is_long =
                |event: &HistoryEvent| matches!(event, HistoryEvent::Read { records: 2.., .. });
            let at = pick(events, rng, is_long)?;
            if let HistoryEvent::Read { records, .. } = &mut events[at] {
                *records -= 1;
            }
            Some(())
        }
        ViolationClass::FailedAppeared => {
            let at = pick(events, rng, |event| matches!(event, HistoryEvent::Acked { .. }))?;
            let HistoryEvent::Acked { key, .. } = events[at] else { return None };
            // A batch that was trimmed before a read cannot be detected.
            let is_read =
                |it: &&HistoryEvent| matches!(it, HistoryEvent::Read { key: of, .. } if *of == key);
            events.iter().find(is_read)?;
            events[at] = HistoryEvent::Failed { key };
            Some(())
        }
        ViolationClass::WatermarkBack => {
            let is_some = |event: &HistoryEvent| {
                matches!(event, HistoryEvent::Watermark { high_watermark: 1.., .. })
            };
            let at = pick(events, rng, is_some)?;
            let HistoryEvent::Watermark { session, partition, high_watermark } = events[at] else {
                return None;
            };
            let high_watermark = rng.random_range(0..high_watermark);
            events.insert(at + 1, HistoryEvent::Watermark { session, partition, high_watermark });
            Some(())
        }
        ViolationClass::LatestStale => make_latest_stale(events, rng),
        ViolationClass::AckedWithoutQuorum => lose_quorum(events, rng),
        ViolationClass::ReplicasDiffer => truncate_one_replica(events, rng),
        ViolationClass::Vanished => {
            let at = pick(events, rng, |event| matches!(event, HistoryEvent::OutOfRange { .. }))?;
            let HistoryEvent::OutOfRange { partition, .. } = events[at] else { return None };
            forbid_trims(events, partition)
        }
        ViolationClass::TrimBroken => {
            let at = pick(events, rng, |event| matches!(event, HistoryEvent::FinalStarts { .. }))?;
            let HistoryEvent::FinalStarts { partition, .. } = events[at] else { return None };
            forbid_trims(events, partition)
        }
        _ => None,
    }
}

/// Removes all trims of a partition, so that its missing front is a violation.
fn forbid_trims(events: &mut Vec<HistoryEvent>, partition_wanted: u32) -> Option<()> {
    events.retain(|event| match event {
        HistoryEvent::MayTrim { partition, .. } | HistoryEvent::Trimmed { partition, .. } => {
            *partition != partition_wanted
        }
        _ => true,
    });
    Some(())
}

fn pick(
    events: &[HistoryEvent],
    rng: &mut StdRng,
    is: impl Fn(&HistoryEvent) -> bool,
) -> Option<usize> {
    let places: Vec<_> = (0..events.len()).filter(|at| is(&events[*at])).collect();
    places.choose(rng).copied()
}

fn is_final(event: &HistoryEvent) -> bool {
    matches!(event, HistoryEvent::Read { reader: FINALS.., .. })
}

/// Truncates every final read before an acked batch.
fn drop_acked(events: &mut Vec<HistoryEvent>, rng: &mut StdRng) -> Option<()> {
    let at = pick(events, rng, |event| matches!(event, HistoryEvent::Acked { .. }))?;
    let HistoryEvent::Acked { key, offset: cut } = events[at] else { return None };
    let partition_wanted = partition_of(events, key)?;
    let is_kept = |event: &HistoryEvent| {
        is_final(event) && matches!(event, HistoryEvent::Read { key: it, .. } if *it == key)
    };
    events.iter().find(|event| is_kept(event))?;
    events.retain(|event| {
        !matches!(event, HistoryEvent::Read { partition, offset, .. }
            if is_final(event) && *partition == partition_wanted && *offset >= cut)
    });
    for event in events {
        if let HistoryEvent::FinalEnded { partition, high_watermark, .. } = event
            && *partition == partition_wanted
        {
            *high_watermark = (*high_watermark).min(cut);
        }
    }
    Some(())
}

fn partition_of(events: &[HistoryEvent], wanted: BatchKey) -> Option<u32> {
    events.iter().find_map(|event| match event {
        HistoryEvent::Invoked { key, partition, .. } if *key == wanted => Some(*partition),
        _ => None,
    })
}

/// Adds a second copy of a batch to the end of one final read.
fn duplicate_batch(events: &mut Vec<HistoryEvent>, rng: &mut StdRng) -> Option<()> {
    let at = pick(events, rng, is_final)?;
    let HistoryEvent::Read { reader, partition, key, records, .. } = events[at] else {
        return None;
    };
    let end = (at..events.len()).find(|at| {
        matches!(
            events[*at],
            HistoryEvent::FinalEnded { reader: by, partition: of, .. }
                if (by, of) == (reader, partition)
        )
    })?;
    let HistoryEvent::FinalEnded { high_watermark: offset, .. } = events[end] else { return None };
    events[end] =
        HistoryEvent::FinalEnded { reader, partition, high_watermark: offset + u64::from(records) };
    events.insert(end, HistoryEvent::Read { reader, partition, offset, key, records });
    Some(())
}

/// Removes a read that is followed by another one of the same reader.
fn drop_read(events: &mut Vec<HistoryEvent>, rng: &mut StdRng) -> Option<()> {
    let at = pick(events, rng, |event| matches!(event, HistoryEvent::Read { .. }))?;
    let HistoryEvent::Read { reader, partition, .. } = events[at] else { return None };
    let next = events[at + 1..].iter().find(|event| {
        matches!(event, HistoryEvent::Read { reader: by, partition: partition_wanted, .. }
            | HistoryEvent::Opened { reader: by, partition: partition_wanted, .. }
            if (*by, *partition_wanted) == (reader, partition))
    });
    let is_followed = matches!(next, Some(HistoryEvent::Read { .. }));
    is_followed.then(|| {
        events.remove(at);
    })
}

/// Swaps two batches of one producer in all events but their invocations.
fn swap_acks(events: &mut [HistoryEvent], rng: &mut StdRng) -> Option<()> {
    let acked = events.iter().filter_map(|event| match event {
        HistoryEvent::Acked { key, .. } => Some(*key),
        _ => None,
    });
    let acked: Vec<_> = acked.collect();
    let size = |events: &[HistoryEvent], wanted: BatchKey| {
        events.iter().find_map(|event| match event {
            HistoryEvent::Invoked { key, records, .. } if *key == wanted => Some(*records),
            _ => None,
        })
    };
    let first = *acked.choose(rng)?;
    // The second was in flight before the first was acked; otherwise its ack would precede it.
    let at = events
        .iter()
        .position(|event| matches!(event, HistoryEvent::Acked { key, .. } if *key == first))?;
    let second = *acked.iter().find(|other| {
        other.producer == first.producer
            && other.number > first.number
            && size(&events[..at], **other) == size(events, first)
    })?;
    for event in events {
        if let HistoryEvent::Acked { key, .. } | HistoryEvent::Read { key, .. } = event {
            *key = match *key {
                key if key == first => second,
                key if key == second => first,
                key => key,
            };
        }
    }
    Some(())
}

/// Replaces the batch of one read by another one of the partition.
fn swap_keys(events: &mut [HistoryEvent], rng: &mut StdRng) -> Option<()> {
    let at = pick(events, rng, |event| matches!(event, HistoryEvent::Read { .. }))?;
    let HistoryEvent::Read { partition, key, .. } = events[at] else { return None };
    let other = events[..at].iter().rev().find_map(|event| match event {
        HistoryEvent::Invoked { key: other, partition: partition_wanted, .. }
            if *partition_wanted == partition && *other != key =>
        {
            Some(*other)
        }
        _ => None,
    })?;
    let HistoryEvent::Read { key, .. } = &mut events[at] else { return None };
    *key = other;
    Some(())
}

/// Makes one "latest" response stale: lower than an offset read before the request.
fn make_latest_stale(events: &mut [HistoryEvent], rng: &mut StdRng) -> Option<()> {
    let at = pick(events, rng, |event| matches!(event, HistoryEvent::Latest { .. }))?;
    let HistoryEvent::Latest { probe, partition, offset } = events[at] else { return None };
    let request = events[..at].iter().rposition(|event| {
        matches!(event, HistoryEvent::LatestAsked { probe: by, partition: partition_wanted }
            if (*by, *partition_wanted) == (probe, partition))
    })?;
    let known = events[..request].iter().filter_map(|event| match event {
        HistoryEvent::Read { partition: partition_wanted, offset, records, .. }
            if *partition_wanted == partition =>
        {
            Some(offset + u64::from(*records))
        }
        _ => None,
    });
    let floor = known.max().filter(|floor| *floor > 0 && *floor <= offset)?;
    events[at] = HistoryEvent::Latest { probe, partition, offset: rng.random_range(0..floor) };
    Some(())
}

/// Claims that a majority was down while a batch was invoked and acked.
fn lose_quorum(events: &mut Vec<HistoryEvent>, rng: &mut StdRng) -> Option<()> {
    let acked = pick(events, rng, |event| matches!(event, HistoryEvent::Acked { .. }))?;
    let HistoryEvent::Acked { key: wanted, .. } = events[acked] else { return None };
    let invoked = events
        .iter()
        .position(|event| matches!(event, HistoryEvent::Invoked { key, .. } if *key == wanted))?;
    events.retain(|event| !matches!(event, HistoryEvent::QuorumLost | HistoryEvent::QuorumBack));
    let invoked = invoked.min(events.len());
    events.insert(invoked.saturating_sub(invoked / 2), HistoryEvent::QuorumLost);
    Some(())
}

/// Removes the last batch of one replica's final read.
fn truncate_one_replica(events: &mut Vec<HistoryEvent>, rng: &mut StdRng) -> Option<()> {
    let at = pick(events, rng, |event| matches!(event, HistoryEvent::FinalEnded { .. }))?;
    let HistoryEvent::Read { offset, .. } = events[at - 1] else { return None };
    let HistoryEvent::FinalEnded { high_watermark, .. } = &mut events[at] else { return None };
    *high_watermark = offset;
    events.remove(at - 1);
    Some(())
}
