//! A program of another language that uses the cluster beside a command.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// Longest wait for the program after its standard input is closed.
const END_MAX: Duration = Duration::from_secs(60);

/// A running program. It runs until its standard input is closed.
pub(super) struct ProgramBeside {
    child: Child,
    command: String,
}

impl ProgramBeside {
    /// Starts a command of the shell with these nodes in `HELIX_ADDR`.
    pub(super) fn start(command: &str, addresses: &[String]) -> anyhow::Result<Self> {
        let child = Command::new("sh")
            .args(["-c", command])
            .env("HELIX_ADDR", addresses.join(","))
            .stdin(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {command:?}"))?;
        Ok(Self { child, command: command.to_owned() })
    }

    /// Closes its standard input and waits for its end.
    ///
    /// # Errors
    /// It ended before, did not end in time, or failed.
    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        let early = self.child.try_wait()?;
        ensure!(early.is_none(), "{:?} ended too early: {}", self.command, said(early));
        drop(self.child.stdin.take());
        let ended = timeout(END_MAX, self.child.wait()).await;
        let status = ended.with_context(|| format!("{:?} did not end", self.command))??;
        ensure!(status.success(), "{:?} failed: {status}", self.command);
        Ok(())
    }
}

fn said(status: Option<ExitStatus>) -> String {
    status.map_or_else(String::new, |it| it.to_string())
}
