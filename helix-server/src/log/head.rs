//! Heads: the part of a log entry that apply needs, stored before the payload.
//! The head of a batch is small, and replay reads no payloads.

use std::fmt::{self, Display};

use bytes::{BufMut, Bytes, BytesMut};

use super::command::{ClusterCommand, ShardCommand};
use super::{
    BatchChecksum, Condition, FENCING_TOKEN_BYTES_MAX, FencingToken, KeptOffsets, PartitionId,
    ProducerOwner, Refusal, command_record,
};

/// Largest head that the log accepts, in bytes. Commands with rows are split by
/// [`ROWS_PER_ENTRY_MAX`](super::ROWS_PER_ENTRY_MAX).
pub const HEAD_BYTES_MAX: usize = 60 << 10;

/// The head of an entry. Its `Display` is short and takes constant time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Head {
    Batch(BatchHead),
    /// A command to the data shard that logs it.
    Shard(ShardCommand),
    /// A command to the cluster's state, in shard 0.
    Cluster(ClusterCommand),
}

/// A batch without its payload. Stored in a fixed little-endian layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchHead {
    pub partition: PartitionId,
    pub record_count: u32,
    /// `EncodedBatch.version` and `.compression`.
    pub version: u32,
    pub compression: i32,
    pub payload_bytes: u32,
    /// `EncodedBatch.uncompressed_bytes` of a compressed batch, and the bytes of the `RecordList`
    /// that a batch of version 2 converts to; else 0.
    pub uncompressed_bytes: u32,
    /// Time of the leader's proposal, in µs since the Unix epoch.
    pub proposed_us: u64,
    pub producer: Option<ProducerStamp>,
    pub condition: Condition,
    /// Offsets that stayed after compaction by key; `None` if all did. Boxed because it is rare.
    pub kept: Option<Box<KeptOffsets>>,
}

/// Producer of a batch, and its position in the producer's sequence on one partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProducerStamp {
    pub producer_id: u64,
    pub epoch: u32,
    /// Sequence of the first record; counts this producer's records on this partition from 0.
    pub first_sequence: u64,
    /// Principal that appended the batch; anonymous before protocol version 8.
    pub owner: ProducerOwner,
    /// Checksum of the batch as it was appended; `None` before protocol version 8.
    pub checksum: Option<BatchChecksum>,
}

impl ProducerStamp {
    /// Returns the stamp of a batch without an owner and a checksum.
    pub fn new(producer_id: u64, epoch: u32, first_sequence: u64) -> Self {
        let owner = ProducerOwner::ANONYMOUS;
        Self { producer_id, epoch, first_sequence, owner, checksum: None }
    }

    /// Checks that the identity, which has this owner, is used by its owner.
    ///
    /// # Errors
    /// [`Refusal::ProducerNotOwned`], or [`Refusal::UnknownProducer`] if the producer should call
    /// InitProducer again. The second is for identities from before access control or protocol
    /// version 8, which belong to no principal, and for batches without a checksum, whose leader
    /// did not know that version yet.
    pub fn check_owner(&self, owner: ProducerOwner) -> Result<(), Refusal> {
        let producer_id = self.producer_id;
        if self.owner == owner {
            Ok(())
        } else if owner.is_anonymous() || self.checksum.is_none() {
            Err(Refusal::UnknownProducer { producer_id })
        } else {
            Err(Refusal::ProducerNotOwned { producer_id })
        }
    }
}

/// Reason why a head cannot be decoded.
///
/// Such an entry must never be skipped, since replicas would diverge.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    #[error("the head is empty")]
    Empty,
    #[error("head kind {kind} is unknown to this version")]
    UnknownKind { kind: u8 },
    #[error("batch flags {flags:#04x} are unknown to this version")]
    UnknownFlags { flags: u8 },
    #[error("the batch head has {bytes} bytes instead of {expected}")]
    WrongLength { bytes: usize, expected: usize },
    #[error("the batch states that it is compressed from 0 bytes")]
    NoUncompressedBytes,
    #[error("the fencing token of the batch is too long or not UTF-8")]
    WrongToken,
    #[error("the owner or the checksum of the producer is malformed")]
    WrongProducer,
    #[error("the offsets that compaction kept in the batch are malformed")]
    WrongKeptOffsets,
    #[error("the command is unknown to this version")]
    UnknownCommand,
    #[error("malformed command: {what}")]
    Malformed { what: String },
}

