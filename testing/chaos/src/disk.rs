//! Disk faults: system calls of a running node that fail or stall, and a small file system that can
//! be filled.
//!
//! Damage to files is in `segment_damage.rs`.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::output::print;

/// Longest wait for the tracer to detach.
const DETACH_MAX: Duration = Duration::from_secs(10);

/// Fault of each `fdatasync`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SyncFault {
    /// Fails without syncing.
    Fails,
    /// Takes this much longer.
    Takes(Duration),
}

/// Tracer that manipulates the system calls of a process until it is detached or dropped.
#[derive(Debug)]
pub(crate) struct SyscallTracer {
    child: Child,
}

/// Reports whether strace can be used here; prints a message if not.
pub(crate) async fn can_trace() -> bool {
    let mut probe = Command::new("strace");
    probe.args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync", "true"]);
    let can = quiet(&mut probe).status().await.is_ok_and(|status| status.success());
    if !can {
        print("SKIPPED: strace is missing or not permitted: no failed syncs, no disk stalls");
    }
    can
}

impl SyscallTracer {
    /// Attaches to all threads of a process.
    pub(crate) fn attach(process_id: u32, fault: SyncFault) -> anyhow::Result<Self> {
        let what = match fault {
            SyncFault::Fails => "error=EIO".to_owned(),
            SyncFault::Takes(time) => format!("delay_enter={}", time.as_micros()),
        };
        let mut command = Command::new("strace");
        command.args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync", "-e"]);
        command.arg(format!("inject=fdatasync:{what}")).arg("-p").arg(process_id.to_string());
        let child = quiet(&mut command).kill_on_drop(true).spawn().context("start strace")?;
        Ok(Self { child })
    }

    /// Detaches and waits for it. A process that has ended is detached already.
    pub(crate) async fn detach(mut self) -> anyhow::Result<()> {
        let id = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(id) = id {
            match kill_process(id, Signal::INT) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error).context("end strace"),
            }
        }
        timeout(DETACH_MAX, self.child.wait()).await.context("strace did not detach")??;
        Ok(())
    }
}

fn quiet(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
}

/// File system for one node: ext4 in a file over a loop device. Unmounted when dropped.
#[derive(Debug)]
pub(crate) struct LoopbackDisk {
    image: PathBuf,
    mounted: PathBuf,
}

impl LoopbackDisk {
    /// Creates `dir` and mounts a new file system on it.
    ///
    /// Prints a message and returns `None` if that is not possible here.
    pub(crate) fn mount(dir: &Path, bytes: u64) -> anyhow::Result<Option<Self>> {
        let image = dir.with_extension("image");
        let file = std::fs::File::options().create(true).write(true).truncate(true).open(&image);
        file.and_then(|file| file.set_len(bytes)).context("make a disk")?;
        let disk = Self { image, mounted: dir.to_owned() };
        let (image, at) = (disk.image.display().to_string(), dir.display().to_string());
        // No blocks are reserved for root, and all metadata is written at once.
        let options = "lazy_itable_init=0,lazy_journal_init=0";
        let is_made = run("mkdir", &["-p", &at])
            && run("mkfs.ext4", &["-q", "-F", "-m", "0", "-E", options, &image])
            && run("mount", &["-o", "loop", &image, &at]);
        if !is_made {
            print("SKIPPED: file systems cannot be mounted here: no full disks");
            return Ok(None);
        }
        ensure!(run("rmdir", &[&format!("{at}/lost+found")]), "{at} is not empty");
        Ok(Some(disk))
    }

    fn free_bytes(&self) -> anyhow::Result<u64> {
        let status = rustix::fs::statvfs(&self.mounted).context("read the free disk space")?;
        Ok(status.f_bavail * status.f_frsize)
    }

    /// Fills the disk up to `left_bytes`. False if less is free already.
    pub(crate) fn fill(&self, left_bytes: u64) -> anyhow::Result<bool> {
        let Some(bytes) = self.free_bytes()?.checked_sub(left_bytes).filter(|bytes| *bytes > 0)
        else {
            return Ok(false);
        };
        let ballast = self.ballast().display().to_string();
        // Fails if the node takes the space first.
        Ok(run("fallocate", &["-l", &bytes.to_string(), &ballast]))
    }

    /// Frees the space again.
    pub(crate) async fn release(&self) -> anyhow::Result<()> {
        match tokio::fs::remove_file(self.ballast()).await {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).context("free disk space")
            }
            _ => Ok(()),
        }
    }

    fn ballast(&self) -> PathBuf {
        self.mounted.join("something-else")
    }
}

impl Drop for LoopbackDisk {
    fn drop(&mut self) {
        // Lazily, because a node that is being killed may have open files. A directory that is kept
        // remains as the image.
        let _ = run("umount", &["-l", &self.mounted.display().to_string()]);
    }
}

fn run(program: &str, args: &[&str]) -> bool {
    let mut command = std::process::Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
