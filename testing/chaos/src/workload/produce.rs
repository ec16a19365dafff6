//! Producers: with a session, one batch after the other, and without an identity.
//! Each batch is noted before it is handed over, and its outcome as soon as it is known here.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use helix_checker::{BatchKey, Event, payload};
use helix_client::{
    Ack, Acked, AppendOptions, Client, Error, ProducerOptions, Session, SessionOptions,
};
use helix_proto::log::v1::{EncodedBatch, ErrorReason};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::Instant;

use super::{Keep, Scene, Shape, Stop, is_stopped, pause};

/// Batches that a session has under way.
const DEPTH: usize = 8;

/// Pause after a session that could not be opened, on top of the client's own retries.
const AGAIN_AFTER: Duration = Duration::from_millis(50);

/// Times in a row that a conditional producer tries to win an offset.
const RACES: usize = 8;

/// One producer.
pub(super) struct Writer {
    scene: Arc<Scene>,
    client: Client,
    producer: u32,
    next: u64,
    shape: Shape,
    rng: StdRng,
    stop: Stop,
}

/// A batch that was handed over.
struct Sent {
    key: BatchKey,
    partition: u32,
    records: u32,
    payload_bytes: u64,
    invoked: Instant,
}

impl Writer {
    pub(super) fn new(scene: &Arc<Scene>, shape: &Shape, stop: Stop) -> anyhow::Result<Self> {
        let producer = scene.id();
        Ok(Self {
            client: scene.client()?,
            rng: scene.rng(producer),
            producer,
            next: 0,
            shape: shape.clone(),
            scene: scene.clone(),
            stop,
        })
    }

    /// Keeps a session to one partition; opens another when it fails.
    pub(super) async fn stream(mut self, partition: u32) {
        let place = self.scene.place(partition);
        while !self.is_over() {
            let opening =
                self.client.session(place.topic, place.partition, SessionOptions::default());
            match opening.await {
                Ok(session) => self.fill(&session, partition).await,
                Err(_) => {
                    self.scene.stats.broken_sessions.fetch_add(1, Ordering::Relaxed);
                    pause(&mut self.stop, AGAIN_AFTER, &mut self.rng).await;
                }
            }
        }
    }

