//! Tests of subscribers and their ledger.

use std::collections::VecDeque;
use std::time::SystemTime;

use helix_client::ConsumedRecord;
use helix_proto::log::v1::Watermarks;
use tokio::time::{sleep, timeout};

use super::*;
use crate::stamp::STAMP_BYTES;

const RUN: u64 = 7;

/// Delivers records of these runs and sequences, then heartbeats without end.
struct RecordsThenHeartbeats {
    records: VecDeque<(u64, u64)>,
    next_offset: u64,
}

fn deliver(records: impl IntoIterator<Item = (u64, u64)>) -> RecordsThenHeartbeats {
    RecordsThenHeartbeats { records: records.into_iter().collect(), next_offset: 0 }
}

impl Deliveries for RecordsThenHeartbeats {
    async fn next(&mut self) -> Option<Result<Event<Records>, Error>> {
        sleep(Duration::from_millis(1)).await;
        let Some((run, sequence)) = self.records.pop_front() else {
            return Some(Ok(Event::Heartbeat(Vec::new())));
        };
        let record = ConsumedRecord {
            offset: self.next_offset,
            append_time: SystemTime::UNIX_EPOCH,
            key: None,
            value: Some(Stamper::new(1, run, 0, STAMP_BYTES).value(sequence, 0)),
            headers: Vec::new(),
            event_time: None,
        };
        self.next_offset += 1;
        Some(Ok(Event::Data(Records {
            topic: String::new(),
            partition: 0,
            records: vec![record],
            next_offset: self.next_offset,
            watermarks: Watermarks::default(),
            topic_id: 0,
            undecodable: Vec::new(),
        })))
    }
}

/// The records of lane 0 were acked, in a partition that ends at `end`.
fn published(records: u32, end: u64) -> Option<Arc<PublishedRecords>> {
    let mut acked = AckedRecords::new(0);
    acked.add(0, records);
    let ends = vec![ResolvedOffset { partition: 0, offset: end, watermarks: None }];
    Some(Arc::new(PublishedRecords { acked: vec![acked], ends }))
}

async fn receive(
    deliveries: RecordsThenHeartbeats,
    records: u32,
    end: u64,
    progress_timeout: Duration,
) -> SubscriberResult {
    let (_sender, receiver) = watch::channel(published(records, end));
    let subscriber = Subscriber::new(RUN, Instant::now(), receiver, progress_timeout);
    timeout(Duration::from_secs(30), subscriber.run(deliveries)).await.unwrap()
}

#[tokio::test]
async fn heartbeats_do_not_hide_a_lost_record() {
    // The record of another run in between is ignored.
    let deliveries = deliver([(RUN, 0), (RUN + 1, 1), (RUN, 2)]);
    let result = receive(deliveries, 3, 3, Duration::from_millis(50)).await;
    assert_eq!((result.meter.records, result.lost, result.doubled), (2, 1, 0));
    let mut all =
        DeliveryResult { meter: LoadMeter::new(), lost: 0, doubled: 0, elapsed: Duration::ZERO };
    all.add(&result, Instant::now());
    assert_eq!(all.meter.failures.by_kind[NOT_DELIVERED], 1);
    assert_eq!((all.lost, all.meter.records), (1, 2));
}

#[tokio::test]
async fn doubled_record_does_not_replace_a_lost_record() {
    let deliveries = deliver([(RUN, 0), (RUN, 0), (RUN, 2)]);
    let result = receive(deliveries, 3, 3, Duration::from_millis(50)).await;
    assert_eq!((result.lost, result.doubled), (1, 1));
    // A doubled record is no throughput and has no latency.
    assert_eq!(result.meter.records, 2);
    assert_eq!(result.meter.latency.percentiles().unwrap().count, 2);
}

#[tokio::test]
async fn receives_up_to_the_end_so_that_late_doubles_are_found() {
    let deliveries = deliver([(RUN, 0), (RUN, 1), (RUN, 1)]);
    let result = receive(deliveries, 2, 3, Duration::from_secs(20)).await;
    assert_eq!((result.lost, result.doubled), (0, 1));
}

#[tokio::test]
async fn records_without_an_ack_are_not_lost() {
    // Sequences 0 and 1 were acked; 2 has an unknown outcome and arrived.
    let deliveries = deliver([(RUN, 0), (RUN, 1), (RUN, 2)]);
    let result = receive(deliveries, 2, 3, Duration::from_secs(20)).await;
    assert_eq!((result.meter.records, result.lost, result.doubled), (3, 0, 0));
}

#[tokio::test]
async fn waits_for_slow_publishers() {
    let (sender, receiver) = watch::channel(None);
    let progress_timeout = Duration::from_millis(20);
    let subscriber = Subscriber::new(RUN, Instant::now(), receiver, progress_timeout);
    let run = tokio::spawn(subscriber.run(deliver((0..100).map(|sequence| (RUN, sequence)))));
    // Several times the timeout, but it is not known yet what was published.
    sleep(Duration::from_millis(100)).await;
    sender.send_replace(published(100, 100));
    let result = timeout(Duration::from_secs(30), run).await.unwrap().unwrap();
    assert_eq!((result.meter.records, result.lost), (100, 0));
}

#[test]
fn consecutive_batches_share_a_range() {
    let mut acked = AckedRecords::new(0);
    for (first, records) in [(0, 10), (10, 5), (20, 1)] {
        acked.add(first, records);
    }
    assert_eq!(acked.ranges, [0..15, 20..21]);
    assert_eq!(DeliveryLedger::default().lost(&[acked]), 16);
}
