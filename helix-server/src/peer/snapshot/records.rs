//! Live records on the wire, and the source's answer to a request for them.
//! The receiver checks every bit here: an entry that passes can be stored.

use std::ops::RangeInclusive;

use bytes::BufMut;
use helix_proto::raft::v1 as pb;
use helix_wal::{LiveEntry, Placement, ReadMode, Wal};
use openraft::Raft;
use openraft::async_runtime::WatchReceiver;

use crate::log::Head;
use crate::peer::limits::RECORDS_BYTES;
use crate::peer::throttle::Throttle;
use crate::peer::wire::{self, WireError};
use crate::raft::{
    DiskReads, RecordStore, StateMachine, TypeConfig, decode_head, from_wal, to_wal,
};

/// Encodes a live entry.
pub(super) fn live_entry(live: LiveEntry) -> pb::LiveEntry {
    let LiveEntry { id, placement, head, payload } = live;
    let Placement { stream, first, count, time } = placement;
    let entry = wire::wal_entry(helix_wal::Entry { id, stream, head, payload });
    let mut message = pb::LiveEntry {
        entry: Some(entry),
        partition: stream,
        first_offset: first,
        record_count: count,
        time_us: time,
        crc32: 0,
    };
    message.crc32 = placement_crc(&message);
    message
}

/// Returns the CRC-32 of the placement and of the entry's own checksum.
fn placement_crc(message: &pb::LiveEntry) -> u32 {
    let mut fixed = [0; 32];
    let mut fields = &mut fixed[..];
    fields.put_u32_le(message.entry.as_ref().map_or(0, |entry| entry.head_crc32));
    fields.put_u64_le(message.partition);
    fields.put_u64_le(message.first_offset);
    fields.put_u32_le(message.record_count);
    fields.put_u64_le(message.time_us);
    crc32fast::hash(&fixed)
}

/// Decodes a live entry. Checks its checksums, and its placement against its head.
pub(in crate::peer) fn read_live_entry(message: pb::LiveEntry) -> Result<LiveEntry, WireError> {
    let crc = placement_crc(&message);
    let entry = message.entry.ok_or(WireError::Missing { what: "the entry of a live entry" })?;
    let helix_wal::Entry { id, head, payload, .. } = wire::read_wal_entry(entry)?;
    let index = id.index;
    if message.crc32 != crc {
        return Err(WireError::PlacementChecksum { index });
    }
    let placement = Placement {
        stream: message.partition,
        first: message.first_offset,
        count: message.record_count,
        time: message.time_us,
    };
    let decoded = decode_head(&head).map_err(|error| WireError::Head(error.to_string()))?;
    let Head::Batch(batch) = decoded else { return Err(WireError::Placement { index }) };
    if batch.payload_bytes as usize != payload.bytes.len() {
        return Err(WireError::Payload { index });
    }
    let (partition, count) = (batch.partition.0, batch.offset_count());
    if (partition, count) != (placement.stream, placement.count) || count == 0 {
        return Err(WireError::Placement { index });
    }
    Ok(LiveEntry { id, placement, head, payload })
}

/// Reads the next live entries of a request.
/// The rate of copies limits it, so that appends keep their share of the disk.
pub(in crate::peer) async fn read(
    raft: &Raft<TypeConfig, StateMachine>,
    store: &RecordStore,
    throttle: &Throttle,
    request: pb::RecordsRequest,
) -> Result<pb::Records, String> {
    let pb::RecordsRequest { after, upto, .. } = request;
    check_applied(raft, after, upto)?;
    read_live(&store.wal, &store.reads, throttle, request).await
}

/// Reads the next live entries of a request. All of the range was applied.
pub(in crate::peer) async fn read_live(
    wal: &Wal,
    reads: &DiskReads,
    throttle: &Throttle,
    request: pb::RecordsRequest,
) -> Result<pb::Records, String> {
    read_live_of(wal, reads, throttle, request, |_| true).await
}

