//! Sessions' bookkeeping: what is acked, sent again, or failed, and who is told what.
//! The streams are played by hand.

use bytes::Bytes;
use helix_proto::batch::encode;
use helix_proto::error as wire;
use helix_proto::log::v1::{AppendAck, Durability, ErrorDetail, Record};

use super::*;

const GAP: ErrorReason = ErrorReason::OutOfOrderSequence;

const IDENTITY: ProducerIdentity = ProducerIdentity { producer_id: 7, epoch: 1 };

/// A session's shared state with a stream in the tester's hands.
struct Played {
    shared: Shared,
    sent: mpsc::UnboundedReceiver<AppendStreamRequest>,
}

impl Played {
    fn new(identity: Option<ProducerIdentity>) -> Self {
        let shared = Shared::new(&SessionOptions::default());
        if let Some(identity) = identity {
            shared.set_identity(identity);
        }
        let (_, sent) = mpsc::unbounded_channel();
        let mut played = Self { shared, sent };
        assert_eq!(played.reopen(identity.map(|_| 0)).unwrap(), Resume::Open);
        played
    }

    fn reopen(&mut self, next_sequence: Option<u64>) -> Result<Resume> {
        let (outgoing, sent) = mpsc::unbounded_channel();
        self.sent = sent;
        let opened = AppendStreamOpened { next_sequence, ..AppendStreamOpened::default() };
        self.shared.on_opened(&opened, outgoing)
    }

    async fn append(&self, records: usize) -> oneshot::Receiver<Result<Ack>> {
        let record = Record { value: Some(Bytes::from_static(b"value")), ..Record::default() };
        let batch = encode(&vec![record; records]);
        let room = self.shared.room(batch.payload.len()).await.unwrap();
        self.shared.hand_over(batch, None, room).unwrap()
    }

    fn ack(&self, first_offset: u64) -> Result<()> {
        let ack = AppendAck {
            first_offset: Some(first_offset),
            durability: Durability::QuorumSynced.into(),
            ..AppendAck::default()
        };
        self.shared.on_acks(&AppendAcks { acks: vec![ack], watermarks: None })
    }

    /// First sequences of the batches that were sent on the present stream.
    fn sent(&mut self) -> Vec<Option<u64>> {
        std::iter::from_fn(|| self.sent.try_recv().ok())
            .map(|request| match request.message {
                Some(Message::Batch(batch)) => batch.first_sequence,
                other => panic!("sent {other:?}"),
            })
            .collect()
    }
}

fn refused(reason: ErrorReason) -> Error {
    Error::from_status(&wire::to_status(&wire::detail(reason), "no", None))
}

#[tokio::test]
async fn acks_resolve_in_order() {
    let mut played = Played::new(Some(IDENTITY));
    let (mut first, mut second) = (played.append(3).await, played.append(2).await);
    assert_eq!(played.sent(), [Some(0), Some(3)]);
    played.ack(100).unwrap();
    assert_eq!(first.try_recv().unwrap().unwrap().first_offset, Some(100));
    assert!(second.try_recv().is_err());
    played.ack(103).unwrap();
    assert_eq!(second.try_recv().unwrap().unwrap().first_offset, Some(103));
    assert!(played.ack(105).is_err());
}

#[tokio::test]
async fn a_broken_stream_sends_again_with_the_same_sequences() {
    let mut played = Played::new(Some(IDENTITY));
    let _first = played.append(3).await;
    let mut second = played.append(2).await;
    played.ack(100).unwrap();
    assert!(played.shared.on_broken(true));
    // Between the streams batches wait.
    let _third = played.append(4).await;
    // The partition has applied the second one; its ack is lost.
    assert_eq!(played.reopen(Some(5)).unwrap(), Resume::Open);
    assert_eq!(played.sent(), [Some(3), Some(5)]);
    played.ack(103).unwrap();
    assert_eq!(second.try_recv().unwrap().unwrap().first_offset, Some(103));
}

#[tokio::test]
async fn without_identity_only_what_was_surely_not_applied_is_sent_again() {
    let mut played = Played::new(None);
    let _batch = played.append(1).await;
    assert_eq!(played.sent(), [None]);
    assert!(played.shared.on_broken(false));
    assert_eq!(played.reopen(None).unwrap(), Resume::Open);
    assert_eq!(played.sent(), [None]);
    assert!(!played.shared.on_broken(true));
}

#[tokio::test]
async fn a_forgotten_producer_is_renewed_only_when_nothing_is_under_way() {
    let mut played = Played::new(Some(IDENTITY));
    let _first = played.append(3).await;
    assert!(played.shared.on_broken(true));
    // Nothing was ever applied under this identity.
    assert_eq!(played.reopen(None).unwrap(), Resume::Open);
    played.ack(0).unwrap();
    assert!(played.shared.on_broken(true));
    assert_eq!(played.reopen(None).unwrap(), Resume::Renew);
    played.shared.set_identity(ProducerIdentity { epoch: 2, ..IDENTITY });
    assert_eq!(played.reopen(None).unwrap(), Resume::Open);
    let _second = played.append(2).await;
    assert_eq!(played.sent(), [Some(0)]);
    played.ack(3).unwrap();
    let _third = played.append(2).await;
    assert!(played.shared.on_broken(true));
    let error = played.reopen(None).unwrap_err();
    assert!(error.is(ErrorReason::UnknownProducer) && error.may_have_applied);
}

