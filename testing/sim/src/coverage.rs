//! Coverage marks: situations that a run met. A simulation that never meets a situation does not
//! test it, so a series of runs must hit every mark.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// Situation that is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CoverageMark {
    LeaderChange,
    LeaderChangeWithBatchInFlight,
    LeaderCutOff,
    LeadershipTransfer,
    DuplicateSuppressed,
    OutcomeUnknown,
    OpenOutcomeApplied,
    SessionBroken,
    TornTailCut,
    PowerLoss,
    PowerLossMidWrite,
    PowerLossOfAll,
    ProcessKilled,
    GracefulStop,
    CrashDuringOpen,
    SyncFailed,
    WriteFailed,
    DiskStalled,
    HandedOverStalledDisk,
    DiskFullEntered,
    DiskFullLeft,
    PartitionSymmetric,
    PartitionOneWay,
    PartitionNonTransitive,
    MessagesHeld,
    MessagesLost,
    ConnectionReset,
    MessageTwice,
    MessageLate,
    MessageWithinAnother,
    SlowLink,
    ClockJump,
    SegmentRolled,
    Purge,
    Trimmed,
    ReaderSentToLogStart,
    RestartedFromCheckpoint,
    FiveNodes,
    ConditionMet,
    ConditionRefused,
    GapRefused,
    ReusedSequenceRefused,
    FalseBatchRefused,
    ElectionForced,
    NodeWiped,
    NodeReplaced,
    NodeAdded,
    NodeRemoved,
    Drained,
    SnapshotInstalled,
    DamageDone,
    SegmentLost,
    DamageNoticed,
    RepairDone,
    DiskFilledUp,
    ShardOpenedAgain,
    CopiesDamaged,
    CopiesDamagedInChange,
    CopiesDamagedInFetch,
    RepairedInPlace,
    WrongClockLed,
    RetentionByTime,
    ExpiredTokenRefused,
    TokenJudgedUnderWrongClock,
    ForeignProducerRefused,
    ForeignProducerRefusedByNewLeader,
    RevokedFetchEnded,
    RevokedHeartbeatEnded,
    RevokedSubscriptionEnded,
    TopicRecreated,
    ReaderToldOfRecreation,
    DeletionRepeated,
    GroupRebalanced,
    GroupPartitionMoved,
    GroupRecordRepeated,
    GroupCoordinatorChanged,
    GroupSessionExpired,
    GroupMemberLeft,
    GroupMemberAbsent,
    GroupMemberFenced,
    GroupCommitFenced,
    GroupLateCommitRefused,
    LateOffsetCommitRefused,
    LateSeekRefused,
    LateDeletionRefused,
    GroupNameTakenOver,
    GroupCommitOutOfRange,
    GroupTopicGrown,
    GroupTopicDeleted,
    GroupTopicRecreated,
    GroupReaderEnded,
    GroupSteady,
    TableCompacted,
    TombstoneForgotten,
    ReplicaMoveAsked,
    ReplicaMoveBegun,
    ReplicaMoved,
    ReplicaDeleted,
    NodeCordoned,
    RemovalRefused,
    MovesPaused,
    MoveCancelled,
    RackMove,
    SevenNodes,
    ShardsAdded,
    AddedShardOpened,
    AddedShardRead,
    AckedBatchRepeated,
    DownNodeReplaced,
    ShardSplit,
    SplitCancelled,
    CrashAtMoveStep,
    CrashAtSplitStep,
    NodeUpgraded,
    NodeRolledBack,
    OlderReleaseRefused,
    ProtocolRaised,
}