/// Like [`read_live`], for the streams that `wants` selects.
pub(in crate::peer) async fn read_live_of(
    wal: &Wal,
    reads: &DiskReads,
    throttle: &Throttle,
    request: pb::RecordsRequest,
    wants: impl Fn(u64) -> bool + Send + 'static,
) -> Result<pb::Records, String> {
    let pb::RecordsRequest { after, upto, bytes_max, .. } = request;
    let bytes_max = usize::try_from(bytes_max).unwrap_or(usize::MAX).min(RECORDS_BYTES);
    throttle.wait().await;
    let wal = wal.clone();
    let read = move || {
        let live = wal.read_live_of(after, upto, bytes_max, &wants)?;
        let bytes_left = wal.live_bytes(live.upto, upto);
        // After the read: what was removed before it had left the log by then.
        Ok::<_, helix_wal::Error>((live, bytes_left, wal.cleaned_upto()))
    };
    let read = reads.cold(read).await.map_err(|error| error.to_string())?;
    let read = read.inspect_err(|error| reads.note(error));
    let (live, bytes_left, compacted_upto) = read.map_err(|error| error.to_string())?;
    let bytes = live.entries.iter().map(|it| it.head.len() + it.payload.bytes.len()).sum::<usize>();
    throttle.spend(bytes as u64);
    let entries = live.entries.into_iter().map(live_entry).collect();
    Ok(pb::Records { entries, upto: live.upto, bytes_left, compacted_upto })
}

fn check_applied(
    raft: &Raft<TypeConfig, StateMachine>,
    after: u64,
    upto: u64,
) -> Result<(), String> {
    let applied = raft.data_metrics().borrow_watched().last_applied;
    let applied = applied.map_or(0, |id| id.index);
    if after > upto || upto > applied {
        return Err(format!("entries {after}..={upto} are not all applied; the last is {applied}"));
    }
    Ok(())
}

/// Reads entries for a repair in place, also those without live records. Leaves out what this
/// replica no longer has.
///
/// Entries need not be applied: a replica that was restarted without a leader does not know what is
/// committed. Term and index, which the requester checks, stand for the content of an entry.
pub(in crate::peer) async fn read_all(
    wal: &Wal,
    reads: &DiskReads,
    throttle: &Throttle,
    request: pb::RecordsRequest,
) -> Result<pb::Records, String> {
    let pb::RecordsRequest { after, upto, bytes_max, from_first, .. } = request;
    let first = if from_first { 0 } else { after.saturating_add(1) };
    let last = wal.state().last.ok_or_else(|| "the log is empty".to_owned())?.index;
    if first > upto.min(last) {
        return Err(format!("entries {first}..={upto} are not in the log, which ends at {last}"));
    }
    let upto = upto.min(last);
    let bytes_max = usize::try_from(bytes_max).unwrap_or(usize::MAX).min(RECORDS_BYTES);
    throttle.wait().await;
    let wal = wal.clone();
    let read = move || {
        let kept_from = wal.first_index();
        if first >= kept_from {
            let found = wal.read(first..upto + 1, bytes_max, ReadMode::Direct)?;
            let entries = found.unwrap_or_default();
            let last = entries.last().map_or(upto, |entry| entry.id.index);
            return Ok((entries, last));
        }
        // Entries that have left the Raft log are kept only for their records.
        let upto = upto.min(kept_from - 1);
        let live = wal.read_live(after, upto, bytes_max)?;
        let stream = |live: LiveEntry| {
            let LiveEntry { id, placement, head, payload } = live;
            helix_wal::Entry { id, stream: placement.stream, head, payload }
        };
        Ok::<_, helix_wal::Error>((live.entries.into_iter().map(stream).collect(), live.upto))
    };
    let read = reads.cold(read).await.map_err(|error| error.to_string())?;
    let read = read.inspect_err(|error| reads.note(error));
    let (entries, upto) = read.map_err(|error| error.to_string())?;
    let bytes = entries.iter().map(|it| it.head.len() + it.payload.bytes.len()).sum::<usize>();
    throttle.spend(bytes as u64);
    let entry =
        |entry| pb::LiveEntry { entry: Some(wire::wal_entry(entry)), ..pb::LiveEntry::default() };
    let entries = entries.into_iter().map(entry).collect();
    Ok(pb::Records { entries, upto, ..pb::Records::default() })
}

/// Returns the entries of a response for a repair in place. Checks their checksums, and that they
/// are in the requested range. Their streams follow from their heads.
pub(in crate::peer) fn read_entries(
    records: pb::Records,
    range: &RangeInclusive<u64>,
) -> Result<Vec<helix_wal::Entry>, String> {
    if !range.contains(&records.upto) {
        return Err(format!("response ends at entry {}, requested {range:?}", records.upto));
    }
    let mut entries = Vec::with_capacity(records.entries.len());
    for live in records.entries {
        let entry = live.entry.ok_or("an entry is missing")?;
        let entry = wire::read_wal_entry(entry).map_err(|error| error.to_string())?;
        let index = entry.id.index;
        if !range.contains(&index) {
            return Err(format!("entry {index} is out of the range {range:?}"));
        }
        // The log's own encoding of the same entry, with its stream.
        let entry = from_wal(entry).map_err(|error| error.to_string())?;
        entries.push(to_wal(&entry));
    }
    Ok(entries)
}

