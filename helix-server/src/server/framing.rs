//! Where messages begin and end in a gRPC body: five bytes of head, and as many bytes as it says.
//! Pure; looks at heads only.

/// A flag, and the length, big endian.
const HEAD_BYTES: usize = 5;

/// How far a body has come.
#[derive(Debug, Default)]
pub(super) struct Framing {
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    /// Bytes that the message under way still lacks.
    left: u64,
    /// Messages that have begun.
    begun: u64,
}

impl Framing {
    /// Takes the next bytes of the body. The lengths of the messages whose heads end in them.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> u64 {
        let mut announced = 0;
        while !bytes.is_empty() {
            if self.left > 0 {
                let passed = self.left.min(bytes.len() as u64);
                self.left -= passed;
                // Never more than there are.
                bytes = &bytes[passed as usize..];
                continue;
            }
            let taken = (HEAD_BYTES - self.head_bytes).min(bytes.len());
            self.head[self.head_bytes..][..taken].copy_from_slice(&bytes[..taken]);
            self.head_bytes += taken;
            bytes = &bytes[taken..];
            if self.head_bytes == HEAD_BYTES {
                let [_, length @ ..] = self.head;
                self.head_bytes = 0;
                self.left = u64::from(u32::from_be_bytes(length));
                self.begun += 1;
                announced += self.left;
            }
        }
        announced
    }

    /// Whether the last byte of a message was the last byte taken, or none was.
    pub(super) fn is_between(&self) -> bool {
        self.left == 0 && self.head_bytes == 0
    }

    /// Whether no message has begun.
    pub(super) fn is_untouched(&self) -> bool {
        self.begun == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(length: u32) -> Vec<u8> {
        let head = [&[0][..], &length.to_be_bytes()].concat();
        [head, vec![7; length as usize]].concat()
    }

    #[test]
    fn each_message_is_announced_once_however_the_body_is_cut() {
        let body = [message(3), message(0), message(1000), message(1)].concat();
        for cut in 1..body.len() {
            let mut framing = Framing::default();
            let announced: u64 = body.chunks(cut).map(|piece| framing.take(piece)).sum();
            assert_eq!(announced, 1004, "pieces of {cut}");
            assert!(framing.is_between());
        }
    }

    #[test]
    fn a_message_is_announced_with_its_head_and_between_means_between() {
        let mut framing = Framing::default();
        assert!(framing.is_between() && framing.is_untouched());
        assert_eq!(framing.take(&[0, 0, 0]), 0);
        assert!(!framing.is_between() && framing.is_untouched());
        assert_eq!(framing.take(&[0, 9, 1]), 9);
        assert!(!framing.is_between() && !framing.is_untouched());
        assert_eq!(framing.take(&[1; 7]), 0);
        assert!(!framing.is_between());
        assert_eq!(framing.take(&[1]), 0);
        assert!(framing.is_between());
        assert_eq!(framing.take(&[0, 255, 255, 255, 255]), u64::from(u32::MAX));
    }
}
