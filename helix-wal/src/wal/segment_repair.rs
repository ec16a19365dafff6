//! Repair of sealed segments while the log is open.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Wal;
use crate::error::Error;
use crate::files::segment::Segment;
use crate::format::footer::IndexRow;
use crate::format::frame::LogPosition;
use crate::format::layout::{Name, parse_name};
use crate::maintenance::segment_damage::{DamageMap, FoundFrame, examine, in_table, numbered_rows};
use crate::maintenance::segment_repair::{RepairSource, patches, sync_name, write_copy};
use crate::types::{Entry, LogId, Placement};

/// Every damaged part of a sealed segment, and what its repair needs from other replicas.
///
/// Until it is dropped, the segment is neither compacted nor freed.
pub struct SegmentDamage {
    wal: Wal,
    segment: Arc<Segment>,
    map: DamageMap,
    missing: Vec<LogId>,
    unplaced: Vec<LogId>,
}

impl std::fmt::Debug for SegmentDamage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.segment.name();
        f.debug_struct("SegmentDamage").field("file", &name).finish_non_exhaustive()
    }
}

impl Drop for SegmentDamage {
    fn drop(&mut self) {
        if let Some(held) = self.wal.shared.lock().log.segment_mut(self.segment.id) {
            held.busy = false;
        }
    }
}

impl SegmentDamage {
    /// Returns the size of the segment.
    pub fn bytes(&self) -> u64 {
        self.segment.len
    }

    /// Returns whether everything verifies.
    pub fn is_clean(&self) -> bool {
        self.map.is_clean()
    }

    /// Returns the damaged entries, in log order.
    pub fn missing(&self) -> &[LogId] {
        &self.missing
    }

    /// Returns entries whose placements are damaged, in log order.
    pub fn unplaced(&self) -> &[LogId] {
        &self.unplaced
    }

    /// Replaces the damaged parts. `entries` are the missing ones, and `placements` those of the
    /// unplaced ones, by index. Blocks.
    ///
    /// Reads the segment twice and writes it once. A crash leaves the damaged segment or the
    /// repaired one. If everything verifies, it only makes an earlier repair durable.
    ///
    /// # Errors
    /// [`Error::Damaged`] if an entry is missing or does not match, and [`Error::DiskFull`] or
    /// [`Error::Io`]; all of them leave the segment unchanged, or repaired without being durable.
    pub fn repair(
        &self,
        entries: &BTreeMap<u64, Entry>,
        placements: &BTreeMap<u64, Placement>,
    ) -> Result<(), Error> {
        let shared = &self.wal.shared;
        let (segment, map) = (&*self.segment, &self.map);
        let (Some(storage), Some(trailer)) = (&shared.storage, segment.trailer()) else {
            return Err(Error::Unusable("the log has no files to repair".to_owned()));
        };
        let before = {
            let core = shared.lock();
            core.check_open()?;
            let before = core.log.chain.range(..segment.id).next_back();
            let before = before.filter(|_| !segment.cold);
            before.and_then(|(id, held)| {
                let trailer = held.segment.as_ref()?.trailer()?;
                let end = LogPosition { segment: *id, at: trailer.data_end };
                Some((end, trailer.context.clone()))
            })
        };
        if map.is_clean() {
            // Perhaps an earlier call gave the copy its name, but a crash may still undo that.
            sync_name(shared, storage, segment)?;
        } else {
            let source = RepairSource { entries, placements, before };
            let patches = patches(shared, segment, trailer, map, &source)?;
            write_copy(shared, storage, segment, trailer, &patches)?;
        }
        if let Some(held) = shared.lock().log.segment_mut(segment.id) {
            held.damage_found = false;
        }
        Ok(())
    }
}

impl Wal {
    /// Returns the first and the last index of the entries in a segment, by the name of its file.
    /// `None` if it is not a live sealed segment with entries.
    pub fn entries_of_file(&self, file: &str) -> Option<(u64, u64)> {
        let core = self.shared.lock();
        let held = core.log.segment(segment_of(file)?)?;
        let (first, last) = held.entries?;
        held.sealed.then_some((first, last.index))
    }

    /// Returns whether the file is a sealed segment that can be repaired in place: its footer was
    /// readable when the log was opened.
    pub fn is_repairable(&self, file: &str) -> bool {
        let Some(id) = segment_of(file) else { return false };
        let core = self.shared.lock();
        let segment =
            core.log.segment(id).filter(|held| held.sealed).and_then(|held| held.segment.as_ref());
        segment.is_some_and(|it| {
            it.name() == file && it.trailer().is_some() && it.quarantined().is_none()
        })
    }

    /// Returns whether the file is still part of the log.
    pub fn has_file(&self, file: &str) -> bool {
        let core = self.shared.lock();
        let held = segment_of(file).and_then(|id| core.log.segment(id));
        held.and_then(|held| held.segment.as_ref()).is_some_and(|it| it.name() == file)
    }

    /// Reads a sealed segment and finds every damaged part. Blocks.
    ///
    /// # Errors
    /// [`Error::Damaged`] if a part is damaged that cannot be repaired in place.
    /// [`Error::Unusable`] if it is no such segment, or is being compacted.
    pub fn examine_segment(&self, file: &str) -> Result<SegmentDamage, Error> {
        let unusable = |what: &str| Error::Unusable(format!("{file}: {what}"));
        let id = segment_of(file).ok_or_else(|| unusable("is no segment"))?;
        let segment = {
            let mut core = self.shared.lock();
            core.check_open()?;
            let held = core.log.segment_mut(id).filter(|held| held.sealed);
            let held = held.ok_or_else(|| unusable("is no sealed segment of the log"))?;
            if held.busy || held.removing {
                return Err(unusable("is being compacted or freed; try again"));
            }
            let segment = held.segment.clone().ok_or_else(|| unusable("has no file"))?;
            held.busy = true;
            segment
        };
        let mut damage = SegmentDamage {
            wal: self.clone(),
            segment,
            map: DamageMap::default(),
            missing: Vec::new(),
            unplaced: Vec::new(),
        };
        if let Some(quarantined) = damage.segment.quarantined() {
            return Err(quarantined.clone());
        }
        let trailer = damage.segment.trailer().cloned();
        let trailer = trailer.ok_or_else(|| unusable("has no footer"))?;
        damage.map = examine(&damage.segment, &trailer)?;
        for frame in damage.map.groups.iter().flat_map(|group| &group.frames) {
            if let FoundFrame::Missing(row) = frame {
                damage.missing.push(row.id);
            }
        }
        damage.missing.sort_unstable_by_key(|id| id.index);
        let lost: Vec<u32> = damage
            .map
            .pages
            .iter()
            .copied()
            .filter(|page| in_table(*page, trailer.streams))
            .collect();
        if !lost.is_empty() {
            let per_page = crate::format::footer::placed_rows_per_page();
            let is_lost = |row: &IndexRow| {
                let page = row.stream_row.map(|row| trailer.streams.page + row / per_page);
                page.is_some_and(|page| lost.contains(&page))
            };
            let rows = numbered_rows::<IndexRow>(&damage.map.good_pages, trailer.index);
            damage.unplaced = rows.map(|(_, row)| row).filter(is_lost).map(|row| row.id).collect();
        }
        Ok(damage)
    }
}

fn segment_of(file: &str) -> Option<u64> {
    match parse_name(file) {
        Name::Segment(id) | Name::Cold(id) => Some(id),
        _ => None,
    }
}
