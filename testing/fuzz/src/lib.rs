//! Fuzz targets: functions of bytes that panic if the product violates a guarantee.
//! `testing/fuzz/runner/` runs them with libFuzzer; `tests/it` runs them on the corpus.
//!
//! `input` and `message` convert bytes to damage, messages and requests, so that inputs are not all
//! rejected by checksums or lengths. Checksums are computed by `docs/wal-format.md`, independently
//! of the code under test. `corpus` packs the inputs into one file.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod access;
mod calls;
pub mod corpus;
mod extremes;
mod input;
mod kafka;
mod kafka_gateway;
mod message;
mod peer;
mod texts;
mod values;
mod wal;

// helix-cli is a binary crate, so its pure modules are compiled here too.
#[path = "../../../helix-cli/src/args/access.rs"]
#[allow(dead_code)]
mod access_args;
#[path = "../../../helix-cli/src/position.rs"]
#[allow(dead_code)]
mod position;
#[path = "../../../helix-cli/src/template.rs"]
#[allow(dead_code)]
mod template;
// Their path `crate::units`.
use helix_proto::units;

pub use extremes::extremes;

/// Name and function of a target.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("wal_damage", wal::damage),
    ("wal_forged", wal::forged),
    ("wal_install", wal::install),
    ("batch", values::batch),
    ("compressed", values::compressed),
    ("kafka", kafka::kafka),
    ("values", values::stored),
    ("config", texts::config),
    ("cli", texts::cli),
    ("calls", calls::calls),
    ("peer", peer::peer),
    ("token", access::token),
    ("jwt", access::jwt),
    ("rules", access::rules),
    ("certificates", access::certificates),
    ("kafka_frame", kafka_gateway::frame),
    ("kafka_produce", kafka_gateway::produce),
];

/// Runs a target.
pub fn run(name: &str, input: &[u8]) {
    let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).expect("a target's name");
    target(input);
}
