//! Events of a history: one line for each request or response of a producer or reader.
//! Small, because a history has millions of lines. Each is written as one JSON object.

use serde::{Deserialize, Serialize};

/// Permanent identity of a batch: its producer and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BatchKey {
    /// Producer id; never reused.
    pub producer: u32,
    /// Number of the batch, in the order of sending.
    pub number: u64,
}

impl std::fmt::Display for BatchKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "batch {}/{}", self.producer, self.number)
    }
}

/// A line of a history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryLine {
    /// Microseconds since the start. For people: the checker uses the order only.
    pub at_us: u64,
    /// Event.
    #[serde(flatten)]
    pub event: HistoryEvent,
}

/// Event of a history. Offsets are those of the first record of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum HistoryEvent {
    /// A producer is about to send a batch. `stream` is its session; `None` is a unary append.
    Invoked {
        #[serde(flatten)]
        key: BatchKey,
        partition: u32,
        records: u32,
        stream: Option<u32>,
    },
    /// The batch was acknowledged.
    Acked {
        #[serde(flatten)]
        key: BatchKey,
        offset: u64,
    },
    /// The batch failed with an error that promises that it was not applied.
    Failed {
        #[serde(flatten)]
        key: BatchKey,
    },
    /// The batch failed with an unknown outcome.
    Unknown {
        #[serde(flatten)]
        key: BatchKey,
    },
    /// A reader starts at this offset of a partition.
    Opened { reader: u32, partition: u32, offset: u64 },
    /// A reader starts a final read of one replica from offset 0, with all producers stopped.
    FinalOpened { reader: u32, partition: u32, round: u32, replica: u64 },
    /// A reader got a batch, or a part of it if `records` is less than its record count.
    Read {
        reader: u32,
        partition: u32,
        offset: u64,
        #[serde(flatten)]
        key: BatchKey,
        records: u32,
    },
    /// A reader got data that no producer has written.
    Foreign { reader: u32, partition: u32, offset: u64, what: String },
    /// A reader got "out of range" for its next offset, because it was trimmed.
    OutOfRange { reader: u32, partition: u32, offset: u64 },
    /// A response says that the log starts here.
    Starts { partition: u32, offset: u64 },
    /// A final read reached the high watermark of the replica.
    FinalEnded { reader: u32, partition: u32, high_watermark: u64 },
    /// A response had this high watermark. A session is one reader of one node between two starts.
    Watermark { session: u32, partition: u32, high_watermark: u64 },
    /// A probe requests the latest offset. Cancels its previous request without a response.
    LatestAsked { probe: u32, partition: u32 },
    /// The response to a probe.
    Latest { probe: u32, partition: u32, offset: u64 },
    /// Condition of a batch, recorded after its invocation: the expected offset, and the expected
    /// fencing token. Tokens of a partition grow in the order in which they are set.
    Condition {
        #[serde(flatten)]
        key: BatchKey,
        expected: Option<u64>,
        token: Option<u64>,
    },
    /// The batch failed because the next offset was this one, not the expected one.
    Refused {
        #[serde(flatten)]
        key: BatchKey,
        next_offset: u64,
    },
    /// Setting this token was acknowledged.
    TokenSet { partition: u32, token: u64 },
    /// The log may start anywhere up to this offset from now on, because of a trim request or
    /// retention.
    MayTrim { partition: u32, offset: u64 },
    /// A trim was acknowledged: the log starts here or later.
    Trimmed { partition: u32, offset: u64 },
    /// A final read starts at the log start of its replica instead of 0.
    FinalStarts { reader: u32, partition: u32, offset: u64 },
    /// A reader got the append time of the batch at this offset.
    Stamped { partition: u32, offset: u64, time_us: u64 },
    /// A majority of the nodes is kept down from now on.
    QuorumLost,
    /// The majority is about to be restarted.
    QuorumBack,
}
