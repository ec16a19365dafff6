//! Which directions of which links are cut or held back, and how slow each link is, applied to
//! turmoil's network. One place that knows, so that faults may overlap and heal in any order.

use std::collections::BTreeSet;
use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;
use turmoil::Sim;

/// A host, by its place in the list that the links were made with.
pub type Place = usize;

/// See the module. Reasons are numbers: a cut is there as long as any reason for it is.
#[derive(Debug, Default)]
pub struct Links {
    hosts: Vec<String>,
    cuts: BTreeSet<(u64, Place, Place)>,
    holds: BTreeSet<(u64, Place, Place)>,
    /// As turmoil has it.
    cut_now: BTreeSet<(Place, Place)>,
    held_now: BTreeSet<(Place, Place)>,
    /// Whether turmoil's network may be in another state than it should be.
    changed: bool,
    latency_max: Duration,
    /// Links that are slow just now.
    slow: BTreeSet<(Place, Place)>,
}

impl Links {
    pub fn new(hosts: Vec<String>, latency_max: Duration) -> Self {
        Self { hosts, latency_max, ..Self::default() }
    }

    pub fn name(&self, place: Place) -> &str {
        &self.hosts[place]
    }

    pub fn count(&self) -> usize {
        self.hosts.len()
    }

    /// Nothing goes from one to the other any more.
    pub fn cut(&mut self, reason: u64, from: Place, to: Place) {
        if from != to {
            self.cuts.insert((reason, from, to));
            self.changed = true;
        }
    }

    pub fn cut_both(&mut self, reason: u64, one: Place, other: Place) {
        self.cut(reason, one, other);
        self.cut(reason, other, one);
    }

    /// Everything between them waits until it is let go.
    pub fn hold(&mut self, reason: u64, one: Place, other: Place) {
        if one != other {
            self.holds.insert((reason, one.min(other), one.max(other)));
            self.changed = true;
        }
    }

    /// The link is slow until it is hastened again.
    pub fn slow_down(&mut self, sim: &Sim<'_>, one: Place, other: Place, latency: Duration) {
        self.slow.insert((one.min(other), one.max(other)));
        sim.set_link_latency(self.name(one), self.name(other), latency);
    }

    pub fn hasten(&mut self, one: Place, other: Place) {
        self.slow.remove(&(one.min(other), one.max(other)));
    }

    /// Every link gets a latency of its own, which changes now and then. It is not drawn for each
    /// message: then a connection that says the same in two pieces would change the whole run.
    pub fn draw_latencies(&self, sim: &Sim<'_>, rng: &mut StdRng) {
        for one in 0..self.count() {
            for other in one + 1..self.count() {
                self.draw_latency(sim, one, other, rng);
            }
        }
    }

    pub fn draw_latency(&self, sim: &Sim<'_>, one: Place, other: Place, rng: &mut StdRng) {
        if self.slow.contains(&(one.min(other), one.max(other))) {
            return;
        }
        let max_us = u64::try_from(self.latency_max.as_micros()).unwrap_or(0);
        let max_us = if rng.random_bool(0.5) { max_us } else { max_us.min(1_000) };
        let latency = Duration::from_micros(rng.random_range(0..=max_us));
        sim.set_link_latency(self.name(one), self.name(other), latency);
    }

    pub fn forget(&mut self, reason: u64) {
        self.cuts.retain(|(why, _, _)| *why != reason);
        self.holds.retain(|(why, _, _)| *why != reason);
        self.changed = true;
    }

    /// Brings turmoil's network to this state.
    pub fn apply(&mut self, sim: &Sim<'_>) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let name = |place: Place| self.name(place);
        let cuts: BTreeSet<_> = self.cuts.iter().map(|(_, from, to)| (*from, *to)).collect();
        let is_cut = |one, other| cuts.contains(&(one, other)) || cuts.contains(&(other, one));
        // turmoil cannot hold what is cut.
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
