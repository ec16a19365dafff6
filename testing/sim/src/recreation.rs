//! Deletes a topic and creates it again under the same name, again and again, while producers,
//! readers and subscriptions use it. `recreation_log` has the rules.

use std::time::Duration;

use helix_checker::{BatchKey, payload};
use helix_client::{
    Ack, Client, Error, Event, FetchOptions, NewTopic, OnRecreate, Position, ProducerOptions,
    ReadOptions, ReadSource, ReadStart, SessionOptions, TopicRef,
};
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::topic_service_client::TopicServiceClient;
use helix_proto::log::v1::{
    AppendRequest, Batch, DeleteTopicRequest, EncodedBatch, ErrorReason, InitProducerRequest,
    ProducerIdentity,
};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

use crate::coverage::CoverageMark;
use crate::net::{CLIENT_PORT, channel};
use crate::plan::SimulationPlan;
use crate::recreation_log::{ReaderCheck, ReaderPosition, RecreationLog};
use crate::workload::{ClientContext, RETRY_PAUSE, TOPIC_IS_THERE};

const NAME: &str = "recreated";
const PARTITIONS: u32 = 2;

/// Mean life of a topic.
const LIFE: Duration = Duration::from_secs(2);

/// Maximum wait for a response of a single node.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum wait for the next event of a subscription.
const POLL: Duration = Duration::from_millis(300);

/// Runs all clients of the recreated topic.
pub async fn run(context: ClientContext, log: RecreationLog) -> turmoil::Result {
    context.wait_for_phase(TOPIC_IS_THERE).await;
    let mut tasks = JoinSet::new();
    tasks.spawn(Recreator::new(&context, &log)?.run());
    tasks.spawn(RecreationClient::new(&context, &log)?.append());
    tasks.spawn(RecreationClient::new(&context, &log)?.append_in_sessions());
    for on_recreate in [OnRecreate::Fail, OnRecreate::Restart] {
        tasks.spawn(RecreationClient::new(&context, &log)?.subscribe(on_recreate));
    }
    tasks.spawn(RecreationClient::new(&context, &log)?.fetch());
    while let Some(task) = tasks.join_next().await {
        task?;
    }
    context.on_end();
    Ok(())
}

/// A producer or reader of the topic, whichever it is.
struct RecreationClient {
    context: ClientContext,
    log: RecreationLog,
    client: Client,
    id: u32,
    next: u64,
    rng: StdRng,
}

impl RecreationClient {
    fn new(context: &ClientContext, log: &RecreationLog) -> turmoil::Result<Self> {
        let id = context.id();
        let (client, rng) = (context.client()?, context.rng(id));
        Ok(Self { context: context.clone(), log: log.clone(), client, id, next: 0, rng })
    }

    fn next_batch(&mut self) -> (BatchKey, EncodedBatch) {
        let key = BatchKey { producer: self.id, number: self.next };
        self.next += 1;
        (key, payload::build(key, self.rng.random_range(1..=3)))
    }

    fn on_result(&self, key: BatchKey, partition: u32, result: Result<Ack, Error>) {
        match result {
            Ok(ack) => match ack.first_offset {
                Some(offset) => self.log.on_acked(key, (ack.topic_id, partition, offset)),
                None => self.log.violate(format!("an ack of {key} without an offset: {ack:?}")),
            },
            // Each batch waits for the one before it.
            Err(error) if error.is(ErrorReason::OutOfOrderSequence) => {
                self.log.violate(format!("{key} carries a sequence over: {error}"));
            }
            Err(error) => self.context.recorder.note(&format!("{key} failed: {error}")),
        }
    }

    /// Appends with an idempotent producer, one batch at a time.
    async fn append(mut self) {
        self.log.register(self.id);
        let producer = self.client.producer(ProducerOptions::default());
        while self.context.pause(self.context.plan.pace, &mut self.rng).await {
            let partition = self.rng.random_range(0..PARTITIONS);
            let (key, batch) = self.next_batch();
            let result = producer.append(NAME, partition, batch).await;
            self.on_result(key, partition, result);
        }
    }

    /// Appends through a session, and opens another one after a failure.
    async fn append_in_sessions(mut self) {
        self.log.register(self.id);
        let partition = self.rng.random_range(0..PARTITIONS);
        while self.context.pause(RETRY_PAUSE, &mut self.rng).await {
            let Ok(session) = self.client.session(NAME, partition, SessionOptions::default()).await
            else {
                continue;
            };
            while self.context.pause(self.context.plan.pace, &mut self.rng).await {
                let (key, batch) = self.next_batch();
                let result = match session.append(batch).await {
                    Ok(acked) => acked.await,
                    Err(error) => Err(error),
                };
                let has_failed = result.is_err();
                self.on_result(key, partition, result);
                if has_failed {
                    break;
                }
            }
        }
    }

