//! A member as a child process, and the reader of what it reports.

use std::fs::File;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::member::LOST;
use super::{SharedCheck, lock};

/// Longest wait for a member to leave its group.
const LEAVE_MAX: Duration = Duration::from_secs(30);

/// Options of a member process.
#[derive(Debug, Clone)]
pub(crate) struct MemberProcessOptions {
    pub(crate) program: PathBuf,
    pub(crate) endpoints: Vec<String>,
    pub(crate) session_timeout: Duration,
    pub(crate) ca: Option<PathBuf>,
    /// File for standard error of all members.
    pub(crate) log: PathBuf,
}

/// A running member. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct MemberProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    reading: JoinHandle<()>,
}

impl MemberProcess {
    pub(crate) fn start(
        options: &MemberProcessOptions,
        check: &SharedCheck,
    ) -> anyhow::Result<Self> {
        let log = File::options().create(true).append(true).open(&options.log);
        let log = log.with_context(|| format!("open {}", options.log.display()))?;
        let mut command = Command::new(&options.program);
        command
            .arg("member")
            .arg(format!("--endpoints={}", options.endpoints.join(",")))
            .arg(format!("--session-timeout-ms={}", options.session_timeout.as_millis()))
            .args(options.ca.as_ref().map(|ca| format!("--ca={}", ca.display())))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .kill_on_drop(true);
        let mut child = command.spawn().context("start a member")?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("a member has no standard output")?;
        let id = child.id().context("a member has exited at once")?;
        let reading = tokio::spawn(read(id, stdout, check.clone()));
        Ok(Self { child, stdin, reading })
    }

    /// Sends SIGKILL, and waits until all that the member reported is read.
    pub(crate) async fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill().await.context("kill a member")?;
        Ok(self.reading.await?)
    }

    /// Lets the member leave its group, and waits for its end.
    pub(crate) async fn leave(mut self) -> anyhow::Result<()> {
        drop(self.stdin.take());
        let Ok(status) = timeout(LEAVE_MAX, self.child.wait()).await else {
            bail!("a member did not leave within {LEAVE_MAX:?}")
        };
        let status = status.context("wait for a member")?;
        ensure!(status.success(), "a member left with {status}; see members.log");
        Ok(self.reading.await?)
    }

    /// Sends SIGSTOP: the member does nothing until [`Self::resume`].
    pub(crate) fn pause(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)
    }

    pub(crate) fn resume(&self) -> anyhow::Result<()> {
        self.signal(Signal::CONT)
    }

    /// Returns the exit status if the member has exited.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let id = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        kill_process(id.context("the member has exited")?, signal).context("signal a member")
    }
}

/// Reads what a member reports, until its end.
async fn read(member: u32, stdout: ChildStdout, check: SharedCheck) {
    let mut lines = BufReader::new(stdout);
    let mut line = Vec::new();
    loop {
        line.clear();
        // A killed member may leave a part of a line. It has not committed those records.
        match lines.read_until(b'\n', &mut line).await {
            Ok(_) if line.ends_with(b"\n") => {}
            _ => return,
        }
        if line.trim_ascii_end() == LOST.as_bytes() {
            lock(&check).on_loss();
            continue;
        }
        match parse(&line) {
            Some((partition, first, values)) => {
                lock(&check).on_delivery(member, partition, first, &values);
            }
            None => {
                let text = String::from_utf8_lossy(&line);
                lock(&check).violate(format!("a member reported {text:?}"));
            }
        }
    }
}

/// Returns the partition, the first offset, and the values of a line.
fn parse(line: &[u8]) -> Option<(u32, u64, Vec<u64>)> {
    let mut words = str::from_utf8(line).ok()?.split_ascii_whitespace();
    let partition = words.next()?.parse().ok()?;
    let first = words.next()?.parse().ok()?;
    let values: Result<Vec<u64>, _> = words.map(str::parse).collect();
    Some((partition, first, values.ok().filter(|it| !it.is_empty())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_a_partition_an_offset_and_values() {
        assert_eq!(parse(b"3 100 7 8\n"), Some((3, 100, vec![7, 8])));
        for wrong in ["\n", "3\n", "3 100\n", "3 100 x\n", "-1 0 1\n"] {
            assert_eq!(parse(wrong.as_bytes()), None, "{wrong:?}");
        }
    }
}
