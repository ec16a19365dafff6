//! Builds a node's Prometheus page: its counters, and the state of its parts.

use std::collections::BTreeMap;

use helix_wal::SYNC_BOUNDS_US;
use tokio::time::Instant;

use super::{ServedNode, group_metrics};
use crate::call::ClientLoad;
use crate::clock::Clock;
use crate::metrics::{MetricName, MetricsPage};
use crate::node::{Node, NodeTls, StorageKind};
use crate::process;
use crate::shard::Shard;
use crate::stderr;

/// Builds the page; without `served` the node is not open yet.
pub(super) async fn page(
    served: Option<&ServedNode>,
    started: Instant,
    unready: Vec<String>,
) -> MetricsPage {
    let mut page = MetricsPage::default();
    page.put(MetricName::BuildInfo, &[env!("CARGO_PKG_VERSION")], 1);
    page.put(MetricName::Ready, &[], u64::from(unready.is_empty()));
    page.put_f64(MetricName::Uptime, &[], started.elapsed().as_secs_f64());
    page.put_f64(MetricName::CpuTime, &[], process::cpu_time_us() as f64 / 1e6);
    page.put(MetricName::Memory, &[], process::rss_bytes());
    page.put(MetricName::DroppedLogLines, &[], stderr::dropped_lines());
    let Some(ServedNode { node, load }) = served else { return page };
    node.metrics().write(&mut page);
    let cluster = node.cluster();
    page.put(MetricName::ProtocolVersion, &[], u64::from(cluster.protocol()));
    page.put(MetricName::NewestProtocolVersion, &[], u64::from(cluster.newest_protocol()));
    let traces = node.tracer().map(|tracer| tracer.counts());
    let traces = traces.map_or((0, 0), |it| (it.exported.get(), it.dropped.get()));
    page.put(MetricName::TracesExported, &[], traces.0);
    page.put(MetricName::TracesDropped, &[], traces.1);
    let mut disk = Disk::default();
    own_shard(&mut page, node, &mut disk);
    for shard in node.shards() {
        // Lets other tasks run: a shard with thousands of partitions takes a while.
        tokio::task::yield_now().await;
        data_shard(&mut page, &shard, &mut disk).await;
        group_metrics::groups(&mut page, node, &shard).await;
    }
    for (shard, _) in node.damaged_shards() {
        page.put(MetricName::ShardWithheld, &[&shard.to_string()], 1);
    }
    for (shard, restarts) in node.restarts() {
        let (in_repair, stopped) = (node.in_repair(), node.stopped());
        let is_in = |shards: &[(u64, String)]| u64::from(shards.iter().any(|it| it.0 == shard));
        let id = &*shard.to_string();
        page.put(MetricName::ShardInRepair, &[id], is_in(&in_repair));
        page.put(MetricName::ShardStopped, &[id], is_in(&stopped));
        page.put(MetricName::ShardRestarts, &[id], restarts);
    }
    for (shard, repaired) in node.repaired_segments() {
        page.put(MetricName::ShardRepaired, &[&shard.to_string()], repaired);
    }
    if node.info().storage == StorageKind::Durable {
        page.put(MetricName::DiskFree, &[], disk.free_bytes);
        page.put(MetricName::DiskUsed, &[], disk.used_bytes);
    }
    for offset in node.clock().offsets() {
        let seconds = offset.offset_us as f64 / 1e6;
        page.put_f64(MetricName::ClockOffset, &[&offset.node_id.to_string()], seconds);
    }
    let now_us = node.clock().now_us();
    for shard in node.shards() {
        let ahead = shard.ahead_of(now_us).map_or(0.0, |it| it.ahead.as_secs_f64());
        page.put_f64(MetricName::AppendTimeAhead, &[&shard.id().to_string()], ahead);
    }
    page.put(MetricName::RetentionHeld, &[], u64::from(node.clock().is_held()));
    peers(&mut page, node);
    let pace = node.copy_pace();
    page.put(MetricName::CopyRate, &[], pace.rate);
    page.put(MetricName::CopiedBytes, &[], pace.copied_bytes);
    let usual = pace.usual_append.unwrap_or_default();
    page.put_f64(MetricName::CopyUsualAppend, &[], usual.as_secs_f64());
    if let Some(own) = node.tls() {
        tls(&mut page, own);
    }
    if let Some(status) = node.jwt().map(|verifier| verifier.status()) {
        page.put(MetricName::JwksReloads, &["succeeded"], status.succeeded);
        page.put(MetricName::JwksReloads, &["failed"], status.failed);
        page.put(MetricName::JwksReloadFailed, &[], u64::from(status.error.is_some()));
    }
    clients(&mut page, load);
    page
}

