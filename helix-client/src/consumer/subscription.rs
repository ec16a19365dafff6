//! A stream of records that goes on by itself. One task per node reads its stream, remembers for
//! each partition how far it came, and asks again from there.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{
    CaughtUp, ErrorReason, PartitionRecords, PartitionWatermarks, SubscribeRequest,
    SubscribeResponse, Watermarks,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::Streaming;
use tracing::debug;

use super::source::Source;
use super::{Batches, Group, Groups, Position, ReadOptions, Records, Start, decode};
use crate::client::Client;
use crate::error::{Error, Result};
use crate::retry::{Next, Repeat, Retries};
use crate::routing::{Lookout, Pace};

/// Messages read ahead of the consumer. Each has at least one batch and about 1 MiB at most; what
/// is not read from the network waits there.
const READ_AHEAD_MESSAGES: usize = 4;

/// What a subscription tells.
#[derive(Debug, Clone, PartialEq)]
pub enum Event<T> {
    /// Records of one partition, in order.
    Data(T),
    /// Everything that was committed in this partition has been told.
    CaughtUp {
        /// Topic.
        topic: String,
        /// Partition.
        partition: u32,
        /// State of the partition.
        watermarks: Watermarks,
    },
    /// Nothing new; the state of some of the partitions.
    Heartbeat(Vec<PartitionWatermarks>),
}

/// An open subscription. Dropping it ends it.
#[derive(Debug)]
pub struct Subscription {
    events: mpsc::Receiver<Result<Event<Batches>>>,
    followers: Arc<Mutex<JoinSet<()>>>,
}

impl Subscription {
    pub(super) fn new(client: Client, starts: Vec<Start>, options: ReadOptions) -> Self {
        let (sender, events) = mpsc::channel(READ_AHEAD_MESSAGES);
        let followers = Arc::new(Mutex::new(JoinSet::new()));
        let cursors = starts.into_iter().map(Cursor::new).collect();
        let follower = Follower {
            retries: Retries::new(Repeat::Read),
            well_at: Instant::now(),
            source: Source::new(options, client.shared.routing.next_turn()),
            client,
            options,
            cursors,
            events: sender,
            followers: followers.clone(),
        };
        follower.spawn();
        Self { events, followers }
    }

    /// The next event. None after the end: every partition has reached its `until`, or an error
    /// was told. Waits for as long as nothing is committed; a connection that has died is noticed
    /// and replaced meanwhile.
    ///
    /// Cancel safe: nothing is lost if the future is dropped.
    pub async fn next(&mut self) -> Option<Result<Event<Records>>> {
        let event = match self.next_encoded().await? {
            Ok(Event::Data(batches)) => batches.decode().map(Event::Data),
            Ok(Event::CaughtUp { topic, partition, watermarks }) => {
                Ok(Event::CaughtUp { topic, partition, watermarks })
            }
            Ok(Event::Heartbeat(partitions)) => Ok(Event::Heartbeat(partitions)),
            Err(error) => Err(error),
        };
        if event.is_err() {
            self.end();
        }
        Some(event)
    }

    /// As [`Subscription::next`], leaving the batches as they are stored.
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
        self.followers.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.followers.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }
}

/// How far one partition was told.
#[derive(Debug)]
struct Cursor {
    /// Where to ask from: an offset as soon as the service has resolved the position.
    start: Start,
    /// Offset that the next records must not lie below: one past the last that were told.
    told: Option<u64>,
}

impl Cursor {
    fn new(start: Start) -> Self {
        let told = match start.position {
            Position::Offset(offset) => Some(offset),
            _ => None,
        };
        Self { start, told }
    }

    fn is_at_end(&self) -> bool {
        matches!((self.told, self.start.until), (Some(next), Some(until)) if next >= until)
    }

    /// Takes a message's records and moves on behind them.
    fn on_data(&mut self, data: PartitionRecords) -> Result<Batches> {
        let batches = decode::batches(data, self.told, self.start.until)?;
        self.told = Some(batches.next_offset);
        self.start.position = Position::Offset(batches.next_offset);
        Ok(batches)
    }

