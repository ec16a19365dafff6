//! Which segments a compaction rewrites next. Pure.
//!
//! Three reasons, in this order. **Dead**: the segments hold much more than what is live in them.
//! **Small**: many small cold segments become one. **Scattered**: a segment holds so many streams
//! that reading one of them means a seek for every entry; it is rewritten by stream, and eight that
//! were become eight with an eighth of the streams each. What is neither is never touched: where a
//! few busy streams are kept equally long, whole segments become free by themselves.

use crate::cold::cold_bytes;

/// Segments with more streams than this are scattered: at 64 MiB, 256 KiB of each.
pub(crate) const STREAMS_MAX: u32 = 256;
/// So many scattered segments are rewritten together; of those that were never rewritten so many
/// newest ones wait: they are read as they are written, or trimmed soon.
pub(crate) const SCATTERED_AT_ONCE: usize = 8;
/// So many small cold segments are left alone.
const SMALL_MAX: usize = 8;
/// Fewer than this are not worth it.
const SMALL_MIN: usize = 4;
/// Rows of an entry in the two tables of a footer, and that of a share in the directory.
const ENTRY_ROWS_BYTES: u64 = 73;
const SHARE_BYTES: u64 = 49;
/// Most rows of streams that one compaction moves: they are kept in memory meanwhile.
const ROWS_MAX: usize = 64 << 10;

/// A sealed segment whose every entry has left the Raft log, undamaged and with something live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub id: u64,
    /// First index in it: its age.
    pub first: u64,
    pub cold: bool,
    /// Written from scattered ones: cannot be gathered better.
    pub gathered: bool,
    /// Bytes of the file.
    pub len: u64,
    pub live_bytes: u64,
    pub live_entries: u64,
    pub live_rows: usize,
    pub streams: u32,
}

impl Candidate {
    /// About what its live entries take of a larger file: their frames and rows of the tables.
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

/// What to rewrite, and whether the result counts as gathered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    pub ids: Vec<u64>,
    pub gathers: bool,
}

/// Bounds of one choice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub segment_bytes: u64,
    /// What the log may hold beyond half as much again as is live.
    pub slack: u64,
    /// What the result may take on the disk.
    pub room: u64,
}

/// What to rewrite next.
pub(crate) fn choose(all: &[Candidate], bounds: Bounds) -> Option<Choice> {
    dead(all, bounds).or_else(|| small(all, bounds)).or_else(|| scattered(all, bounds.room))
}

/// Those with the least live share first, up to one new segment.
fn dead(all: &[Candidate], bounds: Bounds) -> Option<Choice> {
    let held: u64 = all.iter().map(|c| c.len).sum();
    let needed: u64 = all.iter().map(Candidate::needed).sum();
    if 2 * held <= 3 * needed + 2 * bounds.slack {
        return None;
    }
    let mut dead: Vec<&Candidate> = all.iter().filter(|c| c.is_dead()).collect();
    let share = |c: &&Candidate| c.needed().saturating_mul(1000) / c.len.max(1);
    dead.sort_by_key(|c| (share(c), c.id));
    let taken = take(&dead, bounds.segment_bytes, bounds.room);
    // A file of its own has its price too: it must be worth that.
    let freed: u64 = taken.iter().map(|c| c.len).sum();
    (2 * freed >= 3 * file_bytes(&taken)).then(|| chosen(&taken)).flatten()
}

/// The smallest ones, up to one new segment.
fn small(all: &[Candidate], bounds: Bounds) -> Option<Choice> {
    let is_small = |c: &&Candidate| c.cold && 4 * c.len < bounds.segment_bytes;
    let mut small: Vec<&Candidate> = all.iter().filter(is_small).collect();
    if small.len() <= SMALL_MAX {
        return None;
    }
    small.sort_by_key(|c| (c.len, c.id));
    let taken = take(&small, bounds.segment_bytes, bounds.room);
    if taken.len() >= SMALL_MIN { chosen(&taken) } else { None }
}

fn scattered(all: &[Candidate], room: u64) -> Option<Choice> {
    let mut scattered: Vec<&Candidate> = all.iter().filter(|c| c.is_scattered()).collect();
    scattered.sort_by_key(|c| (c.first, c.id));
    let (cold, chain): (Vec<&Candidate>, Vec<&Candidate>) =
        scattered.into_iter().partition(|c| c.cold);
    if let Some(oldest) = cold.get(..SCATTERED_AT_ONCE) {
        let taken = take(oldest, u64::MAX, room);
        if taken.len() > 1 {
            return chosen(&taken).map(|choice| Choice { gathers: true, ..choice });
        }
    }
    let oldest = chain.first().filter(|_| chain.len() > SCATTERED_AT_ONCE)?;
    chosen(&take(&[*oldest], u64::MAX, room))
}

/// Bytes of one file for what is live in all of them.
fn file_bytes(of: &[&Candidate]) -> u64 {
    let entries = of.iter().map(|c| c.live_entries).sum();
    cold_bytes(entries, of.iter().map(|c| c.live_bytes).sum())
}

