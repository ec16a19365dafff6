//! Captures the log of the servers on a test's thread.

use std::io;
use std::panic::AssertUnwindSafe;
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

    /// Fails the test if Helix has logged warnings or errors, and prints them.
    ///
    /// Unwinds without a panic message: a backtrace would follow it and hide the lines, which are
    /// the end of the test's output now.
    pub(crate) fn expect_no_warning(&self) {
        let text = self.text();
        let found = warnings(&text);
        if found.is_empty() {
            return;
        }
        println!("warnings or errors were logged:");
        for line in found {
            println!("{line}");
        }
        std::panic::resume_unwind(Box::new("warnings or errors were logged"));
    }
}

/// Returns the lines with warnings and errors of Helix.
fn warnings(text: &str) -> Vec<&str> {
    let is_bad = |line: &&str| line.contains(" WARN helix_") || line.contains(" ERROR helix_");
    text.lines().filter(is_bad).collect()
}

#[test]
fn warnings_and_errors_of_helix_are_found() {
    let (log, _guard) = CapturedLog::capture();
    tracing::info!(target: "helix_server::node", "all is well");
    tracing::warn!(target: "elsewhere", "not of Helix");
    log.expect_no_warning();
    tracing::warn!(target: "helix_server::node", "a warning");
    tracing::error!(target: "helix_wal", "an error");
    let text = log.text();
    assert_eq!(warnings(&text).len(), 2, "{text}");
    let checked = AssertUnwindSafe(|| log.expect_no_warning());
    std::panic::catch_unwind(checked).expect_err("it fails");
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
