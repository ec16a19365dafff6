//! Chooses the rate of a node's copies: moves, catch-up, rebuilds, repairs and splits.
//!
//! Additive increase and multiplicative decrease (Chiu and Jain 1989), steered by two p99s: of
//! appends to the shards that this node leads, from their proposal until they are applied, and of
//! the syncs of its logs, which is all that a follower sees. Where one of them is above twice its
//! usual value, the rate is halved, else it grows by a fixed step.
//!
//! The usual value is measured while nothing is copied. While copies run it only falls, except at
//! the least rate: copies that slow cause little of what is measured. There it follows slowly, so
//! a node whose load has grown for other reasons does not copy at the least rate permanently.
//!
//! Too few appends for a p99 let the rate grow: no client waits on an idle node, and where appends
//! wait for the copy itself, as without another follower, none completes until it is done.
//!
//! Pure: the caller passes the totals of histograms that exist anyway, once a second.

use std::time::Duration;

use helix_wal::SYNC_BOUNDS_US;

use crate::limits::COPY_RATE_LEAST;
use crate::metrics::BOUNDS_US;

/// Ratio of the largest to the least rate, unless that would be below [`COPY_RATE_LEAST`].
const RATE_RATIO: u64 = 16;

/// Steps from zero to the largest rate.
const GROWTH_STEPS: u64 = 32;

/// Times per p99: with fewer, a single slow append would be it.
const SAMPLES_MIN: u64 = 100;

/// Steps after which a window with fewer times is discarded.
const WINDOW_STEPS_MAX: u32 = 10;

/// A p99 is slow above this multiple of the usual one, and the floor.
const SLOW_FACTOR: f64 = 2.0;
/// Differences below this are noise.
const SLOW_FLOOR_US: f64 = 1_000.0;

/// Weight of a window in the usual p99, for windows without copies and for faster ones.
const WEIGHT: f64 = 1.0 / 8.0;
/// The same for slower windows with copies at the least rate.
const WEIGHT_AT_LEAST_RATE: f64 = 1.0 / 32.0;

/// Rate of a node's copies, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyPace {
    /// Current rate in bytes per second.
    pub rate: u64,
    /// Largest rate in bytes per second.
    pub rate_max: u64,
    /// Bytes copied since the start, sent and received.
    pub copied_bytes: u64,
    /// Usual p99 of appends; `None` before enough of them.
    pub usual_append: Option<Duration>,
}

/// Load of a node by copies in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyLoad {
    Nothing,
    AtLeastRate,
    Faster,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LatencyVerdict {
    /// Not slow, as far as is known.
    Fine,
    Slow,
    /// Copies run, and the usual p99 is not known.
    Unmeasured,
}

/// The controller.
#[derive(Debug)]
pub(super) struct CopyRate {
    rate: u64,
    rate_max: u64,
    /// Bytes copied before the last step.
    copied: u64,
    appends: LatencyWatch,
    syncs: LatencyWatch,
}

impl CopyRate {
    /// Creates a controller that begins at the largest rate.
    pub(super) fn new(rate_max: u64) -> Self {
        let rate_max = rate_max.max(COPY_RATE_LEAST);
        Self {
            rate: rate_max,
            rate_max,
            copied: 0,
            appends: LatencyWatch::new(BOUNDS_US.to_vec()),
            syncs: LatencyWatch::new(SYNC_BOUNDS_US.map(u64::from).to_vec()),
        }
    }

    /// Returns the rate below which it never falls, so that copies always progress.
    fn least(&self) -> u64 {
        (self.rate_max / RATE_RATIO).max(COPY_RATE_LEAST)
    }

    /// Changes the largest rate. Returns the rate.
    pub(super) fn set_max(&mut self, rate_max: u64) -> u64 {
        let was_largest = self.rate == self.rate_max;
        self.rate_max = rate_max.max(COPY_RATE_LEAST);
        let rate = if was_largest { self.rate_max } else { self.rate };
        self.rate = rate.clamp(self.least(), self.rate_max);
        self.rate
    }

