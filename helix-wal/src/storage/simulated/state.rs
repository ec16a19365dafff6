//! The bytes of a simulated disk: durable, pending, and as readers see them.

mod crash;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::super::faults::{Faults, Operation};
use super::{CacheMode, CrashEffect, DiskOperation};

/// The largest unit that a device writes atomically.
const SECTOR: usize = 512;

/// The bytes of a file. Its names are in the directory.
#[derive(Debug, Clone, Default)]
struct Inode {
    /// Content that a reader sees through the page cache.
    seen: Arc<Vec<u8>>,
    /// Content that is left if every pending change is lost.
    durable: Arc<Vec<u8>>,
    /// Changes since the last sync, oldest first.
    pending: Vec<Change>,
    /// A sync has failed: the page cache and the device differ until the crash.
    diverged: bool,
    handles: u32,
    /// The name at creation or at the last move, for messages.
    name: String,
}

#[derive(Debug, Clone)]
struct Change {
    /// Sequence number among all changes of the disk.
    sequence: u64,
    what: Written,
}

#[derive(Debug, Clone)]
enum Written {
    Allocation(u64),
    /// One sector of a write. `data` is the whole write, shared; `at` is the sector's offset in it.
    Sector {
        offset: u64,
        data: Arc<[u8]>,
        at: usize,
    },
}

/// A change of the directory.
#[derive(Debug, Clone)]
struct Entry {
    sequence: u64,
    inode: u64,
    /// The removed name.
    from: Option<String>,
    /// The added name.
    to: Option<String>,
    /// The file that has `to`, and gets `from` in exchange.
    swapped: Option<u64>,
}

