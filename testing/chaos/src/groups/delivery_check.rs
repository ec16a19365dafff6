//! Compares what the members of a group received with what was acknowledged.
//!
//! A group promises each record at least once and skips none, so the offsets that its members have
//! received grow without gaps. A commit covers only records that a member has received, and never
//! moves back.

use std::collections::BTreeMap;

use tokio::time::Instant;

/// Deliveries of all partitions of the topic.
#[derive(Debug)]
pub(crate) struct DeliveryCheck {
    partitions: Vec<PartitionDeliveries>,
    /// Deliveries of records that had been delivered before.
    repeated: u64,
    /// Times that a member lost its partitions.
    losses: u64,
    violation: Option<String>,
}

#[derive(Debug, Default)]
struct PartitionDeliveries {
    /// Acknowledged records by offset: the value, and the time of the ack.
    acked: BTreeMap<u64, (u64, Instant)>,
    delivered: BTreeMap<u64, Delivered>,
    /// All offsets before it were delivered.
    covered: u64,
    committed: u64,
}

#[derive(Debug)]
struct Delivered {
    value: u64,
    /// Process ids of the members that received it, each time that one did.
    to: Vec<(u32, Instant)>,
}

impl DeliveryCheck {
    pub(crate) fn new(partitions: u32) -> Self {
        let partitions = (0..partitions).map(|_| PartitionDeliveries::default()).collect();
        Self { partitions, repeated: 0, losses: 0, violation: None }
    }

    /// Notes an acknowledged batch.
    pub(crate) fn on_ack(&mut self, partition: u32, first: u64, values: &[u64]) {
        let known = &mut self.partitions[partition as usize];
        let mut wrong = None;
        for (offset, value) in (first..).zip(values.iter().copied()) {
            known.acked.insert(offset, (value, Instant::now()));
            // A member may have it before its writer has the ack.
            let delivered = known.delivered.get(&offset).map_or(value, |it| it.value);
            if delivered != value {
                wrong = Some(format!(
                    "partition {partition}, offset {offset}: a member received {delivered}, and \
                     {value} was acknowledged"
                ));
            }
        }
        if let Some(wrong) = wrong {
            self.violate(wrong);
        }
    }

    /// Notes records that the member with this process id received.
    pub(crate) fn on_delivery(&mut self, member: u32, partition: u32, first: u64, values: &[u64]) {
        let Some(known) = self.partitions.get_mut(partition as usize) else {
            return self.violate(format!("a member received partition {partition}"));
        };
        let mut wrong = None;
        for (offset, value) in (first..).zip(values.iter().copied()) {
            let new = || Delivered { value, to: Vec::new() };
            let delivered = known.delivered.entry(offset).or_insert_with(new);
            self.repeated += u64::from(!delivered.to.is_empty());
            delivered.to.push((member, Instant::now()));
            let other = known.acked.get(&offset).map_or(delivered.value, |acked| acked.0);
            if value != other {
                wrong = Some(format!(
                    "partition {partition}, offset {offset}: a member received {value}, and it is \
                     {other} for others"
                ));
            }
        }
        while known.delivered.contains_key(&known.covered) {
            known.covered += 1;
        }
        if let Some(wrong) = wrong {
            self.violate(wrong);
        }
    }

    /// Notes the committed offset of a partition.
    pub(crate) fn on_commit(&mut self, partition: u32, offset: u64) {
        let known = &mut self.partitions[partition as usize];
        let before = std::mem::replace(&mut known.committed, offset);
        if offset < before {
            self.violate(format!(
                "partition {partition}: the committed offset fell from {before} to {offset}"
            ));
        }
    }

    /// Notes that a member has lost its partitions, such as after a session without a response.
    pub(crate) fn on_loss(&mut self) {
        self.losses += 1;
    }

    pub(crate) fn losses(&self) -> u64 {
        self.losses
    }

