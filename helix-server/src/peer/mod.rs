//! Node to node: `helix.raft.v1` over gRPC. With `raft` the only room that knows openraft.
//! `network` is TCP or a simulated one; `hub` and `connection` dial, `calls` asks one thing at a
//! time, `link` and `append` send for openraft, `service` and `inbound` take in, `follow` and
//! `questions` hand over to openraft, `fetch` gets the records that a snapshot speaks of.

mod append;
mod calls;
mod connection;
mod fetch;
mod follow;
mod gather;
mod hub;
mod inbound;
mod limits;
mod link;
mod network;
mod outgoing;
mod questions;
mod records;
mod service;
mod session;
mod snapshot;
mod source;
mod throttle;
mod wire;

pub use connection::PeerStatus;
pub use fetch::Fetching;
pub use hub::{Asker, Desk, Form, Hello, Hub, HubSettings, Join, PeerError};
pub use link::{Link, Route};
pub use network::{Dialer, Network, Tcp};
pub use service::serve;
