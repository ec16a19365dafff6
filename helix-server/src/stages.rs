//! Stages of appends and reads: what a slow or a traced call waited for.
//!
//! Each acknowledged batch has the few times in [`ProposalTimes`], which the append path measures
//! anyway. A batch whose caller or whose trace asks for more carries a [`BatchStamps`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use helix_wal::{GroupStamp, GroupTimes};
use tokio::time::Instant;

/// Stage of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Checks of an append, and its wait for its share of the bytes in flight.
    Queue,
    /// Wait until the log writes the batch: mostly for the sync of the batches before it.
    LogWait,
    LogWrite,
    Sync,
    /// From the batch's place in the leader's log until a majority has it.
    Quorum,
    Apply,
    /// From apply until the call goes on.
    WakeUp,
    /// Quorum, apply and wake-up, where they were not measured one by one.
    Settle,
    /// Checks of a read, and the search for its start positions.
    Open,
    /// Read of the log, from memory or from the disk.
    Read,
}

impl Stage {
    pub fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::LogWait => "log wait",
            Self::LogWrite => "log write",
            Self::Sync => "sync",
            Self::Quorum => "quorum",
            Self::Apply => "apply",
            Self::WakeUp => "wake-up",
            Self::Settle => "settle",
            Self::Open => "open",
            Self::Read => "read",
        }
    }
}

/// Time of a stage. Stages may overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageSpan {
    pub stage: Stage,
    /// Time from the start of the call.
    pub start: Duration,
    pub took: Duration,
}

/// Times of an acknowledged batch that the append path measures for each batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProposalTimes {
    pub proposed: Instant,
    /// Write and sync on the leader's disk; `None` if the batch was applied before its sync, and
    /// for a log in memory.
    pub group: Option<GroupTimes>,
}

/// Moments of one batch, stamped by the parts of the server that it passes.
#[derive(Debug)]
pub struct BatchStamps {
    started: Instant,
    /// Nanoseconds from the start; 0 before the moment. The same for the next two.
    logged: AtomicU64,
    committed: AtomicU64,
    applied: AtomicU64,
    group: GroupStamp,
}

impl BatchStamps {
    pub fn new(started: Instant) -> Self {
        Self {
            started,
            logged: AtomicU64::new(0),
            committed: AtomicU64::new(0),
            applied: AtomicU64::new(0),
            group: GroupStamp::default(),
        }
    }

    /// Notes that the leader's log gets the batch.
    pub fn stamp_logged(&self) {
        self.stamp(&self.logged);
    }

    /// Notes that a majority has the batch.
    pub fn stamp_committed(&self) {
        self.stamp(&self.committed);
    }

    /// Notes that the leader has applied the batch.
    pub fn stamp_applied(&self) {
        self.stamp(&self.applied);
    }

    /// Notes the write and the sync on the leader's disk.
    pub fn stamp_synced(&self, group: GroupTimes) {
        self.group.set(group);
    }

    pub fn started(&self) -> Instant {
        self.started
    }

    pub fn applied(&self) -> Option<Instant> {
        self.moment(&self.applied)
    }

    fn stamp(&self, moment: &AtomicU64) {
        let nanos = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        moment.store(nanos.max(1), Ordering::Relaxed);
    }

    fn moment(&self, moment: &AtomicU64) -> Option<Instant> {
        let nanos = moment.load(Ordering::Relaxed);
        (nanos > 0).then(|| self.started + Duration::from_nanos(nanos))
    }
}

/// Everything that the stages of an append follow from.
#[derive(Debug, Clone, Copy)]
pub struct AppendTimes<'a> {
    pub started: Instant,
    pub ack: Option<ProposalTimes>,
    /// Moment at which the log's clock was 0.
    pub log_base: Option<Instant>,
    pub stamps: Option<&'a BatchStamps>,
    pub acked: Instant,
}

