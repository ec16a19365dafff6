//! Draws the next fault from a seed and the current leaders. `nemesis` injects it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};

use crate::cluster::NODES_MAX;
use crate::proxy::LinkMode;
use crate::segment_damage::SegmentFileDamage;

/// Fault and its duration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChaosFault {
    pub(crate) what: FaultAction,
    pub(crate) lasting: Duration,
}

/// Kind of fault with its targets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FaultAction {
    /// SIGKILL to all of these at once.
    Kill(Vec<u64>),
    /// SIGTERM.
    Terminate(u64),
    /// SIGKILL, until the other logs are purged of the entries that the node lacks.
    AwayUntilPurged(u64),
    /// SIGSTOP.
    Pause(Vec<u64>),
    /// The node is partitioned from all others; clients reach it.
    Isolate(u64),
    /// The node's messages do not reach the others; it receives theirs. Links that it dialled hold
    /// the forward direction, links to it the backward direction.
    BlockOutgoing(u64),
    /// The others' messages do not reach the node; they receive its messages.
    BlockIncoming(u64),
    /// Two nodes are partitioned from each other; both reach the others.
    PartitionPair(u64, u64),
    /// All nodes are partitioned from each other.
    PartitionAll,
    /// All links between nodes are slow.
    Slow(Duration),
    /// The link from clients to this node is reset, held, or loses responses.
    Clients(u64, LinkMode),
    /// Trims all trimmable partitions at random offsets, concurrently with the next fault.
    Trim { seed: u64 },
    /// Deletes a topic and creates it again while this node is down.
    Delete(u64),
    /// Drains and restarts the node.
    Drain(u64),
    /// The node loses its disk and is replaced under the same id.
    Wipe { node: u64, kills_leader: bool },
    /// One node joins and one leaves. If `is_lost`, the leaving node is dead and is replaced.
    Change { joins: u64, leaves: u64, is_lost: bool, kills_leader: bool },
    /// Every sync fails; the node must exit.
    FailSyncs(u64),
    /// Every sync takes this much longer.
    SlowSyncs(u64, Duration),
    /// The node's disk is filled up to this free space.
    FillDisk { node: u64, left_mib: u64 },
    /// One of the node's files is damaged, while it runs or while it is down.
    Damage { node: u64, what: SegmentFileDamage, is_running: bool, seed: u64 },
    /// An older copy of one of the node's segments is restored while it is down.
    Restore { node: u64, seed: u64 },
}

/// Class by which faults are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ChaosFaultKind {
    /// SIGKILLs of a leader, another node, or a majority.
    Kill,
    /// SIGSTOPs.
    Pause,
    /// Partitions between nodes.
    Partition,
    /// Nodes kept away until the others have purged what they lack.
    Absence,
    /// Trims of all trimmable partitions.
    Trim,
    /// Topics deleted and created again while a node is down.
    Deletion,
    /// Nodes drained and restarted.
    Drain,
    /// Lost disks.
    Wipe,
    /// Nodes that join and leave.
    Change,
    /// Failed syncs.
    FailedSync,
    /// Stalled disks.
    SlowSync,
    /// Full disks.
    FullDisk,
    /// Damaged files.
    Damage,
    /// Segments restored from older copies.
    Restore,
}

impl ChaosFaultKind {
    /// Reports whether the fault can happen to a single node.
    fn suits_one(self) -> bool {
        use ChaosFaultKind::{FailedSync, FullDisk, Kill, Pause, SlowSync, Trim};
        matches!(self, Kill | Pause | Trim | FailedSync | SlowSync | FullDisk)
    }

    /// Returns the plural name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill => "kills",
            Self::Pause => "pauses",
            Self::Partition => "partitions",
            Self::Absence => "absences",
            Self::Trim => "trims",
            Self::Deletion => "deleted topics",
            Self::Drain => "drains",
            Self::Wipe => "wiped disks",
            Self::Change => "membership changes",
            Self::FailedSync => "failed syncs",
            Self::SlowSync => "stalled disks",
            Self::FullDisk => "full disks",
            Self::Damage => "damaged files",
            Self::Restore => "restored segments",
        }
    }
}

/// Remaining faults by class.
pub(crate) type ChaosFaultBudget = BTreeMap<ChaosFaultKind, u32>;

/// Longest durations of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FaultDurations {
    /// Longest time until a killed node is restarted.
    pub(crate) down_max: Duration,
    /// Longest SIGSTOP.
    pub(crate) pause_max: Duration,
    /// Longest partition.
    pub(crate) partition_max: Duration,
}

