//! Tests of learning routes from metadata, hints and failures, without a network.

use helix_proto::error as wire;
use helix_proto::log::v1::{ErrorDetail, Node, ShardRoute, TopicRoute};

use super::*;

fn hint(node_id: u64, term: u64) -> LeaderHint {
    LeaderHint { node_id, endpoint: format!("n{node_id}:9092"), term }
}

fn metadata(version: u64, leader: LeaderHint) -> Metadata {
    Metadata {
        cluster_id: "c".to_owned(),
        version,
        nodes: (1..=3)
            .map(|id| Node { node_id: id, endpoint: hint(id, 0).endpoint, ..Node::default() })
            .collect(),
        shards: vec![ShardRoute {
            shard_id: 1,
            leader: Some(leader),
            replicas: vec![1, 2, 3],
            ..ShardRoute::default()
        }],
        topics: vec![TopicRoute {
            topic: "orders".to_owned(),
            shard_ids: vec![1, 1],
            topic_id: 4,
            ..TopicRoute::default()
        }],
    }
}

fn routing() -> Routing {
    Routing::new(Config::new(["seed:9092"])).unwrap()
}

fn learn(routing: &Routing, metadata: Metadata) {
    let seed = routing.node("seed:9092").unwrap();
    routing.learn_all("orders", metadata, &seed);
}

fn route(routing: &Routing) -> Route {
    routing.table().route("orders", 0).unwrap()
}

fn not_leader(hint: LeaderHint) -> Error {
    let detail = ErrorDetail { leader: Some(hint), ..wire::detail(ErrorReason::NotLeader) };
    Error::from_status(&wire::to_status(&detail, "", None))
}

#[tokio::test]
async fn routes_a_partition_to_its_shard_leader() {
    let routing = routing();
    learn(&routing, metadata(1, hint(1, 5)));
    let found = routing.leader("orders", 1).await.unwrap();
    assert_eq!((found.shard_id, found.node_id, found.term), (1, 1, 5));
    assert_eq!(found.connection.address(), "n1:9092");
    assert_eq!(routing.partition_count("orders").await.unwrap(), 2);
    let table = routing.table();
    assert!(table.route("orders", 2).unwrap_err().is(ErrorReason::PartitionNotFound));
    assert!(table.route("none", 0).unwrap_err().is(ErrorReason::TopicNotFound));
}

#[tokio::test]
async fn a_shard_that_no_node_serves_has_its_damage_as_the_reason() {
    let routing = routing();
    let closed = |version, fault: &str, is_damaged| {
        let mut metadata = metadata(version, hint(1, 5));
        let route = &mut metadata.shards[0];
        (route.leader, route.fault, route.is_damaged) = (None, fault.to_owned(), is_damaged);
        metadata
    };
    let reason = || {
        let error = routing.table().route("orders", 0).unwrap_err();
        (error.reason, error.retryable, error.message.clone())
    };
    learn(&routing, closed(1, "", false));
    assert_eq!(reason().0, Some(ErrorReason::NoLeader));
    learn(&routing, closed(2, "000001.seg is damaged", false));
    let (what, retryable, message) = reason();
    assert_eq!((what, retryable), (Some(ErrorReason::NoLeader), true));
    assert!(message.contains("000001.seg is damaged"), "{message}");
    learn(&routing, closed(2, "000001.seg is damaged", true));
    let (what, retryable, message) = reason();
    assert_eq!((what, retryable), (Some(ErrorReason::CorruptLog), false));
    assert!(message.contains("000001.seg is damaged"), "{message}");
    // Outdated metadata changes nothing. After a repair the shard is served again.
    learn(&routing, closed(1, "", false));
    assert_eq!(reason().0, Some(ErrorReason::CorruptLog));
    learn(&routing, metadata(3, hint(1, 6)));
    assert_eq!(route(&routing).node_id, 1);
}

#[tokio::test]
async fn leader_without_address_uses_the_queried_one() {
    let routing = routing();
    learn(&routing, metadata(1, LeaderHint { endpoint: String::new(), ..hint(1, 5) }));
    assert_eq!(route(&routing).connection.address(), "seed:9092");
}

#[tokio::test]
async fn follows_a_hint_of_a_later_term() {
    let routing = routing();
    learn(&routing, metadata(1, hint(1, 5)));
    assert!(routing.on_failure(&route(&routing), &not_leader(hint(2, 6))));
    assert_eq!((route(&routing).node_id, route(&routing).term), (2, 6));
}

#[tokio::test]
async fn ignores_a_stale_hint() {
    let routing = routing();
    learn(&routing, metadata(1, hint(1, 5)));
    assert!(!routing.on_failure(&route(&routing), &not_leader(hint(2, 4))));
    let lost = routing.table().route("orders", 0).unwrap_err();
    assert!(lost.is(ErrorReason::NoLeader) && lost.retryable);
    // Outdated metadata does not restore the old leader either.
    learn(&routing, metadata(1, hint(3, 4)));
    assert!(routing.table().route("orders", 0).is_err());
    learn(&routing, metadata(2, hint(3, 6)));
    assert_eq!(route(&routing).node_id, 3);
}

