//! `helix group` against real nodes, also while members are active and a node is dead.

use helix_client::proto::log::v1::group_service_client::GroupServiceClient;
use helix_client::proto::log::v1::{HeartbeatRequest, HeartbeatResponse, LeaveRequest};
use serde_json::Value;
use tonic::transport::{Channel, Endpoint};

use crate::harness::{DevProcess, ServerProcess, json};

/// Longest line of a table.
const COLUMNS_MAX: usize = 80;

const MEMBERS: [&str; 2] =
    ["7d9c1f00-5be1-4a41-9a2f-2a39c1f7a001", "7d9c1f00-5be1-4a41-9a2f-2a39c1f7b002"];

/// Members of the group `billing` that join, report and leave.
struct Members {
    runtime: tokio::runtime::Runtime,
    groups: GroupServiceClient<Channel>,
}

impl Members {
    fn new(address: &str) -> Self {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        let channel = runtime.block_on(endpoint.connect()).unwrap();
        Self { runtime, groups: GroupServiceClient::new(channel) }
    }

    fn beat(&mut self, id: &str, last: &HeartbeatResponse) -> HeartbeatResponse {
        let request = HeartbeatRequest {
            group: "billing".to_owned(),
            member_id: id.to_owned(),
            member_epoch: last.member_epoch,
            owned: last.assigned.clone(),
            topics: vec!["orders".to_owned()],
            client_name: "worker on host7".to_owned(),
            max_wait: Some(prost_types::Duration { seconds: 5, nanos: 0 }),
            ..HeartbeatRequest::default()
        };
        self.runtime.block_on(self.groups.heartbeat(request)).unwrap().into_inner()
    }

    fn leave(&mut self, id: &str) {
        let request = LeaveRequest { group: "billing".to_owned(), member_id: id.to_owned() };
        self.runtime.block_on(self.groups.leave(request)).unwrap();
    }
}

fn node_with_orders() -> ServerProcess {
    let node = ServerProcess::start();
    node.ok(&["topic", "create", "orders", "--partitions", "2"]);
    let records: String = (0..10).map(|number| format!("{number}\n")).collect();
    for partition in ["0", "1"] {
        node.ok_with(&["produce", "orders", "--partition", partition], &records);
    }
    node
}

/// Returns the committed offsets of the partitions of a topic.
fn offsets(node: &ServerProcess) -> Vec<Option<u64>> {
    let described = json(&node.ok(&["group", "describe", "billing", "-o", "json"]));
    let partitions = described["partitions"].as_array().unwrap().iter();
    partitions.map(|partition| partition["offset"].as_u64()).collect()
}

