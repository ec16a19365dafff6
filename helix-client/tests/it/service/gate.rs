//! A node's sockets behind a gate: open, stopped as a process is by SIGSTOP (connections live, and
//! nothing comes), or broken as by its death.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::transport::server::Connected;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Open,
    Stopped,
    Broken,
}

pub(super) struct Gate(Mutex<(Mode, Vec<Waker>)>);

impl Gate {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new((Mode::Open, Vec::new()))))
    }

    pub(super) fn set(&self, mode: Mode) {
        let mut state = self.0.lock().unwrap();
        state.0 = mode;
        state.1.drain(..).for_each(Waker::wake);
    }

    /// Ready when the gate is open. Wakes the task again at the next change in any case.
    fn pass(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let (mode, wakers) = &mut *self.0.lock().unwrap();
        if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            wakers.push(context.waker().clone());
        }
        match mode {
            Mode::Open => Poll::Ready(Ok(())),
            Mode::Stopped => Poll::Pending,
            Mode::Broken => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
        }
    }
}

pub(super) struct Gated {
    pub(super) stream: TcpStream,
    pub(super) gate: Arc<Gate>,
}

impl Connected for Gated {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Gated {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.gate.pass(context))?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Gated {
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
