//! A member that reads a topic, against a subscription to all of its partitions.

use std::time::Duration;

use anyhow::{Context, Result};
use helix_client::{
    AutoCommit, Event, GroupEvent, Position, ProducerOptions, ReadOptions, ReadStart,
};
use helix_proto::log::v1::Record;
use tokio::time::Instant;

use super::{GroupBenchPlan, GroupBenchRow, median};

/// Records of a batch.
const BATCH_RECORDS: u64 = 100;

pub(super) async fn measure(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    write(plan).await?;
    let mut rates: [Vec<f64>; 3] = Default::default();
    for run in 0..plan.args.runs {
        let seconds = subscription(plan).await?;
        rates[0].push(plan.args.records as f64 / seconds);
        let every_second = AutoCommit::Every(Duration::from_secs(1));
        for (number, auto_commit) in [(1, AutoCommit::Off), (2, every_second)] {
            let group = plan.group("read", 2 * run + number);
            let seconds = member(plan, group, auto_commit).await?;
            rates[number].push(plan.args.records as f64 / seconds);
        }
    }
    let [subscription, without_commits, with_commits] = rates.map(|rates| median(&rates));
    let row = |name: &str, value, reference_name, reference| GroupBenchRow {
        name: name.to_owned(),
        value,
        unit: "records/s",
        reference_name,
        reference: Some(reference),
    };
    Ok(vec![
        row("one member reads", without_commits, "a subscription", subscription),
        row("with commits every second", with_commits, "without commits", without_commits),
    ])
}

async fn write(plan: &GroupBenchPlan) -> Result<()> {
    let producer = plan.client()?.producer(ProducerOptions::default());
    let topic = plan.topic();
    let value = vec![b'x'; plan.args.size];
    let record = Record { value: Some(value.into()), ..Record::default() };
    let mut left = plan.args.records;
    let mut partition = 0;
    while left > 0 {
        let count = left.min(BATCH_RECORDS);
        let batch = vec![record.clone(); usize::try_from(count)?];
        producer.append(&topic, partition, &batch[..]).await.context("fill the topic")?;
        partition = (partition + 1) % plan.args.partitions;
        left -= count;
    }
    Ok(())
}

/// Returns the seconds of a subscription to all records.
async fn subscription(plan: &GroupBenchPlan) -> Result<f64> {
    let client = plan.client()?;
    let topic = plan.topic();
    let since = Instant::now();
    let starts = (0..plan.args.partitions)
        .map(|partition| ReadStart::new(&topic, partition, Position::Earliest));
    let mut events = client.consumer().subscribe(starts.collect(), ReadOptions::default());
    let mut left = plan.args.records;
    while left > 0 {
        if let Event::Data(data) = events.next_encoded().await.context("the end")?? {
            left = left.saturating_sub(data.next_offset - data.start_offset);
        }
    }
    Ok(since.elapsed().as_secs_f64())
}

/// Returns the seconds of a member from its first records on.
async fn member(plan: &GroupBenchPlan, group: String, auto_commit: AutoCommit) -> Result<f64> {
    let group = plan.client()?.consumer_group(group).topics([plan.topic()]);
    let mut consumer = group.auto_commit(auto_commit).join();
    let mut since = Instant::now();
    let mut left = plan.args.records;
    while left > 0 {
        match consumer.next_encoded().await.context("the member has ended")?? {
            GroupEvent::Data(data) => {
                left = left.saturating_sub(data.next_offset - data.start_offset);
            }
            // The join is measured elsewhere; a subscription has none.
            GroupEvent::Assigned(_) => since = Instant::now(),
            _ => {}
        }
    }
    let seconds = since.elapsed().as_secs_f64();
    consumer.close().await?;
    Ok(seconds)
}
