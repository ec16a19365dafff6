//! What a client says that speaks HTTP/2 only to be a burden.

use clap::ValueEnum;

/// Streams, or frames, of one connection's worth of harm.
const TIMES: u32 = 1_000;

/// Bytes of a continuation of headers, and how many of them one stream's headers have.
const PIECE_BYTES: usize = 256;
const PIECES: usize = 64;

/// `:method POST`, `:scheme http`, `:path /`, as HTTP/2's static table has them.
const CALL: &[u8] = &[0x83, 0x84, 0x86];

const HEADERS: u8 = 1;
const DATA: u8 = 0;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 4;

/// A kind of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Harm {
    /// Calls, each reset at once
    Resets,
    /// Headers that go on and on
    Headers,
    /// Pings and settings, which all want an answer
    Pings,
    /// A body in empty pieces
    Empty,
    /// An append whose body comes in pieces of one byte
    Tiny,
}

impl Harm {
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
                    // One name, and a value that is long from the start.
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
                // A message of a megabyte, of which this much comes.
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

/// The headers of a call that the server knows, none of them in any table but the static one.
fn append() -> Vec<u8> {
    let mut block = vec![0x83, 0x86];
    // `:path`, then `content-type`, by their places in the static table; `te` by its name.
    text(&mut block, &[0x04], "/helix.log.v1.ProduceService/Append");
    text(&mut block, &[0x0f, 0x10], "application/grpc");
    text(&mut block, &[0x00, 0x02, b't', b'e'], "trailers");
    block
}

fn text(block: &mut Vec<u8>, name: &[u8], value: &str) {
    block.extend(name);
    // Shorter than 127 bytes: its length is one byte.
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
        for harm in Harm::value_variants() {
            let bytes = harm.bytes();
            let (mut rest, mut count) = (&bytes[..], 0);
            while let [a, b, c, _, _, _, _, _, _, after @ ..] = rest {
                let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
                rest = &after[length..];
                count += 1;
            }
            assert!(rest.is_empty() && count >= TIMES, "{harm:?}");
        }
    }
}
