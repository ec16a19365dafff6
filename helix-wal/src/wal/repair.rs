//! Operations on a data directory whose log is not open: checks and repairs.

use std::sync::Arc;

use bytes::Bytes;

use super::Wal;
use crate::error::{Error, failed};
use crate::files::data_dir::DirListing;
use crate::files::state_file::load_state;
use crate::format::layout::{Name, STATE, parse_name};
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
        Ok(names.iter().any(|name| belongs(name)))
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

    /// Ends a repair: the log has everything its predecessor had promised to keep. Deletes the
    /// quarantined files.
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
