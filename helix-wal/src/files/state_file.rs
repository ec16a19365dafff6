//! Replaces the state file atomically: write the spare file, sync it, swap the names of both, sync
//! the directory.
//!
//! The old state is the next spare file, so a full disk does not prevent a new state, and with it
//! freeing space. On a file system that cannot swap names, the spare file is renamed and another
//! one created.

use std::io;
use std::sync::Arc;

use crate::error::{Error, Shortage, changing, failed, poison};
use crate::files::aligned::Aligned;
use crate::format::layout::{BLOCK_BYTES, STATE, STATE_TMP, STATE_VERSION, blocks};
use crate::format::state::{PersistedState, StateError};
use crate::storage::{File, Storage};
use crate::types::LogId;
use bytes::Bytes;

const SPARE_BYTES_MIN: u64 = 16 << 10;

#[derive(Debug, Default)]
pub(crate) struct StateFile {
    /// `state`, if it exists, and its length.
    current: Option<OpenState>,
    /// `state.tmp`, if it exists, and its length.
    spare: Option<OpenState>,
    /// The file system cannot swap names.
    renames: bool,
    /// Checkpoint of the last written state.
    pub checkpoint: Option<(LogId, Bytes)>,
}

type OpenState = (Arc<dyn File>, u64);

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
    /// Takes over the files of an earlier process.
    ///
    /// # Errors
    /// Fails only after a shortage. Without a spare file a new one is created.
    pub(crate) fn open(storage: &dyn Storage) -> Result<Self, Error> {
        let open = |name: &str| {
            let opened = storage.open(name).and_then(|file| {
                let len = file.len()?;
                Ok((file, len - len % BLOCK_BYTES))
            });
            match opened {
                Ok(opened) => Ok(Some(opened)),
                Err(e) if Shortage::of(&e).is_some() => Err(failed("open", name, &e)),
                Err(_) => Ok(None),
            }
        };
        let (current, spare) = (open(STATE)?, open(STATE_TMP)?);
        Ok(Self { current, spare, renames: false, checkpoint: None })
    }

    /// Replaces the state.
    ///
    /// A shortage leaves everything unchanged; any other error poisons the log.
    pub(crate) fn write(
        &mut self,
        storage: &dyn Storage,
        state: &PersistedState,
    ) -> Result<(), Error> {
        let bytes = Aligned::copy(&state.encode());
        let len = bytes.len() as u64;
        let (file, spare_len) = match self.spare.take() {
            Some(spare) if spare.1 >= len => spare,
            _ => (create(storage, len)?, len),
        };
        let written = file.write_at(bytes.as_slice(), 0).map_err(|e| ("write", e));
        let written = written.and_then(|()| file.sync_data().map_err(|e| ("sync", e)));
        let replaced = written.and_then(|()| self.replace(storage).map_err(|e| ("rename", e)));
        let is_swapped = match replaced {
            Ok(is_swapped) => is_swapped,
            Err((operation, e)) => {
                self.spare = Some((file, spare_len));
                return Err(with_sizes(changing(operation, STATE_TMP, &e), storage, len));
            }
        };
        // Poisons the log even after a shortage: a crash may find either state from here on.
        storage.sync_dir().map_err(|e| poison("sync", &storage.describe(), &e))?;
        let before = self.current.replace((file, spare_len));
        self.spare = before.filter(|_| is_swapped);
        self.checkpoint = state.checkpoint.clone();
        self.provide_spare(storage, len);
        Ok(())
    }

    /// Gives the spare file the name of the state. Returns whether the state got that of the spare.
    fn replace(&mut self, storage: &dyn Storage) -> io::Result<bool> {
        if self.current.is_some() && !self.renames {
            match storage.exchange(STATE_TMP, STATE) {
                Err(e) if e.kind() == io::ErrorKind::Unsupported => self.renames = true,
                exchanged => return exchanged.map(|()| true),
            }
        }
        storage.rename(STATE_TMP, STATE).map(|()| false)
    }

    /// Creates a spare file if there is none that fits the next state, which may be longer.
    fn provide_spare(&mut self, storage: &dyn Storage, len: u64) {
        if self.spare.as_ref().is_some_and(|(_, spare_len)| *spare_len >= blocks(len + len / 4)) {
            return;
        }
        let spare_len = blocks(len + len / 2).max(SPARE_BYTES_MIN);
        // A small spare file is better than none, so it is replaced only if there is space.
        if self.spare.is_some() && storage.free_bytes().unwrap_or(0) < spare_len {
            return;
        }
        // Optional: without a spare file the next write creates one.
        self.spare = create(storage, spare_len).ok().map(|file| (file, spare_len));
    }
}

fn create(storage: &dyn Storage, len: u64) -> Result<Arc<dyn File>, Error> {
    let created = storage.create(STATE_TMP, len);
    created.map_err(|e| with_sizes(changing("create", STATE_TMP, &e), storage, len))
}

/// Adds the sizes to the error of a full disk.
fn with_sizes(error: Error, storage: &dyn Storage, needed_bytes: u64) -> Error {
    match error {
        Error::DiskFull { .. } => {
            Error::DiskFull { free_bytes: storage.free_bytes().unwrap_or(0), needed_bytes }
        }
        other => other,
    }
}
