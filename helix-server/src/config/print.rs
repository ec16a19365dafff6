//! The configuration in force, as a file that `--config` reads: each setting with what it is and
//! where its value comes from.

use std::ffi::OsString;
use std::fmt::{self, Display, Write};

use super::flags::{Choice, Resolved};
use super::settings::Kind;

impl Display for Resolved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# Settings of helix-server {}.", env!("CARGO_PKG_VERSION"))?;
        for choice in &self.choices {
            writeln!(f, "\n# {}", choice.setting.help())?;
            writeln!(f, "{choice}")?;
        }
        Ok(())
    }
}

impl Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, origin, values } = self;
        let key = setting.key();
        let text = |value: &OsString| value.to_string_lossy().into_owned();
        match (setting.kind(), values.as_slice()) {
            (_, []) => return write!(f, "# {key} is not set"),
            (Kind::List, values) => {
                // One variable or flag may hold several, with commas between them.
                let values = values.iter().map(text).collect::<Vec<_>>().join(",");
                let values = values.split(',').filter(|value| !value.is_empty()).map(quoted);
                write!(f, "{key} = [{}]", values.collect::<Vec<_>>().join(", "))?;
            }
            (Kind::Number, [value, ..]) => write!(f, "{key} = {}", number(&text(value)))?,
            (Kind::Switch, [value, ..]) => write!(f, "{key} = {}", is_on(&text(value)))?,
            (_, [value, ..]) => write!(f, "{key} = {}", quoted(&text(value)))?,
        }
        write!(f, " # {origin}")
    }
}

/// TOML knows no leading zeros, the parser of flags does.
fn number(text: &str) -> String {
    text.parse::<u64>().map_or_else(|_| text.to_owned(), |number| number.to_string())
}

/// As the parser of switches sees it.
fn is_on(text: &str) -> bool {
    !matches!(text.to_lowercase().as_str(), "n" | "no" | "f" | "false" | "off" | "0")
}

/// A basic string of TOML.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            // Ignored: a string takes everything.
            c if c.is_control() => drop(write!(quoted, "\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
