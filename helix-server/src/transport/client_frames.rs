//! Follows the frames of a client's HTTP/2 connection as their bytes pass.
//!
//! HTTP/2 itself reads all that has arrived before it accepts a stream, so a limit on what it reads
//! at once must be known before it reads.

use super::authority::AuthorityFilter;

const PREFACE_BYTES: usize = 24;
const HEADER_BYTES: usize = 9;

const DATA: u8 = 0;
const RST_STREAM: u8 = 3;

/// Position in the frames that a client sends.
#[derive(Debug)]
pub(super) struct ClientFrames {
    /// Bytes left of the preface, or of a frame's payload.
    payload_left: usize,
    header: [u8; HEADER_BYTES],
    /// Bytes of the header that have passed.
    header_bytes: usize,
}

/// Bytes and frames that have passed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PassedFrames {
    pub(super) bytes: usize,
    /// Begun frames other than DATA. Each may create or wake a task.
    pub(super) frames: usize,
    /// Streams that the client has reset.
    pub(super) resets: u32,
}

impl ClientFrames {
    pub(super) fn new() -> Self {
        Self { payload_left: PREFACE_BYTES, header: [0; HEADER_BYTES], header_bytes: 0 }
    }

    /// Passes bytes until `frames_max` frames other than DATA have passed.
    ///
    /// A filter sees, and may change, all header blocks.
    pub(super) fn pass(
        &mut self,
        bytes: &mut [u8],
        frames_max: usize,
        mut filter: Option<&mut AuthorityFilter>,
    ) -> PassedFrames {
        let mut passed = PassedFrames::default();
        while passed.bytes < bytes.len() {
            let rest = &mut bytes[passed.bytes..];
            if self.payload_left > 0 {
                let count = self.payload_left.min(rest.len());
                if let Some(filter) = &mut filter {
                    filter.pass(&mut rest[..count]);
                }
                self.payload_left -= count;
                passed.bytes += count;
                continue;
            }
            if self.header_bytes == 0 && passed.frames >= frames_max {
                break;
            }
            let count = (HEADER_BYTES - self.header_bytes).min(rest.len());
            self.header[self.header_bytes..][..count].copy_from_slice(&rest[..count]);
            self.header_bytes += count;
            passed.bytes += count;
            if self.header_bytes == HEADER_BYTES {
                self.header_bytes = 0;
                let [a, b, c, kind, flags, ..] = self.header;
                self.payload_left = u32::from_be_bytes([0, a, b, c]) as usize;
                passed.frames += usize::from(kind != DATA);
                passed.resets += u32::from(kind == RST_STREAM);
                if let Some(filter) = &mut filter {
                    filter.begin_frame(kind, flags, self.payload_left);
                }
            }
        }
        passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).unwrap().to_be_bytes();
        [&length[1..], &[kind, 0, 0, 0, 0, 1], &vec![7; payload]].concat()
    }

    /// Passes the bytes in pieces, each until `frames_max` frames have passed.
    fn turns(bytes: &[u8], piece: usize, frames_max: usize) -> Vec<PassedFrames> {
        let mut frames = ClientFrames::new();
        let mut turns = vec![PassedFrames::default()];
        for piece in bytes.chunks(piece) {
            let mut piece = piece.to_vec();
            let mut at = 0;
            while at < piece.len() {
                let left = frames_max - turns.last().unwrap().frames;
                let passed = frames.pass(&mut piece[at..], left, None);
                at += passed.bytes;
                let turn = turns.last_mut().unwrap();
                turn.bytes += passed.bytes;
                turn.frames += passed.frames;
                turn.resets += passed.resets;
                if at < piece.len() {
                    turns.push(PassedFrames::default());
                }
            }
        }
        turns
    }

    #[test]
    fn a_turn_ends_before_the_frame_that_exceeds_it() {
        let preface = vec![b'P'; PREFACE_BYTES];
        let frames = [frame(1, 40), frame(0, 1_000), frame(3, 4), frame(8, 4), frame(0, 0)];
        let bytes = [preface, frames.concat()].concat();
        let all = |turns: &[PassedFrames]| turns.iter().map(|turn| turn.bytes).sum::<usize>();
        for piece in [1, 2, 9, 10, 100, bytes.len()] {
            let found = turns(&bytes, piece, 2);
            assert_eq!(all(&found), bytes.len());
            let first = PREFACE_BYTES + 49 + 1_009 + 13;
            assert_eq!(found[0], PassedFrames { bytes: first, frames: 2, resets: 1 });
            assert_eq!(found[1], PassedFrames { bytes: 13 + 9, frames: 1, resets: 0 });
            assert_eq!(found.len(), 2);
        }
        let found = turns(&bytes, 7, 100);
        assert_eq!(found, [PassedFrames { bytes: bytes.len(), frames: 3, resets: 1 }]);
    }
}
