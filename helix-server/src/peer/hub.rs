//! The hub: the peers of this node, and the local replicas that answer their messages.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex};

use helix_proto::raft::v1 as pb;
use helix_wal::Wal;
use openraft::Raft;
use prost::Message;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::connection::lane::PeerLane;
use super::connection::peer::PeerStatus;
use super::copy_rate::CopyPace;
use super::dialer::{Dialer, TcpDialer};
use super::failover::FailoverWatch;
use super::handler::PeerHandler;
use super::local::{ClusterIdentity, LocalNode};
use super::send::replica_network::ReplicaNetwork;
use super::served::{HeldLog, ServedReplica};
use super::snapshot::fetcher::{FetchProgress, RecordFetcher};
use super::snapshot::records;
use super::snapshot::source::{fetch_entries, fetch_live};
use super::table::PeerTable;
use super::wire;
use crate::protocol::ProtocolVersions;
use crate::raft::{
    DiskReads, ElectionTiming, Machine, Replica, ReplicaId, ReplicaParts, StateMachine, TypeConfig,
};
use crate::sync::lock;

/// Settings of a [`Hub`].
#[derive(Debug, Clone)]
pub struct HubSettings {
    pub node_id: u64,
    /// Peer addresses, "host:port", by node id.
    pub peers: BTreeMap<u64, String>,
    /// Protocol versions that this node speaks.
    pub versions: ProtocolVersions,
    pub timing: ElectionTiming,
}

/// All connections between this node and its peers. Closes them on drop.
pub struct Hub {
    pub(super) table: Arc<PeerTable>,
    /// Local replicas, by shard.
    shards: Mutex<BTreeMap<u64, ServedReplica>>,
    /// Logs without a running replica, by shard.
    logs: Mutex<BTreeMap<u64, HeldLog>>,
    handler: Mutex<Option<Arc<dyn PeerHandler>>>,
    /// Open incoming streams, one per peer and lane: a newer stream ends the older one.
    inbound: Mutex<BTreeMap<(u64, PeerLane), CancellationToken>>,
    /// Node and cluster of the last peer that dialed this node while it was in no cluster.
    caller: Mutex<Option<(u64, u128)>>,
    /// Last refusal of each peer (0 for unknown nodes), so that a repeated one is logged once.
    refusals: Mutex<BTreeMap<u64, String>>,
}

impl Hub {
    /// Reads the next live entries of these streams above `after`, up to `upto`, from a log of this
    /// node, for a shard that a split makes. Returns them encoded. The rate of copies applies.
    ///
    /// # Errors
    /// The reason why they cannot be read, in words.
    pub async fn read_records_of(
        &self,
        wal: &Wal,
        reads: &DiskReads,
        (after, upto): (u64, u64),
        streams: Arc<HashSet<u64>>,
    ) -> Result<Vec<u8>, String> {
        let request = pb::RecordsRequest { after, upto, bytes_max: u64::MAX, ..Default::default() };
        let wants = move |stream| streams.contains(&stream);
        let read = records::read_live_of(wal, reads, &self.table.throttle, request, wants);
        Ok(read.await?.encode_to_vec())
    }

    /// Creates a hub over TCP that dials its peers after [`Self::set_identity`].
    ///
    /// # Panics
    /// Panics outside a tokio runtime.
    pub fn new(settings: HubSettings, handler: Arc<dyn PeerHandler>) -> Arc<Self> {
        Self::over(Arc::new(TcpDialer), settings, handler)
    }

    /// Creates a hub as [`Self::new`] does, over any kind of network.
    pub fn over(
        dialer: Arc<dyn Dialer>,
        settings: HubSettings,
        handler: Arc<dyn PeerHandler>,
    ) -> Arc<Self> {
        let HubSettings { node_id, peers, versions, timing } = settings;
        let hub = Arc::new(Self {
            table: Arc::new(PeerTable::new(LocalNode::new(node_id, versions, timing), dialer)),
            shards: Mutex::default(),
            logs: Mutex::default(),
            handler: Mutex::new(Some(handler)),
            inbound: Mutex::default(),
            caller: Mutex::default(),
            refusals: Mutex::default(),
        });
        hub.set_peers(&peers);
        hub
    }

    /// Sets the cluster of this node and the generation of its replicas.
    /// Until then no Raft message is sent or accepted.
    pub fn set_identity(&self, cluster: u128, generation: u32) {
        self.table.local.set_identity(ClusterIdentity { cluster, generation });
    }

    /// Returns the protocol versions that this node speaks.
    pub fn versions(&self) -> ProtocolVersions {
        self.table.local.versions
    }

    /// Returns the election timing of this node.
    pub fn timing(&self) -> &ElectionTiming {
        &self.table.local.timing
    }

    /// Returns the protocol version that the whole cluster speaks; 0 until it is known.
    pub fn protocol(&self) -> u32 {
        self.table.local.protocol()
    }

    /// Refuses new connections of peers that do not speak this version.
    /// Returns `true` if the version is later than the one before.
    pub fn set_protocol(&self, version: u32) -> bool {
        self.table.local.set_protocol(version)
    }

