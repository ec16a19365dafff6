//! Time until records arrive at the next owner: after a clean leave, and after a kill.

use anyhow::{Context, Result};
use helix_client::{AssignedPartition, GroupConsumer, GroupEvent, StartPolicy};
use tokio::runtime::Runtime;
use tokio::time::{Instant, timeout};

use super::plan::{GroupBenchPlan, STEP_MAX, settle};
use super::record_load::RecordLoad;
use super::row::{GroupBenchRow, percentile};

pub(super) async fn measure(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let topic = plan.topic("handover");
    plan.create_topic(&topic).await?;
    let mut load = RecordLoad::start(plan, &topic, 0..plan.args.partitions)?;
    let mut leaves = Vec::with_capacity(plan.args.leaves);
    for number in 0..plan.args.leaves {
        let left = leave(plan, &topic, &plan.group("leave", number)).await;
        load.check()?;
        leaves.push(left? * 1e3);
    }
    let mut kills = Vec::with_capacity(plan.args.runs);
    for number in 0..plan.args.runs {
        let killed = kill(plan, &topic, &plan.group("kill", number)).await;
        load.check()?;
        kills.push(killed? * 1e3);
    }
    let session = plan.args.session_timeout.as_secs_f64() * 1e3;
    let p99 = percentile(&leaves, 99);
    Ok(vec![
        GroupBenchRow::new("clean leave until all partitions flow, p50", "ms", leaves),
        GroupBenchRow::new(format!("the same, p99 of {}", plan.args.leaves), "ms", vec![p99]),
        GroupBenchRow::new("member killed until all partitions flow", "ms", kills)
            .against("session timeout", vec![session; plan.args.runs]),
    ])
}

fn member(plan: &GroupBenchPlan, topic: &str, group: &str) -> Result<GroupConsumer> {
    let group = plan.client()?.consumer_group(group).topics([topic]);
    let group = group.start(StartPolicy::Latest);
    Ok(group.session_timeout(plan.args.session_timeout).join())
}

/// Returns the seconds from the begin of a leave until the partitions flow.
async fn leave(plan: &GroupBenchPlan, topic: &str, group: &str) -> Result<f64> {
    let mut members = [member(plan, topic, group)?, member(plan, topic, group)?];
    settle(&mut members, plan.args.partitions, false).await?;
    let [leaving, mut staying] = members;
    let moved = leaving.assignment();
    let since = Instant::now();
    let (left, seconds) = tokio::join!(leaving.close(), until_flowing(&mut staying, moved, since));
    left?;
    staying.close().await?;
    seconds
}

/// Returns the seconds until records of all these partitions have arrived.
async fn until_flowing(
    member: &mut GroupConsumer,
    mut moved: Vec<AssignedPartition>,
    since: Instant,
) -> Result<f64> {
    let flowing = async {
        while !moved.is_empty() {
            let event = member.next_encoded().await.context("the member has ended")??;
            if let GroupEvent::Data(data) = event {
                let from = AssignedPartition::from(&data);
                moved.retain(|partition| *partition != from);
            }
        }
        anyhow::Ok(since.elapsed().as_secs_f64())
    };
    timeout(STEP_MAX, flowing).await.context("partitions do not flow")?
}

/// A runtime whose tasks end with it at once, without their last steps.
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
async fn kill(plan: &GroupBenchPlan, topic: &str, group: &str) -> Result<f64> {
    let runtime = KillableRuntime::new()?;
    let killed = runtime.run(|| member(plan, topic, group))?;
    let mut members = [killed, member(plan, topic, group)?];
    settle(&mut members, plan.args.partitions, false).await?;
    let [killed, mut staying] = members;
    let moved = killed.assignment();
    let since = Instant::now();
    // Its heartbeats end with it, before the consumer could leave.
    drop(runtime);
    drop(killed);
    let seconds = until_flowing(&mut staying, moved, since).await?;
    staying.close().await?;
    Ok(seconds)
}
