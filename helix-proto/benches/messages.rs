//! Protobuf serialization of the messages that carry records, by the bytes of their batch.
//!
//! `encode` writes into a reused buffer, and `decode` shares the payload with its input. `memcpy`
//! copies the bytes of the encoded message.

#![allow(clippy::unwrap_used)]

use std::fmt::Debug;
use std::hint::black_box;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use helix_proto::batch;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{
    AppendRequest, Batch, EncodedBatch, FetchResponse, PartitionRecords, ProducerIdentity, Record,
    StoredBatch, Watermarks,
};
use prost::Message;

const SIZES: [(&str, usize); 5] =
    [("64B", 64), ("512B", 512), ("4KiB", 4 << 10), ("64KiB", 64 << 10), ("1MiB", 1 << 20)];

/// Largest record of a batch.
const RECORD_BYTES: usize = 1000;

/// Returns a batch whose values have these bytes together.
fn encoded_batch(bytes: usize) -> EncodedBatch {
    let values = vec![0; bytes];
    let record =
        |value: &[u8]| Record { value: Some(Bytes::copy_from_slice(value)), ..Record::default() };
    batch::encode(&values.chunks(RECORD_BYTES).map(record).collect::<Vec<_>>())
}

fn append_request(batch: EncodedBatch) -> AppendRequest {
    AppendRequest {
        topic: "orders".to_owned(),
        partition: 3,
        batch: Some(Batch { form: Some(Form::Encoded(batch)) }),
        producer: Some(ProducerIdentity { producer_id: 1 << 40, epoch: 2 }),
        first_sequence: Some(1_000_000),
        topic_id: 7,
        ..AppendRequest::default()
    }
}

fn fetch_response(batch: EncodedBatch) -> FetchResponse {
    let records = u64::from(batch.record_count);
    let stored = StoredBatch {
        first_offset: 1_000_000,
        append_time: Some(prost_types::Timestamp { seconds: 1_790_000_000, nanos: 5 }),
        batch: Some(batch),
        ..StoredBatch::default()
    };
    let partition = PartitionRecords {
        topic: "orders".to_owned(),
        partition: 3,
        batches: vec![stored],
        next_offset: 1_000_000 + records,
        watermarks: Some(Watermarks::default()),
        start_offset: 1_000_000,
        topic_id: 7,
        ..PartitionRecords::default()
    };
    FetchResponse { partitions: vec![partition] }
}

fn of_message<M>(criterion: &mut Criterion, name: &str, size: &str, message: &M)
where
    M: Message + Default + PartialEq + Debug,
{
    let mut group = criterion.benchmark_group(format!("message/{name}/{size}"));
    let encoded = Bytes::from(message.encode_to_vec());
    assert_eq!(&M::decode(encoded.clone()).unwrap(), message);
    group.throughput(Throughput::Bytes(encoded.len() as u64));
    let mut copy = vec![0; encoded.len()];
    group.bench_function("memcpy", |bench| {
        bench.iter(|| black_box(&mut copy[..]).copy_from_slice(black_box(&encoded)));
    });
    let mut buffer = BytesMut::with_capacity(encoded.len());
    group.bench_function("encode", |bench| {
        bench.iter(|| {
            buffer.clear();
            black_box(message).encode(&mut buffer).unwrap();
            black_box(buffer.len())
        });
    });
    group.bench_function("decode", |bench| {
        bench.iter(|| M::decode(black_box(&encoded).clone()).unwrap());
    });
    group.finish();
}

fn messages(criterion: &mut Criterion) {
    for (size, bytes) in SIZES {
        let batch = encoded_batch(bytes);
        of_message(criterion, "append-request", size, &append_request(batch.clone()));
        of_message(criterion, "fetch-response", size, &fetch_response(batch));
    }
}

criterion_group! {
    name = benches;
    // 30 measurements: together they take half a minute.
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600));
    targets = messages
}
criterion_main!(benches);
