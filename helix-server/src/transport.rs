//! The transport: every client request passes it before a handler in `api/`, in this order.
//! 1. `accept.rs` accepts a connection or closes it at once, and serves HTTP/2 on it.
//!    `client_stream.rs` reads it in turns by its frames (`client_frames.rs`); on a Unix domain
//!    socket `authority.rs` accepts any authority.
//! 2. `socket.rs` is its TCP socket; it sends the end of a response in one packet. `unix_socket.rs`
//!    listens for clients of this machine. `in_process.rs` has the connections of the console.
//! 3. `meter.rs` counts the call, its duration and its outcome.
//! 4. `gate.rs` finds the caller; `api/authorize.rs` checks its rights in each handler, and
//!    `stream_guard.rs` ends a stream when its caller loses them.
//! 5. `admission.rs` admits the call and each of its messages, if memory permits;
//!    `quota_delay.rs` delays a stream while its caller is over its quota, and `tracked_body.rs`
//!    counts what the client has not read of the response. `call/` holds the permits: connections,
//!    calls, request bytes, response bytes.
//! 6. `services.rs` picks the service by the path of the request.
//!
//! A response passes the same parts in reverse.

mod accept;
mod admission;
mod authority;
mod client_frames;
mod client_stream;
mod gate;
mod in_process;
mod meter;
mod quota_delay;
mod services;
mod socket;
mod stream_guard;
mod tracked_body;
mod turn_pause;
mod unix_socket;

pub use accept::Listener;
pub(crate) use accept::{LocalListeners, serve};
pub use in_process::InProcessConnector;
pub(crate) use in_process::in_process;
pub(crate) use meter::MeterLayer;
pub use services::Services;
pub use unix_socket::UnixSocketError;
pub(crate) use unix_socket::UnixSocketListener;
