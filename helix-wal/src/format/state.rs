//! Bytes of the state file: the checkpoint, and the segments that make up the log.
//!
//! The file is replaced as a whole; `files/state_file.rs` writes it.
//!
//! ```text
//!   0 magic [8]   8 crc u32 (over 12..len)   12 version u16   14 min_reader_version u16
//!  16 len u64     then, one after the other:
//!  identity (u32 len, bytes), next segment id u64, synced (segment u64, byte u64),
//!  flags u32 (1 purged, 2 committed, 4 vote, 8 checkpoint), purged, committed (16 each),
//!  vote (u32 len, bytes), segments (u32 count, then id u64 and sealed u8 each),
//!  checkpoint id (16), its bytes (u64 len, bytes),
//!  placements (u64 count, then index u64, void u8, stream u64, first u64, count u32,
//!  time u64 each),
//!  from version 2 on: cold segments (u32 count, then id u64, first index u64, last: term u64,
//!  index u64 each),
//!  from version 3 on: staged segments (after u64, u32 count, then as cold segments),
//!  from version 4 on: clean streams (u32 count, then stream, upto, also u64 each, by stream),
//!  cleaned upto u64,
//!  from version 5 on: entries version u32
//! ```
//!
//! A state without cold segments declares that a version 1 reader suffices; it stops before them.
//! Staged segments never raise that version: an older reader treats their files as leftovers.
//! A state without clean streams and cleaned entries is written as version 3. Any other needs a
//! reader of version 4, since an older one would forget what is clean and what may be missing.
//! A state with an entries version needs a reader of version 5, which compares it.
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation)]

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;

use crate::format::frame::LogPosition;
use crate::format::layout::{
    MIN_READER_VERSION, NUMBERS_END, OPAQUE_BYTES_MAX, STATE_VERSION, is_within_bounds, u16_at,
    u32_at, u64_at,
};
use crate::types::{CleanMark, LogId, Placement};

const MAGIC: [u8; 8] = *b"HLXSTATE";
const HEADER: usize = 24;
const SEGMENT_BYTES: usize = 9;
const PLACEMENT_BYTES: usize = 37;
const COLD_BYTES: usize = 32;
/// Oldest reader version that understands cold segments.
const COLD_READER_VERSION: u16 = 2;
/// First version that lists staged segments.
const RECEIVED_VERSION: u16 = 3;
/// First version with the progress of cleaning, and oldest reader version for a state that has it.
const CLEAN_VERSION: u16 = 4;
const CLEAN_BYTES: usize = 24;
/// First version with an entries version, and oldest reader version for a state that has one.
const ENTRIES_VERSION: u16 = 5;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PersistedState {
    pub identity: Bytes,
    /// Above every segment id ever used.
    pub next_id: u64,
    /// Everything before this position was synced when the file was written.
    pub synced: LogPosition,
    pub purged: Option<LogId>,
    pub committed: Option<LogId>,
    pub vote: Option<Bytes>,
    /// Live segments of the chain, oldest first, and whether each is sealed.
    pub segments: Vec<(u64, bool)>,
    /// Live cold segments.
    pub cold: Vec<ColdSegmentInfo>,
    pub checkpoint: Option<(LogId, Bytes)>,
    /// Placements of the entries up to the checkpoint that are in no sealed segment.
    pub placements: Vec<(u64, Option<Placement>)>,
    pub staged: StagedSegments,
    /// Marks of clean streams, by stream.
    pub clean_marks: Arc<BTreeMap<u64, CleanMark>>,
    /// Last entry for which cleaning, here or in another log, may have removed earlier ones.
    pub cleaned_upto: u64,
    /// Version of what the entries mean, as the user of the log counts it; 0 if it was never set.
    pub entries_version: u32,
}

/// Segments received for a snapshot that is not installed yet. Not part of the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StagedSegments {
    /// The segments hold every live entry above this index, up to their last entry.
    pub after: u64,
    /// In the order of their entries; empty if none are staged.
    pub segments: Vec<ColdSegmentInfo>,
}

