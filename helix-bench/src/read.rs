//! Reads: each lane has a share of the offsets of its own, so that together they read each record
//! once. Bounded by time, a lane begins its share again when it is through.

use std::sync::Arc;

use anyhow::{Result, ensure};
use helix_client::{Batches, Client, Event, FetchOptions, Position, ReadOptions, Start};
use helix_proto::batch;
use helix_proto::log::v1::{ErrorReason, ResolvedOffset};
use tokio::time::{Duration, Instant};

use crate::budget::Budget;
use crate::load::Load;
use crate::meter::Meter;
use crate::phase::{self, FAILURES_IN_A_ROW_MAX, Lane, Part};
use crate::place::{Share, split};
use crate::report::Report;
use crate::target::Target;
use crate::verify::Findings;

/// Bytes that a record takes beyond its value, at most, as far as a fetch allows for them.
const RECORD_OVERHEAD: u64 = 64;

/// Wait of a fetch. Everything asked for is there, so it should never be needed.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Runs a read load.
///
/// # Errors
/// Why it could not begin.
pub(crate) async fn run(load: &Load) -> Result<Report> {
    let target = Target::connect(load).await?;
    let (ranges, notes) = ranges(load, &target.ends().await?)?;
    let shares = split(&ranges, load.lanes(), u64::from(load.batch_size));
    let lanes: Vec<Reader> = shares
        .into_iter()
        .enumerate()
        .filter(|(_, shares)| !shares.is_empty())
        .map(|(lane, shares)| Reader::new(load, target.client(lane / load.in_flight), shares))
        .collect();
    let (lanes, warmup) = phase::run(lanes, load, Part::Warmup).await?;
    let before = target.observe().await;
    let (lanes, outcome) = phase::run(lanes, load, Part::Measured).await?;
    let after = target.observe().await;
    let mut report = Report::new(load, &target, &before, &after, &warmup, &outcome);
    report.notes.extend(notes);
    report.notes.push("each client reads a share of its own; checksums are verified".to_owned());
    if load.stream {
        report.notes.push("a subscription asks for nothing, so it has no latency: see e2e".into());
    }
    if load.verify {
        report.verify = Some(findings(&lanes));
    }
    Ok(report)
}

/// What is to be read, and what has to be said about it.
fn ranges(load: &Load, ends: &[ResolvedOffset]) -> Result<(Vec<Share>, Vec<String>)> {
    let partitions = ends.len() as u64;
    let mut notes = Vec::new();
    let mut ranges = Vec::with_capacity(ends.len());
    let mut trimmed = 0;
    for (number, end) in (0..).zip(ends) {
        let marks = end.watermarks.unwrap_or_default();
        let asked = match u64::try_from(load.offset) {
            Ok(offset) => offset,
            Err(_) => end.offset.saturating_sub(load.offset.unsigned_abs()),
        };
        let from = asked.max(marks.log_start_offset);
        trimmed += u64::from(from > asked);
        let wanted = match load.run.records {
            // The first partitions take what does not divide evenly.
            Some(records) => records / partitions + u64::from(number < records % partitions),
            None => u64::MAX,
        };
        let until = end.offset.min(from.saturating_add(wanted));
        if from < until {
            ranges.push(Share { partition: end.partition, from, until });
        }
    }
    let there: u64 = ranges.iter().map(|range| range.until - range.from).sum();
    ensure!(there > 0, "there is nothing to read: write something first");
    if trimmed > 0 {
        notes
            .push("retention has removed the asked offset: reading begins at the log start".into());
    }
    if let Some(records) = load.run.records
        && there < records
    {
        notes.push(format!("only {there} of {records} records are there"));
    }
    Ok((ranges, notes))
}

fn findings(lanes: &[Reader]) -> Findings {
    let mut all = Findings::default();
    for Reader { findings, .. } in lanes {
        all.records += findings.records;
        all.offset_gaps += findings.offset_gaps;
        all.corrupt_batches += findings.corrupt_batches;
    }
    all
}

