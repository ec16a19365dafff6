//! Imports between the modules of helix-server and of helix-wal point down only.

use std::collections::BTreeSet;
use std::fs;

use super::source::{SourceFile, expect_none, repository, sources};
use super::{SERVER, WAL};

/// Modules of helix-server that form its layers, from the top down.
const LAYERS: [&str; 16] = [
    "daemon",
    "embedded",
    "server",
    "config",
    "admin",
    "transport",
    "api",
    "call",
    "node",
    "access",
    "cluster",
    "shard",
    "peer",
    "raft",
    "flow",
    "log",
];

/// Each module of helix-server, and the layers that it may import.
///
/// Modules that are no layer may be imported by all of them.
const MAY_IMPORT: [(&str, &[&str]); 34] = [
    ("daemon", &["server", "config", "access", "raft"]),
    ("embedded", &["server", "config", "transport", "api", "call", "node", "shard", "log"]),
    (
        "server",
        &["config", "admin", "transport", "api", "call", "node", "access", "cluster", "log"],
    ),
    ("config", &["access", "cluster", "log"]),
    ("admin", &["transport", "call", "node", "access", "cluster", "shard", "log"]),
    ("transport", &["api", "call", "node", "access", "log"]),
    ("api", &["call", "node", "access", "cluster", "shard", "log"]),
    ("call", &["access", "log"]),
    ("node", &["access", "cluster", "shard", "peer", "raft", "flow", "log"]),
    ("access", &["log"]),
    ("cluster", &["shard", "peer", "raft", "log"]),
    ("shard", &["peer", "raft", "flow", "log"]),
    ("peer", &["raft", "log"]),
    ("raft", &["flow", "log"]),
    ("flow", &[]),
    ("log", &[]),
    // No layers.
    ("error", &["raft", "log"]),
    ("file_limit", &[]),
    ("clock", &[]),
    ("limits", &[]),
    ("log_threads", &[]),
    ("memory", &[]),
    ("metrics", &[]),
    ("process", &[]),
    ("protocol", &[]),
    ("quote", &[]),
    ("random", &[]),
    ("records", &[]),
    ("signals", &[]),
    ("slow", &[]),
    ("stages", &[]),
    ("stderr", &[]),
    ("sync", &[]),
    ("trace", &[]),
];

/// Only tests use it.
const DOC_TABLES: &str = "doc_tables";

/// First part of a path below `prefix`, without `.rs`.
fn module_of<'a>(source: &'a SourceFile, prefix: &str) -> Option<&'a str> {
    let path = source.path.strip_prefix(prefix)?;
    Some(path.split('/').next().unwrap_or(path).trim_end_matches(".rs"))
}

fn modules(sources: &[SourceFile], prefix: &str) -> BTreeSet<String> {
    let modules = sources.iter().filter_map(|source| module_of(source, prefix));
    modules.filter(|module| !["lib", "main"].contains(module)).map(str::to_owned).collect()
}

#[test]
fn imports_of_the_server_point_down() {
    let sources = sources();
    let listed = MAY_IMPORT.iter().map(|(module, _)| *module).chain([DOC_TABLES]);
    assert_eq!(modules(&sources, SERVER), listed.map(str::to_owned).collect());
    let mut violations = Vec::new();
    let rank = |layer: &str| LAYERS.iter().position(|it| *it == layer);
    for (module, imported) in
        MAY_IMPORT.iter().flat_map(|(module, all)| all.iter().map(move |it| (module, it)))
    {
        if rank(module).is_some_and(|above| rank(imported).is_none_or(|below| below <= above)) {
            violations.push(format!("{imported} is not a layer below {module}"));
        }
    }
    for source in &sources {
        let Some(module) = module_of(source, SERVER) else { continue };
        let Some((_, allowed)) = MAY_IMPORT.iter().find(|(name, _)| *name == module) else {
            continue;
        };
        for (line, imported) in source.crate_modules() {
            let imported = imported.as_str();
            let is_layer = LAYERS.contains(&imported) && imported != module;
            if is_layer && !allowed.contains(&imported) {
                let path = &source.path;
                violations.push(format!("{path}:{line}: {module} must not import {imported}"));
            }
        }
    }
    expect_none("imports of helix-server point down", violations);
}

/// Files of helix-wal that every directory may import, and that import no directory.
const WAL_FILES: [&str; 3] = ["error", "sync", "types"];

/// Directories in the order of the table "Source layout" on the front page of helix-wal.
fn wal_directories() -> Vec<String> {
    let page = fs::read_to_string(repository().join(WAL).join("lib.rs")).unwrap();
    let (_, layout) = page.split_once("//! # Source layout").expect("the page has the table");
    let rows = layout.lines().filter_map(|line| line.strip_prefix("//! | `"));
    rows.filter_map(|row| Some(row.split_once('`')?.0.to_owned())).collect()
}

/// Lines whose `super::` leads out of the file's directory, past the check of paths from `crate`.
fn leaves_its_directory(source: &SourceFile) -> Vec<usize> {
    let path = source.path.trim_start_matches(WAL).trim_end_matches(".rs");
    let depth = path.trim_end_matches("/mod").split('/').count();
    let leaves = |line: &str| {
        // An inline module is one level deeper.
        let is_inline = line.starts_with("    use ");
        line.contains(&"super::".repeat(depth + usize::from(is_inline)))
    };
    source.code().filter(|(_, line)| leaves(line)).map(|(number, _)| number).collect()
}

#[test]
fn imports_of_the_wal_point_down() {
    let (sources, directories) = (sources(), wal_directories());
    let listed = directories.iter().cloned().chain(WAL_FILES.map(str::to_owned));
    assert_eq!(modules(&sources, WAL), listed.collect(), "the table has every directory");
    let mut violations = Vec::new();
    for source in &sources {
        let Some(module) = module_of(source, WAL).filter(|module| *module != "lib") else {
            continue;
        };
        let rank = directories.iter().position(|directory| directory == module);
        // A crate's tests may use what the crate exports.
        let is_test = source.path.ends_with("tests.rs") || source.path.contains("/tests/");
        for (line, imported) in source.crate_modules() {
            let target = directories.iter().position(|directory| *directory == imported);
            let is_allowed = match target {
                Some(target) => rank.is_some_and(|rank| target >= rank),
                None => is_test || WAL_FILES.contains(&imported.as_str()),
            };
            if !is_allowed {
                let path = &source.path;
                violations.push(format!("{path}:{line}: {module} must not import {imported}"));
            }
        }
        for line in leaves_its_directory(source) {
            violations.push(format!("{}:{line}: write the path from `crate`", source.path));
        }
    }
    expect_none("imports of helix-wal point down its table", violations);
}
