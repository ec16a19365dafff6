//! CPU time and memory of this process, as Linux reports them.

use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time of the process since it started, user and system.
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the resident memory; 0 if the system does not report it.
pub(crate) fn resident_bytes() -> u64 {
    resident_pages().unwrap_or(0) * rustix::param::page_size() as u64
}

/// Reads the resident set, in pages: the second number of `statm`.
fn resident_pages() -> Option<u64> {
    use rustix::fs::{Mode, OFlags, open};

    let file = open("/proc/self/statm", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut bytes = [0; 128];
    let read = rustix::io::read(&file, &mut bytes).ok()?;
    std::str::from_utf8(bytes.get(..read)?).ok()?.split(' ').nth(1)?.parse().ok()
}
