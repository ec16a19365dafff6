//! Consumer groups: reads by a member, commits, changes of members, idle heartbeats, and memory.
//!
//! Each measurement has a reference that was measured with it, in turns. A call that fails ends the
//! run, so no result contains errors.

mod commits;
mod handover;
mod idle;
mod memory;
mod operator;
mod reads;
mod record_load;
mod row;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use futures_util::{StreamExt, TryStreamExt, stream};
use helix_client::contexts::ChosenCluster;
use helix_client::{Client, GroupConsumer, GroupEvent, NewTopic};
use helix_proto::log::v1::{ErrorReason, TopicConfig};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{Instant, timeout};

use crate::host::cores;
use crate::load::check_count;
use crate::options::{OutputOptions, TargetOptions, bytes, duration};
use crate::output::ModeResult;
use crate::progress::{self, LiveLine};
use crate::{exit, interrupt, runner, target};
use row::GroupBenchRow;

/// Prefix of created topics and groups, before the process id.
const PREFIX: &str = "bench-group";
/// Longest wait for a step that is not measured.
const STEP_MAX: Duration = Duration::from_secs(60);

/// Time of one member while several are called in turn.
const TURN: Duration = Duration::from_millis(2);

/// Groups that are changed at the same time.
const CONCURRENT_GROUPS: usize = 32;

/// Flags of `group`.
#[derive(Debug, Clone, Args)]
pub(crate) struct GroupBenchArgs {
    #[command(flatten)]
    cluster: TargetOptions,
    /// Measurements to make
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = GroupPart::WITHOUT_OPERATOR)]
    parts: Vec<GroupPart>,
    /// Runs of each measurement; the result is their median
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Partitions of the created topics
    #[arg(long, default_value_t = 12)]
    partitions: u32,
    /// read: records of the topic, which is read again and again
    #[arg(long, default_value_t = 500_000)]
    records: u64,
    /// read: bytes of a record value
    #[arg(long, default_value = "1KiB", value_parser = bytes)]
    size: usize,
    /// commit: clients at the same time
    #[arg(long, default_value_t = 64)]
    committers: usize,
    /// handover: clean leaves
    #[arg(long, default_value_t = 100)]
    leaves: usize,
    /// handover: session timeout of members
    #[arg(long, default_value = "2s", value_parser = duration)]
    session_timeout: Duration,
    /// coordinator: session timeout of the member, which must outlast an election
    #[arg(long, default_value = "10s", value_parser = duration)]
    steady_session_timeout: Duration,
    /// heartbeat, memory: groups with members
    #[arg(long, default_value_t = 1000)]
    groups: usize,
    /// heartbeat, memory: members of a group
    #[arg(long, default_value_t = 10)]
    members: usize,
    /// heartbeat: interval of a member's heartbeats
    #[arg(long, default_value = "3s", value_parser = duration)]
    heartbeat: Duration,
    /// memory, restart: groups without members
    #[arg(long, default_value_t = 10_000)]
    empty_groups: usize,
    /// coordinator: shell command that kills node $HELIX_NODE_ID
    #[arg(long, value_name = "COMMAND")]
    kill_command: Option<String>,
    /// restart: shell command that kills and starts node $HELIX_NODE_ID
    #[arg(long, value_name = "COMMAND")]
    restart_command: Option<String>,
    /// Length of a run that is bounded by time
    #[arg(long, default_value = "5s", value_parser = duration)]
    duration: Duration,
    /// Runtime threads of this process [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
    #[command(flatten)]
    output: OutputOptions,
}

/// A measurement of `group`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum GroupPart {
    /// A member reads, against a subscription
    Read,
    /// Commits, against appends
    Commit,
    /// Members leave or are killed
    Handover,
    /// Idle members send heartbeats
    Heartbeat,
    /// Memory of groups, offsets and members
    Memory,
    /// A coordinator is killed
    Coordinator,
    /// A node with many groups is restarted
    Restart,
}

impl GroupPart {
    const WITHOUT_OPERATOR: [Self; 5] =
        [Self::Read, Self::Commit, Self::Handover, Self::Heartbeat, Self::Memory];
}

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

/// Validated flags.
#[derive(Debug)]
pub(crate) struct GroupBenchPlan {
    args: GroupBenchArgs,
    cluster: ChosenCluster,
    threads: usize,
}

