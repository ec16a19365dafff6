//! Resource use of the nodes during the measured phase, from their status before and after it.
//!
//! Values that a node does not report are `None`, not zero.

use std::time::Duration;

use helix_proto::log::v1::GetNodeStatusResponse;
use schemars::JsonSchema;
use serde::Serialize;

use crate::disk::DiskInfo;
use crate::meter::LoadMeter;
use crate::target::{NodeObservation, Observation};

/// Tolerance for a reported uptime that lags behind this host's clock.
const UPTIME_LAG_MAX: Duration = Duration::from_secs(1);

/// CPU use during the measured phase.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct CpuUsage {
    /// Average number of cores that this process kept busy.
    pub(crate) client_cores: f64,
    /// `None` if no request succeeded.
    pub(crate) client_us_per_request: Option<f64>,
    /// Sum over all nodes; `None` if no node could be measured.
    pub(crate) server_cores: Option<f64>,
    pub(crate) server_us_per_request: Option<f64>,
}

/// Status of one node after the run, and its use of resources.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct NodeUsage {
    pub(crate) address: String,
    pub(crate) version: String,
    pub(crate) storage: String,
    pub(crate) durability: String,
    pub(crate) sync_p50_us: Option<f64>,
    pub(crate) sync_p99_us: Option<f64>,
    /// Disk of the data directory; `None` in memory, and if the node runs on another host.
    pub(crate) disk: Option<DiskInfo>,
    /// `None` if the node did not answer before the run or was restarted during it.
    pub(crate) cpu_seconds: Option<f64>,
    /// `None` if the node does not report it.
    pub(crate) rss_bytes: Option<u64>,
    pub(crate) shards: usize,
}

impl CpuUsage {
    pub(crate) fn new(
        before: &Observation,
        after: &Observation,
        nodes: &[NodeUsage],
        meter: &LoadMeter,
    ) -> Self {
        let seconds = (after.at - before.at).as_secs_f64().max(1e-9);
        let client = after.cpu.saturating_sub(before.cpu).as_secs_f64();
        let server = nodes.iter().filter_map(|node| node.cpu_seconds).reduce(|sum, one| sum + one);
        let per_request =
            |used: f64| (meter.requests > 0).then(|| used * 1e6 / meter.requests as f64);
        Self {
            client_cores: client / seconds,
            client_us_per_request: per_request(client),
            server_cores: server.map(|used| used / seconds),
            server_us_per_request: server.and_then(per_request),
        }
    }
}

/// Returns the resident memory of all nodes together; `None` if no node reports it.
pub(crate) fn rss_bytes(nodes: &[NodeUsage]) -> Option<u64> {
    nodes.iter().filter_map(|node| node.rss_bytes).reduce(|sum, one| sum + one)
}

/// Combines the observations before and after a run.
pub(crate) fn nodes(before: &Observation, after: &Observation) -> Vec<NodeUsage> {
    let node = |seen: &NodeObservation| {
        let NodeObservation { address, status, .. } = seen;
        let earlier = before.nodes.iter().find(|earlier| earlier.address == *address);
        NodeUsage {
            address: address.clone(),
            version: status.version.clone(),
            storage: status.storage.clone(),
            durability: status.durability.clone(),
            sync_p50_us: status.sync_p50.as_ref().map(micros),
            sync_p99_us: status.sync_p99.as_ref().map(micros),
            disk: DiskInfo::of_node(address, &status.data_dir),
            cpu_seconds: earlier.and_then(|earlier| cpu_seconds(earlier, seen)),
            rss_bytes: Some(status.rss_bytes).filter(|bytes| *bytes > 0),
            shards: status.shards.len(),
        }
    };
    after.nodes.iter().map(node).collect()
}

/// Returns `None` if the process was restarted in between.
fn cpu_seconds(before: &NodeObservation, after: &NodeObservation) -> Option<f64> {
    let used = after.status.cpu_time_us.checked_sub(before.status.cpu_time_us)?;
    // A node restarted early in a long run may have used more CPU than the process before it.
    if let (Some(up_before), Some(up_after)) = (uptime(&before.status), uptime(&after.status)) {
        let expected = up_before + (after.at - before.at);
        if up_after + UPTIME_LAG_MAX < expected {
            return None;
        }
    }
    Some(Duration::from_micros(used).as_secs_f64())
}

fn uptime(status: &GetNodeStatusResponse) -> Option<Duration> {
    helix_proto::time::duration(status.uptime?).ok()
}

fn micros(duration: &prost_types::Duration) -> f64 {
    duration.seconds as f64 * 1e6 + f64::from(duration.nanos) / 1e3
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    fn observation(at: Instant, nodes: &[(u64, u64)]) -> Observation {
        let seen = |(number, &(cpu_time_us, seconds)): (usize, &(u64, u64))| {
            let uptime = Duration::from_secs(seconds).try_into().ok();
            let status =
                GetNodeStatusResponse { cpu_time_us, uptime, ..GetNodeStatusResponse::default() };
            NodeObservation { address: format!("n{number}"), at, status }
        };
        let nodes = nodes.iter().enumerate().map(seen).collect();
        Observation { at, cpu: Duration::ZERO, nodes }
    }

    #[test]
    fn cpu_is_summed_over_all_nodes() {
        let start = Instant::now();
        let before = observation(start, &[(5, 10), (7, 10)]);
        let end = start + Duration::from_secs(2);
        let after = observation(end, &[(1_000_005, 12), (2_000_007, 12), (9, 1)]);
        let nodes = nodes(&before, &after);
        // The third node was not observed before the run, so its CPU time is not the run's.
        assert_eq!(nodes[2].cpu_seconds, None);
        let cpu = CpuUsage::new(&before, &after, &nodes, &LoadMeter::new());
        assert!((cpu.server_cores.unwrap() - 1.5).abs() < 1e-6, "{cpu:?}");
        // No request succeeded, so there is no time per request.
        assert_eq!((cpu.client_us_per_request, cpu.server_us_per_request), (None, None));
    }

    #[test]
    fn restart_is_detected() {
        let start = Instant::now();
        let end = start + Duration::from_secs(60);
        let before = observation(start, &[(500, 5)]);
        for (after, cpu_seconds) in [((3, 65), None), ((900, 58), None), ((900, 65), Some(4e-4))] {
            let nodes = nodes(&before, &observation(end, &[after]));
            assert_eq!(nodes[0].cpu_seconds, cpu_seconds, "{after:?}");
        }
    }

    #[test]
    fn missing_nodes_have_unknown_usage() {
        let now = Instant::now();
        let (before, after) = (observation(now, &[(5, 1)]), observation(now, &[]));
        let cpu = CpuUsage::new(&before, &after, &nodes(&before, &after), &LoadMeter::new());
        assert_eq!((cpu.server_cores, rss_bytes(&[])), (None, None));
        // The ceiling does not report its memory.
        assert_eq!(rss_bytes(&nodes(&after, &before)), None);
    }
}
