//! The result of `helix produce`: acked records, the first failed batch, and records whose outcome
//! is unknown.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::Context;
use helix_client::{Ack, Error};
use schemars::JsonSchema;
use serde::Serialize;

use crate::durability::durability_name;
use crate::units;

/// Maximum number of partitions listed in the text summary.
const PARTITIONS_LISTED_MAX: usize = 8;

/// The line of a record and its target partition.
#[derive(Debug, Clone, Copy)]
pub(super) struct LineTarget {
    /// Line number, starting at 1.
    pub(super) line: u64,
    pub(super) partition: u32,
}

/// The first failed batch and its lines.
#[derive(Debug)]
pub(super) struct FailedBatch {
    error: Error,
    partition: u32,
    pub(super) first_line: u64,
    last_line: u64,
    line_count: u64,
}

impl FailedBatch {
    /// Records a failure. The first failure that no earlier batch caused is kept.
    pub(super) fn add(
        failed: &mut Option<Self>,
        LineTarget { line, partition }: LineTarget,
        error: Error,
    ) {
        match failed {
            Some(first) if first.partition == partition && first.error.message == error.message => {
                first.last_line = line;
                first.line_count += 1;
            }
            Some(first) if error.is_from_earlier_batch || !first.error.is_from_earlier_batch => {}
            _ => {
                let (first_line, last_line, line_count) = (line, line, 1);
                *failed = Some(Self { error, partition, first_line, last_line, line_count });
            }
        }
    }

    pub(super) fn into_error(self) -> anyhow::Result<()> {
        let Self { first_line: first, last_line: last, line_count: count, .. } = self;
        Err(self.error).with_context(|| match count {
            1 => format!("line {first}"),
            _ if last - first + 1 == count => format!("lines {first} to {last}, one batch"),
            _ => format!("{} of the lines {first} to {last}, one batch", units::count(count)),
        })
    }
}

/// Summary of the acked records.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ProduceSummary {
    topic: String,
    record_count: u64,
    /// Weakest durability of all acks. None if no record was acked.
    durability: Option<&'static str>,
    partitions: Vec<PartitionSummary>,
    /// True if records without an ack may have been appended.
    may_have_applied: bool,
    /// Records without an ack that may have been appended.
    uncertain_records: u64,
    /// Records of the input that an earlier run had appended; they were not sent again.
    resumed_records: u64,
    /// First line of the failed batch. None if no batch failed or its lines were not sent.
    pub(super) failed_line: Option<u64>,
    /// Acked records from lines after the failed one, which were in flight at the failure.
    acked_behind: u64,
    #[serde(skip)]
    weakest: i32,
    /// Index of each partition in `partitions`.
    #[serde(skip)]
    indexes: BTreeMap<u32, usize>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PartitionSummary {
    partition: u32,
    record_count: u64,
    /// Offset of the first record. None if acks carry no offsets.
    first_offset: Option<u64>,
    /// One past the last record; other clients may have appended in between.
    next_offset: Option<u64>,
}

impl ProduceSummary {
    pub(super) fn new(topic: &str) -> Self {
        Self {
            topic: topic.to_owned(),
            record_count: 0,
            durability: None,
            partitions: Vec::new(),
            may_have_applied: false,
            uncertain_records: 0,
            resumed_records: 0,
            failed_line: None,
            acked_behind: 0,
            weakest: 0,
            indexes: BTreeMap::new(),
        }
    }

    pub(super) fn add(
        &mut self,
        target: LineTarget,
        ack: helix_client::Result<Ack>,
        failed: &mut Option<FailedBatch>,
    ) {
        match ack {
            Ok(ack) => {
                self.acked_behind += u64::from(failed.is_some());
                self.add_ack(target.partition, &ack);
            }
            Err(error) => {
                self.add_uncertain(u64::from(error.may_have_applied));
                FailedBatch::add(failed, target, error);
                // Results arrive in line order: no acked line follows a new first failure.
                if failed.as_ref().is_some_and(|failed| failed.first_line == target.line) {
                    self.acked_behind = 0;
                }
            }
        }
    }

    /// Adds records that may or may not have been appended.
    pub(super) fn add_uncertain(&mut self, records: u64) {
        self.uncertain_records += records;
        self.may_have_applied = self.uncertain_records > 0;
    }

    /// Adds a record that an earlier run had appended.
    pub(super) fn add_resumed(&mut self) {
        self.resumed_records += 1;
    }

    fn add_ack(&mut self, partition: u32, ack: &Ack) {
        self.record_count += 1;
        // Larger enum numbers are weaker.
        if i32::from(ack.durability) > self.weakest {
            self.weakest = ack.durability.into();
            self.durability = Some(durability_name(ack.durability));
        }
        let index = *self.indexes.entry(partition).or_insert(self.partitions.len());
        if index == self.partitions.len() {
            self.partitions.push(PartitionSummary {
                partition,
                record_count: 0,
                first_offset: ack.first_offset,
                next_offset: None,
            });
        }
        let summary = &mut self.partitions[index];
        summary.record_count += 1;
        summary.next_offset = ack.next_offset;
    }

