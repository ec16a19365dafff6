//! The pause between two turns of a task: until the runtime has polled the tasks that were ready,
//! and looked for sockets that became ready meanwhile.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use tokio::task::yield_now;

/// Pause between two turns. Other wake-ups of the task do not shorten it.
///
/// A task that only wakes itself runs again before the runtime looks for ready sockets, which it
/// does after 61 tasks if some are always ready. And a connection's task is also woken by its
/// calls: with a turn for each of those wake-ups it would read all that its client sends, and the
/// calls of other clients would wait behind all of it.
#[derive(Debug)]
pub(super) struct TurnPause {
    ended: Arc<PauseEnd>,
    waker: Waker,
    has_begun: bool,
}

#[derive(Debug, Default)]
struct PauseEnd {
    is_over: AtomicBool,
    task: AtomicWaker,
}

impl Wake for PauseEnd {
    fn wake(self: Arc<Self>) {
        self.is_over.store(true, Ordering::Release);
        self.task.wake();
    }
}

impl TurnPause {
    pub(super) fn new() -> Self {
        let ended = Arc::new(PauseEnd::default());
        let waker = Waker::from(ended.clone());
        Self { ended, waker, has_begun: false }
    }

    /// Begins a pause at the first call; ready, once, after it.
    pub(super) fn poll(&mut self, context: &Context<'_>) -> Poll<()> {
        self.ended.task.register(context.waker());
        if !self.has_begun {
            self.has_begun = true;
            self.ended.is_over.store(false, Ordering::Release);
            // Hands the waker to the runtime, which wakes it at the end of the pause.
            let _ = pin!(yield_now()).poll(&mut Context::from_waker(&self.waker));
        }
        if !self.ended.is_over.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        self.has_begun = false;
        Poll::Ready(())
    }
}
