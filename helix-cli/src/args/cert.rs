//! Arguments of `helix cert`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum CertSubcommand {
    /// Make the CA of a cluster
    ///
    /// Writes ca.pem and ca.key. Nodes and clients need ca.pem only. Keep ca.key off the nodes: it
    /// can make a certificate of any node.
    Ca(CaArgs),
    /// Make the certificate of a node
    ///
    /// Writes node-ID.pem and node-ID.key, for --tls-cert and --tls-key of the node. The
    /// certificate serves all ports of the node and identifies it to other nodes.
    Node(NodeCertArgs),
    /// Make the certificate of a client
    ///
    /// Writes client-NAME.pem and client-NAME.key. The name is the common name of the certificate,
    /// and with --auth the principal of the client.
    Client(ClientCertArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CaArgs {
    /// Name of the cluster, as --cluster-id of its nodes
    #[arg(long, value_name = "NAME", default_value = "helix")]
    pub(crate) cluster: String,
    /// Days until the CA expires
    #[arg(long, default_value_t = 3650, value_parser = days())]
    pub(crate) days: u32,
    /// Directory to write to
    #[arg(long, default_value = ".")]
    pub(crate) dir: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct NodeCertArgs {
    /// Node id
    #[arg(value_parser = clap::value_parser!(u64).range(1..=u64::from(u32::MAX)))]
    pub(crate) node: u64,
    /// DNS name or IP address that clients dial, once for each
    #[arg(long = "host", value_name = "HOST", required = true, value_delimiter = ',')]
    pub(crate) hosts: Vec<String>,
    #[command(flatten)]
    pub(crate) issue: IssueArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ClientCertArgs {
    /// Name of the client
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) issue: IssueArgs,
}

#[derive(Debug, Args)]
pub(crate) struct IssueArgs {
    /// Directory with ca.pem and ca.key
    #[arg(long, default_value = ".", value_name = "DIR")]
    pub(crate) ca_dir: PathBuf,
    /// Days until the certificate expires
    #[arg(long, default_value_t = 365, value_parser = days())]
    pub(crate) days: u32,
    /// Directory to write to
    #[arg(long, default_value = ".")]
    pub(crate) dir: PathBuf,
}

fn days() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=36_500)
}
