//! Repairs a log that opens, but whose replay meets damage above the last checkpoint.
//!
//! The replica of such a log cannot run, so it neither votes nor serves. But the log still has
//! entries that the replica acknowledged. Sealed segments are therefore repaired in place, and the
//! log is given up only by the rule of `decision`. Until then the log stays open and sends its
//! entries to repairs of other replicas. So two such logs can repair each other without a leader.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use helix_wal::Wal;

use super::decision::{
    DamageKind, DamagedReplica, RepairStep, VoterReport, missing_majority, next_step,
};
use super::in_place::{DamagedLog, InPlaceOutcome};
use super::reports::of_voters;
use crate::cluster::{ClusterMachine, ReplicaStatusReport, ask_replica_status};
use crate::error::{Error, Result};
use crate::node::logs::{LogIdentity, NodeLogs, OpenLog, SHORTAGE_PAUSE};
use crate::node::open::{ShardContext, open_or_rebuild, open_shard0_replica};
use crate::peer::{HeldLog, Hub};
use crate::raft::{Replica, ReplicaId, decode_vote};
use crate::shard::Shard;
use crate::sync;

/// Pause between two attempts to open shard 0.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Postponed attempts after which an entry is assumed to be trimmed on all replicas.
const FETCH_ATTEMPTS: u32 = 20;

/// Maximum number of repairs before an open. Each may let the replay get further.
const REPAIRS_MAX: u32 = 16;

/// An open log whose replica did not open.
#[derive(Debug)]
pub(in crate::node) struct UnreplayedLog {
    pub(in crate::node) shard_id: u64,
    pub(in crate::node) log: HeldLog,
    pub(in crate::node) error: io::Error,
}

/// The open logs of data shards whose replicas did not open, by shard id. They stay open between
/// the attempts to repair them, since other replicas may need their entries.
#[derive(Debug, Default)]
pub(in crate::node) struct UnreplayedLogs(Mutex<BTreeMap<u64, UnreplayedLog>>);

impl UnreplayedLogs {
    /// Keeps a log open, and sends its entries to repairs of other replicas.
    pub(in crate::node) fn hold(&self, hub: &Hub, log: UnreplayedLog) {
        hub.hold_log(log.shard_id, log.log.clone());
        sync::lock(&self.0).insert(log.shard_id, log);
    }

    /// Removes and returns the log of a shard. Other replicas may still read it.
    pub(in crate::node) fn take(&self, shard_id: u64) -> Option<UnreplayedLog> {
        sync::lock(&self.0).remove(&shard_id)
    }

    /// Closes all logs.
    pub(in crate::node) async fn close_all(&self, hub: &Hub, logs: &NodeLogs<'_>) {
        let all = std::mem::take(&mut *sync::lock(&self.0));
        for log in all.into_values() {
            log.close(hub, logs).await;
        }
    }
}

/// Reason why a replica is not open.
#[derive(Debug)]
pub(in crate::node) enum OpenFailure {
    /// The log is open, but its replay met damage.
    Replay(UnreplayedLog),
    Other(Error),
}

impl From<Error> for OpenFailure {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

impl UnreplayedLog {
    /// Describes the damage.
    pub(in crate::node) fn damage(&self, logs: &NodeLogs<'_>) -> Error {
        logs.damaged(self.shard_id, &self.error.to_string())
    }

    /// Closes the log, so that no other replica can read it, and returns the error.
    pub(in crate::node) async fn close(self, hub: &Hub, logs: &NodeLogs<'_>) -> Error {
        hub.release_log(self.shard_id);
        let HeldLog { wal, reads, .. } = &self.log;
        logs.close_unopened(self.shard_id, wal, reads, &self.error).await
    }
}

impl OpenFailure {
    /// Keeps the log open if its replay met damage; closes it otherwise.
    pub(in crate::node) async fn of(logs: &NodeLogs<'_>, log: UnreplayedLog) -> Self {
        let UnreplayedLog { shard_id, log: HeldLog { wal, reads, .. }, error } = &log;
        match helix_wal::Error::shortage_of(error).is_none() && !reads.damage().is_empty() {
            true => Self::Replay(log),
            false => Self::Other(logs.close_unopened(*shard_id, wal, reads, error).await),
        }
    }

