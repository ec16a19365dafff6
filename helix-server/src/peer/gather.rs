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

/// Dropping it removes what is on the disk.
#[derive(Default)]
pub(super) struct Gathered {
    /// Entries up to this one are in the log itself.
    after: u64,
    /// Every live entry above `after`, up to it, is here.
    upto: u64,
    bytes: u64,
    /// Finished once already, for a snapshot that was refused.
    finished: Option<ColdSegments>,
    writer: Option<ColdWriter>,
}

impl Gathered {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes ready for what lies above `after`, up to `at`: keeps what is here of it. Up to which
    /// entry and how many bytes that is.
    pub(super) fn begin(&mut self, after: u64, at: u64) -> (u64, u64) {
        // What lies above `at` will come by the log as well, and must not be there twice.
        if self.after != after || self.upto > at {
            *self = Self { after, upto: after, ..Self::default() };
        }
        (self.upto, self.bytes)
    }

    /// Writes what is not here yet. After `DiskFull` it can be called again with the same piece;
    /// after any other error nothing is left.
    pub(super) fn write(&mut self, wal: &Wal, piece: &Piece) -> Result<(), Error> {
        let written = self.write_some(wal, piece);
        if !matches!(written, Ok(()) | Err(Error::DiskFull { .. })) {
            *self = Self::default();
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
        Ok(())
    }

    /// All of it, synced. What is kept of it here is its size.
    pub(super) fn finish(&mut self, after: u64, at: u64) -> Result<Fetched, Error> {
        let Self { bytes, finished, writer, .. } = std::mem::take(self);
        let segments = match (finished, writer) {
            (Some(finished), None) => finished,
            (None, None) => ColdSegments::default(),
            (None, Some(writer)) => writer.finish()?,
            (Some(mut finished), Some(writer)) => {
                finished.append(writer.finish()?);
                finished
            }
        };
        self.bytes = bytes;
        Ok(Fetched { after, at, segments })
    }

    /// Takes back what openraft did not want.
    pub(super) fn keep(&mut self, fetched: Fetched) {
        let Fetched { after, at, segments } = fetched;
        let bytes = self.bytes;
        *self = Self { after, upto: at, bytes, finished: Some(segments), writer: None };
    }
}

#[cfg(test)]
mod tests {
    use helix_wal::{LogId, Options};

    use super::super::records::live_entry;
    use super::super::records::tests::live_at;
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
        assert_eq!(gathered.begin(4, 50), (4, 0));
        gathered.write(&wal, &piece(&[5, 7], 20).unwrap()).unwrap();
        let bytes = gathered.bytes();
        assert!(bytes > 0);
        gathered.write(&wal, &piece(&[5, 7], 20).unwrap()).unwrap();
        assert_eq!(gathered.bytes(), bytes, "the same again is not written again");
        assert_eq!(gathered.begin(4, 60), (20, bytes), "a newer one goes on there");
        assert_eq!(gathered.begin(4, 19), (4, 0), "an older one must not have more");
        gathered.write(&wal, &piece(&[5, 7], 19).unwrap()).unwrap();
        assert_eq!(gathered.begin(6, 60), (6, 0), "the log went on by itself");
    }

    #[test]
    fn what_openraft_refuses_is_for_the_next_snapshot() {
        let (wal, mut gathered) = (wal(), Gathered::default());
        gathered.begin(4, 20);
        gathered.write(&wal, &piece(&[5, 7], 20).unwrap()).unwrap();
        let bytes = gathered.bytes();
        let fetched = gathered.finish(4, 20).unwrap();
        gathered.keep(fetched);
        assert_eq!(gathered.begin(4, 40), (20, bytes));
        gathered.write(&wal, &piece(&[30], 40).unwrap()).unwrap();
        let mut fetched = gathered.finish(4, 40).unwrap();
        assert_eq!((fetched.segments.first(), fetched.segments.last()), (Some(5), Some(30)));
        wal.install(LogId { term: 2, index: 40 }, Default::default(), &mut fetched.segments)
            .unwrap();
        let read = wal.read_stream(7, 15, 93, 1 << 20, helix_wal::How::Blocking);
        assert_eq!(read.unwrap().unwrap().len(), 3);
    }
}
