//! Repairs a log that opens, but whose replay meets damage above the last checkpoint. Its replica
//! cannot run, so it neither votes nor serves. It still has entries that it acknowledged: sealed
//! segments are repaired in place, and the log is given up only by the rule of `repair_decision`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use helix_wal::Wal;

use super::logs::{LogIdentity, NodeLogs, OpenLog, SHORTAGE_PAUSE};
use super::open::{ShardContext, open_or_rebuild, open_shard0_replica};
use super::repair::of_voters;
use super::repair_decision::{
    DamageKind, DamagedReplica, RepairStep, VoterReport, missing_majority, next_step,
};
use super::repair_in_place::{DamagedLog, InPlaceOutcome};
use crate::cluster::{ClusterMachine, ReplicaStatusReport, ask_replica_status};
use crate::error::{Error, Result};
use crate::peer::Hub;
use crate::raft::{DiskReads, Replica, ReplicaId};
use crate::shard::Shard;

/// Pause between two attempts to open shard 0.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Attempts that have to wait before an entry is taken to be trimmed everywhere.
const FETCH_ATTEMPTS: u32 = 20;

/// Repairs before an open, each of which may let the replay get further.
const REPAIRS_MAX: u32 = 16;

/// An open log whose replica did not open.
#[derive(Debug)]
pub(super) struct UnreplayedLog {
    pub(super) shard_id: u64,
    pub(super) own: ReplicaId,
    pub(super) wal: Wal,
    pub(super) reads: DiskReads,
    pub(super) error: io::Error,
}

/// Why a replica is not open.
#[derive(Debug)]
pub(super) enum OpenFailure {
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
    /// Closes the log and returns the error.
    pub(super) async fn close(self, logs: &NodeLogs<'_>) -> Error {
        logs.close_unopened(self.shard_id, &self.wal, &self.reads, &self.error).await
    }
}

impl OpenFailure {
    /// Keeps the log open if its replay met damage; closes it otherwise.
    pub(super) async fn of(logs: &NodeLogs<'_>, log: UnreplayedLog) -> Self {
        match helix_wal::Error::shortage_of(&log.error).is_none() && !log.reads.damage().is_empty()
        {
            true => Self::Replay(log),
            false => Self::Other(log.close(logs).await),
        }
    }

    /// Closes the log if it is open and returns the error.
    pub(super) async fn into_error(self, logs: &NodeLogs<'_>) -> Error {
        match self {
            Self::Replay(log) => log.close(logs).await,
            Self::Other(error) => error,
        }
    }
}

/// The next step of a log whose replay met damage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum UnreplayedStep {
    /// All damage that is known was repaired in place: this many files.
    OpenAgain(u64),
    /// Quarantine the log; the other replicas fill a new one.
    GiveUpLog,
    /// Nothing helps now; the reason is for operators.
    Wait(String),
    /// No other replica responds.
    Alone,
}

/// Occasion on which shard 0 is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shard0Opening {
    /// A single node starts: no other replica can repair its log.
    SingleNode,
    /// The node starts: it waits for other nodes without a limit.
    Start,
    /// The node runs: the caller tries again later.
    Reopen,
}

