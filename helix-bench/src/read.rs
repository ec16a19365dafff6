//! Reads: each lane has a share of the offsets of its own, so that together they read each record
//! once. Bounded by time, a lane begins its share again when it is through.

use std::sync::Arc;

use anyhow::{Result, ensure};
use helix_client::{
    Batches, Client, Error, Event, FetchOptions, Position, ReadOptions, ReadSource, Start,
};
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
use crate::verify::{Answers, Verification};

/// Bytes that a record takes beyond its value, at most, as far as a fetch allows for them.
const RECORD_OVERHEAD: u64 = 64;

/// Where retention has overtaken a reader it goes on at the log start.
const READ: ReadOptions =
    ReadOptions { clamp: true, source: ReadSource::Leader, preferred_node: None };

/// Wait of a fetch. Everything asked for is there, so it should never be needed.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Runs a read load.
///
/// # Errors
/// Why it could not begin.
pub(crate) async fn run(load: &Load) -> Result<Report> {
    let target = Target::connect(load).await?;
    let (ranges, notes) = ranges(load, &target.ends().await?)?;
    let there = ranges.iter().map(|range| range.until - range.from).sum();
    let load = &load.with_records_there(there);
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
        report.verify = Some(Verification::Read(answers(&lanes)));
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

fn answers(lanes: &[Reader]) -> Answers {
    let mut all = Answers::default();
    for Reader { answers, .. } in lanes {
        all.records += answers.records;
        all.offset_gaps += answers.offset_gaps;
        all.corrupt_batches += answers.corrupt_batches;
    }
    all
}

/// One lane.
#[derive(Debug)]
struct Reader {
    client: Client,
    topic: String,
    shares: Vec<Share>,
    /// Offset to read next in each share, in this round.
    next: Vec<u64>,
    options: FetchOptions,
    is_stream: bool,
    /// Whether the measured part ends with the shares.
    is_bounded: bool,
    verify: bool,
    failures_in_a_row: u32,
    answers: Answers,
}

impl Reader {
    fn new(load: &Load, client: &Client, shares: Vec<Share>) -> Self {
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
            shares,
            next: Vec::new(),
            options,
            is_stream: load.stream,
            is_bounded: load.run.records.is_some(),
            verify: load.verify,
            failures_in_a_row: 0,
            answers: Answers::default(),
        }
    }

    fn has_failed(&self) -> bool {
        self.failures_in_a_row >= FAILURES_IN_A_ROW_MAX
    }
}

impl Lane for Reader {
    async fn run(mut self, budget: Arc<Budget>, part: Part) -> (Self, Meter) {
        let mut meter = Meter::new();
        self.failures_in_a_row = 0;
        self.answers = Answers::default();
        let is_once = part == Part::Measured && self.is_bounded;
        loop {
            self.next = self.shares.iter().map(|share| share.from).collect();
            while !self.is_through() && !self.has_failed() && !budget.is_over(Instant::now()) {
                match self.is_stream {
                    true => self.subscribe(&budget, &mut meter).await,
                    false => self.fetch(&budget, &mut meter).await,
                }
            }
            if self.has_failed() {
                meter.give_up(budget.start().elapsed());
            }
            // Retention may have left nothing to begin again with.
            let is_empty = self.shares.iter().all(|share| share.from >= share.until);
            if is_once || is_empty || self.has_failed() || budget.is_over(Instant::now()) {
                return (self, meter);
            }
        }
    }
}

impl Reader {
    /// Whether this round has come to the end of every share.
    fn is_through(&self) -> bool {
        self.shares.iter().zip(&self.next).all(|(share, next)| *next >= share.until)
    }

    /// Reads on in the first share that is not through.
    async fn fetch(&mut self, budget: &Budget, meter: &mut Meter) {
        let unread = |(share, next): (&Share, &u64)| *next < share.until;
        let Some(place) = self.shares.iter().zip(&self.next).position(unread) else { return };
        let (Share { partition, until, .. }, next) = (self.shares[place], self.next[place]);
        let now = Instant::now();
        let start = [Start::new(&self.topic, partition, Position::Offset(next)).until(until)];
        match self.client.consumer().fetch_encoded(&start, &self.options).await {
            Ok(fetched) if fetched.iter().any(|answer| answer.next_offset > next) => {
                let latency = now.elapsed();
                for answer in fetched {
                    let taken = self.take(place, &answer, meter);
                    if taken.records > 0 {
                        meter.succeed(latency, taken.records, taken.bytes);
                    }
                    budget.spend(u32::try_from(taken.records).unwrap_or(u32::MAX));
                }
            }
            Ok(_) => {
                self.failures_in_a_row += 1;
                meter.fail_as("EMPTY".into(), format!("nothing came at offset {next}"));
            }
            Err(error) => self.fail(&error, meter),
        }
    }

    /// Reads on in all shares that are not through, over one subscription.
    async fn subscribe(&mut self, budget: &Budget, meter: &mut Meter) {
        let shares = self.shares.iter().zip(&self.next);
        let starts = shares.filter(|(share, next)| **next < share.until).map(|(share, next)| {
            let start = Start::new(&self.topic, share.partition, Position::Offset(*next));
            start.until(share.until)
        });
        let mut subscription = self.client.consumer().subscribe(starts.collect(), READ);
        while let Some(event) = subscription.next_encoded().await {
            match event {
                Ok(Event::Data(answer)) => {
                    if let Some(place) = self.place_of(&answer) {
                        let taken = self.take(place, &answer, meter);
                        if taken.records > 0 {
                            meter.count(taken.records, taken.bytes);
                        }
                        budget.spend(u32::try_from(taken.records).unwrap_or(u32::MAX));
                    }
                }
                Ok(Event::CaughtUp { .. } | Event::Heartbeat(_)) => {}
                Err(error) => return self.fail(&error, meter),
            }
            if budget.is_over(Instant::now()) {
                return;
            }
        }
        // Every share has come to its end, even where nothing was left to tell.
        for (share, next) in self.shares.iter().zip(&mut self.next) {
            *next = (*next).max(share.until);
        }
    }

