//! The sealed segments at open. One whose footer is damaged is withheld, whole, where its
//! neighbours say which entries it can hold; all others are served.

use std::sync::Arc;

use tracing::error;

use crate::files::Files;
use crate::footer::Trailer;
use crate::frame::{Context, FIRST_GROUP, Position, SegmentHeader};
use crate::layout::{BLOCK_BYTES, cold_name};
use crate::log::Log;
use crate::recovery::{Live, Names, missing, open_segment, read_directory, read_trailer};
use crate::replay::Replay;
use crate::scan::read_header;
use crate::segment::Segment;
use crate::state_file::{ColdName, State};
use crate::storage::Storage;
use crate::{Error, LogId};

/// A segment of the log and its trailer, if it has one that verifies.
struct Found {
    segment: Arc<Segment>,
    trailer: Option<Trailer>,
}

/// Takes the sealed segments into the log; the others come back, with their headers.
pub(crate) fn load_sealed(
    log: &mut Log,
    segments: Vec<Live>,
    files: &Arc<Files>,
    identity: &[u8],
) -> Result<Vec<(Arc<Segment>, SegmentHeader)>, Error> {
    let mut found = Vec::with_capacity(segments.len());
    // Segments are sealed in order.
    let mut sealed = 0;
    for Live { segment, sealed: named } in segments {
        let trailer = read_trailer(&segment)?;
        found.push(Found { segment, trailer });
        if named || found.last().is_some_and(|found| found.trailer.is_some()) {
            sealed = found.len();
        }
    }
    let mut last: Option<(u64, Trailer)> = None;
    for at in 0..sealed {
        let (Some(Found { segment, trailer }), next) = (found.get(at), found.get(at + 1)) else {
            break;
        };
        let (id, segment) = (segment.id, Arc::clone(segment));
        segment.open_on_demand(files);
        let trailer = match trailer {
            Some(trailer) => {
                load_one(log, segment, trailer, identity)?;
                trailer.clone()
            }
            None => withhold_one(log, segment, next, identity)?,
        };
        last = Some((id, trailer));
    }
    let mut unsealed = Vec::with_capacity(found.len() - sealed);
    for Found { segment, .. } in found.into_iter().skip(sealed) {
        let header = read_header(&segment)?;
        if header.identity != *identity {
            return Err(segment.damaged(0..BLOCK_BYTES, "the segment is another replica's"));
        }
        unsealed.push((segment, header));
    }
    check_join(last.as_ref(), &unsealed)?;
    Ok(unsealed)
}

/// Takes the cold segments that the state file names into the log. Their entries stand between
/// those of others, and are all below the purge point.
pub(crate) fn load_cold(
    log: &mut Log,
    storage: &dyn Storage,
    files: &Arc<Files>,
    names: &Names,
    state: &State,
) -> Result<(), Error> {
    for ColdName { id, first, last } in &state.cold {
        let name = cold_name(*id);
        if !names.cold.contains(id) {
            return Err(Error::Damaged { file: name, bytes: 0..0, what: "is missing".to_owned() });
        }
        let segment = Arc::new(open_segment(storage, *id, &name)?);
        segment.open_on_demand(files);
        let block = segment.len - BLOCK_BYTES..segment.len;
        let damage = match read_trailer(&segment)? {
            Some(trailer) if trailer.identity_crc != crc32fast::hash(&state.identity) => {
                return Err(segment.damaged(block, "the segment is another replica's"));
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
        error!(%damage, entries = ?outline.entries, "a cold segment is withheld");
        segment.withhold(damage);
        log.restore_withheld_cold(segment, &outline);
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
        return Err(segment.damaged(block, "the segment is another replica's"));
    }
    let first = trailer.entries.map(|(first, _)| first);
    check_follows(log, first)?;
    if first.zip(last_sealed(log)).is_some_and(|(first, last)| first <= last.index) {
        let block = segment.len - BLOCK_BYTES..segment.len;
        return Err(segment.damaged(block, "its entries do not follow those before it"));
    }
    match read_directory(&segment, trailer) {
        Ok(directory) => log.restore_sealed(segment, trailer, &directory),
        Err(damage @ Error::Damaged { .. }) => withhold(log, segment, trailer, damage),
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Withholds a segment without a trailer. What it can hold at most: entries after those of the
/// segments before it, up to the last one that was there when the next segment was begun.
fn withhold_one(
    log: &mut Log,
    segment: Arc<Segment>,
    next: Option<&Found>,
    identity: &[u8],
) -> Result<Trailer, Error> {
    let block = segment.len - BLOCK_BYTES..segment.len;
    let damage = segment.damaged(block, "the trailer of a sealed segment does not verify");
    let ends_at = |header: &SegmentHeader| {
        let Position { segment: before, at } = header.predecessor;
        header.identity == *identity
            && before == segment.id
            && (FIRST_GROUP..segment.len).contains(&at)
    };
    let next = next.and_then(|next| read_header(&next.segment).ok()).filter(ends_at);
    let Some(next) = next else { return Err(damage) };
    let first = last_sealed(log).map_or(0, |last| last.index + 1);
    let entries = next.context.last.filter(|last| first <= last.index).map(|last| (first, last));
    let outline = Trailer::outline(segment.id, entries, next.predecessor.at, next.context);
    withhold(log, segment, &outline, damage);
    Ok(outline)
}

fn withhold(log: &mut Log, segment: Arc<Segment>, trailer: &Trailer, damage: Error) {
    error!(%damage, entries = ?trailer.entries, "a sealed segment is withheld");
    segment.withhold(damage);
    log.restore_withheld(segment, trailer);
}

/// Last entry of the sealed segments so far.
pub(crate) fn last_sealed(log: &Log) -> Option<LogId> {
    let id = log.sealed_by_index.values().next_back()?;
    log.held.get(id)?.entries.map(|(_, last)| last)
}

/// What a withheld segment holds last is only known while nothing cut into it later: then the next
/// entry stands behind it.
fn check_follows(log: &Log, first: Option<u64>) -> Result<(), Error> {
    let Some(damage) = log.withheld.last().and_then(|segment| segment.withheld()) else {
        return Ok(());
    };
    let last = last_sealed(log);
    let cut = first.zip(last).is_some_and(|(first, last)| first <= last.index);
    if cut { Err(damage.clone()) } else { Ok(()) }
}

/// The same for the entries of the unsealed segments, and for a log that ends within them.
pub(crate) fn check_withheld(log: &Log, replay: &Replay) -> Result<(), Error> {
    let end = replay.last.map_or(0, |last| last.index + 1);
    check_follows(log, Some(replay.slots.first().map_or(end, |slot| slot.id.index)))
}

/// Whether the unsealed segments follow the last sealed one. A segment is sealed only when the
/// next one is durable, so there is always one.
fn check_join(
    last: Option<&(u64, Trailer)>,
    unsealed: &[(Arc<Segment>, SegmentHeader)],
) -> Result<(), Error> {
    let Some((id, trailer)) = last else { return Ok(()) };
    let Some((first, header)) = unsealed.first() else { return Err(missing(id + 1)) };
    let end = Position { segment: *id, at: trailer.data_end };
    if header.predecessor.segment == *id && header.predecessor != end {
        return Err(first.damaged(0..BLOCK_BYTES, "the segment before it ends elsewhere"));
    }
    Ok(())
}
