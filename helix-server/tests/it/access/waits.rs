//! Calls that wait: they end when their caller loses its token or its rights.

use std::time::Duration;

use helix_client::{AccessGrant, NewTopic};
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::group_service_client::GroupServiceClient;
use helix_proto::log::v1::{
    AccessOperation, ErrorReason, FetchRequest, HeartbeatRequest, HeartbeatResponse, ResourceKind,
};
use helix_server::config::AuthSetting;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::Status;

use super::{GuardedServer, WithToken, rule, rules, with_token};
use crate::support::{latest, reason, soon};
use crate::trio::until;

const WAIT: prost_types::Duration = prost_types::Duration { seconds: 60, nanos: 0 };
const MEMBER: &str = "member-1";

fn reader() -> AccessGrant {
    rules(&[
        rule(ResourceKind::Topic, "*", &[AccessOperation::Read]),
        rule(ResourceKind::Group, "*", &[AccessOperation::Read]),
    ])
}

async fn heartbeat(
    groups: &mut GroupServiceClient<WithToken>,
    joined: Option<&HeartbeatResponse>,
    topics: &[&str],
) -> Result<HeartbeatResponse, Status> {
    let request = HeartbeatRequest {
        group: "readers".to_owned(),
        member_id: MEMBER.to_owned(),
        member_epoch: joined.map_or(0, |it| it.member_epoch),
        owned: joined.map_or_else(Vec::new, |it| it.assigned.clone()),
        topics: topics.iter().map(|it| (*it).to_owned()).collect(),
        max_wait: Some(WAIT),
        session_timeout: Some(prost_types::Duration { seconds: 600, nanos: 0 }),
        ..HeartbeatRequest::default()
    };
    Ok(groups.heartbeat(request).await?.into_inner())
}

/// Joins and starts a heartbeat that waits.
async fn waiting_heartbeat(
    guarded: &GuardedServer,
    token: &str,
    topics: &'static [&'static str],
) -> JoinHandle<Result<HeartbeatResponse, Status>> {
    let channel = with_token(&guarded.server.channel, token);
    let mut groups = GroupServiceClient::new(channel);
    let mut known = soon(heartbeat(&mut groups, None, &["def*"])).await.unwrap();
    until("the member has its partitions", async || {
        if known.settled && !known.assigned.is_empty() {
            return Some(());
        }
        known = soon(heartbeat(&mut groups, Some(&known), &["def*"])).await.unwrap();
        None
    })
    .await;
    tokio::spawn(async move { heartbeat(&mut groups, Some(&known), topics).await })
}

fn waiting_fetch(guarded: &GuardedServer, token: &str) -> JoinHandle<Result<(), Status>> {
    let mut consume = ConsumeServiceClient::new(with_token(&guarded.server.channel, token));
    let partitions = vec![latest(0)];
    let fetch = FetchRequest { partitions, max_wait: Some(WAIT), ..FetchRequest::default() };
    tokio::spawn(async move { consume.fetch(fetch).await.map(drop) })
}

/// Waits until this many calls have been open for some time.
async fn until_open(guarded: &GuardedServer, begun: u64) {
    let load = guarded.server.running.load();
    until("the calls wait", async || (load.partition_count() as u64 >= begun).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_calls_end_when_their_token_is_revoked() {
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    let admin = guarded.admin();
    let token = guarded.token("reader", &reader()).await;
    let begun = Instant::now();
    let beats = waiting_heartbeat(&guarded, &token, &["def*"]).await;
    let fetch = waiting_fetch(&guarded, &token);
    until_open(&guarded, 1).await;
    let id = admin.tokens(Some("reader")).await.unwrap()[0].token_id.clone();
    admin.revoke_token(&id).await.unwrap();
    admin.create_topic(&NewTopic::new("default-secret", 1)).await.unwrap();
    let refusal = soon(beats).await.unwrap().unwrap_err();
    assert_eq!(reason(&refusal), ErrorReason::Unauthenticated);
    let refusal = soon(fetch).await.unwrap().unwrap_err();
    assert_eq!(reason(&refusal), ErrorReason::Unauthenticated);
    assert!(begun.elapsed() < Duration::from_secs(60));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_calls_end_when_their_rules_are_removed() {
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    let admin = guarded.admin();
    let token = guarded.token("reader", &reader()).await;
    // The second kind of heartbeat keeps the member's subscription.
    for topics in [&["def*"][..], &[]] {
        let beats = waiting_heartbeat(&guarded, &token, topics).await;
        let fetch = waiting_fetch(&guarded, &token);
        until_open(&guarded, 1).await;
        // A change of other rules ends no wait.
        let other = rules(&[rule(ResourceKind::Topic, "other", &[AccessOperation::Read])]);
        admin.allow_access("other", &other).await.unwrap();
        assert!(!beats.is_finished() && !fetch.is_finished());
        let topics = rules(&[rule(ResourceKind::Topic, "*", &[AccessOperation::Read])]);
        admin.remove_access("reader", &topics).await.unwrap();
        let refusal = soon(beats).await.unwrap().unwrap_err();
        assert_eq!(reason(&refusal), ErrorReason::PermissionDenied);
        let refusal = soon(fetch).await.unwrap().unwrap_err();
        assert_eq!(reason(&refusal), ErrorReason::PermissionDenied);
        admin.allow_access("reader", &reader()).await.unwrap();
    }
}
