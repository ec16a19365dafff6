//! Producer identities belong to the principal that got them, in every call that uses one.

use helix_client::{NewTopic, SessionOptions};
use helix_proto::log::v1::append_stream_request::Message as Sent;
use helix_proto::log::v1::append_stream_response::Message as Received;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::{
    AccessRole, AppendCondition, AppendRequest, AppendResponse, AppendStreamInit,
    AppendStreamOpened, AppendStreamRequest, Durability, ErrorReason, InitProducerRequest,
    ProducerIdentity,
};
use helix_server::config::{AuthSetting, ServerConfig};
use helix_server::protocol::PRODUCER_OWNERS;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use super::{GuardedServer, WithToken, role, with_token};
use crate::support::{
    PATIENCE, TestServer, append_request, detail, encoded, plain, reason, records, soon,
};

/// The raw calls of one principal.
struct Writer(ProduceServiceClient<WithToken>);

impl Writer {
    fn new(server: &TestServer, token: &str) -> Self {
        Self(ProduceServiceClient::new(with_token(&server.channel, token)))
    }

    async fn init(&self, name: &str) -> ProducerIdentity {
        let request = InitProducerRequest { producer_name: name.to_owned() };
        self.0.clone().init_producer(request).await.unwrap().into_inner().producer.unwrap()
    }

    async fn append(&self, request: AppendRequest) -> Result<AppendResponse, Status> {
        Ok(soon(self.0.clone().append(request)).await?.into_inner())
    }

    /// Opens a stream and closes it.
    async fn open(&self, init: AppendStreamInit) -> Result<AppendStreamOpened, Status> {
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let init = AppendStreamRequest { message: Some(Sent::Init(init)) };
        sender.send(init).await.unwrap();
        let stream = self.0.clone().append_stream(ReceiverStream::new(receiver)).await?;
        match soon(stream.into_inner().message()).await?.unwrap().message {
            Some(Received::Opened(opened)) => Ok(opened),
            other => panic!("{other:?} instead of opened"),
        }
    }
}

fn batch(producer: ProducerIdentity, sequence: u64, value: &str) -> AppendRequest {
    AppendRequest {
        producer: Some(producer),
        first_sequence: Some(sequence),
        ..append_request(&[value])
    }
}

async fn expect_owners(server: &TestServer) {
    let cluster = server.running.node().cluster();
    assert!(cluster.wait_protocol(PRODUCER_OWNERS, PATIENCE).await);
}

/// Starts a server with the writers alice and bob, which both may do everything.
async fn start(config: ServerConfig) -> (GuardedServer, [String; 2]) {
    let guarded = GuardedServer::start_with(config).await;
    expect_owners(&guarded.server).await;
    let alice = guarded.token("alice", &role(AccessRole::Admin, "")).await;
    let bob = guarded.token("bob", &role(AccessRole::Admin, "")).await;
    (guarded, [alice, bob])
}

fn in_memory(auth: AuthSetting) -> ServerConfig {
    ServerConfig { auth, ..ServerConfig::in_memory() }
}

#[track_caller]
fn expect_not_owned(outcome: Result<impl std::fmt::Debug, Status>, what: &str) {
    let status = outcome.expect_err(what);
    assert_eq!(reason(&status), ErrorReason::ProducerNotOwned, "{what}: {status:?}");
    assert_eq!(status.code(), Code::PermissionDenied, "{what}");
    let detail = detail(&status);
    assert!(!detail.retryable && !detail.may_have_applied, "{what}");
    assert_eq!(detail.next_sequence, None, "{what}: it reveals the sequence");
}

