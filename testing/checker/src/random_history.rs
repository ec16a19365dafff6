//! Random histories of a correct log, and single corruptions of them, to try the checker on.
//! The model has what a real run has: streams, lone batches, open outcomes, lagging replicas,
//! trims.

use std::collections::{BTreeMap, VecDeque};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use super::{BatchKey, Class, Event, Line};

const PARTITIONS: u32 = 2;
const REPLICAS: u64 = 3;

/// Final readers have numbers from here on.
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
    events: Vec<Event>,
    logs: BTreeMap<u32, Vec<(u64, BatchKey, u32)>>,
    /// Batches that were trimmed.
    trimmed: BTreeMap<u32, usize>,
    writers: Vec<Writer>,
    /// Given up by lone writers and not applied: may still land.
    strays: Vec<(BatchKey, u32, u32)>,
    /// Batches that each reader has got.
    readers: BTreeMap<(u32, u32), usize>,
    watermarks: BTreeMap<(u32, u32), u64>,
    session: u32,
    streams: u32,
    is_down: bool,
}

/// A history that is right.
pub(super) fn good(seed: u64, steps: usize) -> Vec<Event> {
    let mut model = Model::new(seed);
    for _ in 0..steps {
        model.step();
    }
    model.settle();
    model.events
}

pub(super) fn lines(events: &[Event]) -> Vec<Line> {
    events.iter().map(|event| Line { at_us: 0, event: event.clone() }).collect()
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
                model.events.push(Event::Opened { reader, partition, offset: 0 });
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
        let place = self.rng.random_range(0..self.writers.len());
        match self.rng.random_range(0..100) {
            0..30 => self.invoke(place),
            30..50 => self.apply_next(place),
            50..68 => self.ack(place),
            68..71 => self.give_up(place),
            71..73 => self.land(),
            73..93 => self.read(),
            93..96 => self.tell_watermark(),
            96..98 => self.ask(),
            98 => self.trim(),
            _ => self.flip_quorum(),
        }
    }

    fn invoke(&mut self, place: usize) {
        let records = self.rng.random_range(1..4);
        let writer = &mut self.writers[place];
        let limit = if writer.stream.is_some() { 4 } else { 1 };
        if writer.pending.len() >= limit {
            return;
        }
        let key = BatchKey { producer: writer.producer, number: writer.next };
        writer.next += 1;
        writer.pending.push_back((key, records, None));
        let (partition, stream) = (writer.partition, writer.stream);
        self.events.push(Event::Invoked { key, partition, records, stream });
    }

    fn apply_next(&mut self, place: usize) {
        let writer = &self.writers[place];
        let next = writer.pending.iter().position(|(_, _, offset)| offset.is_none());
        let Some(next) = next.filter(|_| !self.is_down) else { return };
        let (key, records, _) = writer.pending[next];
        let offset = self.apply(writer.partition, key, records);
        self.writers[place].pending[next].2 = Some(offset);
    }

    fn ack(&mut self, place: usize) {
        let pending = &mut self.writers[place].pending;
        if let Some((key, _, Some(offset))) = pending.front().copied() {
            pending.pop_front();
            self.events.push(Event::Acked { key, offset });
        }
    }

    /// Ends everything that is under way without an ack; a stream goes on as another one.
    fn give_up(&mut self, place: usize) {
        let pending: Vec<_> = self.writers[place].pending.drain(..).collect();
        let (partition, stream) = (self.writers[place].partition, self.writers[place].stream);
        for (key, records, offset) in pending {
            if offset.is_none() && self.rng.random_bool(0.5) {
                self.events.push(Event::Failed { key });
                continue;
            }
            self.events.push(Event::Unknown { key });
            if offset.is_none() && stream.is_none() {
                self.strays.push((key, partition, records));
            }
        }
        if stream.is_some() {
            self.streams += 1;
            self.writers[place].stream = Some(self.streams);
        }
    }

    fn land(&mut self) {
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
            self.events.push(Event::OutOfRange { reader, partition, offset });
            let offset = self.start(partition);
            self.events.push(Event::Starts { partition, offset });
            self.events.push(Event::Opened { reader, partition, offset });
            self.readers.insert(by, self.trimmed[&by.1]);
            return;
        }
        *self.readers.get_mut(&by).unwrap() += 1;
        self.events.push(Event::Read { reader: by.0, partition: by.1, offset, key, records });
    }

    fn tell_watermark(&mut self) {
        let partition = self.rng.random_range(0..PARTITIONS);
        if self.rng.random_bool(0.2) {
            self.session += 1;
        }
        let low = self.watermarks.get(&(self.session, partition)).copied().unwrap_or(0);
        let high_watermark = self.rng.random_range(low..=self.end(partition));
        self.watermarks.insert((self.session, partition), high_watermark);
        let session = self.session;
        self.events.push(Event::Watermark { session, partition, high_watermark });
    }

    fn ask(&mut self) {
        let partition = self.rng.random_range(0..PARTITIONS);
        self.events.push(Event::LatestAsked { probe: 0, partition });
        if self.rng.random_bool(0.2) {
            return;
        }
        let low = self.end(partition);
        for _ in 0..self.rng.random_range(0..4) {
            let place = self.rng.random_range(0..self.writers.len());
            self.apply_next(place);
            self.ack(place);
        }
        let offset = self.rng.random_range(low..=self.end(partition));
        self.events.push(Event::Latest { probe: 0, partition, offset });
    }

    /// First offset that is kept.
    fn start(&self, partition: u32) -> u64 {
        let first = self.logs[&partition].get(self.trimmed[&partition]);
        first.map_or_else(|| self.end(partition), |(offset, _, _)| *offset)
    }

    /// Trims to some batch, which is acknowledged or not.
    fn trim(&mut self) {
        let partition = self.rng.random_range(0..PARTITIONS);
        if self.is_down {
            return;
        }
        let trimmed = self.rng.random_range(self.trimmed[&partition]..=self.logs[&partition].len());
        self.trimmed.insert(partition, trimmed);
        let offset = self.start(partition);
        self.events.push(Event::MayTrim { partition, offset });
        if self.rng.random_bool(0.7) {
            self.events.push(Event::Trimmed { partition, offset });
        }
    }

    fn flip_quorum(&mut self) {
        self.events.push(if self.is_down { Event::QuorumBack } else { Event::QuorumLost });
        self.is_down = !self.is_down;
    }

    fn settle(&mut self) {
        if self.is_down {
            self.flip_quorum();
        }
        for place in 0..self.writers.len() {
            while self.writers[place].pending.iter().any(|(_, _, offset)| offset.is_none()) {
                self.apply_next(place);
            }
            while !self.writers[place].pending.is_empty() {
                self.ack(place);
            }
        }
        for (reader, replica) in (FINALS..).zip(1..=REPLICAS) {
            for (partition, log) in &self.logs {
                let (partition, round) = (*partition, 1);
                self.events.push(Event::FinalOpened { reader, partition, round, replica });
                let offset = self.start(partition);
                if offset > 0 {
                    self.events.push(Event::FinalStarts { reader, partition, offset });
                }
                for &(offset, key, records) in &log[self.trimmed[&partition]..] {
                    self.events.push(Event::Read { reader, partition, offset, key, records });
                }
                let end = log.last().map_or(0, |(at, _, records)| at + u64::from(*records));
                self.events.push(Event::FinalEnded { reader, partition, high_watermark: end });
            }
        }
    }
}

