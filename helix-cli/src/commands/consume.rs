//! `helix consume`: records from one position on, up to an end or for ever.
//! Partitions come as they are read; within one of them the order is that of the log.

use anyhow::Context;
use helix_client::{Client, Event, Position as ClientPosition, ReadOptions, ReadSource, Start};

use super::records::Printer;
use super::spans::{self, Extent};
use crate::args::{ConsumeArgs, Global};
use crate::connect::connect;
use crate::exit::{Exit, Failure};
use crate::position::{Position, PositionRange};

pub(crate) async fn run(global: &Global, args: &ConsumeArgs) -> anyhow::Result<()> {
    let range = args.range()?;
    let mut printer = Printer::new(global, args.format.as_ref())?;
    let client = connect(global).await?;
    let extents =
        spans::extents(&client, &args.topic, &args.partitions, args.source.into()).await?;
    let spans = plan(&client, args, &range, &extents).await?;
    if !global.quiet {
        explain(&range, &extents, &spans);
    }
    let starts = spans.iter().filter_map(|span| span.start(&args.topic)).collect();
    let (limit, source) = (args.max_records, args.source.into());
    read(&client, starts, limit, source, args.follow, &mut printer)
        .await
        .with_context(|| format!("read {}", args.topic))
}

/// What is read of one partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    partition: u32,
    from: u64,
    /// Offset to stop before. None: no end.
    until: Option<u64>,
}

impl Span {
    fn start(&self, topic: &str) -> Option<Start> {
        let is_empty = self.until.is_some_and(|until| until <= self.from);
        let from = ClientPosition::Offset(self.from);
        let start = Start { until: self.until, ..Start::new(topic, self.partition, from) };
        (!is_empty).then_some(start)
    }
}

async fn plan(
    client: &Client,
    args: &ConsumeArgs,
    range: &PositionRange,
    extents: &[Extent],
) -> anyhow::Result<Vec<Span>> {
    let source = args.source.into();
    let default = if args.follow { Position::Latest } else { Position::Earliest };
    let from = range.from.as_ref().unwrap_or(&default);
    let from = spans::offsets(client, &args.topic, extents, from, source).await?;
    let until = match (&range.until, args.follow) {
        // The end may still be ahead.
        (Some(Position::Offset(offset)), true) => vec![Some(*offset); extents.len()],
        (Some(_), true) => {
            let what = "with --follow, the end is an offset";
            return Err(Failure::new(Exit::Usage, what).into());
        }
        (None, true) => vec![None; extents.len()],
        (until, false) => {
            let until = until.as_ref().unwrap_or(&Position::Latest);
            let offsets = spans::offsets(client, &args.topic, extents, until, source).await?;
            offsets.into_iter().map(Some).collect()
        }
    };
    let span = |((extent, from), until): ((&Extent, u64), _)| Span {
        partition: extent.partition,
        from,
        until,
    };
    Ok(extents.iter().zip(from).zip(until).map(span).collect())
}

/// Says where what is read differs from what was asked for.
fn explain(range: &PositionRange, extents: &[Extent], spans: &[Span]) {
    let Some(Position::Offset(asked)) = range.from else { return };
    for (extent, span) in extents.iter().zip(spans) {
        let partition = extent.partition;
        if span.from > asked {
            eprintln!(
                "partition {partition}: offset {asked} is not kept any more, beginning at {}",
                span.from
            );
        } else if span.from < asked {
            eprintln!("partition {partition}: ends at {}, before offset {asked}", span.from);
        }
    }
}

/// Reads and prints until every start has reached its end.
pub(crate) async fn read(
    client: &Client,
    starts: Vec<Start>,
    max_records: Option<u64>,
    source: ReadSource,
    follow: bool,
    printer: &mut Printer,
) -> anyhow::Result<()> {
    let mut left = max_records.unwrap_or(u64::MAX);
    if starts.is_empty() || left == 0 {
        return Ok(());
    }
    // A start can fall out of what is kept after it was looked up.
    let options = ReadOptions { clamp: true, source, ..ReadOptions::default() };
    let mut subscription = client.consumer().subscribe(starts, options);
    while let Some(event) = subscription.next().await {
        match event {
            Ok(Event::Data(data)) => {
                for record in &data.records {
                    printer.print(&data.topic, data.partition, record)?;
                    left -= 1;
                    if left == 0 {
                        return printer.flush();
                    }
                }
                // Whoever follows wants to see it now.
                if follow {
                    printer.flush()?;
                }
            }
            Ok(Event::CaughtUp { .. } | Event::Heartbeat(_)) => printer.flush()?,
            Err(error) => {
                printer.flush()?;
                return Err(error.into());
            }
        }
    }
    printer.flush()
}
