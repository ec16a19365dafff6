//! What goes out to a peer, as the bytes of a body. The payloads of appends are not copied.

use std::task::{Context, Poll};

use helix_proto::messages::{LONG_BYTES, Outgoing, Pieces};
use helix_proto::raft::v1 as pb;
use pb::exchange_request::Message;
use prost::Message as _;
use tokio::sync::mpsc;
use tonic::Status;
use tonic::body::Body;

use super::connection::Lane;
use super::limits::MESSAGE_BYTES_MAX;

/// Numbers of the fields around a payload, from the outside in.
const APPEND: u32 = 2;
const APPEND_ENTRIES: u32 = 3;
const ENTRY: u32 = 4;
const PAYLOAD: u32 = 3;

/// The body of a stream that begins with `first`. On the catch-up lane others have their turn after
/// each long piece: what is sent there is much at a time, and nobody waits for it.
pub(super) fn body(
    lane: Lane,
    first: pb::ExchangeRequest,
    mut queue: mpsc::UnboundedReceiver<pb::ExchangeRequest>,
) -> Body {
    let mut first = Some(first);
    let body = Outgoing::new(move |context: &mut Context<'_>, pieces: &mut Pieces| {
        if let Some(first) = first.take() {
            return Poll::Ready(Some(write(first, pieces)));
        }
        queue.poll_recv(context).map(|request| Some(write(request?, pieces)))
    });
    Body::new(match lane {
        Lane::CatchUp => body.in_turns(),
        Lane::Live | Lane::Control => body,
    })
}

fn write(request: pb::ExchangeRequest, pieces: &mut Pieces) -> Result<(), Status> {
    let length = request.encoded_len();
    if length > MESSAGE_BYTES_MAX {
        let what = format!("a message of {length} bytes; at most {MESSAGE_BYTES_MAX} are sent");
        return Err(Status::out_of_range(what));
    }
    pieces.begin(length)?;
    match request.message {
        Some(Message::Append(append)) if has_long_payload(&append) => write_append(append, pieces),
        message => pb::ExchangeRequest { message }.encode_raw(pieces.short()),
    }
    Ok(())
}

fn has_long_payload(append: &pb::Append) -> bool {
    let mut entries = append.entries.iter().flat_map(|entries| &entries.entries);
    entries.any(|entry| entry.payload.len() >= LONG_BYTES)
}

/// As the generated code would write it, but for the order of the fields, which protobuf leaves
/// open: what holds a payload, and the payload itself, come last.
fn write_append(mut append: pb::Append, pieces: &mut Pieces) {
    pieces.field(APPEND, append.encoded_len());
    let entries = append.entries.take();
    append.encode_raw(pieces.short());
    let Some(mut entries) = entries else { return };
    pieces.field(APPEND_ENTRIES, entries.encoded_len());
    let list = std::mem::take(&mut entries.entries);
    entries.encode_raw(pieces.short());
    for mut entry in list {
        pieces.field(ENTRY, entry.encoded_len());
        let payload = std::mem::take(&mut entry.payload);
        entry.encode_raw(pieces.short());
        pieces.payload(PAYLOAD, payload);
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use bytes::Bytes;
    use helix_proto::messages::Messages;
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
    async fn a_peer_reads_what_was_sent() {
        let question =
            pb::Question { route: Some(pb::Route { id: 4, ..Default::default() }), question: None };
        let sent = [
            pb::ExchangeRequest { message: Some(Message::Question(question)) },
            append(&[]),
            append(&[0]),
            append(&[10, 100]),
            append(&[LONG_BYTES]),
            append(&[100_000, 0, 10, LONG_BYTES, LONG_BYTES - 1, 200_000]),
            append(&[1 << 20, 1]),
        ];
        let (outgoing, queue) = mpsc::unbounded_channel();
        for request in &sent[1..] {
            outgoing.send(request.clone()).expect("the queue is there");
        }
        drop(outgoing);
        let mut read = Messages::new(body(Lane::Live, sent[0].clone(), queue), MESSAGE_BYTES_MAX);
        for request in sent {
            assert_eq!(read.message().await.expect("it is right"), Some(request));
        }
        assert_eq!(read.message().await.expect("it is right"), None);
    }

    /// How often others had a turn before each long frame of a message with five.
    async fn turns_between_pieces(lane: Lane) -> Vec<usize> {
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
            let data = frame.expect("there is more").expect("it is right").into_data();
            if data.is_ok_and(|data| data.len() >= LONG_BYTES) {
                before.push(others.load(Ordering::Relaxed));
            }
        }
        before
    }

    #[tokio::test]
    async fn others_have_a_turn_after_each_long_piece_of_what_is_caught_up_with() {
        assert_eq!(turns_between_pieces(Lane::Live).await, [0; 5]);
        let turns = turns_between_pieces(Lane::CatchUp).await;
        assert!(turns.is_sorted_by(|before, after| before < after), "{turns:?}");
    }

    #[tokio::test]
    async fn what_is_too_long_is_not_sent() {
        let (_, queue) = mpsc::unbounded_channel();
        let mut read = Messages::<pb::ExchangeRequest>::new(
            body(Lane::Live, append(&[17 << 20]), queue),
            usize::MAX,
        );
        let status = read.message().await.expect_err("it is too long");
        assert_eq!(status.code(), tonic::Code::OutOfRange);
    }
}
