//! The connections to one peer: a stream per lane, each over a connection of its own, made again
//! whenever it is lost; and one more for single calls. Addresses are resolved at every attempt.

use std::sync::{Arc, Mutex, MutexGuard};

use helix_proto::framing::{Answers, Aside};
use helix_proto::raft::v1 as pb;
use pb::exchange_request::Message;
use pb::peer_service_client::PeerServiceClient;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};

use super::hub::{Identity, Roster};
use super::limits::{
    CONNECT_WAIT_MAX, CONNECTION_WINDOW_BYTES, FRAME_BYTES, HANDSHAKE_WAIT_MAX, KEEPALIVE_INTERVAL,
    KEEPALIVE_WAIT_MAX, MESSAGE_BYTES_MAX, RECONNECT_PAUSE_MAX, RECONNECT_PAUSE_MIN,
    STREAM_WINDOW_BYTES,
};
use super::network::Dialer;
use super::outgoing;
use super::session::Session;
use super::wire;
use crate::metrics::Counter;
use crate::protocol::Versions;

/// What a stream is for; the wire's without its unset value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lane {
    Live,
    Control,
    CatchUp,
}

impl Lane {
    pub(super) const ALL: [Self; 3] = [Self::Live, Self::Control, Self::CatchUp];

    fn to_wire(self) -> pb::Lane {
        match self {
            Self::Live => pb::Lane::Live,
            Self::Control => pb::Lane::Control,
            Self::CatchUp => pb::Lane::CatchUp,
        }
    }

    pub(super) fn from_wire(lane: i32) -> Option<Self> {
        match pb::Lane::try_from(lane).ok()? {
            pb::Lane::Unspecified => None,
            pb::Lane::Live => Some(Self::Live),
            pb::Lane::Control => Some(Self::Control),
            pb::Lane::CatchUp => Some(Self::CatchUp),
        }
    }
}

/// One other node.
pub(super) struct Peer {
    pub(super) node_id: u64,
    pub(super) address: String,
    /// None where the address is none.
    endpoint: Option<Endpoint>,
    dialer: Arc<dyn Dialer>,
    /// For single calls: connects at the first one, and again after a failure.
    calls: Option<PeerServiceClient<Answers<Channel>>>,
    /// Ends the connections: the hub is closed, or this is no peer any more.
    pub(super) closed: CancellationToken,
    pub(super) traffic: Arc<Traffic>,
    lines: Mutex<Lines>,
    /// It has connected to this node: so it is there.
    heard: Notify,
}

/// Bytes of requests over all streams, either way, without what frames them.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    pub(super) sent: Counter,
    pub(super) received: Counter,
}

struct Lines {
    sessions: [Option<Arc<Session>>; 3],
    /// The last error of each lane, until it is connected again.
    errors: [Option<String>; 3],
    since: Instant,
}

impl Lines {
    fn connected(&self) -> bool {
        self.sessions.iter().all(Option::is_some)
    }

    /// The oldest that is spoken on any lane; none while one is not open.
    fn protocol(&self) -> Option<u32> {
        let spoken = self.sessions.iter().map(|session| Some(session.as_ref()?.protocol));
        spoken.collect::<Option<Vec<u32>>>()?.into_iter().min()
    }
}

/// How a connection to a peer stands.
#[derive(Debug, Clone)]
pub struct PeerStatus {
    pub node_id: u64,
    pub address: String,
    /// Whether every lane is open.
    pub connected: bool,
    /// Why it is not connected, if that is known.
    pub last_error: Option<String>,
    /// The protocol version that is spoken, while it is connected.
    pub protocol: Option<u32>,
    /// Since when it is connected, or is not.
    pub since: Instant,
    /// Bytes of requests that went there, and that came from there.
    pub sent_bytes: u64,
    pub received_bytes: u64,
}

/// Why there is no stream.
enum Broken {
    /// The peer said no: an operator has to act.
    Refused(String),
    Lost(String),
}

impl Peer {
    pub(super) fn new(
        node_id: u64,
        address: String,
        dialer: Arc<dyn Dialer>,
        closed: CancellationToken,
    ) -> Self {
        let endpoint = endpoint(&address);
        let errors = std::array::from_fn(|_| match endpoint {
            Some(_) => None,
            None => Some(format!("{address:?} is no address")),
        });
        let lines = Lines { sessions: Default::default(), errors, since: Instant::now() };
        let calls = endpoint.as_ref().map(|endpoint| client(dialer.connect_lazily(endpoint)));
        let traffic = Arc::default();
        let lines = Mutex::new(lines);
        let heard = Notify::new();
        Self { node_id, address, endpoint, dialer, calls, closed, traffic, lines, heard }
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().expect("no panic while it is held")
    }

