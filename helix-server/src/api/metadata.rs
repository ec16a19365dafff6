//! Routing data of GetMetadata and WatchMetadata.
//!
//! Watchers of the same topics share one encoded message of each state. A state that is replaced
//! before a watcher's turn is skipped.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, Mutex, Weak};
use std::task::Context;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use helix_proto::log::v1::{self as wire, Metadata, ShardRoute, TopicRoute, WatchMetadataResponse};
use helix_transport::responses;
use prost::Message;
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::codegen::BoxStream;
use tonic::{Response, Status};

use super::authorize::Visibility;
use super::settings::to_wire_format;
use super::{acquire_response, reserve_response, wire_leader, wire_shard_id};
use crate::call::{CallMemory, LoadPermit};
use crate::error::{Error, Result};
use crate::limits::{
    METADATA_BYTES_PER_SECOND, METADATA_KEPT, METADATA_LATE_MAX, METADATA_UNPACED_BYTES,
    PARTITION_ROUTED_BYTES, PARTITIONS_PER_TURN, RESPONSE_WAIT_MAX, TOPIC_ROUTED_BYTES,
};
use crate::log::{RuleSet, TopicInfo};
use crate::node::{ClosedShard, Node};
use crate::shard::Shard;
use crate::sync;

/// Cost of a topic's route, without its partitions, in units of one partition.
const TOPIC_IN_PARTITIONS: usize = 10;

/// Builds routing data, and shares encoded messages among watchers.
pub(super) struct MetadataSource {
    node: Arc<Node>,
    /// Held while routing data is built: one build at a time, so that other tasks are not delayed.
    turn: AsyncMutex<()>,
    /// Topics that clients watch now.
    watched: Mutex<BTreeMap<WatchKey, Weak<WatchedTopics>>>,
    pace: MetadataPace,
}

/// Names of watched topics, or none for all topics, and the encoded rules that hide some.
type WatchKey = (BTreeSet<String>, Option<Vec<u8>>);

/// Topics that at least one client watches.
struct WatchedTopics {
    names: Vec<String>,
    /// Rules that hide some topics; watchers with equal rules share their messages.
    hiding: Option<Arc<RuleSet>>,
    /// The newest message, and the least version of its routes. The message is kept at least for
    /// [`METADATA_KEPT`], and until every watcher has sent it.
    newest: AsyncMutex<(u64, Weak<EncodedMetadata>)>,
}

/// An encoded message, with the permit for its memory.
struct EncodedMetadata {
    bytes: Vec<u8>,
    _permit: Option<LoadPermit>,
}

struct SharedMetadata(Arc<EncodedMetadata>);

impl AsRef<[u8]> for SharedMetadata {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes
    }
}

impl MetadataSource {
    pub(super) fn new(node: &Arc<Node>) -> Arc<Self> {
        Arc::new(Self {
            node: node.clone(),
            turn: AsyncMutex::default(),
            watched: Mutex::default(),
            pace: MetadataPace::default(),
        })
    }

    /// Returns the routing data of the named topics, or of all topics if `names` is empty.
    pub(super) async fn get(
        &self,
        names: &[String],
        call: Option<&CallMemory>,
    ) -> Result<Metadata> {
        let visible = Visibility::of(&self.node, call)?;
        let (version, topics) = self.topics(names, &visible);
        reserve_response(call, bytes(&topics)).await?;
        Ok(self.build(version, &topics).await)
    }

    /// Streams the routing data of the named topics, or of all topics if `names` is empty.
    ///
    /// The first message is sent at once, and others after changes.
    pub(super) fn watch(
        self: &Arc<Self>,
        names: Vec<String>,
        call: Option<Arc<CallMemory>>,
    ) -> Result<Response<BoxStream<WatchMetadataResponse>>> {
        let mut versions = self.node.watch_routes();
        // The first response has the current state.
        versions.mark_changed();
        let names: BTreeSet<String> = names.into_iter().collect();
        let visible = Visibility::of(&self.node, call.as_deref())?;
        let topics = self.watched(names, visible.hiding_topics());
        let is_detached = call.is_some();
        if let Some(call) = &call {
            call.share_responses();
        }
        let watch = MetadataWatch { source: self.clone(), call, topics, versions, sent_bytes: 0 };
        let mut messages: BoxStream<Bytes> =
            Box::pin(stream::try_unfold(watch, |mut watch| async {
                let message = Box::pin(watch.next()).await?;
                Ok(message.map(|message| (message, watch)))
            }));
        if is_detached {
            let next = move |context: &mut Context<'_>| messages.as_mut().poll_next(context);
            return Ok(responses::encoded(next, Box::pin(stream::empty())));
        }
        let decoded = messages.map(|message| {
            let decoded = WatchMetadataResponse::decode(message?);
            decoded.map_err(|error| Status::internal(error.to_string()))
        });
        Ok(Response::new(Box::pin(decoded)))
    }

