//! Whether what is read back is what was acked: nothing missing, doubled, changed or out of place.
//! Pure bookkeeping; fetching is done by `write`.

use std::collections::HashMap;
use std::fmt;

use serde::Serialize;

use crate::exit;
use crate::report::grouped;
use crate::stamp::{Stamp, Stamper};

/// What one lane has sent, in the order of its sequences.
#[derive(Debug)]
pub(crate) struct Ledger {
    pub(crate) stamper: Stamper,
    pub(crate) lane: u32,
    sends: Vec<Sent>,
    next_sequence: u64,
}

/// One batch.
#[derive(Debug, Clone, Copy)]
struct Sent {
    first_sequence: u64,
    partition: u32,
    fate: Fate,
}

/// What is known of a batch after its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Acked, at this offset if the ack had one.
    Acked { first_offset: Option<u64> },
    /// May be there, once.
    Open,
    /// Must not be there.
    Refused,
}

impl Ledger {
    pub(crate) fn new(stamper: Stamper, lane: u32) -> Self {
        Self { stamper, lane, sends: Vec::new(), next_sequence: 0 }
    }

    /// Sequence of the next record.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// Notes a batch before it is sent. Gives its number, for [`Ledger::settle`].
    pub(crate) fn send(&mut self, partition: u32, records: u32) -> usize {
        let first_sequence = self.next_sequence;
        self.next_sequence += u64::from(records);
        self.sends.push(Sent { first_sequence, partition, fate: Fate::Open });
        self.sends.len() - 1
    }

    pub(crate) fn settle(&mut self, number: usize, fate: Fate) {
        self.sends[number].fate = fate;
    }
}

/// Compares records with ledgers.
#[derive(Debug)]
pub(crate) struct Checker {
    run: u64,
    lanes: HashMap<u32, Lane>,
    /// Acked records that have not been read yet.
    outstanding: u64,
    findings: Findings,
}

#[derive(Debug)]
struct Lane {
    ledger: Ledger,
    /// One bit for each sequence.
    seen: Vec<u64>,
    /// Per partition, one past the highest acked sequence seen.
    reached: HashMap<u32, u64>,
}

/// What the comparison found. All but the first two must be 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Findings {
    /// Records of this run that were read back.
    pub(crate) records: u64,
    /// Records of other writers in between.
    pub(crate) foreign: u64,
    /// Acked and not there.
    pub(crate) missing: u64,
    /// There more than once.
    pub(crate) doubled: u64,
    /// There with other bytes.
    pub(crate) changed: u64,
    /// Refused and yet there.
    pub(crate) refused_but_there: u64,
    /// In another partition or at another offset than acked.
    pub(crate) misplaced: u64,
    /// Behind a later record of the same writer.
    pub(crate) out_of_order: u64,
    /// Offsets that are not one more than the last.
    pub(crate) offset_gaps: u64,
    /// Batches whose checksum or layout is wrong.
    pub(crate) corrupt_batches: u64,
}

/// What a read can say of its answers by themselves. All but the first must be 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Answers {
    pub(crate) records: u64,
    /// As in [`Findings`].
    pub(crate) offset_gaps: u64,
    pub(crate) corrupt_batches: u64,
}

/// What came of looking: exactly what was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum Verification {
    Written(Findings),
    Read(Answers),
    /// Why not, as a sentence.
    NotPossible(String),
}

impl Verification {
    pub(crate) fn not_possible(error: &anyhow::Error) -> Self {
        Self::NotPossible(format!("not possible: {error:#}"))
    }

    pub(crate) fn is_good(&self) -> bool {
        match self {
            Self::NotPossible(_) => false,
            made => made.problems().iter().all(|(_, count)| *count == 0),
        }
    }

    /// Of one that is not good.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::NotPossible(_) => exit::FAILED,
            Self::Written(_) | Self::Read(_) => exit::NOT_AS_ACKED,
        }
    }

    fn problems(&self) -> Vec<(&'static str, u64)> {
        match self {
            Self::Written(findings) => findings.problems().to_vec(),
            Self::Read(answers) => vec![
                ("offset gaps", answers.offset_gaps),
                ("corrupt batches", answers.corrupt_batches),
            ],
            Self::NotPossible(_) => Vec::new(),
        }
    }
}

impl fmt::Display for Verification {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let records = match self {
            Self::Written(findings) => findings.records,
            Self::Read(answers) => answers.records,
            Self::NotPossible(why) => return write!(out, "NOT VERIFIED: {why}"),
        };
        let is_good = self.is_good();
        let word = if is_good { "verified" } else { "NOT VERIFIED" };
        write!(out, "{word}: {} records", grouped(records as f64))?;
        for (name, count) in self.problems() {
            if count > 0 || is_good {
                write!(out, ", {count} {name}")?;
            }
        }
        Ok(())
    }
}

