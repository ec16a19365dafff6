//! Whole clusters in one process: the product's own API, peers, Raft and WAL on a simulated
//! network, simulated disks and simulated clocks. Everything follows from a seed.
//!
//! `run` is one run; `plan` draws what it is like; `cluster`, `disks`, `clock`, `links` and `net`
//! are the world; `nemesis` breaks it; `workload` writes and reads through `helix-client`;
//! `watch` looks at all nodes after every tick; `finals` reads every replica at the end;
//! `marks` counts what was met on the way.

#[cfg(not(tokio_unstable))]
compile_error!("build in sim/, whose .cargo/config.toml sets tokio_unstable");

pub mod clock;
pub mod cluster;
pub mod disks;
pub mod finals;
pub mod links;
pub mod marks;
pub mod nemesis;
pub mod net;
pub mod plan;
pub mod record;
pub mod run;
pub mod watch;
pub mod workload;
