//! Access to the disk: a real directory, and in tests a simulated disk with faults and crashes.

#[cfg(any(test, feature = "testing"))]
mod faults;
#[cfg(any(test, feature = "testing"))]
mod faulty;
mod probe;
mod real;
#[cfg(any(test, feature = "testing"))]
mod simulated;

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;

#[cfg(any(test, feature = "testing"))]
pub use faults::{Fault, Operation};
#[cfg(any(test, feature = "testing"))]
pub use faulty::FaultyStorage;
pub use probe::probe_sync;
pub use real::DirStorage;
#[cfg(any(test, feature = "testing"))]
pub use simulated::{CacheMode, Crash, CrashEffect, DiskOperation, PendingChange, SimulatedDisk};

/// Alignment of writes: offset, length and buffer address of `write_at` are multiples of it.
pub const BLOCK: usize = 4096;

/// A flat directory of files. Names are plain file names.
pub trait Storage: Debug + Send + Sync + 'static {
    /// Locks the directory for this process until the guard is dropped. `WouldBlock` if it is
    /// locked.
    fn lock(&self) -> io::Result<Box<dyn Send + Sync>>;
    /// Returns the names of all files.
    fn list(&self) -> io::Result<Vec<String>>;
    /// Creates a file with exactly `len` bytes of allocated space, replacing one of the same name.
    ///
    /// Fails with `StorageFull` if the disk is full, and leaves nothing behind.
    fn create(&self, name: &str, len: u64) -> io::Result<Arc<dyn File>>;
    /// Opens an existing file for reading and writing.
    fn open(&self, name: &str) -> io::Result<Arc<dyn File>>;
    /// Renames a file, replacing the target. Durable after `sync_dir`.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Swaps the names of two files. Durable after `sync_dir`; a crash before it swaps both or
    /// neither.
    ///
    /// Fails with `Unsupported` if the file system cannot do that.
    fn exchange(&self, a: &str, b: &str) -> io::Result<()>;
    /// Removes a file; open handles stay usable. Durable after `sync_dir`.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes creations, renames and removals durable.
    fn sync_dir(&self) -> io::Result<()>;
    /// Returns the bytes that can still be allocated.
    fn free_bytes(&self) -> io::Result<u64>;
    /// Returns whether writes bypass the page cache.
    fn direct_io(&self) -> bool;
    /// Returns whether a write into a created file finds its space.
    ///
    /// It may not on a file system that writes each block to another place, or that allocates
    /// only when it writes.
    fn reserves_space(&self) -> bool {
        true
    }
    /// Returns whether every write goes to a new place, so that filling a file with zeroes before
    /// does not help a write into it.
    fn writes_elsewhere(&self) -> bool {
        false
    }
    /// Returns a description of the directory for messages.
    fn describe(&self) -> String;
}

// Empty files are never requested.
#[allow(clippy::len_without_is_empty)]
/// An open file. Reads may run concurrently with each other and with a write to another range.
pub trait File: Debug + Send + Sync + 'static {
    fn len(&self) -> io::Result<u64>;
    /// Writes all of `data`; `offset`, length and address are multiples of [`BLOCK`].
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()>;
    /// Makes all completed writes durable.
    fn sync_data(&self) -> io::Result<()>;
    /// Fills `buf` through the page cache. No alignment needed.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
    /// Fills `buf` if that needs no disk access; returns `false` if it would.
    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<bool>;
    /// Fills `buf` from the device, bypassing the page cache. No alignment needed.
    fn read_device_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
    /// Returns the allocated bytes that were never written, and read as zeroes; 0 if unknown.
    fn unwritten_bytes(&self) -> io::Result<u64> {
        Ok(0)
    }
    /// Announces that `read_at` will soon read a range, which may be fetched in advance. A hint.
    fn will_read(&self, range: Range<u64>) {
        let _ = range;
    }
}
