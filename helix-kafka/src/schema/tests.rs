//! Tests of the pass over requests.

use kafka_protocol::messages::fetch_request::{FetchPartition, FetchTopic, ForgottenTopic};
use kafka_protocol::messages::join_group_request::JoinGroupRequestProtocol;
use kafka_protocol::messages::leave_group_request::MemberIdentity;
use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use kafka_protocol::messages::offset_fetch_request::{
    OffsetFetchRequestGroup, OffsetFetchRequestTopic, OffsetFetchRequestTopics,
};
use kafka_protocol::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka_protocol::messages::*;
use kafka_protocol::protocol::{Encodable, StrBytes};

use super::*;
use crate::dispatch::decode;
use crate::versions::{SERVED_APIS, served_api};

fn text(text: &'static str) -> StrBytes {
    StrBytes::from_static_str(text)
}

fn encoded(message: &impl Encodable, version: i16) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes, version).unwrap();
    bytes
}

fn check(key: ApiKey, version: i16, bytes: &[u8]) -> Result<usize, SchemaError> {
    let api = served_api(key as i16).unwrap();
    check_body(bytes, api.schema, version, api.is_flexible(version))
}

/// Requests as a client encodes them, with the values that the version can state.
fn requests(key: ApiKey, version: i16) -> Vec<Vec<u8>> {
    let topic = || TopicName(text("orders"));
    macro_rules! plain {
        ($request:ty) => {
            vec![encoded(&<$request>::default(), version)]
        };
    }
    match key {
        ApiKey::Produce => {
            let data = PartitionProduceData::default().with_records(Some(b"batch"[..].into()));
            let empty = PartitionProduceData::default().with_index(1);
            let topic = TopicProduceData::default()
                .with_name(topic())
                .with_partition_data(vec![data, empty]);
            vec![encoded(&ProduceRequest::default().with_topic_data(vec![topic]), version)]
        }
        ApiKey::Fetch => {
            let topic = FetchTopic::default()
                .with_topic(topic())
                .with_partitions(vec![FetchPartition::default(); 3]);
            let mut request = FetchRequest::default().with_topics(vec![topic]);
            if version >= 7 {
                let forgotten = ForgottenTopic::default().with_partitions(vec![1, 2]);
                request = request.with_forgotten_topics_data(vec![forgotten]);
            }
            if version >= 11 {
                request = request.with_rack_id(text("a"));
            }
            if version >= 12 {
                request = request.with_cluster_id(Some(text("c")));
            }
            vec![encoded(&request, version)]
        }
        ApiKey::Metadata => {
            let topics = vec![MetadataRequestTopic::default().with_name(Some(topic()))];
            let mut requests = vec![MetadataRequest::default().with_topics(Some(topics))];
            if version >= 1 {
                requests.push(MetadataRequest::default().with_topics(None));
            }
            requests.iter().map(|request| encoded(request, version)).collect()
        }
        ApiKey::JoinGroup => {
            let protocol = JoinGroupRequestProtocol::default()
                .with_name(text("range"))
                .with_metadata(b"m"[..].into());
            let request = JoinGroupRequest::default()
                .with_group_id(GroupId(text("g")))
                .with_protocols(vec![protocol]);
            vec![encoded(&request, version)]
        }
        ApiKey::LeaveGroup if version >= 3 => {
            let request =
                LeaveGroupRequest::default().with_members(vec![MemberIdentity::default()]);
            vec![encoded(&request, version)]
        }
        ApiKey::OffsetFetch if version >= 8 => {
            let topics = OffsetFetchRequestTopics::default()
                .with_name(topic())
                .with_partition_indexes(vec![0, 1]);
            let group = OffsetFetchRequestGroup::default().with_topics(Some(vec![topics]));
            vec![encoded(&OffsetFetchRequest::default().with_groups(vec![group]), version)]
        }
        ApiKey::OffsetFetch => {
            let topics = OffsetFetchRequestTopic::default()
                .with_name(topic())
                .with_partition_indexes(vec![0, 1]);
            vec![encoded(&OffsetFetchRequest::default().with_topics(Some(vec![topics])), version)]
        }
        ApiKey::ListOffsets => plain!(ListOffsetsRequest),
        ApiKey::OffsetCommit => plain!(OffsetCommitRequest),
        ApiKey::FindCoordinator => plain!(FindCoordinatorRequest),
        ApiKey::Heartbeat => plain!(HeartbeatRequest),
        ApiKey::LeaveGroup => plain!(LeaveGroupRequest),
        ApiKey::SyncGroup => plain!(SyncGroupRequest),
        ApiKey::DescribeGroups => plain!(DescribeGroupsRequest),
        ApiKey::ListGroups => plain!(ListGroupsRequest),
        ApiKey::SaslHandshake => plain!(SaslHandshakeRequest),
        ApiKey::ApiVersions => plain!(ApiVersionsRequest),
        ApiKey::CreateTopics => plain!(CreateTopicsRequest),
        ApiKey::DeleteTopics => plain!(DeleteTopicsRequest),
        ApiKey::DeleteRecords => plain!(DeleteRecordsRequest),
        ApiKey::InitProducerId => plain!(InitProducerIdRequest),
        ApiKey::OffsetForLeaderEpoch => plain!(OffsetForLeaderEpochRequest),
        ApiKey::DescribeAcls => plain!(DescribeAclsRequest),
        ApiKey::DescribeConfigs => plain!(DescribeConfigsRequest),
        ApiKey::SaslAuthenticate => plain!(SaslAuthenticateRequest),
        ApiKey::CreatePartitions => plain!(CreatePartitionsRequest),
        ApiKey::DeleteGroups => plain!(DeleteGroupsRequest),
        ApiKey::IncrementalAlterConfigs => plain!(IncrementalAlterConfigsRequest),
        ApiKey::OffsetDelete => plain!(OffsetDeleteRequest),
        ApiKey::DescribeCluster => plain!(DescribeClusterRequest),
        _ => panic!("{key:?} is served, but has no request here"),
    }
}

