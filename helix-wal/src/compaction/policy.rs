//! Choice of the segments that a compaction rewrites next. Performs no I/O.
//!
//! There are three reasons, in this order:
//! - **Dead**: the segments hold much more than their live entries.
//! - **Small**: many small cold segments become one.
//! - **Scattered**: a segment holds so many streams that reading one of them needs a seek for every
//!   entry. It is rewritten by stream. Eight rewritten segments then become eight with an eighth of
//!   the streams each.
//!
//! Other segments are never touched. If a few busy streams have the same retention, whole segments
//! become free automatically.

use crate::format::sizing::cold_bytes;
use crate::shared::options::COMPACTION_INPUTS_MAX;

/// Segments with more streams are scattered. At 64 MiB this is 256 KiB per stream.
pub(crate) const STREAMS_MAX: u32 = 256;
/// Maximum number of small cold segments that are left alone.
const SMALL_MAX: usize = 8;
/// Minimum number of small segments worth compacting.
const SMALL_MIN: usize = 4;
/// Bytes of an entry's rows in the two footer tables, and of a share's row in the directory.
const ENTRY_ROWS_BYTES: u64 = 73;
const SHARE_BYTES: u64 = 49;
/// Maximum number of stream rows that one compaction moves, because they are kept in memory.
const ROWS_MAX: usize = 64 << 10;

/// A sealed, undamaged segment with live entries, all of which have left the Raft log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CompactionCandidate {
    pub id: u64,
    /// First index in it, which is its age.
    pub first: u64,
    pub cold: bool,
    /// Written from scattered segments, so it cannot be gathered further.
    pub gathered: bool,
    /// Bytes of the file.
    pub len: u64,
    pub live_bytes: u64,
    pub live_entries: u64,
    pub live_rows: usize,
    pub streams: u32,
}

impl CompactionCandidate {
    /// Estimates the bytes that its live entries need in a larger file, with their table rows.
    fn needed(&self) -> u64 {
        let rows = self.live_entries * ENTRY_ROWS_BYTES + self.live_rows as u64 * SHARE_BYTES;
        self.live_bytes + self.live_bytes / 128 + rows
    }

    fn is_dead(&self) -> bool {
        2 * self.len > 3 * self.needed()
    }

    fn is_scattered(&self) -> bool {
        self.streams > STREAMS_MAX && !self.gathered
    }
}

/// Segments to rewrite, and whether the result counts as gathered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CompactionChoice {
    pub ids: Vec<u64>,
    pub gathers: bool,
}

/// Limits of a choice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CompactionLimits {
    pub segment_bytes: u64,
    /// Bytes that the log may hold beyond one and a half times its live bytes.
    pub slack: u64,
    /// Disk space available for the result.
    pub free_bytes: u64,
}

/// Chooses the segments to rewrite next.
pub(crate) fn choose(
    all: &[CompactionCandidate],
    bounds: CompactionLimits,
) -> Option<CompactionChoice> {
    dead(all, bounds).or_else(|| small(all, bounds)).or_else(|| scattered(all, bounds.free_bytes))
}

/// Chooses listed segments for a cleaning, oldest first, up to one new segment.
pub(crate) fn choose_listed(
    all: &[CompactionCandidate],
    listed: &[u64],
    bounds: CompactionLimits,
) -> Option<CompactionChoice> {
    let mut wanted: Vec<&CompactionCandidate> =
        all.iter().filter(|candidate| listed.contains(&candidate.id)).collect();
    wanted.sort_by_key(|c| (c.first, c.id));
    wanted.truncate(COMPACTION_INPUTS_MAX);
    let gathers = wanted.iter().all(|c| c.gathered);
    chosen(&take(&wanted, bounds.segment_bytes, u64::MAX))
        .map(|choice| CompactionChoice { gathers: gathers && choice.gathers, ..choice })
}

/// Chooses the segments with the smallest live share, up to one new segment.
fn dead(all: &[CompactionCandidate], bounds: CompactionLimits) -> Option<CompactionChoice> {
    let held: u64 = all.iter().map(|c| c.len).sum();
    let needed: u64 = all.iter().map(CompactionCandidate::needed).sum();
    if 2 * held <= 3 * needed + 2 * bounds.slack {
        return None;
    }
    let mut dead: Vec<&CompactionCandidate> = all.iter().filter(|c| c.is_dead()).collect();
    let share = |c: &&CompactionCandidate| c.needed().saturating_mul(1000) / c.len.max(1);
    dead.sort_by_key(|c| (share(c), c.id));
    let taken = take(&dead, bounds.segment_bytes, bounds.free_bytes);
    // The freed space must justify the cost of a new file.
    let freed: u64 = taken.iter().map(|c| c.len).sum();
    (2 * freed >= 3 * file_bytes(&taken)).then(|| chosen(&taken)).flatten()
}

