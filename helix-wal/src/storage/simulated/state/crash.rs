//! Crashes of a simulated disk: the effect on each pending change.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::{Crash, CrashEffect, PendingChange};
use super::{Disk, SECTOR, Written, draw};

impl Disk {
    /// Returns the changes that a crash may lose, oldest first.
    pub(in super::super) fn pending(&self) -> Vec<PendingChange> {
        let mut all = Vec::new();
        for file in self.inodes.values() {
            // Later sectors overlay earlier ones, so each is compared with the bytes underneath.
            let mut under = Arc::clone(&file.durable);
            for change in &file.pending {
                let name = file.name.clone();
                let pending = match &change.what {
                    Written::Allocation(_) => PendingChange::Allocation { file: name },
                    Written::Sector { offset, data, at } => {
                        let start = *offset as usize;
                        let new = &data[*at..*at + SECTOR];
                        let changes = match under.get(start..start + SECTOR) {
                            Some(old) => old != new,
                            None => new.iter().any(|b| *b != 0),
                        };
                        PendingChange::Sector { file: name, offset: *offset, changes }
                    }
                };
                change.apply(CrashEffect::Kept, Arc::make_mut(&mut under), &mut 0);
                all.push((change.sequence, pending));
            }
        }
        for entry in &self.entries {
            let from = entry.from.as_deref().unwrap_or("-");
            let change = format!("{from} > {}", entry.to.as_deref().unwrap_or("-"));
            all.push((entry.sequence, PendingChange::Entry { change }));
        }
        all.sort_by_key(|(sequence, _)| *sequence);
        all.into_iter().map(|(_, pending)| pending).collect()
    }

    /// Applies a crash to every pending change, and starts the next life of the disk.
    pub(in super::super) fn crash(&mut self, crash: Crash<'_>) {
        let fates = self.fates(crash);
        let mut random = match crash {
            Crash::Seeded(seed) => seed,
            _ => self.draw(),
        };
        for file in self.inodes.values_mut() {
            let durable = Arc::make_mut(&mut file.durable);
            let mut allocated = true;
            for change in std::mem::take(&mut file.pending) {
                let fate = fates.get(&change.sequence).copied().unwrap_or(CrashEffect::Lost);
                if matches!(change.what, Written::Allocation(_)) {
                    allocated = fate == CrashEffect::Kept;
                }
                // Bytes beyond the size of the file are not part of it.
                if allocated {
                    change.apply(fate, durable, &mut random);
                }
            }
            file.seen = Arc::clone(&file.durable);
            file.diverged = false;
            file.handles = 0;
        }
        self.crash_directory(&fates);
        self.life += 1;
        self.locked = false;
        self.stopped = false;
        self.stop_at = None;
        self.faults.clear();
        self.forget_unnamed();
    }

    /// Applies a crash to the directory.
    ///
    /// A journal never reorders the name changes of one file: a kept change keeps the earlier ones.
    /// Changes of different files are independent.
    fn crash_directory(&mut self, fates: &BTreeMap<u64, CrashEffect>) {
        let entries = std::mem::take(&mut self.entries);
        for (i, entry) in entries.iter().enumerate() {
            let kept = entries[i..].iter().any(|later| {
                let of = |inode: u64| later.inode == inode || later.swapped == Some(inode);
                let is_same = of(entry.inode) || entry.swapped.is_some_and(of);
                is_same && fates.get(&later.sequence) == Some(&CrashEffect::Kept)
            });
            if kept {
                entry.apply(&mut self.durable);
            }
        }
        self.seen = self.durable.clone();
    }

    /// Returns the effect of the crash on every pending change, by sequence number.
    fn fates(&mut self, crash: Crash<'_>) -> BTreeMap<u64, CrashEffect> {
        let mut sequences: Vec<u64> = self.entries.iter().map(|e| e.sequence).collect();
        for file in self.inodes.values() {
            sequences.extend(file.pending.iter().map(|c| c.sequence));
        }
        sequences.sort_unstable();
        let mut random = match crash {
            Crash::Seeded(seed) => !seed,
            _ => 0,
        };
        // Most crashes have mostly one effect; an even mix would hardly ever keep a whole group.
        let mostly = fate(draw(&mut random));
        let fates = sequences.into_iter().enumerate().map(|(i, sequence)| {
            let fate = match crash {
                Crash::KeepAll => CrashEffect::Kept,
                Crash::LoseAll => CrashEffect::Lost,
                Crash::Chosen(chosen) => chosen.get(i).copied().unwrap_or(CrashEffect::Lost),
                Crash::Seeded(_) if !draw(&mut random).is_multiple_of(4) => mostly,
                Crash::Seeded(_) => fate(draw(&mut random)),
            };
            (sequence, fate)
        });
        fates.collect()
    }
}

fn fate(draw: u64) -> CrashEffect {
    match draw % 8 {
        0..3 => CrashEffect::Kept,
        3..6 => CrashEffect::Lost,
        6 => CrashEffect::Torn,
        _ => CrashEffect::Garbled,
    }
}
