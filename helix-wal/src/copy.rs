//! Writes the surviving unsealed entries into new segments, under names that do not count yet.

use std::io;
use std::sync::Arc;

use bytes::Bytes;

use crate::aligned::Aligned;
use crate::error::failed;
use crate::frame::{Context, Frame, FrameHeader, Kind, Position, SegmentHeader};
use crate::layout::{check_segment_number, new_name, ready_name};
use crate::log::Log;
use crate::replay::Replay;
use crate::scan::{Known, scan};
use crate::sealed::last_sealed;
use crate::segment::Segment;
use crate::slot::Slot;
use crate::storage::{File, Storage};
use crate::tip::{Tip, frame_bytes_max};
use crate::{Error, LogId};

/// Groups of the copied tail are about so large.
const COPIED_GROUP_BYTES: usize = 1 << 20;

/// A new segment; where it ended and how the log stood there, except for the last.
pub(crate) struct Made {
    pub segment: Arc<Segment>,
    pub rolled: Option<(u64, Context)>,
}

/// Writes the surviving entries into new segments.
pub(crate) struct Copy<'a> {
    pub storage: &'a dyn Storage,
    pub segment_bytes: u64,
    pub identity: &'a Bytes,
    pub next_id: u64,
    /// The new segments in order; where each of them ended, except for the last.
    pub made: Vec<Made>,
    pub ready: Vec<u64>,
}

impl Copy<'_> {
    /// The end of the new log. Everything in it is durable, but has no name yet that counts.
    pub(crate) fn run(
        &mut self,
        replay: &mut Replay,
        unsealed: &[(Arc<Segment>, SegmentHeader)],
        log: &Log,
    ) -> Result<Tip, Error> {
        let sealed = log.held.iter().next_back().and_then(|(_, held)| held.segment.as_ref());
        let sealed = sealed.and_then(|segment| segment.trailer());
        let end = sealed.map_or(Position::default(), |trailer| Position {
            segment: trailer.segment,
            at: trailer.data_end,
        });
        let before = sealed.map(|trailer| trailer.context.clone()).unwrap_or_default();
        let context = Context {
            vote: replay.vote.clone(),
            purged: replay.purged,
            last: if replay.slots.is_empty() { replay.last } else { last_sealed(log) },
            committed: replay.committed,
            last_group: before.last_group,
        };
        let mut tip = self.begin(end, context, self.segment_bytes)?;
        let mut slots = replay.slots.iter_mut().peekable();
        for ((segment, header), end) in unsealed.iter().zip(&replay.ends) {
            let mut visit = |frame: &FrameHeader, bytes: &[u8]| {
                let survives = |slot: &&mut Slot| {
                    frame.kind == Kind::Entry
                        && slot.segment == frame.place.segment
                        && u64::from(slot.offset) == frame.place.at
                };
                let Some(slot) = slots.next_if(survives) else { return Ok(()) };
                let place = self.push(&mut tip, frame, bytes, replay.committed)?;
                slot.segment = place.segment;
                slot.offset = place.at as u32;
                Ok(())
            };
            scan(segment, header, Known { end: Some(*end), ..Known::default() }, &mut visit)?;
        }
        if slots.next().is_some() {
            let what = "the unsealed segments change while they are read".to_owned();
            return Err(Error::Damaged { file: self.storage.describe(), bytes: 0..0, what });
        }
        if !tip.is_empty() {
            tip.write(replay.committed)?;
        }
        tip.context.last = replay.last;
        if !replay.slots.is_empty() {
            // The mark: it becomes true before the state file names the segment.
            tip.write(replay.committed)?;
        }
        tip.sync()?;
        Ok(tip)
    }

    fn push(
        &mut self,
        tip: &mut Tip,
        frame: &FrameHeader,
        bytes: &[u8],
        committed: Option<LogId>,
    ) -> Result<Position, Error> {
        let full = tip.group_len() + frame.len() > COPIED_GROUP_BYTES && !tip.is_empty();
        let fits = tip.fits_entries(1, frame.len() as u64);
        if (full || !fits) && !tip.is_empty() {
            tip.write(committed)?;
        }
        if !tip.fits_entries(1, frame.len() as u64) {
            tip.sync()?;
            let mut len = self.segment_bytes;
            while frame_bytes_max(len) < frame.len() as u64 {
                len *= 2;
            }
            let end = (tip.at, tip.context.clone());
            if let Some(made) = self.made.last_mut() {
                made.rolled = Some(end);
            }
            *tip = self.begin(tip.position(), tip.context.clone(), len)?;
        }
        let entry = Frame {
            kind: Kind::Entry,
            id: frame.id,
            stream: frame.stream,
            head: bytes.get(frame.head()).unwrap_or_default(),
            payload: bytes.get(frame.payload()).unwrap_or_default(),
            payload_crc: frame.payload_crc,
            payload_crc_seed: frame.payload_crc_seed,
        };
        Ok(tip.push(&entry))
    }

    fn begin(&mut self, end: Position, context: Context, len: u64) -> Result<Tip, Error> {
        let id = self.next_id;
        check_segment_number(id)?;
        self.next_id += 1;
        let name = new_name(id);
        let file = match self.storage.create(&name, len) {
            Err(e) if e.kind() == io::ErrorKind::StorageFull => self.reuse(&name, len)?,
            made => made.map_err(|e| failed("create", &name, &e))?,
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
        let tip = Tip::begin(file, &name, &header)?;
        self.made.push(Made { segment: Arc::clone(&tip.segment), rolled: None });
        Ok(tip)
    }

    /// A full disk: takes a file of the pool, if there is one of that size. It is wiped first: an
    /// opening that was cut short may have left something in it that verifies here.
    fn reuse(&mut self, name: &str, len: u64) -> Result<Arc<dyn File>, Error> {
        while let Some(number) = self.ready.pop() {
            let old = ready_name(number);
            let file = self.storage.open(&old).map_err(|e| failed("open", &old, &e))?;
            if file.len().map_err(|e| failed("read", &old, &e))? != len {
                continue;
            }
            self.storage.rename(&old, name).map_err(|e| failed("rename", &old, &e))?;
            let zeroes = Aligned::with_len(COPIED_GROUP_BYTES);
            let mut at = 0;
            while at < len {
                let part = (len - at).min(COPIED_GROUP_BYTES as u64);
                let bytes = zeroes.as_slice().get(..part as usize).unwrap_or_default();
                file.write_at(bytes, at).map_err(|e| failed("write", name, &e))?;
                at += part;
            }
            file.sync_data().map_err(|e| failed("sync", name, &e))?;
            return Ok(file);
        }
        let free_bytes = self.storage.free_bytes().unwrap_or(0);
        Err(Error::DiskFull { free_bytes, needed_bytes: len })
    }
}