    /// Takes the totals since the start: bytes copied, and the histograms of appends and syncs.
    /// Returns the rate until the next step.
    pub(super) fn step(&mut self, copied: u64, appends: &[u64], syncs: &[u64]) -> u64 {
        let load = if copied == self.copied {
            CopyLoad::Nothing
        } else if self.rate <= self.least() {
            CopyLoad::AtLeastRate
        } else {
            CopyLoad::Faster
        };
        self.copied = copied;
        let verdicts = [self.appends.judge(load, appends), self.syncs.judge(load, syncs)];
        if load == CopyLoad::Nothing {
            // The last rate that did no harm is the best guess for the next copy.
            return self.rate;
        }
        let rate = if verdicts.contains(&LatencyVerdict::Unmeasured) {
            self.least()
        } else if verdicts.contains(&LatencyVerdict::Slow) {
            self.rate / 2
        } else {
            self.rate + self.rate_max / GROWTH_STEPS
        };
        self.rate = rate.clamp(self.least(), self.rate_max);
        self.rate
    }

    pub(super) fn pace(&self, copied_bytes: u64) -> CopyPace {
        let usual = self.appends.usual_us.map(|us| Duration::from_secs_f64(us / 1e6));
        let Self { rate, rate_max, .. } = *self;
        CopyPace { rate, rate_max, copied_bytes, usual_append: usual }
    }
}

/// The p99 of a histogram: the usual one, and the times of the current window.
#[derive(Debug)]
struct LatencyWatch {
    /// Upper bounds of the histogram's buckets, ascending; the last bucket is above all.
    bounds_us: Vec<u64>,
    usual_us: Option<f64>,
    /// Counts of the histogram before the last step.
    totals: Vec<u64>,
    /// Counts of the window. All of its steps have the same load.
    window: Vec<u64>,
    load: CopyLoad,
    steps: u32,
}

impl LatencyWatch {
    fn new(bounds_us: Vec<u64>) -> Self {
        let counts = vec![0; bounds_us.len() + 1];
        let (totals, window, load) = (counts.clone(), counts, CopyLoad::Nothing);
        Self { bounds_us, usual_us: None, totals, window, load, steps: 0 }
    }

    fn judge(&mut self, load: CopyLoad, totals: &[u64]) -> LatencyVerdict {
        if load != self.load {
            self.load = load;
            self.begin_window();
        }
        for ((count, total), before) in self.window.iter_mut().zip(totals).zip(&mut self.totals) {
            // A log that was closed takes its counts with it.
            *count += total.saturating_sub(*before);
            *before = *total;
        }
        self.steps += 1;
        if self.window.iter().sum::<u64>() < SAMPLES_MIN {
            if self.steps >= WINDOW_STEPS_MAX {
                self.begin_window();
            }
            return LatencyVerdict::Fine;
        }
        let p99_us = self.p99_us();
        self.begin_window();
        let Some(usual_us) = self.usual_us else {
            if load == CopyLoad::Faster {
                return LatencyVerdict::Unmeasured;
            }
            self.usual_us = Some(p99_us);
            return LatencyVerdict::Fine;
        };
        let weight = match load {
            CopyLoad::Nothing => WEIGHT,
            // Without copies it would not be slower.
            _ if p99_us < usual_us => WEIGHT,
            CopyLoad::AtLeastRate => WEIGHT_AT_LEAST_RATE,
            CopyLoad::Faster => 0.0,
        };
        self.usual_us = Some(usual_us + (p99_us - usual_us) * weight);
        if p99_us > usual_us * SLOW_FACTOR + SLOW_FLOOR_US {
            LatencyVerdict::Slow
        } else {
            LatencyVerdict::Fine
        }
    }

    fn begin_window(&mut self) {
        self.window.fill(0);
        self.steps = 0;
    }

