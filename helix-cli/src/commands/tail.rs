//! `helix tail`: prints the newest records of all partitions by append time, then new records.
//! Reads at most the requested number from each partition.

use std::collections::BTreeMap;

use anyhow::Context;
use helix_client::proto::log::v1::ErrorReason;
use helix_client::{
    Client, ConsumedRecord, Error, Event, Position as ClientPosition, ReadSource, ReadStart,
    TopicRef, UndecodableBatch,
};
use helix_proto::error as wire;

use super::consume;
use super::records::RecordPrinter;
use super::skipped::SkippedBatches;
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
    let (records, stopped) = newest.with_context(|| format!("read {}", args.topic))?;
    for (partition, record) in records {
        printer.print(&args.topic, partition, &record)?;
    }
    printer.flush()?;
    if let Some(error) = stopped {
        return Err(error).with_context(|| format!("read {}", args.topic));
    }
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
    options.skip_undecodable = args.skip_undecodable;
    let mut progress = consume::ReadProgress::hidden(true);
    consume::read(&client, starts, None, options, &mut printer, &mut progress)
        .await
        .with_context(|| format!("follow {}", args.topic))
}

/// Reads the newest records; returns them oldest first. A batch whose content is not records ends
/// the read of its partition, unless such batches are skipped; its error is returned too.
async fn newest(
    client: &Client,
    topic: TopicRef<'_>,
    args: &TailArgs,
    bounds: &[PartitionBounds],
    source: ReadSource,
) -> anyhow::Result<(Vec<(u32, ConsumedRecord)>, Option<Error>)> {
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
        return Ok((records, None));
    }
    let mut options = consume::read_options(client, source, false);
    // The other partitions are read to their ends in any case.
    options.skip_undecodable = true;
    let mut skipped = SkippedBatches::default();
    let mut stops: BTreeMap<u32, UndecodableBatch> = BTreeMap::new();
    let mut subscription = client.consumer().subscribe(starts, options);
    while let Some(event) = subscription.next().await {
        if let Event::Data(data) = event? {
            let partition = data.partition;
            if args.skip_undecodable {
                skipped.add(&data.undecodable);
            } else if let Some(first) = data.undecodable.into_iter().next() {
                stops.entry(partition).or_insert(first);
            }
            let stop = stops.get(&partition).map_or(u64::MAX, |stop| stop.first_offset);
            let wanted = data.records.into_iter().filter(|record| record.offset < stop);
            records.extend(wanted.map(|record| (partition, record)));
        }
    }
    // Offsets break ties, which keeps the order within a partition.
    records.sort_by_key(|(partition, record)| (record.append_time, *partition, record.offset));
    let records = records.split_off(records.len().saturating_sub(args.max_records));
    let stopped = stops.into_values().next().map(|stop| {
        let detail = wire::detail(ErrorReason::UndecodableBatch);
        Error::from_status(&wire::to_status(&detail, &stop.message, None))
    });
    Ok((records, stopped))
}
