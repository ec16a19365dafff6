//! Standard error that never blocks its callers: lines wait in a queue for a thread that writes.
//!
//! The log must not stop the service. A pipe that is not read, a full disk below a redirection and
//! a terminal that is gone cost lines, which are counted, and nothing else. Reasons:
//! `docs/decisions/0034-lossy-log.md`.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use helix_proto::shown;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use tracing_subscriber::fmt::MakeWriter;

/// Bytes of lines that may wait: minutes of a busy log.
const QUEUE_BYTES_MAX: usize = 1 << 20;

/// Bytes that a waiting line takes beside its text.
const LINE_BYTES: usize = 64;

/// The process's lines, once [`start`] has been called.
static LINES: OnceLock<Arc<LineQueue>> = OnceLock::new();

/// Starts the thread that writes. Later calls do nothing.
pub(crate) fn start() {
    let lines = LINES.get_or_init(Arc::default).clone();
    if lines.lock().is_started {
        return;
    }
    let spawned = thread::Builder::new().name("stderr".to_owned());
    let spawned = spawned.spawn({
        let lines = lines.clone();
        move || lines.write_all_to(&mut StandardError)
    });
    // Without the thread every line is dropped and counted.
    lines.lock().is_started = spawned.is_ok();
}

/// Queues one line, without its newline.
pub(crate) fn write_line(text: &str) {
    if let Some(lines) = LINES.get() {
        lines.push(format!("{}\n", shown::lines(text)).as_bytes());
    }
}

/// Waits until the lines so far are written or dropped, for at most `wait_max`.
pub(crate) fn flush(wait_max: Duration) {
    if let Some(lines) = LINES.get() {
        lines.flush(wait_max);
    }
}

/// Returns the number of lines that were dropped: the queue was full, or a write failed.
pub(crate) fn dropped_lines() -> u64 {
    LINES.get().map_or(0, |lines| lines.dropped.load(Ordering::Relaxed))
}

/// Writer for `tracing_subscriber`: each write is one line. Never fails.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Some(lines) = LINES.get() {
            match escaped(line) {
                Some(escaped) => lines.push(escaped.as_bytes()),
                None => lines.push(line),
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns a line with its controls escaped, so that text of a client neither forges lines nor
/// controls a terminal; `None` if it has none. Colours of the log stay: the log escapes those of
/// others.
fn escaped(line: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(line);
    let body = text.strip_suffix('\n').unwrap_or(&text);
    if !body.contains(shown::is_escaped) && matches!(text, Cow::Borrowed(_)) {
        return None;
    }
    if body.starts_with('{') {
        return Some(json_escaped(body) + "\n");
    }
    let mut parts = body.split("\x1b[");
    let mut escaped = shown::one_line(parts.next().unwrap_or_default()).into_owned();
    for part in parts {
        let digits = part.find(|c: char| !c.is_ascii_digit() && c != ';').unwrap_or(part.len());
        escaped += if part[digits..].starts_with('m') { "\x1b[" } else { "\\u{1b}[" };
        escaped += &shown::one_line(part);
    }
    Some(escaped + "\n")
}

/// Escapes what JSON allows in a string and a terminal should not get.
fn json_escaped(line: &str) -> String {
    let mut escaped = String::with_capacity(line.len());
    for character in line.chars() {
        if shown::is_escaped(character) {
            for unit in character.encode_utf16(&mut [0; 2]) {
                escaped += &format!("\\u{unit:04x}");
            }
        } else {
            escaped.push(character);
        }
    }
    escaped
}

impl MakeWriter<'_> for LogWriter {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        Self
    }
}