impl Findings {
    #[cfg(test)]
    fn is_good(&self) -> bool {
        let Self { records: _, foreign: _, .. } = self;
        self.problems().iter().all(|(_, count)| *count == 0)
    }

    fn problems(&self) -> [(&'static str, u64); 8] {
        [
            ("missing", self.missing),
            ("doubled", self.doubled),
            ("changed", self.changed),
            ("refused but there", self.refused_but_there),
            ("misplaced", self.misplaced),
            ("out of order", self.out_of_order),
            ("offset gaps", self.offset_gaps),
            ("corrupt batches", self.corrupt_batches),
        ]
    }
}

impl Checker {
    pub(crate) fn new(run: u64, ledgers: Vec<Ledger>) -> Self {
        let mut outstanding = 0;
        let mut lanes = HashMap::new();
        for ledger in ledgers {
            outstanding += ledger.acked();
            let words = usize::try_from(ledger.next_sequence.div_ceil(64)).expect("fits memory");
            let lane = Lane { seen: vec![0; words], reached: HashMap::new(), ledger };
            lanes.insert(lane.ledger.lane, lane);
        }
        Self { run, lanes, outstanding, findings: Findings::default() }
    }

    pub(crate) fn outstanding(&self) -> u64 {
        self.outstanding
    }

    /// Looks at one record, in the order of a partition's offsets.
    pub(crate) fn see(&mut self, partition: u32, offset: u64, value: &[u8]) {
        let stamp = Stamp::read(value).filter(|stamp| stamp.run == self.run);
        let Some(stamp) = stamp else {
            self.findings.foreign += 1;
            return;
        };
        self.findings.records += 1;
        let known = self.lanes.get_mut(&stamp.lane);
        let Some(lane) = known.filter(|lane| stamp.sequence < lane.ledger.next_sequence) else {
            self.findings.changed += 1;
            return;
        };
        if !lane.ledger.stamper.is_intact(&stamp, value) {
            self.findings.changed += 1;
            return;
        }
        if lane.mark(stamp.sequence) {
            self.findings.doubled += 1;
            return;
        }
        let sent = lane.ledger.sent(stamp.sequence);
        match sent.fate {
            Fate::Open => {}
            Fate::Refused => self.findings.refused_but_there += 1,
            Fate::Acked { first_offset } => {
                self.outstanding -= 1;
                let planned =
                    first_offset.map(|first| first + stamp.sequence - sent.first_sequence);
                let is_in_place =
                    sent.partition == partition && planned.is_none_or(|planned| planned == offset);
                self.findings.misplaced += u64::from(!is_in_place);
                let reached = lane.reached.entry(partition).or_default();
                self.findings.out_of_order += u64::from(stamp.sequence < *reached);
                *reached = (*reached).max(stamp.sequence + 1);
            }
        }
    }

    pub(crate) fn see_gap(&mut self) {
        self.findings.offset_gaps += 1;
    }

    pub(crate) fn see_corrupt_batch(&mut self) {
        self.findings.corrupt_batches += 1;
    }

    pub(crate) fn finish(mut self) -> Findings {
        self.findings.missing = self.outstanding;
        self.findings
    }
}

impl Ledger {
    fn acked(&self) -> u64 {
        let ends = self.sends.iter().skip(1).map(|sent| sent.first_sequence);
        let ends = ends.chain([self.next_sequence]);
        self.sends
            .iter()
            .zip(ends)
            .filter(|(sent, _)| matches!(sent.fate, Fate::Acked { .. }))
            .map(|(sent, end)| end - sent.first_sequence)
            .sum()
    }

