//! A real file system of a few hundred megabytes that a test can fill: ext4 in a file, mounted
//! over a loop device. It needs root; tests are skipped without it.

// Tests fill the disk as an operator would.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::skipped;

/// A mounted file system; it is unmounted on drop.
#[derive(Debug)]
pub(crate) struct SmallDisk {
    image: PathBuf,
    mounted: PathBuf,
}

impl SmallDisk {
    /// Creates `directory` and mounts a new file system on it.
    ///
    /// Returns `None` and reports a skip if that is not possible here.
    pub(crate) fn mount(directory: &Path, bytes: u64) -> Option<Self> {
        fs::create_dir_all(directory).unwrap();
        let image = directory.with_extension("image");
        fs::File::create(&image).unwrap().set_len(bytes).unwrap();
        let disk = Self { image, mounted: directory.to_owned() };
        let image = disk.image.to_str().unwrap();
        let at = directory.to_str().unwrap();
        // No blocks reserved for root, and no lazy initialization.
        let options = "lazy_itable_init=0,lazy_journal_init=0";
        let is_made = run("mkfs.ext4", &["-q", "-F", "-m", "0", "-E", options, image])
            && run("mount", &["-o", "loop", image, at]);
        if !is_made {
            skipped("no file system can be mounted here: a full disk was not tried");
            return None;
        }
        fs::remove_dir(directory.join("lost+found")).unwrap();
        Some(disk)
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        let shown = Command::new("df").args(["--output=avail", "-B1"]).arg(&self.mounted).output();
        let shown = String::from_utf8(shown.unwrap().stdout).unwrap();
        shown.lines().last().and_then(|line| line.trim().parse().ok()).expect("df shows a number")
    }

    /// Fills the disk with another file, except for `left_bytes`.
    pub(crate) fn fill(&self, left_bytes: u64) {
        let bytes = self.free_bytes().checked_sub(left_bytes).expect("there is more than that");
        let file = self.ballast();
        let file = file.to_str().unwrap();
        assert!(run("fallocate", &["-l", &bytes.to_string(), file]), "{bytes} bytes are free");
        let free_bytes = self.free_bytes();
        assert!(free_bytes <= left_bytes, "{free_bytes} bytes are left");
    }

    /// Removes the file of [`Self::fill`].
    pub(crate) fn relieve(&self) {
        fs::remove_file(self.ballast()).unwrap();
    }

    fn ballast(&self) -> PathBuf {
        self.mounted.join("something-else")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazy: a stopping server may still have files open. Ignored: the test has its result, and
        // the image is removed anyway.
        let _ = run("umount", &["-l", self.mounted.to_str().unwrap()]);
        let _ = fs::remove_file(&self.image);
    }
}

fn run(program: &str, args: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
