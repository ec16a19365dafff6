//! Read responses as detached bodies, without a copy of the batches in them.
//!
//! The server must attach them again: see [`ResponseBody`](crate::ResponseBody).

use std::task::{Context, Poll};

use bytes::Bytes;
use helix_proto::log::v1::subscribe_response::Message as Event;
use helix_proto::log::v1::{FetchResponse, PartitionRecords, StoredBatch, SubscribeResponse};
use prost::Message;
use tonic::body::Body;
use tonic::{Response, Status};

use crate::detached::DetachedBody;
use crate::encode::{ChunkedBody, ChunkedWriter, ZERO_COPY_BYTES_MIN, single_message};

// Field numbers on the path to a payload, outermost first.
const FETCH_PARTITIONS: u32 = 1;
const SUBSCRIBE_DATA: u32 = 1;
const PARTITION_BATCHES: u32 = 4;
const STORED_BATCH: u32 = 4;
const ENCODED_PAYLOAD: u32 = 6;

/// Returns a fetch response with its body detached, or unchanged if no payload in it is long.
pub fn fetch(response: FetchResponse) -> Response<FetchResponse> {
    let mut batches = response.partitions.iter().flat_map(|records| &records.batches);
    let payload = |stored: &StoredBatch| stored.batch.as_ref().map_or(0, |it| it.payload.len());
    if !batches.any(|stored| payload(stored) >= ZERO_COPY_BYTES_MIN) {
        return Response::new(response);
    }
    let write = |response: FetchResponse, writer: &mut ChunkedWriter| {
        for records in response.partitions {
            write_records(FETCH_PARTITIONS, records, writer);
        }
    };
    detached(single_message(response, write), FetchResponse::default())
}

/// Returns the responses of a subscription with their body detached.
///
/// Each poll of `next` yields a response. tonic gets the stream `substitute` instead of them.
pub fn subscribe<F, S>(mut next: F, substitute: S) -> Response<S>
where
    F: FnMut(&mut Context<'_>) -> PolledEvent + Send + Unpin + 'static,
{
    let body = ChunkedBody::new(move |context: &mut Context<'_>, writer: &mut ChunkedWriter| {
        let next = next(context);
        next.map(|response| Some(response?.and_then(|response| write_event(response, writer))))
    });
    detached(Body::new(body), substitute)
}

/// Returns a stream of responses that are encoded already, with its body detached.
///
/// Each poll of `next` yields a message. tonic gets the stream `substitute` instead of them.
pub fn encoded<F, S>(mut next: F, substitute: S) -> Response<S>
where
    F: FnMut(&mut Context<'_>) -> Poll<Option<Result<Bytes, Status>>> + Send + Unpin + 'static,
{
    let write = |message: Bytes, writer: &mut ChunkedWriter| {
        writer.begin_message(message.len())?;
        writer.push(message);
        Ok(())
    };
    let body = ChunkedBody::new(move |context: &mut Context<'_>, writer: &mut ChunkedWriter| {
        next(context).map(|message| Some(message?.and_then(|message| write(message, writer))))
    });
    detached(Body::new(body), substitute)
}

/// A subscription's next response, error, or end.
type PolledEvent = Poll<Option<Result<SubscribeResponse, Status>>>;

fn detached<T>(body: Body, substitute: T) -> Response<T> {
    let mut response = Response::new(substitute);
    response.extensions_mut().insert(DetachedBody::new(body));
    response
}

fn write_event(response: SubscribeResponse, writer: &mut ChunkedWriter) -> Result<(), Status> {
    writer.begin_message(response.encoded_len())?;
    match response.message {
        Some(Event::Data(records)) => write_records(SUBSCRIBE_DATA, records, writer),
        message => SubscribeResponse { message }.encode_raw(writer.buffer()),
    }
    Ok(())
}

