//! What the binary does: `run`, `massacre`, `retries`, `failover`, `refill`, `elections`,
//! `rolling`, `grow`, `flood`, and `check`.
//! Each starts nodes of its own in a folder of its own, which is kept if a promise was broken.

mod elections;
mod failover;
mod flood;
mod grow;
mod massacre;
mod probe;
mod refill;
mod retries;
mod rolling;
mod run;
mod stage;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::recorder;

pub use crate::flood::Harm;
pub use elections::ElectionsArgs;
pub use failover::FailoverArgs;
pub use flood::FloodArgs;
pub use grow::GrowArgs;
pub use massacre::MassacreArgs;
pub use refill::RefillArgs;
pub use retries::RetriesArgs;
pub use rolling::RollingArgs;
pub use run::{Faults, RunArgs};

/// What every command is told.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// Nodes of the cluster: 1, 3 or 5
    #[arg(long, default_value_t = 3)]
    pub nodes: u64,

    /// Seed of everything that is drawn
    #[arg(long, env = "HELIX_SEED", default_value_t = 1)]
    pub seed: u64,

    /// Partitions of the topic
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub topic_partitions: u32,

    /// Time after which no more is begun ("30m")
    #[arg(long, default_value = "30m", value_parser = parse_duration)]
    pub duration_max: Duration,

    /// KiB of log that nodes keep for others, and between checkpoints [default: as a server; with
    /// `run` 256, with `refill` 65536]
    #[arg(long, value_parser = clap::value_parser!(u64).range(64..))]
    pub log_kib: Option<u64>,

    /// Folder for data, logs and history; kept. Without it: one of its own, kept if something is
    /// wrong
    #[arg(long, value_name = "FOLDER")]
    pub keep: Option<PathBuf>,
}

/// Commands.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Kills, pauses and partitions under load; every replica is read and everything is checked
    Run(RunArgs),
    /// Kills all nodes at once, again and again, under load: nothing acked may be missing
    Massacre(MassacreArgs),
    /// Forces retries by swallowed answers and killed leaders: no copy, no gap, order kept
    Retries(RetriesArgs),
    /// Kills leaders under one client and measures the time to its next ack
    Failover(FailoverArgs),
    /// Measures how fast a node that lacks purged log gets the records, and what writers feel of it
    Refill(RefillArgs),
    /// Full load without faults: counts changes of leader, and stalls of the machine
    Elections(ElectionsArgs),
    /// More clients than a node wants: memory stays below its limit, and others are served
    Flood(FloodArgs),
    /// Drains, restarts and takes back one node after the other under load
    Rolling(RollingArgs),
    /// Grows one node to five, replaces a lost disk and shrinks to three, under load
    Grow(GrowArgs),
    /// Checks a history that was saved
    Check {
        /// File of JSON lines
        history: PathBuf,
    },
}

/// Runs a command to its end. `program` is this binary, which is also the nodes'.
///
/// # Errors
/// A promise was broken, something was stuck, or the harness itself could not go on.
pub async fn run(command: Command, program: PathBuf) -> anyhow::Result<()> {
    match command {
        Command::Run(args) => run::run(args, program).await,
        Command::Massacre(args) => massacre::run(args, program).await,
        Command::Retries(args) => retries::run(args, program).await,
        Command::Failover(args) => failover::run(args, program).await,
        Command::Refill(args) => refill::run(args, program).await,
        Command::Elections(args) => elections::run(args, program).await,
        Command::Flood(args) => flood::run(args, program).await,
        Command::Rolling(args) => rolling::run(args, program).await,
        Command::Grow(args) => grow::run(args, program).await,
        Command::Check { history } => {
            let verdict = helix_checker::check(&recorder::load(&history)?);
            println!("{verdict}");
            anyhow::ensure!(verdict.is_good(), "the history is wrong");
            Ok(())
        }
    }
}

/// Runs a command as a program does: the error is printed, and the exit code is 1.
pub fn main(command: Command) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let result = match (runtime, std::env::current_exe()) {
        (Ok(runtime), Ok(program)) => runtime.block_on(run(command, program)),
        (Err(error), _) | (_, Err(error)) => Err(error.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("FAILED: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A length of time: "90s", "15m", "1h", "500ms".
fn parse_duration(text: &str) -> Result<Duration, String> {
    let wanted = || format!("write a length of time, as in 500ms, 90s, 15m or 1h, not {text:?}");
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
    fn the_commands_fit_together() {
        let program = Command::augment_subcommands(clap::Command::new("helix-chaos"));
        program.debug_assert();
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        assert_eq!(parse_duration("30m").unwrap(), Duration::from_secs(1800));
        assert_eq!(parse_duration("500ms").unwrap(), Duration::from_millis(500));
        for wrong in ["", "5", "x", "-1s", "5q", "99999999999999999999s"] {
            assert!(parse_duration(wrong).is_err(), "{wrong:?}");
        }
    }
}
