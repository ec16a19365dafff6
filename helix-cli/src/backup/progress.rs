//! The progress line of long runs.

use std::io::{IsTerminal, stderr};
use std::time::Duration;

use tokio::time::Instant;

use crate::args::GlobalArgs;
use crate::output::write_message;
use crate::units;

/// Minimum time between two updates of the line.
const SHOW_INTERVAL: Duration = Duration::from_millis(100);

/// A line on a terminal that shows the progress of a run. Hidden if standard error is redirected.
#[derive(Debug)]
pub(super) struct ProgressLine {
    is_shown: bool,
    verb: &'static str,
    records: u64,
    bytes: u64,
    shown_at: Option<Instant>,
}

impl ProgressLine {
    pub(super) fn new(global: &GlobalArgs, verb: &'static str) -> Self {
        let is_shown = stderr().is_terminal() && !global.quiet;
        Self { is_shown, verb, records: 0, bytes: 0, shown_at: None }
    }

    /// Counts progress and updates the line; `partition` is shown in it, as `orders/0`.
    pub(super) fn add(&mut self, partition: &str, records: u64, bytes: u64) {
        self.records += records;
        self.bytes += bytes;
        let is_due = self.shown_at.is_none_or(|shown_at| shown_at.elapsed() >= SHOW_INTERVAL);
        if self.is_shown && is_due {
            self.shown_at = Some(Instant::now());
            let (records, bytes) = (units::count(self.records), units::bytes(self.bytes));
            let verb = self.verb;
            write_message(format_args!("\r\x1b[K{verb} {partition}: {records} records, {bytes}"));
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if self.shown_at.is_some() {
            write_message(format_args!("\r\x1b[K"));
        }
    }
}
