//! `helix dev`: one node that stays up until Ctrl-C, to try things with.
//! The node is a child process; its folder goes with it unless it is to be kept.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;
use tempfile::TempDir;
use tokio::time::Instant;

use crate::args::{DevArgs, Global};
use crate::exit::{Exit, Failure, interrupted};
use crate::node::{Node, NodeOptions};
use crate::output::Output;
use crate::units;

pub(crate) async fn run(global: &Global, args: &DevArgs) -> anyhow::Result<()> {
    if TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).is_err() {
        let failure = Failure::new(Exit::Error, format!("port {} is in use", args.port));
        let failure = failure.why("another node may run already: helix version");
        return Err(failure.hint(format!("helix dev --port {}", args.port.wrapping_add(1))).into());
    }
    let folder = Folder::make(args)?;
    let started = Instant::now();
    let mut node =
        Node::start(NodeOptions { port: args.port, data_dir: folder.path(), is_quiet: false })?;
    let outcome = tokio::select! {
        outcome = serve(global, &mut node, &folder, started) => outcome,
        () = interrupted() => Ok(()),
    };
    if !global.quiet {
        eprintln!("stopping");
    }
    let stopped = node.stop().await;
    folder.remove()?;
    outcome?;
    stopped.map(drop)
}

/// Says how to reach the node, and watches it.
async fn serve(
    global: &Global,
    node: &mut Node,
    folder: &Folder,
    started: Instant,
) -> anyhow::Result<()> {
    node.ready().await.context("start a node")?;
    let running = Running { addr: node.address(), data_dir: folder.path() };
    let seconds = units::measured(started.elapsed());
    Output { format: global.output }.show_as(&running, || running.text(&seconds, folder))?;
    Err(node.ended().await)
}

#[derive(Debug, Serialize)]
struct Running {
    addr: String,
    /// None: memory storage.
    data_dir: Option<PathBuf>,
}

impl Running {
    fn text(&self, seconds: &str, folder: &Folder) -> String {
        let helix = program();
        let addr = &self.addr;
        let data = folder.text();
        format!(
            "\
ready in {seconds} at {addr}
{data}

  export HELIX_ADDR={addr}

Try in another terminal:
  {helix} topic create orders --partitions 4
  echo hello | {helix} produce orders
  {helix} consume orders --from earliest
  {helix} tail orders -f
  {helix} topic describe orders

Ctrl-C stops the node.
"
        )
    }
}

/// This program as the user called it.
fn program() -> String {
    std::env::args().next().unwrap_or_else(|| "helix".to_owned())
}

/// Where the node keeps its data.
enum Folder {
    Memory,
    /// Made for this run.
    Temporary(TempDir),
    /// To be kept: asked for, or there before.
    Kept {
        path: PathBuf,
        was_there: bool,
    },
}

impl Folder {
    fn make(args: &DevArgs) -> anyhow::Result<Self> {
        if args.memory {
            return Ok(Self::Memory);
        }
        let path = args.dir.clone();
        if args.keep {
            return Ok(Self::Kept { path, was_there: false });
        }
        match temporary(&path) {
            Ok(folder) => Ok(Self::Temporary(folder)),
            // Whatever is in it is not ours to remove.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Ok(Self::Kept { path, was_there: true })
            }
            Err(error) => Err(error).with_context(|| format!("make {}", path.display())),
        }
    }

    fn path(&self) -> Option<PathBuf> {
        match self {
            Self::Memory => None,
            Self::Temporary(folder) => Some(folder.path().to_owned()),
            Self::Kept { path, .. } => Some(path.clone()),
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Memory => "data in memory: nothing survives, and an ack is no promise".to_owned(),
            Self::Temporary(folder) => {
                let path = folder.path().display();
                format!("data in {path}, removed at the end; --keep keeps it")
            }
            Self::Kept { path, was_there: false } => format!("data in {}, kept", path.display()),
            Self::Kept { path, was_there: true } => {
                format!("data in {}, which was there before and is kept", path.display())
            }
        }
    }

    fn remove(self) -> anyhow::Result<()> {
        match self {
            Self::Temporary(folder) => folder.close().context("remove the node's folder"),
            Self::Memory | Self::Kept { .. } => Ok(()),
        }
    }
}

/// Makes a folder of exactly this name, which goes away with the value.
fn temporary(path: &Path) -> io::Result<TempDir> {
    let path = std::path::absolute(path)?;
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        // The root folder, which is there.
        return Err(io::ErrorKind::AlreadyExists.into());
    };
    tempfile::Builder::new().prefix(name).rand_bytes(0).tempdir_in(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(dir: PathBuf, keep: bool) -> DevArgs {
        DevArgs { port: 0, memory: false, keep, dir }
    }

    #[test]
    fn a_folder_of_its_own_is_removed_and_one_that_was_there_is_not() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("helix-dev");
        let first = Folder::make(&args(path.clone(), false)).unwrap();
        assert!(matches!(first, Folder::Temporary(_)));
        assert_eq!(first.path().unwrap(), path);
        let second = Folder::make(&args(path.clone(), false)).unwrap();
        assert!(matches!(second, Folder::Kept { was_there: true, .. }));
        second.remove().unwrap();
        assert!(path.exists());
        first.remove().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_folder_to_be_kept_is_left_to_the_node() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("data");
        let folder = Folder::make(&args(path.clone(), true)).unwrap();
        assert!(matches!(folder, Folder::Kept { was_there: false, .. }));
        assert!(!path.exists());
    }
}
