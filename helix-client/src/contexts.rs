//! Contexts: named clusters in a file of the user, and the choice of the cluster to connect to.
//!
//! `helix context` maintains the file. A program that follows it connects where `helix` does:
//! ```no_run
//! use helix_client::Client;
//! use helix_client::contexts::ClusterChoice;
//!
//! # async fn connect() -> Result<(), Box<dyn std::error::Error>> {
//! let cluster = ClusterChoice::default().resolve()?;
//! let client = Client::connect(cluster.config()).await?;
//! # Ok(())
//! # }
//! ```

// Reads the user's file.
#![allow(clippy::disallowed_methods)]

mod tls;
mod words;

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::ffi::OsString;
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use helix_proto::address;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::tls_options::TlsOptions;
use crate::token::TokenSource;
pub use tls::ContextTls;

/// Address used if no other is given.
pub const ADDR_DEFAULT: &str = "127.0.0.1:9092";

/// Environment variable with addresses: `HOST:PORT,...`.
pub const ADDR_VARIABLE: &str = "HELIX_ADDR";

/// Environment variable with the client's rack.
pub const RACK_VARIABLE: &str = "HELIX_CLIENT_RACK";

/// Longest name of a rack, in bytes.
const RACK_BYTES_MAX: usize = 64;

/// Content of the contexts file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contexts {
    /// Name of the current context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    /// Name of the previous current context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous: Option<String>,
    /// Clusters by name.
    #[serde(default)]
    pub contexts: BTreeMap<String, ContextEntry>,
}

/// The cluster of a context.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContextEntry {
    /// Nodes to contact first.
    pub addr: Vec<String>,
    /// File with the token for this cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// Rack of the clients that use this context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rack: Option<String>,
    /// Files of TLS; empty for a cluster without TLS.
    #[serde(default, skip_serializing_if = "ContextTls::is_empty")]
    pub tls: ContextTls,
}

/// Reason why no cluster could be chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextError {
    /// Kind, by which a program selects its exit code.
    pub kind: ContextErrorKind,
    /// Description of the problem.
    pub what: String,
    /// Cause; may be empty.
    pub why: String,
    /// Command or option that helps; may be empty.
    pub hint: String,
}

/// Kind of a [`ContextError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContextErrorKind {
    /// A setting is not valid, or lacks another setting that it needs.
    InvalidSetting,
    /// There is no context of the name.
    UnknownContext,
    /// The contexts file cannot be found, read or parsed.
    ContextsFile,
}

impl ContextError {
    fn new(kind: ContextErrorKind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), why: String::new(), hint: String::new() }
    }

    fn why(self, why: impl Into<String>) -> Self {
        Self { why: why.into(), ..self }
    }

    fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: hint.into(), ..self }
    }
}

impl fmt::Display for ContextError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.what)?;
        match self.why.as_str() {
            "" => Ok(()),
            why => write!(formatter, ": {why}"),
        }
    }
}

impl StdError for ContextError {}

impl Contexts {
    /// Returns the path of the user's file.
    ///
    /// # Errors
    /// Fails without a home directory.
    pub fn path() -> Result<PathBuf, ContextError> {
        let of = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let base = of("XDG_CONFIG_HOME").or_else(|| Some(of("HOME")?.join(".config")));
        let base = base.ok_or_else(|| {
            let kind = ContextErrorKind::ContextsFile;
            let error = ContextError::new(kind, "no directory for the contexts file");
            error.why("neither XDG_CONFIG_HOME nor HOME is set").hint("export HOME=DIRECTORY")
        })?;
        Ok(base.join("helix/config.toml"))
    }

    /// Loads the user's contexts; empty if there is no file.
    ///
    /// # Errors
    /// Fails if the file cannot be read or parsed.
    pub fn load() -> Result<Self, ContextError> {
        match Self::path() {
            Ok(path) => Self::load_from(&path),
            // Without a home directory there are no contexts.
            Err(_) => Ok(Self::default()),
        }
    }

