//! One stream of a subscription: opens it, and converts its messages to events.

use helix_proto::log::v1::subscribe_response::Message;
use helix_proto::log::v1::{CaughtUp, PartitionRecords, SubscribeRequest, SubscribeResponse};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tonic::{Code, Streaming};

use super::cursor::{Cursor, CursorIndex};
use super::{Event, StreamTask};
use crate::compression;
use crate::consumer::read_turns::TURN;
use crate::consumer::replica_selector::ReplicaSelector;
use crate::consumer::{Batches, NodeGroup, ReadStart};
use crate::error::{Error, Result};
use crate::routing::{LeaderProbe, ProbePace};

/// The reason why a stream stopped.
pub(super) enum StreamEnd {
    /// The subscription was dropped.
    Dropped,
    /// The service closed the stream.
    Ended,
    /// The turn is over, because other partitions wait.
    TurnOver,
    /// The replica lacks records that others may have.
    Lags(Error),
    Failed(Error),
}

impl StreamTask {
    /// Reads one stream until it fails, is closed, or has to stop.
    pub(super) async fn stream(&mut self, group: &NodeGroup) -> StreamEnd {
        let client = self.client.clone();
        let turns = self.turns.clone();
        let asked_at = Instant::now();
        let _turn = turns.take(self.cursors.len()).await;
        self.healthy_at = Instant::now();
        self.progress_at += self.healthy_at - asked_at;
        let mut turn_end = self.healthy_at + TURN;
        let topic = self.cursors[0].start.topic.clone();
        let routing = &client.shared.routing;
        let mut probe =
            LeaderProbe::new(routing, &topic, &group.shard_ids, &group.route, ProbePace::Patient);
        let mut messages = match self.open(group, &mut probe).await {
            Ok(messages) => messages,
            Err(error) => return StreamEnd::Failed(error),
        };
        let cursor_index = CursorIndex::new(&self.cursors);
        let silence_max = client.config().heartbeat_timeout;
        // Reads with an end move to another replica if this one lacks records of their range.
        let has_ends = self.cursors.iter().any(|cursor| cursor.start.until.is_some());
        let moves_on = has_ends && !self.selector.is_leader();
        let lag_max = 2 * client.config().stall_after;
        let mut received_at = Instant::now();
        let mut data_at = received_at;
        loop {
            let message = tokio::select! {
                biased;
                () = sleep_until(turn_end), if turns.is_awaited() => {
                    // An unresolved "latest" would be a later offset after the turn.
                    if self.cursors.iter().all(Cursor::is_resolved) && turns.give_up_turn() {
                        return StreamEnd::TurnOver;
                    }
                    turn_end = Instant::now() + TURN;
                    continue;
                }
                message = timeout_at(received_at + silence_max, messages.message()) => message,
                () = sleep_until(data_at + lag_max), if moves_on => {
                    match self.cursors.iter().find(|it| it.lacks_end()) {
                        Some(cursor) => return StreamEnd::Lags(lagging(group, cursor)),
                        None => data_at = Instant::now(),
                    }
                    continue;
                }
                () = replaced(&self.selector, &mut probe) => {
                    return StreamEnd::Failed(Error::superseded("subscribe"));
                }
            };
            let message = match message {
                Ok(Ok(Some(message))) => message,
                Ok(Ok(None)) => return StreamEnd::Ended,
                Ok(Err(status)) => return StreamEnd::Failed(Error::from(status)),
                Err(_) => return StreamEnd::Failed(Error::timed_out("waiting for a heartbeat")),
            };
            received_at = Instant::now();
            self.healthy_at = received_at;
            // A partitioned leader still sends heartbeats, but no data.
            if let Some(Message::Data(data)) = &message.message {
                probe.on_progress();
                if let Some(lag) = self.below_position(data, &cursor_index, group) {
                    return StreamEnd::Lags(lag);
                }
            }
            let event = match self.on_message(message, &cursor_index) {
                Ok(Some(event)) => event,
                Ok(None) => continue,
                Err(error) => return StreamEnd::Failed(error),
            };
            self.retries.on_progress();
            self.pending = None;
            let is_data = matches!(event, Event::Data(_));
            if is_data || !moves_on {
                self.selector.on_progress();
            }
            if self.events.send(Ok(event)).await.is_err() {
                return StreamEnd::Dropped;
            }
            if is_data {
                // Set after the wait for a slow consumer, which does not count as lag of the
                // replica.
                data_at = Instant::now();
                self.progress_at = data_at;
            }
        }
    }

