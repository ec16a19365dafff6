//! Encodes the messages of an outgoing stream as an HTTP body. Append payloads are not copied.

use std::task::{Context, Poll};

use helix_proto::raft::v1 as pb;
use helix_transport::{ChunkedBody, ChunkedWriter, ZERO_COPY_BYTES_MIN};
use pb::exchange_request::Message;
use prost::Message as _;
use tokio::sync::mpsc;
use tonic::Status;
use tonic::body::Body;

use super::lane::PeerLane;
use crate::peer::limits::MESSAGE_BYTES_MAX;

/// Field numbers on the path to a payload, outermost first.
const APPEND: u32 = 2;
const APPEND_ENTRIES: u32 = 3;
const ENTRY: u32 = 4;
const PAYLOAD: u32 = 3;

/// Returns the body of a stream that begins with `first`.
/// On the catch-up lane it yields to other tasks after each long frame: the lane carries bulk data
/// that is not latency-sensitive.
pub(super) fn body(
    lane: PeerLane,
    first: pb::ExchangeRequest,
    mut queue: mpsc::UnboundedReceiver<pb::ExchangeRequest>,
) -> Body {
    let mut first = Some(first);
    let body = ChunkedBody::new(move |context: &mut Context<'_>, writer: &mut ChunkedWriter| {
        if let Some(first) = first.take() {
            return Poll::Ready(Some(write(first, writer)));
        }
        queue.poll_recv(context).map(|request| Some(write(request?, writer)))
    });
    Body::new(match lane {
        PeerLane::CatchUp => body.yielding(),
        PeerLane::Live | PeerLane::Control => body,
    })
}

fn write(request: pb::ExchangeRequest, writer: &mut ChunkedWriter) -> Result<(), Status> {
    let length = request.encoded_len();
    if length > MESSAGE_BYTES_MAX {
        let why = format!("message of {length} bytes exceeds the limit of {MESSAGE_BYTES_MAX}");
        return Err(Status::out_of_range(why));
    }
    writer.begin_message(length)?;
    match request.message {
        Some(Message::Append(append)) if has_long_payload(&append) => write_append(append, writer),
        message => pb::ExchangeRequest { message }.encode_raw(writer.buffer()),
    }
    Ok(())
}

fn has_long_payload(append: &pb::Append) -> bool {
    let mut entries = append.entries.iter().flat_map(|entries| &entries.entries);
    entries.any(|entry| entry.payload.len() >= ZERO_COPY_BYTES_MIN)
}

/// Encodes an append like the generated code, but with the payload as the last field.
/// Protobuf does not define an order of fields.
fn write_append(mut append: pb::Append, writer: &mut ChunkedWriter) {
    writer.begin_field(APPEND, append.encoded_len());
    let entries = append.entries.take();
    append.encode_raw(writer.buffer());
    let Some(mut entries) = entries else { return };
    writer.begin_field(APPEND_ENTRIES, entries.encoded_len());
    let list = std::mem::take(&mut entries.entries);
    entries.encode_raw(writer.buffer());
    for mut entry in list {
        writer.begin_field(ENTRY, entry.encoded_len());
        let payload = std::mem::take(&mut entry.payload);
        entry.encode_raw(writer.buffer());
        writer.bytes_field(PAYLOAD, payload);
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use bytes::Bytes;
    use helix_transport::MessageStream;
    use tokio::task::yield_now;
    use tonic::codegen::Body as _;

    use super::*;

    fn append(payloads: &[usize]) -> pb::ExchangeRequest {
        let entry = |(index, length): (usize, &usize)| pb::Entry {
            id: Some(pb::LogId { term: 7, index: index as u64 }),
            head: Bytes::from_static(b"head"),
            payload: vec![index as u8; *length].into(),
            payload_crc32: 1,
            payload_crc32_seed: 2,
            head_crc32: 3,
        };
        let entries = pb::AppendEntries {
            vote: Some(pb::Vote { term: 7, voted_for: 1, committed: true }),
            previous: Some(pb::LogId { term: 6, index: 1 << 40 }),
            committed: None,
            entries: payloads.iter().enumerate().map(entry).collect(),
        };
        let route = pb::Route { id: 9, ..Default::default() };
        let append = pb::Append { route: Some(route), sequence: 300, entries: Some(entries) };
        pb::ExchangeRequest { message: Some(Message::Append(append)) }
    }

    #[tokio::test]
    async fn encoded_messages_decode_unchanged() {
        let route = Some(pb::Route { id: 4, ..Default::default() });
        let request = pb::Question { route, question: None };
        let sent = [
            pb::ExchangeRequest { message: Some(Message::Question(request)) },
            append(&[]),
            append(&[0]),
            append(&[10, 100]),
            append(&[ZERO_COPY_BYTES_MIN]),
            append(&[100_000, 0, 10, ZERO_COPY_BYTES_MIN, ZERO_COPY_BYTES_MIN - 1, 200_000]),
            append(&[1 << 20, 1]),
        ];
        let (outgoing, queue) = mpsc::unbounded_channel();
        for request in &sent[1..] {
            outgoing.send(request.clone()).expect("the queue is open");
        }
        drop(outgoing);
        let mut read =
            MessageStream::new(body(PeerLane::Live, sent[0].clone(), queue), MESSAGE_BYTES_MAX);
        for request in sent {
            assert_eq!(read.message().await.expect("valid"), Some(request));
        }
        assert_eq!(read.message().await.expect("valid"), None);
    }

    /// Turns of another task before each of the five long frames of a message.
    async fn other_turns_per_frame(lane: PeerLane) -> Vec<usize> {
        let others = Arc::new(AtomicUsize::new(0));
        let turns = others.clone();
        tokio::spawn(async move {
            loop {
                turns.fetch_add(1, Ordering::Relaxed);
                yield_now().await;
            }
        });
        let (_outgoing, queue) = mpsc::unbounded_channel();
        let mut body = body(lane, append(&[100_000; 5]), queue);
        let mut before = Vec::new();
        while before.len() < 5 {
            let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
            let data = frame.expect("another frame").expect("valid").into_data();
            if data.is_ok_and(|data| data.len() >= ZERO_COPY_BYTES_MIN) {
                before.push(others.load(Ordering::Relaxed));
            }
        }
        before
    }

    #[tokio::test]
    async fn catch_up_lane_yields_after_each_long_frame() {
        assert_eq!(other_turns_per_frame(PeerLane::Live).await, [0; 5]);
        let turns = other_turns_per_frame(PeerLane::CatchUp).await;
        assert!(turns.is_sorted_by(|before, after| before < after), "{turns:?}");
    }

    #[tokio::test]
    async fn rejects_message_over_limit() {
        let (_, queue) = mpsc::unbounded_channel();
        let mut read = MessageStream::<pb::ExchangeRequest>::new(
            body(PeerLane::Live, append(&[17 << 20]), queue),
            usize::MAX,
        );
        let status = read.message().await.expect_err("too long");
        assert_eq!(status.code(), tonic::Code::OutOfRange);
    }
}
