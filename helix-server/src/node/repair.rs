//! Supervises the shards of a node: reopens stopped shards and repairs damaged logs.
//!
//! Damage to sealed segments is repaired in place. A log that cannot be repaired in place is
//! quarantined and replaced with a new one, which the other replicas fill. This happens only if a
//! majority of voters has every entry without this replica (see `decision`). Until the new log has
//! all entries that the old one had acknowledged, the replica does not vote and cannot be elected.
//! docs/decisions/0018 and 0035 explain why that is sufficient.

mod decision;
mod in_place;
mod rebuild;
mod reports;
pub(in crate::node) mod unreplayed;

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use helix_wal::LogId;
use tokio::time::Instant;

use super::logs::NodeLogs;
use super::open::{ShardContext, directory, identity_of, named_shards, open_shard0_replica};
use super::shard_slots::ShardSlot;
use super::{Node, NodeStorage};
use crate::error::{Error, Result};
use crate::raft::{FoundDamage, Replica, node_of};
use crate::shard::Shard;
use crate::sync;
use decision::{DamageKind, DamagedReplica, RepairStep, missing_majority, next_step};
use in_place::{DamagedLog, InPlaceOutcome};
use rebuild::Rebuild;
use reports::ask_others;
use unreplayed::{Shard0Opening, open_shard0_repaired};

/// Interval between checks of a shard.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Time after a failed leadership transfer in which a leader repairs in place instead.
const TRANSFER_RETRY_PAUSE: Duration = Duration::from_secs(5);

/// Number of checks whether the other replicas have all entries of a closed log. They can lack only
/// entries that were in flight.
const CONFIRM_CHECKS: u32 = 5;

/// Postponed in-place repairs in a row after which a new log is considered.
const IN_PLACE_ATTEMPTS: u32 = 20;

/// Minimum time between two attempts to reopen a shard.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);

pub(super) fn start(node: &Arc<Node>) {
    for shard_id in node.shards.ids().into_iter().chain([0]) {
        start_shard(node, shard_id);
    }
}

/// Starts to supervise a shard, unless it is supervised already. The task stops when the replica is
/// removed or the node drains.
pub(super) fn start_shard(node: &Arc<Node>, shard_id: u64) {
    if sync::lock(&node.supervised).insert(shard_id) {
        let supervisor = ShardSupervisor { shard_id, ..ShardSupervisor::default() };
        tokio::spawn(supervisor.run(Arc::downgrade(node)));
    }
}

/// Supervises one shard.
#[derive(Debug, Default)]
struct ShardSupervisor {
    shard_id: u64,
    rebuild: Option<Rebuild>,
    reopened: Option<Instant>,
    /// Damage of the replica when it was last checked.
    damage: Vec<FoundDamage>,
    /// Postponed in-place repairs and failed reopens in a row.
    delays: u32,
    /// Files whose damage cannot be repaired in place.
    unrepairable: BTreeSet<String>,
    /// Time of the last transfer of leadership that failed.
    transfer_failed: Option<Instant>,
    /// The last warning. The same warning is not logged twice in a row.
    last_warning: String,
}

impl ShardSupervisor {
    async fn run(mut self, node: Weak<Node>) {
        let Some(draining) = node.upgrade().map(|node| node.draining.clone()) else { return };
        loop {
            tokio::select! {
                biased;
                () = draining.cancelled() => return,
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
            }
            let Some(node) = node.upgrade() else { return };
            {
                // Unregisters the shard, so that a replica that is created later gets a new
                // supervisor.
                let mut supervised = sync::lock(&node.supervised);
                if self.shard_id != 0 && node.shards.get(self.shard_id).is_none() {
                    supervised.remove(&self.shard_id);
                    return;
                }
            }
            if let Err(error) = self.supervise_once(&node).await
                && !draining.is_cancelled()
            {
                self.warn_once(&error.to_string());
            }
        }
    }

    fn warn_once(&mut self, what: &str) {
        if self.last_warning != what {
            tracing::warn!(shard_id = self.shard_id, "{what}");
            what.clone_into(&mut self.last_warning);
        }
    }

