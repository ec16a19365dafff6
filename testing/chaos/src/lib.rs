//! Faults on real processes under load, and a check of everything that the clients were told.
//! `helix-checker` is the judge; `commands` are what the binary does.

mod ailments;
mod cluster;
pub mod commands;
mod direct;
mod disk;
mod files;
mod flood;
mod metrics;
mod nemesis;
mod node;
mod operator;
mod ports;
pub mod proxy;
mod recorder;
mod schedule;
mod settle;
mod voice;
mod workload;
