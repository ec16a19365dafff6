//! All figures of a node on one page: what it has counted, and what it knows of itself anyway.

use std::sync::Arc;

use helix_wal::SYNC_BOUNDS_US;
use tokio::time::Instant;

use crate::metrics::{Name, Page};
use crate::node::{Node, StorageKind};
use crate::process;
use crate::shard::Shard;

/// `node` is there once it is open.
pub(super) async fn page(node: Option<&Arc<Node>>, started: Instant, unready: Vec<String>) -> Page {
    let mut page = Page::default();
    page.put(Name::BuildInfo, &[env!("CARGO_PKG_VERSION")], 1);
    page.put(Name::Ready, &[], u64::from(unready.is_empty()));
    page.put_f64(Name::Uptime, &[], started.elapsed().as_secs_f64());
    page.put_f64(Name::CpuTime, &[], process::cpu_time_us() as f64 / 1e6);
    page.put(Name::Memory, &[], process::rss_bytes());
    let Some(node) = node else { return page };
    node.metrics().write(&mut page);
    let mut disk = Disk::default();
    own_shard(&mut page, node, &mut disk);
    for shard in node.shards() {
        // A shard with thousands of partitions takes a while: others get their turn in between.
        tokio::task::yield_now().await;
        data_shard(&mut page, &shard, &mut disk).await;
    }
    for (shard, _) in node.withheld() {
        page.put(Name::ShardWithheld, &[&shard.to_string()], 1);
    }
    for (shard, restarts) in node.restarts() {
        let (in_repair, stopped) = (node.in_repair(), node.stopped());
        let among = |shards: &[(u64, String)]| u64::from(shards.iter().any(|it| it.0 == shard));
        let id = &*shard.to_string();
        page.put(Name::ShardInRepair, &[id], among(&in_repair));
        page.put(Name::ShardStopped, &[id], among(&stopped));
        page.put(Name::ShardRestarts, &[id], restarts);
    }
    if node.info().storage == StorageKind::Durable {
        page.put(Name::DiskFree, &[], disk.free_bytes);
        page.put(Name::DiskUsed, &[], disk.used_bytes);
    }
    peers(&mut page, node);
    clients(&mut page, node);
    page
}

/// All logs of a node are on one disk.
#[derive(Default)]
struct Disk {
    free_bytes: u64,
    used_bytes: u64,
}

impl Disk {
    fn add(&mut self, wal: &helix_wal::Stats) {
        self.free_bytes = wal.free_bytes;
        self.used_bytes += wal.held_bytes + wal.ready_segments * wal.segment_bytes;
    }
}

/// Shard 0, the cluster's own, which has no partitions.
fn own_shard(page: &mut Page, node: &Node, disk: &mut Disk) {
    let cluster = node.cluster();
    let replica = cluster.replica();
    let status = replica.status();
    let shard = "0";
    page.put(Name::ShardDamage, &[shard], replica.damage().len() as u64);
    page.put(Name::ShardLeaderChanges, &[shard], replica.leader_changes());
    page.put(Name::WalWritable, &[shard], u64::from(cluster.unwell().is_none()));
    let unsynced = replica.wal().unsynced_for().unwrap_or_default();
    page.put_f64(Name::WalUnsynced, &[shard], unsynced.as_secs_f64());
    page.put(Name::ShardLeader, &[shard], u64::from(status.leads));
    page.put(Name::ShardLed, &[shard], u64::from(cluster.leader_hint().is_some()));
    page.put(Name::ShardTerm, &[shard], status.term);
    page.put(Name::ShardLastIndex, &[shard], status.last_index);
    page.put(Name::ShardSyncedIndex, &[shard], status.synced);
    page.put(Name::ShardCommittedIndex, &[shard], status.committed);
    page.put(Name::ShardAppliedIndex, &[shard], status.applied);
    page.put(Name::ShardPurgedIndex, &[shard], status.purged);
    wal(page, shard, &status.wal);
    disk.add(&status.wal);
}

