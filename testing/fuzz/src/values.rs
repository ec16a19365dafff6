//! Targets for batches, entry headers and checkpoints: valid values round-trip, invalid ones are
//! rejected.

use std::cell::RefCell;

use bytes::Bytes;
use helix_proto::batch::{self, ScanError};
use helix_proto::compaction::{
    BatchParts, Codecs, CompactedBatch, KeyedRecord, RecordFate, compact,
};
use helix_proto::compression::{BatchCodec, Compressor, UNCOMPRESSED_BYTES_MAX, with_decompressor};
use helix_proto::log::v1::{EncodedBatch, RecordList};
use helix_proto::plain::PlainRecords;
use helix_server::cluster::ClusterState;
use helix_server::log::{Head, ShardState};
use helix_server::raft::decode_head;
use prost::Message;

use crate::input::Input;

/// Target `batch`: an accepted payload has the stated number of records, each within its limit, and
/// decodes to the same records in both forms.
pub(crate) fn batch(input: &[u8]) {
    let mut input = Input(input);
    let expected = match input.u8() {
        0 => input.u64() as u32,
        small => u32::from(small),
    };
    let record_bytes_max = input.number().min(1 << 20) as usize;
    let payload = Bytes::copy_from_slice(input.0);
    let scanned = batch::scan(&payload, expected, record_bytes_max);
    let walked: Vec<_> = batch::walk(&payload, record_bytes_max).collect();
    let whole = walked.iter().all(Result::is_ok);
    assert_eq!(scanned.is_ok(), whole && walked.len() == expected as usize && expected > 0);
    if let Err(ScanError::TooMany { byte, .. }) = scanned {
        assert!(byte < payload.len());
    }
    let mut end = 0;
    for record in walked.into_iter().flatten() {
        assert!(record.start > end && record.len() <= record_bytes_max, "{record:?} after {end}");
        end = record.end;
    }
    let encoded = batch::from_payload(expected, payload.clone());
    assert!(batch::is_intact(&encoded));
    let decoded = batch::decode(&encoded);
    // A record that passes the check of an append decodes in every consumer.
    if batch::scan_records(&payload, expected, record_bytes_max).is_ok() {
        assert!(scanned.is_ok() && decoded.is_ok());
    }
    if let Ok(list) = &decoded {
        assert_eq!(list.records.len(), expected as usize);
        let again = batch::decode(&batch::encode(&list.records)).unwrap();
        assert_eq!(again.records, list.records);
        // The plain form has the same records.
        let plain = PlainRecords::decode(payload.clone()).unwrap().into_payload();
        let plain = RecordList::decode(plain).unwrap();
        assert_eq!(plain.records, list.records);
    }
    compacted(&encoded, decoded.ok());
    if let Some(first) = payload.first().copied() {
        let mut flipped = payload.to_vec();
        flipped[0] = first ^ (1 << (expected % 8));
        let flipped = EncodedBatch { payload: flipped.into(), ..encoded };
        assert!(batch::decode(&flipped).is_err());
    }
    drop(EncodedBatch::decode(payload));
}

/// Compaction by key keeps any part of the records of a valid batch as they are, with their keys.
/// A batch that it accepts decodes, and the result is a valid batch.
fn compacted(encoded: &EncodedBatch, decoded: Option<RecordList>) {
    let parts = BatchParts::from(encoded.clone());
    let wanted = |number: u32| encoded.crc32.rotate_left(number) & 1 != 0;
    let mut keys = Vec::new();
    let may_stay = encoded.crc32.is_multiple_of(3);
    let goes = if may_stay { RecordFate::MayGo } else { RecordFate::MustGo };
    let judge = |record: KeyedRecord<'_>| {
        keys.push((record.key.map(<[u8]>::to_vec), record.has_value));
        if wanted(record.number) { RecordFate::Stays } else { goes }
    };
    let payload_max = encoded.payload.len();
    let result = compact(&parts, &mut Codecs::default(), judge, |_| payload_max);
    let (Ok(result), Some(RecordList { records })) = (result, decoded) else { return };
    let expected =
        records.iter().map(|it| (it.key.as_ref().map(|it| it.to_vec()), it.value.is_some()));
    assert!(keys.into_iter().eq(expected));
    let kept: Vec<_> =
        (0..).zip(&records).filter(|(number, _)| wanted(*number)).map(|(_, it)| it).collect();
    match result {
        CompactedBatch::Unchanged => assert!(may_stay || kept.len() == records.len()),
        CompactedBatch::Empty => assert!(kept.is_empty()),
        CompactedBatch::Smaller(smaller, numbers) => {
            assert!(!may_stay || smaller.payload.len() <= payload_max);
            let batch = EncodedBatch {
                version: smaller.version,
                record_count: smaller.record_count,
                compression: smaller.compression,
                crc32: smaller.crc,
                uncompressed_bytes: smaller.uncompressed_bytes,
                payload: smaller.payload,
            };
            let found = batch::decode(&batch).unwrap().records;
            assert!(numbers.len() == found.len() && found.iter().eq(kept));
        }
    }
}

