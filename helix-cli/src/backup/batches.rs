//! A file of batches: one partition's, as they were stored, each with a checksum of its own.
//! What is damaged is named by file and bytes, and nothing behind it is read.

// A frame, all numbers little endian:
//   0  4  length of the body
//   4  4  CRC-32 of the four bytes before and of the body
//   8     body: a serialized StoredBatch, whose batch has the checksum that its producer computed
// The file begins with MAGIC.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use crc32fast::Hasher;
use helix_client::proto::batch::is_intact;
use helix_client::proto::log::v1::StoredBatch;
use prost::Message;

use crate::files;

const MAGIC: [u8; 8] = *b"HELIXBK1";
const HEAD_BYTES: usize = 8;

/// No batch is larger: no message of the service is.
const BODY_BYTES_MAX: u32 = 16 << 20;

/// Bytes that are read or written at once.
const BUFFER_BYTES: usize = 1 << 20;

/// A file up to a place: how long it is there, and the checksum of all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) file_bytes: u64,
    pub(crate) crc32: u32,
}

/// Writes behind the end of a file.
#[derive(Debug)]
pub(crate) struct Writer {
    file: BufWriter<File>,
    file_bytes: u64,
    crc: Hasher,
}

impl Writer {
    /// Begins a file.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let mut writer = Self::open(path, Extent { file_bytes: 0, crc32: 0 })?;
        writer.put(&MAGIC)?;
        Ok(writer)
    }

    /// Goes on with a file. What is behind the extent, of a run that was interrupted, is gone.
    pub(crate) fn open(path: &Path, Extent { file_bytes, crc32 }: Extent) -> io::Result<Self> {
        let file = files::open_at(path, file_bytes)?;
        let file = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(Self { file, file_bytes, crc: Hasher::new_with_initial(crc32) })
    }

    pub(crate) fn append(&mut self, batch: &StoredBatch) -> io::Result<()> {
        let body = batch.encode_to_vec();
        let length = u32::try_from(body.len()).ok().filter(|length| *length <= BODY_BYTES_MAX);
        let length = length.ok_or_else(|| io::Error::from(ErrorKind::FileTooLarge))?;
        self.put(&length.to_le_bytes())?;
        self.put(&frame_crc(length, &body).to_le_bytes())?;
        self.put(&body)
    }

    /// Makes what was written survive a power loss, and says how far that is.
    pub(crate) fn sync(&mut self) -> io::Result<Extent> {
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        Ok(Extent { file_bytes: self.file_bytes, crc32: self.crc.clone().finalize() })
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.file_bytes += bytes.len() as u64;
        self.crc.update(bytes);
        Ok(())
    }
}

fn frame_crc(length: u32, body: &[u8]) -> u32 {
    let mut crc = Hasher::new();
    crc.update(&length.to_le_bytes());
    crc.update(body);
    crc.finalize()
}

/// Bytes of a file that are not what was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Damage {
    pub(crate) file: PathBuf,
    pub(crate) bytes: Range<u64>,
    pub(crate) what: String,
}

impl fmt::Display for Damage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, bytes: Range { start, end }, what } = self;
        write!(formatter, "{} is damaged at bytes {start} to {end}: {what}", file.display())
    }
}

impl std::error::Error for Damage {}

/// Reads a file from its beginning, and checks it.
#[derive(Debug)]
pub(crate) struct Reader {
    path: PathBuf,
    file: BufReader<File>,
    place: u64,
    expected: Extent,
    crc: Hasher,
    /// Offset below which the next batch must not begin.
    next_offset: u64,
}

