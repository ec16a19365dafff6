//! Node under flood: this program as `node`, with a memory limit.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use helix_client::{Config, TlsOptions, TokenSource};
use helix_proto::log::v1::produce_service_client::ProduceServiceClient;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::{Instant, sleep, timeout};

use super::client_tokens::{CheckedCallers, ClientTokens};
use super::{PARTITIONS, TOPIC, append, connect};
use crate::{certificates, metrics, ports};

const START_MAX: Duration = Duration::from_secs(60);
const STOP_MAX: Duration = Duration::from_secs(60);

/// Retention per partition. Small, so that the log soon recycles segments, as on a node that has
/// run for a while.
const RETENTION: &str = "256MiB";

/// Longest wait for the log to recycle.
const ROUND_MAX: Duration = Duration::from_secs(120);

/// Longest wait for handshakes to end: more than the node's own deadline of 10 s.
const HANDSHAKES_MAX: Duration = Duration::from_secs(30);

/// Batches of 100 KiB written to each partition before the readers start.
const BATCHES: usize = 160;

/// Options of a node under test.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeUnderTestOptions {
    pub(crate) memory_limit_mib: u64,
    pub(crate) pace: Option<u32>,
    /// The node checks its callers, which are these.
    pub(crate) callers: Option<CheckedCallers>,
    /// The clients' port serves connections with and without TLS.
    pub(crate) has_tls: bool,
}

pub(crate) struct NodeUnderTest {
    address: SocketAddr,
    admin: SocketAddr,
    tokens: ClientTokens,
    /// CA of the node's certificate.
    ca: PathBuf,
    child: Child,
    /// Held open while the node is to run.
    _stdin: Option<ChildStdin>,
}

impl NodeUnderTest {
    pub(crate) async fn start(
        program: &Path,
        dir: &Path,
        options: NodeUnderTestOptions,
    ) -> anyhow::Result<Self> {
        let NodeUnderTestOptions { memory_limit_mib, pace, callers, has_tls } = options;
        let (address, admin) = (ports::free()?, ports::free()?);
        let (data_dir, tls_dir) = (dir.join("data"), certificates::directory(dir));
        let ca = tls_dir.join("ca.pem");
        let mut command = Command::new(program);
        command
            .arg("node")
            .arg(format!("--listen-addr={address}"))
            .arg(format!("--data-dir={}", data_dir.display()))
            .arg(format!("--topic={TOPIC}:{PARTITIONS}"))
            .arg(format!("--memory-limit={memory_limit_mib}MiB"))
            .arg(format!("--admin-addr={admin}"))
            .arg(format!("--default-retention-bytes={RETENTION}"))
            .args(pace.map(|pace| format!("--pace={pace}")))
            .args(callers.map(|_| "--auth=required"));
        if has_tls {
            certificates::make(&tls_dir)?;
            let own = tls_dir.join("node-1");
            command
                .arg(format!("--tls-cert={}.pem", own.display()))
                .arg(format!("--tls-key={}.key", own.display()))
                .arg(format!("--tls-ca={}", ca.display()))
                .arg("--tls-clients=optional");
        }
        let mut child = command
            .env("HELIX_LOG", "warn,h2=error")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .spawn()
            .context("start a node")?;
        let stdin = child.stdin.take();
        let tokens = ClientTokens::default();
        let mut node_under_test = Self { address, admin, tokens, ca, child, _stdin: stdin };
        let deadline = Instant::now() + START_MAX;
        while connect(address, TokenSource::none()).await.is_err() {
            node_under_test.is_alive()?;
            ensure!(Instant::now() < deadline, "the node did not answer within {START_MAX:?}");
            sleep(Duration::from_millis(50)).await;
        }
        if let Some(callers) = callers {
            let first = data_dir.join("admin-token");
            node_under_test.tokens = ClientTokens::make(address, &first, callers).await?;
        }
        Ok(node_under_test)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the token of the probe client.
    pub(crate) fn probe_token(&self) -> TokenSource {
        self.tokens.probe.clone()
    }

    /// Returns the token of the abusive clients.
    pub(crate) fn abusive_token(&self) -> TokenSource {
        self.tokens.abusive.clone()
    }

    /// Returns the header `authorization` of the abusive clients, if callers are checked.
    pub(crate) fn abusive_header(&self) -> Option<&str> {
        self.tokens.abusive_header.as_deref()
    }

    /// Returns the tokens of the neighbours.
    pub(crate) fn neighbour_tokens(&self) -> &[TokenSource] {
        &self.tokens.neighbours
    }

    /// Returns the settings of a well-behaved client with TLS.
    pub(crate) fn client_with_tls(&self) -> Config {
        let config =
            Config { token: self.probe_token(), ..Config::new([self.address.to_string()]) };
        config.with_tls(TlsOptions::new(&self.ca))
    }

    /// Waits until this many handshakes have ended without success, and returns their number.
    ///
    /// Neither connections without TLS nor the handshakes of clients that are served count.
    pub(crate) async fn wait_for_handshakes(&self, count: usize) -> anyhow::Result<u64> {
        let deadline = Instant::now() + HANDSHAKES_MAX;
        let has_failed = |labels: &str| {
            ["succeeded", "plaintext"].iter().all(|result| !labels.contains(*result))
        };
        loop {
            let name = "helix_tls_handshakes_total";
            let ended = metrics::sum_where(self.admin, name, has_failed).await?;
            if ended >= count as u64 {
                return Ok(ended);
            }
            let what = "handshakes ended within";
            ensure!(Instant::now() < deadline, "{ended} of {count} {what} {HANDSHAKES_MAX:?}");
            sleep(Duration::from_millis(200)).await;
        }
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
        let mut produce =
            ProduceServiceClient::new(connect(self.address, self.probe_token()).await?);
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
