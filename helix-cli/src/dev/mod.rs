//! `helix dev`: a cluster that stays up until Ctrl-C, to try things with.
//! Its nodes are child processes; `kill`, `restart`, `status` and `stop` come over a socket.

pub(crate) mod control;
mod folder;

use std::path::PathBuf;

use anyhow::Context;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::Instant;

use crate::args::{DevArgs, DevCommand, DevStartArgs, Global, PEER_PORT_STEP};
use crate::exit::{Exit, Failure, interrupted};
use crate::local::{LocalCluster, Plan, Ports};
use crate::node::{Node, State, is_free};
use crate::output::Output;
use crate::units;
use control::{Answer, Call, Control, Process, Request};
use folder::Folder;

pub(crate) async fn run(global: &Global, args: &DevArgs) -> anyhow::Result<()> {
    let (base, request) = match &args.command {
        None => return start(global, &args.start).await,
        Some(DevCommand::Status { base }) => (base, Request::Status),
        Some(DevCommand::Kill { node, base }) => (base, Request::Kill(*node)),
        Some(DevCommand::Restart { node, base }) => (base, Request::Restart(*node)),
        Some(DevCommand::Stop { base }) => (base, Request::Stop),
    };
    let processes = tokio::select! {
        processes = control::ask(base.port, request) => processes?,
        () = interrupted() => return Err(Failure::interrupted().into()),
    };
    Output { format: global.output }.show(&processes)
}

async fn start(global: &Global, args: &DevStartArgs) -> anyhow::Result<()> {
    let plan = plan(args)?;
    let mut control = Control::listen(args.base.port)?;
    let folder = Folder::make(args)?;
    let started = Instant::now();
    let plan = Plan { folder: folder.path(), ..plan };
    let mut dev = Dev { cluster: LocalCluster::start(&plan)?, is_quiet: global.quiet };
    let outcome = tokio::select! {
        outcome = async {
            dev.cluster.ready().await.context("start the cluster")?;
            let running = Running::new(&dev.cluster, &folder, args.base.port);
            let seconds = units::measured(started.elapsed());
            let output = Output { format: global.output };
            output.show_as(&running, || running.text(&seconds, &folder))?;
            dev.serve(&mut control).await.map(Some)
        } => outcome,
        () = interrupted() => Ok(None),
    };
    dev.say("stopping");
    let stopped = dev.cluster.stop().await;
    folder.remove()?;
    if let Some(call) = outcome? {
        call.answer(&dev.answer()).await;
    }
    stopped
}

/// The ports, all of which must be free: later is too late for a clear word.
fn plan(args: &DevStartArgs) -> anyhow::Result<Plan> {
    let base = args.base.port;
    let mut all = Vec::new();
    for client in (base..).take(usize::from(args.nodes)) {
        let ports = Ports { client, peer: client + PEER_PORT_STEP };
        // A single node has no peers to listen to.
        let used = if args.nodes == 1 { vec![client] } else { vec![client, ports.peer] };
        if let Some(port) = used.into_iter().find(|port| !is_free(*port)) {
            let failure = Failure::new(Exit::Error, format!("port {port} is in use"));
            let failure = failure.why("another dev cluster or node may run already");
            let status = with_port("helix dev status", base);
            let other = with_port("helix dev", base.wrapping_add(1000));
            return Err(failure.hint(format!("{status}\n{other}")).into());
        }
        all.push(ports);
    }
    // What several nodes say while they find each other is too much for a start; their last words
    // are shown in any case.
    let is_quiet = args.nodes > 1 && std::env::var_os("HELIX_LOG").is_none();
    Ok(Plan { ports: all, folder: None, is_quiet, has_admin: true })
}

/// A command for the dev cluster at this port.
fn with_port(command: &str, port: u16) -> String {
    match port {
        9092 => command.to_owned(),
        port => format!("{command} --port {port}"),
    }
}

struct Dev {
    cluster: LocalCluster,
    is_quiet: bool,
}

impl Dev {
    /// Does what it is asked for and watches the nodes, until it is asked to stop.
    ///
    /// # Errors
    /// No node is left, though nobody asked for that.
    async fn serve(&mut self, control: &mut Control) -> anyhow::Result<Call> {
        loop {
            tokio::select! {
                node = self.cluster.one_ended() => {
                    let (node_id, state) = (node.node_id(), state_text(node.state()));
                    let explanation = node.explanation();
                    if !self.cluster.nodes().iter().any(Node::is_running) {
                        return Err(explanation.context("no node is left")?);
                    }
                    self.say(&format!("node {node_id} {state}; helix dev restart {node_id}"));
                    if let Some(failure) = explanation.as_ref().and_then(|it| it.downcast_ref()) {
                        let Failure { why, .. } = failure;
                        self.say(why);
                    }
                }
                call = control.next() => {
                    if call.request == Request::Stop {
                        return Ok(call);
                    }
                    let answer = match self.act(call.request).await {
                        Ok(()) => self.answer(),
                        Err(error) => refused(&error),
                    };
                    call.answer(&answer).await;
                }
            }
        }
    }

