//! Settings of a run, drawn from its seed.
//!
//! Every kind of fault is enabled in half of the runs, so that runs also differ in the faults that
//! they omit. A few have none. A third of the runs have a theme: related kinds often, few others.

use std::ops::RangeInclusive;
use std::time::Duration;

use helix_server::protocol::{
    COMMIT_ORDER, COMPACTION, FORGOTTEN_PRODUCERS, MORE_SHARDS, PRODUCER_OWNERS, ProtocolVersions,
};
use helix_wal::storage::CacheMode;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};

use crate::disks::DiskShape;

/// Kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    Partition,
    OneWay,
    NonTransitive,
    Hold,
    Loss,
    Reset,
    FrameTamperer,
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
    /// Bits flipped in sealed segments of several replicas at once.
    CopyDamage,
}

impl FaultKind {
    const ALL: [Self; 26] = [
        Self::Partition,
        Self::OneWay,
        Self::NonTransitive,
        Self::Hold,
        Self::Loss,
        Self::Reset,
        Self::FrameTamperer,
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

/// Group of related fault kinds that a run injects most often.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Theme {
    /// Failing writes and syncs, followed by power loss.
    Disks,
    /// Full disks, also during start.
    Space,
    /// Frequent elections with crashes that expose forgotten votes.
    Votes,
    /// Damage to stored data.
    Damage,
    /// Partitions that let logs diverge.
    Branches,
    /// Lost responses.
    Answers,
    /// Damage to several replicas at once, also during replacements, additions and fetches.
    Copies,
    /// Clocks of a minority that jump by days, with retention by time.
    Clocks,
    /// Lost requests and responses while a topic is deleted and created again.
    Recreation,
    /// A consumer group under faults of its coordinator, its members and the network.
    Groups,
    /// A topic that is compacted by key, under crashes and with replicas that are replaced.
    Tables,
    /// Principals that use each other's identities, and rights that are removed while calls wait.
    Access,
    /// Replicas on some of five to seven nodes, which move while nodes come, go and are cordoned.
    Placement,
    /// Nodes that start with an older release, are upgraded and rolled back.
    Releases,
}

impl Theme {
    /// Themes that a third of the seeds draw from. The others have draws of their own, but
    /// [`Self::Groups`], [`Self::Tables`] and [`Self::Access`], only chosen by hand: other
    /// seeds also have groups, tables and principals.
    const DRAWN: [Self; 6] =
        [Self::Disks, Self::Space, Self::Votes, Self::Damage, Self::Branches, Self::Answers];

    fn kinds(self) -> &'static [FaultKind] {
        use FaultKind::*;
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
            Self::Copies => &[CopyDamage, CopyDamage, CopyDamage, Kill, Wipe, Grow, Stall],
            Self::Clocks => {
                &[ClockJump, ClockJump, ClockJump, Transfer, Kill, Stop, Partition, Election]
            }
            Self::Recreation => {
                &[Partition, OneWay, NonTransitive, Hold, Loss, Reset, Kill, Election, PowerLoss]
            }
            Self::Access => {
                &[Partition, OneWay, Hold, Loss, Reset, Kill, PowerLoss, Stop, Transfer, Election]
            }
            Self::Groups => {
                &[Partition, OneWay, Hold, Loss, Reset, Kill, PowerLoss, Transfer, Election, Stall]
            }
            Self::Releases => {
                &[Kill, Kill, Stop, Stop, Stop, PowerLoss, Transfer, Drain, Partition]
            }
            Self::Placement => &[
                Partition,
                OneWay,
                Hold,
                Kill,
                Kill,
                Stop,
                PowerLoss,
                PowerLossMidWrite,
                Wipe,
                Transfer,
                Drain,
                Election,
                Stall,
                Grow,
            ],
            Self::Tables => &[
                Kill,
                Stop,
                PowerLoss,
                PowerLossMidWrite,
                PowerLossOfAll,
                Wipe,
                Transfer,
                Election,
                Partition,
                Stall,
            ],
        }
    }
}

/// Settings of a run's consumer group.
#[derive(Debug, Clone)]
pub struct GroupPlan {
    /// Members that run at the same time, each on its own host.
    pub members: u32,
    /// Range of session timeouts, in milliseconds.
    pub session_ms: RangeInclusive<u64>,
    /// Mean time until a member crashes, leaves or is absent.
    pub churn: Duration,
    /// Topics that are created, grown and deleted meanwhile.
    pub topics: u32,
}

impl GroupPlan {
    /// Share of the seeds with a group.
    const SHARE: f64 = 0.2;

