//! Tests of the preparation of segments: zero-filled, or only allocated.

use super::*;
use crate::Preparation;

/// Returns the bytes written into segments before they became part of the log.
fn prepared_bytes(disk: &SimulatedDisk) -> u64 {
    let writes = disk.trace().into_iter().filter(|done| {
        // The header of the next segment is a single block.
        let is_chunk = done.bytes.end - done.bytes.start > 4096;
        done.operation == Operation::Write && done.file.starts_with("ready-") && is_chunk
    });
    writes.map(|done| done.bytes.end - done.bytes.start).sum()
}

#[test]
fn segments_are_allocated_only_where_that_reserves_space_or_zeroes_do_not() {
    use Preparation::{Allocate, Auto, Zero};
    for (reserves, elsewhere, preparation, is_zeroed) in [
        (false, false, Auto, true),
        (false, false, Allocate, true),
        (false, true, Auto, false),
        (false, true, Allocate, false),
        (false, true, Zero, true),
        (true, false, Allocate, false),
    ] {
        let disk = SimulatedDisk::new(1);
        disk.set_allocation(reserves, elsewhere);
        let mut log = Driven::open(&disk, Options { preparation, ..small() });
        log.run();
        let stats = log.wal.stats();
        let what = format!("{preparation:?}, reserves {reserves}, elsewhere {elsewhere}");
        assert_eq!(stats.zeroed_segments > 0, is_zeroed, "{what}");
        assert_eq!(stats.allocated_segments > 0, !is_zeroed, "{what}");
    }
}

#[test]
fn zeroes_are_written_once_although_the_sync_of_their_name_is_repeated() {
    let disk = SimulatedDisk::new(1);
    let full = rustix::io::Errno::NOSPC.raw_os_error();
    let mut log = Driven::open(&disk, Options { preparation: Preparation::Zero, ..small() });
    disk.record(true);
    disk.fail(Fault::next(Operation::SyncDir).errno(full));
    log.rest();
    let stats = log.wal.stats();
    assert!(stats.zeroed_segments > 0);
    assert_eq!(stats.zeroed_bytes, prepared_bytes(&disk));
    assert_eq!(stats.zeroed_bytes, stats.zeroed_segments * stats.segment_bytes);
}

#[test]
fn only_zero_filled_segments_are_written_twice() {
    for preparation in [Preparation::Auto, Preparation::Zero, Preparation::Allocate] {
        let disk = SimulatedDisk::new(1);
        disk.record(true);
        let mut log = Driven::open(&disk, Options { preparation, ..small() });
        log.run();
        log.fill(0..100);
        let stats = log.wal.stats();
        let is_zeroed = preparation != Preparation::Allocate;
        assert!(stats.segments > 3);
        assert_eq!(stats.zeroed_segments > 1, is_zeroed, "{preparation:?}");
        assert_eq!(stats.allocated_segments > 1, !is_zeroed, "{preparation:?}");
        assert_eq!(stats.zeroed_bytes, prepared_bytes(&disk), "{preparation:?}");
        assert_eq!(stats.zeroed_bytes, stats.zeroed_segments * stats.segment_bytes);
        drop(log);
        // Nothing verifies behind the end of the log.
        disk.crash(Crash::LoseAll);
        let log = Driven::open(&disk.reopen(), small());
        assert_eq!(log.recovered.state.last, Some(LogId { term: 1, index: 99 }));
        assert_eq!(log.recovered.torn_bytes, 0);
        assert_eq!(crate::verify(&log.disk), []);
    }
}

#[test]
fn segments_are_allocated_while_bandwidth_is_scarce() {
    let mut log = Driven::new();
    log.run();
    assert_eq!((log.wal.stats().zeroed_segments, log.wal.stats().allocated_segments), (2, 0));
    let second = Duration::from_secs(1);
    let now = log.now;
    log.wal.shared.lock().disk.on_group(now, 1 << 20, second, true);
    log.now += second;
    log.fill(0..60);
    let scarce = log.wal.stats();
    assert_eq!(scarce.zeroed_segments, 2);
    assert!(scarce.allocated_segments > 0);
    log.now += second;
    log.fill(60..120);
    let idle = log.wal.stats();
    assert_eq!(idle.allocated_segments, scarce.allocated_segments);
    assert!(idle.zeroed_segments > 2);
}
