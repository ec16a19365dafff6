//! CPU time and memory of this process, as Linux reports them.

use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time of the process since it started, user and system.
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the resident memory; 0 if the system does not report it.
pub(crate) fn resident_bytes() -> u64 {
    // Reads memory of the kernel, not a disk.
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|it| it.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}
