//! Arguments of `helix server`.

use clap::Args;
use helix_server::config::Flags;

#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    #[command(flatten)]
    pub(crate) flags: Flags,
    /// Stop when standard input closes, so that the node ends with its parent process
    #[arg(long, hide = true)]
    pub(crate) exit_with_stdin: bool,
}
