//! Terminal colours of error labels. Disabled if standard error is no terminal, NO_COLOR is set or
//! TERM is `dumb`.

use std::io::{IsTerminal, stderr};

/// Colour setting of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style {
    pub(crate) is_coloured: bool,
}

impl Style {
    #[cfg(test)]
    pub(crate) const PLAIN: Self = Self { is_coloured: false };

    /// Returns the style of standard error.
    pub(crate) fn of_stderr() -> Self {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self { is_coloured: stderr().is_terminal() && !is_set("NO_COLOR") && !is_dumb }
    }

    pub(crate) fn error(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    pub(crate) fn label(self, text: &str) -> String {
        self.paint("1", text)
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.is_coloured { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}