/// The first ones that fit together, without those that do not.
fn take<'a>(from: &[&'a Candidate], bytes_max: u64, room: u64) -> Vec<&'a Candidate> {
    let mut sum = (0, 0, 0);
    let mut taken: Vec<&Candidate> = Vec::new();
    for c in from {
        let (bytes, entries, rows) =
            (sum.0 + c.live_bytes, sum.1 + c.live_entries, sum.2 + c.live_rows);
        let is_little = bytes <= bytes_max && rows <= ROWS_MAX;
        if (taken.is_empty() || is_little) && cold_bytes(entries, bytes) <= room {
            taken.push(c);
            sum = (bytes, entries, rows);
        }
    }
    taken
}

fn chosen(taken: &[&Candidate]) -> Option<Choice> {
    let gathers = taken.iter().all(|c| c.gathered);
    let ids: Vec<u64> = taken.iter().map(|c| c.id).collect();
    (!ids.is_empty()).then_some(Choice { ids, gathers })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 64 << 20;
    const BOUNDS: Bounds = Bounds { segment_bytes: SEGMENT, slack: 2 * SEGMENT, room: u64::MAX };

    fn full(id: u64) -> Candidate {
        Candidate {
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

    fn live(id: u64, percent: u64) -> Candidate {
        let whole = full(id);
        Candidate {
            live_bytes: whole.live_bytes * percent / 100,
            live_entries: whole.live_entries * percent / 100,
            ..whole
        }
    }

    fn ids(all: &[Candidate]) -> Vec<u64> {
        choose(all, BOUNDS).map_or(Vec::new(), |choice| choice.ids)
    }

    #[test]
    fn segments_that_are_full_of_live_entries_are_left_alone() {
        let all: Vec<_> = (0..100).map(full).collect();
        assert_eq!(ids(&all), []);
        // Also where the entries are so small that their rows take as much as they do.
        let tiny = |id| Candidate { live_bytes: 30 << 20, live_entries: 400_000, ..full(id) };
        let all: Vec<_> = (0..100).map(tiny).collect();
        assert_eq!(ids(&all), []);
    }

    #[test]
    fn a_front_that_is_about_to_go_by_itself_is_left_alone() {
        let mut all: Vec<_> = (0..20).map(full).collect();
        all[0] = live(0, 5);
        all[1] = live(1, 50);
        assert_eq!(ids(&all), []);
    }

    #[test]
    fn the_most_dead_go_first_and_together_until_too_little_is_dead() {
        let mut all: Vec<_> = (0..20).map(|id| live(id, 40)).collect();
        all[7] = live(7, 2);
        all[9] = live(9, 3);
        assert_eq!(ids(&all), [7, 9, 0, 1]);
        // Carried out again and again it comes to an end, within the bound.
        let mut rewritten = 0;
        while let Some(choice) = choose(&all, BOUNDS) {
            let (gone, kept): (Vec<_>, Vec<_>) =
                all.iter().copied().partition(|c| choice.ids.contains(&c.id));
            let sum = |of: fn(&Candidate) -> u64| gone.iter().map(of).sum::<u64>();
            let (live_bytes, live_entries) = (sum(|c| c.live_bytes), sum(|c| c.live_entries));
            let len = cold_bytes(live_entries, live_bytes);
            rewritten += len;
            all = kept;
            all.push(Candidate {
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
    fn no_more_is_taken_than_there_is_room_for() {
        let all: Vec<_> = (0..20).map(|id| live(id, 20)).collect();
        let room = cold_bytes(2 * all[0].live_entries, 2 * all[0].live_bytes);
        assert_eq!(choose(&all, Bounds { room, ..BOUNDS }).unwrap().ids, [0, 1]);
        assert_eq!(choose(&all, Bounds { room: 4096, ..BOUNDS }), None);
    }

    #[test]
    fn many_small_ones_become_one() {
        let small = |id: u64| {
            let live_bytes = (id + 1) << 20;
            let len = cold_bytes(10, live_bytes);
            Candidate { cold: true, len, live_bytes, live_entries: 10, ..full(id) }
        };
        let all: Vec<_> = (0..8).map(small).collect();
        assert_eq!(ids(&all), []);
        let all: Vec<_> = (0..9).map(small).collect();
        assert_eq!(ids(&all), (0..9).collect::<Vec<_>>());
    }

    #[test]
    fn scattered_ones_are_gathered_once_alone_and_once_together() {
        let scattered = |id: u64| Candidate { streams: 1000, live_rows: 1000, ..full(id) };
        let all: Vec<_> = (0..8).map(scattered).collect();
        assert_eq!(ids(&all), [], "the newest wait");
        let all: Vec<_> = (0..9).map(scattered).collect();
        assert_eq!(choose(&all, BOUNDS).unwrap(), Choice { ids: vec![0], gathers: false });
        let cold = |id: u64| Candidate { cold: true, ..scattered(id) };
        let all: Vec<_> = (0..7).map(cold).chain((7..15).map(scattered)).collect();
        assert_eq!(ids(&all), []);
        let all: Vec<_> = (0..8).map(cold).chain((8..15).map(scattered)).collect();
        let choice = choose(&all, BOUNDS).unwrap();
        assert_eq!(choice, Choice { ids: (0..8).collect(), gathers: true });
        let all: Vec<_> = (0..80).map(|id| Candidate { gathered: true, ..cold(id) }).collect();
        assert_eq!(ids(&all), [], "ten thousand streams");
    }
}