    async fn act(&mut self, request: Request) -> anyhow::Result<()> {
        match request {
            Request::Status | Request::Stop => Ok(()),
            Request::Kill(node_id) => {
                self.cluster.node(node_id)?.kill().await?;
                self.say(&format!("killed node {node_id} (kill -9)"));
                Ok(())
            }
            Request::Restart(node_id) => {
                let node = self.cluster.node(node_id)?;
                node.stop().await?;
                node.restart()?;
                node.ready(None).await?;
                self.say(&format!("restarted node {node_id}"));
                Ok(())
            }
        }
    }

    fn answer(&self) -> Answer {
        let process = |node: &Node| Process {
            node_id: node.node_id(),
            addr: node.address(),
            state: state_text(node.state()),
            pid: node.pid(),
        };
        Answer::Nodes(self.cluster.nodes().iter().map(process).collect())
    }

    fn say(&self, what: &str) {
        if !self.is_quiet {
            eprintln!("{what}");
        }
    }
}

fn state_text(state: State) -> String {
    match state {
        State::Running => "running".to_owned(),
        State::Stopped => "stopped".to_owned(),
        State::Ended(status) => format!("ended by itself: {status}"),
    }
}

fn refused(error: &anyhow::Error) -> Answer {
    let failure = error.downcast_ref::<Failure>();
    Answer::Refused {
        is_not_found: failure.is_some_and(|failure| failure.exit == Exit::NotFound),
        what: format!("{error:#}"),
        why: failure.map(|failure| failure.why.clone()).unwrap_or_default(),
    }
}

/// What there is to know of a cluster that has just started.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Running {
    addr: String,
    nodes: Vec<RunningNode>,
    /// None: memory storage.
    data_dir: Option<PathBuf>,
    #[serde(skip)]
    port: u16,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RunningNode {
    node_id: u64,
    addr: String,
}

impl Running {
    fn new(cluster: &LocalCluster, folder: &Folder, port: u16) -> Self {
        let node = |node: &Node| RunningNode { node_id: node.node_id(), addr: node.address() };
        Self {
            addr: cluster.addresses().join(","),
            nodes: cluster.nodes().iter().map(node).collect(),
            data_dir: folder.path(),
            port,
        }
    }

    fn text(&self, seconds: &str, folder: &Folder) -> String {
        let helix = program();
        let addr = &self.addr;
        let data = folder.text();
        let nodes = match self.nodes.len() {
            1 => "1 node".to_owned(),
            count => format!("{count} nodes"),
        };
        format!(
            "\
{nodes} ready in {seconds} at {addr}
{data}

  export HELIX_ADDR={addr}

Try in another terminal:
  {helix} topic create orders --partitions 4
  echo hello | {helix} produce orders
  {helix} consume orders --from earliest
  {helix} tail orders -f
  {helix} cluster health
{}
Ctrl-C, or {}, stops {}.
",
            self.cluster_text(&helix),
            with_port(&format!("{helix} dev stop"), self.port),
            if self.nodes.len() == 1 { "the node" } else { "the nodes" },
        )
    }

    /// What only a cluster of several nodes can show.
    fn cluster_text(&self, helix: &str) -> String {
        if self.nodes.len() == 1 {
            return String::new();
        }
        let kill = with_port(&format!("{helix} dev kill 2"), self.port);
        let restart = with_port(&format!("{helix} dev restart 2"), self.port);
        format!("  {kill}       kill -9: the others take over\n  {restart}\n")
    }
}

/// This program as the user called it.
fn program() -> String {
    std::env::args().next().unwrap_or_else(|| "helix".to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;
    use crate::args::DevBase;
    use crate::node::free_ports;

    fn args(nodes: u8, port: u16) -> DevStartArgs {
        let base = DevBase { port };
        DevStartArgs { nodes, base, memory: true, keep: false, dir: PathBuf::new() }
    }

    #[test]
    fn a_port_in_use_is_found_before_anything_starts() {
        let port = free_ports(1).unwrap()[0];
        let _peer = TcpListener::bind((Ipv4Addr::LOCALHOST, port + PEER_PORT_STEP)).unwrap();
        let error = plan(&args(3, port)).unwrap_err();
        let failure = error.downcast_ref::<Failure>().unwrap();
        assert!(failure.what.contains(&(port + PEER_PORT_STEP).to_string()), "{failure:?}");
        assert!(failure.hint.contains(&format!("helix dev status --port {port}")), "{failure:?}");
        // Only a cluster has peers.
        assert_eq!(plan(&args(1, port)).unwrap().ports.len(), 1);
    }
}
