//! Floods of calls that are reset, in mixes of connections, requests and habits of the client.

use std::fmt;
use std::net::SocketAddr;

use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{
    FetchRequest, NamedPosition, PartitionStart, StartPosition, WhoAmIRequest,
};
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::abuse::{DATA, END_HEADERS, HEADERS, RESET, frame, text};
use super::abusive_clients::{LowPriorityRuntime, PREFACE};
use super::{PROBE_PARTITION, TOPIC};

/// Streams in one write of a client.
const STREAMS: u32 = 512;

const END_STREAM: u8 = 1;

/// Longest wait of a fetch, in seconds.
const FETCH_WAIT_SECONDS: i64 = 60;

const FETCH: &str = "/helix.log.v1.ConsumeService/Fetch";

/// Paths of the calls; each connection has one of them.
const PATHS: [&str; 6] = [
    FETCH,
    "/helix.log.v1.ProduceService/Append",
    "/helix.log.v1.ProduceService/AppendStream",
    "/helix.log.v1.ConsumeService/Subscribe",
    "/helix.log.v1.AccessService/WhoAmI",
    "/helix.log.v1.NoService/NoMethod",
];

/// Part of each request that is sent before the call is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SentPart {
    /// Headers; the request stays open.
    Headers,
    /// Headers that end the request.
    HalfClosed,
    /// A message that ends the request.
    Whole,
    /// The start of a message.
    Start,
}

/// One mix of resets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResetMix {
    connections: usize,
    sent: SentPart,
    /// The client reads what the server sends.
    reads: bool,
    /// The client resets calls after all calls of a write, not each at once.
    resets_late: bool,
}

impl fmt::Display for ResetMix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sent = match self.sent {
            SentPart::Headers => "open requests",
            SentPart::HalfClosed => "half-closed requests",
            SentPart::Whole => "whole requests",
            SentPart::Start => "parts of requests",
        };
        let reads = if self.reads { "reading" } else { "not reading" };
        let when = if self.resets_late { "late" } else { "at once" };
        write!(f, "{} connections, {sent}, {reads}, reset {when}", self.connections)
    }
}

impl ResetMix {
    /// Returns every mix for these numbers of connections.
    pub(crate) fn all(connections: &[u16]) -> Vec<Self> {
        let parts = [SentPart::Headers, SentPart::HalfClosed, SentPart::Whole, SentPart::Start];
        let mut mixes = Vec::new();
        for connections in connections.iter().map(|it| usize::from(*it)) {
            for sent in parts {
                for (reads, resets_late) in
                    [(true, false), (true, true), (false, false), (false, true)]
                {
                    mixes.push(Self { connections, sent, reads, resets_late });
                }
            }
        }
        mixes
    }
}

/// Clients that reset calls until this is dropped.
pub(crate) struct ResetFlood {
    // Before the runtime: its tasks are aborted first.
    _tasks: JoinSet<()>,
    _runtime: LowPriorityRuntime,
}

impl ResetFlood {
    /// Starts clients whose calls have this header `authorization`.
    pub(crate) fn start(
        address: SocketAddr,
        mix: ResetMix,
        authorization: Option<&str>,
    ) -> anyhow::Result<Self> {
        let (runtime, mut tasks) = (LowPriorityRuntime::new()?, JoinSet::new());
        for path in PATHS.into_iter().cycle().take(mix.connections) {
            let block = call(path, authorization);
            tasks.spawn_on(flood(address, mix, path, block), runtime.handle());
        }
        Ok(Self { _tasks: tasks, _runtime: runtime })
    }
}

