//! The history as it grows: everyone who does or is told something writes a line, under one lock,
//! so that the order of the lines is an order in time. Memory until it is needed as a file. It is
//! judged as it grows: each look takes the lines since the last one.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use helix_checker::{Checker, Event, Line, Verdict};
use tokio::time::Instant;

/// Lines after which a run must come to its end: about 1 GiB of memory with the checker's own.
const LINES_MAX: usize = 8_000_000;

/// See the module.
#[derive(Debug)]
pub(crate) struct Recorder {
    started: Instant,
    history: Mutex<History>,
}

#[derive(Debug, Default)]
struct History {
    lines: Vec<Line>,
    checker: Checker,
    /// Lines that the checker has taken.
    checked: usize,
}

impl Recorder {
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), history: Mutex::default() }
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
        self.lock().lines.len() >= LINES_MAX
    }

    pub(crate) fn check(&self) -> Verdict {
        let History { lines, checker, checked } = &mut *self.lock();
        lines[*checked..].iter().for_each(|line| checker.on(&line.event));
        *checked = lines.len();
        checker.verdict()
    }

    /// Writes one JSON object per line.
    pub(crate) fn save(&self, path: &Path) -> anyhow::Result<()> {
        let file = File::options().create(true).write(true).truncate(true).open(path);
        let mut file = BufWriter::new(file.with_context(|| format!("open {}", path.display()))?);
        for line in &self.lock().lines {
            serde_json::to_writer(&mut file, line)?;
            file.write_all(b"\n")?;
        }
        file.flush().context("write the history")
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        // Lines are only ever added; a panic elsewhere leaves whole ones.
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
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
