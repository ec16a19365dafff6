//! Duplicates, delays or misplaces messages between nodes.
//!
//! TCP does none of it, but a faulty peer or proxy may. The receiver then rejects the stream and
//! the sender reconnects, or a request is answered twice. A message inside another one breaks the
//! receiver's framing: it reads payload as a length and waits for bytes that never come.
//!
//! Works on the HTTP/2 frames that a dialing node writes. Frames with whole gRPC messages are
//! duplicated or held back, invisibly to the code above the socket.

use rand::RngExt;
use rand::rngs::StdRng;

/// Length of the HTTP/2 connection preface.
pub const PREFACE_BYTES: usize = 24;

/// Length of a frame's header.
pub const HEADER_BYTES: usize = 9;
/// Type of a frame with a part of a message.
pub const DATA: u8 = 0;

/// One message in this many is duplicated, and one is delayed.
pub const ONE_IN: u32 = 150;

/// Treatment of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameAction {
    Sent,
    Twice,
    /// Held back until another frame was sent.
    Late,
    /// Held back, then sent between two frames of one message.
    InsideMessage,
}

/// Tampers with the writing side of one connection.
#[derive(Debug, Default)]
pub struct FrameTamperer {
    is_begun: bool,
    /// Incomplete frame.
    input: Vec<u8>,
    /// Frame that is held back.
    held: Vec<u8>,
    /// DATA frames so far. The first one is the handshake.
    data_frames: u64,
    messages: Messages,
}

impl FrameTamperer {
    /// Returns a tamperer whose connection has sent its preface and its handshake.
    pub fn after_handshake() -> Self {
        Self { is_begun: true, data_frames: 1, ..Self::default() }
    }

    /// Takes written bytes and appends to `out` the bytes to send. Without `rng` they are equal.
    /// Calls `on_action` for each message that is not sent normally.
    pub fn process(
        &mut self,
        bytes: &[u8],
        mut rng: Option<&mut StdRng>,
        out: &mut Vec<u8>,
        mut on_action: impl FnMut(FrameAction),
    ) {
        self.input.extend_from_slice(bytes);
        if !self.is_begun && self.input.len() >= PREFACE_BYTES {
            out.extend(self.input.drain(..PREFACE_BYTES));
            self.is_begun = true;
        }
        while let Some(len) = self.frame_len() {
            let frame: Vec<u8> = self.input.drain(..len).collect();
            let action = self.action(&frame, rng.as_deref_mut());
            if action != FrameAction::Sent {
                on_action(action);
            }
            match action {
                FrameAction::Late if self.held.is_empty() => {
                    self.held = frame;
                    continue;
                }
                FrameAction::Twice => out.extend_from_slice(&frame),
                FrameAction::Sent | FrameAction::Late | FrameAction::InsideMessage => {}
            }
            out.extend(frame);
            if !self.held.is_empty() && !self.messages.is_between() {
                on_action(FrameAction::InsideMessage);
            }
            out.append(&mut self.held);
        }
    }

    /// Returns the length of the next frame, if it is complete.
    fn frame_len(&self) -> Option<usize> {
        let [high, middle, low, ..] = *self.input.get(..HEADER_BYTES)? else { return None };
        let len = u32::from_be_bytes([0, high, middle, low]) as usize + HEADER_BYTES;
        (self.is_begun && self.input.len() >= len).then_some(len)
    }

    /// Chooses what happens to a frame.
    pub fn action(&mut self, frame: &[u8], rng: Option<&mut StdRng>) -> FrameAction {
        let (kind, flags) = (frame[3], frame[4]);
        if kind != DATA {
            return FrameAction::Sent;
        }
        self.data_frames += 1;
        let begins_whole = self.messages.is_between();
        self.messages.pass(&frame[HEADER_BYTES..]);
        // Not padded and not the last of its stream.
        let is_whole = begins_whole && self.messages.is_between() && flags == 0;
        let Some(rng) = rng.filter(|_| is_whole && self.data_frames > 1) else {
            return FrameAction::Sent;
        };
        match rng.random_range(0..2 * ONE_IN) {
            0 | 1 => FrameAction::Twice,
            2 | 3 => FrameAction::Late,
            _ => FrameAction::Sent,
        }
    }
}

/// Tracks the boundaries of gRPC messages. Each has a prefix of five bytes with its length.
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
