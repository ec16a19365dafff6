//! Completion in shells. The shell calls this program for each completion, so that names of topics
//! and contexts are those that exist.

use std::ffi::OsStr;
use std::time::Duration;

use clap::CommandFactory;
use clap_complete::CompleteEnv;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use helix_client::contexts::{ClusterChoice, Contexts};
use helix_client::{Client, Config};

/// Limit of a question to the cluster; a person waits for it.
const ANSWER_MAX: Duration = Duration::from_millis(500);

/// Completes, or prints the code for a shell, and ends the process, if `COMPLETE` names a shell.
pub(crate) fn complete_if_asked<C: CommandFactory>() {
    CompleteEnv::with_factory(C::command).complete();
}

/// Completes names of contexts.
pub(crate) fn contexts() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let names = Contexts::load().map(|contexts| contexts.contexts.into_keys().collect());
        starting_with(current, names.unwrap_or_default())
    })
}

/// Completes names of topics, of the cluster that the command would use.
pub(crate) fn topics() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        starting_with(current, existing_topics().unwrap_or_default())
    })
}

/// Asks the cluster. Errors complete nothing.
fn existing_topics() -> Option<Vec<String>> {
    // The words to complete follow `--`, the program first.
    let words = std::env::args_os().skip_while(|word| word != "--").skip(2);
    let cluster = ClusterChoice::of_words(words)?.resolve().ok()?;
    let config = Config { request_timeout: ANSWER_MAX, ..cluster.config() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    runtime.block_on(async {
        let admin = Client::new(config).ok()?.admin();
        let topics = tokio::time::timeout(ANSWER_MAX, admin.topics("")).await.ok()?.ok()?;
        Some(topics.into_iter().map(|topic| topic.name).collect())
    })
}

fn starting_with(current: &OsStr, names: Vec<String>) -> Vec<CompletionCandidate> {
    let prefix = current.to_string_lossy();
    let matching = names.into_iter().filter(|name| name.starts_with(prefix.as_ref()));
    matching.map(CompletionCandidate::new).collect()
}