const KIND_BATCH: u8 = 1;
const KIND_SHARD: u8 = 2;
const KIND_CLUSTER: u8 = 3;

// A batch, little-endian:
//   0 kind u8 | 1 flags u8 | 2 partition u64 | 10 record_count u32 | 14 version u32
//  18 compression i32 | 22 payload_bytes u32 | 26 proposed_us u64
// followed by the optional fields in this order:
//  with FLAG_PRODUCER          producer_id u64 | epoch u32 | first_sequence u64
//  with FLAG_EXPECTED_OFFSET   expected_offset u64
//  with FLAG_FENCING_TOKEN     length u8 | the token, UTF-8
//  with FLAG_COMPRESSED        uncompressed_bytes u32, at least 1; from protocol version 4 on;
//                              batches of version 2 have it, too, from protocol version 8 on
//  with FLAG_COMPACTED         offset_count u32 | form u8 | length u16 | offsets that stayed; from
//                              protocol version 7 on
//  with FLAG_CHECKSUM          checksum u32, at least 1; from protocol version 8 on
//  with FLAG_OWNER             owner, 16 bytes, not all 0; from protocol version 8 on
// The last two require FLAG_PRODUCER.
const FLAG_PRODUCER: u8 = 1;
const FLAG_EXPECTED_OFFSET: u8 = 1 << 1;
const FLAG_FENCING_TOKEN: u8 = 1 << 2;
const FLAG_COMPRESSED: u8 = 1 << 3;
const FLAG_COMPACTED: u8 = 1 << 4;
const FLAG_CHECKSUM: u8 = 1 << 5;
const FLAG_OWNER: u8 = 1 << 6;
const FLAGS: u8 = FLAG_PRODUCER
    | FLAG_EXPECTED_OFFSET
    | FLAG_FENCING_TOKEN
    | FLAG_COMPRESSED
    | FLAG_COMPACTED
    | FLAG_CHECKSUM
    | FLAG_OWNER;
const BATCH_BYTES: usize = 34;
const STAMP_BYTES: usize = 20;
const BATCH_WITH_PRODUCER_BYTES: usize = BATCH_BYTES + STAMP_BYTES + 4 + ProducerOwner::BYTES;
const _: () = assert!(FENCING_TOKEN_BYTES_MAX <= u8::MAX as usize);

impl Head {
    pub fn encode(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(BATCH_WITH_PRODUCER_BYTES);
        self.encode_to(&mut bytes);
        bytes.freeze()
    }

    /// Appends the encoded head to `bytes`.
    pub fn encode_to(&self, bytes: &mut BytesMut) {
        match self {
            Self::Batch(batch) => batch.encode_to(bytes),
            Self::Shard(command) => {
                bytes.put_u8(KIND_SHARD);
                command_record::encode_shard(command, bytes);
            }
            Self::Cluster(command) => {
                bytes.put_u8(KIND_CLUSTER);
                command_record::encode_cluster(command, bytes);
            }
        }
    }

    /// Decodes the head of an entry.
    ///
    /// # Errors
    /// The first value that is invalid or unknown.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeadError> {
        let (&kind, rest) = bytes.split_first().ok_or(HeadError::Empty)?;
        match kind {
            KIND_BATCH => BatchHead::decode(bytes).map(Self::Batch),
            KIND_SHARD => command_record::decode_shard(rest).map(Self::Shard),
            KIND_CLUSTER => command_record::decode_cluster(rest).map(Self::Cluster),
            kind => Err(HeadError::UnknownKind { kind }),
        }
    }

    /// Returns the stream of the entry in the log: a batch's partition, else 0.
    pub fn stream(&self) -> u64 {
        match self {
            Self::Batch(batch) => batch.partition.0,
            Self::Shard(_) | Self::Cluster(_) => 0,
        }
    }
}

