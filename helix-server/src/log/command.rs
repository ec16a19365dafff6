//! Control entries: commands that change a shard or the cluster's state.
//! `command_record` encodes them for the log.

use super::{
    AccessCommand, CleanupRound, FencingToken, GroupCommand, MemberCommand, PartitionId,
    ProducerOwner, SplitRule,
};
pub use crate::records::{PartitionRun, PartitionSettings};

/// Largest number of rows (partition runs, trims) in one control entry, so that its head fits the
/// log.
pub const ROWS_PER_ENTRY_MAX: usize = 1_500;

/// A change of a data shard. A repeated command changes nothing; a conditional one may then be
/// refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShardCommand {
    /// Adds missing partitions. `cluster_version` is the version of the cluster's state that the
    /// proposer saw. A version below that of a drop changes nothing, so that a node with an old
    /// view cannot restore a dropped topic.
    CreatePartitions {
        cluster_version: u64,
        topic_id: u64,
        runs: Vec<PartitionRun>,
        settings: PartitionSettings,
    },
    /// Updates the settings of the topic's partitions here, unless theirs have this version or a
    /// later one.
    UpdateSettings { topic_id: u64, settings: PartitionSettings },
    /// Removes the topic's partitions permanently; their ids are never reused.
    DropTopic { cluster_version: u64, topic_id: u64 },
    /// Raises log starts, never above the high watermark.
    Trim { starts: Vec<(PartitionId, u64)> },
    /// Allows each replica to purge the log up to this index, once its own checkpoint covers it.
    /// No replica needs those entries to replicate or to catch up.
    Release { index: u64 },
    /// Sets the fencing token, if the current one is `expected` or `expected` is `None`. The empty
    /// token removes it.
    SetFencingToken { partition: PartitionId, expected: Option<FencingToken>, token: FencingToken },
    /// Decides what compaction by key may remove, up to [`ROWS_PER_ENTRY_MAX`] partitions. Proposed
    /// from protocol [`COMPACTION`](crate::protocol::COMPACTION) on, as the next one.
    CleanUp { rounds: Vec<(PartitionId, CleanupRound)> },
    /// Records that every replica is clean below these offsets at this agreed time.
    Cleaned { partitions: Vec<(PartitionId, u64)>, time_us: u64 },
    /// Changes a consumer group. Proposed from protocol [`GROUPS`](crate::protocol::GROUPS) on.
    Group(Box<GroupCommand>),
    /// Begins a split. Refuses batches of the partitions that move to the shard `target`. These are
    /// proposed from protocol [`SHARD_SPLITS`](crate::protocol::SHARD_SPLITS) on.
    Split { id: u64, target: u64, rule: SplitRule },
    /// Lets the partitions of a split take batches again; a later copy of `Split` has no effect.
    CancelSplit { id: u64 },
    /// Removes the partitions that a split has moved.
    FinishSplit { id: u64 },
}

/// A change of the cluster's own state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClusterCommand {
    RegisterNode {
        node_id: u64,
        endpoint: String,
        version: String,
        /// Address at which other nodes can dial it, by its own view; may be empty.
        peer_addr: String,
    },
    /// Adds shards to the pool.
    RegisterShards {
        shards: Vec<u64>,
    },
    CreateTopic(CreateTopic),
    /// Updates the settings that `fields` names. Here and below a topic must have the id
    /// `topic_id`; 0 accepts any.
    UpdateTopic {
        name: String,
        topic_id: u64,
        settings: PartitionSettings,
        fields: SettingsMask,
    },
    /// Raises the number of partitions to `partition_count`.
    AddPartitions {
        name: String,
        topic_id: u64,
        partition_count: u32,
    },
    DeleteTopic {
        name: String,
        topic_id: u64,
    },
    /// Leases producer ids to the requesting node, which then assigns them to their owner.
    LeaseProducerIds {
        count: u32,
        owner: ProducerOwner,
    },
    /// Returns the id of a named producer with its next epoch, which the owner gets.
    InitProducer {
        name: String,
        owner: ProducerOwner,
    },
    Members(MemberCommand),
    /// Raises the protocol version, which every member speaks.
    RaiseProtocol {
        version: u32,
    },
    /// Gives each slot of consumer groups a shard; without effect if they have some. Proposed from
    /// protocol [`GROUPS`](crate::protocol::GROUPS) on.
    AssignGroupSlots,
    /// Changes tokens or rules. Proposed from protocol [`ACCESS`](crate::protocol::ACCESS) on.
    Access(AccessCommand),
}

