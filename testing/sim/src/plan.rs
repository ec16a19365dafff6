//! What a run is like, drawn from its seed. Every kind of fault is on in half of the runs only, so
//! that runs differ in what they leave out as well; a few have none at all. A third of them have a
//! theme: the kinds that make one another worse, often, and few others.

use std::time::Duration;

use helix_wal::storage::CacheMode;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};

use crate::disks::DiskShape;

/// Kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Partition,
    OneWay,
    NonTransitive,
    Hold,
    Loss,
    Reset,
    Tamper,
    SlowLink,
    PowerLoss,
    PowerLossMidWrite,
    PowerLossOfAll,
    Kill,
    Stop,
    SyncError,
    SyncErrorOfAll,
    WriteError,
    Stall,
    Full,
    FilledUp,
    Damage,
    ClockJump,
    Wipe,
    Election,
    Transfer,
    Drain,
    Grow,
}

impl Kind {
    const ALL: [Self; 26] = [
        Self::Partition,
        Self::OneWay,
        Self::NonTransitive,
        Self::Hold,
        Self::Loss,
        Self::Reset,
        Self::Tamper,
        Self::SlowLink,
        Self::PowerLoss,
        Self::PowerLossMidWrite,
        Self::PowerLossOfAll,
        Self::Kill,
        Self::Stop,
        Self::SyncError,
        Self::SyncErrorOfAll,
        Self::WriteError,
        Self::Stall,
        Self::Full,
        Self::FilledUp,
        Self::Damage,
        Self::ClockJump,
        Self::Wipe,
        Self::Election,
        Self::Transfer,
        Self::Drain,
        Self::Grow,
    ];
}

/// What a run is mostly about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Theme {
    /// Writes and syncs fail, and then the power does.
    Disks,
    /// There is no room, and nodes start without any.
    Space,
    /// Who leads changes all the time, and votes are forgotten if they can be.
    Votes,
    /// What is stored turns bad.
    Damage,
    /// Logs part, and are brought together again.
    Branches,
    /// Answers are lost.
    Answers,
}

impl Theme {
    const ALL: [Self; 6] =
        [Self::Disks, Self::Space, Self::Votes, Self::Damage, Self::Branches, Self::Answers];

    fn kinds(self) -> &'static [Kind] {
        use Kind::*;
        match self {
            Self::Disks => &[
                SyncError,
                SyncErrorOfAll,
                WriteError,
                PowerLoss,
                PowerLossMidWrite,
                PowerLossOfAll,
            ],
            Self::Space => &[Full, FilledUp, Full, FilledUp, Kill, PowerLoss],
            Self::Votes => &[Election, PowerLoss, PowerLossOfAll, Kill, Stall],
            Self::Damage => &[Damage, Damage, PowerLoss, Stop, Partition],
            Self::Branches => &[Partition, OneWay, Hold, Kill, PowerLoss, Stall],
            Self::Answers => &[Partition, OneWay, NonTransitive, Reset, Kill, Loss],
        }
    }
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub nodes: u64,
    pub shards: u64,
    pub partitions: u32,
    /// How long the cluster is broken and written to.
    pub duration: Duration,
    /// Mean time between two faults.
    pub gap: Duration,
    /// Some more often than once, where they are to come more often.
    pub kinds: Vec<Kind>,
    pub theme: Option<Theme>,
    pub segment_bytes: u64,
    pub tail_bytes: usize,
    pub checkpoint_bytes: u64,
    pub catch_up_bytes: u64,
    pub retention_bytes: Option<u64>,
    /// Bytes a second that each node reads of its own logs, to find damage.
    pub scrub_rate: u64,
    pub latency_max: Duration,
    /// Machines in the order in which they take their turns.
    pub order: Vec<u64>,
    pub disks: Vec<DiskShape>,
    pub clock_errors_us: Vec<i64>,
    pub sessions: u32,
    pub unary: u32,
    pub plain: u32,
    pub conditional: u32,
    pub repeaters: u32,
    pub trims: bool,
    pub records_max: u32,
    /// Mean pause of a producer between two batches.
    pub pace: Duration,
}