    /// Replaces the peers: dials those that are new or have moved, closes those that are gone.
    pub fn set_peers(&self, addresses: &BTreeMap<u64, String>) {
        let removed = self.table.set_peers(addresses);
        lock(&self.inbound).retain(|(from, _), stream| {
            let is_removed = removed.contains(from);
            if is_removed {
                stream.cancel();
            }
            !is_removed
        });
        self.table.local.peers_changed();
    }

    /// Returns openraft's network for one replica. Only the last index is read from its log.
    pub fn network(
        self: &Arc<Self>,
        shard_id: u64,
        replica_id: ReplicaId,
        wal: Wal,
    ) -> ReplicaNetwork {
        ReplicaNetwork::new(Arc::clone(&self.table), shard_id, replica_id, wal)
    }

    /// Starts to answer messages for a replica, and to replace its leader if that is gone.
    pub fn serve_replica(&self, shard_id: u64, replica: &Replica) {
        let ReplicaParts { id, raft, machine, records, repair_guard, wal, reads } =
            replica.parts_for_peers();
        let served = ServedReplica {
            replica_id: id,
            raft,
            machine,
            fetcher: records.map(|records| RecordFetcher::new(shard_id, records)),
            repair_guard,
            wal,
            reads,
            outranked: Arc::default(),
            stopped: self.table.closed.child_token(),
        };
        let failover = FailoverWatch {
            table: self.table.clone(),
            shard_id,
            replica_id: id,
            raft: served.raft.clone(),
            wal: served.wal.clone(),
            reads: served.reads.clone(),
            fetcher: served.fetcher.clone(),
            repair_guard: served.repair_guard.clone(),
            handler: self.handler(),
            outranked: served.outranked.clone(),
        };
        tokio::spawn(failover.run(served.stopped.clone()));
        self.serve(shard_id, served);
    }

    /// Starts to answer messages for a bare openraft replica of a shard without records.
    pub fn serve_shard(
        &self,
        shard_id: u64,
        replica_id: ReplicaId,
        raft: Raft<TypeConfig, StateMachine>,
        machine: Arc<dyn Machine>,
        wal: Wal,
    ) {
        let stopped = self.table.closed.child_token();
        let (fetcher, repair_guard, outranked) = (None, Arc::default(), Arc::default());
        let served = ServedReplica {
            replica_id,
            raft,
            machine,
            fetcher,
            repair_guard,
            wal,
            reads: DiskReads::new(false),
            outranked,
            stopped,
        };
        self.serve(shard_id, served);
    }

    fn serve(&self, shard_id: u64, served: ServedReplica) {
        if let Some(before) = lock(&self.shards).insert(shard_id, served) {
            before.stopped.cancel();
        }
    }

    /// Stops answering messages for a shard. Drops those that openraft does not have yet.
    pub fn stop_shard(&self, shard_id: u64) {
        if let Some(served) = lock(&self.shards).remove(&shard_id) {
            served.stopped.cancel();
        }
    }

    /// Starts to send entries of a log whose replica does not run.
    pub fn hold_log(&self, shard_id: u64, log: HeldLog) {
        lock(&self.logs).insert(shard_id, log);
    }

    /// Stops to send entries of a log. The caller may then close it.
    pub fn release_log(&self, shard_id: u64) {
        lock(&self.logs).remove(&shard_id);
    }

    /// Returns the log of a shard whose replica does not run.
    pub fn held_log(&self, shard_id: u64) -> Option<HeldLog> {
        lock(&self.logs).get(&shard_id).cloned()
    }

    /// Stops a shard as [`Self::stop_shard`] does, and waits for writes beside its log.
    /// The caller may then close the log.
    pub async fn close_shard(&self, shard_id: u64) {
        let fetcher = self.served(shard_id).and_then(|served| served.fetcher);
        self.stop_shard(shard_id);
        if let Some(fetcher) = fetcher {
            fetcher.stop().await;
        }
    }

    /// Returns the progress of a replica that fetches missing records; `None` if it misses none.
    pub fn fetching(&self, shard_id: u64) -> Option<FetchProgress> {
        self.served(shard_id)?.fetcher?.status()
    }

    /// Discards fetched records of a replica that no longer needs them.
    pub async fn discard_stale_fetch(&self, shard_id: u64) {
        let Some(served) = self.served(shard_id) else { return };
        if let Some(fetcher) = &served.fetcher {
            fetcher.discard_if_stale(&served.raft).await;
        }
    }

    /// Fetches entries of the range from another replica of a shard, for a repair in place. Returns
    /// those that it has, from the front of the range.
    ///
    /// # Errors
    /// Why the replica has not sent them.
    pub async fn fetch_entries(
        &self,
        shard_id: u64,
        own: ReplicaId,
        from: ReplicaId,
        range: RangeInclusive<u64>,
    ) -> Result<Vec<helix_wal::Entry>, String> {
        let fetching = fetch_entries(&self.table, shard_id, own, from, range.clone());
        records::read_entries(fetching.await?, &range)
            .map_err(|why| format!("node {}: {why}", crate::raft::node_of(from)))
    }

