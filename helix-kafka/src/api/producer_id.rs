//! InitProducerId: identities of idempotent producers.

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::{InitProducerIdRequest, InitProducerIdResponse, ProducerId};

use crate::context::RequestContext;
use crate::errors::{CallTarget, code_of};

/// Answers a request for a producer id.
///
/// A producer that lost its sequence asks with its id for another epoch. It gets another id, which
/// does the same.
pub(crate) async fn init_producer_id(
    context: &RequestContext,
    request: InitProducerIdRequest,
) -> InitProducerIdResponse {
    let failed = |code: ResponseError| {
        InitProducerIdResponse::default()
            .with_error_code(code.code())
            .with_producer_id(ProducerId(-1))
            .with_producer_epoch(-1)
    };
    if request.transactional_id.is_some() {
        // Clients take this code for final, and say so at once.
        return failed(ResponseError::TransactionalIdAuthorizationFailed);
    }
    let identity = match context.upstream.client().init_producer("").await {
        Ok(identity) => identity,
        Err(error) => {
            tracing::debug!(%error, "no producer id");
            return failed(match code_of(&error, CallTarget::Cluster) {
                code @ ResponseError::ClusterAuthorizationFailed => code,
                ResponseError::UnknownServerError => ResponseError::UnknownServerError,
                // The code that clients repeat this request after.
                _ => ResponseError::CoordinatorNotAvailable,
            });
        }
    };
    match (i64::try_from(identity.producer_id), i16::try_from(identity.epoch)) {
        (Ok(id), Ok(epoch)) => InitProducerIdResponse::default()
            .with_producer_id(ProducerId(id))
            .with_producer_epoch(epoch),
        _ => failed(ResponseError::UnknownServerError),
    }
}
