//! An append epoch at the follower: a bounded queue into openraft, and openraft's responses.
//! Checks that the sender sends each request once, in order, and within the window.

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

use crate::peer::limits::WINDOW_BYTES;
use crate::peer::served::ServedReplica;
use crate::peer::snapshot::fetcher::RecordFetcher;
use crate::peer::wire::{self, AppendRequest, AppendResult};
use crate::raft::{RepairGuard, ReplicaId, TypeConfig};

/// A response of openraft to one append.
pub(super) type EpochResult = Result<AppendResult, Fatal<TypeConfig>>;

/// The failure that ended an epoch.
pub(super) struct EpochEnded(pub(super) pb::Failure);

/// Refusal of records without disk space for them. The sender retries until there is space.
/// openraft would stop permanently, and the replica no longer vote, on an entry that it cannot
/// write.
const DISK_FULL: &str = "the disk is full; records are refused until there is free space";

/// Refusal of messages while the log is under repair, except those of the admitted leader.
pub(super) const IN_REPAIR: &str = "the log is damaged and lacks entries that it acknowledged";

/// The newest append epoch of a shard. Dropping it discards requests that openraft has not taken.
pub(super) struct ReceiveEpoch {
    pub(super) id: u64,
    /// `None` once the epoch has ended. Later requests are dropped until the sender ends it too.
    queue: Option<mpsc::UnboundedSender<AppendRequest>>,
    wal: Wal,
    repair_guard: Arc<RepairGuard>,
    _dropped: DropGuard,
    next_sequence: u64,
    /// Costs of the unacknowledged requests, oldest first.
    in_flight: VecDeque<u64>,
    bytes_in_flight: u64,
}

impl ReceiveEpoch {
    pub(super) fn open(route: &pb::Route, served: &ServedReplica) -> (Self, EpochResponses) {
        let (sender, receiver) = mpsc::unbounded_channel();
        let dropped = served.stopped.child_token();
        let input = receiver_until(receiver, served.fetcher.clone(), dropped.clone());
        let results = served.raft.stream_append(input);
        let epoch = Self {
            id: route.id,
            queue: Some(sender),
            wal: served.wal.clone(),
            repair_guard: served.repair_guard.clone(),
            _dropped: dropped.drop_guard(),
            next_sequence: 0,
            in_flight: VecDeque::new(),
            bytes_in_flight: 0,
        };
        let (shard_id, epoch_id) = (route.shard_id, route.id);
        let results =
            EpochResponses { shard_id, epoch: epoch_id, results: results.boxed(), is_ended: false };
        (epoch, results)
    }

    /// Queues a request for openraft. A failure ends the epoch and is returned once.
    pub(super) fn push(
        &mut self,
        sequence: u64,
        entries: Option<pb::AppendEntries>,
        source_replica: ReplicaId,
    ) -> Result<(), EpochEnded> {
        if self.queue.is_none() {
            return Ok(());
        }
        let term = entries.as_ref().and_then(|it| it.vote).map_or(0, |vote| vote.term);
        let pushed = if has_records(&entries) && self.wal.check_spare().is_err() {
            Err(wire::failure(DISK_FULL, true))
        } else if !self.repair_guard.accepts(term) {
            Err(wire::failure(IN_REPAIR, true))
        } else {
            self.check_and_queue(sequence, entries, source_replica)
                .map_err(|text| wire::failure(text, false))
        };
        pushed.map_err(|failure| {
            self.queue = None;
            EpochEnded(failure)
        })
    }

    fn check_and_queue(
        &mut self,
        sequence: u64,
        entries: Option<pb::AppendEntries>,
        source_replica: ReplicaId,
    ) -> Result<(), String> {
        if sequence != self.next_sequence {
            return Err(format!("request {sequence} instead of {}", self.next_sequence));
        }
        let entries = entries.ok_or("append without entries message")?;
        let cost = wire::cost(&entries);
        if !self.in_flight.is_empty() && self.bytes_in_flight + cost > WINDOW_BYTES {
            return Err(format!("more than {WINDOW_BYTES} bytes in flight"));
        }
        let request =
            wire::read_append(entries, source_replica).map_err(|error| error.to_string())?;
        let queue = self.queue.as_ref().ok_or("the epoch has ended")?;
        // Fails while the replica is being closed.
        queue.send(request).map_err(|_| format!("the shard {}", wire::NOT_OPEN))?;
        self.next_sequence += 1;
        self.in_flight.push_back(cost);
        self.bytes_in_flight += cost;
        Ok(())
    }

    /// Records the response to the oldest request and returns that request's sequence.
    pub(super) fn on_response(&mut self, result: &EpochResult) -> Option<u64> {
        let sequence = self.next_sequence - self.in_flight.len() as u64;
        self.bytes_in_flight -= self.in_flight.pop_front()?;
        if !matches!(result, Ok(Ok(_))) {
            self.queue = None;
        }
        Some(sequence)
    }
}

/// Returns `true` for an append that needs free disk space.
/// Entries without records are few and small, and some of them free space, so they may use the
/// reserve.
fn has_records(append: &Option<pb::AppendEntries>) -> bool {
    append.iter().flat_map(|append| &append.entries).any(|entry| !entry.payload.is_empty())
}

/// Yields received requests until the token is cancelled, and then drops those in the queue.
/// Waits while a snapshot is handed over to openraft.
fn receiver_until(
    receiver: mpsc::UnboundedReceiver<AppendRequest>,
    fetcher: Option<Arc<RecordFetcher>>,
    until: CancellationToken,
) -> impl Stream<Item = AppendRequest> + Send + 'static {
    let requests =
        stream::unfold((receiver, fetcher, None), |(mut receiver, fetcher, last)| async {
            // openraft polls for the next request once it has queued the last one.
            drop(last);
            let request = receiver.recv().await?;
            let permit = match &fetcher {
                Some(fetcher) => Some(fetcher.append_permit().await),
                None => None,
            };
            Some((request, (receiver, fetcher, permit)))
        });
    requests.take_until(until.cancelled_owned())
}

/// openraft's responses to one epoch, followed by [`Fatal::Stopped`].
///
/// The last one fails requests without a response. Otherwise their sender would wait as long as
/// the connection lives, and reopening the replica does not close that.
pub(super) struct EpochResponses {
    shard_id: u64,
    epoch: u64,
    results: BoxStream<'static, EpochResult>,
    is_ended: bool,
}

/// A response of openraft, and the epoch of its request.
pub(super) struct EpochResponse {
    pub(super) shard_id: u64,
    pub(super) epoch: u64,
    pub(super) result: EpochResult,
}

impl Stream for EpochResponses {
    type Item = EpochResponse;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<EpochResponse>> {
        let (shard_id, epoch) = (self.shard_id, self.epoch);
        if self.is_ended {
            return Poll::Ready(None);
        }
        let polled = self.results.poll_next_unpin(context);
        polled.map(|result| {
            self.is_ended = result.is_none();
            let result = result.unwrap_or(Err(Fatal::Stopped));
            Some(EpochResponse { shard_id, epoch, result })
        })
    }
}
