//! AppendStream: order, coalesced acks, and the end of a session.

use helix_proto::log::v1::append_stream_request::Message as Sent;
use helix_proto::log::v1::append_stream_response::Message as Received;
use helix_proto::log::v1::{
    AppendAck, AppendStreamBatch, AppendStreamInit, AppendStreamOpened, AppendStreamRequest,
    AppendStreamResponse, Durability, ErrorReason, InitProducerRequest, ProducerIdentity,
    TopicConfig, UpdateTopicRequest,
};
use prost_types::FieldMask;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::support::{TestServer, detail, encoded, on_both, reason, soon, values};

/// A raw append session, message by message.
pub(crate) struct AppendSession {
    sender: Option<mpsc::Sender<AppendStreamRequest>>,
    answers: Streaming<AppendStreamResponse>,
}

impl AppendSession {
    /// Opens the stream without sending `init`.
    pub(crate) async fn silent(server: &TestServer) -> Self {
        let (sender, receiver) = mpsc::channel(1000);
        let stream = server.produce().append_stream(ReceiverStream::new(receiver)).await;
        Self { sender: Some(sender), answers: stream.unwrap().into_inner() }
    }

    pub(crate) async fn open(
        server: &TestServer,
        init: AppendStreamInit,
    ) -> (Self, AppendStreamOpened) {
        let mut session = Self::silent(server).await;
        session.send(Sent::Init(init)).await;
        match soon(session.answers.message()).await.unwrap().unwrap().message {
            Some(Received::Opened(opened)) => (session, opened),
            other => panic!("{other:?} instead of opened"),
        }
    }

    pub(crate) async fn send(&self, message: Sent) {
        let request = AppendStreamRequest { message: Some(message) };
        self.sender.as_ref().unwrap().send(request).await.unwrap();
    }

    pub(crate) async fn send_batch(&self, values: &[&str]) {
        let batch = AppendStreamBatch { batch: encoded(values), ..AppendStreamBatch::default() };
        self.send(Sent::Batch(batch)).await;
    }

    /// Receives the next acks.
    pub(crate) async fn acks(&mut self) -> Vec<AppendAck> {
        match soon(self.answers.message()).await.unwrap().unwrap().message {
            Some(Received::Acks(acks)) => acks.acks,
            other => panic!("{other:?} instead of acks"),
        }
    }

    /// Receives all acks until the end of the stream, and the final status.
    pub(crate) async fn finish(mut self) -> (Vec<AppendAck>, Result<(), Status>) {
        drop(self.sender.take());
        let mut acks = Vec::new();
        loop {
            match soon(self.answers.message()).await {
                Ok(Some(answer)) => match answer.message {
                    Some(Received::Acks(more)) => {
                        assert!(!more.acks.is_empty());
                        acks.extend(more.acks);
                    }
                    other => panic!("{other:?} instead of acks"),
                },
                Ok(None) => return (acks, Ok(())),
                Err(status) => return (acks, Err(status)),
            }
        }
    }
}

pub(crate) fn init() -> AppendStreamInit {
    AppendStreamInit { topic: "default".to_owned(), ..AppendStreamInit::default() }
}

async fn new_producer(server: &TestServer) -> ProducerIdentity {
    let request = InitProducerRequest::default();
    server.produce().init_producer(request).await.unwrap().into_inner().producer.unwrap()
}

fn numbered(first_sequence: u64, values: &[&str]) -> Sent {
    Sent::Batch(AppendStreamBatch {
        batch: encoded(values),
        first_sequence: Some(first_sequence),
        expected_offset: None,
    })
}

/// Updates these fields of the default topic's configuration.
async fn update(server: &TestServer, fields: &[&str], config: TopicConfig) {
    let paths = fields.iter().map(|field| (*field).to_owned()).collect();
    let update = UpdateTopicRequest {
        name: "default".to_owned(),
        config: Some(config),
        update_mask: Some(FieldMask { paths }),
        topic_id: 0,
    };
    server.topics().update_topic(update).await.unwrap();
}

pub(crate) fn first_offsets(acks: &[AppendAck]) -> Vec<u64> {
    acks.iter().map(|ack| ack.first_offset.unwrap()).collect()
}