/// Definition of a new topic.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CreateTopic {
    pub name: String,
    pub partition_count: u32,
    pub replication_factor: u32,
    /// `version` is set by apply.
    pub settings: PartitionSettings,
    /// Shards to spread over, in this order. The topic's id selects the first one.
    pub shards: Vec<u64>,
    pub requested_at_us: u64,
}

/// Time that readers have to see a tombstone, unless the topic sets another: a day.
const TOMBSTONE_RETENTION_US_DEFAULT: u64 = 24 * 3_600_000_000;

/// Numbers of `CleanupPolicy` with which a topic is compacted by key.
const CLEANUP_COMPACT: i32 = 2;
const CLEANUP_COMPACT_AND_DELETE: i32 = 3;

/// Numbers of `BatchFormat` with which a topic takes batches of version 2.
const BATCH_FORMAT_KAFKA: i32 = 2;
const BATCH_FORMAT_ANY: i32 = 3;

/// Set of fields of [`PartitionSettings`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SettingsMask(pub u32);

impl SettingsMask {
    pub const RETENTION_TIME: Self = Self(1);
    pub const RETENTION_BYTES: Self = Self(1 << 1);
    pub const MAX_BATCH_BYTES: Self = Self(1 << 2);
    pub const MAX_RECORD_BYTES: Self = Self(1 << 3);
    pub const DEFAULT_DURABILITY: Self = Self(1 << 4);
    pub const MIN_DURABILITY: Self = Self(1 << 5);
    /// From protocol version 4 on.
    pub const ALLOWED_COMPRESSION: Self = Self(1 << 6);
    /// From protocol version 6 on.
    pub const VALIDATE_RECORDS: Self = Self(1 << 7);
    /// These two from protocol version 7 on.
    pub const CLEANUP: Self = Self(1 << 8);
    pub const TOMBSTONE_RETENTION_TIME: Self = Self(1 << 9);
    /// From protocol version 8 on.
    pub const BATCH_FORMAT: Self = Self(1 << 10);
    pub const ALL: Self = Self((1 << 11) - 1);

    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl std::ops::BitOr for SettingsMask {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl std::ops::BitOrAssign for SettingsMask {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

impl PartitionSettings {
    /// Replaces the fields in `fields` by those of `other`. Keeps the version.
    pub fn with(mut self, other: &Self, fields: SettingsMask) -> Self {
        if fields.contains(SettingsMask::RETENTION_TIME) {
            self.retention_us = other.retention_us;
        }
        if fields.contains(SettingsMask::RETENTION_BYTES) {
            self.retention_bytes = other.retention_bytes;
        }
        if fields.contains(SettingsMask::MAX_BATCH_BYTES) {
            self.max_batch_bytes = other.max_batch_bytes;
        }
        if fields.contains(SettingsMask::MAX_RECORD_BYTES) {
            self.max_record_bytes = other.max_record_bytes;
        }
        if fields.contains(SettingsMask::DEFAULT_DURABILITY) {
            self.default_durability = other.default_durability;
        }
        if fields.contains(SettingsMask::MIN_DURABILITY) {
            self.min_durability = other.min_durability;
        }
        if fields.contains(SettingsMask::ALLOWED_COMPRESSION) {
            self.allowed_compression = other.allowed_compression;
        }
        if fields.contains(SettingsMask::VALIDATE_RECORDS) {
            self.takes_any_records = other.takes_any_records;
        }
        if fields.contains(SettingsMask::CLEANUP) {
            self.cleanup = other.cleanup;
        }
        if fields.contains(SettingsMask::TOMBSTONE_RETENTION_TIME) {
            self.tombstone_retention_us = other.tombstone_retention_us;
        }
        if fields.contains(SettingsMask::BATCH_FORMAT) {
            self.batch_format = other.batch_format;
        }
        self
    }

    /// Returns whether batches of version 1 are taken. A number that this version does not know
    /// takes neither.
    pub fn takes_helix_batches(&self) -> bool {
        matches!(self.batch_format, 0 | BATCH_FORMAT_ANY)
    }

    /// Returns whether batches of version 2 are taken.
    pub fn takes_kafka_batches(&self) -> bool {
        matches!(self.batch_format, BATCH_FORMAT_KAFKA | BATCH_FORMAT_ANY)
    }

    /// Returns whether only the latest record of each key is kept.
    pub fn is_compacted(&self) -> bool {
        matches!(self.cleanup, CLEANUP_COMPACT | CLEANUP_COMPACT_AND_DELETE)
    }

    /// Returns whether retention deletes the oldest records.
    pub fn is_deleted_by_retention(&self) -> bool {
        self.cleanup != CLEANUP_COMPACT
    }

    /// Returns how long a tombstone stays once everything older of its key is gone.
    pub fn tombstones_kept_us(&self) -> u64 {
        self.tombstone_retention_us.unwrap_or(TOMBSTONE_RETENTION_US_DEFAULT)
    }
}

impl PartitionRun {
    /// Largest number of partitions in all runs of an entry, or of a shard: the cluster's limit.
    /// It bounds the memory that a small entry can make a shard allocate.
    pub const COUNT_MAX: u32 = 1_000_000;

    /// Returns whether each run is valid, and their partitions are within [`Self::COUNT_MAX`].
    pub(super) fn are_valid<'a>(mut runs: impl Iterator<Item = &'a Self>) -> bool {
        let mut count = 0;
        runs.all(|run| {
            count += u64::from(run.count);
            run.is_valid() && count <= u64::from(Self::COUNT_MAX)
        })
    }

    /// Returns the number and id of each partition.
    pub fn partitions(self) -> impl Iterator<Item = (u32, PartitionId)> {
        debug_assert!(self.is_valid());
        (0..self.count).map_while(move |i| {
            let step = i.checked_mul(self.stride)?;
            let number = self.first_number.checked_add(step)?;
            Some((number, PartitionId(self.first_id.checked_add(u64::from(step))?)))
        })
    }

    pub(super) fn is_valid(&self) -> bool {
        let last = self.count.checked_sub(1).and_then(|steps| steps.checked_mul(self.stride));
        last.is_some_and(|step| {
            self.first_id > 0
                && self.stride > 0
                && self.count <= Self::COUNT_MAX
                && self.first_number.checked_add(step).is_some()
                && self.first_id.checked_add(u64::from(step)).is_some()
        })
    }

    /// Covers partitions, in the order of their numbers, with runs; greedily, so with the fewest.
    pub(super) fn cover(partitions: &[(u32, PartitionId)]) -> Vec<Self> {
        let mut runs: Vec<Self> = Vec::new();
        for &(number, id) in partitions {
            if !runs.last_mut().is_some_and(|run| run.extend(number, id)) {
                runs.push(Self { first_id: id.0, first_number: number, stride: 1, count: 1 });
            }
        }
        runs
    }

    /// Appends a partition if it fits. A run of one partition takes its stride from the second.
    fn extend(&mut self, number: u32, id: PartitionId) -> bool {
        let stride = if self.count == 1 { number - self.first_number } else { self.stride };
        let step = self.count.checked_mul(stride);
        let fits = step.is_some_and(|step| {
            self.count < Self::COUNT_MAX
                && self.first_number.checked_add(step) == Some(number)
                && self.first_id.checked_add(u64::from(step)) == Some(id.0)
        });
        if fits {
            self.stride = stride;
            self.count += 1;
        }
        fits
    }
}

impl ShardCommand {
    pub fn name(&self) -> &'static str {
        match self {
            Self::CreatePartitions { .. } => "create partitions",
            Self::UpdateSettings { .. } => "update settings",
            Self::DropTopic { .. } => "drop topic",
            Self::Trim { .. } => "trim",
            Self::Release { .. } => "release",
            Self::SetFencingToken { .. } => "set fencing token",
            Self::CleanUp { .. } => "clean up",
            Self::Cleaned { .. } => "cleaned",
            Self::Group(command) => command.change.name(),
            Self::Split { .. } => "split",
            Self::CancelSplit { .. } => "cancel split",
            Self::FinishSplit { .. } => "finish split",
        }
    }
}

impl ClusterCommand {
    pub fn name(&self) -> &'static str {
        match self {
            Self::RegisterNode { .. } => "register node",
            Self::RegisterShards { .. } => "register shards",
            Self::CreateTopic(_) => "create topic",
            Self::UpdateTopic { .. } => "update topic",
            Self::AddPartitions { .. } => "add partitions",
            Self::DeleteTopic { .. } => "delete topic",
            Self::LeaseProducerIds { .. } => "lease producer ids",
            Self::InitProducer { .. } => "init producer",
            Self::Members(command) => command.name(),
            Self::RaiseProtocol { .. } => "raise protocol",
            Self::AssignGroupSlots => "assign group slots",
            Self::Access(command) => command.name(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_lists_numbers_and_ids_at_its_stride() {
        let run = PartitionRun { first_id: 101, first_number: 1, stride: 3, count: 3 };
        let partitions: Vec<_> = run.partitions().map(|(number, id)| (number, id.0)).collect();
        assert_eq!(partitions, [(1, 101), (4, 104), (7, 107)]);
    }

    #[test]
    fn cover_joins_partitions_at_one_stride() {
        let run = PartitionRun { first_id: 101, first_number: 1, stride: 3, count: 3 };
        let other = PartitionRun { first_id: 900, first_number: 8, stride: 1, count: 2 };
        let partitions: Vec<_> = run.partitions().chain(other.partitions()).collect();
        assert_eq!(PartitionRun::cover(&partitions), [run, other]);
        assert_eq!(PartitionRun::cover(&[]), []);
    }

    #[test]
    fn rejects_runs_out_of_bounds() {
        let run = PartitionRun { first_id: 1, first_number: 0, stride: 1, count: 1 };
        assert!(run.is_valid());
        assert!(!PartitionRun { first_id: 0, ..run }.is_valid());
        assert!(!PartitionRun { stride: 0, ..run }.is_valid());
        assert!(!PartitionRun { count: 0, ..run }.is_valid());
        assert!(!PartitionRun { count: u32::MAX, ..run }.is_valid());
        assert!(!PartitionRun { first_number: u32::MAX, count: 2, ..run }.is_valid());
        assert!(!PartitionRun { first_id: u64::MAX, count: 2, ..run }.is_valid());
        let many = PartitionRun { count: PartitionRun::COUNT_MAX, ..run };
        assert!(PartitionRun::are_valid([many].iter()));
        assert!(!PartitionRun::are_valid([many, run].iter()), "together they are too many");
    }

    #[test]
    fn mask_updates_only_its_fields() {
        let old =
            PartitionSettings { max_batch_bytes: 1, max_record_bytes: 2, ..Default::default() };
        let new = PartitionSettings {
            retention_us: Some(5),
            retention_bytes: Some(6),
            max_batch_bytes: 7,
            max_record_bytes: 8,
            default_durability: 2,
            min_durability: 3,
            version: 9,
            allowed_compression: 2,
            takes_any_records: true,
            cleanup: 3,
            tombstone_retention_us: Some(4),
            batch_format: 3,
        };
        assert_eq!(old.with(&new, SettingsMask(0)), old);
        let some = SettingsMask::RETENTION_TIME | SettingsMask::MAX_BATCH_BYTES;
        let expected = PartitionSettings { retention_us: Some(5), max_batch_bytes: 7, ..old };
        assert_eq!(old.with(&new, some), expected);
        let all = PartitionSettings { version: 0, ..new };
        assert_eq!(old.with(&new, SettingsMask::ALL), all);
    }
}
