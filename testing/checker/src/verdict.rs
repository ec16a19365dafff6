//! What a check finds: the class of each violation, and the lines that prove it.

use std::collections::BTreeMap;
use std::fmt;

/// Examples that are kept of each class; the rest is counted.
const EXAMPLES_MAX: u64 = 10;

/// Ways in which a history can be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// An acknowledged batch is not in a final read.
    AckedLost,
    /// A batch stands at two offsets.
    Duplicated,
    /// A read skipped offsets, went back, or ended before the high watermark.
    NotDense,
    /// Acked batches of one producer stand in another order than they were sent in.
    Reordered,
    /// A batch of a stream is there although one before it is missing or stands behind it.
    StreamBroken,
    /// A batch stands before something that was acked or read before it was invoked.
    OutOfTime,
    /// One offset, two contents.
    Diverged,
    /// Something that was read, or lay below a high watermark that was told, is gone.
    Vanished,
    /// A record that nobody wrote, or not there.
    Unwritten,
    /// A part of a batch.
    Torn,
    /// A batch that surely was not applied is there.
    FailedAppeared,
    /// A high watermark went back within one session.
    WatermarkBack,
    /// "Latest" was below what had been acked, read or told before.
    LatestStale,
    /// Something was acked while a majority was down.
    AckedWithoutQuorum,
    /// A batch was acked although its condition did not hold, or refused although it did.
    ConditionBroken,
    /// A log starts behind what may have been trimmed, or before what was.
    TrimBroken,
    /// Append times step back, or one batch has two.
    TimeBack,
    /// Final reads of two replicas differ.
    ReplicasDiffer,
    /// The history contradicts itself: the harness is wrong, not the service.
    BadHistory,
}

impl fmt::Display for Class {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::AckedLost => "acked batch lost",
            Self::Duplicated => "batch is there twice",
            Self::NotDense => "offsets not dense",
            Self::Reordered => "order of a producer's acks broken",
            Self::StreamBroken => "order of a stream broken",
            Self::OutOfTime => "order of time broken",
            Self::Diverged => "two contents at one offset",
            Self::Vanished => "what was read is gone",
            Self::Unwritten => "read what nobody wrote",
            Self::Torn => "part of a batch",
            Self::FailedAppeared => "failed batch is there",
            Self::WatermarkBack => "high watermark went back",
            Self::LatestStale => "latest is stale",
            Self::AckedWithoutQuorum => "acked without a majority",
            Self::ConditionBroken => "condition not kept",
            Self::TrimBroken => "log starts at the wrong place",
            Self::TimeBack => "append times step back",
            Self::ReplicasDiffer => "replicas differ",
            Self::BadHistory => "history contradicts itself",
        })
    }
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Its class.
    pub class: Class,
    /// What contradicts what.
    pub what: String,
    /// Lines of the history that prove it, counted from 1.
    pub lines: Vec<u64>,
}

/// What was looked at, and what is wrong with it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// How often each class was found.
    pub counts: BTreeMap<Class, u64>,
    /// The first few of each class, in the order in which they were found.
    pub violations: Vec<Violation>,
    /// Batches that were invoked.
    pub invoked: u64,
    /// Batches that were acked.
    pub acked: u64,
    /// Batches that surely failed.
    pub failed: u64,
    /// Batches with an open outcome at the end.
    pub open: u64,
    /// Batches with an open outcome that were seen in the log.
    pub open_applied: u64,
    /// Batches that readers got, final reads included.
    pub reads: u64,
    /// Final reads of a replica's partition.
    pub finals: u64,
    /// Answered questions for the latest offset.
    pub latest: u64,
}

impl Verdict {
    /// Whether nothing is wrong.
    pub fn is_good(&self) -> bool {
        self.counts.is_empty()
    }

    /// Whether this class was found.
    pub fn has(&self, class: Class) -> bool {
        self.counts.contains_key(&class)
    }

    pub(super) fn add(&mut self, class: Class, what: String, lines: &[u64]) {
        let count = self.counts.entry(class).or_default();
        *count += 1;
        if *count <= EXAMPLES_MAX {
            self.violations.push(Violation { class, what, lines: lines.to_vec() });
        }
    }
}

/// One line for what was looked at, and one for each finding.
impl fmt::Display for Verdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { invoked, acked, failed, open, open_applied, reads, finals, latest, .. } = self;
        write!(
            formatter,
            "{invoked} batches: {acked} acked, {failed} surely failed, {open} open \
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
