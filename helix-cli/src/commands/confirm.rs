//! Confirmation of commands that delete data.

use std::io::{self, BufRead, IsTerminal};

use anyhow::Context;

use crate::exit::{CliError, Exit};
use crate::output::write_message;

/// Asks the user to confirm a deletion by typing the name; `kind` says what it names.
///
/// # Errors
/// Fails if standard input is no terminal or the user types another text.
pub(crate) fn confirm(kind: &str, name: &str, what: &str) -> anyhow::Result<()> {
    if !io::stdin().is_terminal() {
        let failure = CliError::new(Exit::Usage, what).why("a confirmation needs a terminal");
        return Err(failure.hint("run the command with --yes").into());
    }
    write_message(format_args!("{what}; type the {kind} name to confirm: "));
    let mut typed = String::new();
    io::stdin().lock().read_line(&mut typed).context("read the confirmation")?;
    if typed.trim() == name {
        return Ok(());
    }
    Err(CliError::new(Exit::Error, "not confirmed; nothing was changed").into())
}