#[test]
fn offsets_are_sought_reset_and_taken_back() {
    let node = node_with_orders();
    let seek = |args: &[&str]| node.ok(&[&["group", "seek", "billing", "orders"], args].concat());
    seek(&["--to", "4", "--dry-run"]);
    assert_eq!(node.run(&["group", "describe", "billing"], "").code, 3, "a dry run creates none");
    seek(&["--to", "4"]);
    assert_eq!(offsets(&node), [Some(4), Some(4)]);
    seek(&["--to", "-1", "--partitions", "1", "--by", "the operator"]);
    assert_eq!(offsets(&node), [Some(4), Some(9)]);
    let beyond = node.run(&["group", "seek", "billing", "orders", "--to", "11"], "");
    assert_eq!(beyond.code, 4, "{beyond:?}");
    assert!(beyond.stderr.contains("offsets 0..10 can be read"), "{beyond:?}");
    // Each partition goes back to the offset before its own last seek.
    node.ok(&["group", "seek", "billing", "--undo"]);
    assert_eq!(offsets(&node), [None, Some(4)]);
    node.ok(&["group", "seek", "billing", "--undo"]);
    assert_eq!(offsets(&node), [Some(4), Some(9)]);
    let changes = json(&node.ok(&["group", "history", "billing", "orders", "-o", "json"]));
    let changes = changes.as_array().unwrap();
    let of_partition = |number: u64| {
        let found = changes.iter().filter(move |change| change["partition"] == number);
        found.map(|change| change["kind"].as_str().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(of_partition(0), ["SEEK", "UNDO", "UNDO"]);
    assert!(changes.iter().any(|change| change["by"] == "the operator"), "{changes:?}");
    assert_eq!(node.ok(&["group", "history", "billing", "other"]), "");

    node.ok(&["topic", "trim", "orders", "--to", "6", "--partitions", "0", "--yes"]);
    let explained = node.ok(&["group", "explain", "billing"]);
    assert!(explained.contains("billing has no members"), "{explained}");
    node.ok(&["group", "reset", "billing", "--to", "earliest", "--unreadable"]);
    assert_eq!(offsets(&node), [Some(6), Some(9)]);
    node.ok(&["group", "reset", "billing", "--to", "latest"]);
    assert_eq!(offsets(&node), [Some(10), Some(10)]);
    let described = json(&node.ok(&["topic", "describe", "orders", "-o", "json"]));
    assert_eq!(described["groups"][0]["group"], "billing", "{described}");
    assert_eq!(described["groups"][0]["lag"], 0, "{described}");

    let unconfirmed = node.run(&["group", "delete", "billing"], "");
    assert_eq!(unconfirmed.code, 2, "{unconfirmed:?}");
    assert!(unconfirmed.stderr.contains("2 offsets"), "{unconfirmed:?}");
    node.ok(&["group", "delete", "billing", "--yes"]);
    assert_eq!(node.run(&["group", "delete", "billing", "--yes"], "").code, 3);
    assert_eq!(node.ok(&["group", "list"]), "");
}

#[test]
fn offsets_in_a_topic_are_forgotten() {
    let node = node_with_orders();
    node.ok(&["topic", "create", "other", "--partitions", "1"]);
    node.ok(&["group", "seek", "billing", "orders", "--to", "4", "-p", "0"]);
    node.ok(&["group", "seek", "billing", "other", "--to", "earliest"]);
    let described = json(&node.ok(&["group", "describe", "billing", "-o", "json"]));
    assert_eq!(described["total_lag"], 6 + 10, "also where nothing is committed: {described}");
    let forget = |topic: &str, more: &[&str]| {
        node.run(&[&["group", "forget", "billing", topic, "-o", "json"], more].concat(), "")
    };
    let unconfirmed = forget("orders", &[]);
    assert_eq!(unconfirmed.code, 2, "{unconfirmed:?}");
    assert!(unconfirmed.stderr.contains("1 offset of billing in orders"), "{unconfirmed:?}");
    for more in [&["--dry-run"][..], &["--yes"]] {
        let forgotten = forget("orders", more);
        assert_eq!(forgotten.code, 0, "{forgotten:?}");
        let row = &json(&forgotten.stdout)[0];
        assert_eq!((&row["topic"], &row["offset"]), (&"orders".into(), &4.into()));
    }
    let again = forget("orders", &["--yes"]);
    assert_eq!((again.code, again.stdout.trim()), (0, "[]"), "{again:?}");
    assert!(again.stderr.contains("billing has no offsets in orders"), "{again:?}");
    // A group without members and offsets is deleted.
    node.ok(&["group", "describe", "billing"]);
    assert_eq!(forget("other", &["--yes"]).code, 0);
    assert_eq!(node.run(&["group", "describe", "billing"], "").code, 3);
}

#[test]
fn members_are_shown_explained_and_named_by_refusals() {
    let node = node_with_orders();
    node.ok(&["group", "seek", "billing", "orders", "--to", "10", "-p", "0"]);
    let mut members = Members::new(node.address());
    let [first, second] = MEMBERS;
    let last = members.beat(first, &HeartbeatResponse::default());
    assert_eq!(last.assigned.len(), 2);
    members.beat(second, &HeartbeatResponse::default());
    for args in [
        &["group", "seek", "billing", "orders", "--to", "earliest"][..],
        &["group", "seek", "billing", "--undo"],
        &["group", "reset", "billing", "--to", "earliest"],
        &["group", "delete", "billing"],
    ] {
        let refused = node.run(args, "");
        assert_eq!(refused.code, 4, "{args:?}: {refused:?}");
        assert!(MEMBERS.iter().all(|id| refused.stderr.contains(id)), "{refused:?}");
        assert!(refused.stderr.contains("helix group describe billing"), "{refused:?}");
    }
    let explained = node.ok(&["group", "explain", "billing"]);
    for sentence in [
        "billing has partitions that move from one member to another (2 members and 2 partitions)",
        "a001 (worker on host7) reads 1 partition and has to release 1; its last heartbeat was",
        "b002 (worker on host7) reads 0 partitions and waits for 1 more; its last heartbeat was",
        "a001 has released it",
    ] {
        let shortened = sentence.replace("a001", "7d9c1f00-5be1-4a41-9a2f-2a39c1f7a");
        let shortened = shortened.replace("b002", "7d9c1f00-5be1-4a41-9a2f-2a39c1f7b");
        assert!(explained.contains(&shortened), "{sentence} is not in {explained}");
    }
    let described = json(&node.ok(&["group", "describe", "billing", "-o", "json"]));
    let statuses: Vec<&Value> =
        described["partitions"].as_array().unwrap().iter().map(|it| &it["status"]).collect();
    assert!(statuses.contains(&&Value::from("WAITING_FOR_RELEASE")), "{described:#}");
    assert_eq!(described["members"][0]["member_id"], first);
    assert_eq!(described["state"], "RECONCILING");
    let wide = node.ok(&["group", "describe", "billing", "-o", "wide"]);
    assert!(MEMBERS.iter().all(|id| wide.contains(id)), "{wide}");
    MEMBERS.iter().for_each(|id| members.leave(id));
    node.ok(&["group", "seek", "billing", "orders", "--to", "earliest"]);
}

#[test]
fn tables_fit_80_columns() {
    let node = node_with_orders();
    node.ok(&["group", "seek", "billing", "orders", "--to", "3", "--by", "someone"]);
    let mut members = Members::new(node.address());
    // Ids that differ early, as those of real clients.
    for id in ["0b6f3a52-8f4f-4d5e-9d55-0e9a5a0d6f11", "e1c7a9d8-03c2-4b8e-8d5b-6f0d8a3c9e22"] {
        members.beat(id, &HeartbeatResponse::default());
    }
    for args in [
        &["group", "list"][..],
        &["group", "describe", "billing"],
        &["group", "history", "billing"],
    ] {
        let table = node.ok(args);
        for line in table.lines() {
            assert!(line.chars().count() <= COLUMNS_MAX, "{args:?}: {table}");
        }
    }
    let described = node.ok(&["group", "describe", "billing"]);
    assert!(described.contains("\n0b6f3a52   worker on host7  "), "{described}");
}

#[test]
fn groups_are_managed_while_their_coordinator_is_dead() {
    let dev = DevProcess::start(3);
    dev.ok(&["topic", "create", "orders", "--partitions", "4"]);
    dev.ok_with(&["produce", "orders"], "1\n2\n3\n");
    dev.ok(&["group", "seek", "billing", "orders", "--to", "earliest"]);
    let described = json(&dev.ok(&["group", "describe", "billing", "-o", "json"]));
    let coordinator = described["coordinator_node_id"].as_u64().unwrap().to_string();
    assert_eq!(dev.control(&["kill", &coordinator]).code, 0);
    dev.ok(&["group", "seek", "billing", "orders", "--to", "latest"]);
    let after = json(&dev.ok(&["group", "describe", "billing", "-o", "json"]));
    assert_ne!(after["coordinator_node_id"], described["coordinator_node_id"]);
    assert_eq!((&described["total_lag"], &after["total_lag"]), (&3.into(), &0.into()));
    dev.ok(&["group", "seek", "billing", "--undo"]);
    let listed = json(&dev.ok(&["group", "list", "-o", "json"]));
    assert_eq!(listed[0]["total_lag"], 3, "{listed}");
    dev.ok(&["group", "delete", "billing", "--yes"]);
}
