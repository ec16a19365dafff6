//! Subscriptions that resume automatically.
//!
//! One task per stream reads partitions of one node, tracks the position of each, and reopens the
//! stream from there.

mod cursor;
mod partition_watch;
mod stream;

use std::sync::{Arc, Mutex, PoisonError};

use helix_proto::log::v1::{ErrorReason, PartitionWatermarks, Watermarks};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::debug;

use super::decode;
use super::read_turns::ReadTurns;
use super::replica_selector::ReplicaSelector;
use super::{Batches, NodeGroup, NodeGroups, OnRecreate, ReadOptions, ReadStart, Records};
use crate::call_spec::{CallSpec, Repeat};
use crate::client::Client;
use crate::error::{Error, RecreatedTopic, Result};
use crate::pending::PendingGuard;
use crate::retry::{Retries, RetryDecision};
use cursor::Cursor;
use partition_watch::{KnownPartitions, ParkedCursors};
use stream::StreamEnd;

/// Messages read ahead of the consumer; flow control holds back the rest.
///
/// A message has at least one batch and about 1 MiB at most.
const READ_AHEAD_MESSAGES: usize = 4;

/// An event of a subscription.
#[derive(Debug, Clone, PartialEq)]
pub enum Event<T> {
    /// Records of one partition, in order.
    Data(T),
    /// All committed records of this partition have been delivered.
    CaughtUp {
        /// Topic.
        topic: String,
        /// Partition.
        partition: u32,
        /// State of the partition.
        watermarks: Watermarks,
    },
    /// No new records; the state of some of the partitions.
    Heartbeat(Vec<PartitionWatermarks>),
    /// The topic was deleted and created again; the partition is now read from its first readable
    /// record. Only with [`OnRecreate::Restart`].
    Restarted {
        /// Topic.
        topic: String,
        /// Partition.
        partition: u32,
        /// Id of the topic that was read so far.
        old_topic_id: u64,
        /// Id of the topic that is read from now on.
        topic_id: u64,
    },
}

/// An open subscription. Dropping it closes it.
#[derive(Debug)]
pub struct Subscription {
    events: mpsc::Receiver<Result<Event<Batches>>>,
    tasks: Arc<Mutex<JoinSet<()>>>,
    skips_undecodable: bool,
    /// Error of an undecodable batch, returned after the records before it.
    failure: Option<Error>,
}

impl Subscription {
    pub(super) fn new(client: Client, starts: Vec<ReadStart>, options: ReadOptions) -> Self {
        let (sender, events) = mpsc::channel(READ_AHEAD_MESSAGES);
        let tasks = Arc::new(Mutex::new(JoinSet::new()));
        let known = options.new_partitions.then(|| KnownPartitions::of_starts(&starts));
        let cursors = starts.into_iter().map(Cursor::new).collect();
        let task = StreamTask {
            retries: Retries::new(Repeat::Read),
            healthy_at: Instant::now(),
            pending: None,
            progress_at: Instant::now(),
            selector: ReplicaSelector::new(options, client.shared.routing.next_turn()),
            client,
            options,
            cursors,
            turns: Arc::default(),
            parked: ParkedCursors::default(),
            events: sender,
            tasks: tasks.clone(),
        };
        if let Some(known) = known {
            let watch = task.with_cursors(Vec::new()).watch_new_partitions(known);
            tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(watch);
        }
        task.spawn();
        let skips_undecodable = options.skip_undecodable;
        Self { events, tasks, skips_undecodable, failure: None }
    }

