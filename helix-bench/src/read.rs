//! Read load: each lane reads its own offset ranges, so together they read each record once.
//!
//! In a run that is bounded by time a lane starts over after its last range.

use std::sync::Arc;

use anyhow::{Result, ensure};
use helix_client::{
    Batches, Client, Error, Event, FetchOptions, OnRecreate, Position, ReadOptions, ReadSource,
    ReadStart,
};
use helix_proto::batch;
use helix_proto::log::v1::{ErrorReason, ResolvedOffset};
use tokio::time::{Duration, Instant};

use crate::assignment::{OffsetRange, split};
use crate::budget::SendBudget;
use crate::load::BenchLoad;
use crate::meter::LoadMeter;
use crate::phase::{self, FAILURES_IN_A_ROW_MAX, LoadLane, RunPhase};
use crate::report::BenchReport;
use crate::target::BenchTarget;
use crate::verify::{FetchFindings, Verification};

/// Assumed upper bound of the bytes that a record takes beyond its value.
const RECORD_OVERHEAD: u64 = 64;

/// A reader that retention overtakes continues at the log start.
const READ: ReadOptions = ReadOptions {
    clamp: true,
    source: ReadSource::Leader,
    preferred_node: None,
    lag_max: None,
    new_partitions: false,
    on_recreate: OnRecreate::Fail,
    skip_undecodable: false,
};

/// Longest wait of a fetch. The requested records exist, so no wait should be needed.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Runs a read load.
///
/// # Errors
/// The run could not start.
pub(crate) async fn run(load: &BenchLoad) -> Result<BenchReport> {
    let target = BenchTarget::connect(load).await?;
    let (ranges, notes) = ranges(load, &target.ends().await?)?;
    let there = ranges.iter().map(|range| range.until - range.from).sum();
    let load = &load.with_available_records(there);
    let ranges = split(&ranges, load.lanes(), u64::from(load.batch_size));
    let lanes: Vec<ReadLane> = ranges
        .into_iter()
        .enumerate()
        .filter(|(_, ranges)| !ranges.is_empty())
        .map(|(lane, ranges)| ReadLane::new(load, target.client(lane / load.in_flight), ranges))
        .collect();
    let (lanes, warmup) = phase::run(lanes, load, RunPhase::Warmup).await?;
    let before = target.observe().await;
    let (lanes, outcome) = phase::run(lanes, load, RunPhase::Measured).await?;
    let after = target.observe().await;
    let mut report = BenchReport::new(load, &target, &before, &after, &warmup, &outcome);
    report.notes.extend(notes);
    report.notes.push("each client reads its own ranges; checksums are verified".to_owned());
    if load.stream {
        report.notes.push("a subscription sends no requests, so it has no latency: see e2e".into());
    }
    if load.verify {
        report.verify = Some(Verification::Read(fetch_findings(&lanes)));
    }
    Ok(report)
}

/// Returns the ranges to read, and notes about them.
fn ranges(load: &BenchLoad, ends: &[ResolvedOffset]) -> Result<(Vec<OffsetRange>, Vec<String>)> {
    let partitions = ends.len() as u64;
    let mut notes = Vec::new();
    let mut ranges = Vec::with_capacity(ends.len());
    let mut trimmed = 0;
    for (number, end) in (0..).zip(ends) {
        let watermarks = end.watermarks.unwrap_or_default();
        let asked = match u64::try_from(load.offset) {
            Ok(offset) => offset,
            Err(_) => end.offset.saturating_sub(load.offset.unsigned_abs()),
        };
        let from = asked.max(watermarks.log_start_offset);
        trimmed += u64::from(from > asked);
        let wanted = match load.run.records {
            // The first partitions take the remainder of an uneven division.
            Some(records) => records / partitions + u64::from(number < records % partitions),
            None => u64::MAX,
        };
        let until = end.offset.min(from.saturating_add(wanted));
        if from < until {
            ranges.push(OffsetRange { partition: end.partition, from, until });
        }
    }
    let there: u64 = ranges.iter().map(|range| range.until - range.from).sum();
    ensure!(there > 0, "no records to read: write some first");
    if trimmed > 0 {
        notes
            .push("retention has removed the start offset: reading starts at the log start".into());
    }
    if let Some(records) = load.run.records
        && there < records
    {
        notes.push(format!("only {there} of {records} records are available"));
    }
    Ok((ranges, notes))
}

fn fetch_findings(lanes: &[ReadLane]) -> FetchFindings {
    let mut all = FetchFindings::default();
    for ReadLane { fetch_findings, .. } in lanes {
        all.records += fetch_findings.records;
        all.offset_gaps += fetch_findings.offset_gaps;
        all.corrupt_batches += fetch_findings.corrupt_batches;
    }
    all
}

