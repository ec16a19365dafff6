//! State of the checker while it reads a history, and the rules that apply to each line.
//! Rules that need the whole history are in `ordering`, those of final reads in `final_reads`.

use std::collections::{BTreeMap, HashMap};

use super::event::{BatchKey, HistoryEvent};
use super::final_reads::FinalRead;
use super::ordering;
use super::verdict::{HistoryVerdict, ViolationClass};

/// Checks a history line by line.
#[derive(Debug, Default)]
pub struct HistoryChecker {
    pub(super) verdict: HistoryVerdict,
    /// Number of the current line.
    line: u64,
    pub(super) appends: HashMap<BatchKey, InvokedBatch>,
    pub(super) partitions: HashMap<u32, PartitionHistory>,
    /// Next offset of each reader in each partition.
    cursors: HashMap<(u32, u32), u64>,
    pub(super) finals: HashMap<(u32, u32), FinalRead>,
    /// Last watermark of each session in each partition, and its line.
    watermarks: HashMap<(u32, u32), (u64, u64)>,
    /// Minimum response of each probe in flight.
    probes: HashMap<(u32, u32), KnownOffset>,
    /// Line of the last loss of a majority, until it is back.
    quorum_lost: Option<u64>,
    conditions: HashMap<BatchKey, Condition>,
}

/// Condition of a batch.
#[derive(Debug, Clone, Copy)]
struct Condition {
    expected: Option<u64>,
    token: Option<u64>,
    /// Token in force at the invocation, and the line that set it.
    in_force: Option<(u64, u64)>,
}

/// An offset and the line that shows it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct KnownOffset {
    pub(super) offset: u64,
    pub(super) line: u64,
}

/// Outcome of a batch at its producer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AppendOutcome {
    Open,
    Acked(KnownOffset),
    Failed(u64),
}

/// A batch that was invoked.
#[derive(Debug)]
pub(super) struct InvokedBatch {
    pub(super) partition: u32,
    pub(super) records: u32,
    pub(super) stream: Option<u32>,
    pub(super) invoked: u64,
    /// Minimum offset of the batch.
    pub(super) floor: KnownOffset,
    pub(super) outcome: AppendOutcome,
    /// Offset of its first read.
    pub(super) read: Option<KnownOffset>,
}

impl InvokedBatch {
    /// Returns the offset of the batch, if it is known.
    pub(super) fn place(&self) -> Option<KnownOffset> {
        match (self.read, self.outcome) {
            (Some(read), _) => Some(read),
            (None, AppendOutcome::Acked(acked)) => Some(acked),
            (None, AppendOutcome::Open | AppendOutcome::Failed(_)) => None,
        }
    }
}

/// A batch with a known offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PlacedBatch {
    pub(super) key: BatchKey,
    pub(super) records: u32,
    /// First line that shows it.
    pub(super) line: u64,
}

/// Known state of a partition.
#[derive(Debug, Default)]
pub(super) struct PartitionHistory {
    /// Batches by their first offset.
    pub(super) placed: BTreeMap<u64, PlacedBatch>,
    /// One past the highest offset that is known to be committed.
    pub(super) committed: KnownOffset,
    /// First final read of the current round, which the others must equal.
    pub(super) reference: Option<FinalRead>,
    /// Highest token in force, and the line that set it.
    token: Option<(u64, u64)>,
    /// Highest offset that a trim may have reached, and highest acknowledged trim.
    pub(super) may_trim: u64,
    pub(super) trimmed: KnownOffset,
    /// Append times by offset, each with its line.
    times: BTreeMap<u64, (u64, u64)>,
}

impl PartitionHistory {
    fn is_committed_to(&mut self, offset: u64, line: u64) {
        if offset > self.committed.offset {
            self.committed = KnownOffset { offset, line };
        }
    }
}

