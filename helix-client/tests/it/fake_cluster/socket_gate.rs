//! A gate in front of a node's sockets: open, stopped or broken.
//!
//! Stopped acts like SIGSTOP: connections stay open and carry nothing. Broken acts like a crash.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::transport::server::Connected;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GateMode {
    Open,
    Stopped,
    Broken,
}

pub(super) struct SocketGate(Mutex<(GateMode, Vec<Waker>)>);

impl SocketGate {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new((GateMode::Open, Vec::new()))))
    }

    pub(super) fn set(&self, mode: GateMode) {
        let mut state = self.0.lock().unwrap();
        state.0 = mode;
        state.1.drain(..).for_each(Waker::wake);
    }

    /// Returns ready if the gate is open. Wakes the task at the next change in any case.
    fn pass(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let (mode, wakers) = &mut *self.0.lock().unwrap();
        if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            wakers.push(context.waker().clone());
        }
        match mode {
            GateMode::Open => Poll::Ready(Ok(())),
            GateMode::Stopped => Poll::Pending,
            GateMode::Broken => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
        }
    }
}

pub(super) struct GatedStream {
    pub(super) stream: TcpStream,
    pub(super) gate: Arc<SocketGate>,
}

impl Connected for GatedStream {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for GatedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.gate.pass(context))?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for GatedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.gate.pass(context))?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.gate.pass(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
