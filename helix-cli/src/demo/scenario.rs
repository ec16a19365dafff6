//! The steps of the demo: write, kill a leader half way, restart it, read back, verify.
//! Measures each step and reports it on standard error.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::time::Duration;

use anyhow::Context;
use helix_client::proto::log::v1::{Durability, GetNodeStatusResponse};
use helix_client::{Client, Config, Event, NewTopic, Position, ReadOptions, ReadStart};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::measurements::{CrashMeasurement, DemoMeasurements, MeasuredRate, VerifyCounts};
use super::timeline::{AckSampler, AckTimeline};
use super::verify::{Verifier, VerifyFindings};
use super::workload::{DemoWorkload, TOPIC};
use super::write::{WriteProgress, WriterTasks, WrittenPartition};
use crate::durability::durability_name;
use crate::exit::{CliError, Exit};
use crate::local_cluster::LocalCluster;
use crate::output::message;
use crate::units::{count, measured};

/// Maximum time of a restarted node to catch up.
const CATCH_UP_MAX: Duration = Duration::from_secs(60);

/// Poll interval during the catch-up.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A run of the demo.
pub(crate) struct DemoScenario {
    pub(crate) cluster: LocalCluster,
    client: Client,
    workload: DemoWorkload,
    is_verbose: bool,
}

/// A node and the partitions that it leads.
struct Leader {
    node_id: u64,
    partitions: Vec<u32>,
}

/// Results of the write phase.
struct WritePhase {
    written: Vec<WrittenPartition>,
    before: MeasuredRate,
    after: Option<MeasuredRate>,
    crash: CrashMeasurement,
    timeline: AckTimeline,
}

impl DemoScenario {
    pub(crate) fn new(
        workload: DemoWorkload,
        cluster: LocalCluster,
        is_verbose: bool,
    ) -> anyhow::Result<Self> {
        let client = Client::new(Config::new(cluster.addresses()))?;
        Ok(Self { cluster, client, workload, is_verbose })
    }

    pub(crate) async fn run(&mut self) -> anyhow::Result<(DemoMeasurements, VerifyFindings)> {
        let nodes = self.cluster.len();
        let plural = if nodes == 1 { "" } else { "s" };
        let addresses = self.cluster.addresses().join(", ");
        self.log(format!("starting {nodes} node{plural} at {addresses}"));
        self.cluster.ready().await?;
        let topic = NewTopic::new(TOPIC, self.workload.partitions);
        let topic = self.client.admin().create_topic(&topic).await.context("create a topic")?;

        let WritePhase { written, before, after, crash, timeline } = self.write().await?;
        self.log(format!("reading {} records", count(self.workload.records)));
        let started = Instant::now();
        let (records_read, findings) =
            self.read(&written).await.context("read the records back")?;
        let read = MeasuredRate::new(records_read, &self.workload, started.elapsed());

        let statuses = self.statuses().await?;
        let weakest = written.iter().map(|written| i32::from(written.durability)).max();
        let durability = weakest.and_then(|number| Durability::try_from(number).ok());
        let slowest = |of: fn(&GetNodeStatusResponse) -> Option<prost_types::Duration>| {
            statuses.iter().filter_map(of).filter_map(micros).max()
        };
        let measurements = DemoMeasurements {
            version: env!("CARGO_PKG_VERSION"),
            nodes,
            replication_factor: topic.replication_factor,
            records: self.workload.records,
            record_bytes: self.workload.record_bytes,
            partitions: self.workload.partitions,
            write: before,
            write_after: after,
            crash,
            timeline,
            read,
            check: VerifyCounts::new(records_read, &findings),
            durability: durability_name(durability.unwrap_or_default()),
            storage: statuses[0].storage.clone(),
            sync_p50_us: slowest(|status| status.sync_p50),
            sync_p99_us: slowest(|status| status.sync_p99),
            cpus: std::thread::available_parallelism().map_or(1, NonZeroUsize::get),
        };
        Ok((measurements, findings))
    }