/// Usage of the disk, which all logs of a node share.
#[derive(Default)]
struct Disk {
    free_bytes: u64,
    used_bytes: u64,
}

impl Disk {
    fn add(&mut self, wal: &helix_wal::WalStats) {
        self.free_bytes = wal.free_bytes;
        self.used_bytes += wal.held_bytes + wal.ready_segments * wal.segment_bytes;
    }
}

/// Writes the metrics of shard 0, which has no partitions.
fn own_shard(page: &mut MetricsPage, node: &Node, disk: &mut Disk) {
    let cluster = node.cluster();
    let replica = cluster.replica();
    let status = replica.status();
    let shard = "0";
    page.put(MetricName::ShardDamage, &[shard], replica.damage().len() as u64);
    page.put(MetricName::ShardLeaderChanges, &[shard], replica.leader_changes());
    page.put(MetricName::WalWritable, &[shard], u64::from(cluster.write_error().is_none()));
    let unsynced = replica.unsynced_for().unwrap_or_default();
    page.put_f64(MetricName::WalUnsynced, &[shard], unsynced.as_secs_f64());
    page.put(MetricName::ShardLeader, &[shard], u64::from(status.is_leader));
    page.put(MetricName::ShardHasLeader, &[shard], u64::from(cluster.leader_hint().is_some()));
    page.put(MetricName::ShardTerm, &[shard], status.term);
    page.put(MetricName::ShardLastIndex, &[shard], status.last_index);
    page.put(MetricName::ShardSyncedIndex, &[shard], status.synced);
    page.put(MetricName::ShardCommittedIndex, &[shard], status.committed);
    page.put(MetricName::ShardAppliedIndex, &[shard], status.applied);
    page.put(MetricName::ShardPurgedIndex, &[shard], status.purged);
    wal(page, shard, &status.wal);
    disk.add(&status.wal);
}

async fn data_shard(page: &mut MetricsPage, shard: &Shard, disk: &mut Disk) {
    let status = shard.status();
    let id = &*shard.id().to_string();
    page.put(MetricName::ShardLeader, &[id], u64::from(status.leader));
    page.put(MetricName::ShardHasLeader, &[id], u64::from(shard.leader_hint().is_some()));
    page.put(MetricName::ShardWithheld, &[id], 0);
    page.put(MetricName::ShardDamage, &[id], shard.damage().len() as u64);
    page.put(MetricName::ShardTerm, &[id], status.term);
    page.put(MetricName::ShardLeaderChanges, &[id], shard.replica().leader_changes());
    page.put(MetricName::ShardLastIndex, &[id], status.last_index);
    page.put(MetricName::ShardSyncedIndex, &[id], status.synced);
    page.put(MetricName::ShardCommittedIndex, &[id], status.committed);
    page.put(MetricName::ShardAppliedIndex, &[id], status.applied);
    page.put(MetricName::ShardPurgedIndex, &[id], status.purged);
    for (node, lag) in shard.lags() {
        page.put(MetricName::ShardLag, &[id, &node.to_string()], lag);
    }
    let left = status.fetching.map_or(0, |it| it.bytes_total.saturating_sub(it.bytes_done));
    page.put(MetricName::ShardFetchLeft, &[id], left);
    let (high_watermarks, log_starts) = shard.read_state(|state| {
        state.partitions().fold((0_u64, 0_u64), |(high, start), partition| {
            let watermarks = partition.watermarks();
            (
                high.saturating_add(watermarks.high_watermark),
                start.saturating_add(watermarks.log_start),
            )
        })
    });
    page.put(MetricName::ShardPartitions, &[id], status.partition_count.into());
    page.put(MetricName::ShardHighWatermarks, &[id], high_watermarks);
    page.put(MetricName::ShardLogStarts, &[id], log_starts);
    page.put(MetricName::ShardLiveBytes, &[id], shard.live_bytes().await);
    let (in_flight, in_flight_max) = shard.flow().bytes();
    page.put(MetricName::ShardInFlight, &[id], in_flight as u64);
    page.put(MetricName::ShardInFlightMax, &[id], in_flight_max as u64);
    page.put(MetricName::ShardInFlightLargeMax, &[id], shard.flow().large_bytes_max() as u64);
    page.put(MetricName::WalWritable, &[id], u64::from(shard.write_error().is_none()));
    let unsynced = shard.unsynced_for().unwrap_or_default();
    page.put_f64(MetricName::WalUnsynced, &[id], unsynced.as_secs_f64());
    let cleaner = shard.cleaner_stats();
    page.put(MetricName::CleanerPasses, &[id], cleaner.passes);
    page.put(MetricName::CleanerReadBytes, &[id], cleaner.read_bytes);
    page.put(MetricName::CleanerBehind, &[id], cleaner.behind_partitions);
    page.put(MetricName::CleanerUncleanable, &[id], cleaner.uncleanable_partitions);
    page.put(MetricName::CleanerBlocked, &[id], cleaner.blocked_partitions);
    let tables = shard.table_sizes().await;
    page.put(MetricName::CleanerTableBytes, &[id], tables.bytes);
    page.put(MetricName::CleanerDirtyBytes, &[id], tables.dirty_bytes);
    page.put_f64(MetricName::CleanerLag, &[id], tables.lag.as_secs_f64());
    wal(page, id, &status.wal);
    disk.add(&status.wal);
}

