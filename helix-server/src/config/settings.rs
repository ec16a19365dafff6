//! The settings one by one, as the flags of `Config` declare them: names, kinds, defaults, help.
//! What reads and prints configurations goes by this list, and so does the documentation.

use std::any::TypeId;
use std::ffi::{OsStr, OsString};
use std::num::NonZeroUsize;

use clap::builder::BoolishValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Args, Command};

use super::Config;

/// What is written as a setting's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Switch,
    Number,
    Size,
    Time,
    Choice,
    Text,
    /// Of texts.
    List,
}

/// One setting.
#[derive(Debug, Clone)]
pub struct Setting {
    arg: Arg,
}

/// All settings, in the order in which people should meet them.
pub fn settings() -> Vec<Setting> {
    let command = Config::augment_args(Command::new("helix-server"));
    command.get_arguments().map(|arg| Setting { arg: complete(arg.clone()) }).collect()
}

/// A switch can be switched off again, so that the command line can overrule a file.
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
    /// Name of the flag, without the dashes.
    pub fn flag(&self) -> &str {
        self.arg.get_long().expect("every setting is a long flag")
    }

    /// Key in the file.
    pub fn key(&self) -> String {
        self.flag().replace('-', "_")
    }

    /// Name in the environment.
    pub fn variable(&self) -> String {
        variable(self.flag())
    }

    /// All names in the environment, those of the flag's aliases included.
    pub(super) fn variables(&self) -> Vec<String> {
        let aliases = self.arg.get_all_aliases().unwrap_or_default();
        [self.flag()].into_iter().chain(aliases).map(variable).collect()
    }

    /// What it is, in one line.
    pub fn help(&self) -> String {
        self.arg.get_help().map(ToString::to_string).unwrap_or_default()
    }

    /// As it would be written on the command line; empty: there is none.
    pub fn default_values(&self) -> Vec<String> {
        let values = self.arg.get_default_values();
        values.iter().map(|value| value.to_string_lossy().into_owned()).collect()
    }

    pub fn kind(&self) -> Kind {
        let numbers = [TypeId::of::<u64>(), TypeId::of::<u32>(), TypeId::of::<NonZeroUsize>()];
        let type_id = self.arg.get_value_parser().type_id();
        match self.value_name() {
            _ if matches!(self.arg.get_action(), ArgAction::Append) => Kind::List,
            "BOOL" => Kind::Switch,
            "BYTES" => Kind::Size,
            "TIME" => Kind::Time,
            _ if numbers.iter().any(|number| type_id == *number) => Kind::Number,
            _ if !self.arg.get_possible_values().is_empty() => Kind::Choice,
            _ => Kind::Text,
        }
    }

    /// What may be written in the file.
    pub fn wanted(&self) -> String {
        match self.kind() {
            Kind::Switch => "true or false".to_owned(),
            Kind::Number => "a whole number, without quotes".to_owned(),
            Kind::Size => "a size, as in 1048576 or \"64MiB\"".to_owned(),
            Kind::Time => "a length of time, as in \"90s\", \"15m\" or \"7d\"".to_owned(),
            Kind::Choice => format!("one of {}", self.choices()),
            Kind::Text => "a text in quotes".to_owned(),
            Kind::List => format!("a list of texts, as in [\"{}\"]", self.value_name()),
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

    /// The command-line argument that sets it.
    pub(super) fn argument(&self, value: &OsStr) -> OsString {
        let mut argument = OsString::from(format!("--{}=", self.flag()));
        argument.push(value);
        argument
    }

    /// Checks the form of one value; an error says what is wanted.
    pub(super) fn check(&self, value: &OsStr) -> Result<(), String> {
        let command = Command::new("helix-server").no_binary_name(true).arg(self.arg.clone());
        let Err(error) = command.try_get_matches_from([self.argument(value)]) else {
            return Ok(());
        };
        let source = std::error::Error::source(&error).map(ToString::to_string);
        Err(match (error.kind(), error.get(ContextKind::ValidValue), source) {
            (ErrorKind::InvalidValue, Some(ContextValue::Strings(_)), _) => {
                format!("write {}", self.wanted())
            }
            // Ours say what they want; clap's own do not.
            (_, _, Some(source)) if !matches!(self.kind(), Kind::Number | Kind::Switch) => source,
            _ => format!("write {}", self.wanted()),
        })
    }
}

fn variable(flag: &str) -> String {
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
            ("node_id", Kind::Number),
            ("worker_threads", Kind::Number),
            ("segment_bytes", Kind::Size),
            ("default_retention_time", Kind::Time),
            ("storage", Kind::Choice),
            ("data_dir", Kind::Text),
            ("topic", Kind::List),
            ("no_direct_io", Kind::Switch),
        ];
        for (key, kind) in kinds {
            assert_eq!(setting(key).kind(), kind, "{key}");
        }
    }

    #[test]
    fn a_value_that_is_none_is_told_what_is_wanted() {
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
