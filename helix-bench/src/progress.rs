//! Progress on standard error: a line that is rewritten on a terminal, one line a step elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, interval};

use crate::budget::PhaseLimits;
use crate::format::grouped;

/// Interval between updates of a line.
const UPDATE_INTERVAL: Duration = Duration::from_millis(200);

static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Turns progress off for this process.
pub(crate) fn silence() {
    IS_QUIET.store(true, Ordering::Relaxed);
}

/// Prints the start of a step.
pub(crate) fn step(text: &str) {
    if !IS_QUIET.load(Ordering::Relaxed) {
        // Ignored: progress is only informative.
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

/// Line that is rewritten until this is dropped, if standard error is a terminal.
#[derive(Debug)]
pub(crate) struct LiveLine(Option<JoinHandle<()>>);

impl LiveLine {
    /// Shows the text for the time since now. Must be called within a runtime.
    pub(crate) fn show(text: impl Fn(Duration) -> String + Send + 'static) -> Self {
        if IS_QUIET.load(Ordering::Relaxed) || !std::io::stderr().is_terminal() {
            return Self(None);
        }
        Self(Some(tokio::spawn(async move {
            let mut ticks = interval(UPDATE_INTERVAL);
            let start = Instant::now();
            loop {
                ticks.tick().await;
                rewrite(&text(start.elapsed()));
            }
        })))
    }
}

impl Drop for LiveLine {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
            rewrite("");
        }
    }
}

fn rewrite(text: &str) {
    let mut stderr = std::io::stderr();
    // Ignored: progress is only informative.
    let _ = write!(stderr, "\r\x1b[K{text}");
    let _ = stderr.flush();
}

/// Describes a phase: records, rate and the time that is left.
pub(crate) fn records_text(
    what: &str,
    records: u64,
    elapsed: Duration,
    limits: PhaseLimits,
) -> String {
    let rate = records as f64 / elapsed.as_secs_f64().max(1e-9);
    let by_time = limits.duration.map(|duration| duration.saturating_sub(elapsed).as_secs_f64());
    let by_records = limits
        .records
        .filter(|_| records > 0)
        .map(|limit| limit.saturating_sub(records) as f64 / rate);
    let left = by_time.into_iter().chain(by_records).reduce(f64::min);
    let left = left.map_or_else(String::new, |left| format!(", {left:.0} s left"));
    format!("{what}: {} records, {}/s{left}", grouped(records as f64), grouped(rate.round()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_is_that_of_the_limit_that_is_reached_first() {
        let limits = |records, seconds: Option<u64>| PhaseLimits {
            records,
            duration: seconds.map(Duration::from_secs),
        };
        let text = |limits| records_text("measuring", 2000, Duration::from_secs(2), limits);
        assert_eq!(text(limits(None, Some(10))), "measuring: 2,000 records, 1,000/s, 8 s left");
        assert_eq!(
            text(limits(Some(5000), Some(10))),
            "measuring: 2,000 records, 1,000/s, 3 s left"
        );
        assert_eq!(text(limits(None, None)), "measuring: 2,000 records, 1,000/s");
        let none = records_text("measuring", 0, Duration::ZERO, limits(Some(5), None));
        assert_eq!(none, "measuring: 0 records, 0/s");
    }
}
