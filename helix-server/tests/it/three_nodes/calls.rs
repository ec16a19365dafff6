//! Calls that any node of a cluster serves (topics, producers, routes) and calls that only a leader
//! serves (data).

use std::collections::BTreeSet;
use std::time::Duration;

use helix_proto::log::v1::{
    AddPartitionsRequest, AppendRequest, CreateTopicRequest, DeleteTopicRequest, ErrorReason,
    FetchRequest, InitProducerRequest, ListTopicsRequest, Metadata, NamedPosition,
    ProducerIdentity, ResolveOffsetsRequest, StartPosition, Topic, TopicConfig,
    TransferLeaderRequest, TrimPartitionRequest, UpdateTopicRequest, WatchMetadataRequest,
    WatchMetadataResponse, start_position,
};
use tokio::task::JoinHandle;
use tonic::{Code, Status, Streaming};

use crate::support::{TestServer, append_request, detail, from_offset, reason, soon, start};
use crate::trio::{NODES, Trio, TrioPlan, is_redirect, metadata, shard_of, topic, until};

fn new_topic(name: &str, replication_factor: u32) -> CreateTopicRequest {
    CreateTopicRequest {
        name: name.to_owned(),
        partition_count: 3,
        replication_factor,
        ..CreateTopicRequest::default()
    }
}

async fn create(node: &TestServer, request: CreateTopicRequest) -> Result<Topic, Status> {
    let response = node.topics().create_topic(request).await?;
    Ok(response.into_inner().topic.unwrap())
}

async fn list(node: &TestServer, prefix: &str) -> Vec<String> {
    let request = ListTopicsRequest { prefix: prefix.to_owned(), ..ListTopicsRequest::default() };
    let topics = node.topics().list_topics(request).await.unwrap().into_inner().topics;
    topics.into_iter().map(|topic| topic.name).collect()
}

