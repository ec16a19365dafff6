//! Output formats: the values of `-o`.

use clap::ValueEnum;

/// Selects how results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum OutputFormat {
    // No doc comments: clap would print each of them as a paragraph in every help text.
    #[default]
    Table,
    Wide,
    Json,
    Jsonl,
}

impl OutputFormat {
    /// Returns true for the machine-readable formats.
    pub(crate) fn is_json(self) -> bool {
        matches!(self, Self::Json | Self::Jsonl)
    }
}
