//! A durable, segmented log of opaque entries, each with a Raft term and index, that can also be
//! read by (stream, position). Knows nothing of Raft itself, of networks or of async runtimes.
//!
//! One log lives in one folder and is written by one thread: what queues up while a sync runs
//! becomes one write and one sync. Truncations and votes go the same way, in the order of the
//! calls. Entries can be read as soon as they are queued; the callback says when they are durable.
//!
//! A state machine reads entries in order of their index and says where it put each of them
//! ([`Wal::place`]). From then on an entry is found by stream and position too, also after it has
//! left the Raft log ([`Wal::purge`]), until the stream is trimmed. Files go when
//! nobody needs them.
//!
//! ```
//! use std::sync::{Arc, mpsc};
//!
//! use helix_wal::storage::DirStorage;
//! use helix_wal::{Entry, How, LogId, Options, Payload, Placement, Wal};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! let options = Options { segment_bytes: 1 << 20, ..Options::default() };
//! let storage = Arc::new(DirStorage::open(folder)?);
//! let (wal, writer, keeper, recovered) = Wal::open(storage, options)?;
//! writer.spawn()?;
//! keeper.spawn()?;
//! assert!(recovered.created);
//!
//! let payload = Payload { bytes: "hello".into(), crc: crc32fast::hash(b"hello"), crc_seed: 0 };
//! let id = LogId { term: 1, index: 0 };
//! let entry = Entry { id, stream: 7, head: Default::default(), payload };
//! let (told, result) = mpsc::channel();
//! wal.append(vec![entry], Box::new(move |durable| told.send(durable).unwrap()));
//! result.recv()??;
//!
//! wal.place(0, Some(Placement { stream: 7, first: 0, count: 1, time: 1 }))?;
//! let found = wal.read_stream(7, 0, 1, 1 << 20, How::Blocking)?.unwrap();
//! assert_eq!(&found[0].payload.bytes[..], b"hello");
//! wal.close();
//! # Ok(())
//! # }
//! ```
//!
//! # What is promised
//!
//! - What `done` said is durable survives a crash; what it never said may or may not.
//! - Bytes that do not verify are never handed out; a sealed segment that cannot be read does not
//!   keep the rest of the log from being read ([`Recovered::withheld`]). A torn end that was never
//!   said to be durable is cut at the next open; damage to anything else is an error that names the
//!   file and the bytes. The one limit: damage to the very last group, before anything was written
//!   after it, cannot be told from a torn write, so a mark follows it once the log is idle.
//! - The first failed write or sync ends the log ([`Wal::on_poisoned`]); nothing is tried again.
//! - A full disk refuses appends before anything is written, and goes away by itself. Only where
//!   what it has no room for was placed already, as by a follower of others that had room, the log
//!   ends, and has to be opened again.
//!
//! # Reading the code
//!
//! `frame`, `footer` and `state_file` are bytes; `log`, `slot`, `places`, `shorten`, `held` and
//! `streams` are the log in memory; `tip`, `writer` and `keeper` write, `nontemporal` copies what
//! they do; `sealed`, `scan`, `replay`, `copy` and `recovery` open; `read`, `live`, `load`,
//! `readers` and `files` read; `cold` writes segments at once, `received` has them outlive a
//! process, `install` makes them part of the log; `choose` and `compaction` rewrite; `scrub` reads
//! all of it anew; `aside` makes way for a log that takes the place of a damaged one, and `cut`
//! gives up a damaged end.
//! `docs/wal-format.md` draws the files.

mod aligned;
mod aside;
mod buffers;
mod choose;
mod cold;
mod compaction;
mod copy;
mod cut;
mod error;
mod files;
mod footer;
mod frame;
mod held;
mod idle;
mod inspect;
mod install;
mod keeper;
mod layout;
mod live;
mod load;
mod log;
mod nontemporal;
mod options;
mod page_cache;
mod places;
mod read;
mod readers;
mod received;
mod recovery;
mod replay;
mod scan;
mod scrub;
mod sealed;
mod segment;
mod shared;
mod shorten;
mod slot;
mod state_file;
mod state_io;
pub mod storage;
mod streams;
mod sync;
mod threads;
mod tip;
mod types;
mod wal;
mod writer;

pub use aside::Aside;
pub use cold::{ColdSegments, ColdWriter};
pub use cut::{DamagedEnd, LostStream};
pub use error::Error;
pub use inspect::{Finding, Report, SegmentReport, SegmentState, inspect, verify};
pub use keeper::Keeper;
pub use options::Options;
pub use scrub::{Scrub, Scrubbed};
pub use types::{
    Entry, How, LiveEntries, LiveEntry, LogId, LogState, Payload, Placement, Recovered,
    SYNC_BOUNDS_US, Stats, StoredEntry, StreamRow,
};
pub use wal::{Done, Next, Wal};
pub use writer::Writer;
