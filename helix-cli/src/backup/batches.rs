//! The batch file of a partition: stored batches, each in a frame with a checksum.
//! Damage is reported as a byte range of the file; reading stops there.

// Frame layout, integers little endian:
//   0  4  length of the body
//   4  4  CRC-32 of the length field and the body
//   8     body: a serialized StoredBatch; its batch includes the checksum of the producer
// The file starts with MAGIC.

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
const HEADER_BYTES: usize = 8;

/// Maximum size of a frame body: the largest message of the service.
const BODY_BYTES_MAX: u32 = 16 << 20;

/// Size of the read and write buffers.
const BUFFER_BYTES: usize = 1 << 20;

/// The valid prefix of a file: its length and the checksum of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FilePrefix {
    pub(crate) file_bytes: u64,
    pub(crate) crc32: u32,
}

/// Appends batches to a file.
#[derive(Debug)]
pub(crate) struct BatchFileWriter {
    file: BufWriter<File>,
    file_bytes: u64,
    crc: Hasher,
}

impl BatchFileWriter {
    /// Creates a file and writes its magic bytes.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let mut writer = Self::open(path, FilePrefix { file_bytes: 0, crc32: 0 })?;
        writer.put(&MAGIC)?;
        Ok(writer)
    }

    /// Opens a file and truncates it to the prefix; later bytes are from an interrupted run.
    pub(crate) fn open(
        path: &Path,
        FilePrefix { file_bytes, crc32 }: FilePrefix,
    ) -> io::Result<Self> {
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

    /// Syncs the file and returns its durable prefix.
    pub(crate) fn sync(&mut self) -> io::Result<FilePrefix> {
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        Ok(FilePrefix { file_bytes: self.file_bytes, crc32: self.crc.clone().finalize() })
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

/// A damaged byte range of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileDamage {
    pub(crate) file: PathBuf,
    pub(crate) bytes: Range<u64>,
    pub(crate) what: String,
}

impl fmt::Display for FileDamage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, bytes: Range { start, end }, what } = self;
        write!(formatter, "{} is damaged at bytes {start} to {end}: {what}", file.display())
    }
}

impl std::error::Error for FileDamage {}

/// Reads a file from its start and verifies it.
#[derive(Debug)]
pub(crate) struct BatchFileReader {
    path: PathBuf,
    /// None if no bytes are expected.
    file: Option<BufReader<File>>,
    position: u64,
    expected: FilePrefix,
    crc: Hasher,
    /// Lower bound of the next batch's first offset.
    next_offset: u64,
}

impl BatchFileReader {
    /// Opens a file. A partition without batches has none.
    ///
    /// # Errors
    /// Fails if the file is missing or does not start with the magic bytes.
    pub(crate) fn open(path: &Path, expected: FilePrefix) -> Result<Self, FileDamage> {
        let mut reader = Self {
            path: path.to_owned(),
            file: None,
            position: 0,
            expected,
            crc: Hasher::new(),
            next_offset: 0,
        };
        if expected.file_bytes == 0 {
            return Ok(reader);
        }
        let file = files::open(path).map_err(|error| FileDamage {
            file: path.to_owned(),
            bytes: 0..expected.file_bytes,
            what: error.to_string(),
        })?;
        reader.file = Some(BufReader::with_capacity(BUFFER_BYTES, file));
        let mut magic = [0; MAGIC.len()];
        reader.fill(&mut magic)?;
        if magic != MAGIC {
            return Err(reader.damage(0, "not a batch file of a backup"));
        }
        Ok(reader)
    }

