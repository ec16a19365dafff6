//! Options of a log.

use std::ops::RangeInclusive;
use std::time::Duration;

use bytes::Bytes;

use crate::error::Error;
use crate::files::open_files::FileCache;
use crate::format::layout::{BLOCK_BYTES, OPAQUE_BYTES_MAX};
use crate::format::sizing::frame_bytes_max;

/// Maximum number of scattered segments that one compaction rewrites together.
pub(crate) const COMPACTION_INPUTS_MAX: usize = 8;

/// Ready segments that appends leave, so that a log can be opened on a full disk.
pub(crate) const RESERVED_SEGMENTS: usize = 1;

const SEGMENT_BYTES: RangeInclusive<u64> = 64 << 10..=1 << 30;

/// Preparation of a log's next segment files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preparation {
    /// Zero-fills a segment while the disk has idle bandwidth, and allocates it otherwise. On a
    /// copy-on-write file system, where zeroes do not help later writes, it always allocates.
    #[default]
    Auto,
    /// Fills every segment with zeroes. Overwriting them syncs faster than writing into allocated
    /// space, but every byte is written twice until segments are recycled.
    Zero,
    /// Allocates every segment. The file system records the first write into each part, which
    /// makes the sync slower. A file system that cannot allocate gets zero-filled segments.
    Allocate,
}

/// Options of a log. The segment size and the identity are checked at open.
#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes of a segment file, a multiple of 4 KiB. Default 64 MiB.
    pub segment_bytes: u64,
    /// Maximum bytes written and synced as one group. Default 4 MiB.
    pub group_bytes: usize,
    /// Bytes of recent payloads kept in memory for readers. Default 16 MiB.
    pub tail_bytes: usize,
    /// Number of segments kept ready. Default 2.
    ///
    /// At least 2 are kept: appends leave the last one for an open on a full disk.
    pub ready_segments: usize,
    /// Preparation of these segments. Default [`Preparation::Auto`].
    pub preparation: Preparation,
    /// Disk space that must stay free when a new segment is created. Default 256 MiB.
    pub reserve_bytes: u64,
    /// Bytes of footer pages cached for reads of sealed segments. Default 8 MiB.
    pub footer_cache_bytes: usize,
    /// Idle time after which a sync marker follows the last group. Default 20 ms.
    ///
    /// An append that arrives during the sync of a marker waits for it. With random arrivals this
    /// affects less than one in a hundred appends, at any rate.
    pub mark_delay: Duration,
    /// Lets the writer's thread busy-poll for more work. Default true.
    ///
    /// It polls only while that makes appends noticeably faster: on a disk that syncs fast, and
    /// while work arrives soon. It never polls with a single CPU.
    pub busy_poll: bool,
    /// Opaque name of the replica, at most 256 bytes. Written into every file of a new log.
    ///
    /// An open checks it; an empty identity at open accepts any.
    pub identity: Bytes,
    /// Maximum bytes that compaction reads and writes per second; half of it while appends wait.
    ///
    /// 0 disables compaction. Default 64 MiB.
    pub compaction_bytes_per_second: u64,
    /// Slack of compaction. Default 128 MiB.
    ///
    /// Compaction starts when the sealed segments below the purge point hold more than one and a
    /// half times their live bytes plus this.
    pub compaction_slack_bytes: u64,
    /// Open files of sealed segments, which logs may share. Default 64 files for this log.
    pub files: FileCache,
}

impl Options {
    /// Returns the maximum number of segments in the pool: ready ones, and those that one
    /// compaction may free.
    pub(crate) fn pool_max(&self) -> usize {
        self.ready_target() + COMPACTION_INPUTS_MAX + 2
    }

    /// Returns the number of segments that the pool should have.
    pub(crate) fn ready_target(&self) -> usize {
        self.ready_segments.max(RESERVED_SEGMENTS + 1)
    }

    /// Returns the maximum number of files that a log keeps open, besides those in [`Self::files`].
    ///
    /// A file takes two descriptors with direct I/O, and one without. Two more descriptors are for
    /// the directory and its lock.
    pub fn open_files_max(&self) -> usize {
        // Two state files and seven segments: the active one, two that are not sealed yet, and
        // those that are prepared, compacted, received for a snapshot, and repaired.
        self.ready_target() + 9
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            segment_bytes: 64 << 20,
            group_bytes: 4 << 20,
            tail_bytes: 16 << 20,
            ready_segments: 2,
            preparation: Preparation::Auto,
            reserve_bytes: 256 << 20,
            footer_cache_bytes: 8 << 20,
            mark_delay: Duration::from_millis(20),
            busy_poll: true,
            identity: Bytes::new(),
            compaction_bytes_per_second: 64 << 20,
            compaction_slack_bytes: 128 << 20,
            files: FileCache::default(),
        }
    }
}

impl Options {
    /// Returns the maximum bytes of an entry's frame: its payload, its head and 64 bytes.
    pub fn entry_bytes_max(&self) -> u64 {
        frame_bytes_max(self.segment_bytes)
    }

    /// Checks these options, as [`Wal::open`](crate::Wal::open) does.
    ///
    /// # Errors
    /// [`Error::Unusable`], with the permitted values.
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
            let len = self.identity.len();
            return unusable(format!("identity has {len} bytes; the limit is {OPAQUE_BYTES_MAX}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_options_out_of_range() {
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
