//! Runs the examples of `helix cheat` in order against a dev cluster.
//! Examples that do not end are stopped after their first output.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::harness::{CommandOutput, DevProcess, ServerProcess, helix, isolate, outcome};

/// Examples that start clusters; the tests in `cluster` and `main` cover them.
const CLUSTERS: [&str; 3] = ["helix dev", "helix dev --nodes 1 --memory", "helix demo"];

/// Examples that do not end.
const ENDLESS: [&str; 2] =
    ["helix consume orders --from latest --follow", "helix tail orders -n 3 -F -f '%o %v\\n'"];

fn shell(line: &str, dev: &DevProcess, directory: &Path) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_helix")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("sh");
    command.args(["-c", line]).current_dir(directory).env("PATH", path);
    isolate(&mut command);
    command.env("HELIX_ADDR", dev.address()).env("XDG_CONFIG_HOME", directory);
    command.env("XDG_STATE_HOME", directory.join("state"));
    command
}

#[test]
#[allow(clippy::disallowed_methods)] // Writes a token file.
fn examples_succeed_in_order() {
    let dev = DevProcess::start(3);
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    // The log of a stopped node, for the `helix wal` examples.
    let node = ServerProcess::start_in(&directory.join("helix-data"));
    assert_eq!(node.run(&["produce", "default"], "kept\n").code, 0);
    assert!(node.end_by_closing_stdin().success());

    // The cluster checks no tokens, so any well-formed one serves.
    let token = format!("helix_{}_{}", "0".repeat(16), "0".repeat(64));
    std::fs::write(directory.join("admin-token"), token).unwrap();

    let page = helix(&["cheat"], "").stdout;
    let examples = page.lines().filter_map(|line| line.strip_prefix("    "));
    let examples: Vec<_> = examples.map(|line| line.split("  #").next().unwrap().trim()).collect();
    for example in CLUSTERS.iter().chain(&ENDLESS) {
        assert!(examples.contains(example), "{example}");
    }
    for example in examples {
        if CLUSTERS.contains(&example) {
            continue;
        }
        if ENDLESS.contains(&example) {
            prints_new_records(example, &dev, directory);
            continue;
        }
        let line = match example.strip_prefix("helix dev") {
            Some(_) => format!("{example} --port {}", dev.port()),
            None => example.to_owned(),
        };
        if matches!(example, "helix check" | "helix cluster health") {
            dev.ok(&["cluster", "health", "--watch", "--exit-when-healthy", "--timeout", "60s"]);
        }
        let run: CommandOutput = outcome(shell(&line, &dev, directory), "");
        assert_eq!(run.code, 0, "{line}: {run:?}");
    }
}

/// Starts an example and appends records until it prints one.
fn prints_new_records(example: &str, dev: &DevProcess, directory: &Path) {
    let mut command = shell(&format!("exec {example}"), dev, directory);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let reader = std::thread::spawn(move || lines.map_while(Result::ok).next());
    // The example may start to follow only after some appends.
    for _ in 0..600 {
        if reader.is_finished() {
            break;
        }
        dev.ok_with(&["produce", "orders"], "new\n");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(reader.join().unwrap().is_some(), "{example} printed nothing");
}