    /// Returns the next batch, or None at the end of a file with the expected checksum.
    pub(crate) fn next(&mut self) -> Result<Option<StoredBatch>, FileDamage> {
        let start = self.position;
        if start == self.expected.file_bytes {
            let is_intact = self.crc.clone().finalize() == self.expected.crc32;
            let what = "the checksum of the file differs from the manifest";
            return if is_intact { Ok(None) } else { Err(self.damage(0, what)) };
        }
        let mut header = [0; HEADER_BYTES];
        self.fill(&mut header)?;
        let [l0, l1, l2, l3, c0, c1, c2, c3] = header;
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let crc = u32::from_le_bytes([c0, c1, c2, c3]);
        let left = self.expected.file_bytes - self.position;
        if length > BODY_BYTES_MAX || u64::from(length) > left {
            return Err(self.damage(start, "the length of a batch exceeds the rest of the file"));
        }
        let mut body = vec![0; length as usize];
        self.fill(&mut body)?;
        if frame_crc(length, &body) != crc {
            return Err(self.damage(start, "the checksum of a frame does not match"));
        }
        let batch = StoredBatch::decode(Bytes::from(body));
        let batch = batch.map_err(|error| self.damage(start, &error.to_string()))?;
        let end = end_offset(&batch);
        if !batch.batch.as_ref().is_some_and(is_intact) || end.is_none() {
            return Err(self.damage(start, "the checksum of a batch does not match"));
        }
        if batch.first_offset < self.next_offset {
            return Err(self.damage(start, "a batch overlaps the previous batch"));
        }
        self.next_offset = end.unwrap_or(self.next_offset);
        Ok(Some(batch))
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), FileDamage> {
        let (start, end) = (self.position, self.position + buffer.len() as u64);
        let read = match &mut self.file {
            Some(file) if end <= self.expected.file_bytes => file.read_exact(buffer),
            _ => Err(ErrorKind::UnexpectedEof.into()),
        };
        if let Err(error) = read {
            let what = match error.kind() {
                ErrorKind::UnexpectedEof => "the file is too short".to_owned(),
                _ => error.to_string(),
            };
            let bytes = start..self.expected.file_bytes.max(end);
            return Err(FileDamage { file: self.path.clone(), bytes, what });
        }
        self.position = end;
        self.crc.update(buffer);
        Ok(())
    }

    /// Describes damage between `start` and the reader's position.
    fn damage(&self, start: u64, what: &str) -> FileDamage {
        FileDamage { file: self.path.clone(), bytes: start..self.position, what: what.to_owned() }
    }
}

/// Returns one past the last offset of a batch; None if it is empty or its deltas are invalid.
pub(crate) fn end_offset(stored: &StoredBatch) -> Option<u64> {
    let count = stored.batch.as_ref()?.record_count as usize;
    let last = match stored.offset_deltas.as_slice() {
        [] => u64::try_from(count.checked_sub(1)?).ok()?,
        deltas if deltas.len() != count || !deltas.is_sorted() => return None,
        deltas => u64::from(*deltas.last()?),
    };
    stored.first_offset.checked_add(last)?.checked_add(1)
}

/// Returns whether the records of a batch have consecutive offsets.
pub(super) fn is_dense(stored: &StoredBatch) -> bool {
    stored.offset_deltas.iter().zip(0..).all(|(delta, index)| *delta == index)
}

/// Counts the records of a batch at or above an offset.
pub(super) fn record_count_from(stored: &StoredBatch, offset: u64) -> u64 {
    let count = stored.batch.as_ref().map_or(0, |batch| u64::from(batch.record_count));
    if stored.first_offset >= offset {
        return count;
    }
    let below = offset - stored.first_offset;
    match stored.offset_deltas.as_slice() {
        [] => count.saturating_sub(below),
        deltas => deltas.iter().filter(|delta| u64::from(**delta) >= below).count() as u64,
    }
}

