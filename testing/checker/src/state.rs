//! The checker's walk through a history: what is known so far, and what each line adds to it.
//! Rules that need the whole history are in `orders`, those of final reads in `finals`.

use std::collections::{BTreeMap, HashMap};

use super::event::{BatchKey, Event};
use super::finals::FinalRead;
use super::orders;
use super::verdict::{Class, Verdict};

/// A history that is being read.
#[derive(Debug, Default)]
pub struct Checker {
    pub(super) verdict: Verdict,
    /// Number of the present line.
    line: u64,
    pub(super) appends: HashMap<BatchKey, Append>,
    pub(super) partitions: HashMap<u32, Partition>,
    /// Next offset of each reader in each partition.
    cursors: HashMap<(u32, u32), u64>,
    pub(super) finals: HashMap<(u32, u32), FinalRead>,
    /// Last watermark of each session in each partition, and its line.
    watermarks: HashMap<(u32, u32), (u64, u64)>,
    /// What each asking probe must not be below.
    probes: HashMap<(u32, u32), Mark>,
    /// Line since which a majority is down.
    quorum_lost: Option<u64>,
    conditions: HashMap<BatchKey, Condition>,
}

/// What a batch demands.
#[derive(Debug, Clone, Copy)]
struct Condition {
    expected: Option<u64>,
    token: Option<u64>,
    /// The token in force when it was invoked, and the line that says so.
    in_force: Option<(u64, u64)>,
}

/// An offset, and the line that it was learned from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) offset: u64,
    pub(super) line: u64,
}

/// What became of a batch at its producer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Open,
    Acked(Mark),
    Failed(u64),
}

/// A batch that was invoked.
#[derive(Debug)]
pub(super) struct Append {
    pub(super) partition: u32,
    pub(super) records: u32,
    pub(super) stream: Option<u32>,
    pub(super) invoked: u64,
    /// It must not stand below this.
    pub(super) floor: Mark,
    pub(super) outcome: Outcome,
    /// Where it was first read.
    pub(super) read: Option<Mark>,
}

impl Append {
    /// Where it stands, as far as anyone knows.
    pub(super) fn place(&self) -> Option<Mark> {
        match (self.read, self.outcome) {
            (Some(read), _) => Some(read),
            (None, Outcome::Acked(acked)) => Some(acked),
            (None, Outcome::Open | Outcome::Failed(_)) => None,
        }
    }
}

/// A batch at its place in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) key: BatchKey,
    pub(super) records: u32,
    /// First line that says so.
    pub(super) line: u64,
}

/// What is known of a partition.
#[derive(Debug, Default)]
pub(super) struct Partition {
    /// Batches by their first offset.
    pub(super) placed: BTreeMap<u64, Placed>,
    /// One past the highest offset that is known to be committed.
    pub(super) committed: Mark,
    /// The first final read of the present round, which the others must equal.
    pub(super) reference: Option<FinalRead>,
    /// Highest token in force, and the line that says so.
    token: Option<(u64, u64)>,
    /// How far trims may have come, and have come for sure.
    pub(super) may_trim: u64,
    pub(super) trimmed: Mark,
    /// Append times by offset, each with its line.
    times: BTreeMap<u64, (u64, u64)>,
}

impl Partition {
    fn is_committed_to(&mut self, offset: u64, line: u64) {
        if offset > self.committed.offset {
            self.committed = Mark { offset, line };
        }
    }
}

