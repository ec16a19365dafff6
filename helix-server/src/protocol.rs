//! The protocol versions of this program. A version covers all that nodes must agree on: the
//! messages between them, and the format of their log entries and snapshots.
//!
//! A connection uses the newest version that both nodes speak. Every replica reads a log entry,
//! also a replica that is down now, so entries follow the cluster's protocol version. That version
//! is part of the cluster's state and is raised once every member speaks the next one. From then
//! on, a node that does not speak it cannot join.
//!
//! A change of anything that nodes agree on is a new version. Code uses it once
//! [`crate::cluster::Cluster::protocol`] has reached it, and keeps the forms of all versions that
//! [`ProtocolVersions::OWN`] names.

use std::fmt;

/// Protocol version of a cluster that has never raised it.
pub const FIRST: u32 = 2;

/// First version in which checkpoints and snapshots list the producers that a shard forgot.
pub const FORGOTTEN_PRODUCERS: u32 = 3;

/// First version in which commands that change or delete a topic name its id.
pub const TOPIC_IDS: u32 = 4;

/// First version in which logs have compressed batches and topics name the codecs that they allow.
pub const COMPRESSION: u32 = 4;

/// First version with consumer groups: their entries, checkpoints and messages.
pub const GROUPS: u32 = 5;

/// First version with access control: commands for tokens and rules, and their part of the
/// cluster's state.
pub const ACCESS: u32 = 6;

/// First version in which appended records are validated, unless their topic says otherwise.
pub const RECORD_VALIDATION: u32 = 6;

/// First version with compaction by key: the setting of topics, its entries and its checkpoints.
pub const COMPACTION: u32 = 7;

/// First version in which producer identities have owners, and batches of producers a checksum:
/// in heads, checkpoints and the cluster's state.
pub const PRODUCER_OWNERS: u32 = 8;

/// First version in which commits of groups are judged by their order, and groups forget topics.
pub const COMMIT_ORDER: u32 = 8;

/// First version in which logs have batches of version 2, and topics name the versions that they
/// take.
pub const KAFKA_BATCHES: u32 = 8;

/// First version in which shards have replicas on some of the members: the placement in the
/// cluster's state, and the requests of nodes without a replica.
pub const PLACEMENT: u32 = 9;

/// First version in which shards are added while the cluster runs, and new partitions go to the
/// shards with the fewest.
pub const MORE_SHARDS: u32 = 10;
/// First version in which moves of replicas can be paused.
pub const PAUSED_MOVES: u32 = 10;

/// First version in which the cluster's state has the racks of nodes.
pub const RACKS: u32 = 10;

/// First version in which shards are split: their entries, checkpoints and messages.
pub const SHARD_SPLITS: u32 = 11;

/// First version in which shards, and so topics, have their own number of replicas.
pub const REPLICATION_FACTORS: u32 = 11;

/// First version in which a new shard is given up once too many of its replicas are gone.
pub const LOST_NEW_SHARDS: u32 = 11;

/// First version in which replicas move off nodes that have not responded for long.
pub const DOWN_NODES: u32 = 11;

/// First version that is raised only once every member has recorded it in its data directory, so
/// that older programs refuse to start there.
pub const RECORDED_VERSIONS: u32 = 12;

/// A range of protocol versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProtocolVersions {
    pub oldest: u32,
    pub newest: u32,
}

impl ProtocolVersions {
    /// The versions that this program speaks. Version 1 had no members and no peer addresses.
    pub const OWN: Self = Self { oldest: 2, newest: 12 };

    pub fn contains(self, version: u32) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }

    /// Returns why a program with these versions cannot start on data: what "needs" or "uses" a
    /// version.
    pub fn refusal(self, what: &str, used: u32) -> String {
        format!(
            "{what} protocol version {used}, but this Helix, {}, speaks {self}; start a \
             release that speaks {used}",
            env!("CARGO_PKG_VERSION")
        )
    }

    /// Returns the newest version in both ranges.
    pub fn common(self, other: Self) -> Option<u32> {
        let newest = self.newest.min(other.newest);
        (self.contains(newest) && other.contains(newest)).then_some(newest)
    }
}

impl fmt::Display for ProtocolVersions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { oldest, newest } if oldest == newest => write!(f, "version {oldest}"),
            Self { oldest, newest } => write!(f, "versions {oldest} to {newest}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_returns_the_newest_shared_version() {
        let versions = |oldest, newest| ProtocolVersions { oldest, newest };
        assert_eq!(versions(2, 3).common(versions(2, 2)), Some(2));
        assert_eq!(versions(2, 3).common(versions(3, 4)), Some(3));
        assert_eq!(versions(2, 3).common(versions(4, 5)), None);
        assert_eq!(versions(4, 5).common(versions(2, 3)), None);
        assert_eq!(versions(2, 3).common(versions(3, 1)), None, "an empty range");
        assert_eq!(versions(2, 2).common(ProtocolVersions::default()), None);
    }

    #[test]
    fn this_program_speaks_the_first_version() {
        assert!(ProtocolVersions::OWN.contains(FIRST));
    }
}