impl GroupBenchPlan {
    /// Validates the flags.
    fn new(args: &GroupBenchArgs) -> Result<Self> {
        for (flag, value) in [
            ("--runs", args.runs),
            ("--partitions", args.partitions as usize),
            ("--committers", args.committers),
            ("--leaves", args.leaves),
            ("--groups", args.groups),
            ("--members", args.members),
            ("--empty-groups", args.empty_groups),
        ] {
            check_count(flag, value)?;
        }
        ensure!(args.records > 0, "--records must be at least 1");
        for (flag, timeout) in [
            ("--session-timeout", args.session_timeout),
            ("--steady-session-timeout", args.steady_session_timeout),
        ] {
            let valid = Duration::from_secs(1)..=Duration::from_secs(600);
            ensure!(valid.contains(&timeout), "{flag} must be from 1s to 10min");
        }
        ensure!(
            (Duration::from_millis(334)..=Duration::from_secs(60)).contains(&args.heartbeat),
            "--heartbeat must be from 334ms to 60s; nodes hold none back for longer"
        );
        for (part, flag, command) in [
            (GroupPart::Coordinator, "--kill-command", &args.kill_command),
            (GroupPart::Restart, "--restart-command", &args.restart_command),
        ] {
            let name = format!("{part:?}").to_lowercase();
            match args.parts.contains(&part) {
                true => ensure!(command.is_some(), "--parts {name} needs {flag}"),
                false => ensure!(command.is_none(), "{flag} is only for --parts {name}"),
            }
        }
        let threads = args.threads.unwrap_or_else(cores);
        check_count("--threads", threads)?;
        Ok(Self { args: args.clone(), cluster: args.cluster.choose()?, threads })
    }

    fn client(&self) -> Result<Client> {
        Ok(Client::new(self.cluster.clone().config())?)
    }

    fn prefix(&self) -> String {
        format!("{PREFIX}-{}", std::process::id())
    }

    /// Returns the name of a part's topic.
    fn topic(&self, part: &str) -> String {
        format!("{}-{part}", self.prefix())
    }

    fn group_prefix(&self, what: &str) -> String {
        format!("{}-{what}-", self.prefix())
    }

    /// Returns the name of a group that no run has used.
    fn group(&self, what: &str, number: usize) -> String {
        format!("{}{number}", self.group_prefix(what))
    }

    /// Creates a topic that keeps all records of a run.
    async fn create_topic(&self, name: &str) -> Result<()> {
        let config = TopicConfig { retention_bytes: Some(u64::MAX), ..TopicConfig::default() };
        let topic = NewTopic { config, ..NewTopic::new(name, self.args.partitions) };
        let created = self.client()?.admin().create_topic(&topic).await;
        created.with_context(|| format!("create the topic {name}"))?;
        Ok(())
    }
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

/// Deletes the groups whose names have this prefix. They must have no members.
pub(crate) async fn delete_groups(client: &Client, prefix: &str) -> Result<()> {
    let groups = client.admin().groups().await.context("list groups")?;
    let names = groups.into_iter().map(|group| group.group).filter(|name| name.starts_with(prefix));
    let delete = async |name: String| match client.admin().delete_group(&name).await {
        Err(error) if error.is(ErrorReason::GroupNotFound) => Ok(()),
        deleted => deleted.with_context(|| format!("delete the group {name}")),
    };
    stream::iter(names).map(delete).buffer_unordered(CONCURRENT_GROUPS).try_collect().await
}

/// Calls members in turn until they have divided all partitions. With `pauses`, they read none.
async fn settle(members: &mut [GroupConsumer], partitions: u32, pauses: bool) -> Result<()> {
    let until = Instant::now() + STEP_MAX;
    loop {
        for member in &mut *members {
            let Ok(event) = timeout(TURN, member.next_encoded()).await else { continue };
            let event = event.context("a member has ended")??;
            if let GroupEvent::Assigned(assigned) = event
                && pauses
            {
                member.pause(&assigned)?;
            }
        }
        let owned: usize = members.iter().map(|member| member.assignment().len()).sum();
        if owned == partitions as usize && members.iter().all(GroupConsumer::is_settled) {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{owned} of {partitions} partitions are assigned");
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        args: GroupBenchArgs,
    }

    #[test]
    fn rejects_flags_out_of_range() {
        let plan = |line: &str| GroupBenchPlan::new(&Flags::parse_from(line.split(' ')).args);
        plan("group").unwrap();
        plan("group --parts coordinator --kill-command true").unwrap();
        plan("group --heartbeat 60s").unwrap();
        for line in [
            "group --runs 0",
            "group --session-timeout 1ms",
            "group --heartbeat 61s",
            "group --parts restart",
            "group --parts coordinator --restart-command true",
            "group --kill-command true",
        ] {
            assert!(plan(line).is_err(), "{line}");
        }
    }
}