    /// Pins a position like "latest" to where the reader is, so that a later stream does not begin
    /// at what is the latest by then. Does not move a reader that has an offset: the high
    /// watermark may have moved on since.
    fn on_caught_up(&mut self, watermarks: &Watermarks) {
        if !matches!(self.start.position, Position::Offset(_)) {
            self.start.position = Position::Offset(watermarks.high_watermark);
        }
    }
}

/// Follows some partitions over one stream.
struct Follower {
    client: Client,
    options: ReadOptions,
    source: Source,
    cursors: Vec<Cursor>,
    events: mpsc::Sender<Result<Event<Batches>>>,
    followers: Arc<Mutex<JoinSet<()>>>,
    retries: Retries,
    /// When there was last something to read.
    well_at: Instant,
}

/// Why a follower is not on a stream any more.
enum Break {
    /// The consumer is gone.
    Unwanted,
    /// The service has ended the stream.
    Ended,
    Failed(Error),
}

impl Follower {
    fn spawn(self) {
        let followers = self.followers.clone();
        followers.lock().unwrap_or_else(PoisonError::into_inner).spawn(self.run());
    }

    async fn run(mut self) {
        loop {
            self.cursors.retain(|cursor| !cursor.is_at_end());
            if self.cursors.is_empty() {
                return;
            }
            let (group, end) = match self.part().await {
                Ok(group) => {
                    let end = self.stream(&group).await;
                    (Some(group), end)
                }
                Err(error) => (None, Break::Failed(error)),
            };
            let error = match end {
                Break::Unwanted => return,
                // By contract, every partition has reached its end: it may have begun there.
                Break::Ended if self.cursors.iter().all(|it| it.start.until.is_some()) => return,
                Break::Ended => ended(),
                Break::Failed(error) => error,
            };
            if let Err(error) = self.recover(error, group.as_ref()).await {
                // Ignored: the consumer is gone.
                let _ = self.events.send(Err(error)).await;
                return;
            }
        }
    }

    /// Keeps the partitions of one node, and gives those of others to followers of their own; also
    /// those that nobody can be asked about now, so that the rest does not wait for them.
    async fn part(&mut self) -> Result<Group> {
        let mut groups = Groups::default();
        let mut unrouted = Vec::new();
        let mut failure = None;
        let limit = Instant::now() + self.client.config().attempt_timeout;
        for (place, cursor) in self.cursors.iter().enumerate() {
            let Start { topic, partition, .. } = &cursor.start;
            let route = self.source.route(&self.client.shared.routing, topic, *partition);
            match timeout_at(limit, route).await {
                Ok(Ok(route)) => groups.add(route, place),
                Ok(Err(error)) => {
                    failure = Some(error);
                    unrouted.push(place);
                }
                Err(_) => {
                    failure = Some(Error::timed_out("metadata"));
                    unrouted.push(place);
                }
            }
        }
        let mut groups = groups.list.into_iter();
        let Some(group) = groups.next() else {
            return Err(failure.expect("there is a partition to follow"));
        };
        let mut cursors: Vec<_> = std::mem::take(&mut self.cursors).into_iter().map(Some).collect();
        let mut take = |members: &[usize]| -> Vec<_> {
            members.iter().filter_map(|&place| cursors[place].take()).collect()
        };
        self.cursors = take(&group.members);
        for members in groups.map(|group| group.members).chain([unrouted]) {
            if !members.is_empty() {
                self.beside(take(&members)).spawn();
            }
        }
        Ok(group)
    }

    fn beside(&self, cursors: Vec<Cursor>) -> Self {
        Self {
            client: self.client.clone(),
            options: self.options,
            source: self.source.clone(),
            cursors,
            events: self.events.clone(),
            followers: self.followers.clone(),
            retries: Retries::new(Repeat::Read),
            well_at: Instant::now(),
        }
    }

