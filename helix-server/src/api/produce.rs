//! ProduceService: appends, append streams and producer identities.
//! The append path decides the throughput: it spawns, copies and decodes nothing.

use std::sync::Arc;

use helix_proto::log::v1::produce_service_server::ProduceService;
use helix_proto::log::v1::{
    AppendCondition, AppendRequest, AppendResponse, AppendStreamRequest, AppendStreamResponse,
    InitProducerRequest, InitProducerResponse, ProducerIdentity,
};
use tokio::time::Instant;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status, Streaming};

use super::authorize::{authorize, authorize_request};
use super::batch_signer::BatchSigner;
use super::batch_size::BatchSize;
use super::batch_watch::{BatchWatch, call_context, count_ack};
use super::decompressors::Decompressors;
use super::settings::durability_to_reach;
use super::{append_stream, batch, call_memory, wire_ack, wire_watermarks};
use crate::access::AuthMode;
use crate::call::{CallAccess, CallMemory, ClientLoad};
use crate::error::{Error, Result};
use crate::limits::{MESSAGE_BYTES_MAX, PRODUCER_NAME_BYTES_MAX};
use crate::log::ProducerOwner;
use crate::node::Node;
use crate::trace::TraceContext;

pub(crate) struct ProduceHandler {
    node: Arc<Node>,
    load: Arc<ClientLoad>,
    decompressors: Arc<Decompressors>,
}

impl ProduceHandler {
    pub(crate) fn new(
        node: &Arc<Node>,
        load: &Arc<ClientLoad>,
        decompressors: &Arc<Decompressors>,
    ) -> Self {
        let (node, load, decompressors) = (node.clone(), load.clone(), decompressors.clone());
        Self { node, load, decompressors }
    }

    /// Appends a batch.
    ///
    /// # Errors
    /// Those of the batch, of its partition, and of [`crate::shard::Shard::append`].
    pub(crate) async fn append(
        &self,
        request: AppendRequest,
        context: Option<Box<TraceContext>>,
        call: Option<&CallMemory>,
    ) -> Result<AppendResponse> {
        let since = Instant::now();
        let signer = BatchSigner::of(&self.node, call);
        let expected_id = request.topic_id;
        let located = self.node.find(&request.topic, expected_id, request.partition).await?;
        let durability = durability_to_reach(request.durability, &located.settings)?;
        let admitted = batch::admit(request.batch, located.partition, &located.settings)?;
        let mut batch = admitted.verified(&self.node, &self.decompressors, &located).await?;
        let stamp = batch::stamp(request.producer, request.first_sequence, batch.record_count)?;
        batch.producer = stamp.map(|stamp| signer.sign(stamp, batch.crc));
        if let Some(stamp) = batch.producer.filter(|stamp| stamp.first_sequence == 0) {
            self.node.check_producer(&located, stamp).await?;
        }
        if let Some(AppendCondition { expected_offset, fencing_token }) = request.condition {
            let token = |text: &str| batch::fencing_token("condition.fencing_token", text);
            let token = fencing_token.as_deref().map(token).transpose()?;
            batch.condition = batch::condition(expected_offset, token, durability)?;
        }
        let size = BatchSize::of(&batch, since);
        let is_asked = request.report_stages;
        let mut watch = BatchWatch::begin(&self.node, context, is_asked, since, &mut batch);
        let bytes = batch.payload.len();
        let permit = located.shard.permit(signer.share(), bytes).await.inspect_err(|error| {
            if matches!(error, Error::Throttled { .. }) {
                self.load.events().appends_throttled.add();
            }
        });
        let acked = match permit {
            Ok(permit) => {
                self.check_again(call, &located.topic.name)?;
                located.shard.append(batch, durability, permit).await
            }
            Err(error) => Err(error),
        };
        if let (Some(watch), Err(error)) = (&mut watch, &acked) {
            watch.failed(&size, &located, error);
        }
        let ack = match acked {
            Ok(ack) => ack,
            Err(error @ Error::PartitionDeleted { .. }) if expected_id > 0 => {
                return Err(self.node.explain_deleted(&located.topic, error).await);
            }
            Err(error) => return Err(located.shard.redirect(error).await),
        };
        count_ack(&self.node, &located, &size, &ack);
        let mut stages = Vec::new();
        if let Some(watch) = watch {
            stages = watch.acked(&size, &located, &ack);
        }
        let watermarks = ack.offsets.map(|_| wire_watermarks(ack.watermarks));
        let topic_id = located.topic.id;
        Ok(AppendResponse { ack: Some(wire_ack(&ack)), watermarks, topic_id, stages })
    }

    /// Checks the right to append again, if rules have changed since the call began. The batch may
    /// have waited, for example for its permit.
    fn check_again(&self, call: Option<&CallMemory>, topic: &str) -> Result<()> {
        let Some(caller) = call.and_then(CallMemory::access).and_then(CallAccess::caller) else {
            return Ok(());
        };
        if self.node.is_current(caller) {
            return Ok(());
        }
        let request = AppendRequest { topic: topic.to_owned(), ..AppendRequest::default() };
        authorize(&self.node, call, &request)
    }

    async fn init_producer(
        &self,
        producer_name: &str,
        owner: ProducerOwner,
    ) -> Result<ProducerIdentity> {
        if producer_name.len() > PRODUCER_NAME_BYTES_MAX {
            return Err(Error::InvalidArgument {
                field: "producer_name",
                what: format!("must have at most {PRODUCER_NAME_BYTES_MAX} bytes"),
            });
        }
        let (producer_id, epoch) = if producer_name.is_empty() {
            (self.node.next_producer_id(owner).await?, 0)
        } else {
            self.node.cluster().init_producer(producer_name, owner).await?
        };
        Ok(ProducerIdentity { producer_id, epoch })
    }
}

#[tonic::async_trait]
impl ProduceService for ProduceHandler {
    type AppendStreamStream = BoxStream<AppendStreamResponse>;

    async fn init_producer(
        &self,
        request: Request<InitProducerRequest>,
    ) -> Result<Response<InitProducerResponse>, Status> {
        authorize_request(&self.node, &request)?;
        let owner = BatchSigner::of(&self.node, call_memory(&request).as_deref()).owner();
        let producer = self.init_producer(&request.get_ref().producer_name, owner).await?;
        Ok(Response::new(InitProducerResponse { producer: Some(producer) }))
    }

    async fn append(
        &self,
        request: Request<AppendRequest>,
    ) -> Result<Response<AppendResponse>, Status> {
        // Read before the message is: the message consumes the request.
        let is_checked = self.node.auth_mode() != AuthMode::Off;
        let call = if is_checked { call_memory(&request) } else { None };
        let context = call_context(&self.node, request.metadata());
        let request = helix_transport::read_unary(request, MESSAGE_BYTES_MAX).await?;
        authorize(&self.node, call.as_deref(), &request)?;
        Ok(Response::new(self.append(request, context, call.as_deref()).await?))
    }

    async fn append_stream(
        &self,
        request: Request<Streaming<AppendStreamRequest>>,
    ) -> Result<Response<Self::AppendStreamStream>, Status> {
        let requests = helix_transport::read_messages(&request, MESSAGE_BYTES_MAX);
        let call = call_memory(&request);
        let (node, decompressors) = (self.node.clone(), self.decompressors.clone());
        let context = call_context(&node, request.metadata());
        Ok(Response::new(append_stream::responses(node, call, context, decompressors, requests)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiting_append_takes_little_memory() {
        super::super::assert_small_future(|(produce, request): (&'static ProduceHandler, _)| {
            produce.append(request, None, None)
        });
    }
}
