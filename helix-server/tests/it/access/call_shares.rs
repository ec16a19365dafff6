//! Shares of the open calls: a principal with many open calls beside another one.

use helix_proto::log::v1::append_stream_request::Message;
use helix_proto::log::v1::consume_service_client::ConsumeServiceClient;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::{
    AccessRole, AppendStreamRequest, AppendStreamResponse, ErrorReason, FetchRequest,
};
use helix_server::config::{AuthSetting, ServerConfig};
use helix_server::limits::{CALLS_RESERVE_PART, STREAMS_PER_CONNECTION_MAX};
use helix_server::memory::MEMORY_LIMIT_MIN;
use tokio::sync::mpsc::{Sender, channel as channel_of};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::{GuardedServer, TokenInterceptor, WithToken, role, with_token};
use crate::append_stream::init;
use crate::support::{append_request, connect, earliest, reason, soon};
use crate::trio::until;

/// A stream that ends when it is dropped, and the channel that keeps its connection open.
type SilentStream = (WithToken, Sender<AppendStreamRequest>, Streaming<AppendStreamResponse>);

/// Opens an append stream that sends nothing after its first message.
async fn open_silent(channel: &WithToken) -> Result<SilentStream, Status> {
    let first = AppendStreamRequest { message: Some(Message::Init(init())) };
    let (sender, requests) = channel_of(1);
    sender.try_send(first).unwrap();
    let mut produce = ProduceServiceClient::new(channel.clone());
    let response = soon(produce.append_stream(ReceiverStream::new(requests))).await?;
    Ok((channel.clone(), sender, response.into_inner()))
}

/// Opens silent append streams on as many connections as it takes, until not even the first call of
/// a new connection is admitted. Returns the streams and the last refusal.
async fn take_all_calls(guarded: &GuardedServer, token: &str) -> (Vec<SilentStream>, Status) {
    let mut streams = Vec::new();
    loop {
        let channel = with_token(&connect(&guarded.server.running).await, token);
        let before = streams.len();
        // One less than its streams: the last call would wait for a stream at the client.
        for _ in 1..STREAMS_PER_CONNECTION_MAX {
            match open_silent(&channel).await {
                Ok(stream) => streams.push(stream),
                Err(refusal) if streams.len() == before => return (streams, refusal),
                Err(_) => break,
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_streams_of_one_principal_do_not_stop_another() {
    let auth = AuthSetting::Required;
    let config = ServerConfig { auth, memory_limit: MEMORY_LIMIT_MIN, ..ServerConfig::in_memory() };
    let guarded = GuardedServer::start_with(config).await;
    let hog = guarded.token("hog", &role(AccessRole::Admin, "")).await;
    let tenant = guarded.token("tenant", &role(AccessRole::Admin, "")).await;
    let load = guarded.server.running.load();
    let calls = load.shares().calls;
    let reserve = calls / CALLS_RESERVE_PART;

    let (streams, refusal) = take_all_calls(&guarded, &hog).await;
    assert_eq!(
        (refusal.code(), reason(&refusal)),
        (Code::ResourceExhausted, ErrorReason::Throttled)
    );
    assert!(refusal.message().contains("calls of this principal"), "{refusal}");
    assert!(load.events().principal_calls_refused.get() > 0);
    // A tenant that is alone gets all but the reserve, and with few calls on each of many
    // connections half of that.
    let (open, reserve) = (streams.len(), reserve / 2);
    assert!(open + reserve <= calls && open + reserve + 8 >= calls, "{open} of {calls}");

    // Another principal is served, also with many calls and on the hog's own machine.
    let channel = with_token(&connect(&guarded.server.running).await, &tenant);
    let mut produce = ProduceServiceClient::new(channel.clone());
    let mut consume = ConsumeServiceClient::new(channel.clone());
    let mut others = Vec::new();
    for number in 0..reserve / 4 {
        soon(produce.append(append_request(&["a"]))).await.unwrap();
        let partitions = vec![earliest(0)];
        let fetch = FetchRequest { partitions, ..FetchRequest::default() };
        let fetched = soon(consume.fetch(fetch)).await.unwrap().into_inner();
        assert!(fetched.partitions[0].next_offset > number as u64);
        others.push(open_silent(&channel).await.unwrap());
    }
    // The hog gets nothing more meanwhile, and is served again once its streams have ended.
    let channel = with_token(&connect(&guarded.server.running).await, &hog);
    let mut produce = ProduceServiceClient::new(channel);
    let refusal = soon(produce.append(append_request(&["b"]))).await.unwrap_err();
    assert!(refusal.message().contains("calls of this principal"), "{refusal}");
    drop(streams);
    until("the calls of the hog have ended", async || {
        produce.append(append_request(&["b"])).await.ok()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_do_not_stop_another_one_of_their_principal_or_address() {
    let auth = AuthSetting::Optional;
    let config = ServerConfig { auth, memory_limit: MEMORY_LIMIT_MIN, ..ServerConfig::in_memory() };
    let guarded = GuardedServer::start_with(config).await;
    let hog = guarded.token("hog", &role(AccessRole::Admin, "")).await;
    let tenant = guarded.token("tenant", &role(AccessRole::Admin, "")).await;
    for silent in [Some(hog.as_str()), None] {
        let mut streams = Vec::new();
        for _ in 0..5 {
            let channel = of(&guarded, silent).await;
            for _ in 1..STREAMS_PER_CONNECTION_MAX {
                match open_silent(&channel).await {
                    Ok(stream) => streams.push(stream),
                    Err(refusal) => {
                        assert_eq!(reason(&refusal), ErrorReason::Throttled, "{refusal}");
                        break;
                    }
                }
            }
        }
        let load = guarded.server.running.load();
        assert!(streams.len() > load.shares().calls / 4 * 3, "{}", streams.len());
        // Clients that behave, behind the same address.
        for caller in [silent, Some(tenant.as_str()), None] {
            let mut produce = ProduceServiceClient::new(of(&guarded, caller).await);
            for _ in 0..50 {
                soon(produce.append(append_request(&["a"]))).await.unwrap();
            }
        }
        drop(streams);
        let mut produce = ProduceServiceClient::new(of(&guarded, silent).await);
        until("the silent streams have ended", async || {
            let is_free = load.acquire_call(load.shares().calls / 2).is_ok();
            produce.append(append_request(&["b"])).await.ok().filter(|_| is_free)
        })
        .await;
    }
}

/// Connects as a principal, or without credentials.
async fn of(guarded: &GuardedServer, token: Option<&str>) -> WithToken {
    let channel = connect(&guarded.server.running).await;
    let header = token.map(|token| format!("Bearer {token}"));
    WithToken::new(channel, TokenInterceptor(header))
}
