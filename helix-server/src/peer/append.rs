//! Appends to one replica, pipelined. Lives inside the stream that openraft polls: no task of its
//! own, no queue but the connection's. A run of requests over one lane is an epoch.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::{Stream, StreamExt};
use helix_proto::raft::v1 as pb;
use pb::exchange_request::Message;
use tokio::sync::mpsc;
use tokio::time::{Sleep, sleep, sleep_until};

use super::connection::Lane;
use super::limits::{BEHIND_BYTES, BEHIND_ENTRIES, CLOSE_BYTES, CLOSE_ENTRIES, COMMIT_WAIT};
use super::link::Route;
use super::session::Session;
use super::wire::{self, AppendRequest, AppendResult, RpcError};

/// The responses to a stream of requests, oldest first. The first error is the end.
pub(super) struct Outbound<S> {
    route: Route,
    input: S,
    /// Whether `input` has ended.
    no_more: bool,
    /// Taken from `input` and not sent yet: it has no room in the window, or no entries.
    held: Option<Held>,
    /// Until when it waits for entries to go with.
    commit_wait: Option<Pin<Box<Sleep>>>,
    lane: Lane,
    epoch: Option<Epoch>,
    pause: Option<Pin<Box<Sleep>>>,
    over: bool,
}

struct Held {
    entries: pb::AppendEntries,
    cost: u64,
}

impl Held {
    fn has_entries(&self) -> bool {
        !self.entries.entries.is_empty()
    }
}

/// What has become of an attempt to send.
enum Sent {
    One,
    /// Nothing can be sent before something else happens, of which the task will be told.
    Waits,
}

