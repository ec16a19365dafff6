//! Durability levels: their names on the command line and in results.

use clap::ValueEnum;
use helix_proto::log::v1::Durability;

/// A durability level as a command-line value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DurabilityArg {
    /// Synced to stable storage by a majority
    QuorumSynced,
    /// In the log of a majority, not necessarily synced
    QuorumWritten,
    /// In the log of the leader; a leader crash can lose it
    LeaderWritten,
    /// Received by the leader; the ack waits for nothing else
    None,
}

impl From<DurabilityArg> for Durability {
    fn from(name: DurabilityArg) -> Self {
        match name {
            DurabilityArg::QuorumSynced => Self::QuorumSynced,
            DurabilityArg::QuorumWritten => Self::QuorumWritten,
            DurabilityArg::LeaderWritten => Self::LeaderWritten,
            DurabilityArg::None => Self::None,
        }
    }
}

/// Returns the name of a durability without its prefix: `QUORUM_SYNCED`.
pub(crate) fn durability_name(durability: Durability) -> &'static str {
    let name = durability.as_str_name();
    name.strip_prefix("DURABILITY_").unwrap_or(name)
}