    /// Fetches the placements of live entries above `after`, up to `upto`, from another replica.
    ///
    /// # Errors
    /// Why the replica has not sent them.
    pub async fn fetch_placements(
        &self,
        shard_id: u64,
        own: ReplicaId,
        from: ReplicaId,
        after: u64,
        upto: u64,
    ) -> Result<Vec<(u64, helix_wal::Placement)>, String> {
        let records = fetch_live(&self.table, shard_id, own, from, after, upto).await?;
        let placement = |live| {
            let live = records::read_live_entry(live).map_err(|error| error.to_string())?;
            Ok((live.id.index, live.placement))
        };
        records.entries.into_iter().map(placement).collect()
    }

    /// Waits until this node may copy, and counts nothing yet.
    pub async fn wait_to_copy(&self) {
        self.table.throttle.wait().await;
    }

    /// Takes copied bytes from the budget of this node.
    pub fn spend_copied(&self, bytes: u64) {
        self.table.throttle.spend(bytes);
    }

    /// Chooses the rate of copies until the next call, which the caller makes once a second.
    ///
    /// Takes the totals of two histograms since the start: times of appends by
    /// [`crate::metrics::BOUNDS_US`], and times of syncs by [`helix_wal::SYNC_BOUNDS_US`].
    pub fn steer_copies(&self, appends: &[u64], syncs: &[u64]) {
        let mut copy_rate = lock(&self.table.copy_rate);
        let rate = copy_rate.step(self.table.throttle.copied(), appends, syncs);
        self.table.throttle.set_rate(rate);
    }

    /// Changes the largest rate of copies, in bytes per second.
    pub fn set_copy_rate_max(&self, rate_max: u64) {
        let mut copy_rate = lock(&self.table.copy_rate);
        let rate = copy_rate.set_max(rate_max);
        self.table.throttle.set_rate(rate);
    }

    /// Returns the rate of copies and the bytes copied.
    pub fn copy_pace(&self) -> CopyPace {
        lock(&self.table.copy_rate).pace(self.table.throttle.copied())
    }

    /// Returns the connection state of each peer, ordered by node id.
    pub fn peers(&self) -> Vec<PeerStatus> {
        self.table.all().values().map(|peer| peer.status()).collect()
    }

    /// Returns the dialed addresses, by node id.
    pub fn addresses(&self) -> BTreeMap<u64, String> {
        self.table.all().iter().map(|(id, peer)| (*id, peer.address.clone())).collect()
    }

    /// Returns `true` while every lane to a node is open.
    pub fn is_connected(&self, node: u64) -> bool {
        self.table.peer(node).is_some_and(|peer| peer.status().connected)
    }

    /// Returns the cluster of this node.
    pub fn cluster(&self) -> Option<u128> {
        self.table.local.cluster()
    }

    /// Returns the nodes to which every lane is open.
    pub fn connected(&self) -> Vec<u64> {
        let peers = self.peers().into_iter();
        peers.filter(|peer| peer.connected).map(|peer| peer.node_id).collect()
    }

    /// Returns a counter of changes: a peer connected or disconnected, or its last error changed.
    pub fn watch_peers(&self) -> watch::Receiver<u64> {
        self.table.local.watch_peers()
    }

    /// Ends every connection and task, and drops the shards and the handler.
    pub fn close(&self) {
        self.table.closed.cancel();
        lock(&self.shards).clear();
        lock(&self.logs).clear();
        lock(&self.handler).take();
    }

    pub(super) fn served(&self, shard_id: u64) -> Option<ServedReplica> {
        lock(&self.shards).get(&shard_id).cloned()
    }

    pub(super) fn handler(&self) -> Option<Arc<dyn PeerHandler>> {
        lock(&self.handler).clone()
    }

    /// Registers a new incoming stream, and ends the older one of its lane.
    /// The returned token ends the new stream.
    pub(super) fn admit(
        &self,
        from: u64,
        lane: PeerLane,
        until: &CancellationToken,
    ) -> CancellationToken {
        let token = until.child_token();
        lock(&self.refusals).remove(&from);
        if let Some(before) = lock(&self.inbound).insert((from, lane), token.clone()) {
            before.cancel();
        }
        token
    }

    pub(super) fn record_caller(&self, caller: Option<(u64, u128)>) {
        let mut known = lock(&self.caller);
        *known = caller.or(*known);
    }

    /// Returns the last peer that dialed this node while it was in no cluster, and its cluster.
    pub fn caller(&self) -> Option<(u64, u128)> {
        *lock(&self.caller)
    }

    /// Logs a refusal unless it repeats the last one.
    pub(super) fn log_refusal(&self, from: u64, why: &str) {
        let from = if self.table.peer(from).is_some() { from } else { 0 };
        let before = lock(&self.refusals).insert(from, why.to_owned());
        if before.as_deref() != Some(why) {
            if wire::is_of_start_or_stop(why) {
                tracing::info!(node = from, "refused a peer's connection: {why}");
            } else {
                tracing::warn!(node = from, "refused a peer's connection: {why}");
            }
        }
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.table.closed.cancel();
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("Hub");
        debug.field("node_id", &self.table.local.node_id).field("peers", &self.peers()).finish()
    }
}
