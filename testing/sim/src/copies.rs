//! Damage to sealed segments of several replicas of one shard at once. Each entry keeps a whole
//! copy on another running replica, and at most one replica has damage that only a new log repairs.
//! So the cluster must repair everything, whatever else happens meanwhile.
//!
//! An entry that is damaged on two replicas is never damaged together with such headers: a replica
//! does not report damage that it has not met, so the third one could give up the last whole copy.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use helix_wal::storage::{Crash, SimulatedDisk};
use helix_wal::{Options, ReadMode, Wal};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};

use crate::cluster::SimulatedMachine;
use crate::coverage::CoverageMark;
use crate::damage::{DamageInjector, DamagedNode, Discovery, is_repair_file};
use crate::membership::DamageExtent;
use crate::sealed::{BitFlip, SealedSegment, sealed_segments};

/// Damage to one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyDamage {
    /// An entry that no other copy of this draw has damaged.
    OwnEntry,
    /// An entry that two copies have damaged.
    SharedEntry,
    /// Headers of two groups that follow each other: only a new log repairs that.
    Headers,
}

use CopyDamage::{Headers, OwnEntry, SharedEntry};

/// Draws where at least three copies can be damaged.
const OF_THREE: [&[CopyDamage]; 6] = [
    &[OwnEntry, OwnEntry],
    &[OwnEntry, OwnEntry, OwnEntry],
    &[OwnEntry, OwnEntry, Headers],
    &[SharedEntry, SharedEntry, OwnEntry],
    &[SharedEntry, SharedEntry],
    &[Headers],
];

/// Draws where another replica is lost, gone or not ready.
const OF_TWO: [&[CopyDamage]; 3] = [&[OwnEntry, OwnEntry], &[OwnEntry, Headers], &[Headers]];

/// A whole replica of the shard that may be damaged.
struct ShardCopy<'a> {
    machine: &'a SimulatedMachine,
    disk: SimulatedDisk,
    wal: Wal,
    sealed: Vec<SealedSegment>,
    indexes: BTreeSet<u64>,
    checkpoint: u64,
}

impl<'a> ShardCopy<'a> {
    fn of(machine: &'a SimulatedMachine, shard_id: u64) -> Option<Self> {
        let node = machine.node().filter(|_| machine.is_on() && !machine.disks().has_stopped())?;
        let shard = node.shards().into_iter().find(|shard| shard.id() == shard_id)?;
        let replica = shard.replica();
        let is_whole = replica.repair_of().is_none()
            && replica.stopped().is_none()
            && replica.damage().is_empty()
            && shard.fetching().is_none();
        let disk = machine.disks().disk(shard_id).filter(|_| is_whole)?;
        let device = disk.fork();
        device.crash(Crash::LoseAll);
        if disk.files().iter().chain(&device.files()).any(|name| is_repair_file(name)) {
            return None;
        }
        let sealed = sealed_segments(&disk, &device);
        let indexes = sealed.iter().flat_map(SealedSegment::indexes).collect();
        let (wal, checkpoint) = (replica.wal().clone(), replica.checkpointed().0);
        Some(Self { machine, disk, wal, sealed, indexes, checkpoint })
    }

    fn has(&self, index: u64) -> bool {
        let found = || self.wal.log_id(index, ReadMode::Blocking);
        self.indexes.contains(&index) || matches!(found(), Ok(Some(Some(_))))
    }

    /// Returns whether the damaged log opens after a power loss, and the damage to entries can be
    /// repaired in place: the log knows their segments as sealed.
    fn survives(&self, flips: &[BitFlip], segment_bytes: u64) -> bool {
        let copy = self.disk.fork();
        copy.set_free_bytes(None);
        flips.iter().for_each(|flip| flip.apply(&copy));
        copy.crash(Crash::LoseAll);
        let options = Options { segment_bytes: segment_bytes.max(1 << 20), ..Options::default() };
        match Wal::open(Arc::new(copy.reopen()), options) {
            Ok((wal, _writer, _keeper, recovered)) => {
                recovered.quarantined.is_empty()
                    && flips.iter().all(|flip| wal.is_repairable(&flip.file))
            }
            Err(_) => false,
        }
    }

    /// Draws the bits to flip. Spares the entries in `spared`, which are damaged elsewhere.
    fn draw(
        &self,
        damage: CopyDamage,
        shared: Option<u64>,
        spared: &BTreeSet<u64>,
        rng: &mut StdRng,
    ) -> Option<Vec<BitFlip>> {
        match damage {
            OwnEntry => Some(vec![self.sealed.choose(rng)?.entry_flip(spared, rng)?]),
            SharedEntry => {
                let index = shared?;
                let segment = self.sealed.iter().find(|it| it.indexes().any(|it| it == index))?;
                Some(vec![segment.flip_of(index, rng)?])
            }
            Headers => {
                // Below the checkpoint, so that a restart does not need them.
                let is_old =
                    |it: &&SealedSegment| it.ends_by(self.checkpoint) && it.name.ends_with(".seg");
                let old: Vec<&SealedSegment> = self.sealed.iter().filter(is_old).collect();
                Some(old.choose(rng)?.header_flips(rng)?.into())
            }
        }
    }
}

