//! Serializations of records and record lists that a protobuf library may make, in both forms of a
//! batch and for both kinds of readers.

use bytes::Bytes;
use helix_proto::batch;
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::log::v1::{AppendRequest, EncodedBatch, ErrorReason, FetchRequest, Record};
use prost::Message;

use super::wire;
use crate::support::{TestServer, as_batch, from_offset, reason};

const APPEND: &str = "/helix.log.v1.ProduceService/Append";

/// An unknown field with the number 15: a varint.
const UNKNOWN: [u8; 2] = [0x78, 1];

/// Returns a field with a length, behind a tag of any bytes.
fn field(tag: &[u8], value: &[u8]) -> Vec<u8> {
    let mut bytes = tag.to_vec();
    prost::encoding::encode_varint(value.len() as u64, &mut bytes);
    bytes.extend_from_slice(value);
    bytes
}

/// Serializations of one record, and whether the contract accepts them.
fn record_forms(value: &[u8]) -> Vec<(&'static str, Vec<u8>, bool)> {
    let key = field(&[0x0A], b"key");
    let long_length = [&[0x12, 0x80 | u8::try_from(value.len()).unwrap(), 0][..], value].concat();
    let value = field(&[0x12], value);
    vec![
        ("canonical", [&key[..], &value].concat(), true),
        ("unknown field first", [&UNKNOWN, &key[..], &value].concat(), true),
        ("unknown field last", [&key[..], &value, &UNKNOWN].concat(), true),
        ("other order", [&value[..], &key].concat(), true),
        ("key twice", [&field(&[0x0A], b"first")[..], &key, &value].concat(), true),
        ("longer tag", [&[0x8A, 0], &key[1..], &value].concat(), true),
        ("longer length", [&key[..], &long_length].concat(), true),
        // Field 15 as a group: a start and an end.
        ("group", [&key[..], &value, &[0x7B, 0x7C]].concat(), false),
        ("key of another type", [&[0x08, 1], &value[..]].concat(), false),
    ]
}

/// Serializations of a list of one record. For each: whether an encoded batch may have it.
fn list_forms(record: &[u8]) -> Vec<(&'static str, Vec<u8>, bool)> {
    let canonical = field(&[0x0A], record);
    let len = u8::try_from(record.len()).unwrap();
    assert!(len < 0x80);
    let with_length = |length: &[u8]| [&[0x0A], length, record].concat();
    vec![
        ("canonical", canonical.clone(), true),
        ("length of five bytes", with_length(&[0x80 | len, 0x80, 0x80, 0x80, 0]), true),
        ("length of six bytes", with_length(&[0x80 | len, 0x80, 0x80, 0x80, 0x80, 0]), false),
        ("longer tag", [&[0x8A, 0], &canonical[1..]].concat(), false),
        ("unknown field first", [&UNKNOWN, &canonical[..]].concat(), false),
        ("unknown field last", [&canonical[..], &UNKNOWN].concat(), false),
    ]
}

/// The forms in which a list can be sent, and whether it is sent encoded.
fn messages(list: &[u8]) -> Vec<(&'static str, Bytes, bool)> {
    // The field `batch` of AppendRequest, and `records` of Batch.
    let plain = field(&[0x1A], &field(&[0x0A], list));
    let topic = AppendRequest { topic: "default".to_owned(), ..AppendRequest::default() };
    let plain = [topic.encode_to_vec(), plain].concat().into();
    let encoded = |batch: EncodedBatch| -> Bytes {
        AppendRequest { batch: as_batch(batch), ..topic.clone() }.encode_to_vec().into()
    };
    let uncompressed = batch::from_payload(1, list.to_vec().into());
    let compressed = |codec: BatchCodec| {
        let mut compressor = Compressor::default();
        let payload = compressor.compress_bytes(codec, list).unwrap().to_vec();
        let compression = codec.to_wire().into();
        encoded(EncodedBatch {
            compression,
            crc32: batch::crc(batch::BATCH_VERSION, 1, compression, &payload),
            uncompressed_bytes: list.len().try_into().unwrap(),
            payload: payload.into(),
            ..uncompressed.clone()
        })
    };
    vec![
        ("plain", plain, false),
        ("encoded", encoded(uncompressed.clone()), true),
        ("lz4", compressed(BatchCodec::Lz4), true),
        ("zstd", compressed(BatchCodec::Zstd), true),
    ]
}

async fn end(server: &TestServer) -> u64 {
    server.fetch_one(fetch(0, false)).await.watermarks.unwrap().high_watermark
}

fn fetch(offset: u64, accept_encoded: bool) -> FetchRequest {
    let partitions = vec![from_offset(0, offset)];
    FetchRequest { partitions, accept_encoded, ..FetchRequest::default() }
}

/// Both kinds of readers get the record.
async fn expect_record(server: &TestServer, offset: u64, bytes: &[u8], value: &[u8], what: &str) {
    let read = server.fetch_one(fetch(offset, false)).await;
    let stored = read.records[0].record.clone().unwrap();
    let expected = Record {
        key: Some(Bytes::from_static(b"key")),
        value: Some(Bytes::copy_from_slice(value)),
        ..Record::default()
    };
    assert_eq!(stored, expected, "{what}");
    let read = server.fetch_one(fetch(offset, true)).await;
    let stored = read.batches[0].batch.as_ref().unwrap();
    let payload = batch::uncompressed_payload(stored).unwrap();
    assert!(payload.ends_with(bytes), "{what}: a record's bytes are those that were sent");
    let listed = batch::decode(stored).unwrap();
    assert_eq!(listed.records, [expected], "{what}");
}

#[tokio::test]
async fn every_form_of_a_record_is_taken_and_one_of_a_list() {
    let server = TestServer::in_memory().await;
    let mut next = 0;
    let value = [b'v'; 60];
    let mut cases = Vec::new();
    for (form, record, is_valid) in record_forms(&value) {
        cases.push((form, "canonical", field(&[0x0A], &record), record, is_valid, is_valid));
    }
    let canonical = record_forms(&value).remove(0).1;
    for (form, list, is_payload) in list_forms(&canonical) {
        cases.push(("canonical", form, list, canonical.clone(), true, is_payload));
    }
    for (record_form, list_form, list, record, as_plain, as_encoded) in cases {
        for (sent, message, is_encoded) in messages(&list) {
            let what = format!("record {record_form}, list {list_form}, {sent}");
            let outcome = wire::call(&server.channel, APPEND, message).await;
            if if is_encoded { as_encoded } else { as_plain } {
                outcome.unwrap_or_else(|status| panic!("{what}: {status:?}"));
                expect_record(&server, next, &record, &value, &what).await;
                next += 1;
            } else {
                let status = outcome.expect_err(&what);
                assert_eq!(reason(&status), ErrorReason::CorruptBatch, "{what}: {status:?}");
            }
            assert_eq!(end(&server).await, next, "{what}");
        }
    }
}