/// One lane.
#[derive(Debug)]
struct Reader {
    client: Client,
    topic: String,
    shares: Vec<Share>,
    options: FetchOptions,
    is_stream: bool,
    /// Whether the measured part ends with the shares.
    is_bounded: bool,
    verify: bool,
    findings: Findings,
}

impl Reader {
    fn new(load: &Load, client: &Client, shares: Vec<Share>) -> Self {
        let batch_size = u64::from(load.batch_size);
        let options = FetchOptions {
            records_max: Some(batch_size),
            bytes_max: Some(batch_size.saturating_mul(load.size as u64 + RECORD_OVERHEAD)),
            wait_max: WAIT_MAX,
            ..FetchOptions::default()
        };
        Self {
            client: client.clone(),
            topic: load.topic.clone(),
            shares,
            options,
            is_stream: load.stream,
            is_bounded: load.run.records.is_some(),
            verify: load.verify,
            findings: Findings::default(),
        }
    }
}

impl Lane for Reader {
    async fn run(mut self, budget: Arc<Budget>, part: Part) -> (Self, Meter) {
        let mut meter = Meter::new();
        let mut failures_in_a_row = 0;
        self.findings = Findings::default();
        loop {
            let is_through = match self.is_stream {
                true => self.subscribe(&budget, &mut meter).await,
                false => self.fetch(&budget, &mut meter, &mut failures_in_a_row).await,
            };
            let is_enough = part == Part::Measured && self.is_bounded;
            if !is_through || is_enough || budget.is_over(Instant::now()) {
                return (self, meter);
            }
        }
    }
}

impl Reader {
    /// Reads the shares once. False if it came to an end before that.
    async fn fetch(
        &mut self,
        budget: &Budget,
        meter: &mut Meter,
        failures_in_a_row: &mut u32,
    ) -> bool {
        let consumer = self.client.consumer();
        for number in 0..self.shares.len() {
            let Share { partition, from, until } = self.shares[number];
            let mut next = from;
            while next < until {
                let now = Instant::now();
                if budget.is_over(now) || *failures_in_a_row >= FAILURES_IN_A_ROW_MAX {
                    return false;
                }
                let start =
                    [Start::new(&self.topic, partition, Position::Offset(next)).until(until)];
                match consumer.fetch_encoded(&start, &self.options).await {
                    Ok(fetched) if fetched.iter().any(|batches| batches.next_offset > next) => {
                        let latency = now.elapsed();
                        *failures_in_a_row = 0;
                        for batches in fetched {
                            let bytes = self.take(&batches, next);
                            let after = batches.next_offset.min(until);
                            meter.succeed(latency, after - next, bytes);
                            budget.spend(u32::try_from(after - next).unwrap_or(u32::MAX));
                            next = after;
                        }
                    }
                    Ok(_) => {
                        *failures_in_a_row += 1;
                        meter.fail_as("EMPTY".into(), format!("nothing came at offset {next}"));
                    }
                    Err(error) => {
                        *failures_in_a_row += 1;
                        if error.is(ErrorReason::CorruptLog) {
                            self.findings.corrupt_batches += 1;
                        }
                        meter.fail(&error);
                    }
                }
            }
        }
        true
    }

    /// Reads the shares once over one subscription. False if it came to an end before that.
    async fn subscribe(&mut self, budget: &Budget, meter: &mut Meter) -> bool {
        let starts = self.shares.iter().map(|share| {
            let Share { partition, from, until } = *share;
            Start::new(&self.topic, partition, Position::Offset(from)).until(until)
        });
        let mut subscription =
            self.client.consumer().subscribe(starts.collect(), ReadOptions::default());
        while let Some(event) = subscription.next_encoded().await {
            match event {
                Ok(Event::Data(batches)) => {
                    let bytes = self.take(&batches, batches.start_offset);
                    let until = batches.until.unwrap_or(u64::MAX);
                    let records = batches.next_offset.min(until) - batches.start_offset;
                    meter.count(records, bytes);
                    budget.spend(u32::try_from(records).unwrap_or(u32::MAX));
                }
                Ok(Event::CaughtUp { .. } | Event::Heartbeat(_)) => {}
                Err(error) => {
                    if error.is(ErrorReason::CorruptLog) {
                        self.findings.corrupt_batches += 1;
                    }
                    meter.fail(&error);
                    return false;
                }
            }
            if budget.is_over(Instant::now()) {
                return false;
            }
        }
        true
    }

