//! Passes against a simple model: a map of latest values.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use helix_proto::batch;
use helix_proto::compaction::Codecs;
use helix_proto::compression::{BatchCodec, Compressor};
use helix_proto::log::v1::Record;
use helix_wal::{CleanMark, FilteredEntry, Payload, Placement};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::key_map::PassMemory;
use super::pass::{CleanPass, StoredBytes};
use super::{
    CleanerReport, DueRound, KeyMapMemory, PassError, choose_with_memory, fill_tables, with_ticks,
};
use crate::limits::{CLEANER_INTERVAL, CLEANER_RETRY_DELAY};
use crate::log::testing::seeded;
use crate::log::{
    BatchHead, CleanupState, Condition, FencingToken, Head, Partition, PartitionId,
    PartitionSettings,
};
use crate::raft::{decode_head, encode_head};

const STREAM: u64 = 7;

/// A record of the model: offset, key and value.
type ModelRecord = (u64, Option<u8>, Option<u32>);

/// A stored batch.
#[derive(Debug, Clone)]
struct Stored {
    placement: Placement,
    head: Bytes,
    payload: Payload,
}

impl Stored {
    fn bytes(&self) -> StoredBytes<'_> {
        StoredBytes { head: &self.head, payload: &self.payload }
    }

    /// Decodes the records as a reader does.
    fn records(&self) -> Vec<ModelRecord> {
        let Head::Batch(head) = decode_head(&self.head).unwrap() else { panic!() };
        let encoded = helix_proto::log::v1::EncodedBatch {
            version: head.version,
            record_count: head.record_count,
            compression: head.compression,
            crc32: self.payload.crc,
            uncompressed_bytes: head.uncompressed_bytes,
            payload: self.payload.bytes.clone(),
        };
        assert_eq!(head.payload_bytes as usize, self.payload.bytes.len());
        assert_eq!(head.offset_count(), self.placement.count);
        let mut hasher = crc32fast::Hasher::new_with_initial(self.payload.crc_seed);
        hasher.update(&self.payload.bytes);
        assert_eq!(hasher.finalize(), self.payload.crc);
        let records = batch::decode(&encoded).unwrap().records;
        let offsets: Vec<u64> = match &head.kept {
            Some(kept) => kept.deltas().iter().map(|delta| u64::from(*delta)).collect(),
            None => (0..u64::from(head.record_count)).collect(),
        };
        let number = |value: &Bytes| u32::from_le_bytes(value[..4].try_into().unwrap());
        let record = |(delta, record): (u64, Record)| {
            let key = record.key.map(|key| key[0]);
            (self.placement.first + delta, key, record.value.as_ref().map(number))
        };
        offsets.into_iter().zip(records).map(record).collect()
    }
}

/// Returns memory of a node for one pass.
fn memory(bytes: usize) -> Arc<PassMemory> {
    KeyMapMemory::new(bytes).begin_pass().now_or_never().unwrap().unwrap()
}

struct Table {
    rng: StdRng,
    appended: Vec<ModelRecord>,
    stored: Vec<Stored>,
    next: u64,
}

impl Table {
    fn append(&mut self, keys: u8) {
        let count = self.rng.random_range(1..12_u32);
        let mut records = Vec::new();
        for offset in self.next..self.next + u64::from(count) {
            let key = (!self.rng.random_bool(0.03)).then(|| self.rng.random_range(0..keys));
            let value = (!self.rng.random_bool(0.25)).then(|| self.rng.random::<u32>());
            self.appended.push((offset, key, value));
            records.push(Record {
                key: key.map(|key| vec![key; 1 + usize::from(key) % 40].into()),
                value: value.map(|value| value.to_le_bytes().repeat(20).into()),
                ..Record::default()
            });
        }
        let plain = batch::encode(&records);
        let codec = [None, Some(BatchCodec::Lz4), Some(BatchCodec::Zstd)];
        let codec = codec[self.rng.random_range(0..3)];
        let compress = |codec| Compressor::default().compress(codec, &plain, usize::MAX);
        let compressed = codec.and_then(compress);
        let uncompressed_bytes = compressed.as_ref().map_or(0, |batch| batch.uncompressed_bytes);
        let encoded = compressed.unwrap_or(plain);
        let head = BatchHead {
            partition: PartitionId(STREAM),
            record_count: count,
            version: encoded.version,
            compression: encoded.compression,
            payload_bytes: encoded.payload.len() as u32,
            uncompressed_bytes,
            proposed_us: 1,
            producer: None,
            condition: Condition::default(),
            kept: None,
        };
        self.stored.push(Stored {
            placement: Placement { stream: STREAM, first: self.next, count, time: self.next },
            head: encode_head(&Head::Batch(head)),
            payload: Payload {
                crc: encoded.crc32,
                crc_seed: batch::crc_seed(encoded.version, count, encoded.compression),
                bytes: encoded.payload,
            },
        });
        self.next += u64::from(count);
    }

