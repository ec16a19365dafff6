//! What a history is made of: one line for each thing that a producer or reader did or was told.
//! Kept small, since there are millions; written as one JSON object each.

use serde::{Deserialize, Serialize};

/// A batch, for ever: who made it, and its number among those that the same producer made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BatchKey {
    /// Producer; never used again after it has stopped.
    pub producer: u32,
    /// Number of the batch, growing in the order in which the producer hands them over.
    pub number: u64,
}

impl std::fmt::Display for BatchKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "batch {}/{}", self.producer, self.number)
    }
}

/// A line of a history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Microseconds since the start. For people: the checker looks at the order only.
    pub at_us: u64,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// What happened. Offsets are those of the first record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A batch is about to be handed to the client. `stream` names the session it goes through;
    /// None goes alone.
    Invoked {
        #[serde(flatten)]
        key: BatchKey,
        partition: u32,
        records: u32,
        stream: Option<u32>,
    },
    /// Its ack came.
    Acked {
        #[serde(flatten)]
        key: BatchKey,
        offset: u64,
    },
    /// It failed, and the error promises that it was not applied.
    Failed {
        #[serde(flatten)]
        key: BatchKey,
    },
    /// It failed with an open outcome.
    Unknown {
        #[serde(flatten)]
        key: BatchKey,
    },
    /// A reader begins at this offset of a partition.
    Opened { reader: u32, partition: u32, offset: u64 },
    /// A reader begins a final read of one replica, from offset 0, with all writers at rest.
    FinalOpened { reader: u32, partition: u32, round: u32, replica: u64 },
    /// A reader got a batch, or, where `records` is less than the batch has, a part of it.
    Read {
        reader: u32,
        partition: u32,
        offset: u64,
        #[serde(flatten)]
        key: BatchKey,
        records: u32,
    },
    /// A reader got bytes that are no batch of ours.
    Foreign { reader: u32, partition: u32, offset: u64, what: String },
    /// A reader was told that this offset, which it had reached, is out of range: it was trimmed.
    OutOfRange { reader: u32, partition: u32, offset: u64 },
    /// Someone was told that the log starts here.
    Starts { partition: u32, offset: u64 },
    /// A final read has come to what the replica gave as its high watermark.
    FinalEnded { reader: u32, partition: u32, high_watermark: u64 },
    /// A replica told its high watermark. A session is one reader of one node between two starts.
    Watermark { session: u32, partition: u32, high_watermark: u64 },
    /// A probe asks for the latest offset. What it asked before and got no answer to is void.
    LatestAsked { probe: u32, partition: u32 },
    /// The answer.
    Latest { probe: u32, partition: u32, offset: u64 },
    /// What a batch demands, said right after its invocation: that it gets this offset, that this
    /// is the token in force where it stands. Tokens of a partition grow in the order of setting.
    Condition {
        #[serde(flatten)]
        key: BatchKey,
        expected: Option<u64>,
        token: Option<u64>,
    },
    /// It failed, since it would not have got the offset that it demanded but this one.
    Refused {
        #[serde(flatten)]
        key: BatchKey,
        next_offset: u64,
    },
    /// This token is in force: whoever set it was told so.
    TokenSet { partition: u32, token: u64 },
    /// From here on the log may start anywhere up to this offset: someone asks for a trim, or
    /// retention allows it.
    MayTrim { partition: u32, offset: u64 },
    /// A trim was acknowledged: the log starts here, or later.
    Trimmed { partition: u32, offset: u64 },
    /// A final read begins here, at what its replica gave as the log's start, and not at 0.
    FinalStarts { reader: u32, partition: u32, offset: u64 },
    /// A reader was told when the batch at this offset was appended.
    Stamped { partition: u32, offset: u64, time_us: u64 },
    /// A majority is held down from here on.
    QuorumLost,
    /// It is about to be let go.
    QuorumBack,
}
