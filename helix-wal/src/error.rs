//! Errors of the log, by what the caller can do about them.
//!
//! Every variant names the location; none contains a payload.

use std::io;
use std::ops::Range;

use rustix::io::Errno;

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
    /// The process or the system has no file descriptor or memory for a call.
    ///
    /// Nothing was changed and nothing is damaged; the call can be repeated.
    #[error("{operation} of {file}: {reason}; raise the limit of open files, or free memory")]
    Exhausted { operation: &'static str, file: String, reason: String },
    /// The entry or position is below the first one kept.
    #[error("{asked} was trimmed; the first one kept is {first}")]
    Trimmed { asked: u64, first: u64 },
    /// The entry or position does not exist yet.
    #[error("{asked} does not exist yet; the log ends before {next}")]
    Beyond { asked: u64, next: u64 },
    /// The disk or a quota has no space. Nothing was written; reads still work.
    ///
    /// `needed_bytes` is not above `free_bytes` if the file system refused a call although it
    /// states enough free space. Both are 0 if the numbers are unknown.
    #[error("{}", full(*free_bytes, *needed_bytes))]
    DiskFull { free_bytes: u64, needed_bytes: u64 },
    /// The call or the data directory cannot be used: locked, newer, or of another replica.
    #[error("{0}")]
    Unusable(String),
    /// The log was closed.
    #[error("log is closed")]
    Closed,
}

impl Error {
    /// Returns whether the call found no disk space, file descriptor or memory.
    ///
    /// Nothing is damaged, and the call can be repeated.
    pub fn is_shortage(&self) -> bool {
        matches!(self, Self::DiskFull { .. } | Self::Exhausted { .. })
    }

    /// Returns [`Self::DiskFull`] or [`Self::Exhausted`] if a failed call found a shortage, also if
    /// the call was one of the log and `e` only wraps its error.
    pub fn shortage_of(e: &io::Error) -> Option<Self> {
        if let Some(inner) = e.get_ref() {
            if let Some(error) = inner.downcast_ref::<Self>() {
                return error.is_shortage().then(|| error.clone());
            }
            if let Some(e) = inner.downcast_ref::<io::Error>() {
                return Self::shortage_of(e);
            }
        }
        Shortage::of(e).map(|shortage| shortage.into_error("use", "the directory", e))
    }
}

fn damage(file: &str, bytes: &Range<u64>, what: &str) -> String {
    if bytes.is_empty() {
        return format!("{file}: {what}");
    }
    format!("{file} is damaged at bytes {}..{}: {what}", bytes.start, bytes.end)
}

fn full(free_bytes: u64, needed_bytes: u64) -> String {
    if free_bytes < needed_bytes {
        return format!(
            "no disk space for another segment: {free_bytes} bytes free, {needed_bytes} needed; \
             free space, or trim or delete topics"
        );
    }
    "no disk space: the file system or a quota refused a write; free space, or raise the quota"
        .to_owned()
}

/// Reason why a call of the operating system failed that says nothing of the disk's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// No disk space, or a quota is used up.
    Space,
    /// No file descriptor or no memory.
    Resource,
}

impl Shortage {
    /// Classifies a failed call. The only place that decides what a shortage is.
    pub(crate) fn of(e: &io::Error) -> Option<Self> {
        match e.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Some(Self::Space),
            io::ErrorKind::OutOfMemory => Some(Self::Resource),
            // The standard library has no kind for them.
            _ => match Errno::from_io_error(e)? {
                Errno::NOSPC | Errno::DQUOT => Some(Self::Space),
                Errno::MFILE | Errno::NFILE | Errno::NOMEM => Some(Self::Resource),
                _ => None,
            },
        }
    }

    fn into_error(self, operation: &'static str, file: &str, e: &io::Error) -> Error {
        match self {
            Self::Space => Error::DiskFull { free_bytes: 0, needed_bytes: 0 },
            Self::Resource => {
                Error::Exhausted { operation, file: file.to_owned(), reason: e.to_string() }
            }
        }
    }
}

/// Returns whether the disk or a quota has no space for a call.
pub(crate) fn is_no_space(e: &io::Error) -> bool {
    Shortage::of(e) == Some(Shortage::Space)
}

/// Creates the error that poisons the log, even after a shortage: the outcome is unknown.
pub(crate) fn poison(operation: &'static str, file: &str, e: &io::Error) -> Error {
    Error::Poisoned { operation, file: file.to_owned(), reason: e.to_string() }
}

/// Creates the error of a failed change that can be repeated after a shortage.
///
/// Any other failure poisons the log.
pub(crate) fn changing(operation: &'static str, file: &str, e: &io::Error) -> Error {
    match Shortage::of(e) {
        Some(shortage) => shortage.into_error(operation, file, e),
        None => poison(operation, file, e),
    }
}

/// Creates the error of a failed call that leaves everything unchanged.
pub(crate) fn failed(operation: &'static str, file: &str, e: &io::Error) -> Error {
    match Shortage::of(e) {
        Some(shortage) => shortage.into_error(operation, file, e),
        None => Error::Io { operation, file: file.to_owned(), reason: e.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortages_are_no_failures() {
        let of = |errno: Errno| Shortage::of(&io::Error::from(errno));
        for errno in [Errno::NOSPC, Errno::DQUOT] {
            assert_eq!(of(errno), Some(Shortage::Space), "{errno:?}");
        }
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert_eq!(of(errno), Some(Shortage::Resource), "{errno:?}");
        }
        for errno in [Errno::IO, Errno::ROFS, Errno::NOENT, Errno::ACCESS] {
            assert_eq!(of(errno), None, "{errno:?}");
        }
        for kind in [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded] {
            let error = changing("write", "a", &kind.into());
            assert!(matches!(error, Error::DiskFull { .. }) && error.is_shortage(), "{error}");
        }
        for (free_bytes, needed_bytes) in [(0, 0), (1, 2)] {
            let said = Error::DiskFull { free_bytes, needed_bytes }.to_string();
            assert!(said.contains("; free space"), "{said}");
        }
        let error = failed("open", "a", &Errno::MFILE.into());
        assert!(matches!(error, Error::Exhausted { .. }) && error.is_shortage(), "{error}");
        let wrapped = io::Error::other(io::Error::new(io::ErrorKind::ResourceBusy, error.clone()));
        let found = Error::shortage_of(&wrapped).unwrap();
        assert_eq!(found.to_string(), error.to_string());
        let closed = io::Error::other(Error::Closed);
        assert!(Error::shortage_of(&closed).is_none());
        assert!(Error::shortage_of(&Errno::BUSY.into()).is_none());
        let error = changing("write", "a", &Errno::IO.into());
        assert!(matches!(error, Error::Poisoned { .. }) && !error.is_shortage(), "{error}");
    }
}
