//! Bytes of frames, groups and segment headers. Performs no I/O.
//!
//! ```text
//! group  = header (128) frame* zeroes up to a whole block
//! frame  = header (64) head payload zeroes up to a multiple of 8
//!
//! group header                              frame header
//!   0 magic u32      4 header_crc u32         0 header_crc u32   4 kind u8   5 version u8
//!   8 version u16   12 length u32             8 segment u64     16 offset u32
//!  16 segment u64   24 offset u64            20 head_len u32  24 term u64
//!  32 frames u32    36 frames_crc u32        32 index u64       40 stream u64
//!  40 predecessor: segment, offset, crc      48 payload_len u32 52 payload_crc u32
//!  60 flags u32     64 synced: segment, byte 56 payload_crc_seed u32
//!  80 committed: term, index                 60 reserved
//! ```
//!
//! Checksums are CRC-32:
//! - The checksum of a group covers its header from byte 8. `frames_crc` covers the checksums of
//!   its frames in order, so the chain of groups is a chain of contents.
//! - The checksum of a frame covers its header from byte 4 and its head. The payload has the
//!   checksum that its author computed.
//!
//! Both headers contain the segment and the offset. Bytes of another position, another segment or
//! an earlier use of the same file therefore never verify.
#![deny(clippy::indexing_slicing, clippy::cast_possible_truncation)]

use bytes::Bytes;
use crc32fast::Hasher;

use super::nontemporal;
use crate::format::layout::{
    BLOCK_BYTES, FORMAT_VERSION, HEAD_BYTES_MAX, MIN_READER_VERSION, NUMBERS_END, OPAQUE_BYTES_MAX,
    u16_at, u32_at, u64_at,
};
use crate::storage::BLOCK;
use crate::types::{LogId, Payload};

pub(crate) const GROUP_HEADER: usize = 128;
pub(crate) const FRAME_HEADER: usize = 64;
const GROUP_MAGIC: u32 = u32::from_le_bytes(*b"HLXG");
const SEGMENT_MAGIC: [u8; 8] = *b"HLXSEGMT";
const FRAME_VERSION: u8 = 1;

/// A byte of a segment in the log. Positions only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct LogPosition {
    pub segment: u64,
    pub at: u64,
}

/// Reference to a written group, as the next group stores it. All zero before the first group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct GroupRef {
    pub position: LogPosition,
    pub crc: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameKind {
    Entry,
    /// The head is the vote.
    Vote,
    /// Removes the entries from `index` on.
    Truncate,
    /// Removes entries up to (term, index) from the Raft log.
    Purge,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Entry),
            2 => Some(Self::Vote),
            3 => Some(Self::Truncate),
            4 => Some(Self::Purge),
            _ => None,
        }
    }

    fn byte(self) -> u8 {
        match self {
            Self::Entry => 1,
            Self::Vote => 2,
            Self::Truncate => 3,
            Self::Purge => 4,
        }
    }
}

/// Content of a frame, without its position.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frame<'a> {
    pub kind: FrameKind,
    pub id: LogId,
    pub stream: u64,
    pub head: &'a [u8],
    pub payload: &'a [u8],
    pub payload_crc: u32,
    pub payload_crc_seed: u32,
}

impl<'a> Frame<'a> {
    pub(crate) fn entry(id: LogId, stream: u64, head: &'a [u8], payload: &'a Payload) -> Self {
        Self {
            kind: FrameKind::Entry,
            id,
            stream,
            head,
            payload: &payload.bytes,
            payload_crc: payload.crc,
            payload_crc_seed: payload.crc_seed,
        }
    }

