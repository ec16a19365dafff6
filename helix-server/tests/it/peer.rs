//! Clusters of three Raft replicas over the peer transport, on loopback: elections, replication,
//! lost connections and reconnects.

use bytes::Bytes;
use helix_server::peer::{FormCluster, PeerError};
use openraft::async_runtime::WatchReceiver;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::peer_nodes::{
    CLUSTER, PeerNode, Port, expect_equal_logs, form, hub, leader, listeners, memory_wal,
    three_nodes, wait_connected, write,
};
use crate::support::PATIENCE;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_elect_and_replicate() {
    let nodes = three_nodes().await;
    let first = leader(&nodes).await;
    let last = write(first, 10_000, 256, &Bytes::from(vec![7; 300])).await;
    for node in &nodes {
        node.wait_applied(last).await;
        assert_eq!(node.counter.sums(), first.counter.sums());
        expect_equal_logs(first, node, 0);
    }
    assert_eq!(first.counter.sums().0, 10_000);
    for node in nodes {
        node.stop().await;
    }
}

/// A commit index waits for the next entries for a limited time only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_learn_of_a_commit_without_further_appends() {
    let nodes = three_nodes().await;
    let first = leader(&nodes).await;
    for node in &nodes {
        // A heartbeat would carry the commit index too.
        node.raft.runtime_config().heartbeat(false);
        node.raft.runtime_config().elect(false);
    }
    for _ in 0..5 {
        let last = write(first, 3, 1, &Bytes::from_static(b"the last")).await;
        for node in &nodes {
            node.wait_applied(last).await;
        }
    }
    for node in nodes {
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnected_follower_catches_up() {
    let mut nodes = three_nodes().await;
    let leading = leader(&nodes).await.id;
    let away = nodes.iter().position(|node| node.id != leading).unwrap();
    let port = nodes[away].port.take().unwrap();
    let address = port.address;
    port.close().await;

    let first = nodes.iter().find(|node| node.id == leading).unwrap();
    // A lag in bytes above the limit of the live lane.
    let last = write(first, 1_000, 64, &Bytes::from(vec![7; 30 << 10])).await;
    assert!(nodes[away].last_index() < last);

    let listener = TcpListener::bind(address).await.unwrap();
    nodes[away].port = Some(Port::open(&nodes[away].hub, listener));
    nodes[away].wait_applied(last).await;
    let first = leader(&nodes).await;
    let last = write(first, 10, 1, &Bytes::from_static(b"and goes on")).await;
    nodes[away].wait_applied(last).await;
    expect_equal_logs(first, &nodes[away], 0);
    for node in nodes {
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_leader_takes_over() {
    let mut nodes = three_nodes().await;
    let first = leader(&nodes).await;
    let last = write(first, 100, 10, &Bytes::from_static(b"before")).await;
    let leading = first.id;
    let lost = nodes.iter().position(|node| node.id == leading).unwrap();
    nodes.remove(lost).stop().await;

    let second = leader(&nodes).await;
    assert!(second.last_index() >= last);
    let last = write(second, 100, 10, &Bytes::from_static(b"after")).await;
    for node in &nodes {
        node.wait_applied(last).await;
        assert_eq!(node.counter.sums().0, 200);
    }
    for node in nodes {
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leadership_is_transferred() {
    let nodes = three_nodes().await;
    let first = leader(&nodes).await;
    let last = write(first, 10, 1, &Bytes::from_static(b"x")).await;
    let next = nodes.iter().find(|node| node.id != first.id).unwrap();
    next.wait_applied(last).await;
    first.raft.trigger().transfer_leader(next.replica()).await.unwrap();
    let wait = next.raft.wait(Some(PATIENCE));
    wait.current_leader(next.replica(), "it leads").await.unwrap();
    for node in nodes {
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_node_catches_up_from_snapshot() {
    let (mut listeners, peers) = listeners(3).await;
    let (third, second) = (listeners.pop().unwrap(), listeners.pop().unwrap());
    let first = listeners.pop().unwrap();
    let mut nodes = vec![
        PeerNode::start(1, &peers, first, memory_wal()).await,
        PeerNode::start(2, &peers, second, memory_wal()).await,
    ];
    form(&nodes[0], 3).await;
    let leading = leader(&nodes).await;
    let last = write(leading, 100, 10, &Bytes::from_static(b"x")).await;
    leading.wait_applied(last).await;
    leading.raft.trigger().snapshot().await.unwrap();
    let wait = leading.raft.wait(Some(PATIENCE));
    let id = leading.raft.metrics().borrow_watched().last_applied.unwrap();
    wait.purged(Some(id), "the log is purged").await.unwrap();

    nodes.push(PeerNode::start(3, &peers, third, memory_wal()).await);
    nodes[2].wait_applied(last).await;
    let leading = leader(&nodes).await;
    let last = write(leading, 10, 1, &Bytes::from_static(b"y")).await;
    nodes[2].wait_applied(last).await;
    assert_eq!(nodes[2].counter.sums(), leading.counter.sums());
    for node in nodes {
        node.stop().await;
    }
}

#[tokio::test]
async fn closed_hub_leaves_no_tasks() {
    let tasks = tokio::runtime::Handle::current().metrics();
    let before = tasks.num_alive_tasks();
    let (listeners, peers) = listeners(2).await;
    let hubs = [hub(1, &peers), hub(2, &peers)];
    let mut ports = Vec::new();
    for (hub, listener) in hubs.iter().zip(listeners) {
        hub.set_identity(CLUSTER, 1);
        ports.push(Port::open(hub, listener));
    }
    wait_connected(&hubs[0], true).await;
    wait_connected(&hubs[1], true).await;
    hubs[0].hello(2).await.unwrap();
    for hub in &hubs {
        hub.close();
    }
    drop(hubs);
    for port in ports {
        port.ended().await;
    }
    let gone = async {
        while tasks.num_alive_tasks() > before {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("every task ends");
}

#[tokio::test]
async fn refuses_nodes_of_other_clusters() {
    let (listeners, peers) = listeners(2).await;
    let hubs = [hub(1, &peers), hub(2, &peers)];
    let mut listeners = listeners.into_iter();
    let ports = hubs.each_ref().map(|hub| Port::open(hub, listeners.next().unwrap()));
    hubs[0].set_identity(CLUSTER, 1);
    let refused = async |text: &str| {
        let mut changes = hubs[0].watch_peers();
        let seen = async {
            loop {
                let status = hubs[0].peers().pop().unwrap();
                if status.last_error.is_some_and(|error| error.contains(text)) {
                    assert!(!status.connected);
                    return;
                }
                changes.changed().await.unwrap();
            }
        };
        tokio::time::timeout(PATIENCE, seen).await.unwrap();
    };
    refused("in no cluster yet").await;
    hubs[1].set_identity(CLUSTER + 1, 1);
    refused("in cluster 0000").await;
    hubs[1].set_identity(CLUSTER, 1);
    wait_connected(&hubs[0], true).await;
    let [_, port] = ports;
    port.close().await;
    wait_connected(&hubs[0], false).await;
}

#[tokio::test]
async fn answers_calls_before_cluster_is_formed() {
    let (listeners, peers) = listeners(2).await;
    let hubs = [hub(1, &peers), hub(2, &peers)];
    let mut listeners = listeners.into_iter().skip(1);
    let port = Port::open(&hubs[1], listeners.next().unwrap());

    let hello = hubs[0].hello(2).await.unwrap();
    assert_eq!((hello.node_id, hello.cluster, hello.formed), (2, None, false));
    assert_eq!(hello.detail, "waiting");

    let members = vec![1, 2];
    let form =
        FormCluster { cluster: CLUSTER, cluster_name: "test".to_owned(), members, shards: 3 };
    hubs[0].form(2, form.clone()).await.unwrap();
    let again = hubs[0].form(2, form).await.unwrap_err();
    assert_eq!(again, PeerError::Refused("this node is not empty".to_owned()));

    let call = async |request: &'static [u8], wait| {
        hubs[0].call(2, Bytes::from_static(request), wait).await
    };
    assert_eq!(&call(b"hi", PATIENCE).await.unwrap()[..], b"1:hi");
    let no = PeerError::Refused("not for node 1".to_owned());
    assert_eq!(call(b"no", PATIENCE).await.unwrap_err(), no);
    let short = std::time::Duration::from_millis(50);
    assert_eq!(call(b"never", short).await.unwrap_err(), PeerError::TimedOut);
    let unknown = hubs[0].hello(9).await.unwrap_err();
    assert_eq!(unknown, PeerError::Unknown { node: 9 });

    // A call in flight ends with the port.
    let (lost, ()) = tokio::join!(call(b"never", PATIENCE), port.close());
    assert!(matches!(lost, Err(PeerError::Lost { node: 2, .. })), "{lost:?}");
    let gone = hubs[0].hello(2).await.unwrap_err();
    assert!(matches!(gone, PeerError::Unreachable { node: 2, .. }), "{gone:?}");
    hubs[0].close();
    assert_eq!(hubs[0].hello(2).await.unwrap_err(), PeerError::Closed);
}

/// Starts a proxy that forwards bytes until it is frozen. It then keeps connections open, but idle.
async fn freezable(target: String) -> (String, CancellationToken) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let frozen = CancellationToken::new();
    let freeze = frozen.clone();
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((mut near, _)) = listener.accept().await {
            let (target, freeze) = (target.clone(), freeze.clone());
            held.push(tokio::spawn(async move {
                let mut far = TcpStream::connect(target).await.unwrap();
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                    () = freeze.cancelled() => std::future::pending().await,
                }
            }));
        }
    });
    (address, frozen)
}

#[tokio::test]
async fn silent_connection_is_closed() {
    let (listeners, mut peers) = listeners(2).await;
    let (address, frozen) = freezable(peers[&2].clone()).await;
    peers.insert(2, address);
    let hubs = [hub(1, &peers), hub(2, &peers)];
    let ports = listeners.into_iter().zip(&hubs);
    let _ports: Vec<_> = ports.map(|(listener, hub)| Port::open(hub, listener)).collect();
    hubs.iter().for_each(|hub| hub.set_identity(CLUSTER, 1));
    wait_connected(&hubs[0], true).await;
    let start = Instant::now();
    frozen.cancel();
    wait_connected(&hubs[0], false).await;
    eprintln!("silent connection closed after {:?}", start.elapsed());
    assert!(hubs[0].peers()[0].last_error.is_some());
    hubs.iter().for_each(|hub| hub.close());
}
