//! A client's TCP socket that sends the end of a long write together with the next write.
//!
//! HTTP/2 writes a long frame with one call and its trailers with the next. Without corking, TCP
//! would send the frame's last partial packet at once and the trailers in another packet, which
//! wakes the client twice. This socket keeps the partial packet until the next write or flush.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use helix_tls::forward_read;
use tokio::io::{AsyncWrite, Interest};
use tokio::net::TcpStream;

/// Shorter writes are not corked.
const LONG_BYTES: usize = 16 << 10;

/// A TCP stream with `TCP_NODELAY` that corks long writes (`MSG_MORE`).
#[derive(Debug)]
pub struct CorkedSocket {
    stream: TcpStream,
    /// True while the kernel may hold the end of the last write.
    is_corked: bool,
}

impl CorkedSocket {
    pub(super) fn new(stream: TcpStream) -> Self {
        // Ignored: without it the connection is slower, but correct.
        let _ = stream.set_nodelay(true);
        Self { stream, is_corked: false }
    }

    /// Writes some of the buffers; the kernel keeps a last partial packet.
    fn poll_write_corked(
        &mut self,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream.poll_write_ready(context))?;
            let write = || send_with_more_to_come(&self.stream, buffers);
            match self.stream.try_io(Interest::WRITABLE, write) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => {
                    self.is_corked = true;
                    return Poll::Ready(written);
                }
            }
        }
    }
}

#[cfg(target_os = "linux")]
fn send_with_more_to_come(stream: &TcpStream, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
    use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
    let flags = SendFlags::MORE | SendFlags::NOSIGNAL;
    loop {
        match sendmsg(stream, buffers, &mut SendAncillaryBuffer::default(), flags) {
            Err(rustix::io::Errno::INTR) => {}
            sent => return Ok(sent?),
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn send_with_more_to_come(stream: &TcpStream, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
    stream.try_write_vectored(buffers)
}

impl AsyncWrite for CorkedSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if buffers.iter().map(|buffer| buffer.len()).sum::<usize>() >= LONG_BYTES {
            return self.poll_write_corked(context, buffers);
        }
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, buffers))?;
        // The kernel sends the partial packet with it.
        self.is_corked &= written == 0;
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if std::mem::take(&mut self.is_corked) {
            // Setting it again sends the partial packet (tcp(7), TCP_NODELAY).
            self.stream.set_nodelay(true)?;
        }
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

forward_read!([] CorkedSocket, Self { stream, .. } => stream);

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rand::RngExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::log::testing::seeded;

    async fn pair() -> (CorkedSocket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (other, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        (CorkedSocket::new(accepted.unwrap().0), other.unwrap())
    }

    #[tokio::test]
    async fn the_end_of_a_long_write_waits_for_the_next_write_or_flush() {
        let (mut socket, mut other) = pair().await;
        let long = vec![7; 3 * LONG_BYTES + 1];
        let mut read = vec![0; long.len()];
        socket.write_all(&long).await.unwrap();
        assert!(socket.is_corked);
        socket.flush().await.unwrap();
        assert!(!socket.is_corked);
        other.read_exact(&mut read).await.unwrap();
        assert!(read == long);
        socket.write_all(&long).await.unwrap();
        assert!(socket.is_corked);
        socket.write_all(b"trailers").await.unwrap();
        assert!(!socket.is_corked);
        other.read_exact(&mut read).await.unwrap();
        assert!(read == long);
        let mut trailers = [0; 8];
        other.read_exact(&mut trailers).await.unwrap();
        assert_eq!(&trailers, b"trailers");
    }

    #[tokio::test]
    async fn every_byte_arrives_once_and_in_order() {
        let (mut socket, mut other) = pair().await;
        let mut random = seeded("socket");
        let mut sent = Vec::new();
        let mut received = Vec::new();
        for _ in 0..200 {
            let most = if random.random_bool(0.5) { 100 } else { 4 * LONG_BYTES };
            let bytes: Vec<u8> =
                (0..random.random_range(1..most)).map(|_| random.random()).collect();
            sent.extend_from_slice(&bytes);
            let write = async {
                socket.write_all(&bytes).await.unwrap();
                if random.random_bool(0.3) {
                    socket.flush().await.unwrap();
                }
            };
            // Reads what has arrived, so that the connection is sometimes full, sometimes empty.
            let read = async {
                let _ = other.try_read_buf(&mut received);
            };
            let both = async { tokio::join!(write, read) };
            tokio::time::timeout(Duration::from_secs(10), both).await.expect("the write completes");
            while sent.len() - received.len() > 8 * LONG_BYTES {
                other.read_buf(&mut received).await.unwrap();
            }
        }
        socket.shutdown().await.unwrap();
        other.read_to_end(&mut received).await.unwrap();
        assert!(received == sent);
    }
}
