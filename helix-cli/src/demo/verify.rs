//! Compares what was read from one partition with what was acked when it was written.
//! Pure; a healthy log gives no finding, and every kind of damage gives one of its own.

use super::workload::Workload;

/// Findings described word for word; the others are counted.
const EXAMPLES_MAX: usize = 10;

/// No record with this sequence was read.
const UNSEEN: u64 = u64::MAX;

/// A batch that the service has acked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AckedBatch {
    /// Sequence of its first record.
    pub(crate) first_sequence: u64,
    pub(crate) record_count: u64,
    /// Offset that the ack gave to its first record.
    pub(crate) first_offset: u64,
}

/// What is wrong. Counts of records, save `gaps`.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Findings {
    /// Acked, but not there.
    pub(crate) missing: u64,
    /// There a second time.
    pub(crate) doubled: u64,
    /// Not the bytes that were written.
    pub(crate) changed: u64,
    /// Behind a record that was written later.
    pub(crate) out_of_order: u64,
    /// At another offset than the ack said.
    pub(crate) displaced: u64,
    /// Places where the offsets are not dense.
    pub(crate) gaps: u64,
    pub(crate) examples: Vec<String>,
}

impl Findings {
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

/// Takes the records of one partition in the order in which they are read.
#[derive(Debug)]
pub(crate) struct Verifier {
    workload: Workload,
    partition: u32,
    /// Offset of each record that was read, by sequence.
    offsets: Vec<u64>,
    /// One past the last sequence read in order.
    next_sequence: u64,
    next_offset: u64,
    read: u64,
    findings: Findings,
}

impl Verifier {
    pub(crate) fn new(workload: Workload, partition: u32) -> Self {
        let records = usize::try_from(workload.records_of(partition)).expect("it fits memory");
        Self {
            workload,
            partition,
            offsets: vec![UNSEEN; records],
            next_sequence: 0,
            next_offset: 0,
            read: 0,
            findings: Findings::default(),
        }
    }

    /// Takes the next record.
    pub(crate) fn see(&mut self, offset: u64, value: &[u8]) {
        self.read += 1;
        let (partition, expected) = (self.partition, self.next_offset);
        if offset != expected {
            self.findings.gaps += 1;
            self.findings.example(|| {
                format!("partition {partition}: offset {offset} stands where {expected} should")
            });
        }
        self.next_offset = offset + 1;
        match self.workload.check(partition, value) {
            Ok(sequence) => self.place(sequence, offset),
            Err(changed) => {
                self.findings.changed += 1;
                self.findings.example(|| {
                    format!("partition {partition}: the record at offset {offset} {changed}")
                });
            }
        }
    }

    fn place(&mut self, sequence: u64, offset: u64) {
        let (partition, next) = (self.partition, self.next_sequence);
        let seen = &mut self.offsets[usize::try_from(sequence).expect("checked by the workload")];
        if *seen != UNSEEN {
            let first = *seen;
            self.findings.doubled += 1;
            self.findings.example(|| {
                format!(
                    "partition {partition}: record {sequence} is at offset {first} and again at \
                     {offset}"
                )
            });
            return;
        }
        *seen = offset;
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

    /// How many records were taken.
    pub(crate) fn read(&self) -> u64 {
        self.read
    }

    /// Compares with the acks, once everything has been read.
    pub(crate) fn finish(mut self, acked: &[AckedBatch]) -> Findings {
        for batch in acked {
            for place in 0..batch.record_count {
                self.compare(batch.first_sequence + place, batch.first_offset + place);
            }
        }
        self.findings
    }

    fn compare(&mut self, sequence: u64, acked: u64) {
        let partition = self.partition;
        let found = usize::try_from(sequence).ok().and_then(|place| self.offsets.get(place));
        match found.copied().unwrap_or(UNSEEN) {
            UNSEEN => {
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

    fn workload() -> Workload {
        Workload { seed: 3, records: 40, record_bytes: 32, partitions: 4 }
    }

    /// All ten records of the partition, in order.
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

    fn check(read: &[Vec<u8>]) -> Findings {
        let mut verifier = Verifier::new(workload(), PARTITION);
        for (offset, value) in (0..).zip(read) {
            verifier.see(offset, value);
        }
        verifier.finish(&acked())
    }

    #[test]
    fn what_was_written_is_accepted() {
        assert_eq!(check(&written()), Findings::default());
    }

    #[test]
    fn a_missing_record_is_seen() {
        let mut read = written();
        read.pop();
        let findings = check(&read);
        assert_eq!((findings.missing, findings.total()), (1, 1));
        assert!(findings.examples[0].contains("record 9 was acked at offset 9"));
    }

    #[test]
    fn a_missing_record_in_the_middle_displaces_the_others() {
        let mut read = written();
        read.remove(4);
        let findings = check(&read);
        assert_eq!((findings.missing, findings.displaced, findings.out_of_order), (1, 5, 0));
    }

    #[test]
    fn a_doubled_record_is_seen() {
        let mut read = written();
        read.push(read[6].clone());
        let findings = check(&read);
        assert_eq!((findings.doubled, findings.total()), (1, 1));
        assert!(findings.examples[0].contains("offset 6 and again at 10"));
    }

    #[test]
    fn a_changed_record_is_seen_and_missing() {
        let mut read = written();
        read[3][20] ^= 1;
        let findings = check(&read);
        assert_eq!((findings.changed, findings.missing, findings.total()), (1, 1, 2));
    }

    #[test]
    fn reordered_records_are_seen() {
        let mut read = written();
        read.swap(2, 3);
        let findings = check(&read);
        assert_eq!((findings.out_of_order, findings.displaced), (1, 2));
        assert_eq!(findings.total(), 3);
    }

    #[test]
    fn a_hole_in_the_offsets_is_seen() {
        let mut verifier = Verifier::new(workload(), PARTITION);
        for (sequence, value) in (0..).zip(written()) {
            verifier.see(if sequence < 8 { sequence } else { sequence + 1 }, &value);
        }
        assert_eq!(verifier.read(), 10);
        let findings = verifier.finish(&acked());
        assert_eq!((findings.gaps, findings.displaced), (1, 2));
    }

    #[test]
    fn what_was_never_acked_may_be_there_or_not() {
        let acked = &acked()[..1];
        for count in [4, 7, 10] {
            let mut verifier = Verifier::new(workload(), PARTITION);
            for (offset, value) in (0..).zip(written()).take(count) {
                verifier.see(offset, &value);
            }
            assert_eq!(verifier.finish(acked), Findings::default());
        }
    }

    #[test]
    fn findings_add_up_and_examples_are_bounded() {
        let mut all = Findings::default();
        for _ in 0..3 {
            all.add(check(&[]));
        }
        assert_eq!((all.missing, all.total()), (30, 30));
        assert_eq!(all.examples.len(), EXAMPLES_MAX);
    }
}
