//! Answers to reads as the bytes of a body, without a copy of the batches in them. For a server
//! that brings back what was put [`Aside`]; see [`Answered`](crate::framing::Answered).

use std::task::{Context, Poll};

use prost::Message;
use tonic::body::Body;
use tonic::{Response, Status};

use crate::framing::Aside;
use crate::log::v1::subscribe_response::Message as Event;
use crate::log::v1::{FetchResponse, PartitionRecords, StoredBatch, SubscribeResponse};
use crate::messages::{self, LONG_BYTES, Outgoing, Pieces};

/// Numbers of the fields around a payload, from the outside in.
const FETCH_PARTITIONS: u32 = 1;
const SUBSCRIBE_DATA: u32 = 1;
const PARTITION_BATCHES: u32 = 4;
const STORED_BATCH: u32 = 4;
const ENCODED_PAYLOAD: u32 = 6;

/// An answer whose body is put [`Aside`]. As it is where nothing in it is long.
pub fn fetch(answer: FetchResponse) -> Response<FetchResponse> {
    let mut batches = answer.partitions.iter().flat_map(|records| &records.batches);
    let payload = |stored: &StoredBatch| stored.batch.as_ref().map_or(0, |it| it.payload.len());
    if !batches.any(|stored| payload(stored) >= LONG_BYTES) {
        return Response::new(answer);
    }
    let write = |answer: FetchResponse, pieces: &mut Pieces| {
        for records in answer.partitions {
            write_records(FETCH_PARTITIONS, records, pieces);
        }
    };
    aside(messages::one(answer, write), FetchResponse::default())
}

/// A subscription's answers put [`Aside`], one each time that `next` is polled, and a stream that
/// stands for them.
pub fn subscribe<F, S>(mut next: F, nothing: S) -> Response<S>
where
    F: FnMut(&mut Context<'_>) -> Next + Send + Unpin + 'static,
{
    let body = Outgoing::new(move |context: &mut Context<'_>, pieces: &mut Pieces| {
        next(context).map(|answer| Some(answer?.and_then(|answer| write_event(answer, pieces))))
    });
    aside(Body::new(body), nothing)
}

/// What a subscription gives: an answer, an error, or its end.
type Next = Poll<Option<Result<SubscribeResponse, Status>>>;

fn aside<T>(body: Body, nothing: T) -> Response<T> {
    let mut answer = Response::new(nothing);
    answer.extensions_mut().insert(Aside::new(body));
    answer
}

fn write_event(answer: SubscribeResponse, pieces: &mut Pieces) -> Result<(), Status> {
    pieces.begin(answer.encoded_len())?;
    match answer.message {
        Some(Event::Data(records)) => write_records(SUBSCRIBE_DATA, records, pieces),
        message => SubscribeResponse { message }.encode_raw(pieces.short()),
    }
    Ok(())
}

/// As the generated code would write it, but for the order of the fields, which protobuf leaves
/// open: what holds a payload, and the payload itself, come last.
fn write_records(field: u32, mut records: PartitionRecords, pieces: &mut Pieces) {
    pieces.field(field, records.encoded_len());
    let batches = std::mem::take(&mut records.batches);
    records.encode_raw(pieces.short());
    for mut stored in batches {
        pieces.field(PARTITION_BATCHES, stored.encoded_len());
        let batch = stored.batch.take();
        stored.encode_raw(pieces.short());
        if let Some(mut batch) = batch {
            pieces.field(STORED_BATCH, batch.encoded_len());
            let payload = std::mem::take(&mut batch.payload);
            batch.encode_raw(pieces.short());
            pieces.payload(ENCODED_PAYLOAD, payload);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::task::Waker;

    use super::*;
    use crate::log::v1::{CaughtUp, EncodedBatch, Record, StoredRecord, Watermarks};
    use crate::messages::Messages;

    fn batches(payloads: &[usize]) -> Vec<StoredBatch> {
        let stored = |(place, bytes): (usize, &usize)| StoredBatch {
            first_offset: 1 << (7 * place),
            append_time: Some(prost_types::Timestamp { seconds: 1, nanos: 2 }),
            offset_deltas: vec![0, 300],
            batch: Some(EncodedBatch {
                version: 1,
                record_count: 3,
                compression: 2,
                crc32: 4,
                uncompressed_bytes: 5,
                payload: vec![place as u8; *bytes].into(),
            }),
        };
        let nothing = StoredBatch { first_offset: 9, ..StoredBatch::default() };
        payloads.iter().enumerate().map(stored).chain([nothing]).collect()
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
        }
    }

    /// What a client makes of it, without what tonic sends behind it.
    fn read<M: Message + Default, T>(answer: &Response<T>) -> Vec<Result<M, tonic::Code>> {
        let body = answer.extensions().get().map(Aside::take).expect("it was put aside");
        let mut messages = Messages::new(body, 16 << 20);
        let mut context = Context::from_waker(Waker::noop());
        let mut next = || match messages.poll_message(&mut context) {
            Poll::Ready(message) => message.map_err(|status| status.code()).transpose(),
            Poll::Pending => None,
        };
        std::iter::from_fn(&mut next).collect()
    }

    #[test]
    fn a_client_reads_the_fetch_that_was_answered() {
        for payloads in [&[LONG_BYTES][..], &[1, 200_000, 0, LONG_BYTES - 1, LONG_BYTES]] {
            let partitions = vec![records(1, payloads), records(2, &[]), records(3, &[100_000])];
            let answer = FetchResponse { partitions };
            let sent = fetch(answer.clone());
            assert_eq!(sent.get_ref(), &FetchResponse::default());
            assert_eq!(read(&sent), [Ok(answer)]);
        }
    }

    #[test]
    fn an_answer_without_anything_long_is_tonics() {
        let answer = FetchResponse { partitions: vec![records(1, &[0, 1, LONG_BYTES - 1])] };
        let sent = fetch(answer.clone());
        assert!(sent.extensions().get::<Aside>().is_none());
        assert_eq!(sent.into_inner(), answer);
    }

    #[test]
    fn a_client_reads_the_subscription_that_was_answered_and_how_it_ends() {
        let events = [
            None,
            Some(Event::CaughtUp(CaughtUp { topic: "orders".to_owned(), ..Default::default() })),
            Some(Event::Data(records(1, &[]))),
            Some(Event::Data(records(2, &[10, 100_000, LONG_BYTES, 5]))),
        ];
        let answers: Vec<_> = events.map(|message| SubscribeResponse { message }).into();
        let mut queue: VecDeque<_> = answers.iter().cloned().map(Ok).collect();
        queue.push_back(Err(Status::unavailable("enough")));
        let sent = subscribe(move |_| Poll::Ready(queue.pop_front()), ());
        let mut expected: Vec<_> = answers.into_iter().map(Ok).collect();
        let mut found = read(&sent);
        found.truncate(expected.len() + 1);
        expected.push(Err(tonic::Code::Unavailable));
        assert_eq!(found, expected);
    }
}
