//! Repair of sealed segments while the log is open.

use super::Wal;
use crate::format::layout::{Name, parse_name};

impl Wal {
    /// Returns the first and the last index of the entries in a segment, by the name of its file.
    /// `None` if it is not a live sealed segment with entries.
    pub fn entries_of_file(&self, file: &str) -> Option<(u64, u64)> {
        let (Name::Segment(id) | Name::Cold(id)) = parse_name(file) else { return None };
        let core = self.shared.lock();
        let held = core.log.segment(id)?;
        let (first, last) = held.entries?;
        held.sealed.then_some((first, last.index))
    }
}
