//! Arguments of `helix backup` and `helix restore`.
//! Values are parsed here; nothing is done here.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct BackupArgs {
    #[command(subcommand)]
    pub(crate) command: Option<BackupCommand>,
    #[command(flatten)]
    pub(crate) create: BackupCreateArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BackupCreateArgs {
    /// Folder of the backup. One that holds a backup of this cluster gets what has come since
    #[arg(required = true)]
    pub(crate) dir: Option<PathBuf>,
    /// Topic; may be given more than once [default: all]
    #[arg(long = "topic", value_name = "TOPIC")]
    pub(crate) topics: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BackupCommand {
    /// Read every byte of a backup and check it; exit code 11 if anything is damaged
    Verify {
        /// Folder of the backup
        dir: PathBuf,
        /// Topic; may be given more than once [default: all]
        #[arg(long = "topic", value_name = "TOPIC")]
        topics: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// Folder of the backup
    pub(crate) dir: PathBuf,
    /// Topic; may be given more than once [default: all]
    #[arg(long = "topic", value_name = "TOPIC")]
    pub(crate) topics: Vec<String>,
    /// Name for the one topic that is restored [default: the one that it had]
    #[arg(long = "as", value_name = "NAME")]
    pub(crate) new_name: Option<String>,
    /// Give the records the offsets that they had. What was not kept below them is filled with
    /// empty records, two bytes each, and trimmed
    #[arg(long)]
    pub(crate) keep_offsets: bool,
    /// Go on with a restore that was interrupted
    #[arg(long)]
    pub(crate) resume: bool,
}