    /// One stream, until it ends.
    async fn stream(&mut self, group: &Group) -> Break {
        let client = self.client.clone();
        let topic = self.cursors[0].start.topic.clone();
        let routing = &client.shared.routing;
        let mut lookout =
            Lookout::new(routing, &topic, &group.shard_ids, &group.route, Pace::Patient);
        let mut messages = match self.open(group, &mut lookout).await {
            Ok(messages) => messages,
            Err(error) => return Break::Failed(error),
        };
        let places = Places::new(&self.cursors);
        let silence_max = client.config().heartbeat_timeout;
        let mut heard_at = Instant::now();
        loop {
            let message = tokio::select! {
                biased;
                message = timeout_at(heard_at + silence_max, messages.message()) => message,
                () = replaced(&self.source, &mut lookout) => {
                    return Break::Failed(Error::superseded("subscribe"));
                }
            };
            let message = match message {
                Ok(Ok(Some(message))) => message,
                Ok(Ok(None)) => return Break::Ended,
                Ok(Err(status)) => return Break::Failed(Error::from(status)),
                Err(_) => return Break::Failed(Error::timed_out("the sign of life")),
            };
            heard_at = Instant::now();
            self.well_at = heard_at;
            // A leader that is cut off from the others has signs of life to give, and no data.
            if matches!(message.message, Some(Message::Data(_))) {
                lookout.on_progress();
            }
            let event = match self.on_message(message, &places) {
                Ok(Some(event)) => event,
                Ok(None) => continue,
                Err(error) => return Break::Failed(error),
            };
            self.retries.on_progress();
            self.source.on_progress();
            if self.events.send(Ok(event)).await.is_err() {
                return Break::Unwanted;
            }
        }
    }

    async fn open(
        &self,
        group: &Group,
        lookout: &mut Lookout<'_>,
    ) -> Result<Streaming<SubscribeResponse>> {
        let request = SubscribeRequest {
            partitions: self.cursors.iter().map(|cursor| cursor.start.to_wire()).collect(),
            limits: None,
            source: self.source.to_wire().into(),
            out_of_range: self.options.out_of_range().into(),
            accept_encoded: true,
            membership: None,
        };
        let mut consume = group.route.connection.consume();
        let limit = self.client.config().attempt_timeout;
        tokio::select! {
            biased;
            answer = timeout(limit, consume.subscribe(request)) => match answer {
                Ok(Ok(response)) => Ok(response.into_inner()),
                Ok(Err(status)) => Err(Error::from(status)),
                Err(_) => Err(Error::timed_out("subscribe")),
            },
            () = replaced(&self.source, lookout) => Err(Error::superseded("subscribe")),
        }
    }

    /// Takes a message in. None if it is for a partition that was not asked for, or of a kind that
    /// this version does not know.
    fn on_message(
        &mut self,
        message: SubscribeResponse,
        places: &Places,
    ) -> Result<Option<Event<Batches>>> {
        match message.message {
            Some(Message::Data(data)) => {
                let Some(place) = places.of(&data.topic, data.partition) else {
                    return Ok(None);
                };
                self.cursors[place].on_data(data).map(|batches| Some(Event::Data(batches)))
            }
            Some(Message::CaughtUp(CaughtUp { topic, partition, watermarks })) => {
                let place = places.of(&topic, partition);
                let (Some(place), Some(watermarks)) = (place, watermarks) else {
                    return Ok(None);
                };
                self.cursors[place].on_caught_up(&watermarks);
                Ok(Some(Event::CaughtUp { topic, partition, watermarks }))
            }
            Some(Message::Heartbeat(beat)) => Ok(Some(Event::Heartbeat(beat.partitions))),
            None => Ok(None),
        }
    }

