//! `helix dev`: a local cluster that runs until Ctrl-C.
//! Its nodes are child processes. `kill`, `restart`, `status` and `stop` use a control socket.

pub(crate) mod control;
mod directory;
mod gateways;

use std::path::{Path, PathBuf};

use anyhow::Context;
use helix_client::contexts::ContextEntry;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::Instant;

use crate::args::{
    DevArgs, DevStartArgs, DevSubcommand, GlobalArgs, NodeSettingArg, PEER_PORT_STEP,
    ignored_variables,
};
use crate::child_node::{ChildNode, ProcessState, is_free};
use crate::commands::cert::make_dev_certificates;
use crate::exit::{CliError, Exit};
use crate::interrupt::interrupted;
use crate::local_cluster::{ClusterPlan, LocalCluster, NodePorts};
use crate::output::{Output, message, unless_closed};
use crate::{context, tls, units};
use control::{
    ControlRequest, ControlResponse, ControlSocket, PendingRequest, ProcessStatus, with_port,
};
use directory::DataDirectory;
use gateways::{DevGateways, METRICS_PORT_STEP, kafka_port};

pub(crate) async fn run(global: &GlobalArgs, args: &DevArgs) -> anyhow::Result<()> {
    let (base, request) = match &args.command {
        None => return start(global, &args.start).await,
        Some(DevSubcommand::Status { base }) => (base, ControlRequest::Status),
        Some(DevSubcommand::Kill { node, base }) => (base, ControlRequest::Kill(*node)),
        Some(DevSubcommand::Restart { node, base }) => (base, ControlRequest::Restart(*node)),
        Some(DevSubcommand::Stop { base }) => (base, ControlRequest::Stop),
    };
    let processes = tokio::select! {
        processes = control::send(base.port, request) => processes?,
        () = interrupted() => return Err(CliError::interrupted().into()),
    };
    Output { format: global.output }.show(&processes)
}

async fn start(global: &GlobalArgs, args: &DevStartArgs) -> anyhow::Result<()> {
    let plan = plan(args)?;
    let kafka_program = args.kafka.then(gateways::find_program).transpose()?;
    if !global.quiet {
        for (variable, key) in ignored_variables() {
            message!("{variable} is not passed to the nodes; use --set {key}=VALUE");
        }
    }
    let mut control = ControlSocket::listen(args.base.port)?;
    let directory = DataDirectory::create(args)?;
    let started = Instant::now();
    let tls_dir = directory.path().filter(|_| args.tls).map(|path| path.join("tls"));
    if let Some(tls_dir) = &tls_dir {
        // It may block on files: no other task runs yet.
        make_dev_certificates(tls_dir, args.nodes.into())?;
    }
    let plan = ClusterPlan { directory: directory.path(), tls_dir, ..plan };
    let cluster = LocalCluster::start(&plan)?;
    let mut dev = DevCluster { cluster, gateways: DevGateways::default(), is_quiet: global.quiet };
    let outcome = tokio::select! {
        outcome = async {
            dev.cluster.ready().await.context("start the cluster")?;
            if let Some(program) = &kafka_program {
                dev.gateways.start(program, &plan).await?;
            }
            let running = StartedCluster::new(&dev, &directory, args);
            if let Some(tls_dir) = &plan.tls_dir {
                save_context(&running.addr, tls_dir)?;
            }
            let seconds = units::measured(started.elapsed());
            let output = Output { format: global.output };
            unless_closed(output.show_as(&running, || running.text(&seconds, &directory)))?;
            dev.serve(&mut control).await.map(Some)
        } => outcome,
        () = interrupted() => Ok(None),
    };
    dev.log("stopping");
    dev.gateways.stop().await;
    let stopped = dev.cluster.stop().await;
    if plan.tls_dir.is_some() && directory.is_removed() {
        forget_context(&dev.cluster.addresses())?;
    }
    directory.remove()?;
    if let Some(stop_request) = outcome? {
        stop_request.respond(&dev.processes()).await;
    }
    stopped
}

/// Name of the context of a cluster with TLS.
const TLS_CONTEXT: &str = "dev-tls";

/// Saves the context of a cluster with TLS. Does not make it the current one.
fn save_context(addr: &str, tls_dir: &Path) -> anyhow::Result<()> {
    let tls_dir = std::path::absolute(tls_dir).context("find the certificates")?;
    let addr = addr.split(',').map(str::to_owned).collect();
    let tls = tls::in_directory(&tls_dir);
    let entry = ContextEntry { addr, tls, ..ContextEntry::default() };
    let mut contexts = context::load()?;
    contexts.contexts.insert(TLS_CONTEXT.to_owned(), entry);
    context::save(&contexts)
}

