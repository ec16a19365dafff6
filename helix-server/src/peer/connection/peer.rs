//! The connections to one peer: a stream per lane, each over a connection of its own, and one
//! connection for single calls. Lost streams are opened again; each attempt resolves the address.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use helix_proto::raft::v1 as pb;
use helix_transport::{DetachedBody, ResponseLayer};
use pb::exchange_request::Message;
use pb::exchange_response::Message as ResponseMessage;
use pb::peer_service_client::PeerServiceClient;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};

use super::lane::PeerLane;
use super::outgoing;
use super::session::PeerSession;
use super::traffic::Traffic;
use crate::peer::dialer::Dialer;
use crate::peer::limits::{
    CONNECT_WAIT_MAX, CONNECTION_WINDOW_BYTES, FRAME_BYTES, HANDSHAKE_WAIT_MAX, KEEPALIVE_INTERVAL,
    KEEPALIVE_WAIT_MAX, MESSAGE_BYTES_MAX, RECONNECT_PAUSE_MAX, RECONNECT_PAUSE_MIN,
    STREAM_WINDOW_BYTES,
};
use crate::peer::local::{ClusterIdentity, LocalNode};
use crate::peer::wire;
use crate::protocol::ProtocolVersions;
use crate::sync;

/// Another node, and the connections that this node makes to it.
pub(in crate::peer) struct Peer {
    node_id: u64,
    pub(in crate::peer) address: String,
    /// `None` if the address is invalid.
    endpoint: Option<Endpoint>,
    dialer: Arc<dyn Dialer>,
    /// Connects lazily; `None` if the address is invalid.
    call_client: Option<PeerServiceClient<ResponseLayer<Channel>>>,
    /// Ends the connections: the hub is closed, or the node is no longer a peer.
    pub(in crate::peer) closed: CancellationToken,
    pub(in crate::peer) traffic: Arc<Traffic>,
    lanes: Mutex<LaneStates>,
    /// Ends the pause before the next attempt to connect.
    retry: Notify,
}

/// State of each lane, indexed by [`PeerLane`].
struct LaneStates {
    sessions: [Option<Arc<PeerSession>>; 3],
    /// Last error of each lane until it is open again.
    errors: [Option<String>; 3],
    /// True if the last attempt to open the lane met a host without a process that accepts it.
    refused: [bool; 3],
    since: Instant,
}

impl LaneStates {
    fn connected(&self) -> bool {
        self.sessions.iter().all(Option::is_some)
    }

    fn gone(&self) -> bool {
        self.sessions.iter().all(Option::is_none) && self.refused.contains(&true)
    }

    /// Returns the oldest protocol version of all lanes; `None` unless every lane is open.
    fn protocol(&self) -> Option<u32> {
        let spoken = self.sessions.iter().map(|session| Some(session.as_ref()?.protocol));
        spoken.collect::<Option<Vec<u32>>>()?.into_iter().min()
    }
}

/// Connection state of one peer.
#[derive(Debug, Clone)]
pub struct PeerStatus {
    pub node_id: u64,
    pub address: String,
    /// `true` while every lane is open.
    pub connected: bool,
    /// Last error while it is not connected, if known.
    pub last_error: Option<String>,
    /// Protocol version in use while it is connected.
    pub protocol: Option<u32>,
    /// Time of the last change of `connected`.
    pub since: Instant,
    /// Encoded bytes of requests to the peer.
    pub sent_bytes: u64,
    /// Encoded bytes of requests from the peer.
    pub received_bytes: u64,
}

/// Reason why a lane is not open.
enum DisconnectReason {
    /// The peer refused the handshake: an operator has to act.
    Refused(String),
    /// The peer's host refused or ended the connection before the handshake.
    Gone(String),
    Lost(String),
}

