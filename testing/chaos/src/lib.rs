//! Injects faults into real processes under load and checks everything that clients received.
//!
//! `helix-checker` judges the history; `commands` holds the subcommands of the binary.

mod certificates;
mod cluster;
pub mod commands;
mod disk;
mod disk_faults;
mod final_check;
mod flood;
mod groups;
mod history;
mod logger;
mod metrics;
mod nemesis;
mod node_client;
mod node_process;
mod operator;
mod output;
mod ports;
pub mod proxy;
mod schedule;
mod segment_damage;
mod workload;