impl Entry {
    fn apply(&self, names: &mut BTreeMap<String, u64>) {
        if let (Some(from), Some(other)) = (&self.from, self.swapped) {
            names.insert(from.clone(), other);
            names.extend(self.to.clone().map(|to| (to, self.inode)));
            return;
        }
        if let Some(from) = &self.from
            && names.get(from) == Some(&self.inode)
        {
            names.remove(from);
        }
        if let Some(to) = &self.to {
            names.insert(to.clone(), self.inode);
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Disk {
    inodes: BTreeMap<u64, Inode>,
    seen: BTreeMap<String, u64>,
    durable: BTreeMap<String, u64>,
    entries: Vec<Entry>,
    sequence: u64,
    random: u64,
    /// Number of crashes so far.
    pub(super) life: u64,
    pub(super) locked: bool,
    pub(super) faults: Faults,
    pub(super) changes: u64,
    pub(super) stop_at: Option<u64>,
    pub(super) stopped: bool,
    pub(super) free: Option<u64>,
    pub(super) cache: CacheMode,
    pub(super) direct: bool,
    pub(super) reserves_space: bool,
    pub(super) writes_elsewhere: bool,
    pub(super) trace: Option<Vec<DiskOperation>>,
}

impl Disk {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            inodes: BTreeMap::new(),
            seen: BTreeMap::new(),
            durable: BTreeMap::new(),
            entries: Vec::new(),
            sequence: 0,
            random: seed,
            life: 0,
            locked: false,
            faults: Faults::default(),
            changes: 0,
            stop_at: None,
            stopped: false,
            free: None,
            cache: CacheMode::Always,
            direct: true,
            reserves_space: true,
            writes_elsewhere: false,
            trace: None,
        }
    }

    pub(super) fn reseed(&mut self, seed: u64) {
        self.random = seed;
    }

    // Every operation calls `start`, does its work, and calls `finish` if it changes something.

    pub(super) fn start(
        &mut self,
        life: u64,
        operation: Operation,
        file: &str,
        bytes: Range<u64>,
    ) -> io::Result<()> {
        self.begin(life, operation, file, bytes, 0)
    }

    /// Starts a write. A failing write leaves some of its first sectors behind.
    pub(super) fn start_write(
        &mut self,
        life: u64,
        file: &str,
        inode: u64,
        bytes: Range<u64>,
        data: &[u8],
    ) -> io::Result<()> {
        let crc = if self.trace.is_some() { crc32fast::hash(data) } else { 0 };
        let offset = bytes.start;
        let begun = self.begin(life, Operation::Write, file, bytes, crc);
        if begun.is_err() && life == self.life && !self.stopped {
            let sectors = self.draw() as usize % (data.len() / SECTOR + 1);
            self.write(inode, &data[..sectors * SECTOR], offset)?;
        }
        begun
    }

    /// Starts a sync. A failing sync marks the pages clean.
    ///
    /// The pending writes become durable or lost by draw, and no later sync writes them. The size
    /// stays pending.
    pub(super) fn start_sync(&mut self, life: u64, file: &str, inode: u64) -> io::Result<()> {
        let begun = self.begin(life, Operation::Sync, file, 0..0, 0);
        if begun.is_err() && life == self.life && !self.stopped {
            let lose_all = self.draw().is_multiple_of(2);
            let mut random = self.draw();
            if let Some(file) = self.inodes.get_mut(&inode) {
                let changes = std::mem::take(&mut file.pending);
                for change in changes {
                    if matches!(change.what, Written::Allocation(_)) {
                        file.pending.push(change);
                        continue;
                    }
                    let keep = !lose_all && draw(&mut random).is_multiple_of(2);
                    let fate = if keep { CrashEffect::Kept } else { CrashEffect::Lost };
                    change.apply(fate, Arc::make_mut(&mut file.durable), &mut random);
                }
                file.diverged = true;
            }
        }
        begun
    }

    fn begin(
        &mut self,
        life: u64,
        operation: Operation,
        file: &str,
        bytes: Range<u64>,
        crc: u32,
    ) -> io::Result<()> {
        let begun = self.check(life, operation, file);
        if let Some(trace) = &mut self.trace {
            let ok = begun.is_ok();
            trace.push(DiskOperation { operation, file: file.to_owned(), bytes, crc, ok });
        }
        begun
    }

    fn check(&mut self, life: u64, operation: Operation, file: &str) -> io::Result<()> {
        if life != self.life || self.stopped {
            return Err(io::Error::other("the power is off"));
        }
        self.faults.check(operation, file)?;
        if operation.is_mutating() {
            if self.stop_at == Some(self.changes) {
                self.stopped = true;
            }
            self.changes += 1;
        }
        Ok(())
    }

    /// Ends a change; an error if the power failed meanwhile.
    pub(super) fn finish(&self) -> io::Result<()> {
        if self.stopped { Err(io::Error::other("the power went")) } else { Ok(()) }
    }

    // Names.

    pub(super) fn names(&self) -> Vec<String> {
        self.seen.keys().cloned().collect()
    }

    pub(super) fn create(&mut self, name: &str, len: u64) -> io::Result<u64> {
        // Replacing a file frees its space first.
        let freed = self.held_bytes(name);
        if let Some(free) = self.free {
            let Some(rest) = (free + freed).checked_sub(len) else {
                if self.seen.contains_key(name) {
                    self.remove(name)?;
                }
                return Err(io::ErrorKind::StorageFull.into());
            };
            self.free = Some(rest);
        }
        let inode = self.next();
        let file = Inode {
            seen: Arc::new(vec![0; len as usize]),
            durable: Arc::default(),
            pending: vec![Change { sequence: inode, what: Written::Allocation(len) }],
            diverged: false,
            handles: 1,
            name: name.to_owned(),
        };
        self.inodes.insert(inode, file);
        self.enter(inode, None, Some(name.to_owned()));
        Ok(inode)
    }

    pub(super) fn open(&mut self, name: &str) -> io::Result<u64> {
        let inode = self.find(name)?;
        self.inode(inode)?.handles += 1;
        Ok(inode)
    }

    pub(super) fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        let inode = self.find(from)?;
        if from == to {
            return Ok(());
        }
        let freed = self.held_bytes(to);
        self.free = self.free.map(|free| free + freed);
        self.inode(inode)?.name = to.to_owned();
        self.enter(inode, Some(from.to_owned()), Some(to.to_owned()));
        Ok(())
    }

