//! How a replica takes a snapshot of a shard with records: first it fetches those that it lacks,
//! piece by piece, beside its log; then openraft gets the snapshot, and its state machine makes
//! both part of the log at once. What was fetched outlives connections, leaders and this process:
//! committed entries do not change, so the next snapshot goes on where the last one was lost.

use std::sync::{Arc, Mutex, MutexGuard};

use helix_proto::raft::v1 as pb;
use helix_wal::Error;
use openraft::async_runtime::WatchReceiver;
use openraft::{Raft, RaftState};
use tokio::sync::{OwnedRwLockReadGuard, RwLock};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::gather::{Gathered, Piece};
use super::hub::{Roster, Served};
use super::limits::{FETCH_DISK_FULL_PAUSE, FETCH_FAILED_PAUSE};
use super::snapshot::{Arrived, WholeSnapshot};
use super::source::Source;
use crate::raft::{Fetched, LogId, RecordStore, StateMachine, TypeConfig, Vote};

type ShardRaft = Raft<TypeConfig, StateMachine>;

/// Why a fetch waits, for people.
const DISK_FULL: &str = "there is no room on this node's disk";

/// How far a replica is that fetches records.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fetching {
    /// Entries up to this one are in its log.
    pub after: u64,
    pub bytes_done: u64,
    /// What it will be, as far as the source can tell.
    pub bytes_total: u64,
    /// Why it waits, for people.
    pub waits_for: Option<String>,
}

/// What a replica has fetched and is to fetch. There is one for each replica with records.
pub(super) struct Fetch {
    shard_id: u64,
    pub(super) store: RecordStore,
    /// One snapshot at a time.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Ends the work on the snapshot that has, or waits for, its turn.
    current: Mutex<CancellationToken>,
    /// Locked for as long as the disk takes: never on an async thread.
    gathered: Arc<Mutex<Gathered>>,
    status: Mutex<Option<Fetching>>,
    /// Held by appends and beats until openraft has them, and by a snapshot while it is handed
    /// over: nothing else can have entries applied.
    passage: Arc<RwLock<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panic while it is held")
}

/// What became of a snapshot that was handed to openraft.
enum Handed {
    /// Installed, or refused by this vote.
    Over(Vote),
    /// Not handed over: entries were applied that are among what was fetched.
    Moved,
}

impl Fetch {
    pub(super) fn new(shard_id: u64, store: RecordStore) -> Arc<Self> {
        let gathered = Gathered::recover(&store.wal);
        let (after, bytes) = (gathered.after(), gathered.bytes());
        let status = Fetching { after, bytes_done: bytes, bytes_total: bytes, waits_for: None };
        Arc::new(Self {
            shard_id,
            store,
            turn: Arc::default(),
            current: Mutex::new(CancellationToken::new()),
            gathered: Arc::new(Mutex::new(gathered)),
            status: Mutex::new((bytes > 0).then_some(status)),
            passage: Arc::default(),
        })
    }

    /// How far it is; `None` where nothing is to be fetched.
    pub(super) fn status(&self) -> Option<Fetching> {
        lock(&self.status).clone()
    }

    /// To be held until openraft has an append or a beat.
    pub(super) async fn pass(&self) -> OwnedRwLockReadGuard<()> {
        self.passage.clone().read_owned().await
    }

    /// Ends what is going on. Finished segments stay for the next process. Waits for the disk.
    pub(super) async fn end(&self) {
        lock(&self.current).cancel();
        let _turn = self.turn.lock().await;
        // Ignored: without its thread nothing is written either.
        let _ = self.with_gathered(|gathered| *gathered = Gathered::default()).await;
    }

    /// Gives up what was fetched where it is of no use any more: the log went on without it.
    pub(super) async fn tidy(&self, raft: &ShardRaft) {
        let Some(status) = self.status() else { return };
        let Ok(_turn) = self.turn.try_lock() else { return };
        let committed = raft.data_metrics().borrow_watched().local_committed;
        if committed.map_or(0, |id| id.index) > status.after {
            // Ignored: without its thread nothing is written either.
            let _ = self.discard().await;
        }
    }

