//! What a log can be told at open.

use std::ops::RangeInclusive;
use std::time::Duration;

use bytes::Bytes;

use crate::Error;
use crate::layout::{BLOCK_BYTES, OPAQUE_BYTES_MAX};
use crate::tip::frame_bytes_max;

const SEGMENT_BYTES: RangeInclusive<u64> = 64 << 10..=1 << 30;

/// Settings of one log. The size of segments and the identity are checked at open.
#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes of a segment file, a multiple of 4 KiB. Default 64 MiB.
    pub segment_bytes: u64,
    /// Most bytes written and synced as one group. Default 4 MiB.
    pub group_bytes: usize,
    /// Recent payloads kept in memory for readers. Default 16 MiB.
    pub tail_bytes: usize,
    /// Segments kept ready for use, written once so that overwriting them syncs fast. Default 2.
    pub ready_segments: usize,
    /// Space that must stay free when a new segment is created. Default 256 MiB.
    pub reserve_bytes: u64,
    /// Footer pages kept in memory for reads of sealed segments. Default 8 MiB.
    pub footer_cache_bytes: usize,
    /// After this much idle time the last group gets a mark of its own. Default 20 ms: what comes
    /// while a mark is synced waits for it, and where entries come at random that are then less
    /// than one in a hundred of them, however many come a second.
    pub mark_delay: Duration,
    /// For how long the writer's thread stays awake for what comes next, where that has been coming
    /// within this time; 0, or with one processor, not at all. Default 500 µs: longer than a caller
    /// with one append in flight takes to come back, also where a majority has to have it first.
    pub idle_poll: Duration,
    /// Written into every file of a new log and checked at open: an opaque name of the replica
    /// that the log belongs to, at most 256 bytes. Empty at open accepts any.
    pub identity: Bytes,
    /// Most bytes that compaction reads and writes in a second; half of it while appends wait.
    /// 0: none is done. Default 64 MiB.
    pub compaction_bytes_per_second: u64,
    /// Compaction makes space once sealed segments below the purge point hold more than one and a
    /// half times what streams still need of them, and so much. Default 128 MiB.
    pub compaction_slack_bytes: u64,
}

impl Options {
    /// Most segments that are kept for use: those to be ready, and what one compaction may free.
    pub(crate) fn pool_max(&self) -> usize {
        self.ready_segments + crate::choose::SCATTERED_AT_ONCE + 2
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            segment_bytes: 64 << 20,
            group_bytes: 4 << 20,
            tail_bytes: 16 << 20,
            ready_segments: 2,
            reserve_bytes: 256 << 20,
            footer_cache_bytes: 8 << 20,
            mark_delay: Duration::from_millis(20),
            idle_poll: Duration::from_micros(500),
            identity: Bytes::new(),
            compaction_bytes_per_second: 64 << 20,
            compaction_slack_bytes: 128 << 20,
        }
    }
}

impl Options {
    /// Most bytes of an entry's frame: its payload, its head and 64 bytes.
    pub fn entry_bytes_max(&self) -> u64 {
        frame_bytes_max(self.segment_bytes)
    }

    /// What [`Wal::open`](crate::Wal::open) would say of these settings.
    ///
    /// # Errors
    /// [`Error::Unusable`], with what a log can have instead.
    pub fn check(&self) -> Result<(), Error> {
        let unusable = |what: String| Err(Error::Unusable(what));
        if !SEGMENT_BYTES.contains(&self.segment_bytes)
            || !self.segment_bytes.is_multiple_of(BLOCK_BYTES)
        {
            let (least, most) = (SEGMENT_BYTES.start(), SEGMENT_BYTES.end());
            return unusable(format!(
                "segment_bytes is {}, not a multiple of {BLOCK_BYTES} from {least} to {most}",
                self.segment_bytes
            ));
        }
        if self.identity.len() > OPAQUE_BYTES_MAX {
            return unusable(format!("an identity has at most {OPAQUE_BYTES_MAX} bytes"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_log_can_have_is_refused() {
        let with_segments = |segment_bytes| Options { segment_bytes, ..Options::default() };
        for good in [64 << 10, (64 << 10) + 4096, 64 << 20, 1 << 30] {
            with_segments(good).check().unwrap();
        }
        for bad in [0, 60 << 10, (64 << 10) + 512, (64 << 20) - 1, (1 << 30) + 4096, u64::MAX] {
            let error = with_segments(bad).check().unwrap_err().to_string();
            assert!(error.contains(&format!("{bad}, not")), "{error}");
        }
        let with_name = |len| Options { identity: vec![7; len].into(), ..Options::default() };
        with_name(OPAQUE_BYTES_MAX).check().unwrap();
        assert!(matches!(with_name(OPAQUE_BYTES_MAX + 1).check(), Err(Error::Unusable(_))));
    }
}
