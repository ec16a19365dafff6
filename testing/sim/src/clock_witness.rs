//! Checks append times and retention by time against the clocks of all members, after every few
//! ticks and below the API (docs/guarantees.md, "Append times and retention"):
//!
//! - An append time is at most the documented tolerance after the time that a majority of the
//!   clocks has reached.
//! - Retention drops no record that is younger than the topic's retention by that time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use helix_server::node::Node;

use crate::clock;
use crate::cluster::SimulatedMachine;
use crate::coverage::{CoverageMark, CoverageMarks};
use crate::membership::MembershipTracker;
use crate::plan::SimulationPlan;

/// Ticks between checks, with and without retention by time.
const CHECK_EVERY: u64 = 5;
const CHECK_RARELY: u64 = 50;

/// Difference from the agreed time up to which a leader's own clock counts.
const TOLERANCE_US: i64 = 10_000_000;

/// Error of a comparison: half of the longest response time, and a few ticks.
const COMPARISON_ERROR_US: i64 = 510_000;

/// Longest time between the readings of one comparison, with some margin.
const COMPARISON_MAX: Duration = Duration::from_secs(4);

/// Error of a clock from which it counts as wrong in coverage marks.
const WRONG_US: u64 = 3_600_000_000;

/// Errors of one machine's clock.
#[derive(Debug, Default)]
struct MachineClock {
    /// Errors, each with the time at which the clock had it last.
    recent: VecDeque<(Duration, i64)>,
    /// Start of the node that `own_us` belongs to.
    start_count: u64,
    /// Greatest error since this start.
    own_us: i64,
}

impl MachineClock {
    fn observe(&mut self, now: Duration, machine: &SimulatedMachine) {
        let error_us = machine.clock().error_us();
        match self.recent.back_mut().filter(|(_, last)| *last == error_us) {
            Some((at, _)) => *at = now,
            None => self.recent.push_back((now, error_us)),
        }
        self.recent.retain(|(at, _)| *at + COMPARISON_MAX >= now);
        if self.start_count != machine.start_count() {
            (self.start_count, self.own_us) = (machine.start_count(), error_us);
        }
        self.own_us = self.own_us.max(error_us);
    }

    /// Returns the greatest error that a comparison under way may have read.
    fn peak_us(&self) -> i64 {
        self.recent.iter().map(|(_, error_us)| *error_us).max().unwrap_or(0)
    }
}

/// Observed state of a partition.
#[derive(Debug, Default)]
struct PartitionTimes {
    log_start: u64,
    /// Append time of the record before each observed offset.
    times: BTreeMap<u64, u64>,
}

/// Knows all clocks, and checks what the nodes do with them.
#[derive(Debug)]
pub struct ClockWitness {
    members: MembershipTracker,
    marks: CoverageMarks,
    retention_us: Option<u64>,
    ticks: u64,
    clocks: BTreeMap<u64, MachineClock>,
    /// Greatest error of the agreed time so far.
    agreed_us: i64,
    /// The same, or of a leader that had not compared clocks yet, which stamps with its own.
    stamped_us: i64,
    partitions: BTreeMap<u64, PartitionTimes>,
}

impl ClockWitness {
    pub fn new(plan: &SimulationPlan, members: MembershipTracker, marks: CoverageMarks) -> Self {
        Self {
            members,
            marks,
            retention_us: plan.retention_us,
            ticks: 0,
            clocks: BTreeMap::new(),
            agreed_us: i64::MIN,
            stamped_us: i64::MIN,
            partitions: BTreeMap::new(),
        }
    }

    /// Checks all running nodes after a tick.
    ///
    /// # Errors
    /// The promise that is broken.
    pub fn check(&mut self, now: Duration, machines: &[SimulatedMachine]) -> Result<(), String> {
        self.ticks += 1;
        for machine in machines {
            self.clocks.entry(machine.node_id()).or_default().observe(now, machine);
        }
        self.observe_agreement(machines);
        self.observe_leaders(machines);
        let every = if self.retention_us.is_some() { CHECK_EVERY } else { CHECK_RARELY };
        if !self.ticks.is_multiple_of(every) {
            return Ok(());
        }
        let right_us = clock::right_us(now);
        for machine in machines {
            let Some(node) = machine.node().filter(|_| !machine.disks().has_stopped()) else {
                continue;
            };
            self.check_node(machine, &node, right_us)?;
        }
        Ok(())
    }