/// Spoils a history in one place. None if it has nothing that could be spoilt in this way.
pub(super) fn corrupt(events: &mut Vec<Event>, class: Class, rng: &mut StdRng) -> Option<()> {
    match class {
        Class::AckedLost => drop_acked(events, rng),
        Class::Duplicated => double(events, rng),
        Class::NotDense => skip(events, rng),
        Class::Reordered => swap_acks(events, rng),
        Class::Diverged => swap_keys(events, rng),
        Class::Unwritten => {
            let key = BatchKey { producer: 99, number: 7 };
            let place = pick(events, rng, |event| matches!(event, Event::Read { .. }))?;
            if let Event::Read { key: there, .. } = &mut events[place] {
                *there = key;
            }
            Some(())
        }
        Class::Torn => {
            let is_long = |event: &Event| matches!(event, Event::Read { records: 2.., .. });
            let place = pick(events, rng, is_long)?;
            if let Event::Read { records, .. } = &mut events[place] {
                *records -= 1;
            }
            Some(())
        }
        Class::FailedAppeared => {
            let place = pick(events, rng, |event| matches!(event, Event::Acked { .. }))?;
            let Event::Acked { key, .. } = events[place] else { return None };
            // Nobody knows of one that was trimmed before anyone read it.
            let is_read =
                |event: &Event| matches!(event, Event::Read { key: it, .. } if *it == key);
            events.iter().find(|event| is_read(event))?;
            events[place] = Event::Failed { key };
            Some(())
        }
        Class::WatermarkBack => {
            let is_some =
                |event: &Event| matches!(event, Event::Watermark { high_watermark: 1.., .. });
            let place = pick(events, rng, is_some)?;
            let Event::Watermark { session, partition, high_watermark } = events[place] else {
                return None;
            };
            let high_watermark = rng.random_range(0..high_watermark);
            events.insert(place + 1, Event::Watermark { session, partition, high_watermark });
            Some(())
        }
        Class::LatestStale => go_stale(events, rng),
        Class::AckedWithoutQuorum => lose_quorum(events, rng),
        Class::ReplicasDiffer => shorten_one(events, rng),
        Class::Vanished => {
            let place = pick(events, rng, |event| matches!(event, Event::OutOfRange { .. }))?;
            let Event::OutOfRange { partition, .. } = events[place] else { return None };
            forbid_trims(events, partition)
        }
        Class::TrimBroken => {
            let place = pick(events, rng, |event| matches!(event, Event::FinalStarts { .. }))?;
            let Event::FinalStarts { partition, .. } = events[place] else { return None };
            forbid_trims(events, partition)
        }
        _ => None,
    }
}