    fn visible(&self) -> Vec<ModelRecord> {
        self.stored.iter().flat_map(Stored::records).collect()
    }

    /// Checks everything that a reader may rely on at any time. `clean` is where cleaning has got
    /// to, and tombstones below `forgotten` may be gone.
    fn check(&self, clean: u64, forgotten: u64) {
        let visible = self.visible();
        let appended: BTreeMap<u64, ModelRecord> =
            self.appended.iter().map(|record| (record.0, *record)).collect();
        assert!(visible.is_sorted_by(|a, b| a.0 < b.0), "offsets grow");
        let mut found: BTreeMap<u8, ModelRecord> = BTreeMap::new();
        for record in &visible {
            assert_eq!(appended.get(&record.0), Some(record), "a record never changes");
            if let Some(key) = record.1 {
                found.insert(key, *record);
            }
        }
        let latest: BTreeMap<u8, ModelRecord> =
            self.appended.iter().filter_map(|record| Some((record.1?, *record))).collect();
        for (key, record) in &latest {
            let is_forgotten = record.2.is_none() && record.0 < forgotten;
            match found.get(key) {
                Some(found) => assert_eq!(found, record, "the latest of key {key}"),
                None => assert!(is_forgotten, "the latest of key {key} is lost: {record:?}"),
            }
        }
        let keyless = |all: &[ModelRecord]| all.iter().filter(|record| record.1.is_none()).count();
        assert_eq!(keyless(&visible), keyless(&self.appended), "records without a key stay");
        // Below the clean offset nothing is left of a key that was deleted, so that the tombstone
        // may go. Records with a later value may be left, where a batch would not be smaller.
        let mut latest_below: BTreeMap<u8, ModelRecord> = BTreeMap::new();
        for record in self.appended.iter().filter(|record| record.0 < clean) {
            if let Some(key) = record.1 {
                latest_below.insert(key, *record);
            }
        }
        for record in visible.iter().filter(|record| record.0 < clean) {
            let Some(key) = record.1 else { continue };
            let latest = latest_below[&key];
            let is_deleted = latest.2.is_none() && record.0 < latest.0;
            assert!(!is_deleted, "{record:?} is older than the deletion {latest:?}");
        }
    }

    /// Checks that a pass has nothing left to do in any batch.
    fn check_settled(&self, pass: &CleanPass, codecs: &mut Codecs) {
        for stored in &self.stored {
            let filtered = pass.filter(&stored.placement, &stored.bytes(), codecs).unwrap();
            assert!(matches!(filtered, FilteredEntry::Unchanged), "{filtered:?}");
        }
    }

    fn bytes(&self) -> usize {
        self.stored.iter().map(|it| it.head.len() + it.payload.bytes.len()).sum()
    }
}

