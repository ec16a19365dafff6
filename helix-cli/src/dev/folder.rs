//! Where a dev cluster keeps its data: a folder that goes with it unless it is to be kept.
//! Each node has a folder of its own in it.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use tempfile::TempDir;

use crate::args::{DevStartArgs, NODES_MAX};
use crate::exit::{Exit, Failure};
use crate::local::folder_of;

/// Where the nodes keep their data.
#[derive(Debug)]
pub(super) enum Folder {
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
    /// # Errors
    /// It cannot be made, or is that of a cluster of another size.
    pub(super) fn make(args: &DevStartArgs) -> anyhow::Result<Self> {
        if args.memory {
            return Ok(Self::Memory);
        }
        let path = args.dir.clone();
        check_size(&path, args.nodes)?;
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

    /// None: memory.
    pub(super) fn path(&self) -> Option<PathBuf> {
        match self {
            Self::Memory => None,
            Self::Temporary(folder) => Some(folder.path().to_owned()),
            Self::Kept { path, .. } => Some(path.clone()),
        }
    }

    pub(super) fn text(&self) -> String {
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

    pub(super) fn remove(self) -> anyhow::Result<()> {
        match self {
            Self::Temporary(folder) => folder.close().context("remove the nodes' folder"),
            Self::Memory | Self::Kept { .. } => Ok(()),
        }
    }
}

/// A cluster's size is decided when it forms: a folder is of use to one of the same size only.
fn check_size(path: &Path, nodes: u8) -> anyhow::Result<()> {
    let was = (1..=NODES_MAX).take_while(|node| folder_of(path, u64::from(*node)).exists()).count();
    if was == 0 || was == usize::from(nodes) {
        return Ok(());
    }
    let what = format!("{} has the data of {was} nodes, not of {nodes}", path.display());
    let failure = Failure::new(Exit::Precondition, what);
    Err(failure.hint(format!("--nodes {was}\n--dir for another folder")).into())
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
    use crate::args::DevBase;

    fn args(dir: PathBuf, keep: bool) -> DevStartArgs {
        DevStartArgs { nodes: 3, base: DevBase { port: 1 }, memory: false, keep, dir }
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
    fn a_folder_to_be_kept_is_left_to_the_nodes() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("data");
        let folder = Folder::make(&args(path.clone(), true)).unwrap();
        assert!(matches!(folder, Folder::Kept { was_there: false, .. }));
        assert!(!path.exists());
    }

    #[test]
    fn a_folder_of_another_size_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().to_owned();
        let _one = temporary(&folder_of(&path, 1)).unwrap();
        assert!(Folder::make(&args(path.clone(), false)).is_err());
        let _two = temporary(&folder_of(&path, 2)).unwrap();
        let _three = temporary(&folder_of(&path, 3)).unwrap();
        assert!(Folder::make(&args(path, false)).is_ok());
    }
}
