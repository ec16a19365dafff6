//! Arguments of `helix cluster`.

use clap::{Args, Subcommand};
use helix_proto::address;

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterSubcommand {
    /// Show the cluster id, node, shard and topic counts
    Info,
    /// Report health issues; exit code 1 if there are any
    Health(HealthArgs),
    /// List nodes with their status
    Nodes,
    /// List the replicas of each shard and their lag
    Shards,
    /// Transfer the leadership of a shard to another node
    ///
    /// The cluster moves a leadership back to the shard's preferred node when that is up to date;
    /// the result names that node. Use drain to keep leaderships away from a node.
    TransferLeader {
        /// Shard id
        #[arg(long, value_name = "N")]
        shard: u32,
        /// Node to become leader [default: the most up-to-date replica]
        #[arg(long, value_name = "NODE")]
        to: Option<u64>,
    },
    /// Add a node, or change the peer address of a member
    ///
    /// A new node must have been started with an empty data directory.
    AddNode {
        /// Node id
        #[arg(value_name = "NODE")]
        node: u64,
        /// Peer address: where the other nodes dial the node
        #[arg(value_name = "HOST:PORT", value_parser = parse_peer_address)]
        peer_addr: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Remove a node: its leaderships first, then its replicas
    ///
    /// Refused if the other nodes cannot take its replicas, so that fewer nodes could fail.
    RemoveNode {
        /// Node id
        #[arg(value_name = "NODE")]
        node: u64,
        /// The node is lost: it does not answer and will not return
        #[arg(long)]
        lost: bool,
        /// Remove a node as lost even if it answers; the cluster rejects it from then on
        #[arg(long, requires = "lost")]
        force: bool,
        /// Remove it even if the others cannot take its replicas
        #[arg(long)]
        fewer_replicas: bool,
        /// Skip the confirmation
        #[arg(long)]
        yes: bool,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Replace a lost node with an empty one
    ReplaceNode {
        /// Lost node
        #[arg(value_name = "NODE")]
        node: u64,
        /// Replacement node [default: the same id, with an empty data directory]
        #[arg(long, value_name = "NODE", requires = "peer_addr")]
        by: Option<u64>,
        /// Peer address of the replacement [default: unchanged]
        #[arg(long, value_name = "HOST:PORT", value_parser = parse_peer_address)]
        peer_addr: Option<String>,
        /// Replace a node even if it answers; the cluster rejects it from then on
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Drain a node: transfer its leaderships away and wait
    ///
    /// Use this before maintenance. The node leads no shard until `helix cluster undrain`.
    Drain {
        /// Node id
        #[arg(value_name = "NODE")]
        node: u64,
        /// Check only; change nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Let a drained node lead shards again
    Undrain {
        /// Node id
        #[arg(value_name = "NODE")]
        node: u64,
    },
    /// Show which nodes have a replica of each shard, and what moves
    ///
    /// The cluster moves replicas off nodes that leave, replaces lost ones, and keeps their numbers
    /// on the nodes equal.
    Placement {
        /// Show the reason of each move, and what keeps others from starting
        #[arg(long)]
        explain: bool,
    },
    /// Keep new replicas away from a node
    ///
    /// Its replicas stay, but it is no preferred leader any longer.
    Cordon {
        /// Node id
        #[arg(value_name = "NODE")]
        node: u64,
    },
    /// Let a cordoned node get replicas again
    Uncordon {
        /// Node id
        #[arg(value_name = "NODE")]
        node: u64,
    },
    /// Set the number of replicas of every shard
    SetReplicas {
        /// Replicas: 1, 3 or 5
        #[arg(value_name = "N", value_parser = parse_replicas)]
        replicas: u32,
    },
    /// Add data shards, and wait until they have their replicas
    ///
    /// New topics and partitions go to the shards with the fewest partitions. Existing partitions
    /// stay in their shards, unless --split is given.
    AddShards {
        /// Shards to add; the cluster has at most 64
        #[arg(value_name = "N", value_parser = clap::value_parser!(u32).range(1..=63))]
        count: u32,
        /// Split existing shards, so that existing topics spread too
        #[arg(long)]
        split: bool,
        /// Replicas of each: 1, 3 or 5 [default: the cluster's]
        #[arg(
            long,
            default_value_t = 0,
            hide_default_value = true,
            value_name = "COUNT",
            conflicts_with = "split"
        )]
        replicas: u32,
        /// Start to add them and return at once
        #[arg(long)]
        no_wait: bool,
    },
    /// Move a replica of a shard to another node
    MoveShard {
        /// Shard id
        #[arg(value_name = "SHARD")]
        shard: u32,
        /// Node that loses its replica
        #[arg(long, value_name = "NODE")]
        from: u64,
        /// Node that gets a replica
        #[arg(long, value_name = "NODE")]
        to: u64,
        /// Start the move and return at once
        #[arg(long)]
        no_wait: bool,
    },
    /// Stop all moves of replicas
    ///
    /// No move is planned or copies data until `helix cluster resume-moves`; what was copied stays.
    PauseMoves,
    /// Resume paused moves of replicas
    ResumeMoves,
    /// Cancel the move of a shard's replica
    ///
    /// The shard returns to the replicas from before. The cluster plans its own moves again, unless
    /// moves are paused or the node is cordoned.
    CancelMove {
        /// Shard id
        #[arg(value_name = "SHARD")]
        shard: u32,
    },
    /// Rebalance shard leaders
    ///
    /// Transfers each shard's leadership to its preferred node now.
    Balance,
}

/// Options of commands that change the cluster's nodes.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    /// Check only; report what prevents the change
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Start the change and return at once
    #[arg(long)]
    pub(crate) no_wait: bool,
}

#[derive(Debug, Args)]
pub(crate) struct HealthArgs {
    /// Keep running and print the health when it changes
    #[arg(long)]
    pub(crate) watch: bool,
    /// Exit as soon as the cluster is healthy
    #[arg(long, requires = "watch")]
    pub(crate) exit_when_healthy: bool,
}

/// Parses a number of replicas.
fn parse_replicas(text: &str) -> Result<u32, String> {
    let replicas = text.parse().ok().filter(|replicas| [1, 3, 5].contains(replicas));
    replicas.ok_or_else(|| "must be 1, 3 or 5".to_owned())
}

/// Parses an address that other nodes dial. There is no default port.
fn parse_peer_address(text: &str) -> Result<String, String> {
    let address = text.trim();
    address::check_dialable(address).map(|()| address.to_owned())
}
