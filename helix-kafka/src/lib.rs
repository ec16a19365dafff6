//! A gateway that serves Kafka's protocol from a Helix cluster.
//!
//! It is a client of Helix like any other: it has no state of its own that a restart could lose,
//! and every promise is one of the cluster. Kafka batches are stored as they came.
//!
//! - `frame`, `schema` and `versions` check requests before the generated decoders see them.
//! - `connection` and `dispatch` answer the requests of a connection in order.
//! - `lanes` appends batches in order; `batch` checks and converts them.
//! - `api` has the handlers, `groups` the members of consumer groups.
//! - `metrics` counts, `probes` serves the page and the health of the gateway.
//! - `brokers` has the gateways of the cluster, `upstream` the cluster behind them.
//!
//! `docs/kafka.md` has the served APIs, docs/decisions/0056 the reasons.

mod api;
pub mod batch;
mod brokers;
mod connection;
mod context;
mod dispatch;
mod errors;
pub mod frame;
mod groups;
mod lanes;
mod memory;
mod metrics;
mod principals;
mod probes;
mod process;
mod response_codes;
pub mod schema;
mod server;
mod state;
mod upstream;
pub mod versions;

pub use brokers::{GatewayOfNode, HostPort};
pub use metrics::{GatewayCounter, GatewayMetrics};
pub use server::{Gateway, GatewayError, GatewayOptions};
pub use state::{GatewayLimits, GatewayRules, GatewayState};