    /// Creates a control frame: a vote, a truncation or a purge.
    pub(crate) fn control(kind: FrameKind, id: LogId, head: &'a [u8]) -> Self {
        Self { kind, id, stream: 0, head, payload: &[], payload_crc: 0, payload_crc_seed: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        frame_len(self.head.len(), self.payload.len())
    }

    /// Appends the frame to `out` and returns the checksum of its header.
    ///
    /// `place` is the position of its first byte.
    pub(crate) fn encode(&self, place: LogPosition, out: &mut Vec<u8>) -> u32 {
        let mut header = [0u8; FRAME_HEADER];
        header[4] = self.kind.byte();
        header[5] = FRAME_VERSION;
        header[8..16].copy_from_slice(&place.segment.to_le_bytes());
        header[16..20].copy_from_slice(&narrow(place.at).to_le_bytes());
        header[20..24].copy_from_slice(&narrow(self.head.len() as u64).to_le_bytes());
        header[24..32].copy_from_slice(&self.id.term.to_le_bytes());
        header[32..40].copy_from_slice(&self.id.index.to_le_bytes());
        header[40..48].copy_from_slice(&self.stream.to_le_bytes());
        header[48..52].copy_from_slice(&narrow(self.payload.len() as u64).to_le_bytes());
        header[52..56].copy_from_slice(&self.payload_crc.to_le_bytes());
        header[56..60].copy_from_slice(&self.payload_crc_seed.to_le_bytes());
        let mut crc = Hasher::new();
        crc.update(&header[4..]);
        crc.update(self.head);
        let crc = crc.finalize();
        header[..4].copy_from_slice(&crc.to_le_bytes());
        out.extend_from_slice(&header);
        out.extend_from_slice(self.head);
        nontemporal::append(out, self.payload);
        let used = FRAME_HEADER + self.head.len() + self.payload.len();
        out.resize(out.len() + (used.next_multiple_of(8) - used), 0);
        crc
    }
}

/// Converts a length or an offset, all of which the callers have bounded.
fn narrow(value: u64) -> u32 {
    u32::try_from(value).expect("lengths and offsets are checked against the segment's size")
}

/// Returns the bytes of a frame on disk, padding included.
pub(crate) fn frame_len(head: usize, payload: usize) -> usize {
    (FRAME_HEADER + head + payload).next_multiple_of(8)
}

/// Header of a verified frame. The payload is verified separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub crc: u32,
    pub kind: FrameKind,
    pub place: LogPosition,
    pub head_len: usize,
    pub payload_len: usize,
    pub id: LogId,
    pub stream: u64,
    pub payload_crc: u32,
    pub payload_crc_seed: u32,
}

impl FrameHeader {
    /// Returns the bytes that `parse` needs: the frame header and the head.
    ///
    /// `None` if the bytes cannot be a header.
    pub(crate) fn prefix_len(bytes: &[u8]) -> Option<usize> {
        let b: &[u8; FRAME_HEADER] = bytes.first_chunk()?;
        let head_len = usize::try_from(u32_at(b, 20)).ok()?;
        (head_len <= HEAD_BYTES_MAX).then_some(FRAME_HEADER + head_len)
    }

    /// Parses the header at the start of `bytes` if it verifies and belongs to `place`.
    ///
    /// `bytes` must include the head. The payload may be incomplete.
    pub(crate) fn parse(bytes: &[u8], place: LogPosition) -> Option<Self> {
        let b: &[u8; FRAME_HEADER] = bytes.first_chunk()?;
        let covered = bytes.get(4..Self::prefix_len(b)?)?;
        let found = LogPosition { segment: u64_at(b, 8), at: u64::from(u32_at(b, 16)) };
        // Cheap tests first: recovery probes many bytes that are not a header.
        if found != place || b[5] != FRAME_VERSION || crc32fast::hash(covered) != u32_at(b, 0) {
            return None;
        }
        if u64_at(b, 32) >= NUMBERS_END {
            return None;
        }
        Some(Self {
            crc: u32_at(b, 0),
            kind: FrameKind::from_byte(b[4])?,
            place,
            head_len: usize::try_from(u32_at(b, 20)).ok()?,
            payload_len: usize::try_from(u32_at(b, 48)).ok()?,
            id: LogId { term: u64_at(b, 24), index: u64_at(b, 32) },
            stream: u64_at(b, 40),
            payload_crc: u32_at(b, 52),
            payload_crc_seed: u32_at(b, 56),
        })
    }

    pub(crate) fn len(&self) -> usize {
        frame_len(self.head_len, self.payload_len)
    }

    /// Returns the range of the head within the frame.
    pub(crate) fn head(&self) -> std::ops::Range<usize> {
        FRAME_HEADER..FRAME_HEADER + self.head_len
    }

    /// Returns the range of the payload within the frame.
    pub(crate) fn payload(&self) -> std::ops::Range<usize> {
        let start = FRAME_HEADER + self.head_len;
        start..start + self.payload_len
    }

    pub(crate) fn payload_verifies(&self, payload: &[u8]) -> bool {
        payload.len() == self.payload_len
            && payload_crc(payload, self.payload_crc_seed) == self.payload_crc
    }
}

/// Computes a CRC-32 continued from `seed`.
pub(crate) fn payload_crc(payload: &[u8], seed: u32) -> u32 {
    let mut crc = Hasher::new_with_initial(seed);
    crc.update(payload);
    crc.finalize()
}

