//! Helix's Rust client: finds leaders, repeats what may be repeated, and never makes a second copy.
//! Begin with [`Client`]; it gives producers, sessions, consumers and administration.

pub mod admin;
pub mod append;
pub mod client;
pub mod config;
pub mod connection;
mod connector;
pub mod consumer;
pub mod error;
mod identity;
pub mod partitioner;
pub mod producer;
mod retry;
pub mod routing;
pub mod session;

pub use admin::{Admin, NewTopic};
pub use append::{Ack, AppendOptions, IntoBatch};
pub use client::Client;
pub use config::{Config, Dial, Transport};
pub use connection::Connection;
pub use consumer::{
    Batches, ConsumedRecord, Consumer, Event, FetchOptions, Position, ReadOptions, ReadSource,
    Records, Start, Subscription,
};
pub use error::{Error, Failure, Origin, Result};
pub use producer::{Producer, ProducerOptions, Sent};
pub use routing::Route;
pub use session::{Acked, Session, SessionOptions};

/// The wire's types, for what this crate passes through as it is.
pub use helix_proto as proto;
