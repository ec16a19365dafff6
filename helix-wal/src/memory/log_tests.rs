//! Tests of the in-memory log, without a disk.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use super::*;
use crate::types::{Payload, Placement};

fn entry(term: u64, index: u64, bytes: usize) -> Entry {
    let bytes = Bytes::from(vec![index as u8; bytes]);
    let crc = crc32fast::hash(&bytes);
    let payload = Payload { bytes, crc, crc_seed: 0 };
    Entry { id: LogId { term, index }, stream: 1, head: Bytes::new(), payload }
}

fn push(log: &mut Log, term: u64, indexes: std::ops::Range<u64>) {
    for index in indexes {
        let entry = entry(term, index, 100);
        log.check_append(std::slice::from_ref(&entry)).unwrap();
        log.push(entry);
    }
}

fn written(log: &Log, indexes: std::ops::Range<u64>) -> Vec<WrittenEntry> {
    indexes
        .map(|index| WrittenEntry {
            index,
            serial: log.slot(index).unwrap().serial,
            offset: index as u32 * 200,
        })
        .collect()
}

fn at(first: u64) -> Option<Placement> {
    Some(Placement { stream: 1, first, count: 1, time: first })
}

fn indexes(log: &Log) -> Vec<u64> {
    log.slots.iter().map(|slot| slot.id.index).collect()
}

#[test]
fn entries_follow_each_other() {
    let mut log = Log::new(false, 1 << 20);
    push(&mut log, 1, 5..8);
    assert!(log.check_append(&[entry(1, 9, 1)]).is_err());
    assert!(log.check_append(&[entry(1, 7, 1)]).is_err());
    assert!(log.check_append(&[entry(1, 8, 1), entry(1, 10, 1)]).is_err());
    assert_eq!(log.state().last, Some(LogId { term: 1, index: 7 }));
    assert_eq!(log.state().synced, None);
}

#[test]
fn truncated_entries_do_not_become_synced() {
    let mut log = Log::new(false, 1 << 20);
    log.chain.insert(1, LiveSegment::new(None));
    push(&mut log, 1, 0..4);
    let old = written(&log, 0..4);
    log.truncate_after(Some(1)).unwrap();
    push(&mut log, 2, 2..3);
    log.on_written(1, &old);
    assert_eq!(log.state().synced, Some(LogId { term: 1, index: 1 }));
    assert!(!log.slot(2).unwrap().is_written());
    let new = written(&log, 2..3);
    log.on_written(1, &new);
    assert_eq!(log.state().synced, Some(LogId { term: 2, index: 2 }));
}

#[test]
fn a_placed_entry_is_never_truncated() {
    let mut log = Log::new(false, 1 << 20);
    push(&mut log, 1, 0..4);
    log.place(0, at(0)).unwrap();
    log.place(1, None).unwrap();
    assert!(log.truncate_after(Some(0)).is_err());
    assert!(log.truncate_after(None).is_err());
    log.truncate_after(Some(1)).unwrap();
    assert_eq!(log.state().last, Some(LogId { term: 1, index: 1 }));
}

#[test]
fn empty_log_accepts_any_first_index() {
    let mut log = Log::new(false, 1 << 20);
    push(&mut log, 1, 5..8);
    log.truncate_after(None).unwrap();
    assert_eq!(log.state(), LogState::default());
    push(&mut log, 1, 3..4);
    log.place(3, at(0)).unwrap();
}

#[test]
fn placements_must_be_in_order() {
    let mut log = Log::new(false, 1 << 20);
    push(&mut log, 1, 0..4);
    assert!(log.place(1, at(0)).is_err());
    log.place(0, at(0)).unwrap();
    assert!(log.place(0, at(0)).is_err());
    assert!(log.place(1, at(0)).is_err(), "position 0 is taken");
    log.place(1, at(1)).unwrap();
    assert!(matches!(log.place(4, at(2)), Err(Error::Beyond { .. })));
}

