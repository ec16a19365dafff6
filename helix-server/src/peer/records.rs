//! Records that a snapshot speaks of, on the wire and where they are asked for.
//! What comes in is checked here, bit by bit: what passes can be stored.

use bytes::BufMut;
use helix_proto::raft::v1 as pb;
use helix_wal::{LiveEntry, Placement};
use openraft::async_runtime::WatchReceiver;
use tokio::time::sleep_until;

use super::hub::Served;
use super::limits::RECORDS_BYTES;
use super::throttle::Throttle;
use super::wire::{self, WireError};
use crate::log::Head;
use crate::raft::{RecordStore, decode_head};

pub(super) fn live_entry(live: LiveEntry) -> pb::LiveEntry {
    let LiveEntry { id, placement, head, payload } = live;
    let Placement { stream, first, count, time } = placement;
    let entry = wire::stored(helix_wal::Entry { id, stream, head, payload });
    let mut message = pb::LiveEntry {
        entry: Some(entry),
        partition: stream,
        first_offset: first,
        record_count: count,
        time_us: time,
        crc32: 0,
    };
    message.crc32 = place_crc(&message);
    message
}

fn place_crc(message: &pb::LiveEntry) -> u32 {
    let mut fixed = [0; 32];
    let mut fields = &mut fixed[..];
    fields.put_u32_le(message.entry.as_ref().map_or(0, |entry| entry.head_crc32));
    fields.put_u64_le(message.partition);
    fields.put_u64_le(message.first_offset);
    fields.put_u32_le(message.record_count);
    fields.put_u64_le(message.time_us);
    crc32fast::hash(&fixed)
}

pub(super) fn read_live_entry(message: pb::LiveEntry) -> Result<LiveEntry, WireError> {
    let crc = place_crc(&message);
    let entry = message.entry.ok_or(WireError::Missing { what: "a live entry's content" })?;
    let helix_wal::Entry { id, head, payload, .. } = wire::read_stored(entry)?;
    let index = id.index;
    if message.crc32 != crc {
        return Err(WireError::PlaceChecksum { index });
    }
    let placement = Placement {
        stream: message.partition,
        first: message.first_offset,
        count: message.record_count,
        time: message.time_us,
    };
    let decoded = decode_head(&head).map_err(|error| WireError::Head(error.to_string()))?;
    let Head::Batch(batch) = decoded else { return Err(WireError::Place { index }) };
    if batch.payload_bytes as usize != payload.bytes.len() {
        return Err(WireError::Payload { index });
    }
    let (partition, count) = (batch.partition.0, batch.record_count);
    if (partition, count) != (placement.stream, placement.count) || count == 0 {
        return Err(WireError::Place { index });
    }
    Ok(LiveEntry { id, placement, head, payload })
}

/// The next piece of what was asked for, at a rate that those who write can bear.
pub(super) async fn read(
    served: &Served,
    store: &RecordStore,
    throttle: &Throttle,
    request: pb::RecordsRequest,
) -> Result<pb::Records, String> {
    let pb::RecordsRequest { after, upto, bytes_max } = request;
    let applied = served.raft.data_metrics().borrow_watched().last_applied;
    let applied = applied.map_or(0, |id| id.index);
    if after > upto || upto > applied {
        return Err(format!("entries {after} to {upto} of a log that is applied up to {applied}"));
    }
    let bytes_max = usize::try_from(bytes_max).unwrap_or(usize::MAX).min(RECORDS_BYTES);
    while let Some(until) = throttle.wait_until() {
        sleep_until(until).await;
    }
    let wal = store.wal.clone();
    let read = move || {
        let live = wal.read_live(after, upto, bytes_max)?;
        let bytes_left = wal.live_bytes(live.upto, upto);
        Ok::<_, helix_wal::Error>((live, bytes_left))
    };
    let read = store.reads.cold(read).await.map_err(|error| error.to_string())?;
    let read = read.inspect_err(|error| store.reads.note(error));
    let (live, bytes_left) = read.map_err(|error| error.to_string())?;
    let bytes = live.entries.iter().map(|it| it.head.len() + it.payload.bytes.len()).sum::<usize>();
    throttle.spend(bytes as u64);
    let entries = live.entries.into_iter().map(live_entry).collect();
    Ok(pb::Records { entries, upto: live.upto, bytes_left })
}

/// What a piece takes in memory.
pub(super) fn bytes_of(records: &pb::Records) -> usize {
    let entries = records.entries.iter().filter_map(|live| live.entry.as_ref());
    entries.map(|entry| entry.head.len() + entry.payload.len()).sum()
}

#[cfg(test)]
pub(super) mod tests {
    use bytes::Bytes;
    use helix_proto::batch;

    use super::*;
    use crate::log::{BatchHead, Condition, PartitionId};

    /// A batch of three records, in partition 7.
    pub(crate) fn live_at(index: u64, first: u64) -> LiveEntry {
        let id = helix_wal::LogId { term: 2, index };
        let live = live();
        LiveEntry { id, placement: Placement { first, ..live.placement }, ..live }
    }

    /// The same with a payload of so many bytes.
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
            partition: PartitionId(7),
            record_count: 3,
            version: batch::BATCH_VERSION,
            compression: 0,
            payload_bytes: u32::try_from(payload.len()).unwrap_or(0),
            proposed_us: 5,
            producer: None,
            condition: Condition::default(),
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
    fn a_live_entry_crosses_the_wire_as_it_is_stored() {
        let (sent, taken) = (live(), read_live_entry(live_entry(live())).unwrap());
        assert_eq!((taken.id, taken.placement, &taken.head), (sent.id, sent.placement, &sent.head));
        assert_eq!(taken.payload.bytes, sent.payload.bytes);
        assert_eq!(
            (taken.payload.crc, taken.payload.crc_seed),
            (sent.payload.crc, sent.payload.crc_seed)
        );
    }

    #[test]
    fn what_was_changed_on_the_way_is_found() {
        let taken = |spoil: &dyn Fn(&mut pb::LiveEntry)| {
            let mut message = live_entry(live());
            spoil(&mut message);
            read_live_entry(message).unwrap_err()
        };
        let index = 11;
        let place = WireError::PlaceChecksum { index };
        assert_eq!(taken(&|m| m.first_offset += 1), place);
        assert_eq!(taken(&|m| m.partition += 1), place);
        assert_eq!(taken(&|m| m.record_count += 1), place);
        assert_eq!(taken(&|m| m.time_us += 1), place);
        let payload = Bytes::from_static(b"some recards");
        let spoiled = taken(&|m| m.entry.as_mut().unwrap().payload = payload.clone());
        assert_eq!(spoiled, WireError::PayloadChecksum { index });
        let spoiled = taken(&|m| m.entry.as_mut().unwrap().head = Bytes::from_static(b"head"));
        assert_eq!(spoiled, WireError::HeadChecksum { index });
        // With a checksum that fits, but of another batch.
        let other = taken(&|m| {
            m.partition = 8;
            m.crc32 = place_crc(m);
        });
        assert_eq!(other, WireError::Place { index });
        assert_eq!(
            taken(&|m| m.entry = None),
            WireError::Missing { what: "a live entry's content" }
        );
    }
}
