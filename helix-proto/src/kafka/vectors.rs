//! Compressed bytes of other implementations, as hexadecimal digits.

/// Bytes that each of the frames decodes to: the 16 digits, repeated.
pub(super) const DECODED_BYTES: usize = 70_000;

/// Python's lz4: two linked blocks, with all checksums and the content's size.
pub(super) const LZ4_LINKED: &str = concat!(
    "04224d185c407011010000000000e31b010000ff01303132333435363738396162636465661000ffffffffff",
    "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffd850626364656653de5e9c1b00",
    "00000f1000ffffffffffffffffffffffffffffffffff6950626364656634e03a3a00000000c404d9ec",
);

/// Python's zstandard: a stream without the content's size, with a checksum.
pub(super) const ZSTD_STREAM: &str =
    "28b52ffd0458c5000080303132333435363738396162636465660100ba22269f4b65c5e867";
