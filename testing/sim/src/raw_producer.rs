//! A producer without `helix-client`, as a client in another language might be.
//!
//! It sends a batch to several nodes at once, repeats batches that were acknowledged long ago,
//! leaves gaps between sequence numbers, and reuses sequence numbers as another program with the
//! same identity might do. It knows the correct response to each.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use helix_checker::{BatchKey, HistoryEvent, payload};
use helix_client::Error;
use helix_proto::batch;
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::{
    AppendAck, AppendRequest, Batch, EncodedBatch, ErrorReason, InitProducerRequest,
    ProducerIdentity, Record,
};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

use crate::coverage::CoverageMark;
use crate::net::{CLIENT_PORT, channel};
use crate::plan::SimulationPlan;
use crate::workload::{ClientContext, RETRY_PAUSE, TOPIC};

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum attempts of one batch before its outcome stays unknown.
const ATTEMPTS_MAX: u32 = 30;

/// Acknowledged batches that may be repeated: fewer than a node remembers.
const KEPT_ACKS: usize = 60;

/// Sequence gap of a batch that must be rejected.
const GAP: u64 = 1_000_000;

/// Every twelfth batch lies about its contents.
const LIE_INTERVAL: u64 = 12;

/// Records of a batch that is larger than a topic with default settings takes, once decompressed.
const BOMB_RECORDS: u32 = 4;
const BOMB_RECORD_BYTES: usize = 900 << 10;

/// Returns a compressed batch that states a record too many.
fn false_count(key: BatchKey) -> EncodedBatch {
    let honest = payload::build(key, 3);
    let mut compressor = Compressor::default();
    let payload = compressor.compress_bytes(BatchCodec::Zstd, &honest.payload);
    payload::with_crc(EncodedBatch {
        record_count: honest.record_count + 1,
        compression: BatchCodec::Zstd.to_wire().into(),
        payload: Bytes::copy_from_slice(payload.unwrap_or_default()),
        ..honest.clone()
    })
}

/// Returns a small batch of which a node would make a large one.
fn bomb() -> EncodedBatch {
    let value = Bytes::from(vec![0; BOMB_RECORD_BYTES]);
    let record = || Record { value: Some(value.clone()), ..Record::default() };
    let records: Vec<Record> = (0..BOMB_RECORDS).map(|_| record()).collect();
    let large = batch::encode(&records);
    let small = Compressor::default().compress(BatchCodec::Zstd, &large, usize::MAX);
    small.unwrap_or(large)
}

/// An acknowledged batch.
#[derive(Clone)]
struct AckedBatch {
    sequence: u64,
    batch: EncodedBatch,
    offset: u64,
}

/// Producer that calls `ProduceService` directly.
pub struct RawProducer {
    context: ClientContext,
    nodes: Vec<ProduceServiceClient<Channel>>,
    producer: u32,
    partition: u32,
    number: u64,
    rng: StdRng,
}

impl RawProducer {
    pub fn new(context: &ClientContext) -> turmoil::Result<Self> {
        let producer = context.id();
        let mut rng = context.rng(producer);
        let node = |node| -> turmoil::Result<_> {
            let host = SimulationPlan::host(node);
            let endpoint = Endpoint::from_shared(format!("http://{host}:{CLIENT_PORT}"))?;
            Ok(ProduceServiceClient::new(channel(&endpoint)))
        };
        let nodes = (1..=context.plan.machines()).map(node).collect::<Result<_, _>>()?;
        let partition = rng.random_range(0..context.plan.partitions);
        Ok(Self { context: context.clone(), nodes, producer, partition, number: 0, rng })
    }

    pub async fn run(mut self) {
        while let Some(identity) = self.identity().await {
            self.write_as(identity).await;
        }
    }

    /// Requests a producer id. Returns `None` when the workload stops.
    async fn identity(&mut self) -> Option<ProducerIdentity> {
        while self.context.pause(RETRY_PAUSE, &mut self.rng).await {
            let Some(mut node) = self.nodes.choose(&mut self.rng).cloned() else { continue };
            let request = node.init_producer(InitProducerRequest::default());
            if let Ok(Ok(response)) = timeout(RESPONSE_TIMEOUT, request).await {
                return response.into_inner().producer;
            }
        }
        None
    }

