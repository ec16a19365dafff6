//! Accepts any authority on a Unix domain socket.
//!
//! gRPC's C core (C++, Python, Ruby, PHP) sends the percent-encoded path of the socket as
//! `:authority`, which is no authority of RFC 3986; HTTP/2 would reset such calls. Helix uses the
//! authority for nothing, so its bytes are replaced before HTTP/2 reads them.
//!
//! Header blocks are followed field by field (HPACK, RFC 7541). Lengths stay the same, so frames
//! and the sizes of the dynamic table agree with the client's.

const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
const PRIORITY_BYTES: usize = 5;

/// Index of `:authority` in the static table, its name, and the name in Huffman's code.
const STATIC_INDEX: usize = 1;
const NAME: &[u8] = b":authority";
const HUFFMAN_NAME: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

/// A byte that is valid anywhere in an authority, and one whose Huffman code has eight bits ("X").
const REPLACEMENT: u8 = b'-';
const HUFFMAN_REPLACEMENT: u8 = 0xfc;

/// Replaces the authorities in a connection's header blocks.
#[derive(Debug)]
pub(super) struct AuthorityFilter {
    /// True until the length of the padding has passed.
    has_padding: bool,
    /// Bytes left before the header block, in it, and in the frame.
    before_block: usize,
    block_left: usize,
    field: Field,
}

/// Position in a field.
#[derive(Debug, Clone, Copy)]
enum Field {
    Start,
    /// In an integer of several bytes.
    Integer {
        of: Integer,
        value: usize,
        shift: u32,
    },
    NameLength,
    Name {
        left: usize,
        position: usize,
        is_huffman: bool,
        is_equal: bool,
    },
    ValueLength {
        is_authority: bool,
    },
    Value {
        left: usize,
        is_huffman: bool,
        is_authority: bool,
    },
}

/// Meaning of an integer.
#[derive(Debug, Clone, Copy)]
enum Integer {
    /// An indexed field or a table size: the whole field.
    Whole,
    /// The index of a literal field's name; 0 if the name follows.
    NameIndex,
    NameLength {
        is_huffman: bool,
    },
    ValueLength {
        is_huffman: bool,
        is_authority: bool,
    },
}

impl AuthorityFilter {
    pub(super) fn new() -> Self {
        Self { has_padding: false, before_block: 0, block_left: 0, field: Field::Start }
    }

    /// Begins a frame with a payload of this length.
    pub(super) fn begin_frame(&mut self, kind: u8, flags: u8, length: usize) {
        (self.has_padding, self.before_block, self.block_left) = (false, 0, 0);
        if kind == HEADERS {
            self.has_padding = flags & PADDED != 0;
            self.before_block = if flags & PRIORITY != 0 { PRIORITY_BYTES } else { 0 };
            self.field = Field::Start;
        }
        if kind == HEADERS || kind == CONTINUATION {
            let before = usize::from(self.has_padding) + self.before_block;
            self.block_left = length.saturating_sub(before);
        }
    }

    /// Passes bytes of the frame's payload.
    pub(super) fn pass(&mut self, payload: &mut [u8]) {
        for byte in payload {
            if self.has_padding {
                self.has_padding = false;
                self.block_left = self.block_left.saturating_sub((*byte).into());
            } else if self.before_block > 0 {
                self.before_block -= 1;
            } else if self.block_left > 0 {
                self.block_left -= 1;
                self.field = self.field.after(byte);
            }
        }
    }
}

impl Field {
    /// Returns the position after this byte, which it may replace.
    fn after(self, byte: &mut u8) -> Self {
        match self {
            Self::Start => match *byte {
                first if first & 0x80 != 0 => Self::begin(Integer::Whole, first, 7),
                first if first & 0x40 != 0 => Self::begin(Integer::NameIndex, first, 6),
                first if first & 0x20 != 0 => Self::begin(Integer::Whole, first, 5),
                first => Self::begin(Integer::NameIndex, first, 4),
            },
            Self::Integer { of, value, shift } => {
                let part = usize::from(*byte & 0x7f).checked_shl(shift).unwrap_or_default();
                let value = value.saturating_add(part);
                match *byte & 0x80 {
                    0 => Self::of(of, value),
                    // HTTP/2 refuses longer integers.
                    _ => Self::Integer { of, value, shift: (shift + 7).min(usize::BITS) },
                }
            }
            Self::NameLength => {
                let is_huffman = *byte & 0x80 != 0;
                Self::begin(Integer::NameLength { is_huffman }, *byte, 7)
            }
            Self::Name { left, position, is_huffman, is_equal } => {
                let name = if is_huffman { HUFFMAN_NAME } else { NAME };
                let is_equal = is_equal && name.get(position) == Some(byte);
                let position = position + 1;
                match left - 1 {
                    0 => Self::ValueLength { is_authority: is_equal && position == name.len() },
                    left => Self::Name { left, position, is_huffman, is_equal },
                }
            }
            Self::ValueLength { is_authority } => {
                let is_huffman = *byte & 0x80 != 0;
                Self::begin(Integer::ValueLength { is_huffman, is_authority }, *byte, 7)
            }
            Self::Value { left, is_huffman, is_authority } => {
                if is_authority {
                    replace(byte, is_huffman);
                }
                match left - 1 {
                    0 => Self::Start,
                    left => Self::Value { left, is_huffman, is_authority },
                }
            }
        }
    }