impl HistoryChecker {
    /// Processes the next line.
    pub fn on(&mut self, event: &HistoryEvent) {
        self.line += 1;
        match *event {
            HistoryEvent::Invoked { key, partition, records, stream } => {
                self.on_invoked(key, partition, records, stream);
            }
            HistoryEvent::Acked { key, offset } => self.on_acked(key, offset),
            HistoryEvent::Failed { key } => self.on_end(key, AppendOutcome::Failed(self.line)),
            HistoryEvent::Unknown { key } => self.on_end(key, AppendOutcome::Open),
            HistoryEvent::Opened { reader, partition, offset } => {
                self.cursors.insert((reader, partition), offset);
            }
            HistoryEvent::FinalOpened { reader, partition, round, replica } => {
                self.cursors.insert((reader, partition), 0);
                let read = FinalRead::new(round, replica, self.line);
                self.finals.insert((reader, partition), read);
            }
            HistoryEvent::Read { reader, partition, offset, key, records } => {
                self.on_read((reader, partition), offset, key, records);
            }
            HistoryEvent::Foreign { reader, partition, offset, ref what } => {
                let what = format!("reader {reader} got {what} at {partition}@{offset}");
                self.found(ViolationClass::Unwritten, what, &[]);
            }
            HistoryEvent::OutOfRange { reader, partition, offset } => {
                let may = self.partition(partition).may_trim;
                if offset >= may {
                    let what = format!(
                        "reader {reader}: {partition}@{offset} is out of range; trims are \
                         allowed up \
                         to {may}"
                    );
                    self.found(ViolationClass::Vanished, what, &[]);
                }
            }
            HistoryEvent::Starts { partition, offset } => {
                let may = self.partition(partition).may_trim;
                if offset > may {
                    let what =
                        format!("partition {partition} starts at {offset}; {may} was allowed");
                    self.found(ViolationClass::TrimBroken, what, &[]);
                }
            }
            HistoryEvent::FinalEnded { reader, partition, high_watermark } => {
                self.on_final_ended(reader, partition, high_watermark);
            }
            HistoryEvent::Watermark { session, partition, high_watermark } => {
                self.on_watermark(session, partition, high_watermark);
            }
            HistoryEvent::LatestAsked { probe, partition } => {
                let floor = self.partition(partition).committed;
                self.probes.insert((probe, partition), floor);
            }
            HistoryEvent::Latest { probe, partition, offset } => {
                self.on_latest(probe, partition, offset)
            }
            HistoryEvent::Condition { key, expected, token } => {
                self.on_condition(key, expected, token)
            }
            HistoryEvent::Refused { key, next_offset } => self.on_refused(key, next_offset),
            HistoryEvent::TokenSet { partition, token } => {
                let line = self.line;
                let place = self.partition(partition);
                if place.token.is_none_or(|(before, _)| before < token) {
                    place.token = Some((token, line));
                }
            }
            HistoryEvent::MayTrim { partition, offset } => {
                let place = self.partition(partition);
                place.may_trim = place.may_trim.max(offset);
            }
            HistoryEvent::Trimmed { partition, offset } => {
                let line = self.line;
                let place = self.partition(partition);
                if offset > place.trimmed.offset {
                    place.trimmed = KnownOffset { offset, line };
                }
            }
            HistoryEvent::FinalStarts { reader, partition, offset } => {
                self.on_final_starts(reader, partition, offset);
            }
            HistoryEvent::Stamped { partition, offset, time_us } => {
                self.on_stamped(partition, offset, time_us);
            }
            HistoryEvent::QuorumLost => self.quorum_lost = Some(self.line),
            HistoryEvent::QuorumBack => self.quorum_lost = None,
        }
    }

    /// Returns the verdict on all lines so far, including rules that need the whole history. More
    /// lines may follow.
    pub fn verdict(&self) -> HistoryVerdict {
        let mut verdict = self.verdict.clone();
        ordering::judge(self, &mut verdict);
        verdict
    }

    /// Records a violation that the current line proves, together with earlier lines.
    pub(super) fn found(&mut self, class: ViolationClass, what: String, earlier: &[u64]) {
        let mut lines = earlier.to_vec();
        lines.push(self.line);
        self.verdict.add(class, what, &lines);
    }

    pub(super) fn partition(&mut self, partition: u32) -> &mut PartitionHistory {
        self.partitions.entry(partition).or_default()
    }

    fn on_invoked(&mut self, key: BatchKey, partition: u32, records: u32, stream: Option<u32>) {
        let floor = self.partition(partition).committed;
        let (invoked, outcome, read) = (self.line, AppendOutcome::Open, None);
        let append = InvokedBatch { partition, records, stream, invoked, floor, outcome, read };
        if let Some(before) = self.appends.insert(key, append) {
            self.found(
                ViolationClass::BadHistory,
                format!("{key} invoked twice"),
                &[before.invoked],
            );
        }
        self.verdict.invoked += 1;
    }

