//! Compares what was read back with what was acked: missing, doubled, changed and misplaced
//! records.
//!
//! Pure bookkeeping; `readback` does the fetching.

use std::collections::HashMap;
use std::fmt;

use schemars::JsonSchema;
use serde::Serialize;

use crate::exit;
use crate::format::grouped;
use crate::stamp::{Stamp, Stamper};

/// Batches that one lane has sent, in the order of their sequences.
#[derive(Debug)]
pub(crate) struct SentBatches {
    pub(crate) stamper: Stamper,
    pub(crate) lane: u32,
    sends: Vec<SentBatch>,
    next_sequence: u64,
}

/// One sent batch.
#[derive(Debug, Clone, Copy)]
struct SentBatch {
    first_sequence: u64,
    partition: u32,
    outcome: SendOutcome,
}

/// Outcome of a batch after its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendOutcome {
    /// Acked, at this offset if the ack had one.
    Acked { first_offset: Option<u64> },
    /// Unknown: the batch may be in the log, at most once.
    Open,
    /// Rejected: the batch must not be in the log.
    Refused,
}

impl SentBatches {
    pub(crate) fn new(stamper: Stamper, lane: u32) -> Self {
        Self { stamper, lane, sends: Vec::new(), next_sequence: 0 }
    }

    /// Returns the sequence of the next record.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// Notes a batch before it is sent and returns its number for [`SentBatches::settle`].
    pub(crate) fn send(&mut self, partition: u32, records: u32) -> usize {
        let first_sequence = self.next_sequence;
        self.next_sequence += u64::from(records);
        self.sends.push(SentBatch { first_sequence, partition, outcome: SendOutcome::Open });
        self.sends.len() - 1
    }

    pub(crate) fn settle(&mut self, number: usize, outcome: SendOutcome) {
        self.sends[number].outcome = outcome;
    }
}

/// Compares records that are read with those that were sent.
#[derive(Debug)]
pub(crate) struct ReadbackChecker {
    run: u64,
    lanes: HashMap<u32, CheckedLane>,
    /// Acked records that have not been read yet.
    outstanding: u64,
    findings: ReadbackFindings,
}

#[derive(Debug)]
struct CheckedLane {
    sent_batches: SentBatches,
    /// One bit per sequence.
    seen: Vec<u64>,
    /// One past the highest acked sequence seen, by partition.
    reached: HashMap<u32, u64>,
}

/// Result of the comparison. All counts but the first two must be 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct ReadbackFindings {
    /// Records of this run that were read back.
    pub(crate) records: u64,
    /// Records of other writers in between.
    pub(crate) foreign: u64,
    /// Acked but missing.
    pub(crate) missing: u64,
    /// Present more than once.
    pub(crate) doubled: u64,
    /// Present with other bytes.
    pub(crate) changed: u64,
    /// Rejected but present.
    pub(crate) refused_but_there: u64,
    /// In another partition or at another offset than acked.
    pub(crate) misplaced: u64,
    /// After a later record of the same writer.
    pub(crate) out_of_order: u64,
    /// Offsets that do not follow the previous one.
    pub(crate) offset_gaps: u64,
    /// Batches with a wrong checksum or layout.
    pub(crate) corrupt_batches: u64,
}

/// Result of checking fetched batches without knowing what was written. All counts but the first
/// must be 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct FetchFindings {
    pub(crate) records: u64,
    /// See [`ReadbackFindings`].
    pub(crate) offset_gaps: u64,
    pub(crate) corrupt_batches: u64,
}

/// Result of a verification: the counts that were checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub(crate) enum Verification {
    Written(ReadbackFindings),
    Read(FetchFindings),
    /// Reason why it was not possible.
    NotPossible(String),
}

impl Verification {
    pub(crate) fn not_possible(error: &anyhow::Error) -> Self {
        Self::NotPossible(format!("not possible: {error:#}"))
    }

    pub(crate) fn is_clean(&self) -> bool {
        match self {
            Self::NotPossible(_) => false,
            made => made.problems().iter().all(|(_, count)| *count == 0),
        }
    }

    /// Returns the exit code of a verification that is not clean.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::NotPossible(_) => exit::FAILED,
            Self::Written(_) | Self::Read(_) => exit::NOT_AS_ACKED,
        }
    }

    fn problems(&self) -> Vec<(&'static str, u64)> {
        match self {
            Self::Written(findings) => findings.problems().to_vec(),
            Self::Read(findings) => vec![
                ("offset gaps", findings.offset_gaps),
                ("corrupt batches", findings.corrupt_batches),
            ],
            Self::NotPossible(_) => Vec::new(),
        }
    }
}