/// Header of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupHeader {
    pub position: LogPosition,
    /// Bytes of the group, including this header and excluding the padding.
    pub len: u64,
    pub frames: u32,
    pub frames_crc: u32,
    pub predecessor: GroupRef,
    /// Everything before this position was synced when the group was written.
    pub synced: LogPosition,
    pub committed: Option<LogId>,
}

impl GroupHeader {
    pub(crate) fn encode(&self) -> ([u8; GROUP_HEADER], u32) {
        let mut b = [0u8; GROUP_HEADER];
        b[0..4].copy_from_slice(&GROUP_MAGIC.to_le_bytes());
        b[8..10].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        b[12..16].copy_from_slice(&narrow(self.len).to_le_bytes());
        b[16..24].copy_from_slice(&self.position.segment.to_le_bytes());
        b[24..32].copy_from_slice(&self.position.at.to_le_bytes());
        b[32..36].copy_from_slice(&self.frames.to_le_bytes());
        b[36..40].copy_from_slice(&self.frames_crc.to_le_bytes());
        b[40..48].copy_from_slice(&self.predecessor.position.segment.to_le_bytes());
        b[48..56].copy_from_slice(&self.predecessor.position.at.to_le_bytes());
        b[56..60].copy_from_slice(&self.predecessor.crc.to_le_bytes());
        b[60..64].copy_from_slice(&u32::from(self.committed.is_some()).to_le_bytes());
        b[64..72].copy_from_slice(&self.synced.segment.to_le_bytes());
        b[72..80].copy_from_slice(&self.synced.at.to_le_bytes());
        let committed = self.committed.unwrap_or_default();
        b[80..88].copy_from_slice(&committed.term.to_le_bytes());
        b[88..96].copy_from_slice(&committed.index.to_le_bytes());
        let crc = crc32fast::hash(&b[8..]);
        b[4..8].copy_from_slice(&crc.to_le_bytes());
        (b, crc)
    }

    /// Parses the header at the start of `bytes` if it verifies and belongs to `position`.
    pub(crate) fn parse(bytes: &[u8], position: LogPosition) -> Option<(Self, GroupRef)> {
        let b: &[u8; GROUP_HEADER] = bytes.first_chunk()?;
        let found = LogPosition { segment: u64_at(b, 16), at: u64_at(b, 24) };
        if u32_at(b, 0) != GROUP_MAGIC || found != position {
            return None;
        }
        let crc = crc32fast::hash(&b[8..]);
        if crc != u32_at(b, 4) || u16_at(b, 8) != FORMAT_VERSION {
            return None;
        }
        let committed = LogId { term: u64_at(b, 80), index: u64_at(b, 88) };
        if committed.index >= NUMBERS_END {
            return None;
        }
        let header = Self {
            position,
            len: u64::from(u32_at(b, 12)),
            frames: u32_at(b, 32),
            frames_crc: u32_at(b, 36),
            predecessor: GroupRef {
                position: LogPosition { segment: u64_at(b, 40), at: u64_at(b, 48) },
                crc: u32_at(b, 56),
            },
            synced: LogPosition { segment: u64_at(b, 64), at: u64_at(b, 72) },
            committed: (u32_at(b, 60) & 1 != 0).then_some(committed),
        };
        Some((header, GroupRef { position, crc }))
    }
}

/// State of the log that must survive the boundary between two segments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Context {
    pub vote: Option<Bytes>,
    pub purged: Option<LogId>,
    /// Last entry, or `purged` if the log is empty.
    pub last: Option<LogId>,
    pub committed: Option<LogId>,
    pub last_group: GroupRef,
}

const CONTEXT_BYTES: usize = 336;

