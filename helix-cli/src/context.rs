//! Contexts: named cluster addresses and token files, in a file of the user. Also selects the
//! cluster of a command:
//! `--addr`, then `--context`, then HELIX_ADDR, then the current context, then localhost.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use helix_proto::address;
use serde::{Deserialize, Serialize};

use crate::exit::{CliError, Exit};
use crate::files;
use crate::tls::ContextTls;

/// Address used if no other is given.
pub(crate) const DEFAULT_ADDR: &str = "127.0.0.1:9092";

/// Environment variable with addresses in the format of `--addr`.
pub(crate) const ENV: &str = "HELIX_ADDR";

/// Order of the address sources, for help texts and documentation.
pub(crate) const HELP: &str = "\
A command connects to the first of these that is set:
  --addr HOST:PORT,...   nodes to contact first; they name the other nodes. PORT defaults to 9092;
                         unix:PATH is the socket of a node on this machine
  --context NAME         a context: helix context add NAME --addr ...
  HELIX_ADDR             environment variable, same format as --addr
  the current context    helix context use NAME
  127.0.0.1:9092         the default
TLS is on if --tls-ca is given, else if the context has a CA, else if HELIX_TLS_CA is set.";

/// Content of the contexts file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Contexts {
    /// Name of the current context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) current: Option<String>,
    /// Name of the previous current context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) previous: Option<String>,
    #[serde(default)]
    pub(crate) contexts: BTreeMap<String, ContextEntry>,
}

/// The cluster of a context.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ContextEntry {
    pub(crate) addr: Vec<String>,
    /// File with the token for this cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_file: Option<PathBuf>,
    /// Files of TLS; empty for a cluster without TLS.
    #[serde(default, skip_serializing_if = "ContextTls::is_empty")]
    pub(crate) tls: ContextTls,
}

/// Node addresses and the setting that they come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClusterAddresses {
    pub(crate) addr: Vec<String>,
    pub(crate) source: String,
    /// File with the token of the context that has the addresses.
    pub(crate) token_file: Option<PathBuf>,
    /// Files of TLS, if a context is the source.
    pub(crate) tls: Option<ContextTls>,
}

impl Contexts {
    /// Loads the user's contexts; empty if there is no file.
    ///
    /// # Errors
    /// Fails if the file cannot be read or parsed.
    pub(crate) fn load() -> anyhow::Result<Self> {
        match path() {
            Ok(path) => Self::load_from(&path),
            // Without a home directory there are no contexts.
            Err(_) => Ok(Self::default()),
        }
    }

    fn load_from(path: &Path) -> anyhow::Result<Self> {
        let text = files::read_text(path);
        let text = text.with_context(|| format!("read {}", path.display()))?;
        toml::from_str(&text.unwrap_or_default()).map_err(|error| {
            let failure = CliError::new(Exit::Error, format!("{} is not valid", path.display()));
            let failure = failure.why(error.to_string().trim_end().to_owned());
            failure.hint("correct the file, or remove it and add the contexts again").into()
        })
    }

    pub(crate) fn save(&self) -> anyhow::Result<()> {
        self.save_to(&path()?)
    }

    fn save_to(&self, path: &Path) -> anyhow::Result<()> {
        let text = toml::to_string(self).context("write the contexts as TOML")?;
        let saved = path
            .parent()
            .map_or(Ok(()), files::create_directory)
            .and_then(|()| files::replace(path, text.as_bytes()));
        saved.with_context(|| format!("write {}", path.display()))
    }

    /// Makes a context the current one; `-` is the previous one.
    ///
    /// # Errors
    /// Fails if there is no context of this name.
    pub(crate) fn switch_to(&mut self, name: &str) -> anyhow::Result<()> {
        let name = match name {
            "-" => self.previous.clone().ok_or_else(|| {
                let failure = CliError::new(Exit::NotFound, "there is no previous context");
                failure.hint("helix context list")
            })?,
            name => name.to_owned(),
        };
        self.get(&name)?;
        if self.current.as_ref() != Some(&name) {
            self.previous = self.current.replace(name);
        }
        Ok(())
    }

