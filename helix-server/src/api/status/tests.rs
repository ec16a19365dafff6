//! Tests of the mapping of errors.

use std::collections::BTreeSet;

use helix_proto::error::{DOMAIN, from_status};
use prost::Message;
use tonic::Code;
use tonic_types::{StatusExt, pb};

use super::*;
use crate::error::{Denial, LeaderHint};
use crate::log::{
    FencingToken, PartitionId, PartitionKey, StaleCommit, StaleReason, TokenError, Watermarks,
};

const RETRY: &str = "retry";
const FINAL: &str = "final";

/// Returns one error of each variant as docs/api.md describes it: reason, code, retryable, may have
/// been applied.
fn table() -> Vec<(Error, &'static str, Code, &'static str, bool)> {
    let topic = || "orders".to_owned();
    let what = || "why".to_owned();
    let watermarks = Watermarks { log_start: 5, high_watermark: 9 };
    let leader = LeaderHint { node_id: 3, endpoint: "n3:9092".to_owned(), term: 7 };
    let producer_id = 1;
    let partition = PartitionId(4);
    let unknown_partition = Refusal::UnknownPartition { partition };
    let fenced = Refusal::ProducerFenced { producer_id, epoch: 1, current_epoch: 2 };
    let gap = Refusal::OutOfOrderSequence { producer_id, sequence: 9, next_sequence: 4 };
    let not_leader = Error::NotLeader { shard: 1, leader: Some(leader) };
    let no_partition =
        Error::PartitionNotFound { topic: topic(), partition: 9, partition_count: 4 };
    let exists = Error::TopicAlreadyExists { topic: topic(), difference: what() };
    let failed = |may_have_applied| Error::StorageFailed { what: what(), may_have_applied };
    let argument = Error::InvalidArgument { field: "topic", what: what() };
    let throttled = Error::Throttled { what: "bytes", retry_after_ms: 70 };
    let group = |refusal: GroupRefusal| Error::from(Refusal::from(refusal));
    let denial =
        Box::new(Denial { principal: what(), operation: "read", kind: "topic", name: topic() });
    let group_partition = PartitionKey { topic_id: 3, number: 1 };
    let precondition = Code::FailedPrecondition;
    let invalid = Code::InvalidArgument;
    let exhausted = Code::ResourceExhausted;
    vec![
        (not_leader, "NOT_LEADER", precondition, RETRY, false),
        (Error::NoLeader { shard: 1 }, "NO_LEADER", Code::Unavailable, RETRY, false),
        (
            Error::ShardClosed { shard: 1, what: what() },
            "NO_LEADER",
            Code::Unavailable,
            RETRY,
            false,
        ),
        (Error::Draining, "DRAINING", Code::Unavailable, RETRY, false),
        (
            Error::OutcomeUnknown { reason: what() },
            "OUTCOME_UNKNOWN",
            Code::Unavailable,
            RETRY,
            true,
        ),
        (Error::TopicNotFound { topic: topic() }, "TOPIC_NOT_FOUND", Code::NotFound, FINAL, false),
        (
            Error::TopicDeleted { topic: topic(), expected: 3 },
            "TOPIC_DELETED",
            Code::NotFound,
            FINAL,
            false,
        ),
        (
            Error::TopicRecreated { topic: topic(), expected: 3, current: 5 },
            "TOPIC_RECREATED",
            precondition,
            FINAL,
            false,
        ),
        (no_partition, "PARTITION_NOT_FOUND", Code::NotFound, FINAL, false),
        (
            Error::PartitionDeleted { partition },
            "PARTITION_NOT_FOUND",
            Code::NotFound,
            FINAL,
            false,
        ),
        (exists, "TOPIC_ALREADY_EXISTS", Code::AlreadyExists, FINAL, false),
        (
            Error::OffsetOutOfRange { requested: 12, watermarks },
            "OFFSET_OUT_OF_RANGE",
            Code::OutOfRange,
            FINAL,
            false,
        ),
        (unknown_partition.into(), "PARTITION_NOT_FOUND", Code::NotFound, FINAL, false),
        (fenced.into(), "PRODUCER_FENCED", precondition, FINAL, false),
        (gap.into(), "OUT_OF_ORDER_SEQUENCE", precondition, FINAL, false),
        (
            Refusal::OffsetMismatch { expected: 8, watermarks }.into(),
            "EXPECTED_OFFSET_MISMATCH",
            Code::Aborted,
            FINAL,
            false,
        ),
        (
            Refusal::Fenced { in_force: FencingToken::default() }.into(),
            "FENCED",
            precondition,
            FINAL,
            false,
        ),
        (
            Refusal::UnknownProducer { producer_id }.into(),
            "UNKNOWN_PRODUCER",
            precondition,
            FINAL,
            false,
        ),
        (
            Refusal::ProducerNotOwned { producer_id }.into(),
            "PRODUCER_NOT_OWNED",
            Code::PermissionDenied,
            FINAL,
            false,
        ),
        (
            Refusal::SequenceReused { producer_id, sequence: 4 }.into(),
            "SEQUENCE_REUSED",
            precondition,
            FINAL,
            false,
        ),
        (Refusal::OffsetsExhausted.into(), "OFFSET_OUT_OF_RANGE", Code::OutOfRange, FINAL, false),
        (Error::BatchTooLarge { bytes: 9, bytes_max: 8 }, "BATCH_TOO_LARGE", invalid, FINAL, false),
        (
            Error::RecordTooLarge { bytes: 9, bytes_max: 8 },
            "RECORD_TOO_LARGE",
            invalid,
            FINAL,
            false,
        ),
        (Error::EmptyBatch, "EMPTY_BATCH", invalid, FINAL, false),
        (Error::KeyRequired { record: 3 }, "KEY_REQUIRED", invalid, FINAL, false),
        (
            Error::RecordCountMismatch { stated: 2, counted: 1 },
            "RECORD_COUNT_MISMATCH",
            invalid,
            FINAL,
            false,
        ),
        (Error::CorruptBatch { what: what() }, "CORRUPT_BATCH", invalid, FINAL, false),
        (
            Error::UnsupportedCompression { what: "zstd".to_owned(), allowed: &[1, 2] },
            "UNSUPPORTED_COMPRESSION",
            Code::Unimplemented,
            FINAL,
            false,
        ),
        (argument, "INVALID_ARGUMENT", invalid, FINAL, false),
        (
            Error::Unimplemented { what: "condition" },
            "UNIMPLEMENTED",
            Code::Unimplemented,
            FINAL,
            false,
        ),
        (Error::CorruptLog { what: what() }, "CORRUPT_LOG", Code::DataLoss, FINAL, false),
        (
            Error::NotARecord { offset: 2, why: what() },
            "UNDECODABLE_BATCH",
            precondition,
            FINAL,
            false,
        ),
        (throttled, "THROTTLED", exhausted, RETRY, false),
        (Error::Exhausted { what: what() }, "THROTTLED", exhausted, RETRY, false),
        (Error::DiskFull { what: what() }, "DISK_FULL", exhausted, FINAL, false),
        (failed(true), "STORAGE_FAILED", Code::Unavailable, RETRY, true),
        (failed(false), "STORAGE_FAILED", Code::Unavailable, RETRY, false),
        (Error::NodeNotFound { node_id: 9 }, "NODE_NOT_FOUND", Code::NotFound, FINAL, false),
        (
            Error::ChangeInProgress { what: what() },
            "MEMBERSHIP_CHANGE_IN_PROGRESS",
            precondition,
            FINAL,
            false,
        ),
        (Error::NotEnoughNodes { what: what() }, "NOT_ENOUGH_NODES", precondition, FINAL, false),
        (
            Error::ChangeRefused { what: what() },
            "MEMBERSHIP_CHANGE_REFUSED",
            precondition,
            FINAL,
            false,
        ),
        (Error::NotAMember { what: what(), other: None }, "NOT_LEADER", precondition, RETRY, false),
        (Error::GroupNotFound { group: topic() }, "GROUP_NOT_FOUND", Code::NotFound, FINAL, false),
        (
            Error::NoCommittedOffset { group: topic() },
            "NO_COMMITTED_OFFSET",
            Code::NotFound,
            FINAL,
            false,
        ),
        (TokenError::Missing.into(), "UNAUTHENTICATED", Code::Unauthenticated, FINAL, false),
        (
            Error::PermissionDenied { denial },
            "PERMISSION_DENIED",
            Code::PermissionDenied,
            FINAL,
            false,
        ),
        (Error::TokenNotFound { id: what() }, "TOKEN_NOT_FOUND", Code::NotFound, FINAL, false),
        (group(GroupRefusal::GroupNotFound), "GROUP_NOT_FOUND", Code::NotFound, FINAL, false),
        (
            group(GroupRefusal::UnknownMember { member_id: what() }),
            "UNKNOWN_MEMBER",
            Code::NotFound,
            FINAL,
            false,
        ),
        (
            group(GroupRefusal::StaleEpoch { epoch: 1, current: 2 }),
            "STALE_MEMBER_EPOCH",
            Code::Aborted,
            FINAL,
            false,
        ),
        (
            group(GroupRefusal::NameInUse { static_name: what(), holder: "a".into() }),
            "MEMBER_NAME_IN_USE",
            precondition,
            FINAL,
            false,
        ),
        (
            group(GroupRefusal::StaticNameFixed { current: what() }),
            "INVALID_ARGUMENT",
            invalid,
            FINAL,
            false,
        ),
        (
            group(GroupRefusal::NotOwned { partition: group_partition, epoch: 1, current: 2 }),
            "PARTITION_NOT_OWNED",
            Code::Aborted,
            FINAL,
            false,
        ),
        (
            group(GroupRefusal::NotEmpty { count: 1, first: vec!["a".into()] }),
            "GROUP_NOT_EMPTY",
            precondition,
            FINAL,
            false,
        ),
        (
            group(GroupRefusal::TopicInUse { topic: topic(), count: 1, first: vec!["a".into()] }),
            "GROUP_NOT_EMPTY",
            precondition,
            FINAL,
            false,
        ),
        (
            group(GroupRefusal::StaleCommit(StaleCommit {
                partition: None,
                current: 4,
                why: StaleReason::NoEpoch,
            })),
            "STALE_COMMIT",
            Code::Aborted,
            FINAL,
            false,
        ),
        (
            group(GroupRefusal::LimitReached { what: "members of a group", limit: 9 }),
            "GROUP_LIMIT_REACHED",
            precondition,
            FINAL,
            false,
        ),
        (Error::Unusable { what: what() }, "STORAGE_FAILED", Code::Unavailable, RETRY, false),
    ]
}

