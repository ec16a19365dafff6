//! The progress line of long runs.

use std::io::{IsTerminal, stderr};
use std::time::Duration;

use tokio::time::Instant;

use crate::args::GlobalArgs;
use crate::output;
use crate::units;

/// Time of a run before its progress is shown.
const QUIET_MAX: Duration = Duration::from_secs(1);

/// Minimum time between two updates of the line.
const SHOW_INTERVAL: Duration = Duration::from_millis(100);

/// A line on a terminal that shows the progress of a run that takes longer than a second. Hidden if
/// standard error is redirected.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    is_shown: bool,
    verb: &'static str,
    started: Instant,
    shown_at: Option<Instant>,
    progress: Progress,
}

/// Records and bytes that a run has handled so far.
#[derive(Debug, Default)]
struct Progress {
    records: u64,
    bytes: u64,
    /// Work done and work in all, in a unit of the run: records or bytes of input.
    work: Option<(u64, u64)>,
}

impl ProgressLine {
    pub(crate) fn new(global: &GlobalArgs, verb: &'static str) -> Self {
        let is_shown = stderr().is_terminal() && !global.quiet;
        let mut line = Self::hidden();
        (line.is_shown, line.verb) = (is_shown, verb);
        line
    }

    /// Returns a line that is never shown, for runs whose terminal shows other things.
    pub(crate) fn hidden() -> Self {
        let (started, shown_at, progress) = (Instant::now(), None, Progress::default());
        Self { is_shown: false, verb: "", started, shown_at, progress }
    }

    /// Counts progress and updates the line; `detail` is shown in it, as the partition `orders/0`.
    pub(crate) fn add(&mut self, detail: &str, records: u64, bytes: u64) {
        self.progress.records += records;
        self.progress.bytes += bytes;
        if !self.is_shown {
            return;
        }
        let due = self.shown_at.map_or(self.started + QUIET_MAX, |shown| shown + SHOW_INTERVAL);
        if Instant::now() >= due {
            self.shown_at = Some(Instant::now());
            let text = self.progress.text(self.started.elapsed());
            output::set_progress(Some(format!("{} {detail}: {text}", self.verb)));
        }
    }

    /// Sets how much of the work is done, for the time that remains.
    pub(crate) fn set_work(&mut self, done: u64, total: u64) {
        self.progress.work = Some((done.min(total), total));
    }
}

impl Progress {
    fn text(&self, elapsed: Duration) -> String {
        let (records, bytes) = (units::count(self.records), units::bytes(self.bytes));
        let per_second = units::bytes((self.bytes as f64 / elapsed.as_secs_f64()) as u64);
        let mut text = format!("{records} records, {bytes}, {per_second}/s");
        if let Some((done, total)) = self.work.filter(|(done, _)| *done > 0) {
            let left = elapsed.as_secs_f64() * (total - done) as f64 / done as f64;
            let left = units::duration(Duration::from_secs(left.round() as u64));
            // A total that grows meanwhile would show 100 % before the end.
            let percent = (done as f64 / total as f64 * 100.0).floor();
            text += &format!(", {percent} %, {left} left");
        }
        text
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if self.shown_at.is_some() {
            output::set_progress(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_has_the_rate_and_what_is_left_where_it_is_known() {
        let mut progress = Progress { records: 1_200_000, bytes: 64 << 20, work: None };
        let elapsed = Duration::from_secs(4);
        let expected = "1,200,000 records, 64 MiB, 16 MiB/s";
        assert_eq!(progress.text(elapsed), expected);
        progress.work = Some((1, 4));
        assert_eq!(progress.text(elapsed), format!("{expected}, 25 %, 12s left"));
        progress.work = Some((0, 4));
        assert_eq!(progress.text(elapsed), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn line_appears_after_a_second_and_not_more_often_than_it_can_be_read() {
        let mut line = ProgressLine::hidden();
        line.is_shown = true;
        line.add("orders", 1, 10);
        assert!(line.shown_at.is_none());
        tokio::time::advance(QUIET_MAX).await;
        line.add("orders", 1, 10);
        let first = line.shown_at.expect("shown");
        line.add("orders", 1, 10);
        assert_eq!(line.shown_at, Some(first));
        tokio::time::advance(SHOW_INTERVAL).await;
        line.add("orders", 1, 10);
        assert!(line.shown_at > Some(first));
        let mut hidden = ProgressLine::hidden();
        tokio::time::advance(QUIET_MAX).await;
        hidden.add("orders", 1, 10);
        assert!(hidden.shown_at.is_none());
    }
}