    async fn supervise_once(&mut self, node: &Arc<Node>) -> Result<()> {
        let shard_id = self.shard_id;
        let own = node.cluster.replica();
        let shard = node.shard(shard_id);
        let replica = match &shard {
            Some(shard) => shard.replica(),
            None if shard_id == 0 => &*own,
            None => match node.shards.get(shard_id) {
                Some(ShardSlot::Stopped(why)) => {
                    let may_give_up = self.delays >= IN_PLACE_ATTEMPTS;
                    return self.reopen(node, &why, may_give_up).await;
                }
                _ => return Ok(()),
            },
        };
        if let Some(why) = replica.stopped() {
            // The node closed the replica because it is shutting down.
            if node.draining.is_cancelled() {
                return Ok(());
            }
            // A failed write stops the whole node.
            if matches!(replica.writable(), Err(helix_wal::Error::Poisoned { .. })) {
                return Ok(());
            }
            // The damage that stopped the replica is repaired once it runs again.
            self.damage = replica.found_damage();
            self.warn_once(&format!("restarting the stopped replica: {why}"));
            return self.reopen(node, &why, false).await;
        }
        if replica.repair_of().is_some() {
            let rebuild = self.rebuild.get_or_insert_default();
            let waits_for = rebuild.advance(node, shard_id, replica).await?;
            node.note_repair(shard_id, waits_for.clone());
            match waits_for {
                Some(why) => self.warn_once(&format!("repair is waiting: {why}")),
                None => self.rebuild = None,
            }
            return Ok(());
        }
        self.rebuild = None;
        self.damage = replica.found_damage();
        if self.damage.is_empty() || !has_other_voters(replica) {
            let has_waited = std::mem::take(&mut self.delays) > 0;
            if has_waited || !std::mem::take(&mut self.unrepairable).is_empty() {
                self.unrepairable.clear();
                node.note_repair(shard_id, None);
            }
            return Ok(());
        }
        self.repair_damage(node, replica).await
    }

    /// Takes the next repair step of a damaged replica that still serves.
    async fn repair_damage(&mut self, node: &Arc<Node>, replica: &Replica) -> Result<()> {
        let shard_id = self.shard_id;
        let wal = replica.wal();
        let can_repair = |found: &&FoundDamage| {
            wal.is_repairable(&found.file) && !self.unrepairable.contains(&found.file)
        };
        let file = self.damage.iter().find(can_repair).map(|found| found.file.clone());
        let kind = if file.is_some() { DamageKind::InPlace } else { DamageKind::NeedsNewLog };
        let has_failed = self.transfer_failed.is_some_and(|at| at.elapsed() < TRANSFER_RETRY_PAUSE);
        let is_leader = replica.is_leader() && !(has_failed && kind == DamageKind::InPlace);
        // Read before the other replicas report, because their logs can only grow in between.
        let own = DamagedReplica { id: replica.id(), is_leader, kind, last: last_entry(replica) };
        let configs = replica.membership().configs;
        let reports = ask_others(node, shard_id, own.id, &configs).await;
        match next_step(&own, &configs, &reports) {
            RepairStep::TransferTo(to) => {
                let to = node_of(to);
                tracing::info!(shard_id, to, "transferring leadership of a damaged log");
                if let Err(error) = replica.transfer_leadership(Some(to), &[]).await {
                    self.transfer_failed = Some(Instant::now());
                    self.warn_once(&format!("leadership transfer to node {to} failed: {error}"));
                }
            }
            RepairStep::RepairInPlace(from) => {
                let Some(file) = file else { return Ok(()) };
                let (hub, reads) = (&*node.hub, replica.reads());
                let log = DamagedLog { hub, shard_id, own: replica.id(), wal, reads };
                let on_progress = |progress| node.note_repair(shard_id, Some(progress));
                match log.repair_file(&file, &from, &on_progress).await {
                    InPlaceOutcome::Repaired => {
                        self.delays = 0;
                        node.count_repaired(shard_id);
                        node.note_repair(shard_id, None);
                        self.last_warning.clear();
                    }
                    InPlaceOutcome::Later(why) => {
                        // If the other replicas have trimmed an entry, waiting does not help. Only
                        // a new log does, if the rule allows one.
                        self.delays += 1;
                        let own = DamagedReplica { kind: DamageKind::NeedsNewLog, ..own };
                        let step = next_step(&own, &configs, &reports);
                        if self.delays >= IN_PLACE_ATTEMPTS && step == RepairStep::GiveUpLog {
                            self.delays = 0;
                            self.warn_once(&format!("rebuilding the damaged log: {why}"));
                            return self.reopen(node, &why, true).await;
                        }
                        self.wait_for(node, &why);
                    }
                    // The other replicas may have every entry, and a new log needs space as well.
                    InPlaceOutcome::Shortage(error) => self.wait_for(node, &error.to_string()),
                    InPlaceOutcome::Unrepairable(why) => {
                        self.wait_for(node, &format!("{file} cannot be repaired in place: {why}"));
                        self.unrepairable.insert(file);
                    }
                }
            }
            RepairStep::GiveUpLog => {
                let why = descriptions(&self.damage);
                self.warn_once(&format!("rebuilding the damaged log: {why}"));
                return self.reopen(node, &why, true).await;
            }
            RepairStep::Wait(why) => self.wait_for(node, &why),
        }
        Ok(())
    }

