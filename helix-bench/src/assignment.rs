//! Assigns work to lanes: partitions to writers, offset ranges to readers.

/// Returns the partitions that lane `lane` of `lanes` writes to in turn.
///
/// With fewer partitions than lanes, several lanes share a partition; otherwise each partition has
/// one writer.
pub(crate) fn partitions_of(lane: usize, lanes: usize, partitions: &[u32]) -> Vec<u32> {
    if lanes >= partitions.len() {
        vec![partitions[lane % partitions.len()]]
    } else {
        partitions.iter().copied().skip(lane).step_by(lanes).collect()
    }
}

/// Half-open range of offsets in a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OffsetRange {
    pub(crate) partition: u32,
    pub(crate) from: u64,
    pub(crate) until: u64,
}

/// Splits ranges over lanes so that each record is read once.
///
/// Returns a list of ranges for each lane, which may be empty. Within a partition the ranges begin
/// at multiples of `step` from its start, so that they do not split batches.
pub(crate) fn split(ranges: &[OffsetRange], lanes: usize, step: u64) -> Vec<Vec<OffsetRange>> {
    let mut shares = vec![Vec::new(); lanes];
    if lanes <= ranges.len() {
        for (number, range) in ranges.iter().enumerate() {
            shares[number % lanes].push(*range);
        }
        return shares;
    }
    for (number, range) in ranges.iter().enumerate() {
        let readers: Vec<usize> = (number..lanes).step_by(ranges.len()).collect();
        for (lane, share) in readers.iter().zip(cut(*range, readers.len() as u64, step)) {
            shares[*lane].push(share);
        }
    }
    shares
}

/// Cuts a range into at most `parts` ranges of nearly equal length.
fn cut(range: OffsetRange, parts: u64, step: u64) -> Vec<OffsetRange> {
    let steps = (range.until - range.from).div_ceil(step);
    let edge = |part: u64| range.until.min(range.from + steps * part / parts * step);
    (0..parts)
        .map(|part| OffsetRange { from: edge(part), until: edge(part + 1), ..range })
        .filter(|share| share.from < share.until)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(partition: u32, from: u64, until: u64) -> OffsetRange {
        OffsetRange { partition, from, until }
    }

    #[test]
    fn each_partition_has_one_writer_if_there_are_enough() {
        let partitions: Vec<u32> = (0..1000).collect();
        let mut all: Vec<u32> =
            (0..64).flat_map(|lane| partitions_of(lane, 64, &partitions)).collect();
        all.sort_unstable();
        assert_eq!(all, partitions);
        assert_eq!(partitions_of(0, 64, &partitions).len(), 16);
    }

    #[test]
    fn few_partitions_are_shared_evenly() {
        let lanes: Vec<_> = (0..8).map(|lane| partitions_of(lane, 8, &[0, 1, 2, 3])).collect();
        assert_eq!(lanes[1], [1]);
        assert_eq!(lanes[5], [1]);
    }

    #[test]
    fn range_is_split_at_batch_boundaries() {
        let shares = split(&[range(0, 50, 1050)], 4, 100);
        assert_eq!(
            shares.concat(),
            [range(0, 50, 250), range(0, 250, 550), range(0, 550, 750), range(0, 750, 1050)]
        );
    }

    #[test]
    fn split_ranges_cover_each_record_once() {
        for lanes in 1..9 {
            let ranges = [range(0, 0, 1003), range(1, 7, 500), range(2, 0, 1)];
            let mut all = split(&ranges, lanes, 100).concat();
            all.sort_by_key(|share| (share.partition, share.from));
            for whole in ranges {
                let mut next = whole.from;
                for share in all.iter().filter(|share| share.partition == whole.partition) {
                    assert_eq!(share.from, next);
                    next = share.until;
                }
                assert_eq!(next, whole.until);
            }
        }
    }
}
