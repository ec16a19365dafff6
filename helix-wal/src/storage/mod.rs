//! The only door to the disk. Implementations: a real folder, and in tests a simulated disk that
//! loses, tears, damages, fills up and fails.

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
pub use simulated::{CacheMode, Crash, Fate, Pending, SimulatedDisk, Step};

/// Alignment of writes: offsets, lengths and buffer addresses of `write_at` are multiples of it.
pub const BLOCK: usize = 4096;

/// A flat folder of files. Names are plain file names.
pub trait Storage: Debug + Send + Sync + 'static {
    /// Takes the folder for this process, until the guard is dropped. `WouldBlock` if taken.
    fn lock(&self) -> io::Result<Box<dyn Send + Sync>>;
    /// Names of all files.
    fn list(&self) -> io::Result<Vec<String>>;
    /// Creates a file of exactly `len` bytes of allocated space, replacing one of that name.
    /// `StorageFull` when there is no room; nothing is left behind then.
    fn create(&self, name: &str, len: u64) -> io::Result<Arc<dyn File>>;
    /// Opens an existing file for reading and writing.
    fn open(&self, name: &str) -> io::Result<Arc<dyn File>>;
    /// Renames, replacing the target. Durable after `sync_dir`.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file; open handles go on working. Durable after `sync_dir`.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes creations, renames and removals durable.
    fn sync_dir(&self) -> io::Result<()>;
    /// Bytes that may still be allocated.
    fn free_bytes(&self) -> io::Result<u64>;
    /// Whether writes bypass the page cache.
    fn direct_io(&self) -> bool;
    /// The folder, for people.
    fn describe(&self) -> String;
}

// A file of no bytes is nothing that a caller asks for.
#[allow(clippy::len_without_is_empty)]
/// An open file. Reads may run at the same time as each other and as a write elsewhere.
pub trait File: Debug + Send + Sync + 'static {
    fn len(&self) -> io::Result<u64>;
    /// Writes all of `data`; `offset`, length and address are multiples of [`BLOCK`].
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()>;
    /// Makes all writes that returned durable.
    fn sync_data(&self) -> io::Result<()>;
    /// Fills `buf`, through the page cache. No alignment needed.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
    /// Fills `buf` if that needs no disk access; `false` if it would.
    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<bool>;
    /// Fills `buf` from the device itself, past the page cache. No alignment needed.
    fn read_device_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
    /// Says that `read_at` will soon ask for a range: it may be brought into the page cache
    /// meanwhile. Only advice.
    fn will_read(&self, range: Range<u64>) {
        let _ = range;
    }
}
