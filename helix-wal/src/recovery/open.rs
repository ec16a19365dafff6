//! Opens a log: finds its segments, replays the unsealed ones, and copies their entries.
//!
//! The copy has new segment ids, so that no old bytes can verify behind it. The old log is
//! unchanged until the state file lists the new segments.

use std::ops::Range;
use std::sync::Arc;

use tracing::{info, warn};

use crate::error::{Error, changing, failed};
use crate::files::active_segment::ActiveSegment;
use crate::files::data_dir::DirListing;
use crate::files::data_dir::lock_dir;
use crate::files::data_dir::sync_dir;
use crate::files::open_files::OpenFiles;
use crate::files::open_segment::missing_segment;
use crate::files::open_segment::{open_segment, read_header};
use crate::files::segment::Segment;
use crate::files::state_file::StateFile;
use crate::files::state_file::load_state;
use crate::format::frame::SegmentHeader;
use crate::format::layout::{STATE, cold_name, new_name, ready_name, segment_name};
use crate::format::state::PersistedState;
use crate::memory::live_segment::LiveSegment;
use crate::memory::log::Log;
use crate::recovery::copy::{CopiedSegment, TailCopy};
use crate::recovery::replay::Replay;
use crate::recovery::sealed::{NamedSegment, check_quarantined, load_cold, load_sealed};
use crate::recovery::staged::load_staged;
use crate::shared::Shared;
use crate::shared::core::{Core, ReadySegment};
use crate::shared::options::{Options, RESERVED_SEGMENTS};
use crate::storage::Storage;
use crate::types::Recovered;

/// The contents of a data directory, read without changing it.
pub(crate) struct LoadedLog {
    names: DirListing,
    state: PersistedState,
    created: bool,
    log: Log,
    pub unsealed: Vec<(Arc<Segment>, SegmentHeader)>,
    pub replay: Replay,
}

/// Reads the log. With `tolerate_damage`, damage to an unsealed segment is the end of the log.
pub(crate) fn read(
    storage: &dyn Storage,
    files: &Arc<OpenFiles>,
    options: &Options,
    tolerate_damage: bool,
) -> Result<LoadedLog, Error> {
    let names = DirListing::list(storage)?;
    let state = load_state(storage)?;
    let created = state.is_none();
    let state = match state {
        // A state file always lists the active segment.
        Some(state) if state.segments.is_empty() => {
            let what = "lists no segment".to_owned();
            return Err(Error::Damaged { file: STATE.to_owned(), bytes: 0..0, what });
        }
        Some(state) => state,
        None => fresh_state(&names, options)?,
    };
    if !options.identity.is_empty() && options.identity != state.identity {
        let directory = storage.describe();
        return Err(Error::Unusable(format!("{directory} belongs to another replica")));
    }
    let mut log = Log::new(false, options.tail_bytes);
    let segments = live_segments(storage, files, &names, &state)?;
    let unsealed = load_sealed(&mut log, segments, files, &state.identity)?;
    let mut replay = Replay::default();
    replay.tolerate_damage = tolerate_damage;
    replay.read(&unsealed, &state)?;
    replay.apply_state(&state);
    check_quarantined(&log, &replay)?;
    replay.check_against_sealed(log.last_sealed(), &unsealed)?;
    replay.find_committed(&state, log.last_sealed());
    load_cold(&mut log, storage, files, &names, &state)?;
    log.check_positions(&replay.slots)?;
    Ok(LoadedLog { names, state, created, log, unsealed, replay })
}

