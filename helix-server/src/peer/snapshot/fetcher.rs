//! Installs a snapshot of a shard with records.
//!
//! First the replica fetches the records that it lacks, in chunks, into segments beside its log.
//! Then openraft gets the snapshot, and the state machine adds both to the log atomically. Fetched
//! records outlive connections, leaders and the process: committed entries do not change, so the
//! next snapshot resumes the fetch.

use std::sync::{Arc, Mutex};

use helix_proto::raft::v1 as pb;
use helix_wal::Error;
use openraft::RaftState;
use openraft::async_runtime::WatchReceiver;
use tokio::sync::{OwnedRwLockReadGuard, RwLock};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::assembly::ReceivedSnapshot;
use super::source::RecordSource;
use super::staged::{RecordChunk, StagedRecords};
use crate::peer::limits::{FETCH_DISK_FULL_PAUSE, FETCH_FAILED_PAUSE};
use crate::peer::served::ShardRaft;
use crate::peer::table::PeerTable;
use crate::peer::wire::RaftSnapshot;
use crate::raft::{FetchedRecords, RaftLogId, RecordStore, TypeConfig, Vote};
use crate::sync::lock;

/// Reason of a fetch that waits for disk space, for operators.
const DISK_FULL: &str = "the disk of this node is full";

/// As [`DISK_FULL`], without file descriptors or memory.
const EXHAUSTED: &str = "this node is short of open files or memory";

/// Progress of a replica that fetches missing records.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FetchProgress {
    /// Last entry in the replica's own log.
    pub after: u64,
    pub bytes_done: u64,
    /// Estimate by the source of the total to fetch.
    pub bytes_total: u64,
    /// Reason for which the fetch waits, for operators.
    pub waits_for: Option<String>,
}

/// Fetches the records that snapshots refer to. Each replica with records has one.
pub(in crate::peer) struct RecordFetcher {
    shard_id: u64,
    pub(in crate::peer) store: RecordStore,
    /// Held by the one snapshot that is being installed.
    install_lock: Arc<tokio::sync::Mutex<()>>,
    /// Ends the work on the snapshot that holds `install_lock` or waits for it.
    current: Mutex<CancellationToken>,
    /// Held during disk writes, so never locked on an async thread.
    staged: Arc<Mutex<StagedRecords>>,
    status: Mutex<Option<FetchProgress>>,
    /// Read-locked by appends and heartbeats until openraft has them, write-locked while openraft
    /// takes a snapshot. Nothing else causes entries to be applied.
    handover_lock: Arc<RwLock<()>>,
}

/// Outcome of handing a snapshot to openraft.
enum HandOver {
    /// openraft installed the snapshot, or refused it with this vote.
    Done(Vote),
    /// openraft did not get the snapshot: entries were applied that are among the fetched ones.
    LogAdvanced,
}

impl RecordFetcher {
    pub(in crate::peer) fn new(shard_id: u64, store: RecordStore) -> Arc<Self> {
        let staged = StagedRecords::recover(&store.wal);
        let (after, bytes) = (staged.after(), staged.bytes());
        let status =
            FetchProgress { after, bytes_done: bytes, bytes_total: bytes, waits_for: None };
        Arc::new(Self {
            shard_id,
            store,
            install_lock: Arc::default(),
            current: Mutex::new(CancellationToken::new()),
            staged: Arc::new(Mutex::new(staged)),
            status: Mutex::new((bytes > 0).then_some(status)),
            handover_lock: Arc::default(),
        })
    }

    /// Returns the progress; `None` if there is nothing to fetch.
    pub(in crate::peer) fn status(&self) -> Option<FetchProgress> {
        lock(&self.status).clone()
    }

    /// Returns a permit to hold until openraft has an append or a heartbeat.
    pub(in crate::peer) async fn append_permit(&self) -> OwnedRwLockReadGuard<()> {
        self.handover_lock.clone().read_owned().await
    }

    /// Ends the current work and waits for the disk. Keeps finished segments for the next process.
    pub(in crate::peer) async fn stop(&self) {
        lock(&self.current).cancel();
        let _install_lock = self.install_lock.lock().await;
        // Ignored: without a thread to run on, the work writes nothing either.
        let _ = self.with_staged(|staged| *staged = StagedRecords::default()).await;
    }

    /// Discards fetched records if the log has advanced without them.
    pub(in crate::peer) async fn discard_if_stale(&self, raft: &ShardRaft) {
        let Some(status) = self.status() else { return };
        let Ok(_install_lock) = self.install_lock.try_lock() else { return };
        let committed = raft.data_metrics().borrow_watched().local_committed;
        if committed.map_or(0, |id| id.index) > status.after {
            // Ignored: without a thread to run on, the work writes nothing either.
            let _ = self.discard().await;
        }
    }