impl AppendTimes<'_> {
    /// Returns the stages by their start.
    pub fn stages(&self) -> Vec<StageSpan> {
        let mut stages = Vec::with_capacity(7);
        let mut add = |stage, from: Instant, to: Instant| {
            stages.push(StageSpan {
                stage,
                start: from.saturating_duration_since(self.started),
                took: to.saturating_duration_since(from),
            });
        };
        let logged = self.stamps.and_then(|stamps| stamps.moment(&stamps.logged));
        let proposed = self.ack.map(|ack| ack.proposed);
        // A duplicate is acknowledged without a proposal.
        let Some(queued) = logged.or(proposed) else {
            add(Stage::Queue, self.started, self.acked);
            return stages;
        };
        add(Stage::Queue, self.started, queued);
        let group = match self.stamps {
            Some(stamps) => stamps.group.get(),
            None => self.ack.and_then(|ack| ack.group),
        };
        let mut settles_from = queued;
        if let Some((group, base)) = group.zip(self.log_base) {
            let began = (base + group.began()).max(queued);
            let written = began + group.write();
            settles_from = written + group.sync();
            add(Stage::LogWait, queued, began);
            add(Stage::LogWrite, began, written);
            add(Stage::Sync, written, settles_from);
        }
        let committed = self.stamps.and_then(|stamps| stamps.moment(&stamps.committed));
        let applied = self.stamps.and_then(BatchStamps::applied);
        match committed.zip(applied) {
            Some((committed, applied)) => {
                add(Stage::Quorum, queued, committed);
                add(Stage::Apply, committed, applied);
                add(Stage::WakeUp, applied, self.acked);
            }
            None => add(Stage::Settle, settles_from.min(self.acked), self.acked),
        }
        stages.sort_by_key(|span| span.start);
        stages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    fn shown(stages: &[StageSpan]) -> Vec<(&'static str, u128, u128)> {
        let row = |it: &StageSpan| (it.stage.name(), it.start.as_millis(), it.took.as_millis());
        stages.iter().map(row).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn stages_follow_from_the_times_of_every_batch() {
        let started = Instant::now();
        let group = GroupTimes::new(ms(107), ms(2), ms(10));
        let ack = ProposalTimes { proposed: started + ms(5), group: Some(group) };
        let log_base = started.checked_sub(ms(100));
        let acked = started + ms(30);
        let times = AppendTimes { started, ack: Some(ack), log_base, stamps: None, acked };
        let expected = [
            ("queue", 0, 5),
            ("log wait", 5, 2),
            ("log write", 7, 2),
            ("sync", 9, 10),
            ("settle", 19, 11),
        ];
        assert_eq!(shown(&times.stages()), expected);
        let unsynced = AppendTimes { ack: Some(ProposalTimes { group: None, ..ack }), ..times };
        assert_eq!(shown(&unsynced.stages()), [("queue", 0, 5), ("settle", 5, 25)]);
        let duplicate = AppendTimes { ack: None, ..times };
        assert_eq!(shown(&duplicate.stages()), [("queue", 0, 30)]);
    }

    #[tokio::test(start_paused = true)]
    async fn stamps_tell_quorum_apply_and_wake_up_apart() {
        let started = Instant::now();
        let stamps = BatchStamps::new(started);
        let step = async |time| tokio::time::advance(time).await;
        step(ms(5)).await;
        stamps.stamp_logged();
        stamps.stamp_synced(GroupTimes::new(ms(6), ms(1), ms(20)));
        step(ms(12)).await;
        stamps.stamp_committed();
        step(ms(1)).await;
        stamps.stamp_applied();
        step(ms(2)).await;
        let times = AppendTimes {
            started,
            ack: Some(ProposalTimes { proposed: started + ms(4), group: None }),
            log_base: Some(started),
            stamps: Some(&stamps),
            acked: Instant::now(),
        };
        let expected = [
            ("queue", 0, 5),
            ("log wait", 5, 1),
            ("quorum", 5, 12),
            ("log write", 6, 1),
            ("sync", 7, 20),
            ("apply", 17, 1),
            ("wake-up", 18, 2),
        ];
        assert_eq!(shown(&times.stages()), expected);
    }
}