#[tokio::test]
async fn ignores_a_hint_to_the_failed_node() {
    let routing = routing();
    learn(&routing, metadata(1, hint(1, 5)));
    assert!(!routing.on_failure(&route(&routing), &not_leader(hint(1, 5))));
    assert!(!routing.on_failure(
        &Route { node_id: 9, ..old_route(&routing) },
        &not_leader(LeaderHint { node_id: 0, ..LeaderHint::default() })
    ));
}

fn old_route(routing: &Routing) -> Route {
    let connection = routing.node("n9:9092").unwrap();
    Route { shard_id: 1, node_id: 9, term: 1, connection, topic_id: 4 }
}

#[tokio::test]
async fn failure_of_an_old_leader_uses_the_new_one() {
    let routing = routing();
    learn(&routing, metadata(1, hint(1, 5)));
    let old = route(&routing);
    learn(&routing, metadata(2, hint(2, 6)));
    assert!(routing.on_failure(&old, &Error::timed_out("append")));
    assert_eq!(route(&routing).node_id, 2);
}

#[tokio::test]
async fn another_cluster_resets_the_table() {
    let routing = routing();
    learn(&routing, metadata(9, hint(1, 50)));
    let fresh = Metadata { cluster_id: "d".to_owned(), ..metadata(1, hint(2, 1)) };
    let seed = routing.node("seed:9092").unwrap();
    let mut round = QueryRound::default();
    let query = RouteQuery::Leader("orders", 0);
    let take = |round: &mut QueryRound, metadata: Metadata| {
        routing.on_metadata(&query, "seed:9092".to_owned(), Ok((metadata, seed.clone())), round)
    };
    // The client does not switch while a node of the known cluster responds.
    assert!(!take(&mut round, fresh.clone()));
    assert!(take(&mut round, metadata(9, hint(1, 50))));
    assert_eq!(route(&routing).term, 50);
    // Nor does it switch to a node that has not joined a cluster.
    let mut round = QueryRound::default();
    let blank = Metadata { cluster_id: String::new(), ..metadata(0, hint(3, 0)) };
    assert!(!take(&mut round, blank));
    assert!(routing.conclude(&query, &mut round).is_err());
    let mut round = QueryRound::default();
    assert!(!take(&mut round, fresh));
    routing.conclude(&query, &mut round).unwrap();
    assert_eq!((route(&routing).node_id, route(&routing).term), (2, 1));
}

#[tokio::test]
async fn accepts_lower_terms_after_a_long_time_without_leader() {
    let routing = routing();
    learn(&routing, metadata(9, hint(1, 50)));
    let mut table = routing.table();
    let lost_at = Instant::now();
    table.forget_node(1, lost_at);
    let old = |term| KnownLeader::new(&hint(2, term), routing.node("n2:9092").unwrap());
    assert!(!table.learn(1, old(1), lost_at));
    // The leader of the known term is reported and lost again, which does not restart the timeout.
    assert!(table.learn(1, old(50), lost_at));
    table.forget_node(2, lost_at + Duration::from_secs(2));
    assert!(table.learn(1, old(1), lost_at + Duration::from_secs(3)));
    assert_eq!(table.route("orders", 0).unwrap().term, 1);
}

#[tokio::test]
async fn outdated_metadata_restores_no_old_address_or_topic() {
    let routing = routing();
    let moved = |endpoint: &str| LeaderHint { endpoint: endpoint.to_owned(), ..hint(1, 5) };
    let grown = TopicRoute {
        topic: "orders".to_owned(),
        shard_ids: vec![1, 1, 1],
        topic_id: 4,
        ..TopicRoute::default()
    };
    let now = Metadata { topics: vec![grown], ..metadata(3, moved("new:9092")) };
    learn(&routing, now);
    learn(&routing, metadata(2, moved("old:9092")));
    assert_eq!(route(&routing).connection.address(), "new:9092");
    assert_eq!(routing.partition_count("orders").await.unwrap(), 3);
    // A later term is accepted from outdated metadata too.
    learn(&routing, metadata(2, hint(2, 6)));
    assert_eq!(route(&routing).node_id, 2);
}

#[tokio::test]
async fn replicas_are_known_without_a_leader() {
    let routing = routing();
    learn(&routing, metadata(1, LeaderHint::default()));
    let replicas = routing.replicas("orders", 0).await.unwrap();
    let nodes: Vec<_> = replicas.iter().map(|route| route.node_id).collect();
    assert_eq!(nodes, [1, 2, 3]);
    assert!(routing.table().route("orders", 0).is_err());
}

