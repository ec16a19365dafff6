//! Parses an input. Reads beyond its end return zero, so that every input is valid and a shorter
//! one has fewer effects.

/// Boundary values.
const BOUNDARIES: [u64; 20] = [
    0,
    1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    4095,
    4096,
    65_535,
    65_536,
    1 << 31,
    u32::MAX as u64 - 1,
    u32::MAX as u64,
    1 << 32,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];

/// Remaining bytes of an input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn u8(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.u8()))
    }

    /// Returns a number below `end`, which must not be 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        let number = if end > 256 { usize::from(self.u16()) } else { usize::from(self.u8()) };
        number % end
    }

    pub(crate) fn one_in(&mut self, n: u8) -> bool {
        self.u8().is_multiple_of(n)
    }

    /// Returns a small number, a boundary value, or any number.
    pub(crate) fn number(&mut self) -> u64 {
        match self.u8() {
            small @ 0..=99 => u64::from(small % 16),
            edge @ 100..=199 => BOUNDARIES[usize::from(edge) % BOUNDARIES.len()],
            200..=219 => u64::from(self.u16()),
            _ => self.u64(),
        }
    }

    pub(crate) fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Returns up to 255 bytes.
    pub(crate) fn some_bytes(&mut self) -> &'a [u8] {
        let len = usize::from(self.u8());
        self.bytes(len)
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}
