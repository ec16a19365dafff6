//! The table of cases: fields, a call with an invalid value in them, and its expected result.

use bytes::Bytes;
use helix_proto::batch;
use helix_proto::log::v1::append_stream_request::Message as Streamed;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{
    AddNodeRequest, AddPartitionsRequest, AddShardsRequest, AppendCondition, AppendRequest,
    AppendStreamBatch, AppendStreamInit, Batch, CancelMoveRequest, Compression, CreateTopicRequest,
    DeleteTopicRequest, EncodedBatch, ErrorReason as R, FetchRequest, GetHealthRequest,
    GetMetadataRequest, GetTopicRequest, GroupMembership, Header, InitProducerRequest,
    ListTopicsRequest, MoveShardRequest, PartitionStart, ProducerIdentity, ReadLimits, Record,
    RemoveNodeRequest, ReplaceNodeRequest, ResolveOffsetsRequest, SetCordonedRequest,
    SetDrainingRequest, SetFencingTokenRequest, SetMovesPausedRequest, SetReplicasRequest,
    StartPosition, SubscribeRequest, TopicConfig, TransferLeaderRequest, TrimPartitionRequest,
    UpdateTopicRequest, WatchMembershipChangeRequest, WatchMetadataRequest,
};
use helix_proto::plain::PlainRecords;
use helix_server::limits::{BATCH_BYTES_MAX, PARTITIONS_PER_CALL_MAX};
use helix_server::protocol::PRODUCER_OWNERS;
use prost::Message;
use prost_types::{Duration, FieldMask, Timestamp};

use super::Expected::{Fine, Refused, RefusedFor};
use super::{FieldCase, InvalidCall};
use crate::support::{
    PATIENCE, TestServer, append_request, as_batch, earliest, encoded, plain, records, start,
};

/// Records that the cases below append to partition 0: values that only clients interpret.
pub(super) const APPENDED: usize = 1;

/// A name of nothing.
const NOWHERE: &str = "no/where\u{0}";

pub(super) async fn all(server: &TestServer) -> Vec<FieldCase> {
    let producers = Producers::of(server).await;
    let groups =
        [appends(), batches(), producers.rows(), streams(&producers), reads(), places(), topics()];
    let groups = groups.into_iter().flatten().chain(configs()).chain(tokens()).chain(topic_ids());
    let groups = groups.chain(clusters()).chain(members()).chain(super::access_rows::all());
    groups.chain(super::group_rows::all(server).await).collect()
}

struct Producers {
    fresh: ProducerIdentity,
    /// Identity of an instance that has been replaced.
    fenced: ProducerIdentity,
    /// Has appended one record to partition 1.
    current: ProducerIdentity,
}

impl Producers {
    async fn of(server: &TestServer) -> Self {
        let init = async |name: &str| {
            let request = InitProducerRequest { producer_name: name.to_owned() };
            server.produce().init_producer(request).await.unwrap().into_inner().producer.unwrap()
        };
        let cluster = server.running.node().cluster();
        assert!(cluster.wait_protocol(PRODUCER_OWNERS, PATIENCE).await);
        let fenced = init("replaced").await;
        let current = init("replaced").await;
        // A partition learns of the new epoch by its first batch; this partition is not counted.
        let request = AppendRequest {
            partition: 1,
            producer: Some(current),
            first_sequence: Some(0),
            ..append_request(&["current"])
        };
        server.produce().append(request).await.unwrap();
        Self { fresh: init("").await, fenced, current }
    }

    fn rows(&self) -> Vec<FieldCase> {
        let by = |producer, first_sequence| AppendRequest {
            partition: 1,
            producer: Some(producer),
            first_sequence,
            ..append_request(&["x"])
        };
        let nobody = ProducerIdentity { producer_id: 0, epoch: 0 };
        let never = ProducerIdentity { producer_id: u64::MAX, epoch: 0 };
        let alone = AppendRequest { first_sequence: Some(0), ..append_request(&["x"]) };
        let name =
            |name: String| InvalidCall::InitProducer(InitProducerRequest { producer_name: name });
        vec![
            (
                &["InitProducerRequest.producer_name"],
                name("x".repeat(256)),
                Refused(R::InvalidArgument, "producer_name: must have at most 255 bytes"),
            ),
            (&["InitProducerRequest.producer_name"], name(NOWHERE.to_owned()), Fine),
            (
                &["AppendRequest.producer", "ProducerIdentity.producer_id"],
                append(by(nobody, Some(0))),
                Refused(
                    R::InvalidArgument,
                    "producer.producer_id: must be an id from InitProducer",
                ),
            ),
            (
                &["ProducerIdentity.producer_id"],
                append(by(never, Some(7))),
                Refused(R::UnknownProducer, "InitProducer"),
            ),
            (
                &["ProducerIdentity.epoch"],
                append(by(self.fenced, Some(0))),
                Refused(R::ProducerFenced, "is fenced by epoch"),
            ),
            (
                &["ProducerIdentity.epoch"],
                append(by(ProducerIdentity { epoch: u32::MAX, ..self.fenced }, Some(0))),
                Refused(R::UnknownProducer, "InitProducer"),
            ),
            (
                &["AppendRequest.first_sequence"],
                append(by(self.current, Some(0))),
                Refused(R::SequenceReused, "two programs use one identity"),
            ),
            (
                &["AppendRequest.first_sequence"],
                append(by(self.fresh, None)),
                Refused(R::InvalidArgument, "first_sequence: is required with a producer"),
            ),
            (
                &["AppendRequest.first_sequence"],
                append(by(self.fresh, Some(u64::MAX))),
                Refused(R::InvalidArgument, "overflows"),
            ),
            (
                &["AppendRequest.first_sequence"],
                append(alone),
                Refused(R::InvalidArgument, "requires a producer"),
            ),
        ]
    }
}

