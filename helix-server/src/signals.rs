//! Signals that ask a process to stop: SIGTERM, SIGINT and SIGHUP.
//!
//! A thread of its own watches them, so that neither a blocked write nor a busy runtime delays the
//! second signal or the deadline.

use std::io;
use std::thread;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::process;

/// Signals within this time of the first one belong to it. `timeout` and other supervisors signal
/// both the process and its group.
const SAME_REQUEST: Duration = Duration::from_millis(100);

/// Time for the process to stop.
#[derive(Debug, Clone, Copy)]
pub struct StopBounds {
    /// From the first signal on.
    pub stop_max: Duration,
    /// From the second signal on.
    pub hurried_max: Duration,
}

/// Reason why a process that was asked to stop is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopOverdue {
    /// [`StopBounds::stop_max`] has passed.
    Deadline,
    /// A second SIGTERM or SIGINT, and [`StopBounds::hurried_max`] has passed.
    SecondSignal,
}

/// Reports requests to stop the process: holds their number so far, at most 2.
#[derive(Debug, Clone)]
pub struct StopSignals(watch::Receiver<u8>);

impl StopSignals {
    /// Starts to watch. `end` is called if the process does not stop in time; it ends the process.
    ///
    /// SIGHUP is not watched if the process was started with it ignored, as by `nohup`.
    ///
    /// # Errors
    /// The signals cannot be watched, or the thread cannot be started.
    pub fn watch(
        bounds: StopBounds,
        end: impl FnOnce(StopOverdue) + Send + 'static,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut signals = {
            let _context = runtime.enter();
            WatchedSignals::new()?
        };
        let (requests, receiver) = watch::channel(0);
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            runtime.block_on(async {
                signals.next().await;
                requests.send_replace(1);
                end(signals.overdue(bounds, &requests).await);
            });
        })?;
        Ok(Self(receiver))
    }

    /// Resolves once the process has been asked to stop.
    pub async fn stopped(&self) {
        self.requested(1).await;
    }

    /// Resolves once the process has been asked to stop a second time.
    pub async fn hurried(&self) {
        self.requested(2).await;
    }

    async fn requested(&self, times: u8) {
        // Ignored: the sender is dropped only with the process.
        let _ = self.0.clone().wait_for(|requests| *requests >= times).await;
    }
}

struct WatchedSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Option<Signal>,
}

impl WatchedSignals {
    fn new() -> io::Result<Self> {
        let hangup = match process::ignores_hangup() {
            true => None,
            false => Some(signal(SignalKind::hangup())?),
        };
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup,
        })
    }

    /// Waits for any of the signals.
    async fn next(&mut self) {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = hangup => {}
        }
    }

    /// Waits for a signal of an operator. SIGHUP is none: a session that ends sends it after, or
    /// right before, SIGTERM.
    async fn next_request(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Resolves when the process has had its time.
    async fn overdue(&mut self, bounds: StopBounds, requests: &watch::Sender<u8>) -> StopOverdue {
        let second = async {
            sleep(SAME_REQUEST).await;
            while self.next_request().now_or_never().is_some() {}
            self.next_request().await;
        };
        overdue(bounds, second, requests).await
    }
}

/// Resolves when the process has had its time; `second` resolves at a second signal.
async fn overdue(
    bounds: StopBounds,
    second: impl Future<Output = ()>,
    requests: &watch::Sender<u8>,
) -> StopOverdue {
    if timeout(bounds.stop_max, second).await.is_err() {
        return StopOverdue::Deadline;
    }
    requests.send_replace(2);
    sleep(bounds.hurried_max).await;
    StopOverdue::SecondSignal
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::Instant;

    use super::*;

    const BOUNDS: StopBounds =
        StopBounds { stop_max: Duration::from_secs(28), hurried_max: Duration::from_secs(1) };

    const TIMER_PRECISION: Duration = Duration::from_millis(10);

    #[tokio::test(start_paused = true)]
    async fn stop_ends_at_its_deadline_or_soon_after_a_second_signal() {
        let (requests, received) = watch::channel(1);
        let begin = Instant::now();
        assert_eq!(overdue(BOUNDS, pending(), &requests).await, StopOverdue::Deadline);
        let is_after = |wait: Duration| begin.elapsed().abs_diff(wait) < TIMER_PRECISION;
        assert!(is_after(BOUNDS.stop_max) && *received.borrow() == 1, "{:?}", begin.elapsed());

        let second = sleep(Duration::from_secs(2));
        assert_eq!(overdue(BOUNDS, second, &requests).await, StopOverdue::SecondSignal);
        let all = BOUNDS.stop_max + Duration::from_secs(2) + BOUNDS.hurried_max;
        assert!(is_after(all) && *received.borrow() == 2, "{:?}", begin.elapsed());
    }
}
