//! The form of the pages: a title, a first sentence, short lines, short table cells.

use std::process::Command;

use super::source::{SourceFile, expect_none, pages, repository};

const LINE_CHARS_MAX: usize = 100;
const CELL_WORDS_MAX: usize = 25;

/// Pages whose lines are made from a program's help texts.
const GENERATED: [&str; 1] = ["docs/cli.md"];

/// Pages below `docs/`.
fn docs() -> impl Iterator<Item = SourceFile> {
    pages().into_iter().filter(|page| page.path.starts_with("docs/"))
}

/// Lines outside code blocks, with their numbers.
fn text_lines(page: &SourceFile) -> impl Iterator<Item = (usize, &str)> {
    let mut in_block = false;
    (1..).zip(page.text.lines()).filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_block ^= is_fence;
        !in_block && !is_fence
    })
}

/// Starts like prose: no heading, list, table, quote or code.
fn is_prose(line: &str) -> bool {
    line.starts_with(|c: char| c.is_alphanumeric() || ['`', '[', '*', '"'].contains(&c))
}

/// A paragraph that has a sentence, after the blank lines that `lines` starts with.
fn has_sentence<'a>(lines: impl Iterator<Item = &'a str>) -> bool {
    let paragraph = lines.skip_while(|line| line.is_empty()).take_while(|line| !line.is_empty());
    let paragraph: Vec<&str> = paragraph.collect();
    let ends = |line: &&str| line.contains(['.', ':']);
    paragraph.first().is_some_and(|line| is_prose(line)) && paragraph.iter().any(ends)
}

#[test]
fn pages_open_with_a_title_and_a_sentence() {
    let mut violations = Vec::new();
    for page in docs() {
        let mut lines = page.text.lines();
        if !lines.next().is_some_and(|line| line.starts_with("# ")) {
            violations.push(format!("{}:1 has no title", page.path));
            continue;
        }
        // A decision has its status first, then the context.
        let is_decision = lines.clone().any(|line| line.starts_with("- Status: "));
        let opens = match is_decision {
            true => has_sentence(lines.skip_while(|line| *line != "## Context").skip(1)),
            false => has_sentence(lines),
        };
        if !opens {
            violations.push(format!("{} has no sentence after its title", page.path));
        }
    }
    expect_none("a page opens with a title and a sentence", violations);
}

/// A line without the targets of its links.
fn without_targets(line: &str) -> String {
    let mut shown = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("](") {
        shown.push_str(before);
        shown.push(']');
        rest = after.split_once(')').map_or("", |(_, rest)| rest);
    }
    shown + rest
}

#[test]
fn lines_of_pages_are_short() {
    let mut violations = Vec::new();
    for page in docs().filter(|page| !GENERATED.contains(&page.path.as_str())) {
        for (number, line) in text_lines(&page) {
            let length = without_targets(line).chars().count();
            let is_link = line.split_whitespace().any(|word| word.chars().count() > LINE_CHARS_MAX);
            if length > LINE_CHARS_MAX && !line.starts_with('|') && !is_link {
                violations.push(format!("{}:{number} has {length} characters", page.path));
            }
        }
    }
    expect_none(&format!("a line of prose has at most {LINE_CHARS_MAX} characters"), violations);
}

/// A release archive has the pages without the rest of the repository.
#[test]
fn packed_pages_link_only_to_what_is_packed() {
    let directory = tempfile::tempdir().unwrap();
    let script = repository().join("scripts/packed-docs.sh");
    let Ok(packed) = Command::new("bash").arg(script).arg(directory.path()).output() else {
        eprintln!("SKIPPED: there is no bash");
        return;
    };
    let links = String::from_utf8_lossy(&packed.stdout);
    assert!(packed.status.success(), "{links}{}", String::from_utf8_lossy(&packed.stderr));
    assert!(directory.path().join("helix-proto/proto/helix/log/v1/errors.proto").is_file());
}

#[test]
fn table_cells_are_short() {
    let mut violations = Vec::new();
    for page in docs() {
        for (number, line) in text_lines(&page).filter(|(_, line)| line.starts_with('|')) {
            for cell in line.replace("\\|", " ").split('|') {
                let words = cell.split_whitespace().count();
                if words > CELL_WORDS_MAX {
                    violations.push(format!("{}:{number} has a cell of {words} words", page.path));
                }
            }
        }
    }
    expect_none(&format!("a cell of a table has at most {CELL_WORDS_MAX} words"), violations);
}
