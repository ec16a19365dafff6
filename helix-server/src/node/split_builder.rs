//! Builds this node's replicas of shards that splits create. Copies the records that move from the
//! parent's replicas, and begins the new log with the state that the parent's log has fixed.
//!
//! The log is created only once. Shard 0's state records its creation, and a log that is missing
//! afterwards cancels the split. The replica opens once the split has completed, when all replicas
//! are built. So a log without the records never votes, and a cancelled split leaves nothing that
//! was committed.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use helix_wal::LogId;

use super::logs::{LogIdentity, OpenLog};
use super::open::open_shard;
use super::shard_slots::ShardSlot;
use super::{Node, NodeStorage, repair};
use crate::cluster::{PlacedSplit, SplitReplica, SplitStep};
use crate::error::{Error, Result};
use crate::peer::SplitLog;
use crate::records::{SplitRecords, SplitRecordsRequest};
use crate::shard::Shard;

/// Delay before a failed step is repeated.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// Interval at which a replica that has all records asks for more.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Elections that a replica of a new shard starts until the others are open, and the first pause
/// between them. The pause is longer than a vote, because a new election aborts the previous one.
const ELECTIONS: u32 = 5;
const ELECTION_PAUSE: Duration = Duration::from_millis(100);

/// A replica is ready once it lacks fewer bytes than this, and fewer than it may copy in a second.
/// It copies the rest while the partitions are sealed.
const READY_BYTES: u64 = 8 << 20;

pub(super) fn start(node: &Arc<Node>) {
    tokio::spawn(run(Arc::downgrade(node)));
}

/// A replica of this node that a split makes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct NewReplica {
    shard_id: u64,
    split: PlacedSplit,
    own: SplitReplica,
}

impl NewReplica {
    /// Returns whether this is the same replica, at any step.
    fn is(&self, other: &Self) -> bool {
        (self.shard_id, self.own.generation) == (other.shard_id, other.own.generation)
    }
}

/// Follows the splits of the cluster's state, until the node drains.
async fn run(node: Weak<Node>) {
    let Some((mut versions, draining)) =
        node.upgrade().map(|node| (node.cluster.machine().watch(), node.draining.clone()))
    else {
        return;
    };
    let mut building: Option<Building> = None;
    let mut last = String::new();
    loop {
        let Some(node) = node.upgrade() else { return };
        versions.mark_unchanged();
        let step = tokio::select! {
            biased;
            () = draining.cancelled() => Ok(None),
            step = follow(&node, &mut building) => step,
        };
        if draining.is_cancelled() {
            if let Some(building) = building.take() {
                building.close(&node).await;
            }
            return;
        }
        drop(node);
        let wait = step.unwrap_or_else(|error| {
            let what = error.to_string();
            if what != last {
                tracing::info!("cannot build the replica of a split yet: {what}");
                last = what;
            }
            Some(RETRY_DELAY)
        });
        tokio::select! {
            biased;
            () = draining.cancelled() => {}
            changed = versions.changed() => if changed.is_err() { return },
            () = async {
                match wait {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            } => {}
        }
    }
}

/// Returns the replica that this node has to build.
fn wanted(node: &Node) -> Option<NewReplica> {
    let own = node.settings.node_id;
    node.cluster.machine().read(|state| {
        let mut splits = state.members().placement()?.splits();
        splits.find_map(|(shard_id, split)| {
            let replica = *split.replicas.get(&own)?;
            Some(NewReplica { shard_id, split: split.clone(), own: replica })
        })
    })
}

/// Status of a log that this node builds, according to the cluster's state.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Standing {
    /// The log lacks records, or shard 0 does not know yet that it is complete.
    Unfinished(NewReplica),
    /// Other replicas lack records, or the split was cancelled but is still in the state.
    Waits,
    /// The split has completed: the log is a replica of its shard.
    Ended,
    /// The log is not part of its shard and never will be.
    Removed,
}

