//! Puts the state file on the disk: whole, to another name, synced, renamed, folder synced.
//! Keeps the file for the next one at hand, so that a full disk cannot stop space being freed.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use tracing::debug;

use crate::aligned::Aligned;
use crate::error::{failed, poison};
use crate::layout::{BLOCK_BYTES, STATE, STATE_TMP, STATE_VERSION, blocks};
use crate::state_file::{State, Unreadable};
use crate::storage::{File, Storage};
use crate::{Error, LogId};

const SPARE_BYTES_MIN: u64 = 16 << 10;

#[derive(Debug, Default)]
pub(crate) struct StateFile {
    /// `state.tmp`, if it exists.
    spare: Option<(Arc<dyn File>, u64)>,
    /// As last written.
    pub checkpoint: Option<(LogId, Bytes)>,
}

/// Reads the state; `None` if there is none.
pub(crate) fn load(storage: &dyn Storage) -> Result<Option<State>, Error> {
    let file = match storage.open(STATE) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed("open", STATE, &e)),
    };
    let len = file.len().map_err(|e| failed("read", STATE, &e))?;
    let damaged =
        |what: &str| Error::Damaged { file: STATE.into(), bytes: 0..len, what: what.into() };
    let read = |len: u64| {
        let mut bytes = Aligned::with_len(usize::try_from(len).map_err(|_| damaged("too long"))?);
        file.read_device_at(bytes.as_mut_slice(), 0).map_err(|e| failed("read", STATE, &e))?;
        Ok(bytes)
    };
    // How long the state is it says itself. The file may be longer, by whatever is wrong with it.
    let mut bytes = read(len.min(BLOCK_BYTES))?;
    let said = State::len(bytes.as_slice()).filter(|said| *said <= len);
    let said = said.ok_or_else(|| damaged("does not verify"))?;
    if said > BLOCK_BYTES {
        bytes = read(said)?;
    }
    match State::parse(bytes.as_slice()) {
        Ok(state) => Ok(Some(state)),
        Err(Unreadable::Damaged) => Err(damaged("does not verify")),
        Err(Unreadable::Newer(version)) => {
            let folder = storage.describe();
            Err(Error::Unusable(format!(
                "{folder} was written by a newer program and needs one that reads version \
                 {version} of the format, this one reads up to {STATE_VERSION}; use the program \
                 that wrote it, or a later one"
            )))
        }
    }
}

impl StateFile {
    /// Takes over a spare file of an earlier life.
    pub(crate) fn open(storage: &dyn Storage) -> Self {
        // Only a saving: without it a new one is created.
        let spare = storage.open(STATE_TMP).ok().and_then(|file| {
            let len = file.len().ok()?;
            Some((file, len - len % BLOCK_BYTES))
        });
        Self { spare, checkpoint: None }
    }

    /// Replaces the state. `DiskFull` leaves everything as it was; any other error poisons.
    pub(crate) fn write(&mut self, storage: &dyn Storage, state: &State) -> Result<(), Error> {
        let bytes = Aligned::copy(&state.encode());
        let len = bytes.len() as u64;
        let file = match self.spare.take() {
            Some((file, spare_len)) if spare_len >= len => file,
            _ => create(storage, len)?,
        };
        file.write_at(bytes.as_slice(), 0).map_err(|e| poison("write", STATE_TMP, &e))?;
        file.sync_data().map_err(|e| poison("sync", STATE_TMP, &e))?;
        storage.rename(STATE_TMP, STATE).map_err(|e| poison("rename", STATE_TMP, &e))?;
        storage.sync_dir().map_err(|e| poison("sync", &storage.describe(), &e))?;
        self.checkpoint = state.checkpoint.clone();
        let spare_len = blocks(len + len / 2).max(SPARE_BYTES_MIN);
        self.spare = match create(storage, spare_len) {
            Ok(file) => Some((file, spare_len)),
            Err(error) => {
                debug!(%error, "no spare state file");
                None
            }
        };
        Ok(())
    }
}

fn create(storage: &dyn Storage, len: u64) -> Result<Arc<dyn File>, Error> {
    storage.create(STATE_TMP, len).map_err(|e| {
        if e.kind() == io::ErrorKind::StorageFull {
            let free_bytes = storage.free_bytes().unwrap_or(0);
            return Error::DiskFull { free_bytes, needed_bytes: len };
        }
        poison("create", STATE_TMP, &e)
    })
}
