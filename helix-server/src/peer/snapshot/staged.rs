//! Fetched records that wait for their snapshot, in segments beside the log.
//! Readers do not see them. Every function here may wait for the disk.

use helix_proto::raft::v1 as pb;
use helix_wal::{ColdSegments, ColdWriter, Error, LiveEntry, Wal};

use super::records::{read_live_entry, records_bytes};
use crate::raft::FetchedRecords;

/// A checked response of a source: the live entries of one range, in log order.
pub(super) struct RecordChunk {
    entries: Vec<LiveEntry>,
    /// Last index of the range. Every live entry up to it is in this chunk or an earlier one.
    pub(super) upto: u64,
    pub(super) bytes: u64,
    /// Estimate by the source of the bytes after this chunk.
    pub(super) bytes_left: u64,
    /// Last entry whose records may have replaced some that are missing in it.
    compacted_upto: u64,
}

impl RecordChunk {
    /// Checks the response to a request for the live entries above `after`, up to `at`.
    pub(super) fn new(records: pb::Records, after: u64, at: u64) -> Result<Self, String> {
        let pb::Records { upto, bytes_left, compacted_upto, .. } = records;
        if upto <= after || upto > at {
            return Err(format!("response ends at entry {upto}, requested {after}..={at}"));
        }
        let bytes = records_bytes(&records) as u64;
        let mut last = after;
        let mut entries = Vec::with_capacity(records.entries.len());
        for live in records.entries {
            let live = read_live_entry(live).map_err(|error| error.to_string())?;
            if live.id.index <= last || live.id.index > upto {
                return Err(format!("entry {} is out of order", live.id.index));
            }
            last = live.id.index;
            entries.push(live);
        }
        Ok(Self { entries, upto, bytes, bytes_left, compacted_upto })
    }
}

/// Fetched records on disk. Finished segments outlive the process, an unfinished one does not.
#[derive(Default)]
pub(super) struct StagedRecords {
    /// Last entry in the log itself.
    after: u64,
    /// Every live entry above `after`, up to this one, is staged.
    upto: u64,
    bytes: u64,
    /// Durable segments, which the log retains.
    finished: ColdSegments,
    writer: Option<ColdWriter>,
}

impl StagedRecords {
    /// Recovers the segments that an earlier process finished.
    pub(super) fn recover(wal: &Wal) -> Self {
        let Some((after, finished)) = wal.take_staged() else { return Self::default() };
        let upto = finished.last().unwrap_or(after);
        Self { after, upto, bytes: finished.bytes(), finished, writer: None }
    }

