//! Checks invariants of all nodes after every tick, below their API:
//!
//! - A shard has one leader in a term, and a majority has the vote for it on disk.
//! - Committed entries are on stable storage of a majority.
//! - Committed entries are equal (term, checksum) on all nodes, permanently.
//! - Synced entries survive crashes. Only a replica of a damaged node may start with a new log, and
//!   it does not lead until it has all required entries again.
//! - A replica whose log opens gives it up only if a majority of voters has all of its committed
//!   entries without it.
//! - Only a damaged node reports damage.
//! - Votes never go back and never change within a term, also across crashes.
//! - High watermarks and log starts of a running node never go back.
//! - Purged, checkpoint, applied, committed and last index are in this order, and the purged index
//!   never goes back.
//! - A replica that was deleted or lost never returns under its id.
//! - A checkpoint covers only entries that this node has synced or got in a snapshot.

mod log_rules;
mod new_shards;
mod quorums;

use std::collections::{BTreeMap, BTreeSet};

use helix_server::node::Node;
use helix_server::raft::{Replica, node_of};
use helix_server::shard::Shard;
use helix_wal::{LogId, LogState, ReadMode, Wal};

use crate::cluster::SimulatedMachine;
use crate::coverage::{CoverageMark, CoverageMarks};
use crate::membership::{DamageExtent, MembershipTracker};
use crate::observation::ReplicaObservation;
use crate::placement_watch::has_log;
use crate::recorder::Recorder;
use log_rules::{MissingEntry, check_kept, committed_prefix, read_vote, violates_vote_rules};
use new_shards::NewShards;

/// Ticks between checks of partitions, and between checks of segments.
const PARTITIONS_EVERY: u64 = 7;
const SEGMENTS_EVERY: u64 = 1_000;

/// Maximum entries compared at once.
const HEADS_MAX: usize = 512;

/// Checks the invariants and keeps the state they need.
#[derive(Debug)]
pub struct InvariantChecker {
    members: MembershipTracker,
    recorder: Recorder,
    marks: CoverageMarks,
    ticks: u64,
    /// Leader node by shard and term.
    leaders: BTreeMap<(u64, u64), u64>,
    /// Last known leader by shard.
    last_leader: BTreeMap<u64, u64>,
    /// Term and checksum of committed entries, by shard and index.
    entries: BTreeMap<(u64, u64), (u64, u32)>,
    seen: BTreeMap<(u64, u64), ReplicaObservation>,
    /// Start count of each node at the last check.
    start_counts: BTreeMap<u64, u64>,
    /// Leaders first seen in this tick.
    elected: Vec<Elected>,
    /// Logs given up in this tick that could be opened.
    given_up: Vec<GivenUpLog>,
    /// Shards have replicas on some of the members: majorities are those of their voters.
    is_placed: bool,
    /// Replicas whose log was deleted or lost, by shard and replica id.
    gone: BTreeSet<(u64, u64)>,
    new_shards: NewShards,
}

/// A log that a replica gave up.
#[derive(Debug)]
struct GivenUpLog {
    node: u64,
    shard: u64,
    replica: u64,
    /// Sets of voters that the replica knew.
    configs: Vec<BTreeSet<u64>>,
    /// Last entry of the log that is committed.
    required: u64,
}

#[derive(Debug)]
struct Elected {
    shard: u64,
    term: u64,
    replica: u64,
    /// Sets of voters that elected it.
    configs: Vec<BTreeSet<u64>>,
}

/// One replica at the time of a check.
struct ReplicaSnapshot<'a> {
    node_id: u64,
    shard_id: u64,
    replica: &'a Replica,
    state: LogState,
    /// Term in which the replica is the leader.
    leader_term: Option<u64>,
}