thread_local! {
    static COMPRESSOR: RefCell<Compressor> = RefCell::default();
}

/// Target `compressed`: a payload is rejected, or decodes to exactly the stated size. The input is
/// the payload, its contents behind a valid header, or bytes to compress and then to damage.
pub(crate) fn compressed(input: &[u8]) {
    let mut input = Input(input);
    let codec = input.pick(&BatchCodec::ALL);
    let form = input.below(3);
    let flips: Vec<_> = (0..input.below(4)).map(|_| (input.u16(), input.u8())).collect();
    let stated = input.number();
    let content = input.0;
    let (mut payload, stated) = match form {
        0 => (content.to_vec(), stated as usize),
        1 => (with_header(codec, stated as u32, content), stated as u32 as usize),
        _ => {
            let payload = COMPRESSOR.with_borrow_mut(|compressor| {
                compressor.compress_bytes(codec, content).map(<[u8]>::to_vec)
            });
            (payload.unwrap_or_default(), content.len())
        }
    };
    let is_whole = form == 2 && flips.is_empty() && !content.is_empty();
    for (index, bit) in flips {
        let index = usize::from(index) % payload.len().max(1);
        if let Some(byte) = payload.get_mut(index) {
            *byte ^= 1 << (bit % 8);
        }
    }
    let decoded = with_decompressor(|it| it.decompress_to_bytes(codec, &payload, stated)).ok();
    if let Some(decoded) = &decoded {
        assert!(decoded.len() == stated && stated <= UNCOMPRESSED_BYTES_MAX);
    }
    assert!(!is_whole || decoded.as_deref() == Some(content));
    // Damaged payloads do not disturb the reused context and buffer.
    with_decompressor(|it| {
        let again = it.decompress(codec, &payload, stated).ok();
        assert_eq!(again, decoded.as_deref());
    });
}

/// Returns contents behind a header that states `bytes`.
fn with_header(codec: BatchCodec, bytes: u32, content: &[u8]) -> Vec<u8> {
    let size = bytes.to_le_bytes();
    match codec {
        BatchCodec::Lz4 => [&size[..], content].concat(),
        // Single segment, four bytes of content size.
        BatchCodec::Zstd => [&[0x28, 0xB5, 0x2F, 0xFD, 0xA0], &size[..], content].concat(),
    }
}

/// Target `values`: entry headers and checkpoints, from disk or from another node.
pub(crate) fn stored(input: &[u8]) {
    let mut input = Input(input);
    match input.below(4) {
        0 => {
            if let Ok(head) = Head::decode(input.0) {
                // Protobuf encodings are not unique, so compares with our own encoding.
                let encoded = head.encode();
                let again = Head::decode(&encoded).unwrap_or_else(|e| panic!("{head}: {e}"));
                assert_eq!(again.encode(), encoded);
                let _ = head.stream();
            }
        }
        1 => drop(decode_head(input.0)),
        2 => {
            if let Ok(state) = ShardState::decode(input.0) {
                let encoded = state.encode();
                let again = ShardState::decode(&encoded).unwrap_or_else(|e| panic!("{e}"));
                assert_eq!(again.encode(), encoded);
            }
        }
        _ => {
            if let Ok(state) = ClusterState::decode(input.0) {
                let encoded = state.encode();
                let again = ClusterState::decode(&encoded).unwrap_or_else(|e| panic!("{e}"));
                assert_eq!(again.encode(), encoded);
            }
        }
    }
}
