//! Substitutes for the system calls of Linux, on systems that lack them.

use std::fs::{File as Fd, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::Path;

pub(super) fn open_direct(_: &Path, _: &mut OpenOptions) -> io::Result<Fd> {
    Err(io::ErrorKind::Unsupported.into())
}

pub(super) fn reopen_cached(_: &Fd) -> io::Result<Fd> {
    Err(io::ErrorKind::Unsupported.into())
}

pub(super) fn reserve(_: &Fd, _: u64) -> io::Result<bool> {
    Ok(false)
}

pub(super) fn unwritten_bytes(_: &Fd, _: u64) -> io::Result<u64> {
    Ok(0)
}

pub(super) fn writes_elsewhere(_: &Fd) -> bool {
    false
}

pub(super) fn exchange(_: &Fd, _: &str, _: &str) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

pub(super) fn read_without_waiting(_: &Fd, _: &mut [u8], _: u64) -> io::Result<bool> {
    Ok(false)
}

pub(super) fn fetch(_: &Fd, _: Range<u64>) {}

pub(super) fn drop_cached(_: &Fd, _: u64, _: usize) {}
