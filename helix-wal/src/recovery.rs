//! Opening a folder: which segments make up the log, what the unsealed ones hold, and a fresh copy
//! of that under new ids, so that nothing old can ever verify behind it.
//!
//! Nothing of the old log is changed before the state file names the new one.

use std::io;
use std::sync::Arc;

use tracing::{info, warn};

use crate::aligned::Aligned;
use crate::copy::{Copy, Made};
use crate::error::{failed, poison};
use crate::files::Files;
use crate::footer::{DirectoryRow, Trailer, parse_directory};
use crate::frame::SegmentHeader;
use crate::held::Held;
use crate::layout::{
    BLOCK_BYTES, Name, STATE, cold_name, new_name, parse_name, ready_name, segment_name,
};
use crate::log::Log;
use crate::options::Options;
use crate::received;
use crate::replay::Replay;
use crate::scan::read_header;
use crate::sealed::{check_withheld, last_sealed, load_cold, load_sealed};
use crate::segment::Segment;
use crate::shared::{Core, Ready, Shared};
use crate::state_file::State;
use crate::state_io::{self, StateFile};
use crate::storage::{BLOCK, Storage};
use crate::tip::Tip;
use crate::{Error, Recovered};

/// What a folder holds, read and not changed.
pub(crate) struct Read {
    names: Names,
    state: State,
    created: bool,
    log: Log,
    pub unsealed: Vec<(Arc<Segment>, SegmentHeader)>,
    pub replay: Replay,
}

/// Reads the log in a folder. With `forgive` damage to what is not sealed ends it.
pub(crate) fn read(
    storage: &dyn Storage,
    files: &Arc<Files>,
    options: &Options,
    forgive: bool,
) -> Result<Read, Error> {
    let names = Names::list(storage)?;
    let state = state_io::load(storage)?;
    let created = state.is_none();
    let state = match state {
        // It is never written without the segment that the log goes on in.
        Some(state) if state.segments.is_empty() => {
            let what = "names no segment".to_owned();
            return Err(Error::Damaged { file: STATE.to_owned(), bytes: 0..0, what });
        }
        Some(state) => state,
        None => names.fresh(options)?,
    };
    if !options.identity.is_empty() && options.identity != state.identity {
        let folder = storage.describe();
        return Err(Error::Unusable(format!("{folder} belongs to another replica")));
    }
    let mut log = Log::new(false, options.tail_bytes);
    let segments = live_segments(storage, files, &names, &state)?;
    let unsealed = load_sealed(&mut log, segments, files, &state.identity)?;
    let mut replay = Replay::default();
    replay.forgive = forgive;
    replay.read(&unsealed, &state)?;
    replay.settle(&state);
    check_withheld(&log, &replay)?;
    replay.join(last_sealed(&log), &unsealed)?;
    replay.find_committed(&state, last_sealed(&log));
    load_cold(&mut log, storage, files, &names, &state)?;
    log.check_positions(&replay.slots)?;
    Ok(Read { names, state, created, log, unsealed, replay })
}

/// Opens and recovers the log in a folder.
pub(crate) fn open(
    storage: Arc<dyn Storage>,
    files: &Arc<Files>,
    options: Options,
    forgive: bool,
) -> Result<(Arc<Shared>, Tip, Recovered), Error> {
    let guard = lock(storage.as_ref())?;
    let read = read(storage.as_ref(), files, &options, forgive)?;
    let Read { names, state, created, mut log, unsealed, mut replay } = read;
    let (received, found) = received::load(&storage, files, &names, &state)?;
    let next_id = names.next_id().max(state.next_id);
    let mut copy = Copy {
        storage: storage.as_ref(),
        segment_bytes: options.segment_bytes,
        identity: &state.identity,
        next_id,
        made: Vec::new(),
        ready: names.ready,
    };
    let tip = copy.run(&mut replay, &unsealed, &log)?;
    let Copy { next_id, made, ready, .. } = copy;
    let cut_bytes = replay.cut_bytes;
    fill(&mut log, replay, &made, &state);
    let mut core = Core::new(log);
    core.next_id = next_id;
    core.synced_at = tip.position();
    core.guard = Some(guard);
    (core.received, core.found) = (received, found);
    let mut state_file = StateFile::open(storage.as_ref());
    // The names that the state file is about to mention must outlive a crash.
    sync_dir(storage.as_ref())?;
    let named = core.state(state.identity.clone(), state.checkpoint.clone());
    state_file.write(storage.as_ref(), &named)?;
    install(storage.as_ref(), &made, &named)?;
    fill_pool(storage.as_ref(), &options, &ready, &mut core)?;
    let withheld = core.log.withheld.iter().filter_map(|segment| segment.withheld().cloned());
    let recovered = Recovered {
        withheld: withheld.collect(),
        identity: state.identity.clone(),
        created,
        state: core.log.state(),
        checkpoint: state.checkpoint,
        cut_bytes,
    };
    if cut_bytes > 0 {
        warn!(bytes = cut_bytes, "cut a torn tail that was never acknowledged");
    }
    info!(folder = storage.describe(), segments = core.log.held.len(), "log is open");
    let files = Some(Arc::clone(files));
    let shared = Shared::new(Some(storage), files, options, state.identity, state_file, core);
    Ok((Arc::new(shared), tip, recovered))
}

