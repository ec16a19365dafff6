//! The history as it grows: everyone who does or is told something writes a line, under one lock,
//! so that the order of the lines is an order in time. It is judged as it grows: each look takes
//! the lines since the last one, and leaves them in a file. Every round reads all replicas whole,
//! so that a long run has more lines than fit into memory.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use helix_checker::{Checker, Event, Line, Verdict};
use tokio::time::Instant;

/// Lines after which a run must come to its end: some 5 GiB of a file.
const LINES_MAX: usize = 64_000_000;

/// See the module.
#[derive(Debug)]
pub(crate) struct Recorder {
    started: Instant,
    history: Mutex<History>,
}

#[derive(Debug)]
struct History {
    /// Those that are not in the file.
    lines: Vec<Line>,
    checker: Checker,
    written: usize,
    path: PathBuf,
    file: Option<BufWriter<File>>,
}

impl Recorder {
    /// With the file for the history, which is made when something is to be in it.
    pub(crate) fn new(path: PathBuf) -> Self {
        let (lines, checker) = (Vec::new(), Checker::default());
        let history = History { lines, checker, written: 0, path, file: None };
        Self { started: Instant::now(), history: Mutex::new(history) }
    }

    pub(crate) fn add(&self, event: Event) {
        self.add_all([event]);
    }

    /// Adds lines that follow one another.
    pub(crate) fn add_all(&self, events: impl IntoIterator<Item = Event>) {
        let mut history = self.lock();
        let at_us = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        history.lines.extend(events.into_iter().map(|event| Line { at_us, event }));
    }

    /// Whether no more should be begun.
    pub(crate) fn is_full(&self) -> bool {
        let history = self.lock();
        history.written + history.lines.len() >= LINES_MAX
    }

    /// Judges what there is.
    pub(crate) fn check(&self) -> anyhow::Result<Verdict> {
        let mut history = self.lock();
        let History { lines, checker, .. } = &mut *history;
        lines.iter().for_each(|line| checker.on(&line.event));
        let verdict = checker.verdict();
        history.write()?;
        Ok(verdict)
    }

    /// Has all of it in the file.
    pub(crate) fn save(&self) -> anyhow::Result<PathBuf> {
        let mut history = self.lock();
        history.write()?;
        Ok(history.path.clone())
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        // Lines are only ever added; a panic elsewhere leaves whole ones.
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl History {
    /// One JSON object per line.
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

/// Reads a history that was saved.
pub(crate) fn load(path: &Path) -> anyhow::Result<Vec<Line>> {
    let file = File::options().read(true).open(path);
    let file = BufReader::new(file.with_context(|| format!("open {}", path.display()))?);
    let lines = file.lines().zip(1..).map(|(line, number)| {
        serde_json::from_str(&line?).with_context(|| format!("line {number} is no event"))
    });
    lines.collect()
}
