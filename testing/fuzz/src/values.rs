//! Targets for batches, entry headers and checkpoints: valid values round-trip, invalid ones are
//! rejected.

use bytes::Bytes;
use helix_proto::batch::{self, ScanError};
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
    if let Ok(list) = &decoded {
        assert_eq!(list.records.len(), expected as usize);
        let again = batch::decode(&batch::encode(&list.records)).unwrap();
        assert_eq!(again.records, list.records);
        // The plain form has the same records.
        let plain = PlainRecords::decode(payload.clone()).unwrap().into_payload();
        let plain = RecordList::decode(plain).unwrap();
        assert_eq!(plain.records, list.records);
    }
    if let Some(first) = payload.first().copied() {
        let mut flipped = payload.to_vec();
        flipped[0] = first ^ (1 << (expected % 8));
        let flipped = EncodedBatch { payload: flipped.into(), ..encoded };
        assert!(batch::decode(&flipped).is_err());
    }
    drop(EncodedBatch::decode(payload));
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
