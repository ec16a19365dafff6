//! `helix context`: names for clusters, one of which is in use.
//! Speaks to no cluster; how a command chooses its addresses is in `context`.

use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{ContextCommand, Global};
use crate::context::{Cluster, Contexts, path};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// A context.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Row {
    /// Name of the context
    name: String,
    /// Whether commands use it that are given nothing else
    is_current: bool,
    /// Nodes to begin with
    addr: Vec<String>,
}

pub(crate) fn run(global: &Global, command: &ContextCommand) -> anyhow::Result<()> {
    let mut contexts = Contexts::load()?;
    match command {
        ContextCommand::List => {
            if contexts.contexts.is_empty() && !global.quiet {
                eprintln!("no contexts; helix context add NAME --addr HOST:PORT,... makes one");
            }
            return Output { format: global.output }.show(&rows(&contexts));
        }
        ContextCommand::Add { name, make_current } => {
            let cluster = cluster(name, &global.addr)?;
            contexts.contexts.insert(name.clone(), cluster);
            if *make_current || contexts.current.is_none() {
                contexts.switch_to(name)?;
            }
        }
        ContextCommand::Use { name } => contexts.switch_to(name)?,
        ContextCommand::Remove { name } => contexts.remove(name)?,
    }
    contexts.save()?;
    if !global.quiet {
        let current = match &contexts.current {
            Some(name) => format!("{name} is in use"),
            None => "none is in use".to_owned(),
        };
        eprintln!("{} contexts in {}; {current}", contexts.contexts.len(), path()?.display());
    }
    Ok(())
}

fn cluster(name: &str, addr: &[String]) -> anyhow::Result<Cluster> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if name.is_empty() || name == "-" || !name.chars().all(is_name) {
        let failure = Failure::new(Exit::Usage, format!("{name:?} is no name for a context"));
        return Err(failure.why("a name has letters, digits, '.', '_' and '-'").into());
    }
    if addr.is_empty() {
        let failure = Failure::new(Exit::Usage, "a context needs the addresses of its nodes");
        return Err(failure.hint(format!("helix context add {name} --addr HOST:PORT,...")).into());
    }
    Ok(Cluster { addr: addr.to_vec() })
}

fn rows(contexts: &Contexts) -> Vec<Row> {
    let row = |(name, cluster): (&String, &Cluster)| Row {
        name: name.clone(),
        is_current: contexts.current.as_ref() == Some(name),
        addr: cluster.addr.clone(),
    };
    contexts.contexts.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_has_a_name_and_addresses() {
        let addr = ["n1:9092".to_owned()];
        assert_eq!(cluster("prod-1.eu", &addr).unwrap().addr, addr);
        assert!(cluster("prod", &[]).is_err());
        for name in ["", "-", "a b", "a/b"] {
            assert!(cluster(name, &addr).is_err(), "{name:?}");
        }
    }
}
