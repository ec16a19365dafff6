//! Damage at rest: bits that turn over in what a node has stored, and segments that are lost.
//! One node at a time, so that of each shard at most a minority of the copies is damaged: another
//! one may be harmed only when the node has got over it, which is not taken from its own word.
//!
//! What may be harmed is what the log promises to notice. That leaves out the last group on the
//! disk: until a later one says that it was synced, damage to it looks like a torn write.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{Options, Wal};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::cluster::Machine;
use crate::disks::Disks;
use crate::marks::{Mark, Marks};
use crate::members::Members;
use crate::plan::Plan;
use crate::record::Recorder;

/// Bits that turn over on a disk at once, at most.
const FLIPS_MAX: usize = 8;

/// Places that are looked at to find one where something is written.
const PLACES_MAX: usize = 1_000;

/// Time between two looks at whether a node has got over it.
const LOOK_EVERY: Duration = Duration::from_millis(250);

const BLOCK: usize = 4 << 10;
const GROUP_HEADER: usize = 128;

/// A node that is harmed.
#[derive(Debug)]
struct Harm {
    node: u64,
    /// Its life in which it was.
    life: u64,
    /// When it is started anew: what is not sealed is read only then.
    restart_at: Duration,
    look_at: Duration,
}

/// See the module.
#[derive(Debug)]
pub struct Damage {
    members: Members,
    recorder: Recorder,
    marks: Marks,
    segment_bytes: u64,
    harm: Option<Harm>,
}

impl Damage {
    pub fn new(plan: &Plan, members: Members, recorder: Recorder, marks: Marks) -> Self {
        Self { members, recorder, marks, segment_bytes: plan.segment_bytes, harm: None }
    }

    /// Harms a node, running or not, unless the cluster cannot bear that now.
    pub fn strike(&mut self, machine: &Machine, now: Duration, rng: &mut StdRng) -> Struck {
        let node = machine.node_id();
        if !machine.is_on() || !self.members.may_harm(node) {
            return Struck::default();
        }
        let mut struck = Struck::default();
        let shards = machine.disks().shards();
        let only = rng.random_bool(0.6).then(|| shards.choose(rng).copied()).flatten();
        for shard in shards.into_iter().filter(|shard| only.is_none_or(|only| only == *shard)) {
            let Some(disk) = machine.disks().disk(shard) else { continue };
            let (lost, said) = harm(&disk, rng);
            struck.lost_segment |= lost;
            for what in said {
                self.recorder.note(&format!("damage: node {node}, shard {shard}: {what}"));
                struck.has_damaged = true;
            }
        }
        if struck.has_damaged {
            self.members.harm(node);
            self.marks.hit(if struck.lost_segment { Mark::SegmentLost } else { Mark::DamageDone });
            let after = Duration::from_millis(rng.random_range(500..12_000));
            let (life, look_at) = (machine.life(), now);
            self.harm = Some(Harm { node, life, restart_at: now + after, look_at });
        }
        struck
    }

    /// From now on nothing is waited for.
    pub fn hurry(&mut self) {
        if let Some(harm) = &mut self.harm {
            harm.restart_at = Duration::ZERO;
        }
    }

    /// A node has got empty disks, or is gone.
    pub fn forget(&mut self, node: u64) {
        if self.harm.as_ref().is_some_and(|harm| harm.node == node) {
            self.harm = None;
            self.members.on_whole();
        }
    }

    /// Who is to be started anew, so that it reads all that it has. Finds out whether it has got
    /// over its damage.
    pub fn tend(&mut self, machines: &[Machine], now: Duration) -> Option<u64> {
        let harm = self.harm.as_mut().filter(|harm| harm.look_at <= now)?;
        harm.look_at = now + LOOK_EVERY;
        let node = harm.node;
        let machine = machines.iter().find(|machine| machine.node_id() == node)?;
        if machine.life() == harm.life {
            return (harm.restart_at <= now).then_some(node);
        }
        if ails(machine).is_none() && ailment(machine.disks(), self.segment_bytes).is_none() {
            self.recorder.note(&format!("node {node} has got over its damage"));
            self.forget(node);
        }
        None
    }

    /// What a node still suffers from; for people.
    pub fn describe(&self, machines: &[Machine]) -> String {
        let Some(harm) = &self.harm else { return "nobody is harmed".to_owned() };
        let machine = machines.iter().find(|machine| machine.node_id() == harm.node);
        let said = machine.and_then(|it| ails(it).or(ailment(it.disks(), self.segment_bytes)));
        format!("node {} was harmed, and still: {said:?}", harm.node)
    }
}

/// What became of an attempt.
#[derive(Debug, Clone, Copy, Default)]
pub struct Struck {
    pub has_damaged: bool,
    pub lost_segment: bool,
}

