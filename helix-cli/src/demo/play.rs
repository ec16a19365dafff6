//! The demo's course: write, kill half way, restart, wait for the rest, read back, compare.
//! Measures on the way; says what it does on standard error.

use std::num::NonZeroUsize;
use std::time::Duration;

use anyhow::Context;
use helix_client::proto::log::v1::Durability;
use helix_client::{Client, Config, Event, NewTopic, Position, ReadOptions, Start};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::TOPIC;
use super::figures::{Check, Crash, Figures, Rate};
use super::verify::{Findings, Verifier};
use super::workload::Workload;
use super::write::{Progress, Writers, Written};
use crate::commands::produce::durability_name;
use crate::node::Node;
use crate::units::{count, measured};

/// One run.
pub(crate) struct Play {
    pub(crate) node: Node,
    client: Client,
    workload: Workload,
    is_talkative: bool,
}

impl Play {
    pub(crate) fn new(workload: Workload, node: Node, is_talkative: bool) -> anyhow::Result<Self> {
        let client = Client::new(Config::new([node.address()]))?;
        Ok(Self { node, client, workload, is_talkative })
    }

    pub(crate) async fn run(&mut self) -> anyhow::Result<(Figures, Findings)> {
        self.say(format!("starting a node at {}", self.node.address()));
        self.node.ready().await?;
        let topic = NewTopic::new(TOPIC, self.workload.partitions);
        self.client.admin().create_topic(&topic).await.context("create a topic")?;

        let (written, write, crash) = self.write().await?;
        self.say(format!("reading {} records", count(self.workload.records)));
        let started = Instant::now();
        let (records_read, findings) = self.read(&written).await.context("read it back")?;
        let read = Rate::new(records_read, &self.workload, started.elapsed());

        let status = self.client.admin().node_status(None).await.context("ask for figures")?;
        let weakest = written.iter().map(|written| i32::from(written.durability)).max();
        let durability = weakest.and_then(|number| Durability::try_from(number).ok());
        let figures = Figures {
            version: env!("CARGO_PKG_VERSION"),
            records: self.workload.records,
            record_bytes: self.workload.record_bytes,
            partitions: self.workload.partitions,
            write,
            crash,
            read,
            check: Check::new(records_read, &findings),
            durability: durability_name(durability.unwrap_or_default()),
            storage: status.storage,
            sync_p50_us: status.sync_p50.and_then(micros),
            sync_p99_us: status.sync_p99.and_then(micros),
            cpus: std::thread::available_parallelism().map_or(1, NonZeroUsize::get),
        };
        Ok((figures, findings))
    }

    /// Writes everything and kills the node half way.
    async fn write(&mut self) -> anyhow::Result<(Vec<Written>, Rate, Crash)> {
        let records = self.workload.records;
        self.say(format!("writing {} records", count(records)));
        let progress = Progress::new();
        let started = Instant::now();
        let mut writers = Writers::start(&self.client, self.workload, &progress);
        writers.during(progress.reaches(records.div_ceil(2))).await?;
        let (crash, outage) = self.crash(&mut writers, &progress).await?;
        let written = writers.finish().await?;
        // The rate is that of a node that runs; the outage has a figure of its own.
        let rate = Rate::new(records, &self.workload, started.elapsed() - outage);
        Ok((written, rate, crash))
    }

    /// Kills the node and starts it again. Gives the time in which nothing could be acked.
    async fn crash(
        &mut self,
        writers: &mut Writers,
        progress: &Progress,
    ) -> anyhow::Result<(Crash, Duration)> {
        let killed = Instant::now();
        let (acked_records, in_flight_records) = (progress.acked(), progress.in_flight());
        self.node.kill().await?;
        self.say(format!("killed the node (kill -9) after {} acks", count(acked_records)));
        let restarted = Instant::now();
        self.node.restart()?;
        // Acks that had arrived before the kill are counted by now, and no node is up so soon.
        sleep(Duration::from_millis(5)).await;
        let acked = progress.acked();
        let is_done = acked == self.workload.records;
        let next_ack = async {
            progress.reaches(if is_done { acked } else { acked + 1 }).await;
            killed.elapsed()
        };
        let ready = async {
            self.node.ready().await?;
            Ok::<_, anyhow::Error>(restarted.elapsed())
        };
        let both = writers.during(async { tokio::join!(ready, next_ack) }).await?;
        let restart = both.0?;
        let outage = if is_done { killed.elapsed() } else { both.1 };
        self.say(format!("restarted in {}", measured(restart)));
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let crash = Crash {
            acked_records,
            in_flight_records,
            restart_ms: milliseconds(restart),
            outage_ms: (!is_done).then_some(milliseconds(outage)),
        };
        Ok((crash, outage))
    }

    /// Reads every partition to its end and compares.
    async fn read(&self, written: &[Written]) -> anyhow::Result<(u64, Findings)> {
        let ends = self.client.admin().resolve_offsets(TOPIC, &[], &Position::Latest).await?;
        let mut readers = JoinSet::new();
        for end in ends {
            let start = Start::new(TOPIC, end.partition, Position::Earliest).until(end.offset);
            readers.spawn(read(self.client.clone(), start, self.workload));
        }
        let mut records_read = 0;
        let mut findings = Findings::default();
        while let Some(reader) = readers.join_next().await {
            let (partition, verifier) = reader??;
            records_read += verifier.read();
            let of_partition = written.iter().filter(|written| written.partition == partition);
            let acked: Vec<_> =
                of_partition.flat_map(|written| written.acked.iter().copied()).collect();
            findings.add(verifier.finish(&acked));
        }
        Ok((records_read, findings))
    }

    fn say(&self, what: String) {
        if self.is_talkative {
            eprintln!("{what}");
        }
    }
}

async fn read(client: Client, start: Start, workload: Workload) -> anyhow::Result<(u32, Verifier)> {
    let partition = start.partition;
    let mut verifier = Verifier::new(workload, partition);
    if start.until == Some(0) {
        return Ok((partition, verifier));
    }
    let mut subscription = client.consumer().subscribe(vec![start], ReadOptions::default());
    while let Some(event) = subscription.next().await {
        if let Event::Data(data) = event? {
            for record in &data.records {
                verifier.see(record.offset, record.value.as_deref().unwrap_or_default());
            }
        }
    }
    Ok((partition, verifier))
}

fn micros(time: prost_types::Duration) -> Option<u64> {
    let time = Duration::try_from(time).ok()?;
    u64::try_from(time.as_micros()).ok()
}