    /// Returns the next event, or `None` once the subscription is complete or has failed.
    ///
    /// A subscription is complete when every partition has reached its `until`. Waits without a
    /// limit for new records. Dead connections are detected and replaced automatically.
    ///
    /// Cancel safe: no event is lost if the future is dropped.
    ///
    /// # Errors
    /// An error is final: subscribe again from the last `next_offset` if it is `retryable`.
    /// `TOPIC_RECREATED` if a topic was deleted and created again, unless
    /// [`OnRecreate::Restart`] is set. `UNDECODABLE_BATCH` after the records before such a batch,
    /// unless [`ReadOptions::skip_undecodable`] is set.
    pub async fn next(&mut self) -> Option<Result<Event<Records>>> {
        if let Some(failure) = self.failure.take() {
            self.end();
            return Some(Err(failure));
        }
        let event = match self.next_encoded().await? {
            Ok(Event::Data(batches)) => match decode::readable(batches, self.skips_undecodable) {
                (records, None) => Ok(Event::Data(records)),
                (records, Some(error)) if records.records.is_empty() => Err(error),
                (records, failure) => {
                    self.failure = failure;
                    Ok(Event::Data(records))
                }
            },
            Ok(Event::CaughtUp { topic, partition, watermarks }) => {
                Ok(Event::CaughtUp { topic, partition, watermarks })
            }
            Ok(Event::Heartbeat(partitions)) => Ok(Event::Heartbeat(partitions)),
            Ok(Event::Restarted { topic, partition, old_topic_id, topic_id }) => {
                Ok(Event::Restarted { topic, partition, old_topic_id, topic_id })
            }
            Err(error) => Err(error),
        };
        if event.is_err() {
            self.end();
        }
        Some(event)
    }

    /// Like [`Subscription::next`], but returns the stored batches.
    ///
    /// # Errors
    /// As [`Subscription::next`].
    pub async fn next_encoded(&mut self) -> Option<Result<Event<Batches>>> {
        let event = self.events.recv().await;
        if let Some(Err(_)) = &event {
            self.end();
        }
        event
    }

    fn end(&mut self) {
        self.events.close();
        while self.events.try_recv().is_ok() {}
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }
}

/// Task that reads some partitions of one node over one stream.
struct StreamTask {
    client: Client,
    options: ReadOptions,
    selector: ReplicaSelector,
    cursors: Vec<Cursor>,
    turns: Arc<ReadTurns>,
    parked: ParkedCursors,
    events: mpsc::Sender<Result<Event<Batches>>>,
    tasks: Arc<Mutex<JoinSet<()>>>,
    retries: Retries,
    /// Time of the last message.
    healthy_at: Instant,
    /// Set from a failure until the next event.
    pending: Option<PendingGuard>,
    /// Time of the last records.
    progress_at: Instant,
}

/// Outcome of [`StreamTask::restart`].
enum Restart {
    /// At least one cursor has moved to the new topic.
    Done,
    /// The subscription was dropped.
    Dropped,
    /// A cursor without an id may be read from the new topic.
    Reopen,
    /// The error is final.
    NotPossible,
}

impl StreamTask {
    fn spawn(self) {
        let tasks = self.tasks.clone();
        tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(self.run());
    }

    async fn run(mut self) {
        loop {
            self.cursors.retain(|cursor| !cursor.has_reached_end());
            if self.cursors.is_empty() {
                return;
            }
            let (group, end) = match self.split_by_node().await {
                Ok(group) => {
                    let end = self.stream(&group).await;
                    (Some(group), end)
                }
                Err(error) => (None, StreamEnd::Failed(error)),
            };
            let mut reopens = false;
            if let StreamEnd::Failed(error) = &end
                && let Some(recreated) = error.recreated.clone()
            {
                match self.restart(&recreated).await {
                    Restart::Done => continue,
                    Restart::Dropped => return,
                    Restart::Reopen => reopens = true,
                    Restart::NotPossible => {}
                }
            }
            let error = match end {
                StreamEnd::Dropped => return,
                // By contract, the service closes the stream once every partition has reached its
                // end. Partitions may have started there.
                StreamEnd::Ended if self.cursors.iter().all(|it| it.start.until.is_some()) => {
                    return;
                }
                StreamEnd::Ended => ended(),
                StreamEnd::TurnOver => continue,
                StreamEnd::Lags(error) => {
                    if let Err(error) = self.move_on(error, group.as_ref()).await {
                        // Ignored: the subscription was dropped.
                        let _ = self.events.send(Err(error)).await;
                        return;
                    }
                    continue;
                }
                StreamEnd::Failed(error) if reopens => error.retryable_elsewhere(),
                StreamEnd::Failed(error) => error,
            };
            if let Err(error) = self.recover(error, group.as_ref()).await {
                // Ignored: the subscription was dropped.
                let _ = self.events.send(Err(error)).await;
                return;
            }
        }
    }

