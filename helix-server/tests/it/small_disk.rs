//! A real file system of a few hundred megabytes that a test can fill: ext4 in a file, mounted
//! over a loop device. It takes root; where it cannot be had the test is told so.

// What it does to the disk is what an operator would do.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::skipped;

/// Unmounted when dropped.
#[derive(Debug)]
pub(crate) struct SmallDisk {
    image: PathBuf,
    mounted: PathBuf,
}

impl SmallDisk {
    /// Mounts a fresh one over `folder`, which is created. `None`, and aloud, where that cannot be
    /// done here.
    pub(crate) fn mount(folder: &Path, bytes: u64) -> Option<Self> {
        fs::create_dir_all(folder).unwrap();
        let image = folder.with_extension("image");
        fs::File::create(&image).unwrap().set_len(bytes).unwrap();
        let disk = Self { image, mounted: folder.to_owned() };
        let image = disk.image.to_str().unwrap();
        let at = folder.to_str().unwrap();
        // Without blocks for root only, and with everything laid out at once.
        let options = "lazy_itable_init=0,lazy_journal_init=0";
        let is_made = run("mkfs.ext4", &["-q", "-F", "-m", "0", "-E", options, image])
            && run("mount", &["-o", "loop", image, at]);
        if !is_made {
            skipped("no file system can be mounted here: a full disk was not tried");
            return None;
        }
        fs::remove_dir(folder.join("lost+found")).unwrap();
        Some(disk)
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        let shown = Command::new("df").args(["--output=avail", "-B1"]).arg(&self.mounted).output();
        let shown = String::from_utf8(shown.unwrap().stdout).unwrap();
        shown.lines().last().and_then(|line| line.trim().parse().ok()).expect("df shows a number")
    }

    /// Has something else take the space, but for `left_bytes`.
    pub(crate) fn fill(&self, left_bytes: u64) {
        let bytes = self.free_bytes().checked_sub(left_bytes).expect("there is more than that");
        let file = self.ballast();
        let file = file.to_str().unwrap();
        assert!(run("fallocate", &["-l", &bytes.to_string(), file]), "{bytes} bytes are free");
        let free_bytes = self.free_bytes();
        assert!(free_bytes <= left_bytes, "{free_bytes} bytes are left");
    }

    /// Takes it away again.
    pub(crate) fn relieve(&self) {
        fs::remove_file(self.ballast()).unwrap();
    }

    fn ballast(&self) -> PathBuf {
        self.mounted.join("something-else")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a server that is being stopped may still have files open. Ignored: the test has
        // its result, and the image goes all the same.
        let _ = run("umount", &["-l", self.mounted.to_str().unwrap()]);
        let _ = fs::remove_file(&self.image);
    }
}

fn run(program: &str, args: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
