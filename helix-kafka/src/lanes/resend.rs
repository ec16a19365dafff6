//! Order after a failure: which batches wait until the client has sent the failed one again.

use std::time::Duration;

use tokio::time::Instant;

/// Time after a failure in which batches behind the failed one are sent back to the client.
const RESEND_WAIT: Duration = Duration::from_secs(30);

/// Oldest failed batch that the client has not sent again.
///
/// The client had sent later batches before it knew of the failure. The cluster would refuse them
/// as out of order. librdkafka then begins an epoch and numbers all batches again, so batches with
/// an unknown outcome could be stored twice.
#[derive(Debug, Default)]
pub(super) struct PendingResend {
    failed: Option<FailedBatch>,
}

#[derive(Debug, Clone, Copy)]
struct FailedBatch {
    sequence: u32,
    at: Instant,
}

impl PendingResend {
    /// Waits for this batch. `None` is a batch without a sequence, for which nothing waits.
    pub(super) fn expect(&mut self, sequence: Option<u32>) {
        self.failed = sequence.map(|sequence| FailedBatch { sequence, at: Instant::now() });
    }

    /// Returns true if the batch with this sequence is behind a batch that has not come again.
    pub(super) fn holds_back(&mut self, sequence: Option<u32>) -> bool {
        let Some(failed) = self.failed else { return false };
        let is_behind = sequence.is_some_and(|sequence| is_after(sequence, failed.sequence));
        if is_behind && failed.at.elapsed() < RESEND_WAIT {
            return true;
        }
        self.failed = None;
        false
    }
}

/// Returns true if `sequence` comes after `earlier` in Kafka's sequences of 31 bits.
fn is_after(sequence: u32, earlier: u32) -> bool {
    const PERIOD: u32 = 1 << 31;
    let ahead = sequence.wrapping_sub(earlier) % PERIOD;
    ahead != 0 && ahead < PERIOD / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn later_batches_wait_for_the_failed_one() {
        let mut pending = PendingResend::default();
        assert!(!pending.holds_back(Some(9)), "nothing has failed");
        pending.expect(Some(10));
        assert!(pending.holds_back(Some(11)) && pending.holds_back(Some(40)));
        assert!(!pending.holds_back(Some(10)), "it came again");
        assert!(!pending.holds_back(Some(11)));
        pending.expect(Some(10));
        assert!(!pending.holds_back(Some(4)), "an earlier one came again");
        pending.expect(None);
        assert!(!pending.holds_back(None));
    }

    /// A client that has given the batch up learns from the cluster that there is a gap.
    #[tokio::test(start_paused = true)]
    async fn gap_that_stays_reaches_the_cluster() {
        let mut pending = PendingResend::default();
        pending.expect(Some(10));
        tokio::time::advance(RESEND_WAIT).await;
        assert!(!pending.holds_back(Some(11)));
    }

    #[test]
    fn later_sequences_are_after_earlier_ones_across_the_wrap() {
        const LAST: u32 = (1 << 31) - 1;
        for (sequence, earlier) in [(1, 0), (500, 7), (0, LAST), (40, LAST - 9), (LAST, LAST - 1)] {
            assert!(is_after(sequence, earlier), "{sequence} {earlier}");
            assert!(!is_after(earlier, sequence), "{earlier} {sequence}");
        }
        assert!(!is_after(7, 7));
    }
}
