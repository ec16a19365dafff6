//! The harness on real nodes: a short run of every kind of fault that must pass, and a cluster
//! that loses what it had synced, which must not.

#![allow(clippy::unwrap_used)] // Helpers are no tests to clippy.

use std::path::PathBuf;
use std::time::Duration;

use helix_chaos::commands::{
    self, Command, Common, Faults, FloodArgs, GrowArgs, MassacreArgs, RetriesArgs, RollingArgs,
    RunArgs,
};

fn program() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_helix-chaos"))
}

fn common(nodes: u64) -> Common {
    let seed = std::env::var("HELIX_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(7);
    println!("seed {seed} (set HELIX_SEED to repeat or vary)");
    let duration_max = Duration::from_secs(240);
    Common { nodes, seed, topic_partitions: 6, duration_max, log_kib: None, keep: None }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_every_kind_break_no_promise() {
    // Drains, changes of nodes and full disks have tests of their own.
    let faults = Faults {
        kills: 2,
        pauses: 1,
        partitions: 1,
        absences: 1,
        trims: 2,
        failed_syncs: 1,
        stalls: 1,
        damages: 2,
        restores: 2,
        ..Faults::default()
    };
    let common = Common { log_kib: Some(512), ..common(3) };
    let args = RunArgs { common, faults, check_every: 15, short: true };
    commands::run(Command::Run(args), program()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forced_retries_make_no_copy() {
    let args = RetriesArgs { common: common(1), count: 20 };
    commands::run(Command::Retries(args), program()).await.unwrap();
}

/// Small, and without a judgement of latencies: this machine may be doing something else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_stays_below_the_memory_limit_and_another_client_is_served() {
    let args = FloodArgs {
        connections: 300,
        readers: 60,
        writers: 8,
        vandals: 8,
        harm: Vec::new(),
        duration: Duration::from_secs(4),
        memory_limit_mib: 256,
        p99_factor_max: 2.0,
        pace: None,
        no_latency: true,
        json: false,
    };
    commands::run(Command::Flood(args), program()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_are_added_replaced_and_removed_under_load() {
    let args = GrowArgs { common: common(1), kill: true };
    commands::run(Command::Grow(args), program()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_are_restarted_one_by_one_under_load() {
    let (rounds, plain, before) = (1, false, Duration::from_secs(1));
    let (pause, p99_factor_max) = (Duration::ZERO, None);
    let args = RollingArgs { common: common(3), rounds, plain, before, pause, p99_factor_max };
    commands::run(Command::Rolling(args), program()).await.unwrap();
}

/// A node whose disk forgets what it had synced: the harness must find that, or it finds nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_forgets_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let common = Common { keep: Some(folder.path().to_owned()), ..common(1) };
    let args = MassacreArgs { common, rounds: 2, check_every: 2, forget: true };
    let error = commands::run(Command::Massacre(args), program()).await.unwrap_err();
    assert_eq!(error.to_string(), "promises were broken", "{error:#}");
    // The evidence is kept, and says the same when it is checked again.
    let history = folder.path().join("history.jsonl");
    let error = commands::run(Command::Check { history }, program()).await.unwrap_err();
    assert_eq!(error.to_string(), "the history is wrong", "{error:#}");
}
