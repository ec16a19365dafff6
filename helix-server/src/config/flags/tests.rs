//! Tests the precedence of the sources, the reported problems, and that printed settings can be
//! read again.

use std::path::Path;

use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    flags: Flags,
}

/// A command line, an environment and the contents of a file.
struct Sources<'a> {
    arguments: &'a [&'a str],
    environment: &'a [(&'a str, &'a str)],
    file: &'a str,
}

const NONE: Sources<'static> = Sources { arguments: &[], environment: &[], file: "" };

impl Sources<'_> {
    fn resolve(&self) -> Result<ResolvedConfig, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("helix.toml");
        #[allow(clippy::disallowed_methods)]
        std::fs::write(&path, self.file).unwrap();
        self.resolve_with(&path)
    }

    fn resolve_with(&self, path: &Path) -> Result<ResolvedConfig, ConfigError> {
        let program = ["helix-server", "--config", path.to_str().unwrap()];
        let cli = Cli::try_parse_from(program.iter().chain(self.arguments)).unwrap();
        cli.flags.resolve(&|name| {
            let found = self.environment.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| OsString::from(value))
        })
    }

    fn origins(&self) -> BTreeMap<String, SettingOrigin> {
        let settings = self.resolve().unwrap().settings;
        settings.into_iter().map(|it| (it.setting.key(), it.origin)).collect()
    }

    fn problems(&self) -> Vec<String> {
        self.resolve().unwrap_err().problems
    }
}

#[test]
fn the_command_line_overrides_the_environment_which_overrides_the_file() {
    let file = "node_id = 4\nstorage = 'memory'\ntail_bytes = '1MiB'\nno_direct_io = true\n";
    let environment = [("HELIX_NODE_ID", "3"), ("HELIX_STORAGE", "durable")];
    let all = Sources { arguments: &["--node-id", "2"], environment: &environment, file };
    let config = all.resolve().unwrap().config;
    assert_eq!((config.node_id, config.tail_bytes), (2, Some(1 << 20)));
    assert_eq!(config.storage, super::super::StorageMode::Durable);
    assert!(config.no_direct_io);
    let origins = all.origins();
    assert_eq!(origins["node_id"], SettingOrigin::Flag);
    assert_eq!(origins["storage"], SettingOrigin::Variable("HELIX_STORAGE".to_owned()));
    assert!(matches!(origins["tail_bytes"], SettingOrigin::File { line: 3, .. }));
    assert_eq!(origins["segment_bytes"], SettingOrigin::Default);
    let off = Sources { arguments: &["--no-direct-io=false"], ..all };
    assert!(!off.resolve().unwrap().config.no_direct_io, "a switch can be turned off");
}

#[test]
fn without_sources_the_defaults_apply() {
    assert_eq!(NONE.resolve().unwrap().config, ServerConfig::default());
    let empty = Sources { environment: &[("HELIX_PEER", ""), ("HELIX_NODE_ID", "")], ..NONE };
    assert_eq!(
        empty.resolve().unwrap().config,
        ServerConfig::default(),
        "an empty variable counts as unset"
    );
}

#[test]
fn a_list_comes_from_one_source() {
    let file = "peer = ['1=a:1', '2=b:2', '3=c:3']\ntopic = ['x:1', 'y:2']";
    let from_file = Sources { file, ..NONE }.resolve().unwrap().config;
    assert_eq!((from_file.peers.len(), from_file.topics.len()), (3, 2));
    let environment = [("HELIX_PEER", "1=a:1,2=b:2,3=c:3,4=d:4,5=e:5")];
    let arguments = ["--topic", "z:9", "--topic", "v:1,w:2"];
    let mixed = Sources { arguments: &arguments, environment: &environment, file };
    let config = mixed.resolve().unwrap().config;
    assert_eq!(config.peers.len(), 5);
    assert_eq!(config.topics[0], ("z".to_owned(), 9));
    assert_eq!(config.topics.len(), 3, "not added to those of the file");
}

#[test]
fn an_alias_has_a_variable() {
    let log = Sources { environment: &[("HELIX_LOG", "warn")], ..NONE };
    assert_eq!(log.resolve().unwrap().config.log_level, "warn");
    let both = [("HELIX_LOG", "warn"), ("HELIX_LOG_LEVEL", "error")];
    let both = Sources { environment: &both, ..NONE };
    assert_eq!(both.resolve().unwrap().config.log_level, "error");
}

#[test]
fn a_problem_names_the_origin_of_the_value() {
    let environment = [("HELIX_STORAGE", "papyrus"), ("HELIX_SHARDS", "99")];
    let file = "node_id = 0\nsegment_byte = '1MiB'\n";
    let arguments = ["--listen-addr", "0.0.0.0:9092", "--advertise-addr", "n1:9092"];
    let problems = Sources { arguments: &arguments, environment: &environment, file }.problems();
    let wanted = [
        "helix.toml:2: unknown key \"segment_byte\"; did you mean \"segment_bytes\"?",
        "HELIX_STORAGE=papyrus: write one of \"durable\", \"memory\"",
        "helix.toml:1: node_id = 0: choose a number",
        "HELIX_SHARDS=99: choose a number",
        "--listen-addr 0.0.0.0:9092: other machines can reach",
    ];
    assert_eq!(problems.len(), wanted.len(), "{problems:#?}");
    for (problem, wanted) in problems.iter().zip(wanted) {
        assert!(problem.contains(wanted), "{problem}");
    }
}

