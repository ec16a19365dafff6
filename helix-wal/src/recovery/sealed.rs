//! Loads sealed segments at open.
//!
//! A segment with a damaged footer is quarantined as a whole if its neighbours state which entries
//! it can hold. All other segments are served.

use std::sync::Arc;

use tracing::error;

use crate::error::Error;
use crate::files::data_dir::DirListing;
use crate::files::open_files::OpenFiles;
use crate::files::open_segment::{
    missing_segment, open_segment, read_directory, read_header, read_trailer,
};
use crate::files::segment::Segment;
use crate::format::footer::Trailer;
use crate::format::frame::{Context, FIRST_GROUP, LogPosition, SegmentHeader};
use crate::format::layout::{BLOCK_BYTES, cold_name};
use crate::format::state::{ColdSegmentInfo, PersistedState};
use crate::memory::log::Log;
use crate::recovery::replay::Replay;
use crate::storage::Storage;

/// A segment of the log, and whether the state file lists it as sealed.
pub(crate) struct NamedSegment {
    pub segment: Arc<Segment>,
    pub sealed: bool,
}

/// A segment of the log, with its trailer if that verifies.
struct FoundSegment {
    segment: Arc<Segment>,
    trailer: Option<Trailer>,
}

/// Adds the sealed segments to the log. Returns the others, with their headers.
pub(crate) fn load_sealed(
    log: &mut Log,
    segments: Vec<NamedSegment>,
    files: &Arc<OpenFiles>,
    identity: &[u8],
) -> Result<Vec<(Arc<Segment>, SegmentHeader)>, Error> {
    let mut found = Vec::with_capacity(segments.len());
    // Segments are sealed in order.
    let mut sealed = 0;
    for NamedSegment { segment, sealed: named } in segments {
        let trailer = read_trailer(&segment)?;
        found.push(FoundSegment { segment, trailer });
        if named || found.last().is_some_and(|found| found.trailer.is_some()) {
            sealed = found.len();
        }
    }
    let mut last: Option<(u64, Trailer)> = None;
    for at in 0..sealed {
        let (Some(FoundSegment { segment, trailer }), next) = (found.get(at), found.get(at + 1))
        else {
            break;
        };
        let (id, segment) = (segment.id, Arc::clone(segment));
        segment.open_on_demand(files);
        let trailer = match trailer {
            Some(trailer) => {
                load_one(log, segment, trailer, identity)?;
                trailer.clone()
            }
            None => quarantine_segment(log, segment, next, identity)?,
        };
        last = Some((id, trailer));
    }
    let mut unsealed = Vec::with_capacity(found.len() - sealed);
    for FoundSegment { segment, .. } in found.into_iter().skip(sealed) {
        let header = read_header(&segment)?;
        if header.identity != *identity {
            return Err(segment.damaged(0..BLOCK_BYTES, "the segment belongs to another replica"));
        }
        unsealed.push((segment, header));
    }
    check_continuity(last.as_ref(), &unsealed)?;
    Ok(unsealed)
}

/// Adds the cold segments listed in the state file to the log.
///
/// All of their entries are below the purge point, interleaved with entries of other segments.
pub(crate) fn load_cold(
    log: &mut Log,
    storage: &dyn Storage,
    files: &Arc<OpenFiles>,
    names: &DirListing,
    state: &PersistedState,
) -> Result<(), Error> {
    for ColdSegmentInfo { id, first, last } in &state.cold {
        let name = cold_name(*id);
        if !names.cold.contains(id) {
            return Err(Error::Damaged { file: name, bytes: 0..0, what: "is missing".to_owned() });
        }
        let segment = Arc::new(open_segment(storage, *id, &name)?);
        segment.open_on_demand(files);
        let block = segment.len - BLOCK_BYTES..segment.len;
        let damage = match read_trailer(&segment)? {
            Some(trailer) if trailer.identity_crc != crc32fast::hash(&state.identity) => {
                return Err(segment.damaged(block, "the segment belongs to another replica"));
            }
            Some(trailer) => match read_directory(&segment, &trailer) {
                Ok(directory) => {
                    log.restore_cold(segment, &trailer, &directory);
                    continue;
                }
                Err(damage @ Error::Damaged { .. }) => damage,
                Err(error) => return Err(error),
            },
            None => segment.damaged(block, "the trailer of a cold segment does not verify"),
        };
        let outline = Trailer::outline(*id, Some((*first, *last)), 0, Context::default());
        error!(%damage, entries = ?outline.entries, "quarantined a cold segment");
        segment.quarantine(damage);
        log.restore_quarantined_cold(segment, &outline);
    }
    log.sort_rows();
    Ok(())
}