fn standing(node: &Node, new: &NewReplica) -> Standing {
    let (own, shard_id) = (node.settings.node_id, new.shard_id);
    let generation = new.own.generation;
    node.cluster.machine().read(|state| {
        let members = state.members();
        let placed = members.placement().and_then(|it| it.shard(shard_id));
        match placed.filter(|it| it.names(own, generation)) {
            None if members.is_removed(shard_id, own, generation) => Standing::Removed,
            None => Standing::Waits,
            Some(placed) => match (&placed.split, placed.split_replica(own)) {
                (Some(split), Some(replica))
                    if !split.is_cancelled && replica.step < SplitStep::Built =>
                {
                    let split = split.clone();
                    Standing::Unfinished(NewReplica { shard_id, split, own: replica })
                }
                (Some(_), _) => Standing::Waits,
                (None, _) => Standing::Ended,
            },
        }
    })
}

/// Takes the next step. Returns how long to wait for the next one; `None` waits for the cluster's
/// state.
async fn follow(node: &Arc<Node>, building: &mut Option<Building>) -> Result<Option<Duration>> {
    let Some(current) = building else {
        // May be a built replica, whose log was open before a restart.
        let Some(new) = wanted(node).filter(|new| !new.split.is_cancelled) else {
            open_built(node);
            return Ok(None);
        };
        *building = Building::open(node, new).await?;
        return Ok(Some(if building.is_some() { Duration::ZERO } else { RETRY_DELAY }));
    };
    let standing = standing(node, &current.new);
    match standing {
        Standing::Unfinished(new) => {
            current.new = new;
            return current.step(node).await.map(Some);
        }
        Standing::Waits => return Ok(None),
        Standing::Ended | Standing::Removed => {}
    }
    match building.take() {
        Some(built) if standing == Standing::Ended => built.begin(node).await,
        Some(removed) => removed.remove(node).await,
        None => Ok(()),
    }
    .map(|()| Some(Duration::ZERO))
}

/// Lets the supervisor open replicas that were built before a restart. The node started with a copy
/// of the state in which their split had not completed.
fn open_built(node: &Arc<Node>) {
    if matches!(node.settings.storage, NodeStorage::Memory) {
        return;
    }
    let own = node.settings.node_id;
    let named: Vec<u64> =
        node.cluster.machine().read(|state| state.members().shards_with_log(own).collect());
    for shard_id in named {
        if node.shards.get(shard_id).is_none() {
            let what = "its split has ended".to_owned();
            node.shards.set(shard_id, ShardSlot::Stopped(what));
            repair::start_shard(node, shard_id);
        }
    }
}

/// A log that is being filled.
struct Building {
    new: NewReplica,
    log: OpenLog,
    records: SplitLog,
    /// Bytes of the new shard's state that have arrived.
    state: Vec<u8>,
    /// Another source had nearly all that it knew, so the parent's leader is asked first.
    asks_leader: bool,
}

impl Building {
    /// Creates or opens the log. Returns `None` if the replica is no longer wanted, or if its log
    /// is missing although it was created. In the second case, cancels the split.
    async fn open(node: &Arc<Node>, new: NewReplica) -> Result<Option<Self>> {
        let NewReplica { shard_id, own: SplitReplica { generation, step }, .. } = new;
        // An old copy of the state could name a replica that has existed and was lost.
        node.cluster.catch_up().await?;
        if !wanted(node).is_some_and(|it| it.is(&new)) {
            return Ok(None);
        }
        let logs = node.logs();
        let _guard = node.reopening.lock().await;
        if let Some(shard) = node.shard(shard_id) {
            // Opened at a start with an old copy of the state. Without records it has no members.
            node.shards.remove(shard_id);
            node.cluster.set_shard(shard_id, None);
            shard.close().await;
        }
        if let Some(log) = node.unreplayed.take(shard_id) {
            log.close(&node.hub, &logs).await;
        }
        if step >= SplitStep::Created && !logs.exists(shard_id).await? {
            tracing::warn!(shard_id, "the log of a split is gone, cancelling the split");
            node.cluster.cancel_split(shard_id, new.split.id).await?;
            return Ok(None);
        }
        let identity = LogIdentity { shard_id, generation, ..node.identity.clone() };
        let log = logs.open(identity).await?;
        if log.identity.generation != generation {
            let found = log.identity.generation;
            let what = format!("its log of generation {found} is in the way");
            let error = io::Error::other(what.clone());
            logs.close_unopened(shard_id, &log.wal, &log.reads, &error).await;
            if !matches!(node.settings.storage, NodeStorage::Memory) && found < generation {
                logs.delete(shard_id).await?;
            }
            return Err(Error::ShardClosed { shard: shard_id, what });
        }
        let records = SplitLog::new(log.wal.clone(), log.reads.clone());
        Ok(Some(Self { new, log, records, state: Vec::new(), asks_leader: false }))
    }

