//! Runs the fuzz target named by `HELIX_FUZZ_TARGET` with libFuzzer: `just fuzz NAME`.
#![no_main]

use std::alloc::System;
use std::sync::LazyLock;

use cap::Cap;
use libfuzzer_sys::fuzz_target;

/// Memory limit: an allocation beyond it ends the process.
const MEMORY_BYTES_MAX: usize = 512 << 20;

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, MEMORY_BYTES_MAX);

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let wanted = std::env::var("HELIX_FUZZ_TARGET").unwrap_or_default();
    let names: Vec<_> = helix_fuzz::TARGETS.iter().map(|(name, _)| *name).collect();
    let found = helix_fuzz::TARGETS.iter().find(|(name, _)| *name == wanted);
    found.unwrap_or_else(|| panic!("set HELIX_FUZZ_TARGET to one of {}", names.join(", "))).1
});

fuzz_target!(|input: &[u8]| TARGET(input));
