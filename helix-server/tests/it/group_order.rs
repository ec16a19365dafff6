//! Order of commits, ends of partitions, lag and forgotten topics of groups, on one node.

use helix_proto::log::v1::{
    CommitOffsetsRequest, CommitStatus, CreateTopicRequest, DeleteGroupRequest, ErrorReason as R,
    ForgetGroupTopicRequest, GetOffsetsRequest, GetOffsetsResponse, ListGroupsRequest,
    SeekGroupRequest, TopicPartition, TrimPartitionRequest,
};
use tonic::Status;

use crate::groups::{TestMember, commit_at, groups, leave, offsets};
use crate::support::{TestServer, detail, reason};

const GROUP: &str = "readers";

/// A commit without a member.
fn commit(offset: u64, offsets_epoch: Option<u64>) -> CommitOffsetsRequest {
    CommitOffsetsRequest {
        group: GROUP.to_owned(),
        offsets: vec![commit_at(0, offset)],
        offsets_epoch,
        ..CommitOffsetsRequest::default()
    }
}

async fn send(server: &TestServer, request: CommitOffsetsRequest) -> Result<Option<u64>, Status> {
    let response = groups(server).commit_offsets(request).await?;
    Ok(response.into_inner().offsets_epoch)
}

async fn seek(server: &TestServer, offset: u64) {
    let request = SeekGroupRequest {
        group: GROUP.to_owned(),
        offsets: vec![commit_at(0, offset)],
        ..SeekGroupRequest::default()
    };
    groups(server).seek_group(request).await.unwrap();
}

async fn read(server: &TestServer) -> GetOffsetsResponse {
    let request = GetOffsetsRequest {
        group: GROUP.to_owned(),
        allow_missing: true,
        ..GetOffsetsRequest::default()
    };
    groups(server).get_offsets(request).await.unwrap().into_inner()
}

async fn committed(server: &TestServer) -> Option<u64> {
    let found = read(server).await.offsets;
    found.first().and_then(|it| it.committed.as_ref()).map(|it| it.offset)
}

/// A server whose protocol orders commits, with ten records in partition 0.
async fn started() -> TestServer {
    let server = TestServer::in_memory().await;
    server.append(&["a"; 10]).await;
    crate::trio::until("commits are ordered", async || read(&server).await.offsets_epoch).await;
    server
}

async fn trim(server: &TestServer, trim_offset: u64) {
    let request = TrimPartitionRequest {
        topic: "default".to_owned(),
        partition: 0,
        trim_offset,
        ..TrimPartitionRequest::default()
    };
    server.topics().trim_partition(request).await.unwrap();
}

#[tokio::test]
async fn late_commit_undoes_no_seek_and_revives_no_group() {
    let server = started().await;
    let none = read(&server).await.offsets_epoch;
    let first = send(&server, commit(4, none)).await.unwrap();
    assert!(first > none);
    let held = [commit(8, first), commit(8, None), commit(4, none)];
    seek(&server, 5).await;
    for late in held.clone() {
        let refused = send(&server, late).await.unwrap_err();
        assert_eq!(reason(&refused), R::StaleCommit);
        assert_eq!(detail(&refused).offsets_epoch, read(&server).await.offsets_epoch);
        assert_eq!(committed(&server).await, Some(5));
    }
    let delete = delete_after(None);
    groups(&server).delete_group(delete).await.unwrap();
    for late in held {
        assert_eq!(reason(&send(&server, late).await.unwrap_err()), R::StaleCommit);
        assert_eq!(committed(&server).await, None);
    }
    let begin = read(&server).await.offsets_epoch;
    let next = send(&server, commit(1, begin)).await.unwrap();
    send(&server, commit(2, next)).await.unwrap();
    let late = send(&server, commit(1, begin)).await.unwrap_err();
    assert_eq!(reason(&late), R::StaleCommit, "{late}");
    assert_eq!(committed(&server).await, Some(2));
}

