//! What was fetched so far: entries in segments beside the log, which nobody sees.
//! Everything here waits for the disk.

use helix_proto::raft::v1 as pb;
use helix_wal::{ColdSegments, ColdWriter, Error, LiveEntry, Wal};

use super::records::{bytes_of, read_live_entry};
use crate::raft::Fetched;

/// Live entries that follow those that are here: checked, and in the order of the log.
pub(super) struct Piece {
    entries: Vec<LiveEntry>,
    /// Every live entry up to it is in this piece, or came before.
    pub(super) upto: u64,
    pub(super) bytes: u64,
    /// What the source says is left.
    pub(super) bytes_left: u64,
}

impl Piece {
    /// An answer to a question for what lies above `after`, up to `at`.
    pub(super) fn new(answer: pb::Records, after: u64, at: u64) -> Result<Self, String> {
        let pb::Records { upto, bytes_left, .. } = answer;
        if upto <= after || upto > at {
            return Err(format!("an answer up to entry {upto}, asked for {after} to {at}"));
        }
        let bytes = bytes_of(&answer) as u64;
        let mut last = after;
        let mut entries = Vec::with_capacity(answer.entries.len());
        for live in answer.entries {
            let live = read_live_entry(live).map_err(|error| error.to_string())?;
            if live.id.index <= last || live.id.index > upto {
                return Err(format!("entry {} is out of order", live.id.index));
            }
            last = live.id.index;
            entries.push(live);
        }
        Ok(Self { entries, upto, bytes, bytes_left })
    }
}

/// Finished segments outlive the process; what is being written goes with it.
#[derive(Default)]
pub(super) struct Gathered {
    /// Entries up to this one are in the log itself.
    after: u64,
    /// Every live entry above `after`, up to it, is here.
    upto: u64,
    bytes: u64,
    /// Durable, and retained by the log.
    finished: ColdSegments,
    writer: Option<ColdWriter>,
}

impl Gathered {
    /// What an earlier process had of it.
    pub(super) fn recover(wal: &Wal) -> Self {
        let Some((after, finished)) = wal.take_received() else { return Self::default() };
        let upto = finished.last().unwrap_or(after);
        Self { after, upto, bytes: finished.bytes(), finished, writer: None }
    }

