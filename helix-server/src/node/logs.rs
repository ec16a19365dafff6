//! The logs of one node: their identity, how they are opened, and the threads that drive them.
//! Every log records its cluster, node and shard. A log of another node or cluster is refused.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use helix_wal::storage::{DirStorage, Storage};
use helix_wal::{QuarantinedLog, Wal};
use tokio::sync::{oneshot, watch};

use super::{NodeSettings, NodeStorage};
use crate::error::{Error, Result};
use crate::limits;
use crate::log_threads::{self, LogThreads};
use crate::protocol::ProtocolVersions;
use crate::raft::{DiskReads, as_uncommitted_vote};

/// Pause between attempts to open a log without disk space.
pub(super) const SHORTAGE_PAUSE: Duration = Duration::from_secs(1);

/// Owner of a log, recorded in each of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LogIdentity {
    pub(super) cluster: u128,
    pub(super) node_id: u64,
    pub(super) generation: u32,
    pub(super) shard_id: u64,
    /// Generation of the node's replica of shard 0: older replicas are lost.
    pub(super) node_generation: u32,
}

impl LogIdentity {
    const MAGIC: &'static [u8; 8] = b"helix-id";
    /// Length of the identity of a replica with the generation of its node.
    const SHORT: usize = 44;

    /// Returns the identity of a node's log of shard 0.
    pub(super) fn of_node(cluster: u128, node_id: u64, generation: u32) -> Self {
        Self { cluster, node_id, generation, shard_id: 0, node_generation: generation }
    }

    fn encode(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(Self::SHORT + 4);
        bytes.put_slice(Self::MAGIC);
        bytes.put_u128_le(self.cluster);
        bytes.put_u64_le(self.node_id);
        bytes.put_u32_le(self.generation);
        bytes.put_u64_le(self.shard_id);
        if self.node_generation != self.generation {
            bytes.put_u32_le(self.node_generation);
        }
        bytes.freeze()
    }

    fn decode(mut bytes: Bytes) -> Option<Self> {
        let has_node_generation = bytes.len() == Self::SHORT + 4;
        if !has_node_generation && bytes.len() != Self::SHORT {
            return None;
        }
        if bytes.split_to(8) != Self::MAGIC[..] {
            return None;
        }
        let (cluster, node_id) = (bytes.get_u128_le(), bytes.get_u64_le());
        let (generation, shard_id) = (bytes.get_u32_le(), bytes.get_u64_le());
        let node_generation = if has_node_generation { bytes.get_u32_le() } else { generation };
        Some(Self { cluster, node_id, generation, shard_id, node_generation })
    }
}

/// Opens the logs of one node.
#[derive(Debug)]
pub(super) struct NodeLogs<'a> {
    pub(super) settings: &'a NodeSettings,
    pub(super) failed: watch::Sender<Option<String>>,
    pub(super) versions: ProtocolVersions,
}

/// An open log.
pub(super) struct OpenLog {
    pub(super) wal: Wal,
    pub(super) identity: LogIdentity,
    pub(super) checkpoint: Option<(helix_wal::LogId, Bytes)>,
    pub(super) reads: DiskReads,
    /// The quarantined log that this one replaces, until it has all entries of that one.
    pub(super) repair_of: Option<QuarantinedLog>,
    /// Where the last group was that recovery truncated; it may have been acknowledged.
    pub(super) truncated: Option<String>,
}

