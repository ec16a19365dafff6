//! Damage at rest: flipped bits in stored data, and lost segments.
//!
//! Damages any file of one node at a time, so that at most a minority of the copies of each shard
//! is damaged. The next node is damaged only after the first is repaired, which is verified on its
//! disks. `copies` damages sealed segments of several nodes at once.
//!
//! Damages only data whose damage the log promises to detect. This leaves out the last group on the
//! disk: until a later group says that it was synced, damage to it looks like a torn write.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{Options, Wal};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::cluster::SimulatedMachine;
use crate::coverage::{CoverageMark, CoverageMarks};
use crate::disks::NodeDisks;
use crate::membership::{DamageExtent, MembershipTracker};
use crate::plan::SimulationPlan;
use crate::recorder::Recorder;
use crate::sealed::random_nonzero;

/// Maximum number of bits flipped on a disk at once.
const FLIPS_MAX: usize = 8;

/// Interval between checks whether a node is repaired.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

const BLOCK: usize = 4 << 10;
const GROUP_HEADER: usize = 128;

/// Event by which a node meets its damage, if no request does before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Discovery {
    /// A restart. Unsealed segments are only read at start.
    Restart,
    /// A scrub of sealed segments while the node runs.
    Scrub,
}

/// A node that is damaged.
#[derive(Debug)]
pub(crate) struct DamagedNode {
    pub(crate) node: u64,
    /// Shards with damage.
    pub(crate) shards: BTreeSet<u64>,
    /// Start count of the machine when it was damaged.
    pub(crate) start_count: u64,
    pub(crate) discovery: Discovery,
    pub(crate) discover_at: Duration,
    /// The scrub has been done.
    pub(crate) is_scrubbed: bool,
    pub(crate) check_at: Duration,
}

/// Injects damage and tracks its repair.
#[derive(Debug)]
pub struct DamageInjector {
    pub(crate) members: MembershipTracker,
    pub(crate) recorder: Recorder,
    pub(crate) marks: CoverageMarks,
    pub(crate) segment_bytes: u64,
    pub(crate) shards: u64,
    pub(crate) damaged: Vec<DamagedNode>,
}

impl DamageInjector {
    pub fn new(
        plan: &SimulationPlan,
        members: MembershipTracker,
        recorder: Recorder,
        marks: CoverageMarks,
    ) -> Self {
        let (segment_bytes, shards) = (plan.segment_bytes, plan.shards);
        Self { members, recorder, marks, segment_bytes, shards, damaged: Vec::new() }
    }

    /// Damages a node, running or not, unless the cluster cannot tolerate it now.
    pub fn inject(
        &mut self,
        machine: &SimulatedMachine,
        now: Duration,
        rng: &mut StdRng,
    ) -> DamageOutcome {
        let node = machine.node_id();
        if !machine.is_on() || !self.members.may_damage(node) {
            return DamageOutcome::default();
        }
        let mut outcome = DamageOutcome::default();
        let mut damaged_shards = BTreeSet::new();
        let shards = machine.disks().shards();
        let only = rng.random_bool(0.6).then(|| shards.choose(rng).copied()).flatten();
        for shard in shards.into_iter().filter(|shard| only.is_none_or(|only| only == *shard)) {
            let Some(disk) = machine.disks().disk(shard) else { continue };
            let (lost, damages) = damage_disk(&disk, rng);
            outcome.removed_segment |= lost;
            for what in damages {
                self.recorder.note(&format!("damage: node {node}, shard {shard}: {what}"));
                outcome.has_damaged = true;
                damaged_shards.insert(shard);
            }
        }
        if outcome.has_damaged {
            self.members.mark_damaged(node, DamageExtent::AnyFile);
            self.marks.hit(if outcome.removed_segment {
                CoverageMark::SegmentLost
            } else {
                CoverageMark::DamageDone
            });
            let after = Duration::from_millis(rng.random_range(500..12_000));
            self.damaged.push(DamagedNode {
                node,
                shards: damaged_shards,
                start_count: machine.start_count(),
                discovery: Discovery::Restart,
                discover_at: now + after,
                is_scrubbed: false,
                check_at: now,
            });
        }
        outcome
    }

    /// Lets the discovery of all damage be due now.
    pub fn discover_now(&mut self) {
        for damaged in &mut self.damaged {
            damaged.discover_at = Duration::ZERO;
        }
    }

    /// Forgets the damage of a node that is repaired, was wiped or was removed.
    pub fn forget(&mut self, node: u64) {
        self.damaged.retain(|damaged| damaged.node != node);
        self.members.on_repaired(node);
    }

