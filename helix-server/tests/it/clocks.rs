//! Append times, retention and the expiry of tokens with wrong clocks: no single clock of three
//! decides.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use bytes::Bytes;
use helix_proto::log::v1::{HealthIssue, HealthReason};
use helix_server::clock::{Clock, SystemClock, TokioClock};
use helix_server::config::ServerConfig;
use helix_server::log::{AccessCommand, BearerToken, CreateToken, TokenError, TokenRecord};
use helix_server::node::{Node, NodeSettings};
use helix_server::peer::Network;
use helix_server::shard::{Durability, ReadFrom};
use tokio::net::TcpListener;

use crate::simulation::{batch, settings_in};
use crate::support::{TestServer, soon};
use crate::trio::{NODES, STEADY, free_port, health, until};

const START_US: u64 = 1_700_000_000_000_000;
const SECOND_US: u64 = 1_000_000;
const DAYS_US: i64 = 3 * 86_400 * SECOND_US as i64;

/// A right clock, except for an error that can change.
#[derive(Debug)]
struct TestClock {
    right: Arc<TokioClock>,
    error_us: AtomicI64,
}

impl TestClock {
    fn set_error(&self, error_us: i64) {
        self.error_us.store(error_us, Ordering::Relaxed);
    }
}

impl Clock for TestClock {
    fn now_us(&self) -> u64 {
        self.right.now_us().saturating_add_signed(self.error_us.load(Ordering::Relaxed))
    }
}

/// Appends a record to a partition at the leader of its shard. Returns the leader and the time.
async fn append(nodes: &BTreeMap<u64, Arc<Node>>, sequence: u64) -> (u64, u64) {
    let payload = Bytes::from(format!("record {sequence}"));
    until("a leader takes a batch", async || {
        let leads = |node: &&Arc<Node>| {
            node.locate("default", 0).is_ok_and(|located| located.shard.is_leader())
        };
        let node = nodes.values().find(leads)?;
        let located = node.locate("default", 0).ok()?;
        let permit = located
            .shard
            .permit(helix_server::shard::FlowShare::INTERNAL, payload.len())
            .await
            .ok()?;
        let batch = batch(node, 0, sequence, payload.clone());
        let ack = located.shard.append(batch, Durability::QuorumSynced, permit).await.ok()?;
        let (first, _) = ack.offsets?;
        let (partition, from) = (located.partition, ReadFrom::Leader);
        let read = located.shard.read(partition, first, None, 1 << 20, from).await.ok()?;
        Some((node.info().node_id, read.batches[0].append_time_us))
    })
    .await
}

/// Waits until every node has compared all clocks and found this one, or none, to be off.
async fn found_off(nodes: &BTreeMap<u64, Arc<Node>>, expected: Option<u64>) {
    until("all nodes agree on the clocks", async || {
        let agrees = |node: &Arc<Node>| {
            let offsets = node.clock().offsets();
            let off = offsets.iter().filter(|offset| offset.is_off()).map(|it| it.node_id);
            offsets.len() == NODES.len() && off.eq(expected)
        };
        nodes.values().all(agrees).then_some(())
    })
    .await;
}

/// Makes a token that expires then, and returns the header of its calls.
async fn token(nodes: &BTreeMap<u64, Arc<Node>>, expires_at_us: u64) -> String {
    let mut next = expires_at_us;
    let mut random = || {
        next = next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        next
    };
    let token = BearerToken::from_random(&mut random);
    let record = TokenRecord::new(&token, "alice", &mut random, START_US, expires_at_us);
    let create = CreateToken { token: Some(record), ..CreateToken::default() };
    until("every node knows the token", async || {
        // Repeated, if a leader was lost: the second one changes nothing.
        let command = AccessCommand::CreateToken(create.clone());
        nodes[&1].cluster().change_access(command).await.ok()?;
        let knows =
            |node: &Arc<Node>| node.cluster().machine().access().token(token.id()).is_some();
        nodes.values().all(knows).then_some(())
    })
    .await;
    format!("Bearer {}", token.reveal())
}

