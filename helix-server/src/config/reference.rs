//! Checks the table of settings in docs/configuration.md, which is generated from the code.
//! `HELIX_BLESS=1 cargo test -p helix-server --lib reference` writes it.

use super::settings::{Setting, SettingKind, settings};
use crate::doc_tables;

fn help(setting: &Setting) -> String {
    let choices = match setting.kind() {
        SettingKind::Choice => format!(" ({})", setting.expected()),
        _ => String::new(),
    };
    format!("{}{choices}", setting.help()).replace('|', "\\|")
}

fn default(setting: &Setting) -> String {
    let values = setting.default_values();
    let quoted: Vec<_> = values.iter().map(|value| format!("{value:?}")).collect();
    match setting.kind() {
        _ if values.is_empty() => String::new(),
        SettingKind::Switch | SettingKind::Number | SettingKind::Share => {
            format!("`{}`", values.join(" "))
        }
        SettingKind::List => format!("`[{}]`", quoted.join(", ")),
        _ => format!("`{}`", quoted.join(", ")),
    }
}

#[test]
fn the_documentation_has_every_setting_of_the_configuration() {
    let row = |it: &Setting| format!("| `{}` | {} | {} |\n", it.key(), default(it), help(it));
    let head = "| key | default | |\n|---|---|---|\n";
    doc_tables::expect_table("configuration.md", "settings", head, settings().iter().map(row));
}
