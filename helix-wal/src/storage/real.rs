//! A directory of the operating system. Only it and its submodules access files.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

#[cfg(target_os = "linux")]
mod linux;
#[cfg(not(target_os = "linux"))]
mod portable;

use std::fs::{self, File as Fd, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::fs::{FlockOperation, flock, fstatvfs};

#[cfg(target_os = "linux")]
use linux as system;
#[cfg(not(target_os = "linux"))]
use portable as system;
use system::{
    drop_cached, exchange, fetch, open_direct, read_without_waiting, reopen_cached, reserve,
    unwritten_bytes, writes_elsewhere,
};

use super::{BLOCK, File, Storage};
use crate::error::Shortage;

/// Maximum bytes of one direct read. Larger ones would occupy the device's only queue too long.
const DEVICE_READ_BYTES_MAX: usize = 1 << 20;

/// Name of the file that probes the file system.
const PROBE: &str = ".probe";

/// A directory on a real file system. Uses direct writes if the file system supports them.
#[derive(Debug)]
pub struct DirStorage {
    path: PathBuf,
    /// Kept open, so that a sync of the directory does not depend on its path.
    directory: Fd,
    direct: bool,
    /// A file that is open for direct I/O can be opened again for the page cache.
    reopens: bool,
    reserves_space: bool,
    writes_elsewhere: bool,
}

impl DirStorage {
    /// Opens the directory, creating it if it is missing, with direct writes if possible.
    ///
    /// # Errors
    /// Fails if the directory cannot be created or opened, or if there is no file descriptor.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let mut storage = Self::open_buffered(path)?;
        storage.direct = storage.probe_direct()?;
        storage.reopens = storage.direct && storage.probe_reopen();
        Ok(storage)
    }

    /// Opens the directory with all writes through the page cache.
    ///
    /// # Errors
    /// Fails if the directory cannot be created or opened.
    pub fn open_buffered(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref().to_path_buf();
        create_directory(&path)?;
        let directory = Fd::open(&path)?;
        let writes_elsewhere = writes_elsewhere(&directory);
        let (direct, reopens, reserves_space) = (false, false, true);
        let mut storage =
            Self { path, directory, direct, reopens, reserves_space, writes_elsewhere };
        storage.reserves_space = storage.probe_reserve()?;
        Ok(storage)
    }

    /// Returns whether an aligned direct write works. Some file systems accept the flag and then
    /// fail.
    fn probe_direct(&self) -> io::Result<bool> {
        let name = self.path.join(PROBE);
        let probed =
            open_direct(&name, OpenOptions::new().create(true).truncate(true)).and_then(|fd| {
                let mut scratch = Scratch::new(BLOCK);
                fd.write_all_at(scratch.aligned(BLOCK), 0)?;
                fd.read_exact_at(scratch.aligned(BLOCK), 0)
            });
        // Ignored: the file may not exist, and an empty one left behind is harmless.
        let _ = fs::remove_file(&name);
        match probed {
            Ok(()) => Ok(true),
            Err(e) => match Shortage::of(&e) {
                None => Ok(false),
                Some(Shortage::Resource) => Err(e),
                // A full disk says nothing of direct writes.
                Some(Shortage::Space) => Ok(self.reads_direct()),
            },
        }
    }

    /// Returns whether a file can be opened by the descriptor that this process has of it. That
    /// takes a mounted `/proc`.
    fn probe_reopen(&self) -> bool {
        let name = self.path.join(PROBE);
        let made = open_direct(&name, OpenOptions::new().create(true).truncate(true));
        let reopens = made.and_then(|fd| reopen_cached(&fd)).is_ok();
        // Ignored: the file may not exist, and an empty one left behind is harmless.
        let _ = fs::remove_file(&name);
        reopens
    }

    /// Returns whether a direct read of an existing file works.
    fn reads_direct(&self) -> bool {
        let files = self.list().unwrap_or_default().into_iter();
        let read = |name: String| {
            let fd = open_direct(&self.path.join(name), &mut OpenOptions::new()).ok()?;
            (fd.metadata().ok()?.len() >= BLOCK as u64).then_some(())?;
            Some(fd.read_exact_at(Scratch::new(BLOCK).aligned(BLOCK), 0).is_ok())
        };
        files.filter_map(read).next().unwrap_or(false)
    }

    /// Returns whether space allocated to a file stays reserved for writes into it.
    fn probe_reserve(&self) -> io::Result<bool> {
        if self.writes_elsewhere {
            return Ok(false);
        }
        let name = self.path.join(PROBE);
        let probed = OpenOptions::new().create(true).truncate(true).write(true).open(&name);
        let probed = probed.and_then(|fd| reserve(&fd, BLOCK as u64));
        // Ignored: the file may not exist, and an empty one left behind is harmless.
        let _ = fs::remove_file(&name);
        match probed {
            Ok(reserved) => Ok(reserved),
            Err(e) if Shortage::of(&e) == Some(Shortage::Resource) => Err(e),
            // The next use of the directory reports other errors.
            Err(_) => Ok(true),
        }
    }

    /// Opens a file, and prepares a new one with `prepare`.
    fn file(
        &self,
        name: &str,
        options: &mut OpenOptions,
        prepare: impl FnOnce(&Fd) -> io::Result<()>,
    ) -> io::Result<Arc<dyn File>> {
        let path = self.path.join(name);
        let cached = OnceLock::new();
        let mut direct = None;
        if self.reopens {
            prepare(direct.insert(open_direct(&path, options)?))?;
        } else {
            let fd = options.read(true).write(true).open(&path)?;
            prepare(&fd)?;
            if self.direct {
                direct = Some(open_direct(&path, &mut OpenOptions::new())?);
            }
            // Cannot be set yet.
            let _ = cached.set(fd);
        }
        Ok(Arc::new(DirFile { cached, direct, clean: AtomicBool::new(false) }))
    }
}