/// Opens and recovers the log in a data directory.
pub(crate) fn open(
    storage: Arc<dyn Storage>,
    files: &Arc<OpenFiles>,
    options: Options,
    tolerate_damage: bool,
) -> Result<(Arc<Shared>, ActiveSegment, Recovered), Error> {
    let guard = lock_dir(storage.as_ref())?;
    let read = read(storage.as_ref(), files, &options, tolerate_damage)?;
    let LoadedLog { names, state, created, mut log, unsealed, mut replay } = read;
    let (received, found) = load_staged(&storage, files, &names, &state)?;
    let next_id = names.next_id().max(state.next_id);
    let (new_leftovers, old_leftovers) = leftovers(&names, &state);
    let mut copy = TailCopy {
        storage: storage.as_ref(),
        segment_bytes: options.segment_bytes,
        identity: &state.identity,
        next_id,
        made: Vec::new(),
        ready: names.ready,
        new_leftovers,
        old_leftovers,
        is_dir_synced: false,
    };
    let active = copy.run(&mut replay, &unsealed, &log)?;
    let TailCopy { next_id, made, ready, .. } = copy;
    let (torn_bytes, torn_tail) = (replay.torn_bytes, replay.torn_tail.take());
    fill(&mut log, replay, &made, &state);
    let mut core = Core::new(log);
    core.next_id = next_id;
    core.synced_at = active.position();
    core.guard = Some(guard);
    (core.staged, core.staged_found) = (received, found);
    core.clean_marks.clone_from(&state.clean_marks);
    core.cleaned_upto = state.cleaned_upto;
    core.entries_version = state.entries_version;
    let mut state_file = StateFile::open(storage.as_ref())?;
    // The files that the state file will list must survive a crash.
    sync_dir(storage.as_ref())?;
    let named = core.state(state.identity.clone(), state.checkpoint.clone());
    state_file.write(storage.as_ref(), &named)?;
    fill_pool(storage.as_ref(), &options, &ready, &mut core)?;
    install(storage.as_ref(), &options, &made, &named, &mut core)?;
    let quarantined =
        core.log.quarantined.iter().filter_map(|segment| segment.quarantined().cloned());
    let recovered = Recovered {
        quarantined: quarantined.collect(),
        identity: state.identity.clone(),
        created,
        state: core.log.state(),
        checkpoint: state.checkpoint,
        torn_bytes,
        torn_tail,
    };
    if let Some((file, Range { start, end })) = &recovered.torn_tail {
        let directory = storage.describe();
        warn!(directory, file, start, end, "discarded a last group that does not verify");
    }
    info!(directory = storage.describe(), segments = core.log.chain.len(), "log is open");
    let files = Some(Arc::clone(files));
    let shared = Shared::new(Some(storage), files, options, state.identity, state_file, core);
    Ok((Arc::new(shared), active, recovered))
}

/// Returns the new and the old segments that an interrupted open left, and that are not part of the
/// log.
fn leftovers(names: &DirListing, state: &PersistedState) -> (Vec<String>, Vec<String>) {
    let is_listed = |id: &u64| state.segments.iter().any(|(listed, _)| listed == id);
    let new = names.new.iter().filter(|id| !is_listed(id)).map(|id| new_name(*id)).collect();
    // Segments after the last listed segment were begun later.
    let Some((newest, _)) = state.segments.last() else { return (new, Vec::new()) };
    let old = names.segments.iter().filter(|id| **id < *newest && !is_listed(id));
    (new, old.map(|id| segment_name(*id)).collect())
}

/// Opens the segments listed in the state file, and those begun after it was written.
fn live_segments(
    storage: &dyn Storage,
    files: &Arc<OpenFiles>,
    names: &DirListing,
    state: &PersistedState,
) -> Result<Vec<NamedSegment>, Error> {
    let mut live = Vec::new();
    for (id, sealed) in &state.segments {
        let segment = Arc::new(open_named(storage, names, *id)?);
        // Only an unsealed segment may still have its temporary name.
        if *sealed && names.segments.contains(id) {
            segment.open_on_demand(files);
        }
        live.push(NamedSegment { segment, sealed: *sealed });
    }
    let Some(newest) = live.last().map(|live| live.segment.id) else { return Ok(live) };
    let mut last = newest;
    for id in names.segments.iter().filter(|id| **id > newest) {
        let segment = open_segment(storage, *id, &segment_name(*id))?;
        let header = read_header(&segment)?;
        if header.predecessor.segment != last {
            return Err(missing_segment(header.predecessor.segment));
        }
        last = *id;
        live.push(NamedSegment { segment: Arc::new(segment), sealed: false });
    }
    Ok(live)
}

/// Opens a segment listed in the state file, under its final or its temporary name.
fn open_named(storage: &dyn Storage, names: &DirListing, id: u64) -> Result<Segment, Error> {
    let name = if names.segments.contains(&id) {
        segment_name(id)
    } else if names.new.contains(&id) {
        new_name(id)
    } else {
        return Err(missing_segment(id));
    };
    open_segment(storage, id, &name)
}

/// Fills the log with the replayed entries and the copied segments.
fn fill(log: &mut Log, replay: Replay, made: &[CopiedSegment], state: &PersistedState) {
    for CopiedSegment { segment, rolled } in made {
        let mut held = LiveSegment::new(Some(Arc::clone(segment)));
        held.rolled.clone_from(rolled);
        log.chain.insert(segment.id, held);
    }
    let sealed = log.sealed_by_index.keys().next().copied();
    let first = sealed.or(replay.slots.first().map(|slot| slot.id.index));
    log.checkpoint = state.checkpoint.as_ref().map(|(at, _)| *at);
    log.placed = log.checkpoint.map(|at| at.index + 1).or(first);
    log.vote = replay.vote;
    log.purged = replay.purged;
    log.committed = replay.committed;
    log.last = replay.last;
    log.synced = replay.last;
    for slot in replay.slots {
        log.restore(slot);
    }
}

