//! Consumer groups: reads by a member, commits, changes of members, idle heartbeats, and memory.
//!
//! Each measurement has a reference that was measured with it, in turns. A call that fails ends the
//! run, so no result contains errors.

mod commits;
mod handover;
mod idle;
mod memory;
mod operator;
mod plan;
mod reads;
mod record_load;
mod row;

use anyhow::{Context, Result};
use schemars::JsonSchema;
use serde::Serialize;

use crate::output::ModeResult;
use crate::progress::{self, LiveLine};
use crate::target::delete_groups;
use crate::{exit, interrupt, runner, target};
pub(crate) use plan::GroupBenchArgs;
use plan::{GroupBenchPlan, GroupPart};
use row::GroupBenchRow;

/// Result of all measurements.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct GroupBenchReport {
    title: String,
    storage: String,
    durability: String,
    node_count: usize,
    server_version: String,
    rows: Vec<GroupBenchRow>,
    notes: Vec<String>,
}

/// Runs the mode and returns its exit code.
///
/// # Errors
/// A flag is out of range, the cluster cannot be reached, a call failed, a measurement could not
/// finish, or the result could not be written.
pub(crate) fn command(args: &GroupBenchArgs) -> Result<u8> {
    let plan = GroupBenchPlan::new(args).map_err(exit::usage)?;
    runner::run(plan.threads, &args.output, run(&plan))
}

/// Makes the measurements on new topics, which are deleted afterwards.
async fn run(plan: &GroupBenchPlan) -> Result<GroupBenchReport> {
    let client = plan.client()?;
    let status = client.admin().node_status(None).await;
    let status = status.with_context(|| format!("connect to {}", plan.cluster.addr.join(",")))?;
    let node_count = client.admin().metadata(&[""]).await?.nodes.len();
    let rows = measure(plan).await;
    // The groups first, or the coordinator would have them forget the topics.
    let deleted = delete_groups(&client, &plan.prefix()).await;
    let topics = client.admin().topics(&plan.prefix()).await.unwrap_or_default();
    let topics: Vec<&str> = topics.iter().map(|topic| topic.name.as_str()).collect();
    target::delete_topics(&client, &topics).await;
    let rows = rows?;
    // Groups of an interrupted part still have members, which the service removes.
    if !interrupt::is_requested() {
        deleted?;
    }
    Ok(GroupBenchReport {
        title: format!(
            "consumer groups: {node_count} nodes, topics of {} partitions; storage {}, server {}",
            plan.args.partitions, status.storage, status.version
        ),
        storage: status.storage,
        durability: status.durability,
        node_count,
        server_version: status.version,
        rows,
        notes: vec![
            "several values: their median, measured in turns with the reference; ratio: the \
             median of the runs' ratios"
                .to_owned(),
        ],
    })
}

impl ModeResult for GroupBenchReport {
    fn mode(&self) -> &'static str {
        "group"
    }

    fn exit_code(&self) -> u8 {
        0
    }
}

async fn measure(plan: &GroupBenchPlan) -> Result<Vec<GroupBenchRow>> {
    let mut rows = Vec::new();
    for part in &plan.args.parts {
        let name = format!("{part:?}").to_lowercase();
        progress::step(&format!("measuring {name}"));
        let shown = name.clone();
        let line = LiveLine::show(move |elapsed| {
            format!("measuring {shown}: {:.0} s", elapsed.as_secs_f64())
        });
        let part = async {
            match part {
                GroupPart::Read => reads::measure(plan).await,
                GroupPart::Commit => commits::measure(plan).await,
                GroupPart::Handover => handover::measure(plan).await,
                GroupPart::Heartbeat => idle::measure(plan).await,
                GroupPart::Memory => memory::measure(plan).await,
                GroupPart::Coordinator => operator::kill_coordinator(plan).await,
                GroupPart::Restart => operator::restart(plan).await,
            }
        };
        let measured = tokio::select! {
            measured = part => measured,
            // A part without all of its runs has no median.
            () = interrupt::requested() => break,
        };
        drop(line);
        rows.extend(measured.with_context(|| format!("measure {name}"))?);
    }
    Ok(rows)
}
