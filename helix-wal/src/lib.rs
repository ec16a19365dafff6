//! A durable, segmented log of opaque entries, readable by index and by stream position.
//!
//! Each entry has a Raft term and index. The log knows nothing of Raft itself, of networks or of
//! async runtimes.
//!
//! A log lives in one data directory and is written by one thread. Everything queued during a sync
//! becomes one write and one sync. Truncations and votes use the same queue, in the order of the
//! calls. Entries are readable as soon as they are queued; a callback reports when they are
//! durable.
//!
//! A state machine reads the entries in index order and states the stream positions of each one
//! ([`Wal::place`]). From then on the entry is readable by stream and position. It stays so after
//! it has left the Raft log ([`Wal::purge`]), until the stream is trimmed. Files are freed when
//! they hold nothing that is needed.
//!
//! ```
//! use std::sync::{Arc, mpsc};
//!
//! use helix_wal::storage::DirStorage;
//! use helix_wal::{Entry, LogId, Options, Payload, Placement, ReadMode, Wal};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let directory = directory.path();
//! let options = Options { segment_bytes: 1 << 20, ..Options::default() };
//! let storage = Arc::new(DirStorage::open(directory)?);
//! let (wal, writer, keeper, recovered) = Wal::open(storage, options)?;
//! writer.spawn()?;
//! keeper.spawn()?;
//! assert!(recovered.created);
//!
//! let payload = Payload { bytes: "hello".into(), crc: crc32fast::hash(b"hello"), crc_seed: 0 };
//! let id = LogId { term: 1, index: 0 };
//! let entry = Entry { id, stream: 7, head: Default::default(), payload };
//! let (sender, result) = mpsc::channel();
//! wal.append(vec![entry], Box::new(move |durable| sender.send(durable).unwrap()));
//! result.recv()??;
//!
//! wal.place(0, Some(Placement { stream: 7, first: 0, count: 1, time: 1 }))?;
//! let found = wal.read_stream(7, 0, 1, 1 << 20, ReadMode::Blocking)?.unwrap();
//! assert_eq!(&found[0].payload.bytes[..], b"hello");
//! wal.close();
//! # Ok(())
//! # }
//! ```
//!
//! # What is promised
//!
//! - Entries that a callback reported as durable survive a crash. Other entries may or may not.
//! - Bytes that do not verify are never returned. A sealed segment with a damaged footer is
//!   quarantined and does not prevent reads of the rest ([`Recovered::quarantined`]).
//! - A torn end that was never reported as durable is discarded at the next open. Damage to
//!   anything else is an error that names the file and the bytes.
//! - One limit: damage to the very last group, before anything was written after it, looks like a
//!   torn write. The log therefore writes a sync marker after it once it is idle.
//! - The first failed write or sync poisons the log ([`Wal::on_poisoned`]); nothing is retried.
//! - A full disk refuses appends before anything is written, and appends succeed again once there
//!   is space. The log ends only if an entry that does not fit was already placed. This can happen
//!   on a follower whose leader had space. Such a log has to be opened again.
//! - A shortage of disk space, file descriptors or memory neither poisons the log nor counts as
//!   damage ([`Error::is_shortage`]). A group that finds no space in its segment waits, and is
//!   written again unchanged. One exception: a directory sync that fails after the state file was
//!   replaced poisons the log, because a crash may then find either state.
//! - Nothing is logged while a lock is held.
//!
//! # Source layout
//!
//! A directory imports only from directories below it in this table, and from the files `error`,
//! `sync` and `types`, which import none of them.
//!
//! | directory | contents |
//! |---|---|
//! | `wal` | [`Wal`], the public handle |
//! | `maintenance` | [`Keeper`] prepares, seals and frees segments; [`Scrub`] re-reads them |
//! | `compaction` | rewrites live entries of sealed segments into cold ones |
//! | `recovery` | opens, inspects, quarantines and truncates a log |
//! | `write` | [`Writer`], checkpoints and [`ColdWriter`] |
//! | `read` | reads by index and by stream position |
//! | `shared` | state shared by handles and threads: lock, queue, wake-ups, [`Options`] |
//! | `memory` | the log in memory: slots, streams and live segments |
//! | `files` | segment files, the state file and the data directory |
//! | `format` | bytes of the files |
//! | `storage` | the disk, real or simulated |
//!
//! `docs/wal-format.md` describes the files.

mod compaction;
mod error;
mod files;
mod format;
mod maintenance;
mod memory;
mod read;
mod recovery;
mod shared;
pub mod storage;
mod sync;
mod types;
mod wal;
mod write;

pub use error::Error;
pub use files::cold_segment::ColdSegments;
pub use files::open_files::FileCache;
pub use maintenance::keeper::Keeper;
pub use maintenance::scrub::{Scrub, Scrubbed};
pub use recovery::inspect::{
    EntryVisitor, Finding, InspectedEntry, LogReport, SegmentReport, SegmentState, inspect,
    inspect_entries, verify,
};
pub use recovery::quarantine::QuarantinedLog;
pub use recovery::truncate_damage::{DamagedEnd, LostStream};
pub use shared::cleaning::{BackgroundWorker, CleanRequest, EntryFilter, FilteredEntry};
pub use shared::group_times::{GroupStamp, GroupTimes};
pub use shared::options::{Options, Preparation};
pub use types::{
    CleanMark, DurableCallback, Entry, LiveEntries, LiveEntry, LogId, LogState, NextStep, Payload,
    Placement, ReadMode, Recovered, SYNC_BOUNDS_US, StoredEntry, StreamRow, WalStats,
};
pub use wal::Wal;
pub use wal::segment_repair::SegmentDamage;
pub use write::cold_writer::ColdWriter;
pub use write::writer::Writer;