impl Reader {
    /// # Errors
    /// The file is not there, or is not what its beginning should be.
    pub(crate) fn open(path: &Path, expected: Extent) -> Result<Self, Damage> {
        let file = files::open(path).map_err(|error| Damage {
            file: path.to_owned(),
            bytes: 0..expected.file_bytes,
            what: error.to_string(),
        })?;
        let mut reader = Self {
            path: path.to_owned(),
            file: BufReader::with_capacity(BUFFER_BYTES, file),
            place: 0,
            expected,
            crc: Hasher::new(),
            next_offset: 0,
        };
        let mut magic = [0; MAGIC.len()];
        reader.fill(&mut magic)?;
        if magic != MAGIC {
            return Err(reader.damage(0, "this is no file of a backup"));
        }
        Ok(reader)
    }

    /// The next batch. None: the end, and the file's checksum is what it should be.
    pub(crate) fn next(&mut self) -> Result<Option<StoredBatch>, Damage> {
        let start = self.place;
        if start == self.expected.file_bytes {
            let is_right = self.crc.clone().finalize() == self.expected.crc32;
            let what = "the file's checksum differs from the manifest's";
            return if is_right { Ok(None) } else { Err(self.damage(0, what)) };
        }
        let mut head = [0; HEAD_BYTES];
        self.fill(&mut head)?;
        let number =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (length, crc) = (number(0), number(4));
        let left = self.expected.file_bytes - self.place;
        if length > BODY_BYTES_MAX || u64::from(length) > left {
            return Err(self.damage(start, "a batch would be longer than what is left"));
        }
        let mut body = vec![0; length as usize];
        self.fill(&mut body)?;
        if frame_crc(length, &body) != crc {
            return Err(self.damage(start, "a batch's checksum does not fit"));
        }
        let batch = StoredBatch::decode(Bytes::from(body));
        let batch = batch.map_err(|error| self.damage(start, &error.to_string()))?;
        let end = end_offset(&batch);
        if !batch.batch.as_ref().is_some_and(is_intact) || end.is_none() {
            return Err(self.damage(start, "a batch is not what its producer wrote"));
        }
        if batch.first_offset < self.next_offset {
            return Err(self.damage(start, "a batch lies before the one before it"));
        }
        self.next_offset = end.unwrap_or(self.next_offset);
        Ok(Some(batch))
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), Damage> {
        let (start, end) = (self.place, self.place + buffer.len() as u64);
        let read = match end > self.expected.file_bytes {
            true => Err(ErrorKind::UnexpectedEof.into()),
            false => self.file.read_exact(buffer),
        };
        if let Err(error) = read {
            let what = match error.kind() {
                ErrorKind::UnexpectedEof => "the file is too short".to_owned(),
                _ => error.to_string(),
            };
            let bytes = start..self.expected.file_bytes.max(end);
            return Err(Damage { file: self.path.clone(), bytes, what });
        }
        self.place = end;
        self.crc.update(buffer);
        Ok(())
    }

    /// From a place to where the reader is.
    fn damage(&self, start: u64, what: &str) -> Damage {
        Damage { file: self.path.clone(), bytes: start..self.place, what: what.to_owned() }
    }
}

/// One past the last record of a batch. None: it has no records, or their places make no sense.
pub(crate) fn end_offset(stored: &StoredBatch) -> Option<u64> {
    let count = stored.batch.as_ref()?.record_count as usize;
    let last = match stored.offset_deltas.as_slice() {
        [] => u64::try_from(count.checked_sub(1)?).ok()?,
        deltas if deltas.len() != count || !deltas.is_sorted() => return None,
        deltas => u64::from(*deltas.last()?),
    };
    stored.first_offset.checked_add(last)?.checked_add(1)
}

#[cfg(test)]
pub(super) mod tests {
    use helix_client::proto::batch;
    use helix_client::proto::log::v1::Record;

    use super::*;

    pub(crate) fn stored(first_offset: u64, values: &[&str]) -> StoredBatch {
        let record = |value: &&str| Record {
            value: Some(Bytes::copy_from_slice(value.as_bytes())),
            ..Record::default()
        };
        let records: Vec<_> = values.iter().map(record).collect();
        StoredBatch {
            first_offset,
            append_time: Some(prost_types::Timestamp { seconds: 5, nanos: 0 }),
            offset_deltas: Vec::new(),
            batch: Some(batch::encode(&records)),
        }
    }