pub(crate) fn lock(storage: &dyn Storage) -> Result<Box<dyn Send + Sync>, Error> {
    storage.lock().map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => {
            let folder = storage.describe();
            let what = "is in use by another process; stop that one, or use another folder";
            Error::Unusable(format!("{folder} {what}"))
        }
        _ => failed("lock", &storage.describe(), &e),
    })
}

/// The files of the folder.
#[derive(Debug, Default)]
pub(crate) struct Names {
    pub segments: Vec<u64>,
    pub new: Vec<u64>,
    pub cold: Vec<u64>,
    pub ready: Vec<u64>,
}

impl Names {
    pub(crate) fn list(storage: &dyn Storage) -> Result<Self, Error> {
        let all = storage.list().map_err(|e| failed("list", &storage.describe(), &e))?;
        let mut names = Self::default();
        for name in all {
            match parse_name(&name) {
                Name::Segment(id) => names.segments.push(id),
                Name::New(id) => names.new.push(id),
                Name::Cold(id) => names.cold.push(id),
                Name::Ready(number) => names.ready.push(number),
                Name::Other => {}
            }
        }
        names.segments.sort_unstable();
        names.ready.sort_unstable();
        Ok(names)
    }

    /// The state of a log that is just being created. Segments are given their names, and the pool
    /// is filled, only after a first state was durable: where they are without it, it was lost.
    fn fresh(&self, options: &Options) -> Result<State, Error> {
        if self.segments.is_empty() && self.ready.is_empty() && self.cold.is_empty() {
            let identity = options.identity.clone();
            return Ok(State { identity, next_id: 1, ..State::default() });
        }
        let what = "is missing beside the segments".to_owned();
        Err(Error::Damaged { file: STATE.to_owned(), bytes: 0..0, what })
    }

    /// An id above all that are in use.
    fn next_id(&self) -> u64 {
        self.segments.iter().chain(&self.new).chain(&self.cold).max().map_or(1, |id| id + 1)
    }
}

/// A segment of the log and whether the state file calls it sealed.
pub(crate) struct Live {
    pub segment: Arc<Segment>,
    pub sealed: bool,
}

/// The segments that the state file names and those that were begun after it was written.
fn live_segments(
    storage: &dyn Storage,
    files: &Arc<Files>,
    names: &Names,
    state: &State,
) -> Result<Vec<Live>, Error> {
    let mut live = Vec::new();
    for (id, sealed) in &state.segments {
        let segment = Arc::new(open_named(storage, names, *id)?);
        // Only what is not sealed may still have its other name.
        if *sealed && names.segments.contains(id) {
            segment.open_on_demand(files);
        }
        live.push(Live { segment, sealed: *sealed });
    }
    let Some(newest) = live.last().map(|live| live.segment.id) else { return Ok(live) };
    let mut last = newest;
    for id in names.segments.iter().filter(|id| **id > newest) {
        let segment = open_segment(storage, *id, &segment_name(*id))?;
        let header = read_header(&segment)?;
        if header.predecessor.segment != last {
            return Err(missing(header.predecessor.segment));
        }
        last = *id;
        live.push(Live { segment: Arc::new(segment), sealed: false });
    }
    Ok(live)
}

