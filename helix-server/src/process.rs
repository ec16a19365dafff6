//! CPU time and memory of this process, as the operating system reports them.
//! For metrics and benchmarks; no decision depends on them.

use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time of the process since it started, user and system.
pub(crate) fn cpu_time_us() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let micros = u64::try_from(time.tv_nsec / 1_000).unwrap_or(0);
    seconds * 1_000_000 + micros
}

/// Returns the resident memory; 0 if the system does not report it.
pub(crate) fn rss_bytes() -> u64 {
    resident_pages().unwrap_or(0) * rustix::param::page_size() as u64
}

/// Reads the resident set, in pages: the second number of Linux' `statm`.
fn resident_pages() -> Option<u64> {
    use rustix::fs::{Mode, OFlags, open};

    let file = open("/proc/self/statm", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut bytes = [0; 128];
    let read = rustix::io::read(&file, &mut bytes).ok()?;
    std::str::from_utf8(&bytes[..read]).ok()?.split(' ').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_uses_time_and_memory() {
        let before = cpu_time_us();
        let sum = (0..10_000_000_u64).fold(0, |sum: u64, next| sum.wrapping_mul(31) + next);
        assert_ne!(std::hint::black_box(sum), 1);
        assert!(cpu_time_us() > before);
        if cfg!(target_os = "linux") {
            assert!(rss_bytes() > 1 << 20);
        }
    }
}
