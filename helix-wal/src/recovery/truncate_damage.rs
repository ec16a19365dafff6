//! Discards the damaged end of a log, and everything after it. A last resort without other
//! replicas.
//!
//! The damage is described first, and discarded only on request.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::error::Error;
use crate::files::data_dir::lock_dir;
use crate::files::open_files::{FileCache, OpenFiles};
use crate::files::scan::scan_beyond;
use crate::format::frame::{FIRST_GROUP, FrameHeader, FrameKind};
use crate::format::layout::BLOCK_BYTES;
use crate::recovery::open::LoadedLog;
use crate::recovery::open::{open, read};
use crate::shared::options::Options;
use crate::storage::Storage;
use crate::types::LogId;

/// The end of a log from the first synced byte that does not verify.
#[derive(Debug, Clone)]
pub struct DamagedEnd {
    pub file: String,
    /// From the damage to the last byte of the log in this file.
    pub bytes: Range<u64>,
    pub what: String,
    /// Last entry before the damage.
    pub kept: Option<LogId>,
    /// Segments after the damaged one.
    pub later_files: Vec<String>,
    /// Valid entries after the damage, by stream. The damaged entries themselves are unknown.
    pub streams: Vec<LostStream>,
}

/// Entries of a stream that will be lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostStream {
    pub stream: u64,
    pub entries: u64,
    pub first_index: u64,
    pub last_index: u64,
}

/// Describes the damaged end. See [`crate::Wal::damaged_end`].
pub(crate) fn damaged_end(storage: &Arc<dyn Storage>) -> Result<Option<DamagedEnd>, Error> {
    let _guard = lock_dir(storage.as_ref())?;
    let files = Arc::new(OpenFiles::new(Arc::clone(storage), FileCache::default()));
    let read = read(storage.as_ref(), &files, &Options::default(), true)?;
    describe_damage(&read)
}

/// Discards the damaged end. See [`crate::Wal::truncate_damaged_end`].
pub(crate) fn truncate_damaged_end(storage: &Arc<dyn Storage>) -> Result<(), Error> {
    let files = Arc::new(OpenFiles::new(Arc::clone(storage), FileCache::default()));
    let segment_bytes = {
        let _guard = lock_dir(storage.as_ref())?;
        let read = read(storage.as_ref(), &files, &Options::default(), true)?;
        read.unsealed.first().map(|(segment, _)| segment.len)
    };
    let default = Options::default();
    let segment_bytes = segment_bytes.unwrap_or(default.segment_bytes);
    let options = Options { segment_bytes, reserve_bytes: 0, ..default };
    open(Arc::clone(storage), &files, options, true).map(drop)
}

fn describe_damage(read: &LoadedLog) -> Result<Option<DamagedEnd>, Error> {
    let Some(damage) = &read.replay.damage else { return Ok(None) };
    let at = read.replay.ends.len().saturating_sub(1);
    let mut streams: BTreeMap<u64, LostStream> = BTreeMap::new();
    let mut visit = |frame: &FrameHeader, _: &[u8]| {
        if frame.kind == FrameKind::Entry {
            let (stream, index) = (frame.stream, frame.id.index);
            let none = LostStream { stream, entries: 0, first_index: index, last_index: index };
            let lost = streams.entry(stream).or_insert(none);
            lost.entries += 1;
            lost.first_index = lost.first_index.min(index);
            lost.last_index = lost.last_index.max(index);
        }
        Ok(())
    };
    let mut segments = read.unsealed.iter().skip(at).map(|(segment, _)| segment);
    let Some(first) = segments.next() else { return Ok(None) };
    let start = read.replay.ends.last().copied().unwrap_or(FIRST_GROUP);
    let end = scan_beyond(first, start + BLOCK_BYTES, &mut visit)?;
    let mut later_files = Vec::new();
    for segment in segments {
        scan_beyond(segment, FIRST_GROUP, &mut visit)?;
        later_files.push(segment.name());
    }
    let (end, what) = match damage {
        Error::Damaged { bytes, what, .. } => (bytes.end.max(end), what.clone()),
        other => (end, other.to_string()),
    };
    let kept = read.replay.last;
    let streams = streams.into_values().collect();
    let bytes = start..end;
    Ok(Some(DamagedEnd { file: first.name(), bytes, what, kept, later_files, streams }))
}