impl Default for FaultDurations {
    fn default() -> Self {
        Self {
            down_max: Duration::from_secs(3),
            pause_max: Duration::from_secs(5),
            partition_max: Duration::from_secs(6),
        }
    }
}

impl FaultDurations {
    /// For a run of less than a minute.
    pub(crate) fn short() -> Self {
        Self {
            down_max: Duration::from_millis(500),
            pause_max: Duration::from_millis(1500),
            partition_max: Duration::from_millis(1800),
        }
    }
}

/// Free space on a full disk: below the reserve at which a node rejects records, above the reserve
/// for votes.
const LEFT_MIB: std::ops::Range<u64> = 130..250;

/// Draws faults from a seed.
#[derive(Debug)]
pub(crate) struct FaultSchedule {
    rng: StdRng,
    left: ChaosFaultBudget,
    durations: FaultDurations,
    /// Current nodes.
    nodes: Vec<u64>,
}

impl FaultSchedule {
    pub(crate) fn new(
        seed: u64,
        budget: ChaosFaultBudget,
        durations: FaultDurations,
        nodes: &[u64],
    ) -> Self {
        let mut left = budget;
        if nodes.len() == 1 {
            left.retain(|kind, _| kind.suits_one());
        }
        Self { rng: StdRng::seed_from_u64(seed), left, durations, nodes: nodes.to_vec() }
    }

    pub(crate) fn left(&self) -> u32 {
        self.left.values().sum()
    }

    /// Decides whether to wait for a healthy cluster before the next fault. Otherwise the fault
    /// hits a cluster that is still recovering.
    pub(crate) fn waits_for_recovery(&mut self) -> bool {
        self.rng.random_bool(0.6)
    }

    /// Draws the time between two faults.
    pub(crate) fn pause(&mut self) -> Duration {
        self.between(Duration::from_millis(50), Duration::from_millis(800))
    }

    /// Kills all nodes at once.
    pub(crate) fn kill_all(&mut self, nodes: &[u64]) -> ChaosFault {
        let lasting = self.between(Duration::ZERO, self.durations.down_max / 4);
        ChaosFault { what: FaultAction::Kill(nodes.to_vec()), lasting }
    }

    /// Draws the next fault; `None` when the budget is used up.
    pub(crate) fn next(&mut self, nodes: &[u64], leaders: &[u64]) -> Option<ChaosFault> {
        nodes.clone_into(&mut self.nodes);
        // In addition to the counted faults.
        if self.left() > 0
            && self.rng.random_bool(0.2)
            && let Some(fault) = self.extra(leaders)
        {
            return Some(fault);
        }
        let kind = self.draw()?;
        let what = self.what(kind, leaders);
        let FaultDurations { down_max, pause_max, partition_max } = self.durations;
        let (shortest, longest) = match kind {
            ChaosFaultKind::Kill
            | ChaosFaultKind::Absence
            | ChaosFaultKind::FailedSync
            | ChaosFaultKind::Deletion => (Duration::ZERO, down_max),
            ChaosFaultKind::Pause => (Duration::from_millis(100), pause_max),
            ChaosFaultKind::Partition => (Duration::from_millis(300), partition_max),
            ChaosFaultKind::SlowSync | ChaosFaultKind::FullDisk | ChaosFaultKind::Damage => {
                (partition_max / 4, partition_max)
            }
            ChaosFaultKind::Trim
            | ChaosFaultKind::Drain
            | ChaosFaultKind::Wipe
            | ChaosFaultKind::Change
            | ChaosFaultKind::Restore => (Duration::ZERO, down_max / 8),
        };
        Some(ChaosFault { what, lasting: self.between(shortest, longest) })
    }

    /// Draws a class, weighted by the remaining faults.
    fn draw(&mut self) -> Option<ChaosFaultKind> {
        let mut drawn = self.left().checked_sub(1).map(|most| self.rng.random_range(0..=most))?;
        for (kind, left) in &mut self.left {
            if drawn < *left {
                *left -= 1;
                return Some(*kind);
            }
            drawn -= *left;
        }
        None
    }

