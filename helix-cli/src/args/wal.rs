//! Arguments of `helix wal`.

use std::path::PathBuf;

use clap::{Subcommand, ValueEnum};

#[derive(Debug, Subcommand)]
pub(crate) enum WalSubcommand {
    /// List the segments of a log
    Inspect {
        /// Data directory of a node, or one of its shard-N directories
        dir: PathBuf,
        /// Count batches by compression; reads the whole log
        #[arg(long)]
        codecs: bool,
    },
    /// Verify every byte of a log; exit code 11 on damage
    Verify {
        /// Data directory of a node, or one of its shard-N directories
        dir: PathBuf,
    },
    /// Drop the damaged end of a log that has no other replica
    ///
    /// Without --drop, only shows what would be dropped.
    #[command(after_help = WAL_REPAIR)]
    Repair {
        /// Data directory of a node, or one of its shard-N directories
        dir: PathBuf,
        /// Part of the log to drop
        #[arg(long, requires = "yes")]
        drop: Option<DroppablePart>,
        /// Confirm; dropped records cannot be recovered
        #[arg(long, requires = "drop")]
        yes: bool,
    },
}

/// A part of a log that `helix wal repair` can drop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DroppablePart {
    /// Unsealed entries from the first damaged byte on
    End,
}

const WAL_REPAIR: &str = "\
Repair is the last resort for a shard with one replica. Do not use it in a cluster of several
nodes: there, the other nodes rebuild a damaged replica, and a truncated replica would have lost
entries that it acknowledged. Copy the directory first. The dropped records were acknowledged, and
their offsets will be assigned to other records.

A log that does not open for another reason (a damaged state file, a missing segment) cannot be
repaired; restore a backup. A damaged sealed segment does not prevent a log from opening; trim the
partitions past the damage that `helix wal verify` and read errors name.";
