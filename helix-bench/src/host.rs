//! Describes the host that the benchmark runs on and measures its own CPU time.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use schemars::JsonSchema;
use serde::Serialize;

use crate::disk::{DiskInfo, MeasuredDisk};

/// Host that the client ran on.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct HostInfo {
    pub(crate) cores: usize,
    /// Name of the CPU; `None` if the system does not tell.
    pub(crate) cpu: Option<String>,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) os: &'static str,
    pub(crate) arch: &'static str,
    pub(crate) kernel: String,
    /// Disk of the working directory; `None` if the system does not tell.
    pub(crate) disk: Option<DiskInfo>,
    /// Disk of the nodes as `wal` measured it; `None` without --nodes-disk.
    pub(crate) nodes_disk: Option<MeasuredDisk>,
}

impl HostInfo {
    pub(crate) fn here() -> Self {
        let kernel = rustix::system::uname();
        Self {
            cores: cores(),
            cpu: system_value("/proc/cpuinfo", "model name"),
            memory_bytes: system_value("/proc/meminfo", "MemTotal").and_then(|text| kib(&text)),
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            kernel: kernel.release().to_string_lossy().into_owned(),
            disk: DiskInfo::of(Path::new(".")),
            nodes_disk: None,
        }
    }
}

/// Returns the first value with this name in a file of `/proc`.
fn system_value(path: &str, name: &str) -> Option<String> {
    let file = OpenOptions::new().read(true).open(path).ok()?;
    let mut lines = BufReader::new(file).lines().map_while(Result::ok);
    lines.find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

/// Returns the bytes of a size such as "16 kB", whose unit is 1,024 bytes.
fn kib(text: &str) -> Option<u64> {
    let (number, "kB") = text.split_once(' ')? else { return None };
    number.parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the CPU time of this process, user and system.
pub(crate) fn process_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    let nanos = u32::try_from(time.tv_nsec).unwrap_or_default();
    Duration::new(seconds, nanos)
}

/// Returns the command line of this process, without the directory of the program.
pub(crate) fn command_line() -> String {
    let mut arguments = std::env::args();
    let program = arguments.next().unwrap_or_default();
    let name = Path::new(&program).file_name().unwrap_or_default().to_string_lossy().into_owned();
    std::iter::once(name).chain(arguments).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_the_system_are_in_kib() {
        assert_eq!((kib("16 kB"), kib("16 MB"), kib("16")), (Some(16_384), None, None));
        assert_eq!(system_value("/proc/none", "MemTotal"), None);
        assert!(HostInfo::here().memory_bytes.is_none_or(|bytes| bytes > 1 << 20));
    }
}