    /// Payload bytes of an answer that begins at `start`; checks it if asked to.
    fn take(&mut self, answer: &Batches, start: u64) -> u64 {
        if self.verify {
            self.check(answer, start);
        }
        let payloads = answer.batches.iter().filter_map(|stored| stored.batch.as_ref());
        payloads.map(|batch| batch.payload.len() as u64).sum()
    }

    fn check(&mut self, answer: &Batches, start: u64) {
        let mut next = start;
        for stored in &answer.batches {
            let Some(batch) = stored.batch.as_ref() else {
                self.findings.corrupt_batches += 1;
                continue;
            };
            let is_sound = batch::is_intact(batch)
                && batch::scan(&batch.payload, batch.record_count, usize::MAX).is_ok();
            self.findings.corrupt_batches += u64::from(!is_sound);
            // Only the first one may begin before what was asked for.
            let is_dense =
                stored.first_offset == next || stored.first_offset < next && next == start;
            self.findings.offset_gaps += u64::from(!is_dense);
            next = stored.first_offset + u64::from(batch.record_count);
        }
        // The last one may end behind it, but nothing may be skipped.
        self.findings.offset_gaps += u64::from(answer.next_offset > next);
        self.findings.records += answer.next_offset.saturating_sub(start);
    }
}

#[cfg(test)]
mod tests {
    use helix_proto::log::v1::Watermarks;

    use super::*;
    use crate::args::{LoadArgs, Mode};

    fn load(records: Option<u64>, offset: i64) -> Load {
        let duration = records.is_none().then_some(Duration::from_secs(1));
        let offset = Some(offset);
        let args =
            LoadArgs { clients: 1, in_flight: 1, records, duration, offset, ..LoadArgs::default() };
        Load::new(Mode::Read, &args).unwrap()
    }

    fn end(partition: u32, log_start_offset: u64, offset: u64) -> ResolvedOffset {
        let watermarks = Some(Watermarks { log_start_offset, high_watermark: offset });
        ResolvedOffset { partition, offset, watermarks }
    }

    fn share(partition: u32, from: u64, until: u64) -> Share {
        Share { partition, from, until }
    }

    #[test]
    fn records_are_spread_over_partitions() {
        let ends = [end(0, 0, 100), end(1, 0, 100), end(2, 0, 100)];
        let (found, notes) = ranges(&load(Some(10), 0), &ends).unwrap();
        assert_eq!(found, [share(0, 0, 4), share(1, 0, 3), share(2, 0, 3)]);
        assert!(notes.is_empty());
    }

    #[test]
    fn a_time_bound_takes_all_that_is_there() {
        let (found, _) = ranges(&load(None, 5), &[end(0, 0, 100)]).unwrap();
        assert_eq!(found, [share(0, 5, 100)]);
        let (found, _) = ranges(&load(None, -5), &[end(0, 0, 100)]).unwrap();
        assert_eq!(found, [share(0, 95, 100)]);
    }

    #[test]
    fn what_is_missing_is_said() {
        let (found, notes) = ranges(&load(Some(200), 0), &[end(0, 40, 100)]).unwrap();
        assert_eq!((found, notes.len()), (vec![share(0, 40, 100)], 2));
        assert!(ranges(&load(Some(1), 0), &[end(0, 0, 0)]).is_err());
    }
}
