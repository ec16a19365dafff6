//! Disks that fail: system calls of a running node that end with an error or take their time, and a
//! file system of its own that can be filled. What happens to files is in `files.rs`.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// How long the tracer may take to let go.
const DETACH_MAX: Duration = Duration::from_secs(10);

/// What happens to each `fdatasync`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SyncFault {
    /// It fails, and nothing is synced.
    Fails,
    /// It takes so much longer.
    Takes(Duration),
}

/// A process whose system calls are interfered with, until this is ended or dropped.
#[derive(Debug)]
pub(crate) struct Tracer {
    child: Child,
}

/// Whether system calls can be interfered with here; says so where they cannot.
pub(crate) async fn can_trace() -> bool {
    let mut probe = Command::new("strace");
    probe.args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync", "true"]);
    let can = quiet(&mut probe).status().await.is_ok_and(|status| status.success());
    if !can {
        println!("SKIPPED: strace is not here or may not trace: no sync fails and no disk stalls");
    }
    can
}

impl Tracer {
    /// Interferes with all threads of a process.
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

    /// Lets go, and waits until that is done. One whose process has ended is gone already.
    pub(crate) async fn detach(mut self) -> anyhow::Result<()> {
        let id = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(id) = id {
            match kill_process(id, Signal::INT) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error).context("end strace"),
            }
        }
        timeout(DETACH_MAX, self.child.wait()).await.context("strace does not let go")??;
        Ok(())
    }
}

fn quiet(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
}

/// A file system of a node's own: ext4 in a file, over a loop device. Unmounted when dropped.
#[derive(Debug)]
pub(crate) struct SmallDisk {
    image: PathBuf,
    mounted: PathBuf,
}

impl SmallDisk {
    /// Mounts a fresh one over `folder`, which is created. `None`, and aloud, where that cannot be
    /// done here.
    pub(crate) fn mount(folder: &Path, bytes: u64) -> anyhow::Result<Option<Self>> {
        let image = folder.with_extension("image");
        let file = std::fs::File::options().create(true).write(true).truncate(true).open(&image);
        file.and_then(|file| file.set_len(bytes)).context("make a disk")?;
        let disk = Self { image, mounted: folder.to_owned() };
        let (image, at) = (disk.image.display().to_string(), folder.display().to_string());
        // Without blocks for root only, and with everything laid out at once.
        let options = "lazy_itable_init=0,lazy_journal_init=0";
        let is_made = run("mkdir", &["-p", &at])
            && run("mkfs.ext4", &["-q", "-F", "-m", "0", "-E", options, &image])
            && run("mount", &["-o", "loop", &image, &at]);
        if !is_made {
            println!("SKIPPED: no file system can be mounted here: no disk will be full");
            return Ok(None);
        }
        ensure!(run("rmdir", &[&format!("{at}/lost+found")]), "{at} is not empty");
        Ok(Some(disk))
    }

    fn free_bytes(&self) -> anyhow::Result<u64> {
        let status = rustix::fs::statvfs(&self.mounted).context("the space of a disk")?;
        Ok(status.f_bavail * status.f_frsize)
    }

    /// Has something else take the space, but for `left_bytes`. False if there is less already.
    pub(crate) fn fill(&self, left_bytes: u64) -> anyhow::Result<bool> {
        let Some(bytes) = self.free_bytes()?.checked_sub(left_bytes).filter(|bytes| *bytes > 0)
        else {
            return Ok(false);
        };
        let ballast = self.ballast().display().to_string();
        // The node takes space meanwhile.
        Ok(run("fallocate", &["-l", &bytes.to_string(), &ballast]))
    }

    /// Takes it away again.
    pub(crate) async fn relieve(&self) -> anyhow::Result<()> {
        match tokio::fs::remove_file(self.ballast()).await {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).context("empty a disk")
            }
            _ => Ok(()),
        }
    }

    fn ballast(&self) -> PathBuf {
        self.mounted.join("something-else")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a node that is being killed may still have files open. A folder that is to be
        // kept is kept as the image.
        let _ = run("umount", &["-l", &self.mounted.display().to_string()]);
    }
}

fn run(program: &str, args: &[&str]) -> bool {
    let mut command = std::process::Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
