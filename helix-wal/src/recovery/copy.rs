//! Copies the surviving unsealed entries into new segments, which are not part of the log yet.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, failed, is_no_space};
use crate::files::active_segment::ActiveSegment;
use crate::files::aligned::Aligned;
use crate::files::data_dir::sync_dir;
use crate::files::scan::{ScanBounds, scan};
use crate::files::segment::Segment;
use crate::format::frame::{Context, Frame, FrameHeader, FrameKind, LogPosition, SegmentHeader};
use crate::format::layout::{check_segment_number, new_name, ready_name};
use crate::format::sizing::frame_bytes_max;
use crate::memory::log::Log;
use crate::memory::slot::Slot;
use crate::recovery::replay::Replay;
use crate::storage::{File, Storage};
use crate::types::LogId;

/// Approximate size of the groups of the copied tail.
const COPIED_GROUP_BYTES: usize = 1 << 20;

/// A new segment. `rolled`: its end and the state of the log there, except for the last one.
pub(crate) struct CopiedSegment {
    pub segment: Arc<Segment>,
    pub rolled: Option<(u64, Context)>,
}

/// Copies the surviving entries into new segments.
pub(crate) struct TailCopy<'a> {
    pub storage: &'a dyn Storage,
    pub segment_bytes: u64,
    pub identity: &'a Bytes,
    pub next_id: u64,
    /// The new segments, in order.
    pub made: Vec<CopiedSegment>,
    pub ready: Vec<u64>,
    /// New segments that an interrupted open left. They are not part of the log.
    pub new_leftovers: Vec<String>,
    /// Old segments that an interrupted open did not remove. They are not part of the log.
    pub old_leftovers: Vec<String>,
    /// The directory was synced: no crash restores a state that lists a leftover.
    pub is_dir_synced: bool,
}

