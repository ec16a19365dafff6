//! `helix consume`: prints records from a position on, up to an end or continuously.
//! Records of a partition are printed in log order; partitions are interleaved.

use std::collections::BTreeMap;
use std::io::{IsTerminal, stdout};

use anyhow::Context;
use bytes::Bytes;
use helix_client::{
    Client, ConsumedRecord, Event, Position as ClientPosition, ReadOptions, ReadSource, ReadStart,
    Records, TopicRef,
};

use super::records::RecordPrinter;
use super::skipped::SkippedBatches;
use crate::args::{ConsumeArgs, GlobalArgs};
use crate::connect::connect;
use crate::exit::{CliError, Exit};
use crate::offset_lookup::{self, PartitionBounds};
use crate::output::message;
use crate::position::{PositionArg, PositionRange};
use crate::progress::ProgressLine;
use crate::stdout_reader;

pub(crate) async fn run(global: &GlobalArgs, args: &ConsumeArgs) -> anyhow::Result<()> {
    let range = args.range()?;
    let mut printer = RecordPrinter::new(global, args.format.as_ref())?;
    let client = connect(global).await?;
    let topic = offset_lookup::topic(&client, &args.topic).await?;
    let (source, partitions) = (args.source.into(), &args.partitions);
    let bounds = offset_lookup::partition_bounds(&client, topic, partitions, source).await?;
    let ranges = read_ranges(&client, topic, args, &range, &bounds).await?;
    if !global.quiet {
        warn_of_clamped_start(&range, &bounds, &ranges);
        warn_of_clamped_end(&range, &bounds, args.follow);
    }
    if !args.follow {
        check_start_is_reached(&range, &bounds)?;
    }
    let starts = ranges.iter().filter_map(|range| range.start(topic)).collect();
    let mut progress = ReadProgress::new(global, args, &ranges);
    let all_partitions = args.partitions.is_empty() && range.until.is_none();
    let mut options = read_options(&client, source, args.follow);
    options.new_partitions = args.follow && all_partitions;
    options.skip_undecodable = args.skip_undecodable;
    if args.follow {
        options.on_recreate = args.recreate.into();
    }
    read(&client, starts, args.max_records, options, &mut printer, &mut progress)
        .await
        .with_context(|| format!("read {}", args.topic))
}

/// Returns the options of a read, without new partitions.
pub(crate) fn read_options(client: &Client, source: ReadSource, follow: bool) -> ReadOptions {
    // The end of a read was asked of one replica, and another one may lag.
    let lag_max = (!follow).then_some(client.config().request_timeout);
    // The start offset may be deleted after it was resolved.
    ReadOptions { clamp: true, source, lag_max, ..ReadOptions::default() }
}

/// The offsets to read in a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ReadRange {
    partition: u32,
    from: u64,
    /// End offset, exclusive; None to read continuously.
    until: Option<u64>,
}

impl ReadRange {
    /// Returns the start of the read; None if the range is empty.
    fn start(&self, topic: TopicRef<'_>) -> Option<ReadStart> {
        let is_empty = self.until.is_some_and(|until| until <= self.from);
        let from = ClientPosition::Offset(self.from);
        let start = ReadStart::new(topic.name, self.partition, from).in_topic(topic.id);
        (!is_empty).then_some(ReadStart { until: self.until, ..start })
    }
}

/// Resolves the requested positions in each partition.
async fn read_ranges(
    client: &Client,
    topic: TopicRef<'_>,
    args: &ConsumeArgs,
    range: &PositionRange,
    bounds: &[PartitionBounds],
) -> anyhow::Result<Vec<ReadRange>> {
    let source = args.source.into();
    let default = if args.follow { PositionArg::Latest } else { PositionArg::Earliest };
    let from = range.from.as_ref().unwrap_or(&default);
    let from = offset_lookup::offsets(client, topic, bounds, from, source).await?;
    let until = match (&range.until, args.follow) {
        // The end may be above the current end of the partition.
        (Some(PositionArg::Offset(offset)), true) => vec![Some(*offset); bounds.len()],
        (Some(_), true) => {
            let what = "with --follow, --until must be an offset";
            let failure = CliError::new(Exit::Usage, what);
            return Err(failure.hint("use --until OFFSET, or omit --follow").into());
        }
        (None, true) => vec![None; bounds.len()],
        (until, false) => {
            let until = until.as_ref().unwrap_or(&PositionArg::Latest);
            let offsets = offset_lookup::offsets(client, topic, bounds, until, source).await?;
            offsets.into_iter().map(Some).collect()
        }
    };
    let read_range = |((bounds, from), until): ((&PartitionBounds, u64), _)| ReadRange {
        partition: bounds.partition,
        from,
        until,
    };
    Ok(bounds.iter().zip(from).zip(until).map(read_range).collect())
}

/// Warns of partitions in which the requested start offset does not exist.
fn warn_of_clamped_start(range: &PositionRange, bounds: &[PartitionBounds], ranges: &[ReadRange]) {
    let Some(PositionArg::Offset(requested)) = range.from else { return };
    for (bounds, read) in bounds.iter().zip(ranges) {
        let partition = bounds.partition;
        if read.from > requested {
            message!(
                "partition {partition}: offset {requested} is deleted, reading from {}",
                read.from
            );
        } else if read.from < requested {
            message!("partition {partition}: ends at {}, before offset {requested}", read.from);
        }
    }
}