#[tokio::test]
async fn sequences_that_do_not_fit_end_the_session() {
    for expected in [2, 6] {
        let mut played = Played::new(Some(IDENTITY));
        let (_first, _second) = (played.append(3).await, played.append(2).await);
        played.ack(0).unwrap();
        assert!(played.shared.on_broken(true));
        let error = played.reopen(Some(expected)).unwrap_err();
        assert!(error.is(ErrorReason::OutOfOrderSequence), "{error}");
    }
}

#[tokio::test]
async fn acks_that_came_before_apply_may_lie_above_what_the_partition_expects() {
    let mut played = Played::new(Some(IDENTITY));
    let (_first, _second) = (played.append(3).await, played.append(2).await);
    let early = AppendAck { durability: Durability::LeaderWritten.into(), ..AppendAck::default() };
    played.shared.on_acks(&AppendAcks { acks: vec![early], watermarks: None }).unwrap();
    assert!(played.shared.on_broken(true));
    assert_eq!(played.reopen(Some(0)).unwrap(), Resume::Open);
    assert_eq!(played.sent(), [Some(3)]);
    // The verdict tells that they were lost, and that nothing behind them can count any more.
    let gap = |next_sequence| {
        let detail = ErrorDetail { next_sequence: Some(next_sequence), ..wire::detail(GAP) };
        Error::from_status(&wire::to_status(&detail, "gap", None))
    };
    assert!(played.shared.has_lost_acked(&gap(0)));
    assert!(!played.shared.has_lost_acked(&gap(5)));
    played.shared.set_identity(ProducerIdentity { epoch: 2, ..IDENTITY });
    assert_eq!(played.reopen(None).unwrap(), Resume::Open);
    assert_eq!(played.sent(), [Some(0)]);
    assert!(!played.shared.has_lost_acked(&gap(0)));
}

#[tokio::test]
async fn the_first_failure_fails_everything_later() {
    let played = Played::new(Some(IDENTITY));
    let (mut first, mut second) = (played.append(1).await, played.append(1).await);
    played.shared.fail(refused(ErrorReason::Fenced));
    let own = first.try_recv().unwrap().unwrap_err();
    assert!(own.is(ErrorReason::Fenced) && !own.may_have_applied);
    assert_eq!(own.message, "no");
    let later = second.try_recv().unwrap().unwrap_err();
    assert!(later.is(ErrorReason::Fenced) && !later.may_have_applied);
    assert!(later.message.starts_with("an earlier batch"));
    assert!(played.shared.room(1).await.is_err());
    assert!(played.shared.is_finished());
}

#[tokio::test]
async fn a_batch_of_a_broken_stream_stays_in_doubt() {
    let mut played = Played::new(Some(IDENTITY));
    let mut first = played.append(1).await;
    assert!(played.shared.on_broken(true));
    assert_eq!(played.reopen(Some(0)).unwrap(), Resume::Open);
    let mut second = played.append(1).await;
    played.shared.fail(refused(ErrorReason::Fenced));
    assert!(first.try_recv().unwrap().unwrap_err().may_have_applied);
    assert!(!second.try_recv().unwrap().unwrap_err().may_have_applied);
}

#[tokio::test]
async fn the_services_limits_shrink_the_room() {
    let shared = Shared::new(&SessionOptions::default());
    let opened = AppendStreamOpened {
        max_in_flight_batches: 2,
        max_in_flight_bytes: 100,
        max_batch_bytes: 50,
        ..AppendStreamOpened::default()
    };
    let (outgoing, _sent) = mpsc::unbounded_channel();
    shared.on_opened(&opened, outgoing).unwrap();
    assert_eq!(shared.batch_bytes_max(), 50);
    let (first, second) = (shared.room(40).await.unwrap(), shared.room(40).await.unwrap());
    assert_eq!(shared.batches.available_permits(), 0);
    assert_eq!(shared.bytes.available_permits(), 20);
    drop((first, second));
    // Larger than the room: alone.
    assert_eq!(shared.room(1000).await.unwrap().permits, 100);
}

#[tokio::test]
async fn room_that_is_not_used_comes_back() {
    let shared = Shared::new(&SessionOptions::default());
    let before = (shared.batches.available_permits(), shared.bytes.available_permits());
    drop(shared.room(1000).await.unwrap());
    let after = (shared.batches.available_permits(), shared.bytes.available_permits());
    assert_eq!(before, after);
}