/// A cold segment, with the range of its entries for the case that its footer is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ColdSegmentInfo {
    pub id: u64,
    pub first: u64,
    pub last: LogId,
}

/// Reason why a state file cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StateError {
    Damaged,
    Newer(u16),
}

impl PersistedState {
    /// Iterates over the cold segments of the log and the staged ones (`true`).
    pub(crate) fn all_cold(&self) -> impl Iterator<Item = (bool, &ColdSegmentInfo)> {
        let staged = self.staged.segments.iter().map(|name| (true, name));
        self.cold.iter().map(|name| (false, name)).chain(staged)
    }

    pub(crate) fn names_cold(&self, id: u64) -> bool {
        self.all_cold().any(|(_, cold)| cold.id == id)
    }

    /// Returns whether cleaning has left something to know.
    fn is_cleaned(&self) -> bool {
        !self.clean_marks.is_empty() || self.cleaned_upto > 0
    }

    /// Returns the bytes of the state in three parts. The second one is the checkpoint, which may
    /// be large and is not copied.
    pub(crate) fn encode(&self) -> [Bytes; 3] {
        let mut head = Vec::with_capacity(1024 + self.segments.len() * SEGMENT_BYTES);
        head.extend_from_slice(&MAGIC);
        head.extend_from_slice(&[0; 4]);
        let (version, reader) = match (self.is_cleaned(), self.cold.is_empty()) {
            _ if self.entries_version > 0 => (ENTRIES_VERSION, ENTRIES_VERSION),
            (true, _) => (CLEAN_VERSION, CLEAN_VERSION),
            (false, false) => (RECEIVED_VERSION, COLD_READER_VERSION),
            (false, true) => (RECEIVED_VERSION, MIN_READER_VERSION),
        };
        head.extend_from_slice(&version.to_le_bytes());
        head.extend_from_slice(&reader.to_le_bytes());
        put_u64(&mut head, 0);
        put_short(&mut head, &self.identity);
        put_u64(&mut head, self.next_id);
        put_u64(&mut head, self.synced.segment);
        put_u64(&mut head, self.synced.at);
        let flags = u32::from(self.purged.is_some())
            | u32::from(self.committed.is_some()) << 1
            | u32::from(self.vote.is_some()) << 2
            | u32::from(self.checkpoint.is_some()) << 3;
        head.extend_from_slice(&flags.to_le_bytes());
        put_id(&mut head, self.purged.unwrap_or_default());
        put_id(&mut head, self.committed.unwrap_or_default());
        put_short(&mut head, self.vote.as_deref().unwrap_or_default());
        let count = u32::try_from(self.segments.len()).expect("a directory holds fewer files");
        head.extend_from_slice(&count.to_le_bytes());
        for (id, sealed) in &self.segments {
            put_u64(&mut head, *id);
            head.push(u8::from(*sealed));
        }
        let (id, blob) = self.checkpoint.clone().unwrap_or_default();
        put_id(&mut head, id);
        put_u64(&mut head, blob.len() as u64);
        let mut tail = Vec::with_capacity(256 + self.placements.len() * PLACEMENT_BYTES);
        put_u64(&mut tail, self.placements.len() as u64);
        for (index, placement) in &self.placements {
            put_u64(&mut tail, *index);
            tail.push(u8::from(placement.is_none()));
            let p = placement.unwrap_or(Placement { stream: 0, first: 0, count: 0, time: 0 });
            put_u64(&mut tail, p.stream);
            put_u64(&mut tail, p.first);
            tail.extend_from_slice(&p.count.to_le_bytes());
            put_u64(&mut tail, p.time);
        }
        put_cold(&mut tail, &self.cold);
        put_u64(&mut tail, self.staged.after);
        put_cold(&mut tail, &self.staged.segments);
        if version >= CLEAN_VERSION {
            let count = u32::try_from(self.clean_marks.len()).expect("streams fit in memory");
            tail.extend_from_slice(&count.to_le_bytes());
            for (stream, CleanMark { upto, also }) in &*self.clean_marks {
                put_u64(&mut tail, *stream);
                put_u64(&mut tail, *upto);
                put_u64(&mut tail, *also);
            }
            put_u64(&mut tail, self.cleaned_upto);
        }
        if version >= ENTRIES_VERSION {
            tail.extend_from_slice(&self.entries_version.to_le_bytes());
        }
        seal(&mut head, &[&blob, &tail]);
        [head.into(), blob, tail.into()]
    }

