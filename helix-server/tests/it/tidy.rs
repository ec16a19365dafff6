//! Holds the rules of the source that no compiler knows: who may import whom, and how files look.
//! A failure names the file, the line and the rule.

// The one test that reads the repository itself.
#![allow(clippy::disallowed_methods)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Marks that must not reach the main branch. Put together so that this file has none.
const FORBIDDEN: [&str; 2] = [concat!("dbg", "!("), concat!("FIX", "ME")];

const LINE_CHARS_MAX: usize = 100;

struct Source {
    /// Relative to the repository.
    path: String,
    text: String,
}

impl Source {
    fn is_in(&self, places: &[&str]) -> bool {
        places.iter().any(|place| self.path.starts_with(place))
    }

    /// Lines of code, without comments, with their numbers.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.text.lines().zip(1..).map(|(line, number)| (number, line));
        lines.filter(|(_, line)| !line.trim_start().starts_with("//"))
    }

    /// Lines of code with this word, or this beginning of a path; and those where an import of it
    /// begins, however it is written.
    fn naming(&self, word: &str) -> BTreeSet<usize> {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let is_path = word.ends_with("::");
        let names = |line: &str| {
            line.match_indices(word).any(|(at, _)| {
                let before = line[..at].chars().next_back();
                let after = line[at + word.len()..].chars().next();
                !before.is_some_and(is_part) && (is_path || !after.is_some_and(is_part))
            })
        };
        let named = self.code().filter(|(_, line)| names(line)).map(|(number, _)| number);
        let path = word.trim_end_matches("::");
        let is_below = |import: &str| {
            import.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
        };
        let imported = self.imports().into_iter().filter(|(_, import)| is_below(import));
        named.chain(imported.map(|(number, _)| number)).collect()
    }

    /// What is imported, each path in full, with the lines where its statement begins.
    fn imports(&self) -> Vec<(usize, String)> {
        let mut imports = Vec::new();
        let mut open: Option<(usize, String)> = None;
        for (number, line) in self.code() {
            let (begins, mut tree) = match open.take() {
                Some(begun) => begun,
                None => match import_in(line) {
                    Some(_) => (number, String::new()),
                    None => continue,
                },
            };
            tree.push_str(if tree.is_empty() { import_in(line).unwrap_or(line) } else { line });
            match tree.split_once(';') {
                Some((tree, _)) => {
                    let paths = paths_of("", tree).into_iter().map(|path| (begins, path));
                    imports.extend(paths);
                }
                None => open = Some((begins, tree)),
            }
        }
        imports
    }
}

/// What follows `use` in a line that begins an import, of whatever visibility.
fn import_in(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(')')?.1.trim_start(),
        Some(rest) => rest.trim_start(),
        None => line,
    };
    line.strip_prefix("use ")
}

/// The paths of an import: `a::{b, c::{self, d as e}}` has `a::b`, `a::c` and `a::c::d`.
fn paths_of(before: &str, tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some((head, group)) = tree.split_once('{') else {
        let name = tree.split(" as ").next().unwrap_or_default().trim();
        let path = if name == "self" {
            before.trim_end_matches("::").to_owned()
        } else {
            format!("{before}{name}")
        };
        return if name.is_empty() { Vec::new() } else { vec![path] };
    };
    let before = format!("{before}{}", head.trim());
    let (mut depth, mut begin, mut paths) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                paths.extend(paths_of(&before, &group[begin..at]));
                begin = at + 1;
            }
            _ => {}
        }
    }
    paths
}

#[test]
fn imports_are_seen_however_they_are_written() {
    let text = "use std::fs;\n\
                use std::{fmt, fs};\n\
                pub(crate) use std::{\n    fmt::{self, Display},\n    fs::{self as f},\n};\n\
                use crate::{log, raft::Replica as R};\n\
                let user = fsync();\n\
                // use std::fs;\n\
                fn f() { std::fs::read(x) }\n";
    let source = Source { path: "a.rs".to_owned(), text: text.to_owned() };
    let lines = |word| source.naming(word).into_iter().collect::<Vec<_>>();
    assert_eq!(lines("std::fs"), [1, 2, 3, 10]);
    assert_eq!(lines("std::fs::"), [1, 2, 3, 10]);
    assert_eq!(lines("std::fmt"), [2, 3]);
    assert_eq!(lines("std::fmt::Display"), [3]);
    assert_eq!(lines("crate::raft"), [7]);
    assert_eq!(lines("crate::log"), [7]);
    assert!(lines("crate::lo").is_empty());
    assert!(lines("std::f").is_empty());
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn sources() -> Vec<Source> {
    let root = repository();
    let mut sources = Vec::new();
    for entry in fs::read_dir(&root).unwrap() {
        let crate_dir = entry.unwrap().path();
        if crate_dir.join("Cargo.toml").is_file() {
            collect(&root, &crate_dir, &mut sources);
        }
    }
    assert!(sources.len() > 50, "the sources were not found");
    sources
}

fn collect(root: &Path, folder: &Path, sources: &mut Vec<Source>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if !path.ends_with("target") {
                collect(root, &path, sources);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let relative = path.strip_prefix(root).unwrap();
            let path_text = relative.to_str().unwrap().replace('\\', "/");
            sources.push(Source { path: path_text, text: fs::read_to_string(&path).unwrap() });
        }
    }
}

