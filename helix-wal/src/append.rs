//! Taking entries in: checked, copied into the group to come, and queued for the writer. A memory
//! log has them at once.

use crate::frame::frame_len;
use crate::layout::HEAD_BYTES_MAX;
use crate::shared::{Request, Role, Waiting};
use crate::slot::Written;
use crate::wal::Done;
use crate::{Entry, Error, Wal};

impl Wal {
    /// Queues entries with consecutive indexes that follow the last one (any index if there has
    /// been none). They can be read at once; `done` runs when they are durable. An append that
    /// fails with `DiskFull` leaves nothing behind, except that of one larger than a segment a
    /// first part may stay: `state` tells.
    pub fn append(&self, entries: Vec<Entry>, done: Done) {
        if self.shared.storage.is_none() {
            return self.append_to_memory(entries, done);
        }
        let sized = self.check_sizes(&entries);
        let group_bytes = self.shared.options.group_bytes;
        let mut staging = self.shared.staging();
        let staged = if sized.is_ok() { staging.add(&entries, group_bytes) } else { None };
        let mut core = self.shared.lock();
        let checked = core.check_open().and(sized).and_then(|()| core.log.check_append(&entries));
        if let Err(error) = checked {
            staging.undo(staged);
            drop(staging);
            // What it follows may just have been refused, before the caller could hear of it.
            let beyond = entries.first().is_some_and(|entry| entry.id.index > core.log.end());
            let error = match core.disk_full.filter(|_| beyond && core.check_open().is_ok()) {
                Some((free_bytes, needed_bytes)) => Error::DiskFull { free_bytes, needed_bytes },
                None => error,
            };
            drop(core);
            return done(Err(error));
        }
        let serial = core.log.next_serial();
        for entry in &entries {
            core.log.push(entry.clone());
        }
        let epoch = core.epoch;
        let done = Waiting::new(done);
        let request = Request::Append { entries, serial, epoch, staged, done };
        let waiting = self.shared.enqueue(&mut core, request);
        drop(core);
        drop(staging);
        self.shared.wake(Role::Writer, waiting);
    }

    fn check_sizes(&self, entries: &[Entry]) -> Result<(), Error> {
        let max = self.shared.options.entry_bytes_max();
        for Entry { id, head, payload, .. } in entries {
            let bytes = frame_len(head.len(), payload.bytes.len()) as u64;
            if bytes > max || head.len() > HEAD_BYTES_MAX {
                let index = id.index;
                let message = format!("entry {index} takes {bytes} bytes, its head {}", head.len());
                let limits = format!("at most {max} and {HEAD_BYTES_MAX}");
                return Err(Error::Unusable(format!("{message}: {limits}")));
            }
        }
        Ok(())
    }

    fn append_to_memory(&self, entries: Vec<Entry>, done: Done) {
        let mut guard = self.shared.lock();
        let core = &mut *guard;
        let checked = core
            .check_open()
            .and_then(|()| self.check_sizes(&entries))
            .and_then(|()| core.log.check_append(&entries));
        if let Err(error) = checked {
            drop(guard);
            return done(Err(error));
        }
        for entry in entries {
            let bytes = frame_len(entry.head.len(), entry.payload.bytes.len()) as u64;
            let index = entry.id.index;
            let serial = core.log.next_serial();
            core.log.push(entry);
            if core.memory_bytes + bytes > self.shared.options.segment_bytes {
                core.memory_bytes = 0;
                core.log.roll_memory(core.next_id);
                core.next_id += 1;
            }
            core.memory_bytes += bytes;
            let segment = core.next_id - 1;
            core.log.on_written(segment, &[Written { index, serial, offset: 0 }]);
        }
        drop(guard);
        done(Ok(()));
    }
}