    fn starts(check: &ReaderCheck) -> Vec<ReadStart> {
        let positions = (0..).zip(&check.positions);
        let start = |(partition, position): (u32, &ReaderPosition)| {
            ReadStart::new(NAME, partition, Position::Offset(position.next))
                .in_topic(position.topic_id)
        };
        positions.map(start).collect()
    }

    /// Reads through subscriptions to the leaders.
    async fn subscribe(mut self, on_recreate: OnRecreate) {
        let mut check = ReaderCheck::new(self.log.clone(), self.id, PARTITIONS);
        let options = ReadOptions { on_recreate, ..ReadOptions::default() };
        while self.context.pause(RETRY_PAUSE, &mut self.rng).await {
            let consumer = self.client.consumer();
            let mut subscription = consumer.subscribe(Self::starts(&check), options);
            while !self.context.is_stopped() {
                match timeout(POLL, subscription.next_encoded()).await {
                    Ok(Some(Ok(Event::Data(batches)))) => check.on_batches(&batches),
                    Ok(Some(Ok(Event::Restarted {
                        partition, old_topic_id, topic_id, ..
                    }))) => {
                        check.on_restarted(partition, old_topic_id, topic_id);
                    }
                    Ok(Some(Ok(Event::CaughtUp { .. } | Event::Heartbeat(_)))) | Err(_) => {}
                    Ok(Some(Err(error))) => {
                        check.on_error(&error);
                        break;
                    }
                    Ok(None) => break,
                }
            }
        }
    }

    /// Reads by long polls of random replicas.
    async fn fetch(mut self) {
        let mut check = ReaderCheck::new(self.log.clone(), self.id, PARTITIONS);
        let consumer = self.client.consumer();
        while self.context.pause(RETRY_PAUSE, &mut self.rng).await {
            let read = ReadOptions { source: ReadSource::AnyReplica, ..ReadOptions::default() };
            let options = FetchOptions { wait_max: POLL, read, ..FetchOptions::default() };
            match consumer.fetch_encoded(&Self::starts(&check), &options).await {
                Ok(all) => all.iter().for_each(|batches| check.on_batches(batches)),
                Err(error) => check.on_error(&error),
            }
        }
    }
}

/// Batch of a raw producer that was acknowledged.
struct RawBatch {
    identity: ProducerIdentity,
    partition: u32,
    sequence: u64,
    batch: EncodedBatch,
}

/// Deletes and creates the topic. Repeats requests for topics that were deleted long ago, as a
/// client does that got no response.
struct Recreator {
    client: RecreationClient,
    nodes: Vec<Channel>,
}

impl Recreator {
    fn new(context: &ClientContext, log: &RecreationLog) -> turmoil::Result<Self> {
        let node = |node| -> turmoil::Result<_> {
            let host = SimulationPlan::host(node);
            Ok(channel(&Endpoint::from_shared(format!("http://{host}:{CLIENT_PORT}"))?))
        };
        let nodes = (1..=context.plan.machines()).map(node).collect::<Result<_, _>>()?;
        Ok(Self { client: RecreationClient::new(context, log)?, nodes })
    }

    async fn run(mut self) {
        let log = self.client.log.clone();
        loop {
            let id = self.create().await;
            log.on_created(id);
            self.repeat_deletions(id).await;
            let written = self.append_raw(id).await;
            if log.is_quiet() {
                return log.settle();
            }
            self.sleep(LIFE).await;
            log.on_deletion_requested(id);
            self.delete(id).await;
            log.on_deleted(id);
            if self.client.rng.random_bool(0.5) {
                self.sleep(LIFE / 2).await;
            }
            if let Some(written) = written {
                // The name may belong to no topic yet, or to the next one.
                self.repeat_append(&written).await;
                let id = self.create().await;
                log.on_created(id);
                self.repeat_append(&written).await;
                self.repeat_deletions(id).await;
                if log.is_quiet() {
                    return log.settle();
                }
                log.on_deletion_requested(id);
                self.delete(id).await;
                log.on_deleted(id);
            }
        }
    }

    async fn sleep(&mut self, mean: Duration) {
        sleep(mean.mul_f64(self.client.rng.random_range(0.0..2.0))).await;
    }

