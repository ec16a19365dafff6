//! `helix consume --group`: prints records as a member of a consumer group, and commits what it
//! has printed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Context;
use helix_client::{
    AssignedPartition, AutoCommit, Client, GroupConsumer, GroupEvent, OffsetToCommit, PendingCall,
    PendingCalls, Records,
};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::records::RecordPrinter;
use super::skipped::SkippedBatches;
use crate::args::{ConsumeArgs, GlobalArgs};
use crate::connect::connect;
use crate::exit::{self, CliError, Exit};
use crate::interrupt;
use crate::offset_lookup;
use crate::output::message;
use crate::stdout_reader;

/// Interval of commits while records are printed.
const COMMIT_INTERVAL: Duration = Duration::from_secs(1);

/// Interval at which a read without --follow checks whether it has reached all ends.
const END_INTERVAL: Duration = Duration::from_millis(100);

/// Time after an interrupt in which a member commits and leaves while the cluster has no leader.
const LEAVE_LEADERLESS_MAX: Duration = Duration::from_millis(700);

/// The same while the cluster does not respond at all.
const LEAVE_IN_SILENCE_MAX: Duration = Duration::from_secs(1);

pub(crate) async fn run(global: &GlobalArgs, args: &ConsumeArgs) -> anyhow::Result<()> {
    let group = args.group.as_deref().unwrap_or_default();
    let printer = RecordPrinter::new(global, args.format.as_ref())?;
    let client = tokio::select! {
        client = connect_to(global, &args.topic) => client?,
        () = interrupt::interrupted() => return Err(CliError::interrupted().into()),
    };
    let consumer = client
        .consumer_group(group)
        .topics([&args.topic])
        .client_name("helix consume")
        .start(args.start.into())
        .auto_commit(AutoCommit::Off)
        .skip_undecodable(args.skip_undecodable)
        .join();
    let mut reading = GroupReading {
        consumer,
        printer,
        follow: args.follow,
        quiet: global.quiet,
        pending: global.pending.clone(),
        remaining: args.max_records.unwrap_or(u64::MAX),
        printed: BTreeMap::new(),
        skipped: SkippedBatches::default(),
        behind: BTreeSet::new(),
        is_told: false,
        has_assigned: false,
        uncommitted: None,
        committed_at: Instant::now(),
    };
    let outcome = tokio::select! {
        outcome = reading.read() => outcome,
        () = interrupt::interrupted() => Err(CliError::interrupted().into()),
    };
    // Also after a failure: the records before it were printed.
    let ended = reading.end().await;
    let outcome = match (outcome, ended) {
        (Err(failed), Err(ended)) => {
            if !matches!(exit::of(&ended), Exit::Done | Exit::Interrupted) {
                message!("the last records may be printed again: {ended:#}");
            }
            Err(failed)
        }
        (outcome, ended) => outcome.and(ended),
    };
    outcome.with_context(|| format!("read {} as a member of {group}", args.topic))
}

/// Connects to the cluster, and checks that the topic exists, unless it is a pattern.
async fn connect_to(global: &GlobalArgs, topic: &str) -> anyhow::Result<Client> {
    let client = connect(global).await?;
    if !topic.contains('*') {
        offset_lookup::topic(&client, topic).await?;
    }
    Ok(client)
}

/// A member that prints.
struct GroupReading {
    consumer: GroupConsumer,
    printer: RecordPrinter,
    follow: bool,
    quiet: bool,
    /// Calls in progress.
    pending: PendingCalls,
    /// Records to print.
    remaining: u64,
    /// Offsets after the printed records that are not committed yet.
    printed: BTreeMap<AssignedPartition, u64>,
    skipped: SkippedBatches,
    /// Partitions that have records to print, without --follow.
    behind: BTreeSet<AssignedPartition>,
    /// It was said that no topic matches.
    is_told: bool,
    /// Partitions were assigned at least once.
    has_assigned: bool,
    /// Error of a commit that is not reported yet.
    uncommitted: Option<helix_client::Error>,
    committed_at: Instant,
}

