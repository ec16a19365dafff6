//! A producer that speaks the wire itself, as a client in another language might: it sends a batch
//! to several nodes at once, sends again what was acknowledged long ago, and sends what leaves a
//! gap. Each time it knows what the answer must be.

use std::collections::VecDeque;
use std::time::Duration;

use helix_checker::{BatchKey, Event, payload};
use helix_client::Error;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::{
    AppendAck, AppendRequest, Batch, EncodedBatch, ErrorReason, InitProducerRequest,
    ProducerIdentity,
};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

use crate::marks::Mark;
use crate::net::{CLIENT_PORT, channel};
use crate::plan::Plan;
use crate::workload::{BREATH, Scene, TOPIC};

const ANSWER_MAX: Duration = Duration::from_secs(3);

/// Attempts at one batch before its outcome stays open.
const ATTEMPTS_MAX: u32 = 30;

/// Acknowledged batches that it may send again: fewer than a node remembers.
const REMEMBERED: usize = 60;

/// How far ahead a batch that must be refused is.
const GAP: u64 = 1_000_000;

/// A batch that was acknowledged.
#[derive(Clone)]
struct Sent {
    sequence: u64,
    batch: EncodedBatch,
    offset: u64,
}

/// See the module.
pub struct Repeater {
    scene: Scene,
    nodes: Vec<ProduceServiceClient<Channel>>,
    producer: u32,
    partition: u32,
    number: u64,
    rng: StdRng,
}

impl Repeater {
    pub fn new(scene: &Scene) -> turmoil::Result<Self> {
        let producer = scene.id();
        let mut rng = scene.rng(producer);
        let node = |node| -> turmoil::Result<_> {
            let host = Plan::host(node);
            let endpoint = Endpoint::from_shared(format!("http://{host}:{CLIENT_PORT}"))?;
            Ok(ProduceServiceClient::new(channel(&endpoint)))
        };
        let nodes = (1..=scene.plan.machines()).map(node).collect::<Result<_, _>>()?;
        let partition = rng.random_range(0..scene.plan.partitions);
        Ok(Self { scene: scene.clone(), nodes, producer, partition, number: 0, rng })
    }

    pub async fn run(mut self) {
        while let Some(identity) = self.identity().await {
            self.under(identity).await;
        }
    }

    /// A new identity; `None` when it is time to stop.
    async fn identity(&mut self) -> Option<ProducerIdentity> {
        while self.scene.pause(BREATH, &mut self.rng).await {
            let Some(mut node) = self.nodes.choose(&mut self.rng).cloned() else { continue };
            let asked = node.init_producer(InitProducerRequest::default());
            if let Ok(Ok(answer)) = timeout(ANSWER_MAX, asked).await {
                return answer.into_inner().producer;
            }
        }
        None
    }

    /// Writes under one identity until an outcome is open: then nobody knows the next sequence.
    async fn under(&mut self, identity: ProducerIdentity) {
        let mut sequence = 0;
        let mut sent: VecDeque<Sent> = VecDeque::new();
        while self.scene.pause(self.scene.plan.pace, &mut self.rng).await {
            let goes_on = match self.rng.random_range(0..10) {
                0 if sequence > 0 => self.leave_gap(identity, sequence).await,
                1..3 if !sent.is_empty() => {
                    let at = self.rng.random_range(0..sent.len());
                    self.repeat(identity, &sent[at].clone()).await;
                    true
                }
                _ => match self.append(identity, sequence).await {
                    Some((batch, offset)) => {
                        let records = u64::from(batch.record_count);
                        sent.push_back(Sent { sequence, batch, offset });
                        sequence += records;
                        true
                    }
                    None => false,
                },
            };
            if sent.len() > REMEMBERED {
                sent.pop_front();
            }
            if !goes_on {
                return;
            }
        }
    }

    fn make(&mut self) -> (BatchKey, EncodedBatch) {
        let key = BatchKey { producer: self.producer, number: self.number };
        self.number += 1;
        let records = self.rng.random_range(1..=self.scene.plan.records_max);
        let partition = self.partition;
        self.scene.recorder.add(Event::Invoked { key, partition, records, stream: None });
        (key, payload::build(key, records))
    }