    /// Takes the next step. Returns how long to wait for the next one.
    async fn step(&mut self, node: &Arc<Node>) -> Result<Duration> {
        if self.new.own.step == SplitStep::Planned {
            self.say(node, SplitStep::Created).await?;
        }
        if self.log.checkpoint.is_none() {
            let (found, is_of_leader) = self.fetch(node).await?;
            let agrees = self.records.agrees(found.forgotten, found.applied).await;
            if !agrees.map_err(failed)? {
                let shard_id = self.new.shard_id;
                tracing::info!(shard_id, "tombstones were removed, copying the records again");
                self.state.clear();
                return Ok(Duration::ZERO);
            }
            let begins = LogId { term: found.term, index: found.index };
            let is_sealed = begins.index > 0;
            if !found.records.is_empty() {
                let at = if is_sealed { begins.index } else { found.applied };
                let left = self.records.add(&found.records, at).await.map_err(failed)?;
                let is_near = left < READY_BYTES.min(node.hub.copy_pace().rate);
                // Only the leader knows how many records there are, until the seal.
                if is_near && (is_of_leader || is_sealed) {
                    if self.new.own.step < SplitStep::Ready {
                        self.say(node, SplitStep::Ready).await?;
                    }
                } else {
                    self.asks_leader = is_near;
                }
                return Ok(Duration::ZERO);
            }
            if !is_sealed {
                if self.new.own.step < SplitStep::Ready {
                    self.say(node, SplitStep::Ready).await?;
                }
                return Ok(POLL_INTERVAL);
            }
            self.state.extend_from_slice(&found.state);
            if (self.state.len() as u64) < found.state_bytes {
                let has_more = !found.state.is_empty();
                return Ok(if has_more { Duration::ZERO } else { RETRY_DELAY });
            }
            let voters: BTreeSet<_> = self.new.split.voters().collect();
            let state = self.state.clone().into();
            let checkpoint = self.records.install(begins, voters, state).await.map_err(failed)?;
            self.log.checkpoint = Some((begins, checkpoint));
        }
        self.say(node, SplitStep::Built).await?;
        Ok(Duration::ZERO)
    }

    /// Commits the step that this replica has reached. Has no effect if the split was cancelled.
    async fn say(&mut self, node: &Arc<Node>, step: SplitStep) -> Result<()> {
        let NewReplica { shard_id, ref split, .. } = self.new;
        node.cluster.state_split_progress(shard_id, split.id, step).await?;
        self.new.own.step = step;
        Ok(())
    }