/// Returns the bytes of heads and payloads.
pub(super) fn records_bytes(records: &pb::Records) -> usize {
    let entries = records.entries.iter().filter_map(|live| live.entry.as_ref());
    entries.map(|entry| entry.head.len() + entry.payload.len()).sum()
}

#[cfg(test)]
pub(super) mod tests {
    use bytes::Bytes;
    use helix_proto::batch;

    use super::*;
    use crate::log::BatchHead;
    use crate::log::testing::batch_head;

    /// Returns a batch of three records in partition 7.
    pub(crate) fn live_at(index: u64, first: u64) -> LiveEntry {
        let id = helix_wal::LogId { term: 2, index };
        let live = live();
        LiveEntry { id, placement: Placement { first, ..live.placement }, ..live }
    }

    /// Returns the same batch with a payload of `payload_bytes`.
    pub(crate) fn live_with(index: u64, first: u64, payload_bytes: usize) -> LiveEntry {
        let payload = vec![u8::try_from(index % 251).unwrap_or(0); payload_bytes];
        let live = live_of(payload.into());
        let id = helix_wal::LogId { term: 2, index };
        LiveEntry { id, placement: Placement { first, ..live.placement }, ..live }
    }

    fn live() -> LiveEntry {
        live_of(Bytes::from_static(b"some records"))
    }

    fn live_of(payload: Bytes) -> LiveEntry {
        let head = BatchHead {
            version: batch::BATCH_VERSION,
            compression: 0,
            payload_bytes: u32::try_from(payload.len()).unwrap_or(0),
            proposed_us: 5,
            ..batch_head(7, 3)
        };
        let head = [&[2], &Head::Batch(head).encode()[..]].concat().into();
        let payload = helix_wal::Payload {
            crc: batch::crc(batch::BATCH_VERSION, 3, 0, &payload),
            crc_seed: batch::crc_seed(batch::BATCH_VERSION, 3, 0),
            bytes: payload,
        };
        let placement = Placement { stream: 7, first: 40, count: 3, time: 9 };
        LiveEntry { id: helix_wal::LogId { term: 2, index: 11 }, placement, head, payload }
    }

    #[test]
    fn live_entry_round_trips() {
        let (sent, received) = (live(), read_live_entry(live_entry(live())).unwrap());
        assert_eq!(
            (received.id, received.placement, &received.head),
            (sent.id, sent.placement, &sent.head)
        );
        assert_eq!(received.payload.bytes, sent.payload.bytes);
        assert_eq!(
            (received.payload.crc, received.payload.crc_seed),
            (sent.payload.crc, sent.payload.crc_seed)
        );
    }

    #[test]
    fn rejects_changed_live_entry() {
        let read_corrupted = |corrupt: &dyn Fn(&mut pb::LiveEntry)| {
            let mut message = live_entry(live());
            corrupt(&mut message);
            read_live_entry(message).unwrap_err()
        };
        let index = 11;
        let placement = WireError::PlacementChecksum { index };
        assert_eq!(read_corrupted(&|m| m.first_offset += 1), placement);
        assert_eq!(read_corrupted(&|m| m.partition += 1), placement);
        assert_eq!(read_corrupted(&|m| m.record_count += 1), placement);
        assert_eq!(read_corrupted(&|m| m.time_us += 1), placement);
        let payload = Bytes::from_static(b"some recards");
        let error = read_corrupted(&|m| m.entry.as_mut().unwrap().payload = payload.clone());
        assert_eq!(error, WireError::PayloadChecksum { index });
        let error =
            read_corrupted(&|m| m.entry.as_mut().unwrap().head = Bytes::from_static(b"head"));
        assert_eq!(error, WireError::HeadChecksum { index });
        // A valid checksum, but the placement of another batch.
        let other = read_corrupted(&|m| {
            m.partition = 8;
            m.crc32 = placement_crc(m);
        });
        assert_eq!(other, WireError::Placement { index });
        assert_eq!(
            read_corrupted(&|m| m.entry = None),
            WireError::Missing { what: "the entry of a live entry" }
        );
    }
}
