//! openraft's state machine over a [`Machine`]: apply, checkpoints, snapshots.
//! The machine is bookkeeping; the records stay in the log.

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
use super::staging::Staging;
use super::types::{LogId, SnapshotData, StoredMembership, TypeConfig};
use crate::log::{Head, Verdict};

/// How often a checkpoint looks whether its entries are synced: they are within a sync or two.
const SYNC_LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// How long to wait where the disk has no room for the state of a snapshot.
const DISK_FULL_PAUSE: Duration = Duration::from_secs(1);

/// What is decided by apply, and only there. Every entry of the log comes here once, in order
/// (again after a restart, from the last checkpoint on).
pub trait Machine: Debug + Send + Sync + 'static {
    /// Applies an entry: `None` for entries that are openraft's own. Tells the WAL where the
    /// entry's records belong (`Wal::place`) before any reader can learn of them.
    fn apply(&self, id: helix_wal::LogId, head: Option<&Head>) -> io::Result<Verdict>;
    /// The whole state as bytes; equal states give equal bytes.
    fn encode(&self) -> Bytes;
    /// Replaces the state.
    fn restore(&self, bytes: &[u8]) -> io::Result<()>;
    /// Whether [`Self::restore`] would take these bytes. A state that came from another node is
    /// looked at before openraft, which takes a refusal by then for the end of the replica.
    fn check(&self, bytes: &[u8]) -> io::Result<()>;
}

type SnapshotOf = openraft::alias::SnapshotOf<TypeConfig, SnapshotData>;
type Meta = openraft::alias::SnapshotMetaOf<TypeConfig>;

/// Owned by openraft's worker of the shard.
#[derive(Debug)]
pub struct StateMachine {
    machine: Arc<dyn Machine>,
    wal: Wal,
    reads: DiskReads,
    applied: Option<LogId>,
    membership: StoredMembership,
    /// Term of the last applied entry.
    term: watch::Sender<u64>,
    /// The newest checkpoint on disk.
    snapshot: Newest,
    /// Where the records of a snapshot wait for it; `None` where a snapshot speaks of none.
    staging: Option<Staging>,
}

/// The newest checkpoint on disk, and who may write one: a checkpoint that was begun before a
/// snapshot was installed must not come after it.
#[derive(Debug, Clone, Default)]
struct Newest {
    checkpoint: Arc<std::sync::Mutex<Option<(Meta, Bytes)>>>,
    writing: Arc<tokio::sync::Mutex<()>>,
}

impl Newest {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<(Meta, Bytes)>> {
        self.checkpoint.lock().expect("no panic while it is held")
    }

    fn at(&self) -> Option<LogId> {
        self.lock().as_ref().and_then(|(meta, _)| meta.last_log_id)
    }
}

impl StateMachine {
    /// Takes the machine up from a checkpoint that the WAL recovered, and replays what is known
    /// to be committed. Must run before openraft asks for the applied state.
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
            snapshot: Newest::default(),
            staging: None,
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