impl DamageInjector {
    /// Damages copies of a shard from which a replica fetches now, if there is one.
    pub fn inject_during_fetch(
        &mut self,
        machines: &[SimulatedMachine],
        now: Duration,
        rng: &mut StdRng,
    ) {
        let nodes = machines.iter().filter_map(SimulatedMachine::node);
        let mut shards = nodes.flat_map(|node| node.shards());
        if let Some(shard) = shards.find(|shard| shard.fetching().is_some()) {
            self.inject_copies(machines, Some(shard.id()), now, rng);
        }
    }

    /// Damages copies of a shard, a random one if none is given, that has no damage yet. Returns
    /// whether it did.
    pub fn inject_copies(
        &mut self,
        machines: &[SimulatedMachine],
        shard: Option<u64>,
        now: Duration,
        rng: &mut StdRng,
    ) -> bool {
        let shard = shard.unwrap_or_else(|| rng.random_range(1..=self.shards));
        if self.damaged.iter().any(|damaged| damaged.shards.contains(&shard)) {
            return false;
        }
        let may_be_hit = |it: &&SimulatedMachine| self.members.may_damage_sealed(it.node_id());
        let mut copies: Vec<ShardCopy<'_>> = machines
            .iter()
            .filter(may_be_hit)
            .filter_map(|machine| ShardCopy::of(machine, shard))
            .collect();
        copies.shuffle(rng);
        let draws: &[&[CopyDamage]] = match copies.len() {
            0 | 1 => return false,
            2 => &OF_TWO,
            _ => &OF_THREE,
        };
        let Some(damages) = draws.choose(rng) else { return false };
        if damages.first() == Some(&SharedEntry) && rng.random_bool(0.5) {
            // A repair that always asks the same replica would ask a replica with the same damage.
            copies.sort_unstable_by_key(|copy| copy.machine.node_id());
        }
        let Some(hit) = self.draw_all(&copies, damages, rng) else { return false };
        for (copy, flips) in copies.iter().zip(hit) {
            self.damage_copy(copy, shard, &flips, now, rng);
        }
        let is_fetching = |machine: &SimulatedMachine| {
            let shards = machine.node().into_iter().flat_map(|node| node.shards());
            shards.into_iter().any(|it| it.id() == shard && it.fetching().is_some())
        };
        self.marks.hit(CoverageMark::CopiesDamaged);
        if self.members.is_changing() {
            self.marks.hit(CoverageMark::CopiesDamagedInChange);
        }
        if machines.iter().any(is_fetching) {
            self.marks.hit(CoverageMark::CopiesDamagedInFetch);
        }
        true
    }

    /// Draws the bits to flip in the first copies. `None` if an entry would have no whole copy, or
    /// there is nothing to damage.
    fn draw_all(
        &self,
        copies: &[ShardCopy<'_>],
        damages: &[CopyDamage],
        rng: &mut StdRng,
    ) -> Option<Vec<Vec<BitFlip>>> {
        let shared = match (damages, copies) {
            ([SharedEntry, ..], [one, other, ..]) => {
                let common: Vec<u64> = one.indexes.intersection(&other.indexes).copied().collect();
                // Older entries are not in memory, from where a damaged replica would send them.
                Some(*common.get(..common.len().div_ceil(2))?.choose(rng)?)
            }
            _ => None,
        };
        let mut damaged: BTreeSet<u64> = shared.into_iter().collect();
        let mut hit: Vec<Vec<BitFlip>> = Vec::new();
        for (copy, damage) in copies.iter().zip(damages) {
            let flips = copy.draw(*damage, shared, &damaged, rng)?;
            damaged.extend(flips.iter().filter_map(|flip| flip.index));
            if !copy.survives(&flips, self.segment_bytes) {
                return None;
            }
            hit.push(flips);
        }
        let is_damaged_in = |at: usize, index: u64| {
            hit.get(at).is_some_and(|flips| flips.iter().any(|flip| flip.index == Some(index)))
        };
        let has_whole_copy = |index: &u64| {
            let mut copies = copies.iter().enumerate();
            copies.any(|(at, copy)| !is_damaged_in(at, *index) && copy.has(*index))
        };
        damaged.iter().all(has_whole_copy).then_some(hit)
    }

    fn damage_copy(
        &mut self,
        copy: &ShardCopy<'_>,
        shard: u64,
        flips: &[BitFlip],
        now: Duration,
        rng: &mut StdRng,
    ) {
        let node = copy.machine.node_id();
        for flip in flips {
            flip.apply(&copy.disk);
            let BitFlip { file, byte, bit, index } = flip;
            self.recorder.note(&format!(
                "damage: node {node}, shard {shard}: flipped bit {bit} of byte {byte} of {file}, \
                 entry {index:?}"
            ));
        }
        self.members.mark_damaged(node, DamageExtent::SealedOnly);
        let discover_at = now + Duration::from_millis(rng.random_range(100..8_000));
        let discovery = if rng.random_bool(0.5) { Discovery::Restart } else { Discovery::Scrub };
        if let Some(damaged) = self.damaged.iter_mut().find(|damaged| damaged.node == node) {
            // It has damage in another shard too: discovered again from the start.
            damaged.shards.insert(shard);
            (damaged.start_count, damaged.is_scrubbed) = (copy.machine.start_count(), false);
            (damaged.discovery, damaged.discover_at) = (discovery, discover_at);
            return;
        }
        self.damaged.push(DamagedNode {
            node,
            shards: BTreeSet::from([shard]),
            start_count: copy.machine.start_count(),
            discovery,
            discover_at,
            is_scrubbed: false,
            check_at: now,
        });
    }
}
