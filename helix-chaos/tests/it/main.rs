//! The harness on real nodes: a short run of every kind of fault that must pass, and a cluster
//! that loses what it had synced, which must not.

#![allow(clippy::unwrap_used)] // Helpers are no tests to clippy.

use std::path::PathBuf;
use std::time::Duration;

use helix_chaos::commands::{self, Command, Common, MassacreArgs, RetriesArgs, RunArgs};

fn program() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_helix-chaos"))
}

fn common(nodes: u64) -> Common {
    let seed = std::env::var("HELIX_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(7);
    println!("seed {seed} (set HELIX_SEED to repeat or vary)");
    let duration_max = Duration::from_secs(240);
    Common { nodes, seed, topic_partitions: 6, duration_max, keep: None }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_pauses_and_partitions_break_no_promise() {
    let (kills, pauses, partitions) = (6, 3, 3);
    let (common, check_every, short) = (common(3), 100, true);
    let args = RunArgs { common, kills, pauses, partitions, check_every, short };
    commands::run(Command::Run(args), program()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forced_retries_make_no_copy() {
    let args = RetriesArgs { common: common(1), count: 20 };
    commands::run(Command::Retries(args), program()).await.unwrap();
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
