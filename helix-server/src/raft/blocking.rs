//! Moves disk waits off the async threads: the only module that uses blocking threads.
//! A simulation, whose disk never waits, runs the work in place.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use helix_wal::{Error, ReadMode};
use tokio::sync::Semaphore;

use crate::limits;
use crate::sync;

/// Runs reads of one log: at once from memory or the page cache, else on a blocking thread.
#[derive(Debug, Clone)]
pub struct DiskReads {
    in_place: bool,
    /// Limits cold reads, which share the device queue with the writer.
    cold: Arc<Semaphore>,
    /// The damage found and not repaired so far, each once.
    damage: Arc<Mutex<Vec<FoundDamage>>>,
}

/// Damage that a read found in a file of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundDamage {
    /// Name of the damaged file.
    pub file: String,
    /// Description for operators.
    pub what: String,
}

/// Pause before a read that found no file descriptor is repeated.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// Longest list of damage. More would not change the repair.
const DAMAGE_MAX: usize = 16;

impl DiskReads {
    pub fn new(in_place: bool) -> Self {
        let cold = Arc::new(Semaphore::new(limits::COLD_READS_PER_SHARD_MAX));
        Self { in_place, cold, damage: Arc::default() }
    }

    fn lock_damage(&self) -> MutexGuard<'_, Vec<FoundDamage>> {
        sync::lock(&self.damage)
    }

    /// Returns the damage found and not repaired so far.
    pub fn damage(&self) -> Vec<FoundDamage> {
        self.lock_damage().clone()
    }

    /// Adds damage that was found before the log was reopened.
    pub fn carry_damage(&self, found: Vec<FoundDamage>) {
        let mut damage = self.lock_damage();
        for found in found {
            if damage.len() < DAMAGE_MAX && !damage.contains(&found) {
                damage.push(found);
            }
        }
    }

    /// Forgets the damage to a file that has been repaired.
    pub fn forget_damage(&self, file: &str) {
        self.lock_damage().retain(|found| found.file != file);
    }

    /// Records an error that means that the disk lost or changed data written to it.
    pub fn note(&self, error: &Error) {
        let file = match error {
            Error::Damaged { file, .. } | Error::Io { operation: "read", file, .. } => file.clone(),
            _ => return,
        };
        let found = FoundDamage { file, what: error.to_string() };
        let is_new = {
            let mut damage = self.lock_damage();
            let is_new = damage.len() < DAMAGE_MAX && !damage.contains(&found);
            if is_new {
                damage.push(found.clone());
            }
            is_new
        };
        if is_new {
            tracing::error!(what = found.what, "found damage in a log");
        }
    }

    /// Reads what is cached, and waits for the disk only if that is not enough.
    ///
    /// # Errors
    /// The error of the read; [`Error::Closed`] if the runtime ends meanwhile.
    pub async fn run<T, F>(&self, read: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Fn(ReadMode) -> Result<Option<T>, Error> + Send + 'static,
    {
        let tried = self.try_run(read, ReadMode::CachedOnly, ReadMode::Blocking);
        tried.await.inspect_err(|error| self.note(error))
    }

    /// Like [`Self::run`], but bypasses the page cache, for data that is read once.
    /// Even a read limited to the page cache makes the kernel fetch what is missing from it.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub async fn run_direct<T, F>(&self, read: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Fn(ReadMode) -> Result<Option<T>, Error> + Send + 'static,
    {
        let tried = self.try_run(read, ReadMode::MemoryOnly, ReadMode::Direct);
        tried.await.inspect_err(|error| self.note(error))
    }

    /// Like [`Self::run_direct`] or [`Self::run`], but repeats the read while the process has no
    /// file descriptor or memory for it: openraft would stop the replica.
    ///
    /// # Errors
    /// As [`Self::run`], except for [`Error::Exhausted`].
    pub async fn run_patiently<T, F>(&self, read: F, is_direct: bool) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Fn(ReadMode) -> Result<Option<T>, Error> + Clone + Send + 'static,
    {
        loop {
            let read = read.clone();
            let done = if is_direct { self.run_direct(read).await } else { self.run(read).await };
            match done {
                Err(Error::Exhausted { .. }) => tokio::time::sleep(EXHAUSTED_PAUSE).await,
                done => return done,
            }
        }
    }

    async fn try_run<T, F>(&self, read: F, at_once: ReadMode, waiting: ReadMode) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Fn(ReadMode) -> Result<Option<T>, Error> + Send + 'static,
    {
        if let Some(found) = read(at_once)? {
            return Ok(found);
        }
        let permit = self.cold.clone().acquire_owned().await.map_err(|_| Error::Closed)?;
        // The previous cold read may have brought it into the page cache.
        if at_once == ReadMode::CachedOnly
            && let Some(found) = read(at_once)?
        {
            return Ok(found);
        }
        let found = self
            .wait(move || {
                let found = read(waiting);
                drop(permit);
                found
            })
            .await
            .map_err(|_| Error::Closed)??;
        found.ok_or(Error::Closed)
    }

    /// Runs a long read, which is never cached, in the queue of cold reads.
    pub async fn cold<T, F>(&self, read: F) -> io::Result<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let permit = self.cold.clone().acquire_owned().await.map_err(io::Error::other)?;
        self.wait(move || {
            let found = read();
            drop(permit);
            found
        })
        .await
    }

    /// Runs work that waits for the disk.
    #[allow(clippy::disallowed_methods)] // The WAL's shell: the one user of blocking threads.
    pub async fn wait<T, F>(&self, work: F) -> io::Result<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        if self.in_place {
            return Ok(work());
        }
        tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
    }
}