    async fn open(
        &self,
        group: &NodeGroup,
        probe: &mut LeaderProbe<'_>,
    ) -> Result<Streaming<SubscribeResponse>> {
        let request = SubscribeRequest {
            partitions: self.cursors.iter().map(|cursor| cursor.start.to_wire()).collect(),
            limits: None,
            source: self.selector.to_wire().into(),
            out_of_range: self.options.out_of_range().into(),
            accept_encoded: true,
            accept_kafka_batches: true,
            accept_compression: compression::accepted(),
            membership: None,
        };
        let mut consume = group.route.connection.consume();
        let limit = self.client.config().attempt_timeout;
        tokio::select! {
            biased;
            opened = timeout(limit, consume.subscribe(request)) => match opened {
                Ok(Ok(response)) => Ok(response.into_inner()),
                Ok(Err(status)) => Err(Error::from(status)),
                Err(_) => Err(Error::timed_out("subscribe")),
            },
            () = replaced(&self.selector, probe) => Err(Error::superseded("subscribe")),
        }
    }

    /// Converts a message to an event.
    ///
    /// Returns `None` for a partition without a cursor and for unknown kinds of messages.
    fn on_message(
        &mut self,
        message: SubscribeResponse,
        cursor_index: &CursorIndex,
    ) -> Result<Option<Event<Batches>>> {
        match message.message {
            Some(Message::Data(data)) => {
                let Some(index) = cursor_index.get(&data.topic, data.partition) else {
                    return Ok(None);
                };
                self.cursors[index].on_data(data).map(|batches| Some(Event::Data(batches)))
            }
            Some(Message::CaughtUp(CaughtUp { topic, partition, watermarks, topic_id })) => {
                let index = cursor_index.get(&topic, partition);
                let (Some(index), Some(watermarks)) = (index, watermarks) else {
                    return Ok(None);
                };
                self.cursors[index].on_caught_up(&watermarks, topic_id)?;
                Ok(Some(Event::CaughtUp { topic, partition, watermarks }))
            }
            Some(Message::Heartbeat(beat)) => Ok(Some(Event::Heartbeat(beat.partitions))),
            None => Ok(None),
        }
    }

    /// Returns an error if a replica clamped the position to its own, lower end.
    ///
    /// If every replica clamps the position, it is above the end of the partition. Then the data of
    /// a replica that has already failed is accepted, unless the read has an end.
    fn below_position(
        &self,
        data: &PartitionRecords,
        cursor_index: &CursorIndex,
        group: &NodeGroup,
    ) -> Option<Error> {
        if self.selector.is_leader() {
            return None;
        }
        let cursor = &self.cursors[cursor_index.get(&data.topic, data.partition)?];
        let is_below = cursor.is_above(data);
        let is_final = cursor.start.until.is_none() && self.selector.has_failed(&group.route);
        (is_below && !is_final).then(|| lagging(group, cursor))
    }
}

/// Waits until the leader has been replaced; never returns if another replica is read.
async fn replaced(selector: &ReplicaSelector, probe: &mut LeaderProbe<'_>) {
    if selector.is_leader() { probe.replaced().await } else { std::future::pending().await }
}

/// Returns the error for a replica that lacks records of the requested range.
fn lagging(group: &NodeGroup, cursor: &Cursor) -> Error {
    let ReadStart { topic, partition, until, .. } = &cursor.start;
    let position = match cursor.next {
        Some(next) => format!("at offset {next}"),
        None => "at the start".to_owned(),
    };
    let end = until.map_or_else(String::new, |until| format!(", before the end {until}"));
    let (node, address) = (group.route.node_id, group.route.connection.address());
    let message = format!(
        "the replica of {topic}/{partition} on node {node} at {address} has no records {position}\
         {end}; no other replica had them"
    );
    Error::client(Code::Unavailable, message).retryable_elsewhere()
}
