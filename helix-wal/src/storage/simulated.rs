//! A disk in memory that does what real ones do when power goes: forgets, tears and garbles what
//! was not synced. Deterministic: the same calls with the same seed give the same bytes.

mod state;

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::state::Disk;
use super::faults::{Fault, Operation};
use super::{BLOCK, File, Storage};

/// What a crash does to one pending change. Entries of the folder and allocations know only kept
/// and lost; anything but `Kept` loses them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fate {
    Kept,
    Lost,
    /// The first half of the sector is new, the second old.
    Torn,
    /// The sector holds neither.
    Garbled,
}

/// How a crash treats everything that was not synced.
#[derive(Debug, Clone, Copy)]
pub enum Crash<'a> {
    KeepAll,
    LoseAll,
    /// Each change meets a fate drawn from this seed.
    Seeded(u64),
    /// One fate for each change of [`SimulatedDisk::pending`], in that order; lost where missing.
    Chosen(&'a [Fate]),
}

/// A change that a crash may undo, oldest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pending {
    /// The size that a file was created with.
    Allocation { file: String },
    /// 512 bytes of a file. `changes` says whether they differ from what is under them: if not,
    /// keeping, losing and tearing them is the same.
    Sector { file: String, offset: u64, changes: bool },
    /// A name that came, went or moved.
    Entry { change: String },
}

/// Whether cached reads find what they look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheMode {
    Always,
    Never,
    /// Drawn anew for every read.
    Sometimes,
}

/// One operation, for people and for comparing two runs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Step {
    pub operation: Operation,
    pub file: String,
    pub bytes: Range<u64>,
    /// Checksum of what was written, 0 for everything else.
    pub crc: u32,
    pub ok: bool,
}

/// A handle to the disk. Clones are the same handle; after a crash it fails for good and
/// [`SimulatedDisk::reopen`] gives one that works.
#[derive(Debug, Clone)]
pub struct SimulatedDisk {
    disk: Arc<Mutex<Disk>>,
    /// How many crashes the disk had seen when this handle was made.
    life: u64,
}

impl SimulatedDisk {
    /// An empty disk without limits.
    pub fn new(seed: u64) -> Self {
        Self { disk: Arc::new(Mutex::new(Disk::new(seed))), life: 0 }
    }

    /// A disk of its own with the same bytes, pending changes and settings, and a working handle.
    pub fn fork(&self) -> Self {
        let disk = self.disk().clone();
        let life = disk.life;
        Self { disk: Arc::new(Mutex::new(disk)), life }
    }

    /// Power goes and comes back: pending changes meet their fates, every handle ends.
    pub fn crash(&self, crash: Crash<'_>) {
        self.disk().crash(crash);
    }

    /// A handle for the life after the last crash.
    pub fn reopen(&self) -> Self {
        Self { disk: Arc::clone(&self.disk), life: self.disk().life }
    }

    /// What a crash could undo now, oldest first.
    pub fn pending(&self) -> Vec<Pending> {
        self.disk().pending()
    }

    /// Changes the draws to come, so that forks can go different ways.
    pub fn reseed(&self, seed: u64) {
        self.disk().reseed(seed);
    }

    /// Adds a failure to come. A failed sync drops the file's pending writes, or by `Seeded` some
    /// of them, while reads through the page cache go on seeing them until the crash.
    pub fn fail(&self, fault: Fault) {
        self.disk().faults.add(fault);
    }

    /// Forgets the failures that have not happened yet.
    pub fn heal(&self) {
        self.disk().faults.clear();
    }

    /// Operations so far that can change what a crash leaves behind.
    pub fn changes(&self) -> u64 {
        self.disk().changes
    }

    /// From the `n`th change on (0 is the first one ever) nothing is answered any more: the change
    /// itself stays pending, and everything fails until `crash`.
    pub fn stop_at_change(&self, n: Option<u64>) {
        self.disk().stop_at = n;
    }

    /// Where the disk is to stop, if it is. A crash forgets it.
    pub fn stop_at(&self) -> Option<u64> {
        self.disk().stop_at
    }

    /// Whether `stop_at_change` has come to pass.
    pub fn stopped(&self) -> bool {
        self.disk().stopped
    }

    /// Bytes that may still be allocated; `None` for no limit.
    pub fn set_free_bytes(&self, free: Option<u64>) {
        self.disk().free = free;
    }

    pub fn set_cache(&self, mode: CacheMode) {
        self.disk().cache = mode;
    }

    pub fn set_direct_io(&self, direct: bool) {
        self.disk().direct = direct;
    }

    /// Starts (or stops) keeping the operations for [`SimulatedDisk::trace`].
    pub fn record(&self, on: bool) {
        self.disk().trace = on.then(Vec::new);
    }

    /// The operations since `record`.
    pub fn trace(&self) -> Vec<Step> {
        self.disk().trace.clone().unwrap_or_default()
    }

    /// Files that are open now, each counted as often as it is.
    pub fn open_files(&self) -> u64 {
        self.disk().open_files()
    }

    /// Names of the files that a reader sees now.
    pub fn files(&self) -> Vec<String> {
        self.disk().names()
    }

    /// A file as a reader sees it now.
    pub fn read_file(&self, name: &str) -> Option<Vec<u8>> {
        self.disk().read_file(name)
    }

    /// Puts a whole file on the disk, durably: for damage at rest and for prepared folders.
    pub fn write_file(&self, name: &str, bytes: Vec<u8>) {
        self.disk().write_file(name, bytes);
    }

    /// Takes a file off the disk, durably.
    pub fn remove_file(&self, name: &str) {
        self.disk().remove_file(name);
    }

    /// Turns one bit over, at rest. `bit` counts from the file's start.
    pub fn flip_bit(&self, name: &str, bit: u64) {
        self.disk().damage(name, |bytes| {
            if let Some(byte) = bytes.get_mut((bit / 8) as usize) {
                *byte ^= 1 << (bit % 8);
            }
        });
    }

    /// Zeroes a range, at rest.
    pub fn zero(&self, name: &str, range: Range<u64>) {
        self.disk().damage(name, |bytes| {
            let end = (range.end as usize).min(bytes.len());
            let start = (range.start as usize).min(end);
            bytes[start..end].fill(0);
        });
    }

    /// Cuts a file, at rest.
    pub fn truncate(&self, name: &str, len: u64) {
        self.disk().damage(name, |bytes| bytes.truncate(len as usize));
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        // A panic of a test's writer thread must not hide what it left on the disk.
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk, if this handle still counts and the operation is not to fail.
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
        // Ignored: it is advice.
        drop(self.disk.start(Operation::WillRead, &self.name, range));
    }
}

impl Drop for SimulatedFile {
    fn drop(&mut self) {
        self.disk.disk().close(self.disk.life, self.inode);
    }
}

/// Holds the folder's lock.
struct Guard {
    disk: SimulatedDisk,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut disk = self.disk.disk();
        // A crash has released it already, and someone else may have it since.
        if disk.life == self.disk.life {
            disk.locked = false;
        }
    }
}

#[cfg(test)]
#[path = "simulated/tests.rs"]
mod tests;