    /// Reports why the damage is not repaired yet.
    fn wait_for(&mut self, node: &Node, why: &str) {
        self.warn_once(&format!("the log is damaged and withholds the range; repair waits: {why}"));
        node.note_repair(self.shard_id, Some(format!("repair waits: {why}")));
    }

    /// Passes known damage on to the replica that was reopened on the same log.
    fn carry_damage(&self, node: &Node) {
        let (own, shard) = (node.cluster.replica(), node.shard(self.shard_id));
        let replica = match &shard {
            Some(shard) => shard.replica(),
            None if self.shard_id == 0 => &*own,
            None => return,
        };
        if replica.repair_of().is_none() {
            replica.reads().carry_damage(self.damage.clone());
        }
    }

    async fn reopen(&mut self, node: &Arc<Node>, why: &str, may_give_up: bool) -> Result<()> {
        if self.reopened.is_some_and(|at| at.elapsed() < REOPEN_PAUSE) {
            return Ok(());
        }
        self.rebuild = None;
        let opened = node.reopen(self.shard_id, why, may_give_up).await;
        self.reopened = Some(Instant::now());
        self.delays = match &opened {
            Ok(()) => 0,
            // The other replicas may have everything that the repair needs.
            Err(Error::DiskFull { .. } | Error::Exhausted { .. }) => self.delays,
            Err(_) => self.delays.saturating_add(1),
        };
        if opened.is_ok() {
            let mut restarts = sync::lock(&node.restarts);
            *restarts.entry(self.shard_id).or_default() += 1;
            drop(restarts);
            self.last_warning.clear();
            self.carry_damage(node);
            tracing::info!(shard_id = self.shard_id, "reopened the shard");
        }
        opened
    }
}

fn descriptions(damage: &[FoundDamage]) -> String {
    let all: Vec<&str> = damage.iter().map(|found| found.what.as_str()).collect();
    all.join("; ")
}

fn has_other_voters(replica: &Replica) -> bool {
    replica.voters().into_iter().any(|id| id != replica.id())
}

/// Returns the last entry that a replica may have acknowledged.
fn last_entry(replica: &Replica) -> LogId {
    replica.wal().state().last.unwrap_or_default()
}