    /// Without a sync, of which there would be thousands.
    fn overwrite(path: &Path, bytes: &[u8]) {
        files::open_at(path, 0).unwrap().write_all(bytes).unwrap();
    }

    fn read(path: &Path, expected: Extent) -> Result<Vec<StoredBatch>, Damage> {
        let mut reader = Reader::open(path, expected)?;
        std::iter::from_fn(|| reader.next().transpose()).collect()
    }

    fn written(path: &Path) -> (Vec<StoredBatch>, Extent) {
        let batches = vec![stored(3, &["a", "b"]), stored(5, &["c"]), stored(9, &["after a gap"])];
        let mut writer = Writer::create(path).unwrap();
        for batch in &batches {
            writer.append(batch).unwrap();
        }
        (batches, writer.sync().unwrap())
    }

    #[test]
    fn what_is_written_is_read_and_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let (mut batches, extent) = written(&path);
        assert_eq!(read(&path, extent).unwrap(), batches);
        // A run that was interrupted leaves something behind the extent.
        let mut lost = Writer::open(&path, extent).unwrap();
        lost.append(&stored(10, &["lost"])).unwrap();
        lost.sync().unwrap();
        assert_eq!(read(&path, extent).unwrap(), batches);
        let mut writer = Writer::open(&path, extent).unwrap();
        batches.push(stored(10, &["d"]));
        writer.append(batches.last().unwrap()).unwrap();
        assert_eq!(read(&path, writer.sync().unwrap()).unwrap(), batches);
    }

    #[test]
    fn every_damaged_byte_is_found_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let (batches, extent) = written(&path);
        let good = files::read(&path).unwrap().unwrap();
        assert_eq!(good.len() as u64, extent.file_bytes);
        for place in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[place] ^= 1 << bit;
                overwrite(&path, &bad);
                let mut reader = match Reader::open(&path, extent) {
                    Ok(reader) => reader,
                    Err(damage) => {
                        assert!(damage.bytes.contains(&(place as u64)), "{place}: {damage}");
                        continue;
                    }
                };
                let mut read = Vec::new();
                let damage = loop {
                    match reader.next() {
                        Ok(Some(batch)) => read.push(batch),
                        Ok(None) => panic!("byte {place} was not found"),
                        Err(damage) => break damage,
                    }
                };
                // A length that is wrong is named with the head that it stands in.
                assert!(damage.bytes.contains(&(place as u64)), "{place}: {damage}");
                assert!(batches.starts_with(&read), "what came before it is right");
            }
        }
        for length in 0..good.len() {
            overwrite(&path, &good[..length]);
            let damage = read(&path, extent).unwrap_err();
            assert!(damage.bytes.end >= extent.file_bytes, "{length}: {damage}");
        }
        overwrite(&path, &good);
        let wrong = Extent { crc32: extent.crc32 ^ 1, ..extent };
        assert!(read(&path, wrong).is_err(), "the manifest's checksum counts");
    }

    #[test]
    fn ends_of_batches_are_those_of_their_last_records() {
        assert_eq!(end_offset(&stored(3, &["a", "b"])), Some(5));
        let sparse = StoredBatch { offset_deltas: vec![0, 7], ..stored(3, &["a", "b"]) };
        assert_eq!(end_offset(&sparse), Some(11));
        for deltas in [vec![0], vec![7, 0], vec![0, 1, 2]] {
            assert_eq!(
                end_offset(&StoredBatch { offset_deltas: deltas, ..stored(3, &["a", "b"]) }),
                None
            );
        }
        assert_eq!(end_offset(&stored(u64::MAX, &["a"])), None);
        assert_eq!(end_offset(&StoredBatch::default()), None);
    }
}
