//! A wrapper around a storage that fails or stalls on demand, for nodes on a real directory.
//!
//! A failing operation is not executed. The effect of a failed sync on the page cache is not
//! modelled.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use super::faults::{Fault, Faults, Operation};
use super::{File, Storage};
use crate::sync::IgnorePoison;

/// Wraps a storage. Clones share the planned failures and stalls.
#[derive(Debug, Clone)]
pub struct FaultyStorage {
    inner: Arc<dyn Storage>,
    plan: Arc<Plan>,
}

/// Planned failures and stalls.
#[derive(Debug, Default)]
struct Plan {
    state: Mutex<State>,
    goes_on: Condvar,
}

#[derive(Debug, Default)]
struct State {
    faults: Faults,
    stalled: Vec<Operation>,
}

impl Plan {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent after every change, so a panic elsewhere does not matter.
        self.state.lock().ignore_poison()
    }

    /// Counts one operation, waits while it is stalled, and fails if that is planned.
    fn check(&self, operation: Operation, file: &str) -> io::Result<()> {
        let mut state = self.lock();
        while state.stalled.contains(&operation) {
            state = self.goes_on.wait(state).ignore_poison();
        }
        state.faults.check(operation, file)
    }
}

impl FaultyStorage {
    pub fn new(inner: Arc<dyn Storage>) -> Self {
        Self { inner, plan: Arc::default() }
    }

    /// Plans a failure.
    pub fn fail(&self, fault: Fault) {
        self.plan.lock().faults.add(fault);
    }

    /// Blocks operations of this kind until the storage is healed.
    pub fn stall(&self, operation: Operation) {
        self.plan.lock().stalled.push(operation);
    }

    /// Cancels the planned failures and releases stalled operations.
    pub fn heal(&self) {
        let mut state = self.plan.lock();
        state.faults.clear();
        state.stalled.clear();
        drop(state);
        self.plan.goes_on.notify_all();
    }

    fn check(&self, operation: Operation, file: &str) -> io::Result<()> {
        self.plan.check(operation, file)
    }

    fn wrap(&self, name: &str, inner: Arc<dyn File>) -> Arc<dyn File> {
        let name = name.to_owned();
        Arc::new(FaultyFile { name, inner, plan: Arc::clone(&self.plan) })
    }
}

impl Storage for FaultyStorage {
    fn lock(&self) -> io::Result<Box<dyn Send + Sync>> {
        self.check(Operation::Lock, "lock")?;
        self.inner.lock()
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.check(Operation::List, "")?;
        self.inner.list()
    }

    fn create(&self, name: &str, len: u64) -> io::Result<Arc<dyn File>> {
        self.check(Operation::Create, name)?;
        Ok(self.wrap(name, self.inner.create(name, len)?))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        self.check(Operation::Open, name)?;
        Ok(self.wrap(name, self.inner.open(name)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.check(Operation::Rename, from)?;
        self.inner.rename(from, to)
    }

    fn exchange(&self, a: &str, b: &str) -> io::Result<()> {
        self.check(Operation::Exchange, a)?;
        self.inner.exchange(a, b)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.check(Operation::Remove, name)?;
        self.inner.remove(name)
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.check(Operation::SyncDir, "")?;
        self.inner.sync_dir()
    }

    fn free_bytes(&self) -> io::Result<u64> {
        self.inner.free_bytes()
    }

    fn direct_io(&self) -> bool {
        self.inner.direct_io()
    }

    fn reserves_space(&self) -> bool {
        self.inner.reserves_space()
    }

    fn writes_elsewhere(&self) -> bool {
        self.inner.writes_elsewhere()
    }

    fn describe(&self) -> String {
        format!("{} (with injected failures)", self.inner.describe())
    }
}

#[derive(Debug)]
struct FaultyFile {
    name: String,
    inner: Arc<dyn File>,
    plan: Arc<Plan>,
}

impl FaultyFile {
    fn check(&self, operation: Operation) -> io::Result<()> {
        self.plan.check(operation, &self.name)
    }
}

impl File for FaultyFile {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.check(Operation::Write)?;
        self.inner.write_at(data, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.check(Operation::Sync)?;
        self.inner.sync_data()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.check(Operation::Read)?;
        self.inner.read_at(buf, offset)
    }

    fn try_read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<bool> {
        self.check(Operation::TryRead)?;
        self.inner.try_read_at(buf, offset)
    }

    fn read_device_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.check(Operation::ReadDevice)?;
        self.inner.read_device_at(buf, offset)
    }

    fn unwritten_bytes(&self) -> io::Result<u64> {
        self.inner.unwritten_bytes()
    }

    fn will_read(&self, range: Range<u64>) {
        self.inner.will_read(range);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{BLOCK, SimulatedDisk};
    use super::*;

    #[test]
    fn planned_operation_fails_once() {
        let storage = FaultyStorage::new(Arc::new(SimulatedDisk::new(1)));
        let file = storage.create("a", BLOCK as u64).unwrap();
        storage.fail(Fault::next(Operation::Sync).of("a").after(1));
        file.sync_data().unwrap();
        assert!(file.sync_data().is_err());
        file.sync_data().unwrap();
        storage.fail(Fault::next(Operation::SyncDir).lasting());
        assert!(storage.sync_dir().is_err());
        assert!(storage.sync_dir().is_err());
        storage.heal();
        storage.sync_dir().unwrap();
    }
}
