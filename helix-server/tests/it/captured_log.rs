//! Captures the log of the servers on a test's thread.

use std::io;
use std::sync::{Arc, LazyLock, Mutex};

use tracing::Dispatch;
use tracing_subscriber::fmt::MakeWriter;

/// A second subscriber. With a single one, tracing asks only the subscriber of the thread that
/// reaches a call site first, and a thread without any disables the call site for all threads.
static SECOND: LazyLock<Dispatch> =
    LazyLock::new(|| Dispatch::new(tracing_subscriber::fmt().with_writer(io::sink).finish()));

#[derive(Debug, Clone, Default)]
pub(crate) struct CapturedLog(Arc<Mutex<Vec<u8>>>);

impl CapturedLog {
    pub(crate) fn capture() -> (Self, tracing::subscriber::DefaultGuard) {
        LazyLock::force(&SECOND);
        let log = Self::default();
        let subscriber =
            tracing_subscriber::fmt().with_writer(log.clone()).with_ansi(false).finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl io::Write for CapturedLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for CapturedLog {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}
