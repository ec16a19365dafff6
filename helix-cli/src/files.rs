//! Files of this program's own: its contexts, its backups. Everything that touches them is here.
//! A file that is replaced is whole at every moment, also after a power loss.

// The rule keeps the service's files in the log's crate; these are none of the service's.
#![allow(clippy::disallowed_methods)]

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use tempfile::Builder;

/// What a small file holds. None: there is no such file.
pub(crate) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The same, of a file of text.
pub(crate) fn read_text(path: &Path) -> io::Result<Option<String>> {
    let text = read(path)?.map(String::from_utf8).transpose();
    text.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

/// Makes a file hold this and nothing else, or leaves it as it was. Its folder must be there.
pub(crate) fn replace(path: &Path, data: &[u8]) -> io::Result<()> {
    let folder = parent(path);
    let mut builder = Builder::new();
    // As for any other file, what others may do is left to the user's mask.
    builder.prefix(".helix-").suffix(".tmp").permissions(Permissions::from_mode(0o666));
    let mut temporary = builder.tempfile_in(folder)?;
    temporary.write_all(data)?;
    temporary.as_file().sync_all()?;
    temporary.persist(path).map_err(|error| error.error)?;
    sync_folder(folder)
}

/// Makes a folder and those that it lies in, unless they are there.
pub(crate) fn make_folder(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).create(path)?;
    sync_folder(parent(path))
}

/// Makes the names in a folder survive a power loss.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Opens a file for reading.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    File::open(path)
}

/// Opens a file for writing behind its first `length` bytes; what was there beyond is gone. Makes
/// it if it is not there and `length` is 0.
pub(crate) fn open_at(path: &Path, length: u64) -> io::Result<File> {
    let mut options = OpenOptions::new();
    // Cut to the length below, not to nothing.
    let file = options.append(true).create(length == 0).open(path)?;
    file.set_len(length)?;
    Ok(file)
}

/// Names in a folder, in order.
pub(crate) fn names(path: &Path) -> io::Result<Vec<OsString>> {
    let entries: io::Result<Vec<_>> = fs::read_dir(path)?.collect();
    let mut names: Vec<_> = entries?.iter().map(fs::DirEntry::file_name).collect();
    names.sort();
    Ok(names)
}

/// A file that only one process holds at a time, until it is dropped. None: another one holds it.
pub(crate) fn lock(path: &Path) -> io::Result<Option<File>> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).open(path)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Where this user's settings of this program are. None: the system names no home.
pub(crate) fn config_folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let base = match variable("XDG_CONFIG_HOME") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(variable("HOME")?).join(".config"),
    };
    Some(base.join("helix"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_nothing_stays_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one/two/file");
        assert_eq!(read_text(&path).unwrap(), None);
        make_folder(path.parent().unwrap()).unwrap();
        make_folder(path.parent().unwrap()).unwrap();
        replace(&path, b"first").unwrap();
        replace(&path, b"second").unwrap();
        assert_eq!(read_text(&path).unwrap().as_deref(), Some("second"));
        assert_eq!(names(path.parent().unwrap()).unwrap(), ["file"]);
    }

    #[test]
    fn a_lock_is_held_by_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = lock(&path).unwrap();
        assert!(held.is_some() && lock(&path).unwrap().is_none());
        drop(held);
        assert!(lock(&path).unwrap().is_some());
    }

    #[test]
    fn a_file_is_cut_where_it_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert!(open_at(&path, 3).is_err(), "it is not there");
        open_at(&path, 0).unwrap().write_all(b"abcdef").unwrap();
        open_at(&path, 3).unwrap().write_all(b"x").unwrap();
        assert_eq!(read_text(&path).unwrap().as_deref(), Some("abcx"));
    }
}