impl InvariantChecker {
    pub fn new(
        members: MembershipTracker,
        recorder: Recorder,
        marks: CoverageMarks,
        is_placed: bool,
    ) -> Self {
        Self {
            members,
            recorder,
            marks,
            ticks: 0,
            leaders: BTreeMap::new(),
            last_leader: BTreeMap::new(),
            entries: BTreeMap::new(),
            seen: BTreeMap::new(),
            start_counts: BTreeMap::new(),
            elected: Vec::new(),
            given_up: Vec::new(),
            is_placed,
            gone: BTreeSet::new(),
            new_shards: NewShards::default(),
        }
    }

    /// Checks every running node.
    ///
    /// # Errors
    /// The invariant that is violated.
    pub fn check_nodes(&mut self, machines: &[SimulatedMachine]) -> Result<(), String> {
        self.ticks += 1;
        for machine in machines {
            let node_id = machine.node_id();
            self.forget_if_wiped(node_id);
            if machine.node().is_some()
                && self.start_counts.insert(node_id, machine.start_count())
                    != Some(machine.start_count())
            {
                // The node may have restarted within one tick.
                let mine = self.seen.range_mut((node_id, 0)..=(node_id, u64::MAX));
                mine.for_each(|(_, seen)| seen.end());
            }
            match machine.node() {
                // A disk without power cannot be read; entries that it synced count.
                Some(node) if machine.disks().has_stopped() => {
                    self.final_observation(node_id, &node)
                }
                Some(node) => {
                    self.new_shards.update(&node);
                    self.forget_deleted(machine, &node);
                    self.check_node(node_id, &node)?;
                }
                None => {
                    // The node ended in this tick; entries synced until then count.
                    if let Some(node) = machine.last_node() {
                        self.final_observation(node_id, &node);
                    }
                    let mine = self.seen.range_mut((node_id, 0)..=(node_id, u64::MAX));
                    mine.for_each(|(_, seen)| seen.end());
                }
            }
        }
        for elected in std::mem::take(&mut self.elected) {
            self.check_votes(machines, &elected)?;
        }
        for log in std::mem::take(&mut self.given_up) {
            self.check_given_up(&log)?;
        }
        self.check_majorities()
    }

    /// Checks that a replica gave up its log by the rule of docs/decisions/0035: in each set of
    /// voters that it, or any running replica, knew, a majority has everything without it.
    fn check_given_up(&self, log: &GivenUpLog) -> Result<(), String> {
        let has_all = |id: &&u64| {
            let seen = self.seen.get(&(node_of(**id), log.shard));
            **id != log.replica
                && seen.is_some_and(|it| {
                    let last = it.stable.max(it.purged).map_or(0, |id| id.index);
                    it.replica_id == **id && !it.in_repair && last >= log.required
                })
        };
        let is_allowed = |configs: &[BTreeSet<u64>]| {
            !configs.is_empty()
                && configs
                    .iter()
                    .all(|voters| voters.iter().filter(has_all).count() > voters.len() / 2)
        };
        let of_shard = self.seen.iter().filter(|((_, shard), it)| *shard == log.shard && it.is_up);
        let mut known = of_shard.map(|(_, it)| &it.configs).chain([&log.configs]);
        if known.any(|configs| is_allowed(configs)) {
            return Ok(());
        }
        let ends = self.seen.iter().filter(|((_, shard), _)| *shard == log.shard);
        let ends: Vec<_> = ends
            .map(|((node, _), it)| (*node, it.replica_id, it.stable.map_or(0, |id| id.index)))
            .collect();
        Err(format!(
            "node {}, shard {}: gave up its log, which had committed entries up to {}, but no \
             majority of {:?} has them without it: (node, replica, last) {ends:?}",
            log.node, log.shard, log.required, log.configs
        ))
    }

    /// Resets the observations of a node whose disks were wiped.
    fn forget_if_wiped(&mut self, node_id: u64) {
        let wipes = self.members.wipes(node_id);
        let mine = self.seen.range_mut((node_id, 0)..=(node_id, u64::MAX));
        for ((_, shard), seen) in mine.filter(|(_, seen)| seen.wipes < wipes) {
            if seen.takes_part() {
                self.gone.insert((*shard, seen.replica_id));
            }
            *seen = ReplicaObservation {
                wipes,
                lost: seen.stable.max(seen.lost),
                ..ReplicaObservation::default()
            };
        }
    }