impl Checker {
    /// Takes the next line.
    pub fn on(&mut self, event: &Event) {
        self.line += 1;
        match *event {
            Event::Invoked { key, partition, records, stream } => {
                self.on_invoked(key, partition, records, stream);
            }
            Event::Acked { key, offset } => self.on_acked(key, offset),
            Event::Failed { key } => self.on_end(key, Outcome::Failed(self.line)),
            Event::Unknown { key } => self.on_end(key, Outcome::Open),
            Event::Opened { reader, partition, offset } => {
                self.cursors.insert((reader, partition), offset);
            }
            Event::FinalOpened { reader, partition, round, replica } => {
                self.cursors.insert((reader, partition), 0);
                let read = FinalRead::new(round, replica, self.line);
                self.finals.insert((reader, partition), read);
            }
            Event::Read { reader, partition, offset, key, records } => {
                self.on_read((reader, partition), offset, key, records);
            }
            Event::Foreign { reader, partition, offset, ref what } => {
                let what = format!("reader {reader} got {what} at {partition}@{offset}");
                self.found(Class::Unwritten, what, &[]);
            }
            Event::OutOfRange { reader, partition, offset } => {
                let may = self.partition(partition).may_trim;
                if offset >= may {
                    let what = format!(
                        "reader {reader}: {partition}@{offset} is out of range; {may} may be \
                         trimmed"
                    );
                    self.found(Class::Vanished, what, &[]);
                }
            }
            Event::Starts { partition, offset } => {
                let may = self.partition(partition).may_trim;
                if offset > may {
                    let what =
                        format!("partition {partition} starts at {offset}; {may} was allowed");
                    self.found(Class::TrimBroken, what, &[]);
                }
            }
            Event::FinalEnded { reader, partition, high_watermark } => {
                self.on_final_ended(reader, partition, high_watermark);
            }
            Event::Watermark { session, partition, high_watermark } => {
                self.on_watermark(session, partition, high_watermark);
            }
            Event::LatestAsked { probe, partition } => {
                let floor = self.partition(partition).committed;
                self.probes.insert((probe, partition), floor);
            }
            Event::Latest { probe, partition, offset } => self.on_latest(probe, partition, offset),
            Event::Condition { key, expected, token } => self.on_condition(key, expected, token),
            Event::Refused { key, next_offset } => self.on_refused(key, next_offset),
            Event::TokenSet { partition, token } => {
                let line = self.line;
                let place = self.partition(partition);
                if place.token.is_none_or(|(before, _)| before < token) {
                    place.token = Some((token, line));
                }
            }
            Event::MayTrim { partition, offset } => {
                let place = self.partition(partition);
                place.may_trim = place.may_trim.max(offset);
            }
            Event::Trimmed { partition, offset } => {
                let line = self.line;
                let place = self.partition(partition);
                if offset > place.trimmed.offset {
                    place.trimmed = Mark { offset, line };
                }
            }
            Event::FinalStarts { reader, partition, offset } => {
                self.on_final_starts(reader, partition, offset);
            }
            Event::Stamped { partition, offset, time_us } => {
                self.on_stamped(partition, offset, time_us);
            }
            Event::QuorumLost => self.quorum_lost = Some(self.line),
            Event::QuorumBack => self.quorum_lost = None,
        }
    }

    /// Judges what has been taken so far, the rules that need the whole of it among them. More
    /// lines may follow.
    pub fn verdict(&self) -> Verdict {
        let mut verdict = self.verdict.clone();
        orders::judge(self, &mut verdict);
        verdict
    }

    /// A violation that this line shows, together with earlier ones.
    pub(super) fn found(&mut self, class: Class, what: String, earlier: &[u64]) {
        let mut lines = earlier.to_vec();
        lines.push(self.line);
        self.verdict.add(class, what, &lines);
    }

    pub(super) fn partition(&mut self, partition: u32) -> &mut Partition {
        self.partitions.entry(partition).or_default()
    }

    fn on_invoked(&mut self, key: BatchKey, partition: u32, records: u32, stream: Option<u32>) {
        let floor = self.partition(partition).committed;
        let (invoked, outcome, read) = (self.line, Outcome::Open, None);
        let append = Append { partition, records, stream, invoked, floor, outcome, read };
        if let Some(before) = self.appends.insert(key, append) {
            self.found(Class::BadHistory, format!("{key} invoked twice"), &[before.invoked]);
        }
        self.verdict.invoked += 1;
    }

    fn on_acked(&mut self, key: BatchKey, offset: u64) {
        let line = self.line;
        self.on_end(key, Outcome::Acked(Mark { offset, line }));
        let Some(append) = self.appends.get(&key) else { return };
        let (partition, records, invoked) = (append.partition, append.records, append.invoked);
        if let Some(lost) = self.quorum_lost.filter(|lost| *lost < invoked) {
            let what = format!("{key} was invoked and acked while a majority was down");
            self.found(Class::AckedWithoutQuorum, what, &[lost, invoked]);
        }
        if let Some(read) = self.appends.get(&key).and_then(|append| append.read)
            && read.offset != offset
        {
            let what =
                format!("{key} is acked at {partition}@{offset} and was read at {}", read.offset);
            self.found(Class::Diverged, what, &[read.line]);
        }
        self.judge_condition(key, offset);
        self.place(key, partition, offset, records);
    }

