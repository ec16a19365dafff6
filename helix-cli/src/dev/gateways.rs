//! The gateways of a dev cluster for Kafka's clients: one process of `helix-kafka` beside each
//! node. A gateway stops when its standard input closes, so it never outlives this process.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use futures_util::future::{join_all, select_all};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::{sleep, timeout};

use crate::args::KAFKA_PORT_STEP;
use crate::child_node::{collect_output, loopback};
use crate::exit::{CliError, Exit};
use crate::files;
use crate::local_cluster::{ClusterPlan, NodePorts};

/// Difference between the port for metrics and the one for Kafka's clients: the gateway's default.
pub(super) const METRICS_PORT_STEP: u16 = 552;

/// Name of the program.
const PROGRAM: &str = "helix-kafka";

/// Maximum time until a gateway listens, and of a graceful stop.
const START_MAX: Duration = Duration::from_secs(15);
const STOP_MAX: Duration = Duration::from_secs(15);

/// Poll interval while a gateway starts.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The gateways, one beside each node.
#[derive(Debug, Default)]
pub(super) struct DevGateways {
    gateways: Vec<GatewayProcess>,
}

#[derive(Debug)]
struct GatewayProcess {
    node_id: u64,
    port: u16,
    child: Child,
    /// Closing it makes the gateway stop.
    stdin: Option<ChildStdin>,
    lines: Arc<Mutex<VecDeque<String>>>,
    is_running: bool,
}

/// Returns the port of the gateway beside a node.
pub(super) fn kafka_port(ports: NodePorts) -> u16 {
    ports.client + KAFKA_PORT_STEP
}

/// Finds `helix-kafka` beside this program, or in the directories of PATH.
///
/// # Errors
/// Fails if there is none; the hint says how to get it.
pub(super) fn find_program() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("find this program")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    find_in(own.parent(), &path).ok_or_else(|| {
        let what = format!("the program {PROGRAM} is neither beside {} nor on PATH", own.display());
        let failure = CliError::new(Exit::NotFound, what);
        let failure = failure.why("--kafka starts it, and helix does not contain it");
        let hint = "cargo build --release -p helix-kafka   in the source tree\nrelease archives \
                    and container images have it";
        failure.hint(hint).into()
    })
}

fn find_in(beside: Option<&Path>, path: &OsStr) -> Option<PathBuf> {
    let directories = beside.map(Path::to_owned).into_iter().chain(std::env::split_paths(path));
    directories.map(|directory| directory.join(PROGRAM)).find(|program| program.is_file())
}

/// Returns the arguments of the gateway beside a node.
fn arguments(plan: &ClusterPlan, node_id: u64, port: u16) -> Vec<String> {
    let mut arguments = vec!["--exit-with-stdin".to_owned()];
    let mut flag = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    let numbered = || (1_u64..).zip(&plan.ports);
    let nodes: Vec<_> = numbered().map(|(_, ports)| loopback(ports.client)).collect();
    let gateways = numbered().map(|(id, ports)| format!("{id}={}", loopback(kafka_port(*ports))));
    flag("--listen-addr", loopback(port));
    flag("--advertised-addr", loopback(port));
    flag("--gateways", gateways.collect::<Vec<_>>().join(","));
    flag("--addr", nodes.join(","));
    if let Some(directory) = &plan.tls_dir {
        let mut file =
            |name: &str, file: &str| flag(name, directory.join(file).display().to_string());
        file("--ca", "ca.pem");
        file("--cert", "client-dev.pem");
        file("--key", "client-dev.key");
        file("--tls-cert", &format!("node-{node_id}.pem"));
        file("--tls-key", &format!("node-{node_id}.key"));
    }
    arguments
}

/// Returns true for a variable that gateways take from the user's environment.
fn is_passed_on(variable: &str) -> bool {
    variable.starts_with("HELIX_KAFKA_") || variable.starts_with("HELIX_TOKEN")
}