/// Lines on their way to standard error, bounded in bytes.
#[derive(Debug, Default)]
struct LineQueue {
    waiting: Mutex<WaitingLines>,
    /// Notified when a line arrives, and when the last one has been written.
    changed: Condvar,
    dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct WaitingLines {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    is_started: bool,
    /// A line has left the queue and is being written.
    is_writing: bool,
}

/// Next task of the thread.
enum NextLine {
    Write(Vec<u8>),
    /// The queue is empty, and this many lines were dropped since the last report.
    Report(u64),
}

impl LineQueue {
    fn push(&self, line: &[u8]) {
        let mut waiting = self.lock();
        let bytes = line.len() + LINE_BYTES;
        if !waiting.is_started || waiting.bytes + bytes > QUEUE_BYTES_MAX {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        waiting.bytes += bytes;
        waiting.lines.push_back(line.to_vec());
        drop(waiting);
        self.changed.notify_all();
    }

    fn flush(&self, wait_max: Duration) {
        let is_busy = |waiting: &mut WaitingLines| {
            waiting.is_started && (waiting.is_writing || !waiting.lines.is_empty())
        };
        // Ignored: whether time or lines ran out, the caller continues.
        let _ = self.changed.wait_timeout_while(self.lock(), wait_max, is_busy);
    }

    /// Writes lines for as long as the process runs.
    fn write_all_to(&self, sink: &mut impl Write) {
        let mut reported = 0;
        let mut last = Ok(());
        loop {
            // Not after a failure: the report would fail too, and be dropped, again and again.
            match self.next(last.is_ok().then_some(reported)) {
                NextLine::Write(line) => {
                    last = write_whole(sink, &line, &last);
                    if last.is_err() {
                        self.dropped.fetch_add(1, Ordering::Relaxed);
                    }
                }
                NextLine::Report(dropped) => {
                    reported += dropped;
                    tracing::warn!(dropped, "dropped log lines: standard error did not take them");
                }
            }
        }
    }

    /// Waits for a line; with `reported`, also for dropped lines that were not reported yet.
    fn next(&self, reported: Option<u64>) -> NextLine {
        let mut waiting = self.lock();
        waiting.is_writing = false;
        loop {
            if let Some(line) = waiting.lines.pop_front() {
                waiting.bytes -= line.len() + LINE_BYTES;
                waiting.is_writing = true;
                return NextLine::Write(line);
            }
            let dropped = self.dropped.load(Ordering::Relaxed);
            if let Some(unreported) = reported.and_then(|reported| dropped.checked_sub(reported))
                && unreported > 0
            {
                return NextLine::Report(unreported);
            }
            self.changed.notify_all();
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ignores poison: the log must work while another thread panics.
    fn lock(&self) -> MutexGuard<'_, WaitingLines> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A write that failed; `is_torn` if a part of its line was written.
#[derive(Debug)]
struct WriteFailed {
    is_torn: bool,
}

/// Writes a line, on a line of its own if the one before is torn.
fn write_whole(
    sink: &mut impl Write,
    line: &[u8],
    before: &Result<(), WriteFailed>,
) -> Result<(), WriteFailed> {
    let mut is_torn = matches!(before, Err(WriteFailed { is_torn: true }));
    if is_torn {
        is_torn = sink.write(b"\n").map_or(true, |written| written == 0);
    }
    let mut rest = line;
    while !is_torn && !rest.is_empty() {
        match sink.write(rest) {
            Ok(written @ 1..) => rest = &rest[written..],
            Ok(0) | Err(_) => return Err(WriteFailed { is_torn: rest.len() < line.len() }),
        }
    }
    if is_torn { Err(WriteFailed { is_torn }) } else { Ok(()) }
}

/// The file descriptor itself: the lock of [`io::Stderr`] would be held during a blocked write.
struct StandardError;

impl Write for StandardError {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let stderr = rustix::stdio::stderr();
        loop {
            match rustix::io::write(stderr, bytes) {
                Err(Errno::INTR) => {}
                // Another process may have made the shared pipe or terminal non-blocking.
                Err(Errno::AGAIN) => {
                    poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], None)?;
                }
                written => return Ok(written?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Sink whose results the test gives one by one; it waits for each.
    struct ScriptedSink {
        results: mpsc::Receiver<io::Result<usize>>,
        written: mpsc::Sender<Vec<u8>>,
    }

    impl Write for ScriptedSink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let written = self.results.recv().unwrap_or(Ok(usize::MAX))?.min(bytes.len());
            // Ignored: the test has ended.
            let _ = self.written.send(bytes[..written].to_vec());
            Ok(written)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    type Script = (mpsc::Sender<io::Result<usize>>, mpsc::Receiver<Vec<u8>>);

    fn started() -> (Arc<LineQueue>, Script) {
        let queue = Arc::new(LineQueue::default());
        queue.lock().is_started = true;
        let (sender, results) = mpsc::channel();
        let (written, receiver) = mpsc::channel();
        thread::spawn({
            let queue = queue.clone();
            move || queue.write_all_to(&mut ScriptedSink { results, written })
        });
        (queue, (sender, receiver))
    }

    fn full() -> io::Result<usize> {
        Err(io::ErrorKind::StorageFull.into())
    }

    #[test]
    fn a_line_of_the_log_stays_one_and_controls_no_terminal() {
        assert_eq!(escaped("plain größe\n".as_bytes()), None);
        let forged = "refused client=x\r\n2026 INFO forged\x1b[2J\u{9b}1m\u{202e}\u{2028}\n";
        let expected =
            "refused client=x\\r\\n2026 INFO forged\\u{1b}[2J\\u{9b}1m\\u{202e}\\u{2028}\n";
        assert_eq!(escaped(forged.as_bytes()).unwrap(), expected);
        let json = serde_json::json!({ "user_agent": "a\x1b\n\u{9b}1m\u{202e}\u{e0001}" });
        let shown = escaped(format!("{json}\n").as_bytes()).unwrap();
        assert!(!shown.trim_end().contains(shown::is_escaped), "{shown}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), json);
        let coloured = "\x1b[32m INFO\x1b[0m serving\n";
        assert_eq!(escaped(coloured.as_bytes()).unwrap(), coloured);
    }

    #[test]
    fn lines_are_written_in_order_and_flushed() {
        let (queue, (results, written)) = started();
        drop(results);
        for number in 0..100 {
            queue.push(format!("{number}\n").as_bytes());
        }
        queue.flush(Duration::from_secs(60));
        let written: Vec<_> = written.try_iter().collect();
        let expected: Vec<_> = (0..100).map(|number| format!("{number}\n").into_bytes()).collect();
        assert_eq!(written, expected);
        assert_eq!(queue.dropped.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn blocked_sink_costs_lines_and_bounded_memory_only() {
        let (queue, (results, written)) = started();
        let line = vec![b'x'; (1 << 10) - LINE_BYTES];
        for _ in 0..2048 {
            queue.push(&line);
        }
        assert!(queue.lock().bytes <= QUEUE_BYTES_MAX);
        let dropped = queue.dropped.load(Ordering::Relaxed);
        assert!((1023..=1024).contains(&dropped), "{dropped} dropped");
        queue.flush(Duration::from_millis(1));
        assert!(!queue.lock().lines.is_empty(), "the flush ended before the lines did");
        drop(results);
        queue.flush(Duration::from_secs(60));
        assert_eq!(written.try_iter().count() as u64 + dropped, 2048);
    }

    #[test]
    fn failed_write_drops_its_line_and_ends_a_torn_one() {
        let (queue, (results, written)) = started();
        for line in ["lost\n", "torn\n", "lost too\n", "whole\n"] {
            queue.push(line.as_bytes());
        }
        for result in [full(), Ok(2), full(), full(), Ok(usize::MAX), Ok(usize::MAX)] {
            results.send(result).unwrap();
        }
        drop(results);
        queue.flush(Duration::from_secs(60));
        let written: Vec<u8> = written.try_iter().flatten().collect();
        assert_eq!(String::from_utf8(written).unwrap(), "to\nwhole\n");
        assert_eq!(queue.dropped.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn queue_without_its_thread_drops_every_line() {
        let queue = LineQueue::default();
        queue.push(b"a\n");
        queue.flush(Duration::from_secs(60));
        assert_eq!(queue.dropped.load(Ordering::Relaxed), 1);
    }
}