    /// Returns the length of the state that begins with these bytes, if they are a state.
    pub(crate) fn len(bytes: &[u8]) -> Option<u64> {
        bytes.starts_with(&MAGIC).then(|| bytes.get(16..24)).flatten().map(|len| u64_at(len, 0))
    }

    /// Parses a state. Ignores bytes after its end.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, StateError> {
        let len = usize::try_from(u64_at(bytes, 16)).map_err(|_| StateError::Damaged)?;
        let body = bytes.get(..len).filter(|b| b.len() >= HEADER).ok_or(StateError::Damaged)?;
        let covered = body.get(12..).ok_or(StateError::Damaged)?;
        if !body.starts_with(&MAGIC) || crc32fast::hash(covered) != u32_at(body, 8) {
            return Err(StateError::Damaged);
        }
        let min_reader = u16_at(body, 14);
        if min_reader > STATE_VERSION {
            return Err(StateError::Newer(min_reader));
        }
        let mut rest = ByteReader(body.get(HEADER..).ok_or(StateError::Damaged)?);
        let state = rest.state(u16_at(body, 12)).filter(Self::is_sound);
        state.ok_or(StateError::Damaged)
    }
}

impl PersistedState {
    /// Returns whether the numbers of the state are in range, so that arithmetic cannot overflow.
    fn is_sound(&self) -> bool {
        let checkpoint = self.checkpoint.as_ref().map(|(at, _)| *at);
        let ids = [self.purged, self.committed, checkpoint].into_iter().flatten();
        let in_order = self.segments.is_sorted_by(|(a, _), (b, _)| a < b);
        let segments = self.segments.iter().map(|(id, _)| *id);
        // Chain, cold and staged segments share one sequence of ids.
        let mut known = HashSet::new();
        let mut numbers = segments.chain(self.all_cold().map(|(_, cold)| cold.id));
        let placed = |(index, placement): &(u64, Option<Placement>)| {
            *index < NUMBERS_END && placement.as_ref().is_none_or(is_within_bounds)
        };
        let cold =
            |cold: &ColdSegmentInfo| cold.first <= cold.last.index && cold.last.index < NUMBERS_END;
        let mark = |mark: &CleanMark| mark.upto < NUMBERS_END && mark.also < NUMBERS_END;
        self.next_id < NUMBERS_END
            && self.cleaned_upto < NUMBERS_END
            && self.clean_marks.values().all(mark)
            && ids.into_iter().all(|id| id.index < NUMBERS_END)
            && in_order
            && numbers.all(|id| id < self.next_id && known.insert(id))
            && self.placements.iter().all(placed)
            && self.all_cold().all(|(_, name)| cold(name))
    }
}

/// Fills in the length and the checksum of a state that continues with `rest`.
fn seal(head: &mut [u8], rest: &[&[u8]]) {
    let len = rest.iter().fold(head.len(), |len, part| len + part.len()) as u64;
    if let Some(field) = head.get_mut(16..24) {
        field.copy_from_slice(&len.to_le_bytes());
    }
    let mut crc = crc32fast::Hasher::new();
    crc.update(head.get(12..).unwrap_or_default());
    rest.iter().for_each(|part| crc.update(part));
    if let Some(field) = head.get_mut(8..12) {
        field.copy_from_slice(&crc.finalize().to_le_bytes());
    }
}