fn append(request: AppendRequest) -> InvalidCall {
    InvalidCall::Append(Box::new(request))
}

fn with_batch(batch: Option<Batch>) -> InvalidCall {
    append(AppendRequest { batch, ..append_request(&[]) })
}

fn appends() -> Vec<FieldCase> {
    let to = |topic: &str, partition| {
        append(AppendRequest { topic: topic.to_owned(), partition, ..append_request(&["x"]) })
    };
    let durability = |durability| append(AppendRequest { durability, ..append_request(&["x"]) });
    let condition =
        |condition| append(AppendRequest { condition: Some(condition), ..append_request(&["x"]) });
    let offset = AppendCondition { expected_offset: Some(u64::MAX), fencing_token: None };
    let token = AppendCondition { expected_offset: None, fencing_token: Some("x".repeat(99_999)) };
    vec![
        (&["AppendRequest.topic"], to("", 0), Refused(R::TopicNotFound, "does not exist")),
        (&["AppendRequest.topic"], to(NOWHERE, 0), Refused(R::TopicNotFound, "create it")),
        (
            &["AppendRequest.partition"],
            to("default", 4),
            Refused(R::PartitionNotFound, "has no partition 4"),
        ),
        (
            &["AppendRequest.partition"],
            to("default", u32::MAX),
            Refused(R::PartitionNotFound, "its partitions are 0..4"),
        ),
        (
            &["AppendRequest.durability"],
            durability(99),
            Refused(R::InvalidArgument, "durability: 99"),
        ),
        (
            &["AppendRequest.durability"],
            durability(-1),
            Refused(R::InvalidArgument, "durability: -1"),
        ),
        (
            &["AppendRequest.condition", "AppendCondition.expected_offset"],
            condition(offset),
            RefusedFor(&[R::Unimplemented, R::ExpectedOffsetMismatch]),
        ),
        (
            &["AppendCondition.fencing_token"],
            condition(token),
            RefusedFor(&[R::Unimplemented, R::Fenced, R::InvalidArgument]),
        ),
        (
            &["AppendRequest.report_stages"],
            append(AppendRequest { report_stages: true, ..append_request(&[]) }),
            Refused(R::EmptyBatch, ""),
        ),
    ]
}

fn batches() -> Vec<FieldCase> {
    let good = batch::encode(&records(&["a", "b"]));
    let counted = |count| as_batch(batch::from_payload(count, good.payload.clone()));
    let changed = |change: &dyn Fn(&mut EncodedBatch)| {
        let mut batch = good.clone();
        change(&mut batch);
        with_batch(as_batch(batch))
    };
    let payload = |count, payload: &[u8]| {
        with_batch(as_batch(batch::from_payload(count, Bytes::copy_from_slice(payload))))
    };
    let list = |bytes: &[u8]| {
        let form = Form::Records(PlainRecords::decode(bytes).unwrap());
        with_batch(Some(Batch { form: Some(form) }))
    };
    let long = "x".repeat((1 << 20) + 1);
    let half = "x".repeat(1 << 19);
    // An odd key, value and header: only clients interpret them.
    let odd = Record {
        key: Some(Bytes::new()),
        value: None,
        headers: vec![Header { name: String::new(), value: Bytes::from_static(&[0xFF; 9]) }],
        event_time: Some(Timestamp { seconds: i64::MIN, nanos: -1 }),
    };
    let odd_fields: &[&str] = &[
        "Record.key",
        "Record.value",
        "Record.headers",
        "Record.event_time",
        "Header.name",
        "Header.value",
    ];
    vec![
        (
            &["AppendRequest.batch"],
            with_batch(None),
            Refused(R::InvalidArgument, "batch: must hold records or an encoded batch"),
        ),
        (
            &["AppendRequest.batch"],
            with_batch(Some(Batch { form: None })),
            Refused(R::InvalidArgument, "batch: must hold records"),
        ),
        (
            &["Batch.records", "RecordList.records"],
            with_batch(plain(&[])),
            Refused(R::EmptyBatch, "at least one record"),
        ),
        (
            &["RecordList.records"],
            with_batch(plain(&[&long])),
            Refused(R::RecordTooLarge, "max_record_bytes"),
        ),
        (
            &["RecordList.records"],
            with_batch(plain(&[half.as_str(); 9])),
            Refused(R::BatchTooLarge, "max_batch_bytes"),
        ),
        // A record whose key is a varint; a header whose name is not text.
        (
            &["Record.key"],
            list(&[0x0A, 0x02, 0x08, 0x01]),
            Refused(R::CorruptBatch, "record 0 of the batch is not a Record message"),
        ),
        (
            &["Header.name"],
            list(&[0x0A, 0x00, 0x0A, 0x05, 0x1A, 0x03, 0x0A, 0x01, 0xFF]),
            Refused(R::CorruptBatch, "record 1 of the batch is not a Record message"),
        ),
        (
            &["Header.name"],
            with_batch(Some(Batch {
                form: Some(Form::Records(PlainRecords::from(&[odd.clone()][..]))),
            })),
            Refused(
                R::InvalidArgument,
                "batch.records.headers.name: record 0 has a header name of 0 bytes",
            ),
        ),
        (odd_fields, with_batch(as_batch(batch::encode(&[odd]))), Fine),
        (
            &["Batch.encoded", "EncodedBatch.version"],
            changed(&|batch| batch.version = 0),
            Refused(R::CorruptBatch, "batch version 0 is unknown"),
        ),
        (
            &["EncodedBatch.version"],
            changed(&|batch| batch.version = u32::MAX),
            Refused(R::CorruptBatch, "is unknown"),
        ),
        (
            &["EncodedBatch.version"],
            changed(&|batch| batch.version = 2),
            Refused(R::InvalidArgument, "batch.encoded.version: is 2, a Kafka batch"),
        ),
        (
            &["EncodedBatch.record_count"],
            with_batch(counted(0)),
            Refused(R::EmptyBatch, "at least one"),
        ),
        (
            &["EncodedBatch.record_count"],
            with_batch(counted(1)),
            Refused(R::RecordCountMismatch, "record_count is 1 but the payload has 2 records"),
        ),
        (
            &["EncodedBatch.record_count"],
            with_batch(counted(u32::MAX)),
            Refused(R::RecordCountMismatch, "but the payload has 2 records"),
        ),
        (
            &["EncodedBatch.compression"],
            changed(&|batch| batch.compression = Compression::Zstd.into()),
            Refused(R::CorruptBatch, "crc32 does not match"),
        ),
        (
            &["EncodedBatch.compression"],
            changed(&|batch| batch.compression = -7),
            Refused(R::UnsupportedCompression, "compression -7 is unknown to this version"),
        ),
        (
            &["EncodedBatch.compression", "EncodedBatch.payload"],
            with_batch(as_batch(EncodedBatch {
                compression: Compression::Zstd.into(),
                crc32: batch::crc(1, 2, 3, &good.payload),
                ..good.clone()
            })),
            Refused(R::CorruptBatch, "the zstd payload does not begin with a header"),
        ),
        (
            &["EncodedBatch.crc32"],
            changed(&|batch| batch.crc32 ^= 1),
            Refused(R::CorruptBatch, "crc32 does not match"),
        ),
        (
            &["EncodedBatch.uncompressed_bytes"],
            changed(&|batch| batch.uncompressed_bytes += 1),
            Refused(R::InvalidArgument, "batch.encoded.uncompressed_bytes: is "),
        ),
        (
            &["EncodedBatch.payload"],
            payload(1, b"garbage"),
            Refused(R::CorruptBatch, "record 0 is malformed at byte 0"),
        ),
        (
            &["EncodedBatch.payload"],
            payload(2, &good.payload[..good.payload.len() - 1]),
            Refused(R::CorruptBatch, "record 1 is malformed"),
        ),
        (
            &["EncodedBatch.payload"],
            payload(1, &[0x0A, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F]),
            Refused(R::RecordTooLarge, "record of 4294967295 bytes"),
        ),
        (
            &["EncodedBatch.payload"],
            with_batch(encoded(&[&long])),
            Refused(R::RecordTooLarge, "exceeds the limit of 1048576"),
        ),
        (
            &["EncodedBatch.payload"],
            with_batch(encoded(&[half.as_str(); 9])),
            Refused(R::BatchTooLarge, "exceeds the limit of 3145728; send several"),
        ),
    ]
}