    fn on_condition(&mut self, key: BatchKey, expected: Option<u64>, token: Option<u64>) {
        let Some(partition) = self.appends.get(&key).map(|append| append.partition) else {
            return self.found(Class::BadHistory, format!("{key} was never invoked"), &[]);
        };
        let in_force = self.partition(partition).token;
        self.conditions.insert(key, Condition { expected, token, in_force });
    }

    fn judge_condition(&mut self, key: BatchKey, offset: u64) {
        let Some(condition) = self.conditions.get(&key).copied() else { return };
        if let Some(expected) = condition.expected.filter(|expected| *expected != offset) {
            let what = format!("{key} demanded offset {expected} and is acked at {offset}");
            self.found(Class::ConditionBroken, what, &[]);
        }
        if let (Some(token), Some((in_force, line))) = (condition.token, condition.in_force)
            && token < in_force
        {
            let what = format!("{key} came with token {token} after {in_force} and is acked");
            self.found(Class::ConditionBroken, what, &[line]);
        }
    }

    fn on_refused(&mut self, key: BatchKey, next_offset: u64) {
        self.on_end(key, Outcome::Failed(self.line));
        let Some(append) = self.appends.get(&key) else { return };
        let (partition, floor, invoked) = (append.partition, append.floor, append.invoked);
        let expected = self.conditions.get(&key).and_then(|condition| condition.expected);
        let line = self.line;
        match expected {
            None => self.found(Class::BadHistory, format!("{key} demanded no offset"), &[]),
            Some(expected) if expected == next_offset => {
                let what = format!("{key} demanded offset {expected}, and is refused for being it");
                self.found(Class::ConditionBroken, what, &[invoked]);
            }
            Some(_) if next_offset < floor.offset => {
                let what = format!(
                    "{key} is refused since the end is {next_offset}; {} was known before",
                    floor.offset
                );
                self.found(Class::ConditionBroken, what, &[floor.line, invoked]);
            }
            Some(_) => {}
        }
        self.partition(partition).is_committed_to(next_offset, line);
    }

    fn on_final_starts(&mut self, reader: u32, partition: u32, offset: u64) {
        self.cursors.insert((reader, partition), offset);
        let Some(read) = self.finals.get_mut(&(reader, partition)) else {
            return self.found(Class::BadHistory, format!("final {reader} was not begun"), &[]);
        };
        read.start = offset;
        let place = self.partition(partition);
        let (may, trimmed) = (place.may_trim, place.trimmed);
        if offset > may {
            let what = format!("partition {partition} starts at {offset}; {may} was allowed");
            self.found(Class::TrimBroken, what, &[]);
        }
        if offset < trimmed.offset {
            let what =
                format!("partition {partition} starts at {offset}, trimmed to {}", trimmed.offset);
            self.found(Class::TrimBroken, what, &[trimmed.line]);
        }
    }

    fn on_stamped(&mut self, partition: u32, offset: u64, time_us: u64) {
        let line = self.line;
        let times = &mut self.partition(partition).times;
        let before = times.range(..offset).next_back().filter(|(_, (time, _))| *time > time_us);
        let after = times.range(offset + 1..).next().filter(|(_, (time, _))| *time < time_us);
        let same = times.get_key_value(&offset).filter(|(_, (time, _))| *time != time_us);
        let wrong = before.or(after).or(same).map(|(at, told)| (*at, *told));
        times.entry(offset).or_insert((time_us, line));
        if let Some((at, (time, earlier))) = wrong {
            let what = format!("{partition}@{offset} is of {time_us}, {partition}@{at} of {time}");
            self.found(Class::TimeBack, what, &[earlier]);
        }
    }

    fn on_end(&mut self, key: BatchKey, outcome: Outcome) {
        match self.appends.get_mut(&key) {
            Some(append) if append.outcome == Outcome::Open => append.outcome = outcome,
            Some(_) => self.found(Class::BadHistory, format!("{key} ended twice"), &[]),
            None => self.found(Class::BadHistory, format!("{key} was never invoked"), &[]),
        }
    }