impl Node {
    pub(super) fn logs(&self) -> NodeLogs<'_> {
        let (failed, versions) = (self.failed.clone(), self.hub.versions());
        NodeLogs { settings: &self.settings, failed, versions }
    }

    /// Returns whether a majority of voters has every entry of a closed log. Checked again after
    /// the log was closed, because it acknowledged entries until then.
    async fn may_give_up(&self, shard_id: u64, closed: &Replica) -> bool {
        let own = DamagedReplica {
            id: closed.id(),
            is_leader: false,
            kind: DamageKind::NeedsNewLog,
            last: last_entry(closed),
        };
        let configs = closed.membership().configs;
        for _ in 0..CONFIRM_CHECKS {
            let reports = ask_others(self, shard_id, own.id, &configs).await;
            match missing_majority(&own, &configs, &reports) {
                None => return true,
                Some(why) => tracing::info!(shard_id, why, "not giving up the damaged log yet"),
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
        false
    }

    /// Closes a shard and reopens it, on a new log if `may_give_up` and the rule allow it.
    async fn reopen(self: &Arc<Self>, shard_id: u64, why: &str, may_give_up: bool) -> Result<()> {
        let is_in_memory = matches!(self.settings.storage, NodeStorage::Memory);
        if shard_id != 0 && !is_in_memory && !self.logs().exists(shard_id).await? {
            // A replica that was deleted must not return on an empty log.
            self.cluster.catch_up().await?;
            if !named_shards(&self.cluster).contains(&shard_id) {
                let what = "the replica was moved to another node".to_owned();
                return Err(Error::ShardClosed { shard: shard_id, what });
            }
        }
        let _guard = self.reopening.lock().await;
        if self.draining.is_cancelled() {
            return Err(Error::Draining);
        }
        if is_in_memory {
            // A reopen would lose the votes of the replica together with its log.
            let what = format!("a replica in memory cannot be reopened: {why}");
            return Err(Error::StorageFailed { what, may_have_applied: false });
        }
        if shard_id == 0 {
            return self.reopen_shard0(may_give_up.then_some(why)).await;
        }
        if self.shards.get(shard_id).is_none() {
            let what = "the replica was moved to another node".to_owned();
            return Err(Error::ShardClosed { shard: shard_id, what });
        }
        let mut rebuild = false;
        if let Some(shard) = self.shard(shard_id) {
            self.shards.set(shard_id, ShardSlot::Stopped(why.to_owned()));
            self.cluster.set_shard(shard_id, None);
            self.routes.send_modify(|count| *count += 1);
            shard.close().await;
            rebuild = may_give_up && self.may_give_up(shard_id, shard.replica()).await;
        }
        let logs = self.logs();
        let identity = identity_of(&self.cluster, &self.identity, shard_id);
        if rebuild {
            logs.quarantine(shard_id, why, Some(&identity)).await?;
        }
        let context = self.shard_context();
        match self.open_repaired(&logs, identity, &context, may_give_up).await {
            Ok(shard) => {
                self.note_repair(shard_id, None);
                self.begin_shard(shard);
                Ok(())
            }
            Err(Error::CorruptLog { what }) => {
                self.shards.set(shard_id, ShardSlot::Damaged(what.clone()));
                Err(Error::CorruptLog { what })
            }
            Err(error) => {
                self.shards.set(shard_id, ShardSlot::Stopped(error.to_string()));
                Err(error)
            }
        }
    }

    /// Returns the dependencies that all shards of this node share.
    pub(super) fn shard_context(&self) -> ShardContext<'_> {
        ShardContext {
            members: self.handler.replica_ids(),
            hub: &self.hub,
            directory: directory(&self.cluster),
            draining: &self.draining,
            metrics: &self.metrics,
            cleaner_worker: &self.cleaner_worker,
            key_maps: &self.key_maps,
        }
    }

    /// Serves a data shard that was just opened, and starts its tasks.
    pub(super) fn begin_shard(self: &Arc<Self>, shard: Arc<Shard>) {
        self.shards.set(shard.id(), ShardSlot::Open(shard.clone()));
        self.cluster.set_shard(shard.id(), Some(shard.clone()));
        super::background::start_shard(self, shard.clone());
        super::member_tasks::start_shard(self, shard);
        self.routes.send_modify(|count| *count += 1);
    }

    async fn reopen_shard0(self: &Arc<Self>, damage: Option<&str>) -> Result<()> {
        let before = self.cluster.replica();
        let has_other_replicas = self.cluster.has_other_replicas().await;
        // If this is unknown, the configured peers decide, as at startup.
        let is_single_node =
            has_other_replicas.map_or_else(|| self.handler.is_single_node(), |has| !has);
        self.hub.stop_shard(0);
        before.close().await;
        let damage = match damage {
            Some(why) if self.may_give_up(0, &before).await => Some(why),
            _ => None,
        };
        let logs = self.logs();
        if let Some(why) = damage {
            logs.quarantine(0, why, Some(&self.identity)).await?;
        }
        let log = logs.open_or_quarantine(self.identity.clone(), is_single_node).await?;
        let machine = self.cluster.machine();
        machine.replay_from(log.wal.clone());
        let replica = match is_single_node {
            true => {
                let opened = open_shard0_replica(&logs, log, &self.hub, machine).await;
                match opened {
                    Ok(replica) => replica,
                    Err(failure) => return Err(failure.into_error(&self.hub, &logs).await),
                }
            }
            false => {
                let opening = Shard0Opening::Reopen;
                open_shard0_repaired(&logs, log, &self.hub, machine, opening).await?
            }
        };
        self.cluster.set_replica(replica);
        if is_single_node {
            let elected = self.cluster.replica().elect().await;
            elected.map_err(|error| logs.damaged(0, &error.to_string()))?;
        }
        super::background::start_cluster(self);
        super::member_tasks::start_cluster(self);
        self.routes.send_modify(|count| *count += 1);
        Ok(())
    }
}
