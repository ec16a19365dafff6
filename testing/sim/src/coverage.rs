//! What a run has met. A simulation that never meets what it is there for shows nothing: over a
//! series of runs every mark must have been hit.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// Everything that is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mark {
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
}

impl Mark {
    pub const ALL: [Self; 54] = [
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
    ];
}

/// Counts of one run, or of several. Clones are the same counts.
#[derive(Debug, Clone, Default)]
pub struct Marks(Arc<Mutex<BTreeMap<Mark, u64>>>);

impl Marks {
    pub fn hit(&self, mark: Mark) {
        self.add(mark, 1);
    }

    pub fn add(&self, mark: Mark, count: u64) {
        let mut marks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *marks.entry(mark).or_default() += count;
    }

    pub fn get(&self, mark: Mark) -> u64 {
        let marks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        marks.get(&mark).copied().unwrap_or(0)
    }

    /// Adds the counts of another run.
    pub fn take(&self, other: &Self) {
        for mark in Mark::ALL {
            self.add(mark, other.get(mark));
        }
    }
}

/// Marks that only the nodes' own log tells of, by how a message begins. One that is worded anew
/// must be so here too: otherwise its mark stays at zero, which is a failure.
const LOGGED: [(&str, Mark); 7] = [
    ("cut a torn, unacknowledged tail", Mark::TornTailCut),
    ("no majority answers; appends are refused", Mark::LeaderCutOff),
    ("the disk stalls; handing over", Mark::HandedOverStalledDisk),
    ("the log goes on after entry", Mark::SnapshotInstalled),
    ("part of a log is damaged", Mark::DamageNoticed),
    ("repaired: the replica has all that it had", Mark::RepairDone),
    ("the shard is open again", Mark::ShardOpenedAgain),
];

/// Listens to what the nodes log.
#[derive(Debug)]
pub struct Listener(pub Marks);

impl<S: Subscriber> Layer<S> for Listener {
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
