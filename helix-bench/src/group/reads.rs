//! A member that reads a topic, against a subscription to all of its partitions.
//!
//! Both read the whole topic again and again with open connections. Joining is not part of it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use helix_client::{
    AutoCommit, Batches, Client, Event, GroupConsumer, GroupEvent, Position, ProducerOptions,
    ReadOptions, ReadStart,
};
use helix_proto::log::v1::Record;
use tokio::time::{Instant, timeout};

use super::plan::{GroupBenchPlan, STEP_MAX};
use super::row::GroupBenchRow;

/// Records of a batch.
const BATCH_RECORDS: u64 = 100;

pub(super) async fn measure(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let topic = plan.topic("read");
    plan.create_topic(&topic).await?;
    fill(plan, &topic, plan.args.records).await?;
    let client = plan.client()?;
    let ranges = ranges(plan, &client, &topic).await?;
    // Not measured: it brings the topic into the page cache.
    subscription(plan, &client, &topic, &ranges).await?;
    let mut rates: [Vec<f64>; 3] = Default::default();
    for run in 0..plan.args.runs {
        for turn in 0..rates.len() {
            // Another order in each run: a machine that slows down would make the last one look
            // slow.
            let kind = (run + turn) % rates.len();
            let group = plan.group("read", rates.len() * run + kind);
            let rate = match kind {
                0 => subscription(plan, &client, &topic, &ranges).await?,
                1 => member(plan, &topic, &group, AutoCommit::Off, &ranges).await?,
                _ => {
                    let every_second = AutoCommit::Every(Duration::from_secs(1));
                    let rate = member(plan, &topic, &group, every_second, &ranges).await?;
                    // Otherwise the run did not measure what it says.
                    let committed = client.admin().group_offsets(&group, &[]).await?;
                    ensure!(!committed.is_empty(), "the member has not committed");
                    rate
                }
            };
            rates[kind].push(rate);
        }
    }
    let [subscription, without, with] = rates;
    Ok(vec![
        GroupBenchRow::new("one member reads", "records/s", without.clone())
            .against("plain subscription", subscription),
        GroupBenchRow::new("the same with a commit every second", "records/s", with)
            .against("one member without commits", without),
    ])
}

/// Appends records to all partitions in turn.
pub(super) async fn fill(plan: &GroupBenchPlan, topic: &str, records: u64) -> Result<()> {
    let producer = plan.client()?.producer(ProducerOptions::default());
    let value = vec![b'x'; plan.args.size];
    let record = Record { value: Some(value.into()), ..Record::default() };
    let mut left = records;
    let mut partition = 0;
    while left > 0 {
        let count = left.min(BATCH_RECORDS);
        let batch = vec![record.clone(); usize::try_from(count)?];
        producer.append(topic, partition, &batch[..]).await.context("fill the topic")?;
        partition = (partition + 1) % plan.args.partitions;
        left -= count;
    }
    Ok(())
}

/// Offsets of a partition from the first to the end.
type OffsetRange = std::ops::Range<u64>;

async fn ranges(plan: &GroupBenchPlan, client: &Client, topic: &str) -> Result<Vec<OffsetRange>> {
    let partitions: Vec<u32> = (0..plan.args.partitions).collect();
    let admin = client.admin();
    let starts = admin.resolve_offsets(topic, &partitions, &Position::Earliest).await?;
    let ends = admin.resolve_offsets(topic, &partitions, &Position::Latest).await?;
    let mut ranges = vec![0..0; partitions.len()];
    for (start, end) in starts.iter().zip(&ends) {
        let range = ranges.get_mut(start.partition as usize);
        *range.context("an unknown partition was resolved")? = start.offset..end.offset;
    }
    Ok(ranges)
}

/// Progress of one pass over the topic.
struct ReadPass<'a> {
    ranges: &'a [OffsetRange],
    next: Vec<u64>,
}

impl<'a> ReadPass<'a> {
    fn new(ranges: &'a [OffsetRange]) -> Self {
        Self { ranges, next: ranges.iter().map(|range| range.start).collect() }
    }

    /// Takes batches. Fails unless they are the next ones of their partition.
    fn take(&mut self, data: &Batches) -> Result<()> {
        let Batches { partition, start_offset, next_offset, .. } = data;
        let next = self.next.get_mut(*partition as usize).context("an unknown partition")?;
        ensure!(
            start_offset <= next && next_offset > next,
            "partition {partition}: got {start_offset}..{next_offset}, expected {next}"
        );
        *next = *next_offset;
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.next.iter().zip(self.ranges).all(|(next, range)| *next >= range.end)
    }

    fn records(&self) -> u64 {
        self.next.iter().zip(self.ranges).map(|(next, range)| next - range.start).sum()
    }
}

/// Returns the records per second of subscriptions to the whole topic.
async fn subscription(
    plan: &GroupBenchPlan,
    client: &Client,
    topic: &str,
    ranges: &[OffsetRange],
) -> Result<f64> {
    let since = Instant::now();
    let mut records = 0;
    while since.elapsed() < plan.args.duration {
        let starts = (0..plan.args.partitions).zip(ranges).map(|(partition, range)| {
            ReadStart::new(topic, partition, Position::Offset(range.start))
        });
        let mut events = client.consumer().subscribe(starts.collect(), ReadOptions::default());
        let mut pass = ReadPass::new(ranges);
        while !pass.is_done() {
            let event = timeout(STEP_MAX, events.next_encoded()).await;
            let event = event.context("the subscription stalls")?;
            if let Event::Data(data) = event.context("the subscription has ended")?? {
                pass.take(&data)?;
            }
        }
        records += pass.records();
    }
    Ok(records as f64 / since.elapsed().as_secs_f64())
}

/// Returns the records per second of a member that reads the whole topic.
async fn member(
    plan: &GroupBenchPlan,
    topic: &str,
    group: &str,
    auto_commit: AutoCommit,
    ranges: &[OffsetRange],
) -> Result<f64> {
    let group = plan.client()?.consumer_group(group).topics([topic]).auto_commit(auto_commit);
    let mut consumer = group.join();
    while consumer.assignment().len() < ranges.len() {
        next(&mut consumer).await?;
    }
    let since = Instant::now();
    let mut records = 0;
    while since.elapsed() < plan.args.duration {
        let partitions = consumer.assignment();
        // One subscription for all partitions, as without a group.
        consumer.pause(&partitions)?;
        for partition in &partitions {
            consumer.seek(partition, ranges[partition.partition as usize].start)?;
        }
        consumer.resume(&partitions)?;
        let mut pass = ReadPass::new(ranges);
        while !pass.is_done() {
            match next(&mut consumer).await? {
                GroupEvent::Data(data) => pass.take(&data)?,
                GroupEvent::CaughtUp { .. } => {}
                event => anyhow::bail!("the only member's assignment changed: {event:?}"),
            }
        }
        records += pass.records();
    }
    let rate = records as f64 / since.elapsed().as_secs_f64();
    consumer.close().await?;
    Ok(rate)
}

async fn next(consumer: &mut GroupConsumer) -> Result<GroupEvent<Batches>> {
    let event = timeout(STEP_MAX, consumer.next_encoded()).await;
    let event = event.context("the member gets no records")?;
    Ok(event.context("the member has ended")??)
}
