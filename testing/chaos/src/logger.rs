//! Progress log: one line per event, with the time since the start.

use std::time::Duration;

use tokio::time::Instant;

use crate::output::{print, print_error};

/// Durations from here on are logged.
const LONG: Duration = Duration::from_secs(3);

/// Writes the progress log.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Logger {
    started: Instant,
    /// Logs to standard error, because standard output carries the result.
    to_stderr: bool,
}

impl Logger {
    pub(crate) fn new(to_stderr: bool) -> Self {
        Self { started: Instant::now(), to_stderr }
    }

    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    pub(crate) fn log(&self, what: impl std::fmt::Display) {
        let at = self.started.elapsed().as_secs_f64();
        if self.to_stderr {
            print_error(format_args!("{at:9.3} {what}"));
        } else {
            print(format_args!("{at:9.3} {what}"));
        }
    }

    /// Logs how long something took if it took long.
    pub(crate) fn log_if_slow(&self, what: &str, begin: Instant) {
        let took = begin.elapsed();
        if took >= LONG {
            self.log(format_args!("{what} after {} ms", took.as_millis()));
        }
    }
}