    /// Returns the p99 of the window, by linear interpolation in its bucket.
    fn p99_us(&self) -> f64 {
        let rank = (self.window.iter().sum::<u64>() * 99).div_ceil(100);
        let (mut below, mut low) = (0, 0);
        for (count, high) in self.window.iter().zip(&self.bounds_us) {
            if below + count >= rank {
                let share = (rank - below) as f64 / (*count).max(1) as f64;
                return low as f64 + (high - low) as f64 * share;
            }
            (below, low) = (below + count, *high);
        }
        low as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 160 << 20;
    const LEAST: u64 = MAX / RATE_RATIO;
    const GROWTH: u64 = MAX / GROWTH_STEPS;
    /// Appends that take as long as usual, and the same for slow ones.
    const USUAL_US: u64 = 2_000;
    const SLOW_US: u64 = 50_000;

    /// A node of which each step tells the appends, the syncs and the bytes copied.
    struct Plant {
        controller: CopyRate,
        appends: Vec<u64>,
        syncs: Vec<u64>,
        copied: u64,
    }

    impl Plant {
        fn new() -> Self {
            let controller = CopyRate::new(MAX);
            let (appends, syncs) =
                (vec![0; BOUNDS_US.len() + 1], vec![0; SYNC_BOUNDS_US.len() + 1]);
            Self { controller, appends, syncs, copied: 0 }
        }

        /// As [`Self::new`], after a second of usual appends and syncs without copies.
        fn measured() -> Self {
            let mut plant = Self::new();
            plant.sync(1_000, USUAL_US);
            plant.idle(1_000, USUAL_US);
            plant
        }

        fn sync(&mut self, count: u64, time_us: u64) {
            let bucket = SYNC_BOUNDS_US.partition_point(|bound| u64::from(*bound) < time_us);
            self.syncs[bucket] += count;
        }

        fn step(&mut self, appends: u64, time_us: u64) -> u64 {
            self.appends[BOUNDS_US.partition_point(|bound| *bound < time_us)] += appends;
            self.controller.step(self.copied, &self.appends, &self.syncs)
        }

        /// One step without copies.
        fn idle(&mut self, appends: u64, time_us: u64) -> u64 {
            self.step(appends, time_us)
        }

        /// One step in which the node copies as fast as it may.
        fn copy(&mut self, appends: u64, time_us: u64) -> u64 {
            self.copied += self.controller.rate;
            self.step(appends, time_us)
        }

        fn usual_us(&self) -> f64 {
            self.controller.appends.usual_us.expect("it was measured")
        }
    }

    #[test]
    fn slow_appends_halve_the_rate_and_usual_ones_let_it_grow() {
        let mut plant = Plant::measured();
        assert_eq!(plant.copy(1_000, USUAL_US), MAX, "it begins at the largest rate");
        assert_eq!(plant.copy(1_000, SLOW_US), MAX / 2);
        assert_eq!(plant.copy(1_000, SLOW_US), MAX / 4);
        assert_eq!(plant.copy(1_000, USUAL_US), MAX / 4 + GROWTH);
        assert_eq!(plant.copy(1_000, USUAL_US), MAX / 4 + 2 * GROWTH);
        assert_eq!(plant.idle(1_000, SLOW_US), MAX / 4 + 2 * GROWTH, "nothing was copied");
    }

    #[test]
    fn rate_stays_between_its_bounds() {
        let mut plant = Plant::measured();
        for _ in 0..8 {
            plant.copy(1_000, SLOW_US);
        }
        assert_eq!(plant.controller.rate, LEAST, "copies always progress");
        for _ in 0..GROWTH_STEPS {
            plant.copy(1_000, USUAL_US);
        }
        assert_eq!(plant.controller.rate, MAX);
    }

    #[test]
    fn appends_up_to_twice_as_slow_are_usual() {
        let mut plant = Plant::measured();
        // 99 % are in the bucket below, so the p99 is its bound: 2 ms. 5 ms are more than twice
        // of that and the floor only from the other end of that bucket.
        let usual = plant.usual_us();
        assert!((usual - 1_990.0).abs() < 20.0, "{usual}");
        plant.appends[6] += 10;
        assert_eq!(plant.copy(1_000, USUAL_US), MAX, "a few slow ones are not the p99");
        plant.appends[6] += 20;
        assert_eq!(plant.copy(980, USUAL_US), MAX, "3.5 ms");
        assert_eq!(plant.copy(1_000, 5_000), MAX, "4.97 ms");
        assert_eq!(plant.copy(1_000, 10_000), MAX / 2);
    }

    #[test]
    fn differences_of_microseconds_are_noise() {
        let mut plant = Plant::new();
        plant.idle(1_000, 50);
        assert_eq!(plant.copy(1_000, 1_000), MAX, "20 times as slow");
        assert_eq!(plant.copy(1_000, 2_000), MAX / 2);
    }

    #[test]
    fn few_appends_let_the_rate_grow() {
        let mut plant = Plant::measured();
        plant.copy(1_000, SLOW_US);
        plant.copy(1_000, SLOW_US);
        let mut rate = plant.controller.rate;
        for step in 1..=2 * WINDOW_STEPS_MAX {
            let grown = plant.copy(9, SLOW_US);
            assert_eq!(grown, (rate + GROWTH).min(MAX), "step {step}");
            rate = grown;
        }
        // Enough in several steps are judged together.
        assert_eq!(plant.copy(60, SLOW_US), rate + GROWTH);
        assert_eq!(plant.copy(60, SLOW_US), (rate + GROWTH) / 2);
    }

    #[test]
    fn syncs_steer_the_rate_of_a_node_without_appends() {
        let mut plant = Plant::measured();
        plant.sync(200, SLOW_US);
        assert_eq!(plant.copy(0, 0), MAX / 2);
        plant.sync(200, USUAL_US);
        assert_eq!(plant.copy(0, 0), MAX / 2 + GROWTH);
        // A log was closed: its syncs are no longer part of the sum.
        plant.syncs.fill(0);
        assert_eq!(plant.copy(0, 0), MAX / 2 + 2 * GROWTH);
    }

    #[test]
    fn node_that_begins_with_copies_measures_at_the_least_rate() {
        let mut plant = Plant::new();
        assert_eq!(plant.copy(10, SLOW_US), MAX, "it may be idle");
        assert_eq!(plant.copy(1_000, SLOW_US), LEAST);
        assert_eq!(plant.copy(1_000, USUAL_US), LEAST + GROWTH, "this was measured");
        assert_eq!(plant.copy(1_000, SLOW_US), LEAST, "and is known now");
    }

    #[test]
    fn usual_p99_is_remembered_and_ages_slowly() {
        let mut plant = Plant::measured();
        let usual = plant.usual_us();
        plant.copy(1_000, SLOW_US);
        plant.copy(1_000, SLOW_US);
        assert_eq!(plant.usual_us(), usual, "copies make appends slow, not the other load");
        plant.copy(1_000, 100);
        assert!(plant.usual_us() < usual, "without copies they would not be slower");
        // A load that has grown for other reasons: the copies are slow, and appends stay slow.
        while plant.copy(1_000, SLOW_US) > LEAST {}
        let steps = (0..60).take_while(|_| plant.copy(1_000, SLOW_US) == LEAST).count();
        assert!((10..40).contains(&steps), "{steps}");
    }

    #[test]
    fn appends_recover_from_copies_and_the_rate_settles() {
        // A disk that serves appends beside 48 MiB/s of copies, and makes them wait beyond.
        const DISK: u64 = 48 << 20;
        let mut plant = Plant::measured();
        let (mut slow, mut copied) = (0, 0);
        for step in 0..600 {
            let is_over = plant.controller.rate > DISK;
            let before = plant.controller.rate;
            let rate = plant.copy(1_000, if is_over { SLOW_US } else { USUAL_US });
            if step >= 4 {
                assert!(rate <= DISK + GROWTH, "step {step}: {rate}");
                assert!(rate >= DISK / 2, "step {step}: {rate}");
                slow += u32::from(is_over);
                copied += before;
            }
            assert!(!is_over || rate <= before / 2, "appends recover in the next step");
        }
        assert!(slow <= 600 / 5, "appends were slow in {slow} of 600 steps");
        let mean = copied / 596;
        assert!(mean > DISK * 2 / 3, "{mean}");
    }

    #[test]
    fn largest_rate_changes_while_copies_run() {
        let mut plant = Plant::measured();
        assert_eq!(plant.controller.set_max(2 * MAX), 2 * MAX, "it was not lowered");
        plant.copy(1_000, SLOW_US);
        assert_eq!(plant.controller.set_max(4 * MAX), MAX, "it grows from where it is");
        assert_eq!(plant.controller.set_max(MAX / 4), MAX / 4);
        assert_eq!(plant.controller.set_max(1), COPY_RATE_LEAST);
        assert_eq!(plant.copy(1_000, SLOW_US), COPY_RATE_LEAST);
    }
}