impl Plan {
    pub fn new(seed: u64) -> Self {
        Self::of(seed, None)
    }

    /// What the seed draws, with this theme whether it draws that or not.
    pub fn of(seed: u64, theme: Option<Theme>) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let nodes = if rng.random_bool(0.75) { 3 } else { 5 };
        let shards = *[1, 1, 2, 3].get(rng.random_range(0..4)).unwrap_or(&1);
        let mut kinds: Vec<Kind> = Kind::ALL.into_iter().filter(|_| rng.random_bool(0.5)).collect();
        let drawn = match rng.random_bool(0.33) {
            true => Theme::ALL.choose(&mut rng).copied(),
            false => None,
        };
        let theme = theme.or(drawn);
        let mut gap = Duration::from_millis(rng.random_range(300..=3_000));
        if let Some(theme) = theme {
            kinds.retain(|_| rng.random_bool(0.15));
            kinds.extend(theme.kinds());
            gap /= 2;
        } else if rng.random_bool(0.05) {
            kinds.clear();
        }
        if nodes == 5 {
            // A cluster has no more members than that.
            kinds.retain(|kind| *kind != Kind::Grow);
        }
        let disk = |rng: &mut StdRng| DiskShape {
            cache: match rng.random_range(0..4) {
                0 => CacheMode::Never,
                1 => CacheMode::Sometimes,
                _ => CacheMode::Always,
            },
            direct_io: rng.random_bool(0.5),
            pace_max: Duration::from_micros(match rng.random_range(0..4) {
                0 => 0,
                1 => 1_000,
                2 => 8_000,
                _ => 50_000,
            }),
        };
        let machines = nodes + u64::from(kinds.contains(&Kind::Grow));
        let disks = (0..machines).map(|_| disk(&mut rng)).collect();
        let skews = kinds.contains(&Kind::ClockJump);
        let minutes = 60_000_000;
        let error = |rng: &mut StdRng| match skews {
            true => rng.random_range(-10 * minutes..=10 * minutes),
            false => rng.random_range(-50_000..=50_000),
        };
        let clock_errors_us = (0..machines).map(|_| error(&mut rng)).collect();
        let mut order: Vec<u64> = (1..=machines).collect();
        order.shuffle(&mut rng);
        Self {
            seed,
            nodes,
            order,
            shards,
            partitions: rng.random_range(1..=16),
            duration: Duration::from_secs(match rng.random_bool(0.5) {
                true => rng.random_range(15..=45),
                false => rng.random_range(60..=300),
            }),
            gap,
            kinds,
            theme,
            segment_bytes: 64 << 10 << rng.random_range(0..4),
            tail_bytes: 4 << 10 << rng.random_range(0..6),
            checkpoint_bytes: 16 << 10 << rng.random_range(0..5),
            catch_up_bytes: if rng.random_bool(0.5) { 64 << 10 } else { 4 << 30 },
            retention_bytes: rng.random_bool(0.2).then_some(64 << 10),
            // Slower, and a round through a long run's logs outlasts the time for repairs.
            scrub_rate: 2 << 20 << rng.random_range(0..5),
            latency_max: Duration::from_millis(rng.random_range(1..=20)),
            disks,
            clock_errors_us,
            sessions: rng.random_range(1..=4),
            unary: rng.random_range(1..=3),
            plain: rng.random_range(0..=2),
            conditional: rng.random_range(0..=1),
            repeaters: rng.random_range(0..=1),
            trims: rng.random_bool(0.4),
            records_max: if rng.random_bool(0.3) { 40 } else { rng.random_range(1..=12) },
            pace: Duration::from_millis(rng.random_range(5..=60)),
        }
    }

    /// Machines that there are: the nodes that form the cluster, and perhaps one that may join.
    pub fn machines(&self) -> u64 {
        self.disks.len() as u64
    }

    pub fn host(node: u64) -> String {
        format!("n{node}")
    }
}
