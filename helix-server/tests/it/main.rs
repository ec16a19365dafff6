//! Tests of the server as clients see it, and of the rules of its source. One module per subject.

// Tests unwrap: the panic is the report. Clippy's own exception covers test functions only, not
// their helpers.
#![allow(clippy::unwrap_used)]

mod access;
mod add_shards;
mod admin;
mod append_stream;
mod bad_input;
mod bad_start;
mod binary;
mod blocked_log;
mod cancelled_calls;
mod captured_log;
mod cleanup;
mod cleanup_changes;
mod clocks;
mod cluster;
mod compaction;
mod compaction_by_key;
mod compression;
mod conditions;
mod console;
mod consume;
mod disk_failure;
mod disk_full;
mod embedded;
mod fleet;
mod gateway_members;
mod golden;
mod group_consumer;
mod group_limits;
mod group_order;
mod group_pages;
mod group_poison;
mod groups;
mod health_probe;
mod kafka_batches;
mod kill;
mod limits;
mod lost_tail;
mod peer;
mod peer_nodes;
mod peer_records;
mod peer_wire;
mod placement;
mod placement_kill;
mod placement_pause;
mod placement_racks;
mod process;
mod produce;
mod raw_http2;
mod recipes;
mod recreated;
mod reflection;
mod reset_floods;
mod retention;
mod services;
mod shard_splits;
mod shutdown;
mod simulated_trio;
mod simulation;
mod small_disk;
mod subscribe;
mod suite;
mod support;
mod three_nodes;
mod throttled;
mod tidy;
mod tls;
mod topics;
#[cfg(feature = "otlp")]
mod traces;
mod trio;
mod unix_socket;
mod versions;
