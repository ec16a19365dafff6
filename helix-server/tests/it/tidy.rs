//! Rules of the source that no compiler knows: imports, names, words, the form of files and docs.
//! A failure names the file, the line and the rule.

// The tests that read the repository itself.
#![allow(clippy::disallowed_methods)]

mod docs;
mod layers;
mod locks;
mod source;
mod types;
mod words;

use std::fs;

use source::{expect_none, repository, sources};

const SERVER: &str = "helix-server/src/";
const WAL: &str = "helix-wal/src/";

/// Marks that must not reach the main branch, written in two parts so that this file has none.
const FORBIDDEN: [&str; 2] = [concat!("dbg", "!("), concat!("FIX", "ME")];

const LINE_CHARS_MAX: usize = 100;

/// Expects paths into `word`, a crate or a module, only in `allowed` of the files in `within`.
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

#[test]
fn grpc_stays_at_the_edge() {
    let edge = [
        "helix-server/src/api/",
        "helix-server/src/transport/",
        "helix-server/src/peer/",
        "helix-server/src/server.rs",
        // A client of a collector, and of the API in the same process.
        "helix-server/src/trace/otlp.rs",
        "helix-server/src/admin/console/",
        // Its callers have the client's types of batches.
        "helix-server/src/embedded.rs",
        "helix-server/src/main.rs",
        // Builds and reads batches as clients do.
        "helix-server/src/shard/cleaner/tests.rs",
    ];
    for word in [
        "tonic",
        "tonic_health",
        "tonic_reflection",
        "tonic_types",
        "helix_proto::batch",
        "helix_proto::codec",
        "helix_proto::error",
        "helix_proto::log",
        "helix_proto::plain",
        "helix_proto::raft",
        "helix_proto::time",
        "helix_transport",
    ] {
        only_in(word, SERVER, &edge);
    }
}

#[test]
fn http_stays_at_the_edge() {
    let edge = [
        "helix-server/src/transport/",
        "helix-server/src/api/",
        "helix-server/src/admin/",
        // Dials with a socket of its own.
        "helix-server/src/peer/tls.rs",
    ];
    for word in ["hyper", "hyper_util", "http_body_util", "tower"] {
        only_in(word, SERVER, &edge);
    }
}

#[test]
fn openraft_stays_in_raft_and_peer() {
    let directories = ["helix-server/src/raft/", "helix-server/src/peer/"];
    for word in ["openraft", "openraft_rt", "openraft_macros", "openraft_rt_tokio"] {
        only_in(word, SERVER, &directories);
    }
}

#[test]
fn log_is_pure() {
    for word in ["async", "await", "tokio", "std::fs", "helix_wal", "Mutex"] {
        let violations = sources()
            .iter()
            .filter(|source| source.is_in(&["helix-server/src/log/"]))
            .flat_map(|source| {
                source.naming(word).into_iter().map(|line| format!("{}:{line}", source.path))
            })
            .collect();
        expect_none(&format!("log/ is pure, without {word}"), violations);
    }
}

#[test]
fn only_the_wal_opens_files() {
    let allowed = [
        "helix-server/src/config/",
        // The file of a Unix domain socket.
        "helix-server/src/transport/unix_socket.rs",
        // Tests that compare pages of docs/ with the code.
        "helix-server/src/doc_tables.rs",
        "helix-server/src/metrics/reference.rs",
    ];
    for word in ["std::fs", "tokio::fs"] {
        only_in(word, SERVER, &allowed);
    }
}

#[test]
fn the_wal_depends_on_no_runtime_and_no_rpc() {
    let words =
        ["tokio", "tonic", "openraft", "helix_proto", "helix_transport", "helix_server", "prost"];
    for word in words {
        only_in(word, WAL, &[]);
    }
    let manifest = fs::read_to_string(repository().join("helix-wal/Cargo.toml")).unwrap();
    for word in ["tokio", "tonic", "openraft", "helix-proto", "helix-server"] {
        assert!(!manifest.contains(word), "helix-wal must not depend on {word}");
    }
}