    /// The batch that a sequence was sent in.
    fn sent(&self, sequence: u64) -> Sent {
        let after = self.sends.partition_point(|sent| sent.first_sequence <= sequence);
        self.sends[after - 1]
    }
}

impl Lane {
    /// Notes a sequence as seen. True if it was before.
    fn mark(&mut self, sequence: u64) -> bool {
        let word = &mut self.seen[(sequence / 64) as usize];
        let bit = 1 << (sequence % 64);
        let was_seen = *word & bit != 0;
        *word |= bit;
        was_seen
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    const RUN: u64 = 9;
    const ACKED_AT_100: Fate = Fate::Acked { first_offset: Some(100) };

    fn stamper() -> Stamper {
        Stamper::new(1, RUN, 0, 64)
    }

    /// Three batches of two records to partition 0: acked at 100, acked at 102, and `third`.
    fn checker(third: Fate) -> Checker {
        let mut ledger = Ledger::new(stamper(), 0);
        let fates = [ACKED_AT_100, Fate::Acked { first_offset: Some(102) }, third];
        for fate in fates {
            let number = ledger.send(0, 2);
            ledger.settle(number, fate);
        }
        Checker::new(RUN, vec![ledger])
    }

    fn check(third: Fate, reads: impl IntoIterator<Item = (u64, Bytes)>) -> Findings {
        let mut checker = checker(third);
        for (offset, value) in reads {
            checker.see(0, offset, &value);
        }
        checker.finish()
    }

    fn whole(sequences: impl IntoIterator<Item = u64>) -> Vec<(u64, Bytes)> {
        let stamper = stamper();
        sequences.into_iter().map(|number| (100 + number, stamper.value(number, 0))).collect()
    }

    #[test]
    fn what_was_acked_is_there() {
        for third in [Fate::Open, Fate::Refused] {
            let findings = check(third, whole(0..4));
            assert_eq!(findings, Findings { records: 4, ..Findings::default() });
            assert!(findings.is_good());
        }
        assert!(check(Fate::Open, whole(0..6)).is_good());
    }

    #[test]
    fn a_missing_record_is_found() {
        let findings = check(Fate::Open, whole([0, 1, 3]));
        assert_eq!(findings.missing, 1);
        assert!(!findings.is_good());
    }

    #[test]
    fn a_doubled_record_is_found() {
        let mut reads = whole(0..4);
        reads.push((104, stamper().value(1, 0)));
        assert_eq!(check(Fate::Open, reads).doubled, 1);
    }

    #[test]
    fn a_changed_record_is_found() {
        let mut reads = whole(0..4);
        let mut changed = reads[2].1.to_vec();
        changed[50] ^= 1;
        reads[2].1 = changed.into();
        let findings = check(Fate::Open, reads);
        assert_eq!((findings.changed, findings.missing), (1, 1));
    }

    #[test]
    fn a_refused_record_must_not_be_there() {
        assert_eq!(check(Fate::Refused, whole(0..6)).refused_but_there, 2);
    }

    #[test]
    fn another_place_than_acked_is_found() {
        let mut reads = whole(0..4);
        reads.iter_mut().for_each(|(offset, _)| *offset += 1);
        assert_eq!(check(Fate::Open, reads).misplaced, 4);
    }

    #[test]
    fn order_within_a_writer_is_checked() {
        assert_eq!(check(Fate::Open, whole([2, 3, 0, 1])).out_of_order, 2);
    }

    #[test]
    fn others_records_are_told_apart() {
        let mut reads = whole(0..4);
        reads.push((104, Stamper::new(1, RUN + 1, 0, 64).value(0, 0)));
        reads.push((105, Bytes::from_static(b"short")));
        let findings = check(Fate::Open, reads);
        assert!(findings.is_good());
        assert_eq!(findings.foreign, 2);
    }

    #[test]
    fn a_verdict_names_what_is_wrong() {
        let good = Findings { records: 1000, ..Findings::default() };
        let said = Verification::Written(good.clone()).to_string();
        assert!(said.starts_with("verified: 1,000 records, 0 missing, 0 doubled"), "{said}");
        let bad = Verification::Written(Findings { missing: 2, ..good });
        assert_eq!(bad.to_string(), "NOT VERIFIED: 1,000 records, 2 missing");
        assert_eq!(bad.exit_code(), exit::NOT_AS_ACKED);
    }

    #[test]
    fn a_read_says_only_what_it_looked_at() {
        let read = Verification::Read(Answers { records: 7, ..Answers::default() });
        assert_eq!(read.to_string(), "verified: 7 records, 0 offset gaps, 0 corrupt batches");
        let fields = serde_json::json!({ "records": 7, "offset_gaps": 0, "corrupt_batches": 0 });
        assert_eq!(serde_json::to_value(&read).unwrap(), fields);
    }

    #[test]
    fn what_cannot_be_verified_is_said_and_is_not_good() {
        let verification = Verification::not_possible(&anyhow::anyhow!("gone").context("read"));
        assert_eq!(verification.to_string(), "NOT VERIFIED: not possible: read: gone");
        assert_eq!(serde_json::to_value(&verification).unwrap(), "not possible: read: gone");
        assert!(!verification.is_good());
        assert_eq!(verification.exit_code(), exit::FAILED);
    }
}