    pub(super) fn exchange(&mut self, a: &str, b: &str) -> io::Result<()> {
        let (inode, other) = (self.find(a)?, self.find(b)?);
        b.clone_into(&mut self.inode(inode)?.name);
        a.clone_into(&mut self.inode(other)?.name);
        self.enter_change(inode, Some(a.to_owned()), Some(b.to_owned()), Some(other));
        Ok(())
    }

    pub(super) fn remove(&mut self, name: &str) -> io::Result<()> {
        let inode = self.find(name)?;
        let freed = self.held_bytes(name);
        self.free = self.free.map(|free| free + freed);
        self.enter(inode, Some(name.to_owned()), None);
        Ok(())
    }

    pub(super) fn sync_dir(&mut self) {
        for entry in std::mem::take(&mut self.entries) {
            entry.apply(&mut self.durable);
        }
        self.forget_unnamed();
    }

    pub(super) fn open_files(&self) -> u64 {
        self.inodes.values().map(|file| file.handles as u64).sum()
    }

    pub(super) fn close(&mut self, life: u64, inode: u64) {
        if life != self.life {
            return;
        }
        let Some(file) = self.inodes.get_mut(&inode) else { return };
        file.handles -= 1;
        // A file that still has its name is the usual case, and a log closes thousands of them.
        if file.handles == 0 && self.seen.get(&file.name) != Some(&inode) {
            self.forget_unnamed();
        }
    }

    // Bytes.

    pub(super) fn len(&self, life: u64, inode: u64) -> io::Result<u64> {
        if life != self.life {
            return Err(io::Error::other("the power is off"));
        }
        let file = self.inodes.get(&inode).ok_or(io::ErrorKind::NotFound)?;
        Ok(file.seen.len() as u64)
    }

    pub(super) fn write(&mut self, inode: u64, data: &[u8], offset: u64) -> io::Result<()> {
        let first = self.sequence + 1;
        let file = self.inode(inode)?;
        let start = offset as usize;
        // The log never grows a file: a write past the end is a bug in the log.
        assert!(start + data.len() <= file.seen.len(), "write past the end of {}", file.name);
        Arc::make_mut(&mut file.seen)[start..start + data.len()].copy_from_slice(data);
        let mut sequence = first;
        let shared: Arc<[u8]> = Arc::from(data);
        for at in (0..data.len()).step_by(SECTOR) {
            let data = Arc::clone(&shared);
            let what = Written::Sector { offset: offset + at as u64, data, at };
            file.pending.push(Change { sequence, what });
            sequence += 1;
        }
        self.sequence = sequence;
        Ok(())
    }

    pub(super) fn sync(&mut self, inode: u64) {
        if let Some(file) = self.inodes.get_mut(&inode) {
            if !file.diverged && Arc::get_mut(&mut file.durable).is_none() {
                file.pending.clear();
                file.durable = Arc::clone(&file.seen);
                return;
            }
            // If the bytes are not shared, only the written ones have to be copied.
            let durable = Arc::make_mut(&mut file.durable);
            for change in std::mem::take(&mut file.pending) {
                change.apply(CrashEffect::Kept, durable, &mut 0);
            }
        }
    }

