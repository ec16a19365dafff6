//! Tests of the simulated disk's guarantees.

#![allow(clippy::unwrap_used)]

use super::*;

const LEN: u64 = 2 * BLOCK as u64;

/// Writes whole blocks of one byte.
fn fill(file: &Arc<dyn File>, byte: u8, offset: u64) -> io::Result<()> {
    let memory = vec![byte; 2 * BLOCK];
    let start = memory.as_ptr().align_offset(BLOCK);
    file.write_at(&memory[start..start + BLOCK], offset)
}

fn byte(disk: &SimulatedDisk, name: &str, offset: usize) -> u8 {
    disk.read_file(name).unwrap()[offset]
}

/// Returns a disk with one durable file of zeroes, and a handle to the file.
fn with_file() -> (SimulatedDisk, Arc<dyn File>) {
    let disk = SimulatedDisk::new(7);
    let file = disk.create("a", LEN).unwrap();
    file.sync_data().unwrap();
    disk.sync_dir().unwrap();
    (disk, file)
}

#[test]
fn synced_bytes_survive_a_crash() {
    let (disk, file) = with_file();
    fill(&file, 1, 0).unwrap();
    file.sync_data().unwrap();
    fill(&file, 2, 0).unwrap();
    fill(&file, 3, BLOCK as u64).unwrap();
    let kept = disk.fork();
    kept.crash(Crash::KeepAll);
    assert_eq!((byte(&kept, "a", 0), byte(&kept, "a", BLOCK)), (2, 3));
    disk.crash(Crash::LoseAll);
    assert_eq!((byte(&disk, "a", 0), byte(&disk, "a", BLOCK)), (1, 0));
    assert!(file.read_at(&mut [0], 0).is_err());
    assert!(disk.open("a").is_err());
    disk.reopen().open("a").unwrap().read_at(&mut [0], 0).unwrap();
}

#[test]
fn crash_affects_each_sector_separately() {
    let (disk, file) = with_file();
    fill(&file, 9, 0).unwrap();
    let pending = disk.pending();
    assert_eq!(pending.len(), 8);
    let first = PendingChange::Sector { file: "a".to_owned(), offset: 0, changes: true };
    assert_eq!(pending[0], first);
    use CrashEffect::{Garbled, Kept, Lost, Torn};
    disk.crash(Crash::Chosen(&[Lost, Kept, Torn, Garbled, Kept]));
    let bytes = disk.read_file("a").unwrap();
    assert!(bytes[..512].iter().all(|b| *b == 0));
    assert!(bytes[512..1024].iter().all(|b| *b == 9));
    assert!(bytes[1024..1280].iter().all(|b| *b == 9));
    assert!(bytes[1280..1536].iter().all(|b| *b == 0));
    assert!(bytes[1536..2048].iter().any(|b| *b != 0 && *b != 9));
    assert!(bytes[2048..2560].iter().all(|b| *b == 9));
    assert!(bytes[2560..].iter().all(|b| *b == 0));
}

#[test]
fn names_are_durable_after_directory_sync() {
    let (disk, _file) = with_file();
    disk.create("b", LEN).unwrap();
    disk.rename("a", "c").unwrap();
    let lost = disk.fork();
    lost.crash(Crash::LoseAll);
    assert_eq!(lost.files(), ["a"]);
    let kept = disk.fork();
    kept.crash(Crash::KeepAll);
    assert_eq!(kept.files(), ["b", "c"]);
    // The size was never synced, so the name can survive without it.
    let fates: Vec<CrashEffect> = disk
        .pending()
        .iter()
        .map(|p| {
            if matches!(p, PendingChange::Entry { .. }) {
                CrashEffect::Kept
            } else {
                CrashEffect::Lost
            }
        })
        .collect();
    disk.crash(Crash::Chosen(&fates));
    assert_eq!(disk.read_file("b").unwrap().len(), 0);
    disk.reopen().sync_dir().unwrap();
}

