//! What can go wrong, by what the caller can do about it.
//! Every variant says where; none carries a payload.

use std::io;
use std::ops::Range;

/// Why an operation on the log failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The disk refused a write or a sync. The log is poisoned: nothing is retried, every waiting
    /// and later call fails with this. The appends that were waiting may or may not be on disk.
    #[error("log is poisoned: {operation} of {file} failed: {reason}")]
    Poisoned { operation: &'static str, file: String, reason: String },
    /// A read failed or bytes on disk do not verify. The rest of the log stays usable.
    /// No bytes: the file as a whole, which may be missing.
    #[error("{}", damage(file, bytes, what))]
    Damaged { file: String, bytes: Range<u64>, what: String },
    /// A read failed in the operating system.
    #[error("{operation} of {file}: {reason}")]
    Io { operation: &'static str, file: String, reason: String },
    /// The entry or position is below what is kept.
    #[error("{asked} was trimmed: the first one kept is {first}")]
    Trimmed { asked: u64, first: u64 },
    /// The entry or position is not there yet.
    #[error("{asked} is not there yet: the log ends before {next}")]
    Beyond { asked: u64, next: u64 },
    /// The disk has no room for another segment. Nothing was written; reads go on.
    #[error("no room for another segment: {free_bytes} bytes free, {needed_bytes} needed")]
    DiskFull { free_bytes: u64, needed_bytes: u64 },
    /// Another process has the folder, or it was written by something newer or for someone else.
    #[error("{0}")]
    Unusable(String),
    /// The log was closed.
    #[error("log is closed")]
    Closed,
}

fn damage(file: &str, bytes: &Range<u64>, what: &str) -> String {
    if bytes.is_empty() {
        return format!("{file}: {what}");
    }
    format!("{file} is damaged at bytes {}..{}: {what}", bytes.start, bytes.end)
}

/// The disk failed: what the log is poisoned with.
pub(crate) fn poison(operation: &'static str, file: &str, e: &io::Error) -> Error {
    Error::Poisoned { operation, file: file.to_owned(), reason: e.to_string() }
}

/// A failed call that leaves everything as it was.
pub(crate) fn failed(operation: &'static str, file: &str, e: &io::Error) -> Error {
    Error::Io { operation, file: file.to_owned(), reason: e.to_string() }
}