impl Context {
    /// Encodes as `flags u32, vote_len u32, purged, last, committed (16 each), last group: segment
    /// u64, offset u64, crc u32, reserved u32, vote (256)`.
    pub(crate) fn encode(&self) -> [u8; CONTEXT_BYTES] {
        let mut b = [0u8; CONTEXT_BYTES];
        let vote = self.vote.as_deref().unwrap_or_default();
        let flags = u32::from(self.vote.is_some())
            | u32::from(self.purged.is_some()) << 1
            | u32::from(self.last.is_some()) << 2
            | u32::from(self.committed.is_some()) << 3;
        b[0..4].copy_from_slice(&flags.to_le_bytes());
        b[4..8].copy_from_slice(&narrow(vote.len() as u64).to_le_bytes());
        for (out, id) in b[8..56].chunks_exact_mut(16).zip([self.purged, self.last, self.committed])
        {
            out.copy_from_slice(&log_id_bytes(id.unwrap_or_default()));
        }
        b[56..64].copy_from_slice(&self.last_group.position.segment.to_le_bytes());
        b[64..72].copy_from_slice(&self.last_group.position.at.to_le_bytes());
        b[72..76].copy_from_slice(&self.last_group.crc.to_le_bytes());
        if let Some(out) = b.get_mut(80..80 + vote.len()) {
            out.copy_from_slice(vote);
        }
        b
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let b: &[u8; CONTEXT_BYTES] = bytes.first_chunk()?;
        let flags = u32_at(b, 0);
        let id = |bit: u32, at| {
            let id = LogId { term: u64_at(b, at), index: u64_at(b, at + 8) };
            (flags >> bit & 1 != 0).then_some(id)
        };
        let vote_len = usize::try_from(u32_at(b, 4)).ok()?;
        let vote = b.get(80..)?.get(..vote_len)?;
        if [8, 24, 40].iter().any(|at| u64_at(b, at + 8) >= NUMBERS_END) {
            return None;
        }
        Some(Self {
            vote: (flags & 1 != 0).then(|| Bytes::copy_from_slice(vote)),
            purged: id(1, 8),
            last: id(2, 24),
            committed: id(3, 40),
            last_group: GroupRef {
                position: LogPosition { segment: u64_at(b, 56), at: u64_at(b, 64) },
                crc: u32_at(b, 72),
            },
        })
    }
}

fn log_id_bytes(id: LogId) -> [u8; 16] {
    let mut b = [0; 16];
    b[..8].copy_from_slice(&id.term.to_le_bytes());
    b[8..].copy_from_slice(&id.index.to_le_bytes());
    b
}

/// The first block of a segment.
///
/// ```text
///   0 magic [8]       8 crc u32 (over 12..4096)      12 version u16   14 min_reader_version u16
///  16 segment u64    24 predecessor: segment u64, end u64
///  40 synced: segment u64, byte u64                  56 file len u64
///  64 identity_len u32, flags u32 (1: cold), identity (256) 328 context (336)
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    pub id: u64,
    /// End of the log when the segment was begun; segment 0 for the first segment.
    pub predecessor: LogPosition,
    pub synced: LogPosition,
    pub file_len: u64,
    pub identity: Bytes,
    /// State of the log at the end of the predecessor.
    pub context: Context,
    /// Not part of the chain: has no predecessor and no successor.
    pub cold: bool,
}

impl SegmentHeader {
    pub(crate) fn encode(&self) -> [u8; BLOCK] {
        let mut b = [0u8; BLOCK];
        b[0..8].copy_from_slice(&SEGMENT_MAGIC);
        b[12..14].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        b[14..16].copy_from_slice(&MIN_READER_VERSION.to_le_bytes());
        b[16..24].copy_from_slice(&self.id.to_le_bytes());
        b[24..32].copy_from_slice(&self.predecessor.segment.to_le_bytes());
        b[32..40].copy_from_slice(&self.predecessor.at.to_le_bytes());
        b[40..48].copy_from_slice(&self.synced.segment.to_le_bytes());
        b[48..56].copy_from_slice(&self.synced.at.to_le_bytes());
        b[56..64].copy_from_slice(&self.file_len.to_le_bytes());
        b[64..68].copy_from_slice(&narrow(self.identity.len() as u64).to_le_bytes());
        b[68..72].copy_from_slice(&u32::from(self.cold).to_le_bytes());
        if let Some(out) = b.get_mut(72..72 + self.identity.len()) {
            out.copy_from_slice(&self.identity);
        }
        b[328..328 + CONTEXT_BYTES].copy_from_slice(&self.context.encode());
        let crc = crc32fast::hash(&b[12..]);
        b[8..12].copy_from_slice(&crc.to_le_bytes());
        b
    }

    /// Parses the header in a block if it verifies. The caller compares the identity.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let b: &[u8; BLOCK] = bytes.first_chunk()?;
        if b[..8] != SEGMENT_MAGIC || crc32fast::hash(&b[12..]) != u32_at(b, 8) {
            return None;
        }
        let identity_len = usize::try_from(u32_at(b, 64)).ok()?;
        let id = u64_at(b, 16);
        if u16_at(b, 14) > FORMAT_VERSION || identity_len > OPAQUE_BYTES_MAX || id >= NUMBERS_END {
            return None;
        }
        Some(Self {
            id,
            predecessor: LogPosition { segment: u64_at(b, 24), at: u64_at(b, 32) },
            synced: LogPosition { segment: u64_at(b, 40), at: u64_at(b, 48) },
            file_len: u64_at(b, 56),
            identity: Bytes::copy_from_slice(b.get(72..)?.get(..identity_len)?),
            context: Context::parse(&b[328..])?,
            cold: u32_at(b, 68) & 1 != 0,
        })
    }
}