#[test]
fn every_error_maps_to_its_row_of_the_table() {
    for (error, reason, code, retry, may_have_applied) in table() {
        let status = Status::from(error.clone());
        assert_eq!(status.code(), code, "{error}");
        assert_eq!(status.message(), error.to_string());
        let info = status.get_details_error_info().unwrap();
        assert_eq!((info.reason.as_str(), info.domain.as_str()), (reason, DOMAIN));
        assert_eq!(status.metadata().get("helix-reason").unwrap(), reason);
        let detail = from_status(&status).unwrap().detail;
        assert_eq!(detail.retryable, retry == RETRY, "{error}");
        assert_eq!(detail.may_have_applied, may_have_applied, "{error}");
        let rpc_status = pb::Status::decode(status.details()).unwrap();
        assert_eq!(rpc_status.code, i32::from(code));
    }
}

#[test]
fn the_documentation_has_one_row_for_each_reason() {
    let page = include_str!("../../../../docs/api.md");
    let (_, rows) = page.split_once("| reason | code |").unwrap();
    let (rows, _) = rows.split_once("\n\n").unwrap();
    // Skips the rest of the header and the line below it.
    let rows = rows.lines().skip(2).filter_map(|row| row.split('|').nth(1));
    let mut documented: Vec<_> = rows.flat_map(|names| names.split(',')).collect();
    documented.iter_mut().for_each(|name| *name = name.trim());
    documented.sort_unstable();
    let said: BTreeSet<_> = table().into_iter().map(|(_, reason, ..)| reason).collect();
    assert_eq!(documented, said.into_iter().collect::<Vec<_>>());
}