impl Display for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Batch(b) => {
                write!(f, "batch of {} for partition {}", b.record_count, b.partition)
            }
            Self::Shard(command) => f.write_str(command.name()),
            Self::Cluster(command) => f.write_str(command.name()),
        }
    }
}

impl BatchHead {
    fn encode_to(&self, bytes: &mut BytesMut) {
        bytes.put_u8(KIND_BATCH);
        bytes.put_u8(self.flags());
        bytes.put_u64_le(self.partition.0);
        bytes.put_u32_le(self.record_count);
        bytes.put_u32_le(self.version);
        bytes.put_i32_le(self.compression);
        bytes.put_u32_le(self.payload_bytes);
        bytes.put_u64_le(self.proposed_us);
        if let Some(stamp) = &self.producer {
            bytes.put_u64_le(stamp.producer_id);
            bytes.put_u32_le(stamp.epoch);
            bytes.put_u64_le(stamp.first_sequence);
        }
        if let Some(offset) = self.condition.expected_offset {
            bytes.put_u64_le(offset);
        }
        if let Some(token) = &self.condition.fencing_token {
            bytes.put_u8(u8::try_from(token.as_str().len()).expect("a token has at most 64 bytes"));
            bytes.put_slice(token.as_str().as_bytes());
        }
        if self.uncompressed_bytes > 0 {
            bytes.put_u32_le(self.uncompressed_bytes);
        }
        if let Some(kept) = &self.kept {
            kept.encode_to(bytes);
        }
        if let Some(ProducerStamp { owner, checksum, .. }) = &self.producer {
            if let Some(checksum) = checksum {
                bytes.put_u32_le(checksum.get());
            }
            if !owner.is_anonymous() {
                bytes.put_slice(owner.as_bytes());
            }
        }
    }

    /// Returns the number of offsets that the batch covers: its records when it was appended.
    pub fn offset_count(&self) -> u32 {
        self.kept.as_ref().map_or(self.record_count, |kept| kept.offset_count())
    }

    fn flags(&self) -> u8 {
        let flag = |is_set: bool, flag| if is_set { flag } else { 0 };
        flag(self.producer.is_some(), FLAG_PRODUCER)
            | flag(self.condition.expected_offset.is_some(), FLAG_EXPECTED_OFFSET)
            | flag(self.condition.fencing_token.is_some(), FLAG_FENCING_TOKEN)
            | flag(self.uncompressed_bytes > 0, FLAG_COMPRESSED)
            | flag(self.kept.is_some(), FLAG_COMPACTED)
            | flag(self.producer.is_some_and(|it| it.checksum.is_some()), FLAG_CHECKSUM)
            | flag(self.producer.is_some_and(|it| !it.owner.is_anonymous()), FLAG_OWNER)
    }

