//! The one place where work that waits for the disk leaves the async threads.
//! A simulation, whose disk never waits, runs it in place.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use helix_wal::{Error, How};
use tokio::sync::Semaphore;

use crate::limits;

/// Runs reads of one log: from memory or the page cache at once, else on a blocking thread.
#[derive(Debug, Clone)]
pub struct DiskReads {
    in_place: bool,
    /// Cold reads share one device queue with the writer: few at a time.
    cold: Arc<Semaphore>,
    /// What of the log was found damaged, in words, each once.
    damage: Arc<Mutex<Vec<String>>>,
}

/// So many places that are damaged are told apart; all of them end in the same way.
const DAMAGE_MAX: usize = 16;

impl DiskReads {
    pub fn new(in_place: bool) -> Self {
        let cold = Arc::new(Semaphore::new(limits::COLD_READS_PER_SHARD_MAX));
        Self { in_place, cold, damage: Arc::default() }
    }

    fn lock_damage(&self) -> MutexGuard<'_, Vec<String>> {
        self.damage.lock().expect("no panic while it is held")
    }

    /// What was found damaged so far.
    pub fn damage(&self) -> Vec<String> {
        self.lock_damage().clone()
    }

    /// Notes an error if it means that the disk does not have what was written to it.
    pub fn note(&self, error: &Error) {
        if !matches!(error, Error::Damaged { .. } | Error::Io { operation: "read", .. }) {
            return;
        }
        let what = error.to_string();
        let mut damage = self.lock_damage();
        if damage.len() < DAMAGE_MAX && !damage.contains(&what) {
            tracing::error!(%what, "part of a log is damaged");
            damage.push(what);
        }
    }

    /// Asks `read` for what is cached, and only if that is not enough lets it wait for the disk.
    pub async fn run<T, F>(&self, read: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Fn(How) -> Result<Option<T>, Error> + Send + 'static,
    {
        let tried = self.try_run(read, How::Cached, How::Blocking);
        tried.await.inspect_err(|error| self.note(error))
    }

    /// As [`Self::run`], for what hardly anyone else reads: what is not in memory is read past the
    /// page cache. Even to look into that makes the kernel fetch what is not there.
    pub async fn run_passing<T, F>(&self, read: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Fn(How) -> Result<Option<T>, Error> + Send + 'static,
    {
        let tried = self.try_run(read, How::Memory, How::Passing);
        tried.await.inspect_err(|error| self.note(error))
    }

    async fn try_run<T, F>(&self, read: F, at_once: How, waiting: How) -> Result<T, Error>
    where
        T: Send + 'static,
        F: Fn(How) -> Result<Option<T>, Error> + Send + 'static,
    {
        if let Some(found) = read(at_once)? {
            return Ok(found);
        }
        let permit = self.cold.clone().acquire_owned().await.map_err(|_| Error::Closed)?;
        // Whoever read before us may have brought it into the page cache.
        if at_once == How::Cached
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

    /// Runs a long read, one that is never in memory, in the queue of cold reads.
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

    /// Runs something that waits for the disk.
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
