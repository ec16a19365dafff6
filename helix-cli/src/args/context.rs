//! Arguments of `helix context`.

use clap::Subcommand;

use crate::completion;

#[derive(Debug, Subcommand)]
pub(crate) enum ContextSubcommand {
    /// Add a context, or change its addresses
    ///
    /// Stores the addresses of --addr, the files of --token-file and of the --tls options, and
    /// the --client-rack under the name. The first context becomes the current one.
    Add {
        /// Name of the context
        name: String,
        /// Make it the current context
        #[arg(long = "use")]
        make_current: bool,
    },
    /// Make a context the current one
    Use {
        /// Name of the context; `-` is the previous one
        #[arg(allow_hyphen_values = true, add = completion::contexts())]
        name: String,
    },
    /// List contexts
    List,
    /// Remove a context
    Remove {
        /// Name of the context
        #[arg(add = completion::contexts())]
        name: String,
    },
}
