//! Replaces the state file atomically: write to a temporary name, sync, rename, sync the directory.
//!
//! Keeps a spare file for the next state, so that a full disk cannot prevent freeing space.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use tracing::debug;

use crate::error::{Error, failed, poison};
use crate::files::aligned::Aligned;
use crate::format::layout::{BLOCK_BYTES, STATE, STATE_TMP, STATE_VERSION, blocks};
use crate::format::state::{PersistedState, StateError};
use crate::storage::{File, Storage};
use crate::types::LogId;

const SPARE_BYTES_MIN: u64 = 16 << 10;

#[derive(Debug, Default)]
pub(crate) struct StateFile {
    /// `state.tmp`, if it exists, and its length.
    spare: Option<(Arc<dyn File>, u64)>,
    /// Checkpoint of the last written state.
    pub checkpoint: Option<(LogId, Bytes)>,
}

/// Reads the state; `None` if there is no state file.
pub(crate) fn load_state(storage: &dyn Storage) -> Result<Option<PersistedState>, Error> {
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
    // The state contains its own length. The file may be longer.
    let mut bytes = read(len.min(BLOCK_BYTES))?;
    let stated_len = PersistedState::len(bytes.as_slice()).filter(|stated_len| *stated_len <= len);
    let stated_len = stated_len.ok_or_else(|| damaged("does not verify"))?;
    if stated_len > BLOCK_BYTES {
        bytes = read(stated_len)?;
    }
    match PersistedState::parse(bytes.as_slice()) {
        Ok(state) => Ok(Some(state)),
        Err(StateError::Damaged) => Err(damaged("does not verify")),
        Err(StateError::Newer(version)) => {
            let directory = storage.describe();
            Err(Error::Unusable(format!(
                "{directory} was written by a newer program (format version {version}), this one \
                 reads up to version {STATE_VERSION}; use the program that wrote it or a later one"
            )))
        }
    }
}

impl StateFile {
    /// Takes over the spare file of an earlier process.
    pub(crate) fn open(storage: &dyn Storage) -> Self {
        // Optional: without a spare file a new one is created.
        let spare = storage.open(STATE_TMP).ok().and_then(|file| {
            let len = file.len().ok()?;
            Some((file, len - len % BLOCK_BYTES))
        });
        Self { spare, checkpoint: None }
    }

    /// Replaces the state. `DiskFull` leaves everything unchanged; any other error poisons the log.
    pub(crate) fn write(
        &mut self,
        storage: &dyn Storage,
        state: &PersistedState,
    ) -> Result<(), Error> {
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
                debug!(%error, "creating a spare state file failed");
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