    fn on_read(&mut self, by: (u32, u32), offset: u64, key: BatchKey, records: u32) {
        let (reader, partition) = by;
        self.verdict.reads += 1;
        let next = self.cursors.insert(by, offset + u64::from(records));
        match next {
            Some(next) if next == offset => {}
            Some(next) => {
                let what = format!("reader {reader} got {partition}@{offset} and expected {next}");
                self.found(Class::NotDense, what, &[]);
            }
            None => self.found(Class::BadHistory, format!("reader {reader} is unknown"), &[]),
        }
        if let Some(read) = self.finals.get_mut(&by) {
            read.on_batch(offset, key, records);
        }
        let line = self.line;
        let Some(append) = self.appends.get_mut(&key).filter(|at| at.partition == partition) else {
            let what = format!("reader {reader} got {key} at {partition}@{offset}");
            return self.found(Class::Unwritten, what, &[]);
        };
        let before = *append.read.get_or_insert(Mark { offset, line });
        let (whole, outcome) = (append.records, append.outcome);
        if before.offset != offset {
            let what = format!("{key} is at {partition}@{} and at {offset}", before.offset);
            self.found(Class::Duplicated, what, &[before.line]);
        }
        // A second copy is told above; the first one must be where the ack said.
        if let Outcome::Acked(acked) = outcome
            && acked.offset != offset
            && before.offset == offset
        {
            let what = format!("{key} was acked at {partition}@{}, not {offset}", acked.offset);
            self.found(Class::Diverged, what, &[acked.line]);
        }
        if whole != records {
            let what = format!("{records} of {whole} records of {key} at {partition}@{offset}");
            self.found(Class::Torn, what, &[]);
        }
        self.place(key, partition, offset, records);
    }

    /// Notes where a batch stands, and judges it by what stands there and by when it was invoked.
    fn place(&mut self, key: BatchKey, partition: u32, offset: u64, records: u32) {
        let line = self.line;
        let end = offset + u64::from(records);
        let place = self.partition(partition);
        place.is_committed_to(end, line);
        match place.placed.get(&offset) {
            Some(there) if there.key == key => return,
            _ => {}
        }
        // The nearest one that begins before the end overlaps unless it ends before the offset.
        let nearest = place.placed.range(..end).next_back().map(|(at, there)| (*at, *there));
        match nearest {
            Some((at, there)) if at + u64::from(there.records) > offset => {
                let what = format!("{partition}@{offset} is {key}, and {} is at {at}", there.key);
                self.found(Class::Diverged, what, &[there.line]);
            }
            _ => {
                place.placed.insert(offset, Placed { key, records, line });
            }
        }
        let Some(append) = self.appends.get(&key) else { return };
        let floor = append.floor;
        if offset < floor.offset {
            let what = format!(
                "{key} stands at {partition}@{offset}; {} was the end before it was invoked",
                floor.offset
            );
            let lines = [floor.line, append.invoked];
            self.found(Class::OutOfTime, what, &lines);
        }
    }

    fn on_watermark(&mut self, session: u32, partition: u32, high_watermark: u64) {
        let line = self.line;
        let before = self.watermarks.insert((session, partition), (high_watermark, line));
        if let Some((before, at)) = before
            && before > high_watermark
        {
            let what = format!(
                "session {session}, partition {partition}: {before}, then {high_watermark}"
            );
            self.found(Class::WatermarkBack, what, &[at]);
        }
        self.partition(partition).is_committed_to(high_watermark, line);
    }

    fn on_latest(&mut self, probe: u32, partition: u32, offset: u64) {
        self.verdict.latest += 1;
        let line = self.line;
        match self.probes.remove(&(probe, partition)) {
            Some(floor) if offset < floor.offset => {
                let what = format!(
                    "partition {partition}: latest is {offset}, and {} was known before",
                    floor.offset
                );
                self.found(Class::LatestStale, what, &[floor.line]);
            }
            Some(_) => {}
            None => self.found(Class::BadHistory, format!("probe {probe} did not ask"), &[]),
        }
        self.partition(partition).is_committed_to(offset, line);
    }

    fn on_final_ended(&mut self, reader: u32, partition: u32, high_watermark: u64) {
        let Some(mut read) = self.finals.remove(&(reader, partition)) else {
            return self.found(Class::BadHistory, format!("final {reader} was not begun"), &[]);
        };
        self.verdict.finals += 1;
        let next = self.cursors.get(&(reader, partition)).copied().unwrap_or(0);
        if next != high_watermark {
            let what =
                format!("the final read of {partition} ended at {next}, not {high_watermark}");
            self.found(Class::NotDense, what, &[read.opened]);
        }
        read.end = high_watermark;
        self.judge_final(partition, read);
    }
}
