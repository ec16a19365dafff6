//! Tests of clusters of three nodes in the test's own process.

mod calls;
mod catch_up;
mod conditions;
mod disk_full;
mod drain;
mod failover;
mod forming;
mod gone;
mod group_admin;
mod groups;
mod kafka_batches;
mod membership;
mod paused;
mod reads;
mod repair;
mod restart;
mod snapshot;
mod snapshot_disk;
mod space;
mod transfers;
