//! An epoch at the follower: a bounded queue into openraft, and its responses.
//! Holds what the sender promises: every request once, in order, within the window.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::{Stream, StreamExt, stream};
use helix_proto::raft::v1 as pb;
use helix_wal::Wal;
use openraft::base::BoxStream;
use openraft::errors::Fatal;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::fetch::Fetch;
use super::hub::Served;
use super::limits::WINDOW_BYTES;
use super::wire::{self, AppendRequest, AppendResult};
use crate::raft::{Gate, ReplicaId, TypeConfig};

/// A response of openraft.
pub(super) type EpochResult = Result<AppendResult, Fatal<TypeConfig>>;

/// The epoch has ended with this.
pub(super) struct Ended(pub(super) pb::Failure);

/// An entry that cannot be written stops openraft for good, and with it the replica's votes: it is
/// refused before. The sender tries again until there is room.
const DISK_FULL: &str = "its disk is full; it takes no more records until there is room";

/// Said to whoever is not, or not yet, known to be the leader to listen to.
pub(super) const IN_REPAIR: &str = "its log was damaged, and it lacks what it acknowledged";

/// Dropping it drops what openraft has not taken yet.
pub(super) struct Epoch {
    pub(super) id: u64,
    /// None once it has ended: what still comes is dropped, until the sender has noticed.
    queue: Option<mpsc::UnboundedSender<AppendRequest>>,
    wal: Wal,
    gate: Arc<Gate>,
    _dropped: DropGuard,
    next_sequence: u64,
    /// Costs of the requests that are not answered yet, oldest first.
    in_flight: VecDeque<u64>,
    bytes_in_flight: u64,
}

impl Epoch {
    pub(super) fn open(route: &pb::Route, served: &Served) -> (Self, EpochResults) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let dropped = served.stopped.child_token();
        let input = receiver_until(receiver, served.fetch.clone(), dropped.clone());
        let results = served.raft.stream_append(input);
        let epoch = Self {
            id: route.id,
            queue: Some(sender),
            wal: served.wal.clone(),
            gate: served.gate.clone(),
            _dropped: dropped.drop_guard(),
            next_sequence: 0,
            in_flight: VecDeque::new(),
            bytes_in_flight: 0,
        };
        let (shard_id, epoch_id) = (route.shard_id, route.id);
        let results =
            EpochResults { shard_id, epoch: epoch_id, results: results.boxed(), over: false };
        (epoch, results)
    }

    /// Queues a request for openraft. A failure is the end of the epoch, and said once.
    pub(super) fn take(
        &mut self,
        sequence: u64,
        entries: Option<pb::AppendEntries>,
        source_replica: ReplicaId,
    ) -> Result<(), Ended> {
        if self.queue.is_none() {
            return Ok(());
        }
        let term = entries.as_ref().and_then(|it| it.vote).map_or(0, |vote| vote.term);
        let taken = if has_records(&entries) && self.wal.spare().is_err() {
            Err(wire::failure(DISK_FULL, true))
        } else if !self.gate.lets_in(term) {
            Err(wire::failure(IN_REPAIR, true))
        } else {
            self.check(sequence, entries, source_replica).map_err(|text| wire::failure(text, false))
        };
        taken.map_err(|failure| {
            self.queue = None;
            Ended(failure)
        })
    }

    fn check(
        &mut self,
        sequence: u64,
        entries: Option<pb::AppendEntries>,
        source_replica: ReplicaId,
    ) -> Result<(), String> {
        if sequence != self.next_sequence {
            return Err(format!("request {sequence} instead of {}", self.next_sequence));
        }
        let entries = entries.ok_or("an append without content")?;
        let cost = wire::cost(&entries);
        if !self.in_flight.is_empty() && self.bytes_in_flight + cost > WINDOW_BYTES {
            return Err(format!("more than {WINDOW_BYTES} bytes in flight"));
        }
        let request =
            wire::read_append(entries, source_replica).map_err(|error| error.to_string())?;
        let queue = self.queue.as_ref().ok_or("the epoch has ended")?;
        queue.send(request).map_err(|_| "the shard takes no more appends")?;
        self.next_sequence += 1;
        self.in_flight.push_back(cost);
        self.bytes_in_flight += cost;
        Ok(())
    }

    /// Notes the response to the oldest request; gives the request's sequence.
    pub(super) fn settle(&mut self, result: &EpochResult) -> Option<u64> {
        let sequence = self.next_sequence - self.in_flight.len() as u64;
        self.bytes_in_flight -= self.in_flight.pop_front()?;
        if !matches!(result, Ok(Ok(_))) {
            self.queue = None;
        }
        Some(sequence)
    }
}

/// Entries without records are few and small, and among them is what makes room: they may have
/// of the disk what is kept back from records.
fn has_records(append: &Option<pb::AppendEntries>) -> bool {
    append.iter().flat_map(|append| &append.entries).any(|entry| !entry.payload.is_empty())
}

/// What was received, until the token is cancelled; then nothing, whatever is queued. Waits while
/// a snapshot is handed over.
fn receiver_until(
    receiver: mpsc::UnboundedReceiver<AppendRequest>,
    fetch: Option<Arc<Fetch>>,
    until: CancellationToken,
) -> impl Stream<Item = AppendRequest> + Send + 'static {
    let passing = stream::unfold((receiver, fetch, None), |(mut receiver, fetch, last)| async {
        // openraft asks for the next one when it has queued the last one.
        drop(last);
        let request = receiver.recv().await?;
        let pass = match &fetch {
            Some(fetch) => Some(fetch.pass().await),
            None => None,
        };
        Some((request, (receiver, fetch, pass)))
    });
    passing.take_until(until.cancelled_owned())
}

/// openraft's responses to one epoch, and in the end that there will be none any more: the sender
/// of what is not answered by then would wait for as long as the connection lives, which a replica
/// that is closed and opened again does not end.
pub(super) struct EpochResults {
    shard_id: u64,
    epoch: u64,
    results: BoxStream<'static, EpochResult>,
    over: bool,
}

pub(super) struct Outcome {
    pub(super) shard_id: u64,
    pub(super) epoch: u64,
    pub(super) result: EpochResult,
}

impl Stream for EpochResults {
    type Item = Outcome;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Outcome>> {
        let (shard_id, epoch) = (self.shard_id, self.epoch);
        if self.over {
            return Poll::Ready(None);
        }
        let polled = self.results.poll_next_unpin(context);
        polled.map(|result| {
            self.over = result.is_none();
            let result = result.unwrap_or(Err(Fatal::Stopped));
            Some(Outcome { shard_id, epoch, result })
        })
    }
}
