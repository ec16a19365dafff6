//! Tests of the harness on real nodes: short runs that must pass, and a cluster that loses synced
//! data, which must be detected.

#![allow(clippy::unwrap_used)] // Clippy does not treat helper functions as tests.

use std::path::PathBuf;
use std::time::Duration;

use helix_chaos::commands::{
    self, ChaosCommand, CommonArgs, FaultCounts, FloodArgs, GroupsArgs, GrowArgs, KillAllArgs,
    RetriesArgs, RollingArgs, RunArgs,
};

fn program() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_helix-chaos"))
}

fn common(nodes: u64) -> CommonArgs {
    let seed = std::env::var("HELIX_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(7);
    println!("seed {seed} (set HELIX_SEED to repeat or vary)");
    let duration_max = Duration::from_secs(240);
    CommonArgs {
        nodes,
        seed,
        topic_partitions: 6,
        duration_max,
        shards: 3,
        election_timeout_ms: None,
        log_kib: None,
        tls: false,
        keep: None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_every_kind_break_no_promise() {
    // Drains, membership changes and full disks have their own tests.
    let faults = FaultCounts {
        kills: 2,
        pauses: 1,
        partitions: 1,
        absences: 1,
        trims: 2,
        failed_syncs: 1,
        stalls: 1,
        damages: 2,
        restores: 2,
        ..FaultCounts::default()
    };
    let common = CommonArgs { log_kib: Some(512), ..common(3) };
    let args = RunArgs { common, faults, check_every: 15, short: true };
    commands::run(ChaosCommand::Run(args), program()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forced_retries_make_no_copy() {
    let args = RetriesArgs { common: common(1), count: 20 };
    commands::run(ChaosCommand::Retries(args), program()).await.unwrap();
}

/// Small, and without judging latencies, because the host may be shared.
fn flood() -> FloodArgs {
    FloodArgs {
        connections: 300,
        readers: 60,
        writers: 8,
        abusive_clients: 8,
        half_open: 1_000,
        quota_mib: None,
        harm: Vec::new(),
        duration: Duration::from_secs(4),
        memory_limit_mib: 256,
        p99_factor_max: 2.0,
        pace: None,
        resets: false,
        reset_connections: Vec::new(),
        no_latency: true,
        json: false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flooded_node_stays_below_its_memory_limit_and_serves_another_client() {
    commands::run(ChaosCommand::Flood(flood()), program()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flood_of_a_principal_is_held_to_its_quota_and_another_principal_is_served() {
    let args = FloodArgs {
        connections: 0,
        readers: 0,
        abusive_clients: 0,
        half_open: 0,
        // A fifth of what the writers append on a slow machine with the other tests beside them.
        quota_mib: Some(1),
        duration: Duration::from_secs(2),
        ..flood()
    };
    commands::run(ChaosCommand::Flood(args), program()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_are_added_replaced_and_removed_under_load() {
    let (kill, most) = (true, 5);
    let args = GrowArgs { common: common(1), kill, most, pause_max: None, beside: None };
    commands::run(ChaosCommand::Grow(args), program()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_survives_its_members_coordinators_and_leaders() {
    let common = CommonArgs { topic_partitions: 12, ..common(3) };
    let session_timeout = Duration::from_secs(3);
    let args = GroupsArgs { common, members: 3, faults: Some(5), session_timeout };
    commands::run(ChaosCommand::Groups(args), program()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_restart_under_load_fails_no_append() {
    let (rounds, plain, before) = (1, false, Duration::from_secs(1));
    let (pause, p99_factor_max) = (Duration::ZERO, None);
    let args = RollingArgs { common: common(3), rounds, plain, before, pause, p99_factor_max };
    commands::run(ChaosCommand::Rolling(args), program()).await.unwrap();
}

/// The harness must detect a node whose disk loses synced data.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_that_loses_synced_data_is_detected() {
    let dir = tempfile::tempdir().unwrap();
    let common = CommonArgs { keep: Some(dir.path().to_owned()), ..common(1) };
    let args = KillAllArgs { common, rounds: 2, check_every: 2, forget: true };
    let error = commands::run(ChaosCommand::KillAll(args), program()).await.unwrap_err();
    assert_eq!(error.to_string(), "promises were broken", "{error:#}");
    // The history is kept, and checking it again gives the same result.
    let history = dir.path().join("history.jsonl");
    let error = commands::run(ChaosCommand::Check { history }, program()).await.unwrap_err();
    assert_eq!(error.to_string(), "the history is wrong", "{error:#}");
}