#[test]
fn a_missing_file_is_an_error() {
    let missing = Path::new("/nowhere/helix.toml");
    let problems = NONE.resolve_with(missing).unwrap_err().problems;
    assert!(problems[0].starts_with("--config /nowhere/helix.toml: cannot be read"));
}

#[test]
fn a_variable_can_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("helix.toml");
    #[allow(clippy::disallowed_methods)]
    std::fs::write(&path, "node_id = 7").unwrap();
    let cli = Cli::try_parse_from(["helix-server"]).unwrap();
    let environment = |name: &str| (name == "HELIX_CONFIG").then(|| path.clone().into());
    assert_eq!(cli.flags.resolve(&environment).unwrap().config.node_id, 7);
}

#[test]
fn printed_settings_can_be_read_again() {
    let environment =
        [("HELIX_TOPIC", "a:1,b:2"), ("HELIX_SHARDS", "03"), ("HELIX_INSECURE", "yes")];
    let arguments = ["--data-dir", "a \"b\"\\\t#ü", "--peer=1=a:1,2=b:2", "--peer", "3=c:3"];
    let file = "default_retention_time = '7d'\nlisten_addr = '127.0.0.1:1'";
    let first = Sources { arguments: &arguments, environment: &environment, file };
    let first = first.resolve().unwrap();
    let printed = first.to_string();
    let again = Sources { file: &printed, ..NONE };
    assert_eq!(again.resolve().unwrap().config, first.config, "{printed}");
    for (key, origin) in again.origins() {
        let is_set = printed.contains(&format!("\n{key} = "));
        assert_eq!(matches!(origin, SettingOrigin::File { .. }), is_set, "{key}");
    }
    for line in [
        "shards = 3 # HELIX_SHARDS",
        "topic = [\"a:1\", \"b:2\"] # HELIX_TOPIC",
        "peer = [\"1=a:1\", \"2=b:2\", \"3=c:3\"] # command line",
        "segment_bytes = \"64MiB\" # default",
        "# cluster_id is not set",
        "insecure = true # HELIX_INSECURE",
    ] {
        assert!(printed.lines().any(|printed| printed == line), "{line}: {printed}");
    }
    assert!(printed.contains("default_retention_time = \"7d\" # /"), "{printed}");
}

#[test]
fn container_changes_only_defaults() {
    let container = ContainerLimits { memory_bytes: Some(300 << 20), cpus: Some(1.5) };
    let within = |arguments: &[&str]| {
        let arguments = ["helix-server"].iter().chain(arguments);
        Cli::try_parse_from(arguments).unwrap().flags.resolve_within(&container, &|_| None)
    };
    let resolved = within(&[]).unwrap();
    assert_eq!(resolved.config.memory_limit, 272 << 20);
    let printed = resolved.to_string();
    let line = "memory_limit = \"272MiB\" # default within the container's limits";
    assert!(printed.lines().any(|printed| printed == line), "{printed}");
    assert_eq!(Sources { file: &printed, ..NONE }.resolve().unwrap().config, resolved.config);
    assert_eq!(within(&["--memory-limit", "1GiB"]).unwrap().config.memory_limit, 1 << 30);
    let problems = within(&["--shards", "6"]).unwrap_err().problems;
    assert!(problems[0].contains("--memory-limit 272MiB is 42MiB"), "{problems:?}");
}

#[test]
fn explains_removed_settings() {
    let flag = Cli::try_parse_from(["helix-server", "--idle-poll-us", "0"]).unwrap_err();
    assert!(flag.to_string().contains("was removed: "), "{flag}");
    let flags = Cli::try_parse_from(["helix-server"]).unwrap().flags;
    let environment = |name: &str| (name == "HELIX_IDLE_POLL_US").then(|| "0".into());
    let problems = flags.resolve(&environment).unwrap_err().problems;
    assert!(problems[0].starts_with("HELIX_IDLE_POLL_US was removed: "), "{problems:?}");
}

#[test]
fn flags_select_the_action() {
    let action = |arguments: &[&str]| {
        let arguments = ["helix-server"].iter().chain(arguments);
        Cli::try_parse_from(arguments).map(|cli| cli.flags.action())
    };
    assert_eq!(action(&[]).unwrap(), ConfigAction::Run);
    assert_eq!(action(&["--print-config"]).unwrap(), ConfigAction::Print);
    assert_eq!(action(&["--check-config"]).unwrap(), ConfigAction::Check);
    assert!(action(&["--check-config", "--print-config"]).is_err());
}

#[test]
fn the_file_keeps_the_rate_of_copies_unless_another_source_has_it() {
    let file = "copy_rate_max = '20MiB'\n";
    let is_watched = |sources: Sources<'_>| sources.resolve().unwrap().copy_rate_file.is_some();
    assert!(is_watched(Sources { file, ..NONE }));
    assert!(is_watched(NONE), "it may get the key later");
    assert!(!is_watched(Sources { arguments: &["--copy-rate-max", "9MiB"], file, ..NONE }));
    let environment = [("HELIX_COPY_RATE_MAX", "9MiB")];
    assert!(!is_watched(Sources { environment: &environment, file, ..NONE }));
    let cli = Cli::try_parse_from(["helix-server"]).unwrap();
    assert_eq!(cli.flags.resolve(&|_| None).unwrap().copy_rate_file, None);
}
