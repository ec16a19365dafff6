//! Draws what to break next, from a seed and from who leads. Decides only; `nemesis` does it.

use std::fmt;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};

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
}

/// Faults that are still to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Budget {
    /// SIGKILLs of a leader, another node, or a majority.
    pub(crate) kills: u32,
    /// SIGSTOPs.
    pub(crate) pauses: u32,
    /// Cuts between nodes. None happen to a single node.
    pub(crate) partitions: u32,
    /// Nodes kept away until the others have purged what they lack. None happen to a single node.
    pub(crate) absences: u32,
}

impl Budget {
    /// All of them.
    pub(crate) fn total(&self) -> u32 {
        self.kills + self.pauses + self.partitions + self.absences
    }
}

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

/// See the module.
#[derive(Debug)]
pub(crate) struct Schedule {
    rng: StdRng,
    left: Budget,
    tempo: Tempo,
    nodes: Vec<u64>,
}

impl Schedule {
    pub(crate) fn new(seed: u64, budget: Budget, tempo: Tempo, nodes: &[u64]) -> Self {
        let mut left = budget;
        if nodes.len() == 1 {
            left.partitions = 0;
            left.absences = 0;
        }
        Self { rng: StdRng::seed_from_u64(seed), left, tempo, nodes: nodes.to_vec() }
    }

    pub(crate) fn left(&self) -> u32 {
        self.left.total()
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

    /// The next fault; None when all have been.
    pub(crate) fn next(&mut self, leaders: &[u64]) -> Option<Fault> {
        let total = self.left.total();
        if total == 0 {
            return None;
        }
        // Besides those that are counted.
        if self.rng.random_bool(0.2)
            && let Some(fault) = self.extra(leaders)
        {
            return Some(fault);
        }
        let drawn = self.rng.random_range(0..total);
        Some(if drawn < self.left.kills {
            self.left.kills -= 1;
            let what = What::Kill(self.victims(leaders));
            Fault { what, lasting: self.between(Duration::ZERO, self.tempo.down_max) }
        } else if drawn < self.left.kills + self.left.pauses {
            self.left.pauses -= 1;
            let what = What::Pause(self.victims(leaders));
            let shortest = Duration::from_millis(100);
            Fault { what, lasting: self.between(shortest, self.tempo.pause_max) }
        } else if drawn >= total - self.left.absences {
            self.left.absences -= 1;
            let what = What::Outlast(self.victim(leaders));
            Fault { what, lasting: self.between(Duration::ZERO, self.tempo.down_max) }
        } else {
            self.left.partitions -= 1;
            let what = self.cut(leaders);
            let shortest = Duration::from_millis(300);
            Fault { what, lasting: self.between(shortest, self.tempo.cut_max) }
        })
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
            What::Terminate(_) => minority == 0,
            What::Scatter => true,
            _ => false,
        }
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
        }?;
        write!(formatter, " for {} ms", self.lasting.as_millis())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(seed: u64, nodes: &[u64]) -> Vec<Fault> {
        let budget = Budget { kills: 60, pauses: 30, partitions: 30, absences: 5 };
        let mut schedule = Schedule::new(seed, budget, Tempo::default(), nodes);
        std::iter::from_fn(|| schedule.next(&[2])).collect()
    }

    fn count(faults: &[Fault], is: impl Fn(&What) -> bool) -> usize {
        faults.iter().filter(|fault| is(&fault.what)).count()
    }

    #[test]
    fn the_budget_is_used_up_and_the_seed_repeats_it() {
        let faults = all(1, &[1, 2, 3]);
        assert_eq!(faults, all(1, &[1, 2, 3]));
        assert_ne!(faults, all(2, &[1, 2, 3]));
        assert_eq!(count(&faults, |what| matches!(what, What::Kill(_))), 60);
        assert_eq!(count(&faults, |what| matches!(what, What::Pause(_))), 30);
        assert_eq!(count(&faults, |what| matches!(what, What::Outlast(_))), 5);
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
        let cuts = |what: &What| {
            matches!(what, What::Kill(_) | What::Pause(_) | What::Terminate(_) | What::Clients(..))
        };
        assert_eq!(count(&faults, cuts), faults.len());
        assert!(faults.len() >= 90);
    }
}
