//! Terminal colours of labels and states. Disabled where the output is no terminal, NO_COLOR is set
//! or TERM is `dumb`.

use std::ffi::OsString;
use std::io::{IsTerminal, stderr, stdout};

/// Texts that say that something is wrong.
const BAD: [&str; 7] =
    ["unreachable", "fail", "FAILED", "NOT healthy", "unreadable", "damaged", "exited"];

/// Texts that say that something is under way or unusual.
const UNUSUAL: [&str; 6] = ["warn", "fetching", "learner", "draining", "stopped", "warning"];

/// Texts that say that all is well.
const GOOD: [&str; 4] = ["ok", "leader", "healthy", "DONE"];

/// Colour setting of a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Style {
    pub(crate) is_coloured: bool,
}

impl Style {
    #[cfg(test)]
    pub(crate) const PLAIN: Self = Self { is_coloured: false };

    /// Returns the style of standard error.
    pub(crate) fn of_stderr() -> Self {
        Self { is_coloured: stderr().is_terminal() && is_colour_allowed(variable) }
    }

    /// Returns the style of standard output.
    pub(crate) fn of_stdout() -> Self {
        Self { is_coloured: stdout().is_terminal() && is_colour_allowed(variable) }
    }

    pub(crate) fn error(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    pub(crate) fn label(self, text: &str) -> String {
        self.paint("1", text)
    }

    /// Paints a text by the state that it shows. `shown` may have blanks around `state`.
    pub(crate) fn state(self, state: &str, shown: &str) -> String {
        if BAD.contains(&state) {
            self.paint("31", shown)
        } else if UNUSUAL.contains(&state) {
            self.paint("33", shown)
        } else if GOOD.contains(&state) {
            self.paint("32", shown)
        } else {
            shown.to_owned()
        }
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.is_coloured { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

/// Returns true unless the environment turns colours off.
fn is_colour_allowed(variable: impl Fn(&str) -> Option<OsString>) -> bool {
    let is_off = variable("NO_COLOR").is_some_and(|value| !value.is_empty());
    let is_dumb = variable("TERM").is_some_and(|term| term == "dumb");
    !is_off && !is_dumb
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_turns_colours_off() {
        let allows = |set: &'static str, value: &'static str| {
            is_colour_allowed(move |name| (name == set).then(|| value.into()))
        };
        assert!(allows("TERM", "xterm") && allows("NO_COLOR", ""));
        assert!(!allows("NO_COLOR", "1") && !allows("TERM", "dumb"));
    }
}
