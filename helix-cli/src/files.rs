//! File access for contexts and backups.
//! Files are replaced atomically, also with respect to power loss.

// The lint keeps the files of the service in helix-wal; these files belong to the command line.
#![allow(clippy::disallowed_methods)]

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use tempfile::Builder;

/// Reads a small file; None if it does not exist.
pub(crate) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads a small text file; None if it does not exist.
pub(crate) fn read_text(path: &Path) -> io::Result<Option<String>> {
    let text = read(path)?.map(String::from_utf8).transpose();
    text.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

/// Returns true if there is a file of this name, or something else.
pub(crate) fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Replaces the content of a file atomically. Its directory must exist.
pub(crate) fn replace(path: &Path, data: &[u8]) -> io::Result<()> {
    let directory = parent(path);
    let mut builder = Builder::new();
    // The user's umask restricts the permissions, as for any new file.
    builder.prefix(".helix-").suffix(".tmp").permissions(Permissions::from_mode(0o666));
    let mut temporary = builder.tempfile_in(directory)?;
    temporary.write_all(data)?;
    temporary.as_file().sync_all()?;
    temporary.persist(path).map_err(|error| error.error)?;
    sync_directory(directory)
}

/// Creates a file that must not exist, with these permissions, and syncs it.
pub(crate) fn create_new(path: &Path, data: &[u8], mode: u32) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(data)?;
    file.sync_all()
}

/// Removes a file, unless there is none.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Creates a directory that only the user can access, unless it exists.
pub(crate) fn create_private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Creates a directory and its parents, unless they exist.
pub(crate) fn create_directory(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).create(path)?;
    sync_directory(parent(path))
}

/// Syncs a directory, so that the names in it survive a power loss.
pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Opens a file to add to its end.
pub(crate) fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).open(path)
}

/// Opens a file for reading.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    File::open(path)
}

/// Reads the end of a file, at most `bytes_max`.
pub(crate) fn read_end(path: &Path, bytes_max: usize) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(bytes_max as u64)))?;
    let mut content = Vec::new();
    file.take(bytes_max as u64).read_to_end(&mut content)?;
    Ok(content)
}

/// Truncates a file to `length` bytes and opens it for appending.
/// Creates a missing file if `length` is 0.
pub(crate) fn open_at(path: &Path, length: u64) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.append(true).create(length == 0).open(path)?;
    file.set_len(length)?;
    Ok(file)
}

/// Opens a file for appending; creates a missing one.
pub(crate) fn open_to_append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

/// Lists the names in a directory, sorted.
pub(crate) fn names(path: &Path) -> io::Result<Vec<OsString>> {
    let entries: io::Result<Vec<_>> = fs::read_dir(path)?.collect();
    let mut names: Vec<_> = entries?.iter().map(fs::DirEntry::file_name).collect();
    names.sort();
    Ok(names)
}

/// Locks a file until it is dropped; None if another process holds the lock.
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

/// Returns the user's directory for the state of Helix; None without a home directory.
pub(crate) fn state_directory() -> Option<PathBuf> {
    let of = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = of("XDG_STATE_HOME").or_else(|| Some(of("HOME")?.join(".local/state")));
    Some(base?.join("helix"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_file_and_leaves_no_temporary_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("one/two/file");
        assert_eq!(read_text(&path).unwrap(), None);
        create_directory(path.parent().unwrap()).unwrap();
        create_directory(path.parent().unwrap()).unwrap();
        replace(&path, b"first").unwrap();
        replace(&path, b"second").unwrap();
        assert_eq!(read_text(&path).unwrap().as_deref(), Some("second"));
        assert_eq!(names(path.parent().unwrap()).unwrap(), ["file"]);
    }

    #[test]
    fn lock_is_exclusive() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let held = lock(&path).unwrap();
        assert!(held.is_some() && lock(&path).unwrap().is_none());
        drop(held);
        assert!(lock(&path).unwrap().is_some());
    }

    #[test]
    fn open_at_truncates_and_appends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        assert!(open_at(&path, 3).is_err(), "missing file");
        open_at(&path, 0).unwrap().write_all(b"abcdef").unwrap();
        open_at(&path, 3).unwrap().write_all(b"x").unwrap();
        assert_eq!(read_text(&path).unwrap().as_deref(), Some("abcx"));
    }
}
