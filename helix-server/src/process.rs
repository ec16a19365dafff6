//! State of this process, as the operating system reports it: CPU time, memory, ignored signals.
//! Chooses the size of its pages, and the priority of background threads.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the CPU time of the process since it started, user and system.
pub(crate) fn cpu_time_us() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let micros = u64::try_from(time.tv_nsec / 1_000).unwrap_or(0);
    seconds * 1_000_000 + micros
}

/// Returns the CPU time of the calling thread.
pub(crate) fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Added to the nice value of background threads. Beside one busy thread per CPU they get 3 % of
/// it, whatever the value of the process is. No value is greater than [`NICE_MAX`].
const BACKGROUND_NICE: i32 = 15;
const NICE_MAX: i32 = 19;

/// Returns the nice value of background threads, from that of the others.
pub(crate) fn background_nice(nice: i32) -> i32 {
    NICE_MAX.min(nice + BACKGROUND_NICE)
}

/// Lets other threads have the CPU before the calling one, permanently.
///
/// Linux has a priority for each thread. Elsewhere the whole process would get this one.
pub(crate) fn lower_thread_priority() {
    if cfg!(target_os = "linux") {
        let nice = rustix::process::getpriority_process(None).unwrap_or(0);
        // Ignored: the thread then competes with the others.
        let _ = rustix::process::setpriority_process(None, background_nice(nice));
    }
}

/// Returns the resident memory; 0 if the system does not report it.
pub(crate) fn rss_bytes() -> u64 {
    resident_pages().unwrap_or(0) * rustix::param::page_size() as u64
}

/// Returns whether the process was started with SIGHUP ignored, as by `nohup`.
pub(crate) fn ignores_hangup() -> bool {
    let Some(status) = read_file::<{ 8 << 10 }>("/proc/self/status") else { return false };
    ignored_signals(&status).is_some_and(|ignored| ignored & HANGUP_BIT != 0)
}

/// SIGHUP is signal 1.
const HANGUP_BIT: u64 = 1;

/// Parses the set of ignored signals: a line of Linux' `status`, in hexadecimal digits.
fn ignored_signals(status: &str) -> Option<u64> {
    let digits = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(digits.trim(), 16).ok()
}

/// Reads the resident set, in pages: the second number of Linux' `statm`.
fn resident_pages() -> Option<u64> {
    read_file::<128>("/proc/self/statm")?.split(' ').nth(1)?.parse().ok()
}

/// Reads the first `BYTES` bytes of a file of `/proc`.
fn read_file<const BYTES: usize>(path: &str) -> Option<String> {
    use rustix::fs::{Mode, OFlags, open};

    let file = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut bytes = [0; BYTES];
    let read = rustix::io::read(&file, &mut bytes).ok()?;
    std::str::from_utf8(&bytes[..read]).ok().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_ignored_signals() {
        let status = "Name:\thelix-server\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n";
        assert_eq!(ignored_signals(status), Some(0x1001));
        assert_eq!(ignored_signals("Name:\thelix-server\n"), None);
    }

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