    /// Fetches the missing records of a snapshot and installs it. Returns the replica's vote.
    /// Keeps the fetched records if it is dropped.
    pub(in crate::peer) async fn install(
        self: Arc<Self>,
        table: Arc<PeerTable>,
        raft: ShardRaft,
        stopped: CancellationToken,
        route: pb::Route,
        received: ReceivedSnapshot,
    ) -> Result<Vote, String> {
        let (own, _) = vote_and_committed(&raft).await?;
        if own.leader_id.term > received.vote.leader_id.term {
            return Ok(own);
        }
        // Replaces the work on an earlier snapshot: the latest leader is the source.
        let until = stopped.child_token();
        std::mem::replace(&mut *lock(&self.current), until.clone()).cancel();
        let members = received.snapshot.meta.last_membership.clone();
        let voters = members.membership().voter_ids();
        let source = RecordSource::new(&table, &route, voters);
        let installing = async {
            let _permit = table.fetch_permits.acquire().await.map_err(text)?;
            self.fetch_and_install(&source, &raft, received).await
        };
        let delaying_failure = async {
            let installed = installing.await;
            if let Err(why) = &installed {
                self.set_waits_for(why);
                sleep(FETCH_FAILED_PAUSE).await;
            }
            installed
        };
        tokio::select! {
            biased;
            () = until.cancelled() => Err("a newer snapshot replaces this one".to_owned()),
            installed = delaying_failure => installed,
        }
    }

    async fn fetch_and_install(
        self: &Arc<Self>,
        source: &RecordSource<'_>,
        raft: &ShardRaft,
        received: ReceivedSnapshot,
    ) -> Result<Vote, String> {
        let ReceivedSnapshot { vote, snapshot } = received;
        let last = snapshot.meta.last_log_id;
        let mut install_lock = self.install_lock.clone().lock_owned().await;
        loop {
            let (own, committed) = vote_and_committed(raft).await?;
            if own.leader_id.term > vote.leader_id.term {
                return Ok(own);
            }
            // openraft panics on two entries at one committed index.
            if last > committed && last.map(|id| id.index) <= committed.map(|id| id.index) {
                return Err("the snapshot contradicts entries that are committed here".to_owned());
            }
            let (after, at) = match (committed, last) {
                (committed, Some(last)) if committed < Some(last) => {
                    (committed.map_or(0, |id| id.index), last.index)
                }
                // The log has all its entries: nothing to fetch. openraft only returns its vote.
                _ => {
                    self.discard().await?;
                    let installed = raft.install_full_snapshot(vote, snapshot).await;
                    return Ok(installed.map_err(text)?.vote);
                }
            };
            if !self.fetch_missing(source, raft, after, at).await? {
                continue;
            }
            // Spawned, so that dropping this future does not take the records away from openraft.
            let (this, raft, snapshot) = (self.clone(), raft.clone(), snapshot.clone());
            let handing_over = async move {
                let handed_over = this.hand_over(&raft, vote, snapshot, after, at).await;
                (install_lock, handed_over)
            };
            let handed_over: Result<HandOver, String>;
            (install_lock, handed_over) = tokio::spawn(handing_over).await.map_err(text)?;
            match handed_over? {
                HandOver::Done(vote) => return Ok(vote),
                HandOver::LogAdvanced => {}
            }
        }
    }