#[test]
fn the_leader_is_in_the_detail_and_in_the_trailers() {
    let leader = LeaderHint { node_id: 3, endpoint: "n3:9092".to_owned(), term: 7 };
    let status = Status::from(Error::NotLeader { shard: 1, leader: Some(leader.clone()) });
    assert_eq!(from_status(&status).unwrap().detail.leader, Some(wire_leader(leader)));
    assert_eq!(status.metadata().get("helix-leader-node").unwrap(), "3");
    assert_eq!(status.metadata().get("helix-leader-endpoint").unwrap(), "n3:9092");
    assert_eq!(status.metadata().get("helix-leader-term").unwrap(), "7");
}

#[test]
fn facts_that_a_client_needs_are_in_the_detail() {
    let detail = |error: Error| from_status(&error.into()).unwrap().detail;
    let gap = Refusal::OutOfOrderSequence { producer_id: 1, sequence: 9, next_sequence: 4 };
    assert_eq!(detail(gap.into()).next_sequence, Some(4));
    let in_force = FencingToken::new("second").unwrap();
    assert_eq!(detail(Refusal::Fenced { in_force }.into()).fencing_token.unwrap(), "second");
    let too_large = Error::BatchTooLarge { bytes: 9, bytes_max: 8 };
    assert_eq!(detail(too_large).limit, Some(8));
    let watermarks = Watermarks { log_start: 5, high_watermark: 9 };
    let mismatch = detail(Refusal::OffsetMismatch { expected: 8, watermarks }.into());
    assert_eq!(mismatch.next_offset, Some(9));
    assert_eq!(mismatch.watermarks, Some(wire_watermarks(watermarks)));
    let outside = detail(Error::OffsetOutOfRange { requested: 12, watermarks });
    assert_eq!(outside.watermarks, Some(wire_watermarks(watermarks)));
    let missing = detail(Error::TopicNotFound { topic: "orders".to_owned() });
    assert_eq!(missing.topic, "orders");
    let topic = "orders".to_owned();
    let recreated = detail(Error::TopicRecreated { topic, expected: 3, current: 5 });
    assert_eq!((recreated.topic_id, recreated.expected_topic_id), (5, 3));
}

