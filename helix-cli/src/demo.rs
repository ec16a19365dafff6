//! `helix demo`: writes records, kills a leader half way, restarts it, reads all records back and
//! verifies them. `scenario` has the steps, `workload` the records, `verify` the checks.

pub(crate) mod measurements;
mod scenario;
mod timeline;
pub(crate) mod verify;
pub(crate) mod workload;
mod write;

use std::path::Path;

use anyhow::Context;
use tempfile::TempDir;

use crate::args::{DemoArgs, GlobalArgs};
use crate::child_node::free_ports;
use crate::exit::{CliError, Exit};
use crate::interrupt::interrupted;
use crate::local_cluster::{ClusterPlan, LocalCluster, NodePorts};
use crate::output::{Output, message};
use scenario::DemoScenario;
use workload::DemoWorkload;

pub(crate) async fn run(global: &GlobalArgs, args: &DemoArgs) -> anyhow::Result<()> {
    let workload = DemoWorkload {
        seed: args.seed,
        records: args.records,
        record_bytes: args.size,
        partitions: args.partitions,
    };
    let directory = directory(args).context("create a directory for the nodes")?;
    if is_in_memory(directory.path()) && !global.quiet {
        message!(
            "{} is in memory, where a sync is free; use --dir on a disk for real measurements",
            directory.path().display()
        );
    }
    let cluster = LocalCluster::start(&plan(args, directory.path())?)?;
    let mut scenario = DemoScenario::new(workload, cluster, !global.quiet)?;
    let outcome = tokio::select! {
        outcome = scenario.run() => {
            outcome.map_err(|error| scenario.cluster.with_exit_error(error))
        }
        () = interrupted() => Err(CliError::interrupted().into()),
    };
    // Cleans up before errors are returned.
    let killed = scenario.cluster.kill().await;
    let removed = directory.close().context("remove the data directory");
    let (measurements, findings) = outcome?;
    killed?;
    removed?;
    let shown = Output { format: global.output }.show_as(&measurements, || measurements.text());
    if findings.total() == 0 {
        return shown;
    }
    let what =
        format!("the records read differ from the acked ones: {} findings", findings.total());
    let failure = CliError::new(Exit::VerificationFailed, what);
    let failure = failure.why(findings.examples.join("\n"));
    Err(failure.hint("report it with the output of this run").into())
}

fn plan(args: &DemoArgs, directory: &Path) -> anyhow::Result<ClusterPlan> {
    let ports = free_ports(2 * usize::from(args.nodes))?;
    let ports = ports.chunks_exact(2).map(|pair| NodePorts { client: pair[0], peer: pair[1] });
    let directory = Some(directory.to_owned());
    let ports = ports.collect();
    Ok(ClusterPlan {
        ports,
        directory,
        is_quiet: true,
        has_admin: false,
        tls_dir: None,
        settings: Vec::new(),
    })
}

fn directory(args: &DemoArgs) -> std::io::Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("helix-demo-");
    match &args.dir {
        Some(directory) => builder.tempdir_in(directory),
        None => builder.tempdir(),
    }
}

/// Returns true if a directory is on a memory file system, like /tmp on many systems.
#[cfg(target_os = "linux")]
fn is_in_memory(path: &Path) -> bool {
    const TMPFS_MAGIC: i128 = 0x0102_1994;
    rustix::fs::statfs(path).is_ok_and(|system| i128::from(system.f_type) == TMPFS_MAGIC)
}

#[cfg(not(target_os = "linux"))]
fn is_in_memory(_path: &Path) -> bool {
    false
}