    /// Checks whether damaged nodes are repaired. Returns one whose restart is due, which makes it
    /// read all of its log.
    pub fn check_recovery(&mut self, machines: &[SimulatedMachine], now: Duration) -> Option<u64> {
        let mut repaired = Vec::new();
        for damaged in self.damaged.iter_mut().filter(|damaged| damaged.check_at <= now) {
            damaged.check_at = now + CHECK_INTERVAL;
            let node = damaged.node;
            let machine = machines.iter().find(|machine| machine.node_id() == node)?;
            let is_restarted = machine.start_count() != damaged.start_count;
            match damaged.discovery {
                Discovery::Restart if !is_restarted => {
                    if damaged.discover_at <= now {
                        return Some(node);
                    }
                    continue;
                }
                Discovery::Scrub if !damaged.is_scrubbed => {
                    damaged.is_scrubbed = damaged.discover_at <= now && scrub(machine);
                    continue;
                }
                Discovery::Restart | Discovery::Scrub => {}
            }
            if reported_problem(machine).is_none()
                && disk_problem(machine.disks(), self.segment_bytes).is_none()
            {
                repaired.push(node);
            }
        }
        for node in repaired {
            self.recorder.note(&format!("node {node} is repaired"));
            self.forget(node);
        }
        None
    }

    /// Describes the remaining damage, for people.
    pub fn describe(&self, machines: &[SimulatedMachine]) -> String {
        if self.damaged.is_empty() {
            return "no node is damaged".to_owned();
        }
        let describe = |damaged: &DamagedNode| {
            let machine = machines.iter().find(|machine| machine.node_id() == damaged.node);
            let problem = machine.and_then(|it| {
                reported_problem(it).or(disk_problem(it.disks(), self.segment_bytes))
            });
            let progress = machine.and_then(|it| it.node()).map(|node| {
                damaged.shards.iter().filter_map(|it| node.repair_progress(*it)).collect::<Vec<_>>()
            });
            format!("node {} was damaged, remaining: {problem:?}, {progress:?}", damaged.node)
        };
        self.damaged.iter().map(describe).collect::<Vec<_>>().join("; ")
    }
}

/// Scrubs all data shards of a running node at once. Returns whether it did.
fn scrub(machine: &SimulatedMachine) -> bool {
    let Some(node) = machine.node().filter(|_| !machine.disks().has_stopped()) else {
        return false;
    };
    for shard in node.shards() {
        let (mut scrub, reads) = shard.replica().scrub();
        while !shard.replica().has_ended() {
            let scrubbed = scrub.step();
            if let Some(damage) = &scrubbed.damage {
                reads.note(damage);
            }
            if scrubbed.is_round {
                break;
            }
        }
    }
    true
}

/// Returns why a node is not well: a reason for which it is not ready, or damage or a repair that
/// it reports.
pub fn health_problem(machine: &SimulatedMachine) -> Option<String> {
    let node = machine.node();
    let unready = node.iter().flat_map(|node| node.unready()).map(|why| why.what).next();
    let shards = node.iter().flat_map(|node| node.shards()).map(|shard| shard.id()).chain([0]);
    let progress =
        || shards.filter_map(|shard| node.as_ref().and_then(|it| it.repair_progress(shard))).next();
    reported_problem(machine).or(unready).or_else(progress)
}

/// Result of an attempt to damage a node.
#[derive(Debug, Clone, Copy, Default)]
pub struct DamageOutcome {
    pub has_damaged: bool,
    pub removed_segment: bool,
}

/// Returns a problem that the node reports, or that it does not run.
fn reported_problem(machine: &SimulatedMachine) -> Option<String> {
    let Some(node) = machine.node() else { return Some("not running".to_owned()) };
    if let Some((shard, why)) = node.in_repair().into_iter().chain(node.stopped()).next() {
        return Some(format!("shard {shard}: {why}"));
    }
    let own = node.cluster().replica().damage();
    let shards = node.shards();
    own.into_iter().chain(shards.iter().flat_map(|shard| shard.damage())).next()
}

/// Returns damage on a node's disks. Opens a copy of each log and reads all of it.
pub fn disk_problem(disks: &NodeDisks, segment_bytes: u64) -> Option<String> {
    let shards = disks.shards().into_iter();
    let wrong = |shard| Some((shard, log_problem(&disks.disk(shard)?, segment_bytes)?));
    shards.filter_map(wrong).map(|(shard, what)| format!("shard {shard}: {what}")).next()
}

