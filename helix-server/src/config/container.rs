//! Limits of the container (control group) that this process runs in: memory and CPU time.
//! Reads versions 1 and 2 of Linux' control groups. Elsewhere there are no limits.

// Reads the kernel's files.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::{Path, PathBuf};

use crate::memory::MEMORY_LIMIT_MIN;

/// Part of the container's memory that is left to what the memory limit does not count: the
/// allocator's reserves, page tables, other processes.
const MEMORY_RESERVE_PART: u64 = 11;

/// Version 1 writes a number of this size for "unlimited": 2^63, rounded down to a page.
const UNLIMITED_BYTES: u64 = 1 << 62;

/// Limits of the container; `None` where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ContainerLimits {
    pub memory_bytes: Option<u64>,
    /// CPU time that the process may use per time: 1.5 for one and a half CPUs. A quota of all CPUs
    /// or more is none.
    pub cpus: Option<f64>,
}

impl ContainerLimits {
    /// Reads the limits of this process.
    pub fn of_process() -> Self {
        Self::read(Path::new("/"), allowed_cpus())
    }

    /// Reads the limits from the files below `root`, for a process that may run on `cpus` CPUs.
    fn read(root: &Path, cpus: u32) -> Self {
        let groups = ControlGroups::read(root);
        let memory_bytes = groups.memory_bytes().into_iter().min();
        let cpus_max = groups.cpus().into_iter().min_by(f64::total_cmp);
        Self { memory_bytes, cpus: cpus_max.filter(|quota| *quota < f64::from(cpus)) }
    }

    /// Returns the largest memory limit of a node that fits the container, in whole MiB.
    pub fn memory_limit_max(&self) -> Option<u64> {
        let usable = |bytes: u64| (bytes - bytes / MEMORY_RESERVE_PART) >> 20 << 20;
        self.memory_bytes.map(usable)
    }

    /// Returns what to do about a memory limit that does not fit the container, where a node needs
    /// at least `least`; `None` if it fits.
    pub fn memory_advice(&self, memory_limit: u64, least: u64) -> Option<String> {
        let fits = self.memory_limit_max().filter(|fits| *fits < memory_limit)?;
        let needed = |limit: u64| format!("{}MiB", memory_for(limit) >> 20);
        let give = format!("give the container {} or more", needed(memory_limit));
        Some(match (fits >= least, memory_limit > least) {
            (true, _) => format!("lower --memory-limit to {}MiB or less, or {give}", fits >> 20),
            // No limit fits.
            (false, true) => format!(
                "{give}, or at least {} with --memory-limit {}MiB",
                needed(least),
                least >> 20
            ),
            (false, false) => give,
        })
    }

    /// Returns the default of a setting where the container's limits change it.
    pub(super) fn default_of(&self, key: &str, default: Option<u64>) -> Option<String> {
        match key {
            "memory_limit" => {
                let fits = self.memory_limit_max()?.max(MEMORY_LIMIT_MIN);
                (fits < default?).then(|| format!("{}MiB", fits >> 20))
            }
            _ => None,
        }
    }
}

/// Returns the memory of a container that a memory limit of whole MiB fits, in whole MiB.
fn memory_for(memory_limit: u64) -> u64 {
    let part = MEMORY_RESERVE_PART;
    let bytes = memory_limit.div_ceil(part - 1).saturating_mul(part);
    bytes.div_ceil(1 << 20).saturating_mul(1 << 20)
}

/// Returns the number of CPUs that the process may run on, whatever its quota is.
#[cfg(target_os = "linux")]
fn allowed_cpus() -> u32 {
    // Fails on machines with more than 1,024 CPUs.
    rustix::thread::sched_getaffinity(None).map_or(u32::MAX, |cpus| cpus.count())
}

#[cfg(not(target_os = "linux"))]
fn allowed_cpus() -> u32 {
    u32::MAX
}

/// The directories of the process's control groups, innermost first, for each hierarchy.
struct ControlGroups {
    unified: Vec<PathBuf>,
    memory: Vec<PathBuf>,
    cpu: Vec<PathBuf>,
}

impl ControlGroups {
    fn read(root: &Path) -> Self {
        let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        let mut found = Self { unified: Vec::new(), memory: Vec::new(), cpu: Vec::new() };
        // Lines are "hierarchy:controllers:path"; version 2 has hierarchy 0 and no controllers.
        for line in groups.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) =
                (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let mount = root.join("sys/fs/cgroup");
            if controllers.is_empty() {
                found.unified.extend(upwards(&mount, path));
                found.unified.extend(upwards(&mount.join("unified"), path));
            } else {
                let has = |name: &str| controllers.split(',').any(|it| it == name);
                if has("memory") {
                    found.memory.extend(upwards(&mount.join("memory"), path));
                }
                if has("cpu") {
                    found.cpu.extend(upwards(&mount.join("cpu"), path));
                    found.cpu.extend(upwards(&mount.join(controllers), path));
                }
            }
        }
        found
    }

    fn memory_bytes(&self) -> Vec<u64> {
        let v2 = self.unified.iter().map(|group| group.join("memory.max"));
        let v1 = self.memory.iter().map(|group| group.join("memory.limit_in_bytes"));
        let bytes = v2.chain(v1).filter_map(|file| read_words(&file)?.first()?.parse().ok());
        bytes.filter(|bytes| *bytes < UNLIMITED_BYTES).collect()
    }

    fn cpus(&self) -> Vec<f64> {
        let v2 = self.unified.iter().filter_map(|group| {
            let words = read_words(&group.join("cpu.max"))?;
            quota(words.first()?, words.get(1)?)
        });
        let v1 = self.cpu.iter().filter_map(|group| {
            let word = |name| read_words(&group.join(name))?.into_iter().next();
            quota(&word("cpu.cfs_quota_us")?, &word("cpu.cfs_period_us")?)
        });
        v2.chain(v1).collect()
    }
}