fn streams(producers: &Producers) -> Vec<FieldCase> {
    let init = || AppendStreamInit { topic: "default".to_owned(), ..Default::default() };
    let begin =
        |init: AppendStreamInit| InvalidCall::AppendStream(vec![Some(Streamed::Init(init))]);
    let go_on = |batch: AppendStreamBatch| {
        InvalidCall::AppendStream(vec![Some(Streamed::Init(init())), Some(Streamed::Batch(batch))])
    };
    let good = || AppendStreamBatch { batch: encoded(&["x"]), ..Default::default() };
    let nobody = ProducerIdentity { producer_id: 0, epoch: 0 };
    let by_nobody = InvalidCall::AppendStream(vec![
        Some(Streamed::Init(AppendStreamInit { producer: Some(nobody), ..init() })),
        Some(Streamed::Batch(AppendStreamBatch { first_sequence: Some(0), ..good() })),
    ]);
    let without_sequence = InvalidCall::AppendStream(vec![
        Some(Streamed::Init(AppendStreamInit { producer: Some(producers.fresh), ..init() })),
        Some(Streamed::Batch(good())),
    ]);
    let again = || Some(Streamed::Init(init()));
    let twice = InvalidCall::AppendStream(vec![again(), again()]);
    vec![
        (
            &["AppendStreamRequest.init"],
            InvalidCall::AppendStream(vec![Some(Streamed::Batch(good()))]),
            Refused(R::InvalidArgument, "message: the first message must be init"),
        ),
        (
            &["AppendStreamRequest.init"],
            InvalidCall::AppendStream(vec![None]),
            Refused(R::InvalidArgument, "the first message must be init"),
        ),
        (
            &["AppendStreamRequest.init"],
            InvalidCall::AppendStream(Vec::new()),
            Refused(R::InvalidArgument, "the first message must be init"),
        ),
        (
            &["AppendStreamRequest.batch"],
            twice,
            Refused(R::InvalidArgument, "every message after the first one must be a batch"),
        ),
        (
            &["AppendStreamInit.topic"],
            begin(AppendStreamInit { topic: NOWHERE.to_owned(), ..init() }),
            Refused(R::TopicNotFound, "does not exist"),
        ),
        (
            &["AppendStreamInit.partition"],
            begin(AppendStreamInit { partition: 99, ..init() }),
            Refused(R::PartitionNotFound, "no partition 99"),
        ),
        (
            &["AppendStreamInit.durability"],
            begin(AppendStreamInit { durability: 99, ..init() }),
            Refused(R::InvalidArgument, "durability: 99"),
        ),
        (
            &["AppendStreamInit.producer"],
            by_nobody,
            Refused(R::InvalidArgument, "producer.producer_id"),
        ),
        (
            &["AppendStreamInit.fencing_token"],
            begin(AppendStreamInit { fencing_token: Some("x".repeat(99_999)), ..init() }),
            RefusedFor(&[R::Unimplemented, R::Fenced, R::InvalidArgument]),
        ),
        (
            &["AppendStreamBatch.batch"],
            go_on(AppendStreamBatch { batch: None, ..Default::default() }),
            Refused(R::InvalidArgument, "batch: must hold"),
        ),
        (
            &["AppendStreamBatch.first_sequence"],
            without_sequence,
            Refused(R::InvalidArgument, "first_sequence: is required"),
        ),
        (
            &["AppendStreamBatch.first_sequence"],
            go_on(AppendStreamBatch { first_sequence: Some(5), ..good() }),
            Refused(R::InvalidArgument, "requires a producer"),
        ),
        (
            &["AppendStreamBatch.expected_offset"],
            go_on(AppendStreamBatch { expected_offset: Some(u64::MAX), ..good() }),
            RefusedFor(&[R::Unimplemented, R::ExpectedOffsetMismatch]),
        ),
    ]
}

