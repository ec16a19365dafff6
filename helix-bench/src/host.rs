//! Describes the host that the benchmark runs on and measures its own CPU time.

use std::path::Path;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use schemars::JsonSchema;
use serde::Serialize;

/// Host that the client ran on.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub(crate) struct HostInfo {
    pub(crate) cores: usize,
    pub(crate) os: &'static str,
    pub(crate) arch: &'static str,
    pub(crate) kernel: String,
}

impl HostInfo {
    pub(crate) fn here() -> Self {
        let kernel = rustix::system::uname();
        Self {
            cores: cores(),
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            kernel: kernel.release().to_string_lossy().into_owned(),
        }
    }
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