fn delete_after(offsets_epoch: Option<u64>) -> DeleteGroupRequest {
    DeleteGroupRequest { group: GROUP.to_owned(), offsets_epoch }
}

#[tokio::test]
async fn late_seek_and_deletion_change_no_later_state() {
    let server = started().await;
    let none = read(&server).await.offsets_epoch;
    let first = send(&server, commit(4, none)).await.unwrap();
    let seek_after = |offset, offsets_epoch| SeekGroupRequest {
        group: GROUP.to_owned(),
        offsets: commit(offset, None).offsets,
        offsets_epoch,
        ..SeekGroupRequest::default()
    };
    let undo = SeekGroupRequest { undo: true, ..seek_after(0, first) };
    let undo = SeekGroupRequest { offsets: Vec::new(), ..undo };
    let forget = ForgetGroupTopicRequest {
        group: GROUP.to_owned(),
        topic: "default".to_owned(),
        offsets_epoch: first,
        ..ForgetGroupTopicRequest::default()
    };
    // A commit without a member comes between.
    send(&server, commit(6, first)).await.unwrap();
    groups(&server).seek_group(seek_after(5, first)).await.unwrap();
    let late = [
        groups(&server).seek_group(seek_after(8, first)).await.unwrap_err(),
        groups(&server).seek_group(undo).await.unwrap_err(),
        groups(&server).forget_group_topic(forget).await.unwrap_err(),
        groups(&server).delete_group(delete_after(first)).await.unwrap_err(),
    ];
    for refused in late {
        assert_eq!(reason(&refused), R::StaleCommit, "{refused}");
        assert_eq!(detail(&refused).offsets_epoch, read(&server).await.offsets_epoch);
    }
    assert_eq!(committed(&server).await, Some(5));

    // Deleted, and created again.
    let delete = delete_after(read(&server).await.offsets_epoch);
    groups(&server).delete_group(delete.clone()).await.unwrap();
    let missing = groups(&server).delete_group(delete.clone()).await.unwrap_err();
    assert_eq!(reason(&missing), R::GroupNotFound);
    let again = read(&server).await.offsets_epoch;
    groups(&server).seek_group(seek_after(3, again)).await.unwrap();
    let late = groups(&server).delete_group(delete).await.unwrap_err();
    assert_eq!(reason(&late), R::StaleCommit, "{late}");
    assert_eq!(committed(&server).await, Some(3));
}

#[tokio::test]
async fn commits_of_a_member_are_ordered_by_their_numbers() {
    let server = started().await;
    let mut member = TestMember::new("a", &["default"]);
    member.until_owns(&server, 4).await;
    let numbered = |sequence, offset| CommitOffsetsRequest {
        member_id: "a".to_owned(),
        member_epoch: member.last.member_epoch,
        sequence,
        ..commit(offset, None)
    };
    send(&server, numbered(1, 9)).await.unwrap();
    send(&server, numbered(2, 5)).await.unwrap();
    send(&server, numbered(2, 5)).await.unwrap();
    for late in [numbered(1, 9), numbered(2, 6)] {
        let refused = send(&server, late).await.unwrap_err();
        assert_eq!(reason(&refused), R::StaleCommit);
        let detail = detail(&refused);
        assert_eq!((detail.partition, detail.next_sequence), (Some(0), Some(3)));
        assert_eq!(committed(&server).await, Some(5));
    }
}

#[tokio::test]
async fn commits_beyond_the_end_are_refused() {
    let server = started().await;
    let mut member = TestMember::new("a", &["default"]);
    for offset in [11, 999, u64::MAX] {
        let alone = send(&server, commit(offset, None)).await.unwrap_err();
        assert_eq!(reason(&alone), R::OffsetOutOfRange);
        assert_eq!(detail(&alone).watermarks.unwrap().high_watermark, 10);
    }
    send(&server, commit(10, None)).await.unwrap();
    member.until_owns(&server, 4).await;
    for offset in [11, u64::MAX] {
        let refused = member.commit(&server, 0, offset).await.unwrap_err();
        assert_eq!(reason(&refused), R::OffsetOutOfRange);
    }
    member.commit(&server, 0, 10).await.unwrap();
    // A commit of what was read before a trim is accepted.
    trim(&server, 5).await;
    member.commit(&server, 0, 3).await.unwrap();
}