impl fmt::Display for Verification {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let records = match self {
            Self::Written(findings) => findings.records,
            Self::Read(findings) => findings.records,
            Self::NotPossible(why) => return write!(out, "NOT VERIFIED: {why}"),
        };
        let is_clean = self.is_clean();
        let word = if is_clean { "verified" } else { "NOT VERIFIED" };
        write!(out, "{word}: {} records", grouped(records as f64))?;
        for (name, count) in self.problems() {
            if count > 0 || is_clean {
                write!(out, ", {count} {name}")?;
            }
        }
        Ok(())
    }
}

impl ReadbackFindings {
    #[cfg(test)]
    fn is_clean(&self) -> bool {
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

impl ReadbackChecker {
    pub(crate) fn new(run: u64, sent_batches: Vec<SentBatches>) -> Self {
        let mut outstanding = 0;
        let mut lanes = HashMap::new();
        for sent_batches in sent_batches {
            outstanding += sent_batches.acked();
            let words =
                usize::try_from(sent_batches.next_sequence.div_ceil(64)).expect("fits memory");
            let lane = CheckedLane { seen: vec![0; words], reached: HashMap::new(), sent_batches };
            lanes.insert(lane.sent_batches.lane, lane);
        }
        Self { run, lanes, outstanding, findings: ReadbackFindings::default() }
    }

    pub(crate) fn outstanding(&self) -> u64 {
        self.outstanding
    }

    /// Checks one record. Must be called in the order of a partition's offsets.
    pub(crate) fn check_record(&mut self, partition: u32, offset: u64, value: &[u8]) {
        let stamp = Stamp::read(value).filter(|stamp| stamp.run == self.run);
        let Some(stamp) = stamp else {
            self.findings.foreign += 1;
            return;
        };
        self.findings.records += 1;
        let known = self.lanes.get_mut(&stamp.lane);
        let Some(lane) = known.filter(|lane| stamp.sequence < lane.sent_batches.next_sequence)
        else {
            self.findings.changed += 1;
            return;
        };
        if !lane.sent_batches.stamper.is_intact(&stamp, value) {
            self.findings.changed += 1;
            return;
        }
        if lane.mark(stamp.sequence) {
            self.findings.doubled += 1;
            return;
        }
        let sent = lane.sent_batches.sent(stamp.sequence);
        match sent.outcome {
            SendOutcome::Open => {}
            SendOutcome::Refused => self.findings.refused_but_there += 1,
            SendOutcome::Acked { first_offset } => {
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

    pub(crate) fn count_gap(&mut self) {
        self.findings.offset_gaps += 1;
    }

    pub(crate) fn count_corrupt_batch(&mut self) {
        self.findings.corrupt_batches += 1;
    }

    pub(crate) fn finish(mut self) -> ReadbackFindings {
        self.findings.missing = self.outstanding;
        self.findings
    }
}

impl SentBatches {
    fn acked(&self) -> u64 {
        let ends = self.sends.iter().skip(1).map(|sent| sent.first_sequence);
        let ends = ends.chain([self.next_sequence]);
        self.sends
            .iter()
            .zip(ends)
            .filter(|(sent, _)| matches!(sent.outcome, SendOutcome::Acked { .. }))
            .map(|(sent, end)| end - sent.first_sequence)
            .sum()
    }

    /// Returns the batch that a sequence was sent in.
    fn sent(&self, sequence: u64) -> SentBatch {
        let after = self.sends.partition_point(|sent| sent.first_sequence <= sequence);
        self.sends[after - 1]
    }
}

impl CheckedLane {
    /// Marks a sequence as seen. True if it was seen before.
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
    const ACKED_AT_100: SendOutcome = SendOutcome::Acked { first_offset: Some(100) };

    fn stamper() -> Stamper {
        Stamper::new(1, RUN, 0, 64)
    }

    /// Three batches of two records to partition 0: acked at 100, acked at 102, and `third`.
    fn checker(third: SendOutcome) -> ReadbackChecker {
        let mut sent_batches = SentBatches::new(stamper(), 0);
        let outcomes = [ACKED_AT_100, SendOutcome::Acked { first_offset: Some(102) }, third];
        for outcome in outcomes {
            let number = sent_batches.send(0, 2);
            sent_batches.settle(number, outcome);
        }
        ReadbackChecker::new(RUN, vec![sent_batches])
    }

    fn check(
        third: SendOutcome,
        reads: impl IntoIterator<Item = (u64, Bytes)>,
    ) -> ReadbackFindings {
        let mut checker = checker(third);
        for (offset, value) in reads {
            checker.check_record(0, offset, &value);
        }
        checker.finish()
    }

    fn whole(sequences: impl IntoIterator<Item = u64>) -> Vec<(u64, Bytes)> {
        let stamper = stamper();
        sequences.into_iter().map(|number| (100 + number, stamper.value(number, 0))).collect()
    }

    #[test]
    fn acked_records_that_are_present_are_clean() {
        for third in [SendOutcome::Open, SendOutcome::Refused] {
            let findings = check(third, whole(0..4));
            assert_eq!(findings, ReadbackFindings { records: 4, ..ReadbackFindings::default() });
            assert!(findings.is_clean());
        }
        assert!(check(SendOutcome::Open, whole(0..6)).is_clean());
    }

    #[test]
    fn finds_missing_records() {
        let findings = check(SendOutcome::Open, whole([0, 1, 3]));
        assert_eq!(findings.missing, 1);
        assert!(!findings.is_clean());
    }

    #[test]
    fn finds_doubled_records() {
        let mut reads = whole(0..4);
        reads.push((104, stamper().value(1, 0)));
        assert_eq!(check(SendOutcome::Open, reads).doubled, 1);
    }

    #[test]
    fn finds_changed_records() {
        let mut reads = whole(0..4);
        let mut changed = reads[2].1.to_vec();
        changed[50] ^= 1;
        reads[2].1 = changed.into();
        let findings = check(SendOutcome::Open, reads);
        assert_eq!((findings.changed, findings.missing), (1, 1));
    }

    #[test]
    fn finds_rejected_records_that_are_present() {
        assert_eq!(check(SendOutcome::Refused, whole(0..6)).refused_but_there, 2);
    }

    #[test]
    fn finds_misplaced_records() {
        let mut reads = whole(0..4);
        reads.iter_mut().for_each(|(offset, _)| *offset += 1);
        assert_eq!(check(SendOutcome::Open, reads).misplaced, 4);
    }

    #[test]
    fn finds_records_out_of_order() {
        assert_eq!(check(SendOutcome::Open, whole([2, 3, 0, 1])).out_of_order, 2);
    }

    #[test]
    fn ignores_records_of_other_writers() {
        let mut reads = whole(0..4);
        reads.push((104, Stamper::new(1, RUN + 1, 0, 64).value(0, 0)));
        reads.push((105, Bytes::from_static(b"short")));
        let findings = check(SendOutcome::Open, reads);
        assert!(findings.is_clean());
        assert_eq!(findings.foreign, 2);
    }

    #[test]
    fn verification_text_names_the_problems() {
        let good = ReadbackFindings { records: 1000, ..ReadbackFindings::default() };
        let text = Verification::Written(good.clone()).to_string();
        assert!(text.starts_with("verified: 1,000 records, 0 missing, 0 doubled"), "{text}");
        let bad = Verification::Written(ReadbackFindings { missing: 2, ..good });
        assert_eq!(bad.to_string(), "NOT VERIFIED: 1,000 records, 2 missing");
        assert_eq!(bad.exit_code(), exit::NOT_AS_ACKED);
    }

    #[test]
    fn read_verification_reports_only_what_it_checked() {
        let read = Verification::Read(FetchFindings { records: 7, ..FetchFindings::default() });
        assert_eq!(read.to_string(), "verified: 7 records, 0 offset gaps, 0 corrupt batches");
        let fields = serde_json::json!({ "records": 7, "offset_gaps": 0, "corrupt_batches": 0 });
        assert_eq!(serde_json::to_value(&read).unwrap(), fields);
    }

    #[test]
    fn impossible_verification_is_not_clean() {
        let verification = Verification::not_possible(&anyhow::anyhow!("gone").context("read"));
        assert_eq!(verification.to_string(), "NOT VERIFIED: not possible: read: gone");
        assert_eq!(serde_json::to_value(&verification).unwrap(), "not possible: read: gone");
        assert!(!verification.is_clean());
        assert_eq!(verification.exit_code(), exit::FAILED);
    }
}
