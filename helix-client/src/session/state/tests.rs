//! Tests of a session's pipeline without a network: acks, resends, failures and limits.

use bytes::Bytes;
use helix_proto::batch::encode;
use helix_proto::error as wire;
use helix_proto::log::v1::{AppendAck, Durability, ErrorDetail, Record};

use super::*;

const GAP: ErrorReason = ErrorReason::OutOfOrderSequence;

const IDENTITY: ProducerIdentity = ProducerIdentity { producer_id: 7, epoch: 1 };

/// A pipeline whose stream is a channel of the test.
struct TestSession {
    pipeline: Pipeline,
    sent: mpsc::UnboundedReceiver<AppendStreamRequest>,
}

impl TestSession {
    fn new(identity: Option<ProducerIdentity>) -> Self {
        let pipeline = Pipeline::new(&SessionOptions::default());
        if let Some(identity) = identity {
            pipeline.set_identity(identity);
        }
        let (_, sent) = mpsc::unbounded_channel();
        let mut session = Self { pipeline, sent };
        assert_eq!(session.reopen(identity.map(|_| 0)).unwrap(), Resume::Open);
        session
    }

    fn reopen(&mut self, next_sequence: Option<u64>) -> Result<Resume> {
        let (outgoing, sent) = mpsc::unbounded_channel();
        self.sent = sent;
        let opened = AppendStreamOpened { next_sequence, ..AppendStreamOpened::default() };
        self.pipeline.on_opened(&opened, outgoing)
    }

    async fn append(&self, records: usize) -> oneshot::Receiver<Result<Ack>> {
        let record = Record { value: Some(Bytes::from_static(b"value")), ..Record::default() };
        let batch = encode(&vec![record; records]);
        let permit = self.pipeline.permit(batch.payload.len()).await.unwrap();
        self.pipeline.push(batch, None, permit).unwrap()
    }

    fn ack(&self, first_offset: u64) -> Result<()> {
        let ack = AppendAck {
            first_offset: Some(first_offset),
            durability: Durability::QuorumSynced.into(),
            ..AppendAck::default()
        };
        self.pipeline.on_acks(&AppendAcks { acks: vec![ack], watermarks: None })
    }

    /// Returns the first sequences of the batches sent on the current stream.
    fn sent(&mut self) -> Vec<Option<u64>> {
        std::iter::from_fn(|| self.sent.try_recv().ok())
            .map(|request| match request.message {
                Some(Message::Batch(batch)) => batch.first_sequence,
                other => panic!("sent {other:?}"),
            })
            .collect()
    }
}

fn rejected(reason: ErrorReason) -> Error {
    Error::from_status(&wire::to_status(&wire::detail(reason), "no", None))
}

#[tokio::test]
async fn resolves_acks_in_order() {
    let mut session = TestSession::new(Some(IDENTITY));
    let (mut first, mut second) = (session.append(3).await, session.append(2).await);
    assert_eq!(session.sent(), [Some(0), Some(3)]);
    session.ack(100).unwrap();
    assert_eq!(first.try_recv().unwrap().unwrap().first_offset, Some(100));
    assert!(second.try_recv().is_err());
    session.ack(103).unwrap();
    assert_eq!(second.try_recv().unwrap().unwrap().first_offset, Some(103));
    assert!(session.ack(105).is_err());
}

#[tokio::test]
async fn resends_after_a_broken_stream_with_the_same_sequences() {
    let mut session = TestSession::new(Some(IDENTITY));
    let _first = session.append(3).await;
    let mut second = session.append(2).await;
    session.ack(100).unwrap();
    assert!(session.pipeline.on_broken(true));
    // Batches wait while no stream is open.
    let _third = session.append(4).await;
    // The partition has applied the second batch, but its ack was lost.
    assert_eq!(session.reopen(Some(5)).unwrap(), Resume::Open);
    assert_eq!(session.sent(), [Some(3), Some(5)]);
    session.ack(103).unwrap();
    assert_eq!(second.try_recv().unwrap().unwrap().first_offset, Some(103));
}

#[tokio::test]
async fn without_identity_resends_only_what_was_not_applied() {
    let mut session = TestSession::new(None);
    let _batch = session.append(1).await;
    assert_eq!(session.sent(), [None]);
    assert!(session.pipeline.on_broken(false));
    assert_eq!(session.reopen(None).unwrap(), Resume::Open);
    assert_eq!(session.sent(), [None]);
    assert!(!session.pipeline.on_broken(true));
}

#[tokio::test]
async fn renews_a_forgotten_identity_only_without_batches_in_flight() {
    let mut session = TestSession::new(Some(IDENTITY));
    let _first = session.append(3).await;
    assert!(session.pipeline.on_broken(true));
    // Nothing has been applied under this identity.
    assert_eq!(session.reopen(None).unwrap(), Resume::Open);
    session.ack(0).unwrap();
    assert!(session.pipeline.on_broken(true));
    assert_eq!(session.reopen(None).unwrap(), Resume::Renew);
    session.pipeline.set_identity(ProducerIdentity { epoch: 2, ..IDENTITY });
    assert_eq!(session.reopen(None).unwrap(), Resume::Open);
    let _second = session.append(2).await;
    assert_eq!(session.sent(), [Some(0)]);
    session.ack(3).unwrap();
    let _third = session.append(2).await;
    assert!(session.pipeline.on_broken(true));
    let error = session.reopen(None).unwrap_err();
    assert!(error.is(ErrorReason::UnknownProducer) && error.may_have_applied);
}

