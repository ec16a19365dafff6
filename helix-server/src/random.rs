//! Randomness, from one place, so that a simulation can seed it.
//! Nothing about safety depends on it but the uniqueness of a new cluster's id.

use std::sync::Mutex;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// A generator seeded by the operating system.
#[allow(clippy::disallowed_methods)] // The one place that asks the system.
pub(crate) fn from_system() -> StdRng {
    StdRng::from_rng(&mut rand::rng())
}

/// A node's source of random numbers.
#[derive(Debug)]
pub struct Random(Mutex<StdRng>);

impl Random {
    /// From a seed, or from the operating system where there is none.
    pub fn new(seed: Option<u64>) -> Self {
        Self(Mutex::new(seed.map_or_else(from_system, StdRng::seed_from_u64)))
    }

    pub fn next_u64(&self) -> u64 {
        self.0.lock().expect("no panic while it is held").next_u64()
    }
}
