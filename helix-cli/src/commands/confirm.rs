//! Confirmation of commands that delete data or redundancy.

use std::io::{self, BufRead, IsTerminal};

use anyhow::Context;
use tokio::sync::oneshot;

use crate::exit::{CliError, Exit};
use crate::output::write_message;

/// Asks the user to confirm by typing the name of the `kind` of thing that is removed. Ctrl-C ends
/// the wait, because the caller stops to poll this future.
///
/// # Errors
/// Fails if standard input is no terminal or the user types another text.
pub(crate) async fn confirm(kind: &str, name: &str, what: &str) -> anyhow::Result<()> {
    if !io::stdin().is_terminal() {
        let failure = CliError::new(Exit::Usage, what).why("a confirmation needs a terminal");
        return Err(failure.hint("run the command with --yes").into());
    }
    write_message(format_args!("{what}; type the {kind} {}to confirm: ", name_word(kind)));
    let mut prompt = PromptLine { is_open: true };
    let (sender, typed) = oneshot::channel();
    // A thread of its own: a blocked read would keep the command from ending.
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = io::stdin().lock().read_line(&mut line).map(|_| line);
        // Ignored: the command was interrupted.
        let _ = sender.send(read);
    });
    let typed = typed.await.context("wait for the confirmation")?;
    let typed = typed.context("read the confirmation")?;
    prompt.is_open = !typed.ends_with('\n');
    if typed.trim() == name {
        return Ok(());
    }
    Err(CliError::new(Exit::Error, "not confirmed; nothing was changed").into())
}

/// The line of the prompt. Ends it on drop if the user did not, as after Ctrl-C, Ctrl-D and
/// --timeout: the shell's prompt or an error follows on a line of its own.
struct PromptLine {
    is_open: bool,
}

impl Drop for PromptLine {
    fn drop(&mut self) {
        if self.is_open {
            write_message(format_args!("\n"));
        }
    }
}

/// Returns what of a thing is typed: topics have names, nodes have ids.
fn name_word(kind: &str) -> &'static str {
    if kind == "node" { "id " } else { "name " }
}
