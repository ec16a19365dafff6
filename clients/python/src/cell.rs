//! A handle whose calls take turns, although one of them may wait for records without a limit.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Mutex, MutexGuard, Notify};

use crate::failure::Failed;

/// A reader whose wait for the next event is cancel safe.
pub(crate) trait EventReader: Send {
    /// Event that the reader waits for.
    type Event: Send;

    /// Waits for the next event.
    fn next_event(&mut self) -> impl Future<Output = Self::Event> + Send;
}

/// Holds a reader until it is closed.
pub(crate) struct ReaderCell<T> {
    /// None after it was closed.
    reader: Mutex<Option<T>>,
    /// Calls that want the reader while another one waits for records.
    wanted: AtomicUsize,
    is_wanted: Notify,
}

/// A call that wants the reader.
struct Want<'a>(&'a AtomicUsize);

impl Drop for Want<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<T> ReaderCell<T> {
    pub(crate) fn new(reader: T) -> Self {
        Self {
            reader: Mutex::new(Some(reader)),
            wanted: AtomicUsize::new(0),
            is_wanted: Notify::new(),
        }
    }

    /// Returns the reader for a short call. A call that waits for records makes way.
    pub(crate) async fn take_turn(&self) -> MutexGuard<'_, Option<T>> {
        self.wanted.fetch_add(1, Ordering::SeqCst);
        let _want = Want(&self.wanted);
        self.is_wanted.notify_waiters();
        self.reader.lock().await
    }

    async fn until_wanted(&self) {
        let notified = self.is_wanted.notified();
        let mut notified = std::pin::pin!(notified);
        notified.as_mut().enable();
        if self.wanted.load(Ordering::SeqCst) == 0 {
            notified.await;
        }
    }
}

impl<T: EventReader> ReaderCell<T> {
    /// Waits for the next event, and makes way for other calls meanwhile.
    ///
    /// Returns `None` if the reader is closed. Cancel safe.
    pub(crate) async fn next(&self) -> Option<T::Event> {
        loop {
            let mut reader = self.reader.lock().await;
            let waiting = reader.as_mut()?.next_event();
            tokio::select! {
                biased;
                () = self.until_wanted() => {}
                event = waiting => return Some(event),
            }
        }
    }
}

/// Runs a short call of a reader.
///
/// # Errors
/// Fails if the reader is closed.
pub(crate) async fn with_open<T, R>(
    cell: &ReaderCell<T>,
    what: &'static str,
    call: impl AsyncFnOnce(&mut T) -> Result<R, Failed>,
) -> Result<R, Failed> {
    let mut reader = cell.take_turn().await;
    match reader.as_mut() {
        Some(reader) => call(reader).await,
        None => Err(Failed::Closed(what)),
    }
}

/// Takes the reader out, which closes the handle. Returns `None` if it was closed before.
pub(crate) async fn close<T>(cell: &ReaderCell<T>) -> Option<T> {
    cell.take_turn().await.take()
}
