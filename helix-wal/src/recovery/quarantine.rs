//! Quarantines an unusable log, so that a new log can begin in the same directory.
//!
//! A repair note is written before the first file is renamed. It stays until the new log has
//! everything that the old one had promised to keep. Until then, it tells each open that the log
//! may lack acknowledged entries.
//!
//! ```text
//!   0 magic [8]   8 crc u32 (over 12..len)   12 version u16   14 flags u16 (1 moved, 2 has a vote)
//!  16 len u64    24 number u64   then identity, vote, why (u32 len, bytes each)
//! ```
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation)]

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use tracing::{info, warn};

use crate::error::{Error, changing, failed, is_no_space, poison};
use crate::files::aligned::Aligned;
use crate::files::data_dir::DirListing;
use crate::files::data_dir::lock_dir;
use crate::files::open_segment::{missing_segment, open_segment, read_header, read_trailer};
use crate::files::state_file::load_state;
use crate::format::layout::{
    OPAQUE_BYTES_MAX, STATE, STATE_TMP, cold_name, new_name, quarantine_name, quarantine_number,
    ready_name, segment_name, u16_at, u32_at, u64_at,
};
use crate::format::state::PersistedState;
use crate::recovery::replay::Replay;
use crate::storage::Storage;

pub(crate) const REPAIR: &str = "repair";
const REPAIR_TMP: &str = "repair.tmp";
const MAGIC: [u8; 8] = *b"HLXREPAR";
const VERSION: u16 = 1;
const HEADER: usize = 32;
const MOVED: u16 = 1;
const HAS_VOTE: u16 = 2;
/// Longer reasons are truncated.
const WHY_BYTES_MAX: usize = 1024;

/// A quarantined log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuarantinedLog {
    /// Identity of the replica, as in [`crate::Options::identity`].
    pub identity: Bytes,
    /// The last vote; `None` if a later vote may be in the damaged part.
    pub vote: Option<Bytes>,
    /// Reason for the quarantine.
    pub why: String,
}

#[derive(Debug, Clone)]
struct RepairNote {
    log: QuarantinedLog,
    /// Number in the names of its files.
    number: u64,
    /// All files have been renamed.
    moved: bool,
}

/// Returns the quarantined log, and finishes an interrupted [`quarantine`].
pub(crate) fn quarantined_log(storage: &dyn Storage) -> Result<Option<QuarantinedLog>, Error> {
    let _guard = lock_dir(storage)?;
    match load(storage)? {
        Some(note) if note.moved => Ok(Some(note.log)),
        Some(note) => resume(storage, note).map(Some),
        None => {
            // Left by an interrupted `end_repair`.
            remove_quarantined(storage)?;
            Ok(None)
        }
    }
}

/// Renames the files of the log. See [`crate::Wal::quarantine`].
pub(crate) fn quarantine(
    storage: &dyn Storage,
    why: &str,
    identity: Bytes,
) -> Result<QuarantinedLog, Error> {
    let _guard = lock_dir(storage)?;
    if let Some(note) = load(storage)?.filter(|note| !note.moved) {
        return resume(storage, note);
    }
    let names = DirListing::list(storage)?;
    let state = unless_short(load_state(storage))?.flatten();
    let known = Some(identity).filter(|known| !known.is_empty());
    let found = identity_of(storage, &names, state.as_ref())?;
    let identity = found.or(known).ok_or_else(|| Error::Damaged {
        file: STATE.to_owned(),
        bytes: 0..0,
        what: "does not verify, and no segment states the identity of the log".to_owned(),
    })?;
    let vote = match &state {
        Some(state) => {
            let vote = vote_of(storage, &names, state);
            let vote =
                vote.inspect_err(|error| warn!(%error, "vote of the damaged log is unknown"));
            unless_short(vote)?.flatten()
        }
        None => None,
    };
    let mut why = why.to_owned();
    why.truncate(why.floor_char_boundary(WHY_BYTES_MAX));
    let number =
        quarantined_files(storage)?.iter().map(|(number, _)| number + 1).max().unwrap_or(1);
    let note = RepairNote { log: QuarantinedLog { identity, vote, why }, number, moved: false };
    store(storage, &note)?;
    move_files(storage, note)
}

/// Converts any error but a shortage to `None`.
///
/// A file that cannot be opened for want of a descriptor is neither damaged nor lost: the call
/// fails and can be repeated.
pub(crate) fn unless_short<T>(read: Result<T, Error>) -> Result<Option<T>, Error> {
    match read {
        Err(error) if error.is_shortage() => Err(error),
        read => Ok(read.ok()),
    }
}