impl Peer {
    pub(in crate::peer) fn new(
        node_id: u64,
        address: String,
        dialer: Arc<dyn Dialer>,
        closed: CancellationToken,
    ) -> Self {
        let dialer = dialer.for_node(node_id).unwrap_or(dialer);
        let endpoint = endpoint(&address);
        let errors = std::array::from_fn(|_| match endpoint {
            Some(_) => None,
            None => Some(format!("{address:?} is not an address; use host:port")),
        });
        let lanes = LaneStates {
            sessions: Default::default(),
            errors,
            refused: [false; 3],
            since: Instant::now(),
        };
        let call_client = endpoint.as_ref().map(|endpoint| client(dialer.connect_lazily(endpoint)));
        Self {
            node_id,
            address,
            endpoint,
            dialer,
            call_client,
            closed,
            traffic: Arc::default(),
            lanes: Mutex::new(lanes),
            retry: Notify::new(),
        }
    }

    fn lanes(&self) -> MutexGuard<'_, LaneStates> {
        sync::lock(&self.lanes)
    }

    /// Returns the open stream of a lane, or the reason why it is not open.
    pub(in crate::peer) fn session(&self, lane: PeerLane) -> Result<Arc<PeerSession>, String> {
        let lanes = self.lanes();
        lanes.sessions[lane as usize].clone().ok_or_else(|| {
            let why = lanes.errors[lane as usize].as_deref().unwrap_or("not connected yet");
            format!("node {} at {}: {why}", self.node_id, self.address)
        })
    }

    pub(in crate::peer) fn status(&self) -> PeerStatus {
        let lanes = self.lanes();
        let connected = lanes.connected();
        let last_error = match connected {
            true => None,
            false => lanes.errors.iter().flatten().next().cloned(),
        };
        PeerStatus {
            node_id: self.node_id,
            address: self.address.clone(),
            connected,
            last_error,
            protocol: lanes.protocol(),
            since: lanes.since,
            sent_bytes: self.traffic.sent.get(),
            received_bytes: self.traffic.received.get(),
        }
    }

    /// Returns whether the peer's process is gone, as far as this node knows: its connections have
    /// ended, and its host refuses new ones. In a partition it would not refuse them.
    pub(in crate::peer) fn is_gone(&self) -> bool {
        self.lanes().gone()
    }

    /// Returns a client for single calls; `None` if the address is invalid.
    pub(in crate::peer) fn call_client(&self) -> Option<PeerServiceClient<ResponseLayer<Channel>>> {
        self.call_client.clone()
    }

    /// Connects lost lanes without further delay: the peer is up, since it dialed this node.
    pub(in crate::peer) fn retry_now(&self) {
        self.retry.notify_waiters();
    }

    /// Keeps the stream of a lane open until [`Self::closed`].
    pub(in crate::peer) async fn keep_open(self: Arc<Self>, lane: PeerLane, local: Arc<LocalNode>) {
        let Some(endpoint) = &self.endpoint else { return };
        let closed = self.closed.clone();
        let keeping_open = async {
            let identity = local.known_identity().await;
            let mut backoff = ReconnectBackoff::new(local.node_id, self.node_id, lane);
            loop {
                let (open_lane, reason) = match self.open(endpoint, lane, &local, identity).await {
                    Ok((session, results)) => {
                        backoff.reset();
                        let open_lane = OpenLane::new(&self, lane, &local, session);
                        let reason = deliver_results(results, &open_lane.session).await;
                        (Some(open_lane), reason)
                    }
                    Err(reason) => (None, reason),
                };
                self.record_disconnect(lane, &local, reason);
                drop(open_lane);
                tokio::select! {
                    () = sleep(backoff.next()) => {}
                    () = self.retry.notified() => backoff.reset(),
                }
            }
        };
        tokio::select! {
            () = keeping_open => {}
            () = closed.cancelled() => {}
        }
    }

    /// Connects and exchanges handshakes.
    async fn open(
        &self,
        endpoint: &Endpoint,
        lane: PeerLane,
        local: &LocalNode,
        identity: ClusterIdentity,
    ) -> Result<(PeerSession, Streaming<pb::ExchangeResponse>), DisconnectReason> {
        let connecting = self.dialer.connect(endpoint.clone());
        let channel = timeout(CONNECT_WAIT_MAX + HANDSHAKE_WAIT_MAX, connecting)
            .await
            .map_err(|_| DisconnectReason::Lost("connecting timed out".to_owned()))?
            .map_err(|error| match is_refused(&error) {
                true => DisconnectReason::Gone(error_chain(&error)),
                false => DisconnectReason::Lost(error_chain(&error)),
            })?;
        let (outgoing, queue) = mpsc::unbounded_channel();
        let opening = pb::Opening {
            version_min: local.versions.oldest,
            version_max: local.versions.newest,
            cluster: wire::cluster_bytes(identity.cluster),
            from_node: local.node_id,
            to_node: self.node_id,
            lane: lane.to_wire().into(),
            generation: identity.generation,
        };
        let opening = pb::ExchangeRequest { message: Some(Message::Opening(opening)) };
        let mut request = Request::new(futures_util::stream::empty());
        request.extensions_mut().insert(DetachedBody::new(outgoing::body(lane, opening, queue)));
        let shaking_hands = async {
            let mut results = client(channel).exchange(request).await?.into_inner();
            let first = results.message().await?;
            Ok::<_, Status>((results, first))
        };
        let (results, first) = timeout(HANDSHAKE_WAIT_MAX, shaking_hands)
            .await
            .map_err(|_| DisconnectReason::Lost("the handshake timed out".to_owned()))?
            .map_err(|status| match disconnect_reason(&status) {
                // Not a response: the connection ended.
                DisconnectReason::Lost(why) if std::error::Error::source(&status).is_some() => {
                    DisconnectReason::Gone(why)
                }
                reason => reason,
            })?;
        let opened =
            self.check(first, local, identity.cluster).map_err(DisconnectReason::Refused)?;
        // Known before this peer can confirm a leader over this connection.
        if local.timing.meet(opened.election_timeout_ms) && lane == PeerLane::Control {
            let (node, theirs) = (self.node_id, opened.election_timeout_ms);
            tracing::info!(
                node,
                theirs,
                own = local.timing.timeout_ms(),
                "election timeouts differ"
            );
        }
        let session = PeerSession::new(outgoing, &opened, Arc::clone(&self.traffic));
        Ok((session, results))
    }

    /// Checks the peer's handshake.
    fn check(
        &self,
        first: Option<pb::ExchangeResponse>,
        local: &LocalNode,
        cluster: u128,
    ) -> Result<pb::Opened, String> {
        let Some(ResponseMessage::Opened(opened)) = first.and_then(|first| first.message) else {
            return Err("its first message is not a handshake".to_owned());
        };
        let chosen = ProtocolVersions { oldest: opened.version, newest: opened.version };
        local.agree(self.node_id, chosen)?;
        if wire::read_cluster(&opened.cluster) != Some(cluster) {
            return Err("it is in another cluster".to_owned());
        }
        if opened.node != self.node_id {
            return Err(format!("it is node {}", opened.node));
        }
        Ok(opened)
    }

    /// Records and logs why a lane is not open. Logs the same reason once for all lanes.
    fn record_disconnect(&self, lane: PeerLane, local: &LocalNode, reason: DisconnectReason) {
        let (refused, is_gone, why) = match reason {
            DisconnectReason::Refused(why) => (true, false, why),
            DisconnectReason::Gone(why) => (false, true, why),
            DisconnectReason::Lost(why) => (false, false, why),
        };
        let (is_known, has_changed) = {
            let mut lanes = self.lanes();
            let was_gone = lanes.gone();
            lanes.refused[lane as usize] = is_gone;
            let is_known = lanes.errors.iter().flatten().any(|known| *known == why);
            let before = lanes.errors[lane as usize].replace(why.clone());
            (is_known, before.as_ref() != Some(&why) || lanes.gone() != was_gone)
        };
        if has_changed {
            local.peers_changed();
        }
        if is_known {
            return;
        }
        let (node, address) = (self.node_id, &self.address);
        if refused && !wire::is_of_start_or_stop(&why) {
            tracing::warn!(node, %address, ?lane, "peer refused the connection: {why}");
        } else {
            tracing::info!(node, %address, ?lane, "not connected to peer: {why}");
        }
    }
}