pub(crate) fn parse_context(bytes: &[u8]) -> Option<Context> {
    Context::parse(bytes)
}

/// Offset of the first group in a segment.
pub(crate) const FIRST_GROUP: u64 = BLOCK_BYTES;

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests {
    use super::*;

    const PLACE: LogPosition = LogPosition { segment: 9, at: 4224 };

    fn sample() -> (Vec<u8>, Payload) {
        let bytes = Bytes::from_static(b"a payload of some bytes");
        let crc = payload_crc(&bytes, 77);
        let payload = Payload { bytes, crc, crc_seed: 77 };
        let mut out = Vec::new();
        let id = LogId { term: 3, index: 12 };
        Frame::entry(id, 5, b"head", &payload).encode(PLACE, &mut out);
        (out, payload)
    }

    #[test]
    fn frame_round_trips() {
        let (bytes, payload) = sample();
        assert_eq!(bytes.len() % 8, 0);
        let header = FrameHeader::parse(&bytes, PLACE).unwrap();
        assert_eq!(header.kind, FrameKind::Entry);
        assert_eq!(header.id, LogId { term: 3, index: 12 });
        assert_eq!(header.stream, 5);
        assert_eq!(header.len(), bytes.len());
        assert_eq!(&bytes[header.head()], b"head");
        assert_eq!(&bytes[header.payload()], &payload.bytes[..]);
        assert!(header.payload_verifies(&bytes[header.payload()]));
    }

    #[test]
    fn detects_any_flipped_bit_of_a_frame() {
        let (bytes, _) = sample();
        let used = FRAME_HEADER + 4 + 23;
        for bit in 0..used * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let fine = FrameHeader::parse(&bytes, PLACE).is_some_and(|header| {
                bytes.get(header.payload()).is_some_and(|p| header.payload_verifies(p))
            });
            assert!(!fine, "bit {bit}");
        }
    }

    #[test]
    fn rejects_frame_of_another_position() {
        let (bytes, _) = sample();
        assert!(FrameHeader::parse(&bytes, LogPosition { segment: 10, ..PLACE }).is_none());
        assert!(FrameHeader::parse(&bytes, LogPosition { at: 4232, ..PLACE }).is_none());
    }

    #[test]
    fn zeroes_never_verify() {
        let zeroes = [0u8; BLOCK];
        assert!(FrameHeader::parse(&zeroes, LogPosition::default()).is_none());
        assert!(GroupHeader::parse(&zeroes, LogPosition::default()).is_none());
        assert!(SegmentHeader::parse(&zeroes).is_none());
    }

    #[test]
    fn rejects_truncated_headers() {
        let (bytes, _) = sample();
        for len in 0..FRAME_HEADER + 4 {
            assert!(FrameHeader::parse(&bytes[..len], PLACE).is_none());
        }
        assert!(GroupHeader::parse(&[1; 127], PLACE).is_none());
        assert!(SegmentHeader::parse(&[1; 4095]).is_none());
    }

    #[test]
    fn group_header_round_trips_and_detects_flipped_bits() {
        let header = GroupHeader {
            position: PLACE,
            len: 1000,
            frames: 3,
            frames_crc: 99,
            predecessor: GroupRef { position: LogPosition { segment: 8, at: 4096 }, crc: 5 },
            synced: PLACE,
            committed: Some(LogId { term: 3, index: 11 }),
        };
        let (bytes, crc) = header.encode();
        assert_eq!(
            GroupHeader::parse(&bytes, PLACE),
            Some((header, GroupRef { position: PLACE, crc }))
        );
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(GroupHeader::parse(&bytes, PLACE).is_none(), "bit {bit}");
        }
    }

    #[test]
    fn segment_header_round_trips() {
        let header = SegmentHeader {
            id: 4,
            predecessor: LogPosition { segment: 3, at: 8192 },
            synced: LogPosition { segment: 3, at: 8192 },
            file_len: 1 << 20,
            identity: Bytes::from(vec![7; OPAQUE_BYTES_MAX]),
            context: Context {
                vote: Some(Bytes::from(vec![8; OPAQUE_BYTES_MAX])),
                purged: None,
                last: Some(LogId { term: 1, index: 2 }),
                committed: Some(LogId { term: 1, index: 1 }),
                last_group: GroupRef { position: PLACE, crc: 1 },
            },
            cold: true,
        };
        let mut bytes = header.encode();
        assert_eq!(SegmentHeader::parse(&bytes), Some(header));
        bytes[400] ^= 1;
        assert_eq!(SegmentHeader::parse(&bytes), None);
    }
}
