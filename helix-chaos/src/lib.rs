//! Faults on real processes under load, and a check of everything that the clients were told.
//! `helix-checker` is the judge; `commands` are what the binary does.

mod cluster;
pub mod commands;
mod direct;
mod flood;
mod nemesis;
mod node;
mod ports;
pub mod proxy;
mod recorder;
mod schedule;
mod settle;
mod voice;
mod workload;
