//! The last resort of a log whose end is damaged and that nobody else has: what does not verify,
//! and all behind it, is given up. Said first, done only when asked for.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::files::Files;
use crate::frame::{FIRST_GROUP, FrameHeader, Kind};
use crate::layout::BLOCK_BYTES;
use crate::options::Options;
use crate::recovery::{self, Read};
use crate::scan::scan_beyond;
use crate::storage::Storage;
use crate::{Error, LogId, Wal};

/// The end of a log from the first byte on that does not verify and was once synced.
#[derive(Debug, Clone)]
pub struct DamagedEnd {
    pub file: String,
    /// Up to where anything of the log is left in this file.
    pub bytes: Range<u64>,
    pub what: String,
    /// Last entry before it.
    pub kept: Option<LogId>,
    /// Segments behind that one.
    pub later_files: Vec<String>,
    /// What is behind the damage and still verifies. Of what is damaged nothing is known.
    pub streams: Vec<LostStream>,
}

/// Entries of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostStream {
    pub stream: u64,
    pub entries: u64,
    pub first_index: u64,
    pub last_index: u64,
}

impl Wal {
    /// The damaged end of a log that does not open for it; `None` where its end is well. Changes
    /// nothing.
    pub fn damaged_end(storage: &Arc<dyn Storage>) -> Result<Option<DamagedEnd>, Error> {
        let _guard = recovery::lock(storage.as_ref())?;
        let files = Arc::new(Files::new(Arc::clone(storage)));
        let read = recovery::read(storage.as_ref(), &files, &Options::default(), true)?;
        damaged_end(&read)
    }

    /// Gives it up: the log ends before it from now on. A crash leaves the one or the other.
    pub fn cut_damaged_end(storage: &Arc<dyn Storage>) -> Result<(), Error> {
        let files = Arc::new(Files::new(Arc::clone(storage)));
        let segment_bytes = {
            let _guard = recovery::lock(storage.as_ref())?;
            let read = recovery::read(storage.as_ref(), &files, &Options::default(), true)?;
            read.unsealed.first().map(|(segment, _)| segment.len)
        };
        let default = Options::default();
        let segment_bytes = segment_bytes.unwrap_or(default.segment_bytes);
        let options = Options { segment_bytes, reserve_bytes: 0, ..default };
        recovery::open(Arc::clone(storage), &files, options, true).map(drop)
    }
}

fn damaged_end(read: &Read) -> Result<Option<DamagedEnd>, Error> {
    let Some(damage) = &read.replay.damage else { return Ok(None) };
    let at = read.replay.ends.len().saturating_sub(1);
    let mut streams: BTreeMap<u64, LostStream> = BTreeMap::new();
    let mut visit = |frame: &FrameHeader, _: &[u8]| {
        if frame.kind == Kind::Entry {
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
