//! Times of groups, for the callbacks that follow them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Times of a group of requests that was written and synced together, by the log's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupTimes {
    /// Never 0.
    began_ns: u64,
    write_us: u32,
    sync_us: u32,
}

impl GroupTimes {
    /// Creates the times. The write and the sync are kept in microseconds, up to an hour.
    pub fn new(began: Duration, write: Duration, sync: Duration) -> Self {
        let micros = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        let began_ns = u64::try_from(began.as_nanos()).unwrap_or(u64::MAX).max(1);
        Self { began_ns, write_us: micros(write), sync_us: micros(sync) }
    }

    /// Returns the begin of the write.
    pub fn began(self) -> Duration {
        Duration::from_nanos(self.began_ns)
    }

    /// Returns the duration of the write.
    pub fn write(self) -> Duration {
        Duration::from_micros(self.write_us.into())
    }

    /// Returns the duration of the sync.
    pub fn sync(self) -> Duration {
        Duration::from_micros(self.sync_us.into())
    }
}

/// Times of a group, set by the writer and read without a lock.
///
/// The writer runs the callbacks of a group before it writes the next one, so that they read the
/// times of their own group.
#[derive(Debug, Default)]
pub struct GroupStamp {
    /// 0 before the first group.
    began_ns: AtomicU64,
    /// Microseconds of the write in the upper half, of the sync in the lower one.
    took_us: AtomicU64,
}

impl GroupStamp {
    /// Sets the times.
    pub fn set(&self, group: GroupTimes) {
        let took_us = u64::from(group.write_us) << 32 | u64::from(group.sync_us);
        self.took_us.store(took_us, Ordering::Relaxed);
        self.began_ns.store(group.began_ns, Ordering::Relaxed);
    }

    /// Returns the times; `None` before they are set, and for a log in memory.
    pub fn get(&self) -> Option<GroupTimes> {
        let began_ns = self.began_ns.load(Ordering::Relaxed);
        let took_us = self.took_us.load(Ordering::Relaxed);
        let low = |bits: u64| (bits & u64::from(u32::MAX)) as u32;
        (began_ns > 0).then(|| GroupTimes {
            began_ns,
            write_us: low(took_us >> 32),
            sync_us: low(took_us),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_were_set() {
        let stamp = GroupStamp::default();
        assert_eq!(stamp.get(), None);
        let us = Duration::from_micros;
        stamp.set(GroupTimes::new(us(7), us(30), us(5_000_000)));
        let times = stamp.get().unwrap();
        assert_eq!((times.began(), times.write(), times.sync()), (us(7), us(30), us(5_000_000)));
        let long = GroupTimes::new(Duration::ZERO, Duration::MAX, us(1));
        assert_eq!(long.write(), us(u32::MAX.into()));
        assert!(long.began() > Duration::ZERO);
    }
}
