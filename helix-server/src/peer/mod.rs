//! Node to node: `helix.raft.v1` over gRPC. With `raft` the only room that knows openraft.
//! `hub` and `connection` dial, `link` and `append` send for openraft, `service` and `inbound`
//! take in, `follow` and `questions` hand over to openraft.

mod append;
mod connection;
mod follow;
mod hub;
mod inbound;
mod limits;
mod link;
mod questions;
mod service;
mod session;
mod snapshot;
mod throttle;
mod wire;

pub use connection::PeerStatus;
pub use hub::{Desk, Form, Hello, Hub, HubSettings, PeerError};
pub use link::{Link, Route};
pub use service::serve;
