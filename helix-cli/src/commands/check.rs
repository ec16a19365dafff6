//! `helix check`: queries every node and reports problems and risks.
//! Evaluates the status that the nodes report; changes nothing.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use helix_client::proto::log::v1::GetNodeStatusResponse;
use schemars::JsonSchema;
use serde::Serialize;

use super::cluster::health::ClusterHealth;
use super::cluster::snapshot::{ClusterSnapshot, NodeReport, NodeSnapshot, failure};
use crate::args::GlobalArgs;
use crate::exit::{CliError, Exit};
use crate::output::Output;
use crate::units;

/// Maximum p99 sync time without a warning. A disk without a power-loss-protected write cache takes
/// about this long.
const SYNC_MAX: Duration = Duration::from_millis(20);

/// Minimum free disk space without a warning; nodes preallocate segments.
const FREE_BYTES_MIN: u64 = 2 << 30;

/// The result of a check.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct CheckResult {
    /// `ok`, `warn` or `fail`
    status: CheckStatus,
    /// Name of the check
    check: &'static str,
    /// Null for checks of the whole cluster
    node_id: Option<u64>,
    message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum CheckStatus {
    Ok,
    Warn,
    Fail,
}

pub(crate) async fn run(global: &GlobalArgs) -> anyhow::Result<()> {
    let snapshot = ClusterSnapshot::take(global).await?;
    let findings = findings(&snapshot, &global.addr);
    Output { format: global.output }.show_with_verdict(&findings, verdict(&findings))
}

/// # Errors
/// Fails if a check failed.
fn verdict(findings: &[CheckResult]) -> anyhow::Result<()> {
    let failed = findings.iter().filter(|finding| finding.status == CheckStatus::Fail).count();
    if failed == 0 {
        return Ok(());
    }
    let plural = if failed == 1 { "check" } else { "checks" };
    let failure = CliError::new(Exit::Error, format!("{failed} {plural} failed"));
    Err(failure.hint("helix cluster health\nhelix cluster nodes").into())
}

fn findings(snapshot: &ClusterSnapshot, dialled: &[String]) -> Vec<CheckResult> {
    let mut findings = vec![check_cluster_id(snapshot)];
    for (addr, error) in &snapshot.silent {
        let message = format!("no node answers at {addr}: {}", error.message);
        findings.push(CheckResult {
            status: CheckStatus::Fail,
            check: "reach",
            node_id: None,
            message,
        });
    }
    for node in &snapshot.nodes {
        let about = |check, (status, message)| CheckResult {
            status,
            check,
            node_id: Some(node.node_id),
            message,
        };
        match &node.report {
            Err(error) => {
                let message = format!("{} {}", node.named(), failure(error));
                let check = if node.has_answered() { "access" } else { "reach" };
                findings.push(about(check, (CheckStatus::Fail, message)));
            }
            Ok(report) => findings.extend([
                about("address", check_address(node, report, dialled)),
                about("version", check_version(&report.status)),
                about("storage", check_storage(&report.status)),
                about("sync", check_sync(&report.status)),
                about("space", check_space(&report.status)),
            ]),
        }
    }
    let health = ClusterHealth::of(snapshot).messages().into_iter();
    let health: Vec<CheckResult> = health
        .map(|message| CheckResult {
            status: CheckStatus::Fail,
            check: "health",
            node_id: None,
            message,
        })
        .collect();
    if health.is_empty() {
        let message = "no node reports an issue".to_owned();
        findings.push(CheckResult {
            status: CheckStatus::Ok,
            check: "health",
            node_id: None,
            message,
        });
    }
    findings.extend(health);
    findings
}

/// Checks that all nodes belong to one cluster.
fn check_cluster_id(snapshot: &ClusterSnapshot) -> CheckResult {
    let ids = snapshot.reports().map(|(_, report)| report.metadata.cluster_id.as_str());
    let ids: BTreeSet<&str> = ids.collect();
    let names = ids.iter().copied().collect::<Vec<_>>().join(", ");
    let (status, message) = match ids.len() {
        0 | 1 => (CheckStatus::Ok, format!("all answering nodes belong to cluster {names}")),
        count => {
            (CheckStatus::Fail, format!("the answering nodes belong to {count} clusters: {names}"))
        }
    };
    CheckResult { status, check: "cluster", node_id: None, message }
}