    pub(super) fn after(&self) -> u64 {
        self.after
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes ready for what lies above `after`, up to `at`: keeps what is here of it. Up to which
    /// entry and how many bytes that is.
    pub(super) fn begin(&mut self, wal: &Wal, after: u64, at: u64) -> (u64, u64) {
        // What lies above `at` will come by the log as well, and must not be there twice.
        if self.after != after || self.upto > at {
            self.clear(wal);
            (self.after, self.upto) = (after, after);
        }
        (self.upto, self.bytes)
    }

    /// Removes it all.
    pub(super) fn clear(&mut self, wal: &Wal) {
        let Self { finished, .. } = std::mem::take(self);
        if !finished.is_empty() {
            // Ignored: an open takes what is named and missing for nothing.
            let _ = wal.retain(0, &mut ColdSegments::default());
            finished.discard();
        }
    }

    /// Writes what is not here yet. After `DiskFull` it can be called again with the same piece;
    /// after any other error only finished segments are left.
    pub(super) fn write(&mut self, wal: &Wal, piece: &Piece) -> Result<(), Error> {
        let written = self.write_some(wal, piece);
        if !matches!(written, Ok(()) | Err(Error::DiskFull { .. })) {
            self.writer = None;
            self.upto = self.finished.last().unwrap_or(self.after);
            self.bytes = self.finished.bytes();
        }
        written
    }

    fn write_some(&mut self, wal: &Wal, piece: &Piece) -> Result<(), Error> {
        for live in &piece.entries {
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
        self.upto = self.upto.max(piece.upto);
        let finished = match &mut self.writer {
            Some(writer) => writer.take_finished()?,
            None => return Ok(()),
        };
        if finished.is_empty() {
            return Ok(());
        }
        self.finished.append(finished);
        match wal.retain(self.after, &mut self.finished) {
            // Then a crash costs this segment too.
            Err(Error::DiskFull { .. }) => Ok(()),
            retained => retained,
        }
    }

    /// All of it, synced. What is kept of it here is its size.
    pub(super) fn finish(&mut self, after: u64, at: u64) -> Result<Fetched, Error> {
        let Self { bytes, finished: mut segments, writer, .. } = std::mem::take(self);
        if let Some(writer) = writer {
            segments.append(writer.finish()?);
        }
        self.bytes = bytes;
        Ok(Fetched { after, at, segments })
    }

    /// Takes back what openraft did not want.
    pub(super) fn keep(&mut self, fetched: Fetched) {
        let Fetched { after, at, segments } = fetched;
        let bytes = self.bytes;
        *self = Self { after, upto: at, bytes, finished: segments, writer: None };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use helix_wal::storage::{Crash, SimulatedDisk};
    use helix_wal::{How, Keeper, LogId, Options, Writer};

    use super::super::records::live_entry;
    use super::super::records::tests::{live_at, live_with};
    use super::*;

    fn wal() -> Wal {
        Wal::open_memory(Options::default())
    }

    /// Entries of three records each.
    fn piece(indexes: &[u64], upto: u64) -> Result<Piece, String> {
        let after = indexes.first().map_or(0, |first| first - 1);
        let entries = indexes.iter().map(|index| live_entry(live_at(*index, index * 3))).collect();
        Piece::new(pb::Records { entries, upto, bytes_left: 9 }, after, 100)
    }

    #[test]
    fn an_answer_must_be_one_to_the_question() {
        assert_eq!(piece(&[5, 7], 9).unwrap().entries.len(), 2);
        assert!(piece(&[5, 7], 6).is_err(), "an entry behind its end");
        assert!(piece(&[7, 5], 9).is_err(), "out of order");
        assert!(piece(&[5, 5], 9).is_err(), "twice");
        assert!(piece(&[5], 101).is_err(), "more than was asked for");
        assert!(piece(&[], 0).is_err(), "nothing new");
        assert!(piece(&[], 100).is_ok(), "nothing is live there");
    }

    #[test]
    fn what_is_here_is_kept_for_the_next_snapshot_and_only_then() {
        let (wal, mut gathered) = (wal(), Gathered::default());
        assert_eq!(gathered.begin(&wal, 4, 50), (4, 0));
        gathered.write(&wal, &piece(&[5, 7], 20).unwrap()).unwrap();
        let bytes = gathered.bytes();
        assert!(bytes > 0);
        gathered.write(&wal, &piece(&[5, 7], 20).unwrap()).unwrap();
        assert_eq!(gathered.bytes(), bytes, "the same again is not written again");
        assert_eq!(gathered.begin(&wal, 4, 60), (20, bytes), "a newer one goes on there");
        assert_eq!(gathered.begin(&wal, 4, 19), (4, 0), "an older one must not have more");
        gathered.write(&wal, &piece(&[5, 7], 19).unwrap()).unwrap();
        assert_eq!(gathered.begin(&wal, 6, 60), (6, 0), "the log went on by itself");
    }

    #[test]
    fn what_openraft_refuses_is_for_the_next_snapshot() {
        let (wal, mut gathered) = (wal(), Gathered::default());
        gathered.begin(&wal, 4, 20);
        gathered.write(&wal, &piece(&[5, 7], 20).unwrap()).unwrap();
        let bytes = gathered.bytes();
        let fetched = gathered.finish(4, 20).unwrap();
        gathered.keep(fetched);
        assert_eq!(gathered.begin(&wal, 4, 40), (20, bytes));
        gathered.write(&wal, &piece(&[30], 40).unwrap()).unwrap();
        let mut fetched = gathered.finish(4, 40).unwrap();
        assert_eq!((fetched.segments.first(), fetched.segments.last()), (Some(5), Some(30)));
        wal.install(LogId { term: 2, index: 40 }, Default::default(), &mut fetched.segments)
            .unwrap();
        let read = wal.read_stream(7, 15, 93, 1 << 20, How::Blocking);
        assert_eq!(read.unwrap().unwrap().len(), 3);
    }

    const AFTER: u64 = 4;
    const AT: u64 = 80;
    const SEGMENT_BYTES: u64 = 64 << 10;

    /// What is to be fetched: 40 batches of 5 kB, with gaps between them.
    fn missing() -> Vec<LiveEntry> {
        (0..40).map(|n| live_with(AFTER + 1 + n + n / 2, n * 3, 5_000)).collect()
    }

    /// What a source answers: three batches.
    fn answer(missing: &[LiveEntry], after: u64) -> pb::Records {
        let rest = missing.iter().filter(|live| live.id.index > after);
        let entries: Vec<LiveEntry> = rest.clone().take(3).cloned().collect();
        let is_all = rest.count() <= 3;
        let upto = entries.last().filter(|_| !is_all).map_or(AT, |last| last.id.index);
        pb::Records { entries: entries.into_iter().map(live_entry).collect(), upto, bytes_left: 9 }
    }

    /// Whoever is dropped of them closes the log.
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

    /// A process that takes a snapshot up to the end, or until its disk stops. Counts the bytes
    /// that it asks for.
    fn receive(disk: &SimulatedDisk, missing: &[LiveEntry], asked: &mut u64) -> Result<(), Error> {
        let (wal, _writer, _keeper) = open(disk)?;
        let at = LogId { term: 2, index: AT };
        if wal.state().purged == Some(at) {
            return Ok(());
        }
        let mut gathered = Gathered::recover(&wal);
        let (mut upto, _) = gathered.begin(&wal, AFTER, AT);
        while upto < AT {
            let piece = Piece::new(answer(missing, upto), upto, AT).unwrap();
            *asked += piece.bytes;
            upto = piece.upto;
            gathered.write(&wal, &piece)?;
        }
        let mut fetched = gathered.finish(AFTER, AT)?;
        wal.install(at, "state".into(), &mut fetched.segments)
    }

    /// A crash after each change that a receive makes to its disk: the next process goes on with
    /// what was synced, has everything in the end, and asks again for little.
    #[test]
    fn a_receive_goes_on_after_a_crash_at_any_moment() {
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
                // Ignored: what the disk stops may be something that can be done without.
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
        assert!(resumed > changes, "{resumed} runs of {changes} went on in the middle");
    }

    /// The log has each batch once, and the disk nothing beside it.
    fn expect_all(disk: &SimulatedDisk, missing: &[LiveEntry]) {
        disk.crash(Crash::LoseAll);
        let disk = disk.reopen();
        let (wal, _writer, _keeper) = open(&disk).unwrap();
        assert!(wal.take_received().is_none());
        assert_eq!(helix_wal::verify(&disk), []);
        assert_eq!(helix_wal::inspect(&disk).unwrap().leftovers, [""; 0]);
        let live = wal.read_live(AFTER, AT, usize::MAX).unwrap();
        let ids = |all: &[LiveEntry]| all.iter().map(|it| it.id).collect::<Vec<_>>();
        assert_eq!(ids(&live.entries), ids(missing));
        let read = wal.read_stream(7, 0, u64::MAX, usize::MAX, How::Blocking).unwrap().unwrap();
        assert!(read.iter().zip(missing).all(|(a, b)| a.payload.bytes == b.payload.bytes));
    }

    #[test]
    fn what_is_of_no_use_any_more_is_removed_from_the_disk() {
        let (missing, disk) = (missing(), SimulatedDisk::new(1));
        let begun = |disk: &SimulatedDisk| {
            let log = open(disk).unwrap();
            let wal = log.0.clone();
            let mut gathered = Gathered::recover(&wal);
            let (mut upto, _) = gathered.begin(&wal, AFTER, AT);
            while upto < 50 {
                let piece = Piece::new(answer(&missing, upto), upto, AT).unwrap();
                upto = piece.upto;
                gathered.write(&wal, &piece).unwrap();
            }
            (log, gathered)
        };
        drop(begun(&disk));
        let disk = disk.reopen();
        let (log, mut gathered) = begun(&disk);
        let wal = log.0.clone();
        assert!(gathered.bytes() > SEGMENT_BYTES);
        let (upto, bytes) = gathered.begin(&wal, AFTER + 1, AT);
        assert_eq!((upto, bytes), (AFTER + 1, 0), "the log went on by itself");
        let cold = |disk: &SimulatedDisk| {
            disk.files().into_iter().filter(|name| name.ends_with(".cold")).count()
        };
        assert_eq!(cold(&disk), 0);
        drop((wal, gathered, log));
        let (wal, _writer, _keeper) = open(&disk.reopen()).unwrap();
        assert!(wal.take_received().is_none());
    }
}