    /// Writes with one producer id until an outcome is unknown, and with it the next sequence.
    async fn write_as(&mut self, identity: ProducerIdentity) {
        let mut sequence = 0;
        let mut acked: VecDeque<AckedBatch> = VecDeque::new();
        while self.context.pause(self.context.plan.pace, &mut self.rng).await {
            let continues = match self.rng.random_range(0..10) {
                0 if sequence > 0 => self.leave_gap(identity, sequence).await,
                // As often in every seed, without a draw.
                _ if self.number % LIE_INTERVAL == LIE_INTERVAL - 1 => {
                    self.number += 1;
                    self.lie().await;
                    true
                }
                1 if !acked.is_empty() && self.rng.random_bool(0.5) => {
                    let at = self.rng.random_range(0..acked.len());
                    self.reuse(identity, &acked[at].clone()).await
                }
                1..3 if !acked.is_empty() => {
                    let at = self.rng.random_range(0..acked.len());
                    self.repeat(identity, &acked[at].clone()).await;
                    true
                }
                _ => match self.append(identity, sequence).await {
                    Some((batch, offset)) => {
                        let records = u64::from(batch.record_count);
                        acked.push_back(AckedBatch { sequence, batch, offset });
                        sequence += records;
                        true
                    }
                    None => false,
                },
            };
            if acked.len() > KEPT_ACKS {
                acked.pop_front();
            }
            if !continues {
                return;
            }
        }
    }

    fn next_batch(&mut self) -> (BatchKey, EncodedBatch) {
        let records = self.rng.random_range(1..=self.context.plan.records_max);
        self.next_batch_of(records)
    }

    fn next_batch_of(&mut self, records: u32) -> (BatchKey, EncodedBatch) {
        let key = BatchKey { producer: self.producer, number: self.number };
        self.number += 1;
        let partition = self.partition;
        self.context.recorder.add(HistoryEvent::Invoked { key, partition, records, stream: None });
        (key, payload::compressed(key, payload::build(key, records)))
    }