    fn what(&mut self, kind: ChaosFaultKind, leaders: &[u64]) -> FaultAction {
        match kind {
            ChaosFaultKind::Kill => FaultAction::Kill(self.victims(leaders)),
            ChaosFaultKind::Pause => FaultAction::Pause(self.victims(leaders)),
            ChaosFaultKind::Partition => self.draw_partition(leaders),
            ChaosFaultKind::Absence => FaultAction::AwayUntilPurged(self.victim(leaders)),
            ChaosFaultKind::Trim => FaultAction::Trim { seed: self.rng.random() },
            ChaosFaultKind::Deletion => FaultAction::Delete(self.victim(leaders)),
            ChaosFaultKind::Drain => FaultAction::Drain(self.victim(leaders)),
            ChaosFaultKind::Wipe => {
                let kills_leader = self.rng.random_bool(0.4);
                FaultAction::Wipe { node: self.victim(leaders), kills_leader }
            }
            ChaosFaultKind::Change => {
                let (is_lost, kills_leader) =
                    (self.rng.random_bool(0.4), self.rng.random_bool(0.4));
                let free = (1..=NODES_MAX).filter(|id| !self.nodes.contains(id));
                let joins = free.collect::<Vec<_>>().choose(&mut self.rng).copied().unwrap_or(1);
                FaultAction::Change { joins, leaves: self.victim(leaders), is_lost, kills_leader }
            }
            ChaosFaultKind::FailedSync => FaultAction::FailSyncs(self.victim(leaders)),
            ChaosFaultKind::SlowSync => {
                let longer = self.rng.random_range(300..2500);
                FaultAction::SlowSyncs(self.victim(leaders), Duration::from_millis(longer))
            }
            ChaosFaultKind::FullDisk => {
                let left_mib = self.rng.random_range(LEFT_MIB);
                FaultAction::FillDisk { node: self.victim(leaders), left_mib }
            }
            ChaosFaultKind::Damage => {
                let is_flip = self.rng.random_bool(0.7);
                let what = if is_flip {
                    SegmentFileDamage::FlippedBits
                } else {
                    SegmentFileDamage::LostSegment
                };
                let (is_running, seed) = (self.rng.random_bool(0.5), self.rng.random());
                FaultAction::Damage { node: self.victim(leaders), what, is_running, seed }
            }
            ChaosFaultKind::Restore => {
                FaultAction::Restore { node: self.victim(leaders), seed: self.rng.random() }
            }
        }
    }

    fn draw_partition(&mut self, leaders: &[u64]) -> FaultAction {
        let victim = self.victim(leaders);
        match self.rng.random_range(0..12) {
            0..5 => FaultAction::Isolate(victim),
            5..7 => FaultAction::BlockOutgoing(victim),
            7..9 => FaultAction::BlockIncoming(victim),
            9..11 => {
                let others: Vec<_> = self.nodes.iter().filter(|id| **id != victim).collect();
                match others.choose(&mut self.rng) {
                    Some(other) => FaultAction::PartitionPair(victim, **other),
                    None => FaultAction::Isolate(victim),
                }
            }
            _ => FaultAction::PartitionAll,
        }
    }

    fn extra(&mut self, leaders: &[u64]) -> Option<ChaosFault> {
        let victim = self.victim(leaders);
        let what = match self.rng.random_range(0..6) {
            0 => FaultAction::Terminate(victim),
            1 if self.nodes.len() > 1 => {
                FaultAction::Slow(Duration::from_millis(self.rng.random_range(5..60)))
            }
            2 => FaultAction::Clients(victim, LinkMode::Reset),
            3 => FaultAction::Clients(victim, LinkMode::HoldAll),
            4 | 5 => FaultAction::Clients(victim, LinkMode::DropResponses),
            _ => return None,
        };
        Some(ChaosFault {
            what,
            lasting: self.between(Duration::from_millis(100), self.durations.partition_max),
        })
    }

    /// Usually one node, usually a leader; sometimes a majority.
    fn victims(&mut self, leaders: &[u64]) -> Vec<u64> {
        if self.nodes.len() > 1 && self.rng.random_bool(1.0 / 12.0) {
            let mut nodes = self.nodes.clone();
            nodes.shuffle(&mut self.rng);
            nodes.truncate(self.nodes.len() / 2 + 1);
            return nodes;
        }
        vec![self.victim(leaders)]
    }

    fn victim(&mut self, leaders: &[u64]) -> u64 {
        let leads = self.rng.random_bool(0.7).then(|| leaders.choose(&mut self.rng)).flatten();
        let victim = leads.or_else(|| self.nodes.choose(&mut self.rng));
        *victim.expect("a cluster has nodes")
    }

