//! `helix tail`: prints the newest records of all partitions by append time, then new records.
//! Reads at most the requested number from each partition.

use anyhow::Context;
use helix_client::{
    Client, ConsumedRecord, Event, Position as ClientPosition, ReadSource, ReadStart, TopicRef,
};

use super::consume;
use super::records::RecordPrinter;
use crate::args::{GlobalArgs, TailArgs};
use crate::connect::connect;
use crate::offset_lookup::{self, PartitionBounds};
use crate::position::PositionArg;

pub(crate) async fn run(global: &GlobalArgs, args: &TailArgs) -> anyhow::Result<()> {
    let mut printer = RecordPrinter::new(global, args.format.as_ref())?;
    let client = connect(global).await?;
    let source = args.source.into();
    let topic = offset_lookup::topic(&client, &args.topic).await?;
    let bounds = offset_lookup::partition_bounds(&client, topic, &args.partitions, source).await?;
    let newest = newest(&client, topic, args, &bounds, source).await;
    for (partition, record) in newest.with_context(|| format!("read {}", args.topic))? {
        printer.print(&args.topic, partition, &record)?;
    }
    printer.flush()?;
    if !args.follow {
        return Ok(());
    }
    let start = |bounds: &PartitionBounds| {
        let from = ClientPosition::Offset(bounds.watermarks.high_watermark);
        ReadStart::new(topic.name, bounds.partition, from).in_topic(topic.id)
    };
    let starts = bounds.iter().map(start).collect();
    let mut options = consume::read_options(&client, source, true);
    options.new_partitions = args.partitions.is_empty();
    options.on_recreate = args.recreate.into();
    consume::read(&client, starts, None, options, true, &mut printer)
        .await
        .with_context(|| format!("follow {}", args.topic))
}

/// Reads the newest records; returns them oldest first.
async fn newest(
    client: &Client,
    topic: TopicRef<'_>,
    args: &TailArgs,
    bounds: &[PartitionBounds],
    source: ReadSource,
) -> anyhow::Result<Vec<(u32, ConsumedRecord)>> {
    let count = PositionArg::BeforeEnd(args.max_records as u64);
    let from = offset_lookup::offsets(client, topic, bounds, &count, source).await?;
    let mut starts = Vec::new();
    for (bounds, from) in bounds.iter().zip(from) {
        let until = bounds.watermarks.high_watermark;
        if from < until {
            let from = ClientPosition::Offset(from);
            let start = ReadStart::new(topic.name, bounds.partition, from).until(until);
            starts.push(start.in_topic(topic.id));
        }
    }
    let mut records = Vec::new();
    if starts.is_empty() {
        return Ok(records);
    }
    let options = consume::read_options(client, source, false);
    let mut subscription = client.consumer().subscribe(starts, options);
    while let Some(event) = subscription.next().await {
        if let Event::Data(data) = event? {
            records.extend(data.records.into_iter().map(|record| (data.partition, record)));
        }
    }
    // Offsets break ties, which keeps the order within a partition.
    records.sort_by_key(|(partition, record)| (record.append_time, *partition, record.offset));
    Ok(records.split_off(records.len().saturating_sub(args.max_records)))
}