/// Renames the new segments to their final names, and removes files that are not part of the log.
///
/// If disk space is scarce, an old segment becomes a ready one for the next open.
fn install(
    storage: &dyn Storage,
    options: &Options,
    made: &[CopiedSegment],
    state: &PersistedState,
    core: &mut Core,
) -> Result<(), Error> {
    let names = DirListing::list(storage)?;
    let live = |id: &u64| state.segments.iter().any(|(live, _)| live == id);
    debug_assert!(made.iter().all(|made| live(&made.segment.id)));
    // A file with the final name takes precedence over one with the temporary name.
    let to_name = |id: &&u64| live(id) && !names.segments.contains(id);
    for id in names.new.iter().filter(to_name) {
        let (from, to) = (new_name(*id), segment_name(*id));
        storage.rename(&from, &to).map_err(|e| changing("rename", &from, &e))?;
    }
    sync_dir(storage)?;
    let mut old: Vec<String> =
        names.segments.iter().filter(|id| !live(id)).map(|id| segment_name(*id)).collect();
    let is_scarce =
        storage.free_bytes().unwrap_or(u64::MAX) < options.segment_bytes + options.reserve_bytes;
    if is_scarce && core.ready.len() < RESERVED_SEGMENTS {
        recycle(storage, options, &mut old, core)?;
    }
    let unnamed = names.new.iter().filter(|id| !to_name(id)).map(|id| new_name(*id));
    let cold = names.cold.iter().filter(|id| !state.names_cold(**id));
    let unnamed = unnamed.chain(cold.map(|id| cold_name(*id)));
    for name in old.into_iter().chain(unnamed) {
        storage.remove(&name).map_err(|e| changing("remove", &name, &e))?;
    }
    Ok(())
}

/// Makes one of the old segments a ready one.
///
/// The new name is durable before the file is used. So a crash cannot restore an old name for
/// blocks that are in use.
fn recycle(
    storage: &dyn Storage,
    options: &Options,
    old: &mut Vec<String>,
    core: &mut Core,
) -> Result<(), Error> {
    while let Some(name) = old.pop() {
        let file = storage.open(&name).map_err(|e| failed("open", &name, &e))?;
        let len = file.len().map_err(|e| failed("read", &name, &e))?;
        if len != options.segment_bytes {
            drop(file);
            storage.remove(&name).map_err(|e| changing("remove", &name, &e))?;
            continue;
        }
        let ready = ready_name(core.ready_number);
        core.ready_number += 1;
        storage.rename(&name, &ready).map_err(|e| changing("rename", &name, &e))?;
        sync_dir(storage)?;
        let is_written = true;
        core.ready.push_back(ReadySegment { name: ready, len, file: Some(file), is_written });
        return Ok(());
    }
    Ok(())
}

/// Takes over the prepared segments of an earlier process.
fn fill_pool(
    storage: &dyn Storage,
    options: &Options,
    numbers: &[u64],
    core: &mut Core,
) -> Result<(), Error> {
    for number in numbers {
        core.ready_number = core.ready_number.max(number + 1);
        let name = ready_name(*number);
        let file = storage.open(&name).map_err(|e| failed("open", &name, &e))?;
        let len = file.len().map_err(|e| failed("read", &name, &e))?;
        if len == options.segment_bytes && core.ready.len() < options.pool_max() {
            let is_usual = core.ready.len() < options.ready_target();
            // An error is ignored: the flag only decides how the duration of a group is judged.
            let is_written = file.unwritten_bytes().is_ok_and(|bytes| bytes == 0);
            let file = is_usual.then_some(file);
            core.ready.push_back(ReadySegment { name, file, len, is_written });
        } else {
            storage.remove(&name).map_err(|e| changing("remove", &name, &e))?;
        }
    }
    Ok(())
}

/// Returns the state of a new log.
///
/// Segments are named, and the pool is filled, only after a first state was durable. Such files
/// without a state file mean that the state file was lost.
fn fresh_state(names: &DirListing, options: &Options) -> Result<PersistedState, Error> {
    if names.segments.is_empty() && names.ready.is_empty() && names.cold.is_empty() {
        let identity = options.identity.clone();
        return Ok(PersistedState { identity, next_id: 1, ..PersistedState::default() });
    }
    let what = "is missing, but there are segments".to_owned();
    Err(Error::Damaged { file: STATE.to_owned(), bytes: 0..0, what })
}
