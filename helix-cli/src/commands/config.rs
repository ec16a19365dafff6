//! `helix config`: the settings of a node with their defaults and descriptions.
//! The list comes from the server; a running node logs its effective settings.

use helix_server::config::{Setting, SettingKind, settings};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{ConfigSubcommand, GlobalArgs};
use crate::exit::{CliError, Exit};
use crate::output::Output;

/// Minimum Jaro similarity of a suggested setting name.
const SIMILARITY_MIN: f64 = 0.8;

/// A setting of a node.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct SettingRow {
    /// Key in the configuration file
    key: String,
    /// Null if there is no default
    default: Option<String>,
    /// Accepted values
    #[schemars(extend("x-wide" = true))]
    wanted: String,
    #[schemars(extend("x-wide" = true))]
    flag: String,
    /// Environment variable
    #[schemars(extend("x-wide" = true))]
    variable: String,
    /// Description
    help: String,
}

pub(crate) fn run(global: &GlobalArgs, command: &ConfigSubcommand) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    let rows: Vec<SettingRow> = settings().iter().map(SettingRow::from).collect();
    match command {
        ConfigSubcommand::List => output.show(&rows),
        ConfigSubcommand::Explain { key } => {
            let row = find(rows, key)?;
            output.show_as(&row, || row.text())
        }
    }
}

/// Finds a setting by its key, flag or environment variable.
fn find(rows: Vec<SettingRow>, setting_name: &str) -> anyhow::Result<SettingRow> {
    let key = setting_name.trim_start_matches('-').to_lowercase().replace('-', "_");
    let key = key.strip_prefix("helix_").unwrap_or(&key);
    let is_similar =
        |row: &&SettingRow| strsim::jaro(&row.key, key) >= SIMILARITY_MIN || row.key.contains(key);
    let similar: Vec<String> = rows.iter().filter(is_similar).map(|row| row.key.clone()).collect();
    rows.into_iter().find(|row| row.key == key).ok_or_else(|| {
        let failure = CliError::new(Exit::NotFound, format!("unknown setting {setting_name:?}"));
        let failure = match similar.as_slice() {
            [] => failure,
            similar => failure.why(format!("did you mean {}?", similar.join(" or "))),
        };
        failure.hint("helix config list").into()
    })
}

impl From<&Setting> for SettingRow {
    fn from(setting: &Setting) -> Self {
        let values = setting.default_values();
        Self {
            key: setting.key(),
            default: (!values.is_empty()).then(|| values.join(",")),
            wanted: match setting.kind() {
                // Only the configuration file needs quotes.
                SettingKind::Text => "a string".to_owned(),
                _ => setting.expected(),
            },
            flag: format!("--{}", setting.flag()),
            variable: setting.variable(),
            help: setting.help(),
        }
    }
}

impl SettingRow {
    fn text(&self) -> String {
        let Self { key, default, wanted, flag, variable, help } = self;
        let default = default.as_deref().unwrap_or("none");
        format!(
            "{key}: {help}\n\n  default:      {default}\n  values:       {wanted}\n  \
             in the file:  {key} = ...\n  environment:  {variable}\n  command line: {flag}\n\n\
             helix-server --print-config   shows effective values and their sources\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<SettingRow> {
        settings().iter().map(SettingRow::from).collect()
    }

    #[test]
    fn finds_setting_by_key_flag_and_variable() {
        for name in ["listen_addr", "listen-addr", "--listen-addr", "HELIX_LISTEN_ADDR"] {
            assert_eq!(find(rows(), name).unwrap().key, "listen_addr");
        }
        let row = find(rows(), "listen_addr").unwrap();
        assert_eq!(row.default.as_deref(), Some("127.0.0.1:9092"));
        assert!(row.text().contains("HELIX_LISTEN_ADDR"), "{}", row.text());
    }

    #[test]
    fn suggests_similar_setting() {
        let error = find(rows(), "listen_adr").unwrap_err();
        let failure = error.downcast_ref::<CliError>().unwrap();
        assert!(failure.why.contains("listen_addr"), "{failure:?}");
        assert_eq!(failure.exit, Exit::NotFound);
    }
}