    /// Loads the contexts of a file; empty if there is no file.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_from(path: &Path) -> Result<Self, ContextError> {
        let failed = |what: String, why: String| {
            ContextError::new(ContextErrorKind::ContextsFile, what).why(why)
        };
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => {
                return Err(failed(format!("cannot read {}", path.display()), error.to_string()));
            }
        };
        toml::from_str(&text).map_err(|error| {
            let what = format!("{} is not valid", path.display());
            let error = failed(what, error.to_string().trim_end().to_owned());
            error.hint("correct the file, or remove it and add the contexts again")
        })
    }

    /// Returns a context.
    ///
    /// # Errors
    /// Fails if there is no context of this name.
    pub fn get(&self, name: &str) -> Result<&ContextEntry, ContextError> {
        self.contexts.get(name).ok_or_else(|| {
            let what = format!("there is no context {name:?}");
            let error = ContextError::new(ContextErrorKind::UnknownContext, what);
            let known: Vec<&str> = self.contexts.keys().map(String::as_str).collect();
            let error = match known.as_slice() {
                [] => error.why("no context is defined"),
                known => error.why(format!("defined contexts: {}", known.join(", "))),
            };
            error.hint(format!("helix context add {name} --addr HOST:PORT,..."))
        })
    }

    /// Makes a context the current one; `-` is the previous one.
    ///
    /// # Errors
    /// Fails if there is no context of this name.
    pub fn switch_to(&mut self, name: &str) -> Result<(), ContextError> {
        let name = match name {
            "-" => self.previous.clone().ok_or_else(|| {
                let kind = ContextErrorKind::UnknownContext;
                let error = ContextError::new(kind, "there is no previous context");
                error.hint("helix context list")
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
    pub fn remove(&mut self, name: &str) -> Result<(), ContextError> {
        self.get(name)?;
        self.contexts.remove(name);
        self.current.take_if(|current| current == name);
        self.previous.take_if(|previous| previous == name);
        Ok(())
    }
}

/// Settings of one invocation of a program. Contexts and the environment supply the rest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterChoice {
    /// Nodes to contact first, as of `--addr`; empty to take them from elsewhere.
    pub addr: Vec<String>,
    /// Name of a context, as of `--context`.
    pub context: Option<String>,
    /// File with the token, as of `--token-file`.
    pub token_file: Option<PathBuf>,
    /// Rack of the client, as of `--client-rack`.
    pub rack: Option<String>,
    /// Files of TLS, as of `--tls-ca` and its siblings.
    pub tls: ContextTls,
}

/// Cluster to connect to.
#[derive(Debug, Clone)]
pub struct ChosenCluster {
    /// Nodes to contact first.
    pub addr: Vec<String>,
    /// Setting that the addresses come from, such as `--addr` or `context dev`.
    pub source: String,
    /// Token that calls carry.
    pub token: TokenSource,
    /// Rack of the client, as of [`Config::rack`].
    pub rack: Option<String>,
    /// Files of TLS; `None` without TLS.
    pub tls: Option<TlsOptions>,
}

impl ChosenCluster {
    /// Returns the client settings, otherwise with their defaults.
    pub fn config(self) -> Config {
        Config { token: self.token, tls: self.tls, rack: self.rack, ..Config::new(self.addr) }
    }
}

/// Addresses, and the context that supplies the other settings.
struct AddressSource {
    addr: Vec<String>,
    source: String,
    context: Option<ContextEntry>,
}

impl ClusterChoice {
    /// Chooses the cluster.
    ///
    /// The addresses are those of the first of these that has some: `addr`, `context`,
    /// `HELIX_ADDR`, the current context, and [`ADDR_DEFAULT`]. The named context, or else the
    /// context of the addresses, also supplies its files of TLS. Its token is sent only to its own
    /// addresses.
    ///
    /// The token is that of `token_file`, of a named `context`, of the environment
    /// ([`TokenSource::from_env`]), or of the current context. Each file of TLS is the one given
    /// here, of the context, or of the environment. So TLS is on if any of the three has a CA, and
    /// no token is sent without TLS if any of them has a setting of TLS. The rack follows the order
    /// of the token; its variable is [`RACK_VARIABLE`].
    ///
    /// # Errors
    /// Fails if the context is unknown, if the contexts file is needed and unreadable, or if an
    /// address, the token or a file of TLS is missing or not valid.
    pub fn resolve(&self) -> Result<ChosenCluster, ContextError> {
        let variable = |name: &str| std::env::var_os(name);
        let AddressSource { addr, source, context } = self.addresses(variable, Contexts::load)?;
        let context = context.unwrap_or_default();
        let tls = self.tls_files(context.tls, variable).options()?;
        let token = self.token(context.token_file)?;
        let rack = self.rack(context.rack, variable)?;
        Ok(ChosenCluster { addr, source, token, rack, tls })
    }

    fn addresses(
        &self,
        variable: impl Fn(&str) -> Option<OsString>,
        contexts: impl FnOnce() -> Result<Contexts, ContextError>,
    ) -> Result<AddressSource, ContextError> {
        let without_context =
            |addr, source: &str| AddressSource { addr, source: source.to_owned(), context: None };
        if let Some(name) = &self.context {
            let named = of_context(&contexts()?, name)?;
            return Ok(match self.addr.is_empty() {
                true => named,
                // Its token is for its own addresses.
                false => AddressSource {
                    context: named.context.map(|it| ContextEntry { token_file: None, ..it }),
                    ..without_context(self.addr.clone(), "--addr")
                },
            });
        }
        if !self.addr.is_empty() {
            return Ok(without_context(self.addr.clone(), "--addr"));
        }
        if let Some(env) = variable(ADDR_VARIABLE).filter(|env| !env.is_empty()) {
            let hint = format!("export {ADDR_VARIABLE}=HOST:PORT,...");
            // Other bytes are no address, so that the error shows what they are.
            let env = env.to_string_lossy();
            if !env.trim().is_empty() {
                let addr = parse(&env, ADDR_VARIABLE, hint)?;
                return Ok(without_context(addr, ADDR_VARIABLE));
            }
        }
        let contexts = contexts()?;
        match &contexts.current {
            Some(name) => of_context(&contexts, name),
            None => Ok(without_context(vec![ADDR_DEFAULT.to_owned()], "the default")),
        }
    }

    fn token(&self, of_context: Option<PathBuf>) -> Result<TokenSource, ContextError> {
        let named = of_context.as_ref().filter(|_| self.context.is_some());
        let source = match self.token_file.as_ref().or(named) {
            Some(path) => TokenSource::file(path),
            None => match (TokenSource::from_env(), of_context) {
                (Ok(env), Some(path)) if env.is_none() => TokenSource::file(path),
                (env, _) => env,
            },
        };
        source.map_err(|error| {
            let kind = ContextErrorKind::InvalidSetting;
            let failure = ContextError::new(kind, "the token cannot be used");
            failure.why(error.message.clone()).hint("helix whoami --token-file FILE")
        })
    }

    fn rack(
        &self,
        of_context: Option<String>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<String>, ContextError> {
        let of_env = || {
            let value = variable(RACK_VARIABLE).filter(|value| !value.is_empty())?;
            // Other bytes are no node's rack, and too long a name shows what they are.
            Some(value.to_string_lossy().into_owned())
        };
        let named = || of_context.clone().filter(|_| self.context.is_some());
        let rack = self.rack.clone().or_else(named).or_else(of_env).or_else(|| of_context.clone());
        if let Some(rack) = rack.as_ref().filter(|it| it.is_empty() || it.len() > RACK_BYTES_MAX) {
            let what = format!("the client's rack has {} bytes", rack.len());
            let error = ContextError::new(ContextErrorKind::InvalidSetting, what);
            let error = error.why(format!("racks have names of 1 to {RACK_BYTES_MAX} bytes"));
            return Err(error.hint("helix cluster placement lists the racks of the nodes"));
        }
        Ok(rack)
    }

    /// Returns the files of TLS: field by field those given here, of the context and of the
    /// environment. A source that has some must not hide those of another.
    fn tls_files(
        &self,
        of_context: ContextTls,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> ContextTls {
        self.tls.clone().or(of_context).or(ContextTls::of_environment(variable))
    }
}

fn of_context(contexts: &Contexts, name: &str) -> Result<AddressSource, ContextError> {
    let context = contexts.get(name)?;
    let source = format!("context {name}");
    let hint = format!("helix context add {name} --addr HOST:PORT,...");
    let addr = parse(&context.addr.join(","), &source, hint)?;
    Ok(AddressSource { addr, source, context: Some(context.clone()) })
}

/// Parses addresses of a setting.
fn parse(addresses: &str, setting: &str, hint: String) -> Result<Vec<String>, ContextError> {
    let parsed = address::parse_list(addresses, Some(address::PORT_DEFAULT));
    parsed.map_err(|why| {
        let what = format!("{setting} is not valid");
        ContextError::new(ContextErrorKind::InvalidSetting, what).why(why).hint(hint)
    })
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

    fn choice(addr: &[&str], context: Option<&str>) -> ClusterChoice {
        let addr = addr.iter().map(|&address| address.to_owned()).collect();
        ClusterChoice { addr, context: context.map(str::to_owned), ..ClusterChoice::default() }
    }

    fn select(
        choice: &ClusterChoice,
        env: Option<&str>,
        contexts: Contexts,
    ) -> Result<AddressSource, ContextError> {
        choice.addresses(|_| env.map(OsString::from), || Ok(contexts))
    }

    fn found(addr: &[&str], context: Option<&str>, env: Option<&str>) -> (String, String) {
        let AddressSource { addr, source, .. } =
            select(&choice(addr, context), env, contexts()).unwrap();
        (addr.join(","), source)
    }

    fn error<T>(result: Result<T, ContextError>) -> ContextError {
        result.err().expect("an error")
    }

    #[test]
    fn option_takes_precedence_over_environment_and_current_context() {
        let all = found(&["f:1", "f:2"], Some("prod"), Some("e:1"));
        assert_eq!(all, ("f:1,f:2".to_owned(), "--addr".to_owned()));
        let named = found(&[], Some("prod"), Some("e:1"));
        assert_eq!(named, ("p:1".to_owned(), "context prod".to_owned()));
        let env = found(&[], None, Some("e:1, e:2"));
        assert_eq!(env, ("e:1,e:2".to_owned(), "HELIX_ADDR".to_owned()));
        assert_eq!(found(&[], None, Some("")), ("d:1".to_owned(), "context dev".to_owned()));
        let none = select(&choice(&[], None), None, Contexts::default());
        assert_eq!(none.unwrap().addr, [ADDR_DEFAULT]);
        let unknown = error(select(&choice(&[], Some("x")), None, contexts()));
        assert_eq!(unknown.kind, ContextErrorKind::UnknownContext);
        assert!(unknown.to_string().contains("defined contexts: dev, prod"), "{unknown}");
    }

    #[test]
    fn addresses_of_every_source_are_checked() {
        for wrong in ["n1:99999", "n1:", "n1:0", "http://n1/a", "n1,,n2", "n1 :1"] {
            let env = error(select(&choice(&[], None), Some(wrong), contexts()));
            assert_eq!(env.kind, ContextErrorKind::InvalidSetting);
            assert_eq!(env.what, "HELIX_ADDR is not valid");
            assert!(env.why.contains("host:port"), "{env:?}");
            let mut old = contexts();
            let entry = ContextEntry { addr: vec![wrong.to_owned()], ..ContextEntry::default() };
            old.contexts.insert("dev".to_owned(), entry);
            let named = error(select(&choice(&[], None), None, old));
            assert!(named.hint.starts_with("helix context add dev"), "{named:?}");
        }
        let found = found(&[], None, Some("n1, [::1]"));
        assert_eq!(found.0, "n1:9092,[::1]:9092");
    }

    #[test]
    fn contexts_file_is_read_only_if_needed() {
        let broken = || Err(ContextError::new(ContextErrorKind::ContextsFile, "broken"));
        let env = |_: &str| Some("e:1".into());
        assert!(choice(&["f:1"], None).addresses(|_| None, broken).is_ok());
        assert!(choice(&[], None).addresses(env, broken).is_ok());
        assert!(choice(&[], None).addresses(|_| None, broken).is_err());
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
    fn invalid_file_is_reported_and_a_missing_one_is_empty() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        assert_eq!(Contexts::load_from(&path).unwrap(), Contexts::default());
        std::fs::write(&path, toml::to_string(&contexts()).unwrap()).unwrap();
        assert_eq!(Contexts::load_from(&path).unwrap(), contexts());
        std::fs::write(&path, "curent = 'dev'\n").unwrap();
        let error = Contexts::load_from(&path).unwrap_err();
        assert!(error.why.contains("curent") && !error.hint.is_empty(), "{error:?}");
    }

    /// Settings of TLS by the bits of `mask`: CA, certificate, key and server name.
    fn tls_of(origin: &str, mask: u32) -> ContextTls {
        let path = |bit: u32, what: &str| {
            (mask & bit != 0).then(|| PathBuf::from(format!("/{origin}/{what}")))
        };
        ContextTls {
            ca: path(1, "ca"),
            cert: path(2, "cert"),
            key: path(4, "key"),
            server_name: (mask & 8 != 0).then(|| origin.to_owned()),
        }
    }

    /// Every combination of settings of TLS in options, context and environment: each file is that
    /// of the first source that has it, and a connection has TLS or is refused if any has one.
    #[test]
    fn settings_of_tls_combine_field_by_field() {
        for (given, of_context, of_env) in (0..16)
            .flat_map(|given| (0..16).map(move |context| (given, context)))
            .flat_map(|(given, of_context)| (0..8).map(move |of_env| (given, of_context, of_env)))
        {
            let label = format!("options {given}, context {of_context}, environment {of_env}");
            let choice =
                ClusterChoice { tls: tls_of("options", given), ..ClusterChoice::default() };
            let env = tls_of("environment", of_env);
            let variable = |name: &str| {
                let path = match name {
                    "HELIX_TLS_CA" => env.ca.clone(),
                    "HELIX_TLS_CERT" => env.cert.clone(),
                    "HELIX_TLS_KEY" => env.key.clone(),
                    other => panic!("{other}"),
                };
                path.map(PathBuf::into_os_string)
            };
            let merged = choice.tls_files(tls_of("context", of_context), variable);
            let origin = |bit: u32| match () {
                () if given & bit != 0 => Some("options"),
                () if of_context & bit != 0 => Some("context"),
                () if of_env & bit != 0 => Some("environment"),
                () => None,
            };
            let path = |bit: u32, what: &str| origin(bit).map(|it| format!("/{it}/{what}").into());
            let expected = ContextTls {
                ca: path(1, "ca"),
                cert: path(2, "cert"),
                key: path(4, "key"),
                server_name: origin(8).map(str::to_owned),
            };
            assert_eq!(merged, expected, "{label}");
            let all = given | of_context | of_env;
            match merged.options() {
                Ok(None) => assert_eq!(all, 0, "{label}: without TLS"),
                Ok(Some(tls)) => {
                    assert_eq!(tls.certificate.is_some(), all & 6 == 6, "{label}");
                    assert!(all & 1 != 0 && matches!(all & 6, 0 | 6), "{label}: {tls:?}");
                }
                Err(error) => {
                    assert!(all & 1 == 0 || matches!(all & 6, 2 | 4), "{label}: {error:?}");
                }
            }
        }
    }

    #[test]
    fn an_empty_variable_sets_nothing() {
        let choice = ClusterChoice::default();
        let files = choice.tls_files(ContextTls::default(), |_| Some(OsString::new()));
        assert!(files.is_empty(), "{files:?}");
    }

    #[cfg(unix)]
    #[test]
    fn variables_with_other_bytes_than_utf8_count() {
        use std::os::unix::ffi::OsStringExt;
        let bytes = |_: &str| Some(OsString::from_vec(b"/ca-\xff.pem".to_vec()));
        let choice = ClusterChoice::default();
        assert!(choice.tls_files(ContextTls::default(), bytes).ca.is_some());
        let wrong = error(choice.addresses(bytes, || Ok(Contexts::default())));
        assert_eq!(wrong.kind, ContextErrorKind::InvalidSetting);
    }

    #[test]
    fn rack_is_given_or_of_a_named_context_the_environment_or_the_current_context() {
        let choose = |named: Option<&str>, given: Option<&str>, env: &str, rack: Option<&str>| {
            let rack_given = given.map(str::to_owned);
            let choice = ClusterChoice { rack: rack_given, ..choice(&[], named) };
            choice.rack(rack.map(str::to_owned), |_| Some(OsString::from(env)))
        };
        let of = |given: Option<&str>, env: &str, context: Option<&str>| {
            choose(None, given, env, context)
        };
        let named = choose(Some("prod"), None, "b", Some("c"));
        assert_eq!(named.unwrap().as_deref(), Some("c"));
        assert_eq!(choose(Some("prod"), None, "b", None).unwrap().as_deref(), Some("b"));
        assert_eq!(of(Some("a"), "b", Some("c")).unwrap().as_deref(), Some("a"));
        assert_eq!(of(None, "b", Some("c")).unwrap().as_deref(), Some("b"));
        assert_eq!(of(None, "", Some("c")).unwrap().as_deref(), Some("c"));
        assert_eq!(of(None, "", None).unwrap(), None);
        for wrong in [String::new(), "r".repeat(65)] {
            let refused = error(of(Some(&wrong), "", None));
            assert!(refused.to_string().contains("1 to 64 bytes"), "{refused}");
        }
    }

    #[test]
    fn a_named_context_supplies_tls_for_other_addresses_and_no_token() {
        let tls = tls_of("context", 1);
        let mut all = contexts();
        let entry = all.contexts.get_mut("prod").unwrap();
        (entry.tls, entry.token_file) = (tls.clone(), Some(PathBuf::from("/token")));
        let found = select(&choice(&["f:1"], Some("prod")), None, all.clone()).unwrap();
        assert_eq!((found.addr, found.source.as_str()), (vec!["f:1".to_owned()], "--addr"));
        let context = found.context.unwrap();
        assert_eq!((context.tls, context.token_file), (tls, None));
        let own = select(&choice(&[], Some("prod")), None, all.clone()).unwrap().context.unwrap();
        assert_eq!(own.token_file, Some(PathBuf::from("/token")));
        // The current context is one of another cluster then.
        all.current = Some("prod".to_owned());
        assert!(select(&choice(&["f:1"], None), None, all.clone()).unwrap().context.is_none());
        assert!(select(&choice(&[], None), Some("e:1"), all.clone()).unwrap().context.is_none());
        let unknown = error(select(&choice(&["f:1"], Some("x")), None, all));
        assert_eq!(unknown.kind, ContextErrorKind::UnknownContext);
    }

    #[test]
    fn token_of_a_named_context_precedes_the_current_one() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, "token").unwrap();
            path
        };
        let named = choice(&[], Some("prod"));
        let shown = format!("{:?}", named.token(Some(file("of-context"))).unwrap());
        assert!(shown.ends_with("of-context"), "{shown}");
        let given = ClusterChoice { token_file: Some(file("given")), ..named };
        let shown = format!("{:?}", given.token(Some(file("of-context"))).unwrap());
        assert!(shown.ends_with("given"), "{shown}");
        let missing =
            ClusterChoice { token_file: Some("/none".into()), ..ClusterChoice::default() };
        assert_eq!(error(missing.token(None)).kind, ContextErrorKind::InvalidSetting);
    }
}
