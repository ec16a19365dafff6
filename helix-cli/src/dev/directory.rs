//! The data directory of a dev cluster, removed at the end unless it is to be kept.
//! It has a subdirectory for each node.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use tempfile::TempDir;

use crate::args::{DevStartArgs, NODES_MAX};
use crate::exit::{CliError, Exit};
use crate::local_cluster::node_directory;

/// Data directory of a cluster without --dir.
const DIRECTORY_DEFAULT: &str = "helix-dev";

/// Storage of the nodes.
#[derive(Debug)]
pub(super) enum DataDirectory {
    Memory,
    /// Created for this run and removed at its end.
    Temporary(TempDir),
    /// Kept at the end, because of --keep or because it existed before.
    Kept {
        path: PathBuf,
        existed: bool,
    },
}

impl DataDirectory {
    /// Creates or reuses the data directory.
    ///
    /// # Errors
    /// Fails if it cannot be created or belongs to a cluster with another number of nodes.
    pub(super) fn create(args: &DevStartArgs) -> anyhow::Result<Self> {
        if args.memory {
            return Ok(Self::Memory);
        }
        // A directory that the user names is never removed.
        let is_kept = args.keep || args.dir.is_some();
        let path = args.dir.clone().unwrap_or_else(|| PathBuf::from(DIRECTORY_DEFAULT));
        check_size(&path, args.nodes)?;
        Self::create_at(path, is_kept)
    }

    fn create_at(path: PathBuf, is_kept: bool) -> anyhow::Result<Self> {
        if is_kept {
            let existed = path.exists();
            return Ok(Self::Kept { path, existed });
        }
        match temporary(&path) {
            Ok(directory) => Ok(Self::Temporary(directory)),
            // An existing directory is never removed.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Ok(Self::Kept { path, existed: true })
            }
            Err(error) => Err(error).with_context(|| format!("create {}", path.display())),
        }
    }

    /// Returns the path; None for memory storage.
    pub(super) fn path(&self) -> Option<PathBuf> {
        match self {
            Self::Memory => None,
            Self::Temporary(directory) => Some(directory.path().to_owned()),
            Self::Kept { path, .. } => Some(path.clone()),
        }
    }

    /// Returns true if the directory is removed at the end.
    pub(super) fn is_removed(&self) -> bool {
        matches!(self, Self::Temporary(_))
    }

    pub(super) fn text(&self) -> String {
        match self {
            Self::Memory => "data in memory: nothing survives a restart".to_owned(),
            Self::Temporary(directory) => {
                let path = directory.path().display();
                format!("data and logs in {path}, removed on exit; use --keep to keep them")
            }
            Self::Kept { path, existed: false } => {
                format!("data and logs (node-N.log) in {}, kept", path.display())
            }
            Self::Kept { path, existed: true } => {
                format!("data and logs in {}, which existed before and is kept", path.display())
            }
        }
    }

    pub(super) fn remove(self) -> anyhow::Result<()> {
        match self {
            Self::Temporary(directory) => directory.close().context("remove the data directory"),
            Self::Memory | Self::Kept { .. } => Ok(()),
        }
    }
}

/// Checks that a data directory fits the number of nodes, which is fixed when a cluster forms.
fn check_size(path: &Path, nodes: u8) -> anyhow::Result<()> {
    let existing =
        (1..=NODES_MAX).take_while(|node| node_directory(path, u64::from(*node)).exists()).count();
    if existing == 0 || existing == usize::from(nodes) {
        return Ok(());
    }
    let what = format!("{} has the data of {existing} nodes, not of {nodes}", path.display());
    let failure = CliError::new(Exit::Precondition, what);
    Err(failure.hint(format!("--nodes {existing}\n--dir DIR   for another directory")).into())
}

/// Creates a directory with exactly this name, which is removed on drop.
fn temporary(path: &Path) -> io::Result<TempDir> {
    let path = std::path::absolute(path)?;
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        // The root directory exists.
        return Err(io::ErrorKind::AlreadyExists.into());
    };
    tempfile::Builder::new().prefix(name).rand_bytes(0).tempdir_in(parent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::DevPortArgs;

    fn args(dir: PathBuf) -> DevStartArgs {
        let base = DevPortArgs { port: 1 };
        let set = Vec::new();
        let (memory, tls, keep, kafka) = (false, false, false, false);
        DevStartArgs { nodes: 3, base, memory, tls, keep, dir: Some(dir), kafka, set }
    }

    #[test]
    fn removes_created_directory_but_not_an_existing_one() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("helix-dev");
        let first = DataDirectory::create_at(path.clone(), false).unwrap();
        assert!(matches!(first, DataDirectory::Temporary(_)));
        assert_eq!(first.path().unwrap(), path);
        let second = DataDirectory::create_at(path.clone(), false).unwrap();
        assert!(matches!(second, DataDirectory::Kept { existed: true, .. }));
        second.remove().unwrap();
        assert!(path.exists());
        first.remove().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn named_directory_is_created_by_the_nodes_and_kept() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("data");
        let directory = DataDirectory::create(&args(path.clone())).unwrap();
        assert!(matches!(directory, DataDirectory::Kept { existed: false, .. }));
        assert!(!path.exists());
    }

    #[test]
    fn rejects_directory_of_another_cluster_size() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().to_owned();
        let _one = temporary(&node_directory(&path, 1)).unwrap();
        assert!(DataDirectory::create(&args(path.clone())).is_err());
        let _two = temporary(&node_directory(&path, 2)).unwrap();
        let _three = temporary(&node_directory(&path, 3)).unwrap();
        assert!(DataDirectory::create(&args(path)).is_ok());
    }
}