fn log_problem(disk: &SimulatedDisk, segment_bytes: u64) -> Option<String> {
    let copy = disk.fork();
    copy.set_free_bytes(None);
    copy.crash(Crash::KeepAll);
    if let Some(quarantined) = copy.files().into_iter().find(|name| is_repair_file(name)) {
        return Some(format!("{quarantined} exists"));
    }
    if copy.files().is_empty() {
        return None;
    }
    // Large enough for segments written with other settings.
    let options = Options { segment_bytes: segment_bytes.max(1 << 20), ..Options::default() };
    let (wal, _writer, _keeper, recovered) = match Wal::open(Arc::new(copy.reopen()), options) {
        Ok(opened) => opened,
        Err(error) => return Some(error.to_string()),
    };
    if let Some(error) = recovered.quarantined.first() {
        return Some(error.to_string());
    }
    let mut scrub = wal.scrub();
    loop {
        let scrubbed = scrub.step();
        if let Some(damage) = scrubbed.damage {
            return Some(damage.to_string());
        }
        if scrubbed.is_round {
            return None;
        }
    }
}

pub(crate) fn is_repair_file(name: &str) -> bool {
    name == "repair" || name.starts_with("aside-")
}

/// Damages synced data on a disk.
///
/// Returns whether a segment was removed, and a description of each damage. Does nothing while the
/// log is in repair, because the repair note has no copy.
fn damage_disk(disk: &SimulatedDisk, rng: &mut StdRng) -> (bool, Vec<String>) {
    let device = disk.fork();
    device.crash(Crash::LoseAll);
    let (cached, names) = (disk.files(), device.files());
    if names.iter().chain(&cached).any(|name| is_repair_file(name)) {
        return (false, Vec::new());
    }
    let newest = names.iter().filter_map(|name| chain_id(name)).max();
    let is_part = |name: &&String| {
        chain_id(name).is_some() || name.ends_with(".cold") || name.as_str() == "state"
    };
    let files: Vec<&String> =
        names.iter().filter(is_part).filter(|it| cached.contains(it)).collect();
    let is_sealed = |name: &&String| name.as_str() != "state" && chain_id(name) != newest;
    if rng.random_bool(0.2) {
        let sealed: Vec<&String> = files.iter().copied().filter(is_sealed).collect();
        if let Some(name) = sealed.choose(rng) {
            disk.remove_file(name);
            return (true, vec![format!("removed {name}")]);
        }
    }
    // Segments, the state file, or both: a small log may then lose its identity.
    let kind = Some(rng.random_bool(0.15)).filter(|_| rng.random_bool(0.9));
    let is_selected = |name: &&String| kind.is_none_or(|of_state| (*name == "state") == of_state);
    let files: Vec<&String> = files.into_iter().filter(is_selected).collect();
    let mut damages = Vec::new();
    for _ in 0..rng.random_range(1..=FLIPS_MAX) {
        let Some(name) = files.choose(rng).copied() else { break };
        let bytes = device.read_file(name).unwrap_or_default();
        let range = if is_sealed(&name) || name == "state" {
            0..bytes.len()
        } else {
            checked_range(&bytes, newest.unwrap_or(0))
        };
        if let Some(at) = random_nonzero(&bytes, range, rng) {
            let bit = rng.random_range(0..8);
            disk.flip_bit(name, at as u64 * 8 + bit);
            damages.push(format!("flipped bit {bit} of byte {at} of {name}"));
        }
    }
    (false, damages)
}

/// Parses the id of a segment of the log.
fn chain_id(name: &str) -> Option<u64> {
    u64::from_str_radix(name.strip_suffix(".seg")?, 16).ok()
}

/// Returns the range of the newest segment before its last group, whose header says that the range
/// was synced. Parsed by docs/wal-format.md, independently of the code under test.
fn checked_range(bytes: &[u8], id: u64) -> Range<usize> {
    let number = |header: &[u8], at: usize| {
        header.get(at..at + 8).and_then(|it| it.try_into().ok()).map_or(0, u64::from_le_bytes)
    };
    let is_group = |at: &usize| {
        let Some(header) = bytes.get(*at..*at + GROUP_HEADER) else { return false };
        let crc = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
        header.starts_with(b"HLXG")
            && (number(header, 16), number(header, 24)) == (id, *at as u64)
            && crc32fast::hash(&header[8..]) == crc
    };
    let last = (BLOCK..bytes.len()).step_by(BLOCK).rfind(is_group);
    0..last.unwrap_or(BLOCK.min(bytes.len()))
}