    /// Resets the observations of replicas whose files were deleted.
    fn forget_deleted(&mut self, machine: &SimulatedMachine, node: &Node) {
        if !self.is_placed {
            return;
        }
        let node_id = machine.node_id();
        let mine = self.seen.range_mut((node_id, 1)..=(node_id, u64::MAX));
        for ((_, shard), seen) in mine.filter(|(_, seen)| seen.replica_id != 0) {
            let has_files =
                || machine.disks().disk(*shard).is_some_and(|disk| has_log(&disk.files()));
            if node.shard(*shard).is_none() && !has_files() {
                if seen.takes_part() {
                    self.gone.insert((*shard, seen.replica_id));
                }
                *seen = ReplicaObservation {
                    wipes: seen.wipes,
                    restarts: seen.restarts,
                    ..ReplicaObservation::default()
                };
            }
        }
    }

    fn final_observation(&mut self, node_id: u64, node: &Node) {
        let (shards, own) = (node.shards(), node.cluster().replica());
        let all = shards.iter().map(|shard| (shard.id(), shard.replica())).chain([(0, &*own)]);
        for (shard_id, replica) in all {
            let seen = self.seen.entry((node_id, shard_id)).or_default();
            seen.catch_up();
            if let Some(quarantined) = replica.repair_of().filter(|_| !seen.in_repair) {
                seen.replace_log(quarantined);
            }
            let state = replica.wal().state();
            seen.stable = state.synced.min(state.last);
            (seen.is_up, seen.wal) = (false, None);
        }
    }

    fn check_node(&mut self, node_id: u64, node: &Node) -> Result<(), String> {
        // Also for shards that were closed since the last check to be rebuilt.
        let mine = self.seen.range_mut((node_id, 0)..=(node_id, u64::MAX));
        mine.for_each(|(_, seen)| seen.catch_up());
        if let Some((shard, why)) = node.damaged_shards().first() {
            return Err(format!("node {node_id} does not serve shard {shard}: {why}"));
        }
        for (shard_id, restarts) in node.restarts() {
            // As after a restart of the node: unsynced state may be gone.
            let wipes = self.members.wipes(node_id);
            let seen = self.seen.entry((node_id, shard_id));
            let seen = seen.or_insert_with(|| ReplicaObservation::after(wipes));
            if std::mem::replace(&mut seen.restarts, restarts) < restarts {
                seen.is_up = false;
            }
        }
        let replica = node.cluster().replica();
        let leadership = replica.leadership();
        let is_leader = leadership.leader == Some(replica.id());
        self.check_replica(ReplicaSnapshot {
            node_id,
            shard_id: 0,
            replica: &replica,
            state: replica.wal().state(),
            leader_term: is_leader.then_some(leadership.term),
        })?;
        for shard in node.shards() {
            self.check_replica(ReplicaSnapshot {
                node_id,
                shard_id: shard.id(),
                replica: shard.replica(),
                state: shard.replica().wal().state(),
                leader_term: shard.is_leader().then(|| shard.term()),
            })?;
            if self.ticks.is_multiple_of(PARTITIONS_EVERY) {
                self.check_partitions((node_id, shard.id()), &partition_offsets(&shard))?;
            }
            if self.ticks.is_multiple_of(SEGMENTS_EVERY)
                && shard.replica().wal().stats().segments > 2
            {
                self.marks.hit(CoverageMark::SegmentRolled);
            }
        }
        Ok(())
    }