impl GatewayProcess {
    fn start(program: &Path, plan: &ClusterPlan, node_id: u64, port: u16) -> anyhow::Result<Self> {
        let mut command = Command::new(program);
        command.args(arguments(plan, node_id, port)).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        // In a process group of its own it gets no Ctrl-C; this program stops it.
        command.process_group(0);
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("HELIX_") && !is_passed_on(&name) {
                command.env_remove(&*name);
            }
        }
        let log = plan.directory.as_deref().map(|directory| open_log(directory, node_id));
        let log = log.transpose()?;
        let mut child = command.spawn().with_context(|| format!("start {}", program.display()))?;
        let stdin = child.stdin.take();
        let lines = Arc::default();
        if let Some(stderr) = child.stderr.take() {
            let shown = (!plan.is_quiet).then(|| format!("gateway {node_id}"));
            collect_output(stderr, &lines, shown, log);
        }
        Ok(Self { node_id, port, child, stdin, lines, is_running: true })
    }

    /// Waits until the gateway listens.
    async fn ready(&mut self) -> anyhow::Result<()> {
        let port = self.port;
        let listening = async {
            while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
                sleep(POLL_INTERVAL).await;
            }
        };
        let failure = tokio::select! {
            () = listening => return Ok(()),
            status = self.child.wait() => {
                self.is_running = false;
                format!("gateway {} exited: {}", self.node_id, status.context("wait for it")?)
            }
            () = sleep(START_MAX) => {
                format!("gateway {} did not listen within {START_MAX:?}", self.node_id)
            }
        };
        Err(CliError::new(Exit::Error, failure).why(self.last_output()).into())
    }

    fn last_output(&self) -> String {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        match lines.is_empty() {
            true => String::new(),
            false => format!("its last output:\n{}", lines.join("\n")),
        }
    }

    async fn stop(&mut self) {
        drop(self.stdin.take());
        if self.is_running && timeout(STOP_MAX, self.child.wait()).await.is_err() {
            // Ignored: it has exited now.
            let _ = self.child.kill().await;
        }
        self.is_running = false;
    }
}

fn open_log(directory: &Path, node_id: u64) -> anyhow::Result<Arc<File>> {
    let path = directory.join(format!("gateway-{node_id}.log"));
    let file = files::open_to_append(&path);
    Ok(Arc::new(file.with_context(|| format!("open {}", path.display()))?))
}

impl DevGateways {
    /// Starts a gateway beside each node and waits until all listen.
    ///
    /// # Errors
    /// Fails if one exits or does not listen in time; the error has its last output.
    pub(super) async fn start(&mut self, program: &Path, plan: &ClusterPlan) -> anyhow::Result<()> {
        for (node_id, ports) in (1..).zip(&plan.ports) {
            let gateway = GatewayProcess::start(program, plan, node_id, kafka_port(*ports))?;
            self.gateways.push(gateway);
        }
        for gateway in &mut self.gateways {
            gateway.ready().await.context("start the gateways")?;
        }
        Ok(())
    }

    /// Returns the addresses for Kafka's clients, ordered by node id; none without gateways.
    pub(super) fn bootstrap(&self) -> Option<String> {
        let addresses: Vec<_> = self.gateways.iter().map(|it| loopback(it.port)).collect();
        (!addresses.is_empty()).then(|| addresses.join(","))
    }

    /// Waits until a gateway exits on its own; returns its node and status. Cancel safe.
    pub(super) async fn exited(&mut self) -> (u64, Option<ExitStatus>) {
        let running = self.gateways.iter_mut().filter(|gateway| gateway.is_running);
        let exits = running.map(|gateway| {
            Box::pin(async move {
                let status = gateway.child.wait().await.ok();
                gateway.is_running = false;
                (gateway.node_id, status)
            })
        });
        let exits: Vec<_> = exits.collect();
        if exits.is_empty() {
            return std::future::pending().await;
        }
        select_all(exits).await.0
    }

    /// Stops all gateways.
    pub(super) async fn stop(&mut self) {
        join_all(self.gateways.iter_mut().map(GatewayProcess::stop)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(tls_dir: Option<PathBuf>) -> ClusterPlan {
        let ports = [1, 2].map(|node| NodePorts { client: 9091 + node, peer: 9191 + node });
        ClusterPlan {
            ports: ports.to_vec(),
            directory: None,
            is_quiet: true,
            has_admin: true,
            tls_dir,
            settings: Vec::new(),
        }
    }

    #[test]
    fn gateway_knows_all_gateways_and_nodes() {
        let expected = "--exit-with-stdin --listen-addr 127.0.0.1:9293 --advertised-addr \
                        127.0.0.1:9293 --gateways 1=127.0.0.1:9292,2=127.0.0.1:9293 --addr \
                        127.0.0.1:9092,127.0.0.1:9093";
        assert_eq!(arguments(&plan(None), 2, 9293).join(" "), expected);
        let tls = arguments(&plan(Some(PathBuf::from("tls"))), 2, 9293).join(" ");
        assert!(tls.ends_with("--tls-cert tls/node-2.pem --tls-key tls/node-2.key"), "{tls}");
    }

    #[test]
    fn finds_the_program_beside_this_one_before_those_on_path() {
        let (beside, on_path) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let find = || find_in(Some(beside.path()), on_path.path().as_os_str());
        assert_eq!(find(), None);
        for directory in [&on_path, &beside] {
            let program = directory.path().join(PROGRAM);
            files::open_to_append(&program).unwrap();
            assert_eq!(find(), Some(program));
        }
    }
}
