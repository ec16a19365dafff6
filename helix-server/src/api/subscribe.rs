//! One subscription: many partitions over one stream, each in its turn.
//! Lives inside the answer stream, without a task or a channel: nothing is read ahead of what the
//! client's flow-control window takes, so a slow reader holds one message.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{CaughtUp, Heartbeat, SubscribeRequest, SubscribeResponse};
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Status;
use tonic::codegen::BoxStream;

use super::reader::{self, Budget, Reader, Terms};
use super::wire_watermarks;
use crate::error::Error;
use crate::limits::{FETCH_BYTES_DEFAULT, HEARTBEAT_INTERVAL};
use crate::load::{Call, Room};
use crate::node::Node;
use crate::shard::{WatchGuard, Watcher};

pub(super) struct Subscription {
    node: Arc<Node>,
    call: Option<Arc<Call>>,
    _places: Room,
    followed: Vec<Followed>,
    /// Places in `followed` that may have something to read, each at most once.
    turns: VecDeque<u32>,
    watcher: Arc<Watcher>,
    budget: Budget,
    /// Messages that are made but not yet asked for: at most the two of one turn.
    made: VecDeque<Message>,
    open_count: usize,
    silent_since: Instant,
    silence_max: Duration,
    silence: Pin<Box<Sleep>>,
}

struct Followed {
    reader: Reader,
    /// Keeps the watch; gone when the reader is done.
    guard: Option<WatchGuard>,
    has_turn: bool,
    was_at_end: bool,
}

impl Subscription {
    pub(super) async fn open(
        node: &Arc<Node>,
        request: SubscribeRequest,
        call: Option<Arc<Call>>,
    ) -> Result<Self, Status> {
        let SubscribeRequest { source, out_of_range, accept_encoded, .. } = request;
        if request.membership.is_some() {
            return Err(Error::Unimplemented { what: "membership" }.into());
        }
        let limits = request.limits.unwrap_or_default();
        let terms = Terms::new(source, out_of_range, &limits, accept_encoded)?;
        let budget = Budget::new(&limits, u64::MAX, u64::MAX);
        let (readers, places) = reader::open_all(node, request.partitions, terms).await?;
        let watcher = Watcher::new();
        let followed = follow(readers, &watcher)?;
        let silence_max = silence_max(node);
        let silent_since = Instant::now();
        Ok(Self {
            node: node.clone(),
            call,
            _places: places,
            // Everybody has a turn first: what was committed before the watch wakes nobody.
            turns: (0..).take(followed.len()).collect(),
            open_count: followed.iter().filter(|one| !one.reader.is_done()).count(),
            followed,
            watcher,
            budget,
            made: VecDeque::new(),
            silent_since,
            silence_max,
            silence: Box::pin(sleep_until(silent_since + silence_max)),
        })
    }

    pub(super) fn messages(self) -> BoxStream<SubscribeResponse> {
        Box::pin(stream::try_unfold(Box::new(self), |mut subscription| async {
            let message = subscription.next().await?;
            let answer = |message| SubscribeResponse { message: Some(message) };
            Ok(message.map(|message| (answer(message), subscription)))
        }))
    }

    /// The next message; none when every partition has reached its end.
    async fn next(&mut self) -> Result<Option<Message>, Status> {
        loop {
            if let Some(message) = self.made.pop_front() {
                self.silent_since = Instant::now();
                return Ok(Some(message));
            }
            if self.open_count == 0 || self.budget.is_spent() {
                return Ok(None);
            }
            if self.node.shutdown_token().is_cancelled() {
                return Err(Error::Draining.into());
            }
            match self.turns.pop_front() {
                Some(place) => self.take_turn(place).await?,
                None => self.wait().await?,
            }
        }
    }

    /// Reads one message's worth of one partition.
    async fn take_turn(&mut self, place: u32) -> Result<(), Status> {
        let one = &mut self.followed[place as usize];
        one.has_turn = false;
        if one.reader.is_done() {
            return Ok(());
        }
        let now_us = self.node.clock().now_us();
        let mut found = one.reader.read(&mut self.budget, FETCH_BYTES_DEFAULT, now_us).await?;
        let is_empty = found.is_empty();
        if !is_empty {
            if let (Some(call), Some(room)) = (&self.call, found.room.take()) {
                call.hold(room);
            }
            self.node.metrics().on_read(found.record_count(), found.bytes);
            self.made.push_back(Message::Data(one.reader.answer(found)));
        }
        if one.reader.is_done() {
            one.guard = None;
            self.open_count -= 1;
        } else if is_empty || one.reader.is_at_end() {
            // The watch gives it its next turn.
            if !one.was_at_end {
                one.was_at_end = true;
                self.made.push_back(caught_up(&one.reader));
            }
        } else {
            // More than a message behind: it is said again when that has been made up for.
            one.was_at_end = false;
            self.give_turn(place);
        }
        Ok(())
    }

    fn give_turn(&mut self, place: u32) {
        let one = &mut self.followed[place as usize];
        if !one.has_turn && !one.reader.is_done() {
            one.has_turn = true;
            self.turns.push_back(place);
        }
    }

    async fn wait(&mut self) -> Result<(), Status> {
        tokio::select! {
            () = self.watcher.changed() => {
                for place in self.watcher.take_ready() {
                    self.give_turn(place);
                }
                Ok(())
            }
            () = self.silence.as_mut() => self.break_silence(),
            () = self.node.shutdown_token().cancelled() => Err(Error::Draining.into()),
        }
    }

    /// A heartbeat, if nothing was said since the timer was set.
    fn break_silence(&mut self) -> Result<(), Status> {
        let now = Instant::now();
        if now >= self.silent_since + self.silence_max {
            let partitions = self
                .followed
                .iter_mut()
                .filter(|one| !one.reader.is_done())
                .map(|one| one.reader.state())
                .collect::<Result<_, _>>()?;
            self.made.push_back(Message::Heartbeat(Heartbeat { partitions }));
            self.silent_since = now;
            self.silence_max = silence_max(&self.node);
            let places = (0..).take(self.followed.len());
            for place in places {
                if self.followed[place as usize].reader.ends_in_time() {
                    self.give_turn(place);
                }
            }
        }
        self.silence.as_mut().reset(self.silent_since + self.silence_max);
        Ok(())
    }
}

fn follow(readers: Vec<Reader>, watcher: &Arc<Watcher>) -> Result<Vec<Followed>, Status> {
    let mut followed = Vec::with_capacity(readers.len());
    for (place, reader) in (0..).zip(readers) {
        let guard = reader
            .shard()
            .watch(reader.partition(), place, watcher)
            .map_err(|error| reader.status(&error))?;
        followed.push(Followed { reader, guard: Some(guard), has_turn: true, was_at_end: false });
    }
    Ok(followed)
}

/// The interval less up to a fifth: subscriptions that began together do not beat together.
fn silence_max(node: &Node) -> Duration {
    let fifth_us = u64::try_from(HEARTBEAT_INTERVAL.as_micros() / 5).expect("some seconds");
    HEARTBEAT_INTERVAL - Duration::from_micros(node.random_u64() % (fifth_us + 1))
}

fn caught_up(reader: &Reader) -> Message {
    Message::CaughtUp(CaughtUp {
        topic: reader.topic().to_owned(),
        partition: reader.number(),
        watermarks: Some(wire_watermarks(reader.watermarks())),
    })
}
