//! Whole clusters in one process: the product's API, peers, Raft and WAL on a simulated network,
//! simulated disks and simulated clocks. Everything follows from a seed.
//!
//! - `run` executes one run; `plan` draws its settings from the seed.
//! - `cluster`, `disks`, `clock`, `links`, `net` and `tamper` simulate the environment.
//! - `nemesis`, `damage` and `copies` inject faults; `membership` limits the affected nodes.
//! - `workload` and `raw_producer` write and read, with and without `helix-client`.
//! - `operator` administers the cluster.
//! - `placer` moves replicas, cordons nodes and changes the number of replicas; `placement_watch`
//!   checks the placement on all nodes.
//! - `recreation` deletes a topic and creates it again; `recreation_log` checks what its clients
//!   see.
//! - `clock_witness` checks append times and retention by time against all clocks; `token_holder`
//!   checks the expiry of tokens.
//! - `principals` use each other's producer identities; `revocations` removes rights while calls
//!   wait.
//! - `group_member` reads in a consumer group, `group_topics` changes topics under it,
//!   `group_watch` checks the group on all nodes, `group_context` is shared by them.
//! - `group_offsets` commits, seeks and deletes in a group without members, also late.
//! - `tables` writes and reads a topic that is compacted by key, and checks what readers see;
//!   `table_watch` checks its compaction on all nodes.
//! - `invariants` checks all nodes after every tick; `observation` is its state per replica.
//! - `final_reads` reads every replica at the end; `recorder` keeps the history of all clients.
//! - `coverage` counts the situations that a run met; `tally` adds up the counts of many runs.

#[cfg(not(tokio_unstable))]
compile_error!("build in testing/sim/, whose .cargo/config.toml sets tokio_unstable");

pub mod clock;
pub mod clock_witness;
pub mod cluster;
mod copies;
pub mod coverage;
pub mod damage;
pub mod disks;
pub mod final_reads;
pub mod group_context;
pub mod group_member;
pub mod group_offsets;
pub mod group_topics;
pub mod group_watch;
mod growth_writer;
pub mod invariants;
pub mod links;
pub mod membership;
pub mod nemesis;
pub mod net;
mod observation;
pub mod operator;
pub mod placement_watch;
pub mod placer;
pub mod plan;
pub mod principals;
pub mod raw_producer;
pub mod recorder;
pub mod recreation;
pub mod recreation_log;
pub mod revocations;
pub mod run;
mod sealed;
mod shard_growth;
pub mod table_watch;
pub mod tables;
pub mod tally;
pub mod tamper;
pub mod token_holder;
pub mod workload;
