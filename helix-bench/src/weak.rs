//! Whether what a run was told of by weak acks has stayed: an ack that comes before the records are
//! synced on a majority promises less, and a crash takes them back without a word.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use helix_proto::log::v1::ResolvedOffset;
use tokio::time::Instant;

use crate::target::Target;

/// Longest wait for partitions to grow: weak acks come before the commit, and a leader may have to
/// be elected first.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two looks.
const POLL: Duration = Duration::from_millis(200);

/// Counts the acked records that are not there: see [`missing`].
///
/// # Errors
/// Why the partitions could not be looked at.
pub(crate) async fn count_missing(
    target: &Target,
    before: &[ResolvedOffset],
    acked: &BTreeMap<u32, u64>,
) -> Result<u64> {
    let mut least = u64::MAX;
    let mut well_at = Instant::now();
    loop {
        let missing = missing(before, &target.ends().await?, acked);
        if missing < least {
            (least, well_at) = (missing, Instant::now());
        }
        if missing == 0 || well_at.elapsed() > PATIENCE {
            return Ok(missing);
        }
        tokio::time::sleep(POLL).await;
    }
}

/// By how much less partitions have grown than was acked in them, all together: that many records
/// are certainly not there. What others write meanwhile can only hide that records are missing, and
/// never makes it look so.
fn missing(before: &[ResolvedOffset], after: &[ResolvedOffset], acked: &BTreeMap<u32, u64>) -> u64 {
    let end = |ends: &[ResolvedOffset], partition: u32| {
        ends.iter().find(|end| end.partition == partition).map_or(0, |end| end.offset)
    };
    let lacking = |(&partition, &acked): (&u32, &u64)| {
        acked.saturating_sub(end(after, partition).saturating_sub(end(before, partition)))
    };
    acked.iter().map(lacking).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(offsets: [u64; 3]) -> Vec<ResolvedOffset> {
        let end = |(partition, offset)| ResolvedOffset { partition, offset, watermarks: None };
        (0..).zip(offsets).map(end).collect()
    }

    #[test]
    fn partitions_must_have_grown_by_what_was_acked() {
        let acked = BTreeMap::from([(0, 100), (1, 50)]);
        let before = ends([10, 20, 30]);
        assert_eq!(missing(&before, &ends([110, 70, 30]), &acked), 0);
        assert_eq!(missing(&before, &ends([109, 40, 30]), &acked), 1 + 30);
        // What others wrote to one partition does not make up for another one.
        assert_eq!(missing(&before, &ends([500, 60, 30]), &acked), 10);
        // An end that fell back takes no more than all that was acked.
        assert_eq!(missing(&before, &ends([0, 70, 30]), &acked), 100);
    }
}
