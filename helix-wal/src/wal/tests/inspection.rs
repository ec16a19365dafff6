//! Tests of the inspection of a log that is not open, and of its verification.

use super::*;
use crate::SegmentState;

#[test]
fn inspect_and_verify_change_nothing() {
    let mut log = Driven::new();
    log.fill(0..100);
    log.place(0..90);
    log.checked(|wal, done| wal.save_vote(Bytes::from_static(b"v"), done)).unwrap();
    log.rest();
    log.wal.checkpoint(LogId { term: 1, index: 50 }, Bytes::from_static(b"state")).unwrap();
    let before: Vec<_> = log.disk.files().iter().map(|f| log.disk.read_file(f)).collect();
    let report = crate::inspect(&log.disk).unwrap();
    assert_eq!(report.segments.len() as u64, log.wal.stats().segments);
    assert_eq!(report.segments.iter().map(|s| s.entries_count).sum::<u64>(), 100);
    assert_eq!(report.vote.as_deref(), Some(&b"v"[..]));
    assert_eq!(report.checkpoint, Some(LogId { term: 1, index: 50 }));
    assert_eq!(crate::verify(&log.disk), []);
    let after: Vec<_> = log.disk.files().iter().map(|f| log.disk.read_file(f)).collect();
    assert_eq!(before, after);
    // Damage to any byte of a sealed segment's groups or footer is found.
    let first = report.segments[0].clone();
    assert_eq!(first.state, SegmentState::Sealed);
    for at in [10, 4096 + 20, 4096 + 200, first.used_bytes - 4096, first.file_bytes - 4000] {
        log.disk.flip_bit(&first.file, at * 8);
        let findings = crate::verify(&log.disk);
        assert!(!findings.is_empty(), "byte {at}");
        log.disk.flip_bit(&first.file, at * 8);
    }
    assert_eq!(crate::verify(&log.disk), []);
    // The trailer is the last block.
    let trailer = first.file_bytes - 4096..first.file_bytes;
    log.disk.flip_bit(&first.file, (trailer.start + 20) * 8);
    let findings = crate::verify(&log.disk);
    assert!(findings.iter().any(|found| found.bytes == trailer), "{findings:?}");
    let SegmentState::Damaged(what) = &crate::inspect(&log.disk).unwrap().segments[0].state else {
        panic!("not seen");
    };
    assert!(what.contains("trailer"), "{what}");
}

#[test]
fn inspection_visits_the_entries_of_all_segments() {
    let mut log = Driven::new();
    log.fill(0..100);
    log.place(0..90);
    log.rest();
    let mut visited = Vec::new();
    let mut visitor = |entry: &crate::InspectedEntry<'_>| {
        visited.push((entry.id.index, entry.head.len() + entry.payload_bytes));
    };
    let report = crate::inspect_entries(&log.disk, &mut visitor).unwrap();
    let is_sealed = |segment: &&crate::SegmentReport| segment.state == SegmentState::Sealed;
    assert!(report.segments.iter().filter(is_sealed).count() > 0);
    assert!(report.segments.iter().any(|segment| !is_sealed(&segment)));
    assert_eq!(visited.len(), 100);
    assert!(visited.iter().all(|(_, bytes)| *bytes > 0));
    visited.sort_unstable();
    visited.dedup_by_key(|(index, _)| *index);
    assert_eq!(visited.len(), 100, "each entry once");
    // The rest of a damaged segment is not visited, and the report names the damage.
    let first = report.segments[0].clone();
    log.disk.flip_bit(&first.file, (4096 + 200) * 8);
    let mut count = 0;
    let report = crate::inspect_entries(&log.disk, &mut |_| count += 1).unwrap();
    assert!(matches!(report.segments[0].state, SegmentState::Damaged(_)), "{report:?}");
    assert_eq!(count as u64, 100 - first.entries_count);
}

#[test]
fn verify_names_missing_files() {
    let mut log = Driven::new();
    log.fill(0..100);
    log.place(0..90);
    log.rest();
    log.wal.checkpoint(LogId { term: 1, index: 50 }, Bytes::from_static(b"state")).unwrap();
    let first = crate::inspect(&log.disk).unwrap().segments[0].clone();
    log.disk.remove_file(&first.file);
    let findings = crate::verify(&log.disk);
    let expected = format!("{}: the file is missing", first.file);
    assert!(findings.iter().any(|found| found.to_string() == expected), "{findings:?}");
    let report = crate::inspect(&log.disk).unwrap();
    assert_eq!(report.segments[0].state, SegmentState::Damaged(expected));
    log.disk.remove_file("state");
    let expected = "state: is missing, but there are segments";
    assert_eq!(crate::inspect(&log.disk).unwrap_err().to_string(), expected);
    assert_eq!(crate::verify(&log.disk)[0].to_string(), expected);
}
