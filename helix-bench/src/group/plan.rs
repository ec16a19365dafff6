//! Flags of `group`, and what its measurements share.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use helix_client::contexts::ChosenCluster;
use helix_client::{Client, GroupConsumer, GroupEvent, NewTopic};
use helix_proto::log::v1::TopicConfig;
use tokio::time::{Instant, timeout};

use crate::host::cores;
use crate::load::check_count;
use crate::options::{OutputOptions, TargetOptions, bytes, duration};

/// Prefix of created topics and groups, before the process id.
const PREFIX: &str = "bench-group";
/// Longest wait for a step that is not measured.
pub(super) const STEP_MAX: Duration = Duration::from_secs(60);

/// Time of one member while several are called in turn.
pub(super) const TURN: Duration = Duration::from_millis(2);

/// Groups that are changed at the same time.
pub(super) const CONCURRENT_GROUPS: usize = 32;

/// Flags of `group`.
#[derive(Debug, Clone, Args)]
pub(crate) struct GroupBenchArgs {
    #[command(flatten)]
    pub(super) cluster: TargetOptions,
    /// Measurements to make
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = GroupPart::WITHOUT_OPERATOR)]
    pub(super) parts: Vec<GroupPart>,
    /// Runs of each measurement; the result is their median
    #[arg(long, default_value_t = 5)]
    pub(super) runs: usize,
    /// Partitions of the created topics
    #[arg(long, default_value_t = 12)]
    pub(super) partitions: u32,
    /// read: records of the topic, which is read again and again
    #[arg(long, default_value_t = 500_000)]
    pub(super) records: u64,
    /// read: bytes of a record value
    #[arg(long, default_value = "1KiB", value_parser = bytes)]
    pub(super) size: usize,
    /// commit: clients at the same time
    #[arg(long, default_value_t = 64)]
    pub(super) committers: usize,
    /// handover: clean leaves
    #[arg(long, default_value_t = 100)]
    pub(super) leaves: usize,
    /// handover: session timeout of members
    #[arg(long, default_value = "2s", value_parser = duration)]
    pub(super) session_timeout: Duration,
    /// coordinator: session timeout of the member, which must outlast an election
    #[arg(long, default_value = "10s", value_parser = duration)]
    pub(super) steady_session_timeout: Duration,
    /// heartbeat, memory: groups with members
    #[arg(long, default_value_t = 1000)]
    pub(super) groups: usize,
    /// heartbeat, memory: members of a group
    #[arg(long, default_value_t = 10)]
    pub(super) members: usize,
    /// heartbeat: interval of a member's heartbeats
    #[arg(long, default_value = "3s", value_parser = duration)]
    pub(super) heartbeat: Duration,
    /// memory, restart: groups without members
    #[arg(long, default_value_t = 10_000)]
    pub(super) empty_groups: usize,
    /// coordinator: shell command that kills node $HELIX_NODE_ID
    #[arg(long, value_name = "COMMAND")]
    pub(super) kill_command: Option<String>,
    /// restart: shell command that kills and starts node $HELIX_NODE_ID
    #[arg(long, value_name = "COMMAND")]
    pub(super) restart_command: Option<String>,
    /// Length of a run that is bounded by time
    #[arg(long, default_value = "5s", value_parser = duration)]
    pub(super) duration: Duration,
    /// Runtime threads of this process [default: one per core]
    #[arg(long)]
    pub(super) threads: Option<usize>,
    #[command(flatten)]
    pub(super) output: OutputOptions,
}

/// A measurement of `group`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum GroupPart {
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

/// Validated flags.
#[derive(Debug)]
pub(crate) struct GroupBenchPlan {
    pub(super) args: GroupBenchArgs,
    pub(super) cluster: ChosenCluster,
    pub(super) threads: usize,
}

impl GroupBenchPlan {
    /// Validates the flags.
    pub(super) fn new(args: &GroupBenchArgs) -> Result<Self> {
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

    pub(super) fn client(&self) -> Result<Client> {
        Ok(Client::new(self.cluster.clone().config())?)
    }

    pub(super) fn prefix(&self) -> String {
        format!("{PREFIX}-{}", std::process::id())
    }

    /// Returns the name of a part's topic.
    pub(super) fn topic(&self, part: &str) -> String {
        format!("{}-{part}", self.prefix())
    }

    pub(super) fn group_prefix(&self, what: &str) -> String {
        format!("{}-{what}-", self.prefix())
    }

    /// Returns the name of a group that no run has used.
    pub(super) fn group(&self, what: &str, number: usize) -> String {
        format!("{}{number}", self.group_prefix(what))
    }

    /// Creates a topic that keeps all records of a run.
    pub(super) async fn create_topic(&self, name: &str) -> Result<()> {
        let config = TopicConfig { retention_bytes: Some(u64::MAX), ..TopicConfig::default() };
        let topic = NewTopic { config, ..NewTopic::new(name, self.args.partitions) };
        let created = self.client()?.admin().create_topic(&topic).await;
        created.with_context(|| format!("create the topic {name}"))?;
        Ok(())
    }
}

/// Calls members in turn until they have divided all partitions. With `pauses`, they read none.
pub(super) async fn settle(
    members: &mut [GroupConsumer],
    partitions: u32,
    pauses: bool,
) -> Result<()> {
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
