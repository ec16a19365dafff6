//! Draws what to break next, from a seed and from who leads. Decides only; `nemesis` does it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};

use crate::cluster::NODES_MAX;
use crate::files::Damage;
use crate::proxy::Mode;

/// One fault, with how long it lasts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) what: What,
    pub(crate) lasting: Duration,
}

/// What is broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum What {
    /// SIGKILL to all of these at once.
    Kill(Vec<u64>),
    /// SIGTERM.
    Terminate(u64),
    /// SIGKILL, until the logs of the others are purged of what the node lacks.
    Outlast(u64),
    /// SIGSTOP.
    Pause(Vec<u64>),
    /// The node and all others do not hear each other; clients reach it.
    Isolate(u64),
    /// Nobody hears this node; it hears the others. (Links it dialled are held forward, links to
    /// it backward.)
    Mute(u64),
    /// This node hears nobody; it is heard.
    Deafen(u64),
    /// Two nodes do not hear each other; both hear the rest.
    Part(u64, u64),
    /// No node hears another.
    Scatter,
    /// All links between nodes are slow.
    Slow(Duration),
    /// Clients and this node: refused, silent, or without answers.
    Clients(u64, Mode),
    /// All partitions that may be are trimmed, somewhere, while what comes next happens.
    Trim { seed: u64 },
    /// A topic is deleted and made again while this node is down.
    Delete(u64),
    /// Drained, stopped, started, taken back.
    Drain(u64),
    /// The disk is lost: killed, emptied, started, and replaced by itself.
    Wipe { node: u64, kills_leader: bool },
    /// One node comes, one goes; where `is_lost`, the one that comes replaces the other, which is
    /// dead.
    Change { joins: u64, leaves: u64, is_lost: bool, kills_leader: bool },
    /// Every sync fails: the node must stop by itself.
    FailSyncs(u64),
    /// Every sync takes so much longer.
    SlowSyncs(u64, Duration),
    /// Something else takes the space of the node's disk, but for so much.
    FillDisk { node: u64, left_mib: u64 },
    /// One of the node's files is damaged, while it runs or while it is down.
    Damage { node: u64, what: Damage, is_running: bool, seed: u64 },
    /// One of the node's segments is put back as it was at an earlier time, while it is down.
    Restore { node: u64, seed: u64 },
}

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// SIGKILLs of a leader, another node, or a majority.
    Kill,
    /// SIGSTOPs.
    Pause,
    /// Cuts between nodes.
    Cut,
    /// Nodes kept away until the others have purged what they lack.
    Absence,
    /// Trims of all partitions that may be.
    Trim,
    /// Topics deleted and made again while a node is away.
    Deletion,
    /// Nodes drained and restarted.
    Drain,
    /// Disks lost.
    Wipe,
    /// Nodes that come and go.
    Change,
    /// Syncs that fail.
    FailedSync,
    /// Disks that stall.
    SlowSync,
    /// Disks that are full.
    FullDisk,
    /// Damage in files.
    Damage,
    /// Segments put back from older copies.
    Restore,
}

impl Kind {
    /// Whether it can happen to a single node.
    fn suits_one(self) -> bool {
        use Kind::{FailedSync, FullDisk, Kill, Pause, SlowSync, Trim};
        matches!(self, Kill | Pause | Trim | FailedSync | SlowSync | FullDisk)
    }

    /// In the plural.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill => "kills",
            Self::Pause => "pauses",
            Self::Cut => "partitions",
            Self::Absence => "absences",
            Self::Trim => "trims",
            Self::Deletion => "deleted topics",
            Self::Drain => "drains",
            Self::Wipe => "wiped disks",
            Self::Change => "changes of nodes",
            Self::FailedSync => "failed syncs",
            Self::SlowSync => "stalled disks",
            Self::FullDisk => "full disks",
            Self::Damage => "damaged files",
            Self::Restore => "restored segments",
        }
    }
}

/// Faults that are still to come.
pub(crate) type Budget = BTreeMap<Kind, u32>;

/// How long faults last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tempo {
    /// Longest time until a killed node is started again.
    pub(crate) down_max: Duration,
    /// Longest SIGSTOP.
    pub(crate) pause_max: Duration,
    /// Longest cut.
    pub(crate) cut_max: Duration,
}

impl Default for Tempo {
    fn default() -> Self {
        Self {
            down_max: Duration::from_secs(3),
            pause_max: Duration::from_secs(5),
            cut_max: Duration::from_secs(6),
        }
    }
}