fn wal(page: &mut MetricsPage, shard: &str, wal: &helix_wal::WalStats) {
    for (kind, count) in [("zeroed", wal.zeroed_segments), ("allocated", wal.allocated_segments)] {
        page.put(MetricName::WalPreparedSegments, &[shard, kind], count);
    }
    let shard = &[shard];
    page.put(MetricName::WalZeroedBytes, shard, wal.zeroed_bytes);
    page.put(MetricName::WalSegments, shard, wal.segments);
    page.put(MetricName::WalHeldBytes, shard, wal.held_bytes);
    page.put(MetricName::WalReadySegments, shard, wal.ready_segments);
    page.put(MetricName::WalFreedSegments, shard, wal.freed_segments);
    page.put(MetricName::WalFreedBytes, shard, wal.freed_bytes);
    page.put(MetricName::WalColdSegments, shard, wal.cold_segments);
    page.put(MetricName::WalRewrittenBytes, shard, wal.rewritten_bytes);
    page.put(MetricName::WalQueuedRequests, shard, wal.queued_requests);
    page.put(MetricName::WalQueuedBytes, shard, wal.queued_bytes);
    page.put(MetricName::WalGroups, shard, wal.groups);
    page.put(MetricName::WalGroupBytes, shard, wal.group_bytes);
    let bounds = SYNC_BOUNDS_US.into_iter().map(u64::from);
    page.put_buckets(MetricName::WalSyncTimes, shard, bounds, &wal.sync_counts, wal.sync_sum_us);
}

/// Writes what clients make the node hold, and which limits they met.
fn clients(page: &mut MetricsPage, load: &ClientLoad) {
    page.put(MetricName::ClientConnections, &[], load.connection_count() as u64);
    page.put(MetricName::RequestBytes, &[], load.request_bytes() as u64);
    page.put(MetricName::ResponseBytes, &[], load.response_bytes() as u64);
    for (limit, count) in load.events().counts() {
        page.put(MetricName::LimitEvents, &[limit], count);
    }
}

fn tls(page: &mut MetricsPage, tls: &NodeTls) {
    let set = tls.store.current();
    // A CA may be in two files.
    let certificates: BTreeMap<_, _> = set
        .certificates()
        .iter()
        .map(|info| ((info.kind.as_str(), &*info.serial), info.seconds_left()))
        .collect();
    for ((kind, serial), left) in certificates {
        page.put_f64(MetricName::CertificateExpiry, &[kind, serial], left as f64);
    }
    let status = tls.store.status();
    page.put(MetricName::CertificateReloads, &["succeeded"], status.succeeded);
    page.put(MetricName::CertificateReloads, &["failed"], status.failed);
    page.put_f64(MetricName::CertificateReloadTime, &[], status.last_at as f64);
    page.put(MetricName::CertificateReloadFailed, &[], u64::from(status.error.is_some()));
    for acceptor in &tls.acceptors {
        for (result, count) in acceptor.counts() {
            page.put(MetricName::TlsHandshakes, &[acceptor.port(), result], count);
        }
    }
}

fn peers(page: &mut MetricsPage, node: &Node) {
    for peer in node.peers() {
        let id = &*peer.node_id.to_string();
        page.put(MetricName::PeerConnected, &[id], u64::from(peer.connected));
        page.put(MetricName::PeerSentBytes, &[id], peer.sent_bytes);
        page.put(MetricName::PeerReceivedBytes, &[id], peer.received_bytes);
    }
}