/// Removes the context of this cluster, whose certificates are removed too.
fn forget_context(addresses: &[String]) -> anyhow::Result<()> {
    let mut contexts = context::load()?;
    if contexts.contexts.get(TLS_CONTEXT).is_some_and(|entry| entry.addr == addresses) {
        contexts.remove(TLS_CONTEXT).map_err(context::failure)?;
        context::save(&contexts)?;
    }
    Ok(())
}

/// Assigns the ports.
///
/// # Errors
/// Fails if a port is in use, before any node starts.
fn plan(args: &DevStartArgs) -> anyhow::Result<ClusterPlan> {
    let base = args.base.port;
    let mut all = Vec::new();
    for client in (base..).take(usize::from(args.nodes)) {
        let ports = NodePorts { client, peer: client + PEER_PORT_STEP };
        // A single node has no peer port.
        let mut used = if args.nodes == 1 { vec![client] } else { vec![client, ports.peer] };
        if args.kafka {
            let kafka = kafka_port(ports);
            used.push(kafka);
            used.extend(kafka.checked_add(METRICS_PORT_STEP));
        }
        if let Some(port) = used.into_iter().find(|port| !is_free(*port)) {
            let failure = CliError::new(Exit::Error, format!("port {port} is in use"));
            let failure = failure.why("another dev cluster or node may be running");
            let status = with_port("helix dev status", base);
            let other = with_port("helix dev", base.wrapping_add(1000));
            return Err(failure.hint(format!("{status}\n{other}")).into());
        }
        all.push(ports);
    }
    // Hides the log output of nodes that discover each other. Errors still include the last lines.
    let is_quiet = args.nodes > 1 && std::env::var_os("HELIX_LOG").is_none();
    let setting = |set: &NodeSettingArg| (set.variable.clone(), set.value.clone());
    Ok(ClusterPlan {
        ports: all,
        directory: None,
        is_quiet,
        has_admin: true,
        tls_dir: None,
        settings: args.set.iter().map(setting).collect(),
    })
}

struct DevCluster {
    cluster: LocalCluster,
    gateways: DevGateways,
    is_quiet: bool,
}

impl DevCluster {
    /// Serves requests and watches the nodes until a stop request, which is returned.
    ///
    /// # Errors
    /// Fails if the last running node exits on its own.
    async fn serve(&mut self, control: &mut ControlSocket) -> anyhow::Result<PendingRequest> {
        loop {
            tokio::select! {
                node = self.cluster.node_exited() => {
                    let (node_id, state) = (node.node_id(), state_text(node.state()));
                    let exit_error = node.exit_error();
                    if !self.cluster.nodes().iter().any(ChildNode::is_running) {
                        return Err(exit_error.context("no node is running")?);
                    }
                    self.log(&format!("node {node_id} {state}; helix dev restart {node_id}"));
                    if let Some(failure) = exit_error.as_ref().and_then(|it| it.downcast_ref()) {
                        let CliError { why, .. } = failure;
                        self.log(why);
                    }
                }
                (node_id, status) = self.gateways.exited() => {
                    let status = status.map(|status| status.to_string()).unwrap_or_default();
                    self.log(&format!("gateway {node_id} exited: {status}"));
                }
                pending = control.next() => {
                    if pending.request == ControlRequest::Stop {
                        return Ok(pending);
                    }
                    let response = match self.execute(pending.request).await {
                        Ok(()) => self.processes(),
                        Err(error) => rejection(&error),
                    };
                    pending.respond(&response).await;
                }
            }
        }
    }

    async fn execute(&mut self, request: ControlRequest) -> anyhow::Result<()> {
        match request {
            ControlRequest::Status | ControlRequest::Stop => Ok(()),
            ControlRequest::Kill(node_id) => {
                self.cluster.node(node_id)?.kill().await?;
                self.log(&format!("killed node {node_id} (kill -9)"));
                Ok(())
            }
            ControlRequest::Restart(node_id) => {
                let node = self.cluster.node(node_id)?;
                node.stop().await?;
                node.restart()?;
                node.ready(None).await?;
                self.log(&format!("restarted node {node_id}"));
                Ok(())
            }
        }
    }

    fn processes(&self) -> ControlResponse {
        let process = |node: &ChildNode| ProcessStatus {
            node_id: node.node_id(),
            addr: node.address(),
            state: state_text(node.state()),
            pid: node.pid(),
        };
        ControlResponse::Nodes(self.cluster.nodes().iter().map(process).collect())
    }

    fn log(&self, message: &str) {
        if !self.is_quiet {
            message!("{message}");
        }
    }
}

fn state_text(state: ProcessState) -> String {
    match state {
        ProcessState::Running => "running".to_owned(),
        ProcessState::Stopped => "stopped".to_owned(),
        ProcessState::Exited(status) => format!("exited: {status}"),
    }
}