    /// Removes a context. If it is the current one, no context is current afterwards.
    ///
    /// # Errors
    /// Fails if there is no context of this name.
    pub(crate) fn remove(&mut self, name: &str) -> anyhow::Result<()> {
        self.get(name)?;
        self.contexts.remove(name);
        self.current.take_if(|current| current == name);
        self.previous.take_if(|previous| previous == name);
        Ok(())
    }

    fn get(&self, name: &str) -> anyhow::Result<&ContextEntry> {
        self.contexts.get(name).ok_or_else(|| {
            let failure = CliError::new(Exit::NotFound, format!("there is no context {name:?}"));
            let known: Vec<&str> = self.contexts.keys().map(String::as_str).collect();
            let failure = match known.as_slice() {
                [] => failure.why("no context is defined"),
                known => failure.why(format!("defined contexts: {}", known.join(", "))),
            };
            failure.hint(format!("helix context add {name} --addr HOST:PORT,...")).into()
        })
    }
}

/// Returns the path of the contexts file.
pub(crate) fn path() -> anyhow::Result<PathBuf> {
    let directory = files::config_directory().ok_or_else(|| {
        let failure = CliError::new(Exit::Error, "no directory for the contexts file");
        failure.why("neither XDG_CONFIG_HOME nor HOME is set").hint("export HOME=DIRECTORY")
    })?;
    Ok(directory.join("config.toml"))
}

/// Selects the addresses of a command.
///
/// # Errors
/// Fails if the context is unknown, if the contexts file is needed and unreadable, or if an address
/// is not valid.
pub(crate) fn resolve(addr: &[String], context: Option<&str>) -> anyhow::Result<ClusterAddresses> {
    let env = std::env::var(ENV).ok();
    select(addr, context, env.as_deref(), Contexts::load)
}

/// Parses addresses in the format of `--addr` from a setting.
fn parse(addresses: &str, setting: &str, hint: String) -> anyhow::Result<Vec<String>> {
    let parsed = address::parse_list(addresses, Some(address::PORT_DEFAULT));
    parsed.map_err(|what| {
        let failure = CliError::new(Exit::Usage, format!("{setting} is not valid"));
        failure.why(what).hint(hint).into()
    })
}

/// Selects the addresses from the first source that is set.
fn select(
    addr: &[String],
    context: Option<&str>,
    env: Option<&str>,
    contexts: impl FnOnce() -> anyhow::Result<Contexts>,
) -> anyhow::Result<ClusterAddresses> {
    if !addr.is_empty() {
        let (addr, source) = (addr.to_vec(), "--addr".to_owned());
        return Ok(ClusterAddresses { addr, source, token_file: None, tls: None });
    }
    if let Some(name) = context {
        return contexts()?.get(name).and_then(|cluster| of_context(name, cluster));
    }
    if let Some(env) = env.filter(|env| !env.trim().is_empty()) {
        let addr = parse(env, ENV, format!("export {ENV}=HOST:PORT,..."))?;
        let source = ENV.to_owned();
        return Ok(ClusterAddresses { addr, source, token_file: None, tls: None });
    }
    let contexts = contexts()?;
    match &contexts.current {
        Some(name) => contexts.get(name).and_then(|cluster| of_context(name, cluster)),
        None => Ok(ClusterAddresses {
            addr: vec![DEFAULT_ADDR.to_owned()],
            source: "the default".to_owned(),
            token_file: None,
            tls: None,
        }),
    }
}