    /// Draws from a generator of its own, so that other seeds keep their plans.
    fn draw(seed: u64, theme: Option<Theme>) -> Option<Self> {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x6772_6f75);
        let has_group = rng.random_bool(Self::SHARE);
        let shortest = rng.random_range(1_000..=4_000);
        let plan = Self {
            members: rng.random_range(2..=4),
            session_ms: shortest..=shortest + 3_000,
            churn: Duration::from_millis(rng.random_range(1_000..=8_000)),
            topics: rng.random_range(0..=2),
        };
        (has_group || theme == Some(Theme::Groups)).then_some(plan)
    }
}

/// Settings of a run's topic that is compacted by key.
#[derive(Debug, Clone, Copy)]
pub struct TablePlan {
    /// Memory of a node's maps from keys to offsets: for some keys, so that there are several
    /// passes, and shards wait for each other's.
    pub key_map_bytes: usize,
    pub cleaner_lag: Duration,
}

impl TablePlan {
    /// Share of the seeds with a table.
    const SHARE: f64 = 0.15;

    /// Draws from a generator of its own, so that other seeds keep their plans.
    ///
    /// Not with [`Theme::Copies`], whose damage must leave one whole copy of each entry to repair
    /// the others: an entry of a replica that is compacted further does not fit.
    fn draw(seed: u64, theme: Option<Theme>) -> Option<Self> {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x7461_626c);
        let has_table = rng.random_bool(Self::SHARE);
        let plan = Self {
            key_map_bytes: rng.random_range(150..2_500),
            cleaner_lag: Duration::from_secs(rng.random_range(2..=10)),
        };
        let has_table = has_table && theme != Some(Theme::Copies);
        (has_table || theme == Some(Theme::Tables)).then_some(plan)
    }
}

/// Settings of a run whose shards have replicas on some of the nodes.
#[derive(Debug, Clone)]
pub struct PlacementPlan {
    /// Nodes that form the cluster.
    pub founders: u64,
    /// Founders and spare machines, which join and leave.
    pub machines: u64,
    pub shards: u64,
    /// Numbers of replicas that the operator chooses from.
    pub replicas: Vec<u32>,
    /// Mean pause between changes of the placement.
    pub pause: Duration,
    /// Racks of the nodes, in turn; 0 for nodes that state none.
    pub racks: u64,
    /// Time after which others take the replicas of a node that is down.
    pub replace_down_after: Option<Duration>,
}

/// An older release that nodes run at first.
#[derive(Debug, Clone)]
pub struct OlderRelease {
    /// Newest protocol version that it speaks.
    pub newest: u32,
    /// Node that runs it at every start before `until`, so that the others can go back to it.
    pub keeper: u64,
    /// Share of the duration with faults after which nodes start with this release only.
    pub until: f64,
}

impl OlderRelease {
    /// Share of the seeds with two releases.
    const SHARE: f64 = 0.1;

    /// Draws from a generator of its own, so that other seeds keep their plans.
    fn draw(plan: &SimulationPlan) -> Option<Self> {
        let mut rng = StdRng::seed_from_u64(plan.seed ^ 0x7265_6c65);
        let is_drawn = rng.random_bool(Self::SHARE) || plan.theme == Some(Theme::Releases);
        // The clients use what the older release has from its start on.
        let oldest = match plan {
            _ if plan.placement.is_some() => MORE_SHARDS,
            _ if plan.group.is_some() || plan.has_principals || plan.has_tokens => COMMIT_ORDER,
            // Its reuse of a sequence is noticed by the checksum of batches.
            _ if plan.raw_producers > 0 => PRODUCER_OWNERS,
            _ if plan.table.is_some() => COMPACTION,
            _ => FORGOTTEN_PRODUCERS,
        };
        let newest = rng.random_range(oldest..ProtocolVersions::OWN.newest);
        let keeper = rng.random_range(1..=plan.nodes);
        let until = rng.random_range(0.2..1.0);
        is_drawn.then_some(Self { newest, keeper, until })
    }
}

impl PlacementPlan {
    /// Share of the seeds with a placement.
    const SHARE: f64 = 0.1;

    /// Returns the plan of a large cluster: nine founders, a shard for every third machine.
    fn with_machines(self, machines: u64) -> Self {
        Self { founders: 9, machines, shards: machines / 3, ..self }
    }

    /// Draws from a generator of its own, so that other seeds keep their plans.
    fn draw(seed: u64, is_chosen: bool) -> Option<Self> {
        let mut rng = StdRng::seed_from_u64(seed ^ 0x706c_6163);
        let has_placement = rng.random_bool(Self::SHARE);
        let founders = *[3, 3, 5, 7].choose(&mut rng).unwrap_or(&3);
        let plan = Self {
            founders,
            machines: rng.random_range(5..=7).max(founders),
            shards: rng.random_range(2..=4),
            replicas: match rng.random_bool(0.2) {
                true => vec![1, 3],
                false => vec![3, 3, 5],
            },
            pause: Duration::from_millis(rng.random_range(200..=1_500)),
            // Drawn last, so that seeds keep their plans.
            racks: if rng.random_bool(0.5) { rng.random_range(2..=3) } else { 0 },
            replace_down_after: rng
                .random_bool(0.3)
                .then(|| Duration::from_millis(rng.random_range(1_000..=3_000))),
        };
        (has_placement || is_chosen).then_some(plan)
    }
}