fn fetch(partitions: Vec<PartitionStart>) -> FetchRequest {
    FetchRequest { partitions, ..Default::default() }
}

fn reads() -> Vec<FieldCase> {
    let one = || fetch(vec![earliest(0)]);
    let limits = |limits| InvalidCall::Fetch(FetchRequest { limits: Some(limits), ..one() });
    let follow = || SubscribeRequest { partitions: vec![earliest(0)], ..Default::default() };
    let none = ReadLimits::default();
    let bad_time = Some(Timestamp { seconds: 1, nanos: i32::MAX });
    let wait = |seconds, nanos| {
        InvalidCall::Fetch(FetchRequest { max_wait: Some(Duration { seconds, nanos }), ..one() })
    };
    let member = GroupMembership {
        group: NOWHERE.to_owned(),
        member_id: String::new(),
        member_epoch: u64::MAX,
    };
    let bad_limits = ReadLimits { until_timestamp: bad_time, ..none };
    vec![
        (
            &["FetchRequest.partitions"],
            InvalidCall::Fetch(fetch(vec![])),
            Refused(R::InvalidArgument, "partitions: must be 1..=10000 partitions, not 0"),
        ),
        (
            &["FetchRequest.partitions"],
            InvalidCall::Fetch(fetch(vec![earliest(0); PARTITIONS_PER_CALL_MAX + 1])),
            Refused(R::InvalidArgument, "not 10001"),
        ),
        (
            &["FetchRequest.partitions"],
            InvalidCall::Fetch(fetch(vec![earliest(0), earliest(0)])),
            Refused(R::InvalidArgument, "default/0 is named twice"),
        ),
        (
            &["FetchRequest.limits", "ReadLimits.max_records"],
            limits(ReadLimits { max_records: Some(0), ..none }),
            Fine,
        ),
        (
            &["ReadLimits.max_bytes"],
            limits(ReadLimits { max_bytes: Some(u64::MAX), max_records: Some(u64::MAX), ..none }),
            Fine,
        ),
        (
            &["ReadLimits.until_timestamp"],
            limits(bad_limits),
            Refused(R::InvalidArgument, "limits.until_timestamp: nanos must be in"),
        ),
        (
            &["FetchRequest.max_wait"],
            wait(-1, 0),
            Refused(R::InvalidArgument, "max_wait: must be a duration"),
        ),
        (&["FetchRequest.max_wait"], wait(i64::MAX, 999_999_999), Fine),
        (
            &["FetchRequest.min_bytes"],
            InvalidCall::Fetch(FetchRequest { min_bytes: u32::MAX, ..one() }),
            Fine,
        ),
        (
            &["FetchRequest.source"],
            InvalidCall::Fetch(FetchRequest { source: 99, ..one() }),
            Refused(R::InvalidArgument, "source: 99 is unknown"),
        ),
        (
            &["FetchRequest.out_of_range"],
            InvalidCall::Fetch(FetchRequest { out_of_range: -5, ..one() }),
            Refused(R::InvalidArgument, "out_of_range: -5 is unknown"),
        ),
        (
            &["FetchRequest.accept_encoded"],
            InvalidCall::Fetch(FetchRequest { accept_encoded: true, ..one() }),
            Fine,
        ),
        (
            &["FetchRequest.accept_compression"],
            InvalidCall::Fetch(FetchRequest { accept_compression: vec![99, -1, 2], ..one() }),
            Fine,
        ),
        (
            &["FetchRequest.accept_kafka_batches"],
            InvalidCall::Fetch(FetchRequest { accept_kafka_batches: true, ..one() }),
            Fine,
        ),
        (
            &["SubscribeRequest.partitions"],
            InvalidCall::Subscribe(SubscribeRequest::default()),
            Refused(R::InvalidArgument, "partitions: must be 1..=10000"),
        ),
        (
            &["SubscribeRequest.limits"],
            InvalidCall::Subscribe(SubscribeRequest { limits: Some(bad_limits), ..follow() }),
            Refused(R::InvalidArgument, "limits.until_timestamp"),
        ),
        (
            &["SubscribeRequest.source"],
            InvalidCall::Subscribe(SubscribeRequest { source: 99, ..follow() }),
            Refused(R::InvalidArgument, "source: 99"),
        ),
        (
            &["SubscribeRequest.out_of_range"],
            InvalidCall::Subscribe(SubscribeRequest { out_of_range: 99, ..follow() }),
            Refused(R::InvalidArgument, "out_of_range: 99"),
        ),
        (
            &["SubscribeRequest.accept_encoded"],
            InvalidCall::Subscribe(SubscribeRequest { accept_encoded: true, ..follow() }),
            Fine,
        ),
        (
            &["SubscribeRequest.accept_compression"],
            InvalidCall::Subscribe(SubscribeRequest {
                accept_compression: vec![99, -1, 2],
                ..follow()
            }),
            Fine,
        ),
        (
            &["SubscribeRequest.accept_kafka_batches"],
            InvalidCall::Subscribe(SubscribeRequest { accept_kafka_batches: true, ..follow() }),
            Fine,
        ),
        (
            &["SubscribeRequest.membership", "GroupMembership.group"],
            InvalidCall::Subscribe(SubscribeRequest { membership: Some(member), ..follow() }),
            Refused(R::InvalidArgument, "group: a group name has"),
        ),
    ]
}