#[test]
fn passes_keep_the_latest_record_of_each_key() {
    let mut rng = seeded("passes_keep_the_latest_record_of_each_key");
    for _ in 0..60 {
        let keys = rng.random_range(1..60);
        let map_bytes = rng.random_range(1..3_000);
        let seed = rng.random();
        let mut table = Table {
            rng: rand::SeedableRng::seed_from_u64(seed),
            appended: Vec::new(),
            stored: Vec::new(),
            next: 0,
        };
        let mut codecs = Codecs::default();
        let (mut clean, mut forgotten) = (0, 0);
        for _ in 0..rng.random_range(1..6) {
            for _ in 0..rng.random_range(1..20) {
                table.append(keys);
            }
            // A round ends at a batch, as the log's segments do.
            let ends: Vec<u64> = table.stored.iter().map(|it| it.placement.first).collect();
            let upto = ends[rng.random_range(0..ends.len())].max(clean);
            // Only what an earlier round has cleaned.
            forgotten = rng.random_range(forgotten..=clean);
            let mut passes = 0;
            while clean < upto || passes == 0 {
                let mut pass = CleanPass::new(clean, forgotten, memory(map_bytes));
                for stored in &table.stored {
                    if stored.placement.first >= upto || pass.is_full() {
                        break;
                    }
                    pass.add(&stored.placement, &stored.bytes(), upto, &mut codecs).unwrap();
                }
                assert!(pass.upto() > clean || clean >= upto, "a pass makes progress");
                assert!(pass.upto() <= upto);
                // A crash may come between any two batches, and rewrites are repeated then.
                let mut order: Vec<usize> = (0..table.stored.len()).collect();
                rand::seq::SliceRandom::shuffle(&mut order[..], &mut rng);
                let mut removed = Vec::new();
                let bytes_before = table.bytes();
                for at in order {
                    let stored = table.stored[at].clone();
                    match pass.filter(&stored.placement, &stored.bytes(), &mut codecs).unwrap() {
                        FilteredEntry::Unchanged => {}
                        FilteredEntry::Removed => removed.push(at),
                        FilteredEntry::Replaced { head, payload } => {
                            table.stored[at] = Stored { head, payload, ..stored };
                        }
                    }
                }
                removed.sort_unstable();
                for at in removed.into_iter().rev() {
                    table.stored.remove(at);
                    table.check(clean, forgotten);
                }
                table.check(pass.upto().max(clean), forgotten);
                table.check_settled(&pass, &mut codecs);
                // Heads list the offsets that stay: a byte or a bit for each.
                let bytes_max = bytes_before + table.stored.len() * 24;
                assert!(table.bytes() <= bytes_max, "{} of {bytes_before}", table.bytes());
                clean = pass.upto().max(clean);
                passes += 1;
            }
        }
    }
}

#[test]
fn a_damaged_batch_is_refused_with_its_offset() {
    let mut table = Table {
        rng: seeded("a_damaged_batch_is_refused_with_its_offset"),
        appended: Vec::new(),
        stored: Vec::new(),
        next: 40,
    };
    table.append(3);
    let mut stored = table.stored.remove(0);
    stored.payload.crc ^= 1;
    let mut pass = CleanPass::new(0, 0, memory(1_000));
    let mut codecs = Codecs::default();
    let why = pass.add(&stored.placement, &stored.bytes(), 100, &mut codecs).unwrap_err();
    assert_eq!(why, "the batch at offset 40 cannot be compacted: checksum mismatch");
    let filtered = pass.filter(&stored.placement, &stored.bytes(), &mut codecs);
    assert_eq!(filtered.unwrap_err(), why);
}

/// A topic may have stored any bytes before it was compacted.
#[test]
fn a_batch_that_is_no_list_of_records_stays() {
    let mut table = Table {
        rng: seeded("a_batch_that_is_no_list_of_records_stays"),
        appended: Vec::new(),
        stored: Vec::new(),
        next: 40,
    };
    table.append(3);
    let mut stored = table.stored.remove(0);
    let Head::Batch(head) = decode_head(&stored.head).unwrap() else { panic!() };
    let bytes = Bytes::from_static(b"no records");
    let head = BatchHead {
        compression: 1,
        uncompressed_bytes: 0,
        payload_bytes: bytes.len() as u32,
        ..head
    };
    let crc_seed = batch::crc_seed(head.version, head.record_count, head.compression);
    let mut hasher = crc32fast::Hasher::new_with_initial(crc_seed);
    hasher.update(&bytes);
    stored.payload = Payload { bytes, crc: hasher.finalize(), crc_seed };
    stored.head = encode_head(&Head::Batch(head));
    let mut pass = CleanPass::new(0, 100, memory(1_000));
    let mut codecs = Codecs::default();
    pass.add(&stored.placement, &stored.bytes(), 100, &mut codecs).unwrap();
    assert_eq!(pass.upto(), stored.placement.first + u64::from(stored.placement.count));
    assert!(!pass.changes(&stored.placement, &stored.bytes(), &mut codecs).unwrap());
    let filtered = pass.filter(&stored.placement, &stored.bytes(), &mut codecs).unwrap();
    assert!(matches!(filtered, FilteredEntry::Unchanged), "{filtered:?}");
}