impl Tempo {
    /// For a run of less than a minute.
    pub(crate) fn short() -> Self {
        Self {
            down_max: Duration::from_millis(500),
            pause_max: Duration::from_millis(1500),
            cut_max: Duration::from_millis(1800),
        }
    }
}

/// What a full disk has left: less than a node keeps back from records, more than what it keeps
/// for votes alone.
const LEFT_MIB: std::ops::Range<u64> = 130..250;

/// See the module.
#[derive(Debug)]
pub(crate) struct Schedule {
    rng: StdRng,
    left: Budget,
    tempo: Tempo,
    /// Nodes that there are.
    nodes: Vec<u64>,
}

impl Schedule {
    pub(crate) fn new(seed: u64, budget: Budget, tempo: Tempo, nodes: &[u64]) -> Self {
        let mut left = budget;
        if nodes.len() == 1 {
            left.retain(|kind, _| kind.suits_one());
        }
        Self { rng: StdRng::seed_from_u64(seed), left, tempo, nodes: nodes.to_vec() }
    }

    pub(crate) fn left(&self) -> u32 {
        self.left.values().sum()
    }

    /// Whether to wait until everything is well before the next fault. Where not, it meets a
    /// cluster that is still busy with the one before.
    pub(crate) fn is_patient(&mut self) -> bool {
        self.rng.random_bool(0.6)
    }

    /// Time between the end of a fault and the next one.
    pub(crate) fn breath(&mut self) -> Duration {
        self.between(Duration::from_millis(50), Duration::from_millis(800))
    }

    /// All nodes killed at once.
    pub(crate) fn massacre(&mut self, nodes: &[u64]) -> Fault {
        let lasting = self.between(Duration::ZERO, self.tempo.down_max / 4);
        Fault { what: What::Kill(nodes.to_vec()), lasting }
    }

    /// The next fault; None when all have been.
    pub(crate) fn next(&mut self, nodes: &[u64], leaders: &[u64]) -> Option<Fault> {
        nodes.clone_into(&mut self.nodes);
        // Besides those that are counted.
        if self.left() > 0
            && self.rng.random_bool(0.2)
            && let Some(fault) = self.extra(leaders)
        {
            return Some(fault);
        }
        let kind = self.draw()?;
        let what = self.what(kind, leaders);
        let Tempo { down_max, pause_max, cut_max } = self.tempo;
        let (shortest, longest) = match kind {
            Kind::Kill | Kind::Absence | Kind::FailedSync | Kind::Deletion => {
                (Duration::ZERO, down_max)
            }
            Kind::Pause => (Duration::from_millis(100), pause_max),
            Kind::Cut => (Duration::from_millis(300), cut_max),
            Kind::SlowSync | Kind::FullDisk | Kind::Damage => (cut_max / 4, cut_max),
            Kind::Trim | Kind::Drain | Kind::Wipe | Kind::Change | Kind::Restore => {
                (Duration::ZERO, down_max / 8)
            }
        };
        Some(Fault { what, lasting: self.between(shortest, longest) })
    }