#[tokio::test]
async fn mismatched_sequences_end_the_session() {
    for expected in [2, 6] {
        let mut session = TestSession::new(Some(IDENTITY));
        let (_first, _second) = (session.append(3).await, session.append(2).await);
        session.ack(0).unwrap();
        assert!(session.pipeline.on_broken(true));
        let error = session.reopen(Some(expected)).unwrap_err();
        assert!(error.is(ErrorReason::OutOfOrderSequence), "{error}");
    }
}

#[tokio::test]
async fn resumes_below_acks_that_preceded_apply() {
    let mut session = TestSession::new(Some(IDENTITY));
    let (_first, _second) = (session.append(3).await, session.append(2).await);
    let early = AppendAck { durability: Durability::LeaderWritten.into(), ..AppendAck::default() };
    session.pipeline.on_acks(&AppendAcks { acks: vec![early], watermarks: None }).unwrap();
    assert!(session.pipeline.on_broken(true));
    assert_eq!(session.reopen(Some(0)).unwrap(), Resume::Open);
    assert_eq!(session.sent(), [Some(3)]);
    // A rejection as a gap shows that they were lost and that nothing after them can be applied.
    let gap = |next_sequence| {
        let detail = ErrorDetail { next_sequence: Some(next_sequence), ..wire::detail(GAP) };
        Error::from_status(&wire::to_status(&detail, "gap", None))
    };
    assert!(session.pipeline.has_lost_acked(&gap(0)));
    assert!(!session.pipeline.has_lost_acked(&gap(5)));
    session.pipeline.set_identity(ProducerIdentity { epoch: 2, ..IDENTITY });
    assert_eq!(session.reopen(None).unwrap(), Resume::Open);
    assert_eq!(session.sent(), [Some(0)]);
    assert!(!session.pipeline.has_lost_acked(&gap(0)));
}

#[tokio::test]
async fn first_failure_fails_everything_later() {
    let session = TestSession::new(Some(IDENTITY));
    let (mut first, mut second) = (session.append(1).await, session.append(1).await);
    session.pipeline.fail(rejected(ErrorReason::Fenced));
    let first = first.try_recv().unwrap().unwrap_err();
    assert!(first.is(ErrorReason::Fenced) && !first.may_have_applied);
    assert_eq!(first.message, "no");
    let later = second.try_recv().unwrap().unwrap_err();
    assert!(later.is(ErrorReason::Fenced) && !later.may_have_applied);
    assert!(later.message.starts_with("an earlier batch"));
    assert!(session.pipeline.permit(1).await.is_err());
    assert!(session.pipeline.is_finished());
}

#[tokio::test]
async fn batch_of_a_broken_stream_may_have_been_applied() {
    let mut session = TestSession::new(Some(IDENTITY));
    let mut first = session.append(1).await;
    assert!(session.pipeline.on_broken(true));
    assert_eq!(session.reopen(Some(0)).unwrap(), Resume::Open);
    let mut second = session.append(1).await;
    session.pipeline.fail(rejected(ErrorReason::Fenced));
    assert!(first.try_recv().unwrap().unwrap_err().may_have_applied);
    assert!(!second.try_recv().unwrap().unwrap_err().may_have_applied);
}

#[tokio::test]
async fn service_limits_reduce_the_capacity() {
    let pipeline = Pipeline::new(&SessionOptions::default());
    let opened = AppendStreamOpened {
        max_in_flight_batches: 2,
        max_in_flight_bytes: 100,
        max_batch_bytes: 50,
        ..AppendStreamOpened::default()
    };
    let (outgoing, _sent) = mpsc::unbounded_channel();
    pipeline.on_opened(&opened, outgoing).unwrap();
    assert_eq!(pipeline.batch_bytes_max(), 50);
    let (first, second) = (pipeline.permit(40).await.unwrap(), pipeline.permit(40).await.unwrap());
    assert_eq!(pipeline.batches.available_permits(), 0);
    assert_eq!(pipeline.bytes.available_permits(), 20);
    drop((first, second));
    // A batch above the capacity takes all of it.
    assert_eq!(pipeline.permit(1000).await.unwrap().permits, 100);
}

#[tokio::test]
async fn releases_unused_permits() {
    let pipeline = Pipeline::new(&SessionOptions::default());
    let before = (pipeline.batches.available_permits(), pipeline.bytes.available_permits());
    drop(pipeline.permit(1000).await.unwrap());
    let after = (pipeline.batches.available_permits(), pipeline.bytes.available_permits());
    assert_eq!(before, after);
}