    /// Keeps the partitions of one request to one node, and spawns tasks for the others.
    ///
    /// Partitions without a route get a separate task, so that the others do not wait for them.
    async fn split_by_node(&mut self) -> Result<NodeGroup> {
        let mut groups = NodeGroups::default();
        let mut unrouted = Vec::new();
        let mut failure = None;
        let limit = Instant::now() + self.client.config().attempt_timeout;
        for (index, cursor) in self.cursors.iter().enumerate() {
            let ReadStart { topic, partition, .. } = &cursor.start;
            let route = self.selector.route(&self.client.shared.routing, topic, *partition);
            match timeout_at(limit, route).await {
                Ok(Ok(route)) => groups.add(route, index, cursor.start.wire_bytes()),
                Ok(Err(error)) => {
                    failure = Some(error);
                    unrouted.push(index);
                }
                Err(_) => {
                    failure = Some(Error::timed_out("metadata"));
                    unrouted.push(index);
                }
            }
        }
        let mut groups = groups.list.into_iter();
        let Some(group) = groups.next() else {
            return Err(failure.expect("there is at least one partition"));
        };
        let mut cursors: Vec<_> = std::mem::take(&mut self.cursors).into_iter().map(Some).collect();
        let mut take = |members: &[usize]| -> Vec<_> {
            members.iter().filter_map(|&index| cursors[index].take()).collect()
        };
        self.cursors = take(&group.members);
        for members in groups.map(|group| group.members).chain([unrouted]) {
            if !members.is_empty() {
                self.with_cursors(take(&members)).spawn();
            }
        }
        Ok(group)
    }

    /// Moves the cursors of a recreated topic to its first record, if the subscription allows it.
    async fn restart(&mut self, recreated: &RecreatedTopic) -> Restart {
        self.client.shared.routing.forget_topic(&recreated.topic);
        if self.options.on_recreate == OnRecreate::Fail {
            return Restart::NotPossible;
        }
        let mut events = Vec::new();
        for cursor in &mut self.cursors {
            let old_topic_id = cursor.start.topic_id;
            if cursor.restart(recreated) {
                let ReadStart { topic, partition, topic_id, .. } = cursor.start.clone();
                events.push(Event::Restarted { topic, partition, old_topic_id, topic_id });
            }
        }
        if events.is_empty() {
            let reopens = self.cursors.iter().any(|cursor| cursor.is_unbound(&recreated.topic));
            return if reopens { Restart::Reopen } else { Restart::NotPossible };
        }
        for event in events {
            if self.events.send(Ok(event)).await.is_err() {
                return Restart::Dropped;
            }
        }
        Restart::Done
    }

    /// Returns true if a deleted topic may be created again, and is then read from its beginning.
    fn waits_for_successor(&self, error: &Error) -> bool {
        let is_missing = matches!(
            error.reason,
            Some(
                ErrorReason::TopicNotFound
                    | ErrorReason::TopicDeleted
                    | ErrorReason::PartitionNotFound
            )
        );
        is_missing
            && self.options.on_recreate == OnRecreate::Restart
            && self.cursors.iter().all(|cursor| cursor.start.topic_id != 0)
    }

    fn with_cursors(&self, cursors: Vec<Cursor>) -> Self {
        Self {
            client: self.client.clone(),
            options: self.options,
            selector: self.selector.clone(),
            cursors,
            turns: self.turns.clone(),
            parked: self.parked.clone(),
            events: self.events.clone(),
            tasks: self.tasks.clone(),
            retries: Retries::new(Repeat::Read),
            healthy_at: Instant::now(),
            pending: None,
            progress_at: self.progress_at,
        }
    }

