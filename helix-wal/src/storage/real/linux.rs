//! System calls of Linux beside those of the standard library.

use std::fs::{File as Fd, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::Path;

use super::BLOCK;

/// Maximum bytes fetched in advance by one request.
///
/// Linux ignores everything beyond its readahead window, which has this size by default.
const FETCH_BYTES_MAX: u64 = 128 << 10;

pub(super) fn open_direct(path: &Path, options: &mut OpenOptions) -> io::Result<Fd> {
    use std::os::unix::fs::OpenOptionsExt;
    let flag = rustix::fs::OFlags::DIRECT.bits() as i32;
    options.read(true).write(true).custom_flags(flag).open(path)
}

/// Opens a file again by its descriptor, for reads through the page cache. Its name may have
/// changed.
pub(super) fn reopen_cached(direct: &Fd) -> io::Result<Fd> {
    use std::os::fd::AsRawFd;
    Fd::open(format!("/proc/self/fd/{}", direct.as_raw_fd()))
}

/// Reserves space for a file. Returns `false` if the file system cannot do that.
pub(super) fn reserve(fd: &Fd, len: u64) -> io::Result<bool> {
    use rustix::fs::{FallocateFlags, fallocate};
    use rustix::io::Errno;
    loop {
        match fallocate(fd, FallocateFlags::empty(), 0, len) {
            Ok(()) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(false),
            Err(e) => return Err(e.into()),
        }
    }
}

/// Returns the bytes in holes of a file, which its allocated and never written parts count as.
pub(super) fn unwritten_bytes(fd: &Fd, len: u64) -> io::Result<u64> {
    use rustix::fs::{SeekFrom, seek};
    use rustix::io::Errno;
    let (mut at, mut unwritten) = (0, 0);
    while at < len {
        let data = match seek(fd, SeekFrom::Data(at)) {
            Ok(data) => data.min(len),
            Err(Errno::NXIO) => len,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(0),
            Err(e) => return Err(e.into()),
        };
        unwritten += data - at;
        if data >= len {
            break;
        }
        at = seek(fd, SeekFrom::Hole(data))?.max(data + 1);
    }
    Ok(unwritten)
}

/// Returns whether the file system writes each block to a new place, reserved or not.
#[allow(clippy::unnecessary_cast)] // The type of the number differs between platforms.
pub(super) fn writes_elsewhere(directory: &Fd) -> bool {
    // Magic numbers of btrfs, ZFS, bcachefs and F2FS.
    const COPY_ON_WRITE: [i64; 4] = [0x9123_683e, 0x2fc1_2fc1, 0xca45_1a4e, 0xf2f5_2010];
    // Some platforms extend the sign of the number.
    let kind = rustix::fs::fstatfs(directory).map(|stat| stat.f_type as i64 & 0xffff_ffff);
    kind.is_ok_and(|kind| COPY_ON_WRITE.contains(&kind))
}

pub(super) fn exchange(directory: &Fd, a: &str, b: &str) -> io::Result<()> {
    use rustix::fs::{RenameFlags, renameat_with};
    use rustix::io::Errno;
    renameat_with(directory, a, directory, b, RenameFlags::EXCHANGE).map_err(|e| match e {
        Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP => io::ErrorKind::Unsupported.into(),
        e => e.into(),
    })
}

pub(super) fn read_without_waiting(fd: &Fd, buf: &mut [u8], offset: u64) -> io::Result<bool> {
    use rustix::io::{Errno, ReadWriteFlags, preadv2};
    let mut filled = 0;
    while filled < buf.len() {
        let mut rest = [io::IoSliceMut::new(&mut buf[filled..])];
        match preadv2(fd, &mut rest, offset + filled as u64, ReadWriteFlags::NOWAIT) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => filled += n,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(false),
            Err(e) => return Err(e.into()),
        }
    }
    Ok(true)
}

/// Starts fetching a range into the page cache.
pub(super) fn fetch(fd: &Fd, range: Range<u64>) {
    use rustix::fs::{Advice, fadvise};
    let mut start = range.start;
    while start < range.end {
        let len = (range.end - start).min(FETCH_BYTES_MAX);
        // Ignored: it is a hint.
        let _ = fadvise(fd, start, std::num::NonZeroU64::new(len), Advice::WillNeed);
        start += len;
    }
}

pub(super) fn drop_cached(fd: &Fd, offset: u64, len: usize) {
    use rustix::fs::{Advice, fadvise};
    // Ignored: it is a hint. Only whole pages are dropped, so the range is widened.
    let start = offset - offset % BLOCK as u64;
    let len = std::num::NonZeroU64::new((len + 2 * BLOCK) as u64);
    let _ = fadvise(fd, start, len, Advice::DontNeed);
}
