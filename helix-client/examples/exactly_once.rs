//! Exactly once from one topic to another: each result states the offset up to which it counts.

use std::collections::HashMap;

use helix_client::proto::log::v1::{ErrorReason, Record};
use helix_client::{
    AppendOptions, AssignedPartition, AutoCommit, Client, Config, FetchOptions, GroupConsumer,
    GroupEvent, Position, ProducerOptions, ReadStart, Result,
};

// doc: exactly_once
/// Sum of the amounts below `next_offset` of a partition.
#[derive(Default)]
pub struct Total {
    pub sum: i64,
    pub next_offset: u64,
    /// Offset of the next result.
    results_end: u64,
}

/// Reads the last result of a partition.
pub async fn last_total(client: &Client, results: &str, partition: u32) -> Result<Total> {
    let last = ReadStart::new(results, partition, Position::Tail(1));
    let read = client.consumer().fetch(&[last], &FetchOptions::default()).await?;
    let mut total = Total { results_end: read[0].next_offset, ..Total::default() };
    if let Some(record) = read[0].records.last() {
        let text = std::str::from_utf8(record.value.as_deref().unwrap_or_default());
        let mut numbers = text.unwrap_or_default().split(' ');
        total.next_offset = numbers.next().and_then(|it| it.parse().ok()).unwrap_or_default();
        total.sum = numbers.next().and_then(|it| it.parse().ok()).unwrap_or_default();
    }
    Ok(total)
}

/// Adds up the amounts of each partition, and stores the sums in the same partition of `results`.
pub async fn add_up(client: &Client, mut consumer: GroupConsumer, results: &str) -> Result<()> {
    let producer = client.producer(ProducerOptions::default());
    let mut totals: HashMap<u32, Total> = HashMap::new();
    while let Some(event) = consumer.next().await {
        let records = match event? {
            GroupEvent::Data(records) => records,
            GroupEvent::Assigned(partitions) => {
                for partition in partitions {
                    let total = last_total(client, results, partition.partition).await?;
                    // The result has the offset, not the group.
                    consumer.seek(&partition, total.next_offset)?;
                    totals.insert(partition.partition, total);
                }
                continue;
            }
            _ => continue,
        };
        let total = totals.entry(records.partition).or_default();
        let amount = |value: &[u8]| std::str::from_utf8(value).ok()?.parse::<i64>().ok();
        let amounts = records.records.iter().filter_map(|it| amount(it.value.as_deref()?));
        let sum = total.sum + amounts.sum::<i64>();
        let result = format!("{} {sum}", records.next_offset);
        let result = Record { value: Some(result.into()), ..Record::default() };
        let here = AppendOptions::default().expecting(total.results_end);
        match producer.append_with(results, records.partition, &[result][..], &here).await {
            Ok(_) => {
                let (next_offset, results_end) = (records.next_offset, total.results_end + 1);
                *total = Total { sum, next_offset, results_end };
            }
            // Another member has stored a result: its partition was this one's before, or is now.
            Err(error) if error.is(ErrorReason::ExpectedOffsetMismatch) => {
                *total = last_total(client, results, records.partition).await?;
                consumer.seek(&AssignedPartition::from(&records), total.next_offset)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
// doc: end

#[tokio::main]
async fn main() -> Result<()> {
    let client = Client::connect(Config::new(["127.0.0.1:9092"])).await?;
    let consumer = client.consumer_group("totals").topics(["amounts"]);
    add_up(&client, consumer.auto_commit(AutoCommit::Off).join(), "totals").await
}
