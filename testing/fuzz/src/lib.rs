//! What the fuzz targets do, without the fuzzer: each is a function of bytes that panics where the
//! product breaks a promise. `testing/fuzz/runner/` runs them with libFuzzer; `tests/it` runs them over the
//! corpus.
//!
//! Bytes are turned into damage, messages and calls by `input` and `message`, so that a checksum or
//! a length is not the end of every input. What a checksum covers is computed here from
//! `docs/wal-format.md`, not by the code under test.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod calls;
mod input;
mod message;
mod peer;
mod texts;
mod values;
mod wal;

// The command line is a binary: its pure modules are compiled once more here.
#[path = "../../../helix-cli/src/position.rs"]
#[allow(dead_code)]
mod position;
#[path = "../../../helix-cli/src/template.rs"]
#[allow(dead_code)]
mod template;
#[path = "../../../helix-cli/src/units.rs"]
#[allow(dead_code)]
mod units;

/// A target: its name and what it does with an input.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: &[Target] = &[
    ("wal_damage", wal::damage),
    ("wal_forged", wal::forged),
    ("wal_install", wal::install),
    ("batch", values::batch),
    ("values", values::stored),
    ("config", texts::config),
    ("cli", texts::cli),
    ("calls", calls::calls),
    ("peer", peer::peer),
];

/// Runs a target.
pub fn run(name: &str, input: &[u8]) {
    let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).expect("a target's name");
    target(input);
}
