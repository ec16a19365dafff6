//! Contexts: names for clusters, kept in a file of the user's, and how a command finds its cluster.
//! `--addr`, then `--context`, then HELIX_ADDR, then the current context, then this machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use crate::exit::{Exit, Failure};
use crate::files;

/// Where a cluster is looked for if nothing says another place.
pub(crate) const DEFAULT_ADDR: &str = "127.0.0.1:9092";

/// Port of an address that names none.
const PORT: u16 = 9092;

/// Environment variable with addresses, as `--addr` takes them.
const ENV: &str = "HELIX_ADDR";

/// The order, for help and documentation.
pub(crate) const HELP: &str = "\
The cluster that a command speaks to is the first of these that is set:
  --addr HOST:PORT,...   nodes to begin with; the others are learned from them. PORT may be left
                         out where it is 9092
  --context NAME         a context: helix context add NAME --addr ...
  HELIX_ADDR             environment variable, as --addr
  the current context    helix context use NAME
  127.0.0.1:9092         this machine";

/// The file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Contexts {
    /// Name of the one in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) current: Option<String>,
    /// Name of the one that was in use before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) previous: Option<String>,
    #[serde(default)]
    pub(crate) contexts: BTreeMap<String, Cluster>,
}

/// One cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cluster {
    pub(crate) addr: Vec<String>,
}

/// Nodes to begin with, and who named them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) addr: Vec<String>,
    pub(crate) source: String,
}

impl Contexts {
    /// The user's contexts; none if there is no file yet.
    ///
    /// # Errors
    /// The file cannot be read or is not what this program writes.
    pub(crate) fn load() -> anyhow::Result<Self> {
        match path() {
            Ok(path) => Self::load_from(&path),
            // Without a home there are no contexts.
            Err(_) => Ok(Self::default()),
        }
    }

    fn load_from(path: &Path) -> anyhow::Result<Self> {
        let text = files::read_text(path);
        let text = text.with_context(|| format!("read {}", path.display()))?;
        toml::from_str(&text.unwrap_or_default()).map_err(|error| {
            let failure = Failure::new(Exit::Error, format!("{} is not valid", path.display()));
            let failure = failure.why(error.to_string().trim_end().to_owned());
            failure.hint("correct it, or remove it and add the contexts again").into()
        })
    }

    pub(crate) fn save(&self) -> anyhow::Result<()> {
        self.save_to(&path()?)
    }

    fn save_to(&self, path: &Path) -> anyhow::Result<()> {
        let text = toml::to_string(self).context("write the contexts as TOML")?;
        let saved = path
            .parent()
            .map_or(Ok(()), files::make_folder)
            .and_then(|()| files::replace(path, text.as_bytes()));
        saved.with_context(|| format!("write {}", path.display()))
    }

