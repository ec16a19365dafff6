//! State of all network links: cut, held back or slow, applied to turmoil's network.
//! Keeps the reasons of each cut, so that faults may overlap and heal in any order.

use std::collections::BTreeSet;
use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;
use turmoil::Sim;

/// Index of a host in the list given to [`Links::new`].
pub type HostIndex = usize;

/// Links between all hosts. A cut lasts as long as it has a reason; reasons are numbers.
#[derive(Debug, Default)]
pub struct Links {
    hosts: Vec<String>,
    cuts: BTreeSet<(u64, HostIndex, HostIndex)>,
    holds: BTreeSet<(u64, HostIndex, HostIndex)>,
    /// State that turmoil has.
    cut_now: BTreeSet<(HostIndex, HostIndex)>,
    held_now: BTreeSet<(HostIndex, HostIndex)>,
    /// Set if turmoil's network may differ from this state.
    changed: bool,
    latency_max: Duration,
    /// Links that are slow at present.
    slow: BTreeSet<(HostIndex, HostIndex)>,
}

impl Links {
    pub fn new(hosts: Vec<String>, latency_max: Duration) -> Self {
        Self { hosts, latency_max, ..Self::default() }
    }

    pub fn name(&self, place: HostIndex) -> &str {
        &self.hosts[place]
    }

    pub fn count(&self) -> usize {
        self.hosts.len()
    }

    /// Drops all traffic in one direction.
    pub fn cut(&mut self, reason: u64, from: HostIndex, to: HostIndex) {
        if from != to {
            self.cuts.insert((reason, from, to));
            self.changed = true;
        }
    }

    pub fn cut_both(&mut self, reason: u64, one: HostIndex, other: HostIndex) {
        self.cut(reason, one, other);
        self.cut(reason, other, one);
    }

    /// Holds all traffic between two hosts until the reason is removed.
    pub fn hold(&mut self, reason: u64, one: HostIndex, other: HostIndex) {
        if one != other {
            self.holds.insert((reason, one.min(other), one.max(other)));
            self.changed = true;
        }
    }

    /// Slows a link down until [`Self::restore_speed`].
    pub fn slow_down(
        &mut self,
        sim: &Sim<'_>,
        one: HostIndex,
        other: HostIndex,
        latency: Duration,
    ) {
        self.slow.insert((one.min(other), one.max(other)));
        sim.set_link_latency(self.name(one), self.name(other), latency);
    }

    pub fn restore_speed(&mut self, one: HostIndex, other: HostIndex) {
        self.slow.remove(&(one.min(other), one.max(other)));
    }

    /// Draws a latency for every link.
    ///
    /// It is not drawn per message: a connection that splits its writes differently would then
    /// change the whole run.
    pub fn draw_latencies(&self, sim: &Sim<'_>, rng: &mut StdRng) {
        for one in 0..self.count() {
            for other in one + 1..self.count() {
                self.draw_latency(sim, one, other, rng);
            }
        }
    }

    pub fn draw_latency(&self, sim: &Sim<'_>, one: HostIndex, other: HostIndex, rng: &mut StdRng) {
        if self.slow.contains(&(one.min(other), one.max(other))) {
            return;
        }
        let max_us = u64::try_from(self.latency_max.as_micros()).unwrap_or(0);
        let max_us = if rng.random_bool(0.5) { max_us } else { max_us.min(1_000) };
        let latency = Duration::from_micros(rng.random_range(0..=max_us));
        sim.set_link_latency(self.name(one), self.name(other), latency);
    }

    pub fn remove_reason(&mut self, reason: u64) {
        self.cuts.retain(|(why, _, _)| *why != reason);
        self.holds.retain(|(why, _, _)| *why != reason);
        self.changed = true;
    }

    /// Applies this state to turmoil's network.
    pub fn apply(&mut self, sim: &Sim<'_>) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let name = |place: HostIndex| self.name(place);
        let cuts: BTreeSet<_> = self.cuts.iter().map(|(_, from, to)| (*from, *to)).collect();
        let is_cut = |one, other| cuts.contains(&(one, other)) || cuts.contains(&(other, one));
        // turmoil cannot hold a link that is cut.
        let holds = self.holds.iter().map(|(_, one, other)| (*one, *other));
        let holds: BTreeSet<_> = holds.filter(|(one, other)| !is_cut(*one, *other)).collect();
        for (one, other) in self.held_now.difference(&holds) {
            sim.release(name(*one), name(*other));
        }
        for (from, to) in self.cut_now.difference(&cuts) {
            sim.repair_oneway(name(*from), name(*to));
        }
        for (from, to) in cuts.difference(&self.cut_now) {
            sim.partition_oneway(name(*from), name(*to));
        }
        for (one, other) in holds.difference(&self.held_now) {
            sim.hold(name(*one), name(*other));
        }
        (self.cut_now, self.held_now) = (cuts, holds);
    }
}