impl<S: Stream<Item = AppendRequest> + Unpin> Outbound<S> {
    pub(super) fn new(route: Route, input: S) -> Self {
        Self {
            route,
            input,
            no_more: false,
            held: None,
            commit_wait: None,
            lane: Lane::Live,
            epoch: None,
            pause: None,
            over: false,
        }
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<Result<(), RpcError>> {
        loop {
            match self.send_one(context) {
                Ok(Sent::One) => {}
                Ok(Sent::Waits) => return Poll::Pending,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn send_one(&mut self, context: &mut Context<'_>) -> Result<Sent, RpcError> {
        if !self.take_one(context) {
            return Ok(Sent::Waits);
        }
        let cost = self.held.as_ref().map_or(0, |held| held.cost);
        if !self.ready(cost, context)? {
            return Ok(Sent::Waits);
        }
        if let (Some(held), Some(epoch)) = (self.held.take(), self.epoch.as_mut()) {
            self.commit_wait = None;
            epoch.send(&self.route, held)?;
        }
        Ok(Sent::One)
    }

    /// Whether there is a request to send. One without entries only says how far the log is
    /// committed, and the next one says it too: it waits a moment for that. openraft counts log
    /// ids, not answers, so the answer to the next is the answer to both.
    fn take_one(&mut self, context: &mut Context<'_>) -> bool {
        loop {
            // With the window full nothing is asked for: what comes later is worth waiting for,
            // since it will carry more entries.
            let is_full = self.epoch.as_ref().is_some_and(|epoch| !epoch.has_room(1));
            let has_entries = self.held.as_ref().is_some_and(Held::has_entries);
            if has_entries || self.no_more || is_full {
                return self.held.is_some();
            }
            match self.input.poll_next_unpin(context) {
                Poll::Pending => return self.held.is_some() && self.has_waited(context),
                // Nothing will come for the one that is held to go with.
                Poll::Ready(None) => self.no_more = true,
                Poll::Ready(Some(request)) => {
                    let entries = wire::append_entries(&request);
                    let cost = wire::cost(&entries);
                    self.lane = self.choose_lane(&entries, cost);
                    self.held = Some(Held { entries, cost });
                }
            }
        }
    }

    fn has_waited(&mut self, context: &mut Context<'_>) -> bool {
        let wait = self.commit_wait.get_or_insert_with(|| Box::pin(sleep(COMMIT_WAIT)));
        wait.as_mut().poll(context).is_ready()
    }

    /// Whether a request of this cost can go now; opens the epoch that it goes in.
    fn ready(&mut self, cost: u64, context: &mut Context<'_>) -> Result<bool, RpcError> {
        if let Some(epoch) = &self.epoch {
            if epoch.lane != self.lane {
                // Order: nothing may overtake on another lane.
                if !epoch.in_flight.is_empty() {
                    return Ok(false);
                }
                self.epoch = None;
            } else if !epoch.has_room(cost) {
                return Ok(false);
            }
        }
        if self.lane == Lane::CatchUp && self.throttled(context) {
            return Ok(false);
        }
        if self.epoch.is_none() {
            self.epoch = Some(Epoch::open(&self.route, self.lane)?);
        }
        if self.lane == Lane::CatchUp {
            self.route.roster.throttle.spend(cost);
        }
        Ok(true)
    }

    fn throttled(&mut self, context: &mut Context<'_>) -> bool {
        while let Some(until) = self.route.roster.throttle.wait_until() {
            let pause = self.pause.get_or_insert_with(|| Box::pin(sleep_until(until)));
            if pause.as_mut().poll(context).is_pending() {
                return true;
            }
            self.pause = None;
        }
        false
    }

    /// By how far the target is behind: in entries, and in bytes as far as this request's
    /// entries are like the others.
    fn choose_lane(&self, request: &pb::AppendEntries, cost: u64) -> Lane {
        let last = self.route.wal.state().last.map_or(0, |id| id.index);
        let Some(first) = request.entries.first().and_then(|entry| entry.id) else {
            return self.lane;
        };
        let behind = last.saturating_sub(first.index);
        let bytes = (cost / request.entries.len().max(1) as u64).saturating_mul(behind);
        lane_for(self.lane, behind, bytes)
    }

    fn poll_ack(&mut self, context: &mut Context<'_>) -> Poll<Result<AppendResult, RpcError>> {
        let Some(epoch) = &mut self.epoch else { return Poll::Pending };
        match epoch.acks.poll_recv(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) => Poll::Ready(Err(wire::network("the connection was lost"))),
            Poll::Ready(Some(ack)) => Poll::Ready(epoch.settle(ack)),
        }
    }
}

impl<S: Stream<Item = AppendRequest> + Unpin> Stream for Outbound<S> {
    type Item = Result<AppendResult, RpcError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.over {
            return Poll::Ready(None);
        }
        // First the sending: it keeps the follower busy while openraft looks at the response.
        // Again after a response that made room is the next poll's business.
        if let Poll::Ready(Err(error)) = this.poll_send(context) {
            this.end();
            return Poll::Ready(Some(Err(error)));
        }
        if let Poll::Ready(result) = this.poll_ack(context) {
            if !matches!(result, Ok(Ok(_))) {
                this.end();
            }
            return Poll::Ready(Some(result));
        }
        let is_done = this.epoch.as_ref().is_none_or(|epoch| epoch.in_flight.is_empty());
        if this.no_more && this.held.is_none() && is_done {
            this.end();
            return Poll::Ready(None);
        }
        Poll::Pending
    }
}

impl<S> Outbound<S> {
    fn end(&mut self) {
        self.over = true;
        self.held = None;
        self.commit_wait = None;
        self.epoch = None;
    }
}

/// The lane for a target that is so far behind; two limits, so that it stays on the one it is on.
fn lane_for(current: Lane, entries: u64, bytes: u64) -> Lane {
    let (entries_max, bytes_max) = match current {
        Lane::CatchUp => (CLOSE_ENTRIES, CLOSE_BYTES),
        Lane::Live | Lane::Control => (BEHIND_ENTRIES, BEHIND_BYTES),
    };
    if entries > entries_max || bytes > bytes_max { Lane::CatchUp } else { Lane::Live }
}

/// Requests that are answered in order, over one lane. Dropping it ends it on both sides.
struct Epoch {
    session: Arc<Session>,
    route: pb::Route,
    lane: Lane,
    acks: mpsc::UnboundedReceiver<pb::Ack>,
    next_sequence: u64,
    /// Sent and not answered, oldest first; the last one is `next_sequence - 1`.
    in_flight: VecDeque<InFlight>,
    bytes_in_flight: u64,
}

struct InFlight {
    cost: u64,
    /// The last entry that its answer may name.
    last: Option<pb::LogId>,
}

impl Epoch {
    fn open(route: &Route, lane: Lane) -> Result<Self, RpcError> {
        let session = route.session(lane)?;
        let id = route.roster.next_id();
        let acks = session.open_epoch(id).map_err(wire::unreachable)?;
        Ok(Self {
            session,
            route: route.to_wire(id),
            lane,
            acks,
            next_sequence: 0,
            in_flight: VecDeque::new(),
            bytes_in_flight: 0,
        })
    }

    fn has_room(&self, cost: u64) -> bool {
        self.in_flight.is_empty() || self.bytes_in_flight + cost <= self.session.window
    }

    fn send(&mut self, route: &Route, held: Held) -> Result<(), RpcError> {
        let Held { entries, cost } = held;
        let last = entries.entries.last().map_or(entries.previous, |entry| entry.id);
        let sequence = self.next_sequence;
        let route = Some(route.to_wire(self.route.id));
        let message = pb::Append { route, sequence, entries: Some(entries) };
        self.session.send(Message::Append(message)).map_err(wire::network)?;
        self.next_sequence += 1;
        self.bytes_in_flight += cost;
        self.in_flight.push_back(InFlight { cost, last });
        Ok(())
    }

    /// Takes an answer to everything up to a sequence.
    fn settle(&mut self, ack: pb::Ack) -> Result<AppendResult, RpcError> {
        let first = self.next_sequence - self.in_flight.len() as u64;
        if !(first..self.next_sequence).contains(&ack.sequence) {
            return Err(wire::network(format!("an answer to request {}", ack.sequence)));
        }
        let mut last = None;
        for _ in first..=ack.sequence {
            let answered = self.in_flight.pop_front().expect("it is within what is in flight");
            self.bytes_in_flight -= answered.cost;
            last = answered.last;
        }
        let result = match ack.result {
            Some(pb::ack::Result::Matched(matched)) => {
                let index = |id: Option<pb::LogId>| id.map(|id| id.index);
                if index(matched.last) > index(last) {
                    return Err(wire::network("an answer beyond what was sent"));
                }
                wire::read_matched(matched)
            }
            Some(pb::ack::Result::Conflict(id)) => wire::read_conflict(id),
            Some(pb::ack::Result::HigherVote(vote)) => wire::read_higher_vote(vote),
            Some(pb::ack::Result::Failure(failure)) => return Err(wire::failed(failure)),
            None => return Err(wire::network("an answer that says nothing")),
        };
        result.map_err(wire::network)
    }
}

impl Drop for Epoch {
    fn drop(&mut self) {
        self.session.close_epoch(self.route.id);
        let ending = pb::Ending { route: Some(self.route) };
        // Ignored: with the connection its epochs have ended too.
        let _ = self.session.send(Message::Ending(ending));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lane_follows_the_distance_and_keeps_to_itself_in_between() {
        assert_eq!(lane_for(Lane::Live, BEHIND_ENTRIES, BEHIND_BYTES), Lane::Live);
        assert_eq!(lane_for(Lane::Live, BEHIND_ENTRIES + 1, 0), Lane::CatchUp);
        assert_eq!(lane_for(Lane::Live, 1, BEHIND_BYTES + 1), Lane::CatchUp);
        assert_eq!(lane_for(Lane::CatchUp, CLOSE_ENTRIES + 1, 0), Lane::CatchUp);
        assert_eq!(lane_for(Lane::CatchUp, 1, CLOSE_BYTES + 1), Lane::CatchUp);
        assert_eq!(lane_for(Lane::CatchUp, CLOSE_ENTRIES, CLOSE_BYTES), Lane::Live);
    }
}
