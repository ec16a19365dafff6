//! HTTP/2 frames written by hand, for what no client library sends.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::limits::HELLO;
use crate::support::{TestServer, soon};

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RESET: u8 = 3;
pub(crate) const PING: u8 = 6;
pub(crate) const GO_AWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
/// CANCEL
const CANCEL: [u8; 4] = [0, 0, 0, 8];

pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A string of HPACK, as it is.
pub(crate) fn text(text: &[u8]) -> Vec<u8> {
    [&[u8::try_from(text.len()).unwrap()], text].concat()
}

/// Header block of a call of gRPC, in HPACK without a dynamic table.
pub(crate) fn call_block(path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    // POST, http, then the path by its name's index.
    let mut block = vec![0x83, 0x86, 0x04];
    block.extend(text(path.as_bytes()));
    for (name, value) in
        [("content-type", "application/grpc"), ("te", "trailers")].iter().chain(more)
    {
        block.extend([vec![0], text(name.as_bytes()), text(value.as_bytes())].concat());
    }
    block
}

pub(crate) fn reset(stream: u32) -> Vec<u8> {
    frame(RESET, 0, stream, &CANCEL)
}

/// A message of gRPC with its prefix.
pub(crate) fn message(message: &impl prost::Message) -> Vec<u8> {
    let message = message.encode_to_vec();
    let prefix = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0], &prefix[..], &message].concat()
}

pub(crate) struct RawClient<S = TcpStream> {
    pub(crate) stream: S,
    next: u32,
}

impl RawClient {
    pub(crate) async fn connect(server: &TestServer) -> Self {
        Self::new(TcpStream::connect(server.running.local_addr()).await.unwrap()).await
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> RawClient<S> {
    pub(crate) async fn new(mut stream: S) -> Self {
        stream.write_all(HELLO).await.unwrap();
        Self { stream, next: 1 }
    }

    pub(crate) fn next_stream(&mut self) -> u32 {
        self.next += 2;
        self.next - 2
    }

    pub(crate) async fn send(&mut self, frames: &[u8]) {
        self.stream.write_all(frames).await.unwrap();
    }

    /// Reads the next frame: kind, flags, stream, payload.
    pub(crate) async fn read_frame(&mut self) -> (u8, u8, u32, Vec<u8>) {
        let mut head = [0; 9];
        soon(self.stream.read_exact(&mut head)).await.expect("the connection is open");
        let [a, b, c, kind, flags, stream @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        soon(self.stream.read_exact(&mut payload)).await.unwrap();
        assert_ne!(kind, GO_AWAY, "{}", String::from_utf8_lossy(&payload));
        (kind, flags, u32::from_be_bytes(stream), payload)
    }

    /// Reads the next frame: kind, flags, stream.
    pub(crate) async fn read(&mut self) -> (u8, u8, u32) {
        let (kind, flags, stream, _) = self.read_frame().await;
        (kind, flags, stream)
    }

    /// Waits until the server has handled everything that was sent.
    pub(crate) async fn ping(&mut self) {
        self.send(&frame(PING, 0, 0, b"12345678")).await;
        while self.read().await.0 != PING {}
    }
}