/// Chooses the smallest segments, up to one new segment.
fn small(all: &[CompactionCandidate], bounds: CompactionLimits) -> Option<CompactionChoice> {
    let is_small = |c: &&CompactionCandidate| c.cold && 4 * c.len < bounds.segment_bytes;
    let mut small: Vec<&CompactionCandidate> = all.iter().filter(is_small).collect();
    if small.len() <= SMALL_MAX {
        return None;
    }
    small.sort_by_key(|c| (c.len, c.id));
    let taken = take(&small, bounds.segment_bytes, bounds.free_bytes);
    if taken.len() >= SMALL_MIN { chosen(&taken) } else { None }
}

fn scattered(all: &[CompactionCandidate], free_bytes: u64) -> Option<CompactionChoice> {
    let mut scattered: Vec<&CompactionCandidate> =
        all.iter().filter(|c| c.is_scattered()).collect();
    scattered.sort_by_key(|c| (c.first, c.id));
    let (cold, chain): (Vec<&CompactionCandidate>, Vec<&CompactionCandidate>) =
        scattered.into_iter().partition(|c| c.cold);
    if let Some(oldest) = cold.get(..COMPACTION_INPUTS_MAX) {
        let taken = take(oldest, u64::MAX, free_bytes);
        if taken.len() > 1 {
            return chosen(&taken).map(|choice| CompactionChoice { gathers: true, ..choice });
        }
    }
    let oldest = chain.first().filter(|_| chain.len() > COMPACTION_INPUTS_MAX)?;
    chosen(&take(&[*oldest], u64::MAX, free_bytes))
}

/// Returns the bytes of one file for the live entries of all of them.
fn file_bytes(of: &[&CompactionCandidate]) -> u64 {
    let entries = of.iter().map(|c| c.live_entries).sum();
    cold_bytes(entries, of.iter().map(|c| c.live_bytes).sum())
}

/// Returns the first segments that fit together, skipping those that do not fit.
fn take<'a>(
    from: &[&'a CompactionCandidate],
    bytes_max: u64,
    free_bytes: u64,
) -> Vec<&'a CompactionCandidate> {
    let mut sum = (0, 0, 0);
    let mut taken: Vec<&CompactionCandidate> = Vec::new();
    for c in from {
        let (bytes, entries, rows) =
            (sum.0 + c.live_bytes, sum.1 + c.live_entries, sum.2 + c.live_rows);
        let is_little = bytes <= bytes_max && rows <= ROWS_MAX;
        if (taken.is_empty() || is_little) && cold_bytes(entries, bytes) <= free_bytes {
            taken.push(c);
            sum = (bytes, entries, rows);
        }
    }
    taken
}

