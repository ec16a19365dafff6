//! Abusive HTTP/2 traffic.

use clap::ValueEnum;

/// Streams or frames per connection.
const TIMES: u32 = 1_000;

/// Bytes of a CONTINUATION frame, and the number of them per header block.
const PIECE_BYTES: usize = 256;
const PIECES: usize = 64;

/// `:method POST`, `:scheme http`, `:path /`, from the static HPACK table.
const CALL: &[u8] = &[0x83, 0x84, 0x86];

pub(super) const HEADERS: u8 = 1;
pub(super) const DATA: u8 = 0;
pub(super) const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
pub(super) const END_HEADERS: u8 = 4;

/// Pattern of abusive traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AbusePattern {
    /// Requests that are reset at once
    Resets,
    /// Header blocks without end
    Headers,
    /// Pings and settings, which all require a response
    Pings,
    /// A body of empty DATA frames
    Empty,
    /// An append whose body arrives one byte per frame
    Tiny,
}

impl AbusePattern {
    pub(super) fn bytes(self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::Resets => {
                for stream in (1..2 * TIMES).step_by(2) {
                    frame(&mut bytes, HEADERS, END_HEADERS, stream, CALL);
                    frame(&mut bytes, RESET, 0, stream, &8_u32.to_be_bytes());
                }
            }
            Self::Headers => {
                for _ in 0..TIMES {
                    // One name with a long value, sent in many frames.
                    let begin = [CALL, &[0x00, 0x01, b'x']].concat();
                    frame(&mut bytes, HEADERS, 0, 1, &begin);
                    for _ in 0..PIECES {
                        frame(&mut bytes, CONTINUATION, 0, 1, &[b'y'; PIECE_BYTES]);
                    }
                }
            }
            Self::Pings => {
                for _ in 0..TIMES {
                    frame(&mut bytes, PING, 0, 0, &[0; 8]);
                    frame(&mut bytes, SETTINGS, 0, 0, &[]);
                }
            }
            Self::Empty => {
                frame(&mut bytes, HEADERS, END_HEADERS, 1, CALL);
                for _ in 0..TIMES {
                    frame(&mut bytes, DATA, 0, 1, &[]);
                }
            }
            Self::Tiny => {
                frame(&mut bytes, HEADERS, END_HEADERS, 1, &append());
                // A message of 1 MiB, of which only the first bytes are sent.
                for byte in [0, 0, 0x10, 0, 0]
                    .into_iter()
                    .chain(std::iter::repeat(0x0a))
                    .take(TIMES as usize)
                {
                    frame(&mut bytes, DATA, 0, 1, &[byte]);
                }
            }
        }
        bytes
    }
}

/// Builds the headers of an append request, with static HPACK entries only.
fn append() -> Vec<u8> {
    let mut block = vec![0x83, 0x86];
    // `:path` and `content-type` by static table index, `te` as a literal name.
    text(&mut block, &[0x04], "/helix.log.v1.ProduceService/Append");
    text(&mut block, &[0x0f, 0x10], "application/grpc");
    text(&mut block, &[0x00, 0x02, b't', b'e'], "trailers");
    block
}

pub(super) fn text(block: &mut Vec<u8>, name: &[u8], value: &str) {
    block.extend(name);
    // The value is shorter than 127 bytes, so its length takes one byte.
    block.push(value.len() as u8);
    block.extend(value.as_bytes());
}

pub(super) fn frame(into: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap_or_default().to_be_bytes();
    into.extend(&length[1..]);
    into.extend([kind, flags]);
    into.extend(stream.to_be_bytes());
    into.extend(payload);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_their_lengths() {
        for abuse in AbusePattern::value_variants() {
            let bytes = abuse.bytes();
            let (mut rest, mut count) = (&bytes[..], 0);
            while let [a, b, c, _, _, _, _, _, _, after @ ..] = rest {
                let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
                rest = &after[length..];
                count += 1;
            }
            assert!(rest.is_empty() && count >= TIMES, "{abuse:?}");
        }
    }
}
