//! Completion of values. The shell calls this program for each completion, so that names come from
//! the cluster: topics, groups and contexts as they are.

use std::ffi::{OsStr, OsString};
use std::future::Future;
use std::time::Duration;

use clap::ValueEnum;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use helix_client::contexts::{ClusterChoice, Contexts};
use helix_client::{Client, Config};
use helix_server::config::{self, Setting};

use crate::reason_pages::pages;

/// Limit of a question to the cluster; a person waits for it.
const ANSWER_MAX: Duration = Duration::from_millis(500);

/// A program whose words `helix` completes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompletedProgram {
    #[default]
    Helix,
    HelixServer,
}

impl CompletedProgram {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Helix => "helix",
            Self::HelixServer => "helix-server",
        }
    }
}

/// Completes names of topics.
pub(crate) fn topics() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let prefix = current.to_string_lossy().into_owned();
        let names = ask(async move |client: Client| {
            let topics = client.admin().topics(&prefix).await.ok()?;
            Some(topics.into_iter().map(|topic| topic.name).collect::<Vec<String>>())
        });
        starting_with(current, names)
    })
}

/// Completes names of consumer groups.
pub(crate) fn groups() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let names = ask(async |client: Client| {
            let groups = client.admin().groups().await.ok()?;
            Some(groups.into_iter().map(|group| group.group).collect::<Vec<String>>())
        });
        starting_with(current, names)
    })
}

/// Completes names of contexts.
pub(crate) fn contexts() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let names = Contexts::load().map(|contexts| contexts.contexts.into_keys().collect());
        starting_with(current, names.unwrap_or_default())
    })
}

/// Completes reasons of errors.
pub(crate) fn reasons() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        let names = pages().into_iter().map(|page| page.name().to_owned()).collect();
        starting_with(&current.to_ascii_uppercase(), names)
    })
}

/// Completes settings of a node.
pub(crate) fn settings() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        starting_with(current, config::settings().iter().map(Setting::key).collect())
    })
}

fn starting_with(current: &OsStr, names: Vec<String>) -> Vec<CompletionCandidate> {
    let prefix = current.to_string_lossy();
    let matching = names.into_iter().filter(|name| name.starts_with(prefix.as_ref()));
    matching.map(CompletionCandidate::new).collect()
}

/// Returns the words to complete, which follow `--`, without the program.
fn words() -> impl Iterator<Item = OsString> {
    std::env::args_os().skip_while(|word| word != "--").skip(2)
}

/// Asks the cluster that the command would use. Errors complete nothing.
fn ask<F>(question: impl FnOnce(Client) -> F) -> Vec<String>
where
    F: Future<Output = Option<Vec<String>>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let cluster = ClusterChoice::of_words(words()).and_then(|choice| choice.resolve().ok());
    let (Some(cluster), Ok(runtime)) = (cluster, runtime) else {
        return Vec::new();
    };
    let config = Config { request_timeout: ANSWER_MAX, ..cluster.config() };
    let answered = runtime.block_on(async {
        let client = Client::new(config).ok()?;
        tokio::time::timeout(ANSWER_MAX, question(client)).await.ok()?
    });
    answered.unwrap_or_default()
}