/// Floods on new connections: the node may close one.
async fn flood(address: SocketAddr, mix: ResetMix, path: &'static str, block: Vec<u8>) {
    loop {
        let Ok(stream) = TcpStream::connect(address).await else {
            tokio::task::yield_now().await;
            continue;
        };
        let (mut reader, mut writer) = stream.into_split();
        let sending = async {
            writer.write_all(PREFACE).await?;
            let mut next = 1;
            while next < u32::MAX >> 2 {
                let frames = calls(mix, path, &block, next);
                next += 2 * STREAMS;
                writer.write_all(&frames).await?;
            }
            Ok::<(), std::io::Error>(())
        };
        let reading = async {
            let mut sink = [0; 4096];
            if !mix.reads {
                std::future::pending::<()>().await;
            }
            while matches!(reader.read(&mut sink).await, Ok(1..)) {}
        };
        // Ignored: both ends of the connection are expected.
        tokio::select! {
            _ = sending => {}
            () = reading => {}
        }
    }
}

/// Builds the frames of one write, with the calls from this stream on.
fn calls(mix: ResetMix, path: &str, block: &[u8], first: u32) -> Vec<u8> {
    let mut frames = Vec::new();
    let streams = (0..STREAMS).map(|number| first + 2 * number);
    let reset =
        |frames: &mut Vec<u8>, stream| frame(frames, RESET, 0, stream, &8_u32.to_be_bytes());
    for stream in streams.clone() {
        let ends = if mix.sent == SentPart::HalfClosed { END_STREAM } else { 0 };
        frame(&mut frames, HEADERS, END_HEADERS | ends, stream, block);
        match mix.sent {
            SentPart::Headers | SentPart::HalfClosed => {}
            SentPart::Whole => frame(&mut frames, DATA, END_STREAM, stream, &message(path)),
            SentPart::Start => frame(&mut frames, DATA, 0, stream, &[0, 0, 0, 0x10, 0]),
        }
        if !mix.resets_late {
            reset(&mut frames, stream);
        }
    }
    if mix.resets_late {
        for stream in streams {
            reset(&mut frames, stream);
        }
    }
    frames
}

/// Builds the header block of a call, with static HPACK entries only.
fn call(path: &str, authorization: Option<&str>) -> Vec<u8> {
    let mut block = vec![0x83, 0x86];
    text(&mut block, &[0x04], path);
    text(&mut block, &[0x0f, 0x10], "application/grpc");
    text(&mut block, &[0x00, 0x02, b't', b'e'], "trailers");
    if let Some(authorization) = authorization {
        text(&mut block, &[0x0f, 0x08], authorization);
    }
    block
}

/// Builds a message with its prefix of gRPC: a long poll, or an empty message.
fn message(path: &str) -> Vec<u8> {
    let message = if path == FETCH {
        FetchRequest {
            partitions: vec![latest()],
            max_wait: Some(prost_types::Duration { seconds: FETCH_WAIT_SECONDS, nanos: 0 }),
            ..FetchRequest::default()
        }
        .encode_to_vec()
    } else {
        WhoAmIRequest::default().encode_to_vec()
    };
    let length = u32::try_from(message.len()).unwrap_or_default().to_be_bytes();
    [&[0], &length[..], &message].concat()
}

/// Nothing is read from there until the probe client appends.
fn latest() -> PartitionStart {
    let position = Position::Named(NamedPosition::Latest.into());
    PartitionStart {
        topic: TOPIC.to_owned(),
        partition: PROBE_PARTITION,
        start: Some(StartPosition { position: Some(position), ..StartPosition::default() }),
        until_offset: None,
        topic_id: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_of_every_mix_is_reset() {
        let mixes = ResetMix::all(&[1, 64]);
        assert_eq!(mixes.len(), 32);
        for mix in mixes {
            let frames = calls(mix, FETCH, &call(FETCH, Some("Bearer x")), 1);
            let (mut rest, mut begun, mut ended) = (&frames[..], 0, 0);
            while let [a, b, c, kind, _, _, _, _, _, after @ ..] = rest {
                begun += u32::from(*kind == HEADERS);
                ended += u32::from(*kind == RESET);
                rest = &after[u32::from_be_bytes([0, *a, *b, *c]) as usize..];
            }
            assert!(rest.is_empty(), "{mix}");
            assert_eq!((begun, ended), (STREAMS, STREAMS), "{mix}");
        }
    }
}
