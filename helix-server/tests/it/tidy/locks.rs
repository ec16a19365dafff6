//! Nothing is logged while a lock is held: a log may be slow, and the lock stops others meanwhile.

use super::source::{SourceFile, expect_none, sources};
use super::{SERVER, WAL};

/// Calls that log.
const LOGGING: [&str; 4] = ["debug!(", "info!(", "warn!(", "error!("];

/// Programs and libraries, of which the last ones run in the processes of users.
const CHECKED: [&str; 5] =
    [SERVER, WAL, "helix-client/src/", "helix-tls/src/", "helix-transport/src/"];

/// Returns the names of the functions of a file that take a lock and return its guard.
fn locking_functions(source: &SourceFile) -> Vec<&str> {
    let names = source.text.lines().filter_map(|line| {
        let (signature, returned) = line.split_once(" -> ")?;
        let (name, _) = signature.split_once("fn ")?.1.split_once('(')?;
        returned.contains("Guard<'").then_some(name)
    });
    names.collect()
}

/// Returns the name of the guard that a line binds, if it takes a lock of a thread, itself or with
/// one of these functions.
fn guard<'a>(line: &'a str, functions: &[&str]) -> Option<&'a str> {
    let binding = line.trim().strip_prefix("let ")?;
    let (name, value) = binding.split_once(" = ")?;
    let value = value.strip_suffix(';')?.trim_start_matches("self.").trim_start_matches("sync::");
    // A method on the result returns a value, and the guard is gone at the end of the statement.
    let is_one = value.trim_end_matches(')').matches(')').count() == 0;
    let is_call = |name: &str| is_one && value.starts_with(&format!("{name}(&"));
    let ends_with = |call: &str| format!(".{value}").ends_with(call);
    let is_method =
        [".lock()", ".read()", ".write()", ".ignore_poison()"].into_iter().any(ends_with)
            || ends_with(".unwrap_or_else(PoisonError::into_inner)")
            || functions.iter().any(|name| ends_with(&format!(".{name}()")));
    let is_guard = is_method || is_call("lock") || is_call("read") || is_call("write");
    (is_guard && !value.contains('*')).then(|| name.trim_start_matches("mut "))
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Returns the lines that log under a guard.
fn logged_under_lock(source: &SourceFile) -> Vec<usize> {
    let lines: Vec<(usize, &str)> = source.code().collect();
    let functions = locking_functions(source);
    let mut found = Vec::new();
    for (at, (_, line)) in lines.iter().enumerate() {
        let Some(name) = guard(line, &functions) else { continue };
        for (number, later) in lines.iter().skip(at + 1) {
            let is_end = !later.trim().is_empty() && indent(later) < indent(line);
            if is_end || later.contains(&format!("drop({name})")) {
                break;
            }
            let is_passed_on = later.contains(&format!("({name}, "));
            if is_passed_on {
                break;
            }
            if LOGGING.iter().any(|call| later.contains(call)) {
                found.push(*number);
            }
        }
    }
    found
}

#[test]
fn nothing_is_logged_under_a_lock() {
    let sources = sources().into_iter();
    let violations = sources
        .filter(|source| source.is_in(&CHECKED))
        .flat_map(|source| {
            let lines = logged_under_lock(&source);
            lines.into_iter().map(move |line| format!("{}:{line}", source.path))
        })
        .collect();
    expect_none("nothing is logged while a lock is held", violations);
}

#[test]
fn finds_a_message_under_a_lock() {
    let find = |text: &str| {
        logged_under_lock(&SourceFile { path: "a.rs".to_owned(), text: text.to_owned() })
    };
    assert_eq!(find("    let core = self.lock();\n    if a {\n        warn!(b);\n    }\n}\n"), [3]);
    assert_eq!(find("    let mut a = sync::lock(&self.a);\n    info!(b);\n"), [2]);
    assert_eq!(find("    let a = self.b.lock().ignore_poison();\n    tracing::error!(c);\n"), [2]);
    let poisoned = "    let a = self.b.lock().unwrap_or_else(PoisonError::into_inner);\n";
    assert_eq!(find(&format!("{poisoned}    tracing::warn!(c);\n")), [2]);
    let function = "fn state(&self) -> MutexGuard<'_, State> {\n}\n";
    assert_eq!(find(&format!("{function}    let mut a = self.state();\n    warn!(b);\n")), [4]);
    assert!(find("    let a = self.state();\n    warn!(b);\n").is_empty(), "no guard");
    assert!(find("    let core = self.lock();\n    drop(core);\n    warn!(b);\n").is_empty());
    assert!(find("    {\n        let a = self.lock();\n    }\n    warn!(b);\n").is_empty());
    assert!(find("    let a = *sync::lock(&self.a);\n    warn!(b);\n").is_empty());
}