/// Expects that each node accepts the valid token and refuses the expired one.
fn expect_expiry(nodes: &BTreeMap<u64, Arc<Node>>, valid: &str, expired: &str) {
    for node in nodes.values() {
        let login = |header: &str| node.login(Some(header.as_bytes()), None);
        let accepted = login(valid);
        assert!(accepted.is_ok(), "{:?}", accepted.err());
        assert!(matches!(login(expired), Err(TokenError::Expired { .. })));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_clock_decides_neither_append_times_nor_expiry() {
    let root = tempfile::tempdir().unwrap();
    let right = TokioClock::new(START_US);
    let clock = |_| Arc::new(TestClock { right: right.clone(), error_us: AtomicI64::new(0) });
    let clocks: BTreeMap<u64, Arc<TestClock>> = NODES.map(|id| (id, clock(id))).into();
    let address = || SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
    let ports: BTreeMap<u64, SocketAddr> = NODES.map(|id| (id, address())).into();
    let open = async |id: u64| {
        let directory = root.path().join(format!("node-{id}"));
        let clock = clocks[&id].clone();
        let base = settings_in(&directory, id);
        let settings = NodeSettings { node_id: id, clock, election_timeout: STEADY, ..base };
        let peers = ports.iter().map(|(peer, address)| (*peer, address.to_string())).collect();
        let listener = TcpListener::bind(ports[&id]).await.unwrap();
        let opened = Node::open_among(settings, peers, Network::from(listener));
        (id, soon(opened).await.unwrap())
    };
    let (one, two, three) = tokio::join!(open(1), open(2), open(3));
    let nodes: BTreeMap<u64, Arc<Node>> = [one, two, three].into();
    let mut sequence = 0;
    let mut append = async || {
        sequence += 1;
        append(&nodes, sequence - 1).await
    };
    let is_near = |time_us: u64| time_us.abs_diff(right.now_us()) <= 12 * SECOND_US;

    found_off(&nodes, None).await;
    let valid = token(&nodes, START_US + 3_600 * SECOND_US).await;
    let expired = token(&nodes, START_US - 3_600 * SECOND_US).await;
    expect_expiry(&nodes, &valid, &expired);
    let (leader, time_us) = append().await;
    assert!(is_near(time_us), "{time_us}");
    for error_us in [DAYS_US, -DAYS_US] {
        clocks[&leader].set_error(error_us);
        expect_expiry(&nodes, &valid, &expired);
        let (_, time_us) = append().await;
        assert!(is_near(time_us), "at once: {time_us}");
        found_off(&nodes, Some(leader)).await;
        expect_expiry(&nodes, &valid, &expired);
        let (_, time_us) = append().await;
        assert!(is_near(time_us), "{time_us}");
        for node in nodes.values() {
            assert!(node.clock().retention_us().is_some_and(is_near));
        }
        clocks[&leader].set_error(0);
        found_off(&nodes, None).await;
    }
    for node in nodes.into_values() {
        node.close().await;
    }
}

/// A clock that is wrong at the start of a single node cannot be recognized then, but by the times
/// of its records once it is right.
#[tokio::test]
async fn records_of_the_future_are_an_issue() {
    const AHEAD_US: u64 = 10 * 86_400 * SECOND_US;
    let directory = tempfile::tempdir().unwrap();
    let wrong = TokioClock::new(SystemClock.now_us() + AHEAD_US);
    let settings = NodeSettings { clock: wrong, ..settings_in(directory.path(), 1) };
    let node = Node::open(settings).await.unwrap();
    let nodes = BTreeMap::from([(1, node)]);
    let (_, future_us) = append(&nodes, 0).await;
    assert!(nodes[&1].shards().iter().all(|it| it.ahead_of(nodes[&1].clock().now_us()).is_none()));
    nodes[&1].close().await;
    drop(nodes);

    let config = ServerConfig::in_dir(directory.path());
    let server = TestServer::start(config, Some(directory)).await;
    let skewed = |issues: Vec<HealthIssue>| {
        issues.into_iter().find(|issue| issue.reason() == HealthReason::ClockSkew)
    };
    let issue = skewed(health(&server).await.issues).expect("an issue");
    assert!(issue.message.contains("up to 9 days in the future"), "{}", issue.message);
    assert!(issue.shard_id.is_some() && !health(&server).await.healthy);
    // A new record follows the time of the record before.
    let nodes = BTreeMap::from([(1, server.running.node().clone())]);
    assert!(append(&nodes, 1).await.1 >= future_us);
    drop(nodes);
    server.running.shutdown().await;
}