    fn between(&mut self, shortest: Duration, longest: Duration) -> Duration {
        let longest = longest.max(shortest);
        // Short durations are more likely, because the interesting ones are near the election
        // timeouts.
        let part = self.rng.random_range(0.0..1.0_f64).powi(2);
        shortest + (longest - shortest).mul_f64(part)
    }
}

impl ChaosFault {
    /// Reports whether the fault leaves less than a majority reachable.
    pub(crate) fn takes_majority(&self, minority: usize) -> bool {
        match &self.what {
            FaultAction::Kill(nodes) | FaultAction::Pause(nodes) => nodes.len() > minority,
            FaultAction::Terminate(_) | FaultAction::FailSyncs(_) => minority == 0,
            FaultAction::PartitionAll => true,
            _ => false,
        }
    }

    /// Reports whether the cluster must be healthy before the fault: it takes away a replica for
    /// good, or is an operation that requires a healthy cluster.
    pub(crate) fn needs_healthy_cluster(&self) -> bool {
        use FaultAction::{AwayUntilPurged, Change, Delete, Drain, Wipe};
        self.needs_repair()
            || matches!(
                self.what,
                Change { .. } | Delete(_) | Drain(_) | Wipe { .. } | AwayUntilPurged(_)
            )
    }

    /// Reports whether a replica has to repair itself; then all replicas are read afterwards.
    pub(crate) fn needs_repair(&self) -> bool {
        matches!(self.what, FaultAction::Damage { .. } | FaultAction::Restore { .. })
    }

    /// Returns the class by which the fault is counted; extra faults have none.
    pub(crate) fn kind(&self) -> Option<ChaosFaultKind> {
        Some(match &self.what {
            FaultAction::Kill(_) => ChaosFaultKind::Kill,
            FaultAction::Pause(_) => ChaosFaultKind::Pause,
            FaultAction::Isolate(_)
            | FaultAction::BlockOutgoing(_)
            | FaultAction::BlockIncoming(_)
            | FaultAction::PartitionPair(..)
            | FaultAction::PartitionAll => ChaosFaultKind::Partition,
            FaultAction::AwayUntilPurged(_) => ChaosFaultKind::Absence,
            FaultAction::Trim { .. } => ChaosFaultKind::Trim,
            FaultAction::Delete(_) => ChaosFaultKind::Deletion,
            FaultAction::Drain(_) => ChaosFaultKind::Drain,
            FaultAction::Wipe { .. } => ChaosFaultKind::Wipe,
            FaultAction::Change { .. } => ChaosFaultKind::Change,
            FaultAction::FailSyncs(_) => ChaosFaultKind::FailedSync,
            FaultAction::SlowSyncs(..) => ChaosFaultKind::SlowSync,
            FaultAction::FillDisk { .. } => ChaosFaultKind::FullDisk,
            FaultAction::Damage { .. } => ChaosFaultKind::Damage,
            FaultAction::Restore { .. } => ChaosFaultKind::Restore,
            FaultAction::Terminate(_) | FaultAction::Slow(_) | FaultAction::Clients(..) => {
                return None;
            }
        })
    }
}

impl fmt::Display for ChaosFault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            FaultAction::Kill(nodes) => write!(formatter, "kill {nodes:?}"),
            FaultAction::Terminate(node) => write!(formatter, "terminate {node}"),
            FaultAction::AwayUntilPurged(node) => {
                write!(formatter, "{node} away until its log is purged, and")
            }
            FaultAction::Pause(nodes) => write!(formatter, "pause {nodes:?}"),
            FaultAction::Isolate(node) => write!(formatter, "isolate {node} from its peers"),
            FaultAction::BlockOutgoing(node) => write!(formatter, "block messages of {node}"),
            FaultAction::BlockIncoming(node) => write!(formatter, "block messages to {node}"),
            FaultAction::PartitionPair(a, b) => write!(formatter, "partition {a} from {b}"),
            FaultAction::PartitionAll => write!(formatter, "partition all nodes"),
            FaultAction::Slow(wait) => write!(formatter, "slow links between nodes ({wait:?})"),
            FaultAction::Clients(node, mode) => write!(formatter, "clients of {node}: {mode:?}"),
            FaultAction::Trim { .. } => write!(formatter, "trim, and"),
            FaultAction::Delete(node) => write!(formatter, "delete a topic while {node} is down"),
            FaultAction::Drain(node) => write!(formatter, "drain and restart {node}"),
            FaultAction::Wipe { node, kills_leader } => {
                write!(formatter, "{node} loses its disk{}", leader_note(*kills_leader))
            }
            FaultAction::Change { joins, leaves, is_lost: true, kills_leader } => {
                write!(formatter, "{joins} replaces lost {leaves}{}", leader_note(*kills_leader))
            }
            FaultAction::Change { joins, leaves, kills_leader, .. } => {
                write!(formatter, "{joins} joins, {leaves} leaves{}", leader_note(*kills_leader))
            }
            FaultAction::FailSyncs(node) => write!(formatter, "syncs of {node} fail"),
            FaultAction::SlowSyncs(node, time) => {
                write!(formatter, "syncs of {node} take {time:?}")
            }
            FaultAction::FillDisk { node, left_mib } => {
                write!(formatter, "{left_mib} MiB left on the disk of {node}")
            }
            FaultAction::Damage { node, what, is_running, .. } => {
                let when = if *is_running { "running" } else { "down" };
                write!(formatter, "{what:?} of {node}, {when}")
            }
            FaultAction::Restore { node, .. } => {
                write!(formatter, "restore an older segment of {node}")
            }
        }?;
        write!(formatter, " for {} ms", self.lasting.as_millis())
    }
}

