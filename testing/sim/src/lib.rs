//! Whole clusters in one process: the product's own API, peers, Raft and WAL on a simulated
//! network, simulated disks and simulated clocks. Everything follows from a seed.
//!
//! `run` is one run; `plan` draws what it is like; `cluster`, `disks`, `clock`, `links`, `net` and
//! `tamper` are the world; `nemesis` and `damage` break it; `workload` and `repeater` write and
//! read through `helix-client` and past it, and `operator` runs the cluster; `members` is what
//! nemesis and operator know of each other; `watch` looks at all nodes after every tick; `finals`
//! reads every replica at the end; `marks` counts what was met on the way, and `tally` adds up over
//! many runs.

#[cfg(not(tokio_unstable))]
compile_error!("build in testing/sim/, whose .cargo/config.toml sets tokio_unstable");

pub mod clock;
pub mod cluster;
pub mod damage;
pub mod disks;
pub mod finals;
pub mod links;
pub mod marks;
pub mod members;
pub mod nemesis;
pub mod net;
pub mod operator;
pub mod plan;
pub mod record;
pub mod repeater;
pub mod run;
mod seen;
pub mod tally;
pub mod tamper;
pub mod watch;
pub mod workload;
