//! TopicService: creating, describing, updating, trimming and deleting topics.

use helix_proto::log::v1::{
    AddPartitionsRequest, CreateTopicRequest, DeleteTopicRequest, Durability, ErrorReason,
    FetchRequest, GetTopicRequest, ListTopicsRequest, Topic, TopicConfig, TrimPartitionRequest,
    UpdateTopicRequest,
};
use prost_types::FieldMask;
use tonic::{Code, Status};

use crate::support::{TestServer, earliest, on_both, reason, values};

fn create(name: &str, partition_count: u32) -> CreateTopicRequest {
    CreateTopicRequest { name: name.to_owned(), partition_count, ..CreateTopicRequest::default() }
}

async fn created(server: &TestServer, request: CreateTopicRequest) -> Result<Topic, Status> {
    let response = server.topics().create_topic(request).await?;
    Ok(response.into_inner().topic.unwrap())
}

async fn described(server: &TestServer, name: &str) -> Result<Topic, Status> {
    let request = GetTopicRequest { name: name.to_owned() };
    Ok(server.topics().get_topic(request).await?.into_inner().topic.unwrap())
}

async fn listed(server: &TestServer, request: ListTopicsRequest) -> (Vec<String>, String) {
    let response = server.topics().list_topics(request).await.unwrap().into_inner();
    let names = response.topics.into_iter().map(|topic| topic.name).collect();
    (names, response.next_page_token)
}

#[tokio::test]
async fn new_server_has_the_default_topic() {
    let server = TestServer::in_memory().await;
    let topic = described(&server, "default").await.unwrap();
    assert_eq!(topic.partitions.len(), 4);
    assert_eq!(topic.replication_factor, 1);
    let config = topic.config.unwrap();
    assert_eq!(config.default_durability(), Durability::QuorumSynced);
    assert_eq!(config.min_durability(), Durability::None);
    assert_eq!(config.retention_bytes, Some(0), "unlimited");
    let partition = &topic.partitions[1];
    assert_eq!(partition.partition, 1);
    assert_eq!(partition.leader.as_ref().unwrap().node_id, 1);
    let address = server.running.local_addr().to_string();
    assert_eq!(partition.leader.as_ref().unwrap().endpoint, address);
    assert_eq!(partition.replicas, [1]);
    assert_eq!(partition.watermarks.unwrap().high_watermark, 0);
}

#[tokio::test]
async fn created_topic_is_usable_at_once() {
    on_both(async |server: TestServer| {
        let config = TopicConfig {
            retention_time: Some(prost_types::Duration { seconds: 3600, nanos: 0 }),
            max_batch_bytes: Some(1 << 20),
            ..TopicConfig::default()
        };
        let request = CreateTopicRequest { config: Some(config), ..create("orders", 3) };
        let topic = created(&server, request.clone()).await.unwrap();
        assert_eq!((topic.name.as_str(), topic.partitions.len()), ("orders", 3));
        let config = topic.config.unwrap();
        assert_eq!(config.retention_time.unwrap().seconds, 3600);
        assert_eq!(config.max_batch_bytes, Some(1 << 20));
        assert!(config.max_record_bytes.unwrap() > 0, "defaults are filled in");
        // An equal request succeeds again; a different one with the name is refused.
        created(&server, request.clone()).await.unwrap();
        let other = CreateTopicRequest { partition_count: 4, ..request };
        let status = created(&server, other).await.unwrap_err();
        assert_eq!(reason(&status), ErrorReason::TopicAlreadyExists);
        assert_eq!(status.code(), Code::AlreadyExists);
    })
    .await;
}

#[tokio::test]
async fn validating_creates_nothing() {
    let server = TestServer::in_memory().await;
    let request = CreateTopicRequest { validate_only: true, ..create("orders", 3) };
    let topic = created(&server, request).await.unwrap();
    assert_eq!(topic.name, "orders");
    let status = described(&server, "orders").await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::TopicNotFound);
}

