//! openraft's own storage suite, over every disk, also with a close and reopen after each
//! mutating call.

use std::fmt::Debug;
use std::io;
use std::ops::{RangeBounds, RangeInclusive};
use std::sync::Arc;

use bytes::Bytes;
use futures_util::Stream;
use helix_server::log::{Head, Verdict};
use helix_server::raft::{DiskReads, LogStore, Machine, StateMachine, TypeConfig};
use helix_wal::storage::{DirStorage, SimulatedDisk, Storage};
use helix_wal::{Options, Wal};
use openraft::alias::{EntryOf, LogIdOf, VoteOf};
use openraft::storage::{IOFlushed, LogState, RaftLogStorage};
use openraft::testing::log::{StoreBuilder, Suite};
use openraft::{OptionalSend, RaftLogReader, StorageError};
use tokio::sync::oneshot;

/// A machine without state: the suite applies entries that were never logged.
#[derive(Debug)]
struct NullMachine;

impl Machine for NullMachine {
    fn apply(&self, _id: helix_wal::LogId, _head: Option<&Head>) -> io::Result<Verdict> {
        Ok(Verdict::Nothing)
    }
    fn encode(&self) -> Bytes {
        Bytes::new()
    }
    fn restore(&self, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn check(&self, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug, Clone)]
enum SuiteDisk {
    Memory,
    Directory(Arc<tempfile::TempDir>),
    Simulated(SimulatedDisk),
}

fn options() -> Options {
    // Small, so that the suite rolls segments.
    Options {
        segment_bytes: 256 << 10,
        group_bytes: 16 << 10,
        reserve_bytes: 0,
        ready_segments: 1,
        ..Options::default()
    }
}

impl SuiteDisk {
    fn open(&self) -> Wal {
        let storage: Arc<dyn Storage> = match self {
            Self::Memory => return Wal::open_memory(options()),
            Self::Directory(directory) => Arc::new(DirStorage::open(directory.path()).unwrap()),
            Self::Simulated(disk) => Arc::new(disk.clone()),
        };
        let (wal, writer, keeper, _) = Wal::open(storage, options()).unwrap();
        writer.spawn().unwrap();
        keeper.spawn().unwrap();
        wal
    }
}

async fn machine(wal: &Wal, store: &mut LogStore) -> StateMachine {
    let reads = DiskReads::new(false);
    StateMachine::recover(Arc::new(NullMachine), wal.clone(), reads, None, store).await.unwrap()
}

fn directory() -> SuiteDisk {
    SuiteDisk::Directory(Arc::new(tempfile::tempdir().unwrap()))
}

fn simulated() -> SuiteDisk {
    SuiteDisk::Simulated(SimulatedDisk::new(7))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_in_memory() {
    Suite::test_all(SuiteBuilder { disk: || SuiteDisk::Memory, reopens: false }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_on_a_directory() {
    Suite::test_all(SuiteBuilder { disk: directory, reopens: false }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_on_a_simulated_disk() {
    Suite::test_all(SuiteBuilder { disk: simulated, reopens: false }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_on_a_directory_with_a_reopen_after_each_change() {
    Suite::test_all(SuiteBuilder { disk: directory, reopens: true }).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passes_on_a_simulated_disk_with_a_reopen_after_each_change() {
    Suite::test_all(SuiteBuilder { disk: simulated, reopens: true }).await.unwrap();
}

/// The store under test. It writes a checkpoint before a purge, as openraft's core does and the
/// suite does not. With `reopens` it reopens the log after each mutating call.
struct SuiteStore {
    disk: SuiteDisk,
    reopens: bool,
    wal: Wal,
    store: LogStore,
    /// Readers use the reopened log through this.
    current: Arc<std::sync::Mutex<LogStore>>,
}

struct SuiteBuilder {
    disk: fn() -> SuiteDisk,
    reopens: bool,
}

impl StoreBuilder<TypeConfig, SuiteStore, StateMachine, [SuiteDisk; 2]> for SuiteBuilder {
    async fn build(
        &self,
    ) -> Result<([SuiteDisk; 2], SuiteStore, StateMachine), StorageError<TypeConfig>> {
        let [disk, beside] = [(self.disk)(), (self.disk)()];
        let wal = disk.open();
        let mut store = LogStore::new(wal.clone(), DiskReads::new(false));
        // The state machine's checkpoints go to a second log on a disk of the same kind: the suite
        // applies entries that the first log does not have.
        let machine = machine(&beside.open(), &mut store).await;
        let current = Arc::new(std::sync::Mutex::new(store.clone()));
        let reopens = self.reopens;
        Ok(([disk.clone(), beside], SuiteStore { disk, reopens, wal, store, current }, machine))
    }
}

impl SuiteStore {
    fn reopen(&mut self) {
        if !self.reopens {
            return;
        }
        self.wal.close();
        self.wal = self.disk.open();
        self.store = LogStore::new(self.wal.clone(), DiskReads::new(false));
        *self.current.lock().unwrap() = self.store.clone();
    }
}

#[derive(Debug, Clone)]
struct ReopenedReader(Arc<std::sync::Mutex<LogStore>>);

impl ReopenedReader {
    fn store(&self) -> LogStore {
        self.0.lock().unwrap().clone()
    }
}

impl RaftLogReader<TypeConfig> for ReopenedReader {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> io::Result<Vec<EntryOf<TypeConfig>>> {
        self.store().try_get_log_entries(range).await
    }
    async fn read_vote(&mut self) -> io::Result<Option<VoteOf<TypeConfig>>> {
        self.store().read_vote().await
    }
    async fn limited_get_log_entries(
        &mut self,
        start: u64,
        end: u64,
    ) -> io::Result<Vec<EntryOf<TypeConfig>>> {
        self.store().limited_get_log_entries(start, end).await
    }
    async fn entries_stream<RB>(
        &mut self,
        range: RB,
    ) -> impl Stream<Item = io::Result<EntryOf<TypeConfig>>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let mut store = self.store();
        let entries: Vec<_> = {
            use futures_util::StreamExt;
            store.entries_stream(range).await.collect().await
        };
        futures_util::stream::iter(entries)
    }
    async fn get_key_log_ids(
        &mut self,
        range: RangeInclusive<LogIdOf<TypeConfig>>,
    ) -> io::Result<Vec<LogIdOf<TypeConfig>>> {
        self.store().get_key_log_ids(range).await
    }
}

impl RaftLogStorage<TypeConfig> for SuiteStore {
    type LogReader = ReopenedReader;

    async fn get_log_state(&mut self) -> io::Result<LogState<TypeConfig>> {
        self.store.get_log_state().await
    }
    async fn get_log_reader(&mut self) -> ReopenedReader {
        ReopenedReader(self.current.clone())
    }
    async fn save_vote(&mut self, vote: &VoteOf<TypeConfig>) -> io::Result<()> {
        self.store.save_vote(vote).await?;
        self.reopen();
        Ok(())
    }
    async fn save_committed(&mut self, committed: Option<LogIdOf<TypeConfig>>) -> io::Result<()> {
        self.store.save_committed(committed).await?;
        self.reopen();
        Ok(())
    }
    async fn read_committed(&mut self) -> io::Result<Option<LogIdOf<TypeConfig>>> {
        self.store.read_committed().await
    }
    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig>) -> io::Result<()>
    where
        I: IntoIterator<Item = EntryOf<TypeConfig>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let (sender, receiver) = oneshot::channel();
        self.store.append(entries, IOFlushed::signal(into_signal(sender))).await?;
        let flushed = receiver.await.map_err(io::Error::other)?;
        self.reopen();
        callback.io_completed(flushed);
        Ok(())
    }
    async fn truncate_after(&mut self, last: Option<LogIdOf<TypeConfig>>) -> io::Result<()> {
        self.store.truncate_after(last).await?;
        self.reopen();
        Ok(())
    }
    async fn purge(&mut self, upto: LogIdOf<TypeConfig>) -> io::Result<()> {
        let id = helix_wal::LogId { term: **upto.committed_leader_id(), index: upto.index };
        self.wal.checkpoint(id, Bytes::new()).map_err(io::Error::other)?;
        self.store.purge(upto).await?;
        self.reopen();
        Ok(())
    }
}

type Signal = openraft::alias::OneshotSenderOf<TypeConfig, io::Result<()>>;

/// openraft's sender of a flush result, connected to a tokio channel.
fn into_signal(sender: oneshot::Sender<io::Result<()>>) -> Signal {
    use openraft::async_runtime::Oneshot;
    let (signal, flushed) =
        <openraft::alias::OneshotOf<TypeConfig> as Oneshot>::channel::<io::Result<()>>();
    tokio::spawn(async move {
        if let Ok(flushed) = flushed.await {
            let _ = sender.send(flushed);
        }
    });
    signal
}

/// A failed log must not look like the end of the log: the reader of a range gets an error.
#[tokio::test]
async fn reading_a_failed_log_returns_an_error() {
    use futures_util::StreamExt;

    let wal = SuiteDisk::Simulated(SimulatedDisk::new(1)).open();
    let mut store = LogStore::new(wal.clone(), DiskReads::new(false));
    let count = async |store: &mut LogStore| {
        let entries: Vec<_> = store.entries_stream(0..3).await.collect().await;
        (entries.len(), entries.iter().filter(|entry| entry.is_err()).count())
    };
    assert_eq!(count(&mut store).await, (0, 0));
    wal.close();
    assert_eq!(count(&mut store).await, (1, 1));
    let none: Vec<_> = store.entries_stream(0..0).await.collect().await;
    assert!(none.is_empty());
}