#[tokio::test]
async fn lag_counts_what_can_be_read() {
    let server = started().await;
    send(&server, commit(1, None)).await.unwrap();
    for (log_start, lag, lost) in [(0, 9, 0), (6, 4, 5), (10, 0, 9)] {
        trim(&server, log_start).await;
        let found = offsets(&server).await;
        assert_eq!((found[0].lag, found[0].lost), (Some(lag), Some(lost)));
        let listed = groups(&server).list_groups(ListGroupsRequest::default()).await.unwrap();
        let listed = &listed.into_inner().groups[0];
        assert_eq!((listed.total_lag, listed.total_lost, listed.unknown_lags), (lag, lost, 0));
    }
    assert_eq!(offsets(&server).await[0].status(), CommitStatus::BelowLogStart);
    // An undo is checked as a seek is.
    seek(&server, 10).await;
    let undo =
        SeekGroupRequest { group: GROUP.to_owned(), undo: true, ..SeekGroupRequest::default() };
    let refused = groups(&server).seek_group(undo).await.unwrap_err();
    assert_eq!(reason(&refused), R::OffsetOutOfRange);
    assert_eq!(committed(&server).await, Some(10));
}

#[tokio::test]
async fn unread_topic_is_apart_from_the_lag_and_can_be_forgotten() {
    let server = started().await;
    let create = CreateTopicRequest {
        name: "others".to_owned(),
        partition_count: 1,
        ..CreateTopicRequest::default()
    };
    server.topics().create_topic(create).await.unwrap();
    send(&server, commit(1, None)).await.unwrap();
    let mut member = TestMember::new("a", &["others"]);
    member.until_owns(&server, 1).await;
    let found = offsets(&server).await;
    assert_eq!((found[0].lag, found[0].unsubscribed), (Some(9), true));
    let listed = groups(&server).list_groups(ListGroupsRequest::default()).await.unwrap();
    let listed = &listed.into_inner().groups[0];
    assert_eq!((listed.total_lag, listed.unsubscribed_lag), (0, 9));

    let forget = |topic: &str| ForgetGroupTopicRequest {
        group: GROUP.to_owned(),
        topic: topic.to_owned(),
        ..ForgetGroupTopicRequest::default()
    };
    let refused = groups(&server).forget_group_topic(forget("others")).await.unwrap_err();
    assert_eq!(reason(&refused), R::GroupNotEmpty);
    assert_eq!(detail(&refused).member_ids, ["a"]);
    let preview = ForgetGroupTopicRequest { validate_only: true, ..forget("default") };
    let epoch = read(&server).await.offsets_epoch;
    for request in [preview, forget("default")] {
        assert_eq!(committed(&server).await, Some(1));
        let forgotten = groups(&server).forget_group_topic(request).await.unwrap().into_inner();
        let partition = forgotten.offsets[0].partition.clone().unwrap();
        assert_eq!((forgotten.offsets[0].offset, forgotten.offsets.len()), (1, 1));
        assert!(
            matches!(&partition, TopicPartition { topic, partition: 0, .. } if topic == "default")
        );
    }
    assert_eq!(committed(&server).await, None);
    let again = groups(&server).forget_group_topic(forget("default")).await.unwrap();
    assert!(again.into_inner().offsets.is_empty());
    leave(&server, "a").await;
    assert_eq!(reason(&send(&server, commit(4, epoch)).await.unwrap_err()), R::StaleCommit);
}
