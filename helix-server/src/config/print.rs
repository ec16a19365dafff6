//! Prints the effective configuration as a file for `--config`.
//! Each setting has its help and the origin of its value.

use std::ffi::OsString;
use std::fmt::{self, Display, Write};

use super::flags::{ResolvedConfig, ResolvedSetting};
use super::settings::SettingKind;
use super::values::parse_share;

impl Display for ResolvedConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# Settings of helix-server {}.", env!("CARGO_PKG_VERSION"))?;
        for resolved in &self.settings {
            writeln!(f, "\n# {}", resolved.setting.help())?;
            writeln!(f, "{resolved}")?;
        }
        Ok(())
    }
}

impl Display for ResolvedSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, origin, values } = self;
        let key = setting.key();
        let text = |value: &OsString| value.to_string_lossy().into_owned();
        match (setting.kind(), values.as_slice()) {
            (_, []) => return write!(f, "# {key} is not set"),
            (SettingKind::List, values) => {
                // One variable or flag may have several values, separated by commas.
                let values = values.iter().map(text).collect::<Vec<_>>().join(",");
                let values = values.split(',').filter(|value| !value.is_empty()).map(quoted);
                write!(f, "{key} = [{}]", values.collect::<Vec<_>>().join(", "))?;
            }
            (SettingKind::Number, [value, ..]) => write!(f, "{key} = {}", number(&text(value)))?,
            (SettingKind::Share, [value, ..]) => write!(f, "{key} = {}", share(&text(value)))?,
            (SettingKind::Switch, [value, ..]) => write!(f, "{key} = {}", is_on(&text(value)))?,
            (_, [value, ..]) => write!(f, "{key} = {}", quoted(&text(value)))?,
        }
        write!(f, " # {origin}")
    }
}

/// Formats a number without leading zeros, which flags allow and TOML does not.
fn number(text: &str) -> String {
    text.parse::<u64>().map_or_else(|_| text.to_owned(), |number| number.to_string())
}

/// Formats a share as TOML does: `.5` is `0.5`.
fn share(text: &str) -> String {
    parse_share(text).map_or_else(|_| quoted(text), |share| share.to_string())
}

/// Parses a switch as clap does.
fn is_on(text: &str) -> bool {
    !matches!(text.to_lowercase().as_str(), "n" | "no" | "f" | "false" | "off" | "0")
}

/// Formats a basic string of TOML.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            // Ignored: writing to a String cannot fail.
            c if c.is_control() => drop(write!(quoted, "\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
