//! Framing: length prefixes of messages from 64 B to 1 MiB, written, split and read.
//!
//! The message is a `BytesValue`: one field of bytes, so that little but the framing is measured.
//! `memcpy` copies the same bytes. Fields from 4 KiB on are shared and not copied, so larger
//! messages can be faster than it.

#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use helix_transport::{ChunkedBody, ChunkedWriter, FrameSplitter, MessageStream};
use http_body::Frame;
use prost::Message;
use tonic::Status;
use tonic::codegen::Body;

const SIZES: [(&str, usize); 5] =
    [("64B", 64), ("512B", 512), ("4KiB", 4 << 10), ("64KiB", 64 << 10), ("1MiB", 1 << 20)];

/// Bytes of an HTTP/2 frame, as a node with memory to spare announces them.
const FRAME_BYTES: usize = 256 << 10;

/// Longest message that the reader takes.
const MESSAGE_BYTES_MAX: usize = 2 << 20;

/// A body that repeats the frames of one message.
struct Repeated {
    frames: Vec<Bytes>,
    at: usize,
}

impl Body for Repeated {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let bytes = self.frames[self.at].clone();
        self.at = (self.at + 1) % self.frames.len();
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }
}

/// Writes one message and takes its chunks. Returns their bytes.
fn encode(field: &Bytes, context: &mut Context<'_>) -> usize {
    let write = |_: &mut Context<'_>, writer: &mut ChunkedWriter| {
        let begun = writer.begin_message(field.encoded_len());
        writer.bytes_field(1, field.clone());
        Poll::Ready(Some(begun))
    };
    let mut body = ChunkedBody::single(write);
    let mut bytes = 0;
    while let Poll::Ready(Some(frame)) = Pin::new(&mut body).poll_frame(context) {
        bytes += black_box(frame.unwrap().into_data().unwrap()).len();
    }
    bytes
}

/// Returns a message with its prefix.
fn framed(field: &Bytes) -> Bytes {
    let mut framed = BytesMut::new();
    framed.extend_from_slice(&[0]);
    framed.extend_from_slice(&u32::try_from(field.encoded_len()).unwrap().to_be_bytes());
    field.encode(&mut framed).unwrap();
    framed.freeze()
}

fn of_size(criterion: &mut Criterion, name: &str, bytes: usize) {
    let mut group = criterion.benchmark_group(format!("framing/{name}"));
    group.throughput(Throughput::Bytes(bytes as u64));
    let mut context = Context::from_waker(Waker::noop());
    let field = Bytes::from(vec![0; bytes]);
    let framed = framed(&field);
    assert_eq!(encode(&field, &mut context), framed.len());
    let mut copy = vec![0; bytes];
    group.bench_function("memcpy", |bench| {
        bench.iter(|| black_box(&mut copy[..]).copy_from_slice(black_box(&field)));
    });
    group.bench_function("encode", |bench| {
        bench.iter(|| encode(black_box(&field), &mut context));
    });
    // Only the prefixes are read: what a node does with a body before it reads the messages.
    let frames: Vec<Bytes> = framed.chunks(FRAME_BYTES).map(Bytes::copy_from_slice).collect();
    group.bench_function("split", |bench| {
        let mut splitter = FrameSplitter::default();
        bench.iter(|| {
            let mut pieces = 0;
            for frame in &frames {
                splitter.push(black_box(frame).clone());
                while let Some(piece) = splitter.next() {
                    pieces += black_box(piece).bytes.len();
                }
            }
            assert!(splitter.is_at_boundary());
            pieces
        });
    });
    group.bench_function("decode", |bench| {
        let body = Repeated { frames: frames.clone(), at: 0 };
        let mut messages = MessageStream::<Bytes, _>::new(body, MESSAGE_BYTES_MAX);
        bench.iter(|| match messages.poll_message(&mut context) {
            Poll::Ready(Ok(Some(message))) => assert_eq!(message.len(), bytes),
            polled => panic!("the body never ends: {polled:?}"),
        });
    });
    group.finish();
}

fn framing(criterion: &mut Criterion) {
    for (name, bytes) in SIZES {
        of_size(criterion, name, bytes);
    }
}

criterion_group! {
    name = benches;
    // 20 measurements: together they take less than half a minute.
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600));
    targets = framing
}
criterion_main!(benches);