/// Checks that clients reach the node at its advertised address.
fn check_address(
    node: &NodeSnapshot,
    report: &NodeReport,
    dialled: &[String],
) -> (CheckStatus, String) {
    let endpoint = &node.endpoint;
    if report.status.node_id != node.node_id {
        let other = report.status.node_id;
        return (
            CheckStatus::Fail,
            format!("node {other} answers at its advertised address {endpoint}"),
        );
    }
    if let Some(socket) = &node.socket {
        let message = format!("answers at {socket}; its advertised address {endpoint} is not");
        return (CheckStatus::Ok, message + " checked; for that, give a TCP address in --addr");
    }
    let is_remote = dialled.iter().any(|address| !is_loopback(address));
    if is_loopback(endpoint) && is_remote {
        let message = format!("its advertised address {endpoint} is reachable only from its host");
        return (CheckStatus::Warn, message + "; set --advertise-addr");
    }
    (CheckStatus::Ok, format!("answers at its advertised address {endpoint}"))
}

fn is_loopback(address: &str) -> bool {
    if helix_proto::address::unix_path(address).is_some() {
        return true;
    }
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.rsplit_once('/').map_or(host, |(_, host)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn check_version(status: &GetNodeStatusResponse) -> (CheckStatus, String) {
    let ours = env!("CARGO_PKG_VERSION");
    let theirs = &status.version;
    if theirs == ours {
        return (CheckStatus::Ok, format!("{theirs}, same as this program"));
    }
    (CheckStatus::Warn, format!("{theirs}, but this program has {ours}"))
}

fn check_storage(status: &GetNodeStatusResponse) -> (CheckStatus, String) {
    match status.storage.as_str() {
        "memory" => {
            (CheckStatus::Warn, "memory storage: data is lost when the process ends".to_owned())
        }
        kind => (CheckStatus::Ok, format!("{kind}, in {}: {}", status.data_dir, status.durability)),
    }
}

fn check_sync(status: &GetNodeStatusResponse) -> (CheckStatus, String) {
    let time = |it: Option<prost_types::Duration>| helix_proto::time::duration(it?).ok();
    let (Some(p50), Some(p99)) = (time(status.sync_p50), time(status.sync_p99)) else {
        return (CheckStatus::Ok, "no sync measured yet".to_owned());
    };
    let message = format!("a sync takes {} (p99 {})", units::measured(p50), units::measured(p99));
    if p99 > SYNC_MAX {
        return (CheckStatus::Warn, message + "; every quorum-synced ack waits for a sync");
    }
    (CheckStatus::Ok, message)
}

fn check_space(status: &GetNodeStatusResponse) -> (CheckStatus, String) {
    if status.storage == "memory" {
        return (CheckStatus::Ok, "no disk used".to_owned());
    }
    let free = units::bytes(status.free_bytes);
    if status.free_bytes < FREE_BYTES_MIN {
        return (
            CheckStatus::Warn,
            format!("{free} free; appends are rejected when the disk is full"),
        );
    }
    (CheckStatus::Ok, format!("{free} free"))
}

#[cfg(test)]
mod tests {
    use super::super::cluster::snapshot::tests::snapshot;
    use super::*;

    fn of<'a>(findings: &'a [CheckResult], check: &str) -> Vec<&'a CheckResult> {
        findings.iter().filter(|finding| finding.check == check).collect()
    }

    #[test]
    fn silent_node_fails_and_other_nodes_are_checked() {
        let findings = findings(&snapshot(), &["n1".to_owned()]);
        let reach = of(&findings, "reach");
        assert_eq!(
            (reach.len(), reach[0].status, reach[0].node_id),
            (1, CheckStatus::Fail, Some(3))
        );
        assert_eq!(of(&findings, "version").len(), 2);
        assert_eq!(of(&findings, "cluster")[0].status, CheckStatus::Ok);
        assert_eq!(of(&findings, "health")[0].status, CheckStatus::Ok, "no node reports it");
    }

    #[test]
    fn finds_another_node_at_an_advertised_address() {
        let mut snapshot = snapshot();
        // The reports of the test snapshot have node id 0.
        assert_eq!(of(&findings(&snapshot, &[]), "address")[0].status, CheckStatus::Fail);
        for node in &mut snapshot.nodes {
            if let Ok(report) = &mut node.report {
                report.status.node_id = node.node_id;
            }
        }
        assert_eq!(of(&findings(&snapshot, &[]), "address")[0].status, CheckStatus::Ok);
    }

    #[test]
    fn finds_nodes_of_different_clusters() {
        let mut snapshot = snapshot();
        let Ok(two) = &mut snapshot.nodes[1].report else { panic!("it answers") };
        two.metadata.cluster_id = "d".to_owned();
        assert_eq!(check_cluster_id(&snapshot).status, CheckStatus::Fail);
    }

    #[test]
    fn warns_of_loopback_address_if_dialled_remotely() {
        for address in ["127.0.0.1:9092", "localhost:1", "[::1]:9092", "http://127.0.0.1:9092"] {
            assert!(is_loopback(address), "{address}");
        }
        assert!(!is_loopback("n1.example:9092") && !is_loopback("10.0.0.1:9092"));
        let mut snapshot = snapshot();
        snapshot.nodes[0].endpoint = "127.0.0.1:9092".to_owned();
        let Ok(one) = &mut snapshot.nodes[0].report else { panic!("it answers") };
        one.status.node_id = 1;
        let of_remote = findings(&snapshot, &["10.0.0.1:9092".to_owned()]);
        assert_eq!(of(&of_remote, "address")[0].status, CheckStatus::Warn);
        let of_local = findings(&snapshot, &["127.0.0.1:9092".to_owned()]);
        assert_eq!(of(&of_local, "address")[0].status, CheckStatus::Ok);
    }

    #[test]
    fn a_socket_does_not_check_the_advertised_address() {
        let mut snapshot = snapshot();
        snapshot.nodes[0].socket = Some("unix:/run/helix.sock".to_owned());
        let Ok(one) = &mut snapshot.nodes[0].report else { panic!("it answers") };
        one.status.node_id = 1;
        let findings = findings(&snapshot, &["unix:/run/helix.sock".to_owned()]);
        let found = of(&findings, "address")[0];
        assert_eq!(found.status, CheckStatus::Ok);
        assert!(found.message.starts_with("answers at unix:/run/helix.sock;"), "{found:?}");
        assert!(found.message.contains("n1 is not checked"), "{found:?}");
    }

    #[test]
    fn warns_of_slow_full_and_missing_disks() {
        let millis = |millis| prost_types::Duration { seconds: 0, nanos: millis * 1_000_000 };
        let slow = GetNodeStatusResponse {
            storage: "disk".to_owned(),
            sync_p50: Some(millis(5)),
            sync_p99: Some(millis(50)),
            free_bytes: 1 << 30,
            ..GetNodeStatusResponse::default()
        };
        assert_eq!(
            (check_sync(&slow).0, check_space(&slow).0),
            (CheckStatus::Warn, CheckStatus::Warn)
        );
        let fine = GetNodeStatusResponse {
            sync_p99: Some(millis(6)),
            free_bytes: 50 << 30,
            ..slow.clone()
        };
        assert_eq!((check_sync(&fine).0, check_space(&fine).0), (CheckStatus::Ok, CheckStatus::Ok));
        let memory = GetNodeStatusResponse { storage: "memory".to_owned(), ..slow };
        assert_eq!(check_storage(&memory).0, CheckStatus::Warn);
        assert_eq!(check_sync(&GetNodeStatusResponse::default()).0, CheckStatus::Ok);
        assert_eq!(check_version(&fine).0, CheckStatus::Warn);
    }
}
