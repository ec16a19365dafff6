//! Holds docs/configuration.md to the code: its table of settings is made here.
//! `HELIX_BLESS=1 cargo test -p helix-server --lib reference` writes it anew.

// The documentation is read, and written where that is asked for.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::Path;

use super::settings::{Kind, Setting, settings};

const BEGIN: &str = "<!-- settings: made from the code -->\n";
const END: &str = "<!-- end of settings -->\n";

fn table() -> String {
    let mut table = "| key | default | |\n|---|---|---|\n".to_owned();
    for setting in settings() {
        let default = default(&setting);
        table += &format!("| `{}` | {default} | {} |\n", setting.key(), help(&setting));
    }
    table
}

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
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/configuration.md");
    let page = fs::read_to_string(&path).unwrap();
    let begin = page.find(BEGIN).expect("the page has its mark") + BEGIN.len();
    let end = page.find(END).expect("the page has its end mark");
    if std::env::var_os("HELIX_BLESS").is_some() {
        fs::write(&path, [&page[..begin], &table(), &page[end..]].concat()).unwrap();
        return;
    }
    assert_eq!(&page[begin..end], table(), "HELIX_BLESS=1 writes the table anew");
}