/// Every use of alice's identity by bob is refused, and hers goes on.
async fn expect_all_uses_refused(
    alice: &Writer,
    bob: &Writer,
    producer: ProducerIdentity,
    next_sequence: u64,
) {
    for sequence in 0..next_sequence + 2 {
        let what = format!("sequence {sequence} of {next_sequence}");
        let stolen = batch(producer, sequence, "stolen");
        expect_not_owned(bob.append(stolen.clone()).await, &what);
        let weak = Durability::LeaderWritten.into();
        expect_not_owned(
            bob.append(AppendRequest { durability: weak, ..stolen.clone() }).await,
            &what,
        );
        let condition = AppendCondition { expected_offset: Some(0), fencing_token: None };
        let conditional = AppendRequest { condition: Some(condition), ..stolen };
        expect_not_owned(bob.append(conditional).await, &what);
    }
    let init = AppendStreamInit {
        topic: "default".to_owned(),
        producer: Some(producer),
        ..AppendStreamInit::default()
    };
    expect_not_owned(bob.open(init.clone()).await, "a stream tells the next sequence");
    assert_eq!(alice.open(init).await.unwrap().next_sequence, Some(next_sequence));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_identity_is_of_use_only_to_the_principal_that_got_it() {
    let (guarded, tokens) = start(in_memory(AuthSetting::Required)).await;
    let [alice, bob] = tokens.each_ref().map(|token| Writer::new(&guarded.server, token));
    for (name, first_offset) in [("", 0), ("named", 2)] {
        let producer = alice.init(name).await;
        alice.append(batch(producer, 0, "first")).await.unwrap();
        expect_all_uses_refused(&alice, &bob, producer, 1).await;
        let ack = alice.append(batch(producer, 1, "second")).await.unwrap().ack.unwrap();
        assert!(!ack.duplicate, "the record is stored, not taken for another one's");
        assert_eq!(ack.first_offset, Some(first_offset + 1), "and nothing else");
        let again = alice.append(batch(producer, 1, "second")).await.unwrap().ack.unwrap();
        assert!(again.duplicate && again.first_offset == ack.first_offset);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_other_principal_occupies_an_unused_partition_or_epoch() {
    let (guarded, tokens) = start(in_memory(AuthSetting::Required)).await;
    let [alice, bob] = tokens.each_ref().map(|token| Writer::new(&guarded.server, token));
    let topic = NewTopic::new("wide", 3);
    guarded.admin().create_topic(&topic).await.unwrap();
    let producer = alice.init("").await;
    let on = |partition, producer, value| AppendRequest {
        topic: "wide".to_owned(),
        partition,
        ..batch(producer, 0, value)
    };
    expect_not_owned(bob.append(on(1, producer, "occupied")).await, "unused partition");
    alice.append(on(1, producer, "own")).await.unwrap();
    // A guess of ids that bob has not got either.
    for producer_id in producer.producer_id + 1..producer.producer_id + 5 {
        let guess = ProducerIdentity { producer_id, epoch: 0 };
        let status = bob.append(on(2, guess, "guess")).await.unwrap_err();
        let reasons = [ErrorReason::ProducerNotOwned, ErrorReason::UnknownProducer];
        assert!(reasons.contains(&reason(&status)), "{status:?}");
    }
    // A name: the next epoch is not bob's before he has initialised it.
    let named = alice.init("name").await;
    alice.append(on(0, named, "own")).await.unwrap();
    let next = ProducerIdentity { epoch: named.epoch + 1, ..named };
    let status = bob.append(on(0, next, "guess")).await.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::UnknownProducer, "{status:?}");
    let renewed = alice.init("name").await;
    assert_eq!(renewed, next);
    expect_not_owned(bob.append(on(0, renewed, "taken")).await, "a higher epoch");
    alice.append(on(0, renewed, "own")).await.unwrap();
    // With the right to write the name, bob may take it over. Then alice's epochs are fenced.
    let taken = bob.init("name").await;
    expect_not_owned(alice.append(on(0, taken, "lost")).await, "taken over");
    bob.append(on(0, taken, "own")).await.unwrap();
    for earlier in [named, renewed] {
        for partition in [0, 2] {
            let status = alice.append(on(partition, earlier, "late")).await.unwrap_err();
            assert_eq!(reason(&status), ErrorReason::ProducerFenced, "{status:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_caller_may_use_the_identity_of_a_stream_without_one() {
    let (guarded, tokens) = start(in_memory(AuthSetting::Required)).await;
    let [alice, bob] = tokens.each_ref().map(|token| Writer::new(&guarded.server, token));
    let before = alice.init("").await;
    // The stream's own id follows, since the node gives the ids of a principal in order.
    let client = guarded.client(&tokens[0]);
    let options = SessionOptions { idempotent: false, ..SessionOptions::default() };
    let session = client.session("default", 0, options).await.unwrap();
    session.append(&records(&["own"])).await.unwrap().await.unwrap();
    let guess = ProducerIdentity { producer_id: before.producer_id + 1, epoch: 0 };
    for writer in [&alice, &bob] {
        let status = writer.append(batch(guess, 1, "stolen")).await.unwrap_err();
        expect_not_owned(Err::<(), _>(status), "an id of the service");
    }
    session.append(&records(&["own"])).await.unwrap().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn identities_keep_their_owner_across_a_restart_and_a_new_auth_mode() {
    let directory = tempfile::tempdir().unwrap();
    let config = |auth| ServerConfig { auth, ..ServerConfig::in_dir(directory.path()) };
    let (guarded, tokens) = start(config(AuthSetting::Optional)).await;
    let alice = Writer::new(&guarded.server, &tokens[0]);
    let [anonymous_id, named_id] = [alice.init("").await, alice.init("name").await];
    for producer in [anonymous_id, named_id] {
        alice.append(batch(producer, 0, "first")).await.unwrap();
    }
    // A caller without credentials, as before access control.
    let mut open = guarded.server.produce();
    let request = InitProducerRequest::default();
    let open_id = open.init_producer(request).await.unwrap().into_inner().producer.unwrap();
    open.append(batch(open_id, 0, "open")).await.unwrap();
    expect_not_owned(open.append(batch(anonymous_id, 1, "stolen")).await, "without credentials");
    let GuardedServer { server, _directory, .. } = guarded;
    restart(server, config(AuthSetting::Required), async |server| {
        let [alice, bob] = tokens.each_ref().map(|token| Writer::new(server, token));
        for producer in [anonymous_id, named_id] {
            expect_all_uses_refused(&alice, &bob, producer, 1).await;
            alice.append(batch(producer, 1, "second")).await.unwrap();
        }
        // An identity without an owner: its producer gets another one, as clients do then.
        for writer in [&alice, &bob] {
            let status = writer.append(batch(open_id, 1, "stolen")).await.unwrap_err();
            assert_eq!(reason(&status), ErrorReason::UnknownProducer, "{status:?}");
        }
    })
    .await;
}

async fn restart(server: TestServer, config: ServerConfig, check: impl AsyncFnOnce(&TestServer)) {
    let TestServer { running, channel, .. } = server;
    drop(channel);
    running.shutdown().await;
    let server = TestServer::start(config, None).await;
    expect_owners(&server).await;
    check(&server).await;
    server.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_batch_with_a_used_sequence_is_no_duplicate() {
    let server = TestServer::in_memory().await;
    expect_owners(&server).await;
    let mut produce = server.produce();
    let request = InitProducerRequest::default();
    let producer = produce.init_producer(request).await.unwrap().into_inner().producer.unwrap();
    let first = produce.append(batch(producer, 0, "one")).await.unwrap().into_inner().ack.unwrap();
    // Of a second program with the same identity, in both forms of a batch.
    for durability in [Durability::Unspecified, Durability::LeaderWritten, Durability::None] {
        for form in [encoded(&["two"]), plain(&["two"])] {
            let request = batch(producer, 0, "");
            let other = AppendRequest { batch: form, durability: durability.into(), ..request };
            let status = produce.append(other).await.unwrap_err();
            assert_eq!(reason(&status), ErrorReason::SequenceReused, "{status:?}");
            assert!(!detail(&status).retryable && !detail(&status).may_have_applied);
            assert!(status.message().contains("two programs use one identity"), "{status:?}");
        }
    }
    // The plain form of the same records has the same bytes.
    for form in [encoded(&["one"]), plain(&["one"])] {
        let again = AppendRequest { batch: form, ..batch(producer, 0, "") };
        let ack = produce.append(again).await.unwrap().into_inner().ack.unwrap();
        assert!(ack.duplicate && ack.first_offset == first.first_offset);
    }
}