impl CoverageMark {
    pub const ALL: [Self; 117] = [
        Self::LeaderChange,
        Self::LeaderChangeWithBatchInFlight,
        Self::LeaderCutOff,
        Self::LeadershipTransfer,
        Self::DuplicateSuppressed,
        Self::OutcomeUnknown,
        Self::OpenOutcomeApplied,
        Self::SessionBroken,
        Self::TornTailCut,
        Self::PowerLoss,
        Self::PowerLossMidWrite,
        Self::PowerLossOfAll,
        Self::ProcessKilled,
        Self::GracefulStop,
        Self::CrashDuringOpen,
        Self::SyncFailed,
        Self::WriteFailed,
        Self::DiskStalled,
        Self::HandedOverStalledDisk,
        Self::DiskFullEntered,
        Self::DiskFullLeft,
        Self::PartitionSymmetric,
        Self::PartitionOneWay,
        Self::PartitionNonTransitive,
        Self::MessagesHeld,
        Self::MessagesLost,
        Self::ConnectionReset,
        Self::MessageTwice,
        Self::MessageLate,
        Self::MessageWithinAnother,
        Self::SlowLink,
        Self::ClockJump,
        Self::SegmentRolled,
        Self::Purge,
        Self::Trimmed,
        Self::ReaderSentToLogStart,
        Self::RestartedFromCheckpoint,
        Self::FiveNodes,
        Self::ConditionMet,
        Self::ConditionRefused,
        Self::GapRefused,
        Self::ReusedSequenceRefused,
        Self::FalseBatchRefused,
        Self::ElectionForced,
        Self::NodeWiped,
        Self::NodeReplaced,
        Self::NodeAdded,
        Self::NodeRemoved,
        Self::Drained,
        Self::SnapshotInstalled,
        Self::DamageDone,
        Self::SegmentLost,
        Self::DamageNoticed,
        Self::RepairDone,
        Self::DiskFilledUp,
        Self::ShardOpenedAgain,
        Self::CopiesDamaged,
        Self::CopiesDamagedInChange,
        Self::CopiesDamagedInFetch,
        Self::RepairedInPlace,
        Self::WrongClockLed,
        Self::RetentionByTime,
        Self::ExpiredTokenRefused,
        Self::TokenJudgedUnderWrongClock,
        Self::ForeignProducerRefused,
        Self::ForeignProducerRefusedByNewLeader,
        Self::RevokedFetchEnded,
        Self::RevokedHeartbeatEnded,
        Self::RevokedSubscriptionEnded,
        Self::TopicRecreated,
        Self::ReaderToldOfRecreation,
        Self::DeletionRepeated,
        Self::GroupRebalanced,
        Self::GroupPartitionMoved,
        Self::GroupRecordRepeated,
        Self::GroupCoordinatorChanged,
        Self::GroupSessionExpired,
        Self::GroupMemberLeft,
        Self::GroupMemberAbsent,
        Self::GroupMemberFenced,
        Self::GroupCommitFenced,
        Self::GroupLateCommitRefused,
        Self::LateOffsetCommitRefused,
        Self::LateSeekRefused,
        Self::LateDeletionRefused,
        Self::GroupNameTakenOver,
        Self::GroupCommitOutOfRange,
        Self::GroupTopicGrown,
        Self::GroupTopicDeleted,
        Self::GroupTopicRecreated,
        Self::GroupReaderEnded,
        Self::GroupSteady,
        Self::TableCompacted,
        Self::TombstoneForgotten,
        Self::ReplicaMoveAsked,
        Self::ReplicaMoveBegun,
        Self::ReplicaMoved,
        Self::ReplicaDeleted,
        Self::NodeCordoned,
        Self::RemovalRefused,
        Self::MovesPaused,
        Self::MoveCancelled,
        Self::RackMove,
        Self::SevenNodes,
        Self::ShardsAdded,
        Self::AddedShardOpened,
        Self::AddedShardRead,
        Self::AckedBatchRepeated,
        Self::DownNodeReplaced,
        Self::ShardSplit,
        Self::SplitCancelled,
        Self::CrashAtMoveStep,
        Self::CrashAtSplitStep,
        Self::NodeUpgraded,
        Self::NodeRolledBack,
        Self::OlderReleaseRefused,
        Self::ProtocolRaised,
    ];
}

/// Counts of each mark. Clones share the counts.
#[derive(Debug, Clone, Default)]
pub struct CoverageMarks(Arc<Mutex<BTreeMap<CoverageMark, u64>>>);

impl CoverageMarks {
    pub fn hit(&self, mark: CoverageMark) {
        self.add(mark, 1);
    }

    pub fn add(&self, mark: CoverageMark, count: u64) {
        let mut marks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *marks.entry(mark).or_default() += count;
    }

    pub fn get(&self, mark: CoverageMark) -> u64 {
        let marks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        marks.get(&mark).copied().unwrap_or(0)
    }

    /// Adds other counts to these.
    pub fn merge(&self, other: &Self) {
        for mark in CoverageMark::ALL {
            self.add(mark, other.get(mark));
        }
    }
}

/// Marks that are counted by log messages of the nodes, by the start of the message.
///
/// A message that is reworded must be changed here too. Otherwise its mark stays at zero, which
/// `--marks` reports as a failure.
const LOGGED: [(&str, CoverageMark); 11] = [
    ("truncated the last group of the log", CoverageMark::TornTailCut),
    ("refusing appends, no majority responds", CoverageMark::LeaderCutOff),
    ("disk stalls, transferring leadership", CoverageMark::HandedOverStalledDisk),
    ("installed a snapshot and the fetched records", CoverageMark::SnapshotInstalled),
    ("found damage in a log", CoverageMark::DamageNoticed),
    ("repaired the replica", CoverageMark::RepairDone),
    ("reopened the shard", CoverageMark::ShardOpenedAgain),
    ("repaired a segment in place", CoverageMark::RepairedInPlace),
    ("moved a replica", CoverageMark::ReplicaMoved),
    ("deleted the replica", CoverageMark::ReplicaDeleted),
    ("removing members past their session timeouts", CoverageMark::GroupSessionExpired),
];

/// Tracing layer that counts marks by log messages.
#[derive(Debug)]
pub struct CoverageLayer(pub CoverageMarks);

impl<S: Subscriber> Layer<S> for CoverageLayer {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        if !event.metadata().target().starts_with("helix_server") {
            return;
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        for (text, mark) in LOGGED {
            if message.0.starts_with(text) {
                self.0.hit(mark);
            }
        }
    }
}

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}
