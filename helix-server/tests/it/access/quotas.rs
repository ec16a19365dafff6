//! Quotas of principals, as clients meet them.

use helix_client::AppendOptions;
use helix_proto::error::from_status;
use helix_proto::log::v1::append_stream_request::Message as StreamMessage;
use helix_proto::log::v1::cluster_service_client::ClusterServiceClient;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::group_service_client::GroupServiceClient;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::*;
use helix_server::config::AuthSetting;
use tokio::time::Instant;
use tonic::Code;

use super::{GuardedServer, SECOND, role, with_token};
use crate::support::{append_request, connect, earliest, reason, soon};
use crate::trio::until;

const KIB: usize = 1 << 10;

fn record(bytes: usize) -> Vec<Record> {
    vec![Record { value: Some(vec![7; bytes].into()), ..Record::default() }]
}

fn quota(principal: &str) -> PrincipalQuota {
    PrincipalQuota { principal: principal.to_owned(), ..PrincipalQuota::default() }
}

async fn throttled(guarded: &GuardedServer, principal: &str) -> u64 {
    guarded.admin().quotas(Some(principal)).await.unwrap()[0].throttled_count
}

/// Starts a server with a principal `tenant` that may do everything.
async fn with_tenant() -> (GuardedServer, String) {
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    let token = guarded.token("tenant", &role(AccessRole::Admin, "")).await;
    (guarded, token)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn appends_over_the_quota_are_refused_with_the_time_to_wait() {
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    let request = append_request(&[&"x".repeat(256 * KIB)]);
    let mut attempts = 0;
    // Again if the machine stalls, and the bucket fills meanwhile.
    let (tenant, token, status) = until("an append over the quota follows at once", async || {
        attempts += 1;
        let tenant = format!("tenant-{attempts}");
        let token = guarded.token(&tenant, &role(AccessRole::Admin, "")).await;
        let limits = PrincipalQuota { bytes_in_per_second: 128 << 10, ..quota(&tenant) };
        guarded.admin().set_quota(&limits).await.unwrap();
        let mut produce = ProduceServiceClient::new(with_token(&guarded.server.channel, &token));
        produce.append(request.clone()).await.expect("the bucket is full");
        let refused = produce.append(request.clone()).await.err();
        let wait = refused.as_ref().map(|it| from_status(it).unwrap().retry_after.unwrap());
        assert!(wait.is_none_or(|wait| wait <= SECOND + SECOND / 4), "{wait:?}");
        if wait.is_some_and(|wait| wait > SECOND / 2) {
            return Some((tenant, token, refused?));
        }
        guarded.admin().set_quota(&quota(&tenant)).await.unwrap();
        None
    })
    .await;
    assert_eq!((status.code(), reason(&status)), (Code::ResourceExhausted, ErrorReason::Throttled));
    assert!(status.message().contains("131072 bytes of requests per second"), "{status}");
    // Reads and the appends of other principals go on.
    let mut other =
        ProduceServiceClient::new(with_token(&guarded.server.channel, &guarded.admin_token));
    other.append(request.clone()).await.unwrap();
    guarded.client(&token).admin().topics("").await.unwrap();
    assert_eq!(throttled(&guarded, &tenant).await, 1);
    // Without its quota the principal appends at once.
    guarded.admin().set_quota(&quota(&tenant)).await.unwrap();
    let mut produce = ProduceServiceClient::new(with_token(&guarded.server.channel, &token));
    produce.append(request).await.unwrap();
    assert!(guarded.admin().quotas(None).await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_waits_for_its_quota_and_does_not_spin() {
    let (guarded, token) = with_tenant().await;
    let limits = PrincipalQuota { bytes_in_per_second: 256 << 10, ..quota("tenant") };
    guarded.admin().set_quota(&limits).await.unwrap();
    let client = guarded.client(&token);
    let options = AppendOptions::default();
    let started = Instant::now();
    // One second is in the bucket, and the last batch may overdraw it.
    for _ in 0..4 {
        client.append("default", 0, &record(256 * KIB), &options).await.unwrap();
    }
    assert!(started.elapsed() >= 2 * SECOND, "{:?}", started.elapsed());
    let refused = throttled(&guarded, "tenant").await;
    assert!((1..=12).contains(&refused), "{refused} refused calls for 4 appends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_wait_cannot_spin() {
    let (guarded, token) = with_tenant().await;
    let limits = PrincipalQuota { bytes_in_per_second: 64 << 10, ..quota("tenant") };
    guarded.admin().set_quota(&limits).await.unwrap();
    let mut produce = ProduceServiceClient::new(with_token(&guarded.server.channel, &token));
    let request = append_request(&[&"x".repeat(600 * KIB)]);
    produce.append(request).await.expect("the bucket is full");
    let started = Instant::now();
    for _ in 0..4 {
        let refused = produce.append(append_request(&["x"])).await.unwrap_err();
        assert_eq!(reason(&refused), ErrorReason::Throttled, "{refused}");
    }
    assert!(started.elapsed() >= SECOND, "4 refusals in {:?}", started.elapsed());
    assert_eq!(throttled(&guarded, "tenant").await, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn append_streams_and_subscriptions_are_delayed() {
    let (guarded, token) = with_tenant().await;
    let rate = 256 * KIB;
    let limits = PrincipalQuota {
        bytes_in_per_second: rate as u64,
        bytes_out_per_second: rate as u64,
        ..quota("tenant")
    };
    guarded.admin().set_quota(&limits).await.unwrap();
    let channel = with_token(&guarded.server.channel, &token);
    let init = AppendStreamInit { topic: "default".to_owned(), ..AppendStreamInit::default() };
    let batch = append_request(&[&"x".repeat(rate)]).batch;
    let append = |_| {
        let append = AppendStreamBatch { batch: batch.clone(), ..AppendStreamBatch::default() };
        AppendStreamRequest { message: Some(StreamMessage::Batch(append)) }
    };
    let first = AppendStreamRequest { message: Some(StreamMessage::Init(init)) };
    let requests = std::iter::once(first).chain((0..4).map(append));
    let started = Instant::now();
    let stream = ProduceServiceClient::new(channel.clone())
        .append_stream(tokio_stream::iter(requests.collect::<Vec<_>>()))
        .await;
    let mut acks = stream.unwrap().into_inner();
    let mut count = 0;
    while let Some(response) = acks.message().await.unwrap() {
        count += acks_in(&response);
    }
    assert_eq!(count, 4);
    assert!(started.elapsed() >= 2 * SECOND, "appended after {:?}", started.elapsed());

    let started = Instant::now();
    let request = SubscribeRequest { partitions: vec![earliest(0)], ..Default::default() };
    let mut records = ConsumeServiceClient::new(channel)
        .max_decoding_message_size(usize::MAX)
        .subscribe(request)
        .await
        .unwrap()
        .into_inner();
    let mut received = 0;
    while received < 4 * rate {
        received += prost::Message::encoded_len(&records.message().await.unwrap().unwrap());
    }
    assert!(started.elapsed() >= 2 * SECOND, "read after {:?}", started.elapsed());
    assert!(throttled(&guarded, "tenant").await >= 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_and_connections_are_limited_for_each_principal() {
    let (guarded, token) = with_tenant().await;
    let every = PrincipalQuota { requests_per_second: 5, connections: 1, ..quota("*") };
    // The administrator has a quota of its own, and is not held to the one for all others.
    let admin = PrincipalQuota { requests_per_second: 1 << 20, ..quota("admin") };
    guarded.admin().set_quota(&admin).await.unwrap();
    guarded.admin().set_quota(&every).await.unwrap();
    let mut metadata = ClusterServiceClient::new(with_token(&guarded.server.channel, &token));
    let mut admitted = 0;
    let refusal = loop {
        match metadata.get_metadata(GetMetadataRequest::default()).await {
            Ok(_) => admitted += 1,
            Err(status) => break status,
        }
        assert!(admitted < 1_000);
    };
    assert!(admitted >= 5, "{admitted}");
    assert!(refusal.message().contains("5 requests per second"), "{refusal}");
    // A member keeps its partitions, and the quotas can be changed.
    let heartbeat = HeartbeatRequest {
        group: "readers".to_owned(),
        member_id: "member-1".to_owned(),
        topics: vec!["default".to_owned()],
        ..HeartbeatRequest::default()
    };
    let mut groups = GroupServiceClient::new(with_token(&guarded.server.channel, &token));
    for _ in 0..20 {
        groups.heartbeat(heartbeat.clone()).await.unwrap();
        guarded.access(&token).who_am_i(WhoAmIRequest {}).await.unwrap();
    }

    // The channel above is this principal's one connection, also if another one uses it.
    let other = guarded.token("other", &role(AccessRole::Admin, "")).await;
    let by_other = with_token(&guarded.server.channel, &other);
    ClusterServiceClient::new(by_other).get_metadata(GetMetadataRequest::default()).await.unwrap();
    let second = connect(&guarded.server.running).await;
    let mut second = ClusterServiceClient::new(with_token(&second, &token));
    until("the connections are refused, and not the requests", async || {
        let status = second.get_metadata(GetMetadataRequest::default()).await.unwrap_err();
        status.message().contains("1 connections").then_some(())
    })
    .await;
    drop((metadata, groups));
    let GuardedServer { server, .. } = guarded;
    drop(server.channel);
    until("the first connection is closed", async || {
        second.get_metadata(GetMetadataRequest::default()).await.ok()
    })
    .await;
    server.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_quota_holds_for_open_streams() {
    let (guarded, token) = with_tenant().await;
    let client = guarded.client(&token);
    client.append("default", 0, &record(10), &AppendOptions::default()).await.unwrap();
    let request = SubscribeRequest { partitions: vec![earliest(0)], ..Default::default() };
    let mut records = ConsumeServiceClient::new(with_token(&guarded.server.channel, &token))
        .max_decoding_message_size(usize::MAX)
        .subscribe(request)
        .await
        .unwrap()
        .into_inner();
    records.message().await.unwrap().unwrap();
    let limits = PrincipalQuota { bytes_out_per_second: 64 << 10, ..quota("tenant") };
    guarded.admin().set_quota(&limits).await.unwrap();
    let writer = guarded.client(&guarded.admin_token);
    for _ in 0..2 {
        writer.append("default", 0, &record(128 * KIB), &AppendOptions::default()).await.unwrap();
    }
    let mut received = 0;
    while received < 256 * KIB {
        received += prost::Message::encoded_len(&records.message().await.unwrap().unwrap());
    }
    assert!(throttled(&guarded, "tenant").await >= 1);
}

fn acks_in(response: &AppendStreamResponse) -> usize {
    match &response.message {
        Some(append_stream_response::Message::Acks(acks)) => acks.acks.len(),
        _ => 0,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_appends_overdraws_the_quota_by_one_batch() {
    let (guarded, token) = with_tenant().await;
    let limits = PrincipalQuota { bytes_in_per_second: 64 << 10, ..quota("tenant") };
    guarded.admin().set_quota(&limits).await.unwrap();
    let request = append_request(&[&"x".repeat(256 * KIB)]);
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let channel = with_token(&guarded.server.channel, &token);
        let request = request.clone();
        calls.spawn(async move { ProduceServiceClient::new(channel).append(request).await });
    }
    let done = calls.join_all().await;
    let admitted = done.iter().filter(|it| it.is_ok()).count();
    assert!((1..=2).contains(&admitted), "{admitted} of 50 batches that take 4 s each");
    for status in done.into_iter().filter_map(Result::err) {
        assert_eq!(reason(&status), ErrorReason::Throttled, "{status}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscription_over_its_quota_has_heartbeats_and_whole_messages() {
    let (guarded, token) = with_tenant().await;
    let limits = PrincipalQuota { bytes_out_per_second: 64 << 10, ..quota("tenant") };
    guarded.admin().set_quota(&limits).await.unwrap();
    let writer = guarded.client(&guarded.admin_token);
    for _ in 0..3 {
        writer.append("default", 0, &record(700 * KIB), &AppendOptions::default()).await.unwrap();
    }
    let request = SubscribeRequest { partitions: vec![earliest(0)], ..Default::default() };
    let mut records = ConsumeServiceClient::new(with_token(&guarded.server.channel, &token))
        .max_decoding_message_size(usize::MAX)
        .subscribe(request)
        .await
        .unwrap()
        .into_inner();
    let mut kinds = Vec::new();
    while !kinds.contains(&"heartbeat") {
        match soon(records.message()).await.unwrap().unwrap().message.unwrap() {
            subscribe_response::Message::Heartbeat(_) => kinds.push("heartbeat"),
            subscribe_response::Message::Data(_) => kinds.push("data"),
            _ => {}
        }
    }
    assert_eq!(kinds, ["data", "heartbeat"], "the quota lets one message pass in ten seconds");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_says_that_a_quota_delays_its_reads() {
    let (guarded, token) = with_tenant().await;
    let writer = guarded.client(&guarded.admin_token);
    for _ in 0..3 {
        writer.append("default", 0, &record(700 * KIB), &AppendOptions::default()).await.unwrap();
    }
    let channel = with_token(&guarded.server.channel, &token);
    let join = HeartbeatRequest {
        group: "readers".to_owned(),
        member_id: "member-1".to_owned(),
        topics: vec!["default".to_owned()],
        max_wait: std::time::Duration::from_secs(2).try_into().ok(),
        ..HeartbeatRequest::default()
    };
    let mut groups = GroupServiceClient::new(channel.clone());
    until("the member has its partitions", async || {
        let joined = groups.heartbeat(join.clone()).await.unwrap().into_inner();
        (!joined.assigned.is_empty()).then_some(())
    })
    .await;
    let described = async || {
        let group = guarded.client(&guarded.admin_token).admin();
        let group = group.describe_group("readers", false).await.unwrap();
        let found = group
            .partitions
            .into_iter()
            .find(|it| it.partition.as_ref().is_some_and(|partition| partition.partition == 0));
        found.unwrap().status()
    };
    assert_eq!(described().await, DeliveryStatus::Flowing);
    let limits = PrincipalQuota { bytes_out_per_second: 64 << 10, ..quota("tenant") };
    guarded.admin().set_quota(&limits).await.unwrap();
    let request = SubscribeRequest { partitions: vec![earliest(0)], ..Default::default() };
    let mut records = ConsumeServiceClient::new(channel)
        .max_decoding_message_size(usize::MAX)
        .subscribe(request)
        .await
        .unwrap()
        .into_inner();
    records.message().await.unwrap().unwrap();
    // Reads on, so that the stream polls its quota.
    let reading = tokio::spawn(async move { while let Ok(Some(_)) = records.message().await {} });
    until("the group says why", async || {
        (described().await == DeliveryStatus::Throttled).then_some(())
    })
    .await;
    guarded.admin().set_quota(&quota("tenant")).await.unwrap();
    until("nothing delays the reads", async || {
        (described().await == DeliveryStatus::Flowing).then_some(())
    })
    .await;
    reading.abort();
}