impl Shard0Opening {
    /// Returns the attempts that may wait. A start then quarantines the log, since the node serves
    /// nothing without shard 0; a running node tries again later.
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

/// Repairs what can be repaired in place, and decides about the rest. A fetch that has to wait does
/// not give up the log unless `may_give_up`.
async fn repair_or_decide(
    hub: &Hub,
    log: &UnreplayedLog,
    may_give_up: bool,
    on_progress: &(dyn Fn(String) + Sync),
) -> UnreplayedStep {
    let UnreplayedLog { shard_id, own, wal, reads, .. } = log;
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
    let (mut repaired, mut unrepairable, mut later) = (0, None, None);
    for file in files {
        if !wal.is_repairable(&file) {
            unrepairable = Some(format!("{file} cannot be repaired in place"));
            continue;
        }
        match damaged.repair_file(&file, &from, on_progress).await {
            InPlaceOutcome::Repaired => repaired += 1,
            InPlaceOutcome::Later(why) => later = Some(why),
            InPlaceOutcome::Unrepairable(why) => {
                unrepairable = Some(format!("{file} cannot be repaired in place: {why}"));
            }
        }
    }
    let why = match (unrepairable, later) {
        (None, None) => return UnreplayedStep::OpenAgain(repaired),
        (None, Some(why)) if !may_give_up => return UnreplayedStep::Wait(why),
        (None, Some(why)) | (Some(why), _) => why,
    };
    let leader = reports.iter().filter(|it| it.is_leader).max_by_key(|it| it.term);
    // Not replayed, this log does not know the voters. The leader does.
    let Some(leader) = leader.filter(|it| it.is_settled) else {
        return UnreplayedStep::Wait(format!("{why}; no leader with settled voters responds"));
    };
    let voters: BTreeSet<ReplicaId> = leader.voters.iter().copied().collect();
    let by_id = of_voters(reports.iter(), &voters);
    match missing_majority(&replica(DamageKind::NeedsNewLog), &[voters], &by_id) {
        None => UnreplayedStep::GiveUpLog,
        Some(lacking) => UnreplayedStep::Wait(format!("{why}; {lacking}")),
    }
}

impl super::Node {
    /// Opens a data shard, after a repair of the damage that its replay meets. Fails with the
    /// reason if the repair has to wait.
    pub(super) async fn open_repaired(
        &self,
        logs: &NodeLogs<'_>,
        identity: LogIdentity,
        context: &ShardContext<'_>,
        may_give_up: bool,
    ) -> Result<Arc<Shard>> {
        let shard_id = identity.shard_id;
        let is_single_node = !self.cluster.has_other_replicas().await;
        for _ in 0..REPAIRS_MAX {
            let opened = open_or_rebuild(logs, None, identity.clone(), context, is_single_node);
            let log = match opened.await {
                Ok(shard) => return Ok(shard),
                Err(OpenFailure::Replay(log)) if !is_single_node => log,
                Err(failure) => return Err(failure.into_error(logs).await),
            };
            let on_progress = |progress| self.note_repair(shard_id, Some(progress));
            let step = tokio::select! {
                biased;
                () = self.draining.cancelled() => {
                    UnreplayedStep::Wait("the node is shutting down".to_owned())
                }
                step = repair_or_decide(&self.hub, &log, may_give_up, &on_progress) => step,
            };
            let error = log.close(logs).await;
            match step {
                UnreplayedStep::OpenAgain(files) => {
                    (0..files).for_each(|_| self.count_repaired(shard_id));
                }
                UnreplayedStep::GiveUpLog => {
                    logs.quarantine(shard_id, &error.to_string(), Some(&identity)).await?;
                }
                UnreplayedStep::Wait(why) => {
                    let what = format!("{error}; repair waits: {why}");
                    return Err(Error::Unusable { what });
                }
                UnreplayedStep::Alone => {
                    let what = format!("{error}; repair waits: no other replica responds");
                    return Err(Error::Unusable { what });
                }
            }
        }
        Err(logs.unusable(shard_id, "its replay keeps meeting damage after repairs"))
    }
}

/// Opens this node's replica of shard 0, after a repair of the damage that its replay meets.
pub(super) async fn open_shard0_repaired(
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
                tracing::warn!(%error, "the start waits");
                tokio::time::sleep(SHORTAGE_PAUSE).await;
                log = logs.open_shard0(identity.clone(), is_single_node).await?;
                machine.replay_from(log.wal.clone());
                continue;
            }
            Err(failure) if is_single_node => return Err(failure.into_error(logs).await),
            Err(OpenFailure::Replay(unreplayed)) => {
                let what = unreplayed.error.to_string();
                (Some(unreplayed), what)
            }
            Err(OpenFailure::Other(Error::CorruptLog { what })) => (None, what),
            Err(OpenFailure::Other(error)) => return Err(error),
        };
        attempt += 1;
        let step = match unreplayed {
            None => UnreplayedStep::GiveUpLog,
            Some(unreplayed) => {
                let may_give_up = attempt >= opening.attempts().min(FETCH_ATTEMPTS);
                let step = repair_or_decide(hub, &unreplayed, may_give_up, &|_| {}).await;
                unreplayed.close(logs).await;
                step
            }
        };
        match after_step(step, opening, &mut attempt, &mut repairs) {
            Shard0Action::OpenAgain => {}
            Shard0Action::Pause(why) => {
                tracing::warn!(shard_id = 0, why, "the log is damaged; repair waits");
                tokio::time::sleep(RETRY_PAUSE).await;
            }
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

/// Action after a step of the repair of shard 0.
#[derive(Debug, PartialEq, Eq)]
enum Shard0Action {
    OpenAgain,
    /// Open again after a pause; the reason is for operators.
    Pause(String),
    /// The repairs are used up.
    KeepsMeetingDamage,
    /// The caller tries again later.
    Later(String),
    /// No other replica responds, so the damage stays.
    Damaged,
    GiveUpLog,
}

/// Decides what follows a step, and counts attempts and repairs. An attempt that repaired something
/// is not counted as one.
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
        UnreplayedStep::Wait(why) if has_attempts => Shard0Action::Pause(why),
        // A running node serves from the other shards, and the rule may be fulfilled later.
        UnreplayedStep::Wait(why) if opening == Shard0Opening::Reopen => Shard0Action::Later(why),
        UnreplayedStep::Wait(_) | UnreplayedStep::GiveUpLog => Shard0Action::GiveUpLog,
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
                tracing::warn!(%error, "the start waits");
                tokio::time::sleep(SHORTAGE_PAUSE).await;
            }
            quarantined => return quarantined.map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repairs_do_not_use_up_attempts() {
        for opening in [Shard0Opening::Start, Shard0Opening::Reopen] {
            let (mut attempt, mut repairs) = (1, 0);
            for _ in 0..REPAIRS_MAX {
                let step = UnreplayedStep::OpenAgain(1);
                let action = after_step(step, opening, &mut attempt, &mut repairs);
                assert_eq!(action, Shard0Action::OpenAgain);
                attempt += 1;
            }
            let step = UnreplayedStep::OpenAgain(1);
            let action = after_step(step, opening, &mut attempt, &mut repairs);
            assert_eq!((action, attempt), (Shard0Action::KeepsMeetingDamage, 1));
        }
    }

    #[test]
    fn running_node_does_not_give_up_log_because_repair_waits() {
        let after = |opening: Shard0Opening, step: UnreplayedStep, mut attempt: u32| {
            after_step(step, opening, &mut attempt, &mut 0)
        };
        let wait = || UnreplayedStep::Wait("no leader".to_owned());
        let (start, reopen) = (Shard0Opening::Start, Shard0Opening::Reopen);
        let pause = Shard0Action::Pause("no leader".to_owned());
        assert_eq!(after(reopen, wait(), 1), pause);
        assert_eq!(after(start, wait(), start.attempts() - 1), pause);
        let later = Shard0Action::Later("no leader".to_owned());
        assert_eq!(after(reopen, wait(), reopen.attempts()), later);
        assert_eq!(after(start, wait(), start.attempts()), Shard0Action::GiveUpLog);
        assert_eq!(after(reopen, UnreplayedStep::GiveUpLog, 1), Shard0Action::GiveUpLog);
    }
}