    /// Fetches what a snapshot speaks of and has it installed. Takes as long as that takes; what
    /// was done stays done when it is dropped.
    pub(super) async fn install(
        self: Arc<Self>,
        roster: Arc<Roster>,
        served: Served,
        route: pb::Route,
        arrived: Arrived,
    ) -> Result<Vote, String> {
        let (own, _) = standing(&served.raft).await?;
        if own.leader_id.term > arrived.vote.leader_id.term {
            return Ok(own);
        }
        // Whoever leads now is the one to fetch from.
        let until = served.stopped.child_token();
        std::mem::replace(&mut *lock(&self.current), until.clone()).cancel();
        let source = Source::new(&roster, &route);
        let working = async {
            let _place = roster.fetches.acquire().await.map_err(|error| error.to_string())?;
            self.work(&source, &served.raft, arrived).await
        };
        let failing = async {
            let worked = working.await;
            if let Err(why) = &worked {
                self.wait_for(why);
                sleep(FETCH_FAILED_PAUSE).await;
            }
            worked
        };
        tokio::select! {
            biased;
            () = until.cancelled() => Err("another snapshot takes its place".to_owned()),
            worked = failing => worked,
        }
    }

    async fn work(
        self: &Arc<Self>,
        source: &Source<'_>,
        raft: &ShardRaft,
        arrived: Arrived,
    ) -> Result<Vote, String> {
        let Arrived { vote, snapshot } = arrived;
        let last = snapshot.meta.last_log_id;
        let mut turn = self.turn.clone().lock_owned().await;
        loop {
            let (own, committed) = standing(raft).await?;
            if own.leader_id.term > vote.leader_id.term {
                return Ok(own);
            }
            // openraft takes two entries in one committed place for a broken promise, and panics.
            if last > committed && last.map(|id| id.index) <= committed.map(|id| id.index) {
                return Err("the snapshot contradicts what is committed here".to_owned());
            }
            let (after, at) = match (committed, last) {
                (committed, Some(last)) if committed < Some(last) => {
                    (committed.map_or(0, |id| id.index), last.index)
                }
                // It has all that already, and so has openraft nothing to do.
                _ => {
                    self.discard().await?;
                    let handed = raft.install_full_snapshot(vote, snapshot).await;
                    return Ok(handed.map_err(text)?.vote);
                }
            };
            if !self.gather(source, raft, after, at).await? {
                continue;
            }
            // A task of its own: once openraft has the snapshot, nobody may take away the records.
            let (this, raft, snapshot) = (self.clone(), raft.clone(), snapshot.clone());
            let handing = async move {
                let handed = this.hand_over(&raft, vote, snapshot, after, at).await;
                (turn, handed)
            };
            let handed: Result<Handed, String>;
            (turn, handed) = tokio::spawn(handing).await.map_err(text)?;
            match handed? {
                Handed::Over(vote) => return Ok(vote),
                Handed::Moved => {}
            }
        }
    }