    /// The open stream of a lane, or why there is none.
    pub(super) fn session(&self, lane: Lane) -> Result<Arc<Session>, String> {
        let lines = self.lines();
        lines.sessions[lane as usize].clone().ok_or_else(|| {
            let why = lines.errors[lane as usize].as_deref().unwrap_or("not connected yet");
            format!("node {} at {}: {why}", self.node_id, self.address)
        })
    }

    pub(super) fn status(&self) -> PeerStatus {
        let lines = self.lines();
        let connected = lines.connected();
        let last_error = match connected {
            true => None,
            false => lines.errors.iter().flatten().next().cloned(),
        };
        PeerStatus {
            node_id: self.node_id,
            address: self.address.clone(),
            connected,
            last_error,
            protocol: lines.protocol(),
            since: lines.since,
            sent_bytes: self.traffic.sent.get(),
            received_bytes: self.traffic.received.get(),
        }
    }

    /// A client for single calls; none where the address is none.
    pub(super) fn calls(&self) -> Option<PeerServiceClient<Answers<Channel>>> {
        self.calls.clone()
    }

    /// It has connected to this node: lanes that wait for another attempt make it now.
    pub(super) fn on_heard(&self) {
        self.heard.notify_waiters();
    }

    /// Keeps the stream of a lane open until [`Self::closed`].
    pub(super) async fn keep(self: Arc<Self>, lane: Lane, roster: Arc<Roster>) {
        let Some(endpoint) = &self.endpoint else { return };
        let closed = self.closed.clone();
        let keeping = async {
            let identity = roster.known_identity().await;
            let mut pauses = Pauses::new(roster.node_id, self.node_id, lane);
            loop {
                let (session, broken) = match self.open(endpoint, lane, &roster, identity).await {
                    Ok((session, results)) => {
                        pauses.reset();
                        let up = Up::new(&self, lane, &roster, session);
                        let broken = follow(results, &up.session).await;
                        (Some(up), broken)
                    }
                    Err(broken) => (None, broken),
                };
                self.note(lane, &roster, broken);
                drop(session);
                tokio::select! {
                    () = sleep(pauses.next()) => {}
                    () = self.heard.notified() => pauses.reset(),
                }
            }
        };
        tokio::select! {
            () = keeping => {}
            () = closed.cancelled() => {}
        }
    }

    /// Connects and exchanges handshakes.
    async fn open(
        &self,
        endpoint: &Endpoint,
        lane: Lane,
        roster: &Roster,
        identity: Identity,
    ) -> Result<(Session, Streaming<pb::ExchangeResponse>), Broken> {
        let connecting = self.dialer.connect(endpoint.clone());
        let channel = timeout(CONNECT_WAIT_MAX + HANDSHAKE_WAIT_MAX, connecting)
            .await
            .map_err(|_| Broken::Lost("connecting takes too long".to_owned()))?
            .map_err(|error| Broken::Lost(chain(&error)))?;
        let (outgoing, queue) = mpsc::unbounded_channel();
        let opening = pb::Opening {
            version_min: roster.versions.oldest,
            version_max: roster.versions.newest,
            cluster: wire::cluster_bytes(identity.cluster),
            from_node: roster.node_id,
            to_node: self.node_id,
            lane: lane.to_wire().into(),
            generation: identity.generation,
        };
        let opening = pb::ExchangeRequest { message: Some(Message::Opening(opening)) };
        let mut request = Request::new(futures_util::stream::empty());
        request.extensions_mut().insert(Aside::new(outgoing::body(lane, opening, queue)));
        let shaking_hands = async {
            let mut results = client(channel).exchange(request).await?.into_inner();
            let first = results.message().await?;
            Ok::<_, Status>((results, first))
        };
        let (results, first) = timeout(HANDSHAKE_WAIT_MAX, shaking_hands)
            .await
            .map_err(|_| Broken::Lost("no handshake came".to_owned()))?
            .map_err(broken)?;
        let opened = self.check(first, roster, identity.cluster).map_err(Broken::Refused)?;
        let session = Session::new(outgoing, &opened, Arc::clone(&self.traffic));
        Ok((session, results))
    }