    /// One attempt at one node. `None` where no answer came.
    async fn send(
        &self,
        node: usize,
        identity: ProducerIdentity,
        first_sequence: u64,
        batch: &EncodedBatch,
    ) -> Option<Result<AppendAck, Error>> {
        let mut node = self.nodes.get(node)?.clone();
        let request = AppendRequest {
            topic: TOPIC.to_owned(),
            partition: self.partition,
            batch: Some(Batch { form: Some(Form::Encoded(batch.clone())) }),
            producer: Some(identity),
            first_sequence: Some(first_sequence),
            ..AppendRequest::default()
        };
        match timeout(ANSWER_MAX, node.append(request)).await {
            Ok(Ok(answer)) => Some(Ok(answer.into_inner().ack.unwrap_or_default())),
            Ok(Err(status)) => Some(Err(Error::from_status(&status))),
            Err(_) => None,
        }
    }

    /// Appends the next batch, by sending it to two nodes at once, again and again. `None` if its
    /// outcome stays open.
    async fn append(
        &mut self,
        identity: ProducerIdentity,
        sequence: u64,
    ) -> Option<(EncodedBatch, u64)> {
        let (key, batch) = self.make();
        self.scene.recorder.on_begin(self.partition);
        for _ in 0..ATTEMPTS_MAX {
            let (one, other) = (self.any_node(), self.any_node());
            let answers = tokio::join!(
                self.send(one, identity, sequence, &batch),
                self.send(other, identity, sequence, &batch)
            );
            let answers = [answers.0, answers.1];
            let offsets = answers.iter().flatten().flatten().filter_map(|ack| ack.first_offset);
            let offsets: Vec<u64> = offsets.collect();
            if answers.iter().flatten().flatten().any(|ack| ack.duplicate) {
                self.scene.marks.hit(Mark::DuplicateSuppressed);
            }
            if let Some(offset) = offsets.first().copied() {
                self.scene.recorder.on_end(self.partition, true);
                self.scene.recorder.add(Event::Acked { key, offset });
                if offsets.iter().any(|other| *other != offset) {
                    self.accuse(offset, format!("two acks of {key}, {offsets:?}"));
                }
                return Some((batch, offset));
            }
            if self.scene.is_stopped() {
                break;
            }
            sleep(BREATH).await;
        }
        self.scene.recorder.on_end(self.partition, false);
        self.scene.recorder.add(Event::Unknown { key });
        None
    }

    /// Sends what was acknowledged once more: it must get the same offset.
    async fn repeat(&mut self, identity: ProducerIdentity, sent: &Sent) {
        let node = self.any_node();
        match self.send(node, identity, sent.sequence, &sent.batch).await {
            Some(Ok(ack)) => {
                self.scene.marks.hit(Mark::DuplicateSuppressed);
                if ack.first_offset != Some(sent.offset) || !ack.duplicate {
                    let what = format!("what is at {} was acked again with {ack:?}", sent.offset);
                    self.accuse(sent.offset, what);
                }
            }
            Some(Err(error)) if error.is(ErrorReason::OutOfOrderSequence) => {
                self.accuse(
                    sent.offset,
                    format!("what is at {} was refused: {error}", sent.offset),
                );
            }
            Some(Err(_)) | None => {}
        }
    }

    /// Sends a batch that leaves a gap: it must be refused, and never be there. False if nobody
    /// knows.
    async fn leave_gap(&mut self, identity: ProducerIdentity, sequence: u64) -> bool {
        let (key, batch) = self.make();
        let node = self.any_node();
        match self.send(node, identity, sequence + GAP, &batch).await {
            Some(Ok(ack)) => {
                self.scene.recorder.add(Event::Unknown { key });
                let offset = ack.first_offset.unwrap_or(0);
                self.accuse(offset, format!("{key} left a gap, and was taken: {ack:?}"));
                false
            }
            Some(Err(error)) if !error.may_have_applied => {
                if error.is(ErrorReason::OutOfOrderSequence) {
                    self.scene.marks.hit(Mark::GapRefused);
                }
                self.scene.recorder.add(Event::Failed { key });
                true
            }
            Some(Err(_)) | None => {
                self.scene.recorder.add(Event::Unknown { key });
                true
            }
        }
    }

    fn any_node(&mut self) -> usize {
        self.rng.random_range(0..self.nodes.len())
    }

    fn accuse(&self, offset: u64, what: String) {
        let (reader, partition) = (self.producer, self.partition);
        self.scene.recorder.add(Event::Foreign { reader, partition, offset, what });
    }
}