    pub(super) fn read(
        &mut self,
        inode: u64,
        past_cache: bool,
        buf: &mut [u8],
        offset: u64,
    ) -> io::Result<()> {
        let file = self.inode(inode)?;
        let bytes = if past_cache && file.diverged {
            let mut device = Vec::clone(&file.durable);
            for change in &file.pending {
                change.apply(CrashEffect::Kept, &mut device, &mut 0);
            }
            Arc::new(device)
        } else {
            Arc::clone(&file.seen)
        };
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let wanted = start.checked_add(buf.len()).and_then(|end| bytes.get(start..end));
        buf.copy_from_slice(wanted.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    pub(super) fn is_cached(&mut self) -> bool {
        match self.cache {
            CacheMode::Always => true,
            CacheMode::Never => false,
            CacheMode::Sometimes => self.draw().is_multiple_of(2),
        }
    }

    // At rest.

    pub(super) fn read_file(&self, name: &str) -> Option<Vec<u8>> {
        let inode = self.inodes.get(self.seen.get(name)?)?;
        Some(Vec::clone(&inode.seen))
    }

    pub(super) fn write_file(&mut self, name: &str, bytes: Vec<u8>) {
        let inode = self.next();
        let bytes = Arc::new(bytes);
        let file = Inode {
            seen: Arc::clone(&bytes),
            durable: bytes,
            name: name.to_owned(),
            ..Inode::default()
        };
        self.inodes.insert(inode, file);
        self.seen.insert(name.to_owned(), inode);
        self.durable.insert(name.to_owned(), inode);
    }

    pub(super) fn remove_file(&mut self, name: &str) {
        self.seen.remove(name);
        self.durable.remove(name);
        self.forget_unnamed();
    }

    pub(super) fn damage(&mut self, name: &str, damage: impl Fn(&mut Vec<u8>)) {
        let inode = self.seen.get(name).and_then(|inode| self.inodes.get_mut(inode));
        let Some(file) = inode else { panic!("no file {name} to damage") };
        damage(Arc::make_mut(&mut file.seen));
        if file.pending.is_empty() && !file.diverged {
            file.durable = Arc::clone(&file.seen);
        } else {
            damage(Arc::make_mut(&mut file.durable));
        }
    }

    // Helpers.

    fn find(&self, name: &str) -> io::Result<u64> {
        self.seen.get(name).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn inode(&mut self, inode: u64) -> io::Result<&mut Inode> {
        self.inodes.get_mut(&inode).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn held_bytes(&self, name: &str) -> u64 {
        let inode = self.seen.get(name).and_then(|inode| self.inodes.get(inode));
        inode.map_or(0, |file| file.seen.len() as u64)
    }

    fn enter(&mut self, inode: u64, from: Option<String>, to: Option<String>) {
        self.enter_change(inode, from, to, None);
    }

    fn enter_change(
        &mut self,
        inode: u64,
        from: Option<String>,
        to: Option<String>,
        swapped: Option<u64>,
    ) {
        let sequence = self.next();
        let entry = Entry { sequence, inode, from, to, swapped };
        entry.apply(&mut self.seen);
        self.entries.push(entry);
    }

    /// Removes files without handles and without names, durable or not.
    fn forget_unnamed(&mut self) {
        let Self { inodes, seen, durable, entries, .. } = self;
        let pending = entries.iter().flat_map(|entry| [Some(&entry.inode), entry.swapped.as_ref()]);
        let pending = pending.flatten();
        let named: BTreeSet<u64> =
            seen.values().chain(durable.values()).chain(pending).copied().collect();
        inodes.retain(|id, file| file.handles > 0 || named.contains(id));
    }

    fn next(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    fn draw(&mut self) -> u64 {
        draw(&mut self.random)
    }
}

impl Change {
    fn apply(&self, fate: CrashEffect, bytes: &mut Vec<u8>, random: &mut u64) {
        match &self.what {
            Written::Allocation(len) if fate == CrashEffect::Kept => bytes.resize(*len as usize, 0),
            Written::Allocation(_) => {}
            Written::Sector { offset, data, at } => {
                let new = &data[*at..*at + SECTOR];
                let Some(old) = bytes.get_mut(*offset as usize..*offset as usize + SECTOR) else {
                    return;
                };
                match fate {
                    CrashEffect::Kept => old.copy_from_slice(new),
                    CrashEffect::Lost => {}
                    CrashEffect::Torn => old[..SECTOR / 2].copy_from_slice(&new[..SECTOR / 2]),
                    CrashEffect::Garbled => {
                        for word in old.chunks_exact_mut(8) {
                            word.copy_from_slice(&draw(random).to_le_bytes());
                        }
                    }
                }
            }
        }
    }
}

/// SplitMix64: sufficient for drawing effects, and the same on every platform.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
