//! Groups that are too large for one response, and subscriptions that are too large for one
//! assignment.

use helix_client::{Client, Config, NewTopic, Transport};
use helix_proto::log::v1::{
    CommittedOffset, DeliveryStatus, DescribeGroupRequest, GetOffsetsRequest, TopicPartition,
};
use prost::Message;

use crate::groups::{TestMember, groups};
use crate::support::TestServer;

const GROUP: &str = "readers";
const PARTITIONS: u32 = 3_000;

/// Encoded size of the largest page, which is below the limit of clients in most languages.
const PAGE_BYTES_MAX: usize = 2 << 20;

/// A client whose messages have at most 4 MiB.
fn client(server: &TestServer) -> Client {
    let transport = Transport { message_bytes_max: 4 << 20, ..Transport::default() };
    let addr = server.running.local_addr().to_string();
    Client::new(Config { transport, ..Config::new([addr]) }).unwrap()
}

async fn commit_with_metadata(client: &Client, topic: &str) {
    let metadata = "m".repeat(4 << 10);
    let commit = |partition| CommittedOffset {
        partition: Some(TopicPartition { topic: topic.to_owned(), partition, topic_id: 0 }),
        offset: 0,
        metadata: metadata.clone(),
    };
    let all: Vec<_> = (0..PARTITIONS).map(commit).collect();
    for offsets in all.chunks(11) {
        client.admin().commit_group_offsets(GROUP, offsets).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn group_with_much_metadata_is_described_whole() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    let admin = client.admin();
    admin.create_topic(&NewTopic::new("orders", PARTITIONS)).await.unwrap();
    commit_with_metadata(&client, "orders").await;

    let offsets = admin.group_offsets(GROUP, &["orders"]).await.unwrap();
    let of = |partition: &Option<TopicPartition>| partition.as_ref().unwrap().partition;
    let committed = |offset: &Option<CommittedOffset>| {
        let committed = offset.as_ref().unwrap();
        assert_eq!(committed.metadata.len(), 4 << 10);
        of(&committed.partition)
    };
    let numbers: Vec<u32> = offsets.iter().map(|it| committed(&it.committed)).collect();
    assert_eq!(numbers, (0..PARTITIONS).collect::<Vec<_>>());

    let mut member = TestMember::new("a", &["orders"]);
    member.until_owns(&server, PARTITIONS as usize).await;
    let described = admin.describe_group(GROUP, true).await.unwrap();
    assert_eq!((described.members.len(), &*described.next_page_token), (1, ""));
    let partitions = described.partitions.iter();
    let numbers: Vec<u32> = partitions.map(|it| of(&it.partition)).collect();
    assert_eq!(numbers, (0..PARTITIONS).collect::<Vec<_>>());
    assert!(described.partitions.iter().all(|it| it.history.len() == 1));

    // As other clients see it.
    let request = GetOffsetsRequest { group: GROUP.to_owned(), ..GetOffsetsRequest::default() };
    let page = groups(&server).get_offsets(request).await.unwrap().into_inner();
    assert!((PAGE_BYTES_MAX / 2..PAGE_BYTES_MAX).contains(&page.encoded_len()));
    assert!(!page.next_page_token.is_empty());
    let describe = async |page_size, page_token: &str| {
        let request = DescribeGroupRequest {
            group: GROUP.to_owned(),
            include_history: true,
            page_size,
            page_token: page_token.to_owned(),
        };
        groups(&server).describe_group(request).await.unwrap().into_inner()
    };
    let first = describe(2, "").await;
    assert_eq!((first.members.len(), first.partitions.len()), (1, 1));
    let second = describe(0, &first.next_page_token).await;
    assert!((PAGE_BYTES_MAX / 2..PAGE_BYTES_MAX).contains(&second.encoded_len()));
    assert!(second.members.is_empty());
    assert_eq!(of(&second.partitions[0].partition), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_beyond_an_assignment_say_so() {
    let server = TestServer::in_memory().await;
    let client = client(&server);
    let admin = client.admin();
    admin.create_topic(&NewTopic::new("wide", 10_002)).await.unwrap();
    let mut member = TestMember::new("a", &["wide"]);
    member.until_owns(&server, 10_000).await;
    let described = admin.describe_group(GROUP, false).await.unwrap();
    let unassigned = described.partitions.iter().filter(|it| it.owner.is_empty());
    let unassigned: Vec<_> = unassigned
        .map(|it| {
            assert!(it.detail.contains("more than the 10000 partitions"), "{}", it.detail);
            (it.partition.as_ref().unwrap().partition, it.status())
        })
        .collect();
    assert_eq!(unassigned, [10_000, 10_001].map(|it| (it, DeliveryStatus::Unassigned)));
    assert_eq!(described.partitions.len(), 10_002);
}