/// Settings of one run.
#[derive(Debug, Clone)]
pub struct SimulationPlan {
    pub seed: u64,
    pub nodes: u64,
    pub shards: u64,
    pub partitions: u32,
    /// Duration of faults and writes.
    pub duration: Duration,
    /// Mean interval between faults.
    pub gap: Duration,
    /// Enabled kinds. A kind that is listed twice comes twice as often.
    pub kinds: Vec<FaultKind>,
    pub theme: Option<Theme>,
    pub segment_bytes: u64,
    pub tail_bytes: usize,
    pub checkpoint_bytes: u64,
    pub catch_up_bytes: u64,
    pub retention_bytes: Option<u64>,
    pub retention_us: Option<u64>,
    /// Scrub rate of each node in bytes per second.
    pub scrub_rate: u64,
    pub latency_max: Duration,
    /// Machines in the order in which turmoil runs them.
    pub order: Vec<u64>,
    pub disks: Vec<DiskShape>,
    pub clock_errors_us: Vec<i64>,
    /// Nodes whose clocks jump by days, a minority. The clocks of the others stay right. Empty: all
    /// clocks jump, by minutes.
    pub wrong_clocks: Vec<u64>,
    pub sessions: u32,
    pub unary: u32,
    pub plain: u32,
    pub conditional: u32,
    pub raw_producers: u32,
    pub trims: bool,
    /// A client calls with tokens, some of which expire. Most other clients have none.
    pub has_tokens: bool,
    /// Producers of several principals use each other's identities, and calls wait while their
    /// rights are removed.
    pub has_principals: bool,
    /// A topic is deleted and created again all the time.
    pub recreates: bool,
    pub records_max: u32,
    /// Mean pause of a producer between batches.
    pub pace: Duration,
    pub group: Option<GroupPlan>,
    pub table: Option<TablePlan>,
    pub placement: Option<PlacementPlan>,
    pub older: Option<OlderRelease>,
}

impl SimulationPlan {
    pub fn new(seed: u64) -> Self {
        Self::of(seed, None, None)
    }

