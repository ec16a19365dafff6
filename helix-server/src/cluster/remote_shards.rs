//! Shards without a replica on this node: their leaders, and what this node asks them.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::client::Cluster;
use super::peer_messages::{
    GroupsRequest, PartitionReport, PeerRequest, PeerResponse, WatermarksRequest,
};
use crate::error::{Error, LeaderHint, Result};
use crate::limits;
use crate::log::{ConsumerGroup, PartitionId, Watermarks};
use crate::shard::ReadFrom;
use crate::sync;

/// Bytes of groups in one response; a single group may be larger.
const GROUPS_BYTES_MAX: usize = 4 << 20;

/// Partitions in one request for watermarks.
const WATERMARKS_MAX: usize = 10_000;

/// Watermarks that are remembered.
const REMEMBERED_MAX: usize = 100_000;

/// Knowledge of shards without a replica on this node.
#[derive(Debug, Default)]
pub(super) struct RemoteShards {
    /// Leader and its term, by shard.
    leaders: BTreeMap<u64, (u64, u64)>,
    /// Readable offsets as they were last asked for, by partition.
    watermarks: BTreeMap<PartitionId, Watermarks>,
}

impl Cluster {
    /// Returns whether a data shard has its replicas on other nodes only.
    pub fn is_elsewhere(&self, shard_id: u64) -> bool {
        let own = self.node_id();
        self.shard(shard_id).is_err()
            && self.machine().read(|state| {
                let placed = state.members().placement().and_then(|it| it.shard(shard_id));
                placed.is_some_and(|shard| shard.generation_on(own).is_none())
            })
    }

    /// Returns the nodes with a replica of a data shard that has none here.
    pub fn replicas_elsewhere(&self, shard_id: u64) -> Option<Vec<u64>> {
        if !self.is_elsewhere(shard_id) {
            return None;
        }
        self.machine().read(|state| {
            let shard = state.members().placement()?.shard(shard_id)?;
            Some(shard.replicas.keys().copied().collect())
        })
    }

    /// Returns the number of replicas that the data shards have or should have.
    pub fn replica_count(&self) -> u32 {
        let nodes = u32::try_from(self.nodes().len()).unwrap_or(u32::MAX);
        let placed = self.machine().read(|state| Some(state.members().placement()?.replicas()));
        placed.map_or(nodes, |replicas| replicas.min(nodes))
    }

    /// Returns the leader of a shard without a replica here, if it is known and connected.
    pub fn remote_leader(&self, shard_id: u64) -> Option<LeaderHint> {
        let (node_id, term) = sync::lock(&self.remote).leaders.get(&shard_id).copied()?;
        if !self.hub.is_connected(node_id) {
            return None;
        }
        let endpoint = self.machine().read(|state| Some(state.node(node_id)?.endpoint.clone()));
        Some(LeaderHint { node_id, endpoint: endpoint.unwrap_or_default(), term })
    }

    /// Returns the error of a request for a shard without a replica here: it names the leader.
    pub fn elsewhere(&self, shard_id: u64) -> Error {
        match self.remote_leader(shard_id) {
            Some(leader) => Error::NotLeader { shard: shard_id, leader: Some(leader) },
            None => Error::NoLeader { shard: shard_id },
        }
    }

    /// Asks the other nodes which shards they lead, if shards have no replica here. Returns whether
    /// a leader has changed.
    pub async fn learn_leaders(&self) -> bool {
        let shards = self.machine().read(|state| state.shards().clone());
        let is_complete = !shards.iter().any(|shard| self.is_elsewhere(*shard));
        if is_complete {
            return !std::mem::take(&mut sync::lock(&self.remote).leaders).is_empty();
        }
        let asked = self.hub.connected().into_iter().map(|node| async move {
            let wait = limits::PROGRESS_WAIT_MAX;
            let response = self.hub.call(node, PeerRequest::LedShards.encode(), wait).await.ok()?;
            match PeerResponse::decode(response) {
                Ok(PeerResponse::LedShards(rows)) => Some((node, rows)),
                _ => None,
            }
        });
        let mut leaders: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for (node, rows) in join_all(asked).await.into_iter().flatten() {
            for (shard_id, term) in rows {
                // A deposed leader may not know of its successor yet.
                let known = leaders.entry(shard_id).or_insert((node, term));
                if known.1 < term {
                    *known = (node, term);
                }
            }
        }
        leaders.retain(|shard_id, _| shards.contains(shard_id));
        let mut remote = sync::lock(&self.remote);
        let has_changed = remote.leaders != leaders;
        remote.leaders = leaders;
        has_changed
    }

    pub(super) fn led_shards(&self) -> Vec<(u64, u64)> {
        let shards = self.open_shards();
        let led = shards.iter().filter(|shard| shard.is_leader() && !shard.is_isolated());
        led.map(|shard| (shard.id(), shard.term())).collect()
    }