    /// Asks the parent's replicas in turn. This node's replica is the first, because it needs no
    /// transfer. The leader is the last, because it also serves the appends. Each replica returns
    /// only what it has applied, and the receiver checks every entry (`SplitLog::add`).
    ///
    /// A replica that has nothing more may be far behind, so that is decided by the leader. Returns
    /// whether the response is of the leader.
    async fn fetch(&self, node: &Arc<Node>) -> Result<(SplitRecords, bool)> {
        let NewReplica { shard_id, ref split, .. } = self.new;
        let own = node.settings.node_id;
        let mut sources: Vec<u64> = node.cluster.machine().read(|state| {
            let placed = state.members().placement().and_then(|it| it.shard(split.parent));
            placed.map(|it| it.replicas.keys().copied().collect()).unwrap_or_default()
        });
        let turn = usize::try_from(shard_id).unwrap_or(0) % sources.len().max(1);
        sources.rotate_left(turn);
        let leader = match node.shard(split.parent) {
            Some(shard) => shard.leader_hint(),
            None => node.cluster.remote_leader(split.parent),
        };
        let leader = leader.map(|leader| leader.node_id);
        sources.sort_by_key(|source| {
            let is_leader = Some(*source) == leader;
            (self.asks_leader && !is_leader, *source != own, is_leader)
        });
        let mut refusals = Vec::new();
        let mut exhausted = None;
        for source in sources {
            let is_leader = Some(source) == leader;
            if exhausted.is_some() && !is_leader {
                continue;
            }
            let request = SplitRecordsRequest {
                shard_id: split.parent,
                id: split.id,
                after: self.records.upto(),
                state_offset: self.state.len() as u64,
            };
            match node.cluster.split_records(source, request).await {
                Ok(found) if found.records.is_empty() && found.index == 0 && !is_leader => {
                    exhausted = Some(source);
                }
                Ok(found) => return Ok((found, is_leader)),
                Err(why) => refusals.push(format!("node {source}: {why}")),
            }
        }
        if let Some(source) = exhausted {
            refusals.push(format!("node {source} has no more, but the leader may have"));
        }
        Err(Error::OutcomeUnknown { reason: refusals.join("; ") })
    }

    /// Opens the complete log as this node's replica of the new shard.
    async fn begin(self, node: &Arc<Node>) -> Result<()> {
        let shard_id = self.new.shard_id;
        let logs = node.logs();
        let guard = node.reopening.lock().await;
        let shard = match open_shard(&logs, self.log, &node.shard_context()).await {
            Ok(shard) => shard,
            Err(failure) => {
                let error = failure.into_error(&node.hub, &logs).await;
                // `repair` opens it again.
                node.shards.set(shard_id, ShardSlot::Stopped(error.to_string()));
                return Err(error);
            }
        };
        drop(guard);
        tracing::info!(shard_id, parent = self.new.split.parent, "built a replica of a new shard");
        node.begin_shard(shard.clone());
        repair::start_shard(node, shard_id);
        // One replica starts an election at once; the others wait for their election timeout.
        let voters: Vec<_> = self.new.split.voters().collect();
        let turn = usize::try_from(shard_id).unwrap_or(0) % voters.len().max(1);
        if voters.get(turn) == Some(&shard.replica().id()) {
            tokio::spawn(elect(shard));
        }
        Ok(())
    }

    /// Closes the log and keeps it.
    async fn close(self, node: &Arc<Node>) {
        let why = io::Error::other("the node stops");
        let OpenLog { wal, reads, .. } = self.log;
        node.logs().close_unopened(self.new.shard_id, &wal, &reads, &why).await;
    }

    /// Closes the log and deletes it.
    async fn remove(self, node: &Arc<Node>) -> Result<()> {
        let shard_id = self.new.shard_id;
        self.close(node).await;
        node.logs().delete(shard_id).await?;
        tracing::info!(shard_id, "deleted a replica: its split was cancelled");
        Ok(())
    }
}

/// Starts an election, unless there is a leader.
async fn elect(shard: Arc<Shard>) {
    // The other replicas open at about the same time, and cannot vote before they are open.
    let mut pause = ELECTION_PAUSE;
    for _ in 0..ELECTIONS {
        // Without effect on a replica that has stopped.
        let is_led = shard.replica().leadership().leader.is_some();
        if shard.is_closed() || is_led || shard.replica().elect().await.is_err() {
            return;
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
}

fn failed(what: String) -> Error {
    Error::StorageFailed { what, may_have_applied: false }
}