/// Appends to each partition at the leader that `node` reports.
async fn append_as_described(trio: &Trio, node: &TestServer, name: &str) {
    let count = topic(node, name).await.unwrap().partitions.len();
    for place in 0..count {
        until("the partition accepts appends", async || {
            let described = topic(node, name).await.unwrap();
            let leader = described.partitions[place].leader.as_ref()?.node_id;
            let partition = described.partitions[place].partition;
            let batch = append_request(&["a"]);
            let request = AppendRequest { topic: name.to_owned(), partition, ..batch };
            match trio.node(leader).produce().append(request).await {
                Err(status) if is_redirect(&status) => None,
                answer => Some(answer.unwrap()),
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_node_changes_topics_and_sees_them_at_once() {
    let mut trio = Trio::durable().await;
    for id in NODES {
        let node = trio.node(id);
        let name = format!("t{id}");
        let replication_factor = if id == 1 { 0 } else { 3 };
        let made = create(node, new_topic(&name, replication_factor)).await.unwrap();
        assert_eq!((made.partitions.len(), made.replication_factor), (3, 3));
        assert!(made.partitions.iter().all(|it| it.replicas == NODES), "{made:?}");
        assert_eq!(list(node, &name).await, [name.as_str()]);
        append_as_described(&trio, node, &name).await;
        let again = create(node, new_topic(&name, replication_factor)).await.unwrap();
        assert_eq!(again.partitions.len(), 3, "creating an equal topic succeeds");
        let other = CreateTopicRequest { partition_count: 5, ..new_topic(&name, 0) };
        let refused = create(node, other).await.unwrap_err();
        assert_eq!(reason(&refused), ErrorReason::TopicAlreadyExists);

        let config = TopicConfig { max_record_bytes: Some(1000), ..TopicConfig::default() };
        let update = UpdateTopicRequest {
            name: name.clone(),
            config: Some(config),
            update_mask: Some(prost_types::FieldMask { paths: vec!["max_record_bytes".into()] }),
            topic_id: 0,
        };
        node.topics().update_topic(update.clone()).await.unwrap();
        let seen = topic(node, &name).await.unwrap().config.unwrap();
        assert_eq!(seen.max_record_bytes, Some(1000));
        node.topics().update_topic(update).await.unwrap();

        let more = AddPartitionsRequest { name: name.clone(), partition_count: 6, topic_id: 0 };
        node.topics().add_partitions(more.clone()).await.unwrap();
        let seen = topic(node, &name).await.unwrap();
        assert_eq!(seen.partitions.len(), 6);
        append_as_described(&trio, node, &name).await;
        node.topics().add_partitions(more).await.unwrap();

        for other in NODES {
            topic(trio.node(other), &name).await.unwrap();
        }
        let delete = DeleteTopicRequest { name: name.clone(), topic_id: 0 };
        node.topics().delete_topic(delete.clone()).await.unwrap();
        assert_eq!(reason(&topic(node, &name).await.unwrap_err()), ErrorReason::TopicNotFound);
        assert!(list(node, &name).await.is_empty());
        let gone = node.topics().delete_topic(delete).await.unwrap_err();
        assert_eq!(reason(&gone), ErrorReason::TopicNotFound);
        for (_, other) in trio.nodes() {
            until("all nodes know the deletion", async || {
                list(other, &name).await.is_empty().then_some(())
            })
            .await;
        }
    }
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_replication_factors_that_the_cluster_cannot_have() {
    let mut trio = Trio::durable().await;
    for (_, node) in trio.nodes() {
        for replication_factor in [2, 5] {
            let refused = create(node, new_topic("odd", replication_factor)).await.unwrap_err();
            assert_eq!(reason(&refused), ErrorReason::InvalidArgument);
            assert!(refused.message().contains("replication_factor"), "{}", refused.message());
        }
        let check = CreateTopicRequest { validate_only: true, ..new_topic("odd", 3) };
        create(node, check).await.unwrap();
        assert!(list(node, "odd").await.is_empty(), "it was only validated");
    }
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_node_creates_producers() {
    let mut trio = Trio::durable().await;
    let init = async |node: u64, name: &str| {
        let request = InitProducerRequest { producer_name: name.to_owned() };
        let response = trio.node(node).produce().init_producer(request).await.unwrap();
        response.into_inner().producer.unwrap()
    };
    let mut ids = BTreeSet::new();
    let mut named = Vec::new();
    for node in [1, 2, 3, 2, 1] {
        for _ in 0..3 {
            assert!(ids.insert(init(node, "").await.producer_id), "each id is unique");
        }
        named.push(init(node, "worker").await);
    }
    let ProducerIdentity { producer_id, epoch } = named[0];
    for (later, producer) in (0..).zip(&named) {
        let expected = ProducerIdentity { producer_id, epoch: epoch + later };
        assert_eq!(*producer, expected, "a later one of the same name fences the earlier ones");
    }
    let append = async |producer: ProducerIdentity| {
        let ask = async |node: &TestServer| {
            let batch = append_request(&["a"]);
            let (producer, first_sequence) = (Some(producer), Some(0));
            let request = AppendRequest { producer, first_sequence, ..batch };
            node.produce().append(request).await
        };
        trio.call_leader(0, ask).await
    };
    let made_up = ProducerIdentity { epoch: u32::MAX, ..named[4] };
    assert_eq!(reason(&append(made_up).await.unwrap_err()), ErrorReason::UnknownProducer);
    append(named[4]).await.unwrap();
    let fenced = append(named[3]).await.unwrap_err();
    assert_eq!(reason(&fenced), ErrorReason::ProducerFenced);
    trio.stop_all().await;
}

fn expect_hint(status: &Status, leader: u64, endpoint: &str) {
    assert_eq!(reason(status), ErrorReason::NotLeader, "{status:?}");
    assert_eq!(status.code(), Code::FailedPrecondition);
    let detail = detail(status);
    assert!(detail.retryable && !detail.may_have_applied);
    let hint = detail.leader.expect("the leader is known");
    assert_eq!((hint.node_id, hint.endpoint.as_str()), (leader, endpoint));
    assert!(hint.term > 0);
    let trailer = |name| status.metadata().get(name).unwrap().to_str().unwrap().to_owned();
    assert_eq!(trailer("helix-leader-node"), leader.to_string());
    assert_eq!(trailer("helix-leader-endpoint"), endpoint);
    assert_eq!(trailer("helix-leader-term"), hint.term.to_string());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower_redirects_to_the_leader() {
    let mut trio = Trio::durable().await;
    let (leader, shard_id) = trio.leader_of(0).await;
    let endpoint = trio.plan.config(leader).listen_addr.to_string();
    for follower in trio.followers_of(0).await {
        let node = trio.node(follower);
        let append = node.produce().append(append_request(&["a"])).await.unwrap_err();
        expect_hint(&append, leader, &endpoint);
        let fetch = FetchRequest { partitions: vec![from_offset(0, 0)], ..FetchRequest::default() };
        let fetch = node.consume().fetch(fetch).await.unwrap_err();
        expect_hint(&fetch, leader, &endpoint);
        let latest = start(0, start_position::Position::Named(NamedPosition::Latest.into()));
        let resolve = ResolveOffsetsRequest {
            topic: "default".to_owned(),
            partitions: vec![0],
            position: latest.start,
            topic_id: 0,
        };
        let resolve = node.consume().resolve_offsets(resolve).await.unwrap_err();
        expect_hint(&resolve, leader, &endpoint);
        let trim = TrimPartitionRequest {
            topic: "default".to_owned(),
            partition: 0,
            trim_offset: 0,
            topic_id: 0,
        };
        let trim = node.topics().trim_partition(trim).await.unwrap_err();
        expect_hint(&trim, leader, &endpoint);
        let transfer = TransferLeaderRequest { shard_id, target_node_id: follower };
        let transfer = node.cluster().transfer_leader(transfer).await.unwrap_err();
        expect_hint(&transfer, leader, &endpoint);
    }
    assert_eq!(trio.write(0, &["a"]).await.first_offset, Some(0));
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resolves_positions_of_partitions_led_by_the_node() {
    let mut trio = Trio::durable().await;
    let routes = metadata(trio.node(1)).await;
    let leaders = trio.leaders().await;
    for (id, node) in trio.nodes() {
        let named = start_position::Position::Named(NamedPosition::Latest.into());
        let request = ResolveOffsetsRequest {
            topic: "default".to_owned(),
            partitions: Vec::new(),
            position: Some(StartPosition { position: Some(named), ..StartPosition::default() }),
            topic_id: 0,
        };
        let offsets = node.consume().resolve_offsets(request).await.unwrap().into_inner().offsets;
        let resolved: Vec<u32> = offsets.iter().map(|resolved| resolved.partition).collect();
        let is_leader = |partition: &u32| leaders[&shard_of(&routes, "default", *partition)] == id;
        assert_eq!(resolved, (0..4).filter(is_leader).collect::<Vec<_>>());
    }
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topic_created_on_one_node_is_found_on_the_others() {
    let mut trio = Trio::durable().await;
    for round in 0..5 {
        let name = format!("round-{round}");
        create(trio.node(1), new_topic(&name, 0)).await.unwrap();
        let request = AppendRequest { topic: name.clone(), ..append_request(&["a"]) };
        if let Err(status) = trio.node(3).produce().append(request).await {
            let allowed = [ErrorReason::NotLeader, ErrorReason::NoLeader];
            assert!(allowed.contains(&reason(&status)), "{status:?}");
        }
        assert_eq!(topic(trio.node(2), &name).await.unwrap().name, name);
    }
    for (_, node) in trio.nodes() {
        let request = AppendRequest { topic: "nowhere".to_owned(), ..append_request(&["a"]) };
        let status = node.produce().append(request).await.unwrap_err();
        assert_eq!(reason(&status), ErrorReason::TopicNotFound);
    }
    trio.stop_all().await;
}

/// Waits for metadata that satisfies the condition.
async fn shown(
    stream: &mut Streaming<WatchMetadataResponse>,
    shows: impl Fn(&Metadata) -> bool,
) -> Metadata {
    loop {
        let response = soon(stream.message()).await.unwrap().expect("the stream continues");
        let metadata = response.metadata.unwrap();
        if shows(&metadata) {
            return metadata;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_on_any_node_see_new_topics_and_new_leaders() {
    let mut trio = Trio::durable().await;
    let mut streams = Vec::new();
    for (_, node) in trio.nodes() {
        let stream = node.cluster().watch_metadata(WatchMetadataRequest::default()).await;
        streams.push(stream.unwrap().into_inner());
    }
    let before = metadata(trio.node(2)).await;
    create(trio.node(2), new_topic("fresh", 0)).await.unwrap();
    for stream in &mut streams {
        let has_topic = |it: &Metadata| it.topics.iter().any(|route| route.topic == "fresh");
        let seen = shown(stream, has_topic).await;
        assert!(seen.version > before.version);
    }
    let (leader, shard_id) = trio.leader_of(0).await;
    let target = NODES.into_iter().find(|node| *node != leader).unwrap();
    trio.transfer(shard_id, target).await;
    for stream in &mut streams {
        let is_moved = |it: &Metadata| {
            let route = it.shards.iter().find(|route| route.shard_id == shard_id).unwrap();
            route.leader.as_ref().is_some_and(|leader| leader.node_id == target)
        };
        shown(stream, is_moved).await;
    }
    trio.stop_all().await;
}

/// Slow enough for a response to be lost on its way, too fast for a timeout.
const SLOWLY: Duration = Duration::from_millis(400);

/// Deletes a topic through node `asked` so that the leader's response is lost on its way.
async fn delete_without_response(
    trio: &Trio,
    (leader, asked): (u64, u64),
    name: &str,
) -> JoinHandle<Result<(), Status>> {
    loop {
        create(trio.node(asked), new_topic(name, 0)).await.unwrap();
        trio.set_link(asked, leader, SLOWLY, false);
        let mut topics = trio.node(asked).topics();
        let request = DeleteTopicRequest { name: name.to_owned(), topic_id: 0 };
        let deletion = tokio::spawn(async move { topics.delete_topic(request).await.map(drop) });
        until("the leader has deleted it", async || {
            trio.node(leader).running.node().topic(name).is_err().then_some(())
        })
        .await;
        trio.set_link(asked, leader, SLOWLY, true);
        // On a slow machine the response may have arrived first.
        if !deletion.is_finished() {
            return deletion;
        }
        trio.set_link(asked, leader, Duration::ZERO, false);
        deletion.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topic_is_deleted_once_when_the_response_is_lost() {
    let mut trio = Trio::start(TrioPlan::linked().await.steady()).await;
    let (leader, asked) = leader_and_other(&trio).await;
    for (name, is_recreated) in [("gone", false), ("recreated", true)] {
        let deletion = delete_without_response(&trio, (leader, asked), name).await;
        let leader_node = trio.node(leader);
        let made_anew = async {
            if is_recreated {
                create(leader_node, new_topic(name, 0)).await.unwrap();
            }
        };
        let lost = async {
            until("a new topic has its name", async || {
                (leader_node.running.node().topic(name).is_ok() == is_recreated).then_some(())
            })
            .await;
            trio.break_connections(asked);
            trio.set_link(asked, leader, Duration::ZERO, false);
        };
        tokio::join!(made_anew, lost);
        deletion.await.unwrap().unwrap();
        let left = list(leader_node, name).await;
        assert_eq!(left.len(), usize::from(is_recreated), "only the first topic is deleted");
    }
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_to_a_lost_leader_may_have_applied() {
    let mut trio = Trio::start(TrioPlan::linked().await.steady()).await;
    let (leader, asked) = leader_and_other(&trio).await;
    let mut names = (0..).map(|number| format!("made-{number}"));
    let creation = loop {
        let name = names.next().expect("they never end");
        trio.set_link(asked, leader, SLOWLY, false);
        let (mut topics, request) = (trio.node(asked).topics(), new_topic(&name, 0));
        let creation = tokio::spawn(async move { topics.create_topic(request).await });
        until("the leader has created it", async || {
            trio.node(leader).running.node().topic(&name).ok()
        })
        .await;
        // As above.
        if !creation.is_finished() {
            break creation;
        }
        creation.await.unwrap().unwrap();
    };
    trio.remove_links(asked);
    let status = creation.await.unwrap().unwrap_err();
    assert_eq!(reason(&status), ErrorReason::OutcomeUnknown);
    assert!(detail(&status).may_have_applied);

    // A request that was not sent has no effect.
    let request = new_topic("never", 0);
    let status = create(trio.node(asked), request).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::NoLeader);
    assert!(!detail(&status).may_have_applied);
    trio.stop_all().await;
}

/// Returns the leader of shard 0, and another node.
async fn leader_and_other(trio: &Trio) -> (u64, u64) {
    let leader = trio.leaders().await[&0];
    (leader, if leader == 1 { 2 } else { 1 })
}
