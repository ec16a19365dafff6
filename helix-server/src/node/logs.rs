//! The logs of one node: whose they are, how they are opened, who drives them.
//! A log says itself to which cluster, node and shard it belongs; a stranger's is refused.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use helix_wal::storage::{DirStorage, Storage};
use helix_wal::{Aside, Wal};
use tokio::sync::{oneshot, watch};

use super::{NodeSettings, NodeStorage};
use crate::drive::{self, Drive};
use crate::error::{Error, Result};
use crate::limits;
use crate::raft::{DiskReads, as_only_given};

/// Who a log belongs to, in every one of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) cluster: u128,
    pub(super) node_id: u64,
    pub(super) generation: u32,
    pub(super) shard_id: u64,
}

impl Identity {
    const MAGIC: &'static [u8; 8] = b"helix-id";

    fn encode(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(44);
        bytes.put_slice(Self::MAGIC);
        bytes.put_u128_le(self.cluster);
        bytes.put_u64_le(self.node_id);
        bytes.put_u32_le(self.generation);
        bytes.put_u64_le(self.shard_id);
        bytes.freeze()
    }

    fn decode(mut bytes: Bytes) -> Option<Self> {
        if bytes.len() != 44 || bytes.split_to(8) != Self::MAGIC[..] {
            return None;
        }
        Some(Self {
            cluster: bytes.get_u128_le(),
            node_id: bytes.get_u64_le(),
            generation: bytes.get_u32_le(),
            shard_id: bytes.get_u64_le(),
        })
    }
}

/// What it takes to open the logs of one node.
#[derive(Debug)]
pub(super) struct Logs<'a> {
    pub(super) settings: &'a NodeSettings,
    pub(super) failed: watch::Sender<Option<String>>,
}

/// One opened log.
pub(super) struct OpenLog {
    pub(super) wal: Wal,
    pub(super) identity: Identity,
    pub(super) checkpoint: Option<(helix_wal::LogId, Bytes)>,
    pub(super) reads: DiskReads,
    /// The log that this one takes the place of, and may still lack something of.
    pub(super) repair_of: Option<Aside>,
}