impl NodeLogs<'_> {
    fn storage(&self, shard_id: u64) -> Result<Option<Arc<dyn Storage>>> {
        match &self.settings.storage {
            NodeStorage::Memory => Ok(None),
            NodeStorage::Simulated(disks) => Ok(Some(disks.open(shard_id))),
            NodeStorage::DataDir { path, direct_io } => {
                let directory = path.join(format!("shard-{shard_id}"));
                let open = if *direct_io { DirStorage::open } else { DirStorage::open_buffered };
                let storage = open(&directory).map_err(|error| {
                    let what = describe_unusable(&directory, &error);
                    match helix_wal::Error::shortage_of(&error) {
                        Some(helix_wal::Error::DiskFull { .. }) => Error::DiskFull { what },
                        Some(_) => Error::Exhausted { what },
                        None => Error::StorageFailed { what, may_have_applied: false },
                    }
                })?;
                Ok(Some(Arc::new(storage)))
            }
        }
    }

    fn options(&self, shard_id: u64, identity: Bytes) -> helix_wal::Options {
        let mut options = helix_wal::Options { identity, ..helix_wal::Options::default() };
        if shard_id == 0 {
            // The log of shard 0 is small and rarely written.
            options.segment_bytes = limits::CLUSTER_SEGMENT_BYTES;
            options.group_bytes = limits::CLUSTER_GROUP_BYTES;
            options.tail_bytes = limits::CLUSTER_GROUP_BYTES;
        } else {
            options.segment_bytes = self.settings.segment_bytes;
            options.tail_bytes = self.settings.tail_bytes;
            options.footer_cache_bytes = self.settings.footer_bytes;
        }
        options.preparation = self.settings.preparation;
        options.files = self.settings.files.clone();
        options.busy_poll = self.settings.busy_poll;
        options.compaction_slack_bytes = 2 * options.segment_bytes;
        options
    }

    /// Returns whether this node has a log of the shard.
    pub(super) async fn exists(&self, shard_id: u64) -> Result<bool> {
        if let NodeStorage::DataDir { path, .. } = &self.settings.storage
            && !path.join(format!("shard-{shard_id}")).is_dir()
        {
            return Ok(false);
        }
        let Some(storage) = self.storage(shard_id)? else { return Ok(false) };
        let in_place = !matches!(self.settings.storage, NodeStorage::DataDir { .. });
        let exists = DiskReads::new(in_place).wait(move || Wal::exists(&*storage)).await;
        let exists = exists.map_err(|error| self.unusable(shard_id, &error.to_string()))?;
        exists.map_err(|error| self.unusable(shard_id, &error.to_string()))
    }

    /// Opens a shard's log. A new log gets `identity`; an existing one must match node and shard.
    pub(super) async fn open(&self, identity: LogIdentity) -> Result<OpenLog> {
        let shard_id = identity.shard_id;
        let in_place = !matches!(self.settings.storage, NodeStorage::DataDir { .. });
        let reads = DiskReads::new(in_place);
        let options = self.options(shard_id, Bytes::new());
        let Some(storage) = self.storage(shard_id)? else {
            let wal = Wal::open_memory(options);
            return Ok(OpenLog {
                wal,
                identity,
                checkpoint: None,
                reads,
                repair_of: None,
                truncated: None,
            });
        };
        let new = identity.encode();
        let versions = self.versions;
        let open = move || {
            // Before anything is changed. Entries that this program does not know are no damage.
            let needed = match Wal::stored_entries_version(&*storage) {
                Ok(needed) => needed,
                // Reported by the open below.
                Err(helix_wal::Error::Damaged { .. }) => 0,
                Err(error) => return Err(error),
            };
            if needed > versions.newest {
                let what = versions.refusal("the data needs", needed);
                return Err(helix_wal::Error::Unusable(what));
            }
            if Wal::is_being_removed(&*storage)? {
                Wal::remove(&*storage)?;
            }
            // An existing log has an identity; a new one gets the given identity.
            let exists = Wal::exists(&*storage)?;
            let quarantined = Wal::quarantined_log(&*storage)?;
            let identity = match &quarantined {
                Some(quarantined) => quarantined.identity.clone(),
                None if exists => Bytes::new(),
                None => new,
            };
            let opened = Wal::open(storage, helix_wal::Options { identity, ..options })?;
            Ok((opened, quarantined))
        };
        let ((wal, writer, keeper, recovered), repair_of) = self.on_disk(shard_id, open).await?;
        let found = LogIdentity::decode(recovered.identity.clone()).ok_or_else(|| {
            self.unusable(shard_id, "the log has no identity that this program knows")
        })?;
        if (found.node_id, found.shard_id) != (identity.node_id, shard_id) {
            let what = format!(
                "it belongs to shard {} of node {} of cluster {:032x}, but this is node {}; use \
                 another --data-dir, or start with --node-id {}",
                found.shard_id, found.node_id, found.cluster, identity.node_id, found.node_id
            );
            return Err(self.unusable(shard_id, &what));
        }
        if let Some((file, bytes)) = &recovered.torn_tail {
            // A crash during a write leaves such a group, and so does damage to a synced one.
            tracing::warn!(
                shard_id,
                file,
                first_byte = bytes.start,
                next_byte = bytes.end,
                last_index = recovered.state.last.map(|last| last.index),
                "truncated the last group of the log; it may have been acknowledged, if it was \
                 damaged and not torn by a crash"
            );
        }
        let failed = self.failed.clone();
        wal.on_poisoned(Box::new(move |error| match error {
            // The storage has not failed: the shard is reopened once there is disk space.
            helix_wal::Error::DiskFull { .. } => {}
            error => drop(failed.send_replace(Some(format!("shard {shard_id}: {error}")))),
        }));
        let threads = match &self.settings.storage {
            NodeStorage::Simulated(disks) => {
                let disks = disks.clone();
                LogThreads::Tasks { pace: Box::new(move || disks.write_delay(shard_id)) }
            }
            NodeStorage::Memory | NodeStorage::DataDir { .. } => LogThreads::Dedicated,
        };
        log_threads::start(threads, &wal, writer, keeper)
            .map_err(|error| self.unusable(shard_id, &error.to_string()))?;
        for damage in &recovered.quarantined {
            reads.note(damage);
        }
        if let Some(vote) = repair_of.as_ref().and_then(|quarantined| quarantined.vote.clone())
            && wal.state().vote.is_none()
        {
            let kept = self.keep_vote(shard_id, &wal, vote).await;
            kept.inspect_err(|_| wal.close())?;
        }
        let checkpoint = recovered.checkpoint;
        let truncated = recovered.torn_tail.map(|(file, bytes)| {
            format!("bytes {}..{} of {file} in shard-{shard_id}", bytes.start, bytes.end)
        });
        Ok(OpenLog { wal, identity: found, checkpoint, reads, repair_of, truncated })
    }

    /// Returns the generation of the replica whose log is in a shard's directory, also of a log
    /// that does not open. `None` without a log.
    pub(super) async fn generation(&self, shard_id: u64) -> Result<Option<u32>> {
        if !self.exists(shard_id).await? {
            return Ok(None);
        }
        let Some(storage) = self.storage(shard_id)? else { return Ok(None) };
        let found = self.on_disk(shard_id, move || Wal::identity(&*storage)).await?;
        Ok(found.and_then(LogIdentity::decode).map(|identity| identity.generation))
    }

    /// Deletes the log of a replica that was removed.
    pub(super) async fn delete(&self, shard_id: u64) -> Result<()> {
        let Some(storage) = self.storage(shard_id)? else { return Ok(()) };
        self.on_disk(shard_id, move || Wal::remove(&*storage)).await
    }

    /// Like [`Self::open`], but replaces a damaged log with a new one unless this is a single node.
    pub(super) async fn open_or_quarantine(
        &self,
        identity: LogIdentity,
        is_single_node: bool,
    ) -> Result<OpenLog> {
        match self.open(identity.clone()).await {
            Err(Error::CorruptLog { what }) if !is_single_node => {
                let owner = self.identity_of_other_logs(&identity).await?;
                self.quarantine(identity.shard_id, &what, owner.as_ref()).await?;
                self.open(identity).await
            }
            opened => opened,
        }
    }

    /// Like [`Self::open_or_quarantine`], but waits while there is no disk space or file descriptor
    /// for shard 0, without which the node cannot start.
    pub(super) async fn open_shard0(
        &self,
        identity: LogIdentity,
        is_single_node: bool,
    ) -> Result<OpenLog> {
        let mut is_first = true;
        loop {
            match self.open_or_quarantine(identity.clone(), is_single_node).await {
                Err(error @ (Error::DiskFull { .. } | Error::Exhausted { .. })) => {
                    if std::mem::take(&mut is_first) {
                        tracing::warn!(%error, "cannot open the log yet, retrying");
                    }
                    tokio::time::sleep(SHORTAGE_PAUSE).await;
                }
                opened => return opened,
            }
        }
    }

    /// Returns the data shards whose logs exist on this node.
    pub(super) async fn data_shards(&self) -> Result<BTreeSet<u64>> {
        let mut shards = BTreeSet::new();
        // In a directory any log may be missing. Elsewhere the check itself creates the disk.
        let in_directory = matches!(self.settings.storage, NodeStorage::DataDir { .. });
        let disks = match &self.settings.storage {
            NodeStorage::Simulated(disks) => disks.shards(),
            NodeStorage::Memory | NodeStorage::DataDir { .. } => None,
        };
        for shard_id in 1..=limits::SHARDS_MAX {
            if disks.as_ref().is_some_and(|disks| !disks.contains(&shard_id)) {
                continue;
            }
            if self.exists(shard_id).await? {
                shards.insert(shard_id);
            } else if !in_directory && disks.is_none() {
                break;
            }
        }
        Ok(shards)
    }

    /// Returns the identity of a damaged log of shard 0, taken from another log of this node.
    async fn identity_of_other_logs(&self, identity: &LogIdentity) -> Result<Option<LogIdentity>> {
        for other in self.data_shards().await? {
            let Some(storage) = self.storage(other)? else { continue };
            let found = self.on_disk(other, move || Wal::identity(&*storage)).await?;
            let found = found.and_then(LogIdentity::decode);
            if let Some(found) = found.filter(|found| found.node_id == identity.node_id) {
                // All logs name the generation of the replica of shard 0, whose log this is.
                let (generation, shard_id) = (found.node_generation, identity.shard_id);
                return Ok(Some(LogIdentity { generation, shard_id, ..found }));
            }
        }
        Ok(None)
    }

    /// Copies the vote of the quarantined log into the log that replaces it.
    async fn keep_vote(&self, shard_id: u64, wal: &Wal, vote: Bytes) -> Result<()> {
        let vote = as_uncommitted_vote(&vote)
            .map_err(|error| self.unusable(shard_id, &error.to_string()))?;
        let (done, kept) = oneshot::channel();
        // Ignored: the receiver is dropped only with the node.
        wal.save_vote(vote, Box::new(move |result| drop(done.send(result))));
        match kept.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(self.unusable(shard_id, &error.to_string())),
            Err(_) => Err(self.unusable(shard_id, "the log was closed")),
        }
    }

    /// Runs `work` on the files of a shard's log, and maps its errors.
    async fn on_disk<T: Send + 'static>(
        &self,
        shard_id: u64,
        work: impl FnOnce() -> Result<T, helix_wal::Error> + Send + 'static,
    ) -> Result<T> {
        let in_place = !matches!(self.settings.storage, NodeStorage::DataDir { .. });
        let worked = DiskReads::new(in_place).wait(work).await;
        let worked = worked.map_err(|error| self.unusable(shard_id, &error.to_string()))?;
        worked.map_err(|error| match error {
            helix_wal::Error::Damaged { .. } | helix_wal::Error::Io { operation: "read", .. } => {
                self.damaged(shard_id, &error.to_string())
            }
            helix_wal::Error::DiskFull { .. } => {
                Error::DiskFull { what: format!("{}: {error}", self.location(shard_id)) }
            }
            helix_wal::Error::Exhausted { .. } => {
                Error::Exhausted { what: format!("{}: {error}", self.location(shard_id)) }
            }
            other => self.unusable(shard_id, &other.to_string()),
        })
    }

    /// Quarantines a damaged log; the next open creates a new one in its place. `owner` is the
    /// log's identity if it is known from elsewhere.
    pub(super) async fn quarantine(
        &self,
        shard_id: u64,
        why: &str,
        owner: Option<&LogIdentity>,
    ) -> Result<()> {
        let owner = owner.map(LogIdentity::encode).unwrap_or_default();
        let Some(storage) = self.storage(shard_id)? else { return Ok(()) };
        let why = why.to_owned();
        let quarantined =
            self.on_disk(shard_id, move || Wal::quarantine(&*storage, &why, owner)).await?;
        let vote = if quarantined.vote.is_some() { "known" } else { "lost" };
        tracing::warn!(shard_id, vote, "quarantined the damaged log; other nodes have its entries");
        Ok(())
    }

    /// Marks the repair as done: the log has all entries that the quarantined one had acknowledged.
    pub(super) async fn end_repair(&self, shard_id: u64) -> Result<()> {
        let Some(storage) = self.storage(shard_id)? else { return Ok(()) };
        self.on_disk(shard_id, move || Wal::end_repair(&*storage)).await
    }

    /// Closes the log of a replica that failed to open, which releases its directory, and returns
    /// the error.
    pub(super) async fn close_unopened(
        &self,
        shard_id: u64,
        wal: &Wal,
        reads: &DiskReads,
        error: &std::io::Error,
    ) -> Error {
        let closing = wal.clone();
        // Ignored: the blocking pool is gone only when the process is.
        let _ = reads.wait(move || closing.close()).await;
        while !wal.has_ended() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let what = || format!("{}: {error}", self.location(shard_id));
        match helix_wal::Error::shortage_of(error) {
            Some(helix_wal::Error::DiskFull { .. }) => Error::DiskFull { what: what() },
            Some(_) => Error::Exhausted { what: what() },
            None => self.damaged(shard_id, &error.to_string()),
        }
    }

    fn location(&self, shard_id: u64) -> String {
        match &self.settings.storage {
            NodeStorage::DataDir { path, .. } => {
                path.join(format!("shard-{shard_id}")).display().to_string()
            }
            other => format!("shard {shard_id} ({other:?})"),
        }
    }

    pub(super) fn unusable(&self, shard_id: u64, what: &str) -> Error {
        Error::Unusable { what: format!("{}: {what}", self.location(shard_id)) }
    }

    pub(super) fn damaged(&self, shard_id: u64, what: &str) -> Error {
        Error::CorruptLog { what: format!("{}: {what}", self.location(shard_id)) }
    }
}

