//! Progress of the running request to clean streams, and its completion.

use std::sync::Arc;

use crate::compaction::compactor::{CompactionStep, Compactor, candidates};
use crate::compaction::job::CompactionJob;
use crate::error::Error;
use crate::shared::cleaning::{CleanRequest, Cleaning};
use crate::sync::IgnorePoison;

impl Compactor {
    /// Finishes a cleaning that is done, or whose segments cannot be rewritten now.
    pub(super) fn end_cleaning(&self) -> Result<Option<CompactionStep>, Error> {
        let cleaning = {
            let mut core = self.shared.lock();
            let Some(Cleaning { left, .. }) = &core.cleaning else { return Ok(None) };
            if !left.is_empty() {
                let usable = candidates(&core.log);
                let is_usable = |id: &u64| usable.iter().any(|candidate| candidate.id == *id);
                // Trimming may have removed segments.
                let is_gone = |id: &u64| core.log.segment(*id).is_none_or(|held| held.removing);
                let is_blocked = |id: &&u64| !is_usable(id) && !is_gone(id);
                let blocked = left.iter().find(is_blocked).copied();
                let left: Vec<u64> = left.iter().copied().filter(|id| !is_gone(id)).collect();
                let Some(blocked) = blocked else {
                    let is_done = left.is_empty();
                    if let Some(cleaning) = &mut core.cleaning {
                        cleaning.left = left;
                    }
                    return Ok(is_done.then_some(CompactionStep::More(0)));
                };
                let cleaning = core.cleaning.take();
                drop(core);
                if let Some(cleaning) = cleaning {
                    let what = format!("segment {blocked:016x} cannot be rewritten now");
                    cleaning.request.finish(Err(Error::Unusable(what)));
                }
                return Ok(Some(CompactionStep::Refused));
            }
            core.cleaning.take()
        };
        let Some(Cleaning { request, .. }) = cleaning else { return Ok(None) };
        let written = self.write_marks(&request);
        request.finish(written.clone());
        match written {
            Err(Error::Closed) => Ok(Some(CompactionStep::Nothing)),
            Err(error) if !error.is_shortage() => Err(error),
            _ => Ok(Some(CompactionStep::More(0))),
        }
    }

    /// Makes the marks of a request durable. Everything below them must be rewritten before.
    fn write_marks(&self, request: &CleanRequest) -> Result<(), Error> {
        let mut file = self.shared.state_file.lock().ignore_poison();
        let mut core = self.shared.lock();
        core.check_open()?;
        let mut before = Vec::new();
        for (stream, mark) in &request.marks {
            // A stream that was dropped since needs no mark; its number is not used again.
            if core.log.streams.get(stream).is_none_or(|held| !held.dropped) {
                let marks = Arc::make_mut(&mut core.clean_marks);
                before.push((*stream, marks.insert(*stream, *mark)));
            }
        }
        let named = core.state(self.shared.identity.clone(), file.checkpoint.clone());
        drop(core);
        let written = file.write(self.storage.as_ref(), &named);
        if written.as_ref().is_err_and(Error::is_shortage) {
            // Restores the marks in memory. The file may have the new ones, which are correct, too.
            let mut core = self.shared.lock();
            let marks = Arc::make_mut(&mut core.clean_marks);
            for (stream, mark) in before {
                let Some(held) = marks.get_mut(&stream) else { continue };
                match mark {
                    Some(mark) => *held = mark,
                    None => {
                        marks.remove(&stream);
                    }
                }
            }
        }
        written
    }

    /// Removes the segments that a job has rewritten from the running cleaning.
    ///
    /// A job that began before the cleaning has copied their entries without the filter. So its new
    /// segments have to be rewritten instead.
    pub(super) fn on_replaced(&self, job: &CompactionJob) {
        let mut core = self.shared.lock();
        let Some(cleaning) = &mut core.cleaning else { return };
        let count = cleaning.left.len();
        cleaning.left.retain(|id| !job.replaced.contains(id));
        if job.cleaning.is_none() && cleaning.left.len() < count {
            cleaning.left.extend(&job.added);
        }
    }
}
