//! Where a configuration comes from: the command line, else the environment, else the file, else
//! the defaults. Nothing is printed here.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::{self, Display};
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};

use super::check::Fault;
use super::file::{self, FileValues};
use super::settings::{Setting, settings};
use super::{Config, ConfigError};

const ELSEWHERE: &str = "\
Every setting can also be given in the environment, --node-id as HELIX_NODE_ID, and in the file of
--config, as node_id. The command line overrules the environment, which overrules the file.";

/// The flags of a server as they were given: those of `Config`, and whence else to take it.
#[derive(Debug, Clone)]
pub struct Flags {
    /// By key.
    given: BTreeMap<String, Vec<OsString>>,
    sources: Sources,
}

#[derive(Debug, Clone, clap::Args)]
struct Sources {
    /// File with settings, in TOML: docs/configuration.md [env: HELIX_CONFIG]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the settings in force and where each comes from, as a file for --config, and end
    #[arg(long)]
    print_config: bool,
    /// Say everything that is wrong with the settings, and end: with 0 if nothing is, else with 2
    #[arg(long, conflicts_with = "print_config")]
    check_config: bool,
}

/// What is to be done with a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    Run,
    Print,
    Check,
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    Flag,
    /// Its name.
    Variable(String),
    File {
        path: PathBuf,
        line: usize,
    },
    Default,
}

impl Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("command line"),
            Self::Variable(name) => f.write_str(name),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

/// A configuration, and where each of its values comes from.
#[derive(Debug, Clone)]
pub struct Resolved {
    pub config: Config,
    pub(super) choices: Vec<Choice>,
}

/// A setting, and what was chosen for it.
#[derive(Debug, Clone)]
pub(super) struct Choice {
    pub(super) setting: Setting,
    pub(super) origin: Origin,
    /// As on the command line; empty where there is none.
    pub(super) values: Vec<OsString>,
}

impl Flags {
    pub fn asked(&self) -> Asked {
        match &self.sources {
            Sources { print_config: true, .. } => Asked::Print,
            Sources { check_config: true, .. } => Asked::Check,
            _ => Asked::Run,
        }
    }

    /// The configuration that these flags, this environment and the file that they name make.
    ///
    /// # Errors
    /// Everything that is wrong with it, also with what something else overrules in the file.
    pub fn resolve(
        &self,
        environment: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Resolved, ConfigError> {
        // An empty variable is how many tools say that there is none.
        let variable = |name: &str| environment(name).filter(|value| !value.is_empty());
        let settings = settings();
        let path = self.sources.config.clone();
        let path = path.or_else(|| variable("HELIX_CONFIG").map(PathBuf::from));
        let file = path.as_ref().map_or_else(FileValues::default, |it| file::read(it, &settings));
        let mut problems = file.problems;
        let mut choices = Vec::new();
        for setting in settings {
            let key = setting.key();
            let mut names = setting.variables().into_iter();
            let found = names.find_map(|name| variable(&name).map(|value| (name, value)));
            let (origin, values) = if let Some(values) = self.given.get(&key) {
                (Origin::Flag, values.clone())
            } else if let Some((name, value)) = found {
                if let Err(what) = setting.check(&value) {
                    problems.push(format!("{name}={}: {what}", value.to_string_lossy()));
                    continue;
                }
                (Origin::Variable(name), vec![value])
            } else if let (Some(value), Some(path)) = (file.values.get(&key), &path) {
                (Origin::File { path: path.clone(), line: value.line }, value.values.clone())
            } else {
                let defaults = setting.default_values();
                (Origin::Default, defaults.into_iter().map(OsString::from).collect())
            };
            choices.push(Choice { setting, origin, values });
        }
        let config = assemble(&choices)?;
        // A setting whose own value is none has its default now, which says nothing.
        let chosen = |fault: &Fault| choices.iter().find(|it| it.setting.flag() == fault.flag);
        let faults = config.faults();
        problems.extend(faults.iter().filter_map(|it| chosen(it).map(|choice| choice.say(it))));
        if problems.is_empty() {
            Ok(Resolved { config, choices })
        } else {
            Err(ConfigError { problems })
        }
    }
}

fn assemble(choices: &[Choice]) -> Result<Config, ConfigError> {
    let command = Command::new("helix-server").no_binary_name(true);
    let command = command.args(settings().iter().map(|setting| setting.arg().clone()));
    let arguments = choices
        .iter()
        .flat_map(|choice| choice.values.iter().map(|value| choice.setting.argument(value)));
    let matches = command.try_get_matches_from(arguments);
    // Each value was checked: what is left is what clap says of them together.
    matches
        .and_then(|matches| Config::from_arg_matches(&matches))
        .map_err(|error| ConfigError { problems: vec![error.to_string()] })
}

impl Choice {
    /// A fault, with the place where the value was written.
    fn say(&self, fault: &Fault) -> String {
        let Fault { value, what, .. } = fault;
        match &self.origin {
            Origin::Variable(name) => format!("{name}={value}: {what}"),
            Origin::File { .. } => {
                format!("{}: {} = {value}: {what}", self.origin, self.setting.key())
            }
            Origin::Flag | Origin::Default => fault.to_string(),
        }
    }
}

impl Args for Flags {
    fn augment_args(command: Command) -> Command {
        let command = command.args(settings().iter().map(|setting| setting.arg().clone()));
        Sources::augment_args(command).after_help(ELSEWHERE)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let values = |id: &str| -> Vec<OsString> {
            matches.get_raw(id).unwrap_or_default().map(OsStr::to_owned).collect()
        };
        let given = settings()
            .into_iter()
            .filter(|setting| is_given(setting.id()))
            .map(|setting| (setting.key(), values(setting.id())))
            .collect();
        Ok(Self { given, sources: Sources::from_arg_matches(matches)? })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
