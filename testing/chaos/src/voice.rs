//! What is said while things happen: one line per event, with the time since the start.

use std::time::Duration;

use tokio::time::Instant;

/// What takes longer than this is worth a line.
const LONG: Duration = Duration::from_secs(3);

/// See the module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Voice {
    started: Instant,
    /// Standard output is for a result that is read by a program.
    is_aside: bool,
}

impl Voice {
    pub(crate) fn new(is_aside: bool) -> Self {
        Self { started: Instant::now(), is_aside }
    }

    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    pub(crate) fn say(&self, what: impl std::fmt::Display) {
        let at = self.started.elapsed().as_secs_f64();
        if self.is_aside {
            eprintln!("{at:9.3} {what}");
        } else {
            println!("{at:9.3} {what}");
        }
    }

    /// Says how long it took until something was so, if that was long.
    pub(crate) fn say_if_long(&self, what: &str, begin: Instant) {
        let took = begin.elapsed();
        if took >= LONG {
            self.say(format_args!("{what} after {} ms", took.as_millis()));
        }
    }
}
