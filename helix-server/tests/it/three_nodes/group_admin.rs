//! Administration of groups by the Rust client on three nodes, while coordinators fail.

use std::time::{Duration, UNIX_EPOCH};

use helix_client::{Admin, Position, SeekOptions};
use helix_proto::log::v1::{ErrorReason as R, GroupState, OffsetChangeKind};

use crate::groups::{TestMember, commit_at};
use crate::trio::{Trio, until};

const GROUP: &str = "readers";

async fn offsets(admin: &Admin) -> Vec<u64> {
    let found = admin.group_offsets(GROUP, &["default"]).await.unwrap();
    found.into_iter().map(|it| it.committed.unwrap().offset).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_node_leads_to_the_coordinator() {
    let mut trio = Trio::durable().await;
    trio.write(0, &["a", "b", "c"]).await;
    let client = trio.client();
    let admin = client.admin();
    let missing = admin.describe_group(GROUP, false).await.unwrap_err();
    assert!(missing.is(R::GroupNotFound), "{missing}");
    admin.commit_group_offsets(GROUP, &[commit_at(0, 2)]).await.unwrap();
    let options = SeekOptions { by: "operator".to_owned(), ..SeekOptions::default() };
    let preview = SeekOptions { validate_only: true, ..options.clone() };
    let sought = admin.seek_group(GROUP, &[commit_at(0, 1)], &preview).await.unwrap();
    assert_eq!((sought[0].from, sought[0].to), (Some(2), Some(1)));
    assert_eq!(offsets(&admin).await, [2]);
    for (position, expected) in [
        (Position::Offset(1), 1),
        (Position::Latest, 3),
        (Position::Earliest, 0),
        (Position::Tail(1), 2),
        (Position::Timestamp(UNIX_EPOCH + Duration::from_secs(1)), 0),
    ] {
        admin.reset_group(GROUP, "default", &[0], &position, &options).await.unwrap();
        assert_eq!(offsets(&admin).await, [expected], "{position:?}");
    }
    let undone = admin.undo_group_seek(GROUP, &["default"], &options).await.unwrap();
    assert_eq!((undone.len(), undone[0].to), (1, Some(2)));
    admin.reset_group(GROUP, "default", &[], &Position::Latest, &options).await.unwrap();
    assert_eq!(offsets(&admin).await, [3, 0, 0, 0]);
    let beyond = admin.seek_group(GROUP, &[commit_at(0, 9)], &options).await.unwrap_err();
    assert!(beyond.is(R::OffsetOutOfRange) && !beyond.may_have_applied, "{beyond}");
    let history = &admin.describe_group(GROUP, true).await.unwrap().partitions[0].history;
    let last: Vec<_> = history.iter().rev().take(2).map(|change| change.kind()).collect();
    assert_eq!(last, [OffsetChangeKind::Seek, OffsetChangeKind::Undo]);
    let listed = admin.groups().await.unwrap();
    assert_eq!((listed.len(), listed[0].state()), (1, GroupState::Empty));
    admin.delete_group(GROUP).await.unwrap();
    assert!(admin.delete_group(GROUP).await.unwrap_err().is(R::GroupNotFound));
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_outlive_a_stopped_and_a_silent_coordinator() {
    let mut trio = Trio::start(crate::trio::TrioPlan::linked().await).await;
    trio.write(0, &["a", "b", "c"]).await;
    let client = trio.client();
    let admin = client.admin();
    admin.commit_group_offsets(GROUP, &[commit_at(0, 1)]).await.unwrap();
    let coordinator = async || {
        let described = admin.describe_group(GROUP, false).await.unwrap();
        described.coordinator_node_id
    };
    let first = coordinator().await;
    trio.stop(first).await;
    admin.seek_group(GROUP, &[commit_at(0, 2)], &SeekOptions::default()).await.unwrap();
    assert_eq!(offsets(&admin).await, [2]);
    trio.start_nodes(&[first]).await;
    trio.settle().await;
    // Partitioned from the others, the coordinator can confirm nothing.
    let second = coordinator().await;
    trio.isolate(second);
    admin.commit_group_offsets(GROUP, &[commit_at(0, 3)]).await.unwrap();
    assert_eq!(offsets(&admin).await, [3]);
    assert_ne!(coordinator().await, second);
    trio.heal(second);
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_changes_name_the_members() {
    let mut trio = Trio::durable().await;
    let client = trio.client();
    let admin = client.admin();
    admin.commit_group_offsets(GROUP, &[commit_at(0, 0)]).await.unwrap();
    let mut member = TestMember::new("m1", &["default"]);
    until("the member has joined", async || {
        for (_, node) in trio.nodes() {
            if member.beat(node).await.is_ok() {
                return Some(());
            }
        }
        None
    })
    .await;
    let options = SeekOptions::default();
    for refused in [
        admin.commit_group_offsets(GROUP, &[commit_at(0, 0)]).await,
        admin.seek_group(GROUP, &[commit_at(0, 0)], &options).await.map(drop),
        admin.undo_group_seek(GROUP, &[], &options).await.map(drop),
        admin.delete_group(GROUP).await,
    ] {
        let refused = refused.unwrap_err();
        assert!(refused.is(R::GroupNotEmpty), "{refused}");
        assert_eq!(refused.member_ids, ["m1"]);
    }
    trio.stop_all().await;
}
