//! Repeated `kill -9` during writes: acked records are stored once, with their bytes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use helix_client::{Client, FetchOptions, Position, ReadStart, SessionOptions};
use helix_proto::log::v1::Record;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::process;

const PARTITIONS: u32 = 4;
const RECORDS_PER_BATCH: u64 = 5;
const DEADLINE: Duration = Duration::from_secs(120);

/// Bytes of varying length that follow from the writer and the number of the record.
fn value(writer: u32, number: u64) -> Bytes {
    let mut rng = StdRng::seed_from_u64(u64::from(writer) << 40 | number);
    let length = 16 + rng.random_range(0..600);
    let mut bytes = Vec::with_capacity(length);
    bytes.extend_from_slice(&writer.to_le_bytes());
    bytes.extend_from_slice(&number.to_le_bytes());
    while bytes.len() < length {
        bytes.push(rng.random());
    }
    bytes.into()
}

fn read_number(value: &[u8]) -> (u32, u64) {
    let writer = u32::from_le_bytes(value[..4].try_into().unwrap());
    (writer, u64::from_le_bytes(value[4..12].try_into().unwrap()))
}

/// The first offset of each acked batch of one writer.
#[derive(Debug, Default)]
struct AckedBatches {
    sent: u64,
    acked: HashMap<u64, u64>,
}

/// Appends numbered records to the writer's own partition, pipelined, until stopped.
async fn write(
    client: Client,
    writer: u32,
    stop: Arc<AtomicBool>,
    acks: Arc<AtomicU64>,
) -> AckedBatches {
    let mut written = AckedBatches::default();
    let options = SessionOptions { in_flight_batches: 8, ..SessionOptions::default() };
    let session = client.session("default", writer, options).await.expect("the session opens");
    let mut waiting = std::collections::VecDeque::new();
    while !stop.load(Ordering::Relaxed) {
        let first = written.sent;
        let records: Vec<Record> = (first..first + RECORDS_PER_BATCH)
            .map(|number| Record { value: Some(value(writer, number)), ..Record::default() })
            .collect();
        let acked = session.append(helix_proto::batch::encode(&records)).await.expect("no refusal");
        written.sent += RECORDS_PER_BATCH;
        waiting.push_back((first, acked));
        if waiting.len() >= 8 {
            let (first, acked) = waiting.pop_front().unwrap();
            let ack = acked.await.expect("the retry succeeds");
            written.acked.insert(first, ack.first_offset.expect("a synced ack has an offset"));
            acks.fetch_add(1, Ordering::Relaxed);
        }
    }
    for (first, acked) in waiting {
        let ack = acked.await.expect("the retry succeeds");
        written.acked.insert(first, ack.first_offset.expect("a synced ack has an offset"));
    }
    written
}

/// Reads a partition from the start: offsets are dense, and each record is there once, in the
/// writer's order, with its bytes, and at the offset of its ack.
async fn check(client: &Client, writer: u32, written: &AckedBatches) {
    let options = FetchOptions::default();
    let mut offset = 0;
    let mut numbers = Vec::new();
    loop {
        let start = ReadStart::new("default", writer, Position::Offset(offset));
        let mut fetched =
            client.consumer().fetch(&[start], &options).await.expect("it is readable");
        let part = fetched.remove(0);
        for record in part.records {
            assert_eq!(record.offset, offset, "offsets are dense");
            let bytes = record.value.expect("records have values");
            let (by, number) = read_number(&bytes);
            assert_eq!(by, writer);
            assert_eq!(bytes, value(writer, number), "record {number} has its bytes");
            numbers.push(number);
            offset += 1;
        }
        if offset >= part.watermarks.high_watermark {
            break;
        }
    }
    // Every batch was acked in the end, so each number is there once and in order.
    let expected: Vec<u64> = (0..written.sent).collect();
    assert_eq!(numbers, expected, "partition {writer}: nothing missing, doubled or reordered");
    for (first, offset) in &written.acked {
        assert_eq!(numbers[usize::try_from(*offset).unwrap()], *first, "acked offset {offset}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acked_records_survive_fifty_kills_exactly_once() {
    let kills: u64 = std::env::var("HELIX_KILLS").ok().and_then(|k| k.parse().ok()).unwrap_or(50);
    let mut rng = StdRng::seed_from_u64(process::seed(20_261_121));
    let directory = tempfile::tempdir().unwrap();
    let address = process::free_address();
    let mut arguments = process::arguments(address, directory.path());
    // Small segments, so that kills also meet rolls, seals and checkpoints.
    arguments.push("--segment-bytes=33554432".to_owned());
    let mut server = process::start(&arguments);
    let stop = Arc::new(AtomicBool::new(false));
    let acks = Arc::new(AtomicU64::new(0));
    let writers: Vec<JoinHandle<AckedBatches>> = (0..PARTITIONS)
        .map(|writer| {
            let client = process::patient_client(address, u64::from(writer));
            tokio::spawn(write(client, writer, stop.clone(), acks.clone()))
        })
        .collect();
    for round in 0..kills {
        // Each round reaches an ack, so that every kill finds writes in progress.
        let before = acks.load(Ordering::Relaxed);
        let deadline = Instant::now() + DEADLINE;
        while acks.load(Ordering::Relaxed) == before {
            assert!(Instant::now() < deadline, "round {round}: no ack after the restart");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        tokio::time::sleep(Duration::from_micros(rng.random_range(0..60_000))).await;
        process::kill(server).await;
        server = process::start(&arguments);
    }
    stop.store(true, Ordering::Relaxed);
    let reader = process::patient_client(address, 99);
    for (writer, written) in writers.into_iter().enumerate() {
        let written = tokio::time::timeout(DEADLINE, written).await.expect("in time").unwrap();
        assert!(!written.acked.is_empty());
        check(&reader, u32::try_from(writer).unwrap(), &written).await;
    }
    println!("{kills} kills, {} batches acknowledged", acks.load(Ordering::Relaxed));
    process::kill(server).await;
}
