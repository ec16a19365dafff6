//! A log that cannot be used, put out of the way of a new one in the same folder. A note says so,
//! from before the first file moves until the new log has all that the old one had promised to
//! keep: whoever opens the folder meanwhile learns that the log in it may lack what was
//! acknowledged.
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

use crate::aligned::Aligned;
use crate::error::{failed, poison};
use crate::layout::{
    OPAQUE_BYTES_MAX, STATE, STATE_TMP, aside_name, aside_number, cold_name, new_name, ready_name,
    segment_name, u16_at, u32_at, u64_at,
};
use crate::recovery::{Names, missing, open_segment, read_trailer};
use crate::replay::Replay;
use crate::scan::read_header;
use crate::state_file::State;
use crate::state_io;
use crate::storage::Storage;
use crate::{Error, Wal};

pub(crate) const REPAIR: &str = "repair";
const REPAIR_TMP: &str = "repair.tmp";
const MAGIC: [u8; 8] = *b"HLXREPAR";
const VERSION: u16 = 1;
const HEADER: usize = 32;
const MOVED: u16 = 1;
const HAS_VOTE: u16 = 2;
/// Of the reason so much is kept.
const WHY_BYTES_MAX: usize = 1024;

/// A log that was put aside.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Aside {
    /// Whose it was, as [`crate::Options::identity`].
    pub identity: Bytes,
    /// Its last vote; `None` where a later one may be in what is damaged.
    pub vote: Option<Bytes>,
    /// What is wrong with it.
    pub why: String,
}

#[derive(Debug, Clone)]
struct Note {
    aside: Aside,
    /// In the names of its files.
    number: u64,
    /// All of them have these names.
    moved: bool,
}

impl Wal {
    /// The log that the one in this folder takes the place of, and is not yet known to have all
    /// of. Finishes what [`Self::set_aside`] began.
    pub fn repair_of(storage: &dyn Storage) -> Result<Option<Aside>, Error> {
        let _guard = lock(storage)?;
        match load(storage)? {
            Some(note) if note.moved => Ok(Some(note.aside)),
            Some(note) => move_files(storage, note).map(Some),
            None => {
                // Left by an end that was cut short.
                remove_aside(storage)?;
                Ok(None)
            }
        }
    }

    /// Whose log is in this folder, as [`crate::Options::identity`]; `None` where neither the state
    /// file nor any segment says so any more. For a log that does not open.
    pub fn identity(storage: &dyn Storage) -> Result<Option<Bytes>, Error> {
        let state = state_io::load(storage).ok().flatten();
        Ok(identity_of(storage, &Names::list(storage)?, state.as_ref()))
    }

    /// Puts the log in this folder aside: the folder is then one for a new log. Nothing is lost by
    /// it; the files get other names. `identity` is whose it is where nothing in it says that any
    /// more; empty: not known. `DiskFull` leaves everything as it was.
    pub fn set_aside(storage: &dyn Storage, why: &str, identity: Bytes) -> Result<Aside, Error> {
        let _guard = lock(storage)?;
        if let Some(note) = load(storage)?.filter(|note| !note.moved) {
            return move_files(storage, note);
        }
        let names = Names::list(storage)?;
        let state = state_io::load(storage).ok().flatten();
        let known = Some(identity).filter(|known| !known.is_empty());
        let found = identity_of(storage, &names, state.as_ref());
        let identity = found.or(known).ok_or_else(|| Error::Damaged {
            file: STATE.to_owned(),
            bytes: 0..0,
            what: "does not verify, and no segment says whose log this is".to_owned(),
        })?;
        let vote = state.as_ref().and_then(|state| {
            let vote = vote_of(storage, &names, state);
            vote.inspect_err(|error| warn!(%error, "the vote of a damaged log is not known"))
                .ok()?
        });
        let mut why = why.to_owned();
        why.truncate(why.floor_char_boundary(WHY_BYTES_MAX));
        let number = aside_files(storage)?.iter().map(|(number, _)| number + 1).max().unwrap_or(1);
        let note = Note { aside: Aside { identity, vote, why }, number, moved: false };
        store(storage, &note)?;
        move_files(storage, note)
    }

    /// Says that the log in this folder has all that the one before had promised to keep, and
    /// removes what is left of that.
    pub fn end_repair(storage: &dyn Storage) -> Result<(), Error> {
        match storage.remove(REPAIR) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(failed("remove", REPAIR, &e)),
        }
        storage.sync_dir().map_err(|e| failed("sync", &storage.describe(), &e))?;
        remove_aside(storage)
    }
}

fn lock(storage: &dyn Storage) -> Result<Box<dyn Send + Sync>, Error> {
    crate::recovery::lock(storage)
}