    fn check_replica(&mut self, snapshot: ReplicaSnapshot<'_>) -> Result<(), String> {
        let ReplicaSnapshot { node_id, shard_id, replica, state, leader_term } = snapshot;
        let damage = self.members.damage_of(node_id);
        let is_damaged = damage.is_some();
        let has_damage = self.members.has_damage();
        let wal = replica.wal();
        let index = |id: Option<LogId>| id.map_or(0, |id| id.index);
        let name = format!("node {node_id}, shard {shard_id}");
        if let Some(damage) = replica.damage().first().filter(|_| !is_damaged) {
            return Err(format!("{name} is not damaged, but reports damage: {damage}"));
        }
        let of_shard = self.seen.iter().filter(|((_, shard), _)| *shard == shard_id);
        let commits: Vec<(u64, Wal)> =
            of_shard.filter_map(|(_, seen)| Some((seen.committed, seen.wal.clone()?))).collect();
        let seen = self.seen.entry((node_id, shard_id)).or_insert_with(|| {
            // A replica that a split has built takes part from the first observation on.
            ReplicaObservation::after(self.members.wipes(node_id))
        });
        seen.catch_up();
        seen.wal = Some(wal.clone());
        if !wal.is_open() {
            // Its state may include unsynced votes and entries that were never acknowledged.
            seen.is_up = false;
            if replica.repair_of().is_some() && !seen.in_repair {
                // A new log that ended before it was observed. The quarantined one still counts.
                seen.wal = None;
            }
            return Ok(());
        }
        let vote = state.vote.as_deref().and_then(read_vote);
        match replica.repair_of() {
            Some(quarantined) if !seen.in_repair => {
                if !is_damaged {
                    return Err(format!("{name} gave up an undamaged log: {}", quarantined.why));
                }
                if damage == Some(DamageExtent::SealedOnly) {
                    let lost = seen.stable.max(seen.lost);
                    self.given_up.push(GivenUpLog {
                        node: node_id,
                        shard: shard_id,
                        replica: seen.replica_id,
                        configs: seen.configs.clone(),
                        required: committed_prefix(lost, &commits),
                    });
                }
                seen.replace_log(quarantined);
            }
            Some(_) if leader_term.is_some() => {
                return Err(format!("{name} leads in {leader_term:?} during its repair"));
            }
            Some(_) => {}
            None if seen.in_repair => {
                let (had, has) = (index(seen.lost), index(state.synced).max(index(state.purged)));
                let required = committed_prefix(seen.lost, &commits);
                if has < required {
                    return Err(format!(
                        "{name} is repaired with entries up to {has}; it had entries up to {had}, \
                         of which those up to {required} are committed"
                    ));
                }
                (seen.in_repair, seen.lost) = (false, None);
            }
            None => {}
        }
        if self.is_placed && seen.replica_id != 0 && seen.replica_id != replica.id() {
            // Deleted and created again within a tick.
            if seen.takes_part() {
                self.gone.insert((shard_id, seen.replica_id));
            }
            *seen = ReplicaObservation {
                wal: seen.wal.take(),
                wipes: seen.wipes,
                restarts: seen.restarts,
                ..ReplicaObservation::default()
            };
        }
        if seen.replica_id != replica.id() && self.gone.contains(&(shard_id, replica.id())) {
            return Err(format!("{name}: replica {} is gone, and returns", replica.id()));
        }
        seen.replica_id = replica.id();
        if has_damage && !seen.in_repair {
            seen.configs = replica.membership().configs;
        } else if self.is_placed {
            seen.note_configs(replica.membership().configs);
        }
        if !seen.is_up {
            seen.is_up = true;
            (seen.compared, seen.committed) = (index(state.purged), 0);
            seen.partitions.clear();
            seen.leader_term = None;
            if let Some(stable) = seen.stable {
                match check_kept(wal, &state, stable) {
                    Err(MissingEntry::Unreadable(_)) if is_damaged => {}
                    kept => kept.map_err(|why| format!("{name}: {}", why.into_text()))?,
                }
            }
            if index(seen.purged) > index(state.purged) {
                return Err(format!(
                    "{name}: purged up to {:?}, after a restart up to {:?}",
                    seen.purged, state.purged
                ));
            }
            if index(state.purged) > 0 {
                self.marks.hit(CoverageMark::RestartedFromCheckpoint);
            }
        }
        if let (Some(before), now) = (seen.vote, vote)
            && now.is_none_or(|now| violates_vote_rules(before, now))
        {
            return Err(format!("{name}: voted {before:?} (term, node), then {now:?}"));
        }
        // Queued requests are not on disk yet and may be lost in a crash.
        if wal.unsynced_for().is_none() {
            (seen.vote, seen.purged) = (vote, state.purged);
        }
        seen.stable = state.synced.min(state.last);
        let (committed, last, purged) =
            (index(state.committed), index(state.last), index(state.purged));
        if committed > last || purged > last {
            return Err(format!(
                "{name}: log ends at {last}, committed {committed}, purged {purged}"
            ));
        }
        if self.ticks.is_multiple_of(PARTITIONS_EVERY) {
            // The values come from openraft, its state machine and the log. The committed index of
            // the log is not updated by a snapshot.
            let (checkpoint, purged) = replica.checkpointed();
            let applied = replica.applied();
            let order = [purged, checkpoint, applied, committed.max(checkpoint), last];
            if !order.is_sorted() {
                return Err(format!(
                    "{name}: purged, checkpoint, applied, committed, last are {order:?}"
                ));
            }
            if checkpoint > index(state.synced).max(purged) {
                return Err(format!(
                    "{name}: a checkpoint covers {checkpoint}, but {:?} is synced",
                    state.synced
                ));
            }
        }
        if purged > seen.compared {
            seen.compared = purged;
            self.marks.hit(CoverageMark::Purge);
        }
        if committed < seen.committed {
            return Err(format!("{name}: committed {}, then {committed}", seen.committed));
        }
        if committed > seen.committed {
            seen.committed = committed;
            self.recorder.note(&format!("{name}: committed {committed}"));
        }
        if leader_term != seen.leader_term {
            seen.leader_term = leader_term;
            self.recorder.note(&format!("{name}: leads in {leader_term:?}"));
            self.on_leader_change((node_id, shard_id), leader_term, replica)?;
        }
        self.compare((node_id, shard_id), wal, committed, is_damaged)
    }