fn places() -> Vec<FieldCase> {
    let at = |position| InvalidCall::Fetch(fetch(vec![start(0, position)]));
    let from = |start: PartitionStart| InvalidCall::Fetch(fetch(vec![start]));
    let unset = PartitionStart { start: None, ..earliest(0) };
    let empty = PartitionStart { start: Some(StartPosition::default()), ..earliest(0) };
    let timestamp = |seconds, nanos| at(Position::Timestamp(Timestamp { seconds, nanos }));
    let resolve = |topic: &str, partitions: Vec<u32>, position| {
        InvalidCall::ResolveOffsets(ResolveOffsetsRequest {
            topic: topic.to_owned(),
            partitions,
            position,
            topic_id: 0,
        })
    };
    vec![
        (
            &["PartitionStart.topic"],
            from(PartitionStart { topic: NOWHERE.to_owned(), ..earliest(0) }),
            Refused(R::TopicNotFound, "does not exist"),
        ),
        (
            &["PartitionStart.partition"],
            from(earliest(77)),
            Refused(R::PartitionNotFound, "default/77: "),
        ),
        (&["PartitionStart.start"], from(unset), Refused(R::InvalidArgument, "start: is required")),
        (&["PartitionStart.start"], from(empty), Refused(R::InvalidArgument, "EARLIEST")),
        (
            &["PartitionStart.until_offset"],
            from(PartitionStart { until_offset: Some(0), ..earliest(0) }),
            Fine,
        ),
        (
            &["StartPosition.offset"],
            at(Position::Offset(u64::MAX)),
            Refused(R::OffsetOutOfRange, "default/0: offset 18446744073709551615 is out of range"),
        ),
        (
            &["StartPosition.timestamp"],
            timestamp(1, -1),
            Refused(R::InvalidArgument, "start.timestamp: nanos must be in"),
        ),
        (&["StartPosition.timestamp"], timestamp(i64::MIN, 0), Fine),
        (&["StartPosition.timestamp"], timestamp(i64::MAX, 0), Fine),
        (
            &["StartPosition.named"],
            at(Position::Named(99)),
            Refused(R::InvalidArgument, "is required: an offset"),
        ),
        (&["StartPosition.tail_records"], at(Position::TailRecords(u64::MAX)), Fine),
        (
            &["StartPosition.committed_group"],
            at(Position::CommittedGroup(NOWHERE.to_owned())),
            Refused(R::InvalidArgument, "group: a group name has"),
        ),
        (
            &["StartPosition.commit_fallback"],
            from(PartitionStart {
                start: Some(StartPosition {
                    position: Some(Position::CommittedGroup("readers".to_owned())),
                    commit_fallback: 99,
                    ..StartPosition::default()
                }),
                ..earliest(0)
            }),
            Refused(R::InvalidArgument, "start.commit_fallback: 99 is unknown"),
        ),
        (
            &["StartPosition.reached_offset"],
            from(PartitionStart {
                start: Some(StartPosition {
                    position: Some(Position::Offset(0)),
                    reached_offset: Some(u64::MAX),
                    ..StartPosition::default()
                }),
                ..earliest(0)
            }),
            Refused(R::InvalidArgument, "start.reached_offset: is for a committed_group"),
        ),
        (
            &["ResolveOffsetsRequest.topic"],
            resolve(NOWHERE, vec![0], earliest(0).start),
            Refused(R::TopicNotFound, "does not exist"),
        ),
        (
            &["ResolveOffsetsRequest.partitions"],
            resolve("default", vec![0, 9], earliest(0).start),
            Refused(R::PartitionNotFound, "default/9: "),
        ),
        (
            &["ResolveOffsetsRequest.partitions"],
            resolve("default", vec![0; PARTITIONS_PER_CALL_MAX + 1], earliest(0).start),
            Refused(R::InvalidArgument, "partitions: must be at most 10000"),
        ),
        (
            &["ResolveOffsetsRequest.position"],
            resolve("default", vec![0], None),
            Refused(R::InvalidArgument, "is required: an offset"),
        ),
    ]
}

fn create(name: &str) -> CreateTopicRequest {
    CreateTopicRequest {
        name: name.to_owned(),
        partition_count: 1,
        validate_only: true,
        ..Default::default()
    }
}