    /// Closes the log if it is open and returns the error.
    pub(in crate::node) async fn into_error(self, hub: &Hub, logs: &NodeLogs<'_>) -> Error {
        match self {
            Self::Replay(log) => log.close(hub, logs).await,
            Self::Other(error) => error,
        }
    }
}

/// The next step of a log whose replay met damage.
#[derive(Debug)]
pub(in crate::node) enum UnreplayedStep {
    /// All known damage was repaired in place; the number of repaired files.
    OpenAgain(u64),
    /// Quarantine the log; the other replicas fill a new one.
    GiveUpLog,
    /// Nothing helps now; the reason is for operators.
    Wait(String),
    /// As [`Self::Wait`], and no leader with settled voters responds, so that the rule for giving
    /// up the log cannot be checked.
    WaitForLeader(String),
    /// Like [`Self::Wait`], for disk space, file descriptors or memory of this node. The other
    /// replicas may have every entry.
    Shortage(helix_wal::Error),
    /// No other replica responds.
    Alone,
}

/// Occasion on which shard 0 is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::node) enum Shard0Opening {
    /// A single node starts: no other replica can repair its log.
    SingleNode,
    /// The node starts: it waits for other nodes without a limit.
    Start,
    /// The node runs: the caller tries again later.
    Reopen,
}

impl Shard0Opening {
    /// Returns the number of attempts that may wait. After that, a start quarantines the log,
    /// because the node serves nothing without shard 0. A running node tries again later.
    fn attempts(self) -> u32 {
        match self {
            Self::SingleNode => 1,
            Self::Start => 30,
            Self::Reopen => 5,
        }
    }

    /// Returns whether the open waits until the shortage behind the error ends. A running node
    /// tries again later instead.
    fn waits_for(self, error: &Error) -> bool {
        self != Self::Reopen && matches!(error, Error::DiskFull { .. } | Error::Exhausted { .. })
    }
}

/// Repairs damage in place where possible, and decides about the rest.
///
/// A fetch that has to wait gives up the log only with `may_give_up`. `is_start` means that the
/// caller gives up the log after some steps that wait, even if no majority has every entry without
/// it.
async fn repair_or_decide(
    hub: &Hub,
    log: &UnreplayedLog,
    may_give_up: bool,
    is_start: bool,
    on_progress: &(dyn Fn(String) + Sync),
) -> UnreplayedStep {
    let UnreplayedLog { shard_id, log: HeldLog { replica_id: own, wal, reads, .. }, .. } = log;
    let requests =
        hub.peers().into_iter().map(|it| ask_replica_status(hub, it.node_id, *shard_id, None));
    let reports = futures_util::future::join_all(requests).await;
    let reports: Vec<ReplicaStatusReport> = reports.into_iter().flatten().collect();
    let replica = |kind| {
        let last = wal.state().last.unwrap_or_default();
        DamagedReplica { id: *own, is_leader: false, kind, last }
    };
    // Every replica that responds may have the entries, even without a vote.
    let all: BTreeSet<ReplicaId> = reports.iter().map(|it| it.replica_id).collect();
    let all: BTreeSet<ReplicaId> = all.into_iter().filter(|id| *id != 0 && id != own).collect();
    let by_id: BTreeMap<ReplicaId, VoterReport> = of_voters(reports.iter(), &all);
    let from = match next_step(&replica(DamageKind::InPlace), &[all], &by_id) {
        RepairStep::RepairInPlace(from) => from,
        _ => return UnreplayedStep::Alone,
    };
    let damaged = DamagedLog { hub, shard_id: *shard_id, own: *own, wal, reads };
    let files: BTreeSet<String> = reads.damage().into_iter().map(|found| found.file).collect();
    let (mut repaired, mut unrepairable, mut later, mut shortage) = (0, None, None, None);
    for file in files {
        if !wal.is_repairable(&file) {
            unrepairable = Some(format!("{file} cannot be repaired in place"));
            continue;
        }
        match damaged.repair_file(&file, &from, on_progress).await {
            InPlaceOutcome::Repaired => repaired += 1,
            InPlaceOutcome::Later(why) => later = Some(why),
            InPlaceOutcome::Shortage(error) => shortage = Some(error),
            InPlaceOutcome::Unrepairable(why) => {
                unrepairable = Some(format!("{file} cannot be repaired in place: {why}"));
            }
        }
    }
    if let (None, Some(error)) = (&unrepairable, shortage) {
        return UnreplayedStep::Shortage(error);
    }
    let why = match (unrepairable, later) {
        (None, None) => return UnreplayedStep::OpenAgain(repaired),
        (None, Some(why)) if !may_give_up => return UnreplayedStep::Wait(why),
        (None, Some(why)) | (Some(why), _) => why,
    };
    // This log was not replayed, so it does not know the voters. The leader does.
    let leader = match current_leader(*own, own_term(wal), &reports, is_start) {
        Ok(leader) => leader,
        Err(lacking) => return UnreplayedStep::WaitForLeader(format!("{why}; {lacking}")),
    };
    let voters: BTreeSet<ReplicaId> = leader.voters.iter().copied().collect();
    let by_id = of_voters(reports.iter(), &voters);
    match missing_majority(&replica(DamageKind::NeedsNewLog), &[voters], &by_id) {
        None => UnreplayedStep::GiveUpLog,
        Some(lacking) => UnreplayedStep::Wait(format!("{why}; {lacking}")),
    }
}

