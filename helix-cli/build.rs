//! Sets the commit that the program is built from: HELIX_COMMIT, or the commit that git names.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=HELIX_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let given = std::env::var("HELIX_COMMIT").ok().filter(|commit| !commit.is_empty());
    // Other builds would be repeated after each commit.
    let commit = given.or_else(|| is_release.then(commit_of_git).flatten());
    println!("cargo::rustc-env=HELIX_COMMIT={}", commit.unwrap_or_default());
}

fn commit_of_git() -> Option<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        (output.status.success() && !text.is_empty()).then_some(text)
    };
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}
