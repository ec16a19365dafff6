//! Looks at all nodes after every tick, beneath their API, for what must hold at any moment:
//!
//! - a shard has one leader in a term, and a majority has that vote on its disks;
//! - what is committed anywhere is on stable storage of a majority;
//! - committed entries are the same (term, checksum) everywhere, for ever;
//! - what was on stable storage is there after a crash; only a replica whose node was damaged may
//!   begin anew, and it leads nothing until it has all that counts on it again;
//! - only a node that was damaged finds damage;
//! - votes never go back or change within a term, also over crashes;
//! - high watermarks and log starts of a running node never go back;
//! - what is purged stays so, and is in a checkpoint; that was applied; that was committed; that is
//!   in the log;
//! - a checkpoint holds nothing that this node has not synced, or got whole from another one.

use std::collections::BTreeMap;

use helix_server::node::Node;
use helix_server::raft::Replica;
use helix_server::shard::Shard;
use helix_wal::storage::Crash;
use helix_wal::{How, LogId, LogState, Wal};

use crate::cluster::Machine;
use crate::marks::{Mark, Marks};
use crate::members::Members;
use crate::record::Recorder;
use crate::seen::{Seen, Vote};

/// Ticks between two looks at partitions and at segments.
const PARTITIONS_EVERY: u64 = 7;
const SEGMENTS_EVERY: u64 = 1_000;

/// Entries that are looked at in one piece.
const HEADS_MAX: usize = 512;

/// See the module.
#[derive(Debug)]
pub struct Watch {
    members: Members,
    recorder: Recorder,
    marks: Marks,
    ticks: u64,
    /// Node that leads, by shard and term.
    leaders: BTreeMap<(u64, u64), u64>,
    /// Last known leader by shard.
    last_leader: BTreeMap<u64, u64>,
    /// Term and checksum of committed entries, by shard and index.
    entries: BTreeMap<(u64, u64), (u64, u32)>,
    seen: BTreeMap<(u64, u64), Seen>,
    /// How often a node had been started when it was last seen running.
    lives: BTreeMap<u64, u64>,
    /// Leaders that this tick has shown for the first time.
    elected: Vec<Elected>,
}

#[derive(Debug)]
struct Elected {
    shard: u64,
    term: u64,
    replica: u64,
}

/// One replica at one moment.
struct Look<'a> {
    node_id: u64,
    shard_id: u64,
    replica: &'a Replica,
    state: LogState,
    /// Term in which it leads.
    leads_in: Option<u64>,
}

impl Watch {
    pub fn new(members: Members, recorder: Recorder, marks: Marks) -> Self {
        Self {
            members,
            recorder,
            marks,
            ticks: 0,
            leaders: BTreeMap::new(),
            last_leader: BTreeMap::new(),
            entries: BTreeMap::new(),
            seen: BTreeMap::new(),
            lives: BTreeMap::new(),
            elected: Vec::new(),
        }
    }

    /// Looks at every node that runs.
    ///
    /// # Errors
    /// What does not hold.
    pub fn look(&mut self, machines: &[Machine]) -> Result<(), String> {
        self.ticks += 1;
        for machine in machines {
            let node_id = machine.node_id();
            self.forget_if_wiped(node_id);
            if machine.node().is_some()
                && self.lives.insert(node_id, machine.life()) != Some(machine.life())
            {
                // It may have ended and be open again within one tick.
                let mine = self.seen.range_mut((node_id, 0)..=(node_id, u64::MAX));
                mine.for_each(|(_, seen)| seen.end());
            }
            match machine.node() {
                // A disk without power answers nothing more; what it had synced counts.
                Some(node) if machine.disks().has_stopped() => self.last_look(node_id, &node),
                Some(node) => self.look_at(node_id, &node)?,
                None => {
                    // It has ended in this tick; what it had synced until then counts.
                    if let Some(node) = machine.last_node() {
                        self.last_look(node_id, &node);
                    }
                    let mine = self.seen.range_mut((node_id, 0)..=(node_id, u64::MAX));
                    mine.for_each(|(_, seen)| seen.end());
                }
            }
        }
        for elected in std::mem::take(&mut self.elected) {
            self.votes(machines, &elected)?;
        }
        self.majorities()
    }

