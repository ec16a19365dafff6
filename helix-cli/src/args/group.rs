//! Arguments of `helix group`.

use clap::{Args, Subcommand};

use crate::completion;
use crate::partitions::PartitionList;
use crate::position::{self, PositionArg};

#[derive(Debug, Subcommand)]
pub(crate) enum GroupSubcommand {
    /// List consumer groups
    List,
    /// Show the members, partitions and lag of a group
    ///
    /// Tables shorten member ids; `-o wide` prints them whole.
    Describe {
        /// Name of the group
        #[arg(add = completion::groups())]
        group: String,
    },
    /// Explain for each partition why no records arrive
    Explain {
        /// Name of the group
        #[arg(add = completion::groups())]
        group: String,
    },
    /// Show the last changes of a group's offsets
    History {
        /// Name of the group
        #[arg(add = completion::groups())]
        group: String,
        /// Topic [default: all]
        #[arg(add = completion::topics())]
        topic: Option<String>,
    },
    /// Set the offsets of a group in a topic
    ///
    /// Creates the group. Refused while the group has members. `--undo` takes back the last seek of
    /// each partition; a second `--undo` restores it. A seek removes the metadata of the commits,
    /// and `--undo` does not restore it.
    Seek(GroupSeekArgs),
    /// Move all committed offsets of a group
    ///
    /// Refused while the group has members. `helix group seek --undo` takes it back.
    Reset(GroupResetArgs),
    /// Forget the offsets of a group in one topic
    ///
    /// Also in a deleted topic. Refused while members subscribe to the topic. A later reader starts
    /// there as in a new group. A group without members and without other offsets is deleted.
    Forget {
        /// Name of the group
        #[arg(add = completion::groups())]
        group: String,
        /// Topic
        #[arg(add = completion::topics())]
        topic: String,
        /// Show the offsets only; change nothing
        #[arg(long)]
        dry_run: bool,
        /// Skip the confirmation
        #[arg(long)]
        yes: bool,
    },
    /// Delete a group and its offsets
    ///
    /// Refused while the group has members.
    Delete {
        /// Name of the group
        #[arg(add = completion::groups())]
        group: String,
        /// Skip the confirmation
        #[arg(long)]
        yes: bool,
    },
}

impl GroupSubcommand {
    /// Returns the group that the command is about.
    pub(crate) fn group(&self) -> Option<&str> {
        match self {
            Self::List => None,
            Self::Describe { group }
            | Self::Explain { group }
            | Self::History { group, .. }
            | Self::Forget { group, .. }
            | Self::Delete { group, .. } => Some(group),
            Self::Seek(args) => Some(&args.group),
            Self::Reset(args) => Some(&args.group),
        }
    }

    /// Returns the topic that the command is about.
    pub(crate) fn topic(&self) -> Option<&str> {
        match self {
            Self::History { topic, .. } => topic.as_deref(),
            Self::Forget { topic, .. } => Some(topic),
            Self::Seek(args) => args.topic.as_deref(),
            _ => None,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct GroupSeekArgs {
    /// Name of the group
    #[arg(add = completion::groups())]
    pub(crate) group: String,
    /// Topic; optional with --undo
    #[arg(required_unless_present_any = ["undo", "schema"], add = completion::topics())]
    pub(crate) topic: Option<String>,
    #[arg(
        long,
        value_name = "POSITION",
        allow_hyphen_values = true,
        required_unless_present_any = ["undo", "schema"],
        conflicts_with = "undo",
        help = "Next record to read: a position as in `consume --from`",
        long_help = position::help("Next record to read")
    )]
    pub(crate) to: Option<PositionArg>,
    /// Partitions [default: all]
    #[arg(
        short,
        long,
        value_name = "N-M,...",
        default_value = "",
        hide_default_value = true,
        conflicts_with = "undo"
    )]
    pub(crate) partitions: PartitionList,
    /// Take back the last seek
    #[arg(long)]
    pub(crate) undo: bool,
    #[command(flatten)]
    pub(crate) change: OffsetChangeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct GroupResetArgs {
    /// Name of the group
    #[arg(add = completion::groups())]
    pub(crate) group: String,
    #[arg(
        long,
        value_name = "POSITION",
        allow_hyphen_values = true,
        help = "Next record to read: a position as in `consume --from`",
        long_help = position::help("Next record to read")
    )]
    pub(crate) to: PositionArg,
    /// Only offsets whose records were deleted, or that are above the end
    #[arg(long)]
    pub(crate) unreadable: bool,
    #[command(flatten)]
    pub(crate) change: OffsetChangeArgs,
}

/// Arguments of each change of offsets.
#[derive(Debug, Args)]
pub(crate) struct OffsetChangeArgs {
    /// Text for the history, at most 64 bytes [default: the user's name]
    #[arg(long, value_name = "TEXT")]
    pub(crate) by: Option<String>,
    /// Show the change only; change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}