fn put_u64(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_le_bytes());
}

fn put_id(out: &mut Vec<u8>, id: LogId) {
    put_u64(out, id.term);
    put_u64(out, id.index);
}

fn put_cold(out: &mut Vec<u8>, names: &[ColdSegmentInfo]) {
    let count = u32::try_from(names.len()).expect("a directory holds fewer files");
    out.extend_from_slice(&count.to_le_bytes());
    for ColdSegmentInfo { id, first, last } in names {
        put_u64(out, *id);
        put_u64(out, *first);
        put_id(out, *last);
    }
}

fn put_short(out: &mut Vec<u8>, bytes: &[u8]) {
    let len = u32::try_from(bytes.len()).expect("votes and identities are short");
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(bytes);
}

/// Bytes not parsed yet. Every length is checked against them before use.
struct ByteReader<'a>(&'a [u8]);

impl<'a> ByteReader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4).map(|b| u32_at(b, 0))
    }

    fn u64(&mut self) -> Option<u64> {
        self.take(8).map(|b| u64_at(b, 0))
    }

    fn id(&mut self) -> Option<LogId> {
        Some(LogId { term: self.u64()?, index: self.u64()? })
    }

    fn short(&mut self) -> Option<Bytes> {
        let len = usize::try_from(self.u32()?).ok().filter(|len| *len <= OPAQUE_BYTES_MAX)?;
        self.take(len).map(Bytes::copy_from_slice)
    }

    fn state(&mut self, version: u16) -> Option<PersistedState> {
        let identity = self.short()?;
        let next_id = self.u64()?;
        let synced = LogPosition { segment: self.u64()?, at: self.u64()? };
        let flags = self.u32()?;
        let has = |bit: u32| flags >> bit & 1 != 0;
        let purged = self.id()?;
        let committed = self.id()?;
        let vote = self.short()?;
        let segments = usize::try_from(self.u32()?).ok()?;
        let segments = self.take(segments.checked_mul(SEGMENT_BYTES)?)?;
        let segments = segments
            .chunks_exact(SEGMENT_BYTES)
            .map(|b| (u64_at(b, 0), b.last().is_some_and(|sealed| *sealed != 0)))
            .collect();
        let checkpoint = self.id()?;
        let blob = usize::try_from(self.u64()?).ok()?;
        let blob = Bytes::copy_from_slice(self.take(blob)?);
        let placements = usize::try_from(self.u64()?).ok()?;
        let placements = self.take(placements.checked_mul(PLACEMENT_BYTES)?)?;
        let placements = placements.chunks_exact(PLACEMENT_BYTES).map(placement).collect();
        let cold = if version < COLD_READER_VERSION { Vec::new() } else { self.cold()? };
        let staged = match version {
            ..RECEIVED_VERSION => StagedSegments::default(),
            _ => StagedSegments { after: self.u64()?, segments: self.cold()? },
        };
        let (clean_marks, cleaned_upto) = match version {
            ..CLEAN_VERSION => (BTreeMap::new(), 0),
            _ => (self.clean_marks()?, self.u64()?),
        };
        let entries_version = if version < ENTRIES_VERSION { 0 } else { self.u32()? };
        Some(PersistedState {
            identity,
            next_id,
            synced,
            purged: has(0).then_some(purged),
            committed: has(1).then_some(committed),
            vote: has(2).then_some(vote),
            segments,
            cold,
            checkpoint: has(3).then_some((checkpoint, blob)),
            placements,
            staged,
            clean_marks: Arc::new(clean_marks),
            cleaned_upto,
            entries_version,
        })
    }

    fn cold(&mut self) -> Option<Vec<ColdSegmentInfo>> {
        let count = usize::try_from(self.u32()?).ok()?;
        let names = self.take(count.checked_mul(COLD_BYTES)?)?;
        Some(names.chunks_exact(COLD_BYTES).map(cold_name).collect())
    }

    fn clean_marks(&mut self) -> Option<BTreeMap<u64, CleanMark>> {
        let count = usize::try_from(self.u32()?).ok()?;
        let marks = self.take(count.checked_mul(CLEAN_BYTES)?)?;
        let mark = |b: &[u8]| (u64_at(b, 0), CleanMark { upto: u64_at(b, 8), also: u64_at(b, 16) });
        Some(marks.chunks_exact(CLEAN_BYTES).map(mark).collect())
    }
}