/// Returns whether compaction by key has removed records of a batch since it was copied, or all.
pub(super) fn is_compacted(found: Option<&StoredBatch>, copied: &StoredBatch) -> bool {
    found.is_none_or(|found| {
        !found.offset_deltas.is_empty()
            && found.append_time == copied.append_time
            && found.first_offset >= copied.first_offset
            && end_offset(found) <= end_offset(copied)
    })
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

    /// Overwrites a file without syncing it, because the tests do so thousands of times.
    fn overwrite(path: &Path, bytes: &[u8]) {
        files::open_at(path, 0).unwrap().write_all(bytes).unwrap();
    }

    fn read(path: &Path, expected: FilePrefix) -> Result<Vec<StoredBatch>, FileDamage> {
        let mut reader = BatchFileReader::open(path, expected)?;
        std::iter::from_fn(|| reader.next().transpose()).collect()
    }

    fn written(path: &Path) -> (Vec<StoredBatch>, FilePrefix) {
        let batches = vec![stored(3, &["a", "b"]), stored(5, &["c"]), stored(9, &["after a gap"])];
        let mut writer = BatchFileWriter::create(path).unwrap();
        for batch in &batches {
            writer.append(batch).unwrap();
        }
        (batches, writer.sync().unwrap())
    }

    #[test]
    fn a_compacted_batch_is_not_that_of_another_topic() {
        let copied = stored(10, &["a", "b", "c"]);
        let left = StoredBatch { offset_deltas: vec![0, 1], ..stored(11, &["b", "c"]) };
        assert!(is_compacted(Some(&left), &copied));
        assert!(is_compacted(None, &copied), "no record is left");
        assert!(!is_compacted(Some(&stored(10, &["a", "b", "d"])), &copied));
        let later = prost_types::Timestamp { seconds: 6, nanos: 0 };
        let other = StoredBatch { append_time: Some(later), ..left.clone() };
        assert!(!is_compacted(Some(&other), &copied), "appended at another time");
        let longer = StoredBatch { offset_deltas: vec![0, 2], ..left };
        assert!(!is_compacted(Some(&longer), &copied), "with an offset that it did not have");
    }

    #[test]
    fn record_count_skips_records_below_the_offset() {
        let batch = stored(10, &["a", "b", "c"]);
        for (offset, records) in [(0, 3), (10, 3), (11, 2), (13, 0), (99, 0)] {
            assert_eq!(record_count_from(&batch, offset), records, "{offset}");
        }
        let sparse = StoredBatch { offset_deltas: vec![0, 5, 9], ..batch };
        for (offset, records) in [(10, 3), (11, 2), (15, 2), (16, 1), (20, 0)] {
            assert_eq!(record_count_from(&sparse, offset), records, "{offset}");
        }
    }

    #[test]
    fn reads_written_batches_and_appends_after_the_prefix() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let (mut batches, prefix) = written(&path);
        assert_eq!(read(&path, prefix).unwrap(), batches);
        // An interrupted run leaves bytes after the prefix.
        let mut lost = BatchFileWriter::open(&path, prefix).unwrap();
        lost.append(&stored(10, &["lost"])).unwrap();
        lost.sync().unwrap();
        assert_eq!(read(&path, prefix).unwrap(), batches);
        let mut writer = BatchFileWriter::open(&path, prefix).unwrap();
        batches.push(stored(10, &["d"]));
        writer.append(batches.last().unwrap()).unwrap();
        assert_eq!(read(&path, writer.sync().unwrap()).unwrap(), batches);
    }

    #[test]
    fn reports_every_damaged_byte_in_its_range() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let (batches, prefix) = written(&path);
        let good = files::read(&path).unwrap().unwrap();
        assert_eq!(good.len() as u64, prefix.file_bytes);
        for index in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[index] ^= 1 << bit;
                overwrite(&path, &bad);
                let mut reader = match BatchFileReader::open(&path, prefix) {
                    Ok(reader) => reader,
                    Err(damage) => {
                        assert!(damage.bytes.contains(&(index as u64)), "{index}: {damage}");
                        continue;
                    }
                };
                let mut read = Vec::new();
                let damage = loop {
                    match reader.next() {
                        Ok(Some(batch)) => read.push(batch),
                        Ok(None) => panic!("damage at byte {index} was not found"),
                        Err(damage) => break damage,
                    }
                };
                assert!(damage.bytes.contains(&(index as u64)), "{index}: {damage}");
                assert!(batches.starts_with(&read), "batches before the damage are returned");
            }
        }
        for length in 0..good.len() {
            overwrite(&path, &good[..length]);
            let damage = read(&path, prefix).unwrap_err();
            assert!(damage.bytes.end >= prefix.file_bytes, "{length}: {damage}");
        }
        overwrite(&path, &good);
        let wrong = FilePrefix { crc32: prefix.crc32 ^ 1, ..prefix };
        assert!(read(&path, wrong).is_err(), "the checksum of the manifest is compared");
    }

    #[test]
    fn partition_without_batches_has_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let none = FilePrefix { file_bytes: 0, crc32: 0 };
        assert_eq!(read(&directory.path().join("missing"), none).unwrap(), []);
        assert!(read(&directory.path().join("missing"), FilePrefix { crc32: 1, ..none }).is_err());
    }

    #[test]
    fn end_offset_follows_the_last_record() {
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