fn load_one(
    log: &mut Log,
    segment: Arc<Segment>,
    trailer: &Trailer,
    identity: &[u8],
) -> Result<(), Error> {
    if trailer.identity_crc != crc32fast::hash(identity) {
        let block = segment.len - BLOCK_BYTES..segment.len;
        return Err(segment.damaged(block, "the segment belongs to another replica"));
    }
    let first = trailer.entries.map(|(first, _)| first);
    check_follows(log, first)?;
    if first.zip(log.last_sealed()).is_some_and(|(first, last)| first <= last.index) {
        let block = segment.len - BLOCK_BYTES..segment.len;
        return Err(segment.damaged(block, "its entries do not follow the previous ones"));
    }
    match read_directory(&segment, trailer) {
        Ok(directory) => log.restore_sealed(segment, trailer, &directory),
        Err(damage @ Error::Damaged { .. }) => quarantine(log, segment, trailer, damage),
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Quarantines a segment without a valid trailer.
///
/// It can hold entries after those of the previous segments, up to the last entry at the time the
/// next segment was begun.
fn quarantine_segment(
    log: &mut Log,
    segment: Arc<Segment>,
    next: Option<&FoundSegment>,
    identity: &[u8],
) -> Result<Trailer, Error> {
    let block = segment.len - BLOCK_BYTES..segment.len;
    let damage = segment.damaged(block, "the trailer of a sealed segment does not verify");
    let ends_at = |header: &SegmentHeader| {
        let LogPosition { segment: before, at } = header.predecessor;
        header.identity == *identity
            && before == segment.id
            && (FIRST_GROUP..segment.len).contains(&at)
    };
    let next = match next.map(|next| read_header(&next.segment)) {
        Some(Err(error)) if error.is_shortage() => return Err(error),
        next => next.and_then(Result::ok).filter(ends_at),
    };
    let Some(next) = next else { return Err(damage) };
    let first = log.last_sealed().map_or(0, |last| last.index + 1);
    let entries = next.context.last.filter(|last| first <= last.index).map(|last| (first, last));
    let outline = Trailer::outline(segment.id, entries, next.predecessor.at, next.context);
    quarantine(log, segment, &outline, damage);
    Ok(outline)
}

fn quarantine(log: &mut Log, segment: Arc<Segment>, trailer: &Trailer, damage: Error) {
    error!(%damage, entries = ?trailer.entries, "quarantined a sealed segment");
    segment.quarantine(damage);
    log.restore_quarantined(segment, trailer);
}

/// Checks that no truncation reached into the quarantined segment: the next entry must follow its
/// last one.
fn check_follows(log: &Log, first: Option<u64>) -> Result<(), Error> {
    let Some(damage) = log.quarantined.last().and_then(|segment| segment.quarantined()) else {
        return Ok(());
    };
    let last = log.last_sealed();
    let cut = first.zip(last).is_some_and(|(first, last)| first <= last.index);
    if cut { Err(damage.clone()) } else { Ok(()) }
}

/// Like `check_follows`, for the first unsealed entry, or for the end of a log without one.
pub(crate) fn check_quarantined(log: &Log, replay: &Replay) -> Result<(), Error> {
    let end = replay.last.map_or(0, |last| last.index + 1);
    check_follows(log, Some(replay.slots.first().map_or(end, |slot| slot.id.index)))
}

/// Checks that the unsealed segments follow the last sealed one.
///
/// A segment is sealed only after the next one is durable, so there is always an unsealed segment.
fn check_continuity(
    last: Option<&(u64, Trailer)>,
    unsealed: &[(Arc<Segment>, SegmentHeader)],
) -> Result<(), Error> {
    let Some((id, trailer)) = last else { return Ok(()) };
    let Some((first, header)) = unsealed.first() else { return Err(missing_segment(id + 1)) };
    let end = LogPosition { segment: *id, at: trailer.data_end };
    if header.predecessor.segment == *id && header.predecessor != end {
        return Err(first.damaged(0..BLOCK_BYTES, "the previous segment ends at another position"));
    }
    Ok(())
}