fn due(upto: u64, tombstones_below: u64, mark: CleanMark) -> DueRound {
    let round = CleanupState { upto, tombstones_below, ..CleanupState::default() };
    DueRound { partition: PartitionId(STREAM), log_start: 0, round, mark }
}

fn due_of(partition: u64) -> (DueRound, u64) {
    let partition = PartitionId(partition);
    (DueRound { partition, ..due(9, 0, CleanMark::default()) }, 9)
}

fn ids_of(chosen: &[(DueRound, u64)]) -> Vec<u64> {
    chosen.iter().map(|(due, _)| due.partition.0).collect()
}

#[test]
fn tombstones_go_only_in_a_pass_after_everything_older_went() {
    let mark = |upto, also| CleanMark { upto, also };
    // A rebuilt replica begins at 0, and first removes what the tombstones delete.
    assert_eq!(due(100, 60, mark(0, 0)).tombstones_below(), 0);
    assert_eq!(due(100, 60, mark(59, 0)).tombstones_below(), 0);
    assert_eq!(due(100, 60, mark(60, 0)).tombstones_below(), 60);
    assert!(!due(100, 60, mark(100, 0)).is_done());
    assert!(!due(100, 60, mark(99, 60)).is_done());
    assert!(due(100, 60, mark(100, 60)).is_done());
    // Records that retention has deleted need no pass.
    let trimmed = DueRound { log_start: 100, ..due(100, 60, mark(0, 0)) };
    assert!(trimmed.is_done());
    let trimmed = DueRound { log_start: 70, ..due(100, 60, mark(0, 0)) };
    assert_eq!((trimmed.clean(), trimmed.tombstones_below(), trimmed.is_done()), (70, 60, false));
}

#[test]
fn a_pass_ends_where_segments_or_the_round_do() {
    let mark = |upto, also| CleanMark { upto, also };
    let ends = |due: DueRound| [0, 40, 60, 90, u64::MAX].map(|cleanable| due.end(cleanable));
    let all = Some(100);
    assert_eq!(ends(due(100, 0, mark(0, 0))), [None, Some(40), Some(60), Some(90), all]);
    assert_eq!(ends(due(100, 0, mark(60, 0))), [None, None, None, Some(90), all]);
    // Tombstones need what is clean to be cleanable, but no new records.
    assert_eq!(ends(due(100, 60, mark(60, 0))), [None, None, Some(60), Some(90), all]);
    assert_eq!(ends(due(100, 60, mark(100, 0))), [None, None, None, None, all]);
    // The topic is no longer compacted, and this replica has done more than is still decided.
    assert_eq!(ends(due(60, 60, mark(90, 0))), [None, None, None, Some(90), Some(90)]);
    assert_eq!(ends(due(60, 60, mark(90, 60))), [None; 5]);
}

/// Otherwise a leader that knows of both changes would take the replica for clean.
#[test]
fn a_replica_reports_a_round_also_while_its_topic_is_not_compacted() {
    let partition = |cleanup| Partition {
        id: PartitionId(STREAM),
        topic_id: 1,
        number: 0,
        settings: Arc::new(PartitionSettings { cleanup, ..PartitionSettings::default() }),
        log_start: 0,
        next_offset: 200,
        last_time_us: 0,
        fencing_token: FencingToken::default(),
        cleanup: CleanupState { upto: 100, cleaned: 60, ..CleanupState::default() },
        is_sealed: false,
    };
    let mark = CleanMark { upto: 80, also: 0 };
    for (cleanup, is_due) in [(0, false), (2, true)] {
        assert_eq!(DueRound::of(&partition(cleanup), mark).is_some(), is_due);
        let reported = DueRound::of_last_round(&partition(cleanup), mark).unwrap();
        assert_eq!(reported.clean(), 80);
        let mark = CleanMark { upto: 100, also: 0 };
        assert_eq!(DueRound::of_last_round(&partition(cleanup), mark), None);
    }
}

