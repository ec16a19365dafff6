//! The state machine of openraft over a [`Machine`]: apply, checkpoints and snapshots.
//! The machine keeps metadata only; the records stay in the log.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, TryStreamExt};
use helix_wal::{ColdSegments, Error, Wal};
use openraft::storage::{EntryResponder, RaftStateMachine, Snapshot, SnapshotMeta};
use openraft::{EntryPayload, OptionalSend, RaftSnapshotBuilder};
use tokio::sync::watch;

use super::blocking::DiskReads;
use super::codec;
use super::log_store::to_io;
use super::runtime::Yield;
use super::snapshot_records::SnapshotRecords;
use super::types::{RaftLogId, SnapshotData, StoredMembership, TypeConfig};
use crate::log::{Head, Verdict};
use crate::sync;

/// Interval at which a checkpoint checks whether its entries are synced: one or two syncs.
const SYNC_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Pause before a snapshot is installed again after the disk was full.
const SHORTAGE_PAUSE: Duration = Duration::from_secs(1);

/// State that applied entries change. Every entry is applied once, in order; after a restart,
/// entries since the last checkpoint are applied again.
pub trait Machine: Debug + Send + Sync + 'static {
    /// Applies an entry; `None` stands for openraft's own entries. Registers the entry's records
    /// with the WAL (`Wal::place`) before any reader can see them.
    fn apply(&self, id: helix_wal::LogId, head: Option<&Head>) -> io::Result<Verdict>;
    /// Encodes the whole state. Equal states give equal bytes.
    fn encode(&self) -> Bytes;
    /// Replaces the state.
    fn restore(&self, bytes: &[u8]) -> io::Result<()>;
    /// Returns an error where [`Self::restore`] would refuse these bytes. State from another node
    /// is checked before openraft gets it, since openraft stops the replica on a refusal.
    fn check(&self, bytes: &[u8]) -> io::Result<()>;
}

type SnapshotOf = openraft::alias::SnapshotOf<TypeConfig, SnapshotData>;
type Meta = openraft::alias::SnapshotMetaOf<TypeConfig>;

/// The state machine of one replica, owned by openraft's worker.
#[derive(Debug)]
pub struct StateMachine {
    machine: Arc<dyn Machine>,
    wal: Wal,
    reads: DiskReads,
    applied: Option<RaftLogId>,
    membership: StoredMembership,
    /// Term of the last applied entry.
    term: watch::Sender<u64>,
    /// The newest checkpoint on disk.
    snapshot: LatestCheckpoint,
    /// Fetched records of the next snapshot; `None` where snapshots have no records.
    snapshot_records: Option<SnapshotRecords>,
}

/// The newest checkpoint on disk, and a lock for its writers. A checkpoint that was begun before a
/// snapshot was installed must not replace it.
#[derive(Debug, Clone, Default)]
struct LatestCheckpoint {
    checkpoint: Arc<std::sync::Mutex<Option<(Meta, Bytes)>>>,
    writing: Arc<tokio::sync::Mutex<()>>,
}

impl LatestCheckpoint {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<(Meta, Bytes)>> {
        sync::lock(&self.checkpoint)
    }

    fn at(&self) -> Option<RaftLogId> {
        self.lock().as_ref().and_then(|(meta, _)| meta.last_log_id)
    }
}

impl StateMachine {
    /// Restores the machine from a recovered checkpoint, and replays entries known as committed.
    /// Must run before openraft asks for the applied state.
    ///
    /// # Errors
    /// Fails where the checkpoint or an entry cannot be read or applied.
    pub async fn recover(
        machine: Arc<dyn Machine>,
        wal: Wal,
        reads: DiskReads,
        checkpoint: Option<(helix_wal::LogId, Bytes)>,
        store: &mut super::LogStore,
    ) -> io::Result<Self> {
        let mut this = Self {
            machine,
            wal,
            reads,
            applied: None,
            membership: StoredMembership::default(),
            term: watch::Sender::new(0),
            snapshot: LatestCheckpoint::default(),
            snapshot_records: None,
        };
        if let Some((at, bytes)) = checkpoint {
            let at = codec::raft_id(at);
            this.load(at, bytes.clone())?;
            let meta = this.meta();
            *this.snapshot.lock() = Some((meta, bytes));
        }
        this.replay(store).await?;
        Ok(this)
    }

    /// Installs snapshots only together with the fetched records in `snapshot_records`.
    pub fn with_records(mut self, snapshot_records: SnapshotRecords) -> Self {
        self.snapshot_records = Some(snapshot_records);
        self
    }