    /// Moves on to another replica, because the last one lags.
    ///
    /// # Errors
    /// The given error, if no replica has had the records for [`ReadOptions::lag_max`].
    async fn move_on(&mut self, error: Error, group: Option<&NodeGroup>) -> Result<()> {
        debug!(partitions = self.cursors.len(), %error, "reading from another replica");
        // A subscription without an end waits until the records exist.
        let lag_max = self.options.lag_max.filter(|_| self.cursors.iter().any(Cursor::lacks_end));
        if lag_max.is_some_and(|limit| self.progress_at.elapsed() >= limit) {
            return Err(error);
        }
        let has_others = group.is_some_and(|group| self.selector.on_lag(&group.route));
        match self.retries.after(&error, has_others, &self.client.shared.jitter) {
            RetryDecision::GiveUp => Err(error),
            RetryDecision::Redirect => Ok(()),
            RetryDecision::Wait(wait) => {
                sleep(wait).await;
                Ok(())
            }
        }
    }

    /// Handles a failure and waits before the next stream.
    ///
    /// Stops reading partitions that a recreated topic no longer has.
    ///
    /// # Errors
    /// The failure is final, or no message has arrived for the whole request timeout.
    async fn recover(&mut self, error: Error, group: Option<&NodeGroup>) -> Result<()> {
        debug!(partitions = self.cursors.len(), %error, "subscription stream failed");
        let mut error = error.with_may_have_applied(false);
        let shared = &self.client.shared;
        let mut is_redirected = false;
        let has_absent = self.has_absent(&error);
        if !has_absent && self.waits_for_successor(&error) {
            error = error.retryable_elsewhere();
        }
        if let Some(NodeGroup { route, .. }) = group {
            (error, is_redirected) = self.selector.on_failure(route, error);
            is_redirected |= shared.routing.on_failure(route, &error);
        }
        let call = CallSpec::new("read", Repeat::Read);
        let pending = self.pending.take().or_else(|| shared.config.pending.begin(&call));
        if let Some(pending) = &pending {
            pending.on_failure(&error);
        }
        self.pending = pending;
        match self.retries.after(&error, is_redirected, &shared.jitter) {
            RetryDecision::GiveUp if has_absent => {
                self.park_absent();
                Ok(())
            }
            RetryDecision::GiveUp => Err(error),
            RetryDecision::Redirect => Ok(()),
            RetryDecision::Wait(wait) => {
                // The timeout begins when a stream counts as dead, after a silence of
                // `heartbeat_timeout`.
                let limit = shared.config.request_timeout + shared.config.heartbeat_timeout;
                if self.healthy_at.elapsed() + wait >= limit {
                    return Err(error);
                }
                sleep(wait).await;
                Ok(())
            }
        }
    }
}

/// Returns the error for a stream that the service closed early, for example at a shutdown.
fn ended() -> Error {
    Error::known(ErrorReason::Draining, "the service ended the stream")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::Config;
    use crate::consumer::Position;

    #[tokio::test]
    async fn lag_ends_only_reads_with_an_end() {
        let client = Client::new(Config::new(["n1:9092"])).unwrap();
        let options = ReadOptions { lag_max: Some(Duration::ZERO), ..ReadOptions::default() };
        let (events, _receiver) = mpsc::channel(1);
        let mut task = StreamTask {
            selector: ReplicaSelector::new(options, 0),
            client,
            options,
            cursors: vec![Cursor::new(ReadStart::new("orders", 0, Position::Offset(7)))],
            turns: Arc::default(),
            parked: ParkedCursors::default(),
            events,
            tasks: Arc::default(),
            retries: Retries::new(Repeat::Read),
            healthy_at: Instant::now(),
            progress_at: Instant::now(),
            pending: None,
        };
        let lag = || Error::timed_out("records").retryable_elsewhere();
        task.move_on(lag(), None).await.unwrap();
        task.cursors[0].start.until = Some(9);
        assert!(task.move_on(lag(), None).await.is_err());
    }
}
