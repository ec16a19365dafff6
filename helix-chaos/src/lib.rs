//! Faults on real processes under load, and a check of everything that the clients were told.
//! `check` is the judge and knows nothing of the rest; `commands` are what the binary does.

pub mod check;
mod cluster;
pub mod commands;
mod direct;
mod nemesis;
mod node;
mod payload;
mod ports;
pub mod proxy;
mod recorder;
mod schedule;
mod settle;
mod voice;
mod workload;
