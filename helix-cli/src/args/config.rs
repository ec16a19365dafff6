//! Arguments of `helix config`.

use clap::Subcommand;

use crate::completion;

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigSubcommand {
    /// List settings and their defaults
    List,
    /// Explain a setting
    Explain {
        /// Key of the file, flag or environment variable
        #[arg(allow_hyphen_values = true, add = completion::settings())]
        key: String,
    },
}
