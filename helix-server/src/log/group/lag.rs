//! Lag of committed offsets.

use crate::log::Watermarks;

/// Lag of a committed offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OffsetLag {
    /// Records to read.
    pub lag: u64,
    /// Offsets that retention or a trim has removed before the group read them.
    pub lost: u64,
}

impl OffsetLag {
    /// Returns the lag of an offset in a partition with these bounds.
    pub fn new(offset: u64, bounds: Watermarks) -> Self {
        let Watermarks { log_start, high_watermark } = bounds;
        Self {
            lag: high_watermark.saturating_sub(offset.max(log_start)),
            lost: log_start.saturating_sub(offset),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lag_counts_what_can_be_read_and_loss_what_cannot() {
        let lag = |offset, log_start, high_watermark| {
            let OffsetLag { lag, lost } =
                OffsetLag::new(offset, Watermarks { log_start, high_watermark });
            (lag, lost)
        };
        assert_eq!(lag(10, 0, 1_000), (990, 0));
        assert_eq!(lag(10, 1_000, 1_000), (0, 990));
        assert_eq!(lag(10, 600, 1_000), (400, 590));
        assert_eq!(lag(600, 600, 1_000), (400, 0));
        assert_eq!(lag(1_000, 600, 1_000), (0, 0));
        assert_eq!(lag(u64::MAX, 600, 1_000), (0, 0), "beyond the end");
        assert_eq!(lag(0, u64::MAX, u64::MAX), (0, u64::MAX));
    }
}