    /// Writes all records and kills a leader half way. At the end all nodes run again.
    async fn write(&mut self) -> anyhow::Result<WritePhase> {
        let records = self.workload.records;
        self.log(format!("writing {} records", count(records)));
        let progress = WriteProgress::new();
        let started = Instant::now();
        let sampler = AckSampler::start(&progress, started);
        let mut writers = WriterTasks::start(&self.client, self.workload, &progress);
        // Looked up early, so that the kill does not wait for the response.
        writers.during(progress.reaches(records.div_ceil(4))).await?;
        let leader = writers.during(self.busiest_leader()).await??;
        writers.during(progress.reaches(records.div_ceil(2))).await?;
        let before = MeasuredRate::new(progress.acked(), &self.workload, started.elapsed());
        let killed = Instant::now();
        let mut crash = self.crash(&leader, &mut writers, &progress).await?;

        let (acked, resumed) = (progress.acked(), Instant::now());
        let written = writers.finish().await?;
        let timeline = sampler.finish(killed, progress.acked());
        let rest = records - acked;
        let after = (rest > 0).then(|| MeasuredRate::new(rest, &self.workload, resumed.elapsed()));
        if self.cluster.len() > 1 {
            self.restart_and_catch_up(&leader, &mut crash).await?;
        }
        Ok(WritePhase { written, before, after, crash, timeline })
    }

    /// Kills the leader and waits until its partitions accept writes again. Restarts a single node
    /// for that.
    async fn crash(
        &mut self,
        leader: &Leader,
        writers: &mut WriterTasks,
        progress: &WriteProgress,
    ) -> anyhow::Result<CrashMeasurement> {
        let killed = Instant::now();
        let (acked_records, in_flight_records) = (progress.acked(), progress.in_flight());
        self.cluster.node(leader.node_id)?.kill().await?;
        progress.note_kill();
        let partitions_led = leader.partitions.len();
        self.log(format!(
            "killed node {} (kill -9), leader of {partitions_led} of {} partitions, after {} acks",
            leader.node_id,
            self.workload.partitions,
            count(acked_records)
        ));
        let restart_ms = match self.cluster.len() {
            1 => Some(milliseconds(writers.during(self.restart(leader.node_id)).await??)),
            _ => None,
        };
        let resumed = writers.during(progress.resume(&leader.partitions)).await?;
        let since_kill = |time: &Instant| milliseconds(*time - killed);
        let failover_ms = resumed.first().map(since_kill);
        if let Some(first) = resumed.first() {
            self.log(format!("next ack {} after the kill", measured(*first - killed)));
        }
        Ok(CrashMeasurement {
            node_id: leader.node_id,
            partitions_led,
            acked_records,
            in_flight_records,
            failover_ms,
            failover_all_ms: resumed.last().map(since_kill),
            restart_ms: restart_ms.unwrap_or_default(),
            caught_up_ms: None,
        })
    }

    /// Starts the node again and returns the time until it answers.
    async fn restart(&mut self, node_id: u64) -> anyhow::Result<Duration> {
        let restarted = Instant::now();
        let node = self.cluster.node(node_id)?;
        node.restart()?;
        node.ready(None).await?;
        let time = restarted.elapsed();
        self.log(format!("restarted node {node_id} in {}", measured(time)));
        Ok(time)
    }

