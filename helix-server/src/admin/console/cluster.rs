//! The first page: health with its reasons, nodes, shards, and the load of this node.
//! Two calls to each node, and one for the routes.

use std::collections::BTreeMap;
use std::time::Duration;

use askama::Template;
use futures_util::future::join_all;
use helix_proto::log::v1::{
    GetHealthRequest, GetHealthResponse, GetMetadataRequest, GetNodeStatusRequest,
    GetNodeStatusResponse, Metadata, Node, ShardStatus,
};
use helix_proto::units;
use hyper::{Response, StatusCode};
use tonic::transport::Channel;

use super::PageRequest;
use super::caller::{self, FailedCall};
use super::chart::LoadChart;
use super::health::{HealthLine, MergedHealth};
use super::history::{LoadSample, SAMPLE_INTERVAL};
use super::page::{AdminBody, PageFailure, PageFrame, duration, html, shown};

/// Time for the report of another node; without it the page shows the node as silent.
const REPORT_WAIT_MAX: Duration = Duration::from_secs(2);

/// A name that no topic has: the routes without topics.
const NO_TOPIC: &str = "";

#[derive(Template)]
#[template(path = "cluster.html")]
struct ClusterPage {
    frame: PageFrame,
    cluster_id: String,
    verdict: String,
    is_healthy: bool,
    issues: Vec<HealthLine>,
    topics: String,
    partitions: String,
    nodes: Vec<NodeRow>,
    shards: Vec<ShardRow>,
    charts: Vec<LoadChart>,
    sample_seconds: u64,
}

struct NodeRow {
    node_id: u64,
    endpoint: String,
    is_self: bool,
    is_draining: bool,
    is_leaving: bool,
    /// Reason why there is no report; empty with one.
    silent: String,
    version: String,
    leads: usize,
    storage: String,
    free: String,
    sync: String,
    memory: String,
    uptime: String,
}

struct ShardRow {
    shard_id: u32,
    /// 0 without a leader.
    leader: u64,
    /// Replicas that could lead instead.
    others: Vec<u64>,
    replicas: String,
    fault: String,
    partitions: String,
    live: String,
    held: String,
    /// Entries that the slowest replica lacks.
    behind: String,
}

/// The reports of one node.
struct NodeReport {
    health: GetHealthResponse,
    status: GetNodeStatusResponse,
}

/// Shows the page.
pub(super) async fn show(page: &PageRequest) -> Result<Response<AdminBody>, PageFailure> {
    let caller = &page.caller;
    let topics = vec![NO_TOPIC.to_owned()];
    let request = caller.request(GetMetadataRequest { topics });
    let metadata = caller::cluster(caller.local()).get_metadata(request).await?.into_inner();
    let own_id = metadata.node_id;
    let metadata = metadata.metadata.unwrap_or_default();
    let reports = join_all(metadata.nodes.iter().map(|node| report(page, node, own_id))).await;
    let reports: BTreeMap<u64, Result<NodeReport, String>> =
        metadata.nodes.iter().map(|node| node.node_id).zip(reports).collect();

    let mut merged = MergedHealth::default();
    for (node_id, report) in &reports {
        let issues = report.iter().flat_map(|report| &report.health.issues);
        issues.for_each(|issue| merged.add(*node_id, issue.clone()));
    }
    // Afterwards, since other nodes say more about a node that is down.
    for (node_id, report) in &reports {
        report.as_ref().err().into_iter().for_each(|why| merged.add_silent(*node_id, why));
    }
    let issues = merged.lines();
    let status_of = |node_id: u64| reports.get(&node_id)?.as_ref().ok().map(|it| &it.status);
    let own = status_of(own_id);
    let count = |number: Option<u64>| number.map_or_else(String::new, units::count);
    let shown_page = ClusterPage {
        frame: PageFrame { refresh_seconds: 5, ..page.frame("Cluster", "cluster") },
        cluster_id: shown(&metadata.cluster_id),
        verdict: verdict(&reports, issues.len()),
        is_healthy: issues.is_empty() && !reports.is_empty(),
        issues,
        topics: count(own.and_then(|status| status.topic_count)),
        partitions: count(own.and_then(|status| status.partition_count)),
        nodes: metadata.nodes.iter().map(|it| node_row(it, own_id, &metadata, &reports)).collect(),
        shards: shard_rows(&metadata, &reports),
        charts: charts(&page.console.history.samples()),
        sample_seconds: SAMPLE_INTERVAL.as_secs(),
    };
    html(StatusCode::OK, &shown_page)
}

/// Requests the reports of a node.
async fn report(page: &PageRequest, node: &Node, own_id: u64) -> Result<NodeReport, String> {
    let channel = match node.node_id == own_id {
        true => page.caller.local(),
        false => page.caller.other(&node.endpoint)?,
    };
    let reported = tokio::time::timeout(REPORT_WAIT_MAX, request_report(page, channel)).await;
    match reported {
        Ok(Ok(report)) => Ok(report),
        Ok(Err(failed)) => Err(shown(&failed.message)),
        Err(_) => Err(format!("it has not answered for {}", units::duration(REPORT_WAIT_MAX))),
    }
}

