//! Options of every command.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use helix_client::{PendingCalls, TlsOptions, TokenSource};
use helix_proto::address;

use crate::format::OutputFormat;
use crate::{completion, units};

#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct GlobalArgs {
    /// Nodes to contact first, also as unix:PATH [env: HELIX_ADDR] [default: the context's, or
    /// 127.0.0.1:9092]
    #[arg(
        long,
        global = true,
        value_delimiter = ',',
        value_name = "HOST:PORT,...",
        value_parser = parse_address
    )]
    pub(crate) addr: Vec<String>,
    /// Context to use, as added with `helix context add`
    #[arg(long, global = true, value_name = "NAME", add = completion::contexts())]
    pub(crate) context: Option<String>,
    /// File with the token of this client [env: HELIX_TOKEN_FILE, or HELIX_TOKEN with the token]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Rack of this client: where any replica may serve a read, one on a node of this rack is
    /// preferred [env: HELIX_CLIENT_RACK]
    #[arg(long, global = true, value_name = "RACK")]
    pub(crate) client_rack: Option<String>,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Print results in this format
    #[arg(short, long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: OutputFormat,
    /// Print the JSON Schema of the results and exit
    #[arg(long, global = true)]
    pub(crate) schema: bool,
    /// Print only results and errors
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    /// Give up after this time; what was started may still be done [default: no limit]
    #[arg(long, global = true, value_name = "TIME", value_parser = units::parse_duration)]
    pub(crate) timeout: Option<Duration>,
    /// Setting that the addresses come from, such as `--addr` or `context dev`.
    #[arg(skip)]
    pub(crate) addr_source: String,
    /// Token that calls carry.
    #[arg(skip)]
    pub(crate) token: TokenSource,
    /// Calls in progress, which `wait_notes` shows.
    #[arg(skip)]
    pub(crate) pending: PendingCalls,
    /// Files of TLS, from the options, the context or the environment.
    #[arg(skip)]
    pub(crate) tls_files: Option<TlsOptions>,
}

/// Options of TLS.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct TlsArgs {
    /// CAs of the nodes, PEM; turns TLS on [env: HELIX_TLS_CA]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Certificate of this client, PEM [env: HELIX_TLS_CERT]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of the certificate, PEM [env: HELIX_TLS_KEY]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Name that the certificates of all nodes must have
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) tls_server_name: Option<String>,
}

/// Parses the address of a node; the port may be missing.
fn parse_address(text: &str) -> Result<String, String> {
    address::parse(text, Some(address::PORT_DEFAULT))
}
