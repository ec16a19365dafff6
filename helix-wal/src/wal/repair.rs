//! Operations on a data directory whose log is not open: checks and repairs.

use std::sync::Arc;

use bytes::Bytes;

use super::Wal;
use crate::error::{Error, failed};
use crate::files::data_dir::{DirListing, lock_dir};
use crate::files::state_file::load_state;
use crate::format::layout::{Name, REMOVED, STATE, parse_name};
use crate::recovery::quarantine::{self, QuarantinedLog, REPAIR};
use crate::recovery::truncate_damage::{self, DamagedEnd};
use crate::storage::Storage;

impl Wal {
    /// Returns whether the data directory holds a log, of any replica and in any state.
    ///
    /// # Errors
    /// Fails if the directory cannot be listed.
    pub fn exists(storage: &dyn Storage) -> Result<bool, Error> {
        let names = storage.list().map_err(|e| failed("list", &storage.describe(), &e))?;
        let belongs = |name: &str| {
            name == STATE || name == REPAIR || matches!(parse_name(name), Name::Segment(_))
        };
        // A log whose removal was interrupted no longer exists.
        let is_removed = names.iter().any(|name| name == REMOVED);
        Ok(!is_removed && names.iter().any(|name| belongs(name)))
    }

    /// Removes the log in this directory with all of its files. Also completes a removal that was
    /// interrupted: after a crash the log either exists as before, or no longer.
    ///
    /// # Errors
    /// Fails if the directory is in use, or a file cannot be removed; the call can be repeated.
    pub fn remove(storage: &dyn Storage) -> Result<(), Error> {
        let _guard = lock_dir(storage)?;
        let list = || storage.list().map_err(|e| failed("list", &storage.describe(), &e));
        let changing = |name: &str| {
            let name = name.to_owned();
            move |e: std::io::Error| failed("remove", &name, &e)
        };
        let names = list()?;
        if !names.iter().any(|name| name == REMOVED) {
            // A rename needs no disk space. From then on the log does not exist.
            let first = names.iter().find(|name| *name == STATE).or_else(|| names.first());
            let Some(first) = first else { return Ok(()) };
            storage.rename(first, REMOVED).map_err(changing(first))?;
            storage.sync_dir().map_err(changing(REMOVED))?;
        }
        for name in list()?.iter().filter(|name| *name != REMOVED) {
            storage.remove(name).map_err(changing(name))?;
        }
        storage.sync_dir().map_err(changing(REMOVED))?;
        storage.remove(REMOVED).map_err(changing(REMOVED))?;
        storage.sync_dir().map_err(changing(REMOVED))
    }

    /// Returns whether a removal of the log in this directory was interrupted.
    ///
    /// # Errors
    /// Fails if the directory cannot be listed.
    pub fn is_being_removed(storage: &dyn Storage) -> Result<bool, Error> {
        let names = storage.list().map_err(|e| failed("list", &storage.describe(), &e))?;
        Ok(names.iter().any(|name| name == REMOVED))
    }

    /// Returns the identity of the log in this directory, as [`crate::Options::identity`].
    ///
    /// For a log that does not open. `None` if neither the state file nor a segment can be read.
    ///
    /// # Errors
    /// Fails if the directory cannot be listed, or after a shortage ([`Error::is_shortage`]).
    pub fn identity(storage: &dyn Storage) -> Result<Option<Bytes>, Error> {
        let state = quarantine::unless_short(load_state(storage))?.flatten();
        quarantine::identity_of(storage, &DirListing::list(storage)?, state.as_ref())
    }

    /// Returns [`Wal::entries_version`] of the log in this directory; 0 if there is none.
    ///
    /// # Errors
    /// Fails if the state file cannot be read, or is of a newer program.
    pub fn stored_entries_version(storage: &dyn Storage) -> Result<u32, Error> {
        Ok(load_state(storage)?.map_or(0, |state| state.entries_version))
    }

    /// Returns the quarantined log that the log in this directory replaces, until the repair ends.
    ///
    /// Completes an interrupted [`Wal::quarantine`].
    ///
    /// # Errors
    /// Fails if the directory is in use, the repair note cannot be read, or after a shortage
    /// ([`Error::is_shortage`]).
    pub fn quarantined_log(storage: &dyn Storage) -> Result<Option<QuarantinedLog>, Error> {
        quarantine::quarantined_log(storage)
    }

    /// Quarantines the log in this directory: renames its files, so that a new log can begin.
    ///
    /// Nothing is deleted except prepared segments. `identity` is used if no file of the log states
    /// one; empty if it is unknown.
    ///
    /// # Errors
    /// [`Error::DiskFull`] and [`Error::Exhausted`] leave everything unchanged. [`Error::Damaged`]
    /// if the identity is unknown.
    pub fn quarantine(
        storage: &dyn Storage,
        why: &str,
        identity: Bytes,
    ) -> Result<QuarantinedLog, Error> {
        quarantine::quarantine(storage, why, identity)
    }

    /// Ends a repair, once the log has everything that its predecessor had promised to keep.
    /// Deletes the quarantined files.
    ///
    /// # Errors
    /// Fails if a file cannot be removed; the call can be repeated.
    pub fn end_repair(storage: &dyn Storage) -> Result<(), Error> {
        quarantine::end_repair(storage)
    }

    /// Describes the damaged end that keeps a log from opening; `None` if its end is intact.
    /// Changes nothing.
    ///
    /// # Errors
    /// Fails if the directory is in use, or the log is damaged elsewhere.
    pub fn damaged_end(storage: &Arc<dyn Storage>) -> Result<Option<DamagedEnd>, Error> {
        truncate_damage::damaged_end(storage)
    }

    /// Discards the damaged end: the log now ends before it. A crash leaves either the old log or
    /// the truncated one.
    ///
    /// # Errors
    /// Fails if the directory is in use, or the log is damaged elsewhere.
    pub fn truncate_damaged_end(storage: &Arc<dyn Storage>) -> Result<(), Error> {
        truncate_damage::truncate_damaged_end(storage)
    }
}