#[tokio::test]
async fn topics_are_listed_by_name_page_by_page() {
    let server = TestServer::in_memory().await;
    for name in ["orders-b", "orders-a", "orders-c", "other"] {
        created(&server, create(name, 1)).await.unwrap();
    }
    let all = listed(&server, ListTopicsRequest::default()).await;
    let expected = ["default", "orders-a", "orders-b", "orders-c", "other"];
    assert_eq!(all, (expected.map(str::to_owned).to_vec(), String::new()));
    let page = |page_token: &str| ListTopicsRequest {
        prefix: "orders-".to_owned(),
        page_size: 2,
        page_token: page_token.to_owned(),
    };
    let (names, token) = listed(&server, page("")).await;
    assert_eq!(names, ["orders-a", "orders-b"]);
    let (names, token) = listed(&server, page(&token)).await;
    assert_eq!((names, token.as_str()), (vec!["orders-c".to_owned()], ""));
    let negative = ListTopicsRequest { page_size: -1, ..ListTopicsRequest::default() };
    let status = server.topics().list_topics(negative).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::InvalidArgument);
}

#[tokio::test]
async fn update_changes_only_the_fields_of_its_mask() {
    let server = TestServer::in_memory().await;
    let update = async |config: TopicConfig, paths: &[&str]| {
        let paths = paths.iter().map(|path| (*path).to_owned()).collect();
        let request = UpdateTopicRequest {
            name: "default".to_owned(),
            config: Some(config),
            update_mask: Some(FieldMask { paths }),
            topic_id: 0,
        };
        server.topics().update_topic(request).await.map(|r| r.into_inner().topic.unwrap())
    };
    let config = TopicConfig {
        retention_bytes: Some(1 << 30),
        max_record_bytes: Some(10),
        ..TopicConfig::default()
    };
    let before = described(&server, "default").await.unwrap().config.unwrap();
    let after = update(config, &["retention_bytes"]).await.unwrap().config.unwrap();
    assert_eq!(after, TopicConfig { retention_bytes: Some(1 << 30), ..before });
    let reset = update(TopicConfig::default(), &["retention_bytes"]).await.unwrap();
    assert_eq!(reset.config.unwrap(), before, "unset goes back to the default");
    update(config, &["max_record_bytes"]).await.unwrap();
    let long = crate::support::append_request(&["longer than ten bytes"]);
    let status = server.produce().append(long).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::RecordTooLarge, "the limit applies at once");
    for paths in [&[][..], &["partition_count"]] {
        let status = update(config, paths).await.unwrap_err();
        assert_eq!(reason(&status), ErrorReason::InvalidArgument);
    }
}

#[tokio::test]
async fn partitions_can_be_added_but_not_removed() {
    on_both(async |server: TestServer| {
        let add = async |partition_count| {
            let request =
                AddPartitionsRequest { name: "default".to_owned(), partition_count, topic_id: 0 };
            server.topics().add_partitions(request).await.map(|r| r.into_inner().topic.unwrap())
        };
        assert_eq!(add(6).await.unwrap().partitions.len(), 6);
        assert_eq!(add(6).await.unwrap().partitions.len(), 6);
        server.append_to(5, &["a"]).await;
        assert_eq!(reason(&add(5).await.unwrap_err()), ErrorReason::InvalidArgument);
    })
    .await;
}

#[tokio::test]
async fn deleted_topic_is_gone_and_its_name_is_free() {
    on_both(async |server: TestServer| {
        server.append(&["old"]).await;
        let delete = async || {
            let request = DeleteTopicRequest { name: "default".to_owned(), topic_id: 0 };
            server.topics().delete_topic(request).await
        };
        delete().await.unwrap();
        let status = described(&server, "default").await.unwrap_err();
        assert_eq!(reason(&status), ErrorReason::TopicNotFound);
        created(&server, create("default", 1)).await.unwrap();
        assert!(server.records(0, 0).await.is_empty(), "another topic of the same name");
        assert_eq!(server.append(&["new"]).await.ack.unwrap().first_offset, Some(0));
    })
    .await;
}

#[tokio::test]
async fn trimming_moves_the_log_start_forward_only() {
    on_both(async |server: TestServer| {
        server.append(&["a", "b", "c"]).await;
        let trim = async |trim_offset| {
            let topic = "default".to_owned();
            let request = TrimPartitionRequest { topic, partition: 0, trim_offset, topic_id: 0 };
            let response = server.topics().trim_partition(request).await?;
            Ok::<_, Status>(response.into_inner().watermarks.unwrap().log_start_offset)
        };
        assert_eq!(trim(2).await.unwrap(), 2);
        assert_eq!(trim(1).await.unwrap(), 2);
        assert_eq!(reason(&trim(4).await.unwrap_err()), ErrorReason::OffsetOutOfRange);
        let request = FetchRequest { partitions: vec![earliest(0)], ..FetchRequest::default() };
        assert_eq!(values(&server.fetch_one(request).await.records), ["c"]);
    })
    .await;
}
