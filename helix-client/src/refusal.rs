//! Problems of TLS that end a connection after it was opened.
//!
//! A node that requires TLS, or another certificate, says so once the connection exists. HTTP/2
//! passes the reason on only to calls that were sent by then; others end as cancelled. So the
//! connection itself notes what it reads, and a call that fails with it takes its error from there.

use std::error::Error as StdError;
use std::fmt;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use helix_tls::{PLAINTEXT_REFUSAL, TlsSocket, describe_tls_error};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::ConnectError;

/// Bytes of a server within which a refusal ends: an empty SETTINGS frame, and a GOAWAY frame.
const REFUSAL_BYTES_MAX: usize = 9 + 9 + 8 + PLAINTEXT_REFUSAL.len();

/// Bytes that are read for a reason after a write has failed.
const LAST_BYTES_MAX: usize = 4 << 10;

/// The connections of a channel, and why the last refused one was refused.
#[derive(Debug, Clone, Default)]
pub(crate) struct RefusalNote(Arc<Mutex<NotedConnections>>);

#[derive(Debug, Default)]
struct NotedConnections {
    opened: u64,
    refused: u64,
    /// Those that were not refused.
    ended: u64,
    reason: String,
}

/// The connections of a channel when a call began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallMark {
    refused: u64,
    ended: u64,
}

/// Failure of a call whose connection the node refused.
#[derive(Debug)]
pub(crate) struct RefusedConnection {
    pub(crate) reason: String,
    /// True if the call cannot have been sent on a connection that was not refused.
    pub(crate) was_not_applied: bool,
}

impl fmt::Display for RefusedConnection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.reason)
    }
}

impl StdError for RefusedConnection {}

impl RefusalNote {
    fn lock(&self) -> MutexGuard<'_, NotedConnections> {
        // A panic elsewhere cannot have left the counts inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a call begins.
    pub(crate) fn begin(&self) -> CallMark {
        let noted = self.lock();
        CallMark { refused: noted.refused, ended: noted.ended }
    }

