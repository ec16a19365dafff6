//! Writes the entries in memory into cold segments, sorted by stream and position.

use crate::compaction::compactor::{CompactionStep, Compactor, STEP_BYTES};
use crate::compaction::job::{CompactionJob, MovedEntry};
use crate::error::Error;
use crate::format::frame::Frame;
use crate::format::sizing::{cold_bytes, frame_bytes_max};
use crate::write::cold_writer::ColdSegmentBuilder;

impl Compactor {
    /// Writes the next entries of the window.
    pub(super) fn write_some(&self, job: &mut CompactionJob) -> Result<CompactionStep, Error> {
        if !job.sorted {
            let all = job.window.make_contiguous();
            all.sort_unstable_by_key(|(moving, _)| {
                (moving.placement.stream, moving.placement.first)
            });
            job.sorted = true;
        }
        let mut bytes = 0;
        let mut full = None;
        while let Some((MovedEntry { placement, share }, entry)) = job.window.front() {
            let frame = Frame::entry(entry.id, entry.stream, &entry.head, &entry.payload);
            let len = frame.len() as u64;
            if bytes > 0 && bytes + len > STEP_BYTES {
                break;
            }
            let Some(growing) = &mut job.growing else {
                job.growing = Some(self.begin_segment(job, len)?);
                continue;
            };
            if !growing.fits(frame.len()) {
                full = job.growing.take();
                break;
            }
            let begins_share = job.written_share != Some(*share);
            growing.push(&frame, *placement, begins_share, !begins_share)?;
            job.written_share = Some(*share);
            bytes += len;
            job.left_bytes = job.left_bytes.saturating_sub(len);
            job.left_entries = job.left_entries.saturating_sub(1);
            job.window.pop_front();
        }
        self.shared.lock().counters.rewritten_bytes += bytes;
        match full {
            Some(full) => self.finish(job, full),
            None => Ok(CompactionStep::More(bytes)),
        }
    }

    fn begin_segment(&self, job: &CompactionJob, frame: u64) -> Result<ColdSegmentBuilder, Error> {
        let (entries, bytes) = match job.cleaning {
            None => (job.left_entries, job.left_bytes),
            Some(_) => (job.window.len() as u64, job.window_bytes()),
        };
        let left = cold_bytes(entries.max(1), bytes.max(frame));
        let mut len = left.min(self.shared.options.segment_bytes);
        while frame_bytes_max(len) < frame {
            len *= 2;
        }
        ColdSegmentBuilder::begin(&self.shared, &self.storage, len, job.gathers)
    }

    /// Finishes a segment. Everything except its name is durable then.
    pub(super) fn finish(
        &self,
        job: &mut CompactionJob,
        mut growing: ColdSegmentBuilder,
    ) -> Result<CompactionStep, Error> {
        job.written_share = None;
        if let Some((index, input)) = growing.repeated().zip(job.inputs.first()) {
            return Err(input.damaged(0..input.len, &format!("entry {index} occurs twice")));
        }
        let cold = match growing.finish() {
            Ok(cold) => cold,
            Err(error) => {
                // Without the segment the job would count as whole, although its entries are in no
                // segment.
                job.growing = Some(growing);
                return Err(error);
            }
        };
        let footer = cold.segment.len - cold.trailer.footer_start;
        job.made.push_back(cold);
        Ok(CompactionStep::More(footer))
    }
}
