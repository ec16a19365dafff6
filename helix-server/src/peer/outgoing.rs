//! What goes out to a peer, as the bytes of a body. The payloads of appends are not copied.

use std::task::{Context, Poll};

use helix_proto::messages::{LONG_BYTES, Outgoing, Pieces};
use helix_proto::raft::v1 as pb;
use pb::exchange_request::Message;
use prost::Message as _;
use tokio::sync::mpsc;
use tonic::Status;
use tonic::body::Body;

use super::limits::MESSAGE_BYTES_MAX;

/// Numbers of the fields around a payload, from the outside in.
const APPEND: u32 = 2;
const APPEND_ENTRIES: u32 = 3;
const ENTRY: u32 = 4;
const PAYLOAD: u32 = 3;

/// The body of a stream that begins with `first`.
pub(super) fn body(
    first: pb::ExchangeRequest,
    mut queue: mpsc::UnboundedReceiver<pb::ExchangeRequest>,
) -> Body {
    let mut first = Some(first);
    Body::new(Outgoing::new(move |context: &mut Context<'_>, pieces: &mut Pieces| {
        if let Some(first) = first.take() {
            return Poll::Ready(Some(write(first, pieces)));
        }
        queue.poll_recv(context).map(|request| Some(write(request?, pieces)))
    }))
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
    use bytes::Bytes;
    use helix_proto::messages::Messages;

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
        let mut read = Messages::new(body(sent[0].clone(), queue), MESSAGE_BYTES_MAX);
        for request in sent {
            assert_eq!(read.message().await.expect("it is right"), Some(request));
        }
        assert_eq!(read.message().await.expect("it is right"), None);
    }

    #[tokio::test]
    async fn what_is_too_long_is_not_sent() {
        let (_, queue) = mpsc::unbounded_channel();
        let mut read =
            Messages::<pb::ExchangeRequest>::new(body(append(&[17 << 20]), queue), usize::MAX);
        let status = read.message().await.expect_err("it is too long");
        assert_eq!(status.code(), tonic::Code::OutOfRange);
    }
}