/// Fails with every violation, not only the first one.
fn expect_none(rule: &str, violations: Vec<String>) {
    assert!(violations.is_empty(), "{rule}:\n  {}", violations.join("\n  "));
}

/// Paths into `word`, a crate or a module, stand nowhere in `within` but in `allowed`.
fn only_in(word: &str, within: &str, allowed: &[&str]) {
    let path = format!("{word}::");
    let violations = sources()
        .iter()
        .filter(|source| source.path.starts_with(within) && !source.is_in(allowed))
        .flat_map(|source| {
            source.naming(&path).into_iter().map(|line| format!("{}:{line}", source.path))
        })
        .collect();
    expect_none(&format!("{word} belongs only in {allowed:?} of {within}"), violations);
}

const SERVER: &str = "helix-server/src/";

const ROOMS: [&str; 12] = [
    "log",
    "raft",
    "shard",
    "cluster",
    "node",
    "api",
    "transport",
    "peer",
    "admin",
    "server",
    "config",
    "daemon",
];

#[test]
fn grpc_stays_at_the_edge() {
    let edge = [
        "helix-server/src/api/",
        "helix-server/src/transport/",
        "helix-server/src/peer/",
        "helix-server/src/server.rs",
        "helix-server/src/main.rs",
    ];
    for word in [
        "tonic",
        "tonic_health",
        "tonic_reflection",
        "tonic_types",
        "helix_proto",
        "helix_transport",
    ] {
        only_in(word, SERVER, &edge);
    }
}

#[test]
fn http_stays_at_the_edge() {
    let edge = ["helix-server/src/transport/", "helix-server/src/api/", "helix-server/src/admin/"];
    for word in ["hyper", "hyper_util", "http_body_util", "tower"] {
        only_in(word, SERVER, &edge);
    }
}

#[test]
fn the_raft_library_stays_in_its_room() {
    let rooms = ["helix-server/src/raft/", "helix-server/src/peer/"];
    for word in ["openraft", "openraft_rt", "openraft_macros", "openraft_rt_tokio"] {
        only_in(word, SERVER, &rooms);
    }
}

#[test]
fn imports_point_down() {
    // Each room, and the rooms above it, which it must not know. What is beside all rooms knows
    // none of them.
    let above: [(&str, &[&str]); 23] = [
        (
            "log/",
            &[
                "raft",
                "shard",
                "cluster",
                "node",
                "api",
                "transport",
                "peer",
                "admin",
                "server",
                "config",
                "daemon",
            ],
        ),
        (
            "raft/",
            &[
                "shard",
                "cluster",
                "node",
                "api",
                "transport",
                "peer",
                "admin",
                "server",
                "config",
                "daemon",
            ],
        ),
        ("shard/", &["cluster", "node", "api", "transport", "admin", "server", "config", "daemon"]),
        ("cluster/", &["node", "api", "transport", "admin", "server", "config", "daemon"]),
        ("node/", &["api", "transport", "admin", "server", "config", "daemon"]),
        (
            "peer/",
            &[
                "shard",
                "cluster",
                "node",
                "api",
                "transport",
                "admin",
                "server",
                "config",
                "daemon",
            ],
        ),
        ("api/", &["raft", "peer", "admin", "server", "config", "daemon"]),
        ("admin/", &["raft", "peer", "api", "server", "config", "daemon"]),
        ("server.rs", &["raft", "peer", "shard", "daemon"]),
        (
            "transport/",
            &["raft", "peer", "shard", "cluster", "admin", "server", "config", "daemon"],
        ),
        ("daemon.rs", &["log", "shard", "cluster", "node", "api", "transport", "peer", "admin"]),
        (
            "config/",
            &["raft", "shard", "node", "api", "transport", "peer", "admin", "server", "daemon"],
        ),
        (
            "error.rs",
            &["shard", "cluster", "node", "api", "transport", "peer", "admin", "server", "config"],
        ),
        ("metrics/", &ROOMS),
        ("transport/load", &ROOMS),
        ("flow", &ROOMS),
        ("memory.rs", &ROOMS),
        ("limits.rs", &ROOMS),
        ("protocol.rs", &ROOMS),
        ("random.rs", &ROOMS),
        ("clock.rs", &ROOMS),
        ("log_threads.rs", &ROOMS),
        ("process.rs", &ROOMS),
    ];
    let mut violations = Vec::new();
    for source in sources().iter().filter(|source| source.path.starts_with(SERVER)) {
        for (room, strangers) in above {
            if !source.path[SERVER.len()..].starts_with(room) {
                continue;
            }
            for stranger in strangers {
                for line in source.naming(&format!("crate::{stranger}")) {
                    violations.push(format!("{}:{line} knows {stranger}", source.path));
                }
            }
        }
    }
    expect_none("imports point down only", violations);
}

