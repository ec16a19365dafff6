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
use helix_proto::log::v1::EncodedBatch;
use rand::RngExt;
use rand::rngs::StdRng;

use super::{Scene, Shape, Stop, TOPIC, is_stopped, pause};

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
    records_max: u32,
    pace: Duration,
    rng: StdRng,
    stop: Stop,
}

impl Writer {
    pub(super) fn new(scene: &Arc<Scene>, shape: &Shape, stop: Stop) -> anyhow::Result<Self> {
        let producer = scene.id();
        Ok(Self {
            client: scene.client()?,
            rng: scene.rng(producer),
            producer,
            next: 0,
            records_max: shape.records_max,
            pace: shape.pace,
            scene: scene.clone(),
            stop,
        })
    }

    /// Keeps a session to one partition; opens another when it fails.
    pub(super) async fn stream(mut self, partition: u32) {
        while !self.is_over() {
            match self.client.session(TOPIC, partition, SessionOptions::default()).await {
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
        let mut waiting: VecDeque<(BatchKey, u32, Acked)> = VecDeque::new();
        let mut has_failed = false;
        while !has_failed && pause(&mut self.stop, self.pace, &mut self.rng).await {
            if self.is_over() {
                break;
            }
            let (key, records, batch) = self.make(partition, Some(stream));
            match session.append(batch).await {
                Ok(acked) => waiting.push_back((key, records, acked)),
                Err(error) => {
                    self.end(key, partition, records, Err(error));
                    has_failed = true;
                }
            }
            if waiting.len() >= DEPTH {
                has_failed |= self.take(&mut waiting, partition).await;
            }
        }
        while !waiting.is_empty() {
            has_failed |= self.take(&mut waiting, partition).await;
        }
        if has_failed {
            self.scene.stats.broken_sessions.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits for the oldest batch. True if it failed.
    async fn take(&self, waiting: &mut VecDeque<(BatchKey, u32, Acked)>, partition: u32) -> bool {
        let Some((key, records, acked)) = waiting.pop_front() else { return false };
        let result = acked.await;
        let has_failed = result.is_err();
        self.end(key, partition, records, result);
        has_failed
    }

    /// An idempotent producer with one batch under way, to any partition.
    pub(super) async fn one_by_one(mut self) {
        let producer = self.client.producer(ProducerOptions::default());
        while pause(&mut self.stop, self.pace, &mut self.rng).await && !self.is_over() {
            let partition = self.rng.random_range(0..self.scene.partitions);
            let (key, records, batch) = self.make(partition, None);
            let result = producer.append(TOPIC, partition, batch).await;
            self.end(key, partition, records, result);
        }
    }

    /// A producer that cannot repeat what may have been applied.
    pub(super) async fn plain(mut self) {
        let options = AppendOptions::default();
        while pause(&mut self.stop, self.pace, &mut self.rng).await && !self.is_over() {
            let partition = self.rng.random_range(0..self.scene.partitions);
            let (key, records, batch) = self.make(partition, None);
            let result = self.client.append(TOPIC, partition, batch, &options).await;
            self.end(key, partition, records, result);
        }
    }

    /// An idempotent producer that appends only at the offset at which it believes the end to be.
    /// A refusal tells it where the end is; others move it all the time, so that most races are
    /// lost, and a batch that lost one must never turn up.
    pub(super) async fn conditional(mut self) {
        let producer = self.client.producer(ProducerOptions::default());
        let mut ends = vec![0; self.scene.partitions as usize];
        while pause(&mut self.stop, self.pace, &mut self.rng).await && !self.is_over() {
            let partition = self.rng.random_range(0..self.scene.partitions);
            let end = &mut ends[partition as usize];
            for _ in 0..RACES {
                let (key, records, batch) = self.make(partition, None);
                let options = AppendOptions::default().expecting(*end);
                let result = producer.append_with(TOPIC, partition, batch, &options).await;
                let has_lost = result.is_err();
                let is_elsewhere =
                    |ack: &Ack| ack.first_offset.is_some_and(|offset| offset != *end);
                if result.as_ref().is_ok_and(is_elsewhere) {
                    let what = format!("an ack of {key}, which was to be at {end}");
                    let (reader, offset) = (self.producer, *end);
                    self.scene.recorder.add(Event::Foreign { reader, partition, offset, what });
                }
                let told = match &result {
                    Ok(ack) => ack.next_offset,
                    Err(error) => error.next_offset,
                };
                *end = told.unwrap_or(*end);
                self.end(key, partition, records, result);
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
    fn make(&mut self, partition: u32, stream: Option<u32>) -> (BatchKey, u32, EncodedBatch) {
        let key = BatchKey { producer: self.producer, number: self.next };
        self.next += 1;
        let records = self.rng.random_range(1..=self.records_max);
        let batch = payload::build(key, records);
        self.scene.recorder.add(Event::Invoked { key, partition, records, stream });
        (key, records, batch)
    }

    fn end(&self, key: BatchKey, partition: u32, records: u32, result: Result<Ack, Error>) {
        let recorder = &self.scene.recorder;
        match result {
            Ok(Ack { first_offset: Some(offset), next_offset, duplicate, .. }) => {
                recorder.add(Event::Acked { key, offset });
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
            Err(_) => recorder.add(Event::Failed { key }),
        }
    }
}