fn cold_name(b: &[u8]) -> ColdSegmentInfo {
    let last = LogId { term: u64_at(b, 16), index: u64_at(b, 24) };
    ColdSegmentInfo { id: u64_at(b, 0), first: u64_at(b, 8), last }
}

fn placement(b: &[u8]) -> (u64, Option<Placement>) {
    let void = b.get(8).is_some_and(|void| *void != 0);
    let placement = Placement {
        stream: u64_at(b, 9),
        first: u64_at(b, 17),
        count: u32_at(b, 25),
        time: u64_at(b, 29),
    };
    (u64_at(b, 0), (!void).then_some(placement))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    fn sample() -> PersistedState {
        PersistedState {
            identity: Bytes::from_static(b"replica 7"),
            next_id: 12,
            synced: LogPosition { segment: 11, at: 8192 },
            purged: Some(LogId { term: 1, index: 5 }),
            committed: None,
            vote: Some(Bytes::from_static(b"vote")),
            segments: vec![(9, true), (11, false)],
            cold: vec![ColdSegmentInfo { id: 10, first: 3, last: LogId { term: 1, index: 7 } }],
            checkpoint: Some((LogId { term: 2, index: 40 }, Bytes::from(vec![3; 5000]))),
            placements: vec![
                (39, None),
                (40, Some(Placement { stream: 1, first: 2, count: 3, time: 4 })),
            ],
            staged: StagedSegments {
                after: 40,
                segments: vec![ColdSegmentInfo {
                    id: 8,
                    first: 42,
                    last: LogId { term: 2, index: 50 },
                }],
            },
            clean_marks: Arc::default(),
            cleaned_upto: 0,
            entries_version: 0,
        }
    }

    fn encoded(state: &PersistedState) -> Vec<u8> {
        state.encode().iter().flatten().copied().collect()
    }

    #[test]
    fn state_round_trips_with_trailing_bytes() {
        for state in [sample(), PersistedState::default()] {
            let mut bytes = encoded(&state);
            assert_eq!(PersistedState::parse(&bytes).as_ref(), Ok(&state));
            bytes.resize(bytes.len() + 9000, 0xaa);
            assert_eq!(PersistedState::parse(&bytes), Ok(state));
        }
    }

    #[test]
    fn detects_damage_to_any_byte() {
        let bytes = encoded(&sample());
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x10;
            assert_eq!(PersistedState::parse(&bytes), Err(StateError::Damaged), "byte {at}");
            assert_eq!(
                PersistedState::parse(&bytes[..at]),
                Err(StateError::Damaged),
                "cut at {at}"
            );
        }
    }

    /// The format that version 1 reads and wrote.
    #[test]
    fn only_cold_segments_need_a_reader_of_version_2() {
        let with = sample();
        assert_eq!(u16_at(&encoded(&with), 14), 2);
        let without =
            PersistedState { cold: Vec::new(), staged: StagedSegments::default(), ..with };
        let mut bytes = encoded(&without);
        assert_eq!(u16_at(&bytes, 14), 1);
        bytes.truncate(bytes.len() - 16);
        bytes[12] = 1;
        seal(&mut bytes, &[]);
        assert_eq!(PersistedState::parse(&bytes), Ok(without));
    }

    /// The format that version 2 wrote.
    #[test]
    fn a_state_of_version_2_has_received_nothing() {
        let state = PersistedState { staged: StagedSegments::default(), ..sample() };
        let mut bytes = encoded(&state);
        bytes.truncate(bytes.len() - 12);
        bytes[12] = 2;
        seal(&mut bytes, &[]);
        assert_eq!(PersistedState::parse(&bytes), Ok(state));
    }

    /// A program before it must not take entries that it does not know for damage.
    #[test]
    fn an_entries_version_needs_a_reader_of_version_5() {
        let without = sample();
        let with = PersistedState { entries_version: 12, ..without.clone() };
        let (bytes, longer) = (encoded(&without), encoded(&with));
        assert_eq!((u16_at(&longer, 12), u16_at(&longer, 14)), (5, 5));
        assert_eq!(longer.len(), bytes.len() + 4 + 8 + 4);
        assert_eq!(PersistedState::parse(&longer).as_ref(), Ok(&with));
        for at in 0..longer.len() {
            assert_eq!(PersistedState::parse(&longer[..at]), Err(StateError::Damaged));
        }
    }

    /// Logs that know nothing of cleaning keep the bytes of version 3.
    #[test]
    fn only_cleaning_needs_a_reader_of_version_4() {
        let without = sample();
        let bytes = encoded(&without);
        assert_eq!((u16_at(&bytes, 12), u16_at(&bytes, 14)), (3, 2));
        let marks = [(7, CleanMark { upto: 40, also: 9 }), (9, CleanMark::default())];
        let with = PersistedState { clean_marks: Arc::new(marks.into()), ..without };
        let longer = encoded(&with);
        assert_eq!((u16_at(&longer, 12), u16_at(&longer, 14)), (4, 4));
        assert_eq!(longer.len(), bytes.len() + 4 + 2 * 24 + 8);
        assert_eq!(PersistedState::parse(&longer).as_ref(), Ok(&with));
        for at in 0..longer.len() {
            assert_eq!(PersistedState::parse(&longer[..at]), Err(StateError::Damaged));
        }
        // Entries of another log may be cleaned before this log has cleaned any.
        let with = PersistedState { clean_marks: Arc::default(), cleaned_upto: 70, ..with };
        let shorter = encoded(&with);
        assert_eq!((u16_at(&shorter, 12), u16_at(&shorter, 14)), (4, 4));
        assert_eq!(shorter.len(), bytes.len() + 4 + 8);
        assert_eq!(PersistedState::parse(&shorter), Ok(with));
    }

    /// Even if the checksum matches: numbers out of range, and duplicate ids.
    #[test]
    fn rejects_states_out_of_range() {
        let refused = |change: fn(&mut PersistedState)| {
            let mut state = sample();
            change(&mut state);
            assert_eq!(
                PersistedState::parse(&encoded(&state)),
                Err(StateError::Damaged),
                "{state:?}"
            );
        };
        refused(|state| state.next_id = 11);
        refused(|state| state.next_id = NUMBERS_END);
        refused(|state| state.segments.reverse());
        refused(|state| state.cold[0].id = 9);
        refused(|state| state.staged.segments[0].id = 10);
        refused(|state| state.staged.segments[0].id = 12);
        refused(|state| state.staged.segments[0].first = 51);
        refused(|state| state.cold[0].last.index = NUMBERS_END);
        refused(|state| state.placements[0].0 = NUMBERS_END);
        refused(|state| state.cleaned_upto = NUMBERS_END);
        refused(|state| {
            let mark = CleanMark { upto: NUMBERS_END, also: 0 };
            state.clean_marks = Arc::new([(7, mark)].into());
        });
        refused(|state| {
            let first = NUMBERS_END - 3;
            state.placements[1].1 = Some(Placement { stream: 1, first, count: 3, time: 4 });
        });
    }

    #[test]
    fn reports_version_of_newer_format() {
        let mut bytes = encoded(&sample());
        bytes[14] = 9;
        seal(&mut bytes, &[]);
        assert_eq!(PersistedState::parse(&bytes), Err(StateError::Newer(9)));
    }
}