    /// Sends a request to the leader of a shard without a replica here, and retries if leadership
    /// moves.
    async fn ask_leader(&self, shard_id: u64, request: &PeerRequest) -> Result<PeerResponse> {
        let deadline = Instant::now() + limits::READY_WAIT_MAX;
        loop {
            if let Some(leader) = self.remote_leader(shard_id) {
                match self.forward(leader.node_id, request).await {
                    Ok(PeerResponse::NotLeader) | Err(_) => {}
                    Ok(response) => return Ok(response),
                }
            }
            if Instant::now() >= deadline {
                return Err(Error::NoLeader { shard: shard_id });
            }
            if !self.learn_leaders().await {
                sleep(limits::LEADER_POLL_INTERVAL).await;
            }
        }
    }

    /// Returns groups of a shard without a replica here: the one with this name, or up to `after`
    /// groups whose names sort after it.
    ///
    /// # Errors
    /// [`Error::NoLeader`] if no leader of the shard responds.
    pub async fn remote_groups(
        &self,
        shard_id: u64,
        name: &str,
        after: u32,
    ) -> Result<Vec<(String, ConsumerGroup)>> {
        let name = name.to_owned();
        let request = PeerRequest::Groups(GroupsRequest { shard_id, name, after });
        let PeerResponse::Groups(rows) = self.ask_leader(shard_id, &request).await? else {
            return Err(Error::NoLeader { shard: shard_id });
        };
        let groups = rows.iter().map(|row| ConsumerGroup::decode(row));
        groups.collect::<Result<_, String>>().map_err(|what| Error::CorruptLog { what })
    }

    pub(super) async fn local_groups(&self, request: &GroupsRequest) -> PeerResponse {
        let GroupsRequest { shard_id, ref name, after } = *request;
        let Ok(shard) = self.shard(shard_id) else { return PeerResponse::NotLeader };
        if shard.ready().await.is_err() {
            return PeerResponse::NotLeader;
        }
        let after = usize::try_from(after).unwrap_or(usize::MAX);
        let mut bytes = 0;
        let rows = shard.read_groups(|groups| {
            let found = groups.get(name).filter(|_| after == 0);
            let found = found.map(|group| group.encode(name)).into_iter();
            let later = groups.after(name).take(after);
            let later = later.map(|(name, group)| group.encode(name)).take_while(|row| {
                let is_first = bytes == 0;
                bytes += row.len();
                is_first || bytes <= GROUPS_BYTES_MAX
            });
            found.chain(later).collect()
        });
        PeerResponse::Groups(rows)
    }

    /// Asks for the state of partitions of a shard without a replica here, and remembers their
    /// readable offsets.
    ///
    /// # Errors
    /// [`Error::NoLeader`] if no leader of the shard responds.
    pub async fn remote_partitions(
        &self,
        shard_id: u64,
        partitions: &[PartitionId],
    ) -> Result<BTreeMap<PartitionId, PartitionReport>> {
        let mut reports = BTreeMap::new();
        for part in partitions.chunks(WATERMARKS_MAX) {
            let partitions = part.iter().map(|partition| partition.0).collect();
            let request = PeerRequest::Watermarks(WatermarksRequest { shard_id, partitions });
            let PeerResponse::Watermarks(rows) = self.ask_leader(shard_id, &request).await? else {
                return Err(Error::NoLeader { shard: shard_id });
            };
            let mut remote = sync::lock(&self.remote);
            if remote.watermarks.len() + rows.len() > REMEMBERED_MAX {
                remote.watermarks.clear();
            }
            let offsets = rows.iter().map(|(id, it)| (PartitionId(*id), it.watermarks));
            remote.watermarks.extend(offsets);
            reports.extend(rows.into_iter().map(|(id, report)| (PartitionId(id), report)));
        }
        Ok(reports)
    }

    /// Returns the readable offsets of a partition as they were last asked for.
    pub fn remembered_watermarks(&self, partition: PartitionId) -> Option<Watermarks> {
        sync::lock(&self.remote).watermarks.get(&partition).copied()
    }

    pub(super) async fn local_watermarks(&self, request: &WatermarksRequest) -> PeerResponse {
        let Ok(shard) = self.shard(request.shard_id) else { return PeerResponse::NotLeader };
        if shard.ready().await.is_err() {
            return PeerResponse::NotLeader;
        }
        let asked = request.partitions.iter().take(WATERMARKS_MAX);
        let report = |id: &u64| {
            let partition = PartitionId(*id);
            let watermarks = shard.watermarks_for(partition, ReadFrom::Leader).ok()?;
            let bytes = Some(shard.partition_bytes(partition));
            Some((*id, PartitionReport { watermarks, bytes }))
        };
        PeerResponse::Watermarks(asked.filter_map(report).collect())
    }
}