    /// One of those that are left, each as likely as the other.
    fn draw(&mut self) -> Option<Kind> {
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

    fn what(&mut self, kind: Kind, leaders: &[u64]) -> What {
        match kind {
            Kind::Kill => What::Kill(self.victims(leaders)),
            Kind::Pause => What::Pause(self.victims(leaders)),
            Kind::Cut => self.cut(leaders),
            Kind::Absence => What::Outlast(self.victim(leaders)),
            Kind::Trim => What::Trim { seed: self.rng.random() },
            Kind::Deletion => What::Delete(self.victim(leaders)),
            Kind::Drain => What::Drain(self.victim(leaders)),
            Kind::Wipe => {
                let kills_leader = self.rng.random_bool(0.4);
                What::Wipe { node: self.victim(leaders), kills_leader }
            }
            Kind::Change => {
                let (is_lost, kills_leader) =
                    (self.rng.random_bool(0.4), self.rng.random_bool(0.4));
                let free = (1..=NODES_MAX).filter(|id| !self.nodes.contains(id));
                let joins = free.collect::<Vec<_>>().choose(&mut self.rng).copied().unwrap_or(1);
                What::Change { joins, leaves: self.victim(leaders), is_lost, kills_leader }
            }
            Kind::FailedSync => What::FailSyncs(self.victim(leaders)),
            Kind::SlowSync => {
                let longer = self.rng.random_range(300..2500);
                What::SlowSyncs(self.victim(leaders), Duration::from_millis(longer))
            }
            Kind::FullDisk => {
                let left_mib = self.rng.random_range(LEFT_MIB);
                What::FillDisk { node: self.victim(leaders), left_mib }
            }
            Kind::Damage => {
                let is_flip = self.rng.random_bool(0.7);
                let what = if is_flip { Damage::FlippedBits } else { Damage::LostSegment };
                let (is_running, seed) = (self.rng.random_bool(0.5), self.rng.random());
                What::Damage { node: self.victim(leaders), what, is_running, seed }
            }
            Kind::Restore => What::Restore { node: self.victim(leaders), seed: self.rng.random() },
        }
    }

    fn cut(&mut self, leaders: &[u64]) -> What {
        let victim = self.victim(leaders);
        match self.rng.random_range(0..12) {
            0..5 => What::Isolate(victim),
            5..7 => What::Mute(victim),
            7..9 => What::Deafen(victim),
            9..11 => {
                let others: Vec<_> = self.nodes.iter().filter(|id| **id != victim).collect();
                match others.choose(&mut self.rng) {
                    Some(other) => What::Part(victim, **other),
                    None => What::Isolate(victim),
                }
            }
            _ => What::Scatter,
        }
    }

    fn extra(&mut self, leaders: &[u64]) -> Option<Fault> {
        let victim = self.victim(leaders);
        let what = match self.rng.random_range(0..6) {
            0 => What::Terminate(victim),
            1 if self.nodes.len() > 1 => {
                What::Slow(Duration::from_millis(self.rng.random_range(5..60)))
            }
            2 => What::Clients(victim, Mode::Refuse),
            3 => What::Clients(victim, Mode::Stall),
            4 | 5 => What::Clients(victim, Mode::Swallow),
            _ => return None,
        };
        Some(Fault { what, lasting: self.between(Duration::from_millis(100), self.tempo.cut_max) })
    }

    /// Mostly one node, and mostly one that leads something; now and then a majority.
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
        // Short ones are as likely as long ones are rare: the interesting lengths are near the
        // timeouts of elections.
        let part = self.rng.random_range(0.0..1.0_f64).powi(2);
        shortest + (longest - shortest).mul_f64(part)
    }
}

impl Fault {
    /// Whether fewer than a majority can be reached from anywhere while it lasts.
    pub(crate) fn takes_majority(&self, minority: usize) -> bool {
        match &self.what {
            What::Kill(nodes) | What::Pause(nodes) => nodes.len() > minority,
            What::Terminate(_) | What::FailSyncs(_) => minority == 0,
            What::Scatter => true,
            _ => false,
        }
    }

    /// Whether everything must be well before it begins: it takes one copy of everything away for
    /// good, or is what nobody does to a cluster that is not well.
    pub(crate) fn needs_calm(&self) -> bool {
        use What::{Change, Delete, Drain, Outlast, Wipe};
        self.spoils_a_copy()
            || matches!(self.what, Change { .. } | Delete(_) | Drain(_) | Wipe { .. } | Outlast(_))
    }

    /// Whether a replica has to repair itself after it: then all replicas are read at once.
    pub(crate) fn spoils_a_copy(&self) -> bool {
        matches!(self.what, What::Damage { .. } | What::Restore { .. })
    }