    /// Writes through a session until it fails or it is time to stop. Every batch that was handed
    /// over has its outcome in the history when this returns.
    async fn fill(&mut self, session: &Session, partition: u32) {
        let stream = self.scene.id();
        let mut waiting: VecDeque<(Sent, Acked)> = VecDeque::new();
        let mut has_failed = false;
        while !has_failed && pause(&mut self.stop, self.shape.pace, &mut self.rng).await {
            if self.is_over() {
                break;
            }
            let (sent, batch) = self.make(partition, Some(stream));
            match session.append(batch).await {
                Ok(acked) => waiting.push_back((sent, acked)),
                Err(error) => {
                    self.end(&sent, Err(error));
                    has_failed = true;
                }
            }
            if waiting.len() >= DEPTH {
                has_failed |= self.take(&mut waiting).await;
            }
        }
        while !waiting.is_empty() {
            has_failed |= self.take(&mut waiting).await;
        }
        if has_failed {
            self.scene.stats.broken_sessions.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits for the oldest batch. True if it failed.
    async fn take(&self, waiting: &mut VecDeque<(Sent, Acked)>) -> bool {
        let Some((sent, acked)) = waiting.pop_front() else { return false };
        let result = acked.await;
        let has_failed = result.is_err();
        self.end(&sent, result);
        has_failed
    }

    /// Any partition.
    fn draw(&mut self) -> u32 {
        self.rng.random_range(0..u32::try_from(self.scene.places.len()).unwrap_or(1))
    }

    /// An idempotent producer with one batch under way, to any partition.
    pub(super) async fn one_by_one(mut self) {
        let producer = self.client.producer(ProducerOptions::default());
        while pause(&mut self.stop, self.shape.pace, &mut self.rng).await && !self.is_over() {
            let number = self.draw();
            let place = self.scene.place(number);
            let (sent, batch) = self.make(number, None);
            let result = producer.append(place.topic, place.partition, batch).await;
            self.end(&sent, result);
        }
    }

    /// A producer that cannot repeat what may have been applied.
    pub(super) async fn plain(mut self) {
        let options = AppendOptions::default();
        while pause(&mut self.stop, self.shape.pace, &mut self.rng).await && !self.is_over() {
            let number = self.draw();
            let place = self.scene.place(number);
            let (sent, batch) = self.make(number, None);
            let result = self.client.append(place.topic, place.partition, batch, &options).await;
            self.end(&sent, result);
        }
    }

    /// An idempotent producer that appends only at the offset at which it believes the end to be.
    /// A refusal tells it where the end is; others move it all the time, so that most races are
    /// lost, and a batch that lost one must never turn up.
    pub(super) async fn conditional(mut self) {
        let producer = self.client.producer(ProducerOptions::default());
        let mut ends = vec![0; self.scene.places.len()];
        while pause(&mut self.stop, self.shape.pace, &mut self.rng).await && !self.is_over() {
            let number = self.draw();
            let place = self.scene.place(number);
            let end = &mut ends[number as usize];
            for _ in 0..RACES {
                let (sent, batch) = self.make(number, None);
                let (key, expected) = (sent.key, Some(*end));
                self.scene.recorder.add(Event::Condition { key, expected, token: None });
                let options = AppendOptions::default().expecting(*end);
                let result =
                    producer.append_with(place.topic, place.partition, batch, &options).await;
                let has_lost = result.is_err();
                let told = match &result {
                    Ok(ack) => ack.next_offset,
                    Err(error) => error.next_offset,
                };
                *end = told.unwrap_or(*end);
                self.end(&sent, result);
                if !has_lost || self.is_over() {
                    break;
                }
            }
        }
    }

    fn is_over(&self) -> bool {
        is_stopped(&self.stop) || self.scene.recorder.is_full()
    }

    /// The next batch, noted as invoked.
    fn make(&mut self, partition: u32, stream: Option<u32>) -> (Sent, EncodedBatch) {
        let key = BatchKey { producer: self.producer, number: self.next };
        self.next += 1;
        let most = match self.scene.place(partition).keep {
            Keep::All | Keep::Untrimmed => self.shape.records_max,
            Keep::Bytes(_) | Keep::Newer(_) => self.shape.bulk_records_max,
        };
        let records = self.rng.random_range(1..=most);
        let batch = payload::build(key, records);
        let payload_bytes = batch.payload.len() as u64;
        self.scene.ledger(partition).on_invoked(payload_bytes);
        self.scene.recorder.add(Event::Invoked { key, partition, records, stream });
        (Sent { key, partition, records, payload_bytes, invoked: Instant::now() }, batch)
    }

    fn end(&self, sent: &Sent, result: Result<Ack, Error>) {
        let Sent { key, partition, records, payload_bytes, invoked } = *sent;
        let recorder = &self.scene.recorder;
        match result {
            Ok(Ack { first_offset: Some(offset), next_offset, duplicate, .. }) => {
                recorder.add(Event::Acked { key, offset });
                self.scene.ledger(partition).on_acked(offset, payload_bytes, invoked);
                if next_offset != Some(offset + u64::from(records)) {
                    let what = format!("an ack of {key} whose end is {next_offset:?}");
                    recorder.add(Event::Foreign { reader: self.producer, partition, offset, what });
                }
                let stats = &self.scene.stats;
                stats.acks[partition as usize].fetch_add(1, Ordering::Relaxed);
                stats.records.fetch_add(u64::from(records), Ordering::Relaxed);
                stats.duplicates.fetch_add(u64::from(duplicate), Ordering::Relaxed);
            }
            Ok(Ack { first_offset: None, .. }) => {
                let what = format!("an ack of {key} without an offset");
                recorder.add(Event::Unknown { key });
                recorder.add(Event::Foreign { reader: self.producer, partition, offset: 0, what });
            }
            Err(error) if error.may_have_applied => recorder.add(Event::Unknown { key }),
            Err(error) => {
                self.scene.ledger(partition).on_failed(payload_bytes);
                recorder.add(match error.next_offset {
                    Some(next_offset) if error.is(ErrorReason::ExpectedOffsetMismatch) => {
                        Event::Refused { key, next_offset }
                    }
                    _ => Event::Failed { key },
                });
            }
        }
    }
}