    pub(super) fn text(&self) -> String {
        let mut text = self.acked_text();
        if self.resumed_records > 0 {
            let resumed = units::counted(self.resumed_records, "record");
            // Writing to a string cannot fail.
            let _ = write!(text, "; {resumed} of an earlier run had been appended already");
        }
        if self.uncertain_records > 0 {
            let (topic, uncertain) =
                (&self.topic, units::counted(self.uncertain_records, "record"));
            let _ = match self.record_count {
                0 => write!(text, "; {uncertain} may have been appended to {topic}"),
                _ => write!(text, "; {uncertain} without an ack may have been appended, too"),
            };
        }
        text
    }

    fn acked_text(&self) -> String {
        if self.record_count == 0 {
            return match self.uncertain_records {
                0 => format!("nothing was appended to {}", self.topic),
                _ => "no record was acknowledged".to_owned(),
            };
        }
        let mut text = format!("{} to {}", units::counted(self.record_count, "record"), self.topic);
        if let Some(durability) = self.durability {
            // Writing to a string cannot fail.
            let _ = write!(text, " ({durability})");
        }
        let listed = self.partitions.iter().take(PARTITIONS_LISTED_MAX);
        let listed: Vec<_> = listed.map(PartitionSummary::text).collect();
        text = format!("{text}: {}", listed.join(", "));
        let more = self.partitions.len().saturating_sub(PARTITIONS_LISTED_MAX);
        if more > 0 {
            let _ = write!(text, " and {more} more partitions");
        }
        if let (Some(line), 1..) = (self.failed_line, self.acked_behind) {
            let behind = units::count(self.acked_behind);
            let _ = write!(text, "; {behind} of them from lines after line {line}, which failed");
        }
        text
    }
}

impl PartitionSummary {
    fn text(&self) -> String {
        let partition = self.partition;
        match (self.first_offset, self.next_offset) {
            (Some(first), Some(next)) if next == first + 1 => {
                format!("partition {partition} offset {first}")
            }
            (Some(first), Some(next)) => {
                format!("partition {partition} offsets {first} to {}", next - 1)
            }
            _ => format!("partition {partition}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use helix_proto::error as wire;
    use helix_proto::log::v1::{Durability, ErrorReason};

    use super::*;

    #[test]
    fn summary_lists_partitions_and_offsets() {
        let mut summary = ProduceSummary::new("orders");
        assert_eq!(summary.text(), "nothing was appended to orders");
        let ack = |offset: u64| {
            Ok(Ack {
                first_offset: Some(offset),
                next_offset: Some(offset + 1),
                duplicate: false,
                durability: Durability::QuorumSynced,
                watermarks: None,
                topic_id: 1,
            })
        };
        let mut failed = None;
        for (line, partition, offset) in [(1, 2, 7), (2, 0, 4), (3, 2, 8), (4, 2, 9)] {
            summary.add(LineTarget { line, partition }, ack(offset), &mut failed);
        }
        assert!(failed.is_none());
        assert_eq!(
            summary.text(),
            "4 records to orders (QUORUM_SYNCED): partition 2 offsets 7 to 9, partition 0 offset 4"
        );
        let expected = concat!(
            r#"{"topic":"orders","record_count":4,"durability":"QUORUM_SYNCED","partitions":["#,
            r#"{"partition":2,"record_count":3,"first_offset":7,"next_offset":10},"#,
            r#"{"partition":0,"record_count":1,"first_offset":4,"next_offset":5}],"#,
            r#""may_have_applied":false,"uncertain_records":0,"resumed_records":0,"#,
            r#""failed_line":null,"acked_behind":0}"#
        );
        assert_eq!(serde_json::to_string(&summary).unwrap(), expected);
    }

    #[test]
    fn unknown_outcomes_are_stated() {
        let open = || {
            let detail = wire::detail(ErrorReason::OutcomeUnknown);
            Err(Error::from(wire::to_status(&detail, "the leader is gone", None)))
        };
        let mut summary = ProduceSummary::new("orders");
        let mut failed = None;
        summary.add(LineTarget { line: 1, partition: 0 }, open(), &mut failed);
        let expected = "no record was acknowledged; 1 record may have been appended to orders";
        assert_eq!(summary.text(), expected);
        summary.add(LineTarget { line: 2, partition: 0 }, open(), &mut failed);
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(
            (&json["may_have_applied"], &json["uncertain_records"]),
            (&true.into(), &2.into())
        );
        assert!(summary.text().contains("2 records may have been appended"), "{}", summary.text());
    }

    #[test]
    fn reports_lines_of_the_first_failed_batch() {
        let error_of = |reason, message: &str, is_from_earlier_batch| {
            let status = wire::to_status(&wire::detail(reason), message, None);
            let mut failure = (*Error::from(status)).clone();
            failure.is_from_earlier_batch = is_from_earlier_batch;
            Error::from(failure)
        };
        let mut failed = None;
        for (line, partition, message, is_later) in [
            (3, 1, "an earlier batch failed: too large", true),
            (5, 0, "too large", false),
            (6, 1, "an earlier batch failed: too large", true),
            (7, 0, "too large", false),
            (8, 0, "an earlier batch failed: too large", true),
            (9, 2, "gone", false),
        ] {
            let error = error_of(ErrorReason::BatchTooLarge, message, is_later);
            FailedBatch::add(&mut failed, LineTarget { line, partition }, error);
        }
        let error = failed.unwrap().into_error().unwrap_err();
        assert_eq!(error.to_string(), "2 of the lines 5 to 7, one batch");
        assert!(format!("{error:#}").contains("too large"), "{error:#}");
    }
}