/// Removes the repair note, then the files of the quarantined log.
pub(crate) fn end_repair(storage: &dyn Storage) -> Result<(), Error> {
    match storage.remove(REPAIR) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(failed("remove", REPAIR, &e)),
    }
    storage.sync_dir().map_err(|e| failed("sync", &storage.describe(), &e))?;
    remove_quarantined(storage)
}

/// Continues after the note was stored.
fn resume(storage: &dyn Storage, note: RepairNote) -> Result<QuarantinedLog, Error> {
    // The sync of the note may have failed, and no file may be renamed before the note is durable.
    storage.sync_dir().map_err(|e| failed("sync", &storage.describe(), &e))?;
    move_files(storage, note)
}

/// Renames the files, then records in the note that it is done.
fn move_files(storage: &dyn Storage, mut note: RepairNote) -> Result<QuarantinedLog, Error> {
    let names = DirListing::list(storage)?;
    let segments = names.segments.iter().map(|id| segment_name(*id));
    let news = names.new.iter().map(|id| new_name(*id));
    let colds = names.cold.iter().map(|id| cold_name(*id));
    for name in segments.chain(news).chain(colds).chain([STATE.to_owned()]) {
        match storage.rename(&name, &quarantine_name(note.number, &name)) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(failed("rename", &name, &e)),
        }
    }
    // Removed: prepared segments hold no data, and a new log would take them over.
    for name in names.ready.iter().map(|number| ready_name(*number)).chain([STATE_TMP.to_owned()]) {
        remove(storage, &name)?;
    }
    storage.sync_dir().map_err(|e| failed("sync", &storage.describe(), &e))?;
    note.moved = true;
    store(storage, &note)?;
    info!(directory = storage.describe(), why = note.log.why, "quarantined a damaged log");
    Ok(note.log)
}

fn remove(storage: &dyn Storage, name: &str) -> Result<(), Error> {
    match storage.remove(name) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed("remove", name, &e)),
        _ => Ok(()),
    }
}

/// Lists the files of quarantined logs, with their numbers.
fn quarantined_files(storage: &dyn Storage) -> Result<Vec<(u64, String)>, Error> {
    let all = storage.list().map_err(|e| failed("list", &storage.describe(), &e))?;
    Ok(all.into_iter().filter_map(|name| Some((quarantine_number(&name)?, name))).collect())
}

fn remove_quarantined(storage: &dyn Storage) -> Result<(), Error> {
    let files = quarantined_files(storage)?;
    for (_, name) in &files {
        remove(storage, name)?;
    }
    if !files.is_empty() {
        storage.sync_dir().map_err(|e| failed("sync", &storage.describe(), &e))?;
    }
    Ok(())
}

/// Returns the identity of the log, which each of its files states.
pub(crate) fn identity_of(
    storage: &dyn Storage,
    names: &DirListing,
    state: Option<&PersistedState>,
) -> Result<Option<Bytes>, Error> {
    if let Some(state) = state {
        return Ok(Some(state.identity.clone()));
    }
    for id in &names.segments {
        let segment = open_segment(storage, *id, &segment_name(*id));
        let header = unless_short(segment.and_then(|segment| read_header(&segment)))?;
        if let Some(header) = header {
            return Ok(Some(header.identity));
        }
    }
    Ok(None)
}

/// Returns the last vote of a log.
///
/// Each segment header contains the current vote, so the newest segment has the last one. If that
/// segment verifies up to its end, no later vote is lost.
fn vote_of(
    storage: &dyn Storage,
    names: &DirListing,
    state: &PersistedState,
) -> Result<Option<Bytes>, Error> {
    let named = state.segments.last().map(|(id, _)| *id);
    let known = named.into_iter().chain([state.synced.segment]).max().unwrap_or(0);
    let newest = names.segments.last().copied().into_iter().chain(named).max().unwrap_or(0);
    if newest < known {
        return Err(missing_segment(known));
    }
    let unnamed = !names.segments.contains(&newest) && names.new.contains(&newest);
    let name = if unnamed { new_name(newest) } else { segment_name(newest) };
    let segment = Arc::new(open_segment(storage, newest, &name)?);
    // A segment is sealed only after the next one is durable.
    if read_trailer(&segment)?.is_some() {
        return Err(missing_segment(newest + 1));
    }
    let header = read_header(&segment)?;
    if header.identity != state.identity {
        return Err(segment.damaged(0..segment.len, "the segment belongs to another replica"));
    }
    let mut replay = Replay::default();
    replay.read(&[(segment, header)], state)?;
    Ok(replay.vote)
}

