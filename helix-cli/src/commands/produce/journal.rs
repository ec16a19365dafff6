//! Hashes of the records that a named producer has sent, so that a resumed run can compare its
//! input with them before it appends anything.
//!
//! The file has 8 bytes for each record: its partition and the CRC-32 of its bytes, in the order of
//! sending. It is written before the record is sent, so it covers all that can have been appended.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use helix_client::proto::log::v1::Record;
use prost::Message;

use crate::files;

const ENTRY_BYTES: usize = 8;

/// The file of the hashes.
#[derive(Debug)]
pub(super) struct RecordJournal {
    file: File,
}

/// Returns the hash of a record.
pub(super) fn record_hash(record: &Record) -> u32 {
    crc32fast::hash(&record.encode_to_vec())
}

impl RecordJournal {
    /// Replaces the file with these hashes, and continues it.
    pub(super) fn begin(path: &Path, hashes: &HashMap<u32, VecDeque<u32>>) -> io::Result<Self> {
        let entries = hashes.iter().flat_map(|(partition, hashes)| {
            hashes.iter().flat_map(move |hash| entry(*partition, *hash))
        });
        files::replace(path, &entries.collect::<Vec<u8>>())?;
        Ok(Self { file: files::append_to(path)? })
    }

    /// Adds a record before it is sent.
    pub(super) fn add(&mut self, partition: u32, record: &Record) -> io::Result<()> {
        self.file.write_all(&entry(partition, record_hash(record)))
    }

    /// Reads the hashes of each partition; `None` without a file. A last entry that was not written
    /// completely is of a record that was not sent.
    pub(super) fn read(path: &Path) -> io::Result<Option<HashMap<u32, VecDeque<u32>>>> {
        let Some(bytes) = files::read(path)? else { return Ok(None) };
        let mut hashes: HashMap<u32, VecDeque<u32>> = HashMap::new();
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
        for entry in bytes.chunks_exact(ENTRY_BYTES) {
            let (partition, hash) = entry.split_at(ENTRY_BYTES / 2);
            hashes.entry(word(partition)).or_default().push_back(word(hash));
        }
        Ok(Some(hashes))
    }
}

/// Returns the file beside that of the producer.
pub(super) fn path_beside(path: &Path) -> PathBuf {
    path.with_extension("records")
}

fn entry(partition: u32, hash: u32) -> [u8; ENTRY_BYTES] {
    let [a, b, c, d] = partition.to_le_bytes();
    let [e, f, g, h] = hash.to_le_bytes();
    [a, b, c, d, e, f, g, h]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journal_keeps_the_order_of_each_partition() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("p.records");
        assert_eq!(RecordJournal::read(&path).unwrap(), None);
        let record =
            |value: &'static str| Record { value: Some(value.into()), ..Record::default() };
        let mut journal = RecordJournal::begin(&path, &HashMap::new()).unwrap();
        for (partition, value) in [(1, "a"), (0, "b"), (1, "c")] {
            journal.add(partition, &record(value)).unwrap();
        }
        journal.file.write_all(&[7; 3]).unwrap();
        let hash = |value| record_hash(&record(value));
        let expected: HashMap<u32, VecDeque<u32>> =
            [(1, [hash("a"), hash("c")].into()), (0, [hash("b")].into())].into();
        let read = RecordJournal::read(&path).unwrap().unwrap();
        assert_eq!(read, expected);
        drop(RecordJournal::begin(&path, &read).unwrap());
        assert_eq!(RecordJournal::read(&path).unwrap(), Some(expected));
    }
}