    /// Decodes a batch; `bytes` start with the kind.
    fn decode(bytes: &[u8]) -> Result<Self, HeadError> {
        let mut reader = HeadReader { bytes, at: 0 };
        let fixed: &[u8; BATCH_BYTES] = reader.take()?;
        let flags = fixed[1];
        if flags & !FLAGS != 0 {
            return Err(HeadError::UnknownFlags { flags });
        }
        let mut producer = None;
        if flags & FLAG_PRODUCER != 0 {
            let stamp: &[u8; STAMP_BYTES] = reader.take()?;
            producer = Some(ProducerStamp::new(
                u64::from_le_bytes(field(stamp, 0)),
                u32::from_le_bytes(field(stamp, 8)),
                u64::from_le_bytes(field(stamp, 12)),
            ));
        }
        let mut condition = Condition::default();
        if flags & FLAG_EXPECTED_OFFSET != 0 {
            condition.expected_offset = Some(u64::from_le_bytes(*reader.take()?));
        }
        if flags & FLAG_FENCING_TOKEN != 0 {
            let [length] = *reader.take()?;
            let text = std::str::from_utf8(reader.take_slice(length.into())?).ok();
            let token = text.and_then(FencingToken::new).ok_or(HeadError::WrongToken)?;
            condition.fencing_token = Some(token);
        }
        let mut uncompressed_bytes = 0;
        if flags & FLAG_COMPRESSED != 0 {
            uncompressed_bytes = u32::from_le_bytes(*reader.take()?);
            if uncompressed_bytes == 0 {
                return Err(HeadError::NoUncompressedBytes);
            }
        }
        let record_count = u32::from_le_bytes(field(fixed, 10));
        let mut kept = None;
        if flags & FLAG_COMPACTED != 0 {
            let prefix = reader.take()?;
            let form = reader.take_slice(KeptOffsets::form_bytes(prefix))?;
            let decoded = KeptOffsets::decode(prefix, form, record_count);
            kept = Some(Box::new(decoded.ok_or(HeadError::WrongKeptOffsets)?));
        }
        if flags & FLAG_CHECKSUM != 0 {
            let checksum = BatchChecksum::from_field(u32::from_le_bytes(*reader.take()?));
            let stamp = producer.as_mut().ok_or(HeadError::WrongProducer)?;
            stamp.checksum = Some(checksum.ok_or(HeadError::WrongProducer)?);
        }
        if flags & FLAG_OWNER != 0 {
            let owner = ProducerOwner::from_bytes(*reader.take()?);
            let stamp = producer.as_mut().ok_or(HeadError::WrongProducer)?;
            if owner.is_anonymous() {
                return Err(HeadError::WrongProducer);
            }
            stamp.owner = owner;
        }
        reader.end()?;
        Ok(Self {
            partition: PartitionId(u64::from_le_bytes(field(fixed, 2))),
            record_count,
            version: u32::from_le_bytes(field(fixed, 14)),
            compression: i32::from_le_bytes(field(fixed, 18)),
            payload_bytes: u32::from_le_bytes(field(fixed, 22)),
            uncompressed_bytes,
            proposed_us: u64::from_le_bytes(field(fixed, 26)),
            producer,
            condition,
            kept,
        })
    }
}

/// Reads fields from the front of `bytes`.
struct HeadReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> HeadReader<'a> {
    fn take<const N: usize>(&mut self) -> Result<&'a [u8; N], HeadError> {
        let part = self.bytes[self.at..].first_chunk().ok_or_else(|| self.wrong(N))?;
        self.at += N;
        Ok(part)
    }

    fn take_slice(&mut self, count: usize) -> Result<&'a [u8], HeadError> {
        let part = self.bytes[self.at..].get(..count).ok_or_else(|| self.wrong(count))?;
        self.at += count;
        Ok(part)
    }

    fn end(&self) -> Result<(), HeadError> {
        if self.at == self.bytes.len() { Ok(()) } else { Err(self.wrong(0)) }
    }

    fn wrong(&self, more: usize) -> HeadError {
        HeadError::WrongLength { bytes: self.bytes.len(), expected: self.at + more }
    }
}

/// Returns `N` bytes at `at`, which the caller knows to be in bounds.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("the slice has N bytes")
}

#[cfg(test)]
mod tests {
    use rand::{Rng, RngExt};

    use super::super::testing::{batch_head, random_head, seeded};
    use super::super::{PartitionRun, PartitionSettings, ROWS_PER_ENTRY_MAX};
    use super::*;

    fn batch(producer: Option<ProducerStamp>) -> BatchHead {
        BatchHead {
            compression: -1,
            payload_bytes: 1024,
            proposed_us: 7,
            producer,
            ..batch_head(0x0102, 3)
        }
    }

    /// Returns a batch with every optional field.
    fn full(token: &str) -> BatchHead {
        let stamp = ProducerStamp::new(9, 2, 5);
        let condition =
            Condition { expected_offset: Some(0x0304), fencing_token: FencingToken::new(token) };
        BatchHead { condition, ..batch(Some(stamp)) }
    }

