//! Subcommands: `run`, `kill-all`, `retries`, `failover`, `refill`, `repairs`, `elections`,
//! `rolling`, `grow`, `upgrade`, `flood`, `fair-shares`, `groups` and `check`.
//!
//! Each starts its own nodes in its own directory, which is kept after a failure.

mod ack_probe;
mod beside;
mod elections;
mod failover;
mod fair_shares;
mod flood;
mod groups;
mod grow;
mod kill_all;
mod refill;
mod repairs;
mod retries;
mod rolling;
mod run;
mod test_bed;
mod upgrade;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::groups::member;
use crate::history;
use crate::output::{print, print_error};

pub use crate::flood::{AbusePattern, NeighbourCalls};
pub use crate::groups::member::GroupMemberArgs;
pub use elections::ElectionsArgs;
pub use failover::FailoverArgs;
pub use fair_shares::FairSharesArgs;
pub use flood::FloodArgs;
pub use groups::GroupsArgs;
pub use grow::GrowArgs;
pub use kill_all::KillAllArgs;
pub use refill::RefillArgs;
pub use repairs::RepairsArgs;
pub use retries::RetriesArgs;
pub use rolling::RollingArgs;
pub use run::{FaultCounts, RunArgs};
pub use upgrade::UpgradeArgs;

/// Options of all commands that start a cluster.
#[derive(Debug, Clone, Args)]
pub struct CommonArgs {
    /// Nodes of the cluster: 1, 3 or 5
    #[arg(long, default_value_t = 3)]
    pub nodes: u64,

    /// Data shards of the new cluster; with several, leaders are on different nodes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=64))]
    pub shards: u64,

    /// Seed of all random choices
    #[arg(long, env = "HELIX_SEED", default_value_t = 1)]
    pub seed: u64,

    /// Partitions of the topic
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub topic_partitions: u32,

    /// Time after which no new fault starts ("30m")
    #[arg(long, default_value = "30m", value_parser = parse_duration)]
    pub duration_max: Duration,

    /// KiB of log that nodes keep for lagging replicas, and between checkpoints [default: as a
    /// server; with `run` 4096, with `refill` 65536]
    #[arg(long, value_parser = clap::value_parser!(u64).range(64..))]
    pub log_kib: Option<u64>,

    /// Election timeout of the nodes in milliseconds [default: as a server]
    #[arg(long)]
    pub election_timeout_ms: Option<u32>,

    /// Encrypt connections between nodes, and those of the workload, with TLS
    #[arg(long)]
    pub tls: bool,

    /// Directory for data, logs and history, which is kept. Without it: a temporary one, kept after
    /// a failure
    #[arg(long, value_name = "FOLDER")]
    pub keep: Option<PathBuf>,
}

/// Subcommands.
#[derive(Debug, Clone, Subcommand)]
pub enum ChaosCommand {
    /// Inject random faults under load and check all replicas
    Run(RunArgs),
    /// Kill all nodes at once, repeatedly, under load
    KillAll(KillAllArgs),
    /// Force retries with lost responses and killed leaders
    Retries(RetriesArgs),
    /// Kill leaders and measure the time to the next ack
    Failover(FailoverArgs),
    /// Measure how fast a lagging node catches up
    Refill(RefillArgs),
    /// Flip bits of running nodes; measure repairs and acks
    Repairs(RepairsArgs),
    /// Count leader changes under full load without faults
    Elections(ElectionsArgs),
    /// Overload a node and check its memory and latency
    Flood(FloodArgs),
    /// Measure a principal beside a flooding principal
    FairShares(FairSharesArgs),
    /// Drain and restart one node after another under load
    Rolling(RollingArgs),
    /// Grow one node to five and shrink to three under load
    Grow(GrowArgs),
    /// Upgrade and roll back nodes of an older release under load
    Upgrade(UpgradeArgs),
    /// Kill members, coordinators and leaders under a consumer group
    Groups(GroupsArgs),
    /// Check a saved history
    Check {
        /// File of JSON lines
        history: PathBuf,
    },
}

/// Runs a command. `program` is this binary, which also runs the nodes.
///
/// # Errors
/// A promise was broken, the cluster was stuck, or the harness failed.
pub async fn run(command: ChaosCommand, program: PathBuf) -> anyhow::Result<()> {
    match command {
        ChaosCommand::Run(args) => run::run(args, program).await,
        ChaosCommand::KillAll(args) => kill_all::run(args, program).await,
        ChaosCommand::Retries(args) => retries::run(args, program).await,
        ChaosCommand::Failover(args) => failover::run(args, program).await,
        ChaosCommand::Refill(args) => refill::run(args, program).await,
        ChaosCommand::Repairs(args) => repairs::run(args, program).await,
        ChaosCommand::Elections(args) => elections::run(args, program).await,
        ChaosCommand::FairShares(args) => fair_shares::run(args, program).await,
        ChaosCommand::Flood(args) => flood::run(args, program).await,
        ChaosCommand::Rolling(args) => rolling::run(args, program).await,
        ChaosCommand::Grow(args) => grow::run(args, program).await,
        ChaosCommand::Upgrade(args) => upgrade::run(args, program).await,
        ChaosCommand::Groups(args) => groups::run(args, program).await,
        ChaosCommand::Check { history } => {
            let verdict = helix_checker::check(&history::load(&history)?);
            print(&verdict);
            anyhow::ensure!(verdict.is_good(), "the history is wrong");
            Ok(())
        }
    }
}

/// Runs a command, prints its error and returns the exit code.
pub fn main(command: ChaosCommand) -> ExitCode {
    complete(async {
        let program = std::env::current_exe()?;
        run(command, program).await
    })
}

/// Runs as a member of the group of `groups`, prints its error and returns the exit code.
pub fn main_as_member(args: GroupMemberArgs) -> ExitCode {
    member::log_to_stderr();
    complete(member::run(args))
}

fn complete(run: impl Future<Output = anyhow::Result<()>>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(run),
        Err(error) => Err(error.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(format_args!("FAILED: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Parses a duration: "500ms", "90s", "15m" or "1h".
fn parse_duration(text: &str) -> Result<Duration, String> {
    let wanted = || format!("{text:?} is not a duration; use 500ms, 90s, 15m or 1h");
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wanted)?;
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wanted())?;
    let milliseconds = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wanted()),
    };
    number.checked_mul(milliseconds).map(Duration::from_millis).ok_or_else(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_consistent() {
        let program = ChaosCommand::augment_subcommands(clap::Command::new("helix-chaos"));
        program.debug_assert();
    }

    #[test]
    fn durations_are_parsed() {
        assert_eq!(parse_duration("30m").unwrap(), Duration::from_secs(1800));
        assert_eq!(parse_duration("500ms").unwrap(), Duration::from_millis(500));
        for wrong in ["", "5", "x", "-1s", "5q", "99999999999999999999s"] {
            assert!(parse_duration(wrong).is_err(), "{wrong:?}");
        }
    }
}
