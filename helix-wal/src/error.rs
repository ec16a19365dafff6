//! Errors of the log, by what the caller can do about them.
//!
//! Every variant names the location; none contains a payload.

use std::io;
use std::ops::Range;

/// Reason why an operation on the log failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A write or a sync failed, and the log is poisoned: nothing is retried.
    ///
    /// Every waiting and later call fails with this error. The waiting appends may or may not be on
    /// disk.
    #[error("log is poisoned: {operation} of {file} failed: {reason}")]
    Poisoned { operation: &'static str, file: String, reason: String },
    /// Bytes on disk do not verify. The rest of the log stays usable.
    ///
    /// An empty range means the file as a whole, which may be missing.
    #[error("{}", damage(file, bytes, what))]
    Damaged { file: String, bytes: Range<u64>, what: String },
    /// The operating system failed a read or another call that leaves the log unchanged.
    #[error("{operation} of {file}: {reason}")]
    Io { operation: &'static str, file: String, reason: String },
    /// The entry or position is below the first one kept.
    #[error("{asked} was trimmed; the first one kept is {first}")]
    Trimmed { asked: u64, first: u64 },
    /// The entry or position does not exist yet.
    #[error("{asked} does not exist yet; the log ends before {next}")]
    Beyond { asked: u64, next: u64 },
    /// The disk has no space for another segment. Nothing was written; reads still work.
    #[error("no disk space for another segment: {free_bytes} bytes free, {needed_bytes} needed")]
    DiskFull { free_bytes: u64, needed_bytes: u64 },
    /// The call or the data directory cannot be used: locked, newer, or of another replica.
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

/// Creates the error that poisons the log after a disk failure.
pub(crate) fn poison(operation: &'static str, file: &str, e: &io::Error) -> Error {
    Error::Poisoned { operation, file: file.to_owned(), reason: e.to_string() }
}

/// Creates the error of a failed call that leaves everything unchanged.
pub(crate) fn failed(operation: &'static str, file: &str, e: &io::Error) -> Error {
    Error::Io { operation, file: file.to_owned(), reason: e.to_string() }
}