/// Describes why a directory cannot be created or opened. The system's error names a dangling link
/// as a file that exists.
fn describe_unusable(directory: &Path, error: &std::io::Error) -> String {
    for path in directory.ancestors().filter(|path| !path.is_dir()) {
        if path.is_symlink() {
            let target = path.read_link().unwrap_or_default();
            return format!(
                "{} is a symbolic link to {}, which is not a directory; create that directory, or \
                 remove the link",
                path.display(),
                target.display()
            );
        }
        if path.exists() {
            return format!("{} is not a directory; choose another --data-dir", path.display());
        }
    }
    format!("directory {}: {error}", directory.display())
}

/// Measures the p50 and p99 latency of a small sync on this node's disk, in microseconds.
pub(super) async fn probe(logs: &NodeLogs<'_>) -> Result<(u64, u64)> {
    let NodeStorage::DataDir { .. } = logs.settings.storage else { return Ok((0, 0)) };
    let Some(storage) = logs.storage(0)? else { return Ok((0, 0)) };
    if !storage.reserves_space() {
        tracing::warn!(
            directory = storage.describe(),
            "the file system does not reserve disk space: appends that were accepted may wait for \
             space on a full disk, see docs/limits.md"
        );
    }
    let reads = DiskReads::new(false);
    let measure = move || helix_wal::storage::probe_sync(&*storage, limits::SYNC_PROBES);
    let failed = |what: String| Error::StorageFailed { what, may_have_applied: false };
    let measured = reads.wait(measure).await.map_err(|error| failed(error.to_string()))?;
    let measured = measured.map_err(|error| failed(format!("measuring a sync: {error}")))?;
    let Some((p50, p99)) = measured else {
        tracing::warn!("no disk space to measure a sync");
        return Ok((0, 0));
    };
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    Ok((us(p50), us(p99)))
}
