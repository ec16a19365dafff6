//! Replaces the state file atomically: write the spare file, sync it, swap the names of both, sync
//! the directory.
//!
//! The old state is the next spare file, so a full disk does not prevent a new state, and with it
//! freeing space. On a file system that cannot swap names, the spare file is renamed and another
//! one created.

use std::io;
use std::sync::Arc;

use crate::error::{Error, Shortage, changing, failed};
use crate::files::aligned::Aligned;
use crate::format::layout::{BLOCK_BYTES, STATE, STATE_TMP, STATE_VERSION, blocks};
use crate::format::state::{PersistedState, StateError};
use crate::storage::{File, Storage};
use crate::types::LogId;
use bytes::Bytes;

const SPARE_BYTES_MIN: u64 = 16 << 10;

/// Bytes of a write. A checkpoint may be large, and its copy for direct I/O takes memory.
const PIECE_BYTES: usize = 1 << 20;

#[derive(Debug, Default)]
pub(crate) struct StateFile {
    /// `state`, if it exists, and its length.
    current: Option<OpenState>,
    /// `state.tmp`, if it exists, and its length.
    spare: Option<OpenState>,
    /// The file system cannot swap names.
    renames: bool,
    /// The directory was not synced since `current` got its name. A crash may find the state before
    /// it, which the spare file may have.
    is_unsynced: bool,
    /// The last write gave its state the name, perhaps not durably.
    is_last_named: bool,
    /// The failure that poisons the log. The spare file may then be the durable state.
    failure: Option<Error>,
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
        Ok(Self { current, spare, ..Self::default() })
    }

    /// Replaces the state.
    ///
    /// After a shortage the log continues as before the call, but a crash or an open may find this
    /// state ([`Self::is_unsynced`]). Any other error poisons the log, and every later call returns
    /// it: another thread may call before the log is poisoned.
    pub(crate) fn write(
        &mut self,
        storage: &dyn Storage,
        state: &PersistedState,
    ) -> Result<(), Error> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let written = self.try_write(storage, state);
        self.failure = written.as_ref().err().filter(|error| !error.is_shortage()).cloned();
        written
    }

    /// Returns whether a crash may find the state of the last write although that failed.
    ///
    /// The files that it lists must then stay.
    pub(crate) fn is_last_named(&self) -> bool {
        self.is_last_named
    }

    /// Returns whether a crash may find either of the last two states.
    ///
    /// The files that either of them lists must then stay. The next write first syncs the
    /// directory.
    pub(crate) fn is_unsynced(&self) -> bool {
        self.is_unsynced
    }

    fn try_write(&mut self, storage: &dyn Storage, state: &PersistedState) -> Result<(), Error> {
        let parts = state.encode();
        let len = blocks(parts.iter().map(|part| part.len() as u64).sum());
        self.is_last_named = false;
        // The spare file must not change while a crash may restore its old name.
        self.sync_dir(storage, len)?;
        let (file, spare_len) = match self.spare.take() {
            Some(spare) if spare.1 >= len => spare,
            small => match create(storage, len) {
                Ok(file) => (file, len),
                Err(error) => {
                    self.spare = small.and_then(|(_, len)| create_spare(storage, len));
                    return Err(error);
                }
            },
        };
        let written = write_parts(file.as_ref(), &parts).map_err(|e| ("write", e));
        let written = written.and_then(|()| file.sync_data().map_err(|e| ("sync", e)));
        let replaced = written.and_then(|()| self.replace(storage).map_err(|e| ("rename", e)));
        let is_swapped = match replaced {
            Ok(is_swapped) => is_swapped,
            Err((operation, e)) => {
                self.spare = Some((file, spare_len));
                return Err(with_sizes(changing(operation, STATE_TMP, &e), storage, len));
            }
        };
        let before = self.current.replace((file, spare_len));
        self.spare = before.filter(|_| is_swapped);
        self.is_unsynced = true;
        self.is_last_named = true;
        self.sync_dir(storage, len)?;
        self.checkpoint = state.checkpoint.clone();
        self.provide_spare(storage, len);
        Ok(())
    }

    /// Makes the names of both files durable.
    fn sync_dir(&mut self, storage: &dyn Storage, len: u64) -> Result<(), Error> {
        if self.is_unsynced {
            let synced = storage.sync_dir();
            let failed = |e| with_sizes(changing("sync", &storage.describe(), &e), storage, len);
            synced.map_err(failed)?;
            self.is_unsynced = false;
        }
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
        let small_len = self.spare.take().map(|(_, len)| len);
        // Even with enough free space, a quota may refuse the bigger file.
        self.spare = create_spare(storage, spare_len)
            .or_else(|| small_len.and_then(|len| create_spare(storage, len)));
    }
}

/// Writes the parts one after the other, with zeroes up to a whole block.
fn write_parts(file: &dyn File, parts: &[Bytes]) -> io::Result<()> {
    let mut piece = Aligned::default();
    let mut at = 0;
    for part in parts {
        let mut left: &[u8] = part;
        while !left.is_empty() {
            let (next, rest) = left.split_at(left.len().min(PIECE_BYTES - piece.len()));
            piece.reserve(next.len()).extend_from_slice(next);
            left = rest;
            if piece.len() == PIECE_BYTES {
                file.write_at(piece.as_slice(), at)?;
                at += PIECE_BYTES as u64;
                piece.clear(PIECE_BYTES);
            }
        }
    }
    piece.pad();
    if piece.len() > 0 { file.write_at(piece.as_slice(), at) } else { Ok(()) }
}