    fn on_acked(&mut self, key: BatchKey, offset: u64) {
        let line = self.line;
        self.on_end(key, AppendOutcome::Acked(KnownOffset { offset, line }));
        let Some(append) = self.appends.get(&key) else { return };
        let (partition, records, invoked) = (append.partition, append.records, append.invoked);
        if let Some(lost) = self.quorum_lost.filter(|lost| *lost < invoked) {
            let what = format!("{key} was invoked and acked while a majority was down");
            self.found(ViolationClass::AckedWithoutQuorum, what, &[lost, invoked]);
        }
        if let Some(read) = self.appends.get(&key).and_then(|append| append.read)
            && read.offset != offset
        {
            let what =
                format!("{key} is acked at {partition}@{offset} and was read at {}", read.offset);
            self.found(ViolationClass::Diverged, what, &[read.line]);
        }
        self.judge_condition(key, offset);
        self.place(key, partition, offset, records);
    }

    fn on_condition(&mut self, key: BatchKey, expected: Option<u64>, token: Option<u64>) {
        let Some(partition) = self.appends.get(&key).map(|append| append.partition) else {
            return self.found(ViolationClass::BadHistory, format!("{key} was never invoked"), &[]);
        };
        let in_force = self.partition(partition).token;
        self.conditions.insert(key, Condition { expected, token, in_force });
    }

    fn judge_condition(&mut self, key: BatchKey, offset: u64) {
        let Some(condition) = self.conditions.get(&key).copied() else { return };
        if let Some(expected) = condition.expected.filter(|expected| *expected != offset) {
            let what = format!("{key} expected offset {expected} and is acked at {offset}");
            self.found(ViolationClass::ConditionBroken, what, &[]);
        }
        if let (Some(token), Some((in_force, line))) = (condition.token, condition.in_force)
            && token < in_force
        {
            let what = format!(
                "{key} has token {token}, was invoked after {in_force} was set, and is acked"
            );
            self.found(ViolationClass::ConditionBroken, what, &[line]);
        }
    }

    fn on_refused(&mut self, key: BatchKey, next_offset: u64) {
        self.on_end(key, AppendOutcome::Failed(self.line));
        let Some(append) = self.appends.get(&key) else { return };
        let (partition, floor, invoked) = (append.partition, append.floor, append.invoked);
        let expected = self.conditions.get(&key).and_then(|condition| condition.expected);
        let line = self.line;
        match expected {
            None => {
                self.found(ViolationClass::BadHistory, format!("{key} expected no offset"), &[])
            }
            Some(expected) if expected == next_offset => {
                let what = format!(
                    "{key} expected offset {expected} and is rejected, although it is the next \
                     offset"
                );
                self.found(ViolationClass::ConditionBroken, what, &[invoked]);
            }
            Some(_) if next_offset < floor.offset => {
                let what = format!(
                    "{key} is rejected because the next offset is {next_offset}; {} was known \
                     before",
                    floor.offset
                );
                self.found(ViolationClass::ConditionBroken, what, &[floor.line, invoked]);
            }
            Some(_) => {}
        }
        self.partition(partition).is_committed_to(next_offset, line);
    }

    fn on_final_starts(&mut self, reader: u32, partition: u32, offset: u64) {
        self.cursors.insert((reader, partition), offset);
        let Some(read) = self.finals.get_mut(&(reader, partition)) else {
            return self.found(
                ViolationClass::BadHistory,
                format!("final read {reader} was not started"),
                &[],
            );
        };
        read.start = offset;
        let place = self.partition(partition);
        let (may, trimmed) = (place.may_trim, place.trimmed);
        if offset > may {
            let what = format!("partition {partition} starts at {offset}; {may} was allowed");
            self.found(ViolationClass::TrimBroken, what, &[]);
        }
        if offset < trimmed.offset {
            let what =
                format!("partition {partition} starts at {offset}, trimmed to {}", trimmed.offset);
            self.found(ViolationClass::TrimBroken, what, &[trimmed.line]);
        }
    }

    fn on_stamped(&mut self, partition: u32, offset: u64, time_us: u64) {
        let line = self.line;
        let times = &mut self.partition(partition).times;
        let before = times.range(..offset).next_back().filter(|(_, (time, _))| *time > time_us);
        let after = times.range(offset + 1..).next().filter(|(_, (time, _))| *time < time_us);
        let same = times.get_key_value(&offset).filter(|(_, (time, _))| *time != time_us);
        let wrong = before.or(after).or(same).map(|(at, time)| (*at, *time));
        times.entry(offset).or_insert((time_us, line));
        if let Some((at, (time, earlier))) = wrong {
            let what = format!(
                "{partition}@{offset} has time {time_us}, {partition}@{at} has time {time}"
            );
            self.found(ViolationClass::TimeBack, what, &[earlier]);
        }
    }