    /// Fetches every live entry above `after`, up to `at`, onto the disk.
    /// Returns `false` if the replica's own log advanced meanwhile.
    async fn fetch_missing(
        &self,
        source: &RecordSource<'_>,
        raft: &ShardRaft,
        after: u64,
        at: u64,
    ) -> Result<bool, String> {
        let wal = self.store.wal.clone();
        let (mut upto, bytes) =
            self.with_staged(move |staged| staged.prepare(&wal, after, at)).await?;
        self.update_status(|status| (status.after, status.bytes_done) = (after, bytes));
        if upto == after {
            tracing::info!(
                shard_id = self.shard_id,
                from = source.node(),
                first = after + 1,
                last = at,
                "fetching records of entries that the leader has purged"
            );
        }
        let on_wait = |why: &str| {
            self.set_waits_for(why);
        };
        let mut next = None;
        while upto < at {
            let records = match next.take() {
                Some(records) => records,
                None => source.fetch(upto, at, &on_wait).await?,
            };
            let chunk = RecordChunk::new(records, upto, at)?;
            upto = chunk.upto;
            self.update_status(|status| {
                let bytes_left = chunk.bytes.saturating_add(chunk.bytes_left);
                status.bytes_total = status.bytes_done.saturating_add(bytes_left);
                status.waits_for = None;
            });
            let fetching_next = async {
                if upto == at {
                    return Ok(None);
                }
                source.fetch(upto, at, &on_wait).await.map(Some)
            };
            let (written, fetched) = tokio::join!(self.write(chunk), fetching_next);
            written?;
            next = fetched?;
            let committed = raft.data_metrics().borrow_watched().local_committed;
            if committed.map_or(0, |id| id.index) > after {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes a chunk; waits while there is no disk space or file descriptor.
    async fn write(&self, chunk: RecordChunk) -> Result<(), String> {
        let chunk = Arc::new(chunk);
        loop {
            let (wal, to_write) = (self.store.wal.clone(), chunk.clone());
            let writing = self.with_staged(move |staged| {
                let written = staged.write(&wal, &to_write);
                (written, staged.bytes())
            });
            let (written, bytes) = writing.await?;
            self.update_status(|status| status.bytes_done = bytes);
            match written {
                Ok(()) => return Ok(()),
                // A shortage that ended the log does not end.
                Err(error) if error.is_shortage() && self.store.wal.is_open() => {
                    let is_full = matches!(error, Error::DiskFull { .. });
                    if self.set_waits_for(if is_full { DISK_FULL } else { EXHAUSTED }) {
                        let shard_id = self.shard_id;
                        tracing::warn!(shard_id, %error, "fetch of records waits");
                    }
                    sleep(FETCH_DISK_FULL_PAUSE).await;
                }
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// Passes a snapshot to openraft once all its records are here.
    async fn hand_over(
        &self,
        raft: &ShardRaft,
        vote: Vote,
        snapshot: RaftSnapshot,
        after: u64,
        at: u64,
    ) -> Result<HandOver, String> {
        let fetched = self.with_staged(move |staged| staged.finish(after, at)).await?;
        let fetched = fetched.map_err(text)?;
        // From here on no entry is applied until openraft has the snapshot.
        let _handover_lock = self.handover_lock.clone().write_owned().await;
        let (_, committed) = vote_and_committed(raft).await?;
        if committed.map_or(0, |id| id.index) != after {
            self.put_back(fetched).await?;
            return Ok(HandOver::LogAdvanced);
        }
        self.store.fetched.put(fetched);
        let installed = raft.install_full_snapshot(vote, snapshot).await.map_err(text);
        match self.store.fetched.take() {
            // Refused with a later vote: keeps the records for the next leader's snapshot.
            Some(fetched) => self.put_back(fetched).await?,
            None => {
                self.discard().await?;
                let shard_id = self.shard_id;
                tracing::info!(shard_id, at, "installed a snapshot and the fetched records");
            }
        }
        Ok(HandOver::Done(installed?.vote))
    }

    async fn put_back(&self, fetched: FetchedRecords) -> Result<(), String> {
        self.with_staged(move |staged| staged.put_back(fetched)).await
    }

    async fn discard(&self) -> Result<(), String> {
        *lock(&self.status) = None;
        let wal = self.store.wal.clone();
        self.with_staged(move |staged| staged.clear(&wal)).await
    }

    /// Runs `work`, which may wait for the disk, on a thread for blocking work.
    async fn with_staged<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut StagedRecords) -> T + Send + 'static,
    ) -> Result<T, String> {
        let staged = self.staged.clone();
        self.store.reads.wait(move || work(&mut lock(&staged))).await.map_err(text)
    }

    fn update_status(&self, change: impl FnOnce(&mut FetchProgress)) {
        change(lock(&self.status).get_or_insert_default());
    }

    /// Sets the reason for which the fetch waits. Returns `true` if it differs from the last one.
    fn set_waits_for(&self, reason: &str) -> bool {
        let mut status = lock(&self.status);
        let status = status.get_or_insert_default();
        let is_new = status.waits_for.as_deref() != Some(reason);
        status.waits_for = Some(reason.to_owned());
        is_new
    }
}

/// Returns the replica's vote, and the last entry that openraft will have applied.
async fn vote_and_committed(raft: &ShardRaft) -> Result<(Vote, Option<RaftLogId>), String> {
    let read =
        |state: &RaftState<TypeConfig>| (*state.vote_ref(), state.local_committed().copied());
    raft.with_raft_state(read).await.map_err(text)
}

fn text(error: impl ToString) -> String {
    error.to_string()
}