    /// Starts the killed node again and waits until it has caught up with the others.
    async fn restart_and_catch_up(
        &mut self,
        leader: &Leader,
        crash: &mut CrashMeasurement,
    ) -> anyhow::Result<()> {
        let goals = self.committed().await?;
        let restarted = Instant::now();
        crash.restart_ms = milliseconds(self.restart(leader.node_id).await?);
        let address = self.cluster.node(leader.node_id)?.address();
        loop {
            let status = self.client.admin().node_status(Some(&address)).await;
            let lagging =
                status.as_ref().map_or(goals.len(), |status| lagging_shards(status, &goals));
            let time = restarted.elapsed();
            if lagging == 0 {
                crash.caught_up_ms = Some(milliseconds(time));
                self.log(format!("caught up {} after the restart", measured(time)));
                return Ok(());
            }
            if time > CATCH_UP_MAX {
                let what = format!("node {} has not caught up", leader.node_id);
                let failure = CliError::new(Exit::Error, what);
                let why = format!("{lagging} of {} shards lack entries", goals.len());
                return Err(failure.why(why).into());
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns the node that leads the most partitions.
    async fn busiest_leader(&self) -> anyhow::Result<Leader> {
        let metadata = self.client.admin().metadata(&[TOPIC]).await.context("find the leaders")?;
        let leaders: BTreeMap<u32, u64> = metadata
            .shards
            .iter()
            .filter_map(|shard| Some((shard.shard_id, shard.leader.as_ref()?.node_id)))
            .collect();
        let mut led: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        for (partition, shard) in (0..).zip(metadata.topics.iter().flat_map(|t| &t.shard_ids)) {
            if let Some(node_id) = leaders.get(shard).filter(|node_id| **node_id != 0) {
                led.entry(*node_id).or_default().push(partition);
            }
        }
        let busiest = led.into_iter().max_by_key(|(id, led)| (led.len(), Reverse(*id)));
        let (node_id, partitions) = busiest.context("no partition has a leader")?;
        Ok(Leader { node_id, partitions })
    }

    /// Returns the highest committed index of each shard on the running nodes.
    async fn committed(&self) -> anyhow::Result<BTreeMap<u32, u64>> {
        let mut committed = BTreeMap::new();
        for shard in self.statuses().await?.into_iter().flat_map(|status| status.shards) {
            let last: &mut u64 = committed.entry(shard.shard_id).or_default();
            *last = shard.committed_index.max(*last);
        }
        Ok(committed)
    }

    /// Returns the status of each running node; at least one runs.
    async fn statuses(&self) -> anyhow::Result<Vec<GetNodeStatusResponse>> {
        let mut statuses = Vec::new();
        for node in self.cluster.nodes().iter().filter(|node| node.is_running()) {
            let status = self.client.admin().node_status(Some(&node.address())).await;
            statuses.push(status.context("get the status of a node")?);
        }
        anyhow::ensure!(!statuses.is_empty(), "no node runs");
        Ok(statuses)
    }

    /// Reads every partition to its end and compares the records with the acks.
    async fn read(&self, written: &[WrittenPartition]) -> anyhow::Result<(u64, VerifyFindings)> {
        let ends = self.client.admin().resolve_offsets(TOPIC, &[], &Position::Latest).await?;
        let mut readers = JoinSet::new();
        for end in ends {
            let start = ReadStart::new(TOPIC, end.partition, Position::Earliest).until(end.offset);
            readers.spawn(read(self.client.clone(), start, self.workload));
        }
        let mut records_read = 0;
        let mut findings = VerifyFindings::default();
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

    fn log(&self, message: String) {
        if self.is_verbose {
            message!("{message}");
        }
    }
}

async fn read(
    client: Client,
    start: ReadStart,
    workload: DemoWorkload,
) -> anyhow::Result<(u32, Verifier)> {
    let partition = start.partition;
    let mut verifier = Verifier::new(workload, partition);
    if start.until == Some(0) {
        return Ok((partition, verifier));
    }
    let mut subscription = client.consumer().subscribe(vec![start], ReadOptions::default());
    while let Some(event) = subscription.next().await {
        if let Event::Data(data) = event? {
            for record in &data.records {
                verifier.add(record.offset, record.value.as_deref().unwrap_or_default());
            }
        }
    }
    Ok((partition, verifier))
}

/// Counts the shards in which a node has not synced and applied the entries up to `goals`.
fn lagging_shards(status: &GetNodeStatusResponse, goals: &BTreeMap<u32, u64>) -> usize {
    let has_reached = |shard_id: u32, goal: u64| {
        let shard = status.shards.iter().find(|shard| shard.shard_id == shard_id);
        shard.is_some_and(|shard| shard.applied_index >= goal && shard.synced_index >= goal)
    };
    goals.iter().filter(|(shard_id, goal)| !has_reached(**shard_id, **goal)).count()
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn micros(time: prost_types::Duration) -> Option<u64> {
    let time = helix_proto::time::duration(time).ok()?;
    u64::try_from(time.as_micros()).ok()
}

#[cfg(test)]
mod tests {
    use helix_client::proto::log::v1::ShardStatus;

    use super::*;

    #[test]
    fn shard_is_caught_up_when_synced_and_applied() {
        let shard = |shard_id, applied_index, synced_index| ShardStatus {
            shard_id,
            applied_index,
            synced_index,
            ..ShardStatus::default()
        };
        let goals = BTreeMap::from([(0, 5), (1, 100)]);
        let lagging = |shards: Vec<ShardStatus>| {
            lagging_shards(&GetNodeStatusResponse { shards, ..Default::default() }, &goals)
        };
        assert_eq!(lagging(vec![shard(0, 5, 5), shard(1, 100, 120)]), 0);
        assert_eq!(lagging(vec![shard(0, 5, 4), shard(1, 99, 120)]), 2);
        assert_eq!(lagging(vec![shard(0, 5, 5)]), 1);
    }
}