    /// The share that an answer belongs to: a lane has one of each partition at most.
    fn place_of(&self, answer: &Batches) -> Option<usize> {
        self.shares.iter().position(|share| share.partition == answer.partition)
    }

    fn fail(&mut self, error: &Error, meter: &mut Meter) {
        self.failures_in_a_row += 1;
        if error.is(ErrorReason::CorruptLog) {
            self.answers.corrupt_batches += 1;
        }
        meter.fail(error);
    }

    /// Goes on behind an answer, and counts what of it was asked for; checks it if asked to.
    fn take(&mut self, place: usize, answer: &Batches, meter: &mut Meter) -> Taken {
        self.failures_in_a_row = 0;
        let (next, share) = (self.next[place], &mut self.shares[place]);
        if answer.start_offset > next {
            meter.starts_moved += 1;
            share.from = share.from.max(answer.start_offset);
            if share.from >= share.until && !self.is_bounded {
                // All of it is gone: what has come since takes its place.
                share.until = answer.watermarks.high_watermark;
            }
        }
        let start = next.max(answer.start_offset);
        let until = answer.next_offset.min(answer.until.unwrap_or(u64::MAX));
        self.next[place] = next.max(answer.next_offset);
        if self.verify {
            self.check(answer, start);
        }
        taken(answer, start, until)
    }

    fn check(&mut self, answer: &Batches, start: u64) {
        let mut next = start;
        // What retention removes while a subscription goes on is no gap.
        let log_start = answer.watermarks.log_start_offset;
        for stored in &answer.batches {
            let Some(batch) = stored.batch.as_ref() else {
                self.answers.corrupt_batches += 1;
                continue;
            };
            let is_sound = batch::is_intact(batch)
                && batch::scan(&batch.payload, batch.record_count, usize::MAX).is_ok();
            self.answers.corrupt_batches += u64::from(!is_sound);
            // Only the first one may begin before what was asked for.
            let is_dense = stored.first_offset == next
                || stored.first_offset < next && next == start
                || (next..=log_start).contains(&stored.first_offset);
            self.answers.offset_gaps += u64::from(!is_dense);
            next = stored.first_offset + u64::from(batch.record_count);
        }
        // The last one may end behind it, but nothing may be skipped.
        self.answers.offset_gaps += u64::from(answer.next_offset > next.max(log_start));
        let until = answer.next_offset.min(answer.until.unwrap_or(u64::MAX));
        self.answers.records += taken(answer, start, until).records;
    }
}

/// What of an answer was asked for.
#[derive(Debug, PartialEq, Eq)]
struct Taken {
    records: u64,
    /// Of payloads. A batch of which only a part was asked for counts by its share of records.
    bytes: u64,
}

fn taken(answer: &Batches, start: u64, until: u64) -> Taken {
    let mut taken = Taken { records: 0, bytes: 0 };
    for stored in &answer.batches {
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

    /// Batches of ten records from these offsets on.
    fn answer(start_offset: u64, firsts: &[u64], next_offset: u64) -> Batches {
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
        }
    }

    #[test]
    fn what_was_not_asked_for_does_not_count() {
        let answer = answer(5, &[0, 10, 20], 25);
        let whole = answer.batches[0].batch.as_ref().unwrap().payload.len() as u64;
        let half = Taken { records: 5, bytes: whole / 2 };
        assert_eq!(taken(&answer, 5, 10), half);
        assert_eq!(taken(&answer, 20, 25), half);
        assert_eq!(taken(&answer, 5, 25), Taken { records: 20, bytes: whole * 2 });
        assert_eq!(taken(&answer, 30, 40), Taken { records: 0, bytes: 0 });
    }

    fn reader(load: &Load, share: Share) -> Reader {
        let client = Client::new(Config::default()).unwrap();
        let mut reader = Reader::new(load, &client, vec![share]);
        reader.next = vec![share.from];
        reader.verify = true;
        reader
    }

    #[tokio::test]
    async fn a_reader_goes_on_at_the_log_start() {
        let mut meter = Meter::new();
        let mut reader = reader(&load(None, 0), share(0, 0, 30));
        let taken = reader.take(0, &answer(10, &[10, 20], 30), &mut meter);
        assert_eq!((taken.records, meter.starts_moved, reader.next[0]), (20, 1, 30));
        assert_eq!((reader.shares[0], reader.answers.offset_gaps), (share(0, 10, 30), 0));
        // All of the share is gone: it takes what has come since.
        reader.next = vec![10];
        reader.take(0, &answer(40, &[], 40), &mut meter);
        assert_eq!((reader.shares[0], meter.starts_moved), (share(0, 40, 100), 2));
        assert!(!reader.is_through());
    }

    #[tokio::test]
    async fn gaps_are_found_unless_retention_made_them() {
        let mut meter = Meter::new();
        let mut reader = reader(&load(Some(30), 0), share(0, 0, 30));
        let mut gap = answer(0, &[0, 20], 30);
        reader.take(0, &gap, &mut meter);
        assert_eq!((reader.answers.offset_gaps, reader.answers.records), (1, 20));
        gap.watermarks.log_start_offset = 20;
        reader.next = vec![0];
        reader.take(0, &gap, &mut meter);
        assert_eq!(reader.answers.offset_gaps, 1);
    }
}
