//! Failures on demand: which operation of a storage fails next, and how.
//! Shared by the simulated disk and by the wrapper around a real one.

use std::io;

/// What a storage is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    Lock,
    List,
    Create,
    Open,
    Rename,
    Remove,
    SyncDir,
    Write,
    Sync,
    Read,
    TryRead,
    ReadDevice,
    /// Advice: it cannot fail, but it can be seen.
    WillRead,
}

impl Operation {
    /// Whether the operation can change what a crash leaves behind.
    pub fn is_mutating(self) -> bool {
        matches!(
            self,
            Self::Create | Self::Rename | Self::Remove | Self::SyncDir | Self::Write | Self::Sync
        )
    }
}

/// A failure to come: of the operations that match, `after` more succeed and the next one fails.
#[derive(Debug, Clone)]
pub struct Fault {
    pub operation: Operation,
    /// Only for files whose name, when they were created or opened, contained this; any file when
    /// empty.
    pub file: String,
    pub after: u64,
    /// Whether all later ones fail too.
    pub lasting: bool,
    pub error: io::ErrorKind,
}

impl Fault {
    /// The next operation of this kind fails, once.
    pub fn next(operation: Operation) -> Self {
        let error = io::ErrorKind::Other;
        Self { operation, file: String::new(), after: 0, lasting: false, error }
    }

    /// Only on files whose name, when they were created or opened, contained `name`.
    pub fn of(mut self, name: &str) -> Self {
        self.file = name.to_owned();
        self
    }

    /// After `count` more that succeed.
    pub fn after(mut self, count: u64) -> Self {
        self.after = count;
        self
    }

    /// And all later ones.
    pub fn lasting(mut self) -> Self {
        self.lasting = true;
        self
    }

    /// With this kind of error instead of a plain input/output error.
    pub fn error(mut self, error: io::ErrorKind) -> Self {
        self.error = error;
        self
    }
}

/// The failures that are still to come.
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

    /// Counts one operation; an error if it is to fail.
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
            failed = failed.or(Some(fault.error));
            fault.lasting
        });
        match failed {
            Some(kind) => Err(io::Error::new(kind, format!("injected into {operation:?}"))),
            None => Ok(()),
        }
    }
}
