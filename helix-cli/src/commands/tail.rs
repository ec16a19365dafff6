//! `helix tail`: the newest records over all partitions, by append time, and then what comes.
//! Reads at most that many of each partition.

use anyhow::Context;
use helix_client::{
    Client, ConsumedRecord, Event, Position as ClientPosition, ReadOptions, ReadSource, Start,
};

use super::consume;
use super::records::Printer;
use super::spans::{self, Extent};
use crate::args::{Global, TailArgs};
use crate::connect::connect;
use crate::position::Position;

pub(crate) async fn run(global: &Global, args: &TailArgs) -> anyhow::Result<()> {
    let mut printer = Printer::new(global, args.format.as_ref())?;
    let client = connect(global).await?;
    let source = args.source.into();
    let extents = spans::extents(&client, &args.topic, &args.partitions, source).await?;
    let newest = newest(&client, args, &extents, source).await;
    for (partition, record) in newest.with_context(|| format!("read {}", args.topic))? {
        printer.print(&args.topic, partition, &record)?;
    }
    printer.flush()?;
    if !args.follow {
        return Ok(());
    }
    let start = |extent: &Extent| {
        let from = ClientPosition::Offset(extent.watermarks.high_watermark);
        Start::new(&args.topic, extent.partition, from)
    };
    let starts = extents.iter().map(start).collect();
    consume::read(&client, starts, None, source, true, &mut printer)
        .await
        .with_context(|| format!("follow {}", args.topic))
}

/// The newest records, oldest first.
async fn newest(
    client: &Client,
    args: &TailArgs,
    extents: &[Extent],
    source: ReadSource,
) -> anyhow::Result<Vec<(u32, ConsumedRecord)>> {
    let count = Position::BeforeEnd(args.max_records as u64);
    let from = spans::offsets(client, &args.topic, extents, &count, source).await?;
    let mut starts = Vec::new();
    for (extent, from) in extents.iter().zip(from) {
        let until = extent.watermarks.high_watermark;
        if from < until {
            let from = ClientPosition::Offset(from);
            starts.push(Start::new(&args.topic, extent.partition, from).until(until));
        }
    }
    let mut records = Vec::new();
    if starts.is_empty() {
        return Ok(records);
    }
    let options = ReadOptions { clamp: true, source, ..ReadOptions::default() };
    let mut subscription = client.consumer().subscribe(starts, options);
    while let Some(event) = subscription.next().await {
        if let Event::Data(data) = event? {
            records.extend(data.records.into_iter().map(|record| (data.partition, record)));
        }
    }
    // Offsets break ties, so that a partition stays in its own order.
    records.sort_by_key(|(partition, record)| (record.append_time, *partition, record.offset));
    Ok(records.split_off(records.len().saturating_sub(args.max_records)))
}