pub(crate) fn missing(id: u64) -> Error {
    let what = "is missing".to_owned();
    Error::Damaged { file: segment_name(id), bytes: 0..0, what }
}

/// Opens a segment that the state file names, under either of its names.
fn open_named(storage: &dyn Storage, names: &Names, id: u64) -> Result<Segment, Error> {
    let name = if names.segments.contains(&id) {
        segment_name(id)
    } else if names.new.contains(&id) {
        new_name(id)
    } else {
        return Err(missing(id));
    };
    open_segment(storage, id, &name)
}

pub(crate) fn open_segment(storage: &dyn Storage, id: u64, name: &str) -> Result<Segment, Error> {
    let file = storage.open(name).map_err(|e| failed("open", name, &e))?;
    let len = file.len().map_err(|e| failed("read", name, &e))?;
    let is_cold = matches!(parse_name(name), Name::Cold(_));
    let segment =
        if is_cold { Segment::new_cold(id, file, len) } else { Segment::new(id, file, len) };
    if len < 2 * BLOCK_BYTES || !len.is_multiple_of(BLOCK_BYTES) {
        return Err(segment.damaged(len..len + 1, "the file is shorter than it was"));
    }
    Ok(segment)
}

/// The trailer of a segment, if it has a valid one.
pub(crate) fn read_trailer(segment: &Segment) -> Result<Option<Trailer>, Error> {
    let mut block = Aligned::with_len(BLOCK);
    segment.read_device(block.as_mut_slice(), segment.len - BLOCK_BYTES)?;
    Ok(Trailer::parse(block.as_slice(), segment.id, segment.len))
}

pub(crate) fn read_directory(
    segment: &Segment,
    trailer: &Trailer,
) -> Result<Vec<DirectoryRow>, Error> {
    let start = trailer.footer_start + u64::from(trailer.directory.page) * BLOCK_BYTES;
    let end = start + u64::from(trailer.directory.pages) * BLOCK_BYTES;
    let mut pages = Aligned::with_len((end - start) as usize);
    if start < end {
        segment.read_device(pages.as_mut_slice(), start)?;
    }
    parse_directory(pages.as_slice(), trailer)
        .ok_or_else(|| segment.damaged(start..end, "the directory of streams does not verify"))
}

/// Puts what was found into the log.
fn fill(log: &mut Log, replay: Replay, made: &[Made], state: &State) {
    for Made { segment, rolled } in made {
        let mut held = Held::new(Some(Arc::clone(segment)));
        held.rolled.clone_from(rolled);
        log.held.insert(segment.id, held);
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

/// Gives the new segments their names, which the state file has made true, and removes what is
/// not part of the log.
fn install(storage: &dyn Storage, made: &[Made], state: &State) -> Result<(), Error> {
    let names = Names::list(storage)?;
    let live = |id: &u64| state.segments.iter().any(|(live, _)| live == id);
    debug_assert!(made.iter().all(|made| live(&made.segment.id)));
    // One that has its name has the right to it, whatever else lies there under the other.
    let to_name = |id: &&u64| live(id) && !names.segments.contains(id);
    for id in names.new.iter().filter(to_name) {
        let (from, to) = (new_name(*id), segment_name(*id));
        storage.rename(&from, &to).map_err(|e| poison("rename", &from, &e))?;
    }
    sync_dir(storage)?;
    let old = names.segments.iter().filter(|id| !live(id)).map(|id| segment_name(*id));
    let unnamed = names.new.iter().filter(|id| !to_name(id)).map(|id| new_name(*id));
    let cold = names.cold.iter().filter(|id| !state.names_cold(**id));
    let unnamed = unnamed.chain(cold.map(|id| cold_name(*id)));
    // Never recycled: a name that comes back after a crash must not share its blocks.
    for name in old.chain(unnamed) {
        storage.remove(&name).map_err(|e| poison("remove", &name, &e))?;
    }
    Ok(())
}

fn sync_dir(storage: &dyn Storage) -> Result<(), Error> {
    storage.sync_dir().map_err(|e| poison("sync", &storage.describe(), &e))
}

/// Takes over the pool of an earlier life.
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
            core.ready.push_back(Ready { name, file, len });
        } else {
            storage.remove(&name).map_err(|e| poison("remove", &name, &e))?;
        }
    }
    Ok(())
}
