//! The Rust client of Helix: producers, append sessions, consumers and administration.
//!
//! [`Client`] finds partition leaders, repeats calls that are safe to repeat, and never stores a
//! second copy of a batch. Everything starts from it:
//!
//! - [`Client::producer`]: idempotent appends, by batch or by record with batching.
//! - [`Client::session`]: a pipeline of batches to one partition.
//! - [`Client::consumer`]: fetches and subscriptions.
//! - [`Client::consumer_group`]: a member of a consumer group.
//! - [`Client::admin`]: topics, offsets, consumer groups, cluster state, membership, access.
//!
//! # Quickstart
//! ```no_run
//! use helix_client::proto::log::v1::Record;
//! use helix_client::{Client, Config, Event, NewTopic, Position, ProducerOptions};
//! use helix_client::{ReadOptions, ReadStart, Result};
//!
//! # async fn quickstart() -> Result<()> {
//! let client = Client::connect(Config::new(["127.0.0.1:9092"])).await?;
//! client.admin().create_topic(&NewTopic::new("orders", 4)).await?;
//!
//! let producer = client.producer(ProducerOptions::default());
//! let record = Record { value: Some("hello".into()), ..Record::default() };
//! let ack = producer.send("orders", record).await?.await?;
//! println!("stored at offset {:?}", ack.first_offset);
//!
//! let starts = (0..4).map(|partition| ReadStart::new("orders", partition, Position::Earliest));
//! let mut events = client.consumer().subscribe(starts.collect(), ReadOptions::default());
//! while let Some(event) = events.next().await {
//!     if let Event::Data(data) = event? {
//!         println!("{} records from partition {}", data.records.len(), data.partition);
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Consumer groups
//! The members of a group divide the partitions, and the service keeps their offsets. Records are
//! delivered at least once; `docs/recipes.md` shows exactly once.
//! ```no_run
//! # use helix_client::{Client, GroupEvent, Result};
//! # async fn read(client: Client) -> Result<()> {
//! let group = client.consumer_group("billing").topics(["orders"]).pattern("payments.*");
//! let mut consumer = group.join();
//! while let Some(event) = consumer.next().await {
//!     match event? {
//!         GroupEvent::Data(data) => println!("{} records of {}", data.records.len(), data.topic),
//!         // The last chance to commit; the next call releases them.
//!         GroupEvent::Revoked(partitions) => println!("gives up {} partitions", partitions.len()),
//!         GroupEvent::Assigned(_) | GroupEvent::Lost(_) | GroupEvent::CaughtUp { .. } => {}
//!     }
//! }
//! consumer.close().await
//! # }
//! ```
//! Calling for the next event says that the application is done with the last event. Automatic
//! commits count only such records, so a record that was not handled is read again.
//!
//! # Errors
//! Every call returns [`Error`]. It states the service's reason, whether the same request may
//! succeed later (`retryable`), and whether it may have been applied (`may_have_applied`).
//! Retries have already been made by then, until [`Config::request_timeout`] passed.

pub mod admin;
pub mod append;
mod authorized_channel;
mod call_spec;
pub mod client;
pub mod compression;
pub mod config;
pub mod connection;
mod connector;
pub mod consumer;
#[cfg(feature = "programs")]
pub mod contexts;
mod coordinator;
pub mod error;
#[cfg(feature = "programs")]
pub mod exit;
mod gateway;
pub mod group;
mod identity;
pub mod partitioner;
pub mod pending;
pub mod producer;
mod refusal;
mod retry;
pub mod routing;
pub mod session;
mod tls_options;
pub mod token;
pub mod topic;

pub use admin::{AccessGrant, Admin, NewTopic, SeekOptions};
pub use append::{Ack, AppendOptions, IntoBatch};
pub use authorized_channel::AuthorizedChannel;
pub use client::Client;
pub use compression::{BatchCompressor, Compression};
pub use config::{Config, Dial, Transport};
pub use connection::Connection;
pub use consumer::{
    Batches, ConsumedRecord, Consumer, Event, FetchOptions, OnRecreate, Position, ReadOptions,
    ReadSource, ReadStart, Records, Subscription, UndecodableBatch,
};
pub use error::{Error, Failure, Origin, RecreatedTopic, Result};
pub use group::{
    AssignedPartition, AutoCommit, GroupConsumer, GroupConsumerBuilder, GroupEvent, OffsetToCommit,
    StartPolicy,
};
pub use pending::{PendingCall, PendingCalls};
pub use producer::{DeliveryFuture, Producer, ProducerOptions};
pub use routing::Route;
pub use session::{AckFuture, Session, SessionOptions};
pub use tls_options::TlsOptions;
pub use token::TokenSource;
pub use topic::TopicRef;

/// The wire types, for requests and responses that this crate passes through.
pub use helix_proto as proto;

/// Compiles the Rust code of the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct ReadmeExamples;

/// Compiles the Rust code of the quickstart.
#[cfg(doctest)]
#[doc = include_str!("../../docs/quickstart-rust.md")]
struct QuickstartExamples;
