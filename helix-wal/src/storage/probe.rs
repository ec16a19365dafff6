//! Measures the cost of a sync, for the startup log and next to benchmark results.
//!
//! Writes like a small group: one block over blocks that were written before.

use std::io;
use std::time::{Duration, Instant};

use super::{BLOCK, File, Storage};
use crate::error::Shortage;

const NAME: &str = "sync-probe";

/// Writes and syncs one block `rounds` times. Returns p50 and p99 of the times.
///
/// Returns `None` if the disk has no space for the probe, or the process no file descriptor.
///
/// # Errors
/// Fails if the probe file cannot be created, written or removed.
#[allow(clippy::disallowed_methods)] // Measures the disk, which keeps no simulated time.
pub fn probe_sync(
    storage: &dyn Storage,
    rounds: usize,
) -> io::Result<Option<(Duration, Duration)>> {
    let blocks = 16_usize;
    let memory = vec![0x5a_u8; (blocks + 1) * BLOCK];
    let start = memory.as_ptr().align_offset(BLOCK);
    let aligned = memory.get(start..start + blocks * BLOCK).unwrap_or_default();
    let file = match storage.create(NAME, aligned.len() as u64) {
        Err(e) if Shortage::of(&e).is_some() => return Ok(None),
        created => created?,
    };
    let measured = measure(&*file, aligned, blocks, rounds.max(1));
    drop(file);
    let removed = storage.remove(NAME);
    let mut times = match measured {
        Err(e) if Shortage::of(&e).is_some() => return Ok(None),
        measured => measured?,
    };
    removed?;
    times.sort_unstable();
    let at = |permille: usize| {
        times.get((times.len() - 1) * permille / 1000).copied().unwrap_or_default()
    };
    Ok(Some((at(500), at(990))))
}

#[allow(clippy::disallowed_methods)] // As above.
fn measure(
    file: &dyn File,
    aligned: &[u8],
    blocks: usize,
    rounds: usize,
) -> io::Result<Vec<Duration>> {
    file.write_at(aligned, 0)?;
    file.sync_data()?;
    let mut times = Vec::with_capacity(rounds);
    for round in 0..rounds {
        let block = aligned.get(..BLOCK).unwrap_or_default();
        let begin = Instant::now();
        file.write_at(block, (round % blocks * BLOCK) as u64)?;
        file.sync_data()?;
        times.push(begin.elapsed());
    }
    Ok(times)
}
