//! The list of settings, from the flags of `ServerConfig`: names, kinds, defaults, help.
//! Reading, printing and the documentation use this list.

use std::any::TypeId;
use std::ffi::{OsStr, OsString};
use std::num::NonZeroUsize;

use clap::builder::BoolishValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Args, Command};

use super::ServerConfig;

/// Keys of settings that no longer exist, with what replaces them.
pub(super) const REMOVED: &[(&str, &str)] = &[(
    "idle_poll_us",
    "was removed: the log polls only where that makes appends faster; omit the setting",
)];

/// Returns what replaces a setting that no longer exists.
pub(super) fn removed(key: &str) -> Option<&'static str> {
    REMOVED.iter().find(|(removed, _)| *removed == key).map(|(_, why)| *why)
}

/// Kind of a setting's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettingKind {
    Switch,
    Number,
    /// Decimal number from 0 to 1.
    Share,
    Size,
    Time,
    Choice,
    Text,
    /// List of strings.
    List,
}

/// One setting.
#[derive(Debug, Clone)]
pub struct Setting {
    arg: Arg,
}

/// Returns all settings, in the order of their declaration.
pub fn settings() -> Vec<Setting> {
    let command = ServerConfig::augment_args(Command::new("helix-server"));
    command.get_arguments().map(|arg| Setting { arg: complete(arg.clone()) }).collect()
}