    /// Notes a broken promise; the first one counts.
    pub(crate) fn violate(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    pub(crate) fn violation(&self) -> Option<&str> {
        self.violation.as_deref()
    }

    /// Returns the offset after the last acknowledged record of each partition.
    pub(crate) fn acked_ends(&self) -> Vec<u64> {
        let end = |it: &PartitionDeliveries| it.acked.last_key_value().map_or(0, |(it, _)| it + 1);
        self.partitions.iter().map(end).collect()
    }

    /// Returns the offset after the last record of each partition that a member has received or
    /// that was acknowledged.
    pub(crate) fn seen_ends(&self) -> Vec<u64> {
        let delivered = self.partitions.iter().map(|it| it.delivered.last_key_value());
        let ends = delivered.zip(self.acked_ends());
        ends.map(|(last, acked)| last.map_or(acked, |(it, _)| acked.max(it + 1))).collect()
    }

    /// Returns the committed offset of each partition.
    pub(crate) fn committed(&self) -> Vec<u64> {
        self.partitions.iter().map(|it| it.committed).collect()
    }

    /// Returns the first partition in which a record before these ends was not delivered, and the
    /// offset of that record.
    pub(crate) fn first_missing(&self, ends: &[u64]) -> Option<(usize, u64)> {
        let covered = self.partitions.iter().map(|it| it.covered);
        covered.zip(ends).enumerate().find_map(|(partition, (covered, end))| {
            (covered < *end).then_some((partition, covered))
        })
    }

    /// Returns the first record from these offsets on that was delivered twice, in words.
    pub(crate) fn first_repeated(&self, from: &[u64]) -> Option<String> {
        self.partitions.iter().zip(from).enumerate().find_map(|(partition, (known, from))| {
            let mut repeated = known.delivered.range(from..).filter(|(_, it)| it.to.len() > 1);
            let (offset, Delivered { to, .. }) = repeated.next()?;
            let ago = |at: &Instant| format!("{} ms ago", at.elapsed().as_millis());
            let to = to.iter().map(|(member, at)| format!("to {member} {}", ago(at)));
            let acked = known.acked.get(offset).map_or("never".to_owned(), |(_, at)| ago(at));
            Some(format!(
                "partition {partition}, offset {offset} was delivered {}, and acknowledged {acked}",
                to.collect::<Vec<_>>().join(" and ")
            ))
        })
    }

    /// Returns the records that were acknowledged, delivered, and delivered again.
    pub(crate) fn counts(&self) -> (usize, usize, u64) {
        let acked = self.partitions.iter().map(|it| it.acked.len()).sum();
        let delivered = self.partitions.iter().map(|it| it.delivered.len()).sum();
        (acked, delivered, self.repeated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two partitions; four records of the second are acknowledged.
    fn check() -> DeliveryCheck {
        let mut check = DeliveryCheck::new(2);
        check.on_ack(1, 0, &[10, 11]);
        check.on_ack(1, 2, &[12, 13]);
        check
    }

    #[test]
    fn a_skipped_record_is_missing_until_it_arrives() {
        let mut check = check();
        assert_eq!(check.acked_ends(), [0, 4]);
        check.on_delivery(7, 1, 2, &[12, 13]);
        check.on_delivery(7, 1, 0, &[10]);
        assert_eq!(check.first_missing(&check.acked_ends()), Some((1, 1)));
        assert_eq!(check.first_missing(&[0, 1]), None);
        check.on_delivery(7, 1, 1, &[11]);
        assert_eq!(check.first_missing(&check.acked_ends()), None);
        assert_eq!((check.counts(), check.violation()), ((4, 4, 0), None));
    }

    #[test]
    fn repeated_records_are_found_where_they_may_not_be() {
        let mut check = check();
        check.on_delivery(7, 1, 0, &[10, 11, 12]);
        check.on_delivery(7, 1, 1, &[11, 12]);
        assert_eq!(check.counts(), (4, 3, 2));
        let repeated = check.first_repeated(&[0, 0]).unwrap();
        assert!(repeated.starts_with("partition 1, offset 1 was delivered to 7 "), "{repeated}");
        assert_eq!(check.first_repeated(&[0, 3]), None);
        assert_eq!(check.seen_ends(), [0, 4]);
        check.on_delivery(7, 1, 4, &[14]);
        assert_eq!(check.seen_ends(), [0, 5], "its writer has no ack yet");
        assert!(check.violation().is_none());
    }

    #[test]
    fn other_values_are_violations() {
        let mut other_than_acked = check();
        other_than_acked.on_delivery(7, 1, 0, &[10, 99]);
        let mut other_than_before = check();
        other_than_before.on_delivery(7, 0, 7, &[1]);
        other_than_before.on_delivery(7, 0, 7, &[2]);
        let mut acked_later = check();
        acked_later.on_delivery(7, 0, 0, &[5]);
        acked_later.on_ack(0, 0, &[6]);
        let mut no_partition = check();
        no_partition.on_delivery(7, 2, 0, &[1]);
        for (check, wanted) in [
            (other_than_acked, "partition 1, offset 1: a member received 99, and it is 11"),
            (other_than_before, "partition 0, offset 7: a member received 2, and it is 1"),
            (acked_later, "partition 0, offset 0: a member received 5, and 6 was acknowledged"),
            (no_partition, "a member received partition 2"),
        ] {
            let violation = check.violation().unwrap();
            assert!(violation.starts_with(wanted), "{violation}");
        }
    }

    #[test]
    fn commits_never_move_back() {
        let mut check = check();
        for offset in [0, 3, 3, 4] {
            check.on_commit(1, offset);
        }
        assert_eq!((check.violation(), check.committed()), (None, vec![0, 4]));
        check.on_commit(1, 3);
        let wanted = "partition 1: the committed offset fell from 4 to 3";
        assert_eq!(check.violation(), Some(wanted));
    }
}