    /// Returns the reason for which the connection of a failed call was refused, else the error.
    pub(crate) fn explain(
        &self,
        mark: CallMark,
        error: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Box<dyn StdError + Send + Sync> {
        let error = error.into();
        let first: &(dyn StdError + 'static) = &*error;
        let mut chain = std::iter::successors(Some(first), |&error| error.source());
        // Such an error has the reason of its own connection.
        if chain.any(|error| error.is::<ConnectError>()) {
            return error;
        }
        let noted = self.lock();
        // Every connection that the call can have used was refused.
        let was_not_applied = noted.refused > 0 && noted.opened == noted.refused + mark.ended;
        match was_not_applied || noted.refused > mark.refused {
            true => Box::new(RefusedConnection { reason: noted.reason.clone(), was_not_applied }),
            false => error,
        }
    }
}

/// A connection that notes for which reason the node refused it.
#[derive(Debug)]
pub(crate) struct WatchedSocket {
    inner: TlsSocket<TcpStream>,
    note: RefusalNote,
    /// The first bytes of the server; `None` once it has accepted or refused the connection.
    first: Option<Vec<u8>>,
    is_refused: bool,
}

impl WatchedSocket {
    pub(crate) fn new(inner: TlsSocket<TcpStream>, note: RefusalNote) -> Self {
        note.lock().opened += 1;
        Self { inner, note, first: Some(Vec::new()), is_refused: false }
    }

    fn refused(&mut self, reason: String) {
        self.first = None;
        self.is_refused = true;
        let mut noted = self.note.lock();
        noted.refused += 1;
        noted.reason = reason;
    }

    /// Notes what the server sent.
    fn on_bytes(&mut self, bytes: &[u8]) {
        let Some(first) = &mut self.first else { return };
        let left = REFUSAL_BYTES_MAX - first.len();
        first.extend_from_slice(bytes.get(..left).unwrap_or(bytes));
        if !self.inner.is_encrypted() && first.ends_with(PLAINTEXT_REFUSAL.as_bytes()) {
            let reason = "the node requires TLS; set the CA file that signs its certificate";
            self.refused(reason.to_owned());
        } else if !bytes.is_empty() && !is_refusal_start(first) {
            self.first = None;
        }
    }

    /// Notes a TLS error. Later ones break a connection that has moved requests.
    fn on_error(&mut self, error: &io::Error) {
        if self.first.is_some()
            && let Some(reason) = describe_tls_error(error)
        {
            self.refused(reason);
        }
    }

    /// Reads what the server said before it closed the connection, after a write has failed.
    fn read_last(&mut self, context: &mut Context<'_>) {
        let mut bytes = [0; LAST_BYTES_MAX];
        let mut buffer = ReadBuf::new(&mut bytes);
        while let Poll::Ready(Ok(())) = Pin::new(&mut *self).poll_read(context, &mut buffer) {
            let is_end = buffer.filled().is_empty();
            if is_end || self.first.is_none() {
                return;
            }
            buffer.clear();
        }
    }

    fn noting<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if let Poll::Ready(Err(error)) = &written {
            self.on_error(error);
            self.read_last(context);
        }
        written
    }
}

impl Drop for WatchedSocket {
    fn drop(&mut self) {
        if !self.is_refused {
            self.note.lock().ended += 1;
        }
    }
}

/// Returns true if bytes of a server without TLS may be the start of a refusal: empty settings, and
/// the type of a GOAWAY frame.
fn is_refusal_start(bytes: &[u8]) -> bool {
    let settings = bytes.iter().zip([0, 0, 0, 4, 0, 0, 0, 0, 0]);
    settings.into_iter().all(|(byte, expected)| *byte == expected)
        && bytes.get(12).is_none_or(|kind| *kind == 7)
        && bytes.len() < REFUSAL_BYTES_MAX
}

impl AsyncRead for WatchedSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.inner).poll_read(context, buffer));
        match &read {
            Ok(()) => self.on_bytes(buffer.filled().get(before..).unwrap_or_default()),
            Err(error) => self.on_error(error),
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for WatchedSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.noting(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(context, buffers);
        self.noting(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(context);
        self.noting(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Outcome of a call that began with `mark`: the reason, and whether it was certainly not sent.
    fn explained(note: &RefusalNote, mark: CallMark) -> Option<(String, bool)> {
        let error = note.explain(mark, io::Error::from(io::ErrorKind::ConnectionReset));
        let refused = error.downcast::<RefusedConnection>().ok()?;
        Some((refused.reason, refused.was_not_applied))
    }

    #[test]
    fn a_call_was_not_sent_only_if_each_of_its_connections_was_refused() {
        let note = RefusalNote::default();
        let refuse = || {
            let mut noted = note.lock();
            noted.refused += 1;
            noted.reason = "no".to_owned();
        };
        let open = || note.lock().opened += 1;
        let no = |was_not_applied| Some(("no".to_owned(), was_not_applied));
        let first = note.begin();
        open();
        assert_eq!(explained(&note, first), None);
        refuse();
        assert_eq!(explained(&note, first), no(true));
        // Sent on the connection that was refused before it began.
        let second = note.begin();
        assert_eq!(explained(&note, second), no(true));
        // The next connection is not refused: a call may have been sent on it.
        open();
        assert_eq!(explained(&note, first), no(false));
        assert_eq!(explained(&note, second), None);
        note.lock().ended += 1;
        assert_eq!(explained(&note, second), None);
        let third = note.begin();
        open();
        refuse();
        assert_eq!(explained(&note, third), no(true));
    }

    #[test]
    fn only_a_refusal_looks_like_one() {
        let refusal = [0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 30, 7];
        for length in 0..refusal.len() {
            assert!(is_refusal_start(&refusal[..length]), "{length}");
        }
        // Settings that have values; and another frame behind empty ones.
        assert!(!is_refusal_start(&[0, 0, 6]));
        assert!(!is_refusal_start(&[0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 4, 8]));
        assert!(!is_refusal_start(&[0x15, 3, 3]));
    }
}
