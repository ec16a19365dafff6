//! Completion in shells, also for `helix-server`.

use std::ffi::OsStr;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Command, CommandFactory, ValueEnum};
use clap_complete::env::Shells;
use clap_complete::{CompleteEnv, Shell};
use helix_server::config::Flags;

use crate::args::Cli;
use crate::completion::CompletedProgram;
use crate::output;

/// Variable that tells the program to complete instead of to run.
const VARIABLE: &str = "COMPLETE";

/// Completes and ends the process, if a shell asks for it.
pub(crate) fn complete_if_asked() {
    // The words to complete follow `--`, the program first.
    let factory = || {
        let mut words = std::env::args_os().skip_while(|word| word != "--").skip(1);
        let program = words.next().map(PathBuf::from).unwrap_or_default();
        let server = CompletedProgram::HelixServer;
        let is_server = program.file_name() == Some(OsStr::new(server.name()));
        if is_server { command_of(server) } else { command_of(CompletedProgram::Helix) }
    };
    CompleteEnv::with_factory(factory).var(VARIABLE).complete();
}

/// Prints the code that registers the completion of a program in a shell.
pub(crate) fn print_registration(shell: Shell, program: CompletedProgram) -> anyhow::Result<()> {
    let name = shell.to_possible_value().map(|value| value.get_name().to_owned());
    let name = name.unwrap_or_default();
    let shells = Shells::builtins();
    let completer = shells.completer(&name).context("the shell has no completion")?;
    let mut code = Vec::new();
    let words_of = program.name();
    let written = completer.write_registration(VARIABLE, words_of, words_of, "helix", &mut code);
    written.context("write the completion")?;
    output::write(&code).context("print the completion")
}

/// Returns the flags and commands of a program.
fn command_of(program: CompletedProgram) -> Command {
    match program {
        CompletedProgram::Helix => Cli::command(),
        CompletedProgram::HelixServer => {
            let version = env!("CARGO_PKG_VERSION");
            Flags::augment_args(Command::new(program.name()).version(version))
        }
    }
}
