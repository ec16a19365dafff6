//! Node under flood: this program as `node`, with a memory limit.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::{Instant, sleep, timeout};

use super::{PARTITIONS, TOPIC, append, connect};
use crate::{metrics, ports};

const START_MAX: Duration = Duration::from_secs(60);
const STOP_MAX: Duration = Duration::from_secs(60);

/// Retention per partition. Small, so that the log soon recycles segments, as on a node that has
/// run for a while.
const RETENTION: &str = "256MiB";

/// Longest wait for the log to recycle.
const ROUND_MAX: Duration = Duration::from_secs(120);

/// Batches of 100 KiB written to each partition before the readers start.
const BATCHES: usize = 160;

pub(crate) struct NodeUnderTest {
    address: SocketAddr,
    admin: SocketAddr,
    child: Child,
    /// Held open while the node is to run.
    _stdin: Option<ChildStdin>,
}

impl NodeUnderTest {
    pub(crate) async fn start(
        program: &Path,
        dir: &Path,
        memory_limit_mib: u64,
        pace: Option<u32>,
    ) -> anyhow::Result<Self> {
        let (address, admin) = (ports::free()?, ports::free()?);
        let mut child = Command::new(program)
            .arg("node")
            .arg(format!("--listen-addr={address}"))
            .arg(format!("--data-dir={}", dir.join("data").display()))
            .arg(format!("--topic={TOPIC}:{PARTITIONS}"))
            .arg(format!("--memory-limit={memory_limit_mib}MiB"))
            .arg(format!("--admin-addr={admin}"))
            .arg(format!("--default-retention-bytes={RETENTION}"))
            .args(pace.map(|pace| format!("--pace={pace}")))
            .env("HELIX_LOG", "warn,h2=error")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .spawn()
            .context("start a node")?;
        let stdin = child.stdin.take();
        let mut node_under_test = Self { address, admin, child, _stdin: stdin };
        let deadline = Instant::now() + START_MAX;
        while connect(address).await.is_err() {
            node_under_test.is_alive()?;
            ensure!(Instant::now() < deadline, "the node did not answer within {START_MAX:?}");
            sleep(Duration::from_millis(50)).await;
        }
        Ok(node_under_test)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns a metric, summed over its labels.
    pub(crate) async fn metric(&self, name: &str) -> anyhow::Result<u64> {
        metrics::sum(self.admin, name).await
    }

    /// Returns the CPU time of the process.
    pub(crate) async fn cpu(&self) -> anyhow::Result<Duration> {
        let seconds = metrics::sum_f64(self.admin, "process_cpu_seconds_total").await?;
        Ok(Duration::from_secs_f64(seconds))
    }

    /// Returns how often clients hit each limit.
    pub(crate) async fn limits_met(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        metrics::by_label(self.admin, "helix_limit_events_total").await
    }

    /// Writes records for the readers.
    pub(crate) async fn fill(&self) -> anyhow::Result<()> {
        let mut produce = ProduceServiceClient::new(connect(self.address).await?);
        for partition in 0..PARTITIONS {
            let request = append(partition, 100);
            for _ in 0..BATCHES {
                produce.append(request.clone()).await?;
            }
        }
        Ok(())
    }

    /// Waits until the log has begun to free segments.
    pub(crate) async fn wait_for_recycling(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + ROUND_MAX;
        while self.metric("helix_wal_freed_segments_total").await? == 0 {
            ensure!(Instant::now() < deadline, "no segment was freed within {ROUND_MAX:?}");
            sleep(Duration::from_millis(200)).await;
        }
        Ok(())
    }

    /// Fails if the process has exited.
    pub(crate) fn is_alive(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("the node exited with {status}"),
            None => Ok(()),
        }
    }

    pub(crate) fn rss_mib(&self) -> anyhow::Result<u64> {
        self.memory("VmRSS:")
    }

    /// Returns the peak resident memory of the process.
    pub(crate) fn peak_rss_mib(&self) -> anyhow::Result<u64> {
        self.memory("VmHWM:")
    }

    #[allow(clippy::disallowed_methods)] // /proc is not a file of the node.
    fn memory(&self, line: &str) -> anyhow::Result<u64> {
        let pid = self.child.id().context("the node has exited")?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))
            .context("read /proc for the memory of the node; this needs Linux")?;
        let found = status.lines().find_map(|it| it.strip_prefix(line));
        let kib = found.and_then(|rest| rest.trim().strip_suffix(" kB")?.trim().parse().ok());
        let kib: u64 = kib.with_context(|| format!("no {line} in /proc/{pid}/status"))?;
        Ok(kib / 1024)
    }

    /// Stops the node and waits for its exit.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        let pid = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid {
            kill_process(pid, Signal::TERM).context("ask the node to stop")?;
        }
        let ended = timeout(STOP_MAX, self.child.wait()).await;
        let status = ended.context("the node did not stop")?.context("wait for the node")?;
        ensure!(status.success(), "the node exited with {status}");
        Ok(())
    }
}