impl Storage for DirStorage {
    fn lock(&self) -> io::Result<Box<dyn Send + Sync>> {
        let path = self.path.join("lock");
        let fd = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        flock(&fd, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Box::new(fd))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            // A log never writes names that are not valid UTF-8.
            if let (true, Ok(name)) =
                (entry.file_type()?.is_file(), entry.file_name().into_string())
            {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn create(&self, name: &str, len: u64) -> io::Result<Arc<dyn File>> {
        let options = &mut OpenOptions::new();
        let made = self.file(name, options.create(true).truncate(true), |fd| allocate(fd, len));
        if made.is_err() {
            // Ignored: the first error is reported, and there may be nothing to remove.
            let _ = fs::remove_file(self.path.join(name));
        }
        made
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        self.file(name, &mut OpenOptions::new(), |_| Ok(()))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn exchange(&self, a: &str, b: &str) -> io::Result<()> {
        exchange(&self.directory, a, b)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.directory.sync_all()
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let stat = fstatvfs(&self.directory)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn direct_io(&self) -> bool {
        self.direct
    }

    fn reserves_space(&self) -> bool {
        self.reserves_space
    }

    fn writes_elsewhere(&self) -> bool {
        self.writes_elsewhere
    }

    fn describe(&self) -> String {
        self.path.display().to_string()
    }
}

/// A file, opened twice: reads of the tail use the page cache, writes bypass it.
///
/// The descriptor for reads is opened by the first of them, if the system can do that. Most files
/// of an idle log are never read.
///
/// The system reads ahead for sequential reads, into large folios. A copy out of these takes half
/// as long as out of pages that were fetched one by one.
#[derive(Debug)]
struct DirFile {
    /// Set unless there is a direct one.
    cached: OnceLock<Fd>,
    direct: Option<Fd>,
    /// Pages left dirty by an earlier process have been written.
    clean: AtomicBool,
}

impl DirFile {
    /// Returns the descriptor that reads through the page cache.
    fn cached(&self) -> io::Result<&Fd> {
        match (self.cached.get(), &self.direct) {
            (Some(fd), _) => Ok(fd),
            (None, Some(direct)) => {
                let opened = reopen_cached(direct)?;
                Ok(self.cached.get_or_init(|| opened))
            }
            (None, None) => Err(io::Error::other("a file without a descriptor")),
        }
    }

    /// Returns a descriptor for calls that do not transfer bytes of the file.
    fn any(&self) -> io::Result<&Fd> {
        self.direct.as_ref().map_or_else(|| self.cached(), Ok)
    }
}

impl File for DirFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.any()?.metadata()?.len())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        debug_assert!(offset.is_multiple_of(BLOCK as u64) && data.len().is_multiple_of(BLOCK));
        match &self.direct {
            Some(direct) => direct.write_all_at(data, offset),
            None => self.cached()?.write_all_at(data, offset),
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        // Either descriptor flushes the file's dirty pages and the device. On macOS the standard
        // library requests a full flush here.
        self.any()?.sync_data()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.cached()?.read_exact_at(buf, offset)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<bool> {
        read_without_waiting(self.cached()?, buf, offset)
    }

    fn read_device_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match &self.direct {
            Some(direct) => read_direct(direct, buf, offset),
            None => {
                // Only clean pages can be dropped. This process syncs its own writes.
                if !self.clean.load(Ordering::Acquire) {
                    self.cached()?.sync_data()?;
                    self.clean.store(true, Ordering::Release);
                }
                drop_cached(self.cached()?, offset, buf.len());
                self.cached()?.read_exact_at(buf, offset)
            }
        }
    }

    fn unwritten_bytes(&self) -> io::Result<u64> {
        unwritten_bytes(self.any()?, self.len()?)
    }

    fn will_read(&self, range: Range<u64>) {
        // Ignored: the read that follows reports it.
        if let Ok(cached) = self.cached() {
            fetch(cached, range);
        }
    }
}

/// Memory with an aligned start, without unsafe code: a vector with one spare block.
struct Scratch {
    bytes: Vec<u8>,
}

impl Scratch {
    fn new(len: usize) -> Self {
        Self { bytes: vec![0; len + BLOCK] }
    }

    fn aligned(&mut self, len: usize) -> &mut [u8] {
        let start = self.bytes.as_ptr().align_offset(BLOCK);
        &mut self.bytes[start..start + len]
    }
}

/// Reads whole blocks around the range and copies the range.
fn read_direct(fd: &Fd, buf: &mut [u8], offset: u64) -> io::Result<()> {
    let block = BLOCK as u64;
    let aligned = offset.is_multiple_of(block)
        && buf.len().is_multiple_of(BLOCK)
        && buf.as_ptr().align_offset(BLOCK) == 0;
    if aligned {
        for (i, chunk) in buf.chunks_mut(DEVICE_READ_BYTES_MAX).enumerate() {
            let got = read_fully(fd, chunk, offset + (i * DEVICE_READ_BYTES_MAX) as u64)?;
            if got < chunk.len() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        return Ok(());
    }
    let wanted = buf.len() + BLOCK;
    let mut scratch = Scratch::new(wanted.next_multiple_of(BLOCK).min(DEVICE_READ_BYTES_MAX));
    let mut filled = 0;
    while filled < buf.len() {
        let at = offset + filled as u64;
        let start = at - at % block;
        let skip = (at - start) as usize;
        let rest = buf.len() - filled;
        let len = (skip + rest).next_multiple_of(BLOCK).min(DEVICE_READ_BYTES_MAX);
        let blocks = scratch.aligned(len);
        let got = read_fully(fd, blocks, start)?;
        let take = got.saturating_sub(skip).min(rest);
        if take == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        buf[filled..filled + take].copy_from_slice(&blocks[skip..skip + take]);
        filled += take;
    }
    Ok(())
}

/// Reads until `buf` is full or the file ends. Returns the number of bytes read.
fn read_fully(fd: &Fd, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buf.len() {
        match fd.read_at(&mut buf[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
        // A direct read that ends inside a block has reached the end of the file.
        if !filled.is_multiple_of(BLOCK) {
            break;
        }
    }
    Ok(filled)
}

/// Creates the directory and makes every name in its path durable.
fn create_directory(path: &Path) -> io::Result<()> {
    let missing = path.ancestors().take_while(|p| !p.as_os_str().is_empty() && !p.exists()).count();
    fs::create_dir_all(path)?;
    // Syncs even if nothing was missing: the creator may have died before its sync.
    for directory in path.canonicalize()?.ancestors().skip(1).take(missing.max(1)) {
        match Fd::open(directory) {
            Ok(directory) => directory.sync_all()?,
            // A parent that is not readable was not created by this process.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Gives a file its length, with its space if the file system can reserve it.
fn allocate(fd: &Fd, len: u64) -> io::Result<()> {
    // Without a reservation a full disk shows at a write, which then waits.
    if reserve(fd, len)? { Ok(()) } else { fd.set_len(len) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + i / 251) as u8).collect()
    }

    fn write(file: &Arc<dyn File>, bytes: &[u8], offset: u64) {
        let mut scratch = Scratch::new(bytes.len());
        scratch.aligned(bytes.len()).copy_from_slice(bytes);
        file.write_at(scratch.aligned(bytes.len()), offset).unwrap();
    }

    fn in_all_modes(check: impl Fn(DirStorage)) {
        let directory = tempfile::tempdir().unwrap();
        check(DirStorage::open(directory.path().join("direct/a/b")).unwrap());
        let mut opens_twice = DirStorage::open(directory.path().join("twice")).unwrap();
        opens_twice.reopens = false;
        check(opens_twice);
        check(DirStorage::open_buffered(directory.path().join("buffered")).unwrap());
    }

    #[test]
    fn reads_written_bytes_in_all_modes_at_any_offset() {
        in_all_modes(|storage| {
            let len = 3 * DEVICE_READ_BYTES_MAX;
            let bytes = pattern(len);
            let file = storage.create("a", len as u64).unwrap();
            assert_eq!(file.len().unwrap(), len as u64);
            write(&file, &bytes, 0);
            file.sync_data().unwrap();
            let file = storage.open("a").unwrap();
            let ranges =
                [(0, len), (1, len - 1), (4095, 2), (5000, 1 << 20), (0, BLOCK), (len - 1, 1)];
            for (offset, count) in ranges {
                let wanted = &bytes[offset..offset + count];
                let mut got = vec![0; count];
                file.read_device_at(&mut got, offset as u64).unwrap();
                assert!(got == wanted, "device read of {count} at {offset}");
                let mut got = vec![0; count];
                file.read_at(&mut got, offset as u64).unwrap();
                assert!(got == wanted, "read of {count} at {offset}");
                let mut got = vec![0; count];
                // After a read the page cache usually has the pages, but it may have dropped them.
                if file.try_read_at(&mut got, offset as u64).unwrap() {
                    assert!(got == wanted, "cached read of {count} at {offset}");
                }
            }
        });
    }

    #[test]
    fn cached_reads_see_later_writes() {
        in_all_modes(|storage| {
            let file = storage.create("a", 2 * BLOCK as u64).unwrap();
            let mut got = [0; 16];
            file.read_at(&mut got, 100).unwrap();
            write(&file, &[7; BLOCK], 0);
            file.read_at(&mut got, 100).unwrap();
            assert_eq!(got, [7; 16]);
        });
    }

    #[test]
    fn reads_past_the_end_are_errors() {
        in_all_modes(|storage| {
            let file = storage.create("a", BLOCK as u64).unwrap();
            let mut buf = [0; 2];
            let at = BLOCK as u64 - 1;
            for e in [
                file.read_at(&mut buf, at).unwrap_err(),
                file.read_device_at(&mut buf, at).unwrap_err(),
            ] {
                assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof);
            }
            assert!(!matches!(file.try_read_at(&mut buf, at), Ok(true)));
        });
    }

    #[test]
    fn files_are_listed_renamed_replaced_and_removed() {
        in_all_modes(|storage| {
            storage.create("a", 4096).unwrap();
            storage.create("b", 8192).unwrap();
            storage.rename("a", "b").unwrap();
            storage.sync_dir().unwrap();
            assert_eq!(storage.list().unwrap(), ["b"]);
            let held = storage.open("b").unwrap();
            assert_eq!(held.len().unwrap(), 4096);
            storage.remove("b").unwrap();
            held.read_at(&mut [0; 8], 0).unwrap();
            assert_eq!(storage.open("b").unwrap_err().kind(), io::ErrorKind::NotFound);
            assert!(storage.list().unwrap().is_empty());
            assert!(storage.free_bytes().unwrap() > 0);
        });
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_takes_a_second_descriptor_once_it_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let storage = DirStorage::open(directory.path()).unwrap();
        if !storage.reopens {
            println!("skipped: no direct I/O, or no /proc");
            return;
        }
        let descriptors = || {
            let all = fs::read_dir("/proc/self/fd").unwrap();
            let paths = all.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
            paths.filter(|path| path.starts_with(directory.path()) && path.is_file()).count()
        };
        let file = storage.create("a", 4 * BLOCK as u64).unwrap();
        write(&file, &[7; BLOCK], 0);
        file.sync_data().unwrap();
        file.read_device_at(&mut [0; BLOCK], 0).unwrap();
        assert_eq!((file.len().unwrap(), descriptors()), (4 * BLOCK as u64, 1));
        storage.rename("a", "b").unwrap();
        for _ in 0..2 {
            let mut got = [0; 16];
            file.read_at(&mut got, 100).unwrap();
            assert_eq!((got, descriptors()), ([7; 16], 2));
        }
        drop(file);
        assert_eq!(descriptors(), 0);
    }

    #[test]
    fn exchanged_files_swap_names() {
        in_all_modes(|storage| {
            storage.create("a", 4096).unwrap();
            storage.create("b", 8192).unwrap();
            let unsupported = |e: io::Error| e.kind() == io::ErrorKind::Unsupported;
            if storage.exchange("a", "b").is_err_and(unsupported) {
                return;
            }
            assert_eq!(storage.open("a").unwrap().len().unwrap(), 8192);
            assert_eq!(storage.open("b").unwrap().len().unwrap(), 4096);
            let e = storage.exchange("a", "missing").unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::NotFound);
        });
    }

    #[test]
    fn directory_is_locked_until_guard_is_dropped() {
        in_all_modes(|storage| {
            let guard = storage.lock().unwrap();
            let other = DirStorage::open_buffered(&storage.path).unwrap();
            assert_eq!(other.lock().err().unwrap().kind(), io::ErrorKind::WouldBlock);
            drop(guard);
            other.lock().unwrap();
        });
    }

    #[test]
    fn create_on_full_disk_leaves_nothing_behind() {
        in_all_modes(|storage| {
            let e = storage.create("huge", 1 << 60).unwrap_err();
            // Some file systems check the maximum file size before the free space.
            let kinds = [io::ErrorKind::StorageFull, io::ErrorKind::FileTooLarge];
            assert!(kinds.contains(&e.kind()), "{e}");
            assert!(storage.list().unwrap().is_empty());
        });
    }

    #[test]
    fn counts_unwritten_bytes() {
        in_all_modes(|storage| {
            let (blocks, block) = (64, BLOCK as u64);
            let file = storage.create("a", blocks * block).unwrap();
            let before = file.unwritten_bytes().unwrap();
            // Not every file system tells.
            assert!(before == 0 || before == blocks * block, "{before}");
            write(&file, &pattern(2 * BLOCK), 32 * block);
            file.sync_data().unwrap();
            // A file system may write zeroes around a short write.
            let after = file.unwritten_bytes().unwrap();
            assert!(after <= before.saturating_sub(2 * block), "{after}");
            assert!(after >= before / 2, "{after}");
            for at in 0..blocks {
                write(&file, &pattern(BLOCK), at * block);
            }
            file.sync_data().unwrap();
            assert_eq!(file.unwritten_bytes().unwrap(), 0);
        });
    }

    #[test]
    fn never_written_bytes_read_as_zeroes() {
        in_all_modes(|storage| {
            let file = storage.create("a", 64 * BLOCK as u64).unwrap();
            let mut read = vec![1; 64 * BLOCK];
            file.read_device_at(&mut read, 0).unwrap();
            assert!(read.iter().all(|byte| *byte == 0));
        });
    }

    #[test]
    fn direct_read_past_end_is_an_error() {
        in_all_modes(|storage| {
            fs::write(storage.path.join("odd"), pattern(5000)).unwrap();
            let file = storage.open("odd").unwrap();
            let mut got = vec![0; 5000];
            file.read_device_at(&mut got, 0).unwrap();
            assert_eq!(got, pattern(5000));
            let mut got = vec![0; 8192];
            let e = file.read_device_at(&mut got, 0).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof);
        });
    }
}