/// Delivers results to the session until the stream ends. Returns the reason of the end.
async fn deliver_results(
    mut results: Streaming<pb::ExchangeResponse>,
    session: &PeerSession,
) -> DisconnectReason {
    loop {
        let message = match results.message().await {
            Ok(Some(message)) => message.message,
            Ok(None) => return DisconnectReason::Lost("the peer ended the stream".to_owned()),
            Err(status) => return disconnect_reason(&status),
        };
        match message {
            Some(ResponseMessage::Results(results)) => session.deliver(results),
            Some(ResponseMessage::Opened(_)) | None => {
                return DisconnectReason::Lost("the peer sent an unexpected message".to_owned());
            }
        }
    }
}

/// Publishes the session of a lane until it is dropped.
struct OpenLane<'a> {
    peer: &'a Peer,
    lane: PeerLane,
    local: &'a LocalNode,
    session: Arc<PeerSession>,
}

impl<'a> OpenLane<'a> {
    fn new(peer: &'a Peer, lane: PeerLane, local: &'a LocalNode, session: PeerSession) -> Self {
        let session = Arc::new(session);
        let connected = {
            let mut lanes = peer.lanes();
            lanes.sessions[lane as usize] = Some(Arc::clone(&session));
            lanes.errors[lane as usize] = None;
            lanes.refused[lane as usize] = false;
            let connected = lanes.connected();
            if connected {
                lanes.since = Instant::now();
            }
            connected
        };
        if connected {
            tracing::info!(node = peer.node_id, address = %peer.address, "peer connected");
            local.peers_changed();
        }
        Self { peer, lane, local, session }
    }
}

