//! Costs and benefits of compaction on a real disk: space held by ten streams with different
//! retention, append latency during rewrites, and uncached reads of one stream of a thousand before
//! and after.
//!
//! `cargo bench -p helix-wal --bench wal_compaction`; `HELIX_COMPACTION_MIB` sets the size of each
//! log (1280).

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use helix_wal::Options;
use helix_wal::storage::DirStorage;
use support::{BenchLog, FETCH_BYTES, evict, payload_bytes, read_cached_first};

const MIB: u64 = 1 << 20;
/// Entries per append.
const GROUP: u64 = 64;

fn open(path: &Path, entry_bytes: usize, streams: u64, options: Options) -> BenchLog {
    BenchLog::open(DirStorage::open(path).unwrap(), options, entry_bytes, streams)
}

/// Waits until compaction has been idle for two seconds.
fn wait_for_compaction(log: &BenchLog) {
    let (mut last, mut since) = (u64::MAX, Instant::now());
    while since.elapsed() < Duration::from_secs(2) {
        thread::sleep(Duration::from_millis(50));
        let rewritten = log.wal.stats().rewritten_bytes;
        if rewritten != last {
            (last, since) = (rewritten, Instant::now());
        }
    }
}

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() - 1) * percent / 100]
}

/// Reads the first `count` entries of each stream uncached. Returns MB/s.
fn read_cold(
    log: &BenchLog,
    directory: &Path,
    streams: impl Iterator<Item = u64>,
    count: u64,
) -> f64 {
    let (mut bytes, mut spent) = (0, Duration::ZERO);
    for stream in streams {
        evict(directory);
        let start = Instant::now();
        let mut position = 0;
        while position < count {
            let got = read_cached_first(|read_mode| {
                log.wal.read_stream(stream, position, count, FETCH_BYTES, read_mode).unwrap()
            });
            position += got.len() as u64;
            bytes += payload_bytes(&got);
        }
        spent += start.elapsed();
    }
    bytes as f64 / spent.as_secs_f64() / 1e6
}

/// Ten streams; the retention doubles with every second stream.
fn ten_retentions(directory: &Path, mib: u64, rate: u64) {
    let options = Options { compaction_bytes_per_second: rate, ..Options::default() };
    let mut log = open(directory, 16 << 10, 10, options);
    let per_stream = mib * MIB / 10 / (16 << 10);
    let start = Instant::now();
    // Three times the size, so that most streams are trimmed repeatedly.
    let (mut purged, mut appends) = (0, Vec::new());
    while log.bytes() < 3 * mib * MIB {
        appends.push(log.append(GROUP));
        if log.bytes() - purged >= 64 * MIB {
            purged = log.bytes();
            log.purge();
            for stream in 0..10 {
                let kept = per_stream >> (4 - stream / 2);
                log.wal.trim(stream, (log.next / 10).saturating_sub(kept));
            }
        }
    }
    let took = start.elapsed();
    let during = log.wal.stats();
    wait_for_compaction(&log);
    let stats = log.wal.stats();
    appends.sort_unstable();
    let (p50, p99) = (percentile(&appends, 50), percentile(&appends, 99));
    let mb = |bytes: u64| bytes / 1_000_000;
    println!(
        "ten retentions, at most {} MB/s: wrote {} MB at {:.0} MB/s, append p50 {p50:.2?} p99 \
         {p99:.2?}; held {} MB at the end of it, {} MB after; live {} MB, {} segments ({} cold), \
         rewritten {} MB",
        mb(rate),
        mb(log.bytes()),
        log.bytes() as f64 / took.as_secs_f64() / 1e6,
        mb(during.held_bytes),
        mb(stats.held_bytes),
        mb(stats.live_bytes),
        stats.segments,
        stats.cold_segments,
        mb(stats.rewritten_bytes),
    );
    log.wal.close();
}

/// Compares reads of one stream of a thousand with reads of a log with one stream.
fn one_of_a_thousand(directory: &Path, mib: u64, entry_bytes: usize) {
    const STREAMS: u64 = 1000;
    let alone = directory.join("alone");
    let mut log = open(&alone, entry_bytes, 1, Options::default());
    while log.bytes() < 512 * MIB {
        log.append(GROUP);
    }
    let sequential = read_cold(&log, &alone, [0].into_iter(), log.next - 4096);
    log.wal.close();
    drop(log);
    std::fs::remove_dir_all(&alone).unwrap();

    let scattered = directory.join("scattered");
    let options = Options { compaction_bytes_per_second: 0, ..Options::default() };
    let mut log = open(&scattered, entry_bytes, STREAMS, options);
    while log.bytes() < mib * MIB {
        log.append(GROUP);
    }
    log.purge();
    // Compaction gathers eight segments; the newest ones wait.
    let count = 8 * 64 * MIB * 9 / 10 / entry_bytes as u64 / STREAMS;
    let some = || (0..STREAMS).step_by(37);
    let before = read_cold(&log, &scattered, some(), count);
    log.wal.close();
    drop(log);
    let options = Options { compaction_bytes_per_second: u64::MAX, ..Options::default() };
    let log = open(&scattered, entry_bytes, STREAMS, options);
    let start = Instant::now();
    wait_for_compaction(&log);
    let (took, stats) = (start.elapsed(), log.wal.stats());
    let after = read_cold(&log, &scattered, some(), count);
    println!(
        "one stream of {STREAMS}, entries of {entry_bytes} bytes, cold, fetches of 1 MiB: alone \
         {sequential:.0} MB/s; scattered {before:.0} MB/s ({:.2}); gathered {after:.0} MB/s \
         ({:.2}); rewritten {} MB in about {:.0} s",
        before / sequential,
        after / sequential,
        stats.rewritten_bytes / 1_000_000,
        took.as_secs_f64() - 2.0,
    );
    log.wal.close();
}

fn main() {
    let mib = std::env::var("HELIX_COMPACTION_MIB").map_or(1280, |mib| mib.parse().unwrap());
    let temporary = |name: &str| {
        tempfile::Builder::new().prefix(name).tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
    };
    for rate in [0, Options::default().compaction_bytes_per_second] {
        let directory = temporary("retentions");
        ten_retentions(&directory.path().join("log"), mib, rate);
    }
    for entry_bytes in [4 << 10, 16 << 10] {
        let directory = temporary("scattered");
        one_of_a_thousand(directory.path(), mib, entry_bytes);
    }
}