    /// Who leads got a majority's votes, and each is on a disk: a vote that a crash can take back
    /// may be given twice. Read from the disks, as they were if the power went now.
    fn votes(&self, machines: &[Machine], elected: &Elected) -> Result<(), String> {
        let (members, majority) = (self.members.all(), self.members.majority());
        let Elected { shard, term, replica } = *elected;
        let given =
            machines.iter().filter(|it| members.contains(&it.node_id())).filter(|machine| {
                let id = Some(machine.node_id());
                if id == self.members.lost() || id == self.members.harmed() {
                    return true;
                }
                let Some(disk) = machine.disks().disk(shard) else { return false };
                let device = disk.fork();
                device.crash(Crash::LoseAll);
                // One that cannot be read just now is another check's business.
                let Ok(report) = helix_wal::inspect(&device.reopen()) else { return true };
                let vote = report.vote.as_deref().and_then(read_vote);
                vote.is_some_and(|vote| vote.0 > term || (vote.0, vote.1) == (term, replica))
            });
        let given: Vec<u64> = given.map(Machine::node_id).collect();
        if given.len() < majority {
            return Err(format!(
                "shard {shard}: {replica} leads in term {term}, and only nodes {given:?} have that \
                 vote on their disks"
            ));
        }
        Ok(())
    }

    /// Replicas on emptied disks begin anew: nothing is kept, nobody was voted for.
    fn forget_if_wiped(&mut self, node_id: u64) {
        let wipes = self.members.wipes(node_id);
        let mine = self.seen.range_mut((node_id, 0)..=(node_id, u64::MAX));
        for (_, seen) in mine.filter(|(_, seen)| seen.wipes < wipes) {
            *seen = Seen { wipes, lost: seen.stable.max(seen.lost), ..Seen::default() };
        }
    }

    fn last_look(&mut self, node_id: u64, node: &Node) {
        let (shards, own) = (node.shards(), node.cluster().replica());
        let all = shards.iter().map(|shard| (shard.id(), shard.replica())).chain([(0, &*own)]);
        for (shard_id, replica) in all {
            let seen = self.seen.entry((node_id, shard_id)).or_default();
            seen.catch_up();
            if let Some(aside) = replica.repair_of().filter(|_| !seen.in_repair) {
                seen.begin_anew(aside);
            }
            let state = replica.wal().state();
            seen.stable = state.synced.min(state.last);
            (seen.is_up, seen.wal) = (false, None);
        }
    }

    fn look_at(&mut self, node_id: u64, node: &Node) -> Result<(), String> {
        // Also of shards that were closed since the last look, to be filled anew.
        let mine = self.seen.range_mut((node_id, 0)..=(node_id, u64::MAX));
        mine.for_each(|(_, seen)| seen.catch_up());
        if let Some((shard, why)) = node.withheld().first() {
            return Err(format!("node {node_id} withholds shard {shard}: {why}"));
        }
        for (shard_id, restarts) in node.restarts() {
            // As after a restart of the node: what it knew and had not on its disk may be gone.
            let seen = self.seen.entry((node_id, shard_id)).or_default();
            if std::mem::replace(&mut seen.restarts, restarts) < restarts {
                seen.is_up = false;
            }
        }
        let replica = node.cluster().replica();
        let leadership = replica.leadership();
        let leads = leadership.leader == Some(replica.id());
        self.replica(Look {
            node_id,
            shard_id: 0,
            replica: &replica,
            state: replica.wal().state(),
            leads_in: leads.then_some(leadership.term),
        })?;
        for shard in node.shards() {
            self.replica(Look {
                node_id,
                shard_id: shard.id(),
                replica: shard.replica(),
                state: shard.wal().state(),
                leads_in: shard.leads().then(|| shard.term()),
            })?;
            if self.ticks.is_multiple_of(PARTITIONS_EVERY) {
                self.partitions((node_id, shard.id()), &rows(&shard))?;
            }
            if self.ticks.is_multiple_of(SEGMENTS_EVERY) && shard.wal().stats().segments > 2 {
                self.marks.hit(Mark::SegmentRolled);
            }
        }
        Ok(())
    }

