//! Resolves the configuration from the command line, the environment, the file and the defaults.
//! Earlier sources override later ones. Prints nothing.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::{self, Display};
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};

use super::check::ConfigProblem;
use super::copy_rate::{self, CopyRateFile};
use super::file::{self, FileValues};
use super::settings::{REMOVED, Setting, removed, settings, variable};
use super::values::parse_bytes;
use super::{ConfigError, ContainerLimits, ServerConfig};

const SOURCES_HELP: &str = "\
Every setting can also be given in the environment (--node-id as HELIX_NODE_ID) and in the file of
--config (as node_id). The command line overrides the environment, which overrides the file.";

/// The flags of a server as given: those of `ServerConfig`, and those of the other sources.
#[derive(Debug, Clone)]
pub struct Flags {
    /// Values by key.
    given: BTreeMap<String, Vec<OsString>>,
    sources: Sources,
}

#[derive(Debug, Clone, clap::Args)]
struct Sources {
    /// File with settings, in TOML; see docs/configuration.md [env: HELIX_CONFIG]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the effective settings with their origins, as a file for --config, and exit
    #[arg(long)]
    print_config: bool,
    /// Check the settings, print all problems, and exit with 0 if there is none, else with 2
    #[arg(long, conflicts_with = "print_config")]
    check_config: bool,
    /// Rejected, with what replaces it.
    #[arg(long, hide = true, value_parser = reject_idle_poll)]
    #[allow(dead_code)]
    idle_poll_us: Option<String>,
}

fn reject_idle_poll(_: &str) -> Result<String, &'static str> {
    Err(removed("idle_poll_us").unwrap_or_default())
}

/// Action that the flags request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigAction {
    Run,
    Print,
    Check,
}

/// Origin of a setting's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingOrigin {
    Flag,
    /// Environment variable of this name.
    Variable(String),
    File {
        path: PathBuf,
        line: usize,
    },
    Default,
    /// Default in a container whose limits need another value.
    Container,
}

impl Display for SettingOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("command line"),
            Self::Variable(name) => f.write_str(name),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Default => f.write_str("default"),
            Self::Container => f.write_str("default within the container's limits"),
        }
    }
}

/// A configuration with the origin of each value.
#[derive(Debug, Clone)]
pub struct ResolvedConfig {
    pub config: ServerConfig,
    /// File in which `copy_rate_max` may change; `None` if there is none, or another source
    /// overrides it.
    pub copy_rate_file: Option<CopyRateFile>,
    pub(super) settings: Vec<ResolvedSetting>,
}

/// A setting with its values and their origin.
#[derive(Debug, Clone)]
pub(super) struct ResolvedSetting {
    pub(super) setting: Setting,
    pub(super) origin: SettingOrigin,
    /// In the form of the command line; empty if unset.
    pub(super) values: Vec<OsString>,
}

impl Flags {
    pub fn action(&self) -> ConfigAction {
        match &self.sources {
            Sources { print_config: true, .. } => ConfigAction::Print,
            Sources { check_config: true, .. } => ConfigAction::Check,
            _ => ConfigAction::Run,
        }
    }