#[test]
fn a_throttled_status_has_a_retry_delay() {
    let status = Status::from(Error::Throttled { what: "bytes", retry_after_ms: 70 });
    let wait = Some(Duration::from_millis(70));
    assert_eq!(from_status(&status).unwrap().retry_after, wait);
    assert_eq!(status.get_details_retry_info().unwrap().retry_delay, wait);
    assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "70");
}

#[test]
fn trailers_stay_small_whatever_a_client_sends() {
    for text in ["x", "\u{1}", "\u{e4}", "\u{10FFFF}", "\""] {
        let long = || text.repeat(100_000);
        let not_found = Error::TopicNotFound { topic: long() };
        let partition = 9;
        for status in [
            status_at(&not_found, &long(), partition),
            not_found.into(),
            Error::PartitionNotFound { topic: long(), partition, partition_count: 4 }.into(),
            Error::TopicAlreadyExists { topic: long(), difference: long() }.into(),
            Error::InvalidArgument { field: "name", what: long() }.into(),
        ] {
            let headers = status.into_http::<()>().into_parts().0.headers;
            let bytes = headers.iter().map(|(name, it)| name.as_str().len() + it.len());
            let bytes: usize = bytes.sum();
            assert!(bytes < 8 << 10, "{text:?}: {bytes} bytes in {headers:?}");
        }
    }
}

#[test]
fn a_status_of_many_partitions_names_the_failed_one() {
    let status = status_at(&Error::NoLeader { shard: 1 }, "orders", 3);
    let detail = from_status(&status).unwrap().detail;
    assert_eq!((detail.topic.as_str(), detail.partition), ("orders", Some(3)));
    assert!(status.message().starts_with("orders/3: "));
}