#[test]
fn the_domain_does_not_wait_and_touches_nothing() {
    for word in ["async", "await", "tokio", "std::fs", "helix_wal", "Mutex"] {
        let violations = sources()
            .iter()
            .filter(|source| source.path.starts_with("helix-server/src/log/"))
            .flat_map(|source| {
                source.naming(word).into_iter().map(|line| format!("{}:{line}", source.path))
            })
            .collect();
        expect_none(&format!("log/ is pure, without {word}"), violations);
    }
}

#[test]
fn files_are_the_wals_business() {
    let places = [
        "helix-server/src/config/",
        // Tests, which hold pages of docs/ to what the code says.
        "helix-server/src/doc_tables.rs",
        "helix-server/src/metrics/reference.rs",
    ];
    for word in ["std::fs", "tokio::fs"] {
        only_in(word, SERVER, &places);
    }
}

#[test]
fn the_wal_stands_alone() {
    let words =
        ["tokio", "tonic", "openraft", "helix_proto", "helix_transport", "helix_server", "prost"];
    for word in words {
        only_in(word, "helix-wal/src/", &[]);
    }
    let manifest = fs::read_to_string(repository().join("helix-wal/Cargo.toml")).unwrap();
    for word in ["tokio", "tonic", "openraft", "helix-proto", "helix-server"] {
        assert!(!manifest.contains(word), "helix-wal must not depend on {word}");
    }
}

#[test]
fn unsafe_code_has_two_places() {
    let places = ["helix-wal/src/format/nontemporal.rs", "testing/sim/hermetic/"];
    // Put together so that this file has no such word.
    let word = concat!("un", "safe");
    let violations = sources()
        .iter()
        .filter(|source| !source.is_in(&places))
        .flat_map(|source| {
            source.naming(word).into_iter().map(|line| format!("{}:{line}", source.path))
        })
        .collect();
    expect_none(&format!("{word} code is only in {places:?}"), violations);
}

/// It cannot take them over, since it has to deny what they forbid.
#[test]
fn the_wal_has_the_lints_of_the_workspace() {
    let read = |path| fs::read_to_string(repository().join(path)).unwrap();
    let (workspace, wal) = (read("Cargo.toml"), read("helix-wal/Cargo.toml"));
    let (_, lints) = workspace.split_once("[workspace.lints.rust]").unwrap();
    let (lints, _) = lints.split_once("[profile").unwrap();
    let lints: Vec<_> = lints.lines().filter(|line| line.contains(" = ")).collect();
    assert!(lints.len() > 5, "the workspace's lints were not found");
    let missing = lints.iter().map(|lint| lint.replace("\"forbid\"", "\"deny\""));
    let missing = missing.filter(|lint| !wal.lines().any(|line| line == lint)).collect();
    expect_none("helix-wal/Cargo.toml has every lint of the workspace", missing);
}

#[test]
fn clients_do_not_know_the_server() {
    let crates =
        ["helix-client/src/", "helix-proto/src/", "helix-transport/src/", "helix-wal/src/"];
    for crate_dir in crates {
        only_in("helix_server", crate_dir, &[]);
    }
}

#[test]
fn the_simulation_and_the_fuzzer_are_workspaces_of_their_own() {
    let manifest = fs::read_to_string(repository().join("Cargo.toml")).unwrap();
    assert!(manifest.contains("exclude = [\"testing/sim\", \"testing/fuzz/runner\"]"));
}

#[test]
fn every_file_begins_with_what_it_is() {
    let violations = sources()
        .iter()
        .filter(|source| !source.text.starts_with("//!"))
        .map(|source| source.path.clone())
        .collect();
    expect_none("a file begins with //! lines", violations);
}

#[test]
fn lines_fit_and_leave_no_marks() {
    let mut violations = Vec::new();
    for source in sources() {
        for (number, line) in (1..).zip(source.text.lines()) {
            if line.chars().count() > LINE_CHARS_MAX {
                violations.push(format!("{}:{number} is too long", source.path));
            }
            for mark in FORBIDDEN {
                if line.contains(mark) {
                    violations.push(format!("{}:{number} has {mark}", source.path));
                }
            }
        }
    }
    expect_none("no line is longer than 100 characters or unfinished", violations);
}
