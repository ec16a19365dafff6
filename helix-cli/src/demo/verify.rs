//! Compares the records read from a partition with the acks of its writer.
//! Each kind of damage has a counter; a correct log has no findings.

use super::workload::DemoWorkload;

/// Maximum number of findings with a description; further ones are only counted.
const EXAMPLES_MAX: usize = 10;

/// Marks a sequence number without a record read.
const UNREAD: u64 = u64::MAX;

/// A batch acked by the service.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AckedBatch {
    /// Sequence number of its first record.
    pub(crate) first_sequence: u64,
    pub(crate) record_count: u64,
    /// Offset of its first record, from the ack.
    pub(crate) first_offset: u64,
}

/// Findings of the verification. Counts records, except `gaps`.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct VerifyFindings {
    /// Acked records that were not read.
    pub(crate) missing: u64,
    /// Records that were read more than once.
    pub(crate) doubled: u64,
    /// Records with other bytes than written.
    pub(crate) changed: u64,
    /// Records after a record that was written later.
    pub(crate) out_of_order: u64,
    /// Records at another offset than in the ack.
    pub(crate) displaced: u64,
    /// Gaps in the offsets.
    pub(crate) gaps: u64,
    pub(crate) examples: Vec<String>,
}

impl VerifyFindings {
    pub(crate) fn total(&self) -> u64 {
        self.missing + self.doubled + self.changed + self.out_of_order + self.displaced + self.gaps
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.missing += other.missing;
        self.doubled += other.doubled;
        self.changed += other.changed;
        self.out_of_order += other.out_of_order;
        self.displaced += other.displaced;
        self.gaps += other.gaps;
        for example in other.examples {
            self.example(|| example);
        }
    }

    fn example(&mut self, text: impl FnOnce() -> String) {
        if self.examples.len() < EXAMPLES_MAX {
            self.examples.push(text());
        }
    }
}

/// Verifies the records of a partition in read order.
#[derive(Debug)]
pub(crate) struct Verifier {
    workload: DemoWorkload,
    partition: u32,
    /// Offset of each record read, by sequence number.
    offsets: Vec<u64>,
    /// One past the highest sequence number read.
    next_sequence: u64,
    next_offset: u64,
    read: u64,
    findings: VerifyFindings,
}

impl Verifier {
    pub(crate) fn new(workload: DemoWorkload, partition: u32) -> Self {
        let records =
            usize::try_from(workload.records_of(partition)).expect("record count fits in memory");
        Self {
            workload,
            partition,
            offsets: vec![UNREAD; records],
            next_sequence: 0,
            next_offset: 0,
            read: 0,
            findings: VerifyFindings::default(),
        }
    }

    /// Adds the next record.
    pub(crate) fn add(&mut self, offset: u64, value: &[u8]) {
        self.read += 1;
        let (partition, expected) = (self.partition, self.next_offset);
        if offset != expected {
            self.findings.gaps += 1;
            self.findings.example(|| {
                format!("partition {partition}: offset {offset} instead of {expected}")
            });
        }
        self.next_offset = offset + 1;
        match self.workload.check(partition, value) {
            Ok(sequence) => self.add_sequence(sequence, offset),
            Err(changed) => {
                self.findings.changed += 1;
                self.findings.example(|| {
                    format!("partition {partition}: the record at offset {offset} {changed}")
                });
            }
        }
    }

    fn add_sequence(&mut self, sequence: u64, offset: u64) {
        let (partition, next) = (self.partition, self.next_sequence);
        let known = &mut self.offsets[usize::try_from(sequence).expect("checked by the workload")];
        if *known != UNREAD {
            let first = *known;
            self.findings.doubled += 1;
            self.findings.example(|| {
                format!(
                    "partition {partition}: record {sequence} is at offset {first} and again at \
                     {offset}"
                )
            });
            return;
        }
        *known = offset;
        if sequence < next {
            self.findings.out_of_order += 1;
            self.findings.example(|| {
                format!(
                    "partition {partition}: record {sequence} at offset {offset} comes after \
                     record {}",
                    next - 1
                )
            });
        }
        self.next_sequence = next.max(sequence + 1);
    }

    /// Returns the number of records read.
    pub(crate) fn read(&self) -> u64 {
        self.read
    }