fn topics() -> Vec<FieldCase> {
    let named = |name: &str| InvalidCall::CreateTopic(create(name));
    let counted = |partition_count| {
        InvalidCall::CreateTopic(CreateTopicRequest { partition_count, ..create("new") })
    };
    let list = |prefix: &str, page_size, page_token: &str| {
        let (prefix, page_token) = (prefix.to_owned(), page_token.to_owned());
        InvalidCall::ListTopics(ListTopicsRequest { prefix, page_size, page_token })
    };
    let update = |name: &str, paths: Option<&[&str]>| {
        let paths = paths.map(|paths| paths.iter().map(|path| (*path).to_owned()).collect());
        InvalidCall::UpdateTopic(UpdateTopicRequest {
            name: name.to_owned(),
            config: None,
            update_mask: paths.map(|paths| FieldMask { paths }),
            topic_id: 0,
        })
    };
    let add = |name: &str, partition_count| {
        InvalidCall::AddPartitions(AddPartitionsRequest {
            name: name.to_owned(),
            partition_count,
            topic_id: 0,
        })
    };
    let trim = |topic: &str, partition, trim_offset| {
        let topic = topic.to_owned();
        InvalidCall::TrimPartition(TrimPartitionRequest {
            topic,
            partition,
            trim_offset,
            topic_id: 0,
        })
    };
    let nowhere = || NOWHERE.to_owned();
    let missing = Refused(R::TopicNotFound, "does not exist");
    let odd = Refused(R::InvalidArgument, "name: must be 1..=249 of ASCII letters");
    vec![
        (&["CreateTopicRequest.name"], named(""), odd),
        (&["CreateTopicRequest.name"], named(NOWHERE), odd),
        (&["CreateTopicRequest.name"], named(&"x".repeat(250)), odd),
        (
            &["CreateTopicRequest.partition_count"],
            counted(0),
            Refused(R::InvalidArgument, "partition_count: must be at least 1"),
        ),
        (
            &["CreateTopicRequest.partition_count"],
            counted(u32::MAX),
            Refused(R::InvalidArgument, "partition_count: 4294967295 is out of range 1..=100000"),
        ),
        (
            &["CreateTopicRequest.replication_factor"],
            InvalidCall::CreateTopic(CreateTopicRequest {
                replication_factor: 99,
                ..create("new")
            }),
            Refused(R::InvalidArgument, "replication_factor: 99 is not one of 1, 3 and 5"),
        ),
        (&["CreateTopicRequest.validate_only"], named("new"), Fine),
        (
            &["GetTopicRequest.name"],
            InvalidCall::GetTopic(GetTopicRequest { name: nowhere() }),
            missing,
        ),
        (
            &["ListTopicsRequest.page_size"],
            list("", -1, ""),
            Refused(R::InvalidArgument, "page_size: must not be negative"),
        ),
        (
            &["ListTopicsRequest.prefix", "ListTopicsRequest.page_token"],
            list(NOWHERE, i32::MAX, NOWHERE),
            Fine,
        ),
        (&["UpdateTopicRequest.name"], update(NOWHERE, Some(&["retention_bytes"])), missing),
        (
            &["UpdateTopicRequest.update_mask"],
            update("default", None),
            Refused(R::InvalidArgument, "update_mask: must name at least one field"),
        ),
        (
            &["UpdateTopicRequest.update_mask"],
            update("default", Some(&["partition_count"])),
            Refused(R::InvalidArgument, "\"partition_count\" is not a field of TopicConfig"),
        ),
        (&["AddPartitionsRequest.name"], add(NOWHERE, 9), missing),
        (
            &["AddPartitionsRequest.partition_count"],
            add("default", 3),
            Refused(R::InvalidArgument, "3 is less than the current 4"),
        ),
        (
            &["AddPartitionsRequest.partition_count"],
            add("default", u32::MAX),
            Refused(R::InvalidArgument, "is out of range 1..=100000"),
        ),
        (
            &["DeleteTopicRequest.name"],
            InvalidCall::DeleteTopic(DeleteTopicRequest { name: nowhere(), topic_id: 0 }),
            missing,
        ),
        (&["TrimPartitionRequest.topic"], trim(NOWHERE, 0, 0), missing),
        (
            &["TrimPartitionRequest.partition"],
            trim("default", 9, 0),
            Refused(R::PartitionNotFound, "no partition 9"),
        ),
        (
            &["TrimPartitionRequest.trim_offset"],
            trim("default", 0, u64::MAX),
            Refused(R::OffsetOutOfRange, "is out of range 0.."),
        ),
    ]
}

/// Requests that name the topic `default` with the id of no topic.
fn topic_ids() -> Vec<FieldCase> {
    let name = || "default".to_owned();
    let topic_id = u64::MAX;
    let init = AppendStreamInit { topic: name(), topic_id, ..Default::default() };
    let (partitions, position) = (vec![0], earliest(0).start);
    let resolve = ResolveOffsetsRequest { topic: name(), topic_id, partitions, position };
    let update = UpdateTopicRequest {
        name: name(),
        config: Some(TopicConfig::default()),
        update_mask: Some(FieldMask { paths: vec!["retention_bytes".to_owned()] }),
        topic_id,
    };
    let token = SetFencingTokenRequest { topic: name(), topic_id, ..Default::default() };
    let start = PartitionStart { topic_id, ..earliest(0) };
    let cases: [(&'static [&'static str], InvalidCall); 9] = [
        (&["PartitionStart.topic_id"], InvalidCall::Fetch(fetch(vec![start]))),
        (&["ResolveOffsetsRequest.topic_id"], InvalidCall::ResolveOffsets(resolve)),
        (
            &["AppendRequest.topic_id"],
            InvalidCall::Append(Box::new(AppendRequest { topic_id, ..append_request(&["x"]) })),
        ),
        (
            &["AppendStreamInit.topic_id"],
            InvalidCall::AppendStream(vec![Some(Streamed::Init(init))]),
        ),
        (&["UpdateTopicRequest.topic_id"], InvalidCall::UpdateTopic(update)),
        (
            &["AddPartitionsRequest.topic_id"],
            InvalidCall::AddPartitions(AddPartitionsRequest {
                name: name(),
                partition_count: 9,
                topic_id,
            }),
        ),
        (
            &["DeleteTopicRequest.topic_id"],
            InvalidCall::DeleteTopic(DeleteTopicRequest { name: name(), topic_id }),
        ),
        (
            &["TrimPartitionRequest.topic_id"],
            InvalidCall::TrimPartition(TrimPartitionRequest {
                topic: name(),
                topic_id,
                ..Default::default()
            }),
        ),
        (&["SetFencingTokenRequest.topic_id"], InvalidCall::SetFencingToken(token)),
    ];
    let refused = |(fields, call)| (fields, call, Refused(R::TopicRecreated, "created again"));
    cases.into_iter().map(refused).collect()
}