/// Lane that reads its ranges.
#[derive(Debug)]
struct ReadLane {
    client: Client,
    topic: String,
    ranges: Vec<OffsetRange>,
    /// Next offset to read in each range, in this round.
    next: Vec<u64>,
    options: FetchOptions,
    is_stream: bool,
    /// Ends the measured phase after one round.
    is_bounded: bool,
    verify: bool,
    failures_in_a_row: u32,
    fetch_findings: FetchFindings,
}

impl ReadLane {
    fn new(load: &BenchLoad, client: &Client, ranges: Vec<OffsetRange>) -> Self {
        let batch_size = u64::from(load.batch_size);
        let options = FetchOptions {
            records_max: Some(batch_size),
            bytes_max: Some(batch_size.saturating_mul(load.size as u64 + RECORD_OVERHEAD)),
            wait_max: WAIT_MAX,
            read: READ,
            ..FetchOptions::default()
        };
        Self {
            client: client.clone(),
            topic: load.topic.clone(),
            ranges,
            next: Vec::new(),
            options,
            is_stream: load.stream,
            is_bounded: load.run.records.is_some(),
            verify: load.verify,
            failures_in_a_row: 0,
            fetch_findings: FetchFindings::default(),
        }
    }

    fn has_failed(&self) -> bool {
        self.failures_in_a_row >= FAILURES_IN_A_ROW_MAX
    }
}

impl LoadLane for ReadLane {
    async fn run(mut self, budget: Arc<SendBudget>, part: RunPhase) -> (Self, LoadMeter) {
        let mut meter = LoadMeter::with_series(budget.series());
        self.failures_in_a_row = 0;
        self.fetch_findings = FetchFindings::default();
        let is_once = part == RunPhase::Measured && self.is_bounded;
        loop {
            self.next = self.ranges.iter().map(|range| range.from).collect();
            while !self.is_through() && !self.has_failed() && !budget.is_over(Instant::now()) {
                match self.is_stream {
                    true => self.subscribe(&budget, &mut meter).await,
                    false => self.fetch(&budget, &mut meter).await,
                }
            }
            if self.has_failed() {
                meter.give_up(budget.start().elapsed());
            }
            // Retention may have removed every range.
            let is_empty = self.ranges.iter().all(|range| range.from >= range.until);
            if is_once || is_empty || self.has_failed() || budget.is_over(Instant::now()) {
                return (self, meter);
            }
        }
    }
}

impl ReadLane {
    /// Reports whether this round has reached the end of every range.
    fn is_through(&self) -> bool {
        self.ranges.iter().zip(&self.next).all(|(range, next)| *next >= range.until)
    }

    /// Fetches the next batches of the first unfinished range.
    async fn fetch(&mut self, budget: &SendBudget, meter: &mut LoadMeter) {
        let unread = |(range, next): (&OffsetRange, &u64)| *next < range.until;
        let Some(index) = self.ranges.iter().zip(&self.next).position(unread) else { return };
        let (OffsetRange { partition, until, .. }, next) = (self.ranges[index], self.next[index]);
        let now = Instant::now();
        let start = [ReadStart::new(&self.topic, partition, Position::Offset(next)).until(until)];
        match self.client.consumer().fetch_encoded(&start, &self.options).await {
            Ok(fetched) if fetched.iter().any(|response| response.next_offset > next) => {
                let latency = now.elapsed();
                for response in fetched {
                    let taken = self.take(index, &response, meter);
                    if taken.records > 0 {
                        meter.succeed(latency, taken.records, taken.bytes);
                    }
                    budget.spend(u32::try_from(taken.records).unwrap_or(u32::MAX));
                }
            }
            Ok(_) => {
                self.failures_in_a_row += 1;
                meter.fail_as("EMPTY".into(), format!("no records at offset {next}"));
            }
            Err(error) => self.fail(&error, meter),
        }
    }

    /// Reads all unfinished ranges over one subscription.
    async fn subscribe(&mut self, budget: &SendBudget, meter: &mut LoadMeter) {
        let ranges = self.ranges.iter().zip(&self.next);
        let starts = ranges.filter(|(range, next)| **next < range.until).map(|(range, next)| {
            let start = ReadStart::new(&self.topic, range.partition, Position::Offset(*next));
            start.until(range.until)
        });
        let mut subscription = self.client.consumer().subscribe(starts.collect(), READ);
        while let Some(event) = subscription.next_encoded().await {
            match event {
                Ok(Event::Data(response)) => {
                    if let Some(index) = self.range_index(&response) {
                        let taken = self.take(index, &response, meter);
                        if taken.records > 0 {
                            meter.count(taken.records, taken.bytes);
                        }
                        budget.spend(u32::try_from(taken.records).unwrap_or(u32::MAX));
                    }
                }
                Ok(Event::CaughtUp { .. } | Event::Heartbeat(_) | Event::Restarted { .. }) => {}
                Err(error) => return self.fail(&error, meter),
            }
            if budget.is_over(Instant::now()) {
                return;
            }
        }
        // The subscription ended, so every range is finished even if its last records are gone.
        for (range, next) in self.ranges.iter().zip(&mut self.next) {
            *next = (*next).max(range.until);
        }
    }

