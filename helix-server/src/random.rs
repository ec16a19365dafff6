//! The only source of randomness, so that a simulation can seed it.
//! Safety depends on it only for the uniqueness of a new cluster's id.

use std::sync::Mutex;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::sync;

/// Returns a generator seeded by the operating system.
#[allow(clippy::disallowed_methods)] // The only use of the system's randomness.
pub(crate) fn from_system() -> StdRng {
    StdRng::from_rng(&mut rand::rng())
}

/// A node's source of random numbers.
#[derive(Debug)]
pub struct Random(Mutex<StdRng>);

impl Random {
    /// Creates a source from `seed`, or from the operating system without one.
    pub fn new(seed: Option<u64>) -> Self {
        Self(Mutex::new(seed.map_or_else(from_system, StdRng::seed_from_u64)))
    }

    pub fn next_u64(&self) -> u64 {
        sync::lock(&self.0).next_u64()
    }
}
