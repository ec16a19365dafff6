//! Holds docs/configuration.md to the code: its table of settings is made here.
//! `HELIX_BLESS=1 cargo test -p helix-server --lib reference` writes it anew.

use super::settings::{Kind, Setting, settings};
use crate::made_docs;

fn help(setting: &Setting) -> String {
    let choices = match setting.kind() {
        Kind::Choice => format!(" ({})", setting.wanted()),
        _ => String::new(),
    };
    format!("{}{choices}", setting.help()).replace('|', "\\|")
}

fn default(setting: &Setting) -> String {
    let values = setting.default_values();
    let quoted: Vec<_> = values.iter().map(|value| format!("{value:?}")).collect();
    match setting.kind() {
        _ if values.is_empty() => String::new(),
        Kind::Switch | Kind::Number => format!("`{}`", values.join(" ")),
        Kind::List => format!("`[{}]`", quoted.join(", ")),
        _ => format!("`{}`", quoted.join(", ")),
    }
}

#[test]
fn the_documentation_has_every_setting_of_the_configuration() {
    let row = |it: &Setting| format!("| `{}` | {} | {} |\n", it.key(), default(it), help(it));
    let head = "| key | default | |\n|---|---|---|\n";
    made_docs::expect_table("configuration.md", "settings", head, settings().iter().map(row));
}
