//! Writes tar archives in the ustar form (POSIX.1-1988): plain files only.

/// Size of a block.
const BLOCK_BYTES: usize = 512;

/// Longest name of a file.
const NAME_BYTES_MAX: usize = 100;

/// Largest size that eleven octal digits hold.
const FILE_BYTES_MAX: u64 = (1 << 33) - 1;

/// An archive in memory.
#[derive(Debug)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    /// Time of every file, in seconds since 1970.
    time: u64,
}

impl Archive {
    pub(super) fn new(time: u64) -> Self {
        Self { bytes: Vec::new(), time }
    }

    /// Adds a file.
    ///
    /// # Errors
    /// Fails if the name or the content is too long for the form.
    pub(super) fn add(&mut self, name: &str, content: &[u8]) -> anyhow::Result<()> {
        let size = content.len() as u64;
        anyhow::ensure!(name.len() <= NAME_BYTES_MAX, "the name {name:?} is over 100 bytes");
        anyhow::ensure!(size <= FILE_BYTES_MAX, "{name} is over 8 GiB");
        let mut header = [0; BLOCK_BYTES];
        let mut field = |start: usize, text: &[u8]| {
            header[start..start + text.len()].copy_from_slice(text);
        };
        field(0, name.as_bytes());
        field(100, b"0000644\0");
        field(108, b"0000000\0");
        field(116, b"0000000\0");
        field(124, format!("{size:011o}\0").as_bytes());
        field(136, format!("{:011o}\0", self.time).as_bytes());
        // The checksum is computed with blanks in its place.
        field(148, b"        ");
        field(156, b"0");
        field(257, b"ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.bytes.extend_from_slice(&header);
        self.bytes.extend_from_slice(content);
        self.bytes.resize(self.bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        Ok(())
    }

    /// Returns the archive with its end.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len() + 2 * BLOCK_BYTES, 0);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_has_a_header_and_whole_blocks() {
        let mut archive = Archive::new(7);
        archive.add("d/a.txt", b"hello").unwrap();
        archive.add("d/empty", b"").unwrap();
        assert!(archive.add(&"x".repeat(101), b"").is_err());
        let bytes = archive.finish();
        assert_eq!(bytes.len(), 5 * BLOCK_BYTES);
        assert!(bytes.starts_with(b"d/a.txt\0"));
        assert_eq!(&bytes[124..136], b"00000000005\0");
        assert_eq!(&bytes[257..265], b"ustar\x0000");
        assert_eq!(&bytes[BLOCK_BYTES..BLOCK_BYTES + 6], b"hello\0");
    }
}
