//! Time until records arrive at the next owner: after a clean leave, and after a kill.

use std::time::Duration;

use anyhow::{Context, Result};
use helix_client::{AssignedPartition, GroupConsumer, GroupEvent, ProducerOptions, StartPolicy};
use helix_proto::log::v1::Record;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio::time::{Instant, interval, timeout};

use super::{GroupBenchPlan, GroupBenchRow, STEP_MAX, median, settle};

/// Interval of the records in each partition.
const RECORD_INTERVAL: Duration = Duration::from_millis(2);

pub(super) async fn measure(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let load = load(plan)?;
    let mut leaves = Vec::new();
    for number in 0..plan.args.leaves {
        let group = plan.group("leave", number);
        let mut members = [member(plan, &group)?, member(plan, &group)?];
        settle(&mut members, plan.args.partitions).await?;
        let [leaving, mut staying] = members;
        let moved = leaving.assignment();
        let since = Instant::now();
        let (left, arrived) = tokio::join!(leaving.close(), until_flowing(&mut staying, moved));
        left?;
        arrived?;
        leaves.push(since.elapsed().as_secs_f64());
        staying.close().await?;
    }
    let mut kills = Vec::new();
    for number in 0..plan.args.runs {
        kills.push(kill(plan, &plan.group("kill", number)).await?);
    }
    load.abort();
    leaves.sort_by(f64::total_cmp);
    let p99 = leaves[(leaves.len() * 99).div_ceil(100) - 1];
    let row = |name: String, value: f64, reference_name, reference| GroupBenchRow {
        name,
        value: value * 1e3,
        unit: "ms",
        reference_name,
        reference,
    };
    let session = plan.args.session_timeout.as_secs_f64();
    Ok(vec![
        row("clean leave until all partitions flow, p50".to_owned(), median(&leaves), "", None),
        row(format!("p99 of {} leaves", leaves.len()), p99, "", None),
        row(
            "kill until all partitions flow".to_owned(),
            median(&kills),
            "session timeout",
            Some(session * 1e3),
        ),
    ])
}

fn member(plan: &GroupBenchPlan, group: &str) -> Result<GroupConsumer> {
    let group = plan.client()?.consumer_group(group).topics([plan.topic()]);
    let group = group.start(StartPolicy::Latest);
    Ok(group.session_timeout(plan.args.session_timeout).join())
}

/// Appends records to all partitions until it is aborted.
fn load(plan: &GroupBenchPlan) -> Result<JoinHandle<helix_client::Result<()>>> {
    let producer = plan.client()?.producer(ProducerOptions::default());
    let (topic, partitions) = (plan.topic(), plan.args.partitions);
    Ok(tokio::spawn(async move {
        let mut ticks = interval(RECORD_INTERVAL);
        let record = Record { value: Some("x".into()), ..Record::default() };
        loop {
            ticks.tick().await;
            let appends = (0..partitions)
                .map(|partition| producer.append(&topic, partition, std::slice::from_ref(&record)));
            futures_util::future::try_join_all(appends).await?;
        }
    }))
}

/// Waits until records of all these partitions have arrived.
async fn until_flowing(
    member: &mut GroupConsumer,
    mut moved: Vec<AssignedPartition>,
) -> Result<()> {
    let flowing = async {
        while !moved.is_empty() {
            let event = member.next_encoded().await.context("the member has ended")??;
            if let GroupEvent::Data(data) = event {
                let from = AssignedPartition::from(&data);
                moved.retain(|partition| *partition != from);
            }
        }
        anyhow::Ok(())
    };
    timeout(STEP_MAX, flowing).await.context("partitions do not flow")?
}

/// A runtime whose tasks end with it at once.
struct KillableRuntime(Option<Runtime>);

impl KillableRuntime {
    fn new() -> Result<Self> {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        runtime.worker_threads(1).enable_all();
        Ok(Self(Some(runtime.build().context("start a runtime")?)))
    }

    /// Runs `start` so that its tasks run here.
    fn run<T>(&self, start: impl FnOnce() -> T) -> T {
        let _entered = self.0.as_ref().map(Runtime::enter);
        start()
    }
}

impl Drop for KillableRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Returns the seconds from the end of a member's runtime until its partitions flow.
async fn kill(plan: &GroupBenchPlan, group: &str) -> Result<f64> {
    let runtime = KillableRuntime::new()?;
    let killed = runtime.run(|| member(plan, group))?;
    let mut members = [killed, member(plan, group)?];
    settle(&mut members, plan.args.partitions).await?;
    let [killed, mut staying] = members;
    let moved = killed.assignment();
    let since = Instant::now();
    // Its heartbeats end with it, before the consumer could leave.
    drop(runtime);
    drop(killed);
    until_flowing(&mut staying, moved).await?;
    let seconds = since.elapsed().as_secs_f64();
    staying.close().await?;
    Ok(seconds)
}