    async fn replay(&mut self, store: &mut super::LogStore) -> io::Result<()> {
        use openraft::RaftLogReader;
        let state = self.wal.state();
        let committed = state.committed.min_by_index(state.last);
        let Some(committed) = committed else { return Ok(()) };
        let start = self.applied.map_or(0, |id| id.index + 1);
        if start > committed.index {
            return Ok(());
        }
        let entries = store.entries_stream(start..committed.index + 1).await;
        let mut entries = std::pin::pin!(entries);
        while let Some(entry) = entries.try_next().await? {
            self.apply_entry(entry)?;
        }
        Ok(())
    }

    fn apply_entry(&mut self, entry: super::types::RaftEntry) -> io::Result<Verdict> {
        let id = codec::wal_id(&entry.log_id);
        debug_assert!(
            self.applied.is_none_or(|applied| applied.index < id.index),
            "entry {id:?} is applied after {:?}",
            self.applied
        );
        let verdict = match &entry.payload {
            EntryPayload::Blank => self.machine.apply(id, None)?,
            EntryPayload::Membership(membership) => {
                let verdict = self.machine.apply(id, None)?;
                self.membership = StoredMembership::new(Some(entry.log_id), membership.clone());
                verdict
            }
            EntryPayload::Normal(command) => self.machine.apply(id, Some(&command.head))?,
        };
        self.on_applied(entry.log_id);
        Ok(verdict)
    }

    fn on_applied(&mut self, at: RaftLogId) {
        self.applied = Some(at);
        let new = codec::wal_id(&at).term;
        self.term.send_if_modified(|term| std::mem::replace(term, new) != new);
    }

    /// Returns the index of the last applied entry.
    pub fn applied_index(&self) -> Option<u64> {
        self.applied.map(|id| id.index)
    }

    /// Watches the term of the last applied entry.
    pub fn watch_term(&self) -> watch::Receiver<u64> {
        self.term.subscribe()
    }

    fn load(&mut self, at: RaftLogId, bytes: Bytes) -> io::Result<()> {
        let (membership, machine) = codec::decode_checkpoint(bytes)?;
        self.machine.restore(&machine)?;
        self.membership = membership;
        self.applied = Some(at);
        Ok(())
    }

    fn meta(&self) -> Meta {
        SnapshotMeta { last_log_id: self.applied, last_membership: self.membership.clone() }
    }

    /// Takes the records that a snapshot at this entry refers to and this replica lacks.
    fn records_for(&self, at: &RaftLogId) -> io::Result<Option<ColdSegments>> {
        let Some(snapshot_records) = &self.snapshot_records else { return Ok(None) };
        let applied = self.applied.map_or(0, |id| id.index);
        match snapshot_records.take() {
            Some(fetched) if (fetched.after, fetched.at) == (applied, at.index) => {
                Ok(Some(fetched.segments))
            }
            // `peer` passes a snapshot to openraft only after it has fetched the records.
            _ => Err(io::Error::other(format!(
                "the records between entries {applied} and {} did not come with the snapshot",
                at.index
            ))),
        }
    }

    /// Retries while there is no disk space or file descriptor, since openraft stops the replica on
    /// a failure.
    async fn install<F>(&self, install: F, mut records: Option<ColdSegments>) -> io::Result<()>
    where
        F: Fn(&mut Option<ColdSegments>) -> Result<(), Error> + Send + Sync + 'static,
    {
        let install = Arc::new(install);
        loop {
            let install = install.clone();
            let installing = move || (install(&mut records), records);
            let (installed, left) = self.reads.wait(installing).await?;
            match installed {
                // A shortage that ended the log does not end.
                Err(error) if error.is_shortage() && self.wal.is_open() => {
                    tracing::warn!(%error, "waiting to install a snapshot");
                    tokio::time::sleep(SHORTAGE_PAUSE).await;
                    records = left;
                }
                installed => return installed.map_err(to_io),
            }
        }
    }

    fn builder(&self) -> Checkpointer {
        Checkpointer {
            wal: self.wal.clone(),
            reads: self.reads.clone(),
            meta: self.meta(),
            bytes: codec::encode_checkpoint(&self.membership, self.machine.encode()),
            newest: self.snapshot.clone(),
        }
    }
}

/// Selects the id with the lower index.
trait MinByIndex {
    fn min_by_index(self, other: Self) -> Self;
}

impl MinByIndex for Option<helix_wal::LogId> {
    fn min_by_index(self, other: Self) -> Self {
        if self.map(|id| id.index) <= other.map(|id| id.index) { self } else { other }
    }
}

impl RaftStateMachine<TypeConfig> for StateMachine {
    type SnapshotData = SnapshotData;
    type SnapshotBuilder = Checkpointer;