    /// Makes a context the current one; `-` is the one before.
    ///
    /// # Errors
    /// There is none of this name.
    pub(crate) fn switch_to(&mut self, name: &str) -> anyhow::Result<()> {
        let name = match name {
            "-" => self.previous.clone().ok_or_else(|| {
                let failure = Failure::new(Exit::NotFound, "no context was in use before");
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

    /// Removes a context. Removing the current one leaves none in use.
    ///
    /// # Errors
    /// There is none of this name.
    pub(crate) fn remove(&mut self, name: &str) -> anyhow::Result<()> {
        self.get(name)?;
        self.contexts.remove(name);
        self.current.take_if(|current| current == name);
        self.previous.take_if(|previous| previous == name);
        Ok(())
    }

    fn get(&self, name: &str) -> anyhow::Result<&Cluster> {
        self.contexts.get(name).ok_or_else(|| {
            let failure = Failure::new(Exit::NotFound, format!("there is no context {name:?}"));
            let known: Vec<&str> = self.contexts.keys().map(String::as_str).collect();
            let failure = match known.as_slice() {
                [] => failure.why("no context has been added yet"),
                known => failure.why(format!("there are: {}", known.join(", "))),
            };
            failure.hint(format!("helix context add {name} --addr HOST:PORT,...")).into()
        })
    }
}

/// The file of the contexts.
pub(crate) fn path() -> anyhow::Result<PathBuf> {
    let folder = files::config_folder().ok_or_else(|| {
        let failure = Failure::new(Exit::Error, "there is no place for contexts");
        failure.why("neither XDG_CONFIG_HOME nor HOME is set")
    })?;
    Ok(folder.join("config.toml"))
}

/// Addresses for a command: those of the flag, of the named context, of the environment, of the
/// current context, or this machine's.
/// One without a port is meant with the usual one.
pub(crate) fn resolve(addr: &[String], context: Option<&str>) -> anyhow::Result<Addresses> {
    let env = std::env::var(ENV).ok();
    let found = first(addr, context, env.as_deref(), Contexts::load)?;
    let addr = found.addr.iter().map(|address| with_port(address)).collect();
    Ok(Addresses { addr, ..found })
}

fn with_port(address: &str) -> String {
    let host = address.rsplit_once('/').map_or(address, |(_, host)| host);
    // The colons of an IPv6 address stand in brackets.
    let after = host.rsplit_once(']').map_or(host, |(_, after)| after);
    if after.contains(':') { address.to_owned() } else { format!("{address}:{PORT}") }
}

fn first(
    addr: &[String],
    context: Option<&str>,
    env: Option<&str>,
    contexts: impl FnOnce() -> anyhow::Result<Contexts>,
) -> anyhow::Result<Addresses> {
    if !addr.is_empty() {
        return Ok(Addresses { addr: addr.to_vec(), source: "--addr".to_owned() });
    }
    if let Some(name) = context {
        return contexts()?.get(name).map(|cluster| of_context(name, cluster));
    }
    let env: Vec<String> =
        env.unwrap_or_default().split(',').map(|it| it.trim().to_owned()).collect();
    if env.iter().any(|address| !address.is_empty()) {
        return Ok(Addresses { addr: env, source: ENV.to_owned() });
    }
    let contexts = contexts()?;
    match &contexts.current {
        Some(name) => contexts.get(name).map(|cluster| of_context(name, cluster)),
        None => {
            Ok(Addresses { addr: vec![DEFAULT_ADDR.to_owned()], source: "the default".to_owned() })
        }
    }
}

fn of_context(name: &str, cluster: &Cluster) -> Addresses {
    Addresses { addr: cluster.addr.clone(), source: format!("context {name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contexts() -> Contexts {
        let cluster = |addr: &str| Cluster { addr: vec![addr.to_owned()] };
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
        let Addresses { addr, source } = first(&addr, context, env, || Ok(contexts())).unwrap();
        (addr.join(","), source)
    }

    #[test]
    fn a_flag_goes_before_the_environment_and_that_before_a_context() {
        let all = found(&["f:1", "f:2"], Some("prod"), Some("e:1"));
        assert_eq!(all, ("f:1,f:2".to_owned(), "--addr".to_owned()));
        let named = found(&[], Some("prod"), Some("e:1"));
        assert_eq!(named, ("p:1".to_owned(), "context prod".to_owned()));
        let env = found(&[], None, Some("e:1, e:2"));
        assert_eq!(env, ("e:1,e:2".to_owned(), "HELIX_ADDR".to_owned()));
        assert_eq!(found(&[], None, Some("")), ("d:1".to_owned(), "context dev".to_owned()));
        let none = first(&[], None, None, || Ok(Contexts::default())).unwrap();
        assert_eq!(none.addr, [DEFAULT_ADDR]);
        let unknown = first(&[], Some("x"), None, || Ok(contexts())).unwrap_err();
        assert_eq!(crate::exit::of(&unknown), Exit::NotFound);
    }

    #[test]
    fn an_address_without_a_port_has_the_usual_one() {
        for (address, dialled) in [
            ("n1", "n1:9092"),
            ("n1:1", "n1:1"),
            ("http://n1", "http://n1:9092"),
            ("http://n1:1", "http://n1:1"),
            ("[::1]", "[::1]:9092"),
            ("[::1]:1", "[::1]:1"),
        ] {
            assert_eq!(with_port(address), dialled);
        }
    }

    #[test]
    fn a_file_is_needed_only_where_nothing_else_says_where() {
        let broken = || Err(anyhow::anyhow!("broken"));
        assert!(first(&["f:1".to_owned()], None, None, broken).is_ok());
        assert!(first(&[], None, Some("e:1"), broken).is_ok());
        assert!(first(&[], None, None, broken).is_err());
    }

    #[test]
    fn contexts_are_switched_and_back() {
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
    fn what_is_saved_is_loaded_and_what_is_wrong_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("helix/config.toml");
        assert_eq!(Contexts::load_from(&path).unwrap(), Contexts::default());
        contexts().save_to(&path).unwrap();
        assert_eq!(Contexts::load_from(&path).unwrap(), contexts());
        files::replace(&path, b"curent = 'dev'\n").unwrap();
        let error = Contexts::load_from(&path).unwrap_err();
        let failure = error.downcast_ref::<Failure>().unwrap();
        assert!(failure.why.contains("curent"), "{failure:?}");
    }
}