fn configs() -> Vec<FieldCase> {
    let with = |config| {
        InvalidCall::CreateTopic(CreateTopicRequest {
            config: Some(config),
            ..create("configured")
        })
    };
    let none = TopicConfig::default();
    let time = |seconds, nanos| {
        with(TopicConfig { retention_time: Some(Duration { seconds, nanos }), ..none })
    };
    let most = BATCH_BYTES_MAX + 1;
    let update = InvalidCall::UpdateTopic(UpdateTopicRequest {
        name: "default".to_owned(),
        config: Some(TopicConfig { max_batch_bytes: Some(0), ..none }),
        update_mask: Some(FieldMask { paths: vec!["max_batch_bytes".to_owned()] }),
        topic_id: 0,
    });
    let validate = InvalidCall::UpdateTopic(UpdateTopicRequest {
        name: "default".to_owned(),
        config: Some(TopicConfig { validate_records: Some(true), ..none }),
        update_mask: Some(FieldMask { paths: vec!["validate_records".to_owned()] }),
        topic_id: 0,
    });
    vec![
        (
            &["CreateTopicRequest.config", "TopicConfig.retention_time"],
            time(-1, 0),
            Refused(R::InvalidArgument, "config.retention_time: must be a duration"),
        ),
        (
            &["TopicConfig.retention_time"],
            time(i64::MAX, 0),
            Refused(R::InvalidArgument, "must be at most"),
        ),
        (
            &["TopicConfig.retention_bytes"],
            with(TopicConfig { retention_bytes: Some(u64::MAX), ..none }),
            Fine,
        ),
        (
            &["TopicConfig.max_batch_bytes"],
            with(TopicConfig { max_batch_bytes: Some(0), ..none }),
            Refused(R::InvalidArgument, "config.max_batch_bytes: must be in 1..=8388608, not 0"),
        ),
        (
            &["TopicConfig.max_batch_bytes"],
            with(TopicConfig { max_batch_bytes: Some(most), ..none }),
            Refused(R::InvalidArgument, "config.max_batch_bytes: must be in"),
        ),
        (
            &["TopicConfig.max_record_bytes"],
            with(TopicConfig { max_record_bytes: Some(u32::MAX), ..none }),
            Refused(R::InvalidArgument, "config.max_record_bytes: must be in"),
        ),
        (
            &["TopicConfig.min_durability"],
            with(TopicConfig { min_durability: 99, ..none }),
            Refused(R::InvalidArgument, "config.min_durability: 99"),
        ),
        (
            &["TopicConfig.default_durability"],
            with(TopicConfig { default_durability: -1, ..none }),
            Refused(R::InvalidArgument, "config.default_durability: -1"),
        ),
        (
            &["TopicConfig.allowed_compression"],
            with(TopicConfig { allowed_compression: 99, ..none }),
            Refused(R::InvalidArgument, "config.allowed_compression: 99"),
        ),
        (&["TopicConfig.validate_records"], validate, Fine),
        (
            &["TopicConfig.cleanup"],
            with(TopicConfig { cleanup: 99, ..none }),
            Refused(R::InvalidArgument, "config.cleanup: 99"),
        ),
        (
            &["TopicConfig.tombstone_retention_time"],
            with(TopicConfig {
                tombstone_retention_time: Some(Duration { seconds: -1, nanos: 0 }),
                ..none
            }),
            Refused(R::InvalidArgument, "config.tombstone_retention_time"),
        ),
        (
            &["TopicConfig.batch_format"],
            with(TopicConfig { batch_format: 99, ..none }),
            Refused(R::InvalidArgument, "config.batch_format: 99"),
        ),
        (
            &["UpdateTopicRequest.config"],
            update,
            Refused(R::InvalidArgument, "config.max_batch_bytes"),
        ),
    ]
}

fn tokens() -> Vec<FieldCase> {
    let set = |topic: &str, partition, expected_token: Option<&str>, token: String| {
        InvalidCall::SetFencingToken(SetFencingTokenRequest {
            topic: topic.to_owned(),
            partition,
            expected_token: expected_token.map(str::to_owned),
            token,
            topic_id: 0,
        })
    };
    vec![
        (
            &["SetFencingTokenRequest.topic"],
            set(NOWHERE, 0, None, String::new()),
            Refused(R::TopicNotFound, "does not exist"),
        ),
        (
            &["SetFencingTokenRequest.partition"],
            set("default", 9, None, String::new()),
            Refused(R::PartitionNotFound, "no partition 9"),
        ),
        (
            &["SetFencingTokenRequest.expected_token"],
            set("default", 2, Some("never was"), "new".to_owned()),
            RefusedFor(&[R::Fenced]),
        ),
        (
            &["SetFencingTokenRequest.token"],
            set("default", 2, None, "x".repeat(65)),
            Refused(R::InvalidArgument, "token"),
        ),
    ]
}

fn clusters() -> Vec<FieldCase> {
    let topics = || vec![NOWHERE.to_owned(), String::new()];
    let transfer = |shard_id, target_node_id| {
        InvalidCall::TransferLeader(TransferLeaderRequest { shard_id, target_node_id })
    };
    vec![
        (
            &["GetMetadataRequest.topics"],
            InvalidCall::GetMetadata(GetMetadataRequest { topics: topics() }),
            Fine,
        ),
        (
            &["WatchMetadataRequest.topics"],
            InvalidCall::WatchMetadata(WatchMetadataRequest { topics: topics() }),
            Fine,
        ),
        (
            &["TransferLeaderRequest.shard_id"],
            transfer(u32::MAX, 0),
            Refused(R::InvalidArgument, "shard_id: there is no shard 4294967295"),
        ),
        (
            &["TransferLeaderRequest.target_node_id"],
            transfer(1, 99),
            Refused(R::NodeNotFound, "node 99 is not in this cluster"),
        ),
    ]
}

/// Reasons for which an invalid membership change is refused.
const NO_CHANGE: super::Expected = RefusedFor(&[
    R::InvalidArgument,
    R::NodeNotFound,
    R::NotEnoughNodes,
    R::MembershipChangeInProgress,
    R::Unimplemented,
]);

