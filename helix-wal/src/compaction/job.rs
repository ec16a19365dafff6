//! State of a running compaction, from the live shares of its inputs to new segments.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::files::cold_segment::ColdSegment;
use crate::files::segment::Segment;
use crate::format::footer::DirectoryRow;
use crate::format::frame::Frame;
use crate::read::load::FrameRef;
use crate::shared::cleaning::EntryFilter;
use crate::types::{Entry, Placement};
use crate::write::cold_writer::ColdSegmentBuilder;

/// A live share of an input.
#[derive(Debug, Clone, Copy)]
pub(super) struct LiveShare {
    pub input: usize,
    pub share: DirectoryRow,
}

/// An entry being moved.
#[derive(Debug)]
pub(super) struct MovedEntry {
    pub placement: Placement,
    /// Number of the entry's share. Shares are preserved, because retention deletes whole shares.
    pub share: u64,
}

/// A running compaction.
pub(super) struct CompactionJob {
    pub inputs: Vec<Arc<Segment>>,
    pub gathers: bool,
    /// Number of inputs whose directory is not read yet.
    pub unread: usize,
    /// Live shares by stream and position, from the next one to read.
    pub pieces: VecDeque<LiveShare>,
    /// Entries to read into memory, by location on disk.
    pub wanted: VecDeque<(MovedEntry, FrameRef)>,
    /// Entries read and not yet judged by the filter.
    pub loaded: VecDeque<(MovedEntry, Entry)>,
    /// Entries to write; sorted by stream and position once `wanted` and `loaded` are empty.
    pub window: VecDeque<(MovedEntry, Entry)>,
    pub sorted: bool,
    pub left_bytes: u64,
    pub left_entries: u64,
    pub growing: Option<ColdSegmentBuilder>,
    pub made: VecDeque<ColdSegment>,
    /// New segments listed in the state file, with the rows that are still to be moved to them.
    pub receiving_rows: VecDeque<(Arc<Segment>, VecDeque<DirectoryRow>)>,
    pub is_named: bool,
    /// Share of the last planned entry, and of the last written one.
    pub planned_share: u64,
    pub written_share: Option<u64>,
    /// Filter of the streams being cleaned, and the position below which it judges each stream.
    pub cleaning: Option<(Arc<dyn EntryFilter>, BTreeMap<u64, u64>)>,
    /// Inputs that were replaced, and the segments that replaced them.
    pub replaced: Vec<u64>,
    pub added: Vec<u64>,
    /// Why the filter refused an entry.
    pub refusal: Option<String>,
}

impl CompactionJob {
    /// Begins a compaction of these segments with so many live bytes and entries.
    pub(super) fn new(
        inputs: Vec<Arc<Segment>>,
        gathers: bool,
        (left_bytes, left_entries): (u64, u64),
        cleaning: Option<(Arc<dyn EntryFilter>, BTreeMap<u64, u64>)>,
    ) -> Self {
        Self {
            unread: inputs.len(),
            inputs,
            gathers,
            pieces: VecDeque::new(),
            wanted: VecDeque::new(),
            loaded: VecDeque::new(),
            window: VecDeque::new(),
            sorted: false,
            left_bytes,
            left_entries,
            growing: None,
            made: VecDeque::new(),
            receiving_rows: VecDeque::new(),
            is_named: false,
            planned_share: 0,
            written_share: None,
            cleaning,
            replaced: Vec::new(),
            added: Vec::new(),
            refusal: None,
        }
    }

    /// Returns whether all entries are written, so that only the state file remains.
    pub(super) fn is_whole(&self) -> bool {
        let is_read = self.unread == 0 && self.pieces.is_empty() && self.wanted.is_empty();
        let is_written = self.loaded.is_empty() && self.window.is_empty();
        is_read && is_written && self.growing.is_none()
    }

    /// Returns the filter if the next step judges entries.
    pub(super) fn judging_filter(&self) -> Option<Arc<dyn EntryFilter>> {
        self.loaded.iter().find_map(|(moving, _)| self.filter_of(&moving.placement)).cloned()
    }

    /// Returns whether this job rewrites a segment.
    pub(super) fn has_input(&self, id: u64) -> bool {
        self.inputs.iter().any(|input| input.id == id)
    }

    /// Returns the filter of an entry, if it is being cleaned.
    pub(super) fn filter_of(&self, placement: &Placement) -> Option<&Arc<dyn EntryFilter>> {
        let (filter, below) = self.cleaning.as_ref()?;
        below.get(&placement.stream).filter(|end| placement.first < **end).map(|_| filter)
    }

    /// Returns the bytes of the frames in the window.
    pub(super) fn window_bytes(&self) -> u64 {
        let len = |entry: &Entry| {
            Frame::entry(entry.id, entry.stream, &entry.head, &entry.payload).len() as u64
        };
        self.window.iter().map(|(_, entry)| len(entry)).sum()
    }
}