impl GroupReading {
    /// Prints until the end, or without end.
    async fn read(&mut self) -> anyhow::Result<()> {
        let mut ticks = interval(END_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let gone = stdout_reader::gone();
        tokio::pin!(gone);
        while self.remaining > 0 {
            let event = tokio::select! {
                biased;
                event = self.consumer.next() => event,
                closed = &mut gone, if self.follow => return Err(closed.into()),
                _ = ticks.tick() => {
                    self.commit_if_due().await?;
                    self.tell_unmatched();
                    if self.follow || !self.behind.is_empty() || !self.has_joined() {
                        continue;
                    }
                    // The first assignment may have arrived with the join.
                    match timeout(END_INTERVAL, self.consumer.next()).await {
                        Ok(event) => event,
                        Err(_) => return Ok(()),
                    }
                }
            };
            let Some(event) = event else { return Ok(()) };
            self.on_event(event?).await?;
        }
        Ok(())
    }

    /// Says once that a pattern matches no topic.
    fn tell_unmatched(&mut self) {
        if self.is_told || self.quiet || !self.consumer.is_settled() {
            return;
        }
        let unmatched = self.consumer.unmatched_topics();
        if let Some(pattern) = unmatched.iter().find(|topic| topic.contains('*')) {
            self.is_told = true;
            let waits = if self.follow { "; waiting for one" } else { "" };
            message!("no topic matches {pattern}{waits}");
        }
    }

    /// Returns true once the member has its assignment. The coordinator may not know a new topic
    /// yet.
    fn has_joined(&self) -> bool {
        let lacks_topic =
            || self.consumer.unmatched_topics().iter().any(|topic| !topic.contains('*'));
        self.consumer.is_settled() && (self.has_assigned || !lacks_topic())
    }

    async fn on_event(&mut self, event: GroupEvent<Records>) -> anyhow::Result<()> {
        match event {
            GroupEvent::Data(records) => {
                self.print(&records)?;
                if self.follow {
                    self.printer.flush()?;
                }
                self.commit_if_due().await
            }
            GroupEvent::CaughtUp { partition, .. } => {
                self.behind.remove(&partition);
                self.printer.flush()
            }
            GroupEvent::Assigned(partitions) => {
                self.behind.extend(partitions);
                self.has_assigned = true;
                Ok(())
            }
            GroupEvent::Revoked(partitions) => {
                for partition in &partitions {
                    self.behind.remove(partition);
                }
                self.commit().await
            }
            GroupEvent::Lost(partitions) => {
                for partition in &partitions {
                    self.behind.remove(partition);
                    self.printed.remove(partition);
                }
                self.uncommitted = None;
                if !self.quiet {
                    message!(
                        "lost {} partitions, joining the group again; another member may print \
                         their last records again",
                        partitions.len()
                    );
                }
                Ok(())
            }
        }
    }

    fn print(&mut self, data: &Records) -> anyhow::Result<()> {
        let count = usize::try_from(self.remaining).unwrap_or(usize::MAX).min(data.records.len());
        for record in &data.records[..count] {
            self.printer.print(&data.topic, data.partition, record)?;
        }
        self.remaining -= count as u64;
        let next = match data.records[..count].last() {
            Some(last) if count < data.records.len() => last.offset + 1,
            _ => data.next_offset,
        };
        let passed = data.undecodable.iter().filter(|skipped| skipped.first_offset < next);
        self.skipped.add(passed);
        self.printed.insert(AssignedPartition::from(data), next);
        Ok(())
    }

    async fn commit_if_due(&mut self) -> anyhow::Result<()> {
        if self.committed_at.elapsed() < COMMIT_INTERVAL { Ok(()) } else { self.commit().await }
    }

    async fn commit(&mut self) -> anyhow::Result<()> {
        match self.try_commit().await? {
            // The consumer repeats the commit.
            Err(error) if error.retryable => Ok(()),
            // The service revokes the partitions soon, and no member prints their records again.
            Err(error) if is_gone(&error) => Ok(()),
            // The consumer has lost the partition and says so.
            Err(error) if is_lost(&error) => {
                self.uncommitted = Some(error);
                Ok(())
            }
            committed => Ok(committed?),
        }
    }

    /// Writes the buffered records, then commits them.
    async fn try_commit(&mut self) -> anyhow::Result<helix_client::Result<()>> {
        self.printer.flush()?;
        self.committed_at = Instant::now();
        if self.printed.is_empty() {
            return Ok(Ok(()));
        }
        let printed = std::mem::take(&mut self.printed);
        let offsets =
            printed.into_iter().map(|(partition, next)| OffsetToCommit::new(partition, next));
        Ok(self.consumer.commit_offsets(offsets).await)
    }

    /// Commits and leaves the group. After an interrupt it does not wait for a cluster that can do
    /// neither, and after a second one for nothing.
    async fn end(mut self) -> anyhow::Result<()> {
        let pending = self.pending.clone();
        let left = async move {
            let committed = self.commit().await;
            let left = match self.consumer.close().await {
                Err(error) if is_gone(&error) => Ok(()),
                left => left,
            };
            committed?;
            self.uncommitted.map_or(Ok(()), Err).and(left).context("commit the last records")
        };
        tokio::select! {
            left = left => left,
            () = interrupt::interrupted_again() => Err(CliError::interrupted().into()),
            why = leaves_without_effect(&pending) => {
                message!(
                    "did not commit and leave the group: {why}; the last records may be printed \
                     again"
                );
                Err(CliError::interrupted().into())
            }
        }
    }
}

/// Resolves after an interrupt, once the calls in progress have failed or got no response for a
/// while. Returns the reason.
async fn leaves_without_effect(pending: &PendingCalls) -> String {
    interrupt::interrupted().await;
    let begin = Instant::now();
    loop {
        sleep(LEAVE_LEADERLESS_MAX / 10).await;
        match pending.longest() {
            Some(PendingCall { last_error: Some(error), .. })
                if begin.elapsed() >= LEAVE_LEADERLESS_MAX =>
            {
                return error.message.clone();
            }
            Some(call) if begin.elapsed().min(call.since.elapsed()) >= LEAVE_IN_SILENCE_MAX => {
                return "no node responds".to_owned();
            }
            _ => {}
        }
    }
}

/// Returns true if a commit was refused because its topic was deleted.
fn is_gone(error: &helix_client::Error) -> bool {
    use helix_client::proto::log::v1::ErrorReason as R;
    matches!(
        error.reason,
        Some(R::TopicNotFound | R::TopicDeleted | R::PartitionNotFound | R::TopicRecreated)
    )
}

/// Returns true if a commit was refused because the member had lost its partitions.
fn is_lost(error: &helix_client::Error) -> bool {
    use helix_client::proto::log::v1::ErrorReason as R;
    matches!(error.reason, Some(R::PartitionNotOwned | R::UnknownMember | R::StaleMemberEpoch))
}