fn store(storage: &dyn Storage, note: &RepairNote) -> Result<(), Error> {
    let bytes = Aligned::copy(&note.encode());
    let file =
        storage.create(REPAIR_TMP, bytes.len() as u64).map_err(|e| match is_no_space(&e) {
            true => Error::DiskFull {
                free_bytes: storage.free_bytes().unwrap_or(0),
                needed_bytes: bytes.len() as u64,
            },
            false => changing("create", REPAIR_TMP, &e),
        })?;
    file.write_at(bytes.as_slice(), 0).map_err(|e| changing("write", REPAIR_TMP, &e))?;
    file.sync_data().map_err(|e| changing("sync", REPAIR_TMP, &e))?;
    // The last note takes effect at once, so it is undone if it cannot be made durable.
    let is_swapped = note.moved && storage.exchange(REPAIR_TMP, REPAIR).is_ok();
    if !is_swapped {
        storage.rename(REPAIR_TMP, REPAIR).map_err(|e| changing("rename", REPAIR_TMP, &e))?;
    }
    if let Err(e) = storage.sync_dir() {
        let is_undone = is_swapped && storage.exchange(REPAIR_TMP, REPAIR).is_ok();
        let can_repeat = is_undone || !note.moved;
        let error = if can_repeat { changing } else { poison };
        return Err(error("sync", &storage.describe(), &e));
    }
    if is_swapped {
        // Ignored: the next note replaces it.
        let _ = storage.remove(REPAIR_TMP);
    }
    Ok(())
}

fn load(storage: &dyn Storage) -> Result<Option<RepairNote>, Error> {
    let file = match storage.open(REPAIR) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed("open", REPAIR, &e)),
    };
    let len = file.len().map_err(|e| failed("read", REPAIR, &e))?;
    let damaged = || Error::Damaged {
        file: REPAIR.to_owned(),
        bytes: 0..len,
        what: "does not verify".to_owned(),
    };
    let size = usize::try_from(len).ok().filter(|size| *size <= 64 << 10).ok_or_else(damaged)?;
    let mut bytes = Aligned::with_len(size);
    file.read_device_at(bytes.as_mut_slice(), 0).map_err(|e| failed("read", REPAIR, &e))?;
    RepairNote::parse(bytes.as_slice()).map(Some).ok_or_else(damaged)
}

impl RepairNote {
    fn encode(&self) -> Vec<u8> {
        let QuarantinedLog { identity, vote, why } = &self.log;
        let flags = if self.moved { MOVED } else { 0 } | if vote.is_some() { HAS_VOTE } else { 0 };
        let mut body = Vec::with_capacity(256);
        body.extend_from_slice(&VERSION.to_le_bytes());
        body.extend_from_slice(&flags.to_le_bytes());
        let parts = [&identity[..], vote.as_deref().unwrap_or_default(), why.as_bytes()];
        let len = HEADER + parts.iter().map(|part| 4 + part.len()).sum::<usize>();
        body.extend_from_slice(&(len as u64).to_le_bytes());
        body.extend_from_slice(&self.number.to_le_bytes());
        for part in parts {
            let len = u32::try_from(part.len()).expect("the callers bound the lengths");
            body.extend_from_slice(&len.to_le_bytes());
            body.extend_from_slice(part);
        }
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&crc32fast::hash(&body).to_le_bytes());
        out.extend_from_slice(&body);
        out
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let len = usize::try_from(u64_at(bytes, 16)).ok()?;
        let bytes = bytes.get(..len).filter(|bytes| bytes.starts_with(&MAGIC))?;
        let verifies = crc32fast::hash(bytes.get(12..)?) == u32_at(bytes, 8);
        if !verifies || u16_at(bytes, 12) != VERSION {
            return None;
        }
        let flags = u16_at(bytes, 14);
        let mut rest = bytes.get(HEADER..)?;
        let mut part = |max: usize| {
            let len = usize::try_from(u32_at(rest, 0)).ok().filter(|len| *len <= max)?;
            let (taken, after) = rest.get(4..)?.split_at_checked(len)?;
            rest = after;
            Some(taken)
        };
        let identity = Bytes::copy_from_slice(part(OPAQUE_BYTES_MAX)?);
        let vote = Bytes::copy_from_slice(part(OPAQUE_BYTES_MAX)?);
        let why = String::from_utf8_lossy(part(WHY_BYTES_MAX)?).into_owned();
        let vote = (flags & HAS_VOTE != 0).then_some(vote);
        let log = QuarantinedLog { identity, vote, why };
        Some(Self { log, number: u64_at(bytes, 24), moved: flags & MOVED != 0 })
    }
}