    /// Resolves the configuration from these flags, the environment and the file that they name.
    ///
    /// # Errors
    /// All problems, also those of values in the file that another source overrides.
    pub fn resolve(
        &self,
        environment: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<ResolvedConfig, ConfigError> {
        self.resolve_within(&ContainerLimits::default(), environment)
    }

    /// Like [`Self::resolve`], with defaults that fit a container.
    ///
    /// # Errors
    /// As of [`Self::resolve`].
    pub fn resolve_within(
        &self,
        container: &ContainerLimits,
        environment: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<ResolvedConfig, ConfigError> {
        // Many tools set an empty variable for an unset one.
        let given = |name: &str| environment(name).filter(|value| !value.is_empty());
        let settings = settings();
        let path = self.sources.config.clone();
        let path = path.or_else(|| given("HELIX_CONFIG").map(PathBuf::from));
        let file = path.as_ref().map_or_else(FileValues::default, |it| file::read(it, &settings));
        let mut problems = file.problems;
        for (key, why) in REMOVED {
            let name = variable(&key.replace('_', "-"));
            problems.extend(given(&name).map(|_| format!("{name} {why}")));
        }
        let mut resolved = Vec::new();
        for setting in settings {
            let key = setting.key();
            let mut names = setting.variables().into_iter();
            let found = names.find_map(|name| given(&name).map(|value| (name, value)));
            let (origin, values) = if let Some(values) = self.given.get(&key) {
                (SettingOrigin::Flag, values.clone())
            } else if let Some((name, value)) = found {
                if let Err(what) = setting.check(&value) {
                    problems.push(format!("{name}={}: {what}", value.to_string_lossy()));
                    continue;
                }
                (SettingOrigin::Variable(name), vec![value])
            } else if let (Some(value), Some(path)) = (file.values.get(&key), &path) {
                (SettingOrigin::File { path: path.clone(), line: value.line }, value.values.clone())
            } else {
                default_within(container, &setting)
            };
            resolved.push(ResolvedSetting { setting, origin, values });
        }
        let config = assemble(&resolved)?;
        let rate = resolved.iter().find(|it| it.setting.key() == copy_rate::KEY);
        let is_from_file = rate.is_some_and(|rate| {
            matches!(rate.origin, SettingOrigin::File { .. } | SettingOrigin::Default)
        });
        let copy_rate_file = path.filter(|_| is_from_file).map(CopyRateFile);
        // A setting with an invalid value has its default now, so it is not checked.
        for problem in config.problems() {
            let setting = resolved.iter().find(|it| it.setting.flag() == problem.flag);
            problems.extend(setting.map(|setting| setting.describe(&problem)));
        }
        if problems.is_empty() {
            Ok(ResolvedConfig { config, copy_rate_file, settings: resolved })
        } else {
            Err(ConfigError { problems })
        }
    }
}

/// Returns the default of a setting in a container, and its origin.
fn default_within(
    container: &ContainerLimits,
    setting: &Setting,
) -> (SettingOrigin, Vec<OsString>) {
    let defaults = setting.default_values();
    let bytes = defaults.first().and_then(|value| parse_bytes(value).ok());
    match container.default_of(&setting.key(), bytes) {
        Some(value) => (SettingOrigin::Container, vec![value.into()]),
        None => (SettingOrigin::Default, defaults.into_iter().map(OsString::from).collect()),
    }
}

fn assemble(resolved: &[ResolvedSetting]) -> Result<ServerConfig, ConfigError> {
    let command = Command::new("helix-server").no_binary_name(true);
    let command = command.args(settings().iter().map(|setting| setting.arg().clone()));
    let arguments =
        resolved.iter().flat_map(|it| it.values.iter().map(|value| it.setting.argument(value)));
    let matches = command.try_get_matches_from(arguments);
    // Each value was checked; clap can only report a conflict between them.
    matches
        .and_then(|matches| ServerConfig::from_arg_matches(&matches))
        .map_err(|error| ConfigError { problems: vec![error.to_string()] })
}

impl ResolvedSetting {
    /// Formats a problem with the origin of the value.
    fn describe(&self, problem: &ConfigProblem) -> String {
        let ConfigProblem { value, what, .. } = problem;
        match &self.origin {
            SettingOrigin::Variable(name) => format!("{name}={value}: {what}"),
            SettingOrigin::File { .. } => {
                format!("{}: {} = {value}: {what}", self.origin, self.setting.key())
            }
            SettingOrigin::Flag | SettingOrigin::Default | SettingOrigin::Container => {
                problem.to_string()
            }
        }
    }
}

impl Args for Flags {
    fn augment_args(command: Command) -> Command {
        let command = command.args(settings().iter().map(|setting| setting.arg().clone()));
        Sources::augment_args(command).after_help(SOURCES_HELP)
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