    #[test]
    fn batch_layout_is_stable() {
        let stamp = ProducerStamp::new(9, 2, 5);
        let bytes = Head::Batch(batch(Some(stamp))).encode();
        let mut expected = vec![1, 1, 2, 1, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0];
        expected.extend([255, 255, 255, 255, 0, 4, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend([9, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes, expected);
        expected[1] = 7;
        expected.extend([4, 3, 0, 0, 0, 0, 0, 0, 3]);
        expected.extend(b"one");
        assert_eq!(Head::Batch(full("one")).encode(), expected);
        expected[1] = 15;
        expected.extend([0, 0x10, 0, 0]);
        let compressed = BatchHead { uncompressed_bytes: 4096, ..full("one") };
        assert_eq!(Head::Batch(compressed).encode(), expected);
        let size = expected.len() - 3;
        let mut compacted = expected.clone();
        compacted[1] = 31;
        compacted.extend([100, 0, 0, 0, 1, 3, 0, 5, 0, 9]);
        let kept = KeptOffsets::new(100, vec![5, 6, 16]).map(Box::new);
        let head = BatchHead { uncompressed_bytes: 4096, kept, ..full("one") };
        assert_eq!(head.offset_count(), 100);
        assert_eq!(Head::Batch(head).encode(), compacted);
        expected[size] = 0;
        assert_eq!(Head::decode(&expected), Err(HeadError::NoUncompressedBytes));
    }

    #[test]
    fn layout_of_owner_and_checksum_is_stable() {
        let stamp = ProducerStamp::new(9, 2, 5);
        let plain = Head::Batch(batch(Some(stamp))).encode();
        let checksum = Some(BatchChecksum::of_crc(0x0102_0304));
        let owned = ProducerStamp { owner: ProducerOwner::from_bytes([7; 16]), checksum, ..stamp };
        let mut expected = plain.to_vec();
        expected[1] = 0b110_0001;
        expected.extend([4, 3, 2, 1]);
        expected.extend([7; 16]);
        assert_eq!(Head::Batch(batch(Some(owned))).encode(), expected);
        let at = plain.len();
        for (range, what) in [(at..at + 4, "no checksum"), (at + 4..at + 20, "no owner")] {
            let mut zeroed = expected.clone();
            zeroed[range].fill(0);
            assert_eq!(Head::decode(&zeroed), Err(HeadError::WrongProducer), "{what}");
        }
        let mut unstamped = Head::Batch(batch(None)).encode().to_vec();
        unstamped[1] = FLAG_CHECKSUM;
        unstamped.extend([4, 3, 2, 1]);
        assert_eq!(Head::decode(&unstamped), Err(HeadError::WrongProducer));
    }

    #[test]
    fn rejects_batches_of_wrong_length_or_with_unknown_flags() {
        let stamp = ProducerStamp::new(9, 2, 5);
        let owner = ProducerOwner::SESSION;
        let checked = ProducerStamp { checksum: Some(BatchChecksum::of_crc(7)), ..stamp };
        let owned = ProducerStamp { owner, ..checked };
        let compressed = BatchHead { uncompressed_bytes: 1 << 20, ..full("one") };
        let kept = KeptOffsets::new(100, vec![5, 6, 16]).map(Box::new);
        let compacted = BatchHead { kept, ..full("one") };
        let heads = [batch(None), batch(Some(stamp)), full(""), full("one"), compressed, compacted];
        for head in heads.into_iter().chain([batch(Some(checked)), batch(Some(owned))]) {
            let bytes = Head::Batch(head).encode();
            for cut in 0..bytes.len() {
                assert!(Head::decode(&bytes[..cut]).is_err(), "cut at {cut}");
            }
            let mut longer = bytes.to_vec();
            longer.push(0);
            assert!(matches!(Head::decode(&longer), Err(HeadError::WrongLength { .. })));
            let mut flagged = bytes.to_vec();
            flagged[1] |= 0x80;
            assert!(matches!(Head::decode(&flagged), Err(HeadError::UnknownFlags { .. })));
        }
    }

    #[test]
    fn rejects_token_that_is_too_long_or_not_utf8() {
        let longest = "x".repeat(FENCING_TOKEN_BYTES_MAX);
        let bytes = Head::Batch(full(&longest)).encode();
        assert!(Head::decode(&bytes).is_ok());
        let mut longer = bytes.to_vec();
        longer[BATCH_BYTES + STAMP_BYTES + 8] += 1;
        longer.push(b'x');
        assert_eq!(Head::decode(&longer), Err(HeadError::WrongToken));
        let mut no_text = bytes.to_vec();
        *no_text.last_mut().unwrap() = 0xff;
        assert_eq!(Head::decode(&no_text), Err(HeadError::WrongToken));
    }

    #[test]
    fn rejects_unknown_kinds_commands_and_fields() {
        assert_eq!(Head::decode(&[]), Err(HeadError::Empty));
        assert_eq!(Head::decode(&[9, 1]), Err(HeadError::UnknownKind { kind: 9 }));
        assert_eq!(Head::decode(&[KIND_SHARD]), Err(HeadError::UnknownCommand));
        // Field 100, empty, as a later version might write it.
        assert_eq!(Head::decode(&[KIND_SHARD, 0xa2, 6, 0]), Err(HeadError::UnknownCommand));
        assert_eq!(Head::decode(&[KIND_CLUSTER, 0xa2, 6, 0]), Err(HeadError::UnknownCommand));
        let drop = ShardCommand::DropTopic { cluster_version: 1, topic_id: 2 };
        let mut bytes = Head::Shard(drop).encode().to_vec();
        bytes.extend([0xa2, 6, 0]);
        assert!(matches!(Head::decode(&bytes), Err(HeadError::Malformed { .. })));
    }

    #[test]
    fn heads_survive_encode_and_decode() {
        let mut rng = seeded("heads_survive_encode_and_decode");
        for _ in 0..5_000 {
            let head = random_head(&mut rng);
            assert_eq!(Head::decode(&head.encode()).as_ref(), Ok(&head));
        }
    }

    #[test]
    fn decode_of_any_bytes_never_panics() {
        let mut rng = seeded("decode_of_any_bytes_never_panics");
        for _ in 0..50_000 {
            let mut bytes = random_head(&mut rng).encode().to_vec();
            if rng.random_bool(0.2) {
                bytes = vec![0; rng.random_range(0..80)];
                rng.fill_bytes(&mut bytes);
                if let Some(first) = bytes.first_mut() {
                    *first %= 4;
                }
            }
            for _ in 0..rng.random_range(1..4) {
                let end = bytes.len();
                match rng.random_range(0..3) {
                    0 if end > 0 => bytes[rng.random_range(0..end)] ^= 1 << rng.random_range(0..8),
                    1 => bytes.truncate(rng.random_range(0..=end)),
                    _ => bytes.insert(rng.random_range(0..=end), rng.random()),
                }
            }
            if let Ok(head) = Head::decode(&bytes) {
                assert_eq!(head.encode().len(), bytes.len(), "decode must not skip bytes");
            }
        }
    }

    #[test]
    fn largest_commands_fit_into_one_head() {
        let most = u64::MAX - 100_000;
        let starts = (0..ROWS_PER_ENTRY_MAX as u64).map(|i| (PartitionId(most + i), most + i));
        let trim = Head::Shard(ShardCommand::Trim { starts: starts.collect() });
        assert!(trim.encode().len() <= HEAD_BYTES_MAX);
        let run =
            PartitionRun { first_id: most, first_number: u32::MAX - 20, stride: 1 << 30, count: 1 };
        let create = Head::Shard(ShardCommand::CreatePartitions {
            cluster_version: u64::MAX,
            topic_id: u64::MAX,
            runs: vec![run; ROWS_PER_ENTRY_MAX],
            settings: PartitionSettings { version: u64::MAX, ..PartitionSettings::default() },
        });
        assert!(create.encode().len() <= HEAD_BYTES_MAX);
        assert!(Head::decode(&create.encode()).is_ok());
    }

    #[test]
    fn creates_ten_thousand_partitions_with_one_small_entry() {
        let run = PartitionRun { first_id: 1, first_number: 0, stride: 1, count: 10_000 };
        let create = Head::Shard(ShardCommand::CreatePartitions {
            cluster_version: 1,
            topic_id: 1,
            runs: vec![run],
            settings: PartitionSettings::default(),
        });
        assert!(create.encode().len() < 100);
    }
}
