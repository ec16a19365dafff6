//! Checkpoints, snapshots and scrubbing of a [`Wal`].

use std::sync::Arc;

use bytes::Bytes;

use super::Wal;
use crate::error::Error;
use crate::files::cold_segment::ColdSegments;
use crate::files::segment::unless_blocked;
use crate::maintenance::scrub::Scrub;
use crate::types::{LiveEntries, LogId};
use crate::write::cold_writer::ColdWriter;

/// Maximum number of streams visited per lock acquisition.
const STREAMS_PER_LOCK: usize = 64;

impl Wal {
    /// Stores a checkpoint of the state machine durably: all entries up to `at` are in it. Blocks.
    ///
    /// `at` must be synced. Entries below it are not replayed at open. If `at` is above the last
    /// placed entry, the state machine was moved forward by a snapshot, and the entries between
    /// take no positions.
    ///
    /// # Errors
    /// [`Error::DiskFull`] and [`Error::Exhausted`] leave the previous checkpoint in place; an open
    /// may find the new one.
    pub fn checkpoint(&self, at: LogId, state: Bytes) -> Result<(), Error> {
        self.shared.store_checkpoint(at, state, None)
    }

    /// Installs a snapshot: a state together with the live entries that this log lacks. Blocks.
    ///
    /// In one step the state becomes the checkpoint, the segments become part of the log, and the
    /// entries between the last placed one and `at` are removed. The log continues after `at`.
    /// The entries must lie above the last placed one, and at or below `at`.
    ///
    /// # Errors
    /// Any error leaves the log unchanged until the next open, which may find it installed. After
    /// [`Error::DiskFull`] and [`Error::Exhausted`] the call can be repeated with the same
    /// segments.
    pub fn install(&self, at: LogId, state: Bytes, cold: &mut ColdSegments) -> Result<(), Error> {
        self.shared.store_checkpoint(at, state, Some(cold))
    }

    /// Makes staged segments survive a restart: the next open returns them. Blocks.
    ///
    /// The segments hold every live entry above `after`, up to their last. They replace the
    /// segments retained before, which should be among them.
    ///
    /// # Errors
    /// After [`Error::DiskFull`] and [`Error::Exhausted`] the call can be repeated.
    pub fn retain(&self, after: u64, segments: &mut ColdSegments) -> Result<(), Error> {
        self.shared.retain(after, segments)
    }

    /// Returns the version of what the entries mean; 0 if it was never set.
    pub fn entries_version(&self) -> u32 {
        self.shared.lock().entries_version
    }

    /// Raises the version of what the entries mean, which the user of the log counts. Blocks until
    /// it is durable; without effect on a version as high.
    ///
    /// Programs that do not know such versions then refuse to open the log. Others ask for it
    /// before they open one: [`Wal::stored_entries_version`].
    ///
    /// # Errors
    /// Fails if the log is closed or poisoned, and after a shortage.
    pub fn raise_entries_version(&self, version: u32) -> Result<(), Error> {
        self.shared.raise_entries_version(version)
    }

    /// Returns the segments that an earlier process retained, and the index above which they hold
    /// every live entry. Returns them once.
    pub fn take_staged(&self) -> Option<(u64, ColdSegments)> {
        self.shared.take_staged()
    }

    /// Begins segments for entries of another replica, for [`Wal::install`].
    ///
    /// # Errors
    /// Fails if the log is closed or poisoned.
    pub fn cold_writer(&self) -> Result<ColdWriter, Error> {
        self.shared.lock().check_open()?;
        Ok(ColdWriter::new(&self.shared))
    }

    /// Reads entries that streams still need with `after < index <= upto`, in index order. Blocks.
    ///
    /// Includes entries that have left the Raft log. Returns about `bytes_max` bytes, and none only
    /// if it passed many entries that are not live. [`LiveEntries::upto`] tells how far the call
    /// got, which is above `after`. Trimmed entries are left out.
    ///
    /// # Errors
    /// [`Error::Beyond`] if `upto` is not placed yet.
    pub fn read_live(&self, after: u64, upto: u64, bytes_max: usize) -> Result<LiveEntries, Error> {
        self.read_live_of(after, upto, bytes_max, &|_| true)
    }

    /// Like [`Wal::read_live`], for the streams that `wants` accepts.
    ///
    /// Passes entries of other streams without reading them, except small ones that lie between two
    /// wanted ones on disk. A call passes a limited number of entries, so that the result may be
    /// empty although wanted entries follow above [`LiveEntries::upto`].
    ///
    /// # Errors
    /// [`Error::Beyond`] if `upto` is not placed yet.
    pub fn read_live_of(
        &self,
        after: u64,
        upto: u64,
        bytes_max: usize,
        wants: &dyn Fn(u64) -> bool,
    ) -> Result<LiveEntries, Error> {
        let found = unless_blocked(self.shared.find_live(after, upto, bytes_max, wants))?;
        Ok(found.unwrap_or_default())
    }

    /// Estimates the bytes of frames that [`Wal::read_live`] would return for a range. Counts
    /// trimmed entries that are still on disk.
    pub fn live_bytes(&self, after: u64, upto: u64) -> u64 {
        self.shared.lock().log.bytes_between(after, upto)
    }

    /// Estimates the bytes of frames that [`Wal::read_live_of`] would return for a range.
    ///
    /// Leaves out trimmed entries, and those that are not durable yet. Visits the shares of all
    /// wanted streams: callers that read in a loop should not call it each time.
    pub fn live_bytes_of(&self, after: u64, upto: u64, wants: &dyn Fn(u64) -> bool) -> u64 {
        let mut streams: Vec<u64> = self.shared.lock().log.streams.keys().copied().collect();
        streams.retain(|stream| wants(*stream));
        let chunks = streams.chunks(STREAMS_PER_LOCK);
        let bytes = chunks.map(|streams| self.shared.lock().log.bytes_of(streams, after, upto));
        bytes.sum()
    }

    /// Begins a scrub at the oldest sealed segment.
    pub fn scrub(&self) -> Scrub {
        Scrub::new(Arc::clone(&self.shared))
    }
}