#[tokio::test]
async fn silent_addresses_are_queried_last() {
    let routing = routing();
    learn(&routing, metadata(1, hint(1, 5)));
    let addresses = ["n1:9092", "n2:9092", "n3:9092", "seed:9092"];
    assert_eq!(routing.addresses(), addresses);
    routing.on_failure(&route(&routing), &Error::timed_out("append"));
    assert_eq!(routing.addresses(), ["n2:9092", "n3:9092", "seed:9092", "n1:9092"]);
    routing.table().prefer("n3:9092");
    assert_eq!(routing.addresses()[0], "n3:9092");
    routing.on_response(&routing.node("n1:9092").unwrap());
    routing.table().change_preferred();
    assert_eq!(routing.addresses(), ["n3:9092", "seed:9092", "n1:9092", "n2:9092"]);
    let mut tried = Vec::new();
    let order: Vec<_> =
        (0..5).map(|_| routing.next_untried(&mut tried).unwrap().address().to_owned()).collect();
    assert_eq!(order, ["n3:9092", "seed:9092", "n1:9092", "n2:9092", "n3:9092"]);
}

#[tokio::test]
async fn leader_has_moved_when_another_node_leads() {
    let routing = routing();
    learn(&routing, metadata(1, hint(1, 5)));
    let old = route(&routing);
    let has_moved = |shards: &[u32]| routing.table().has_moved(shards, &old);
    learn(&routing, metadata(2, hint(1, 7)));
    assert!(!has_moved(&[1]), "the same node was elected again");
    learn(&routing, metadata(3, hint(2, 8)));
    assert!(has_moved(&[1]) && has_moved(&[0, 1]) && !has_moved(&[0]));
}

#[tokio::test]
async fn forgets_a_deleted_topic() {
    let routing = routing();
    learn(&routing, metadata(1, hint(1, 5)));
    learn(&routing, Metadata { topics: Vec::new(), ..metadata(2, hint(1, 5)) });
    assert!(routing.table().route("orders", 0).unwrap_err().is(ErrorReason::TopicNotFound));
}

#[test]
fn malformed_addresses_are_rejected_before_any_call() {
    for wrong in
        ["n1", "n1:", "n1:0", "n1:99999", "http://n1:9092/path", "https://n1:9092", "n 1:1"]
    {
        let error = Routing::new(Config::new([wrong])).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument, "{wrong}");
        assert!(error.message.contains("host:port"), "{error}");
    }
    let routing = Routing::new(Config::new([" n1:1 ", "http://n2:2"])).unwrap();
    assert_eq!(routing.addresses(), ["n1:1", "n2:2"]);
}

#[tokio::test]
async fn a_node_is_reached_over_its_socket_while_the_socket_responds() {
    const SOCKET: &str = "unix:/run/helix.sock";
    let routing = Routing::new(Config::new([SOCKET])).unwrap();
    let socket = routing.node(SOCKET).unwrap();
    routing.connections.prefer(&socket, "n1:9092");
    let mut found = metadata(1, hint(1, 5));
    routing.use_sockets(&mut found);
    routing.learn_all("orders", found, &socket);
    assert_eq!(route(&routing).connection.address(), SOCKET);
    assert_eq!(routing.addresses().iter().filter(|it| *it == "n1:9092").count(), 0);
    // Hints of other nodes name TCP addresses.
    assert!(routing.on_failure(&route(&routing), &not_leader(hint(2, 6))));
    assert_eq!(route(&routing).connection.address(), "n2:9092");
    assert!(routing.on_failure(&route(&routing), &not_leader(hint(1, 7))));
    assert_eq!(route(&routing).connection.address(), SOCKET);
    // After a failed call the other nodes name the TCP address.
    routing.on_failure(&route(&routing), &Error::timed_out("append"));
    let mut named = metadata(2, hint(1, 8));
    routing.use_sockets(&mut named);
    let other = routing.node("n2:9092").unwrap();
    routing.learn_all("orders", named, &other);
    assert_eq!(route(&routing).connection.address(), "n1:9092");
    routing.connections.prefer(&socket, "n1:9092");
    routing.on_silence(&socket, &Error::timed_out("describe group"));
    assert_eq!(routing.node("n1:9092").unwrap().address(), "n1:9092");
    // Another node listens on the socket now.
    routing.connections.prefer(&socket, "n3:9092");
    assert_eq!(routing.node("n1:9092").unwrap().address(), "n1:9092");
    assert_eq!(routing.node("n3:9092").unwrap().address(), SOCKET);
    routing.connections.forget_socket(SOCKET);
    assert_eq!(routing.node("n3:9092").unwrap().address(), "n3:9092");
}

#[test]
fn a_socket_excludes_a_custom_dial_function() {
    let dial = crate::config::Dial::with(|endpoint| endpoint.connect_lazy());
    let config = Config { dial, ..Config::new(["unix:/run/helix.sock"]) };
    let error = Routing::new(config).unwrap().node("unix:/run/helix.sock").unwrap_err();
    assert!(error.to_string().contains("custom dial"), "{error}");
    let error = Routing::new(Config::new(["unix:helix.sock"])).unwrap_err();
    assert!(error.to_string().contains("must be absolute"), "{error}");
}
