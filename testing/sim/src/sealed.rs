//! Parses sealed segments by docs/wal-format.md, independently of the code under test, and picks
//! bits whose damage has a known repair.

use std::collections::BTreeSet;
use std::ops::Range;

use helix_wal::storage::SimulatedDisk;
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

const BLOCK: usize = 4 << 10;
const GROUP_HEADER: usize = 128;
const PAGE_HEADER: usize = 24;
const INDEX_ROW: usize = 32;

/// Attempts to find a byte that is not zero.
const POSITION_ATTEMPTS_MAX: usize = 1_000;

/// Frame of a live entry.
#[derive(Debug, Clone)]
struct SealedEntry {
    index: u64,
    frame: Range<usize>,
}

/// A sealed segment, or a cold one.
#[derive(Debug, Clone)]
pub(crate) struct SealedSegment {
    pub(crate) name: String,
    bytes: Vec<u8>,
    entries: Vec<SealedEntry>,
    /// Last entry before the segment ended.
    last_index: u64,
    /// Start of each group.
    groups: Vec<usize>,
}

/// One bit of a file. `index` is the damaged entry, if it is in one.
#[derive(Debug, Clone)]
pub(crate) struct BitFlip {
    pub(crate) file: String,
    pub(crate) byte: usize,
    pub(crate) bit: u64,
    pub(crate) index: Option<u64>,
}

impl BitFlip {
    pub(crate) fn apply(&self, disk: &SimulatedDisk) {
        disk.flip_bit(&self.file, self.byte as u64 * 8 + self.bit);
    }
}

/// Returns the sealed segments that are durable on a disk.
pub(crate) fn sealed_segments(disk: &SimulatedDisk, device: &SimulatedDisk) -> Vec<SealedSegment> {
    let cached = disk.files();
    let is_segment = |name: &String| {
        (name.ends_with(".seg") || name.ends_with(".cold")) && cached.contains(name)
    };
    let names = device.files().into_iter().filter(is_segment);
    names.filter_map(|name| SealedSegment::parse(device.read_file(&name)?, name)).collect()
}

impl SealedSegment {
    fn parse(bytes: Vec<u8>, name: String) -> Option<Self> {
        let trailer = bytes.get(bytes.len().checked_sub(BLOCK)?..)?;
        if !trailer.starts_with(b"HLXTRAIL")
            || crc32fast::hash(&trailer[12..]) != u32_at(trailer, 8)?
        {
            return None;
        }
        let last_index = u64_at(trailer, 48)?;
        let (data_end, footer) = (usize_at(trailer, 56)?, usize_at(trailer, 72)?);
        let (first, pages) = (u32_at(trailer, 80)? as usize, u32_at(trailer, 84)? as usize);
        let mut entries = Vec::new();
        for page in first..first + pages {
            let page = bytes.get(footer + page * BLOCK..footer + (page + 1) * BLOCK)?;
            for row in 0..u32_at(page, 20)? as usize {
                let row = page.get(PAGE_HEADER + row * INDEX_ROW..)?;
                let (at, len) = (u32_at(row, 16)? as usize, u32_at(row, 20)? as usize);
                entries.push(SealedEntry { index: u64_at(row, 0)?, frame: at..at + len });
            }
        }
        let mut groups = Vec::new();
        let mut at = BLOCK;
        while at < data_end {
            let header = bytes.get(at..at + GROUP_HEADER).filter(|it| it.starts_with(b"HLXG"))?;
            groups.push(at);
            at += (u32_at(header, 12)? as usize).next_multiple_of(BLOCK);
        }
        Some(Self { name, bytes, entries, last_index, groups })
    }

    /// Returns the indexes of the live entries.
    pub(crate) fn indexes(&self) -> impl Iterator<Item = u64> {
        self.entries.iter().map(|entry| entry.index)
    }

    /// Returns whether all entries are at or below this index.
    pub(crate) fn ends_by(&self, index: u64) -> bool {
        self.last_index <= index && self.indexes().all(|it| it <= index)
    }

    /// Picks a bit in the frame of an entry, except of the entries in `spared`.
    pub(crate) fn entry_flip(&self, spared: &BTreeSet<u64>, rng: &mut StdRng) -> Option<BitFlip> {
        let may_be_hit: Vec<&SealedEntry> =
            self.entries.iter().filter(|entry| !spared.contains(&entry.index)).collect();
        let entry = *may_be_hit.choose(rng)?;
        self.flip_in(entry.frame.clone(), Some(entry.index), rng)
    }

    /// Picks a bit in the frame of the entry with this index.
    pub(crate) fn flip_of(&self, index: u64, rng: &mut StdRng) -> Option<BitFlip> {
        let entry = self.entries.iter().find(|entry| entry.index == index)?;
        self.flip_in(entry.frame.clone(), Some(index), rng)
    }

    /// Picks a bit in the header of each of two groups that follow each other. Their headers cannot
    /// be derived, so only a new log repairs that.
    pub(crate) fn header_flips(&self, rng: &mut StdRng) -> Option<[BitFlip; 2]> {
        let pairs: Vec<&[usize]> = self.groups.windows(2).collect();
        let [one, next] = **pairs.choose(rng)? else { return None };
        let mut flip = |at: usize| self.flip_in(at..at + GROUP_HEADER, None, rng);
        Some([flip(one)?, flip(next)?])
    }

    fn flip_in(
        &self,
        range: Range<usize>,
        index: Option<u64>,
        rng: &mut StdRng,
    ) -> Option<BitFlip> {
        let byte = random_nonzero(&self.bytes, range, rng)?;
        Some(BitFlip { file: self.name.clone(), byte, bit: rng.random_range(0..8), index })
    }
}

/// Draws the position of a byte in the range that is not zero.
pub(crate) fn random_nonzero(bytes: &[u8], range: Range<usize>, rng: &mut StdRng) -> Option<usize> {
    if range.is_empty() || range.end > bytes.len() {
        return None;
    }
    (0..POSITION_ATTEMPTS_MAX).map(|_| rng.random_range(range.clone())).find(|at| bytes[*at] != 0)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}

fn usize_at(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64_at(bytes, at)?).ok()
}