async fn data_shard(page: &mut Page, shard: &Shard, disk: &mut Disk) {
    let status = shard.status();
    let id = &*shard.id().to_string();
    page.put(Name::ShardLeader, &[id], u64::from(status.leader));
    page.put(Name::ShardLed, &[id], u64::from(shard.leader_hint().is_some()));
    page.put(Name::ShardWithheld, &[id], 0);
    page.put(Name::ShardDamage, &[id], shard.damage().len() as u64);
    page.put(Name::ShardTerm, &[id], status.term);
    page.put(Name::ShardLeaderChanges, &[id], shard.replica().leader_changes());
    page.put(Name::ShardLastIndex, &[id], status.last_index);
    page.put(Name::ShardSyncedIndex, &[id], status.synced);
    page.put(Name::ShardCommittedIndex, &[id], status.committed);
    page.put(Name::ShardAppliedIndex, &[id], status.applied);
    page.put(Name::ShardPurgedIndex, &[id], status.purged);
    for (node, lag) in shard.lags() {
        page.put(Name::ShardLag, &[id, &node.to_string()], lag);
    }
    let left = status.fetching.map_or(0, |it| it.bytes_total.saturating_sub(it.bytes_done));
    page.put(Name::ShardFetchLeft, &[id], left);
    let (high_watermarks, log_starts) = shard.read_state(|state| {
        state.partitions().fold((0_u64, 0_u64), |(high, start), partition| {
            let watermarks = partition.watermarks();
            (
                high.saturating_add(watermarks.high_watermark),
                start.saturating_add(watermarks.log_start),
            )
        })
    });
    page.put(Name::ShardPartitions, &[id], status.partition_count.into());
    page.put(Name::ShardHighWatermarks, &[id], high_watermarks);
    page.put(Name::ShardLogStarts, &[id], log_starts);
    page.put(Name::ShardLiveBytes, &[id], shard.live_bytes().await);
    let (in_flight, in_flight_max) = shard.flow().bytes();
    page.put(Name::ShardInFlight, &[id], in_flight as u64);
    page.put(Name::ShardInFlightMax, &[id], in_flight_max as u64);
    page.put(Name::ShardInFlightLargeMax, &[id], shard.flow().large_bytes_max() as u64);
    page.put(Name::WalWritable, &[id], u64::from(shard.unwell().is_none()));
    let unsynced = shard.unsynced_for().unwrap_or_default();
    page.put_f64(Name::WalUnsynced, &[id], unsynced.as_secs_f64());
    wal(page, id, &status.wal);
    disk.add(&status.wal);
}

fn wal(page: &mut Page, shard: &str, wal: &helix_wal::Stats) {
    let shard = &[shard];
    page.put(Name::WalSegments, shard, wal.segments);
    page.put(Name::WalHeldBytes, shard, wal.held_bytes);
    page.put(Name::WalReadySegments, shard, wal.ready_segments);
    page.put(Name::WalFreedSegments, shard, wal.freed_segments);
    page.put(Name::WalFreedBytes, shard, wal.freed_bytes);
    page.put(Name::WalColdSegments, shard, wal.cold_segments);
    page.put(Name::WalRewrittenBytes, shard, wal.rewritten_bytes);
    page.put(Name::WalQueuedRequests, shard, wal.queued_requests);
    page.put(Name::WalQueuedBytes, shard, wal.queued_bytes);
    page.put(Name::WalGroups, shard, wal.groups);
    page.put(Name::WalGroupBytes, shard, wal.group_bytes);
    let bounds = SYNC_BOUNDS_US.into_iter().map(u64::from);
    page.put_classes(Name::WalSyncTimes, shard, bounds, &wal.sync_counts, wal.sync_sum_us);
}

/// What clients make the node hold, and which limits they met.
fn clients(page: &mut Page, node: &Node) {
    let load = node.load();
    page.put(Name::ClientConnections, &[], load.connection_count() as u64);
    page.put(Name::RequestBytes, &[], load.received_bytes() as u64);
    page.put(Name::AnswerBytes, &[], load.answer_bytes() as u64);
    for (limit, count) in load.events().counts() {
        page.put(Name::LimitEvents, &[limit], count);
    }
}

fn peers(page: &mut Page, node: &Node) {
    for peer in node.peers() {
        let id = &*peer.node_id.to_string();
        page.put(Name::PeerConnected, &[id], u64::from(peer.connected));
        page.put(Name::PeerSentBytes, &[id], peer.sent_bytes);
        page.put(Name::PeerReceivedBytes, &[id], peer.received_bytes);
    }
}
