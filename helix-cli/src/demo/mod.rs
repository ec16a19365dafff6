//! `helix demo`: writes, kills a leader half way, goes on, restarts the node, reads everything
//! back and checks it. Every figure is measured; what is checked is in `workload` and `verify`.

pub(crate) mod figures;
mod play;
pub(crate) mod verify;
pub(crate) mod workload;
mod write;

use std::path::Path;

use anyhow::Context;
use tempfile::TempDir;

use crate::args::{DemoArgs, Global};
use crate::exit::{Exit, Failure, interrupted};
use crate::local::{LocalCluster, Plan, Ports};
use crate::node::free_ports;
use crate::output::Output;
use play::Play;
use workload::Workload;

/// The topic that is written to.
const TOPIC: &str = "demo";

pub(crate) async fn run(global: &Global, args: &DemoArgs) -> anyhow::Result<()> {
    let workload = Workload {
        seed: args.seed,
        records: args.records,
        record_bytes: args.size,
        partitions: args.partitions,
    };
    let folder = folder(args).context("make a folder for the nodes")?;
    if is_in_memory(folder.path()) && !global.quiet {
        eprintln!(
            "{} is in memory, where a sync costs nothing; --dir on a disk gives real figures",
            folder.path().display()
        );
    }
    let cluster = LocalCluster::start(&plan(args, folder.path())?)?;
    let mut play = Play::new(workload, cluster, !global.quiet)?;
    let outcome = tokio::select! {
        outcome = play.run() => outcome.map_err(|error| play.cluster.explain(error)),
        () = interrupted() => Err(Failure::interrupted().into()),
    };
    // Whatever happened, nothing stays behind.
    let killed = play.cluster.kill().await;
    let removed = folder.close().context("remove the nodes' folder");
    let (figures, findings) = outcome?;
    killed?;
    removed?;
    Output { format: global.output }.show_as(&figures, || figures.text())?;
    if findings.total() == 0 {
        return Ok(());
    }
    let what = format!("what was read is not what was acked: {} findings", findings.total());
    let failure = Failure::new(Exit::VerificationFailed, what);
    Err(failure.why(findings.examples.join("\n")).into())
}

fn plan(args: &DemoArgs, folder: &Path) -> anyhow::Result<Plan> {
    let ports = free_ports(2 * usize::from(args.nodes))?;
    let ports = ports.chunks_exact(2).map(|pair| Ports { client: pair[0], peer: pair[1] });
    let folder = Some(folder.to_owned());
    Ok(Plan { ports: ports.collect(), folder, is_quiet: true, has_admin: false })
}

fn folder(args: &DemoArgs) -> std::io::Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("helix-demo-");
    match &args.dir {
        Some(folder) => builder.tempdir_in(folder),
        None => builder.tempdir(),
    }
}

/// Whether a folder is not on a disk at all, as /tmp on many systems.
#[cfg(target_os = "linux")]
fn is_in_memory(path: &Path) -> bool {
    const TMPFS_MAGIC: i128 = 0x0102_1994;
    rustix::fs::statfs(path).is_ok_and(|system| i128::from(system.f_type) == TMPFS_MAGIC)
}

#[cfg(not(target_os = "linux"))]
fn is_in_memory(_path: &Path) -> bool {
    false
}
