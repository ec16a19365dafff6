//! gRPC bodies without copies: tonic keeps headers, statuses and routing, this crate the payloads.
//!
//! **Why tonic alone is not enough.** tonic decodes each message from one contiguous buffer and
//! encodes it into another. With three replicas a batch was copied seven times between its client
//! and the logs; with 16 clients, user-space copies took 18 % of all CPU (docs/decisions/0025 and
//! 0027). HTTP/2 also sends headers and trailers as packets of their own, each of which wakes the
//! other side (0028). Without these copies and packets a node serves fetches of 100 KiB at 1.25
//! times the throughput with 0.75 of the CPU (0029). The bytes on the wire stay plain gRPC.
//!
//! **A request** leaves a client through [`requests`], which writes it as a [`ChunkedBody`] and
//! stores it in the request's extensions as a [`DetachedBody`]. [`ResponseLayer`] around the
//! channel swaps it back in. On a server [`detach_body`] (or [`RequestLayer`]) takes the body away
//! before tonic reads it, and the handler reads it with [`read_unary`] or [`read_messages`].
//!
//! **A response** leaves a server through [`responses`], and [`ResponseBody`] puts the detached
//! body in front of tonic's trailers. A client reads responses through tonic: [`ResponseLayer`]
//! frames them with [`FramedBody`], so that each message gets one buffer of its own size.
//!
//! On either side [`CoalescedIo`] wraps the TCP connection and merges small writes.

mod coalesce;
mod decode;
mod detached;
mod encode;
mod layers;
mod message_buffer;
pub mod requests;
pub mod responses;
mod splitter;

pub use coalesce::{CoalescedIo, FlushPolicy};
pub use decode::{MessageStream, read_messages, read_unary};
pub use detached::{DetachedBody, ResponseBody};
pub use encode::{ChunkedBody, ChunkedWriter, ZERO_COPY_BYTES_MIN};
pub use layers::{RequestLayer, ResponseLayer, detach_body};
pub use splitter::{FramePiece, FrameSplitter, FramedBody};

/// Bytes of a gRPC length prefix: a compression flag, and the length as a big-endian `u32`.
const PREFIX_BYTES: usize = 5;