#[tokio::test(start_paused = true)]
async fn partitions_that_failed_and_others_do_not_stop_each_other() {
    let report = CleanerReport::default();
    let start = Instant::now();
    let after = |delays: u32| start + delays * CLEANER_RETRY_DELAY;
    let chosen = |ids: &[u64], delays: u32| -> Vec<u64> {
        ids_of(&report.choose(ids.iter().map(|id| due_of(*id)), after(delays)))
    };
    assert_eq!(chosen(&[1, 2, 3], 0), [1, 2, 3]);
    report.end_turn(PartitionId(2));
    assert_eq!(chosen(&[1, 2, 3], 0), [3, 1, 2], "whatever the first two leave to do");
    report.end_turn(PartitionId(3));
    assert_eq!(chosen(&[1, 2, 3], 0), [1, 2, 3]);
    let fail = |ids: &[u64], is_transient, delays: u32| {
        let error = PassError { why: "why".to_owned(), is_transient };
        report.fail(ids.iter().map(|id| PartitionId(*id)), &error, after(delays));
    };
    fail(&[1, 2], false, 0);
    assert_eq!(chosen(&[1, 2, 3], 0), [3], "others go on at once");
    assert_eq!(chosen(&[1, 2], 0), [0; 0], "a retry waits");
    assert_eq!(chosen(&[1, 2, 3], 1), [1], "alone, although another partition is always due");
    fail(&[1], false, 1);
    assert_eq!(chosen(&[1, 2, 3], 1), [3]);
    assert_eq!(chosen(&[1, 2, 3], 2), [2], "in turn");
    fail(&[2], false, 2);
    assert_eq!(chosen(&[1, 2], 3), [1]);
    report.succeed(&[PartitionId(3)]);
    assert_eq!(chosen(&[1, 2], 2), [0; 0], "only a retry that succeeds is followed by the next");
    report.end_turn(PartitionId(1));
    report.succeed(&[PartitionId(1)]);
    assert_eq!(chosen(&[1, 2, 3], 2), [1, 3], "others go on in between");
    assert_eq!(chosen(&[2], 2), [2], "unless no other one is due");
    report.end_turn(PartitionId(1));
    assert_eq!(chosen(&[1, 2, 3], 2), [2]);
    let uncleanable = || report.uncleanable().into_iter().map(|(id, _)| id.0).collect::<Vec<_>>();
    assert_eq!(uncleanable(), [2]);
    // A failure that may pass is reported only once it has not.
    fail(&[1], true, 3);
    fail(&[1], true, 4);
    assert_eq!((chosen(&[1], 5), uncleanable()), (vec![1], vec![2]));
    fail(&[1], true, 5);
    assert_eq!(uncleanable(), [1, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_table_that_fails_does_not_stop_others_of_its_pass() {
    let report = CleanerReport::default();
    let tried = RefCell::new(Vec::new());
    let fill_all = |chosen: Vec<(DueRound, u64)>, bad: u64| {
        let (memory, report, tried) = (memory(1 << 20), &report, &tried);
        async move {
            let fill = |due: DueRound, _, pass| {
                tried.borrow_mut().push(due.partition.0);
                let error = || PassError { why: "why".to_owned(), is_transient: false };
                let is_bad = due.partition.0 == bad;
                ready(if is_bad { Err(error()) } else { Ok((pass, Vec::new())) })
            };
            let (filled, failure) = fill_tables(report, &memory, chosen, fill).await;
            let filled: Vec<u64> = filled.iter().map(|table| table.partition.0).collect();
            (filled, failure.is_some())
        }
    };
    let choose = || report.choose([1, 2, 3].map(due_of).into_iter(), Instant::now());
    assert_eq!(fill_all(choose(), 2).await, (vec![1, 3], true));
    assert_eq!(tried.take(), [1, 2, 3], "in the same pass");
    report.succeed(&[PartitionId(1), PartitionId(3)]);
    assert_eq!(ids_of(&choose()), [1, 3]);
    assert_eq!(fill_all(choose(), 2).await, (vec![1, 3], false));
    tokio::time::advance(CLEANER_RETRY_DELAY).await;
    assert_eq!(ids_of(&choose()), [2], "alone");
    assert_eq!(fill_all(choose(), 2).await, (vec![], true));
    assert_eq!(fill_all(choose(), 2).await, (vec![1, 3], false));
    tokio::time::advance(CLEANER_RETRY_DELAY).await;
    assert_eq!(fill_all(choose(), 0).await, (vec![2], false));
    report.succeed(&[PartitionId(2)]);
    assert_eq!(ids_of(&choose()), [1, 2, 3]);
}

#[tokio::test]
async fn tables_are_chosen_again_after_the_wait_for_memory() {
    let memory = KeyMapMemory::new(1 << 20);
    let mut held = Vec::new();
    while let Some(pass) = memory.begin_pass().now_or_never() {
        held.push(pass.unwrap());
    }
    let now = Cell::new(1);
    let mut choosing = Box::pin(choose_with_memory(&memory, || vec![due_of(now.get())]));
    assert!(choosing.as_mut().now_or_never().is_none(), "all memory is taken");
    now.set(2);
    held.clear();
    let (pass, chosen) = choosing.await.unwrap().unwrap();
    assert_eq!(ids_of(&chosen), [2]);
    drop(pass);
    // Without work there is no wait.
    while let Some(pass) = memory.begin_pass().now_or_never() {
        held.push(pass.unwrap());
    }
    let nothing = choose_with_memory(&memory, Vec::new).now_or_never();
    assert!(nothing.unwrap().unwrap().is_none());
}

/// A shard whose pass waits for memory begins segments early for its other rounds.
#[tokio::test(start_paused = true)]
async fn ticks_during_a_pass_are_not_lost() {
    let mut tick = tokio::time::interval(CLEANER_INTERVAL);
    tick.tick().await;
    let (ticked, ticks) = (Notify::new(), Cell::new(0));
    let on_tick = || {
        ticks.set(ticks.get() + 1);
        ticked.notify_one();
    };
    let pass = async {
        for _ in 0..3 {
            ticked.notified().await;
        }
        7
    };
    let begin = Instant::now();
    let passed = with_ticks(pass, &mut tick, on_tick);
    let passed = tokio::time::timeout(10 * CLEANER_INTERVAL, passed).await;
    assert_eq!((passed.ok(), ticks.get()), (Some(7), 3));
    assert!(begin.elapsed() < 4 * CLEANER_INTERVAL, "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn segments_are_sealed_early_after_a_wait_and_not_often() {
    let report = CleanerReport::default();
    let (start, delay) = (Instant::now(), Duration::from_secs(10));
    let second = Duration::from_secs(1);
    assert!(!report.has_waited(true, start, delay));
    assert!(!report.has_waited(true, start + 9 * second, delay));
    assert!(!report.has_waited(false, start + 10 * second, delay), "no round waits");
    assert!(!report.has_waited(true, start + 11 * second, delay));
    assert!(report.has_waited(true, start + 21 * second, delay));
    assert!(report.may_seal_early(start, delay));
    assert!(!report.may_seal_early(start + 9 * second, delay));
    assert!(report.may_seal_early(start + 10 * second, delay));
}

#[test]
fn only_changed_batches_are_dirty() {
    let mut table = Table {
        rng: seeded("only_changed_batches_are_dirty"),
        appended: Vec::new(),
        stored: Vec::new(),
        next: 0,
    };
    // Of so many keys most are written once or twice, so that some batches do not change.
    for _ in 0..40 {
        table.append(200);
    }
    let mut codecs = Codecs::default();
    for (upto, forgotten) in [(table.next, 0), (table.next / 2, 0), (table.next, table.next)] {
        let mut pass = CleanPass::new(0, forgotten, memory(1 << 20));
        let mut latest = BTreeMap::new();
        for stored in &table.stored {
            pass.add(&stored.placement, &stored.bytes(), upto, &mut codecs).unwrap();
        }
        for (offset, key, _) in table.appended.iter().filter(|record| record.0 < upto) {
            latest.insert(*key, *offset);
        }
        let goes = |(offset, key, value): &ModelRecord| {
            let is_replaced = latest.get(key).is_some_and(|latest| latest > offset);
            let is_forgotten = value.is_none() && *offset < forgotten;
            key.is_some() && *offset < upto && (is_replaced || is_forgotten)
        };
        let mut dirty = 0;
        for stored in &table.stored {
            let is_dirty = pass.changes(&stored.placement, &stored.bytes(), &mut codecs).unwrap();
            let filtered = pass.filter(&stored.placement, &stored.bytes(), &mut codecs).unwrap();
            assert_eq!(is_dirty, !matches!(filtered, FilteredEntry::Unchanged));
            assert!(!is_dirty || stored.records().iter().any(goes), "{:?}", stored.placement);
            dirty += usize::from(is_dirty);
        }
        assert!(dirty > 0 && dirty < table.stored.len(), "{dirty} batches below {upto}");
    }
}