    /// Decides about a failure and waits before the next stream.
    ///
    /// # Errors
    /// It is final, or nothing could be read for the whole request timeout.
    async fn recover(&mut self, error: Error, group: Option<&Group>) -> Result<()> {
        debug!(partitions = self.cursors.len(), %error, "subscription broke");
        let mut error = error.with_may_have_applied(false);
        let shared = &self.client.shared;
        let mut is_redirected = false;
        if let Some(Group { route, .. }) = group {
            (error, is_redirected) = self.source.on_failure(route, error);
            is_redirected |= shared.routing.on_failure(route, &error);
        }
        match self.retries.after(&error, is_redirected, &shared.jitter) {
            Next::GiveUp => Err(error),
            Next::Redirect => Ok(()),
            Next::Wait(wait) => {
                // A stream is only known to be dead after a silence, which does not count.
                let limit = shared.config.request_timeout + shared.config.heartbeat_timeout;
                if self.well_at.elapsed() + wait >= limit {
                    return Err(error);
                }
                sleep(wait).await;
                Ok(())
            }
        }
    }
}

/// Waits until the node that is read from has been replaced as the leader; for ever if it is not
/// read from as such.
async fn replaced(source: &Source, lookout: &mut Lookout<'_>) {
    if source.is_leader() { lookout.moved().await } else { std::future::pending().await }
}

/// Finds a partition's cursor by its name.
struct Places {
    by_topic: HashMap<String, HashMap<u32, usize>>,
}

impl Places {
    fn new(cursors: &[Cursor]) -> Self {
        let mut by_topic: HashMap<String, HashMap<u32, usize>> = HashMap::new();
        for (place, Cursor { start, .. }) in cursors.iter().enumerate() {
            by_topic.entry(start.topic.clone()).or_default().insert(start.partition, place);
        }
        Self { by_topic }
    }

    fn of(&self, topic: &str, partition: u32) -> Option<usize> {
        self.by_topic.get(topic)?.get(&partition).copied()
    }
}

/// The service has ended a stream that was not at its end, as a server does that stops.
fn ended() -> Error {
    Error::known(ErrorReason::Draining, "the service has ended the stream")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(position: Position, until: Option<u64>) -> Cursor {
        Cursor::new(Start { until, ..Start::new("orders", 0, position) })
    }

    #[test]
    fn a_cursor_goes_on_where_the_last_message_ended() {
        let mut cursor = cursor(Position::Latest, Some(9));
        let data =
            PartitionRecords { start_offset: 5, next_offset: 7, ..PartitionRecords::default() };
        assert_eq!(cursor.on_data(data).unwrap().start_offset, 5);
        assert_eq!(cursor.start.position, Position::Offset(7));
        assert!(!cursor.is_at_end());
        let data = PartitionRecords { next_offset: 9, ..PartitionRecords::default() };
        assert_eq!(cursor.on_data(data).unwrap().start_offset, 7);
        assert!(cursor.is_at_end());
    }

    #[test]
    fn catching_up_pins_a_named_start_and_moves_nothing_else() {
        let mut cursor = cursor(Position::Latest, None);
        cursor.on_caught_up(&Watermarks { log_start_offset: 0, high_watermark: 12 });
        assert_eq!(cursor.start.position, Position::Offset(12));
        cursor.on_caught_up(&Watermarks { log_start_offset: 0, high_watermark: 20 });
        assert_eq!(cursor.start.position, Position::Offset(12));
        // What the service sends from where it is counts, not what it said about the end.
        let data =
            PartitionRecords { start_offset: 10, next_offset: 14, ..PartitionRecords::default() };
        assert_eq!(cursor.on_data(data).unwrap().start_offset, 10);
    }

    #[test]
    fn cursors_are_found_by_name() {
        let starts = [("a", 0), ("a", 1), ("b", 1)];
        let cursors: Vec<_> = starts
            .iter()
            .map(|&(topic, partition)| {
                Cursor::new(Start::new(topic, partition, Position::Earliest))
            })
            .collect();
        let places = Places::new(&cursors);
        assert_eq!(places.of("a", 1), Some(1));
        assert_eq!(places.of("b", 1), Some(2));
        assert_eq!(places.of("b", 0), None);
        assert_eq!(places.of("c", 0), None);
    }
}