    /// Compares the records with the acks, after all records were added.
    pub(crate) fn finish(mut self, acked: &[AckedBatch]) -> VerifyFindings {
        for batch in acked {
            for index in 0..batch.record_count {
                self.compare(batch.first_sequence + index, batch.first_offset + index);
            }
        }
        self.findings
    }

    fn compare(&mut self, sequence: u64, acked: u64) {
        let partition = self.partition;
        let found = usize::try_from(sequence).ok().and_then(|index| self.offsets.get(index));
        match found.copied().unwrap_or(UNREAD) {
            UNREAD => {
                self.findings.missing += 1;
                self.findings.example(|| {
                    format!(
                        "partition {partition}: record {sequence} was acked at offset {acked} and \
                         is missing"
                    )
                });
            }
            found if found != acked => {
                self.findings.displaced += 1;
                self.findings.example(|| {
                    format!(
                        "partition {partition}: record {sequence} was acked at offset {acked} and \
                         is at {found}"
                    )
                });
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARTITION: u32 = 1;

    fn workload() -> DemoWorkload {
        DemoWorkload { seed: 3, records: 40, record_bytes: 32, partitions: 4 }
    }

    /// Returns all ten records of the partition in order.
    fn written() -> Vec<Vec<u8>> {
        (0..10).map(|sequence| workload().value(PARTITION, sequence)).collect()
    }

    fn acked() -> Vec<AckedBatch> {
        [(0, 4), (4, 6)]
            .map(|(first, record_count)| AckedBatch {
                first_sequence: first,
                record_count,
                first_offset: first,
            })
            .to_vec()
    }

    fn check(read: &[Vec<u8>]) -> VerifyFindings {
        let mut verifier = Verifier::new(workload(), PARTITION);
        for (offset, value) in (0..).zip(read) {
            verifier.add(offset, value);
        }
        verifier.finish(&acked())
    }

    #[test]
    fn accepts_written_records() {
        assert_eq!(check(&written()), VerifyFindings::default());
    }

    #[test]
    fn detects_missing_record() {
        let mut read = written();
        read.pop();
        let findings = check(&read);
        assert_eq!((findings.missing, findings.total()), (1, 1));
        assert!(findings.examples[0].contains("record 9 was acked at offset 9"));
    }

    #[test]
    fn missing_record_displaces_later_records() {
        let mut read = written();
        read.remove(4);
        let findings = check(&read);
        assert_eq!((findings.missing, findings.displaced, findings.out_of_order), (1, 5, 0));
    }

    #[test]
    fn detects_duplicate_record() {
        let mut read = written();
        read.push(read[6].clone());
        let findings = check(&read);
        assert_eq!((findings.doubled, findings.total()), (1, 1));
        assert!(findings.examples[0].contains("offset 6 and again at 10"));
    }

    #[test]
    fn changed_record_is_also_missing() {
        let mut read = written();
        read[3][20] ^= 1;
        let findings = check(&read);
        assert_eq!((findings.changed, findings.missing, findings.total()), (1, 1, 2));
    }

    #[test]
    fn detects_reordered_records() {
        let mut read = written();
        read.swap(2, 3);
        let findings = check(&read);
        assert_eq!((findings.out_of_order, findings.displaced), (1, 2));
        assert_eq!(findings.total(), 3);
    }

    #[test]
    fn detects_gap_in_offsets() {
        let mut verifier = Verifier::new(workload(), PARTITION);
        for (sequence, value) in (0..).zip(written()) {
            verifier.add(if sequence < 8 { sequence } else { sequence + 1 }, &value);
        }
        assert_eq!(verifier.read(), 10);
        let findings = verifier.finish(&acked());
        assert_eq!((findings.gaps, findings.displaced), (1, 2));
    }

    #[test]
    fn unacked_records_may_be_present_or_absent() {
        let acked = &acked()[..1];
        for count in [4, 7, 10] {
            let mut verifier = Verifier::new(workload(), PARTITION);
            for (offset, value) in (0..).zip(written()).take(count) {
                verifier.add(offset, &value);
            }
            assert_eq!(verifier.finish(acked), VerifyFindings::default());
        }
    }

    #[test]
    fn findings_are_summed_and_examples_are_bounded() {
        let mut all = VerifyFindings::default();
        for _ in 0..3 {
            all.add(check(&[]));
        }
        assert_eq!((all.missing, all.total()), (30, 30));
        assert_eq!(all.examples.len(), EXAMPLES_MAX);
    }
}