/// Writes what the generated code would, but for the order of fields, which protobuf leaves open.
///
/// Fields with a payload, and the payload itself, come last.
fn write_records(field: u32, mut records: PartitionRecords, writer: &mut ChunkedWriter) {
    writer.begin_field(field, records.encoded_len());
    let batches = std::mem::take(&mut records.batches);
    records.encode_raw(writer.buffer());
    for mut stored in batches {
        writer.begin_field(PARTITION_BATCHES, stored.encoded_len());
        let batch = stored.batch.take();
        stored.encode_raw(writer.buffer());
        if let Some(mut batch) = batch {
            writer.begin_field(STORED_BATCH, batch.encoded_len());
            let payload = std::mem::take(&mut batch.payload);
            batch.encode_raw(writer.buffer());
            writer.bytes_field(ENCODED_PAYLOAD, payload);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::task::Waker;

    use helix_proto::log::v1::{CaughtUp, EncodedBatch, Record, StoredRecord, Watermarks};

    use super::*;
    use crate::decode::MessageStream;

    fn batches(payloads: &[usize]) -> Vec<StoredBatch> {
        let stored = |(index, bytes): (usize, &usize)| StoredBatch {
            first_offset: 1 << (7 * index),
            append_time: Some(prost_types::Timestamp { seconds: 1, nanos: 2 }),
            offset_deltas: vec![0, 300],
            batch: Some(EncodedBatch {
                version: 1,
                record_count: 3,
                compression: 2,
                crc32: 4,
                uncompressed_bytes: 5,
                payload: vec![index as u8; *bytes].into(),
            }),
        };
        let empty = StoredBatch { first_offset: 9, ..StoredBatch::default() };
        payloads.iter().enumerate().map(stored).chain([empty]).collect()
    }

    fn records(partition: u32, payloads: &[usize]) -> PartitionRecords {
        let record = Record { key: Some("key".into()), ..Record::default() };
        PartitionRecords {
            topic: "orders".to_owned(),
            partition,
            records: vec![StoredRecord { offset: 8, append_time: None, record: Some(record) }],
            batches: batches(payloads),
            next_offset: 1 << 40,
            watermarks: Some(Watermarks { log_start_offset: 1, high_watermark: 2 }),
            start_offset: 7,
            topic_id: 0,
        }
    }

    /// Reads the messages as a client does, without the trailers that tonic sends.
    fn read<M: Message + Default, T>(response: &Response<T>) -> Vec<Result<M, tonic::Code>> {
        let body = response.extensions().get().map(DetachedBody::take).expect("a detached body");
        let mut messages = MessageStream::new(body, 16 << 20);
        let mut context = Context::from_waker(Waker::noop());
        let mut next = || match messages.poll_message(&mut context) {
            Poll::Ready(message) => message.map_err(|status| status.code()).transpose(),
            Poll::Pending => None,
        };
        std::iter::from_fn(&mut next).collect()
    }

    #[test]
    fn fetch_reads_back_as_written() {
        let long = ZERO_COPY_BYTES_MIN;
        for payloads in [&[long][..], &[1, 200_000, 0, long - 1, long]] {
            let partitions = vec![records(1, payloads), records(2, &[]), records(3, &[100_000])];
            let response = FetchResponse { partitions };
            let sent = fetch(response.clone());
            assert_eq!(sent.get_ref(), &FetchResponse::default());
            assert_eq!(read(&sent), [Ok(response)]);
        }
    }

    #[test]
    fn response_without_long_payloads_is_left_to_tonic() {
        let partitions = vec![records(1, &[0, 1, ZERO_COPY_BYTES_MIN - 1])];
        let response = FetchResponse { partitions };
        let sent = fetch(response.clone());
        assert!(sent.extensions().get::<DetachedBody>().is_none());
        assert_eq!(sent.into_inner(), response);
    }

    #[test]
    fn encoded_messages_are_sent_as_they_are() {
        let responses = [0, 1, 100_000].map(|bytes| FetchResponse {
            partitions: if bytes == 0 { Vec::new() } else { vec![records(1, &[bytes])] },
        });
        let encoded: Vec<Bytes> =
            responses.iter().map(|response| response.encode_to_vec().into()).collect();
        let mut queue: VecDeque<_> = encoded.into_iter().map(Ok).collect();
        queue.push_back(Err(Status::unavailable("enough")));
        let sent = super::encoded(move |_| Poll::Ready(queue.pop_front()), ());
        let mut found = read(&sent);
        found.truncate(responses.len() + 1);
        let ended = Err(tonic::Code::Unavailable);
        let expected: Vec<_> = responses.into_iter().map(Ok).chain([ended]).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn subscription_and_its_error_read_back_as_written() {
        let events = [
            None,
            Some(Event::CaughtUp(CaughtUp { topic: "orders".to_owned(), ..Default::default() })),
            Some(Event::Data(records(1, &[]))),
            Some(Event::Data(records(2, &[10, 100_000, ZERO_COPY_BYTES_MIN, 5]))),
        ];
        let responses: Vec<_> = events.map(|message| SubscribeResponse { message }).into();
        let mut queue: VecDeque<_> = responses.iter().cloned().map(Ok).collect();
        queue.push_back(Err(Status::unavailable("enough")));
        let sent = subscribe(move |_| Poll::Ready(queue.pop_front()), ());
        let mut expected: Vec<_> = responses.into_iter().map(Ok).collect();
        let mut found = read(&sent);
        found.truncate(expected.len() + 1);
        expected.push(Err(tonic::Code::Unavailable));
        assert_eq!(found, expected);
    }
}
