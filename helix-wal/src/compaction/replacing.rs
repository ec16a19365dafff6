//! Replacing: new segments take the place of the old ones, first in the state file, then in memory.

use std::sync::Arc;

use crate::compaction::compactor::{CompactionStep, Compactor};
use crate::compaction::job::CompactionJob;
use crate::error::{Error, changing};
use crate::files::cold_segment::ColdSegment;
use crate::memory::live_segment::LiveSegment;
use crate::sync::IgnorePoison;

/// Rows moved per lock acquisition.
const ROWS_PER_LOCK: usize = 1024;

impl Compactor {
    /// Lists the new segments in the state file instead of the old ones.
    pub(super) fn name(&self, job: &mut CompactionJob) -> Result<(), Error> {
        self.storage.sync_dir().map_err(|e| changing("sync", &self.storage.describe(), &e))?;
        let shared = &self.shared;
        let mut file = shared.state_file.lock().ignore_poison();
        let named = {
            let mut core = shared.lock();
            core.check_open()?;
            let upto = core.log.purged.zip(core.log.checkpoint);
            if let (Some(_), Some((purged, checkpoint))) = (&job.cleaning, upto) {
                // The later entries that replace removed ones have left the Raft log, too.
                let upto = purged.index.min(checkpoint.index);
                core.cleaned_upto = core.cleaned_upto.max(upto);
            }
            let mut named = core.state(shared.identity.clone(), file.checkpoint.clone());
            named.segments.retain(|(id, _)| !job.has_input(*id));
            named.cold.retain(|cold| !job.has_input(cold.id));
            named.cold.extend(job.made.iter().map(ColdSegment::info));
            named
        };
        // After a shortage the step is repeated.
        let written = file.write(self.storage.as_ref(), &named);
        if written.is_err() && file.is_last_named() {
            // The state file may list the new segments, and an open after a crash may need them.
            job.made.iter_mut().for_each(ColdSegment::pin_file);
        }
        written?;
        let mut core = shared.lock();
        for input in &job.inputs {
            if let Some(held) = core.log.segment_mut(input.id) {
                held.removing = true;
            }
        }
        for cold in job.made.drain(..) {
            let (segment, trailer, directory) = cold.into_parts();
            if let Some(files) = &shared.files {
                segment.open_on_demand(files);
            }
            let held = LiveSegment::receiving_rows(Arc::clone(&segment), &trailer, &directory);
            core.log.cold.insert(segment.id, held);
            job.added.push(segment.id);
            job.receiving_rows.push_back((segment, directory.into()));
        }
        drop(core);
        // Locked until here, so that memory and the file agree.
        drop(file);
        job.is_named = true;
        Ok(())
    }

    /// Moves rows to the new segments. The old segments are freed once no row is left.
    pub(super) fn join(&mut self, job: &mut CompactionJob) -> CompactionStep {
        let mut core = self.shared.lock();
        let log = &mut core.log;
        if let Some((segment, directory)) = job.receiving_rows.front_mut() {
            for _ in 0..ROWS_PER_LOCK {
                let Some(share) = directory.pop_front() else { break };
                log.move_row(segment.id, &share, |id| {
                    job.inputs.iter().any(|input| input.id == id)
                });
            }
            if directory.is_empty() {
                job.receiving_rows.pop_front();
            }
            return CompactionStep::More(0);
        }
        for stream in job.cleaning.iter().flat_map(|(_, below)| below.keys()) {
            log.remove_replaced(*stream, |id| job.has_input(id));
        }
        // All at once, so that a read by index finds each entry in exactly one of them.
        let joined: Vec<u64> =
            log.cold.iter().filter(|(_, h)| h.receiving_rows).map(|(id, _)| *id).collect();
        for id in joined {
            if let Some(held) = log.cold.get_mut(&id) {
                (held.busy, held.receiving_rows) = (false, false);
            }
        }
        for input in &job.inputs {
            let old = log.remove_segment(input.id);
            debug_assert!(old.is_none_or(|old| old.live_rows == 0), "a row was left behind");
        }
        drop(core);
        job.replaced = job.inputs.iter().map(|input| input.id).collect();
        self.replaced.append(&mut job.inputs);
        CompactionStep::Done
    }
}