/// The front of a partition goes although nobody asked for it.
fn forbid_trims(events: &mut Vec<Event>, home: u32) -> Option<()> {
    events.retain(|event| match event {
        Event::MayTrim { partition, .. } | Event::Trimmed { partition, .. } => *partition != home,
        _ => true,
    });
    Some(())
}

fn pick(events: &[Event], rng: &mut StdRng, is: impl Fn(&Event) -> bool) -> Option<usize> {
    let places: Vec<_> = (0..events.len()).filter(|place| is(&events[*place])).collect();
    places.choose(rng).copied()
}

fn is_final(event: &Event) -> bool {
    matches!(event, Event::Read { reader: FINALS.., .. })
}

/// Cuts every final read before an acked batch, as if the log had been truncated there.
fn drop_acked(events: &mut Vec<Event>, rng: &mut StdRng) -> Option<()> {
    let place = pick(events, rng, |event| matches!(event, Event::Acked { .. }))?;
    let Event::Acked { key, offset: cut } = events[place] else { return None };
    let home = partition_of(events, key)?;
    let is_kept = |event: &Event| {
        is_final(event) && matches!(event, Event::Read { key: it, .. } if *it == key)
    };
    events.iter().find(|event| is_kept(event))?;
    events.retain(|event| {
        !matches!(event, Event::Read { partition, offset, .. }
            if is_final(event) && *partition == home && *offset >= cut)
    });
    for event in events {
        if let Event::FinalEnded { partition, high_watermark, .. } = event
            && *partition == home
        {
            *high_watermark = (*high_watermark).min(cut);
        }
    }
    Some(())
}

fn partition_of(events: &[Event], wanted: BatchKey) -> Option<u32> {
    events.iter().find_map(|event| match event {
        Event::Invoked { key, partition, .. } if *key == wanted => Some(*partition),
        _ => None,
    })
}

/// Adds a second copy of a batch to the end of one final read.
fn double(events: &mut Vec<Event>, rng: &mut StdRng) -> Option<()> {
    let place = pick(events, rng, is_final)?;
    let Event::Read { reader, partition, key, records, .. } = events[place] else { return None };
    let end = (place..events.len()).find(|at| {
        matches!(events[*at], Event::FinalEnded { reader: by, partition: home, .. }
            if (by, home) == (reader, partition))
    })?;
    let Event::FinalEnded { high_watermark: offset, .. } = events[end] else { return None };
    events[end] =
        Event::FinalEnded { reader, partition, high_watermark: offset + u64::from(records) };
    events.insert(end, Event::Read { reader, partition, offset, key, records });
    Some(())
}

