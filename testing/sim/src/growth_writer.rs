//! Idempotent producers that write to the topics of [`crate::shard_growth`] while shards are added
//! and split: one for each partition, without a client library.
//!
//! A batch is sent under its sequence until it is acked, to whichever node takes it. Now and then
//! the last batch is sent once more: it must be answered as the copy that it is, at its offset,
//! also if its partition has moved to another shard since.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use helix_checker::{BatchKey, payload};
use helix_client::Error;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::{
    AppendRequest, Batch, EncodedBatch, ErrorReason, InitProducerRequest, ProducerIdentity,
};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::{sleep, timeout};
use tonic::transport::Channel;

use crate::coverage::CoverageMark;
use crate::principals::produce_clients;
use crate::workload::ClientContext;

/// Mean pause between two batches of a partition: a few come while it is sealed.
const PAUSE: Duration = Duration::from_millis(150);

/// Pause before another node is asked.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Probability that the last batch is sent once more.
const REPEATED: f64 = 0.3;

/// Acked batches of all writers, by topic, partition and offset.
#[derive(Debug, Clone, Default)]
pub(crate) struct AckedBatches(Arc<Mutex<AckedState>>);

#[derive(Debug, Default)]
pub(crate) struct AckedState {
    pub(crate) batches: BTreeMap<(String, u32), BTreeMap<u64, BatchKey>>,
    /// First broken promise.
    pub(crate) violation: Option<String>,
}

impl AckedBatches {
    pub(crate) fn lock(&self) -> MutexGuard<'_, AckedState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn violate(&self, what: String) {
        self.lock().violation.get_or_insert(what);
    }
}

/// An idempotent producer of one partition.
pub(crate) struct GrowthWriter {
    context: ClientContext,
    nodes: Vec<ProduceServiceClient<Channel>>,
    /// Node that took the last batch.
    node: usize,
    rng: StdRng,
    topic: String,
    partition: u32,
    acked: AckedBatches,
}

impl GrowthWriter {
    pub(crate) fn new(
        context: &ClientContext,
        topic: &str,
        partition: u32,
        acked: &AckedBatches,
    ) -> turmoil::Result<Self> {
        let nodes = produce_clients(context)?;
        let rng = context.rng(context.id());
        let (topic, acked) = (topic.to_owned(), acked.clone());
        Ok(Self { context: context.clone(), nodes, node: 0, rng, topic, partition, acked })
    }

    /// Writes until the run calms down.
    pub(crate) async fn run(mut self) {
        let Some(identity) = self.init().await else { return };
        let producer = self.context.id();
        let mut last: Option<(u64, EncodedBatch, u64)> = None;
        for number in 0.. {
            sleep(PAUSE.mul_f64(self.rng.random_range(0.0..2.0))).await;
            if self.context.is_calm() {
                return;
            }
            if let Some((sequence, batch, offset)) = &last
                && self.rng.random_bool(REPEATED)
            {
                let Some(again) = self.settle(identity, *sequence, batch).await else { return };
                if again != *offset {
                    let Self { topic, partition, .. } = &self;
                    self.acked.violate(format!(
                        "sequence {sequence} of {topic}/{partition} is at {offset} and, sent once \
                         more, at {again}"
                    ));
                    return;
                }
                self.context.marks.hit(CoverageMark::AckedBatchRepeated);
            }
            let key = BatchKey { producer, number };
            let batch = payload::build(key, 1);
            let Some(offset) = self.settle(identity, number, &batch).await else { return };
            let place = (self.topic.clone(), self.partition);
            self.acked.lock().batches.entry(place).or_default().insert(offset, key);
            last = Some((number, batch, offset));
        }
    }

    async fn init(&mut self) -> Option<ProducerIdentity> {
        while !self.context.is_calm() {
            let at = self.context.random_member(&mut self.rng);
            let response = self.nodes[at].init_producer(InitProducerRequest::default());
            if let Ok(Ok(response)) = timeout(RESPONSE_TIMEOUT, response).await {
                return response.into_inner().producer;
            }
            sleep(RETRY_PAUSE).await;
        }
        None
    }

    /// Sends a batch until it is acked, and returns its offset. `None` if the run ends before, or
    /// if it was refused although it is the producer's next or last.
    async fn settle(
        &mut self,
        identity: ProducerIdentity,
        sequence: u64,
        batch: &EncodedBatch,
    ) -> Option<u64> {
        while !self.context.is_stopped() {
            let request = AppendRequest {
                topic: self.topic.clone(),
                partition: self.partition,
                batch: Some(Batch { form: Some(Form::Encoded(batch.clone())) }),
                producer: Some(identity),
                first_sequence: Some(sequence),
                ..AppendRequest::default()
            };
            let response = self.nodes[self.node].append(request);
            match timeout(RESPONSE_TIMEOUT, response).await {
                Ok(Ok(response)) => {
                    if let Some(offset) = response.into_inner().ack.and_then(|it| it.first_offset) {
                        return Some(offset);
                    }
                }
                Ok(Err(status)) => {
                    let error = Error::from_status(&status);
                    let is_sequence_lost = [
                        ErrorReason::UnknownProducer,
                        ErrorReason::OutOfOrderSequence,
                        ErrorReason::SequenceReused,
                    ];
                    if is_sequence_lost.into_iter().any(|reason| error.is(reason)) {
                        let Self { topic, partition, .. } = &*self;
                        self.acked.violate(format!(
                            "sequence {sequence} of {topic}/{partition} was refused: {error}"
                        ));
                        return None;
                    }
                }
                Err(_) => {}
            }
            self.node = self.context.random_member(&mut self.rng);
            sleep(RETRY_PAUSE).await;
        }
        None
    }
}
