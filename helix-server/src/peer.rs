//! The peer transport: `helix.raft.v1` over gRPC between the nodes of a cluster.
//! Only this module and `raft` depend on openraft.
//!
//! Each pair of nodes has one stream per direction and lane, over a connection of its own, which
//! all shards share. Each peer also has a connection for single calls (hello, join, form, call).
//!
//! | lane | carries |
//! |---|---|
//! | live | appends to followers that keep up |
//! | control | heartbeats, votes and leadership transfers |
//! | catch-up | appends to followers that are behind, snapshots, and records; throttled |
//!
//! The path of an append from the leader to a follower:
//!
//! 1. openraft polls the stream of `send::appends`, which takes the next request.
//! 2. The lag of the follower selects the live or the catch-up lane.
//! 3. The request gets the next sequence of its epoch, within the window of bytes in flight.
//! 4. `connection::session` queues it, and `connection::outgoing` encodes it without a copy.
//! 5. `receive::inbound` reads it on the follower and finds the replica.
//! 6. `receive::epoch` checks sequence, window, disk space and checksums, and queues it.
//! 7. The follower's openraft appends and syncs it. `inbound` merges the responses into acks.
//! 8. `connection::peer` on the leader passes the ack to the epoch, which yields the result.
//!
//! In reading order:
//!
//! - `limits`: every bound of the transport.
//! - `hub`: the interface to the rest of the node. `handler`: requests that are not Raft messages.
//! - `local`, `table`, `dialer`, `network`: this node, its peers, and how to reach them.
//! - `connection`: `peer` opens the lanes, `session` is an open one, `outgoing` encodes.
//! - `tls`: certificates of nodes, for both directions.
//! - `wire`: conversion and checks of messages.
//! - `throttle`: the byte budget of all copies. `copy_rate`: chooses its rate.
//! - `send`: `replica_network` and `route` implement openraft's network; `appends`, `snapshot`.
//! - `receive`: `service` accepts, `inbound` reads, `epoch` appends, `unary` answers the rest.
//! - `snapshot`: `assembly` collects chunks, `fetcher` gets missing records from a `source` into
//!   `staged` segments, `records` serves them. `split_log` fills a log that a split makes.
//! - `served`: a local replica, or a log alone. `failover` replaces its leader when that is gone.
//!   `calls`: single calls to other nodes.

mod calls;
mod connection;
mod copy_rate;
mod dialer;
mod failover;
mod handler;
mod hub;
mod limits;
mod local;
mod network;
mod receive;
mod send;
mod served;
mod snapshot;
mod table;
mod throttle;
mod tls;
mod wire;

pub use calls::PeerError;
pub use connection::peer::PeerStatus;
pub use copy_rate::CopyPace;
pub use dialer::Dialer;
pub use handler::{FormCluster, Hello, HelloRequest, JoinCluster, PeerHandler};
pub use hub::{Hub, HubSettings};
pub use network::{Network, serve};
pub use send::replica_network::ReplicaNetwork;
pub use send::route::ReplicaRoute;
pub use served::HeldLog;
pub use snapshot::fetcher::FetchProgress;
pub use snapshot::split_log::SplitLog;
pub use tls::PeerTls;
