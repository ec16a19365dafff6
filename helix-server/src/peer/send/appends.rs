//! Pipelined appends to one replica, inside the stream that openraft polls.
//! There is no task and no queue beside the connection's. An epoch is a run of requests over one
//! lane.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::{Stream, StreamExt};
use helix_proto::raft::v1 as pb;
use pb::exchange_request::Message;
use tokio::sync::mpsc;
use tokio::time::{Sleep, sleep, sleep_until};

use super::route::ReplicaRoute;
use crate::peer::connection::lane::PeerLane;
use crate::peer::connection::session::PeerSession;
use crate::peer::limits::{BEHIND_BYTES, BEHIND_ENTRIES, CLOSE_BYTES, CLOSE_ENTRIES, COMMIT_WAIT};
use crate::peer::wire::{self, AppendRequest, AppendResult, RpcError};

/// Sends a stream of requests and yields their responses in order. Ends at the first error.
pub(super) struct AppendSender<S> {
    route: ReplicaRoute,
    input: S,
    input_ended: bool,
    /// Next request to send: waits for the window, or for the next entries if it has none.
    next_request: Option<NextRequest>,
    /// Deadline for a request without entries to be sent alone.
    commit_wait: Option<Pin<Box<Sleep>>>,
    lane: PeerLane,
    epoch: Option<SendEpoch>,
    /// Pause for the budget of copies.
    pause: Option<Pin<Box<Sleep>>>,
    is_ended: bool,
}

struct NextRequest {
    entries: pb::AppendEntries,
    cost: u64,
}

impl NextRequest {
    fn has_entries(&self) -> bool {
        !self.entries.entries.is_empty()
    }
}

/// Result of an attempt to send.
enum SendProgress {
    Sent,
    /// Nothing can be sent now. The task is woken when that may have changed.
    Blocked,
}

