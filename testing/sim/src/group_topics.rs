//! Topics that are created, grown, deleted and created again while a consumer group reads them.

use std::collections::BTreeMap;
use std::time::Duration;

use helix_checker::{BatchKey, payload};
use helix_client::{AppendOptions, Client, NewTopic};
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::{Instant, sleep};

use crate::coverage::CoverageMark;
use crate::workload::{ClientContext, RETRY_PAUSE, TOPIC_IS_THERE};

/// Prefix of the topics' names, which members' patterns match.
pub const PREFIX: &str = "extra-";

/// Mean pause between two changes of topics.
const CHANGE_PAUSE: Duration = Duration::from_millis(2_500);

/// Mean pause between two batches.
const WRITE_PAUSE: Duration = Duration::from_millis(60);

const PARTITIONS_MAX: u32 = 6;

/// Changes and writes the topics until the workload stops.
pub async fn operate(context: ClientContext) -> turmoil::Result {
    context.wait_for_phase(TOPIC_IS_THERE).await;
    let (client, rng) = (context.client()?, context.rng(context.id()));
    let producer = context.id();
    let topics =
        TopicChanger { client, rng, partitions: BTreeMap::new(), producer, number: 0, context };
    topics.run().await;
    Ok(())
}

struct TopicChanger {
    context: ClientContext,
    client: Client,
    rng: StdRng,
    /// Partition counts of the existing topics, by number.
    partitions: BTreeMap<u32, u32>,
    producer: u32,
    number: u64,
}

impl TopicChanger {
    async fn run(mut self) {
        let mut next_change = Instant::now();
        while self.context.pause(WRITE_PAUSE, &mut self.rng).await {
            if self.context.group.is_calm() {
                self.context.group.fix_topics();
            } else if Instant::now() >= next_change {
                self.change().await;
                next_change =
                    Instant::now() + CHANGE_PAUSE.mul_f64(self.rng.random_range(0.1..2.0));
            }
            self.write().await;
        }
        self.context.group.fix_topics();
        self.context.on_end();
    }

    async fn change(&mut self) {
        let topics = self.context.plan.group.as_ref().map_or(0, |group| group.topics);
        if topics == 0 {
            return;
        }
        let number = self.rng.random_range(0..topics);
        let name = format!("{PREFIX}{number}");
        let admin = self.client.admin();
        let marks = self.context.marks.clone();
        match self.partitions.get(&number).copied() {
            None => {
                let count = self.rng.random_range(1..=PARTITIONS_MAX / 2);
                self.context.recorder.note(&format!("creating {name} with {count} partitions"));
                // A retry may find the topic with another count.
                match admin.create_topic(&NewTopic::new(&name, count)).await {
                    Ok(_) => drop(self.partitions.insert(number, count)),
                    Err(error) => {
                        self.context.recorder.note(&format!("cannot create {name}: {error}"));
                        if let Ok(topic) = admin.topic(&name).await {
                            let count = u32::try_from(topic.partitions.len()).unwrap_or(0);
                            self.partitions.insert(number, count);
                        }
                    }
                }
            }
            Some(count) if count < PARTITIONS_MAX && self.rng.random_bool(0.5) => {
                self.context.recorder.note(&format!("growing {name} to {}", count + 1));
                if admin.add_partitions(&name, count + 1).await.is_ok() {
                    marks.hit(CoverageMark::GroupTopicGrown);
                }
                if let Ok(topic) = admin.topic(&name).await {
                    let count = u32::try_from(topic.partitions.len()).unwrap_or(0);
                    self.partitions.insert(number, count);
                }
            }
            Some(_) => {
                self.context.recorder.note(&format!("deleting {name}"));
                if admin.delete_topic(&name).await.is_ok() {
                    marks.hit(CoverageMark::GroupTopicDeleted);
                    self.partitions.remove(&number);
                }
            }
        }
    }

    async fn write(&mut self) {
        let topics: Vec<(u32, u32)> = self.partitions.iter().map(|(at, n)| (*at, *n)).collect();
        if topics.is_empty() {
            return;
        }
        let (number, count) = topics[self.rng.random_range(0..topics.len())];
        if count == 0 {
            return;
        }
        let partition = self.rng.random_range(0..count);
        let key = BatchKey { producer: self.producer, number: self.number };
        self.number += 1;
        let batch = payload::build(key, self.rng.random_range(1..=5));
        let name = format!("{PREFIX}{number}");
        let options = AppendOptions::default();
        if self.client.append(&name, partition, batch, &options).await.is_err() {
            sleep(RETRY_PAUSE).await;
        }
    }
}