impl TailCopy<'_> {
    /// Copies the entries and returns the end of the new log.
    ///
    /// Everything in it is durable, but the state file does not list it yet.
    pub(crate) fn run(
        &mut self,
        replay: &mut Replay,
        unsealed: &[(Arc<Segment>, SegmentHeader)],
        log: &Log,
    ) -> Result<ActiveSegment, Error> {
        let sealed = log.chain.iter().next_back().and_then(|(_, held)| held.segment.as_ref());
        let sealed = sealed.and_then(|segment| segment.trailer());
        let end = sealed.map_or(LogPosition::default(), |trailer| LogPosition {
            segment: trailer.segment,
            at: trailer.data_end,
        });
        let before = sealed.map(|trailer| trailer.context.clone()).unwrap_or_default();
        let context = Context {
            vote: replay.vote.clone(),
            purged: replay.purged,
            last: if replay.slots.is_empty() { replay.last } else { log.last_sealed() },
            committed: replay.committed,
            last_group: before.last_group,
        };
        let mut active = self.begin(end, context, self.segment_bytes)?;
        let mut slots = replay.slots.iter_mut().peekable();
        for ((segment, header), end) in unsealed.iter().zip(&replay.ends) {
            let mut visit = |frame: &FrameHeader, bytes: &[u8]| {
                let survives = |slot: &&mut Slot| {
                    frame.kind == FrameKind::Entry
                        && slot.segment == frame.place.segment
                        && u64::from(slot.offset) == frame.place.at
                };
                let Some(slot) = slots.next_if(survives) else { return Ok(()) };
                let place = self.push(&mut active, frame, bytes, replay.committed)?;
                slot.segment = place.segment;
                slot.offset = place.at as u32;
                Ok(())
            };
            scan(
                segment,
                header,
                ScanBounds { end: Some(*end), ..ScanBounds::default() },
                &mut visit,
            )?;
        }
        if slots.next().is_some() {
            let what = "the unsealed segments changed while they were read".to_owned();
            return Err(Error::Damaged { file: self.storage.describe(), bytes: 0..0, what });
        }
        if !active.is_empty() {
            active.write(replay.committed)?;
        }
        active.context.last = replay.last;
        if !replay.slots.is_empty() {
            // The sync marker. The sync below makes it true before the state file lists the
            // segment.
            active.write(replay.committed)?;
        }
        active.sync()?;
        Ok(active)
    }

    fn push(
        &mut self,
        active: &mut ActiveSegment,
        frame: &FrameHeader,
        bytes: &[u8],
        committed: Option<LogId>,
    ) -> Result<LogPosition, Error> {
        let full = active.group_len() + frame.len() > COPIED_GROUP_BYTES && !active.is_empty();
        let fits = active.fits_entries(1, frame.len() as u64);
        if (full || !fits) && !active.is_empty() {
            active.write(committed)?;
        }
        if !active.fits_entries(1, frame.len() as u64) {
            active.sync()?;
            let mut len = self.segment_bytes;
            while frame_bytes_max(len) < frame.len() as u64 {
                len *= 2;
            }
            let end = (active.at, active.context.clone());
            if let Some(made) = self.made.last_mut() {
                made.rolled = Some(end);
            }
            *active = self.begin(active.position(), active.context.clone(), len)?;
        }
        let entry = Frame {
            kind: FrameKind::Entry,
            id: frame.id,
            stream: frame.stream,
            head: bytes.get(frame.head()).unwrap_or_default(),
            payload: bytes.get(frame.payload()).unwrap_or_default(),
            payload_crc: frame.payload_crc,
            payload_crc_seed: frame.payload_crc_seed,
        };
        Ok(active.push(&entry))
    }

    fn begin(
        &mut self,
        end: LogPosition,
        context: Context,
        len: u64,
    ) -> Result<ActiveSegment, Error> {
        let id = self.next_id;
        check_segment_number(id)?;
        self.next_id += 1;
        let name = new_name(id);
        // The new segments of an interrupted open come first: otherwise repeated opens would fill
        // the disk with them.
        let file = match self.reuse_new(&name, len)? {
            Some(file) => file,
            None => match self.storage.create(&name, len) {
                Err(e) if is_no_space(&e) => self.reuse(&name, len)?,
                made => made.map_err(|e| failed("create", &name, &e))?,
            },
        };
        let header = SegmentHeader {
            id,
            predecessor: end,
            synced: end,
            file_len: len,
            identity: self.identity.clone(),
            context,
            cold: false,
        };
        let active = ActiveSegment::begin(file, &name, &header)?;
        self.made.push(CopiedSegment { segment: Arc::clone(&active.segment), rolled: None });
        Ok(active)
    }

    /// Takes a new segment of the same size that an interrupted open left.
    fn reuse_new(&mut self, name: &str, len: u64) -> Result<Option<Arc<dyn File>>, Error> {
        let mut at = 0;
        while let Some(old) = self.new_leftovers.get(at).cloned() {
            if let Some(file) = self.take_over(&old, name, len)? {
                self.new_leftovers.remove(at);
                return Ok(Some(file));
            }
            at += 1;
        }
        Ok(None)
    }

    /// Takes a file of the same size from the pool, or of an interrupted open, if the disk is full.
    fn reuse(&mut self, name: &str, len: u64) -> Result<Arc<dyn File>, Error> {
        loop {
            let ready = self.ready.pop().map(ready_name);
            let Some(old) = ready.or_else(|| self.old_leftovers.pop()) else { break };
            if let Some(file) = self.take_over(&old, name, len)? {
                return Ok(file);
            }
        }
        let free_bytes = self.storage.free_bytes().unwrap_or(0);
        Err(Error::DiskFull { free_bytes, needed_bytes: len })
    }

    /// Renames a file and fills it with zeroes; `None` if it has another size.
    ///
    /// Without the zeroes, bytes that an interrupted open left in it might verify here.
    fn take_over(
        &mut self,
        old: &str,
        name: &str,
        len: u64,
    ) -> Result<Option<Arc<dyn File>>, Error> {
        let file = self.storage.open(old).map_err(|e| failed("open", old, &e))?;
        if file.len().map_err(|e| failed("read", old, &e))? != len {
            return Ok(None);
        }
        if !self.is_dir_synced {
            sync_dir(self.storage)?;
            self.is_dir_synced = true;
        }
        self.storage.rename(old, name).map_err(|e| failed("rename", old, &e))?;
        let zeroes = Aligned::with_len(COPIED_GROUP_BYTES);
        let mut at = 0;
        while at < len {
            let part = (len - at).min(COPIED_GROUP_BYTES as u64);
            let bytes = zeroes.as_slice().get(..part as usize).unwrap_or_default();
            file.write_at(bytes, at).map_err(|e| failed("write", name, &e))?;
            at += part;
        }
        file.sync_data().map_err(|e| failed("sync", name, &e))?;
        Ok(Some(file))
    }
}