    /// Begins an integer with a prefix of these bits.
    fn begin(of: Integer, first: u8, bits: u32) -> Self {
        let most = (1_u8 << bits).wrapping_sub(1);
        match first & most {
            value if value == most => Self::Integer { of, value: value.into(), shift: 0 },
            value => Self::of(of, value.into()),
        }
    }

    /// Returns the position after a complete integer.
    fn of(of: Integer, value: usize) -> Self {
        match (of, value) {
            (Integer::Whole, _) => Self::Start,
            (Integer::NameIndex, 0) => Self::NameLength,
            (Integer::NameIndex, index) => {
                Self::ValueLength { is_authority: index == STATIC_INDEX }
            }
            (Integer::NameLength { .. }, 0) => Self::ValueLength { is_authority: false },
            (Integer::NameLength { is_huffman }, left) => {
                Self::Name { left, position: 0, is_huffman, is_equal: true }
            }
            (Integer::ValueLength { .. }, 0) => Self::Start,
            (Integer::ValueLength { is_huffman, is_authority }, left) => {
                Self::Value { left, is_huffman, is_authority }
            }
        }
    }
}

/// Replaces a byte of an authority if it may not be valid.
///
/// A Huffman code is replaced as a whole, by as many characters as it has bytes. These are at most
/// as many as before, so this side's dynamic table keeps at least what the client's keeps.
fn replace(byte: &mut u8, is_huffman: bool) {
    if is_huffman {
        *byte = HUFFMAN_REPLACEMENT;
    } else if !(byte.is_ascii_alphanumeric() || matches!(*byte, b'-' | b'.' | b'_')) {
        *byte = REPLACEMENT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &[u8]) -> Vec<u8> {
        assert!(text.len() < 127);
        [&[u8::try_from(text.len()).unwrap()], text].concat()
    }

    /// Passes a frame's payload in pieces and returns it.
    fn passed(kind: u8, flags: u8, payload: &[u8], piece: usize) -> Vec<u8> {
        let mut filter = AuthorityFilter::new();
        let mut payload = payload.to_vec();
        filter.begin_frame(kind, flags, payload.len());
        for piece in payload.chunks_mut(piece) {
            filter.pass(piece);
        }
        payload
    }

    #[test]
    fn only_authorities_change() {
        let socket = b"%2Ftmp%2Fhelix.sock";
        let wanted = b"-2Ftmp-2Fhelix.sock";
        let block = |authority: &[u8]| {
            let long = [&[0x00, 0x7f, 0x81, 0x01][..], &[b'n'; 256], &text(b"%2F")].concat();
            [
                // POST; a table size; a path by its name's index; a long name.
                &[0x83, 0x3f, 0xe1, 0x1f, 0x04][..],
                &text(b"/a%2Fb"),
                &long,
                // By the static index, by the name, and never indexed.
                &[0x41],
                &text(authority),
                &[0x40],
                &text(b":authority"),
                &text(authority),
                &[0x10],
                &text(b":authority"),
                &text(authority),
                &[0x40],
                &text(b"authority%"),
                &text(b"%2F"),
            ]
            .concat()
        };
        let padded = |authority| [&[3][..], &[0, 0, 0, 0, 9], &block(authority), b"%%%"].concat();
        for piece in [1, 3, 7, 1_000] {
            assert_eq!(passed(HEADERS, 0, &block(socket), piece), block(wanted));
            let flags = PADDED | PRIORITY;
            assert_eq!(passed(HEADERS, flags, &padded(socket), piece), padded(wanted));
            assert_eq!(passed(0, 0, &block(socket), piece), block(socket), "no header block");
        }
    }

    #[test]
    fn a_block_may_continue_in_another_frame() {
        let block = [&[0x83, 0x41][..], &text(b"a%2Fb"), &[0x84]].concat();
        for at in 0..block.len() {
            let mut filter = AuthorityFilter::new();
            let (mut first, mut second) = (block[..at].to_vec(), block[at..].to_vec());
            filter.begin_frame(HEADERS, 0, first.len());
            filter.pass(&mut first);
            filter.begin_frame(CONTINUATION, 4, second.len());
            filter.pass(&mut second);
            let wanted = [&[0x83, 0x41][..], &text(b"a-2Fb"), &[0x84]].concat();
            assert_eq!([first, second].concat(), wanted, "at {at}");
        }
    }

    #[test]
    fn huffman_codes_become_as_many_characters_as_they_have_bytes() {
        let name = [&[0x40, 0x80 | 8], HUFFMAN_NAME].concat();
        let block = |code: &[u8]| [&name, &[0x83][..], code].concat();
        let found = passed(HEADERS, 0, &block(&[0x12, 0x34, 0x56]), 2);
        assert_eq!(found, block(&[0xfc, 0xfc, 0xfc]));
    }

    #[test]
    fn no_bytes_of_a_client_stop_the_filter() {
        let mut filter = AuthorityFilter::new();
        for seed in 0..20_000_u32 {
            let mut bytes = seed.wrapping_mul(2_654_435_761).to_le_bytes();
            filter.begin_frame([HEADERS, CONTINUATION][(seed % 2) as usize], bytes[3], 4);
            filter.pass(&mut bytes);
            let mut endless = [0xff; 4];
            filter.begin_frame(CONTINUATION, 0, 4);
            filter.pass(&mut endless);
        }
    }
}