    /// Draws a plan from a seed. A given theme replaces the drawn one, and a number of machines
    /// makes a placement one of a large cluster.
    pub fn of(seed: u64, theme: Option<Theme>, machines: Option<u64>) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut nodes = if rng.random_bool(0.75) { 3 } else { 5 };
        let mut shards = *[1, 1, 2, 3].get(rng.random_range(0..4)).unwrap_or(&1);
        let mut kinds: Vec<FaultKind> =
            FaultKind::ALL.into_iter().filter(|_| rng.random_bool(0.5)).collect();
        let drawn = match rng.random_bool(0.33) {
            true => Theme::DRAWN.choose(&mut rng).copied(),
            false => None,
        };
        // Generators of their own, so that the other seeds keep their plans.
        let is_of_copies = StdRng::seed_from_u64(seed ^ 0x636f_7069).random_bool(0.1);
        let drawn = if is_of_copies { Some(Theme::Copies) } else { drawn };
        let mut clock_rng = StdRng::seed_from_u64(seed ^ 0x636c_6f63);
        let drawn = if clock_rng.random_bool(0.1) { Some(Theme::Clocks) } else { drawn };
        let placement = PlacementPlan::draw(seed, theme == Some(Theme::Placement));
        let placement = placement.filter(|_| theme.is_none_or(|it| it == Theme::Placement));
        let placement = placement.map(|plan| match machines {
            Some(machines) => plan.with_machines(machines),
            None => plan,
        });
        let drawn = if placement.is_some() { Some(Theme::Placement) } else { drawn };
        let theme = theme.or(drawn);
        if let Some(placement) = &placement {
            (nodes, shards) = (placement.founders, placement.shards);
        }
        let mut gap = Duration::from_millis(rng.random_range(300..=3_000));
        if let Some(theme) = theme {
            kinds.retain(|_| rng.random_bool(0.15));
            kinds.extend(theme.kinds());
            gap /= 2;
        } else if rng.random_bool(0.05) {
            kinds.clear();
        }
        if let Some(placement) = &placement {
            // Damage and single replicas do not go together, nor do lost disks.
            let has_copies = !placement.replicas.contains(&1);
            kinds.retain(|kind| match kind {
                FaultKind::Damage => false,
                FaultKind::Wipe => has_copies,
                _ => true,
            });
        } else if nodes == 5 {
            // Other seeds stay below the sizes of the theme of placement.
            kinds.retain(|kind| *kind != FaultKind::Grow);
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
        let machines = match &placement {
            Some(placement) => placement.machines,
            None => nodes + u64::from(kinds.contains(&FaultKind::Grow)),
        };
        let disks = (0..machines).map(|_| disk(&mut rng)).collect();
        let of_clocks = theme == Some(Theme::Clocks);
        let skews = kinds.contains(&FaultKind::ClockJump) && !of_clocks;
        let minutes = 60_000_000;
        let error = |rng: &mut StdRng| match skews {
            true => rng.random_range(-10 * minutes..=10 * minutes),
            false => rng.random_range(-50_000..=50_000),
        };
        let clock_errors_us = (0..machines).map(|_| error(&mut rng)).collect();
        let mut order: Vec<u64> = (1..=machines).collect();
        order.shuffle(&mut rng);
        let of_copies = theme == Some(Theme::Copies);
        let mut wrong_clocks: Vec<u64> = (1..=nodes).collect();
        wrong_clocks.shuffle(&mut clock_rng);
        wrong_clocks.truncate(if of_clocks { (nodes as usize - 1) / 2 } else { 0 });
        let mut plan = Self {
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
            // Only sealed segments have copies that can be damaged at once, and are dropped while
            // there are new records.
            segment_bytes: 64
                << 10
                << if of_copies || of_clocks { 0 } else { rng.random_range(0..4) },
            tail_bytes: 4 << 10 << rng.random_range(0..6),
            checkpoint_bytes: 16 << 10 << rng.random_range(0..5),
            catch_up_bytes: if rng.random_bool(0.5) { 64 << 10 } else { 4 << 30 },
            retention_bytes: rng.random_bool(0.2).then_some(64 << 10),
            // At a lower rate a scrub of a long run's logs takes longer than the time for repairs.
            scrub_rate: 2 << 20 << rng.random_range(0..5),
            latency_max: Duration::from_millis(rng.random_range(1..=20)),
            disks,
            clock_errors_us,
            wrong_clocks,
            retention_us: None,
            sessions: rng.random_range(1..=4),
            unary: rng.random_range(1..=3),
            plain: rng.random_range(0..=2),
            conditional: rng.random_range(0..=1),
            raw_producers: rng.random_range(0..=1),
            trims: rng.random_bool(0.4),
            has_tokens: false,
            // A generator of its own, so that other seeds keep their plans.
            has_principals: StdRng::seed_from_u64(seed ^ 0x7072_696e).random_bool(0.15)
                || theme == Some(Theme::Access),
            recreates: false,
            records_max: if rng.random_bool(0.3) { 40 } else { rng.random_range(1..=12) },
            pace: Duration::from_millis(rng.random_range(5..=60)),
            group: GroupPlan::draw(seed, theme),
            table: TablePlan::draw(seed, theme),
            placement,
            older: None,
        };
        if of_clocks {
            // Trims and retention by bytes drop records of any age.
            plan.retention_us = Some(clock_rng.random_range(2_000_000..=10_000_000));
            (plan.retention_bytes, plan.trims) = (None, false);
            plan.partitions = plan.partitions.min(4);
            // With fewer members a wrong clock could be a majority.
            plan.has_tokens = !plan.kinds.contains(&FaultKind::Grow);
        }
        let draws = StdRng::seed_from_u64(seed ^ 0x7265_6372).random_bool(0.1);
        if theme == Some(Theme::Recreation) || draws && theme.is_none() {
            // Its readers expect all records.
            (plan.recreates, plan.retention_bytes) = (true, None);
        }
        if skews || of_clocks {
            // Its readers measure the retention of tombstones.
            plan.table = None;
        }
        if plan.recreates || plan.retention_us.is_some() {
            // Its members expect all records of topics that only its own client changes.
            plan.group = None;
        }
        if plan.placement.is_some() {
            // Their checks expect every shard on every node.
            (plan.table, plan.has_principals, plan.recreates) = (None, false, false);
            plan.duration = plan.duration.min(Duration::from_secs(120));
        }
        plan.older = OlderRelease::draw(&plan);
        plan
    }

    /// Returns the number of members of the group that run at the same time.
    pub fn group_members(&self) -> u32 {
        self.group.as_ref().map_or(0, |group| group.members)
    }

    /// Returns the rack that a node states; empty for none.
    pub fn rack_of(&self, node: u64) -> String {
        match self.placement.as_ref().map_or(0, |placement| placement.racks) {
            0 => String::new(),
            racks => format!("r{}", node % racks),
        }
    }

    /// Returns the number of machines: the initial nodes and spare nodes, which may join.
    pub fn machines(&self) -> u64 {
        self.disks.len() as u64
    }

    pub fn host(node: u64) -> String {
        format!("n{node}")
    }
}