/// Returns the latest term that the log knows: of its vote or its last entry.
fn own_term(wal: &Wal) -> u64 {
    let state = wal.state();
    // The term of a vote that does not decode is unknown. Then the replica must keep its log.
    let vote = state
        .vote
        .map_or(0, |bytes| decode_vote(&bytes).map_or(u64::MAX, |vote| vote.leader_id.term));
    vote.max(state.last.map_or(0, |last| last.term))
}

/// Returns the leader with settled voters, unless a later leader may have replaced it.
///
/// A leader that is partitioned from the other voters still reports that it leads. At a start,
/// another voter must also be whole in the leader's term, so that no entry depends on the leader's
/// log alone.
///
/// # Errors
/// The reason why there is none, for operators.
fn current_leader(
    own: ReplicaId,
    own_term: u64,
    reports: &[ReplicaStatusReport],
    is_start: bool,
) -> std::result::Result<&ReplicaStatusReport, &'static str> {
    let leader = reports.iter().filter(|it| it.is_leader).max_by_key(|it| it.term);
    let leader = leader.filter(|it| it.is_settled);
    let leader = leader.ok_or("no leader with settled voters responds")?;
    let known = reports.iter().map(|it| it.term.max(it.synced_term)).max().unwrap_or(0);
    if leader.term < own_term.max(known) {
        return Err("the leader that responds may have a successor");
    }
    let is_whole = |it: &ReplicaStatusReport| {
        let is_lacking = it.is_damaged || it.in_repair || it.is_fetching;
        it.term == leader.term && !is_lacking
    };
    let others = || leader.voters.iter().filter(|id| **id != own && **id != leader.replica_id);
    let has_whole = match others().next() {
        // There are only two voters.
        None => is_whole(leader),
        Some(_) => others().any(|id| reports.iter().any(|it| it.replica_id == *id && is_whole(it))),
    };
    match is_start && !has_whole {
        true => Err("no voter besides the leader is whole in its term"),
        false => Ok(leader),
    }
}

impl crate::node::Node {
    /// Opens a data shard, after a repair of the damage that its replay meets. Fails with the
    /// reason if the repair has to wait.
    pub(in crate::node) async fn open_repaired(
        &self,
        logs: &NodeLogs<'_>,
        identity: LogIdentity,
        context: &ShardContext<'_>,
        may_give_up: bool,
    ) -> Result<Arc<Shard>> {
        let shard_id = identity.shard_id;
        let has_other_replicas = self.cluster.data_has_other_replicas(shard_id).await;
        // If this is unknown, the log may be the only copy.
        let may_be_single = has_other_replicas != Some(true);
        for _ in 0..REPAIRS_MAX {
            let log = match self.unreplayed.take(shard_id) {
                Some(log) if log.log.wal.is_open() && has_other_replicas != Some(false) => log,
                ended => {
                    if let Some(ended) = ended {
                        ended.close(&self.hub, logs).await;
                    }
                    let identity = identity.clone();
                    let opened = open_or_rebuild(logs, None, identity, context, may_be_single);
                    match opened.await {
                        Ok(shard) => return Ok(shard),
                        Err(OpenFailure::Replay(log)) if !may_be_single => log,
                        Err(failure) => {
                            let error = failure.into_error(&self.hub, logs).await;
                            return Err(retried_unless_single(error, has_other_replicas));
                        }
                    }
                }
            };
            self.hub.hold_log(shard_id, log.log.clone());
            let on_progress = |progress| self.note_repair(shard_id, Some(progress));
            let step = tokio::select! {
                biased;
                () = self.draining.cancelled() => {
                    UnreplayedStep::Wait("the node is shutting down".to_owned())
                }
                step = repair_or_decide(&self.hub, &log, may_give_up, false, &on_progress) => step,
            };
            let why = match step {
                UnreplayedStep::OpenAgain(files) => {
                    (0..files).for_each(|_| self.count_repaired(shard_id));
                    log.close(&self.hub, logs).await;
                    continue;
                }
                UnreplayedStep::GiveUpLog => {
                    let error = log.close(&self.hub, logs).await;
                    logs.quarantine(shard_id, &error.to_string(), Some(&identity)).await?;
                    continue;
                }
                UnreplayedStep::Shortage(error) => {
                    let what = format!("{}; repair waits: {error}", log.damage(logs));
                    self.unreplayed.hold(&self.hub, log);
                    return Err(match error {
                        helix_wal::Error::DiskFull { .. } => Error::DiskFull { what },
                        _ => Error::Exhausted { what },
                    });
                }
                UnreplayedStep::Wait(why) | UnreplayedStep::WaitForLeader(why) => why,
                UnreplayedStep::Alone => "no other replica responds".to_owned(),
            };
            let what = format!("{}; repair waits: {why}", log.damage(logs));
            self.unreplayed.hold(&self.hub, log);
            return Err(Error::Unusable { what });
        }
        Err(logs.unusable(shard_id, "its replay keeps meeting damage after repairs"))
    }
}