    async fn applied_state(&mut self) -> io::Result<(Option<RaftLogId>, StoredMembership)> {
        Ok((self.applied, self.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> io::Result<()>
    where
        S: Stream<Item = io::Result<EntryResponder<TypeConfig>>> + Unpin + OptionalSend,
    {
        let mut has_responded = false;
        while let Some((entry, responder)) = entries.try_next().await? {
            let verdict = self.apply_entry(entry)?;
            if let Some(responder) = responder {
                responder.send(verdict);
                has_responded = true;
            }
        }
        if has_responded {
            // Only for speed: on a single async thread, responses go out before openraft is
            // notified, which makes it publish its metrics again.
            Yield::default().await;
        }
        Ok(())
    }

    async fn try_create_snapshot_builder(&mut self, _force: bool) -> Option<Checkpointer> {
        Some(self.builder())
    }

    async fn get_snapshot_builder(&mut self) -> Checkpointer {
        self.builder()
    }

    async fn install_snapshot(&mut self, meta: &Meta, bytes: SnapshotData) -> io::Result<()> {
        let Some(at) = meta.last_log_id else {
            return Err(codec::damaged("snapshot without a last entry"));
        };
        let (_, machine) = codec::decode_checkpoint(bytes)?;
        self.machine.check(&machine)?;
        let records = self.records_for(&at)?;
        let bytes = codec::encode_checkpoint(&meta.last_membership, machine.clone());
        let (wal, id, state) = (self.wal.clone(), codec::wal_id(&at), bytes.clone());
        let install = move |records: &mut Option<ColdSegments>| match records {
            Some(records) => wal.install(id, state.clone(), records),
            None => wal.checkpoint(id, state.clone()),
        };
        {
            let _writing = self.snapshot.writing.lock().await;
            self.install(install, records).await?;
            *self.snapshot.lock() = Some((meta.clone(), bytes));
        }
        // Readers may see the records only once the log has them.
        self.machine.restore(&machine)?;
        self.membership = meta.last_membership.clone();
        self.on_applied(at);
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<SnapshotOf>> {
        let snapshot = self.snapshot.lock().clone();
        Ok(snapshot.map(|(meta, bytes)| Snapshot { meta, snapshot: bytes }))
    }
}

/// Writes one checkpoint, concurrently with apply.
#[derive(Debug)]
pub struct Checkpointer {
    wal: Wal,
    reads: DiskReads,
    meta: Meta,
    bytes: Bytes,
    newest: LatestCheckpoint,
}

impl Checkpointer {
    /// Waits until the entry is synced here. A checkpoint covers only what is on this disk, and a
    /// leader may apply what a majority of followers has synced before its own disk has.
    async fn wait_synced(&self, index: u64) -> io::Result<()> {
        let reaches = |id: Option<helix_wal::LogId>| id.is_some_and(|id| id.index >= index);
        loop {
            let state = self.wal.state();
            // An entry that is not in this log came with a snapshot.
            if reaches(state.synced) || !reaches(state.last) {
                return Ok(());
            }
            if let Err(error @ (Error::Poisoned { .. } | Error::Closed)) = self.wal.writable() {
                return Err(to_io(error));
            }
            if self.wal.has_ended() {
                return Err(to_io(Error::Closed));
            }
            tokio::time::sleep(SYNC_POLL_INTERVAL).await;
        }
    }
}

impl Checkpointer {
    /// Stores the checkpoint. Returns the shortage that prevented it, if there was one: openraft
    /// would stop the replica.
    async fn store(&self, at: RaftLogId) -> io::Result<Option<Error>> {
        let (wal, id, state) = (self.wal.clone(), codec::wal_id(&at), self.bytes.clone());
        let _writing = self.newest.writing.lock().await;
        // A snapshot that was installed meanwhile covers more.
        if self.newest.at().is_some_and(|newest| newest.index > at.index) {
            return Ok(None);
        }
        match self.reads.wait(move || wal.checkpoint(id, state)).await? {
            // A shortage that ended the log does not end.
            Err(error) if error.is_shortage() && self.wal.is_open() => return Ok(Some(error)),
            stored => stored.map_err(to_io)?,
        }
        *self.newest.lock() = Some((self.meta.clone(), self.bytes.clone()));
        Ok(None)
    }
}

impl RaftSnapshotBuilder<TypeConfig> for Checkpointer {
    type SnapshotData = SnapshotData;

    async fn build_snapshot(&mut self) -> io::Result<SnapshotOf> {
        if let Some(at) = self.meta.last_log_id {
            self.wait_synced(at.index).await?;
            let mut is_first = true;
            while let Some(error) = self.store(at).await? {
                if std::mem::take(&mut is_first) {
                    tracing::warn!(%error, "waiting to store a checkpoint");
                }
                tokio::time::sleep(SHORTAGE_PAUSE).await;
            }
        }
        Ok(Snapshot { meta: self.meta.clone(), snapshot: self.bytes.clone() })
    }
}
