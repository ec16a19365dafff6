//! Reads what is sealed anew, from the disk itself and a piece at a time: damage is found while
//! others still have what is damaged, and not when somebody needs it.

use std::sync::Arc;

use crate::aligned::Aligned;
use crate::footer::page_verifies;
use crate::frame::SegmentHeader;
use crate::layout::BLOCK_BYTES;
use crate::recovery::read_trailer;
use crate::scan::{Scanned, check_groups, read_header};
use crate::segment::Segment;
use crate::shared::Shared;
use crate::storage::BLOCK;
use crate::{Error, Wal};

/// Bytes of groups checked in one step: what one read of the disk brings.
const STEP_BYTES: u64 = 4 << 20;

/// Goes through the sealed segments of a log, over and over.
pub struct Scrub {
    shared: Arc<Shared>,
    /// The last segment that was begun.
    last: u64,
    current: Option<Current>,
}

struct Current {
    /// As long as it is held its file is not used for anything else.
    segment: Arc<Segment>,
    scanned: Scanned,
}

/// What one step came to.
#[derive(Debug, Clone, Default)]
pub struct Scrubbed {
    pub bytes: u64,
    /// Every segment that was there has been read once more.
    pub is_round: bool,
    /// What does not verify. The rest of its segment is passed over.
    pub damage: Option<Error>,
}

impl Wal {
    /// Begins with the oldest sealed segment.
    pub fn scrub(&self) -> Scrub {
        Scrub { shared: Arc::clone(&self.shared), last: 0, current: None }
    }
}

impl Scrub {
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
            Err(damage) => {
                let bytes = current.scanned.end - start;
                return Scrubbed { bytes, damage: Some(damage), is_round: false };
            }
        }
        let footer = current.segment.len
            - current.segment.trailer().map_or(0, |trailer| trailer.footer_start);
        let bytes = current.scanned.end - start + footer;
        Scrubbed { bytes, is_round: false, damage: current.check_footer().err() }
    }

    /// The sealed segment that comes next, cold ones among them; `None` behind the last one.
    fn next(&mut self) -> Option<Current> {
        loop {
            let segment = {
                let core = self.shared.lock();
                let after = self.last + 1;
                let sealed = core.log.held.range(after..).filter(|(_, held)| held.sealed);
                let sealed = sealed.map(|(id, held)| (*id, held.segment.clone())).next();
                let cold =
                    core.log.cold.range(after..).map(|(id, held)| (*id, held.segment.clone()));
                let (id, segment) = sealed.into_iter().chain(cold.take(1)).min_by_key(|it| it.0)?;
                self.last = id;
                segment
            };
            // What is withheld is known to be damaged.
            let readable = segment.filter(|it| it.withheld().is_none() && it.trailer().is_some());
            if let Some(segment) = readable {
                return Some(Current { segment, scanned: Scanned::default() });
            }
        }
    }
}

impl Current {
    /// Checks the next groups; whether those were the last.
    fn check(&mut self) -> Result<bool, Error> {
        let end = self.segment.trailer().map_or(0, |trailer| trailer.data_end);
        if self.scanned.end == 0 {
            let header: SegmentHeader = read_header(&self.segment)?;
            self.scanned = Scanned::begin(&header);
        }
        check_groups(&self.segment, &mut self.scanned, end, STEP_BYTES)
    }

    fn check_footer(&self) -> Result<(), Error> {
        let segment = &self.segment;
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
}