/// What a node says that is wrong with it, if it runs.
fn ails(machine: &Machine) -> Option<String> {
    let Some(node) = machine.node() else { return Some("it does not run".to_owned()) };
    if let Some((shard, why)) = node.in_repair().into_iter().chain(node.stopped()).next() {
        return Some(format!("shard {shard}: {why}"));
    }
    let own = node.cluster().replica().damage();
    let shards = node.shards();
    own.into_iter().chain(shards.iter().flat_map(|shard| shard.damage())).next()
}

/// What is wrong with a node's disks, were it started on them as they are: everything is read.
pub fn ailment(disks: &Disks, segment_bytes: u64) -> Option<String> {
    let shards = disks.shards().into_iter();
    let wrong = |shard| Some((shard, log_ailment(&disks.disk(shard)?, segment_bytes)?));
    shards.filter_map(wrong).map(|(shard, what)| format!("shard {shard}: {what}")).next()
}

fn log_ailment(disk: &SimulatedDisk, segment_bytes: u64) -> Option<String> {
    let copy = disk.fork();
    copy.set_free_bytes(None);
    copy.crash(Crash::KeepAll);
    if let Some(aside) = copy.files().into_iter().find(|name| is_of_repair(name)) {
        return Some(format!("{aside} is there"));
    }
    if copy.files().is_empty() {
        return None;
    }
    // Large enough for whatever was written under other settings.
    let options = Options { segment_bytes: segment_bytes.max(1 << 20), ..Options::default() };
    let (wal, _writer, _keeper, recovered) = match Wal::open(Arc::new(copy.reopen()), options) {
        Ok(opened) => opened,
        Err(error) => return Some(error.to_string()),
    };
    if let Some(error) = recovered.withheld.first() {
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

fn is_of_repair(name: &str) -> bool {
    name == "repair" || name.starts_with("aside-")
}

/// Damages what is on a disk for sure, whatever becomes of what is not synced. Whether a segment is
/// gone, and what was done, in words; nothing while the log is in repair: the note that says so has
/// no copy.
fn harm(disk: &SimulatedDisk, rng: &mut StdRng) -> (bool, Vec<String>) {
    let device = disk.fork();
    device.crash(Crash::LoseAll);
    let (seen, names) = (disk.files(), device.files());
    if names.iter().chain(&seen).any(|name| is_of_repair(name)) {
        return (false, Vec::new());
    }
    let newest = names.iter().filter_map(|name| chain_id(name)).max();
    let is_part = |name: &&String| {
        chain_id(name).is_some() || name.ends_with(".cold") || name.as_str() == "state"
    };
    let files: Vec<&String> = names.iter().filter(is_part).filter(|it| seen.contains(it)).collect();
    let is_sealed = |name: &&String| name.as_str() != "state" && chain_id(name) != newest;
    if rng.random_bool(0.2) {
        let sealed: Vec<&String> = files.iter().copied().filter(is_sealed).collect();
        if let Some(name) = sealed.choose(rng) {
            disk.remove_file(name);
            return (true, vec![format!("{name} is gone")]);
        }
    }
    // One kind, or both of them: then nothing of a small log may say any more whose it is.
    let kind = Some(rng.random_bool(0.15)).filter(|_| rng.random_bool(0.9));
    let is_chosen = |name: &&String| kind.is_none_or(|of_state| (*name == "state") == of_state);
    let files: Vec<&String> = files.into_iter().filter(is_chosen).collect();
    let mut said = Vec::new();
    for _ in 0..rng.random_range(1..=FLIPS_MAX) {
        let Some(name) = files.choose(rng).copied() else { break };
        let bytes = device.read_file(name).unwrap_or_default();
        let fair = if is_sealed(&name) || name == "state" {
            0..bytes.len()
        } else {
            noticed(&bytes, newest.unwrap_or(0))
        };
        if let Some(at) = place(&bytes, fair, rng) {
            let bit = rng.random_range(0..8);
            disk.flip_bit(name, at as u64 * 8 + bit);
            said.push(format!("bit {bit} of byte {at} of {name}"));
        }
    }
    (false, said)
}

/// The id of a segment of the chain.
fn chain_id(name: &str) -> Option<u64> {
    u64::from_str_radix(name.strip_suffix(".seg")?, 16).ok()
}

/// A byte of the range that is not zero.
fn place(bytes: &[u8], range: Range<usize>, rng: &mut StdRng) -> Option<usize> {
    if range.is_empty() {
        return None;
    }
    (0..PLACES_MAX).map(|_| rng.random_range(range.clone())).find(|at| bytes[*at] != 0)
}

/// Of the newest segment: all that lies before its last group, whose header says that it was
/// synced. Read by the format's own description (docs/wal-format.md), not by the code that is
/// tried here.
fn noticed(bytes: &[u8], id: u64) -> Range<usize> {
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
