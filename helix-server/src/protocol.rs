//! Which protocol versions this program speaks. A version stands for all that nodes have to agree
//! on: the messages between them, and what stands in their logs and snapshots.
//!
//! Two nodes talk in the newest version that both speak. What goes into a log is read by every
//! replica, also by one that is away: it follows the cluster's protocol, which is part of the
//! cluster's state and is raised once every member speaks the next one. From then on nobody is let
//! in who does not. A change of anything that nodes agree on is a new version: it is used where
//! [`crate::cluster::Cluster::protocol`] has come to it, and the way before is kept for a version.

use std::fmt;

/// Protocol of a cluster that has never raised it.
pub const FIRST: u32 = 2;

/// From this version on checkpoints and snapshots say which producers a shard has forgotten.
pub const FORGOTTEN_PRODUCERS: u32 = 3;

/// A range of versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Versions {
    pub oldest: u32,
    pub newest: u32,
}

impl Versions {
    /// What this program speaks. Version 1 knew no members and no peer addresses.
    pub const OWN: Self = Self { oldest: 2, newest: 3 };

    pub fn contains(self, version: u32) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }

    /// The newest that both speak.
    pub fn common(self, other: Self) -> Option<u32> {
        let newest = self.newest.min(other.newest);
        (self.contains(newest) && other.contains(newest)).then_some(newest)
    }
}

impl fmt::Display for Versions {
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
    fn the_newest_common_version_is_spoken() {
        let versions = |oldest, newest| Versions { oldest, newest };
        assert_eq!(versions(2, 3).common(versions(2, 2)), Some(2));
        assert_eq!(versions(2, 3).common(versions(3, 4)), Some(3));
        assert_eq!(versions(2, 3).common(versions(4, 5)), None);
        assert_eq!(versions(4, 5).common(versions(2, 3)), None);
        assert_eq!(versions(2, 3).common(versions(3, 1)), None, "no range at all");
        assert_eq!(versions(2, 2).common(Versions::default()), None);
    }

    #[test]
    fn this_program_reads_what_a_cluster_begins_with() {
        assert!(Versions::OWN.contains(FIRST));
    }
}