    fn replica(&mut self, look: Look<'_>) -> Result<(), String> {
        let Look { node_id, shard_id, replica, state, leads_in } = look;
        let is_harmed = self.members.harmed() == Some(node_id);
        let wal = replica.wal();
        let index = |id: Option<LogId>| id.map_or(0, |id| id.index);
        let name = format!("node {node_id}, shard {shard_id}");
        if let Some(damage) = replica.damage().first().filter(|_| !is_harmed) {
            return Err(format!("{name} is whole, and finds damage: {damage}"));
        }
        let of_shard = self.seen.iter().filter(|((_, shard), _)| *shard == shard_id);
        let commits: Vec<(u64, Wal)> =
            of_shard.filter_map(|(_, seen)| Some((seen.committed, seen.wal.clone()?))).collect();
        let seen = self.seen.entry((node_id, shard_id)).or_default();
        seen.catch_up();
        seen.wal = Some(wal.clone());
        if !wal.is_open() {
            // What it says of votes and entries may never have been written; nobody was told.
            seen.is_up = false;
            return Ok(());
        }
        let vote = state.vote.as_deref().and_then(read_vote);
        match replica.repair_of() {
            Some(aside) if !seen.in_repair => {
                if !is_harmed {
                    return Err(format!("{name} gave up a log that was whole: {}", aside.why));
                }
                seen.begin_anew(aside);
            }
            Some(_) if leads_in.is_some() => {
                return Err(format!("{name} leads in {leads_in:?}, and is in repair"));
            }
            Some(_) => {}
            None if seen.in_repair => {
                let (had, has) = (index(seen.lost), index(state.synced).max(index(state.purged)));
                let owed = committed_of(seen.lost, &commits);
                if has < owed {
                    return Err(format!(
                        "{name} is repaired with entries up to {has}; it had {had}, of which \
                         {owed} are committed"
                    ));
                }
                (seen.in_repair, seen.lost) = (false, None);
            }
            None => {}
        }
        if !seen.is_up {
            seen.is_up = true;
            (seen.compared, seen.committed) = (index(state.purged), 0);
            seen.partitions.clear();
            seen.leads_in = None;
            if let Some(stable) = seen.stable {
                match is_kept(wal, &state, stable) {
                    Err(Unkept::Unreadable(_)) if is_harmed => {}
                    kept => kept.map_err(|why| format!("{name}: {}", why.into_text()))?,
                }
            }
            if index(seen.purged) > index(state.purged) {
                return Err(format!(
                    "{name}: purged up to {:?}, and after a restart up to {:?}",
                    seen.purged, state.purged
                ));
            }
            if index(state.purged) > 0 {
                self.marks.hit(Mark::RestartedFromCheckpoint);
            }
        }
        if let (Some(before), now) = (seen.vote, vote)
            && now.is_none_or(|now| is_broken(before, now))
        {
            return Err(format!("{name}: voted {before:?} (term, node), and then {now:?}"));
        }
        // What is queued is not on the disk yet, and may be gone after a crash.
        if wal.unsynced_for().is_none() {
            (seen.vote, seen.purged) = (vote, state.purged);
        }
        seen.stable = state.synced.min(state.last);
        let (committed, last, purged) =
            (index(state.committed), index(state.last), index(state.purged));
        if committed > last || purged > last {
            return Err(format!(
                "{name}: log ends at {last}, committed {committed}, {purged} gone"
            ));
        }
        if self.ticks.is_multiple_of(PARTITIONS_EVERY) {
            // Each is told by another part: openraft, its state machine, the log. The log's hint of
            // what is committed does not follow a snapshot.
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
                    "{name}: a checkpoint holds {checkpoint}, and {:?} is synced",
                    state.synced
                ));
            }
        }
        if purged > seen.compared {
            seen.compared = purged;
            self.marks.hit(Mark::Purge);
        }
        if committed < seen.committed {
            return Err(format!("{name}: committed {}, and then {committed}", seen.committed));
        }
        if committed > seen.committed {
            seen.committed = committed;
            self.recorder.note(&format!("{name}: committed {committed}"));
        }
        if leads_in != seen.leads_in {
            seen.leads_in = leads_in;
            self.recorder.note(&format!("{name}: leads in {leads_in:?}"));
            self.leader((node_id, shard_id), leads_in, replica.id())?;
        }
        self.compare((node_id, shard_id), wal, committed, is_harmed)
    }

    fn leader(
        &mut self,
        (node, shard): (u64, u64),
        term: Option<u64>,
        replica: u64,
    ) -> Result<(), String> {
        let Some(term) = term else { return Ok(()) };
        self.elected.push(Elected { shard, term, replica });
        let first = *self.leaders.entry((shard, term)).or_insert(node);
        if first != node {
            return Err(format!("shard {shard}: nodes {first} and {node} lead in term {term}"));
        }
        if self.last_leader.insert(shard, node).is_some_and(|before| before != node) {
            self.marks.hit(Mark::LeaderChange);
            if shard > 0 && self.recorder.under_way() > 0 {
                self.marks.hit(Mark::LeaderChangeWithBatchInFlight);
            }
        }
        Ok(())
    }

    /// Compares what has been committed since the last tick with what others have there.
    fn compare(
        &mut self,
        of: (u64, u64),
        wal: &Wal,
        committed: u64,
        is_harmed: bool,
    ) -> Result<(), String> {
        let (node, shard) = of;
        let Some(seen) = self.seen.get_mut(&of) else { return Ok(()) };
        while seen.compared < committed {
            let range = seen.compared + 1..committed + 1;
            let heads = match wal.heads(range.clone(), HEADS_MAX, How::Blocking) {
                Ok(heads) => heads.unwrap_or_default(),
                Err(helix_wal::Error::Poisoned { .. } | helix_wal::Error::Closed) => return Ok(()),
                // It says so, and will be filled anew.
                Err(helix_wal::Error::Damaged { .. }) if is_harmed => return Ok(()),
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
                        "shard {shard}: entry {} is committed with (term, checksum) {first:?}, and \
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

    fn partitions(&mut self, of: (u64, u64), rows: &[(u64, u64, u64)]) -> Result<(), String> {
        // What is kept of one that is not up is of another life.
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

    /// What is committed is on the disks of a majority, whether these nodes run or not.
    fn majorities(&self) -> Result<(), String> {
        let mut committed: BTreeMap<u64, u64> = BTreeMap::new();
        for ((_, shard), seen) in self.seen.iter().filter(|(_, seen)| seen.is_up) {
            let most = committed.entry(*shard).or_default();
            *most = (*most).max(seen.committed);
        }
        let (members, majority) = (self.members.all(), self.members.majority());
        let lost = self.members.lost();
        for (shard, committed) in committed {
            let stable = members.iter().filter_map(|node| {
                let seen = self.seen.get(&(*node, shard))?;
                let counts_lost = lost == Some(*node) || seen.in_repair;
                if counts_lost { seen.stable.max(seen.lost) } else { seen.stable }
            });
            let stable: Vec<u64> = stable.map(|id| id.index).collect();
            let count = stable.iter().filter(|index| **index >= committed).count();
            if committed > 0 && count < majority {
                return Err(format!(
                    "shard {shard}: {committed} is committed, and the nodes have synced {stable:?}"
                ));
            }
        }
        Ok(())
    }

    /// Last entries by shard, if all nodes run and agree on them, and all of it is committed and
    /// applied.
    pub fn level(&self, machines: &[Machine]) -> Option<Vec<(u64, u64)>> {
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

    /// Whether replicas that have applied the same have come to the same.
    ///
    /// # Errors
    /// Where they differ.
    pub fn compare_partitions(&self, machines: &[Machine]) -> Result<(), String> {
        let members = self.members.all();
        let mut first: BTreeMap<(u64, u64), (u64, (u64, u64))> = BTreeMap::new();
        for machine in machines.iter().filter(|it| members.contains(&it.node_id())) {
            for shard in machine.node().iter().flat_map(|node| node.shards()) {
                for (partition, start, next) in rows(&shard) {
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

/// Log start and high watermark of each partition.
fn rows(shard: &Shard) -> Vec<(u64, u64, u64)> {
    shard.read_state(|state| {
        let rows = state.partitions();
        rows.map(|row| (row.id.0, row.log_start, row.next_offset)).collect()
    })
}

/// Why what was on stable storage cannot be shown.
enum Unkept {
    Gone(String),
    Unreadable(String),
}

impl Unkept {
    fn into_text(self) -> String {
        let (Self::Gone(text) | Self::Unreadable(text)) = self;
        text
    }
}

/// What was on stable storage must be in the log that was recovered, or have been purged.
fn is_kept(wal: &Wal, state: &LogState, stable: LogId) -> Result<(), Unkept> {
    if state.purged.is_some_and(|purged| purged.index >= stable.index) {
        return Ok(());
    }
    match wal.log_id(stable.index, How::Blocking) {
        Ok(Some(Some(found))) if found == stable => Ok(()),
        // Another term's: it was replaced after the last look, and that too is on the disk.
        Ok(Some(Some(found))) if found.term > stable.term => Ok(()),
        Ok(found) => {
            Err(Unkept::Gone(format!("{stable:?} was synced, and after a restart it is {found:?}")))
        }
        Err(error) => {
            let text = format!("{stable:?} was synced, and after a restart: {error}");
            Err(Unkept::Unreadable(text))
        }
    }
}

/// A term never goes back, and in one term nobody votes twice. Who has voted for one node and then
/// learns that another one was elected notes that as a vote too.
fn is_broken(before: Vote, now: Vote) -> bool {
    let changes = now.1 != before.1 && (before.2 || !now.2);
    now.0 < before.0 || now.0 == before.0 && changes
}

/// A vote as it is stored.
fn read_vote(bytes: &[u8]) -> Option<Vote> {
    let (term, rest) = bytes.split_first_chunk()?;
    let (node, rest) = rest.split_first_chunk()?;
    Some((u64::from_le_bytes(*term), u64::from_le_bytes(*node), rest == [1]))
}

/// How many entries of a lost log, which ended with `lost`, are committed by what replicas have
/// committed. What stands in their place in a later term was never in that log.
fn committed_of(lost: Option<LogId>, commits: &[(u64, Wal)]) -> u64 {
    let Some(lost) = lost else { return 0 };
    let most = commits.iter().map(|(committed, _)| *committed).max().unwrap_or(0);
    let term_of = |index: u64| {
        let known = commits.iter().filter(|(committed, _)| *committed >= index);
        known.filter_map(|(_, wal)| wal.log_id(index, How::Blocking).ok()??).next()
    };
    let is_later = |index: u64| term_of(index).is_some_and(|id| id.term > lost.term);
    let mut owed = lost.index.min(most);
    while owed > 0 && is_later(owed) {
        owed -= 1;
    }
    owed
}