fn leader_note(kills_leader: bool) -> &'static str {
    if kills_leader { ", and the leader is killed" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [(ChaosFaultKind, u32); 14] = [
        (ChaosFaultKind::Kill, 60),
        (ChaosFaultKind::Pause, 30),
        (ChaosFaultKind::Partition, 30),
        (ChaosFaultKind::Absence, 5),
        (ChaosFaultKind::Trim, 7),
        (ChaosFaultKind::Deletion, 3),
        (ChaosFaultKind::Drain, 4),
        (ChaosFaultKind::Wipe, 2),
        (ChaosFaultKind::Change, 6),
        (ChaosFaultKind::FailedSync, 1),
        (ChaosFaultKind::SlowSync, 8),
        (ChaosFaultKind::FullDisk, 9),
        (ChaosFaultKind::Damage, 10),
        (ChaosFaultKind::Restore, 11),
    ];

    fn all(seed: u64, nodes: &[u64]) -> Vec<ChaosFault> {
        let mut schedule = FaultSchedule::new(
            seed,
            ChaosFaultBudget::from(KINDS),
            FaultDurations::default(),
            nodes,
        );
        std::iter::from_fn(|| schedule.next(nodes, &[2])).collect()
    }

    fn count(faults: &[ChaosFault], is: impl Fn(&FaultAction) -> bool) -> usize {
        faults.iter().filter(|fault| is(&fault.what)).count()
    }

    #[test]
    fn the_budget_is_used_up_and_the_seed_repeats_it() {
        let faults = all(1, &[1, 2, 3]);
        assert_eq!(faults, all(1, &[1, 2, 3]));
        assert_ne!(faults, all(2, &[1, 2, 3]));
        for (kind, count) in KINDS {
            let drawn = faults.iter().filter(|fault| fault.kind() == Some(kind)).count();
            assert_eq!(drawn, count as usize, "{kind:?}");
        }
        assert!(faults.iter().all(|fault| fault.lasting <= Duration::from_secs(6)));
    }

    #[test]
    fn leaders_are_preferred_and_majorities_rare() {
        let faults = all(1, &[1, 2, 3]);
        let of_leader = count(&faults, |what| *what == FaultAction::Kill(vec![2]));
        assert!(of_leader > 30, "{of_leader} of 60 kills were of the leader");
        let majorities = faults.iter().filter(|fault| fault.takes_majority(1)).count();
        assert!((1..30).contains(&majorities), "{majorities}");
    }

    #[test]
    fn a_single_node_has_no_links_to_cut() {
        let faults = all(1, &[1]);
        assert!(faults.iter().filter_map(ChaosFault::kind).all(ChaosFaultKind::suits_one));
        assert!(!faults.iter().any(|fault| matches!(fault.what, FaultAction::Slow(_))));
        assert!(faults.len() >= 90);
    }

    #[test]
    fn who_comes_is_not_there_and_who_goes_is() {
        for fault in all(1, &[1, 2, 3]) {
            if let FaultAction::Change { joins, leaves, .. } = fault.what {
                assert!(leaves <= 3 && joins > 3 && joins <= NODES_MAX, "{fault}");
                assert!(fault.needs_healthy_cluster());
            }
        }
    }
}
