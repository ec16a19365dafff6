//! The log of a new replica that a split makes, while it is filled: the records that move, copied
//! from the parent into segments beside the log, then the state with which the shard begins.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use helix_proto::raft::v1 as pb;
use helix_wal::{LogId, Wal};
use prost::Message;
use tokio::sync::oneshot;

use super::staged::{RecordChunk, StagedRecords};
use crate::raft::{DiskReads, ReplicaId, initial_checkpoint, initial_vote};
use crate::sync::lock;

/// The log of a new replica. Finished segments outlive the process.
pub struct SplitLog {
    wal: Wal,
    reads: DiskReads,
    staged: Arc<Mutex<StagedRecords>>,
    /// Every record that moves, up to this entry of the parent, is here.
    upto: u64,
    /// Fingerprint of the tombstones that the sources may have removed, and the last entry that
    /// the source had applied. `None` after a restart.
    forgotten: Option<(u64, u64)>,
}

impl SplitLog {
    pub fn new(wal: Wal, reads: DiskReads) -> Self {
        let mut staged = StagedRecords::recover(&wal);
        let (upto, _) = staged.prepare(&wal, 0, u64::MAX);
        Self { wal, reads, staged: Arc::new(Mutex::new(staged)), upto, forgotten: None }
    }

    /// Returns the last entry of the parent up to which every record that moves is here.
    pub fn upto(&self) -> u64 {
        self.upto
    }

    /// Takes a source's fingerprint of the tombstones that it may have removed, as of the entry
    /// `applied`. If it is newer than the records that are here, discards them and returns `false`.
    ///
    /// They may have values from before the tombstones went. Every replica of the parent has
    /// removed those, so that nothing would ever say that they were deleted. A source that is
    /// further behind than the last one has more tombstones, not fewer.
    ///
    /// # Errors
    /// The reason in words. The call can be repeated.
    pub async fn agrees(&mut self, forgotten: u64, applied: u64) -> Result<bool, String> {
        let is_same = match self.forgotten {
            Some((_, newest)) if applied < newest => return Ok(true),
            Some((known, _)) => known == forgotten,
            None => self.upto == 0 || forgotten == 0,
        };
        if !is_same {
            let (wal, staged) = (self.wal.clone(), self.staged.clone());
            let discard = move || lock(&staged).clear(&wal);
            self.reads.wait(discard).await.map_err(|error| error.to_string())?;
            self.upto = 0;
        }
        self.forgotten = Some((forgotten, applied));
        Ok(is_same)
    }

    /// Adds an encoded response with the records after [`Self::upto`], up to `at` at most. Returns
    /// the bytes that the source still has, as it estimates them.
    ///
    /// # Errors
    /// The reason in words. The next attempt begins at [`Self::upto`].
    pub async fn add(&mut self, records: &[u8], at: u64) -> Result<u64, String> {
        let mut records = pb::Records::decode(records).map_err(|error| error.to_string())?;
        // The parent's other partitions may be compacted up to later entries, and those that move
        // have none after `at` once they are sealed. An idle shard would never reach such an entry.
        records.compacted_upto = records.compacted_upto.min(at);
        let chunk = RecordChunk::new(records, self.upto, at)?;
        let (wal, staged) = (self.wal.clone(), self.staged.clone());
        let (upto, bytes_left) = (chunk.upto, chunk.bytes_left);
        let write = move || lock(&staged).write(&wal, &chunk);
        let written = self.reads.wait(write).await.map_err(|error| error.to_string())?;
        if let Err(error) = written {
            let (wal, staged) = (self.wal.clone(), self.staged.clone());
            let prepare = move || lock(&staged).prepare(&wal, 0, u64::MAX).0;
            self.upto = self.reads.wait(prepare).await.map_err(|error| error.to_string())?;
            return Err(error.to_string());
        }
        self.upto = upto;
        Ok(bytes_left)
    }