/// Gives a switch an optional value, so that the command line can turn off a switch of the file.
fn complete(arg: Arg) -> Arg {
    let arg = arg.env(None::<&'static str>);
    if !matches!(arg.get_action(), ArgAction::SetTrue) {
        return arg;
    }
    arg.action(ArgAction::Set)
        .num_args(0..=1)
        .require_equals(true)
        .value_parser(BoolishValueParser::new())
        .value_name("BOOL")
        .hide_default_value(true)
        .hide_possible_values(true)
        .default_missing_value("true")
        .default_value("false")
}

impl Setting {
    /// Returns the name of the flag, without the dashes.
    pub fn flag(&self) -> &str {
        self.arg.get_long().expect("every setting is a long flag")
    }

    /// Returns the key in the file.
    pub fn key(&self) -> String {
        self.flag().replace('-', "_")
    }

    /// Returns the environment variable.
    pub fn variable(&self) -> String {
        variable(self.flag())
    }

    /// Returns all environment variables, with those of the flag's aliases.
    pub(super) fn variables(&self) -> Vec<String> {
        let aliases = self.arg.get_all_aliases().unwrap_or_default();
        [self.flag()].into_iter().chain(aliases).map(variable).collect()
    }

    /// Returns the help text, in one line.
    pub fn help(&self) -> String {
        self.arg.get_help().map(ToString::to_string).unwrap_or_default()
    }

    /// Returns the defaults in the form of the command line; empty without a default.
    pub fn default_values(&self) -> Vec<String> {
        let values = self.arg.get_default_values();
        values.iter().map(|value| value.to_string_lossy().into_owned()).collect()
    }

    pub fn kind(&self) -> SettingKind {
        let numbers = [TypeId::of::<u64>(), TypeId::of::<u32>(), TypeId::of::<NonZeroUsize>()];
        let type_id = self.arg.get_value_parser().type_id();
        match self.value_name() {
            _ if matches!(self.arg.get_action(), ArgAction::Append) => SettingKind::List,
            "BOOL" => SettingKind::Switch,
            "BYTES" => SettingKind::Size,
            "TIME" => SettingKind::Time,
            "SHARE" => SettingKind::Share,
            _ if numbers.iter().any(|number| type_id == *number) => SettingKind::Number,
            _ if !self.arg.get_possible_values().is_empty() => SettingKind::Choice,
            _ => SettingKind::Text,
        }
    }

    /// Describes the values that the file accepts.
    pub fn expected(&self) -> String {
        match self.kind() {
            SettingKind::Switch => "true or false".to_owned(),
            SettingKind::Number => "a whole number, without quotes".to_owned(),
            SettingKind::Share => "a number from 0 to 1, as in 0.01".to_owned(),
            SettingKind::Size => "a size, as in 1048576 or \"64MiB\"".to_owned(),
            SettingKind::Time => "a duration, as in \"90s\", \"15m\" or \"7d\"".to_owned(),
            SettingKind::Choice => format!("one of {}", self.choices()),
            SettingKind::Text => "a string".to_owned(),
            SettingKind::List => format!("a list of strings, as in [\"{}\"]", self.value_name()),
        }
    }

    fn choices(&self) -> String {
        let values = self.arg.get_possible_values();
        let names: Vec<_> = values.iter().map(|value| format!("{:?}", value.get_name())).collect();
        names.join(", ")
    }

    fn value_name(&self) -> &str {
        self.arg.get_value_names().and_then(|names| names.first()).map_or("", |name| name.as_str())
    }

    pub(super) fn id(&self) -> &str {
        self.arg.get_id().as_str()
    }

    pub(super) fn arg(&self) -> &Arg {
        &self.arg
    }

    /// Returns the command-line argument that sets the value.
    pub(super) fn argument(&self, value: &OsStr) -> OsString {
        let mut argument = OsString::from(format!("--{}=", self.flag()));
        argument.push(value);
        argument
    }

    /// Checks the form of one value; an error describes the expected form.
    pub(super) fn check(&self, value: &OsStr) -> Result<(), String> {
        let command = Command::new("helix-server").no_binary_name(true).arg(self.arg.clone());
        let Err(error) = command.try_get_matches_from([self.argument(value)]) else {
            return Ok(());
        };
        let source = std::error::Error::source(&error).map(ToString::to_string);
        Err(match (error.kind(), error.get(ContextKind::ValidValue), source) {
            (ErrorKind::InvalidValue, Some(ContextValue::Strings(_)), _) => {
                format!("write {}", self.expected())
            }
            // The parsers in `values.rs` describe the expected form; clap's do not.
            (_, _, Some(source))
                if !matches!(self.kind(), SettingKind::Number | SettingKind::Switch) =>
            {
                source
            }
            _ => format!("write {}", self.expected()),
        })
    }
}

pub(super) fn variable(flag: &str) -> String {
    format!("HELIX_{}", flag.replace('-', "_").to_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(key: &str) -> Setting {
        settings().into_iter().find(|setting| setting.key() == key).expect("there is such a key")
    }

    #[test]
    fn names_follow_from_the_flag() {
        let setting = setting("listen_addr");
        assert_eq!(setting.flag(), "listen-addr");
        assert_eq!(setting.variables(), ["HELIX_LISTEN_ADDR", "HELIX_LISTEN"]);
        assert_eq!(setting.default_values(), ["127.0.0.1:9092"]);
        assert!(setting.help().starts_with("Address to listen on"));
    }

    #[test]
    fn kinds_follow_from_the_type() {
        let kinds = [
            ("node_id", SettingKind::Number),
            ("worker_threads", SettingKind::Number),
            ("segment_bytes", SettingKind::Size),
            ("default_retention_time", SettingKind::Time),
            ("storage", SettingKind::Choice),
            ("data_dir", SettingKind::Text),
            ("topic", SettingKind::List),
            ("no_direct_io", SettingKind::Switch),
        ];
        for (key, kind) in kinds {
            assert_eq!(setting(key).kind(), kind, "{key}");
        }
    }

    #[test]
    fn an_error_describes_the_expected_value() {
        let said = |key: &str, value: &str| setting(key).check(OsStr::new(value)).unwrap_err();
        assert_eq!(said("node_id", "x"), "write a whole number, without quotes");
        assert_eq!(said("worker_threads", "0"), "write a whole number, without quotes");
        assert!(said("segment_bytes", "5q").contains("64MiB"));
        assert_eq!(said("storage", "papyrus"), "write one of \"durable\", \"memory\"");
        assert!(said("topic", "orders").contains("orders:4"));
        assert_eq!(said("insecure", "maybe"), "write true or false");
        for (key, value) in [("insecure", "yes"), ("data_dir", "-x=,y"), ("peer", "1=a:1,2=b:2")] {
            setting(key).check(OsStr::new(value)).unwrap();
        }
    }

    #[test]
    fn every_setting_is_documented() {
        for setting in settings() {
            assert!(!setting.help().is_empty(), "{} has no help", setting.flag());
        }
    }
}
