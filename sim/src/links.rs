//! Which directions of which links are cut or held back, applied to turmoil's network.
//! One place that knows, so that faults may overlap and heal in any order.

use std::collections::BTreeSet;

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
}

impl Links {
    pub fn new(hosts: Vec<String>) -> Self {
        Self { hosts, ..Self::default() }
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