async fn request_report(page: &PageRequest, channel: Channel) -> Result<NodeReport, FailedCall> {
    let mut cluster = caller::cluster(channel);
    let health = cluster.get_health(page.caller.request(GetHealthRequest::default())).await?;
    let status = cluster.get_node_status(page.caller.request(GetNodeStatusRequest {})).await?;
    Ok(NodeReport { health: health.into_inner(), status: status.into_inner() })
}

fn verdict(reports: &BTreeMap<u64, Result<NodeReport, String>>, issues: usize) -> String {
    let count = reports.len();
    let answering = reports.values().filter(|report| report.is_ok()).count();
    match issues {
        0 if count == 1 => "healthy: the node answers and has no issues".to_owned(),
        0 => format!("healthy: all {count} nodes answer and have no issues"),
        issues => {
            let issues = units::counted(issues as u64, "issue");
            format!("NOT healthy: {issues}; {answering} of {count} nodes answer")
        }
    }
}

fn node_row(
    node: &Node,
    own_id: u64,
    metadata: &Metadata,
    reports: &BTreeMap<u64, Result<NodeReport, String>>,
) -> NodeRow {
    let is_leader = |leader: u64| leader == node.node_id;
    let leaders = metadata.shards.iter().filter_map(|shard| shard.leader.as_ref());
    let leads = leaders.filter(|leader| is_leader(leader.node_id)).count();
    let row = NodeRow {
        node_id: node.node_id,
        endpoint: shown(&node.endpoint),
        is_self: node.node_id == own_id,
        is_draining: node.draining,
        is_leaving: node.leaving,
        silent: String::new(),
        version: shown(&node.version),
        leads,
        storage: String::new(),
        free: String::new(),
        sync: String::new(),
        memory: String::new(),
        uptime: String::new(),
    };
    let status = match reports.get(&node.node_id) {
        Some(Ok(report)) => &report.status,
        Some(Err(why)) => return NodeRow { silent: why.clone(), ..row },
        None => return row,
    };
    let sync = duration(status.sync_p50).zip(duration(status.sync_p99));
    let is_disk = status.storage == "disk";
    NodeRow {
        version: shown(&status.version),
        storage: shown(&status.storage),
        free: if is_disk { units::bytes(status.free_bytes) } else { String::new() },
        sync: sync.map_or_else(String::new, |(p50, p99)| {
            format!("{} / {}", units::measured(p50), units::measured(p99))
        }),
        memory: units::bytes(status.rss_bytes),
        uptime: duration(status.uptime).map_or_else(String::new, |uptime| {
            units::duration(Duration::from_secs(uptime.as_secs()))
        }),
        ..row
    }
}

fn shard_rows(
    metadata: &Metadata,
    reports: &BTreeMap<u64, Result<NodeReport, String>>,
) -> Vec<ShardRow> {
    let statuses = |shard_id: u32| {
        let reported = reports.iter().filter_map(|(id, report)| Some((*id, report.as_ref().ok()?)));
        reported.filter_map(move |(id, report)| {
            let of_shard = report.status.shards.iter().find(|it| it.shard_id == shard_id);
            Some((id, of_shard?))
        })
    };
    let row = |route: &helix_proto::log::v1::ShardRoute| {
        let leader = route.leader.as_ref().map_or(0, |leader| leader.node_id);
        let known: BTreeMap<u64, &ShardStatus> = statuses(route.shard_id).collect();
        let best = known.get(&leader).or_else(|| known.values().next());
        let newest = known.values().map(|status| status.last_index).max().unwrap_or(0);
        let oldest = known.values().map(|status| status.synced_index).min().unwrap_or(0);
        let replicas: Vec<String> = route.replicas.iter().map(u64::to_string).collect();
        let has_partitions = route.shard_id > 0;
        let text = |format: &dyn Fn(&ShardStatus) -> String| match best {
            Some(status) if has_partitions => format(status),
            _ => String::new(),
        };
        ShardRow {
            shard_id: route.shard_id,
            leader,
            others: route.replicas.iter().copied().filter(|id| *id != leader).collect(),
            replicas: replicas.join(", "),
            fault: shown(&route.fault),
            partitions: text(&|status| units::count(status.partition_count.into())),
            live: text(&|status| units::bytes(status.live_bytes)),
            held: text(&|status| units::bytes(status.held_bytes)),
            behind: units::count(newest.saturating_sub(oldest)),
        }
    };
    metadata.shards.iter().map(row).collect()
}

fn charts(samples: &[LoadSample]) -> Vec<LoadChart> {
    let values = |of: fn(&LoadSample) -> f64| samples.iter().map(of).collect::<Vec<_>>();
    let bytes = |value: f64| format!("{}/s", units::bytes(value as u64));
    vec![
        LoadChart::new("Appended", &values(|it| it.appended_bytes), bytes),
        LoadChart::new("Records appended", &values(|it| it.appended_records), |value| {
            format!("{}/s", units::count(value.round() as u64))
        }),
        LoadChart::new("Read", &values(|it| it.read_bytes), bytes),
        LoadChart::new("Append, 99 % within", &values(|it| it.append_p99_ms), |value| {
            match value > 0.0 {
                true => units::measured(Duration::from_micros((value * 1e3) as u64)),
                false => "no appends".to_owned(),
            }
        }),
        LoadChart::new("CPUs", &values(|it| it.cpus), |value| format!("{value:.2}")),
        LoadChart::new("Memory", &values(|it| it.memory_bytes), |value| units::bytes(value as u64)),
    ]
}
