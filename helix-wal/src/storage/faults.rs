//! Failures on demand, shared by the simulated disk and the wrapper around a real one.

use std::io;

/// An operation of a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    Lock,
    List,
    Create,
    Open,
    Rename,
    Exchange,
    Remove,
    SyncDir,
    Write,
    Sync,
    Read,
    TryRead,
    ReadDevice,
    /// A hint: it cannot fail, but it is recorded.
    WillRead,
}

impl Operation {
    /// Returns whether the operation can change what a crash leaves behind.
    pub fn is_mutating(self) -> bool {
        matches!(
            self,
            Self::Create
                | Self::Rename
                | Self::Exchange
                | Self::Remove
                | Self::SyncDir
                | Self::Write
                | Self::Sync
        )
    }
}

/// A planned failure: `after` more matching operations succeed, and the next one fails.
#[derive(Debug, Clone)]
pub struct Fault {
    pub operation: Operation,
    /// Only for files whose name, when created or opened, contained this; empty for any file.
    pub file: String,
    pub after: u64,
    /// All later matching operations fail too.
    pub lasting: bool,
    pub error: io::ErrorKind,
    /// Error number of the operating system, instead of `error`.
    pub errno: Option<i32>,
}

impl Fault {
    /// Fails the next operation of this kind, once.
    pub fn next(operation: Operation) -> Self {
        let error = io::ErrorKind::Other;
        Self { operation, file: String::new(), after: 0, lasting: false, error, errno: None }
    }

    /// Limits the failure to files whose name, when created or opened, contained `name`.
    pub fn of(mut self, name: &str) -> Self {
        self.file = name.to_owned();
        self
    }

    /// Lets `count` more operations succeed first.
    pub fn after(mut self, count: u64) -> Self {
        self.after = count;
        self
    }

    /// Fails all later operations too.
    pub fn lasting(mut self) -> Self {
        self.lasting = true;
        self
    }

    /// Uses this kind of error instead of a plain input/output error.
    pub fn error(mut self, error: io::ErrorKind) -> Self {
        self.error = error;
        self
    }

    /// Uses this error number of the operating system, such as `EMFILE`.
    pub fn errno(mut self, errno: i32) -> Self {
        self.errno = Some(errno);
        self
    }
}

/// The planned failures.
#[derive(Debug, Clone, Default)]
pub(super) struct Faults {
    list: Vec<Fault>,
}

impl Faults {
    pub(super) fn add(&mut self, fault: Fault) {
        self.list.push(fault);
    }

    pub(super) fn clear(&mut self) {
        self.list.clear();
    }

    /// Counts one operation; an error if it is planned to fail.
    pub(super) fn check(&mut self, operation: Operation, file: &str) -> io::Result<()> {
        let mut failed = None;
        self.list.retain_mut(|fault| {
            if fault.operation != operation || !file.contains(fault.file.as_str()) {
                return true;
            }
            if fault.after > 0 {
                fault.after -= 1;
                return true;
            }
            failed = failed.or(Some((fault.error, fault.errno)));
            fault.lasting
        });
        match failed {
            Some((_, Some(errno))) => Err(io::Error::from_raw_os_error(errno)),
            Some((kind, None)) => Err(io::Error::new(kind, format!("injected into {operation:?}"))),
            None => Ok(()),
        }
    }
}
