//! What the nodes used while a run was measured, from what they said before and after it.
//! What they did not say is unknown, not nothing.

use std::time::Duration;

use helix_proto::log::v1::GetNodeStatusResponse;
use serde::Serialize;

use crate::meter::Meter;
use crate::target::{Observation, Seen};

/// Time by which what a node says of its uptime may lag behind the clock here.
const UPTIME_LAG_MAX: Duration = Duration::from_secs(1);

/// CPU time of the measured part.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Cpu {
    /// Cores that this process kept busy.
    pub(crate) client_cores: f64,
    /// None where no request succeeded.
    pub(crate) client_us_per_request: Option<f64>,
    /// The same of all nodes together. None if no node could be measured.
    pub(crate) server_cores: Option<f64>,
    pub(crate) server_us_per_request: Option<f64>,
}

/// One node, as it described itself after the run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Node {
    pub(crate) address: String,
    pub(crate) version: String,
    pub(crate) storage: String,
    pub(crate) durability: String,
    pub(crate) sync_p50_us: Option<f64>,
    pub(crate) sync_p99_us: Option<f64>,
    /// None: it did not answer before the run, or was restarted during it.
    pub(crate) cpu_seconds: Option<f64>,
    /// None: it does not say.
    pub(crate) rss_bytes: Option<u64>,
    pub(crate) shards: usize,
}

impl Cpu {
    pub(crate) fn new(
        before: &Observation,
        after: &Observation,
        nodes: &[Node],
        meter: &Meter,
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

/// Resident memory of all nodes together; None if none says.
pub(crate) fn rss_bytes(nodes: &[Node]) -> Option<u64> {
    nodes.iter().filter_map(|node| node.rss_bytes).reduce(|sum, one| sum + one)
}

pub(crate) fn nodes(before: &Observation, after: &Observation) -> Vec<Node> {
    let node = |seen: &Seen| {
        let Seen { address, status, .. } = seen;
        let earlier = before.nodes.iter().find(|earlier| earlier.address == *address);
        Node {
            address: address.clone(),
            version: status.version.clone(),
            storage: status.storage.clone(),
            durability: status.durability.clone(),
            sync_p50_us: status.sync_p50.as_ref().map(micros),
            sync_p99_us: status.sync_p99.as_ref().map(micros),
            cpu_seconds: earlier.and_then(|earlier| cpu_seconds(earlier, seen)),
            rss_bytes: Some(status.rss_bytes).filter(|bytes| *bytes > 0),
            shards: status.shards.len(),
        }
    };
    after.nodes.iter().map(node).collect()
}

/// None if another process answered than before.
fn cpu_seconds(before: &Seen, after: &Seen) -> Option<f64> {
    let used = after.status.cpu_time_us.checked_sub(before.status.cpu_time_us)?;
    // One that was restarted early in a long run may have used more by now than the one before.
    if let (Some(up_before), Some(up_after)) = (uptime(&before.status), uptime(&after.status)) {
        let expected = up_before + (after.at - before.at);
        if up_after + UPTIME_LAG_MAX < expected {
            return None;
        }
    }
    Some(Duration::from_micros(used).as_secs_f64())
}

fn uptime(status: &GetNodeStatusResponse) -> Option<Duration> {
    Duration::try_from(status.uptime?).ok()
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
            Seen { address: format!("n{number}"), at, status }
        };
        let nodes = nodes.iter().enumerate().map(seen).collect();
        Observation { at, cpu: Duration::ZERO, nodes }
    }

    #[test]
    fn the_cpu_of_all_nodes_is_added_up() {
        let start = Instant::now();
        let before = observation(start, &[(5, 10), (7, 10)]);
        let end = start + Duration::from_secs(2);
        let after = observation(end, &[(1_000_005, 12), (2_000_007, 12), (9, 1)]);
        let nodes = nodes(&before, &after);
        // The third was not there before: what it has used since its start is not the run's.
        assert_eq!(nodes[2].cpu_seconds, None);
        let cpu = Cpu::new(&before, &after, &nodes, &Meter::new());
        assert!((cpu.server_cores.unwrap() - 1.5).abs() < 1e-6, "{cpu:?}");
        // Nothing succeeded: nothing can be divided by that.
        assert_eq!((cpu.client_us_per_request, cpu.server_us_per_request), (None, None));
    }

    #[test]
    fn a_restart_is_noticed() {
        let start = Instant::now();
        let end = start + Duration::from_secs(60);
        let before = observation(start, &[(500, 5)]);
        for (after, cpu_seconds) in [((3, 65), None), ((900, 58), None), ((900, 65), Some(4e-4))] {
            let nodes = nodes(&before, &observation(end, &[after]));
            assert_eq!(nodes[0].cpu_seconds, cpu_seconds, "{after:?}");
        }
    }

    #[test]
    fn nodes_that_are_gone_used_what_nobody_knows() {
        let now = Instant::now();
        let (before, after) = (observation(now, &[(5, 1)]), observation(now, &[]));
        let cpu = Cpu::new(&before, &after, &nodes(&before, &after), &Meter::new());
        assert_eq!((cpu.server_cores, rss_bytes(&[])), (None, None));
        // The ceiling does not say what it holds.
        assert_eq!(rss_bytes(&nodes(&after, &before)), None);
    }
}