#[test]
fn evicts_oldest_written_payloads_first() {
    let mut log = Log::new(false, 0);
    log.chain.insert(1, LiveSegment::new(None));
    push(&mut log, 1, 0..4);
    let first = written(&log, 0..2);
    let gone = log.on_written(1, &first);
    assert_eq!(gone.len(), 2);
    let kept: Vec<_> = log.slots.iter().map(|slot| slot.payload.is_some()).collect();
    assert_eq!(kept, [false, false, true, true]);
    assert_eq!(log.slots.len(), 4, "their segment is not sealed");
}

#[test]
fn drops_slots_of_sealed_segments_with_their_payloads() {
    let mut log = Log::new(false, 1 << 20);
    log.chain.insert(1, LiveSegment::new(None));
    push(&mut log, 1, 0..4);
    let first = written(&log, 0..3);
    log.on_written(1, &first);
    assert!(log.drop_slots_upto(9, 9).is_empty(), "their segment is not sealed");
    log.chain.get_mut(&1).unwrap().sealed = true;
    let bytes = log.tail_bytes;
    assert_eq!(log.drop_slots_upto(1, 1).len(), 1);
    assert_eq!(log.drop_slots_upto(1, 9).len(), 1);
    assert_eq!((indexes(&log), log.evicted, log.tail_bytes), (vec![2, 3], 0, bytes / 2));
    assert_eq!(log.drop_slots_upto(9, 9).len(), 1, "an unwritten entry stays");
    assert_eq!(indexes(&log), [3]);
}

#[test]
fn finds_entries_around_a_gap_left_by_purge() {
    let mut log = Log::new(false, 1 << 20);
    log.chain.insert(1, LiveSegment::new(None));
    push(&mut log, 1, 0..3);
    for index in 0..2 {
        log.place(index, at(index)).unwrap();
    }
    log.check_checkpoint(LogId { term: 4, index: 99 }).unwrap();
    log.on_checkpoint(LogId { term: 4, index: 99 });
    log.purge(LogId { term: 4, index: 99 }).unwrap();
    assert_eq!(log.slot(2).unwrap().place, PlacementState::Void);
    assert_eq!(log.next(), Some(100));
    push(&mut log, 5, 100..103);
    assert_eq!(indexes(&log), [0, 1, 2, 100, 101, 102]);
    for index in [0, 1, 2, 100, 101, 102] {
        assert_eq!(log.slot(index).unwrap().id.index, index);
    }
    for index in [3, 50, 99, 103] {
        assert!(log.slot(index).is_none());
    }
    log.place(100, at(2)).unwrap();
    assert_eq!(log.state().purged, log.state().synced);
}

#[test]
fn memory_log_drops_purged_and_trimmed_entries() {
    let mut log = Log::new(true, 0);
    log.chain.insert(1, LiveSegment::new(None));
    push(&mut log, 1, 0..6);
    let all = written(&log, 0..6);
    log.on_written(1, &all);
    for index in 0..6 {
        log.place(index, at(index)).unwrap();
    }
    log.trim(1, 4);
    assert_eq!(log.slots.len(), 6, "the Raft log still has them");
    log.purge(LogId { term: 1, index: 2 }).unwrap();
    assert_eq!(indexes(&log), [3, 4, 5]);
    log.purge(LogId { term: 1, index: 5 }).unwrap();
    assert_eq!(indexes(&log), [4, 5]);
    log.drop_stream(1);
    assert!(log.slots.is_empty());
}

#[test]
fn drops_unwritable_queued_entries_unless_placed() {
    let mut log = Log::new(false, 1 << 20);
    log.chain.insert(1, LiveSegment::new(None));
    push(&mut log, 1, 0..4);
    let first = written(&log, 0..2);
    log.on_written(1, &first);
    assert!(log.drop_unwritten().0);
    assert_eq!(log.next(), Some(2));
    push(&mut log, 1, 2..4);
    for index in 0..3 {
        log.place(index, at(index)).unwrap();
    }
    assert!(!log.drop_unwritten().0);
}
