//! Runs a mode: opens its outputs, starts a runtime and writes the result.

use std::future::Future;

use anyhow::{Context, Result};

use crate::options::OutputOptions;
use crate::output::{ModeResult, ReportOutput};

/// Runs a mode with its own runtime, writes the result and returns the exit code.
///
/// # Errors
/// An output could not be opened or written, or the mode failed.
pub(crate) fn run<R: ModeResult>(
    threads: usize,
    output: &OutputOptions,
    mode: impl Future<Output = Result<R>>,
) -> Result<u8> {
    // Before the run, so that no run is wasted.
    let output = ReportOutput::open(output)?;
    let result = runtime(threads)?.block_on(mode)?;
    output.deliver(&result)
}

/// Starts a runtime.
///
/// # Errors
/// The threads could not be started.
pub(crate) fn runtime(threads: usize) -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .context("start the runtime")
}