/// Gives the files their names, and says that they have them.
fn move_files(storage: &dyn Storage, mut note: Note) -> Result<Aside, Error> {
    let names = Names::list(storage)?;
    let segments = names.segments.iter().map(|id| segment_name(*id));
    let news = names.new.iter().map(|id| new_name(*id));
    let colds = names.cold.iter().map(|id| cold_name(*id));
    for name in segments.chain(news).chain(colds).chain([STATE.to_owned()]) {
        match storage.rename(&name, &aside_name(note.number, &name)) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(failed("rename", &name, &e)),
        }
    }
    // What is in these means nothing, and would be missed by a log that begins.
    for name in names.ready.iter().map(|number| ready_name(*number)).chain([STATE_TMP.to_owned()]) {
        remove(storage, &name)?;
    }
    storage.sync_dir().map_err(|e| failed("sync", &storage.describe(), &e))?;
    note.moved = true;
    store(storage, &note)?;
    info!(folder = storage.describe(), why = note.aside.why, "a damaged log is put aside");
    Ok(note.aside)
}

fn remove(storage: &dyn Storage, name: &str) -> Result<(), Error> {
    match storage.remove(name) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed("remove", name, &e)),
        _ => Ok(()),
    }
}

/// The files of logs that were put aside, with their numbers.
fn aside_files(storage: &dyn Storage) -> Result<Vec<(u64, String)>, Error> {
    let all = storage.list().map_err(|e| failed("list", &storage.describe(), &e))?;
    Ok(all.into_iter().filter_map(|name| Some((aside_number(&name)?, name))).collect())
}

fn remove_aside(storage: &dyn Storage) -> Result<(), Error> {
    let files = aside_files(storage)?;
    for (_, name) in &files {
        remove(storage, name)?;
    }
    if !files.is_empty() {
        storage.sync_dir().map_err(|e| failed("sync", &storage.describe(), &e))?;
    }
    Ok(())
}

/// Whose log it is: every one of its files says so.
fn identity_of(storage: &dyn Storage, names: &Names, state: Option<&State>) -> Option<Bytes> {
    let of = |id: &u64| {
        let segment = open_segment(storage, *id, &segment_name(*id)).ok()?;
        Some(read_header(&segment).ok()?.identity)
    };
    state.map(|state| state.identity.clone()).or_else(|| names.segments.iter().find_map(of))
}

/// The last vote of a log. Each segment begins with the vote as of then, so it is in the newest
/// one: where that verifies up to its end, no later one is lost.
fn vote_of(storage: &dyn Storage, names: &Names, state: &State) -> Result<Option<Bytes>, Error> {
    let named = state.segments.last().map(|(id, _)| *id);
    let known = named.into_iter().chain([state.synced.segment]).max().unwrap_or(0);
    let newest = names.segments.last().copied().into_iter().chain(named).max().unwrap_or(0);
    if newest < known {
        return Err(missing(known));
    }
    let unnamed = !names.segments.contains(&newest) && names.new.contains(&newest);
    let name = if unnamed { new_name(newest) } else { segment_name(newest) };
    let segment = Arc::new(open_segment(storage, newest, &name)?);
    // A segment is sealed only when the next one is durable.
    if read_trailer(&segment)?.is_some() {
        return Err(missing(newest + 1));
    }
    let header = read_header(&segment)?;
    if header.identity != state.identity {
        return Err(segment.damaged(0..segment.len, "the segment is another replica's"));
    }
    let mut replay = Replay::default();
    replay.read(&[(segment, header)], state)?;
    Ok(replay.vote)
}

fn store(storage: &dyn Storage, note: &Note) -> Result<(), Error> {
    let bytes = Aligned::copy(&note.encode());
    let file = storage.create(REPAIR_TMP, bytes.len() as u64).map_err(|e| match e.kind() {
        io::ErrorKind::StorageFull => Error::DiskFull {
            free_bytes: storage.free_bytes().unwrap_or(0),
            needed_bytes: bytes.len() as u64,
        },
        _ => poison("create", REPAIR_TMP, &e),
    })?;
    file.write_at(bytes.as_slice(), 0).map_err(|e| poison("write", REPAIR_TMP, &e))?;
    file.sync_data().map_err(|e| poison("sync", REPAIR_TMP, &e))?;
    storage.rename(REPAIR_TMP, REPAIR).map_err(|e| poison("rename", REPAIR_TMP, &e))?;
    storage.sync_dir().map_err(|e| poison("sync", &storage.describe(), &e))
}

fn load(storage: &dyn Storage) -> Result<Option<Note>, Error> {
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
    Note::parse(bytes.as_slice()).map(Some).ok_or_else(damaged)
}

impl Note {
    fn encode(&self) -> Vec<u8> {
        let Aside { identity, vote, why } = &self.aside;
        let flags = if self.moved { MOVED } else { 0 } | if vote.is_some() { HAS_VOTE } else { 0 };
        let mut body = Vec::with_capacity(256);
        body.extend_from_slice(&VERSION.to_le_bytes());
        body.extend_from_slice(&flags.to_le_bytes());
        let parts = [&identity[..], vote.as_deref().unwrap_or_default(), why.as_bytes()];
        let len = HEADER + parts.iter().map(|part| 4 + part.len()).sum::<usize>();
        body.extend_from_slice(&(len as u64).to_le_bytes());
        body.extend_from_slice(&self.number.to_le_bytes());
        for part in parts {
            let len = u32::try_from(part.len()).expect("bounded where they come from");
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
        let aside = Aside { identity, vote, why };
        Some(Self { aside, number: u64_at(bytes, 24), moved: flags & MOVED != 0 })
    }
}
