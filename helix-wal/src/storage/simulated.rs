//! An in-memory disk that behaves like a real one at a power failure.
//!
//! It loses, tears and garbles unsynced data. It is deterministic: the same calls with the same
//! seed give the same bytes.

mod state;

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use self::state::Disk;
use super::faults::{Fault, Operation};
use super::{BLOCK, File, Storage};
use crate::sync::IgnorePoison;

/// Effect of a crash on one pending change.
///
/// Directory entries and allocations are either kept or lost; every effect except `Kept` loses
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CrashEffect {
    Kept,
    Lost,
    /// The first half of the sector is new, the second half old.
    Torn,
    /// The sector holds neither the old nor the new bytes.
    Garbled,
}

/// Effect of a crash on unsynced changes.
#[derive(Debug, Clone, Copy)]
pub enum Crash<'a> {
    KeepAll,
    LoseAll,
    /// Draws the effect on each change from this seed.
    Seeded(u64),
    /// One effect for each change of [`SimulatedDisk::pending`], in that order; lost if missing.
    Chosen(&'a [CrashEffect]),
}

/// A change that a crash may undo.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PendingChange {
    /// The size that a file was created with.
    Allocation { file: String },
    /// 512 bytes of a file. `changes`: they differ from the bytes underneath. If not, keeping,
    /// losing and tearing them have the same result.
    Sector { file: String, offset: u64, changes: bool },
    /// A name that was added, removed or moved.
    Entry { change: String },
}

/// Success of cached reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheMode {
    Always,
    Never,
    /// Drawn for each read.
    Sometimes,
}

/// A recorded operation, for debugging and for comparing two runs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DiskOperation {
    pub operation: Operation,
    pub file: String,
    pub bytes: Range<u64>,
    /// Checksum of the written bytes; 0 for other operations.
    pub crc: u32,
    pub ok: bool,
}

/// A handle to the disk. Clones are the same handle.
///
/// After a crash every operation on it fails; [`SimulatedDisk::reopen`] returns a new handle.
#[derive(Debug, Clone)]
pub struct SimulatedDisk {
    disk: Arc<Mutex<Disk>>,
    /// Number of crashes before this handle was created.
    life: u64,
}

impl SimulatedDisk {
    /// Creates an empty disk without limits.
    pub fn new(seed: u64) -> Self {
        Self { disk: Arc::new(Mutex::new(Disk::new(seed))), life: 0 }
    }

    /// Copies the disk with its bytes, pending changes and settings. Returns a working handle.
    pub fn fork(&self) -> Self {
        let disk = self.disk().clone();
        let life = disk.life;
        Self { disk: Arc::new(Mutex::new(disk)), life }
    }

    /// Simulates a power failure: applies `crash` to the pending changes and ends every handle.
    pub fn crash(&self, crash: Crash<'_>) {
        self.disk().crash(crash);
    }

    /// Returns a handle for use after the last crash.
    pub fn reopen(&self) -> Self {
        Self { disk: Arc::clone(&self.disk), life: self.disk().life }
    }

    /// Returns the changes that a crash could undo now, oldest first.
    pub fn pending(&self) -> Vec<PendingChange> {
        self.disk().pending()
    }

    /// Reseeds later random draws, so that forks can diverge.
    pub fn reseed(&self, seed: u64) {
        self.disk().reseed(seed);
    }

    /// Plans a failure.
    ///
    /// A failed sync drops all or some of the file's pending writes. Reads through the page cache
    /// still return them until the crash.
    pub fn fail(&self, fault: Fault) {
        self.disk().faults.add(fault);
    }

    /// Cancels the planned failures.
    pub fn heal(&self) {
        self.disk().faults.clear();
    }

    /// Returns the number of operations so far that can change what a crash leaves behind.
    pub fn changes(&self) -> u64 {
        self.disk().changes
    }

