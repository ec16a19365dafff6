//! Requests to append as the bytes of a body, without a copy of the batches in them.

use std::task::{Context, Poll};

use prost::Message;
use tonic::Request;
use tonic::body::Body;

use crate::framing::Aside;
use crate::log::v1::append_stream_request::Message as StreamMessage;
use crate::log::v1::batch::Form;
use crate::log::v1::{AppendRequest, AppendStreamRequest, Batch};
use crate::messages::{self, Outgoing, Pieces};

/// Numbers of the fields around a payload.
const APPEND_BATCH: u32 = 3;
const STREAM_MESSAGE_BATCH: u32 = 2;
const STREAM_BATCH: u32 = 1;
const BATCH_ENCODED: u32 = 2;
const ENCODED_PAYLOAD: u32 = 6;

/// For the generated client: an append whose body was put [`Aside`].
pub fn append(request: AppendRequest) -> Request<AppendRequest> {
    aside(messages::one(request, write_append), AppendRequest::default())
}

/// For the generated client: a session's requests, one each time that `next` is polled, and a
/// stream that stands for them.
pub fn append_stream<F, S>(mut next: F, nothing: S) -> Request<S>
where
    F: FnMut(&mut Context<'_>) -> Poll<Option<AppendStreamRequest>> + Send + Unpin + 'static,
{
    let body = Outgoing::new(move |context: &mut Context<'_>, pieces: &mut Pieces| {
        next(context).map(|request| {
            let request = request?;
            let begun = pieces.begin(request.encoded_len());
            Some(begun.map(|()| write_stream_request(request, pieces)))
        })
    });
    aside(Body::new(body), nothing)
}

fn aside<T>(body: Body, nothing: T) -> Request<T> {
    let mut request = Request::new(nothing);
    request.extensions_mut().insert(Aside::new(body));
    request
}

/// As the generated code would write it, but for the order of the fields, which protobuf leaves
/// open: what holds a payload comes last. So do the two below.
fn write_append(mut request: AppendRequest, pieces: &mut Pieces) {
    let batch = request.batch.take();
    request.encode_raw(pieces.short());
    write_batch(APPEND_BATCH, batch, pieces);
}

fn write_stream_request(request: AppendStreamRequest, pieces: &mut Pieces) {
    match request.message {
        Some(StreamMessage::Batch(mut message)) => {
            pieces.field(STREAM_MESSAGE_BATCH, message.encoded_len());
            let batch = message.batch.take();
            message.encode_raw(pieces.short());
            write_batch(STREAM_BATCH, batch, pieces);
        }
        message => AppendStreamRequest { message }.encode_raw(pieces.short()),
    }
}

fn write_batch(field: u32, batch: Option<Batch>, pieces: &mut Pieces) {
    let Some(batch) = batch else { return };
    pieces.field(field, batch.encoded_len());
    match batch.form {
        Some(Form::Encoded(mut encoded)) => {
            pieces.field(BATCH_ENCODED, encoded.encoded_len());
            let payload = std::mem::take(&mut encoded.payload);
            encoded.encode_raw(pieces.short());
            pieces.payload(ENCODED_PAYLOAD, payload);
        }
        form => Batch { form }.encode_raw(pieces.short()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::task::Waker;

    use super::*;
    use crate::log::v1::{AppendStreamBatch, AppendStreamInit, EncodedBatch, ProducerIdentity};
    use crate::messages::{LONG_BYTES, Messages};
    use crate::plain::PlainRecords;

    fn batches() -> Vec<Option<Batch>> {
        let encoded = |bytes: usize| EncodedBatch {
            version: 1,
            record_count: 3,
            compression: 2,
            crc32: 4,
            uncompressed_bytes: 5,
            payload: vec![6; bytes].into(),
        };
        let forms = [0, 1, LONG_BYTES - 1, LONG_BYTES, 200_000].map(encoded).map(Form::Encoded);
        let plain = Form::Records(PlainRecords::default());
        let forms = forms.into_iter().chain([plain]).map(Some).chain([None]);
        forms.map(|form| Some(Batch { form })).chain([None]).collect()
    }

    /// What a server makes of it.
    fn read<M: Message + Default>(body: Body) -> Vec<M> {
        let mut messages = Messages::new(body, 16 << 20);
        let mut context = Context::from_waker(Waker::noop());
        let mut next = || match messages.poll_message(&mut context) {
            Poll::Ready(message) => message.expect("it is a message"),
            Poll::Pending => unreachable!("the body is always ready"),
        };
        std::iter::from_fn(&mut next).collect()
    }

    fn body<T>(request: &Request<T>) -> Body {
        request.extensions().get().map(Aside::take).expect("it was put aside")
    }

    #[test]
    fn a_server_reads_the_append_that_was_made() {
        for batch in batches() {
            let request = AppendRequest {
                topic: "orders".to_owned(),
                partition: 300,
                batch,
                durability: 1,
                producer: Some(ProducerIdentity { producer_id: 1 << 40, epoch: 2 }),
                first_sequence: Some(0),
                condition: Some(Default::default()),
            };
            let sent = body(&append(request.clone()));
            assert_eq!(read::<AppendRequest>(sent), [request]);
        }
    }

    #[test]
    fn a_server_reads_the_stream_that_was_made() {
        let init = AppendStreamInit { topic: "orders".to_owned(), ..Default::default() };
        let batch = |batch| {
            let batch = AppendStreamBatch { batch, first_sequence: Some(7), expected_offset: None };
            Some(StreamMessage::Batch(batch))
        };
        let messages = [None, Some(StreamMessage::Init(init))];
        let messages = messages.into_iter().chain(batches().into_iter().map(batch));
        let requests = messages.map(|message| AppendStreamRequest { message });
        let requests: Vec<_> = requests.collect();
        let mut queue = VecDeque::from(requests.clone());
        let sent = body(&append_stream(move |_| Poll::Ready(queue.pop_front()), ()));
        assert_eq!(read::<AppendStreamRequest>(sent), requests);
    }
}
