//! Measures the cost of a sync, for the startup log and next to benchmark results.
//!
//! Writes like a small group: one block over blocks that were written before.

use std::io;
use std::time::{Duration, Instant};

use super::{BLOCK, Storage};

const NAME: &str = "sync-probe";

/// Writes and syncs one block `rounds` times. Returns p50 and p99 of the times.
///
/// # Errors
/// Fails if the probe file cannot be created, written or removed.
#[allow(clippy::disallowed_methods)] // Measures the disk, which keeps no simulated time.
pub fn probe_sync(storage: &dyn Storage, rounds: usize) -> io::Result<(Duration, Duration)> {
    let blocks = 16_usize;
    let memory = vec![0x5a_u8; (blocks + 1) * BLOCK];
    let start = memory.as_ptr().align_offset(BLOCK);
    let aligned = memory.get(start..start + blocks * BLOCK).unwrap_or_default();
    let file = storage.create(NAME, aligned.len() as u64)?;
    file.write_at(aligned, 0)?;
    file.sync_data()?;
    let mut times = Vec::with_capacity(rounds.max(1));
    for round in 0..rounds.max(1) {
        let block = aligned.get(..BLOCK).unwrap_or_default();
        let begin = Instant::now();
        file.write_at(block, (round % blocks * BLOCK) as u64)?;
        file.sync_data()?;
        times.push(begin.elapsed());
    }
    drop(file);
    storage.remove(NAME)?;
    times.sort_unstable();
    let at = |permille: usize| {
        times.get((times.len() - 1) * permille / 1000).copied().unwrap_or_default()
    };
    Ok((at(500), at(990)))
}
