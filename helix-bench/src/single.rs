//! A single run of one load: `write`, `read`, `latency` and `e2e`, and the runs of other modes.

use anyhow::Result;

use crate::load::{BenchLoad, LoadArgs, LoadMode};
use crate::report::BenchReport;
use crate::{e2e, exit, latency, read, runner, write};

/// Runs a load once and returns its exit code.
///
/// # Errors
/// A flag is out of range, the run could not start, or its result could not be written.
pub(crate) fn command(mode: LoadMode, args: &LoadArgs) -> Result<u8> {
    let load = BenchLoad::new(mode, args).map_err(exit::usage)?;
    runner::run(load.threads, &args.output, run(&load))
}

/// Runs a load.
///
/// # Errors
/// The run could not start.
pub(crate) async fn run(load: &BenchLoad) -> Result<BenchReport> {
    match load.mode {
        LoadMode::Write | LoadMode::Stream => write::run(load).await,
        LoadMode::Read => read::run(load).await,
        LoadMode::Latency => latency::run(load).await,
        LoadMode::E2e => e2e::run(load).await,
    }
}
