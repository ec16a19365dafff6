//! `helix context`: manages named cluster addresses.
//! Connects to no cluster; `crate::context` selects the addresses of a command.

use anyhow::Context as _;
use helix_client::contexts::{ADDR_DEFAULT, ADDR_VARIABLE, ContextEntry, Contexts};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{ContextSubcommand, GlobalArgs, TlsArgs};
use crate::exit::{CliError, Exit};
use crate::output::{Output, message};
use crate::{context, tls, units};

/// A context.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ContextRow {
    /// Name of the context
    name: String,
    /// True for the context that commands use by default
    is_current: bool,
    /// Nodes to contact first
    addr: Vec<String>,
    /// File with the token; absent without one
    token_file: Option<String>,
    /// Rack of the clients; absent without one
    rack: Option<String>,
    /// True if connections have TLS
    tls: bool,
}

pub(crate) fn run(global: &GlobalArgs, command: &ContextSubcommand) -> anyhow::Result<()> {
    let mut contexts = context::load()?;
    match command {
        ContextSubcommand::List => {
            if contexts.contexts.is_empty() && !global.quiet {
                message!("no contexts; add one with: helix context add NAME --addr HOST:PORT,...");
            }
            return Output { format: global.output }.show(&rows(&contexts));
        }
        ContextSubcommand::Add { name, make_current } => {
            let token_file = match &global.token_file {
                Some(path) => Some(std::path::absolute(path).context("find the token file")?),
                None => None,
            };
            let entry = context_entry(name, &global.addr, &global.tls)?;
            let entry = ContextEntry { token_file, rack: global.client_rack.clone(), ..entry };
            contexts.contexts.insert(name.clone(), entry);
            if *make_current || contexts.current.is_none() {
                contexts.switch_to(name).map_err(context::failure)?;
            }
        }
        ContextSubcommand::Use { name } => {
            contexts.switch_to(name).map_err(context::failure)?;
        }
        ContextSubcommand::Remove { name } => contexts.remove(name).map_err(context::failure)?,
    }
    context::save(&contexts)?;
    if !global.quiet {
        let current = match &contexts.current {
            Some(name) => format!("current: {name}"),
            None => match std::env::var(ADDR_VARIABLE) {
                Ok(addr) => format!("no current context; commands use {addr} of HELIX_ADDR"),
                Err(_) => format!("no current context; commands use {ADDR_DEFAULT}"),
            },
        };
        let count = units::counted(contexts.contexts.len() as u64, "context");
        let path = Contexts::path().map_err(context::failure)?;
        message!("{count} in {}; {current}", path.display());
    }
    Ok(())
}

fn context_entry(name: &str, addr: &[String], tls: &TlsArgs) -> anyhow::Result<ContextEntry> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if name.is_empty() || name == "-" || !name.chars().all(is_name) {
        let failure = CliError::new(Exit::Usage, format!("invalid context name {name:?}"));
        return Err(failure.why("use letters, digits, '.', '_' and '-'").into());
    }
    if addr.is_empty() {
        let failure = CliError::new(Exit::Usage, "the addresses of the context are missing");
        return Err(failure.hint(format!("helix context add {name} --addr HOST:PORT,...")).into());
    }
    let tls = tls::of_args(tls);
    tls.options().map_err(context::failure)?;
    Ok(ContextEntry { addr: addr.to_vec(), tls, ..ContextEntry::default() })
}

fn rows(contexts: &Contexts) -> Vec<ContextRow> {
    let row = |(name, entry): (&String, &ContextEntry)| ContextRow {
        name: name.clone(),
        is_current: contexts.current.as_ref() == Some(name),
        addr: entry.addr.clone(),
        token_file: entry.token_file.as_ref().map(|path| path.display().to_string()),
        rack: entry.rack.clone(),
        tls: !entry.tls.is_empty(),
    };
    contexts.contexts.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requires_valid_name_and_addresses() {
        let addr = ["n1:9092".to_owned()];
        assert_eq!(context_entry("prod-1.eu", &addr, &TlsArgs::default()).unwrap().addr, addr);
        assert!(context_entry("prod", &[], &TlsArgs::default()).is_err());
        for name in ["", "-", "a b", "a/b"] {
            assert!(context_entry(name, &addr, &TlsArgs::default()).is_err(), "{name:?}");
        }
    }
}