    /// Returns the index of the range that a response belongs to. A lane has at most one range per
    /// partition.
    fn range_index(&self, response: &Batches) -> Option<usize> {
        self.ranges.iter().position(|range| range.partition == response.partition)
    }

    fn fail(&mut self, error: &Error, meter: &mut LoadMeter) {
        self.failures_in_a_row += 1;
        if error.is(ErrorReason::CorruptLog) {
            self.fetch_findings.corrupt_batches += 1;
        }
        meter.fail(error);
    }

    /// Advances past a response and counts the requested records; checks it with `--verify`.
    fn take(&mut self, index: usize, response: &Batches, meter: &mut LoadMeter) -> RequestedPart {
        self.failures_in_a_row = 0;
        let (next, range) = (self.next[index], &mut self.ranges[index]);
        if response.start_offset > next {
            meter.starts_moved += 1;
            range.from = range.from.max(response.start_offset);
            if range.from >= range.until && !self.is_bounded {
                // Retention removed the whole range: continue with the records that were appended
                // since.
                range.until = response.watermarks.high_watermark;
            }
        }
        let start = next.max(response.start_offset);
        let until = response.next_offset.min(response.until.unwrap_or(u64::MAX));
        self.next[index] = next.max(response.next_offset);
        if self.verify {
            self.check(response, start);
        }
        taken(response, start, until)
    }

    fn check(&mut self, response: &Batches, start: u64) {
        let mut next = start;
        // Records that retention removes during a subscription are no gap.
        let log_start = response.watermarks.log_start_offset;
        for stored in &response.batches {
            let Some(batch) = stored.batch.as_ref() else {
                self.fetch_findings.corrupt_batches += 1;
                continue;
            };
            let is_sound = batch::uncompressed_payload(batch)
                .is_ok_and(|payload| batch::scan(&payload, batch.record_count, usize::MAX).is_ok());
            self.fetch_findings.corrupt_batches += u64::from(!is_sound);
            // Only the first batch may begin before the requested offset.
            let is_dense = stored.first_offset == next
                || stored.first_offset < next && next == start
                || (next..=log_start).contains(&stored.first_offset);
            self.fetch_findings.offset_gaps += u64::from(!is_dense);
            next = stored.first_offset + u64::from(batch.record_count);
        }
        // The last batch may end beyond the response, but no offset may be skipped.
        self.fetch_findings.offset_gaps += u64::from(response.next_offset > next.max(log_start));
        let until = response.next_offset.min(response.until.unwrap_or(u64::MAX));
        self.fetch_findings.records += taken(response, start, until).records;
    }
}

/// Part of a response that was requested.
#[derive(Debug, PartialEq, Eq)]
struct RequestedPart {
    records: u64,
    /// Payload bytes. A partly requested batch counts in proportion to its records.
    bytes: u64,
}

fn taken(response: &Batches, start: u64, until: u64) -> RequestedPart {
    let mut taken = RequestedPart { records: 0, bytes: 0 };
    for stored in &response.batches {
        let Some(batch) = stored.batch.as_ref() else { continue };
        let count = u64::from(batch.record_count);
        let end = until.min(stored.first_offset.saturating_add(count));
        let records = end.saturating_sub(start.max(stored.first_offset));
        let bytes = (batch.payload.len() as u64).saturating_mul(records);
        taken.records += records;
        taken.bytes += bytes.checked_div(count).unwrap_or_default();
    }
    taken
}

#[cfg(test)]
mod tests {
    use helix_client::Config;
    use helix_proto::log::v1::{Record, StoredBatch, Watermarks};

    use super::*;
    use crate::load::{LoadArgs, LoadMode};
    use crate::options::TargetOptions;

    fn load(records: Option<u64>, offset: i64) -> BenchLoad {
        let duration = records.is_none().then_some(Duration::from_secs(1));
        let offset = Some(offset);
        let cluster = TargetOptions::of_node("n1:1");
        let (clients, in_flight) = (1, 1);
        let args = LoadArgs {
            cluster,
            clients,
            in_flight,
            records,
            duration,
            offset,
            ..LoadArgs::default()
        };
        BenchLoad::new(LoadMode::Read, &args).unwrap()
    }

