//! `helix backup` and `helix restore`: topics as files in a folder, online, and back.
//! A client like any other: what it reads was acknowledged, and what it writes is.

pub(crate) mod batches;
pub(crate) mod create;
pub(crate) mod manifest;
pub(crate) mod restore;
pub(crate) mod verify;

use std::io::{IsTerminal, stderr};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use tokio::time::Instant;

use crate::args::{BackupArgs, BackupCommand, Global};
use crate::exit::{Exit, Failure};
use crate::units;
use manifest::{Manifest, Topic};

/// How often progress is shown.
const SHOW_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) async fn run(global: &Global, args: &BackupArgs) -> anyhow::Result<()> {
    match (&args.command, &args.create.dir) {
        (Some(BackupCommand::Verify { dir, topics }), _) => verify::run(global, dir, topics),
        (None, Some(dir)) => create::run(global, dir, &args.create.topics).await,
        (None, None) => {
            let failure = Failure::new(Exit::Usage, "a backup needs a folder");
            Err(failure.hint("helix backup DIR").into())
        }
    }
}

/// The backup in a folder.
///
/// # Errors
/// There is none, or it has not come to its end.
fn load(folder: &Path) -> anyhow::Result<Manifest> {
    let Some(manifest) = Manifest::load(folder)? else {
        let what = format!("{} holds no backup", folder.display());
        return Err(Failure::new(Exit::NotFound, what).hint("helix backup DIR").into());
    };
    if !manifest.is_complete {
        let what = format!("the backup in {} was interrupted", folder.display());
        let failure = Failure::new(Exit::Precondition, what);
        let hint = format!("helix backup {}   goes on with it", folder.display());
        return Err(failure.hint(hint).into());
    }
    Ok(manifest)
}

/// The named topics of a backup; none named: all.
///
/// # Errors
/// One of them is not in it.
fn select(manifest: &Manifest, names: &[String]) -> anyhow::Result<Vec<Topic>> {
    if names.is_empty() {
        return Ok(manifest.topics.clone());
    }
    let find = |name: &String| {
        let found = manifest.topic(name).cloned();
        found.ok_or_else(|| {
            let what = format!("the backup has no topic {name:?}");
            let known: Vec<_> = manifest.topics.iter().map(|topic| topic.name.as_str()).collect();
            Failure::new(Exit::NotFound, what).why(format!("it has {}", known.join(", ")))
        })
    };
    let found: Result<_, _> = names.iter().map(find).collect();
    found.context("look for topics in the backup")
}

/// One line at a terminal that says how far a long run is. Nothing anywhere else.
#[derive(Debug)]
struct Progress {
    is_shown: bool,
    verb: &'static str,
    records: u64,
    bytes: u64,
    shown_at: Option<Instant>,
}

impl Progress {
    fn new(global: &Global, verb: &'static str) -> Self {
        let is_shown = stderr().is_terminal() && !global.quiet;
        Self { is_shown, verb, records: 0, bytes: 0, shown_at: None }
    }

    fn add(&mut self, place: &str, records: u64, bytes: u64) {
        self.records += records;
        self.bytes += bytes;
        let is_due = self.shown_at.is_none_or(|shown_at| shown_at.elapsed() >= SHOW_INTERVAL);
        if self.is_shown && is_due {
            self.shown_at = Some(Instant::now());
            let (records, bytes) = (units::count(self.records), units::bytes(self.bytes));
            eprint!("\r\x1b[K{} {place}: {records} records, {bytes}", self.verb);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown_at.is_some() {
            eprint!("\r\x1b[K");
        }
    }
}
