//! Arguments of `helix backup` and `helix restore`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::completion;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct BackupArgs {
    #[command(subcommand)]
    pub(crate) command: Option<BackupSubcommand>,
    #[command(flatten)]
    pub(crate) create: BackupCreateArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BackupCreateArgs {
    /// Directory of the backup; an existing backup is extended
    #[arg(required = true)]
    pub(crate) dir: Option<PathBuf>,
    /// Topic to back up; repeatable [default: all]
    #[arg(long = "topic", value_name = "TOPIC", add = completion::topics())]
    pub(crate) topics: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BackupSubcommand {
    /// Verify every byte of a backup; exit code 11 on damage
    Verify {
        /// Directory of the backup
        dir: PathBuf,
        /// Topic to verify; repeatable [default: all]
        #[arg(long = "topic", value_name = "TOPIC")]
        topics: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// Directory of the backup
    pub(crate) dir: PathBuf,
    /// Topic to restore; repeatable [default: all]
    #[arg(long = "topic", value_name = "TOPIC")]
    pub(crate) topics: Vec<String>,
    /// New name, when restoring one topic [default: its old name]
    #[arg(long = "as", value_name = "NAME")]
    pub(crate) new_name: Option<String>,
    /// Keep the offsets of the records
    ///
    /// The offsets below the first record are filled with empty records of two bytes, which are
    /// trimmed again.
    #[arg(long)]
    pub(crate) keep_offsets: bool,
    /// Resume an interrupted restore
    #[arg(long)]
    pub(crate) resume: bool,
}