/// Converts damage to an error after which the open is retried, unless this node has the only
/// replica.
fn retried_unless_single(error: Error, has_other_replicas: Option<bool>) -> Error {
    let Error::CorruptLog { what } = error else { return error };
    let why = match has_other_replicas {
        Some(false) => return Error::CorruptLog { what },
        Some(true) => "the log could not be replaced",
        None => {
            "this may be the only replica: shard 0 has stopped, or a membership change is in \
             progress"
        }
    };
    Error::Unusable { what: format!("{what}; repair waits: {why}") }
}

/// Opens this node's replica of shard 0, after a repair of the damage that its replay meets.
pub(in crate::node) async fn open_shard0_repaired(
    logs: &NodeLogs<'_>,
    mut log: OpenLog,
    hub: &Arc<Hub>,
    machine: &Arc<ClusterMachine>,
    opening: Shard0Opening,
) -> Result<Replica> {
    let identity = log.identity.clone();
    let is_single_node = opening == Shard0Opening::SingleNode;
    let (mut attempt, mut repairs) = (0, 0);
    loop {
        let (unreplayed, what) = match open_shard0_replica(logs, log, hub, machine).await {
            Ok(replica) => return Ok(replica),
            Err(OpenFailure::Other(error)) if opening.waits_for(&error) => {
                tracing::warn!(%error, "cannot open the log yet, retrying");
                tokio::time::sleep(SHORTAGE_PAUSE).await;
                log = logs.open_shard0(identity.clone(), is_single_node).await?;
                machine.replay_from(log.wal.clone());
                continue;
            }
            Err(failure) if is_single_node => return Err(failure.into_error(hub, logs).await),
            Err(OpenFailure::Replay(unreplayed)) => {
                let what = unreplayed.error.to_string();
                (Some(unreplayed), what)
            }
            Err(OpenFailure::Other(Error::CorruptLog { what })) => (None, what),
            Err(OpenFailure::Other(error)) => return Err(error),
        };
        let action = match unreplayed {
            None => Shard0Action::GiveUpLog,
            Some(unreplayed) => {
                let action = repair_shard0(hub, &unreplayed, opening, &mut attempt, &mut repairs);
                let action = action.await;
                unreplayed.close(hub, logs).await;
                action
            }
        };
        match action {
            Shard0Action::OpenAgain => {}
            Shard0Action::Pause(_) => tokio::time::sleep(RETRY_PAUSE).await,
            Shard0Action::KeepsMeetingDamage => {
                let why = "its replay keeps meeting damage after repairs";
                return Err(logs.unusable(0, why));
            }
            Shard0Action::Later(why) => {
                return Err(logs.unusable(0, &format!("{what}; repair waits: {why}")));
            }
            Shard0Action::Damaged => return Err(logs.damaged(0, &what)),
            Shard0Action::GiveUpLog => quarantine_shard0(logs, &what, &identity, opening).await?,
        }
        log = match opening {
            Shard0Opening::Reopen => logs.open(identity.clone()).await?,
            _ => logs.open_shard0(identity.clone(), is_single_node).await?,
        };
        machine.replay_from(log.wal.clone());
    }
}

