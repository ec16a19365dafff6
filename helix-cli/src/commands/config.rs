//! `helix config`: the settings of a node, with defaults and what they are.
//! The list is the server's own; what a running node was started with is in its log.

use helix_server::config::{Kind, Setting, settings};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{ConfigCommand, Global};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// How alike two names must be for one to be meant with the other.
const LIKENESS_MIN: f64 = 0.8;

/// A setting.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Row {
    /// Its name in the file
    key: String,
    /// Null: it has none
    default: Option<String>,
    /// What may be written
    #[schemars(extend("x-wide" = true))]
    wanted: String,
    #[schemars(extend("x-wide" = true))]
    flag: String,
    /// Environment variable
    #[schemars(extend("x-wide" = true))]
    variable: String,
    /// What it is
    help: String,
}

pub(crate) fn run(global: &Global, command: &ConfigCommand) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    let rows: Vec<Row> = settings().iter().map(Row::from).collect();
    match command {
        ConfigCommand::List => output.show(&rows),
        ConfigCommand::Explain { key } => {
            let row = find(rows, key)?;
            output.show_as(&row, || row.text())
        }
    }
}

/// The setting of this key, flag or variable.
fn find(rows: Vec<Row>, asked: &str) -> anyhow::Result<Row> {
    let key = asked.trim_start_matches('-').to_lowercase().replace('-', "_");
    let key = key.strip_prefix("helix_").unwrap_or(&key);
    let alike = |row: &&Row| strsim::jaro(&row.key, key) >= LIKENESS_MIN || row.key.contains(key);
    let alike: Vec<String> = rows.iter().filter(alike).map(|row| row.key.clone()).collect();
    rows.into_iter().find(|row| row.key == key).ok_or_else(|| {
        let failure = Failure::new(Exit::NotFound, format!("a node has no setting {asked:?}"));
        let failure = match alike.as_slice() {
            [] => failure,
            alike => failure.why(format!("did you mean {}?", alike.join(" or "))),
        };
        failure.hint("helix config list").into()
    })
}

impl From<&Setting> for Row {
    fn from(setting: &Setting) -> Self {
        let values = setting.default_values();
        Self {
            key: setting.key(),
            default: (!values.is_empty()).then(|| values.join(",")),
            wanted: match setting.kind() {
                // The file has quotes, a command line has none.
                Kind::Text => "a text".to_owned(),
                _ => setting.wanted(),
            },
            flag: format!("--{}", setting.flag()),
            variable: setting.variable(),
            help: setting.help(),
        }
    }
}

impl Row {
    fn text(&self) -> String {
        let Self { key, default, wanted, flag, variable, help } = self;
        let default = default.as_deref().unwrap_or("none");
        format!(
            "{key}: {help}\n\n  default:      {default}\n  write:        {wanted}\n  \
             in the file:  {key} = ...\n  environment:  {variable}\n  command line: {flag}\n\n\
             helix-server --print-config   shows what is in force, and where it comes from\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Row> {
        settings().iter().map(Row::from).collect()
    }

    #[test]
    fn a_setting_is_found_by_each_of_its_names() {
        for name in ["listen_addr", "listen-addr", "--listen-addr", "HELIX_LISTEN_ADDR"] {
            assert_eq!(find(rows(), name).unwrap().key, "listen_addr");
        }
        let row = find(rows(), "listen_addr").unwrap();
        assert_eq!(row.default.as_deref(), Some("127.0.0.1:9092"));
        assert!(row.text().contains("HELIX_LISTEN_ADDR"), "{}", row.text());
    }

    #[test]
    fn a_name_that_is_almost_right_is_answered_with_the_right_one() {
        let error = find(rows(), "listen_adr").unwrap_err();
        let failure = error.downcast_ref::<Failure>().unwrap();
        assert!(failure.why.contains("listen_addr"), "{failure:?}");
        assert_eq!(failure.exit, Exit::NotFound);
    }
}