    fn end(partition: u32, log_start_offset: u64, offset: u64) -> ResolvedOffset {
        let watermarks = Some(Watermarks { log_start_offset, high_watermark: offset });
        ResolvedOffset { partition, offset, watermarks }
    }

    fn range(partition: u32, from: u64, until: u64) -> OffsetRange {
        OffsetRange { partition, from, until }
    }

    #[test]
    fn records_are_spread_over_partitions() {
        let ends = [end(0, 0, 100), end(1, 0, 100), end(2, 0, 100)];
        let (found, notes) = ranges(&load(Some(10), 0), &ends).unwrap();
        assert_eq!(found, [range(0, 0, 4), range(1, 0, 3), range(2, 0, 3)]);
        assert!(notes.is_empty());
    }

    #[test]
    fn time_bound_run_reads_all_records() {
        let (found, _) = ranges(&load(None, 5), &[end(0, 0, 100)]).unwrap();
        assert_eq!(found, [range(0, 5, 100)]);
        let (found, _) = ranges(&load(None, -5), &[end(0, 0, 100)]).unwrap();
        assert_eq!(found, [range(0, 95, 100)]);
    }

    #[test]
    fn reports_unavailable_records() {
        let (found, notes) = ranges(&load(Some(200), 0), &[end(0, 40, 100)]).unwrap();
        assert_eq!((found, notes.len()), (vec![range(0, 40, 100)], 2));
        assert!(ranges(&load(Some(1), 0), &[end(0, 0, 0)]).is_err());
    }

    /// Batches of ten records that start at these offsets.
    fn response(start_offset: u64, firsts: &[u64], next_offset: u64) -> Batches {
        let records = vec![Record::default(); 10];
        let stored = |&first_offset: &u64| StoredBatch {
            first_offset,
            batch: Some(batch::encode(&records)),
            ..StoredBatch::default()
        };
        Batches {
            topic: "default".to_owned(),
            partition: 0,
            start_offset,
            until: None,
            batches: firsts.iter().map(stored).collect(),
            next_offset,
            watermarks: Watermarks { log_start_offset: 0, high_watermark: 100 },
            topic_id: 0,
        }
    }

    #[test]
    fn counts_only_requested_records() {
        let response = response(5, &[0, 10, 20], 25);
        let whole = response.batches[0].batch.as_ref().unwrap().payload.len() as u64;
        let half = RequestedPart { records: 5, bytes: whole / 2 };
        assert_eq!(taken(&response, 5, 10), half);
        assert_eq!(taken(&response, 20, 25), half);
        assert_eq!(taken(&response, 5, 25), RequestedPart { records: 20, bytes: whole * 2 });
        assert_eq!(taken(&response, 30, 40), RequestedPart { records: 0, bytes: 0 });
    }

    fn reader(load: &BenchLoad, range: OffsetRange) -> ReadLane {
        let client = Client::new(Config::default()).unwrap();
        let mut reader = ReadLane::new(load, &client, vec![range]);
        reader.next = vec![range.from];
        reader.verify = true;
        reader
    }

    #[tokio::test]
    async fn reader_continues_at_the_log_start() {
        let mut meter = LoadMeter::new();
        let mut reader = reader(&load(None, 0), range(0, 0, 30));
        let taken = reader.take(0, &response(10, &[10, 20], 30), &mut meter);
        assert_eq!((taken.records, meter.starts_moved, reader.next[0]), (20, 1, 30));
        assert_eq!((reader.ranges[0], reader.fetch_findings.offset_gaps), (range(0, 10, 30), 0));
        // The whole range is gone: it is replaced by the records appended since.
        reader.next = vec![10];
        reader.take(0, &response(40, &[], 40), &mut meter);
        assert_eq!((reader.ranges[0], meter.starts_moved), (range(0, 40, 100), 2));
        assert!(!reader.is_through());
    }

    #[tokio::test]
    async fn finds_gaps_unless_retention_made_them() {
        let mut meter = LoadMeter::new();
        let mut reader = reader(&load(Some(30), 0), range(0, 0, 30));
        let mut gap = response(0, &[0, 20], 30);
        reader.take(0, &gap, &mut meter);
        assert_eq!((reader.fetch_findings.offset_gaps, reader.fetch_findings.records), (1, 20));
        gap.watermarks.log_start_offset = 20;
        reader.next = vec![0];
        reader.take(0, &gap, &mut meter);
        assert_eq!(reader.fetch_findings.offset_gaps, 1);
    }
}