/// `println!` and its siblings panic where their output is closed or full, and block a runtime
/// thread where it is not read.
#[test]
fn programs_print_without_panics() {
    let programs = [SERVER, "helix-bench/src/", "helix-cli/src/", "testing/chaos/src/"];
    let is_test = |path: &str| {
        path.ends_with("tests.rs") || path.contains("/tests/") || path.ends_with("testing.rs")
    };
    let violations = sources()
        .iter()
        .filter(|source| source.is_in(&programs) && !is_test(&source.path))
        .flat_map(|source| {
            // Tests are at the end of their file.
            let code = source.code().take_while(|(_, line)| *line != "mod tests {");
            let prints =
                code.filter(|(_, line)| line.contains("print!(") || line.contains("println!("));
            prints.map(|(number, _)| format!("{}:{number}", source.path)).collect::<Vec<_>>()
        })
        .collect();
    expect_none("write output and ignore or return the error", violations);
}

/// The conversions of `prost_types` panic for some values that a sender can choose.
#[test]
fn times_of_the_wire_are_converted_without_panics() {
    let violations = sources()
        .iter()
        .filter(|source| !source.is_in(&["helix-server/tests/", "testing/fuzz/"]))
        .flat_map(|source| {
            // The other direction has an error for every value without equivalent.
            let is_conversion = |line: &str| {
                let line = line.replace("prost_types::Duration::try_from(", "");
                line.contains(" Duration::try_from(") || line.contains("SystemTime::try_from(")
            };
            let code = source.code().filter(|(_, line)| is_conversion(line));
            code.map(|(number, _)| format!("{}:{number}", source.path)).collect::<Vec<_>>()
        })
        .collect();
    expect_none("convert times of the wire with helix_proto::time", violations);
}

#[test]
fn unsafe_code_is_in_three_places() {
    let allowed = [
        "helix-wal/src/format/nontemporal.rs",
        "helix-allocator/src/lib.rs",
        "testing/sim/hermetic/",
    ];
    // Written in two parts so that this file has no such word.
    let word = concat!("un", "safe");
    let violations = sources()
        .iter()
        .filter(|source| !source.is_in(&allowed))
        .flat_map(|source| {
            source.naming(word).into_iter().map(|line| format!("{}:{line}", source.path))
        })
        .collect();
    expect_none(&format!("{word} code is only in {allowed:?}"), violations);
}

/// They cannot inherit the lints, because they have to deny some that the workspace forbids.
#[test]
fn crates_with_their_own_lints_have_those_of_the_workspace() {
    let read = |path| fs::read_to_string(repository().join(path)).unwrap();
    let workspace = read("Cargo.toml");
    let (_, lints) = workspace.split_once("[workspace.lints.rust]").unwrap();
    let (lints, _) = lints.split_once("[profile").unwrap();
    let lints: Vec<_> = lints.lines().filter(|line| line.contains(" = ")).collect();
    assert!(lints.len() > 5, "the workspace's lints were not found");
    for manifest in ["helix-wal/Cargo.toml", "helix-allocator/Cargo.toml"] {
        let own = read(manifest);
        let missing = lints.iter().map(|lint| lint.replace("\"forbid\"", "\"deny\""));
        let missing = missing.filter(|lint| !own.lines().any(|line| line == lint)).collect();
        expect_none(&format!("{manifest} has every lint of the workspace"), missing);
    }
}

#[test]
fn clients_do_not_import_the_server() {
    let crates = [
        "helix-client/src/",
        "helix-proto/src/",
        "helix-tls/src/",
        "helix-transport/src/",
        "helix-wal/src/",
    ];
    for crate_dir in crates {
        only_in("helix_server", crate_dir, &[]);
    }
}

#[test]
fn simulation_fuzzer_and_python_client_are_workspaces_of_their_own() {
    let manifest = fs::read_to_string(repository().join("Cargo.toml")).unwrap();
    let excluded = r#"exclude = ["testing/sim", "testing/fuzz/runner", "clients/python"]"#;
    assert!(manifest.contains(excluded));
}

#[test]
fn every_file_opens_with_a_doc_comment() {
    let violations = sources()
        .iter()
        .filter(|source| !source.text.starts_with("//!"))
        .map(|source| source.path.clone())
        .collect();
    expect_none("a file opens with //! lines", violations);
}

#[test]
fn lines_are_short_and_have_no_marks() {
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
