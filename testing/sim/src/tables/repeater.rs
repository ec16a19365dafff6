//! A producer without `helix-client` that repeats updates of a table long after they were
//! acknowledged, and sends conditions that no longer hold. Compaction changes neither response.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use helix_client::Error;
use helix_proto::batch;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use helix_proto::log::v1::{
    AppendAck, AppendCondition, AppendRequest, Batch, ErrorReason, Header, InitProducerRequest,
    ProducerIdentity, Record,
};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

use super::{KEYS, NAME, PARTITIONS, RESPONSE_TIMEOUT, TableModel, kafka_batch, key_bytes};
use crate::net::{CLIENT_PORT, channel};
use crate::plan::SimulationPlan;
use crate::workload::{ClientContext, RETRY_PAUSE};

/// Keys of its own. With those of the writers it would replace their tombstones.
const OWN_KEYS: u8 = 3;

/// Mean pause between two calls.
const CALL_PAUSE: Duration = Duration::from_millis(150);

/// Maximum attempts of one update before its outcome stays unknown.
const ATTEMPTS_MAX: u32 = 30;

/// Acknowledged updates that may be repeated: fewer than a node remembers. The oldest ones are
/// older than a round of compaction.
const KEPT_ACKS: usize = 60;

type AppendResult = Result<AppendAck, Error>;

/// An update that was sent with a producer id.
#[derive(Clone)]
struct Update {
    sequence: u64,
    record: Record,
}

pub(super) struct TableRepeater {
    context: ClientContext,
    model: TableModel,
    nodes: Vec<ProduceServiceClient<Channel>>,
    id: u32,
    next: u64,
    partition: u32,
    rng: StdRng,
}

impl TableRepeater {
    pub(super) fn new(context: &ClientContext, model: &TableModel) -> turmoil::Result<Self> {
        let id = context.id();
        let mut rng = context.rng(id);
        let node = |node| -> turmoil::Result<_> {
            let host = SimulationPlan::host(node);
            let endpoint = Endpoint::from_shared(format!("http://{host}:{CLIENT_PORT}"))?;
            Ok(ProduceServiceClient::new(channel(&endpoint)))
        };
        let nodes = (1..=context.plan.machines()).map(node).collect::<Result<_, _>>()?;
        let partition = rng.random_range(0..PARTITIONS);
        let (context, model) = (context.clone(), model.clone());
        Ok(Self { context, model, nodes, id, next: 0, partition, rng })
    }

    pub(super) async fn run(mut self) -> Result<(), String> {
        while let Some(identity) = self.identity().await {
            self.write_as(identity).await?;
        }
        Ok(())
    }

    fn node(&mut self) -> ProduceServiceClient<Channel> {
        self.nodes[self.context.random_member(&mut self.rng)].clone()
    }

    /// Requests a producer id. Returns `None` when the workload stops.
    async fn identity(&mut self) -> Option<ProducerIdentity> {
        while self.context.pause(RETRY_PAUSE, &mut self.rng).await {
            let mut node = self.node();
            let request = node.init_producer(InitProducerRequest::default());
            if let Ok(Ok(response)) = timeout(RESPONSE_TIMEOUT, request).await {
                return response.into_inner().producer;
            }
        }
        None
    }

    /// Writes with one producer id until an outcome is unknown, and with it the next sequence.
    async fn write_as(&mut self, identity: ProducerIdentity) -> Result<(), String> {
        let mut sequence = 0;
        let mut acked: VecDeque<(Update, u64)> = VecDeque::new();
        while self.context.pause(CALL_PAUSE, &mut self.rng).await {
            let known = self.rng.random_range(0..KEPT_ACKS);
            match (self.rng.random_range(0..4), acked.get(known).cloned()) {
                (0, Some((update, offset))) => self.repeat(identity, &update, offset).await?,
                (1, Some((update, offset))) => self.expect_offset(&update, offset).await?,
                _ => {
                    let Some(ack) = self.append(identity, sequence).await else { return Ok(()) };
                    acked.push_back(ack);
                    sequence += 1;
                }
            }
            if acked.len() > KEPT_ACKS {
                acked.pop_front();
            }
        }
        Ok(())
    }

    /// Sends a record to a random node. Returns `None` if no response came in time.
    async fn send(&mut self, request: AppendRequest, record: &Record) -> Option<AppendResult> {
        // A repeated record has the same bytes again.
        let records = std::slice::from_ref(record);
        let encoded = match record.value.as_ref().map_or(0, Bytes::len) % 2 {
            0 => kafka_batch(records, None),
            _ => batch::encode(records),
        };
        let request = AppendRequest {
            topic: NAME.to_owned(),
            partition: self.partition,
            batch: Some(Batch { form: Some(Form::Encoded(encoded)) }),
            ..request
        };
        let mut node = self.node();
        match timeout(RESPONSE_TIMEOUT, node.append(request)).await {
            Ok(Ok(response)) => Some(Ok(response.into_inner().ack.unwrap_or_default())),
            Ok(Err(status)) => Some(Err(Error::from_status(&status))),
            Err(_) => None,
        }
    }

    async fn send_as(
        &mut self,
        identity: ProducerIdentity,
        update: &Update,
    ) -> Option<AppendResult> {
        let request = AppendRequest {
            producer: Some(identity),
            first_sequence: Some(update.sequence),
            ..AppendRequest::default()
        };
        self.send(request, &update.record).await
    }

    /// Appends a new update, with retries. Returns `None` if its outcome stays unknown.
    async fn append(&mut self, identity: ProducerIdentity, sequence: u64) -> Option<(Update, u64)> {
        let number = u64::from(self.id) << 32 | self.next;
        self.next += 1;
        let key = KEYS + self.rng.random_range(0..OWN_KEYS);
        self.model.on_sent(self.partition, number, key, false);
        let record = Record {
            key: Some(key_bytes(key).into()),
            value: Some(Bytes::from_static(b"value")),
            headers: vec![Header {
                name: "number".to_owned(),
                value: number.to_le_bytes().to_vec().into(),
            }],
            ..Record::default()
        };
        let update = Update { sequence, record };
        for _ in 0..ATTEMPTS_MAX {
            if let Some(Ok(ack)) = self.send_as(identity, &update).await {
                let offset = ack.first_offset?;
                self.model.on_acked(self.partition, number, offset);
                return Some((update, offset));
            }
            if self.context.is_stopped() {
                break;
            }
            sleep(RETRY_PAUSE).await;
        }
        None
    }

    /// Repeats an acknowledged update, which must get the same offset.
    async fn repeat(
        &mut self,
        identity: ProducerIdentity,
        update: &Update,
        offset: u64,
    ) -> Result<(), String> {
        match self.send_as(identity, update).await {
            Some(Ok(ack)) if ack.first_offset != Some(offset) || !ack.duplicate => {
                Err(format!("the update at {offset} was acked again with {ack:?}"))
            }
            Some(Err(error)) if error.is(ErrorReason::OutOfOrderSequence) => {
                Err(format!("the repeated update at {offset} was rejected: {error}"))
            }
            _ => Ok(()),
        }
    }

    /// Expects an offset that another record has got, so the append must be rejected.
    async fn expect_offset(&mut self, update: &Update, offset: u64) -> Result<(), String> {
        let condition = AppendCondition { expected_offset: Some(offset), fencing_token: None };
        let request = AppendRequest { condition: Some(condition), ..AppendRequest::default() };
        match self.send(request, &update.record).await {
            Some(Ok(ack)) => Err(format!("an append that expected {offset} got {ack:?}")),
            _ => Ok(()),
        }
    }
}
