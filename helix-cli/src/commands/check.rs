//! `helix check`: dials every node and looks at what goes wrong before it does.
//! Judges what the nodes say of themselves; nothing is changed.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use helix_client::proto::log::v1::GetNodeStatusResponse;
use schemars::JsonSchema;
use serde::Serialize;

use super::cluster::health::Health;
use super::cluster::view::{Answer, Asked, View};
use crate::args::Global;
use crate::exit::{Exit, Failure};
use crate::output::Output;
use crate::units;

/// Longest sync of the slowest hundredth that is worth no word: a disk without a write cache that
/// survives a power loss takes about this long.
const SYNC_MAX: Duration = Duration::from_millis(20);

/// Free space below which there is a word: a node needs room for segments ahead.
const FREE_BYTES_MIN: u64 = 2 << 30;

/// What was looked at, and what was found.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct Finding {
    /// `ok`, `warn` or `fail`
    status: Status,
    /// What was looked at
    check: &'static str,
    /// Null: it is about the cluster
    node_id: Option<u64>,
    message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Status {
    Ok,
    Warn,
    Fail,
}

pub(crate) async fn run(global: &Global) -> anyhow::Result<()> {
    let view = View::ask(global).await?;
    let findings = findings(&view, &global.addr);
    Output { format: global.output }.show(&findings)?;
    let failed = findings.iter().filter(|finding| finding.status == Status::Fail).count();
    if failed == 0 {
        return Ok(());
    }
    let plural = if failed == 1 { "check has" } else { "checks have" };
    let failure = Failure::new(Exit::Error, format!("{failed} {plural} failed"));
    Err(failure.hint("helix cluster health\nhelix cluster nodes").into())
}

fn findings(view: &View, dialled: &[String]) -> Vec<Finding> {
    let mut findings = vec![clusters(view)];
    for (addr, error) in &view.silent {
        let message = format!("nobody answers at {addr}: {}", error.message);
        findings.push(Finding { status: Status::Fail, check: "reach", node_id: None, message });
    }
    for node in &view.nodes {
        let about = |check, (status, message)| Finding {
            status,
            check,
            node_id: Some(node.node_id),
            message,
        };
        match &node.answer {
            Err(error) => {
                let message = format!("{} does not answer: {}", node.endpoint, error.message);
                findings.push(about("reach", (Status::Fail, message)));
            }
            Ok(answer) => findings.extend([
                about("address", address(node, answer, dialled)),
                about("version", version(&answer.status)),
                about("storage", storage(&answer.status)),
                about("sync", sync(&answer.status)),
                about("space", space(&answer.status)),
            ]),
        }
    }
    let health = Health::of(view).messages().into_iter();
    let health: Vec<Finding> = health
        .map(|message| Finding { status: Status::Fail, check: "health", node_id: None, message })
        .collect();
    if health.is_empty() {
        let message = "no node has an issue".to_owned();
        findings.push(Finding { status: Status::Ok, check: "health", node_id: None, message });
    }
    findings.extend(health);
    findings
}

/// Whether those that answer are of one cluster.
fn clusters(view: &View) -> Finding {
    let ids = view.answers().map(|(_, answer)| answer.metadata.cluster_id.as_str());
    let ids: BTreeSet<&str> = ids.collect();
    let names = ids.iter().copied().collect::<Vec<_>>().join(", ");
    let (status, message) = match ids.len() {
        0 | 1 => (Status::Ok, format!("all nodes that answer are of cluster {names}")),
        count => (Status::Fail, format!("the nodes that answer are of {count} clusters: {names}")),
    };
    Finding { status, check: "cluster", node_id: None, message }
}

/// Whether clients find the node where it says that they do.
fn address(node: &Asked, answer: &Answer, dialled: &[String]) -> (Status, String) {
    let endpoint = &node.endpoint;
    if answer.status.node_id != node.node_id {
        let other = answer.status.node_id;
        return (
            Status::Fail,
            format!("{endpoint} is its address, and node {other} answers there"),
        );
    }
    let is_remote = dialled.iter().any(|address| !is_loopback(address));
    if is_loopback(endpoint) && is_remote {
        let message = format!("{endpoint} is its address, which only its own machine can dial");
        return (Status::Warn, message + "; --advertise-addr changes it");
    }
    (Status::Ok, format!("answers at {endpoint}, its advertised address"))
}

fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.rsplit_once('/').map_or(host, |(_, host)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn version(status: &GetNodeStatusResponse) -> (Status, String) {
    let ours = env!("CARGO_PKG_VERSION");
    let theirs = &status.version;
    if theirs == ours {
        return (Status::Ok, format!("{theirs}, as this program"));
    }
    (Status::Warn, format!("{theirs}, and this program is {ours}"))
}

fn storage(status: &GetNodeStatusResponse) -> (Status, String) {
    match status.storage.as_str() {
        "memory" => (Status::Warn, "in memory: everything is gone with the process".to_owned()),
        kind => (Status::Ok, format!("{kind}, in {}: {}", status.data_dir, status.durability)),
    }
}

fn sync(status: &GetNodeStatusResponse) -> (Status, String) {
    let time = |time: Option<prost_types::Duration>| Duration::try_from(time?).ok();
    let (Some(p50), Some(p99)) = (time(status.sync_p50), time(status.sync_p99)) else {
        return (Status::Ok, "not measured: there has been no sync yet".to_owned());
    };
    let message = format!("a sync takes {} (p99 {})", units::measured(p50), units::measured(p99));
    if p99 > SYNC_MAX {
        return (Status::Warn, message + "; every acknowledgement waits for one");
    }
    (Status::Ok, message)
}

fn space(status: &GetNodeStatusResponse) -> (Status, String) {
    if status.storage == "memory" {
        return (Status::Ok, "none is used".to_owned());
    }
    let free = units::bytes(status.free_bytes);
    if status.free_bytes < FREE_BYTES_MIN {
        return (Status::Warn, format!("{free} free; appends are refused when it is full"));
    }
    (Status::Ok, format!("{free} free"))
}

#[cfg(test)]
mod tests {
    use super::super::cluster::view::tests::view;
    use super::*;

    fn of<'a>(findings: &'a [Finding], check: &str) -> Vec<&'a Finding> {
        findings.iter().filter(|finding| finding.check == check).collect()
    }

    #[test]
    fn a_node_that_is_silent_fails_and_the_others_are_looked_at() {
        let findings = findings(&view(), &["n1".to_owned()]);
        let reach = of(&findings, "reach");
        assert_eq!((reach.len(), reach[0].status, reach[0].node_id), (1, Status::Fail, Some(3)));
        assert_eq!(of(&findings, "version").len(), 2);
        assert_eq!(of(&findings, "cluster")[0].status, Status::Ok);
        assert_eq!(of(&findings, "health")[0].status, Status::Ok, "nobody but us says so");
    }

    #[test]
    fn another_node_at_an_address_is_found() {
        let mut view = view();
        // Answers say node 0 unless they are told otherwise.
        assert_eq!(of(&findings(&view, &[]), "address")[0].status, Status::Fail);
        for node in &mut view.nodes {
            if let Ok(answer) = &mut node.answer {
                answer.status.node_id = node.node_id;
            }
        }
        assert_eq!(of(&findings(&view, &[]), "address")[0].status, Status::Ok);
    }

    #[test]
    fn clusters_are_not_mixed() {
        let mut view = view();
        let Ok(two) = &mut view.nodes[1].answer else { panic!("it answers") };
        two.metadata.cluster_id = "d".to_owned();
        assert_eq!(clusters(&view).status, Status::Fail);
    }

    #[test]
    fn an_address_of_this_machine_is_of_no_use_to_others() {
        for address in ["127.0.0.1:9092", "localhost:1", "[::1]:9092", "http://127.0.0.1:9092"] {
            assert!(is_loopback(address), "{address}");
        }
        assert!(!is_loopback("n1.example:9092") && !is_loopback("10.0.0.1:9092"));
        let mut view = view();
        view.nodes[0].endpoint = "127.0.0.1:9092".to_owned();
        let Ok(one) = &mut view.nodes[0].answer else { panic!("it answers") };
        one.status.node_id = 1;
        let of_remote = findings(&view, &["10.0.0.1:9092".to_owned()]);
        assert_eq!(of(&of_remote, "address")[0].status, Status::Warn);
        let of_local = findings(&view, &["127.0.0.1:9092".to_owned()]);
        assert_eq!(of(&of_local, "address")[0].status, Status::Ok);
    }

    #[test]
    fn slow_disks_full_disks_and_no_disks_are_said() {
        let millis = |millis| prost_types::Duration { seconds: 0, nanos: millis * 1_000_000 };
        let slow = GetNodeStatusResponse {
            storage: "disk".to_owned(),
            sync_p50: Some(millis(5)),
            sync_p99: Some(millis(50)),
            free_bytes: 1 << 30,
            ..GetNodeStatusResponse::default()
        };
        assert_eq!((sync(&slow).0, space(&slow).0), (Status::Warn, Status::Warn));
        let fine = GetNodeStatusResponse {
            sync_p99: Some(millis(6)),
            free_bytes: 50 << 30,
            ..slow.clone()
        };
        assert_eq!((sync(&fine).0, space(&fine).0), (Status::Ok, Status::Ok));
        let memory = GetNodeStatusResponse { storage: "memory".to_owned(), ..slow };
        assert_eq!(storage(&memory).0, Status::Warn);
        assert_eq!(sync(&GetNodeStatusResponse::default()).0, Status::Ok);
        assert_eq!(version(&fine).0, Status::Warn);
    }
}