    fn watched(&self, names: BTreeSet<String>, hiding: Option<Arc<RuleSet>>) -> Arc<WatchedTopics> {
        let key = (names, hiding.as_ref().map(|rules| rules.encode()));
        let mut watched = sync::lock(&self.watched);
        if let Some(found) = watched.get(&key).and_then(Weak::upgrade) {
            return found;
        }
        watched.retain(|_, topics| topics.strong_count() > 0);
        let newest = AsyncMutex::new((0, Weak::new()));
        let names = key.0.iter().cloned().collect();
        let topics = Arc::new(WatchedTopics { names, hiding, newest });
        watched.insert(key, Arc::downgrade(&topics));
        topics
    }

    /// Returns the encoded message of a state that is at least as new as `version`.
    async fn encoded(
        &self,
        watched: &WatchedTopics,
        version: u64,
        call: Option<&CallMemory>,
    ) -> Result<Bytes> {
        let shared = |message| Bytes::from_owner(SharedMetadata(message));
        // Limited, since the watcher that holds the lock may wait for memory without success.
        let newest = timeout(RESPONSE_WAIT_MAX, watched.newest.lock()).await;
        let mut newest = newest.map_err(|_| Error::throttled("routing data for watchers"))?;
        if newest.0 >= version
            && let Some(message) = newest.1.upgrade()
        {
            return Ok(shared(message));
        }
        // Read before the data: if the data is newer, it is sent again with its own version.
        let version = *self.node.watch_routes().borrow();
        let visible = Visibility::by(watched.hiding.clone());
        let (of_routes, topics) = self.topics(&watched.names, &visible);
        let mut permit = acquire_response(call, bytes(&topics)).await?;
        let metadata = Some(self.build(of_routes, &topics).await);
        let bytes = WatchMetadataResponse { metadata }.encode_to_vec();
        if let Some(permit) = &mut permit {
            permit.shrink_to(bytes.len());
        }
        let message = Arc::new(EncodedMetadata { bytes, _permit: permit });
        *newest = (version, Arc::downgrade(&message));
        let kept = message.clone();
        tokio::spawn(async move {
            sleep(METADATA_KEPT).await;
            drop(kept);
        });
        Ok(shared(message))
    }

    /// Returns the topics, and a version of the cluster's state that is not newer than they are. A
    /// client ignores older routes than those that it has.
    fn topics(&self, names: &[String], visible: &Visibility) -> (u64, Vec<Arc<TopicInfo>>) {
        let version = self.node.metadata_version();
        if names.is_empty() {
            let is_visible = |name: &str| visible.sees_topic(name);
            return (version, self.node.visible_topics("", None, usize::MAX, is_visible));
        }
        let mut seen = HashSet::new();
        let names =
            names.iter().filter(|name| seen.insert(name.as_str()) && visible.sees_topic(name));
        (version, names.filter_map(|name| self.node.topic(name).ok()).collect())
    }

    async fn build(&self, version: u64, topics: &[Arc<TopicInfo>]) -> Metadata {
        let _turn = self.turn.lock().await;
        let node = &self.node;
        let mut routes = Vec::with_capacity(topics.len());
        let mut built = 0;
        for topic in topics {
            // Lets other tasks run.
            built += TOPIC_IN_PARTITIONS + topic.partition_count as usize;
            if built >= PARTITIONS_PER_TURN {
                built = 0;
                yield_now().await;
            }
            routes.push(topic_route(topic));
        }
        let members = node.cluster().machine().read(|state| state.members().clone());
        let nodes = node.nodes().into_iter().map(|node| {
            let member = members.get(node.node_id);
            wire::Node {
                draining: member.is_some_and(|member| member.draining),
                leaving: member.is_some_and(|member| member.leaving),
                cordoned: member.is_some_and(|member| member.cordoned),
                rack: member.map(|member| member.rack.clone()).unwrap_or_default(),
                node_id: node.node_id,
                endpoint: node.endpoint,
                version: node.version,
            }
        });
        Metadata {
            cluster_id: node.info().cluster_id,
            version,
            nodes: nodes.collect(),
            shards: shard_routes(node),
            topics: routes,
        }
    }
}

/// One client's watch.
struct MetadataWatch {
    source: Arc<MetadataSource>,
    call: Option<Arc<CallMemory>>,
    topics: Arc<WatchedTopics>,
    versions: watch::Receiver<u64>,
    /// Bytes of the last message.
    sent_bytes: usize,
}

impl MetadataWatch {
    /// Changes the watched topics if the caller's rights have changed.
    fn follow_rights(&mut self) -> Result<()> {
        let hiding = Visibility::of(&self.source.node, self.call.as_deref())?.hiding_topics();
        if hiding != self.topics.hiding {
            let names = self.topics.names.iter().cloned().collect();
            self.topics = self.source.watched(names, hiding);
        }
        Ok(())
    }

    /// Returns the next message; `None` once the node is gone.
    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        let source = self.source.clone();
        let next = async {
            if self.versions.changed().await.is_err() {
                return Ok(None);
            }
            if let Some(turn) = source.pace.turn(self.sent_bytes) {
                sleep_until(turn).await;
            }
            // Skips the states that were replaced during the wait.
            let version = *self.versions.borrow_and_update();
            source.node.check_member()?;
            self.follow_rights()?;
            let message = source.encoded(&self.topics, version, self.call.as_deref()).await?;
            if self.sent_bytes == 0 {
                // The first message does not wait, but later ones of all watchers do.
                source.pace.turn(message.len());
            }
            self.sent_bytes = message.len();
            Ok::<_, Status>(Some(message))
        };
        tokio::select! {
            next = next => next,
            () = source.node.shutdown_token().cancelled() => Err(Error::Draining.into()),
        }
    }
}