    fn on_leader_change(
        &mut self,
        (node, shard): (u64, u64),
        term: Option<u64>,
        replica: &Replica,
    ) -> Result<(), String> {
        let Some(term) = term else { return Ok(()) };
        let configs = replica.membership().configs;
        self.elected.push(Elected { shard, term, replica: replica.id(), configs });
        let first = *self.leaders.entry((shard, term)).or_insert(node);
        if first != node {
            return Err(format!("shard {shard}: nodes {first} and {node} lead in term {term}"));
        }
        if self.last_leader.insert(shard, node).is_some_and(|before| before != node) {
            self.marks.hit(CoverageMark::LeaderChange);
            if shard > 0 && self.recorder.batches_in_flight() > 0 {
                self.marks.hit(CoverageMark::LeaderChangeWithBatchInFlight);
            }
        }
        Ok(())
    }

    /// Compares entries committed since the last tick with those of other nodes.
    fn compare(
        &mut self,
        of: (u64, u64),
        wal: &Wal,
        committed: u64,
        is_damaged: bool,
    ) -> Result<(), String> {
        let (node, shard) = of;
        let Some(seen) = self.seen.get_mut(&of) else { return Ok(()) };
        while seen.compared < committed {
            let range = seen.compared + 1..committed + 1;
            let heads = match wal.heads(range.clone(), HEADS_MAX, ReadMode::Blocking) {
                Ok(heads) => heads.unwrap_or_default(),
                Err(helix_wal::Error::Poisoned { .. } | helix_wal::Error::Closed) => return Ok(()),
                // The damage is reported, and the replica will be rebuilt.
                Err(helix_wal::Error::Damaged { .. }) if is_damaged => return Ok(()),
                Err(error) => return Err(format!("node {node}, shard {shard}: {error}")),
            };
            if heads.is_empty() {
                return Err(format!("node {node}, shard {shard}: {range:?} is not in its log"));
            }
            for head in heads {
                let (term, crc) = (head.id.term, head.payload.crc);
                let first = *self.entries.entry((shard, head.id.index)).or_insert((term, crc));
                if first != (term, crc) {
                    return Err(format!(
                        "shard {shard}: entry {} is committed with (term, checksum) {first:?}, but \
                         on node {node} with {:?}",
                        head.id.index,
                        (term, crc)
                    ));
                }
                seen.compared = head.id.index;
            }
        }
        Ok(())
    }