    pub(super) fn after(&self) -> u64 {
        self.after
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Prepares for the live entries above `after`, up to `at`. Keeps those that are staged.
    /// Returns the last staged entry and the staged bytes.
    pub(super) fn prepare(&mut self, wal: &Wal, after: u64, at: u64) -> (u64, u64) {
        // Entries above `at` will arrive through the log, and must not be stored twice.
        if self.after != after || self.upto > at {
            self.clear(wal);
            (self.after, self.upto) = (after, after);
        }
        (self.upto, self.bytes)
    }

    /// Deletes all staged records.
    pub(super) fn clear(&mut self, wal: &Wal) {
        let Self { finished, .. } = std::mem::take(self);
        if !finished.is_empty() {
            // Ignored: opening the log tolerates retained segments that are missing.
            let _ = wal.retain(0, &mut ColdSegments::default());
            finished.discard();
        }
    }

    /// Writes the entries of a chunk that are not staged yet.
    ///
    /// # Errors
    /// After a shortage the same chunk can be written again. After any other error only finished
    /// segments are left.
    pub(super) fn write(&mut self, wal: &Wal, chunk: &RecordChunk) -> Result<(), Error> {
        let written = self.try_write(wal, chunk);
        if written.as_ref().is_err_and(|error| !error.is_shortage()) {
            self.writer = None;
            self.upto = self.finished.last().unwrap_or(self.after);
            self.bytes = self.finished.bytes();
        }
        written
    }

    fn try_write(&mut self, wal: &Wal, chunk: &RecordChunk) -> Result<(), Error> {
        // Before the log retains or installs any of it, so that a restart does not forget it.
        wal.raise_cleaned_upto(chunk.compacted_upto)?;
        for live in &chunk.entries {
            if live.id.index <= self.upto {
                continue;
            }
            let writer = match &mut self.writer {
                Some(writer) => writer,
                none => none.insert(wal.cold_writer()?),
            };
            writer.write(live.clone())?;
            self.upto = live.id.index;
            self.bytes += (live.head.len() + live.payload.bytes.len()) as u64;
        }
        self.upto = self.upto.max(chunk.upto);
        let finished = match &mut self.writer {
            Some(writer) => writer.take_finished()?,
            None => return Ok(()),
        };
        if finished.is_empty() {
            return Ok(());
        }
        self.finished.append(finished);
        match wal.retain(self.after, &mut self.finished) {
            // A crash then loses this segment too.
            Err(error) if error.is_shortage() => Ok(()),
            retained => retained,
        }
    }

    /// Syncs and returns all staged records. Only their size stays here.
    pub(super) fn finish(&mut self, after: u64, at: u64) -> Result<FetchedRecords, Error> {
        let last = match self.writer.as_mut().map(ColdWriter::finish).transpose() {
            Ok(last) => last,
            // The call can be repeated.
            Err(error) if error.is_shortage() => return Err(error),
            Err(error) => {
                *self = Self::default();
                return Err(error);
            }
        };
        let Self { bytes, finished: mut segments, .. } = std::mem::take(self);
        if let Some(last) = last {
            segments.append(last);
        }
        self.bytes = bytes;
        Ok(FetchedRecords { after, at, segments })
    }

    /// Stages finished records again, whose snapshot openraft refused.
    pub(super) fn put_back(&mut self, fetched: FetchedRecords) {
        let FetchedRecords { after, at, segments } = fetched;
        let bytes = self.bytes;
        *self = Self { after, upto: at, bytes, finished: segments, writer: None };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use helix_wal::storage::{Crash, SimulatedDisk};
    use helix_wal::{Keeper, LogId, Options, ReadMode, Writer};

    use super::super::records::live_entry;
    use super::super::records::tests::{live_at, live_with};
    use super::*;

    fn wal() -> Wal {
        Wal::open_memory(Options::default())
    }

    /// Entries of three records each.
    fn chunk(indexes: &[u64], upto: u64) -> Result<RecordChunk, String> {
        let after = indexes.first().map_or(0, |first| first - 1);
        let entries = indexes.iter().map(|index| live_entry(live_at(*index, index * 3))).collect();
        let records = pb::Records { entries, upto, bytes_left: 9, compacted_upto: 0 };
        RecordChunk::new(records, after, 100)
    }

    #[test]
    fn rejects_response_outside_of_request() {
        assert_eq!(chunk(&[5, 7], 9).unwrap().entries.len(), 2);
        assert!(chunk(&[5, 7], 6).is_err(), "an entry after its end");
        assert!(chunk(&[7, 5], 9).is_err(), "out of order");
        assert!(chunk(&[5, 5], 9).is_err(), "twice");
        assert!(chunk(&[5], 101).is_err(), "past the requested range");
        assert!(chunk(&[], 0).is_err(), "no progress");
        assert!(chunk(&[], 100).is_ok(), "no live entries in the range");
    }

    #[test]
    fn staged_records_are_kept_only_for_a_later_snapshot_of_the_same_log_end() {
        let (wal, mut staged) = (wal(), StagedRecords::default());
        assert_eq!(staged.prepare(&wal, 4, 50), (4, 0));
        staged.write(&wal, &chunk(&[5, 7], 20).unwrap()).unwrap();
        let bytes = staged.bytes();
        assert!(bytes > 0);
        staged.write(&wal, &chunk(&[5, 7], 20).unwrap()).unwrap();
        assert_eq!(staged.bytes(), bytes, "a repeated chunk is not written again");
        assert_eq!(staged.prepare(&wal, 4, 60), (20, bytes), "a later snapshot resumes");
        assert_eq!(
            staged.prepare(&wal, 4, 19),
            (4, 0),
            "an older snapshot must not find later entries"
        );
        staged.write(&wal, &chunk(&[5, 7], 19).unwrap()).unwrap();
        assert_eq!(staged.prepare(&wal, 6, 60), (6, 0), "the log advanced without them");
    }

    #[test]
    fn records_of_refused_snapshot_are_kept_for_the_next() {
        let (wal, mut staged) = (wal(), StagedRecords::default());
        staged.prepare(&wal, 4, 20);
        staged.write(&wal, &chunk(&[5, 7], 20).unwrap()).unwrap();
        let bytes = staged.bytes();
        let fetched = staged.finish(4, 20).unwrap();
        staged.put_back(fetched);
        assert_eq!(staged.prepare(&wal, 4, 40), (20, bytes));
        staged.write(&wal, &chunk(&[30], 40).unwrap()).unwrap();
        let mut fetched = staged.finish(4, 40).unwrap();
        assert_eq!((fetched.segments.first(), fetched.segments.last()), (Some(5), Some(30)));
        wal.install(LogId { term: 2, index: 40 }, Default::default(), &mut fetched.segments)
            .unwrap();
        let read = wal.read_stream(7, 15, 93, 1 << 20, ReadMode::Blocking);
        assert_eq!(read.unwrap().unwrap().len(), 3);
    }

    const AFTER: u64 = 4;
    const AT: u64 = 80;
    const SEGMENT_BYTES: u64 = 64 << 10;

    /// Returns 40 batches of 5 kB to fetch, with gaps between them.
    fn missing() -> Vec<LiveEntry> {
        (0..40).map(|n| live_with(AFTER + 1 + n + n / 2, n * 3, 5_000)).collect()
    }

    /// Returns a response of a source: up to three batches.
    fn response(missing: &[LiveEntry], after: u64) -> pb::Records {
        let rest = missing.iter().filter(|live| live.id.index > after);
        let entries: Vec<LiveEntry> = rest.clone().take(3).cloned().collect();
        let is_all = rest.count() <= 3;
        let upto = entries.last().filter(|_| !is_all).map_or(AT, |last| last.id.index);
        let entries = entries.into_iter().map(live_entry).collect();
        pb::Records { entries, upto, bytes_left: 9, compacted_upto: 0 }
    }

    /// Dropping any of these closes the log.
    type Log = (Wal, Writer, Keeper);

    fn open(disk: &SimulatedDisk) -> Result<Log, Error> {
        let options = Options {
            segment_bytes: SEGMENT_BYTES,
            reserve_bytes: 0,
            ready_segments: 0,
            ..Options::default()
        };
        let opened = Wal::open(Arc::new(disk.clone()), options);
        opened.map(|(wal, writer, keeper, _)| (wal, writer, keeper))
    }

    /// Fetches and installs a snapshot, until its disk stops. Adds to `fetched_bytes`.
    fn receive(
        disk: &SimulatedDisk,
        missing: &[LiveEntry],
        fetched_bytes: &mut u64,
    ) -> Result<(), Error> {
        let (wal, _writer, _keeper) = open(disk)?;
        let at = LogId { term: 2, index: AT };
        if wal.state().purged == Some(at) {
            return Ok(());
        }
        let mut staged = StagedRecords::recover(&wal);
        let (mut upto, _) = staged.prepare(&wal, AFTER, AT);
        while upto < AT {
            let chunk = RecordChunk::new(response(missing, upto), upto, AT).unwrap();
            *fetched_bytes += chunk.bytes;
            upto = chunk.upto;
            staged.write(&wal, &chunk)?;
        }
        let mut fetched = staged.finish(AFTER, AT)?;
        wal.install(at, "state".into(), &mut fetched.segments)
    }

    /// Crashes after each change to the disk. The next process must resume from synced segments,
    /// end with every entry, and fetch little twice.
    #[test]
    fn fetch_resumes_after_crash_at_any_change() {
        let missing = missing();
        let (mut total, whole) = (0, SimulatedDisk::new(1));
        receive(&whole, &missing, &mut total).unwrap();
        let changes = whole.changes();
        let bound = total + SEGMENT_BYTES + 3 * 5_100;
        let mut resumed = 0;
        for stop in 0..changes {
            for crash in [Crash::LoseAll, Crash::KeepAll, Crash::Seeded(stop)] {
                let disk = SimulatedDisk::new(stop);
                disk.stop_at_change(Some(stop));
                let (mut before, mut after) = (0, 0);
                // Ignored: the stopped change may be an optional one.
                let _ = receive(&disk, &missing, &mut before);
                assert!(disk.stopped(), "change {stop} of {changes} was not reached");
                disk.crash(crash);
                let disk = disk.reopen();
                receive(&disk, &missing, &mut after).unwrap();
                assert!(before + after <= bound, "after change {stop}: {before} and {after} bytes");
                resumed += u64::from(after < total);
                expect_all(&disk, &missing);
            }
        }
        assert!(resumed > changes, "{resumed} runs of {changes} resumed");
    }

    /// Asserts that the log has each batch once, and that the disk has no leftovers.
    fn expect_all(disk: &SimulatedDisk, missing: &[LiveEntry]) {
        disk.crash(Crash::LoseAll);
        let disk = disk.reopen();
        let (wal, _writer, _keeper) = open(&disk).unwrap();
        assert!(wal.take_staged().is_none());
        assert_eq!(helix_wal::verify(&disk), []);
        assert_eq!(helix_wal::inspect(&disk).unwrap().leftovers, [""; 0]);
        let live = wal.read_live(AFTER, AT, usize::MAX).unwrap();
        let ids = |all: &[LiveEntry]| all.iter().map(|it| it.id).collect::<Vec<_>>();
        assert_eq!(ids(&live.entries), ids(missing));
        let read =
            wal.read_stream(7, 0, u64::MAX, usize::MAX, ReadMode::Blocking).unwrap().unwrap();
        assert!(read.iter().zip(missing).all(|(a, b)| a.payload.bytes == b.payload.bytes));
    }

    /// Crashes, and opens the log again.
    fn reopen(disk: &SimulatedDisk) -> (SimulatedDisk, Log) {
        disk.crash(Crash::LoseAll);
        let disk = disk.reopen();
        let log = open(&disk).unwrap();
        (disk, log)
    }

    /// Sources may have compacted records of which only later entries have the latest ones.
    #[test]
    fn restart_remembers_what_sources_had_compacted() {
        const COMPACTED: u64 = AT + 9;
        let (missing, disk) = (missing(), SimulatedDisk::new(1));
        let stage = |wal: &Wal, until: u64, compacted_upto: u64| {
            let mut staged = StagedRecords::recover(wal);
            let (mut upto, _) = staged.prepare(wal, AFTER, AT);
            while upto < until {
                let records = pb::Records { compacted_upto, ..response(&missing, upto) };
                let chunk = RecordChunk::new(records, upto, AT).unwrap();
                upto = chunk.upto;
                staged.write(wal, &chunk).unwrap();
            }
            staged
        };
        let log = open(&disk).unwrap();
        assert!(stage(&log.0, 50, COMPACTED).bytes() > SEGMENT_BYTES);
        drop(log);

        let (disk, log) = reopen(&disk);
        assert_eq!(log.0.cleaned_upto(), COMPACTED, "with the staged segments");
        // Another source, which has compacted less, sends the rest.
        let mut fetched = stage(&log.0, AT, 1).finish(AFTER, AT).unwrap();
        let at = LogId { term: 2, index: AT };
        log.0.install(at, "state".into(), &mut fetched.segments).unwrap();
        drop((log, fetched));

        let (disk, log) = reopen(&disk);
        assert_eq!(log.0.state().purged, Some(at));
        assert_eq!(log.0.cleaned_upto(), COMPACTED, "installed, and not caught up yet");
        drop(log);
        expect_all(&disk, &missing);
    }

    /// Nothing of the range may be left in the source.
    #[test]
    fn restart_remembers_compaction_that_left_no_records() {
        let disk = SimulatedDisk::new(1);
        let log = open(&disk).unwrap();
        let mut staged = StagedRecords::recover(&log.0);
        staged.prepare(&log.0, AFTER, AT);
        let records = pb::Records { upto: AT, compacted_upto: AT + 9, ..pb::Records::default() };
        let chunk = RecordChunk::new(records, AFTER, AT).unwrap();
        staged.write(&log.0, &chunk).unwrap();
        let mut fetched = staged.finish(AFTER, AT).unwrap();
        let at = LogId { term: 2, index: AT };
        log.0.install(at, "state".into(), &mut fetched.segments).unwrap();
        drop(log);
        let (_disk, log) = reopen(&disk);
        assert_eq!((log.0.state().purged, log.0.cleaned_upto()), (Some(at), AT + 9));
        drop(log);

        let records = pb::Records { upto: AT, compacted_upto: 1 << 62, ..pb::Records::default() };
        let chunk = RecordChunk::new(records, AFTER, AT).unwrap();
        let wal = wal();
        let refused = StagedRecords::default().write(&wal, &chunk);
        assert!(matches!(refused, Err(Error::Unusable(_))), "no log has such an entry");
    }

    #[test]
    fn stale_records_are_deleted_from_disk() {
        let (missing, disk) = (missing(), SimulatedDisk::new(1));
        let begun = |disk: &SimulatedDisk| {
            let log = open(disk).unwrap();
            let wal = log.0.clone();
            let mut staged = StagedRecords::recover(&wal);
            let (mut upto, _) = staged.prepare(&wal, AFTER, AT);
            while upto < 50 {
                let chunk = RecordChunk::new(response(&missing, upto), upto, AT).unwrap();
                upto = chunk.upto;
                staged.write(&wal, &chunk).unwrap();
            }
            (log, staged)
        };
        drop(begun(&disk));
        let disk = disk.reopen();
        let (log, mut staged) = begun(&disk);
        let wal = log.0.clone();
        assert!(staged.bytes() > SEGMENT_BYTES);
        let (upto, bytes) = staged.prepare(&wal, AFTER + 1, AT);
        assert_eq!((upto, bytes), (AFTER + 1, 0), "the log advanced without them");
        let cold = |disk: &SimulatedDisk| {
            disk.files().into_iter().filter(|name| name.ends_with(".cold")).count()
        };
        assert_eq!(cold(&disk), 0);
        drop((wal, staged, log));
        let (wal, _writer, _keeper) = open(&disk.reopen()).unwrap();
        assert!(wal.take_staged().is_none());
    }
}