    /// What it counts as.
    pub(crate) fn kind(&self) -> Option<Kind> {
        Some(match &self.what {
            What::Kill(_) => Kind::Kill,
            What::Pause(_) => Kind::Pause,
            What::Isolate(_) | What::Mute(_) | What::Deafen(_) | What::Part(..) | What::Scatter => {
                Kind::Cut
            }
            What::Outlast(_) => Kind::Absence,
            What::Trim { .. } => Kind::Trim,
            What::Delete(_) => Kind::Deletion,
            What::Drain(_) => Kind::Drain,
            What::Wipe { .. } => Kind::Wipe,
            What::Change { .. } => Kind::Change,
            What::FailSyncs(_) => Kind::FailedSync,
            What::SlowSyncs(..) => Kind::SlowSync,
            What::FillDisk { .. } => Kind::FullDisk,
            What::Damage { .. } => Kind::Damage,
            What::Restore { .. } => Kind::Restore,
            What::Terminate(_) | What::Slow(_) | What::Clients(..) => return None,
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            What::Kill(nodes) => write!(formatter, "kill {nodes:?}"),
            What::Terminate(node) => write!(formatter, "terminate {node}"),
            What::Outlast(node) => write!(formatter, "{node} away until its log is purged, and"),
            What::Pause(nodes) => write!(formatter, "pause {nodes:?}"),
            What::Isolate(node) => write!(formatter, "cut {node} off from its peers"),
            What::Mute(node) => write!(formatter, "nobody hears {node}"),
            What::Deafen(node) => write!(formatter, "{node} hears nobody"),
            What::Part(a, b) => write!(formatter, "cut between {a} and {b}"),
            What::Scatter => write!(formatter, "cut all links between nodes"),
            What::Slow(wait) => write!(formatter, "slow links between nodes ({wait:?})"),
            What::Clients(node, mode) => write!(formatter, "clients of {node}: {mode:?}"),
            What::Trim { .. } => write!(formatter, "trim, and"),
            What::Delete(node) => write!(formatter, "a topic goes while {node} is down"),
            What::Drain(node) => write!(formatter, "drain and restart {node}"),
            What::Wipe { node, kills_leader } => {
                write!(formatter, "{node} loses its disk{}", aside(*kills_leader))
            }
            What::Change { joins, leaves, is_lost: true, kills_leader } => {
                write!(formatter, "{joins} replaces {leaves}, lost{}", aside(*kills_leader))
            }
            What::Change { joins, leaves, kills_leader, .. } => {
                write!(formatter, "{joins} comes, {leaves} goes{}", aside(*kills_leader))
            }
            What::FailSyncs(node) => write!(formatter, "syncs of {node} fail"),
            What::SlowSyncs(node, time) => write!(formatter, "syncs of {node} take {time:?}"),
            What::FillDisk { node, left_mib } => {
                write!(formatter, "{left_mib} MiB left on the disk of {node}")
            }
            What::Damage { node, what, is_running, .. } => {
                let when = if *is_running { "running" } else { "down" };
                write!(formatter, "{what:?} of {node}, {when}")
            }
            What::Restore { node, .. } => write!(formatter, "{node} gets an old segment back"),
        }?;
        write!(formatter, " for {} ms", self.lasting.as_millis())
    }
}

fn aside(kills_leader: bool) -> &'static str {
    if kills_leader { ", and the leader is killed" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [(Kind, u32); 14] = [
        (Kind::Kill, 60),
        (Kind::Pause, 30),
        (Kind::Cut, 30),
        (Kind::Absence, 5),
        (Kind::Trim, 7),
        (Kind::Deletion, 3),
        (Kind::Drain, 4),
        (Kind::Wipe, 2),
        (Kind::Change, 6),
        (Kind::FailedSync, 1),
        (Kind::SlowSync, 8),
        (Kind::FullDisk, 9),
        (Kind::Damage, 10),
        (Kind::Restore, 11),
    ];

    fn all(seed: u64, nodes: &[u64]) -> Vec<Fault> {
        let mut schedule = Schedule::new(seed, Budget::from(KINDS), Tempo::default(), nodes);
        std::iter::from_fn(|| schedule.next(nodes, &[2])).collect()
    }

    fn count(faults: &[Fault], is: impl Fn(&What) -> bool) -> usize {
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
        let of_leader = count(&faults, |what| *what == What::Kill(vec![2]));
        assert!(of_leader > 30, "{of_leader} of 60 kills were of the leader");
        let majorities = faults.iter().filter(|fault| fault.takes_majority(1)).count();
        assert!((1..30).contains(&majorities), "{majorities}");
    }

    #[test]
    fn a_single_node_has_no_links_to_cut() {
        let faults = all(1, &[1]);
        assert!(faults.iter().filter_map(Fault::kind).all(Kind::suits_one));
        assert!(!faults.iter().any(|fault| matches!(fault.what, What::Slow(_))));
        assert!(faults.len() >= 90);
    }

    #[test]
    fn who_comes_is_not_there_and_who_goes_is() {
        for fault in all(1, &[1, 2, 3]) {
            if let What::Change { joins, leaves, .. } = fault.what {
                assert!(leaves <= 3 && joins > 3 && joins <= NODES_MAX, "{fault}");
                assert!(fault.needs_calm());
            }
        }
    }
}
