//! The Helix server: partitioned, replicated, append-only logs over gRPC.
//!
//! A topic's partitions live in shards. A shard is one Raft group with one write-ahead log
//! (`helix-wal`), and that log is the record store. Modules, in the order in which an append passes
//! them:
//!
//! | module | purpose |
//! |---|---|
//! | [`daemon`], [`server`] | run a server as a process; start and stop it |
//! | [`embedded`] | a node in the program's own process, without a port |
//! | [`config`] | settings, from the command line, the environment and a file |
//! | [`admin`] | the admin port: probes, Prometheus metrics and the console |
//! | [`transport`] | connections, admission, metering: what a request passes before its handler |
//! | [`api`] | the public gRPC services |
//! | [`call`] | what clients make the node hold: connections, calls and their memory |
//! | [`node`] | the shards of this node, and their background tasks |
//! | [`access`] | callers: principals, credentials, quotas, the audit log |
//! | [`cluster`] | shard 0: topics, placement, nodes, producer ids |
//! | [`shard`] | one replicated log: append, read, wait, maintenance |
//! | [`peer`] | node to node: connections, replication, snapshots |
//! | [`raft`] | openraft on the WAL |
//! | [`flow`] | bytes in flight of a shard: small batches first, large ones paced |
//! | [`log`] | the domain, pure: how an entry changes the bookkeeping |
//!
//! # Embedded
//! A program can have the node in its own process, and append and read without a port:
//! ```no_run
//! use futures_util::TryStreamExt;
//! use helix_proto::batch;
//! use helix_proto::log::v1::Record;
//! use helix_server::config::ServerConfig;
//! use helix_server::embedded::Embedded;
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! // Or `ServerConfig::in_memory()`, which loses all data at the end. Both have a topic `default`.
//! let config = ServerConfig::in_dir("/var/lib/app/log");
//! let log = Embedded::open(ServerConfig { topics: Vec::new(), ..config }).await?;
//! log.create_topic("orders", 1).await?;
//!
//! let record = Record { value: Some("hello".into()), ..Record::default() };
//! let offset = log.append("orders", 0, batch::encode(&[record])).await?;
//!
//! let mut batches = log.subscribe("orders", 0, offset).await?;
//! if let Some(stored) = batches.try_next().await? {
//!     println!("{} records from offset {}", stored.batch.record_count, stored.first_offset);
//! }
//! log.close().await;
//! # Ok(())
//! # }
//! ```
//! `examples/embedded.rs` is a whole program. [`server::Server`] can open the same directory later,
//! for clients and with other nodes.
//!
//! # Source layout
//! Imports point down the list above; `tests/it/tidy/layers.rs` checks it. All of them may use the
//! other modules, such as [`limits`] and [`memory`]. `docs/ARCHITECTURE.md` describes the append
//! path and the read path.

pub mod daemon;
pub mod embedded;
pub mod server;

pub mod config;

pub mod admin;

pub mod transport;

pub mod api;

pub mod call;

pub mod node;

pub mod access;

pub mod cluster;

pub mod shard;

pub mod peer;

pub mod raft;

pub mod flow;

pub mod log;

pub mod clock;
#[cfg(test)]
mod doc_tables;
pub mod error;
pub mod file_limit;
pub mod limits;
mod log_threads;
pub mod memory;
pub mod metrics;
mod process;
pub mod protocol;
mod quote;
pub mod random;
mod records;
pub mod signals;
pub mod slow;
pub mod stages;
mod stderr;
mod sync;
pub mod trace;