/// Creates a spare file. Optional: without one the next write creates it.
fn create_spare(storage: &dyn Storage, len: u64) -> Option<OpenState> {
    create(storage, len).ok().map(|file| (file, len))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::{Crash, Fault, Operation, SimulatedDisk};

    fn state(next_id: u64, identity_bytes: usize) -> PersistedState {
        let identity = Bytes::from(vec![7; identity_bytes]);
        PersistedState { identity, next_id, ..PersistedState::default() }
    }

    fn next_id(disk: &SimulatedDisk) -> u64 {
        load_state(disk).unwrap().unwrap().next_id
    }

    #[test]
    fn nothing_is_written_after_a_failure() {
        for operation in [Operation::SyncDir, Operation::Exchange, Operation::Sync] {
            let disk = SimulatedDisk::new(1);
            let mut file = StateFile::default();
            file.write(&disk, &state(1, 10)).unwrap();
            file.write(&disk, &state(2, 10)).unwrap();
            disk.fail(Fault::next(operation));
            let failure = file.write(&disk, &state(3, 10)).unwrap_err();
            let before = disk.changes();
            // Another thread, before the log is poisoned.
            let error = file.write(&disk, &state(4, 10)).unwrap_err();
            assert!(matches!(error, Error::Poisoned { .. }), "{error}");
            assert_eq!((error.to_string(), disk.changes()), (failure.to_string(), before));
            disk.crash(Crash::LoseAll);
            assert_eq!(next_id(&disk.reopen()), 2, "{operation:?}");
        }
    }

    #[test]
    fn large_state_is_written_in_pieces() {
        let disk = SimulatedDisk::new(1);
        let mut file = StateFile::default();
        for len in [PIECE_BYTES - 5000, PIECE_BYTES - 100, PIECE_BYTES, 3 * PIECE_BYTES + 77] {
            let bytes = (0..len).map(|at| (at % 251) as u8).collect();
            let large = PersistedState {
                checkpoint: Some((LogId::default(), bytes)),
                placements: vec![(9, None); 1000],
                ..state(1, 10)
            };
            file.write(&disk, &large).unwrap();
            assert_eq!(load_state(&disk).unwrap(), Some(large));
        }
        // Ends with a block.
        let parts = [Bytes::from(vec![1; PIECE_BYTES - 1]), Bytes::from_static(&[2])];
        let written = disk.create("parts", PIECE_BYTES as u64).unwrap();
        write_parts(written.as_ref(), &parts).unwrap();
        let mut end = [0; 2];
        written.read_at(&mut end, PIECE_BYTES as u64 - 2).unwrap();
        assert_eq!(end, [1, 2]);
    }

    /// A crash finds one of both states, also if further calls fail. None of them is written over.
    #[test]
    fn state_without_a_directory_sync_is_kept_until_one_succeeds() {
        for seed in 0..16 {
            let disk = SimulatedDisk::new(seed);
            let mut file = StateFile::default();
            file.write(&disk, &state(1, 10)).unwrap();
            file.write(&disk, &state(2, 10)).unwrap();
            let short = Fault::next(Operation::SyncDir).lasting();
            disk.fail(short.error(io::ErrorKind::QuotaExceeded));
            for id in 3..6 {
                let error = file.write(&disk, &state(id, 10)).unwrap_err();
                assert!(error.is_shortage() && file.is_unsynced(), "{error}");
                assert_eq!(next_id(&disk), 3, "without a crash");
                let fork = disk.fork();
                fork.crash(Crash::Seeded(seed));
                assert!([2, 3].contains(&next_id(&fork.reopen())));
            }
            disk.heal();
            file.write(&disk, &state(6, 10)).unwrap();
            assert!(!file.is_unsynced());
            disk.crash(Crash::LoseAll);
            assert_eq!(next_id(&disk.reopen()), 6);
        }
    }

    #[test]
    fn quota_leaves_a_small_spare_file() {
        let disk = SimulatedDisk::new(1);
        let mut file = StateFile::default();
        file.write(&disk, &state(1, 10)).unwrap();
        file.write(&disk, &state(2, 10)).unwrap();
        let len = |file: &StateFile| file.spare.as_ref().map(|(_, len)| *len);
        // Too small for the usual margin, but not for the state.
        file.spare = create_spare(&disk, BLOCK_BYTES);
        disk.fail(Fault::next(Operation::Create).error(io::ErrorKind::QuotaExceeded));
        file.provide_spare(&disk, BLOCK_BYTES);
        assert_eq!(len(&file), Some(BLOCK_BYTES));
        // Too small for the state.
        disk.fail(Fault::next(Operation::Create).error(io::ErrorKind::QuotaExceeded));
        let mut large = state(3, 10);
        large.checkpoint = Some((LogId::default(), Bytes::from(vec![0; 9000])));
        assert!(file.write(&disk, &large).unwrap_err().is_shortage());
        assert_eq!(len(&file), Some(BLOCK_BYTES));
        file.write(&disk, &large).unwrap();
        assert_eq!(next_id(&disk), 3);
    }
}