    /// Sends a batch to one node. Returns `None` if no response came in time.
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
        match timeout(RESPONSE_TIMEOUT, node.append(request)).await {
            Ok(Ok(response)) => Some(Ok(response.into_inner().ack.unwrap_or_default())),
            Ok(Err(status)) => Some(Err(Error::from_status(&status))),
            Err(_) => None,
        }
    }

    /// Appends the next batch by sending it to two nodes at once, with retries. Returns `None` if
    /// its outcome stays unknown.
    async fn append(
        &mut self,
        identity: ProducerIdentity,
        sequence: u64,
    ) -> Option<(EncodedBatch, u64)> {
        let (key, batch) = self.next_batch();
        self.context.recorder.on_begin(self.partition);
        for _ in 0..ATTEMPTS_MAX {
            let (one, other) = (self.random_node(), self.random_node());
            let responses = tokio::join!(
                self.send(one, identity, sequence, &batch),
                self.send(other, identity, sequence, &batch)
            );
            let responses = [responses.0, responses.1];
            let offsets = responses.iter().flatten().flatten().filter_map(|ack| ack.first_offset);
            let offsets: Vec<u64> = offsets.collect();
            if responses.iter().flatten().flatten().any(|ack| ack.duplicate) {
                self.context.marks.hit(CoverageMark::DuplicateSuppressed);
            }
            if let Some(offset) = offsets.first().copied() {
                self.context.recorder.on_end(self.partition, true);
                self.context.recorder.add(HistoryEvent::Acked { key, offset });
                if offsets.iter().any(|other| *other != offset) {
                    self.record_violation(offset, format!("two acks of {key}, {offsets:?}"));
                }
                return Some((batch, offset));
            }
            if self.context.is_stopped() {
                break;
            }
            sleep(RETRY_PAUSE).await;
        }
        self.context.recorder.on_end(self.partition, false);
        self.context.recorder.add(HistoryEvent::Unknown { key });
        None
    }

    /// Repeats an acknowledged batch, which must get the same offset.
    async fn repeat(&mut self, identity: ProducerIdentity, acked: &AckedBatch) {
        let node = self.random_node();
        match self.send(node, identity, acked.sequence, &acked.batch).await {
            Some(Ok(ack)) => {
                self.context.marks.hit(CoverageMark::DuplicateSuppressed);
                if ack.first_offset != Some(acked.offset) || !ack.duplicate {
                    let what =
                        format!("the batch at {} was acked again with {ack:?}", acked.offset);
                    self.record_violation(acked.offset, what);
                }
            }
            Some(Err(error)) if error.is(ErrorReason::OutOfOrderSequence) => {
                self.record_violation(
                    acked.offset,
                    format!("the repeated batch at {} was rejected: {error}", acked.offset),
                );
            }
            Some(Err(_)) | None => {}
        }
    }

    /// Sends a batch that leaves a gap, which must be rejected. Returns `false` if it was accepted.
    async fn leave_gap(&mut self, identity: ProducerIdentity, sequence: u64) -> bool {
        let batch = self.next_batch();
        self.send_false(identity, sequence + GAP, batch, "leaves a gap").await
    }

    /// Sends other records with the sequence and the count of an acknowledged batch. They must be
    /// rejected: as a duplicate they would be acknowledged, and be nowhere.
    async fn reuse(&mut self, identity: ProducerIdentity, acked: &AckedBatch) -> bool {
        let batch = self.next_batch_of(acked.batch.record_count);
        self.send_false(identity, acked.sequence, batch, "reuses a sequence").await
    }

    /// Sends a batch with a false sequence. Returns `false` if it was accepted.
    async fn send_false(
        &mut self,
        identity: ProducerIdentity,
        sequence: u64,
        (key, batch): (BatchKey, EncodedBatch),
        fault: &str,
    ) -> bool {
        let node = self.random_node();
        match self.send(node, identity, sequence, &batch).await {
            Some(Ok(ack)) => {
                self.context.recorder.add(HistoryEvent::Unknown { key });
                let offset = ack.first_offset.unwrap_or(0);
                self.record_violation(offset, format!("{key} {fault} and was accepted: {ack:?}"));
                false
            }
            Some(Err(error)) if !error.may_have_applied => {
                if error.is(ErrorReason::OutOfOrderSequence) {
                    self.context.marks.hit(CoverageMark::GapRefused);
                }
                if error.is(ErrorReason::SequenceReused) {
                    self.context.marks.hit(CoverageMark::ReusedSequenceRefused);
                }
                self.context.recorder.add(HistoryEvent::Failed { key });
                true
            }
            Some(Err(_)) | None => {
                self.context.recorder.add(HistoryEvent::Unknown { key });
                true
            }
        }
    }

    /// Sends a compressed batch that states something else than it contains, or contains more than
    /// a topic takes. It must be rejected.
    async fn lie(&mut self) {
        let key = BatchKey { producer: self.producer, number: self.number };
        let (lie, reason) = match self.number / LIE_INTERVAL % 2 {
            0 => (false_count(key), ErrorReason::RecordCountMismatch),
            _ => (bomb(), ErrorReason::BatchTooLarge),
        };
        let Some(mut node) = self.nodes.choose(&mut self.rng).cloned() else { return };
        let request = AppendRequest {
            topic: TOPIC.to_owned(),
            partition: self.partition,
            batch: Some(Batch { form: Some(Form::Encoded(lie)) }),
            ..AppendRequest::default()
        };
        match timeout(RESPONSE_TIMEOUT, node.append(request)).await {
            Ok(Ok(response)) => {
                let offset = response.into_inner().ack.and_then(|ack| ack.first_offset);
                let what = format!("a batch to be rejected with {reason:?} was accepted");
                self.record_violation(offset.unwrap_or(0), what);
            }
            Ok(Err(status)) if Error::from_status(&status).is(reason) => {
                self.context.marks.hit(CoverageMark::FalseBatchRefused);
            }
            Ok(Err(_)) | Err(_) => {}
        }
    }

    fn random_node(&mut self) -> usize {
        self.context.random_member(&mut self.rng)
    }

    fn record_violation(&self, offset: u64, what: String) {
        let (reader, partition) = (self.producer, self.partition);
        self.context.recorder.add(HistoryEvent::Foreign { reader, partition, offset, what });
    }
}