    fn on_end(&mut self, key: BatchKey, outcome: AppendOutcome) {
        match self.appends.get_mut(&key) {
            Some(append) if append.outcome == AppendOutcome::Open => append.outcome = outcome,
            Some(_) => self.found(ViolationClass::BadHistory, format!("{key} ended twice"), &[]),
            None => self.found(ViolationClass::BadHistory, format!("{key} was never invoked"), &[]),
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
                self.found(ViolationClass::NotDense, what, &[]);
            }
            None => {
                self.found(ViolationClass::BadHistory, format!("reader {reader} is unknown"), &[])
            }
        }
        if let Some(read) = self.finals.get_mut(&by) {
            read.on_batch(offset, key, records);
        }
        let line = self.line;
        let Some(append) = self.appends.get_mut(&key).filter(|at| at.partition == partition) else {
            let what = format!("reader {reader} got {key} at {partition}@{offset}");
            return self.found(ViolationClass::Unwritten, what, &[]);
        };
        let before = *append.read.get_or_insert(KnownOffset { offset, line });
        let (whole, outcome) = (append.records, append.outcome);
        if before.offset != offset {
            let what = format!("{key} is at {partition}@{} and at {offset}", before.offset);
            self.found(ViolationClass::Duplicated, what, &[before.line]);
        }
        // A second copy is reported above; the first one must be at the offset of the ack.
        if let AppendOutcome::Acked(acked) = outcome
            && acked.offset != offset
            && before.offset == offset
        {
            let what = format!("{key} was acked at {partition}@{}, not {offset}", acked.offset);
            self.found(ViolationClass::Diverged, what, &[acked.line]);
        }
        if whole != records {
            let what = format!("{records} of {whole} records of {key} at {partition}@{offset}");
            self.found(ViolationClass::Torn, what, &[]);
        }
        self.place(key, partition, offset, records);
    }

    /// Records the offset of a batch, and checks it against other batches and its invocation.
    fn place(&mut self, key: BatchKey, partition: u32, offset: u64, records: u32) {
        let line = self.line;
        let end = offset + u64::from(records);
        let place = self.partition(partition);
        place.is_committed_to(end, line);
        match place.placed.get(&offset) {
            Some(there) if there.key == key => return,
            _ => {}
        }
        // The nearest batch that begins before the end overlaps unless it ends before the offset.
        let nearest = place.placed.range(..end).next_back().map(|(at, there)| (*at, *there));
        match nearest {
            Some((at, there)) if at + u64::from(there.records) > offset => {
                let what = format!("{partition}@{offset} is {key}, but {} is at {at}", there.key);
                self.found(ViolationClass::Diverged, what, &[there.line]);
            }
            _ => {
                place.placed.insert(offset, PlacedBatch { key, records, line });
            }
        }
        let Some(append) = self.appends.get(&key) else { return };
        let floor = append.floor;
        if offset < floor.offset {
            let what = format!(
                "{key} is at {partition}@{offset}; the end was {} before its invocation",
                floor.offset
            );
            let lines = [floor.line, append.invoked];
            self.found(ViolationClass::OutOfTime, what, &lines);
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
            self.found(ViolationClass::WatermarkBack, what, &[at]);
        }
        self.partition(partition).is_committed_to(high_watermark, line);
    }

    fn on_latest(&mut self, probe: u32, partition: u32, offset: u64) {
        self.verdict.latest += 1;
        let line = self.line;
        match self.probes.remove(&(probe, partition)) {
            Some(floor) if offset < floor.offset => {
                let what = format!(
                    "partition {partition}: latest is {offset}, but {} was known before",
                    floor.offset
                );
                self.found(ViolationClass::LatestStale, what, &[floor.line]);
            }
            Some(_) => {}
            None => self.found(
                ViolationClass::BadHistory,
                format!("probe {probe} sent no request"),
                &[],
            ),
        }
        self.partition(partition).is_committed_to(offset, line);
    }

    fn on_final_ended(&mut self, reader: u32, partition: u32, high_watermark: u64) {
        let Some(mut read) = self.finals.remove(&(reader, partition)) else {
            return self.found(
                ViolationClass::BadHistory,
                format!("final read {reader} was not started"),
                &[],
            );
        };
        self.verdict.finals += 1;
        let next = self.cursors.get(&(reader, partition)).copied().unwrap_or(0);
        if next != high_watermark {
            let what =
                format!("the final read of {partition} ended at {next}, not {high_watermark}");
            self.found(ViolationClass::NotDense, what, &[read.opened]);
        }
        read.end = high_watermark;
        self.judge_final(partition, read);
    }
}