impl<S: Stream<Item = AppendRequest> + Unpin> AppendSender<S> {
    pub(super) fn new(route: ReplicaRoute, input: S) -> Self {
        Self {
            route,
            input,
            input_ended: false,
            next_request: None,
            commit_wait: None,
            lane: PeerLane::Live,
            epoch: None,
            pause: None,
            is_ended: false,
        }
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<Result<(), RpcError>> {
        loop {
            match self.send_one(context) {
                Ok(SendProgress::Sent) => {}
                Ok(SendProgress::Blocked) => return Poll::Pending,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn send_one(&mut self, context: &mut Context<'_>) -> Result<SendProgress, RpcError> {
        if !self.take_next(context) {
            return Ok(SendProgress::Blocked);
        }
        let cost = self.next_request.as_ref().map_or(0, |request| request.cost);
        if !self.prepare_epoch(cost, context)? {
            return Ok(SendProgress::Blocked);
        }
        if let (Some(request), Some(epoch)) = (self.next_request.take(), self.epoch.as_mut()) {
            self.commit_wait = None;
            epoch.send(&self.route, request)?;
        }
        Ok(SendProgress::Sent)
    }

    /// Takes the next request from the input. Returns `true` if there is one to send.
    ///
    /// A request without entries only advances the commit index, as the next request does too, so
    /// it waits up to [`COMMIT_WAIT`] and is replaced by the next one. openraft counts log ids and
    /// not responses: the response to the later request covers both.
    fn take_next(&mut self, context: &mut Context<'_>) -> bool {
        loop {
            // Leaves the input alone while the window is full: a later request has more entries.
            let is_full = self.epoch.as_ref().is_some_and(|epoch| !epoch.fits(1));
            let has_entries = self.next_request.as_ref().is_some_and(NextRequest::has_entries);
            if has_entries || self.input_ended || is_full {
                return self.next_request.is_some();
            }
            match self.input.poll_next_unpin(context) {
                Poll::Pending => {
                    return self.next_request.is_some() && self.commit_wait_is_over(context);
                }
                // The waiting request is the last one.
                Poll::Ready(None) => self.input_ended = true,
                Poll::Ready(Some(request)) => {
                    let entries = wire::append_entries(&request);
                    let cost = wire::cost(&entries);
                    self.lane = self.choose_lane(&entries, cost);
                    self.next_request = Some(NextRequest { entries, cost });
                }
            }
        }
    }

    fn commit_wait_is_over(&mut self, context: &mut Context<'_>) -> bool {
        let wait = self.commit_wait.get_or_insert_with(|| Box::pin(sleep(COMMIT_WAIT)));
        wait.as_mut().poll(context).is_ready()
    }

    /// Opens an epoch on the current lane if needed.
    /// Returns `true` if a request of this cost can be sent in it now.
    fn prepare_epoch(&mut self, cost: u64, context: &mut Context<'_>) -> Result<bool, RpcError> {
        if let Some(epoch) = &self.epoch {
            if epoch.lane != self.lane {
                // Requests on another lane must not overtake those in flight.
                if !epoch.in_flight.is_empty() {
                    return Ok(false);
                }
                self.epoch = None;
            } else if !epoch.fits(cost) {
                return Ok(false);
            }
        }
        if self.lane == PeerLane::CatchUp && self.throttled(context) {
            return Ok(false);
        }
        if self.epoch.is_none() {
            self.epoch = Some(SendEpoch::open(&self.route, self.lane)?);
        }
        if self.lane == PeerLane::CatchUp {
            self.route.table.throttle.spend(cost);
        }
        Ok(true)
    }

    fn throttled(&mut self, context: &mut Context<'_>) -> bool {
        while let Some(until) = self.route.table.throttle.wait_until() {
            let pause = self.pause.get_or_insert_with(|| Box::pin(sleep_until(until)));
            if pause.as_mut().poll(context).is_pending() {
                return true;
            }
            self.pause = None;
        }
        false
    }

    /// Chooses the lane by the lag of the target in entries and in bytes.
    /// Estimates the bytes from the average entry of this request.
    fn choose_lane(&self, request: &pb::AppendEntries, cost: u64) -> PeerLane {
        let last = self.route.wal.state().last.map_or(0, |id| id.index);
        let Some(first) = request.entries.first().and_then(|entry| entry.id) else {
            return self.lane;
        };
        let lag = last.saturating_sub(first.index);
        let bytes = (cost / request.entries.len().max(1) as u64).saturating_mul(lag);
        lane_for(self.lane, lag, bytes)
    }

    fn poll_ack(&mut self, context: &mut Context<'_>) -> Poll<Result<AppendResult, RpcError>> {
        let Some(epoch) = &mut self.epoch else { return Poll::Pending };
        match epoch.acks.poll_recv(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) => Poll::Ready(Err(wire::network("the connection was lost"))),
            Poll::Ready(Some(ack)) => Poll::Ready(epoch.on_ack(ack)),
        }
    }
}

impl<S: Stream<Item = AppendRequest> + Unpin> Stream for AppendSender<S> {
    type Item = Result<AppendResult, RpcError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.is_ended {
            return Poll::Ready(None);
        }
        // Sends first, which keeps the follower busy while openraft handles the response. The next
        // poll uses the window that this response frees.
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
        if this.input_ended && this.next_request.is_none() && is_done {
            this.end();
            return Poll::Ready(None);
        }
        Poll::Pending
    }
}

impl<S> AppendSender<S> {
    fn end(&mut self) {
        self.is_ended = true;
        self.next_request = None;
        self.commit_wait = None;
        self.epoch = None;
    }
}

/// Returns the lane for a target with this lag.
/// The limits differ between the lanes, so that a target does not alternate between them.
fn lane_for(current: PeerLane, entries: u64, bytes: u64) -> PeerLane {
    let (entries_max, bytes_max) = match current {
        PeerLane::CatchUp => (CLOSE_ENTRIES, CLOSE_BYTES),
        PeerLane::Live | PeerLane::Control => (BEHIND_ENTRIES, BEHIND_BYTES),
    };
    if entries > entries_max || bytes > bytes_max { PeerLane::CatchUp } else { PeerLane::Live }
}

/// A run of requests over one lane, acknowledged in order. Ends on both sides when dropped.
struct SendEpoch {
    session: Arc<PeerSession>,
    route: pb::Route,
    lane: PeerLane,
    acks: mpsc::UnboundedReceiver<pb::Ack>,
    next_sequence: u64,
    /// Unacknowledged requests, oldest first; the last one has `next_sequence - 1`.
    in_flight: VecDeque<InFlightAppend>,
    bytes_in_flight: u64,
}

struct InFlightAppend {
    cost: u64,
    /// Last entry that an ack of this request may match.
    last: Option<pb::LogId>,
}

impl SendEpoch {
    fn open(route: &ReplicaRoute, lane: PeerLane) -> Result<Self, RpcError> {
        let session = route.session(lane)?;
        let id = route.table.local.next_id();
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

    /// Returns `true` if the window has capacity. A single request of any size always fits.
    fn fits(&self, cost: u64) -> bool {
        self.in_flight.is_empty() || self.bytes_in_flight + cost <= self.session.window
    }

    fn send(&mut self, route: &ReplicaRoute, request: NextRequest) -> Result<(), RpcError> {
        let NextRequest { entries, cost } = request;
        let last = entries.entries.last().map_or(entries.previous, |entry| entry.id);
        let sequence = self.next_sequence;
        let route = Some(route.to_wire(self.route.id));
        let message = pb::Append { route, sequence, entries: Some(entries) };
        self.session.send(Message::Append(message)).map_err(wire::network)?;
        self.next_sequence += 1;
        self.bytes_in_flight += cost;
        self.in_flight.push_back(InFlightAppend { cost, last });
        Ok(())
    }

    /// Handles an ack, which covers every request up to its sequence.
    fn on_ack(&mut self, ack: pb::Ack) -> Result<AppendResult, RpcError> {
        let first = self.next_sequence - self.in_flight.len() as u64;
        if !(first..self.next_sequence).contains(&ack.sequence) {
            return Err(wire::network(format!(
                "ack of request {}; requests {first}..{} are in flight",
                ack.sequence, self.next_sequence
            )));
        }
        let mut last = None;
        for _ in first..=ack.sequence {
            let acked = self.in_flight.pop_front().expect("the sequence is in flight");
            self.bytes_in_flight -= acked.cost;
            last = acked.last;
        }
        let result = match ack.result {
            Some(pb::ack::Result::Matched(matched)) => {
                let index = |id: Option<pb::LogId>| id.map(|id| id.index);
                if index(matched.last) > index(last) {
                    return Err(wire::network("ack of an entry that was not sent"));
                }
                wire::read_matched(matched)
            }
            Some(pb::ack::Result::Conflict(id)) => wire::read_conflict(id),
            Some(pb::ack::Result::HigherVote(vote)) => wire::read_higher_vote(vote),
            Some(pb::ack::Result::Failure(failure)) => return Err(wire::failed(failure)),
            None => return Err(wire::network("ack without a result")),
        };
        result.map_err(wire::network)
    }
}

impl Drop for SendEpoch {
    fn drop(&mut self) {
        self.session.close_epoch(self.route.id);
        let ending = pb::Ending { route: Some(self.route) };
        // Ignored: a lost connection ends its epochs too.
        let _ = self.session.send(Message::Ending(ending));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lane_changes_at_two_distances_with_hysteresis() {
        assert_eq!(lane_for(PeerLane::Live, BEHIND_ENTRIES, BEHIND_BYTES), PeerLane::Live);
        assert_eq!(lane_for(PeerLane::Live, BEHIND_ENTRIES + 1, 0), PeerLane::CatchUp);
        assert_eq!(lane_for(PeerLane::Live, 1, BEHIND_BYTES + 1), PeerLane::CatchUp);
        assert_eq!(lane_for(PeerLane::CatchUp, CLOSE_ENTRIES + 1, 0), PeerLane::CatchUp);
        assert_eq!(lane_for(PeerLane::CatchUp, 1, CLOSE_BYTES + 1), PeerLane::CatchUp);
        assert_eq!(lane_for(PeerLane::CatchUp, CLOSE_ENTRIES, CLOSE_BYTES), PeerLane::Live);
    }
}