fn of_context(name: &str, cluster: &ContextEntry) -> anyhow::Result<ClusterAddresses> {
    let source = format!("context {name}");
    let hint = format!("helix context add {name} --addr HOST:PORT,...");
    let addr = parse(&cluster.addr.join(","), &source, hint)?;
    let (token_file, tls) = (cluster.token_file.clone(), Some(cluster.tls.clone()));
    Ok(ClusterAddresses { addr, source, token_file, tls })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contexts() -> Contexts {
        let cluster =
            |addr: &str| ContextEntry { addr: vec![addr.to_owned()], ..ContextEntry::default() };
        Contexts {
            current: Some("dev".to_owned()),
            previous: None,
            contexts: BTreeMap::from([
                ("dev".to_owned(), cluster("d:1")),
                ("prod".to_owned(), cluster("p:1")),
            ]),
        }
    }

    fn found(addr: &[&str], context: Option<&str>, env: Option<&str>) -> (String, String) {
        let addr: Vec<_> = addr.iter().map(|&address| address.to_owned()).collect();
        let ClusterAddresses { addr, source, .. } =
            select(&addr, context, env, || Ok(contexts())).unwrap();
        (addr.join(","), source)
    }

    #[test]
    fn flag_takes_precedence_over_environment_and_current_context() {
        let all = found(&["f:1", "f:2"], Some("prod"), Some("e:1"));
        assert_eq!(all, ("f:1,f:2".to_owned(), "--addr".to_owned()));
        let named = found(&[], Some("prod"), Some("e:1"));
        assert_eq!(named, ("p:1".to_owned(), "context prod".to_owned()));
        let env = found(&[], None, Some("e:1, e:2"));
        assert_eq!(env, ("e:1,e:2".to_owned(), "HELIX_ADDR".to_owned()));
        assert_eq!(found(&[], None, Some("")), ("d:1".to_owned(), "context dev".to_owned()));
        let none = select(&[], None, None, || Ok(Contexts::default())).unwrap();
        assert_eq!(none.addr, [DEFAULT_ADDR]);
        let unknown = select(&[], Some("x"), None, || Ok(contexts())).unwrap_err();
        assert_eq!(crate::exit::of(&unknown), Exit::NotFound);
    }

    #[test]
    fn addresses_of_every_source_are_checked() {
        for wrong in ["n1:99999", "n1:", "n1:0", "http://n1/a", "n1,,n2", "n1 :1"] {
            let env = select(&[], None, Some(wrong), || Ok(contexts())).unwrap_err();
            let failure = env.downcast_ref::<CliError>().unwrap();
            assert_eq!(
                (failure.exit, failure.what.as_str()),
                (Exit::Usage, "HELIX_ADDR is not valid")
            );
            assert!(failure.why.contains("host:port"), "{failure:?}");
            let mut old = contexts();
            let entry = ContextEntry { addr: vec![wrong.to_owned()], ..ContextEntry::default() };
            old.contexts.insert("dev".to_owned(), entry);
            let named = select(&[], None, None, || Ok(old)).unwrap_err();
            let failure = named.downcast_ref::<CliError>().unwrap();
            assert!(failure.hint.starts_with("helix context add dev"), "{failure:?}");
        }
        let found = found(&[], None, Some("n1, [::1]"));
        assert_eq!(found.0, "n1:9092,[::1]:9092");
    }

    #[test]
    fn reads_contexts_file_only_if_needed() {
        let broken = || Err(anyhow::anyhow!("broken"));
        assert!(select(&["f:1".to_owned()], None, None, broken).is_ok());
        assert!(select(&[], None, Some("e:1"), broken).is_ok());
        assert!(select(&[], None, None, broken).is_err());
    }

    #[test]
    fn switches_between_contexts() {
        let mut contexts = contexts();
        assert!(contexts.switch_to("-").is_err());
        contexts.switch_to("prod").unwrap();
        assert_eq!(contexts.current.as_deref(), Some("prod"));
        contexts.switch_to("-").unwrap();
        contexts.switch_to("dev").unwrap();
        assert_eq!(contexts.previous.as_deref(), Some("prod"));
        contexts.remove("dev").unwrap();
        assert_eq!(contexts.current, None);
        assert!(contexts.remove("dev").is_err());
    }

    #[test]
    fn contexts_round_trip_and_invalid_file_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("helix/config.toml");
        assert_eq!(Contexts::load_from(&path).unwrap(), Contexts::default());
        contexts().save_to(&path).unwrap();
        assert_eq!(Contexts::load_from(&path).unwrap(), contexts());
        files::replace(&path, b"curent = 'dev'\n").unwrap();
        let error = Contexts::load_from(&path).unwrap_err();
        let failure = error.downcast_ref::<CliError>().unwrap();
        assert!(failure.why.contains("curent"), "{failure:?}");
    }
}