    /// Checks the peer's handshake.
    fn check(
        &self,
        first: Option<pb::ExchangeResponse>,
        roster: &Roster,
        cluster: u128,
    ) -> Result<pb::Opened, String> {
        let Some(pb::exchange_response::Message::Opened(opened)) = first.and_then(|f| f.message)
        else {
            return Err("it did not begin with a handshake".to_owned());
        };
        let chosen = Versions { oldest: opened.version, newest: opened.version };
        roster.agree(self.node_id, chosen)?;
        if wire::read_cluster(&opened.cluster) != Some(cluster) {
            return Err("it is in another cluster".to_owned());
        }
        if opened.node != self.node_id {
            return Err(format!("it is node {}", opened.node));
        }
        Ok(opened)
    }

    /// Keeps and logs why a lane is not open; the same reason is logged once for all lanes.
    fn note(&self, lane: Lane, roster: &Roster, broken: Broken) {
        let (refused, why) = match broken {
            Broken::Refused(why) => (true, why),
            Broken::Lost(why) => (false, why),
        };
        let (is_known, before) = {
            let mut lines = self.lines();
            let is_known = lines.errors.iter().flatten().any(|known| *known == why);
            (is_known, lines.errors[lane as usize].replace(why.clone()))
        };
        if before.as_ref() != Some(&why) {
            roster.peers_changed();
        }
        if is_known {
            return;
        }
        let (node, address) = (self.node_id, &self.address);
        if refused {
            tracing::warn!(node, %address, ?lane, "peer refuses the connection: {why}");
        } else {
            tracing::info!(node, %address, ?lane, "no connection to peer: {why}");
        }
    }
}

/// Hands out results until the stream ends.
async fn follow(mut results: Streaming<pb::ExchangeResponse>, session: &Session) -> Broken {
    loop {
        let message = match results.message().await {
            Ok(Some(message)) => message.message,
            Ok(None) => return Broken::Lost("the peer ended the stream".to_owned()),
            Err(status) => return broken(status),
        };
        match message {
            Some(pb::exchange_response::Message::Results(results)) => session.deliver(results),
            Some(pb::exchange_response::Message::Opened(_)) | None => {
                return Broken::Lost("the peer sent something that is no result".to_owned());
            }
        }
    }
}

/// A lane while it is open.
struct Up<'a> {
    peer: &'a Peer,
    lane: Lane,
    roster: &'a Roster,
    session: Arc<Session>,
}

impl<'a> Up<'a> {
    fn new(peer: &'a Peer, lane: Lane, roster: &'a Roster, session: Session) -> Self {
        let session = Arc::new(session);
        let connected = {
            let mut lines = peer.lines();
            lines.sessions[lane as usize] = Some(Arc::clone(&session));
            lines.errors[lane as usize] = None;
            let connected = lines.connected();
            if connected {
                lines.since = Instant::now();
            }
            connected
        };
        if connected {
            tracing::info!(node = peer.node_id, address = %peer.address, "peer connected");
            roster.peers_changed();
        }
        Self { peer, lane, roster, session }
    }
}

impl Drop for Up<'_> {
    fn drop(&mut self) {
        let was_connected = {
            let mut lines = self.peer.lines();
            let was_connected = lines.connected();
            lines.sessions[self.lane as usize] = None;
            if was_connected {
                lines.since = Instant::now();
            }
            was_connected
        };
        self.session.end("the connection was lost");
        if was_connected {
            self.roster.peers_changed();
        }
    }
}

/// Growing pauses with jitter, from a source that is the same at every start of this node.
struct Pauses {
    random: StdRng,
    next: std::time::Duration,
}

impl Pauses {
    fn new(node_id: u64, peer: u64, lane: Lane) -> Self {
        let seed = node_id << 32 ^ peer << 2 ^ lane as u64;
        Self { random: StdRng::seed_from_u64(seed), next: RECONNECT_PAUSE_MIN }
    }

    fn reset(&mut self) {
        self.next = RECONNECT_PAUSE_MIN;
    }

    fn next(&mut self) -> std::time::Duration {
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

fn client(channel: Channel) -> PeerServiceClient<Answers<Channel>> {
    PeerServiceClient::new(Answers(channel))
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

fn broken(status: Status) -> Broken {
    match status.code() {
        Code::FailedPrecondition => Broken::Refused(status.message().to_owned()),
        _ => Broken::Lost(status_text(&status)),
    }
}

/// What a status says, with what is behind it: tonic's own text is often "transport error".
pub(super) fn status_text(status: &Status) -> String {
    match std::error::Error::source(status) {
        Some(source) => format!("{}: {}", status.message(), chain(source)),
        None => status.message().to_owned(),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
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