#[test]
fn failed_sync_hides_loss_until_crash() {
    // The sectors that a failed sync wrote are drawn. This test needs a seed that lost the first
    // one.
    let (disk, file) = (0..64)
        .map(|seed| {
            let (disk, file) = with_file();
            fill(&file, 5, 0).unwrap();
            disk.reseed(seed);
            disk.fail(Fault::next(Operation::Sync));
            assert!(file.sync_data().is_err());
            (disk, file)
        })
        .find(|(_, file)| {
            let mut device = [9];
            file.read_device_at(&mut device, 0).unwrap();
            device == [0]
        })
        .unwrap();
    file.sync_data().unwrap();
    let mut cached = [0];
    file.read_at(&mut cached, 0).unwrap();
    assert_eq!(cached, [5]);
    disk.crash(Crash::KeepAll);
    assert_eq!(byte(&disk, "a", 0), 0);
}

#[test]
fn full_disk_refuses_files_until_space_is_freed() {
    let disk = SimulatedDisk::new(1);
    disk.set_free_bytes(Some(LEN));
    disk.create("a", LEN).unwrap();
    assert_eq!(disk.free_bytes().unwrap(), 0);
    assert_eq!(disk.create("b", 1).unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(disk.files(), ["a"]);
    disk.remove("a").unwrap();
    disk.create("b", LEN).unwrap();
}

#[test]
fn power_can_fail_at_any_change() {
    let (disk, file) = with_file();
    let now = disk.changes();
    disk.stop_at_change(Some(now + 1));
    fill(&file, 1, 0).unwrap();
    assert!(!disk.stopped());
    // The interrupted sync may or may not have reached the device.
    assert!(file.sync_data().is_err());
    assert!(disk.stopped());
    assert!(file.read_at(&mut [0], 0).is_err());
    assert_eq!(disk.pending().len(), 8);
    disk.crash(Crash::KeepAll);
    assert_eq!(byte(&disk, "a", 0), 1);
    disk.reopen().open("a").unwrap();
}

#[test]
fn same_seed_gives_same_bytes_and_trace() {
    let run = |seed| {
        let disk = SimulatedDisk::new(seed);
        disk.record(true);
        let file = disk.create("a", LEN).unwrap();
        disk.sync_dir().unwrap();
        file.sync_data().unwrap();
        fill(&file, 3, 0).unwrap();
        disk.crash(Crash::Seeded(seed));
        (disk.trace(), disk.read_file("a"))
    };
    assert_eq!(run(3), run(3));
    let different: std::collections::HashSet<_> = (0..64).map(|s| run(s).1).collect();
    assert!(different.len() > 8);
}

#[test]
fn removed_files_stay_readable_for_open_handles() {
    let (disk, file) = with_file();
    disk.remove("a").unwrap();
    disk.sync_dir().unwrap();
    file.read_at(&mut [0], 0).unwrap();
    assert!(disk.open("a").is_err());
}

#[test]
fn crash_releases_the_lock() {
    let disk = SimulatedDisk::new(1);
    let guard = disk.lock().unwrap();
    assert_eq!(disk.lock().err().unwrap().kind(), io::ErrorKind::WouldBlock);
    disk.crash(Crash::LoseAll);
    let disk = disk.reopen();
    let _second = disk.lock().unwrap();
    drop(guard);
    assert!(disk.lock().is_err());
}

#[test]
fn cached_reads_follow_the_mode() {
    let (disk, file) = with_file();
    assert!(file.try_read_at(&mut [0], 0).unwrap());
    disk.set_cache(CacheMode::Never);
    assert!(!file.try_read_at(&mut [0], 0).unwrap());
    disk.set_cache(CacheMode::Sometimes);
    let hits = (0..64).filter(|_| file.try_read_at(&mut [0], 0).unwrap()).count();
    assert!((1..64).contains(&hits));
}

#[test]
fn damage_at_rest_is_visible_and_permanent() {
    let (disk, _file) = with_file();
    disk.flip_bit("a", 9);
    assert_eq!(byte(&disk, "a", 1), 2);
    disk.zero("a", 0..2);
    assert_eq!(byte(&disk, "a", 1), 0);
    disk.truncate("a", 100);
    disk.crash(Crash::LoseAll);
    assert_eq!(disk.read_file("a").unwrap().len(), 100);
}