    fn check_partitions(&mut self, of: (u64, u64), rows: &[(u64, u64, u64)]) -> Result<(), String> {
        // Observations of a stopped replica are of its previous run.
        let Some(seen) = self.seen.get_mut(&of).filter(|seen| seen.is_up) else { return Ok(()) };
        for (id, start, high) in rows {
            let before = seen.partitions.insert(*id, (*start, *high));
            if start > high {
                return Err(format!(
                    "node {}, shard {}: partition {id} starts at {start} and ends at {high}",
                    of.0, of.1
                ));
            }
            if let Some(before) = before.filter(|before| before.0 > *start || before.1 > *high) {
                return Err(format!(
                    "node {}, shard {}: partition {id} went from {before:?} (log start, high \
                     watermark) to {:?}",
                    of.0,
                    of.1,
                    (start, high)
                ));
            }
        }
        Ok(())
    }

    /// Returns the last entry of each shard, if all nodes run, agree on it and have applied it.
    pub fn level(&self, machines: &[SimulatedMachine]) -> Option<Vec<(u64, u64)>> {
        let mut levels = BTreeMap::new();
        let members = self.members.all();
        for machine in machines.iter().filter(|machine| members.contains(&machine.node_id())) {
            let node = machine.node()?;
            if !node.stopped().is_empty() {
                return None;
            }
            for shard in node.shards() {
                let status = shard.status();
                let level = (status.last_index, status.term);
                let is_level = status.applied == status.last_index
                    && *levels.entry(shard.id()).or_insert(level) == level;
                if !is_level {
                    return None;
                }
            }
        }
        Some(levels.into_values().collect())
    }

    /// Checks that replicas that applied the same entries have equal partitions, and that each
    /// partition is in one shard.
    ///
    /// # Errors
    /// The first difference.
    pub fn compare_partitions(&self, machines: &[SimulatedMachine]) -> Result<(), String> {
        let members = self.members.all();
        let mut first: BTreeMap<(u64, u64), (u64, (u64, u64))> = BTreeMap::new();
        let mut shard_of: BTreeMap<u64, u64> = BTreeMap::new();
        for machine in machines.iter().filter(|it| members.contains(&it.node_id())) {
            for shard in machine.node().iter().flat_map(|node| node.shards()) {
                for (partition, start, next) in partition_offsets(&shard) {
                    let owner = *shard_of.entry(partition).or_insert(shard.id());
                    if owner != shard.id() {
                        let other = shard.id();
                        return Err(format!("partition {partition} is in shards {owner}, {other}"));
                    }
                    let mine = (machine.node_id(), (start, next));
                    let other = *first.entry((shard.id(), partition)).or_insert(mine);
                    if other.1 != mine.1 {
                        return Err(format!(
                            "shard {}, partition {partition}: (node, (log start, high watermark)) \
                             are {other:?} and {mine:?}",
                            shard.id()
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns (id, log start, high watermark) of each partition.
fn partition_offsets(shard: &Shard) -> Vec<(u64, u64, u64)> {
    shard.read_state(|state| {
        let rows = state.partitions();
        rows.map(|row| (row.id.0, row.log_start, row.next_offset)).collect()
    })
}