#[tokio::test]
async fn acks_batches_in_send_order() {
    on_both(async |server: TestServer| {
        let (session, opened) = AppendSession::open(&server, init()).await;
        assert_eq!(opened.watermarks.unwrap().high_watermark, 0);
        assert!(opened.max_batch_bytes > 0 && opened.max_in_flight_batches > 0);
        assert!(opened.max_in_flight_bytes > 0);
        assert_eq!(opened.next_sequence, None);
        for number in 0..200 {
            session.send_batch(&[&format!("{number}a"), &format!("{number}b")]).await;
        }
        let (acks, end) = session.finish().await;
        end.unwrap();
        let expected: Vec<u64> = (0..200).map(|number| 2 * number).collect();
        assert_eq!(first_offsets(&acks), expected);
        let read = server.records(0, 0).await;
        assert_eq!(read.len(), 400);
        assert_eq!(values(&read[398..]), ["199a", "199b"]);
    })
    .await;
}

#[tokio::test]
async fn first_failure_ends_the_session_and_drops_later_batches() {
    on_both(async |server: TestServer| {
        let (session, _) = AppendSession::open(&server, init()).await;
        session.send_batch(&["a"]).await;
        session.send_batch(&["b"]).await;
        session.send_batch(&[]).await;
        session.send_batch(&["never"]).await;
        let (acks, end) = session.finish().await;
        assert_eq!(first_offsets(&acks), [0, 1], "earlier batches are acked first");
        assert_eq!(reason(&end.unwrap_err()), ErrorReason::EmptyBatch);
        assert_eq!(values(&server.records(0, 0).await), ["a", "b"]);
    })
    .await;
}

#[tokio::test]
async fn producer_resumes_after_a_broken_session() {
    on_both(async |server: TestServer| {
        let init = AppendStreamInit { producer: Some(new_producer(&server).await), ..init() };
        let (session, opened) = AppendSession::open(&server, init.clone()).await;
        assert_eq!(opened.next_sequence, None, "the producer is unknown yet");
        session.send(numbered(0, &["a", "b"])).await;
        session.send(numbered(9, &["j"])).await;
        session.send(numbered(2, &["void"])).await;
        let (acks, end) = session.finish().await;
        assert_eq!(first_offsets(&acks), [0]);
        let status = end.unwrap_err();
        assert_eq!(reason(&status), ErrorReason::OutOfOrderSequence);
        assert_eq!(status.code(), Code::FailedPrecondition);

        let (session, opened) = AppendSession::open(&server, init).await;
        assert_eq!(opened.next_sequence, Some(2), "no batch after the failure was applied");
        session.send(numbered(0, &["a", "b"])).await;
        session.send(numbered(2, &["c"])).await;
        let (acks, end) = session.finish().await;
        end.unwrap();
        assert_eq!(acks.iter().map(|ack| ack.duplicate).collect::<Vec<_>>(), [true, false]);
    })
    .await;
}

#[tokio::test]
async fn sequence_gap_ends_a_session_with_early_acks() {
    for durability in [Durability::LeaderWritten, Durability::None] {
        on_both(async |server: TestServer| {
            let producer = Some(new_producer(&server).await);
            let blind = AppendStreamInit { producer, durability: durability.into(), ..init() };
            let (session, _) = AppendSession::open(&server, blind.clone()).await;
            session.send(numbered(0, &["a"])).await;
            session.send(numbered(50, &["refused"])).await;
            session.send(numbered(1, &["void"])).await;
            let (acks, end) = session.finish().await;
            assert_eq!(acks.len(), 1, "earlier batches are acked");
            let status = end.unwrap_err();
            assert_eq!(reason(&status), ErrorReason::OutOfOrderSequence);
            assert_eq!(detail(&status).next_sequence, Some(1));
            assert!(!detail(&status).may_have_applied);

            let (session, _) =
                AppendSession::open(&server, AppendStreamInit { producer, ..init() }).await;
            session.send(numbered(1, &["b"])).await;
            let (acks, end) = session.finish().await;
            end.unwrap();
            assert_eq!((acks[0].duplicate, first_offsets(&acks)), (false, vec![1]));

            let (session, _) = AppendSession::open(&server, blind).await;
            session.send(numbered(2, &["c"])).await;
            session.send(numbered(3, &["d"])).await;
            let (acks, end) = session.finish().await;
            end.unwrap();
            assert_eq!(acks.len(), 2, "it may start anywhere");
        })
        .await;
    }
}