fn chosen(taken: &[&CompactionCandidate]) -> Option<CompactionChoice> {
    let gathers = taken.iter().all(|c| c.gathered);
    let ids: Vec<u64> = taken.iter().map(|c| c.id).collect();
    (!ids.is_empty()).then_some(CompactionChoice { ids, gathers })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 64 << 20;
    const BOUNDS: CompactionLimits =
        CompactionLimits { segment_bytes: SEGMENT, slack: 2 * SEGMENT, free_bytes: u64::MAX };

    fn full(id: u64) -> CompactionCandidate {
        CompactionCandidate {
            id,
            first: id * 1000,
            cold: false,
            gathered: false,
            len: SEGMENT,
            live_bytes: SEGMENT - (2 << 20),
            live_entries: 640,
            live_rows: 4,
            streams: 4,
        }
    }

    fn live(id: u64, percent: u64) -> CompactionCandidate {
        let whole = full(id);
        CompactionCandidate {
            live_bytes: whole.live_bytes * percent / 100,
            live_entries: whole.live_entries * percent / 100,
            ..whole
        }
    }

    fn ids(all: &[CompactionCandidate]) -> Vec<u64> {
        choose(all, BOUNDS).map_or(Vec::new(), |choice| choice.ids)
    }

    #[test]
    fn leaves_fully_live_segments_alone() {
        let all: Vec<_> = (0..100).map(full).collect();
        assert_eq!(ids(&all), []);
        // The same holds for entries so small that their rows take as much space as they do.
        let tiny =
            |id| CompactionCandidate { live_bytes: 30 << 20, live_entries: 400_000, ..full(id) };
        let all: Vec<_> = (0..100).map(tiny).collect();
        assert_eq!(ids(&all), []);
    }

    #[test]
    fn leaves_nearly_trimmed_segments_alone() {
        let mut all: Vec<_> = (0..20).map(full).collect();
        all[0] = live(0, 5);
        all[1] = live(1, 50);
        assert_eq!(ids(&all), []);
    }

    #[test]
    fn compacts_deadest_segments_first_and_terminates() {
        let mut all: Vec<_> = (0..20).map(|id| live(id, 40)).collect();
        all[7] = live(7, 2);
        all[9] = live(9, 3);
        assert_eq!(ids(&all), [7, 9, 0, 1]);
        // Repeated compaction terminates within the bound.
        let mut rewritten = 0;
        while let Some(choice) = choose(&all, BOUNDS) {
            let (gone, kept): (Vec<_>, Vec<_>) =
                all.iter().copied().partition(|c| choice.ids.contains(&c.id));
            let sum = |of: fn(&CompactionCandidate) -> u64| gone.iter().map(of).sum::<u64>();
            let (live_bytes, live_entries) = (sum(|c| c.live_bytes), sum(|c| c.live_entries));
            let len = cold_bytes(live_entries, live_bytes);
            rewritten += len;
            all = kept;
            all.push(CompactionCandidate {
                id: 1000 + rewritten,
                cold: true,
                len,
                live_bytes,
                live_entries,
                ..full(0)
            });
        }
        let held: u64 = all.iter().map(|c| c.len).sum();
        let live: u64 = all.iter().map(|c| c.live_bytes).sum();
        assert!(held < live * 3 / 2 + 3 * SEGMENT, "{held} of {live}");
        assert!(rewritten <= live, "{rewritten} of {live}");
    }

    #[test]
    fn chooses_only_what_fits_on_disk() {
        let all: Vec<_> = (0..20).map(|id| live(id, 20)).collect();
        let free_bytes = cold_bytes(2 * all[0].live_entries, 2 * all[0].live_bytes);
        assert_eq!(choose(&all, CompactionLimits { free_bytes, ..BOUNDS }).unwrap().ids, [0, 1]);
        assert_eq!(choose(&all, CompactionLimits { free_bytes: 4096, ..BOUNDS }), None);
    }

    #[test]
    fn merges_many_small_segments() {
        let small = |id: u64| {
            let live_bytes = (id + 1) << 20;
            let len = cold_bytes(10, live_bytes);
            CompactionCandidate { cold: true, len, live_bytes, live_entries: 10, ..full(id) }
        };
        let all: Vec<_> = (0..8).map(small).collect();
        assert_eq!(ids(&all), []);
        let all: Vec<_> = (0..9).map(small).collect();
        assert_eq!(ids(&all), (0..9).collect::<Vec<_>>());
    }

    #[test]
    fn gathers_scattered_segments_alone_then_together() {
        let scattered =
            |id: u64| CompactionCandidate { streams: 1000, live_rows: 1000, ..full(id) };
        let all: Vec<_> = (0..8).map(scattered).collect();
        assert_eq!(ids(&all), [], "the newest wait");
        let all: Vec<_> = (0..9).map(scattered).collect();
        assert_eq!(
            choose(&all, BOUNDS).unwrap(),
            CompactionChoice { ids: vec![0], gathers: false }
        );
        let cold = |id: u64| CompactionCandidate { cold: true, ..scattered(id) };
        let all: Vec<_> = (0..7).map(cold).chain((7..15).map(scattered)).collect();
        assert_eq!(ids(&all), []);
        let all: Vec<_> = (0..8).map(cold).chain((8..15).map(scattered)).collect();
        let choice = choose(&all, BOUNDS).unwrap();
        assert_eq!(choice, CompactionChoice { ids: (0..8).collect(), gathers: true });
        let all: Vec<_> =
            (0..80).map(|id| CompactionCandidate { gathered: true, ..cold(id) }).collect();
        assert_eq!(ids(&all), [], "ten thousand streams");
    }
}