    /// Updates the greatest agreed time. A change of the members may use either number of them.
    fn observe_agreement(&mut self, machines: &[SimulatedMachine]) {
        let members = |node: Arc<Node>| node.cluster().nodes().into_iter().collect();
        let known = machines.iter().filter_map(|machine| Some(members(machine.node()?)));
        let sets: BTreeSet<BTreeSet<u64>> = known.chain([self.members.all()]).collect();
        for members in sets.into_iter().filter(|members| !members.is_empty()) {
            let peaks = members.iter().filter_map(|node| self.clocks.get(node));
            let mut peaks: Vec<i64> = peaks.map(MachineClock::peak_us).collect();
            peaks.sort_unstable_by(|a, b| b.cmp(a));
            if let Some(agreed_us) = peaks.get(members.len() / 2) {
                self.agreed_us = self.agreed_us.max(*agreed_us);
            }
        }
        self.stamped_us = self.stamped_us.max(self.agreed_us);
    }

    /// Updates the greatest append time: a leader may not have compared clocks yet.
    fn observe_leaders(&mut self, machines: &[SimulatedMachine]) {
        for machine in machines {
            let Some(node) = machine.node() else { continue };
            if !node.shards().iter().any(|shard| shard.is_leader()) {
                continue;
            }
            if node.clock().offsets().is_empty() {
                let own_us = self.clocks.get(&machine.node_id()).map_or(0, |clock| clock.own_us);
                self.stamped_us = self.stamped_us.max(own_us);
            } else if machine.clock().error_us().unsigned_abs() > WRONG_US {
                self.marks.hit(CoverageMark::WrongClockLed);
            }
        }
    }

    fn check_node(
        &mut self,
        machine: &SimulatedMachine,
        node: &Node,
        right_us: u64,
    ) -> Result<(), String> {
        let node_id = machine.node_id();
        let latest_us = right_us
            .saturating_add_signed(self.stamped_us)
            .saturating_add_signed(TOLERANCE_US + COMPARISON_ERROR_US);
        for shard in node.shards() {
            let starts: Vec<(u64, u64)> = shard.read_state(|state| {
                state.partitions().map(|row| (row.id.0, row.log_start)).collect()
            });
            for (id, log_start) in starts {
                let known = self.partitions.entry(id).or_default();
                for row in shard.replica().wal().stream_rows(id) {
                    if row.last_time > latest_us {
                        return Err(format!(
                            "node {node_id}, partition id {id}: the record before offset {} has \
                             append time {}, but a majority of the clocks has reached {} at most",
                            row.next,
                            row.last_time,
                            right_us.saturating_add_signed(self.stamped_us)
                        ));
                    }
                    if row.last_time > 0 && row.next > known.log_start {
                        known.times.insert(row.next, row.last_time);
                    }
                }
                if log_start > known.log_start {
                    known.log_start = log_start;
                    let kept = known.times.split_off(&(log_start + 1));
                    let dropped = std::mem::replace(&mut known.times, kept).pop_last();
                    self.check_dropped(id, dropped, right_us)?;
                }
            }
        }
        Ok(())
    }

    /// Checks the newest record that retention has dropped.
    fn check_dropped(
        &self,
        id: u64,
        dropped: Option<(u64, u64)>,
        right_us: u64,
    ) -> Result<(), String> {
        let (Some(retention_us), Some((offset, time_us))) = (self.retention_us, dropped) else {
            return Ok(());
        };
        let agreed_us = right_us.saturating_add_signed(self.agreed_us);
        let age_us = agreed_us.saturating_add_signed(COMPARISON_ERROR_US).saturating_sub(time_us);
        if age_us < retention_us {
            return Err(format!(
                "partition id {id}: retention of {retention_us} us dropped the record before \
                 offset {offset} with append time {time_us}, but a majority of the clocks has \
                 reached {agreed_us} at most"
            ));
        }
        self.marks.hit(CoverageMark::RetentionByTime);
        Ok(())
    }
}