    /// Makes the records and the state of the machine the log of a shard of these voters, which
    /// begins after entry `at`. Returns its checkpoint.
    ///
    /// # Errors
    /// The reason in words. The call can be repeated after a shortage of space.
    pub async fn install(
        &mut self,
        at: LogId,
        voters: BTreeSet<ReplicaId>,
        state: Bytes,
    ) -> Result<Bytes, String> {
        let checkpoint = initial_checkpoint(at, voters, state).map_err(|it| it.to_string())?;
        let known = self.wal.state().vote;
        if let Some(vote) = initial_vote(at.term, known.as_deref()).map_err(|it| it.to_string())? {
            let (done, saved) = oneshot::channel();
            // Ignored: the receiver is dropped only with this future.
            self.wal.save_vote(vote, Box::new(move |result| drop(done.send(result))));
            let saved = saved.await.map_err(|_| "the log was closed".to_owned())?;
            saved.map_err(|error| error.to_string())?;
        }
        let (wal, staged, bytes) = (self.wal.clone(), self.staged.clone(), checkpoint.clone());
        let install = move || {
            let mut staged = lock(&staged);
            let mut fetched = staged.finish(0, at.index)?;
            let installed = wal.install(at, bytes, &mut fetched.segments);
            if installed.is_err() {
                staged.put_back(fetched);
            }
            installed
        };
        let installed = self.reads.wait(install).await.map_err(|error| error.to_string())?;
        installed.map_err(|error| error.to_string())?;
        Ok(checkpoint)
    }
}

#[cfg(test)]
mod tests {
    use helix_wal::Options;

    use super::super::records::live_entry;
    use super::super::records::tests::live_at;
    use super::*;

    fn response(index: u64) -> pb::Records {
        let entries = vec![live_entry(live_at(index, index * 3))];
        pb::Records { entries, upto: index, bytes_left: 0, compacted_upto: 0 }
    }

    fn records(index: u64) -> Vec<u8> {
        response(index).encode_to_vec()
    }

    /// A value that was copied before its tombstone went would stay permanently.
    #[tokio::test]
    async fn records_from_before_tombstones_went_are_copied_again() {
        let wal = Wal::open_memory(Options::default());
        let mut log = SplitLog::new(wal.clone(), DiskReads::new(true));
        assert!(log.agrees(7, 9).await.unwrap(), "nothing is here yet");
        log.add(&records(5), 9).await.unwrap();
        assert!(log.agrees(7, 9).await.unwrap());
        assert_eq!(log.upto(), 5);
        assert!(!log.agrees(8, 10).await.unwrap());
        assert_eq!(log.upto(), 0, "discarded");
        log.add(&records(5), 9).await.unwrap();
        assert!(log.agrees(8, 10).await.unwrap());
        assert!(log.agrees(7, 9).await.unwrap(), "a source that is behind");
        assert!(log.agrees(8, 10).await.unwrap(), "its fingerprint was not taken");
        assert_eq!(log.upto(), 5);

        // After a restart, the records may be from before the tombstones went.
        log.forgotten = None;
        assert!(log.agrees(0, 11).await.unwrap(), "none have gone");
        assert_eq!(log.upto(), 5);
        log.forgotten = None;
        assert!(!log.agrees(8, 12).await.unwrap());
        assert_eq!(log.upto(), 0);
    }

    /// Its followers serve no reads until they have applied the entry up to which the sources have
    /// compacted, and the new shard may never have as many.
    #[tokio::test]
    async fn compaction_of_other_partitions_does_not_reach_beyond_the_seal() {
        let wal = Wal::open_memory(Options::default());
        let mut log = SplitLog::new(wal.clone(), DiskReads::new(true));
        let found = pb::Records { compacted_upto: 70, ..response(5) };
        log.add(&found.encode_to_vec(), 9).await.unwrap();
        assert_eq!(wal.cleaned_upto(), 9);
    }
}
