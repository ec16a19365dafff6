//! The corpus of all targets in one file, `testing/fuzz/corpus.pack`.
//!
//! Format, all numbers little-endian:
//!
//! ```text
//! magic      8 bytes  "HLXCORP1"
//! inputs     repeated, sorted by name
//!   length   u16      of the name
//!   name              "TARGET/INPUT", UTF-8
//!   length   u32      of the data
//!   data
//! checksum   u32      CRC-32 of everything before it
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

const MAGIC: &[u8] = b"HLXCORP1";

/// Inputs by "TARGET/INPUT".
pub type Corpus = BTreeMap<String, Vec<u8>>;

/// Returns the path of the packed corpus in the source tree.
pub fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus.pack")
}

/// Reads and verifies the packed corpus of the source tree.
///
/// # Errors
/// The file cannot be read or is damaged.
pub fn load() -> io::Result<Corpus> {
    decode(&fs::read(path())?)
}

/// Encodes a corpus.
pub fn encode(corpus: &Corpus) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    for (name, data) in corpus {
        let name_length = u16::try_from(name.len()).expect("a short name");
        let data_length = u32::try_from(data.len()).expect("a small input");
        out.extend_from_slice(&name_length.to_le_bytes());
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(&data_length.to_le_bytes());
        out.extend_from_slice(data);
    }
    let checksum = crc32fast::hash(&out);
    out.extend_from_slice(&checksum.to_le_bytes());
    out
}

/// Decodes a corpus.
///
/// # Errors
/// The bytes are not a corpus, or the checksum is wrong.
pub fn decode(packed: &[u8]) -> io::Result<Corpus> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "corpus.pack is damaged");
    let (content, checksum) = packed.split_last_chunk().ok_or_else(invalid)?;
    if crc32fast::hash(content) != u32::from_le_bytes(*checksum) {
        return Err(invalid());
    }
    let mut rest = content.strip_prefix(MAGIC).ok_or_else(invalid)?;
    let mut corpus = Corpus::new();
    while !rest.is_empty() {
        let (length, after) = rest.split_first_chunk().ok_or_else(invalid)?;
        let length = usize::from(u16::from_le_bytes(*length));
        let (name, after) = after.split_at_checked(length).ok_or_else(invalid)?;
        let name = str::from_utf8(name).map_err(|_| invalid())?;
        let (length, after) = after.split_first_chunk().ok_or_else(invalid)?;
        let length = u32::from_le_bytes(*length) as usize;
        let (data, after) = after.split_at_checked(length).ok_or_else(invalid)?;
        corpus.insert(name.to_owned(), data.to_vec());
        rest = after;
    }
    Ok(corpus)
}

/// Writes the packed corpus to a directory, as `TARGET/INPUT` files.
///
/// # Errors
/// The corpus cannot be read, or a file cannot be written.
pub fn unpack(directory: &Path) -> io::Result<()> {
    for (name, data) in load()? {
        let file = directory.join(name);
        fs::create_dir_all(file.parent().unwrap_or(directory))?;
        fs::write(file, data)?;
    }
    Ok(())
}

/// Packs a directory of `TARGET/INPUT` files into the source tree.
///
/// # Errors
/// A file cannot be read, or the corpus cannot be written.
pub fn pack(directory: &Path) -> io::Result<()> {
    let mut corpus = Corpus::new();
    for target in fs::read_dir(directory)? {
        for input in fs::read_dir(target?.path())? {
            let input = input?.path();
            let name = input.strip_prefix(directory).map_err(io::Error::other)?;
            let name = name.to_str().ok_or(io::ErrorKind::InvalidData)?.to_owned();
            corpus.insert(name, fs::read(&input)?);
        }
    }
    fs::write(path(), encode(&corpus))
}