    /// Stops the disk at the `n`th change (0 is the first one ever).
    ///
    /// The change itself stays pending, and every operation fails until `crash`.
    pub fn stop_at_change(&self, n: Option<u64>) {
        self.disk().stop_at = n;
    }

    /// Returns the change at which the disk will stop. A crash resets it.
    pub fn stop_at(&self) -> Option<u64> {
        self.disk().stop_at
    }

    /// Returns whether the disk has stopped.
    pub fn stopped(&self) -> bool {
        self.disk().stopped
    }

    /// Sets the bytes that can still be allocated; `None` for no limit.
    pub fn set_free_bytes(&self, free: Option<u64>) {
        self.disk().free = free;
    }

    pub fn set_cache(&self, mode: CacheMode) {
        self.disk().cache = mode;
    }

    pub fn set_direct_io(&self, direct: bool) {
        self.disk().direct = direct;
    }

    /// Sets whether created files report to have their space, and whether writes go elsewhere.
    pub fn set_allocation(&self, reserves_space: bool, writes_elsewhere: bool) {
        let mut disk = self.disk();
        disk.reserves_space = reserves_space;
        disk.writes_elsewhere = writes_elsewhere;
    }

    /// Starts or stops recording the operations for [`SimulatedDisk::trace`].
    pub fn record(&self, on: bool) {
        self.disk().trace = on.then(Vec::new);
    }

    /// Returns the operations since `record`.
    pub fn trace(&self) -> Vec<DiskOperation> {
        self.disk().trace.clone().unwrap_or_default()
    }

    /// Returns the number of open file handles.
    pub fn open_files(&self) -> u64 {
        self.disk().open_files()
    }

    /// Returns the names of the files that a reader sees now.
    pub fn files(&self) -> Vec<String> {
        self.disk().names()
    }

    /// Returns a file as a reader sees it now.
    pub fn read_file(&self, name: &str) -> Option<Vec<u8>> {
        self.disk().read_file(name)
    }

    /// Writes a whole file durably, for damage at rest and for prepared directories.
    pub fn write_file(&self, name: &str, bytes: Vec<u8>) {
        self.disk().write_file(name, bytes);
    }

    /// Removes a file durably.
    pub fn remove_file(&self, name: &str) {
        self.disk().remove_file(name);
    }

    /// Flips one bit at rest. `bit` counts from the start of the file.
    pub fn flip_bit(&self, name: &str, bit: u64) {
        self.disk().damage(name, |bytes| {
            if let Some(byte) = bytes.get_mut((bit / 8) as usize) {
                *byte ^= 1 << (bit % 8);
            }
        });
    }

    /// Zeroes a range at rest.
    pub fn zero(&self, name: &str, range: Range<u64>) {
        self.disk().damage(name, |bytes| {
            let end = (range.end as usize).min(bytes.len());
            let start = (range.start as usize).min(end);
            bytes[start..end].fill(0);
        });
    }

    /// Truncates a file at rest.
    pub fn truncate(&self, name: &str, len: u64) {
        self.disk().damage(name, |bytes| bytes.truncate(len as usize));
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        // A panic of a test's writer thread must not hide what it left on the disk.
        self.disk.lock().ignore_poison()
    }

    /// Returns the disk, if this handle is valid and the operation is not planned to fail.
    fn start(
        &self,
        operation: Operation,
        file: &str,
        bytes: Range<u64>,
    ) -> io::Result<MutexGuard<'_, Disk>> {
        let mut disk = self.disk();
        disk.start(self.life, operation, file, bytes)?;
        Ok(disk)
    }

    fn handle(&self, name: &str, inode: u64) -> Arc<dyn File> {
        Arc::new(SimulatedFile { disk: self.clone(), name: name.to_owned(), inode })
    }
}

impl Storage for SimulatedDisk {
    fn lock(&self) -> io::Result<Box<dyn Send + Sync>> {
        let mut disk = self.start(Operation::Lock, "lock", 0..0)?;
        if disk.locked {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        disk.locked = true;
        Ok(Box::new(Guard { disk: self.clone() }))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.start(Operation::List, "", 0..0)?.names())
    }

