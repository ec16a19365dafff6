//! Result of a check: violations by class, with the lines that prove them.

use std::collections::BTreeMap;
use std::fmt;

/// Maximum examples kept per class. All violations are counted.
const EXAMPLES_MAX: u64 = 10;

/// Class of a violation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ViolationClass {
    /// An acknowledged batch is not in a final read.
    AckedLost,
    /// A batch is at two offsets.
    Duplicated,
    /// A read skipped offsets, went back, or ended before the high watermark.
    NotDense,
    /// Acked batches of one producer are not in the order of sending.
    Reordered,
    /// A batch of a stream is in the log although an earlier one is missing or behind it.
    StreamBroken,
    /// A batch is before an offset that was acked or read before its invocation.
    OutOfTime,
    /// An offset has two contents.
    Diverged,
    /// A batch that was read, or was below a known high watermark, is gone.
    Vanished,
    /// A record that was never written, or not to this partition.
    Unwritten,
    /// A reader got a part of a batch.
    Torn,
    /// A batch that failed for certain is in the log.
    FailedAppeared,
    /// A high watermark went back within one session.
    WatermarkBack,
    /// "Latest" was below an offset that was acked, read or returned before.
    LatestStale,
    /// A batch was acked while a majority was down.
    AckedWithoutQuorum,
    /// A batch was acked although its condition did not hold, or rejected although it did.
    ConditionBroken,
    /// A log starts after the highest allowed trim, or before an acknowledged one.
    TrimBroken,
    /// Append times decrease, or one batch has two.
    TimeBack,
    /// Final reads of two replicas differ.
    ReplicasDiffer,
    /// The history contradicts itself: the harness is wrong, not the service.
    BadHistory,
}

impl fmt::Display for ViolationClass {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::AckedLost => "acked batch lost",
            Self::Duplicated => "batch appended twice",
            Self::NotDense => "offsets not dense",
            Self::Reordered => "order of a producer's acks broken",
            Self::StreamBroken => "order of a stream broken",
            Self::OutOfTime => "batch before an earlier one",
            Self::Diverged => "two contents at one offset",
            Self::Vanished => "known batch vanished",
            Self::Unwritten => "record was never written",
            Self::Torn => "part of a batch",
            Self::FailedAppeared => "failed batch appeared",
            Self::WatermarkBack => "high watermark went back",
            Self::LatestStale => "latest is stale",
            Self::AckedWithoutQuorum => "acked without a majority",
            Self::ConditionBroken => "condition broken",
            Self::TrimBroken => "log starts at the wrong place",
            Self::TimeBack => "append times decrease",
            Self::ReplicasDiffer => "replicas differ",
            Self::BadHistory => "history contradicts itself",
        })
    }
}

/// A violation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Its class.
    pub class: ViolationClass,
    /// Description of the contradiction.
    pub what: String,
    /// Lines of the history that prove it, counted from 1.
    pub lines: Vec<u64>,
}

/// Result of a check: counts of what was checked, and all violations.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HistoryVerdict {
    /// Violations by class.
    pub counts: BTreeMap<ViolationClass, u64>,
    /// First violations of each class, in the order in which they were found.
    pub violations: Vec<Violation>,
    /// Batches that were invoked.
    pub invoked: u64,
    /// Batches that were acked.
    pub acked: u64,
    /// Batches that failed for certain.
    pub failed: u64,
    /// Batches with an unknown outcome at the end.
    pub open: u64,
    /// Batches with an unknown outcome that were found in the log.
    pub open_applied: u64,
    /// Batches that readers got, final reads included.
    pub reads: u64,
    /// Final reads of a replica's partition.
    pub finals: u64,
    /// Responses with the latest offset.
    pub latest: u64,
}

impl HistoryVerdict {
    /// Returns whether no violation was found.
    pub fn is_good(&self) -> bool {
        self.counts.is_empty()
    }

    /// Returns whether a violation of this class was found.
    pub fn has(&self, class: ViolationClass) -> bool {
        self.counts.contains_key(&class)
    }

    pub(super) fn add(&mut self, class: ViolationClass, what: String, lines: &[u64]) {
        let count = self.counts.entry(class).or_default();
        *count += 1;
        if *count <= EXAMPLES_MAX {
            self.violations.push(Violation { class, what, lines: lines.to_vec() });
        }
    }
}

/// Formats one line with counts, and one for each violation.
impl fmt::Display for HistoryVerdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { invoked, acked, failed, open, open_applied, reads, finals, latest, .. } = self;
        write!(
            formatter,
            "{invoked} batches: {acked} acked, {failed} failed, {open} unknown \
             ({open_applied} of them applied); {reads} batches read, {finals} final reads, \
             {latest} latest offsets"
        )?;
        for (class, count) in &self.counts {
            write!(formatter, "\nVIOLATION: {class}: {count}")?;
            for violation in self.violations.iter().filter(|found| found.class == *class) {
                write!(formatter, "\n  {} (lines {:?})", violation.what, violation.lines)?;
            }
        }
        Ok(())
    }
}