    fn random_node(&mut self) -> Channel {
        let at = self.client.context.random_member(&mut self.client.rng);
        self.nodes[at].clone()
    }

    async fn create(&mut self) -> u64 {
        let topic = NewTopic::new(NAME, PARTITIONS);
        loop {
            match self.client.client.admin().create_topic(&topic).await {
                Ok(topic) => return topic.topic_id,
                Err(error) => self.client.context.recorder.note(&format!("no creation: {error}")),
            }
            self.sleep(RETRY_PAUSE).await;
        }
    }

    /// Deletes the topic by its name, or by name and id.
    async fn delete(&mut self, id: u64) {
        let mut by_id = self.client.rng.random_bool(0.5);
        loop {
            let topic = TopicRef::with_id(NAME, if by_id { id } else { 0 });
            match self.client.client.admin().delete_topic(topic).await {
                Ok(()) => return,
                Err(error) if error.is(ErrorReason::TopicDeleted) => return,
                // A lookup by name may ask a node that does not know the topic yet.
                Err(error) if error.is(ErrorReason::TopicNotFound) => {
                    if by_id {
                        return;
                    }
                    by_id = true;
                }
                Err(error) => self.client.context.recorder.note(&format!("no deletion: {error}")),
            }
            self.sleep(RETRY_PAUSE).await;
        }
    }

    /// Repeats the deletions of earlier topics, each at some node.
    async fn repeat_deletions(&mut self, current: u64) {
        for id in self.client.log.deleted().into_iter().rev().take(2) {
            let mut node = TopicServiceClient::new(self.random_node());
            let request = DeleteTopicRequest { name: NAME.to_owned(), topic_id: id };
            let response = timeout(RESPONSE_TIMEOUT, node.delete_topic(request)).await;
            match response {
                Ok(Ok(_)) => self.client.log.violate(format!(
                    "the repeated deletion of topic {id} was acknowledged while {current} had the \
                     name"
                )),
                Ok(Err(_)) => self.client.context.marks.hit(CoverageMark::DeletionRepeated),
                Err(_) => {}
            }
        }
    }

    /// Appends two batches to a topic with a new producer id. Returns the second one.
    async fn append_raw(&mut self, id: u64) -> Option<RawBatch> {
        let mut node = ProduceServiceClient::new(self.random_node());
        let request = node.init_producer(InitProducerRequest::default());
        let response = timeout(RESPONSE_TIMEOUT, request).await.ok()?.ok()?;
        let identity = response.into_inner().producer?;
        let partition = self.client.rng.random_range(0..PARTITIONS);
        let mut sequence = 0;
        let mut last = None;
        for _ in 0..2 {
            let (key, batch) = self.client.next_batch();
            let records = u64::from(batch.record_count);
            let sent = RawBatch { identity, partition, sequence, batch };
            let mut attempts = 0;
            let (topic_id, offset) = loop {
                if let Some(acked) = self.send(&sent, id).await {
                    break acked;
                }
                attempts += 1;
                if attempts > 20 {
                    return None;
                }
                self.sleep(RETRY_PAUSE).await;
            };
            self.client.log.on_acked(key, (topic_id, partition, offset));
            sequence += records;
            last = Some(sent);
        }
        last
    }

    /// Sends a batch to some node, with the id of a topic or 0. Returns its topic and offset if it
    /// was acknowledged.
    async fn send(&mut self, sent: &RawBatch, topic_id: u64) -> Option<(u64, u64)> {
        let mut node = ProduceServiceClient::new(self.random_node());
        let request = AppendRequest {
            topic: NAME.to_owned(),
            partition: sent.partition,
            batch: Some(Batch { form: Some(Form::Encoded(sent.batch.clone())) }),
            producer: Some(sent.identity),
            first_sequence: Some(sent.sequence),
            topic_id,
            ..AppendRequest::default()
        };
        let response = timeout(RESPONSE_TIMEOUT, node.append(request)).await.ok()?.ok()?;
        let response = response.into_inner();
        Some((response.topic_id, response.ack?.first_offset?))
    }

    /// Repeats a batch of a deleted topic. The next topic does not know its sequence.
    async fn repeat_append(&mut self, written: &RawBatch) {
        for _ in 0..3 {
            if let Some(place) = self.send(written, 0).await {
                self.client.log.violate(format!(
                    "a batch of a deleted topic with sequence {} was acknowledged again at \
                     {place:?}",
                    written.sequence
                ));
            }
        }
    }
}