    fn create(&self, name: &str, len: u64) -> io::Result<Arc<dyn File>> {
        let mut disk = self.start(Operation::Create, name, 0..len)?;
        let inode = disk.create(name, len)?;
        disk.finish()?;
        Ok(self.handle(name, inode))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        let inode = self.start(Operation::Open, name, 0..0)?.open(name)?;
        Ok(self.handle(name, inode))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut disk = self.start(Operation::Rename, &format!("{from} > {to}"), 0..0)?;
        disk.rename(from, to)?;
        disk.finish()
    }

    fn exchange(&self, a: &str, b: &str) -> io::Result<()> {
        let mut disk = self.start(Operation::Exchange, &format!("{a} <> {b}"), 0..0)?;
        disk.exchange(a, b)?;
        disk.finish()
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut disk = self.start(Operation::Remove, name, 0..0)?;
        disk.remove(name)?;
        disk.finish()
    }

    fn sync_dir(&self) -> io::Result<()> {
        let mut disk = self.start(Operation::SyncDir, "", 0..0)?;
        // The order matters: a disk that stops here has not synced.
        disk.finish()?;
        disk.sync_dir();
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<u64> {
        Ok(self.disk().free.unwrap_or(u64::MAX))
    }

    fn direct_io(&self) -> bool {
        self.disk().direct
    }

    fn reserves_space(&self) -> bool {
        self.disk().reserves_space
    }

    fn writes_elsewhere(&self) -> bool {
        self.disk().writes_elsewhere
    }

    fn describe(&self) -> String {
        "simulated disk".to_owned()
    }
}

#[derive(Debug)]
struct SimulatedFile {
    disk: SimulatedDisk,
    name: String,
    inode: u64,
}

impl SimulatedFile {
    fn read(&self, operation: Operation, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let range = offset..offset + buf.len() as u64;
        let mut disk = self.disk.start(operation, &self.name, range)?;
        disk.read(self.inode, operation == Operation::ReadDevice, buf, offset)
    }
}

impl File for SimulatedFile {
    fn len(&self) -> io::Result<u64> {
        self.disk.disk().len(self.disk.life, self.inode)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        assert!(offset.is_multiple_of(BLOCK as u64), "write of {} at {offset}", self.name);
        assert!(data.len().is_multiple_of(BLOCK), "write of {} bytes", data.len());
        assert_eq!(data.as_ptr().align_offset(BLOCK), 0, "unaligned memory");
        let range = offset..offset + data.len() as u64;
        let mut disk = self.disk.disk();
        disk.start_write(self.disk.life, &self.name, self.inode, range, data)?;
        disk.write(self.inode, data, offset)?;
        disk.finish()
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut disk = self.disk.disk();
        disk.start_sync(self.disk.life, &self.name, self.inode)?;
        disk.finish()?;
        disk.sync(self.inode);
        Ok(())
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.read(Operation::Read, buf, offset)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<bool> {
        if !self.disk.disk().is_cached() {
            return Ok(false);
        }
        self.read(Operation::TryRead, buf, offset)?;
        Ok(true)
    }

    fn read_device_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.read(Operation::ReadDevice, buf, offset)
    }

    fn will_read(&self, range: Range<u64>) {
        // Ignored: it is a hint.
        drop(self.disk.start(Operation::WillRead, &self.name, range));
    }
}

impl Drop for SimulatedFile {
    fn drop(&mut self) {
        self.disk.disk().close(self.disk.life, self.inode);
    }
}

/// Holds the lock of the directory.
struct Guard {
    disk: SimulatedDisk,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut disk = self.disk.disk();
        // A crash has released the lock already, and another handle may hold it since.
        if disk.life == self.disk.life {
            disk.locked = false;
        }
    }
}

#[cfg(test)]
#[path = "simulated/tests.rs"]
mod tests;
