//! Sends a message between two nodes twice, or after the one that follows it, or into the middle of
//! that. TCP does none of it; a peer with a fault, or something between the two, may. What comes of
//! it is that the receiver refuses the stream's order and the sender begins anew, that an answer is
//! given twice, or that the receiver has lost sight of where messages begin: it then takes records
//! for a length, and waits for bytes that nobody sends.
//!
//! Works on what a dialing node writes: HTTP/2 frames, of which those that hold whole gRPC messages
//! are doubled or held back. Nothing behind the socket knows of it.

use rand::RngExt;
use rand::rngs::StdRng;

/// What begins a connection, before its first frame.
const PREFACE_BYTES: usize = 24;

const HEADER_BYTES: usize = 9;
const DATA: u8 = 0;

/// One message in so many is sent twice, and one is sent late.
const ONE_IN: u32 = 150;

/// What becomes of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Sent,
    Twice,
    /// Held back until another frame has gone.
    Late,
    /// Held back, and now sent between two frames of one message.
    Within,
}

/// The writing side of one connection.
#[derive(Debug, Default)]
pub struct Tamper {
    is_begun: bool,
    /// Not a whole frame yet.
    input: Vec<u8>,
    /// Held back until another frame has gone.
    held: Vec<u8>,
    /// Frames with data so far: the first one is the handshake.
    data_frames: u64,
    messages: Messages,
}

impl Tamper {
    /// Takes what is written; adds to `out` what is to go over the network. Without `rng` that is
    /// the same. Calls `told` for each message that is not sent as it should be.
    pub fn feed(
        &mut self,
        bytes: &[u8],
        mut rng: Option<&mut StdRng>,
        out: &mut Vec<u8>,
        mut told: impl FnMut(Fate),
    ) {
        self.input.extend_from_slice(bytes);
        if !self.is_begun && self.input.len() >= PREFACE_BYTES {
            out.extend(self.input.drain(..PREFACE_BYTES));
            self.is_begun = true;
        }
        while let Some(len) = self.frame_len() {
            let frame: Vec<u8> = self.input.drain(..len).collect();
            let fate = self.fate(&frame, rng.as_deref_mut());
            if fate != Fate::Sent {
                told(fate);
            }
            match fate {
                Fate::Late if self.held.is_empty() => {
                    self.held = frame;
                    continue;
                }
                Fate::Twice => out.extend_from_slice(&frame),
                Fate::Sent | Fate::Late | Fate::Within => {}
            }
            out.extend(frame);
            if !self.held.is_empty() && !self.messages.is_between() {
                told(Fate::Within);
            }
            out.append(&mut self.held);
        }
    }

    /// Bytes of the next frame, if all of it is there.
    fn frame_len(&self) -> Option<usize> {
        let [high, middle, low, ..] = *self.input.get(..HEADER_BYTES)? else { return None };
        let len = u32::from_be_bytes([0, high, middle, low]) as usize + HEADER_BYTES;
        (self.is_begun && self.input.len() >= len).then_some(len)
    }

    fn fate(&mut self, frame: &[u8], rng: Option<&mut StdRng>) -> Fate {
        let (kind, flags) = (frame[3], frame[4]);
        if kind != DATA {
            return Fate::Sent;
        }
        self.data_frames += 1;
        let begins_whole = self.messages.is_between();
        self.messages.pass(&frame[HEADER_BYTES..]);
        // Neither padded nor the last of its stream.
        let is_whole = begins_whole && self.messages.is_between() && flags == 0;
        let Some(rng) = rng.filter(|_| is_whole && self.data_frames > 1) else { return Fate::Sent };
        match rng.random_range(0..2 * ONE_IN) {
            0 | 1 => Fate::Twice,
            2 | 3 => Fate::Late,
            _ => Fate::Sent,
        }
    }
}

/// Where gRPC's messages begin and end: each has five bytes before it, with its length.
#[derive(Debug, Default)]
struct Messages {
    prefix: Vec<u8>,
    left: usize,
}

impl Messages {
    fn is_between(&self) -> bool {
        self.prefix.is_empty() && self.left == 0
    }

