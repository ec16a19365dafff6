//! Counts records that were acked before they were synced on a majority and have since been lost.
//!
//! Such an ack does not promise durability, so a crash may lose the records silently.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use helix_proto::log::v1::ResolvedOffset;
use tokio::time::Instant;

use crate::target::BenchTarget;

/// Longest wait for partitions to grow: weak acks precede the commit, and a leader may have to be
/// elected first.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two polls.
const POLL: Duration = Duration::from_millis(200);

/// Counts the acked records that are missing; see [`missing`].
///
/// # Errors
/// The end offsets cannot be looked up.
pub(crate) async fn count_missing(
    target: &BenchTarget,
    before: &[ResolvedOffset],
    acked: &BTreeMap<u32, u64>,
) -> Result<u64> {
    let mut least = u64::MAX;
    let mut last_progress_at = Instant::now();
    loop {
        let missing = missing(before, &target.ends().await?, acked);
        if missing < least {
            (least, last_progress_at) = (missing, Instant::now());
        }
        if missing == 0 || last_progress_at.elapsed() > PROGRESS_TIMEOUT {
            return Ok(missing);
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Returns by how much the partitions have grown less than was acked.
///
/// At least that many records are missing. Concurrent writers can hide missing records but cannot
/// cause a false count.
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
    fn partitions_must_grow_by_the_acked_records() {
        let acked = BTreeMap::from([(0, 100), (1, 50)]);
        let before = ends([10, 20, 30]);
        assert_eq!(missing(&before, &ends([110, 70, 30]), &acked), 0);
        assert_eq!(missing(&before, &ends([109, 40, 30]), &acked), 1 + 30);
        // Records of others in one partition do not make up for missing ones in another.
        assert_eq!(missing(&before, &ends([500, 60, 30]), &acked), 10);
        // An end that moved back counts at most the acked records as missing.
        assert_eq!(missing(&before, &ends([0, 70, 30]), &acked), 100);
    }
}
