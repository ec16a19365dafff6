//! The page of examples, run line by line against a dev cluster.
//! What has no end is read until something has come.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::helix::{Dev, Node, Outcome, helix, isolate, outcome};

/// Examples that start clusters of their own: `cluster` and `main` do so.
const CLUSTERS: [&str; 3] = ["helix dev", "helix dev --nodes 1 --memory", "helix demo"];

/// Examples without an end.
const ENDLESS: [&str; 2] =
    ["helix consume orders --from latest --follow", "helix tail orders -n 3 -f -F '%o %v\\n'"];

fn shell(line: &str, dev: &Dev, folder: &Path) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_helix")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("sh");
    command.args(["-c", line]).current_dir(folder).env("PATH", path);
    isolate(&mut command);
    command.env("HELIX_ADDR", dev.address()).env("XDG_CONFIG_HOME", folder);
    command
}

#[test]
fn the_examples_work_in_their_order() {
    let dev = Dev::start(3);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // The log of a node that does not run, for the examples that look at one.
    let node = Node::start_in(&folder.join("helix-data"));
    assert_eq!(node.run(&["produce", "default"], "kept\n").code, 0);
    assert!(node.end_by_closing_stdin().success());

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
            reads_what_comes(example, &dev, folder);
            continue;
        }
        let line = match example.strip_prefix("helix dev") {
            Some(_) => format!("{example} --port {}", dev.port()),
            None => example.to_owned(),
        };
        if matches!(example, "helix check" | "helix cluster health") {
            dev.ok(&["cluster", "health", "--watch", "--exit-when-healthy", "--timeout", "60s"]);
        }
        let run: Outcome = outcome(shell(&line, &dev, folder), "");
        assert_eq!(run.code, 0, "{line}: {run:?}");
    }
}

/// Starts an example and writes until it prints something.
fn reads_what_comes(example: &str, dev: &Dev, folder: &Path) {
    let mut command = shell(&format!("exec {example}"), dev, folder);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let reader = std::thread::spawn(move || lines.map_while(Result::ok).next());
    // It may begin to follow only after some of these.
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
