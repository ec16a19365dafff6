//! Append requests as detached bodies, without a copy of the batches in them.

use std::task::{Context, Poll};

use helix_proto::log::v1::append_stream_request::Message as StreamMessage;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{AppendRequest, AppendStreamRequest, Batch};
use prost::Message;
use tonic::Request;
use tonic::body::Body;

use crate::detached::DetachedBody;
use crate::encode::{ChunkedBody, ChunkedWriter, single_message};

// Field numbers on the path to a payload.
const APPEND_BATCH: u32 = 3;
const STREAM_MESSAGE_BATCH: u32 = 2;
const STREAM_BATCH: u32 = 1;
const BATCH_ENCODED: u32 = 2;
const ENCODED_PAYLOAD: u32 = 6;

/// Returns an append for the generated client, with its body detached.
pub fn append(request: AppendRequest) -> Request<AppendRequest> {
    detached(single_message(request, write_append), AppendRequest::default())
}

/// Returns the requests of a session for the generated client, with their body detached.
///
/// Each poll of `next` yields a request. tonic gets the stream `substitute` instead of them.
pub fn append_stream<F, S>(mut next: F, substitute: S) -> Request<S>
where
    F: FnMut(&mut Context<'_>) -> Poll<Option<AppendStreamRequest>> + Send + Unpin + 'static,
{
    let body = ChunkedBody::new(move |context: &mut Context<'_>, writer: &mut ChunkedWriter| {
        next(context).map(|request| {
            let request = request?;
            let begun = writer.begin_message(request.encoded_len());
            Some(begun.map(|()| write_stream_request(request, writer)))
        })
    });
    detached(Body::new(body), substitute)
}

fn detached<T>(body: Body, substitute: T) -> Request<T> {
    let mut request = Request::new(substitute);
    request.extensions_mut().insert(DetachedBody::new(body));
    request
}

// The functions below write what the generated code would, but for the order of fields, which
// protobuf leaves open: the field with the payload comes last.

fn write_append(mut request: AppendRequest, writer: &mut ChunkedWriter) {
    let batch = request.batch.take();
    request.encode_raw(writer.buffer());
    write_batch(APPEND_BATCH, batch, writer);
}

fn write_stream_request(request: AppendStreamRequest, writer: &mut ChunkedWriter) {
    match request.message {
        Some(StreamMessage::Batch(mut message)) => {
            writer.begin_field(STREAM_MESSAGE_BATCH, message.encoded_len());
            let batch = message.batch.take();
            message.encode_raw(writer.buffer());
            write_batch(STREAM_BATCH, batch, writer);
        }
        message => AppendStreamRequest { message }.encode_raw(writer.buffer()),
    }
}

fn write_batch(field: u32, batch: Option<Batch>, writer: &mut ChunkedWriter) {
    let Some(batch) = batch else { return };
    writer.begin_field(field, batch.encoded_len());
    match batch.form {
        Some(Form::Encoded(mut encoded)) => {
            writer.begin_field(BATCH_ENCODED, encoded.encoded_len());
            let payload = std::mem::take(&mut encoded.payload);
            encoded.encode_raw(writer.buffer());
            writer.bytes_field(ENCODED_PAYLOAD, payload);
        }
        form => Batch { form }.encode_raw(writer.buffer()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::task::Waker;

    use helix_proto::log::v1::{
        AppendStreamBatch, AppendStreamInit, EncodedBatch, ProducerIdentity,
    };
    use helix_proto::plain::PlainRecords;

    use super::*;
    use crate::decode::MessageStream;
    use crate::encode::ZERO_COPY_BYTES_MIN;

    fn batches() -> Vec<Option<Batch>> {
        let encoded = |bytes: usize| EncodedBatch {
            version: 1,
            record_count: 3,
            compression: 2,
            crc32: 4,
            uncompressed_bytes: 5,
            payload: vec![6; bytes].into(),
        };
        let sizes = [0, 1, ZERO_COPY_BYTES_MIN - 1, ZERO_COPY_BYTES_MIN, 200_000];
        let forms = sizes.map(encoded).map(Form::Encoded);
        let plain = Form::Records(PlainRecords::default());
        let forms = forms.into_iter().chain([plain]).map(Some).chain([None]);
        forms.map(|form| Some(Batch { form })).chain([None]).collect()
    }

    /// Reads the messages as a server does.
    fn read<M: Message + Default>(body: Body) -> Vec<M> {
        let mut messages = MessageStream::new(body, 16 << 20);
        let mut context = Context::from_waker(Waker::noop());
        let mut next = || match messages.poll_message(&mut context) {
            Poll::Ready(message) => message.expect("a valid message"),
            Poll::Pending => unreachable!("the body is always ready"),
        };
        std::iter::from_fn(&mut next).collect()
    }

    fn body<T>(request: &Request<T>) -> Body {
        request.extensions().get().map(DetachedBody::take).expect("a detached body")
    }

    #[test]
    fn append_reads_back_as_written() {
        for batch in batches() {
            let request = AppendRequest {
                topic: "orders".to_owned(),
                partition: 300,
                batch,
                durability: 1,
                producer: Some(ProducerIdentity { producer_id: 1 << 40, epoch: 2 }),
                first_sequence: Some(0),
                condition: Some(Default::default()),
                topic_id: 0,
                report_stages: true,
            };
            let sent = body(&append(request.clone()));
            assert_eq!(read::<AppendRequest>(sent), [request]);
        }
    }

    #[test]
    fn append_stream_reads_back_as_written() {
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