fn rejection(error: &anyhow::Error) -> ControlResponse {
    let failure = error.downcast_ref::<CliError>();
    ControlResponse::Refused {
        is_not_found: failure.is_some_and(|failure| failure.exit == Exit::NotFound),
        what: format!("{error:#}"),
        why: failure.map(|failure| failure.why.clone()).unwrap_or_default(),
    }
}

/// Description of a started cluster.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct StartedCluster {
    addr: String,
    nodes: Vec<RunningNode>,
    /// None for memory storage.
    data_dir: Option<PathBuf>,
    /// Context with the certificates; None without TLS.
    context: Option<String>,
    /// Addresses for Kafka's clients; None without --kafka.
    kafka: Option<String>,
    #[serde(skip)]
    port: u16,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RunningNode {
    node_id: u64,
    addr: String,
}

impl StartedCluster {
    fn new(dev: &DevCluster, directory: &DataDirectory, args: &DevStartArgs) -> Self {
        let cluster = &dev.cluster;
        let node = |node: &ChildNode| RunningNode { node_id: node.node_id(), addr: node.address() };
        Self {
            addr: cluster.addresses().join(","),
            nodes: cluster.nodes().iter().map(node).collect(),
            data_dir: directory.path(),
            context: args.tls.then(|| TLS_CONTEXT.to_owned()),
            kafka: dev.gateways.bootstrap(),
            port: args.base.port,
        }
    }

    fn text(&self, seconds: &str, directory: &DataDirectory) -> String {
        let helix = program();
        let addr = &self.addr;
        let select = match &self.context {
            Some(context) => format!("{helix} context use {context}"),
            None => format!("export HELIX_ADDR={addr}"),
        };
        let data = directory.text();
        let nodes = match self.nodes.len() {
            1 => "1 node".to_owned(),
            count => format!("{count} nodes"),
        };
        format!(
            "\
{nodes} ready in {seconds} at {addr}
{data}

  {select}

In another terminal, try:
  {helix} topic create orders --partitions 4
  echo hello | {helix} produce orders
  {helix} consume orders --from earliest
  {helix} tail orders --follow
  {helix} cluster health
{}{}
Ctrl-C, or {}, stops {}.
",
            self.cluster_text(&helix),
            self.kafka_text(&helix, directory),
            with_port(&format!("{helix} dev stop"), self.port),
            if self.nodes.len() == 1 { "the node" } else { "the nodes" },
        )
    }

    /// Returns the examples for Kafka's clients.
    fn kafka_text(&self, helix: &str, directory: &DataDirectory) -> String {
        let Some(bootstrap) = &self.kafka else { return String::new() };
        let tls = directory.path().filter(|_| self.context.is_some()).map(|path| {
            let ca = path.join("tls/ca.pem");
            format!(" -X security.protocol=ssl -X ssl.ca.location={}", ca.display())
        });
        let tls = tls.unwrap_or_default();
        format!(
            "
For Kafka's clients, bootstrap.servers is {bootstrap}
  {helix} topic create events --batch-format any
  echo hello | kcat -b {bootstrap}{tls} -P -t events
"
        )
    }

    /// Returns the examples that need several nodes.
    fn cluster_text(&self, helix: &str) -> String {
        if self.nodes.len() == 1 {
            return String::new();
        }
        let kill = with_port(&format!("{helix} dev kill 2"), self.port);
        let restart = with_port(&format!("{helix} dev restart 2"), self.port);
        format!("  {kill}       kill -9; the other nodes take over\n  {restart}\n")
    }
}

/// Returns this program as the user called it.
fn program() -> String {
    std::env::args().next().unwrap_or_else(|| "helix".to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::args::DevPortArgs;
    use crate::child_node::free_ports;

    fn args(nodes: u8, port: u16) -> DevStartArgs {
        let base = DevPortArgs { port };
        let set = Vec::new();
        let (tls, keep, kafka) = (false, false, false);
        DevStartArgs { nodes, base, memory: true, tls, keep, dir: None, kafka, set }
    }

    #[test]
    fn rejects_used_port_before_start() {
        let port = free_ports(1).unwrap()[0];
        let _peer = TcpListener::bind((Ipv4Addr::LOCALHOST, port + PEER_PORT_STEP)).unwrap();
        let error = plan(&args(3, port)).unwrap_err();
        let failure = error.downcast_ref::<CliError>().unwrap();
        assert!(failure.what.contains(&(port + PEER_PORT_STEP).to_string()), "{failure:?}");
        assert!(failure.hint.contains(&format!("helix dev status --port {port}")), "{failure:?}");
        // A single node has no peer port.
        assert_eq!(plan(&args(1, port)).unwrap().ports.len(), 1);
    }
}
