//! `helix explain`: explains a reason, or lists all reasons.

use crate::args::GlobalArgs;
use crate::exit::{CliError, Exit};
use crate::output::Output;
use crate::reason_pages::{ReasonPage, pages};

pub(crate) fn run(global: &GlobalArgs, reason: Option<&str>) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    let pages = pages();
    let Some(requested) = reason else { return output.show(&pages) };
    let name = normalized(requested);
    let found: Vec<ReasonPage> = pages.into_iter().filter(|page| page.name() == name).collect();
    if found.is_empty() {
        let failure = CliError::new(Exit::NotFound, format!("unknown reason {requested:?}"));
        return Err(failure.hint("helix explain   lists all reasons").into());
    }
    output.show_as(&found, || found.iter().map(ReasonPage::text).collect())
}

/// Normalizes `no-leader` and `ERROR_REASON_NO_LEADER` to `NO_LEADER`.
fn normalized(text: &str) -> String {
    let name = text.trim().to_uppercase().replace('-', "_");
    name.trim_start_matches("ERROR_REASON_").trim_start_matches("HEALTH_REASON_").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_names_are_normalized() {
        for text in ["NO_LEADER", "no_leader", "no-leader", "ERROR_REASON_NO_LEADER"] {
            assert_eq!(normalized(text), "NO_LEADER");
        }
    }
}