impl Logs<'_> {
    fn storage(&self, shard_id: u64) -> Result<Option<Arc<dyn Storage>>> {
        match &self.settings.storage {
            NodeStorage::Memory => Ok(None),
            NodeStorage::Simulated(disks) => Ok(Some(disks.open(shard_id))),
            NodeStorage::Folder { path, direct_io } => {
                let folder = path.join(format!("shard-{shard_id}"));
                let open = if *direct_io { DirStorage::open } else { DirStorage::open_buffered };
                let storage = open(&folder).map_err(|error| Error::StorageFailed {
                    what: format!("folder {}: {error}", folder.display()),
                    may_have_applied: false,
                })?;
                Ok(Some(Arc::new(storage)))
            }
        }
    }

    fn options(&self, shard_id: u64, identity: Bytes) -> helix_wal::Options {
        let mut options = helix_wal::Options { identity, ..helix_wal::Options::default() };
        if shard_id == 0 {
            // The cluster's own log is small and rarely written.
            options.segment_bytes = limits::CLUSTER_SEGMENT_BYTES;
            options.group_bytes = limits::CLUSTER_GROUP_BYTES;
            options.tail_bytes = limits::CLUSTER_GROUP_BYTES;
            options.ready_segments = 1;
        } else {
            options.segment_bytes = self.settings.segment_bytes;
            options.tail_bytes = self.settings.tail_bytes;
            options.footer_cache_bytes = self.settings.footer_bytes;
        }
        options.idle_poll = self.settings.idle_poll;
        options.compaction_slack_bytes = 2 * options.segment_bytes;
        options
    }

    /// Whether this node has a log of the shard.
    pub(super) async fn exists(&self, shard_id: u64) -> Result<bool> {
        if let NodeStorage::Folder { path, .. } = &self.settings.storage
            && !path.join(format!("shard-{shard_id}")).is_dir()
        {
            return Ok(false);
        }
        let Some(storage) = self.storage(shard_id)? else { return Ok(false) };
        let in_place = !matches!(self.settings.storage, NodeStorage::Folder { .. });
        let exists = DiskReads::new(in_place).wait(move || Wal::exists(&*storage)).await;
        let exists = exists.map_err(|error| self.unusable(shard_id, &error.to_string()))?;
        exists.map_err(|error| self.unusable(shard_id, &error.to_string()))
    }

    /// Opens a shard's log, for `identity` where it is new.
    pub(super) async fn open(&self, identity: Identity) -> Result<OpenLog> {
        let shard_id = identity.shard_id;
        let in_place = !matches!(self.settings.storage, NodeStorage::Folder { .. });
        let reads = DiskReads::new(in_place);
        let options = self.options(shard_id, Bytes::new());
        let Some(storage) = self.storage(shard_id)? else {
            let wal = Wal::open_memory(options);
            return Ok(OpenLog { wal, identity, checkpoint: None, reads, repair_of: None });
        };
        let new = identity.encode();
        let open = move || {
            // An existing log says itself whose it is; a new one is told.
            let exists = Wal::exists(&*storage)?;
            let aside = Wal::repair_of(&*storage)?;
            let identity = match &aside {
                Some(aside) => aside.identity.clone(),
                None if exists => Bytes::new(),
                None => new,
            };
            let opened = Wal::open(storage, helix_wal::Options { identity, ..options })?;
            Ok((opened, aside))
        };
        let ((wal, writer, keeper, recovered), repair_of) = self.at_disk(shard_id, open).await?;
        let found = Identity::decode(recovered.identity.clone()).ok_or_else(|| {
            self.unusable(shard_id, "the log's identity is not one of this program")
        })?;
        if (found.node_id, found.shard_id) != (identity.node_id, shard_id) {
            let what = format!(
                "it belongs to shard {} of node {} of cluster {:032x}; this is node {}: give it \
                 its own --data-dir, or start it with --node-id {}",
                found.shard_id, found.node_id, found.cluster, identity.node_id, found.node_id
            );
            return Err(self.unusable(shard_id, &what));
        }
        if recovered.cut_bytes > 0 {
            tracing::info!(
                shard_id,
                bytes = recovered.cut_bytes,
                "cut a torn, unacknowledged tail"
            );
        }
        let failed = self.failed.clone();
        wal.on_poisoned(Box::new(move |error| match error {
            // Nothing has failed: the shard is opened again once there is room.
            helix_wal::Error::DiskFull { .. } => {}
            error => drop(failed.send_replace(Some(format!("shard {shard_id}: {error}")))),
        }));
        let drive = match &self.settings.storage {
            NodeStorage::Simulated(disks) => {
                let disks = disks.clone();
                Drive::Tasks { pace: Box::new(move || disks.pace(shard_id)) }
            }
            NodeStorage::Memory | NodeStorage::Folder { .. } => Drive::Threads,
        };
        drive::start(drive, &wal, writer, keeper)
            .map_err(|error| self.unusable(shard_id, &error.to_string()))?;
        for damage in &recovered.withheld {
            reads.note(damage);
        }
        if let Some(vote) = repair_of.as_ref().and_then(|aside| aside.vote.clone())
            && wal.state().vote.is_none()
        {
            let kept = self.keep_vote(shard_id, &wal, vote).await;
            kept.inspect_err(|_| wal.close())?;
        }
        let checkpoint = recovered.checkpoint;
        Ok(OpenLog { wal, identity: found, checkpoint, reads, repair_of })
    }

    /// As [`Self::open`]. A damaged log is put aside for a new one, unless this node is alone.
    pub(super) async fn open_or_put_aside(
        &self,
        identity: Identity,
        is_alone: bool,
    ) -> Result<OpenLog> {
        match self.open(identity.clone()).await {
            Err(Error::CorruptLog { what }) if !is_alone => {
                let owner = self.owner_of_others(&identity).await?;
                self.put_aside(identity.shard_id, &what, owner.as_ref()).await?;
                self.open(identity).await
            }
            opened => opened,
        }
    }

    /// The data shards whose logs are here.
    pub(super) async fn data_shards(&self) -> Result<BTreeSet<u64>> {
        let mut shards = BTreeSet::new();
        // In a folder any may be missing; elsewhere a look makes a disk.
        let in_folder = matches!(self.settings.storage, NodeStorage::Folder { .. });
        for shard_id in 1..=limits::SHARDS_MAX {
            if self.exists(shard_id).await? {
                shards.insert(shard_id);
            } else if !in_folder {
                break;
            }
        }
        Ok(shards)
    }

    /// Whose a log of this node is that may not say so any more: all of its logs were made
    /// together, so one of the others does.
    async fn owner_of_others(&self, identity: &Identity) -> Result<Option<Identity>> {
        for other in self.data_shards().await? {
            let Some(storage) = self.storage(other)? else { continue };
            let found = self.at_disk(other, move || Wal::identity(&*storage)).await?;
            let found = found.and_then(Identity::decode);
            if let Some(found) = found.filter(|found| found.node_id == identity.node_id) {
                return Ok(Some(Identity { shard_id: identity.shard_id, ..found }));
            }
        }
        Ok(None)
    }

    /// A log that takes the place of another one begins with that one's vote.
    async fn keep_vote(&self, shard_id: u64, wal: &Wal, vote: Bytes) -> Result<()> {
        let vote =
            as_only_given(&vote).map_err(|error| self.unusable(shard_id, &error.to_string()))?;
        let (done, kept) = oneshot::channel();
        // Ignored: who asked is gone only with the node.
        wal.save_vote(vote, Box::new(move |result| drop(done.send(result))));
        match kept.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(self.unusable(shard_id, &error.to_string())),
            Err(_) => Err(self.unusable(shard_id, "the log was closed")),
        }
    }

    /// Works on the files of a shard's log, and says what is wrong with them.
    async fn at_disk<T: Send + 'static>(
        &self,
        shard_id: u64,
        work: impl FnOnce() -> Result<T, helix_wal::Error> + Send + 'static,
    ) -> Result<T> {
        let in_place = !matches!(self.settings.storage, NodeStorage::Folder { .. });
        let worked = DiskReads::new(in_place).wait(work).await;
        let worked = worked.map_err(|error| self.unusable(shard_id, &error.to_string()))?;
        worked.map_err(|error| match error {
            helix_wal::Error::Damaged { .. } | helix_wal::Error::Io { operation: "read", .. } => {
                self.damaged(shard_id, &error.to_string())
            }
            helix_wal::Error::DiskFull { .. } => {
                Error::DiskFull { what: format!("{}: {error}", self.place(shard_id)) }
            }
            other => self.unusable(shard_id, &other.to_string()),
        })
    }

    /// Puts a damaged log aside, so that the next open begins a new one in its place.
    /// `owner` is whose it is, where that is known from elsewhere.
    pub(super) async fn put_aside(
        &self,
        shard_id: u64,
        why: &str,
        owner: Option<&Identity>,
    ) -> Result<()> {
        let owner = owner.map(Identity::encode).unwrap_or_default();
        let Some(storage) = self.storage(shard_id)? else { return Ok(()) };
        let why = why.to_owned();
        let put = self.at_disk(shard_id, move || Wal::set_aside(&*storage, &why, owner)).await?;
        let vote = if put.vote.is_some() { "known" } else { "not known" };
        tracing::warn!(shard_id, vote, "the damaged log is put aside; the others have its entries");
        Ok(())
    }

    /// Says that the log has all that the one before it had acknowledged.
    pub(super) async fn end_repair(&self, shard_id: u64) -> Result<()> {
        let Some(storage) = self.storage(shard_id)? else { return Ok(()) };
        self.at_disk(shard_id, move || Wal::end_repair(&*storage)).await
    }

    /// Why a replica could not be opened on its log, which is closed: nobody holds its folder then.
    pub(super) async fn unopened(
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
        if error.kind() == std::io::ErrorKind::StorageFull {
            return Error::DiskFull { what: format!("{}: {error}", self.place(shard_id)) };
        }
        self.damaged(shard_id, &error.to_string())
    }

    fn place(&self, shard_id: u64) -> String {
        match &self.settings.storage {
            NodeStorage::Folder { path, .. } => {
                path.join(format!("shard-{shard_id}")).display().to_string()
            }
            other => format!("shard {shard_id} ({other:?})"),
        }
    }

    pub(super) fn unusable(&self, shard_id: u64, what: &str) -> Error {
        Error::Unusable { what: format!("{}: {what}", self.place(shard_id)) }
    }

    pub(super) fn damaged(&self, shard_id: u64, what: &str) -> Error {
        Error::CorruptLog { what: format!("{}: {what}", self.place(shard_id)) }
    }
}

/// Measures what a small sync costs here.
pub(super) async fn probe(logs: &Logs<'_>) -> Result<(u64, u64)> {
    let NodeStorage::Folder { .. } = logs.settings.storage else { return Ok((0, 0)) };
    let Some(storage) = logs.storage(0)? else { return Ok((0, 0)) };
    let reads = DiskReads::new(false);
    let measure = move || helix_wal::storage::probe_sync(&*storage, limits::SYNC_PROBES);
    let failed = |what: String| Error::StorageFailed { what, may_have_applied: false };
    let measured = reads.wait(measure).await.map_err(|error| failed(error.to_string()))?;
    let (p50, p99) = measured.map_err(|error| failed(format!("measuring a sync: {error}")))?;
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    Ok((us(p50), us(p99)))
}