    /// Takes snapshots only together with the records that wait for them here.
    pub fn with_records(mut self, staging: Staging) -> Self {
        self.staging = Some(staging);
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

    fn apply_entry(&mut self, entry: super::types::Entry) -> io::Result<Verdict> {
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

    fn on_applied(&mut self, at: LogId) {
        self.applied = Some(at);
        let new = codec::wal_id(&at).term;
        self.term.send_if_modified(|term| std::mem::replace(term, new) != new);
    }

    /// Follows the term of the last applied entry.
    pub fn watch_term(&self) -> watch::Receiver<u64> {
        self.term.subscribe()
    }

    fn load(&mut self, at: LogId, bytes: Bytes) -> io::Result<()> {
        let (membership, machine) = codec::decode_checkpoint(bytes)?;
        self.machine.restore(&machine)?;
        self.membership = membership;
        self.applied = Some(at);
        Ok(())
    }

    fn meta(&self) -> Meta {
        SnapshotMeta { last_log_id: self.applied, last_membership: self.membership.clone() }
    }

    /// The records that a snapshot at this entry speaks of and this replica does not have.
    fn records_for(&self, at: &LogId) -> io::Result<Option<ColdSegments>> {
        let Some(staging) = &self.staging else { return Ok(None) };
        let applied = self.applied.map_or(0, |id| id.index);
        match staging.take() {
            Some(fetched) if (fetched.after, fetched.at) == (applied, at.index) => {
                Ok(Some(fetched.segments))
            }
            // Whoever hands snapshots to openraft sees to it that this does not happen.
            _ => Err(io::Error::other(format!(
                "the records between entries {applied} and {} did not come with the snapshot",
                at.index
            ))),
        }
    }

    /// Waits for room on the disk where there is none: openraft takes a failure for the end.
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
                Err(error @ Error::DiskFull { .. }) => {
                    tracing::warn!(%error, "a snapshot waits for room on the disk");
                    tokio::time::sleep(DISK_FULL_PAUSE).await;
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

/// Ids in the order of their places.
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

    async fn applied_state(&mut self) -> io::Result<(Option<LogId>, StoredMembership)> {
        Ok((self.applied, self.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> io::Result<()>
    where
        S: Stream<Item = io::Result<EntryResponder<TypeConfig>>> + Unpin + OptionalSend,
    {
        let mut has_told = false;
        while let Some((entry, responder)) = entries.try_next().await? {
            let verdict = self.apply_entry(entry)?;
            if let Some(responder) = responder {
                responder.send(verdict);
                has_told = true;
            }
        }
        if has_told {
            // Only speed: where the node has one async thread, answers go out before openraft hears
            // of this, which makes it report its state anew.
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
            return Err(codec::damaged("a snapshot without a last entry"));
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
        // Readers learn of the records only now that the log has them.
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

/// Writes one checkpoint, beside apply.
#[derive(Debug)]
pub struct Checkpointer {
    wal: Wal,
    reads: DiskReads,
    meta: Meta,
    bytes: Bytes,
    newest: Newest,
}

impl Checkpointer {
    /// A checkpoint covers only what is on this disk, and a leader may apply what its followers
    /// have synced before its own disk has.
    async fn wait_synced(&self, index: u64) -> io::Result<()> {
        let reaches = |id: Option<helix_wal::LogId>| id.is_some_and(|id| id.index >= index);
        loop {
            let state = self.wal.state();
            // What is not in this log at all came as a snapshot.
            if reaches(state.synced) || !reaches(state.last) {
                return Ok(());
            }
            if let Err(error @ (Error::Poisoned { .. } | Error::Closed)) = self.wal.writable() {
                return Err(to_io(error));
            }
            if self.wal.has_ended() {
                return Err(to_io(Error::Closed));
            }
            tokio::time::sleep(SYNC_LOOK_INTERVAL).await;
        }
    }
}

impl RaftSnapshotBuilder<TypeConfig> for Checkpointer {
    type SnapshotData = SnapshotData;

    async fn build_snapshot(&mut self) -> io::Result<SnapshotOf> {
        if let Some(at) = self.meta.last_log_id {
            self.wait_synced(at.index).await?;
            let (wal, id, state) = (self.wal.clone(), codec::wal_id(&at), self.bytes.clone());
            let _writing = self.newest.writing.lock().await;
            // A snapshot that was installed meanwhile covers more.
            if self.newest.at().is_none_or(|newest| newest.index <= at.index) {
                self.reads.wait(move || wal.checkpoint(id, state)).await?.map_err(to_io)?;
                *self.newest.lock() = Some((self.meta.clone(), self.bytes.clone()));
            }
        }
        Ok(Snapshot { meta: self.meta.clone(), snapshot: self.bytes.clone() })
    }
}