/// Returns the directories of a group and of the groups around it.
///
/// In a container the path may be that of the host, of which only the end, or nothing, is mounted.
fn upwards(mount: &Path, path: &str) -> Vec<PathBuf> {
    let path = Path::new(path.trim_start_matches('/'));
    path.ancestors().map(|ancestor| mount.join(ancestor)).collect()
}

fn read_words(file: &Path) -> Option<Vec<String>> {
    let text = fs::read_to_string(file).ok()?;
    Some(text.split_whitespace().map(str::to_owned).collect())
}

/// Returns the CPUs of a quota; `None` for "max" and -1, which mean none.
fn quota(quota_us: &str, period_us: &str) -> Option<f64> {
    let (quota_us, period_us): (u64, u64) = (quota_us.parse().ok()?, period_us.parse().ok()?);
    (period_us > 0).then(|| quota_us as f64 / period_us as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with these files.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn limits(files: &[(&str, &str)]) -> ContainerLimits {
        ContainerLimits::read(tree(files).path(), 8)
    }

    #[test]
    fn reads_version_2_and_takes_the_smallest_limit_of_all_groups_around() {
        let files = [
            ("proc/self/cgroup", "0::/kubepods/pod1/c1\n"),
            ("sys/fs/cgroup/kubepods/pod1/c1/memory.max", "max\n"),
            ("sys/fs/cgroup/kubepods/pod1/c1/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/kubepods/pod1/memory.max", "536870912\n"),
            ("sys/fs/cgroup/kubepods/pod1/cpu.max", "150000 100000\n"),
            ("sys/fs/cgroup/kubepods/memory.max", "8589934592\n"),
        ];
        let wanted = ContainerLimits { memory_bytes: Some(512 << 20), cpus: Some(1.5) };
        assert_eq!(limits(&files), wanted);
    }

    #[test]
    fn reads_version_1_also_where_the_path_is_the_hosts() {
        let files = [
            ("proc/self/cgroup", "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "314572800\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "200000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
        ];
        let wanted = ContainerLimits { memory_bytes: Some(300 << 20), cpus: Some(2.0) };
        assert_eq!(limits(&files), wanted);
    }

    #[test]
    fn no_limit_is_none() {
        let unlimited = [
            ("proc/self/cgroup", "4:memory:/\n1:cpu:/\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/memory.max", "max\n"),
        ];
        assert_eq!(limits(&unlimited), ContainerLimits::default());
        assert_eq!(limits(&[]), ContainerLimits::default());
        let all_cpus =
            [("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/cpu.max", "800000 100000\n")];
        assert_eq!(limits(&all_cpus), ContainerLimits::default());
    }

    #[test]
    fn the_advice_for_a_small_container_names_values_that_a_node_takes() {
        let advice = |container_mib: u64, limit_mib: u64, least_mib: u64| {
            let limits = ContainerLimits { memory_bytes: Some(container_mib << 20), cpus: None };
            limits.memory_advice(limit_mib << 20, least_mib << 20)
        };
        assert_eq!(advice(300, 272, 256), None);
        let lower = "lower --memory-limit to 272MiB or less, or give the container 330MiB or more";
        assert_eq!(advice(300, 300, 256).as_deref(), Some(lower));
        let give = "give the container 282MiB or more";
        assert_eq!(advice(200, 256, 256).as_deref(), Some(give));
        let less =
            "give the container 564MiB or more, or at least 282MiB with --memory-limit 256MiB";
        assert_eq!(advice(200, 512, 256).as_deref(), Some(less));
        // More shards need more than the least limit of all nodes.
        let shards = "give the container 550MiB or more, or at least 440MiB with --memory-limit \
                      400MiB";
        assert_eq!(advice(300, 500, 400).as_deref(), Some(shards));
        for mib in 256..2_000 {
            let needed = ContainerLimits { memory_bytes: Some(memory_for(mib << 20)), cpus: None };
            assert!(needed.memory_limit_max().unwrap() >= mib << 20, "{mib}");
        }
    }

    #[test]
    fn memory_limit_follows_a_smaller_container() {
        let default = |mib: u64| {
            let limits = ContainerLimits { memory_bytes: Some(mib << 20), cpus: None };
            limits.default_of("memory_limit", Some(512 << 20))
        };
        assert_eq!(default(1024), None);
        assert_eq!(default(564), None);
        assert_eq!(default(550).as_deref(), Some("500MiB"));
        assert_eq!(default(300).as_deref(), Some("272MiB"));
        assert_eq!(default(100).as_deref(), Some("256MiB"), "the smallest limit that works");
    }
}
