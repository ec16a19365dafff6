//! Records the history of all clients and judges it incrementally.
//!
//! All clients append under one lock, so the order of the lines is an order in time. Each check
//! processes the lines since the last check and moves them to a file, because every round reads all
//! replicas and a long run does not fit into memory.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use helix_checker::{HistoryChecker, HistoryEvent, HistoryLine, HistoryVerdict};
use tokio::time::Instant;

/// Lines after which a run must end; about 5 GiB on disk.
const LINES_MAX: usize = 64_000_000;

/// Records and judges the history.
#[derive(Debug)]
pub(crate) struct ChaosRecorder {
    started: Instant,
    history: Mutex<History>,
}

#[derive(Debug)]
struct History {
    /// Lines that are not in the file yet.
    lines: Vec<HistoryLine>,
    checker: HistoryChecker,
    written: usize,
    path: PathBuf,
    file: Option<BufWriter<File>>,
}

impl ChaosRecorder {
    /// Creates a recorder; the file is created with the first lines.
    pub(crate) fn new(path: PathBuf) -> Self {
        let (lines, checker) = (Vec::new(), HistoryChecker::default());
        let history = History { lines, checker, written: 0, path, file: None };
        Self { started: Instant::now(), history: Mutex::new(history) }
    }

    pub(crate) fn add(&self, event: HistoryEvent) {
        self.add_all([event]);
    }

    /// Adds consecutive lines.
    pub(crate) fn add_all(&self, events: impl IntoIterator<Item = HistoryEvent>) {
        let mut history = self.lock();
        let at_us = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        history.lines.extend(events.into_iter().map(|event| HistoryLine { at_us, event }));
    }

    /// Reports whether the run must end.
    pub(crate) fn is_full(&self) -> bool {
        let history = self.lock();
        history.written + history.lines.len() >= LINES_MAX
    }

    /// Judges the lines so far.
    pub(crate) fn check(&self) -> anyhow::Result<HistoryVerdict> {
        let mut history = self.lock();
        let History { lines, checker, .. } = &mut *history;
        lines.iter().for_each(|line| checker.on(&line.event));
        let verdict = checker.verdict();
        history.write()?;
        Ok(verdict)
    }

    /// Writes all lines to the file and returns its path.
    pub(crate) fn save(&self) -> anyhow::Result<PathBuf> {
        let mut history = self.lock();
        history.write()?;
        Ok(history.path.clone())
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        // Lines are only appended, so a panic elsewhere leaves them whole.
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl History {
    /// Writes one JSON object per line.
    fn write(&mut self) -> anyhow::Result<()> {
        let shown = self.path.display().to_string();
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                let file = File::options().create(true).write(true).truncate(true).open(&self.path);
                none.insert(BufWriter::new(file.with_context(|| format!("open {shown}"))?))
            }
        };
        for line in &self.lines {
            serde_json::to_writer(&mut *file, line)?;
            file.write_all(b"\n")?;
        }
        file.flush().context("write the history")?;
        self.written += self.lines.len();
        self.lines.clear();
        Ok(())
    }
}

/// Reads a saved history.
pub(crate) fn load(path: &Path) -> anyhow::Result<Vec<HistoryLine>> {
    let file = File::options().read(true).open(path);
    let file = BufReader::new(file.with_context(|| format!("open {}", path.display()))?);
    let lines = file.lines().zip(1..).map(|(line, number)| {
        serde_json::from_str(&line?).with_context(|| format!("line {number} is not an event"))
    });
    lines.collect()
}