/// Takes one read away that is followed by another of the same reader.
fn skip(events: &mut Vec<Event>, rng: &mut StdRng) -> Option<()> {
    let place = pick(events, rng, |event| matches!(event, Event::Read { .. }))?;
    let Event::Read { reader, partition, .. } = events[place] else { return None };
    let next = events[place + 1..].iter().find(|event| {
        matches!(event, Event::Read { reader: by, partition: home, .. }
            | Event::Opened { reader: by, partition: home, .. }
            if (*by, *home) == (reader, partition))
    });
    let is_followed = matches!(next, Some(Event::Read { .. }));
    is_followed.then(|| {
        events.remove(place);
    })
}

/// Swaps two batches of one producer everywhere but where they are invoked.
fn swap_acks(events: &mut [Event], rng: &mut StdRng) -> Option<()> {
    let acked = events.iter().filter_map(|event| match event {
        Event::Acked { key, .. } => Some(*key),
        _ => None,
    });
    let acked: Vec<_> = acked.collect();
    let size = |events: &[Event], wanted: BatchKey| {
        events.iter().find_map(|event| match event {
            Event::Invoked { key, records, .. } if *key == wanted => Some(*records),
            _ => None,
        })
    };
    let first = *acked.choose(rng)?;
    // The second was under way before the first was acked: else its ack came before it was sent.
    let place = events
        .iter()
        .position(|event| matches!(event, Event::Acked { key, .. } if *key == first))?;
    let second = *acked.iter().find(|other| {
        other.producer == first.producer
            && other.number > first.number
            && size(&events[..place], **other) == size(events, first)
    })?;
    for event in events {
        if let Event::Acked { key, .. } | Event::Read { key, .. } = event {
            *key = match *key {
                key if key == first => second,
                key if key == second => first,
                key => key,
            };
        }
    }
    Some(())
}

/// Gives one reader another batch of the partition instead of the one that is there.
fn swap_keys(events: &mut [Event], rng: &mut StdRng) -> Option<()> {
    let place = pick(events, rng, |event| matches!(event, Event::Read { .. }))?;
    let Event::Read { partition, key, .. } = events[place] else { return None };
    let other = events[..place].iter().rev().find_map(|event| match event {
        Event::Invoked { key: other, partition: home, .. }
            if *home == partition && *other != key =>
        {
            Some(*other)
        }
        _ => None,
    })?;
    let Event::Read { key, .. } = &mut events[place] else { return None };
    *key = other;
    Some(())
}

/// Makes one answer too old: lower than what was acked before the question.
fn go_stale(events: &mut [Event], rng: &mut StdRng) -> Option<()> {
    let place = pick(events, rng, |event| matches!(event, Event::Latest { .. }))?;
    let Event::Latest { probe, partition, offset } = events[place] else { return None };
    let asked = events[..place].iter().rposition(|event| {
        matches!(event, Event::LatestAsked { probe: by, partition: home }
            if (*by, *home) == (probe, partition))
    })?;
    let known = events[..asked].iter().filter_map(|event| match event {
        Event::Read { partition: home, offset, records, .. } if *home == partition => {
            Some(offset + u64::from(*records))
        }
        _ => None,
    });
    let floor = known.max().filter(|floor| *floor > 0 && *floor <= offset)?;
    events[place] = Event::Latest { probe, partition, offset: rng.random_range(0..floor) };
    Some(())
}

/// Claims that a majority was down while some batch was invoked and acked.
fn lose_quorum(events: &mut Vec<Event>, rng: &mut StdRng) -> Option<()> {
    let acked = pick(events, rng, |event| matches!(event, Event::Acked { .. }))?;
    let Event::Acked { key: wanted, .. } = events[acked] else { return None };
    let invoked = events
        .iter()
        .position(|event| matches!(event, Event::Invoked { key, .. } if *key == wanted))?;
    events.retain(|event| !matches!(event, Event::QuorumLost | Event::QuorumBack));
    let invoked = invoked.min(events.len());
    events.insert(invoked.saturating_sub(invoked / 2), Event::QuorumLost);
    Some(())
}

/// Takes the last batch from one replica's final read of one partition.
fn shorten_one(events: &mut Vec<Event>, rng: &mut StdRng) -> Option<()> {
    let place = pick(events, rng, |event| matches!(event, Event::FinalEnded { .. }))?;
    let Event::Read { offset, .. } = events[place - 1] else { return None };
    let Event::FinalEnded { high_watermark, .. } = &mut events[place] else { return None };
    *high_watermark = offset;
    events.remove(place - 1);
    Some(())
}
