//! Corruption matrix: flips every bit and truncates to every length each file of a log, one at a
//! time, for each format version. Every damage must fall into one of four classes. `classify`
//! panics on a wrong payload, a different vote, or silently missing entries.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use helix_wal::storage::SimulatedDisk;

use crate::common::{PrintOnPanic, TestRng, seed};
use crate::corruption::{DamageClass, Golden, classify, files};
use crate::golden;
use crate::truth::Truth;

/// One damage in this many is tested by default. `HELIX_SHARE=1` tests all (`just
/// corruption-matrix`).
const SHARE: u64 = 1000;

/// Bytes of a file in one unit of work.
const PIECE: usize = 1024;

/// Counts by kind of damage (bits, lengths) and class.
type Counts = BTreeMap<(&'static str, DamageClass), u64>;

/// A closed log, its expected contents, and whether its last group may be truncated.
struct Case {
    name: &'static str,
    disk: SimulatedDisk,
    truth: Truth,
    may_truncate: bool,
}

/// Returns the log of each format version, and a current log without a sync marker at its end.
fn cases() -> Vec<Case> {
    let Golden { disk, truth, .. } = Golden::unmarked();
    let unmarked = Case { name: "not marked", disk, truth, may_truncate: true };
    let golden_logs = golden::golden_logs().into_iter().map(|(name, disk, truth)| Case {
        name,
        disk,
        truth,
        may_truncate: false,
    });
    golden_logs.chain([unmarked]).collect()
}

impl Case {
    /// Tests all damages in a range of a file, or one in `share`.
    fn damage(
        &self,
        name: &str,
        start: usize,
        len: usize,
        share: u64,
        rng: &mut TestRng,
    ) -> Counts {
        let mut counts = Counts::new();
        let mut tried = |kind, what: String, disk: SimulatedDisk| {
            let _context = PrintOnPanic(format!("{}: {name}, {what}", self.name));
            let class = classify(&disk, &self.truth);
            assert!(
                self.may_truncate || class != DamageClass::Truncated,
                "a group with a sync marker was truncated"
            );
            *counts.entry((kind, class)).or_default() += 1;
        };
        for at in start..start + len {
            for bit in 0..8 {
                if rng.one_in(share) {
                    let disk = self.disk.fork();
                    disk.flip_bit(name, 8 * at as u64 + bit);
                    tried("bits", format!("bit {bit} of byte {at}"), disk);
                }
            }
            if rng.one_in(share) {
                let disk = self.disk.fork();
                disk.truncate(name, at as u64);
                tried("lengths", format!("truncated to {at} bytes"), disk);
            }
        }
        counts
    }

    fn run(&self, share: u64, base: u64) -> Counts {
        let files = files(&self.disk);
        let pieces: Vec<(&str, usize, usize)> = files
            .iter()
            .flat_map(|(name, bytes)| {
                let starts = (0..bytes.len()).step_by(PIECE);
                starts.map(|at| (name.as_str(), at, PIECE.min(bytes.len() - at)))
            })
            .collect();
        let (next, all) = (AtomicUsize::new(0), Mutex::new(Counts::new()));
        let work = || {
            while let Some((name, start, len)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                let mut rng = TestRng::new(base ^ ((*start as u64) << 8));
                let counts = self.damage(name, *start, *len, share, &mut rng);
                let mut all = all.lock().unwrap();
                for (class, count) in counts {
                    *all.entry(class).or_default() += count;
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
                scope.spawn(work);
            }
        });
        all.into_inner().unwrap()
    }
}

#[test]
fn every_damage_to_every_version_is_classified() {
    let share = std::env::var("HELIX_SHARE").map_or(SHARE, |text| text.parse().expect("a number"));
    let base = seed("matrix");
    for case in cases() {
        let begun = Instant::now();
        let counts = case.run(share, base);
        let all: u64 = counts.values().sum();
        println!(
            "{}: {all} damages, {:.0} s: {counts:?}",
            case.name,
            begun.elapsed().as_secs_f64()
        );
        let of = |class| counts.get(&("bits", class)).copied().unwrap_or(0);
        assert!(
            of(DamageClass::Equal) > 0
                && of(DamageClass::Reported) > 0
                && of(DamageClass::Refused) > 0
        );
    }
}