    fn pass(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let taken = match self.left {
                0 => 5 - self.prefix.len(),
                left => left,
            };
            let (now, later) = bytes.split_at(taken.min(bytes.len()));
            bytes = later;
            if self.left > 0 {
                self.left -= now.len();
                continue;
            }
            self.prefix.extend_from_slice(now);
            if let [_, a, b, c, d] = self.prefix[..] {
                self.left = u32::from_be_bytes([a, b, c, d]) as usize;
                self.prefix.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![0, 0, u8::try_from(payload.len()).unwrap(), kind, 0, 0, 0, 0, 1];
        frame.extend_from_slice(payload);
        frame
    }

    fn message(text: u8) -> Vec<u8> {
        vec![0, 0, 0, 0, 2, text, text]
    }

    /// Splits what went out into the messages of its frames; control frames are skipped.
    fn messages(mut out: &[u8]) -> Vec<u8> {
        let mut found = Vec::new();
        out = &out[PREFACE_BYTES..];
        while let [_, _, len, kind, ..] = *out {
            let (frame, rest) = out.split_at(HEADER_BYTES + usize::from(len));
            if kind == DATA {
                found.extend(frame[HEADER_BYTES..].chunks(7).map(|message| message[5]));
            }
            out = rest;
        }
        found
    }

    fn sent(rng: Option<&mut StdRng>, pieces: usize) -> (Vec<u8>, u32) {
        let mut written = vec![b'P'; PREFACE_BYTES];
        written.extend(frame(4, &[]));
        for number in 0..200 {
            written.extend(frame(DATA, &message(number)));
        }
        written.extend(frame(6, &[0; 8]));
        let (mut tamper, mut out, mut count) = (Tamper::default(), Vec::new(), 0);
        let mut rng = rng;
        for piece in written.chunks(pieces) {
            tamper.feed(piece, rng.as_deref_mut(), &mut out, |_| count += 1);
        }
        (messages(&out), count)
    }

    #[test]
    fn without_a_draw_everything_goes_as_it_came() {
        for pieces in [1, 7, 4096] {
            assert_eq!(sent(None, pieces), ((0..200).collect(), 0));
        }
    }

    #[test]
    fn messages_come_twice_or_late_and_none_is_lost() {
        let (mut doubled, mut swapped) = (false, false);
        for seed in 0..20 {
            let (got, _) = sent(Some(&mut StdRng::seed_from_u64(seed)), 13);
            assert_eq!(got[0], 0, "the handshake is left alone");
            doubled |= got.windows(2).any(|pair| pair[0] == pair[1]);
            swapped |= got.windows(2).any(|pair| pair[0] > pair[1]);
            let mut all = got.clone();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all, (0..200).collect::<Vec<u8>>(), "seed {seed}");
        }
        assert!(doubled && swapped);
    }

    #[test]
    fn a_late_message_may_end_up_within_the_next_one() {
        let (long, mut within) = (message(9), 0);
        for seed in 0..400 {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut tamper = Tamper { is_begun: true, data_frames: 1, ..Tamper::default() };
            let frames =
                [frame(DATA, &message(8)), frame(DATA, &long[..6]), frame(DATA, &long[6..])];
            let (mut out, mut told) = (Vec::new(), Vec::new());
            tamper.feed(&frames.concat(), Some(&mut rng), &mut out, |fate| told.push(fate));
            if told == [Fate::Late, Fate::Within] {
                let [late, begins, ends] = &frames;
                assert_eq!(out, [&begins[..], late, ends].concat());
                within += 1;
            } else {
                assert!(!told.contains(&Fate::Within), "{told:?}");
            }
        }
        assert!(within > 0);
    }

    #[test]
    fn a_message_over_two_frames_is_left_alone() {
        let (long, mut rng) = (message(9), StdRng::seed_from_u64(1));
        let mut tamper = Tamper { is_begun: true, data_frames: 1, ..Tamper::default() };
        for _ in 0..4 * ONE_IN {
            for half in [&long[..3], &long[3..]] {
                assert_eq!(tamper.fate(&frame(DATA, half), Some(&mut rng)), Fate::Sent);
            }
        }
    }
}