/// Limits the common rate of all watchers' messages.
#[derive(Default)]
struct MetadataPace {
    /// Time by which the messages so far are sent.
    sent_at: Mutex<Option<Instant>>,
}

impl MetadataPace {
    /// Counts a message. Returns the time at which it may be sent; `None` for a short message.
    ///
    /// No message waits for longer than [`METADATA_LATE_MAX`], even if that exceeds the rate.
    fn turn(&self, bytes: usize) -> Option<Instant> {
        if bytes <= METADATA_UNPACED_BYTES {
            return None;
        }
        let now = Instant::now();
        let latest = now + METADATA_LATE_MAX;
        let mut sent_at = sync::lock(&self.sent_at);
        let turn = sent_at.map_or(now, |it| it.clamp(now, latest));
        let time = METADATA_BYTES_PER_SECOND.recip() * bytes as f64;
        *sent_at = Some(latest.min(turn + Duration::from_secs_f64(time)));
        Some(turn)
    }
}

fn topic_route(topic: &TopicInfo) -> TopicRoute {
    let mut shard_ids = Vec::with_capacity(topic.partition_count as usize);
    shard_ids.extend(topic.locations().map(|location| wire_shard_id(location.shard_id)));
    let batch_format = to_wire_format(&topic.settings);
    TopicRoute { topic: topic.name.clone(), shard_ids, topic_id: topic.id, batch_format }
}

/// Returns the memory that routing data of these topics may take.
fn bytes(topics: &[Arc<TopicInfo>]) -> usize {
    let bytes = |topic: &Arc<TopicInfo>| {
        let name = 2 * topic.name.len();
        TOPIC_ROUTED_BYTES + name + topic.partition_count as usize * PARTITION_ROUTED_BYTES
    };
    topics.iter().map(bytes).sum()
}

/// Returns the routes of shard 0 and of the data shards.
fn shard_routes(node: &Node) -> Vec<ShardRoute> {
    let own = ShardRoute {
        shard_id: 0,
        leader: node.cluster().leader_hint().map(wire_leader),
        replicas: node.cluster().voters(),
        learners: node.cluster().learners(),
        ..ShardRoute::default()
    };
    let shards = node.shards();
    let open = shards.iter().map(|shard| shard_route(shard));
    let closed = node.closed_shards().into_iter().map(|closed| closed_route(node, closed));
    let elsewhere = node.cluster().machine().read(|state| state.shards().clone());
    let elsewhere = elsewhere.into_iter().filter_map(|shard_id| {
        Some(ShardRoute {
            shard_id: wire_shard_id(shard_id),
            replicas: node.cluster().replicas_elsewhere(shard_id)?,
            leader: node.cluster().remote_leader(shard_id).map(wire_leader),
            ..ShardRoute::default()
        })
    });
    std::iter::once(own).chain(open).chain(closed).chain(elsewhere).collect()
}

/// Returns the route of a shard that this node does not serve.
fn closed_route(node: &Node, closed: ClosedShard) -> ShardRoute {
    ShardRoute {
        shard_id: wire_shard_id(closed.shard_id),
        replicas: node.cluster().nodes(),
        fault: closed.why,
        is_damaged: closed.is_damaged,
        ..ShardRoute::default()
    }
}

fn shard_route(shard: &Shard) -> ShardRoute {
    ShardRoute {
        shard_id: wire_shard_id(shard.id()),
        leader: shard.leader_hint().map(wire_leader),
        replicas: shard.replicas(),
        learners: shard.learners(),
        ..ShardRoute::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[tokio::test(start_paused = true)]
    async fn watchers_share_the_rate() {
        let pace = MetadataPace::default();
        let begun = Instant::now();
        // Two seconds at 64 MiB/s.
        let turns: Vec<Duration> =
            (0..128).map(|_| pace.turn(MIB).unwrap().duration_since(begun)).collect();
        assert_eq!(turns[0], Duration::ZERO);
        assert!(turns.is_sorted());
        assert!(turns[127].abs_diff(Duration::from_secs(2)) < Duration::from_millis(50));
        assert_eq!(pace.turn(METADATA_UNPACED_BYTES), None);
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(pace.turn(MIB).unwrap(), Instant::now(), "unused time is not saved");
    }

    #[tokio::test(start_paused = true)]
    async fn no_message_is_later_than_the_limit() {
        let pace = MetadataPace::default();
        for _ in 0..10_000 {
            assert!(pace.turn(MIB).unwrap() <= Instant::now() + METADATA_LATE_MAX);
        }
        // The backlog does not grow either.
        tokio::time::advance(METADATA_LATE_MAX).await;
        assert_eq!(pace.turn(MIB).unwrap(), Instant::now());
    }
}