impl Drop for OpenLane<'_> {
    fn drop(&mut self) {
        let has_changed = {
            let mut lanes = self.peer.lanes();
            let was_connected = lanes.connected();
            lanes.sessions[self.lane as usize] = None;
            if was_connected {
                lanes.since = Instant::now();
            }
            was_connected || lanes.gone()
        };
        self.session.end("the connection was lost");
        if has_changed {
            self.local.peers_changed();
        }
    }
}

/// Exponential pauses between attempts to connect, with jitter of up to 25 %.
/// The seed depends on node ids and lane only, so that simulations can be repeated.
struct ReconnectBackoff {
    random: StdRng,
    next: Duration,
}

impl ReconnectBackoff {
    fn new(node_id: u64, peer: u64, lane: PeerLane) -> Self {
        let seed = node_id << 32 ^ peer << 2 ^ lane as u64;
        Self { random: StdRng::seed_from_u64(seed), next: RECONNECT_PAUSE_MIN }
    }

    fn reset(&mut self) {
        self.next = RECONNECT_PAUSE_MIN;
    }

    fn next(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(RECONNECT_PAUSE_MAX);
        pause + pause.mul_f64(self.random.random_range(0.0..0.25))
    }
}

fn endpoint(address: &str) -> Option<Endpoint> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).ok()?;
    Some(
        endpoint
            .connect_timeout(CONNECT_WAIT_MAX)
            .tcp_nodelay(true)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_WAIT_MAX)
            .keep_alive_while_idle(true),
    )
}

fn client(channel: Channel) -> PeerServiceClient<ResponseLayer<Channel>> {
    PeerServiceClient::new(ResponseLayer(channel))
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

fn disconnect_reason(status: &Status) -> DisconnectReason {
    match status.code() {
        Code::FailedPrecondition => DisconnectReason::Refused(status.message().to_owned()),
        _ => DisconnectReason::Lost(status_text(status)),
    }
}

/// Returns whether a host refused or reset a connection. No response, or none in time, is not that.
fn is_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        if let Some(io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset) = kind {
            return true;
        }
        next = error.source();
    }
    false
}

/// Returns a status message with its sources: tonic's own text is often "transport error".
pub(in crate::peer) fn status_text(status: &Status) -> String {
    match std::error::Error::source(status) {
        Some(source) => format!("{}: {}", status.message(), error_chain(source)),
        None => status.message().to_owned(),
    }
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let more = source.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        next = source.source();
    }
    text
}