    /// Gets every live entry above `after`, up to `at`, onto the disk; `false` if this replica has
    /// gone on by itself meanwhile.
    async fn gather(
        &self,
        source: &Source<'_>,
        raft: &ShardRaft,
        after: u64,
        at: u64,
    ) -> Result<bool, String> {
        let wal = self.store.wal.clone();
        let (mut upto, bytes) =
            self.with_gathered(move |gathered| gathered.begin(&wal, after, at)).await?;
        self.note(|status| (status.after, status.bytes_done) = (after, bytes));
        if upto == after {
            tracing::info!(
                shard_id = self.shard_id,
                from = source.node(),
                "the log lacks entries {} to {at}, which others have purged: fetching the records",
                after + 1
            );
        }
        let waits = |why: &str| {
            self.wait_for(why);
        };
        let mut next = None;
        while upto < at {
            let piece = match next.take() {
                Some(piece) => piece,
                None => source.ask(upto, at, &waits).await?,
            };
            let piece = Piece::new(piece, upto, at)?;
            upto = piece.upto;
            self.note(|status| {
                status.bytes_total = status.bytes_done + piece.bytes + piece.bytes_left;
                status.waits_for = None;
            });
            let asking = async {
                if upto == at {
                    return Ok(None);
                }
                source.ask(upto, at, &waits).await.map(Some)
            };
            let (written, asked) = tokio::join!(self.write(piece), asking);
            written?;
            next = asked?;
            let committed = raft.data_metrics().borrow_watched().local_committed;
            if committed.map_or(0, |id| id.index) > after {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes a piece, once there is room for it.
    async fn write(&self, piece: Piece) -> Result<(), String> {
        let piece = Arc::new(piece);
        loop {
            let (wal, part) = (self.store.wal.clone(), piece.clone());
            let written = self.with_gathered(move |gathered| {
                let written = gathered.write(&wal, &part);
                (written, gathered.bytes())
            });
            let (written, bytes) = written.await?;
            self.note(|status| status.bytes_done = bytes);
            match written {
                Ok(()) => return Ok(()),
                Err(error @ Error::DiskFull { .. }) => {
                    if self.wait_for(DISK_FULL) {
                        tracing::warn!(shard_id = self.shard_id, %error, "a fetch waits");
                    }
                    sleep(FETCH_DISK_FULL_PAUSE).await;
                }
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// Gives openraft a snapshot whose records are all here.
    async fn hand_over(
        &self,
        raft: &ShardRaft,
        vote: Vote,
        snapshot: WholeSnapshot,
        after: u64,
        at: u64,
    ) -> Result<Handed, String> {
        let fetched = self.with_gathered(move |gathered| gathered.finish(after, at)).await?;
        let fetched = fetched.map_err(text)?;
        // From here on nothing has entries applied, until openraft has the snapshot.
        let _passage = self.passage.clone().write_owned().await;
        let (_, committed) = standing(raft).await?;
        if committed.map_or(0, |id| id.index) != after {
            self.keep(fetched).await?;
            return Ok(Handed::Moved);
        }
        self.store.staging.put(fetched);
        let handed = raft.install_full_snapshot(vote, snapshot).await.map_err(text);
        match self.store.staging.take() {
            // Refused by a later vote: for the next leader's snapshot.
            Some(fetched) => self.keep(fetched).await?,
            None => {
                self.discard().await?;
                let shard_id = self.shard_id;
                tracing::info!(
                    shard_id,
                    "the log goes on after entry {at}: what was missing is here"
                );
            }
        }
        Ok(Handed::Over(handed?.vote))
    }

    async fn keep(&self, fetched: Fetched) -> Result<(), String> {
        self.with_gathered(move |gathered| gathered.keep(fetched)).await
    }

    async fn discard(&self) -> Result<(), String> {
        *lock(&self.status) = None;
        let wal = self.store.wal.clone();
        self.with_gathered(move |gathered| gathered.clear(&wal)).await
    }

    async fn with_gathered<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Gathered) -> T + Send + 'static,
    ) -> Result<T, String> {
        let gathered = self.gathered.clone();
        self.store.reads.wait(move || work(&mut lock(&gathered))).await.map_err(text)
    }

    fn note(&self, change: impl FnOnce(&mut Fetching)) {
        change(lock(&self.status).get_or_insert_default());
    }

    /// Notes why it waits. Whether that is new.
    fn wait_for(&self, what: &str) -> bool {
        let mut status = lock(&self.status);
        let status = status.get_or_insert_default();
        let is_new = status.waits_for.as_deref() != Some(what);
        status.waits_for = Some(what.to_owned());
        is_new
    }
}

/// The vote of this replica, and the last entry that openraft will have applied.
async fn standing(raft: &ShardRaft) -> Result<(Vote, Option<LogId>), String> {
    let standing =
        |state: &RaftState<TypeConfig>| (*state.vote_ref(), state.local_committed().copied());
    raft.with_raft_state(standing).await.map_err(text)
}

fn text(error: impl ToString) -> String {
    error.to_string()
}
