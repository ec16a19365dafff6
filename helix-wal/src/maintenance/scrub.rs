//! Re-reads sealed segments from the device, one piece at a time.
//!
//! Finds damage while other replicas still have the data, and not only when it is needed.

use std::sync::Arc;

use crate::error::Error;
use crate::files::aligned::Aligned;
use crate::files::open_segment::{read_header, read_trailer};
use crate::files::scan::{Scanned, check_groups};
use crate::files::segment::Segment;
use crate::format::footer::page_verifies;
use crate::format::frame::SegmentHeader;
use crate::format::layout::BLOCK_BYTES;
use crate::shared::Shared;
use crate::storage::BLOCK;

/// Bytes of groups checked in one step: one read of the device.
const STEP_BYTES: u64 = 4 << 20;

/// Checks the sealed segments of a log, round after round.
pub struct Scrub {
    shared: Arc<Shared>,
    /// Id of the last segment that was begun.
    last: u64,
    current: Option<ScrubbedSegment>,
}

struct ScrubbedSegment {
    /// Held so that its file is not recycled.
    segment: Arc<Segment>,
    scanned: Scanned,
}

/// Result of one step.
#[derive(Debug, Clone, Default)]
pub struct Scrubbed {
    pub bytes: u64,
    /// Every sealed segment has been read once more.
    pub is_round: bool,
    /// Damage found. The rest of its segment is skipped.
    pub damage: Option<Error>,
    /// Shortage that prevented the step, which the next one repeats.
    pub shortage: Option<Error>,
}

impl Scrub {
    /// Creates a scrub that begins with the oldest sealed segment.
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, last: 0, current: None }
    }

    /// Reads the next piece. Blocks.
    pub fn step(&mut self) -> Scrubbed {
        let Some(mut current) = self.current.take().or_else(|| self.next()) else {
            self.last = 0;
            return Scrubbed { is_round: true, ..Scrubbed::default() };
        };
        let start = current.scanned.end;
        match current.check() {
            Ok(true) => {}
            Ok(false) => {
                let bytes = current.scanned.end - start;
                self.current = Some(current);
                return Scrubbed { bytes, ..Scrubbed::default() };
            }
            Err(error) if error.is_shortage() => {
                let bytes = current.scanned.end - start;
                self.current = Some(current);
                return Scrubbed { bytes, shortage: Some(error), ..Scrubbed::default() };
            }
            Err(damage) => {
                let bytes = current.scanned.end - start;
                return Scrubbed { bytes, damage: Some(damage), ..Scrubbed::default() };
            }
        }
        let footer = current.segment.len
            - current.segment.trailer().map_or(0, |trailer| trailer.footer_start);
        let bytes = current.scanned.end - start + footer;
        let damage = match check_footer(&current.segment) {
            Err(error) if error.is_shortage() => {
                self.current = Some(current);
                return Scrubbed { shortage: Some(error), ..Scrubbed::default() };
            }
            checked => checked.err(),
        };
        Scrubbed { bytes, damage, ..Scrubbed::default() }
    }

    /// Returns the next sealed segment, cold ones included; `None` after the last one.
    fn next(&mut self) -> Option<ScrubbedSegment> {
        loop {
            let segment = {
                let core = self.shared.lock();
                let after = self.last + 1;
                let sealed = core.log.chain.range(after..).filter(|(_, held)| held.sealed);
                let sealed = sealed.map(|(id, held)| (*id, held.segment.clone())).next();
                let cold =
                    core.log.cold.range(after..).map(|(id, held)| (*id, held.segment.clone()));
                let (id, segment) = sealed.into_iter().chain(cold.take(1)).min_by_key(|it| it.0)?;
                self.last = id;
                segment
            };
            // Quarantined segments are known to be damaged.
            let readable =
                segment.filter(|it| it.quarantined().is_none() && it.trailer().is_some());
            if let Some(segment) = readable {
                return Some(ScrubbedSegment { segment, scanned: Scanned::default() });
            }
        }
    }
}

impl ScrubbedSegment {
    /// Checks the next groups. Returns whether they were the last.
    fn check(&mut self) -> Result<bool, Error> {
        let end = self.segment.trailer().map_or(0, |trailer| trailer.data_end);
        if self.scanned.end == 0 {
            let header: SegmentHeader = read_header(&self.segment)?;
            self.scanned = Scanned::begin(&header);
        }
        check_groups(&self.segment, &mut self.scanned, end, STEP_BYTES)
    }
}

/// Checks the trailer and the pages of a sealed segment.
pub(crate) fn check_footer(segment: &Segment) -> Result<(), Error> {
    let end = segment.len - BLOCK_BYTES;
    let Some(trailer) = read_trailer(segment)? else {
        let what = "the trailer of a sealed segment does not verify";
        return Err(segment.damaged(end..segment.len, what));
    };
    let mut pages = Aligned::with_len((end - trailer.footer_start) as usize);
    if pages.len() > 0 {
        segment.read_device(pages.as_mut_slice(), trailer.footer_start)?;
    }
    let tables = [trailer.index, trailer.streams, trailer.directory];
    let used = tables.iter().map(|table| table.page + table.pages).max().unwrap_or(0);
    for (number, page) in (0..used).zip(pages.as_slice().chunks_exact(BLOCK)) {
        if !page_verifies(page, segment.id, number) {
            let at = trailer.footer_start + u64::from(number) * BLOCK_BYTES;
            let what = "a page of the footer does not verify";
            return Err(segment.damaged(at..at + BLOCK_BYTES, what));
        }
    }
    Ok(())
}