fn members() -> Vec<FieldCase> {
    let add = |node_id, peer_endpoint: &str, rack: &str| {
        InvalidCall::AddNode(AddNodeRequest {
            node_id,
            peer_endpoint: peer_endpoint.to_owned(),
            rack: rack.to_owned(),
            validate_only: true,
        })
    };
    let replace = |lost_node_id, node_id, peer_endpoint: &str, rack: &str| {
        InvalidCall::ReplaceNode(ReplaceNodeRequest {
            lost_node_id,
            node_id,
            peer_endpoint: peer_endpoint.to_owned(),
            rack: rack.to_owned(),
            validate_only: true,
        })
    };
    let remove = |node_id, lost| {
        InvalidCall::RemoveNode(RemoveNodeRequest {
            node_id,
            lost,
            validate_only: true,
            allow_fewer_replicas: lost,
        })
    };
    let drain = |node_id, draining| {
        InvalidCall::SetDraining(SetDrainingRequest { node_id, draining, validate_only: true })
    };
    let move_shard = |shard_id, from_node_id, to_node_id| {
        InvalidCall::MoveShard(MoveShardRequest { shard_id, from_node_id, to_node_id })
    };
    let watch = InvalidCall::WatchMembershipChange(WatchMembershipChangeRequest { id: u64::MAX });
    vec![
        (
            &["AddNodeRequest.node_id", "AddNodeRequest.validate_only"],
            add(0, "n2:9192", ""),
            NO_CHANGE,
        ),
        (&["AddNodeRequest.node_id"], add(u64::MAX, "n2:9192", ""), NO_CHANGE),
        (&["AddNodeRequest.peer_endpoint"], add(2, NOWHERE, ""), NO_CHANGE),
        (&["AddNodeRequest.rack"], add(2, "n2:9192", NOWHERE), NO_CHANGE),
        (
            &["RemoveNodeRequest.node_id", "RemoveNodeRequest.validate_only"],
            remove(99, false),
            NO_CHANGE,
        ),
        (
            &["RemoveNodeRequest.lost", "RemoveNodeRequest.allow_fewer_replicas"],
            remove(99, true),
            NO_CHANGE,
        ),
        (
            &["ReplaceNodeRequest.lost_node_id", "ReplaceNodeRequest.validate_only"],
            replace(99, 99, "n2:9192", ""),
            NO_CHANGE,
        ),
        (&["ReplaceNodeRequest.node_id"], replace(99, u64::MAX, "n2:9192", ""), NO_CHANGE),
        (&["ReplaceNodeRequest.peer_endpoint"], replace(99, 99, NOWHERE, ""), NO_CHANGE),
        (&["ReplaceNodeRequest.rack"], replace(99, 99, "n2:9192", NOWHERE), NO_CHANGE),
        (
            &["SetDrainingRequest.node_id", "SetDrainingRequest.validate_only"],
            drain(99, true),
            NO_CHANGE,
        ),
        (&["SetDrainingRequest.draining"], drain(u64::MAX, false), NO_CHANGE),
        (&["WatchMembershipChangeRequest.id"], watch, NO_CHANGE),
        (
            &["SetCordonedRequest.node_id", "SetCordonedRequest.cordoned"],
            InvalidCall::SetCordoned(SetCordonedRequest { node_id: 99, cordoned: true }),
            Refused(R::NodeNotFound, "node 99 is not in this cluster"),
        ),
        (
            &["GetHealthRequest.prove"],
            InvalidCall::GetHealth(GetHealthRequest { prove: true }),
            Fine,
        ),
        (
            &["SetMovesPausedRequest.paused"],
            InvalidCall::PauseMoves(SetMovesPausedRequest { paused: false }),
            Fine,
        ),
        (
            &["CancelMoveRequest.shard_id"],
            InvalidCall::CancelMove(CancelMoveRequest { shard_id: u32::MAX }),
            Refused(R::InvalidArgument, "shard_id: there is no shard 4294967295"),
        ),
        (
            &["SetReplicasRequest.replicas"],
            InvalidCall::SetReplicas(SetReplicasRequest { replicas: 4 }),
            Refused(R::InvalidArgument, "replicas: 4 is not one of 1, 3 and 5"),
        ),
        (
            &["AddShardsRequest.total"],
            InvalidCall::AddShards(AddShardsRequest {
                current: 1,
                total: 65,
                ..AddShardsRequest::default()
            }),
            Refused(R::InvalidArgument, "total: 65 is above the limit of 64 data shards"),
        ),
        (
            &["AddShardsRequest.current", "AddShardsRequest.split"],
            InvalidCall::AddShards(AddShardsRequest {
                current: 7,
                total: 8,
                split: true,
                replicas: 0,
            }),
            Refused(R::MembershipChangeInProgress, "data shards, not 7: shards were added since"),
        ),
        (
            &["AddShardsRequest.replicas"],
            InvalidCall::AddShards(AddShardsRequest {
                current: 1,
                total: 2,
                split: false,
                replicas: 4,
            }),
            Refused(R::InvalidArgument, "replicas: 4 is not one of 1, 3 and 5"),
        ),
        (
            &["MoveShardRequest.shard_id"],
            move_shard(u32::MAX, 1, 2),
            Refused(R::InvalidArgument, "shard_id: there is no shard 4294967295"),
        ),
        (
            &["MoveShardRequest.from_node_id"],
            move_shard(1, 0, 2),
            Refused(R::InvalidArgument, "from_node_id: must be at least 1"),
        ),
        (
            &["MoveShardRequest.to_node_id"],
            move_shard(1, 1, u64::MAX),
            Refused(R::NodeNotFound, "node 18446744073709551615 is not in this cluster"),
        ),
    ]
}