#[tokio::test]
async fn open_session_applies_changed_topic_settings() {
    on_both(async |server: TestServer| {
        let weak = AppendStreamInit { durability: Durability::None.into(), ..init() };
        let (mut session, _) = AppendSession::open(&server, weak).await;
        let long = "x".repeat(5_000);
        session.send_batch(&[&long]).await;
        let acks = session.acks().await;
        assert_eq!((acks[0].durability(), acks[0].first_offset), (Durability::None, None));

        let minimum =
            |least: Durability| TopicConfig { min_durability: least.into(), ..Default::default() };
        update(&server, &["min_durability"], minimum(Durability::QuorumSynced)).await;
        session.send_batch(&["raised"]).await;
        let acks = session.acks().await;
        assert!(acks[0].durability() <= Durability::QuorumWritten, "{acks:?}");
        assert_eq!(first_offsets(&acks), [1]);
        update(&server, &["min_durability"], minimum(Durability::None)).await;
        session.send_batch(&["not lowered"]).await;
        assert_eq!(first_offsets(&session.acks().await), [2]);

        let smaller = TopicConfig {
            max_batch_bytes: Some(100),
            max_record_bytes: Some(100),
            ..TopicConfig::default()
        };
        update(&server, &["max_batch_bytes", "max_record_bytes"], smaller).await;
        session.send_batch(&[&long]).await;
        let (acks, end) = session.finish().await;
        assert!(acks.is_empty());
        let status = end.unwrap_err();
        assert_eq!(reason(&status), ErrorReason::BatchTooLarge);
        assert_eq!(detail(&status).limit, Some(100));
    })
    .await;
}

#[tokio::test]
async fn session_starts_with_init() {
    let server = TestServer::in_memory().await;
    let session = AppendSession::silent(&server).await;
    session.send_batch(&["a"]).await;
    let (_, end) = session.finish().await;
    assert_eq!(reason(&end.unwrap_err()), ErrorReason::InvalidArgument);
    let (_, end) = AppendSession::silent(&server).await.finish().await;
    assert_eq!(reason(&end.unwrap_err()), ErrorReason::InvalidArgument);
    let (session, _) = AppendSession::open(&server, init()).await;
    session.send(Sent::Init(init())).await;
    let (_, end) = session.finish().await;
    assert_eq!(reason(&end.unwrap_err()), ErrorReason::InvalidArgument);
}

#[tokio::test]
async fn init_is_validated_first() {
    let server = TestServer::in_memory().await;
    let refused = async |init| {
        let session = AppendSession::silent(&server).await;
        session.send(Sent::Init(init)).await;
        session.finish().await.1.unwrap_err()
    };
    let nowhere = AppendStreamInit { topic: "nowhere".to_owned(), ..init() };
    assert_eq!(reason(&refused(nowhere).await), ErrorReason::TopicNotFound);
    let durability = AppendStreamInit { durability: 77, ..init() };
    assert_eq!(reason(&refused(durability).await), ErrorReason::InvalidArgument);
}

#[tokio::test]
async fn sequence_without_a_producer_ends_the_session() {
    let server = TestServer::in_memory().await;
    let batch = AppendStreamBatch {
        batch: encoded(&["a"]),
        expected_offset: None,
        first_sequence: Some(0),
    };
    let (session, _) = AppendSession::open(&server, init()).await;
    session.send(Sent::Batch(batch)).await;
    let (acks, end) = session.finish().await;
    assert!(acks.is_empty());
    let status = end.unwrap_err();
    assert_eq!(reason(&status), ErrorReason::InvalidArgument);
    assert!(!detail(&status).may_have_applied);
    assert!(server.records(0, 0).await.is_empty());
}

#[tokio::test]
async fn accepts_large_batches_beyond_the_window() {
    let server = TestServer::durable().await;
    let (session, opened) = AppendSession::open(&server, init()).await;
    let value = "x".repeat(1 << 20 >> 1);
    let count = 4 * opened.max_in_flight_bytes / (1 << 20);
    let sender = async {
        for _ in 0..count {
            session.send_batch(&[&value, &value[1..]]).await;
        }
    };
    soon(sender).await;
    let (acks, end) = session.finish().await;
    end.unwrap();
    assert_eq!(acks.len() as u64, count);
    assert_eq!(acks.last().unwrap().next_offset, Some(2 * count));
}
