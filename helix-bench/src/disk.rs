//! Describes the disk of a directory, as far as the system tells: Linux only. Its speed is that of
//! an earlier run of `wal`.

use std::fs::OpenOptions;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::result_file::read_result;

/// Longest name of a disk model that is read.
const MODEL_BYTES_MAX: u64 = 256;
/// Longest list of mounts that is read.
const MOUNTS_BYTES_MAX: u64 = 1 << 20;

/// Disk of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(crate) struct DiskInfo {
    /// Type of the file system, such as "ext4".
    pub(crate) file_system: String,
    /// Device or other source of the mount.
    pub(crate) device: String,
    /// Model of the disk; `None` for most virtual disks, which have none.
    pub(crate) model: Option<String>,
}

impl DiskInfo {
    /// Returns the disk of an existing directory of this host; `None` if it is not known.
    pub(crate) fn of(directory: &Path) -> Option<Self> {
        let directory = directory.canonicalize().ok()?;
        let mounts = read(Path::new("/proc/self/mountinfo"), MOUNTS_BYTES_MAX)?;
        let mount = Mount::of(&directory, &mounts)?;
        // A partition has the model in the directory of its disk.
        let block = Path::new("/sys/dev/block").join(mount.number).canonicalize().ok();
        let model = block.and_then(|block| {
            let disks = [Some(block.as_path()), block.parent()];
            disks.into_iter().flatten().find_map(|disk| {
                let model = read(&disk.join("device/model"), MODEL_BYTES_MAX)?;
                Some(model.trim().to_owned()).filter(|model| !model.is_empty())
            })
        });
        Some(Self {
            file_system: mount.file_system.to_owned(),
            device: mount.source.to_owned(),
            model,
        })
    }

    /// Returns the disk of a node's data directory, if the node runs on this host.
    pub(crate) fn of_node(address: &str, data_dir: &str) -> Option<Self> {
        let directory = Path::new(data_dir);
        // A relative one is relative to the node's working directory.
        if !is_of_this_host(address) || !directory.is_absolute() {
            return None;
        }
        Self::of(directory)
    }
}

/// Speed of a disk, measured by `wal`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub(crate) struct MeasuredDisk {
    pub(crate) disk: Option<DiskInfo>,
    /// Sequential writes of the log, each group synced, in units of 10^6 bytes.
    pub(crate) sequential_write_mb_per_sec: f64,
    /// Bytes of a group.
    pub(crate) group_size: f64,
    pub(crate) sync_p50_us: f64,
    pub(crate) sync_p99_us: f64,
}

impl MeasuredDisk {
    /// Returns the disk that a stored result of `wal` is of.
    ///
    /// # Errors
    /// The file cannot be read, or is not such a result.
    pub(crate) fn of_result(path: &Path) -> Result<Self> {
        let name = path.display();
        let result = read_result(path).context("--nodes-disk")?;
        ensure!(
            result["mode"] == "wal" && result["storage"] == "disk",
            "--nodes-disk {name} is no result of `wal` on a disk; make one on the host of the \
             nodes: helix-bench wal --dir NEW_DIRECTORY --json FILE"
        );
        let number = |field: &str| {
            result[field].as_f64().with_context(|| format!("--nodes-disk {name} has no {field}"))
        };
        Ok(Self {
            disk: DiskInfo::deserialize(&result["disk"]).ok(),
            sequential_write_mb_per_sec: number("mb_per_sec")?,
            group_size: number("group_size")?,
            sync_p50_us: number("sync_p50_us")?,
            sync_p99_us: number("sync_p99_us")?,
        })
    }
}

/// Reports whether an address names this host for certain.
fn is_of_this_host(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    address.starts_with("unix:") || ["127.0.0.1", "localhost", "[::1]"].contains(&host)
}

/// Entry of `/proc/self/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
struct Mount<'a> {
    /// Major and minor number of the device.
    number: &'a str,
    file_system: &'a str,
    source: &'a str,
}

