//! A connection with or without TLS.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsStream;

use crate::{forward_read, forward_write};

/// A connection whose first byte was read to learn its protocol.
#[derive(Debug)]
pub(crate) struct PeekedSocket<S> {
    /// The byte, until it is read again.
    first: Option<u8>,
    inner: S,
}

impl<S> PeekedSocket<S> {
    pub(crate) fn new(inner: S, first: Option<u8>) -> Self {
        Self { first, inner }
    }

    pub(crate) fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PeekedSocket<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buffer.remaining() > 0
            && let Some(first) = self.first.take()
        {
            buffer.put_slice(&[first]);
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

forward_write!([S: AsyncWrite + Unpin] PeekedSocket<S>, Self { inner, .. } => inner);

/// A connection with or without TLS.
#[derive(Debug)]
pub struct TlsSocket<S>(SocketKind<S>);

#[derive(Debug)]
enum SocketKind<S> {
    Plain(PeekedSocket<S>),
    Tls(Box<TlsStream<PeekedSocket<S>>>),
}

impl<S> TlsSocket<S> {
    /// Wraps a connection without TLS.
    pub fn plain(inner: S) -> Self {
        Self::peeked(PeekedSocket::new(inner, None))
    }

    pub(crate) fn peeked(socket: PeekedSocket<S>) -> Self {
        Self(SocketKind::Plain(socket))
    }

    pub(crate) fn tls(stream: impl Into<TlsStream<PeekedSocket<S>>>) -> Self {
        Self(SocketKind::Tls(Box::new(stream.into())))
    }

    /// Returns true if the connection is encrypted.
    pub fn is_encrypted(&self) -> bool {
        matches!(self.0, SocketKind::Tls(_))
    }

    /// Returns the connection below TLS.
    pub fn get_ref(&self) -> &S {
        match &self.0 {
            SocketKind::Plain(socket) => socket.get_ref(),
            SocketKind::Tls(stream) => stream.get_ref().0.get_ref(),
        }
    }
}

forward_read!(
    [S: AsyncRead + AsyncWrite + Unpin] TlsSocket<S>,
    Self(SocketKind::Plain(socket)) => socket,
    Self(SocketKind::Tls(stream)) => stream,
);

forward_write!(
    [S: AsyncRead + AsyncWrite + Unpin] TlsSocket<S>,
    Self(SocketKind::Plain(socket)) => socket,
    Self(SocketKind::Tls(stream)) => stream,
);