#[test]
fn accepts_requests_of_clients_in_every_version() {
    for api in SERVED_APIS {
        for version in api.min..=api.max {
            for bytes in requests(api.key, version) {
                let result = check(api.key, version, &bytes);
                assert!(result.is_ok(), "{:?} {version}: {result:?}", api.key);
            }
        }
    }
}

#[test]
fn rejects_every_truncation_and_ignores_bytes_after_the_last_field() {
    for api in SERVED_APIS {
        for version in api.min..=api.max {
            for bytes in requests(api.key, version) {
                for length in 0..bytes.len() {
                    let result = check(api.key, version, &bytes[..length]);
                    assert!(result.is_err(), "{:?} {version}: {length}", api.key);
                }
                let longer = [&bytes[..], &[0]].concat();
                let result = check(api.key, version, &longer);
                assert!(result.is_ok(), "{:?} {version}: {result:?}", api.key);
            }
        }
    }
}

/// librdkafka 2.16 writes null in four bytes instead of one if it asks for all topics.
#[test]
fn accepts_the_long_null_of_a_request_for_all_topics() {
    for flags in [[0, 0, 0], [1, 0, 0], [1, 1, 1]] {
        let bytes = [&[0, 0, 0, 0], &flags[..], &[0]].concat();
        assert_eq!(check(ApiKey::Metadata, 9, &bytes), Ok(0), "{flags:?}");
        let request: MetadataRequest = decode(bytes.into(), 9).unwrap();
        assert_eq!(request.topics, None, "{flags:?}");
    }
}

#[test]
fn counts_beyond_the_bytes_are_rejected() {
    let list = [Field::always(Kind::List(&Kind::Fixed(4)))];
    let check = |bytes: &[u8], is_flexible| check_body(bytes, &list, 0, is_flexible);
    assert_eq!(check(&[0, 0, 0, 1, 0, 0, 0, 0], false), Ok(1));
    assert_eq!(check(&[0xff; 4], false), Ok(0), "null");
    let error = check(&[0x7f, 0xff, 0xff, 0xff, 0], false).unwrap_err();
    assert_eq!(error, SchemaError::LongList { at: 0, count: 0x7fff_ffff, left: 1 });
    let error = check(&[0x80, 0, 0, 0], false).unwrap_err();
    assert!(matches!(error, SchemaError::NegativeLength { .. }), "{error}");
    let error = check(&[0xff, 0xff, 0xff, 0xff, 0xff, 0], true).unwrap_err();
    assert!(matches!(error, SchemaError::LongNumber { .. }), "{error}");
    // A list of empty texts: each element has a byte, so the count is bounded by the bytes.
    let many = vec![1; ELEMENTS_MAX + 10];
    let texts = [Field::always(Kind::List(&Kind::Text))];
    let mut bytes = vec![0xcb, 0x9a, 0x0c];
    bytes.extend(many);
    let result = check_body(&bytes, &texts, 0, true);
    assert_eq!(result, Err(SchemaError::ManyElements));
}

#[test]
fn tagged_fields_are_bounded() {
    assert_eq!(tagged_fields_len(&[0]), Ok(1));
    assert_eq!(tagged_fields_len(&[1, 5, 2, 8, 8, 9]), Ok(5));
    assert!(tagged_fields_len(&[1, 5, 3, 8, 8]).is_err());
    assert_eq!(tagged_fields_len(&[65]), Err(SchemaError::ManyTaggedFields(65)));
}