impl<'a> Mount<'a> {
    /// Finds the mount of a directory. A later mount covers an earlier one at the same path.
    fn of(directory: &Path, mounts: &'a str) -> Option<Self> {
        let mount = |line: &'a str| {
            let (place, what) = line.split_once(" - ")?;
            let mut place = place.split(' ').skip(2);
            let number = place.next()?;
            let path = place.nth(1)?.replace("\\040", " ");
            let (file_system, rest) = what.split_once(' ')?;
            let source = rest.split(' ').next()?;
            let is_above = directory.starts_with(&path);
            is_above.then_some((path.len(), Self { number, file_system, source }))
        };
        mounts.lines().filter_map(mount).max_by_key(|(length, _)| *length).map(|(_, mount)| mount)
    }
}

fn read(path: &Path, bytes_max: u64) -> Option<String> {
    let file = OpenOptions::new().read(true).open(path).ok()?;
    let mut text = String::new();
    file.take(bytes_max).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_belongs_to_the_innermost_and_latest_mount() {
        let mounts = "22 27 0:21 / /proc rw - proc proc rw\n\
            27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard\n\
            30 27 259:1 / /data rw - ext4 /dev/old rw\n\
            31 27 259:2 / /data rw shared:2 master:1 - xfs /dev/nvme0n1p2 rw\n\
            32 27 0:40 / /with\\040space rw - tmpfs tmpfs rw\n\
            unreadable\n";
        let of = |path: &str| {
            let mount = Mount::of(Path::new(path), mounts).unwrap();
            (mount.number, mount.file_system, mount.source)
        };
        assert_eq!(of("/data/1"), ("259:2", "xfs", "/dev/nvme0n1p2"));
        // The name of another directory may start with that of the mount.
        assert_eq!(of("/database"), ("254:0", "ext4", "/dev/vda"));
        assert_eq!(of("/with space/a"), ("0:40", "tmpfs", "tmpfs"));
        assert_eq!(Mount::of(Path::new("/data"), ""), None);
    }

    #[test]
    fn speed_of_a_disk_is_that_of_a_stored_result() {
        let dir = tempfile::tempdir().unwrap();
        let stored = |name: &str, result: serde_json::Value| {
            let path = dir.path().join(name);
            crate::figures::write_file(&path, result.to_string().as_bytes()).unwrap();
            MeasuredDisk::of_result(&path)
        };
        let mut result = serde_json::json!({
            "mode": "wal", "storage": "disk", "mb_per_sec": 512.5, "group_size": 1 << 20,
            "sync_p50_us": 70, "sync_p99_us": 170,
            "disk": { "file_system": "ext4", "device": "/dev/a", "model": null },
        });
        let disk = stored("wal.json", result.clone()).unwrap();
        assert_eq!((disk.sequential_write_mb_per_sec, disk.sync_p99_us), (512.5, 170.0));
        assert_eq!(disk.disk.unwrap().file_system, "ext4");
        result["disk"] = serde_json::Value::Null;
        assert_eq!(stored("unknown.json", result.clone()).unwrap().disk, None);
        result["storage"] = "memory".into();
        let error = stored("memory.json", result).unwrap_err().to_string();
        assert!(error.contains("is no result of `wal` on a disk"), "{error}");
        assert!(MeasuredDisk::of_result(&dir.path().join("none")).is_err());
    }

    #[test]
    fn disk_of_another_host_is_not_described() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().display().to_string();
        assert_eq!(DiskInfo::of_node("10.0.0.1:9092", &directory), None);
        assert_eq!(DiskInfo::of_node("127.0.0.1:9092", ""), None);
        assert_eq!(DiskInfo::of_node("127.0.0.1:9092", "src"), None);
        assert_eq!(DiskInfo::of(Path::new("/none/at/all")), None);
        for address in ["127.0.0.1:9092", "localhost:1", "[::1]:1", "unix:/run/helix.sock"] {
            assert!(is_of_this_host(address), "{address}");
        }
        if cfg!(target_os = "linux") {
            assert!(DiskInfo::of_node("localhost:9092", &directory).is_some());
        }
    }
}