/// Warns of partitions that end before the requested end.
fn warn_of_clamped_end(range: &PositionRange, bounds: &[PartitionBounds], follow: bool) {
    let Some(PositionArg::Offset(requested)) = range.until.as_ref().filter(|_| !follow) else {
        return;
    };
    for PartitionBounds { partition, watermarks } in bounds {
        let end = watermarks.high_watermark;
        if end < *requested {
            message!("partition {partition}: ends at {end}, before offset {requested}");
        }
    }
}

/// Fails if every partition ends before the requested start.
fn check_start_is_reached(range: &PositionRange, bounds: &[PartitionBounds]) -> anyhow::Result<()> {
    let Some(PositionArg::Offset(requested)) = range.from else { return Ok(()) };
    let is_behind = |bounds: &PartitionBounds| bounds.watermarks.high_watermark < requested;
    if bounds.is_empty() || !bounds.iter().all(is_behind) {
        return Ok(());
    }
    let what = format!("offset {requested} is beyond the end of every partition");
    let failure = CliError::new(Exit::Precondition, what);
    Err(failure.hint("use an earlier offset, latest or -100\nuse --follow to wait for it").into())
}

/// The progress of a read whose records are not printed on a terminal.
#[derive(Debug)]
pub(crate) struct ReadProgress {
    line: ProgressLine,
    follow: bool,
    records_read: u64,
    records_max: Option<u64>,
    /// Offset after the last record of each partition.
    positions: BTreeMap<u32, u64>,
    offsets_read: u64,
    offsets_total: u64,
}

impl ReadProgress {
    fn new(global: &GlobalArgs, args: &ConsumeArgs, ranges: &[ReadRange]) -> Self {
        let positions = ranges.iter().map(|range| (range.partition, range.from)).collect();
        let length = |range: &ReadRange| range.until.map_or(0, |it| it.saturating_sub(range.from));
        let line = match stdout().is_terminal() {
            true => ProgressLine::hidden(),
            false => ProgressLine::new(global, "reading"),
        };
        let offsets_total = ranges.iter().map(length).sum();
        let records_max = args.max_records;
        Self { line, positions, offsets_total, records_max, ..Self::hidden(args.follow) }
    }

    /// Returns the progress of a read that shows none.
    pub(crate) fn hidden(follow: bool) -> Self {
        Self {
            line: ProgressLine::hidden(),
            follow,
            records_read: 0,
            records_max: None,
            positions: BTreeMap::new(),
            offsets_read: 0,
            offsets_total: 0,
        }
    }

    fn add(&mut self, data: &Records) {
        let Some(last) = data.records.last() else { return };
        let next = last.offset + 1;
        let position = self.positions.insert(data.partition, next).unwrap_or(next);
        self.offsets_read += next.saturating_sub(position);
        let records = data.records.len() as u64;
        self.records_read += records;
        match self.records_max {
            // A topic may end before.
            Some(max) if max < self.offsets_total => self.line.set_work(self.records_read, max),
            _ if self.follow => {}
            _ => self.line.set_work(self.offsets_read, self.offsets_total),
        }
        let length = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, |bytes| bytes.len() as u64);
        let bytes = |record: &ConsumedRecord| length(&record.key) + length(&record.value);
        self.line.add(&data.topic, records, data.records.iter().map(bytes).sum());
    }
}

/// Reads and prints records until every partition has reached its end.
pub(crate) async fn read(
    client: &Client,
    starts: Vec<ReadStart>,
    max_records: Option<u64>,
    options: ReadOptions,
    printer: &mut RecordPrinter,
    progress: &mut ReadProgress,
) -> anyhow::Result<()> {
    let follow = progress.follow;
    let mut remaining = max_records.unwrap_or(u64::MAX);
    if starts.is_empty() || remaining == 0 {
        return Ok(());
    }
    let mut skipped = SkippedBatches::default();
    let mut subscription = client.consumer().subscribe(starts, options);
    let gone = stdout_reader::gone();
    tokio::pin!(gone);
    loop {
        let event = tokio::select! {
            biased;
            event = subscription.next() => event,
            // A read with an end reports its failures even if their output has no reader.
            closed = &mut gone, if follow => return Err(closed.into()),
        };
        let Some(event) = event else { break };
        match event {
            Ok(Event::Data(data)) => {
                skipped.add(&data.undecodable);
                progress.add(&data);
                for record in &data.records {
                    printer.print(&data.topic, data.partition, record)?;
                    remaining -= 1;
                    if remaining == 0 {
                        return printer.flush();
                    }
                }
                // With --follow, records are shown without delay.
                if follow {
                    printer.flush()?;
                }
            }
            Ok(Event::CaughtUp { .. } | Event::Heartbeat(_)) => printer.flush()?,
            Ok(Event::Restarted { topic, partition, .. }) => {
                printer.flush()?;
                message!(
                    "{topic} was deleted and created again, reading partition {partition} of the \
                     new topic from its beginning"
                );
            }
            Err(error) => {
                // The failure of the read counts more than that of the output.
                let _ = printer.flush();
                return Err(error.into());
            }
        }
    }
    printer.flush()
}