/// Repairs the log of shard 0. During the repair, other replicas can read its entries. Returns once
/// the log must be closed.
async fn repair_shard0(
    hub: &Hub,
    unreplayed: &UnreplayedLog,
    opening: Shard0Opening,
    attempt: &mut u32,
    repairs: &mut u32,
) -> Shard0Action {
    hub.hold_log(0, unreplayed.log.clone());
    let mut last_reason = String::new();
    loop {
        *attempt += 1;
        let may_give_up = *attempt >= opening.attempts().min(FETCH_ATTEMPTS);
        let is_start = opening == Shard0Opening::Start;
        let step = repair_or_decide(hub, unreplayed, may_give_up, is_start, &|_| {}).await;
        match after_step(step, opening, attempt, repairs) {
            Shard0Action::Pause(why) if unreplayed.log.wal.is_open() => {
                if last_reason != why {
                    tracing::warn!(shard_id = 0, why, "the log is damaged; repair waits");
                    last_reason = why;
                }
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            action => return action,
        }
    }
}

/// Action after a step of the repair of shard 0.
#[derive(Debug, PartialEq, Eq)]
enum Shard0Action {
    OpenAgain,
    /// Try again after a pause; the reason is for operators.
    Pause(String),
    /// The repairs are used up.
    KeepsMeetingDamage,
    /// The caller tries again later.
    Later(String),
    /// No other replica responds, so the damage stays.
    Damaged,
    GiveUpLog,
}

/// Decides the action after a step, and counts attempts and repairs. A step that repaired a file
/// does not count as an attempt.
fn after_step(
    step: UnreplayedStep,
    opening: Shard0Opening,
    attempt: &mut u32,
    repairs: &mut u32,
) -> Shard0Action {
    let has_attempts = *attempt < opening.attempts();
    match step {
        UnreplayedStep::OpenAgain(0) if has_attempts => Shard0Action::OpenAgain,
        UnreplayedStep::OpenAgain(files) if files > 0 && *repairs < REPAIRS_MAX => {
            *attempt -= 1;
            *repairs += 1;
            Shard0Action::OpenAgain
        }
        UnreplayedStep::OpenAgain(_) => Shard0Action::KeepsMeetingDamage,
        UnreplayedStep::Alone if opening == Shard0Opening::Start => {
            *attempt = 0;
            Shard0Action::Pause("no other replica responds".to_owned())
        }
        UnreplayedStep::Alone if has_attempts => {
            Shard0Action::Pause("no other replica responds".to_owned())
        }
        UnreplayedStep::Alone => Shard0Action::Damaged,
        UnreplayedStep::Shortage(error) => {
            *attempt = attempt.saturating_sub(1);
            match opening {
                Shard0Opening::Reopen => Shard0Action::Later(error.to_string()),
                _ => Shard0Action::Pause(error.to_string()),
            }
        }
        // Without a leader, giving up this log as well could leave no majority permanently.
        UnreplayedStep::WaitForLeader(why) if opening == Shard0Opening::Start => {
            *attempt = (*attempt).min(FETCH_ATTEMPTS);
            Shard0Action::Pause(why)
        }
        UnreplayedStep::Wait(why) | UnreplayedStep::WaitForLeader(why) if has_attempts => {
            Shard0Action::Pause(why)
        }
        // A running node serves from the other shards, and the rule may be fulfilled later.
        UnreplayedStep::Wait(why) | UnreplayedStep::WaitForLeader(why)
            if opening == Shard0Opening::Reopen =>
        {
            Shard0Action::Later(why)
        }
        UnreplayedStep::Wait(_) | UnreplayedStep::WaitForLeader(_) | UnreplayedStep::GiveUpLog => {
            Shard0Action::GiveUpLog
        }
    }
}

/// Quarantines the log of shard 0. A start waits for space or file descriptors.
async fn quarantine_shard0(
    logs: &NodeLogs<'_>,
    what: &str,
    identity: &LogIdentity,
    opening: Shard0Opening,
) -> Result<()> {
    loop {
        match logs.quarantine(0, what, Some(identity)).await {
            Err(error) if opening.waits_for(&error) => {
                tracing::warn!(%error, "cannot open the log yet, retrying");
                tokio::time::sleep(SHORTAGE_PAUSE).await;
            }
            quarantined => return quarantined.map(drop),
        }
    }
}

#[cfg(test)]
mod tests;
