//! Reads the repository's sources: code, imports, comments, strings and names.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// One file with code.
pub(super) struct SourceFile {
    /// Path relative to the repository.
    pub(super) path: String,
    pub(super) text: String,
}

impl SourceFile {
    /// Returns whether the file has one of these paths, or is in one of these directories. The file
    /// of a module is in the module's directory: `log.rs` is in `log/`.
    pub(super) fn is_in(&self, prefixes: &[&str]) -> bool {
        let is_module = |directory: &str| self.path.strip_suffix(".rs") == Some(directory);
        prefixes.iter().any(|prefix| {
            self.path.starts_with(prefix) || prefix.strip_suffix('/').is_some_and(is_module)
        })
    }

    /// Lines of code with their numbers, without comment lines.
    pub(super) fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.text.lines().zip(1..).map(|(line, number)| (number, line));
        lines.filter(|(_, line)| !line.trim_start().starts_with("//"))
    }

    /// Lines that use this word, or a path that starts with it, and lines of imports of it.
    pub(super) fn naming(&self, word: &str) -> BTreeSet<usize> {
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

    /// First segments after `crate::`, in imports and in paths, with their lines.
    pub(super) fn crate_modules(&self) -> BTreeSet<(usize, String)> {
        let mut modules = BTreeSet::new();
        for (line, import) in self.imports() {
            if let Some(rest) = import.strip_prefix("crate::") {
                modules.insert((line, first_name(rest)));
            }
        }
        for (number, line) in self.code().filter(|(_, line)| import_in(line).is_none()) {
            for (at, found) in line.match_indices("crate::") {
                let name = first_name(&line[at + found.len()..]);
                let before = line[..at].chars().next_back();
                if !name.is_empty() && !before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
                    modules.insert((number, name));
                }
            }
        }
        modules
    }

    /// Imported paths in full, with the lines where their statements start.
    fn imports(&self) -> Vec<(usize, String)> {
        let mut imports = Vec::new();
        let mut open: Option<(usize, String)> = None;
        for (number, line) in self.code() {
            let (start, mut tree) = match open.take() {
                Some(open) => open,
                None => match import_in(line) {
                    Some(_) => (number, String::new()),
                    None => continue,
                },
            };
            tree.push_str(if tree.is_empty() { import_in(line).unwrap_or(line) } else { line });
            match tree.split_once(';') {
                Some((tree, _)) => {
                    imports.extend(paths_of("", tree).into_iter().map(|path| (start, path)));
                }
                None => open = Some((start, tree)),
            }
        }
        imports
    }

    /// Types with a visibility, with their lines: structs, enums, unions, traits and aliases.
    ///
    /// Items below `#[cfg(test)]` are left out.
    pub(super) fn public_types(&self) -> Vec<(usize, String)> {
        let mut types = Vec::new();
        // The indentation of an item for tests only, once its attribute was seen.
        let (mut is_test, mut skipped): (bool, Option<usize>) = (false, None);
        for (number, line) in self.code() {
            let text = line.trim_start();
            let indent = line.len() - text.len();
            if let Some(item) = skipped {
                let is_end = indent == item && text.starts_with('}');
                skipped = (!is_end).then_some(item);
                continue;
            }
            if text.starts_with("#[") {
                is_test |= text.starts_with("#[cfg(") && has_test(text);
                continue;
            }
            if std::mem::take(&mut is_test) {
                let is_block = text.ends_with('{');
                skipped = is_block.then_some(indent);
                continue;
            }
            types.extend(public_type(text).map(|name| (number, name)));
        }
        types
    }

    /// Names of functions with their lines.
    pub(super) fn functions(&self) -> Vec<(usize, String)> {
        let name = |line: &str| {
            let (before, rest) = line.split_once("fn ")?;
            let is_item = before.is_empty() || before.ends_with(' ');
            (is_item && rest.contains('(')).then(|| first_name(rest))
        };
        self.code().filter_map(|(number, line)| Some((number, name(line)?))).collect()
    }

    /// Comment blocks and strings.
    pub(super) fn prose(&self) -> Vec<Prose> {
        let mut prose: Vec<Prose> = Vec::new();
        for token in tokens(&self.text) {
            match token.kind {
                TokenKind::Comment => {
                    let text = comment_text(token.text).to_owned();
                    match prose.last_mut() {
                        Some(last) if last.continues_at(&token) => last.lines.push(text),
                        _ => prose.push(Prose {
                            is_comment: true,
                            starts_line: token.starts_line,
                            line: token.line,
                            lines: vec![text],
                        }),
                    }
                }
                TokenKind::Text => prose.push(Prose {
                    is_comment: false,
                    starts_line: false,
                    line: token.line,
                    lines: token.text.lines().map(str::to_owned).collect(),
                }),
            }
        }
        prose
    }
}

/// A comment block or a string.
pub(super) struct Prose {
    pub(super) is_comment: bool,
    starts_line: bool,
    /// Line of the first line of the text.
    pub(super) line: usize,
    pub(super) lines: Vec<String>,
}

impl Prose {
    fn continues_at(&self, token: &Token<'_>) -> bool {
        let is_next = self.line + self.lines.len() == token.line;
        self.is_comment && self.starts_line && token.starts_line && is_next
    }
}

fn comment_text(comment: &str) -> &str {
    let comment = comment.trim_end();
    comment.trim_start_matches("//").trim_start_matches(['/', '!']).trim_start_matches("/*")
}

fn has_test(attribute: &str) -> bool {
    let words = |text: &str| -> Vec<String> {
        text.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned).collect()
    };
    words(attribute).iter().any(|word| word == "test") && !attribute.contains("not(test")
}

fn first_name(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

fn public_type(line: &str) -> Option<String> {
    let rest = after_visibility(line)?;
    let kinds = ["struct ", "enum ", "union ", "trait ", "type "];
    let name = kinds.iter().find_map(|kind| rest.strip_prefix(kind))?;
    Some(first_name(name))
}

fn after_visibility(line: &str) -> Option<&str> {
    match line.strip_prefix("pub")? {
        rest if rest.starts_with('(') => Some(rest.split_once(')')?.1.trim_start()),
        rest => rest.strip_prefix(' '),
    }
}

/// Returns the text after `use` in a line that starts an import of any visibility.
fn import_in(line: &str) -> Option<&str> {
    let line = line.trim_start();
    after_visibility(line).unwrap_or(line).strip_prefix("use ")
}

/// The paths of an import: `a::{b, c::{self, d as e}}` has `a::b`, `a::c` and `a::c::d`.
fn paths_of(before: &str, tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some((path, group)) = tree.split_once('{') else {
        let name = tree.split(" as ").next().unwrap_or_default().trim();
        let path = if name == "self" {
            before.trim_end_matches("::").to_owned()
        } else {
            format!("{before}{name}")
        };
        return if name.is_empty() { Vec::new() } else { vec![path] };
    };
    let before = format!("{before}{}", path.trim());
    let (mut depth, mut start, mut paths) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                paths.extend(paths_of(&before, &group[start..at]));
                start = at + 1;
            }
            _ => {}
        }
    }
    paths
}

enum TokenKind {
    Comment,
    Text,
}

/// A comment, or the inside of a string.
struct Token<'a> {
    kind: TokenKind,
    line: usize,
    /// Nothing but white space precedes it in its line.
    starts_line: bool,
    text: &'a str,
}

/// Comments and strings of a Rust or proto file, in order.
fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let (mut at, mut line, mut starts_line) = (0, 1, true);
    while at < text.len() {
        let rest = &text[at..];
        let (length, found) = next_token(rest, text[..at].chars().next_back());
        if let Some((kind, inside)) = found {
            tokens.push(Token { kind, line, starts_line, text: inside });
        }
        for c in rest[..length].chars() {
            line += usize::from(c == '\n');
            starts_line = c == '\n' || (starts_line && c.is_whitespace());
        }
        at += length;
    }
    tokens
}

/// Returns the bytes to move on, and a comment or string if one starts here.
fn next_token(rest: &str, before: Option<char>) -> (usize, Option<(TokenKind, &str)>) {
    let first = rest.chars().next().map_or(1, char::len_utf8);
    if rest.starts_with("//") {
        let length = rest.find('\n').unwrap_or(rest.len());
        return (length, Some((TokenKind::Comment, &rest[..length])));
    }
    if rest.starts_with("/*") {
        let length = rest.find("*/").map_or(rest.len(), |end| end + 2);
        return (length, Some((TokenKind::Comment, &rest[..length])));
    }
    if rest.starts_with('"') {
        let end = string_end(rest);
        return ((end + 1).min(rest.len()), Some((TokenKind::Text, &rest[1..end])));
    }
    let is_name = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    if let Some(raw) = rest.strip_prefix('r').filter(|_| !is_name || before == Some('b')) {
        let marks = raw.len() - raw.trim_start_matches('#').len();
        if let Some(inside) = raw[marks..].strip_prefix('"') {
            let closing = format!("\"{}", "#".repeat(marks));
            let end = inside.find(&closing).unwrap_or(inside.len());
            let length = (2 + marks + end + closing.len()).min(rest.len());
            return (length, Some((TokenKind::Text, &inside[..end])));
        }
    }
    if let Some(inside) = rest.strip_prefix('\'') {
        let mut chars = inside.chars();
        let length = match (chars.next(), chars.next()) {
            (Some('\\'), Some(escaped)) => {
                let from = 2 + escaped.len_utf8();
                from + rest[from..].find('\'').map_or(0, |end| end + 1)
            }
            (Some(c), Some('\'')) => 2 + c.len_utf8(),
            // A lifetime.
            _ => 1,
        };
        return (length, None);
    }
    (first, None)
}

fn string_end(text: &str) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            '"' => return at,
            _ => {}
        }
    }
    text.len()
}

pub(super) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Rust files of every crate: at the top of the repository and anywhere below `testing/`.
pub(super) fn sources() -> Vec<SourceFile> {
    let sources: Vec<_> = files("rs");
    for crate_dir in ["helix-wal", "testing/checker", "testing/sim/hermetic", "testing/fuzz"] {
        let found = sources.iter().any(|source| source.path.starts_with(crate_dir));
        assert!(found, "the sources of {crate_dir} were not found");
    }
    sources
}

/// Proto files.
pub(super) fn protos() -> Vec<SourceFile> {
    files("proto")
}

fn files(extension: &str) -> Vec<SourceFile> {
    let root = repository();
    let mut found = Vec::new();
    for entry in fs::read_dir(&root).unwrap() {
        let directory = entry.unwrap().path();
        if directory.join("Cargo.toml").is_file() || directory.ends_with("testing") {
            collect(&root, &directory, extension, &mut found);
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

fn collect(root: &Path, directory: &Path, extension: &str, found: &mut Vec<SourceFile>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if !["target", "corpus", "golden"].iter().any(|name| path.ends_with(name)) {
                collect(root, &path, extension, found);
            }
        } else if path.extension().is_some_and(|it| it == extension) {
            found.push(read(root, &path));
        }
    }
}

fn read(root: &Path, path: &Path) -> SourceFile {
    let relative = path.strip_prefix(root).unwrap();
    let relative = relative.to_str().unwrap().replace('\\', "/");
    SourceFile { path: relative, text: fs::read_to_string(path).unwrap() }
}

/// README, CONTRIBUTING, CHANGELOG and the pages below `docs/`.
pub(super) fn pages() -> Vec<SourceFile> {
    let root = repository();
    let mut found = Vec::new();
    collect(&root, &root.join("docs"), "md", &mut found);
    for name in ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"] {
        found.push(read(&root, &root.join(name)));
    }
    assert!(found.len() > 20, "the pages were not found");
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// Fails with every violation, not only with the first.
pub(super) fn expect_none(rule: &str, violations: Vec<String>) {
    let count = violations.len();
    assert!(violations.is_empty(), "{rule} ({count}):\n  {}", violations.join("\n  "));
}

fn file(text: &str) -> SourceFile {
    SourceFile { path: "a.rs".to_owned(), text: text.to_owned() }
}

#[test]
fn finds_imports_in_every_form() {
    let source = file(
        "use std::fs;\n\
         use std::{fmt, fs};\n\
         pub(crate) use std::{\n    fmt::{self, Display},\n    fs::{self as f},\n};\n\
         use crate::{log, raft::Replica as R};\n\
         let user = fsync();\n\
         // use std::fs;\n\
         fn f() { std::fs::read(x); crate::peer::f() }\n",
    );
    let lines = |word| source.naming(word).into_iter().collect::<Vec<_>>();
    assert_eq!(lines("std::fs"), [1, 2, 3, 10]);
    assert_eq!(lines("std::fs::"), [1, 2, 3, 10]);
    assert_eq!(lines("std::fmt"), [2, 3]);
    assert_eq!(lines("std::fmt::Display"), [3]);
    assert_eq!(lines("crate::raft"), [7]);
    assert_eq!(lines("crate::log"), [7]);
    assert!(lines("crate::lo").is_empty());
    assert!(lines("std::f").is_empty());
    let modules: Vec<_> = source.crate_modules().into_iter().collect();
    let expected = [(7, "log"), (7, "raft"), (10, "peer")];
    assert_eq!(modules, expected.map(|(line, name)| (line, name.to_owned())));
}

#[test]
fn finds_comment_blocks_and_strings() {
    let source = file(
        "//! First\n//! second.\nfn f<'a>() { // trailing\n    let c = '\"';\n    \
         // apart\n    g(\"a \\\" b\", r#\"raw \" one\"#);\n}\n",
    );
    let found: Vec<_> = source
        .prose()
        .into_iter()
        .map(|prose| (prose.line, prose.is_comment, prose.lines.join("|")))
        .collect();
    let expected = [
        (1, true, " First| second."),
        (3, true, " trailing"),
        (5, true, " apart"),
        (6, false, "a \\\" b"),
        (6, false, "raw \" one"),
    ];
    assert_eq!(found, expected.map(|(line, is, text)| (line, is, text.to_owned())));
}

#[test]
fn finds_public_types_outside_tests() {
    let source = file(
        "pub struct One;\nstruct Private;\npub(super) enum Two {\n}\n#[cfg(test)]\n\
         mod tests {\n    pub(crate) struct Hidden;\n}\n#[cfg(any(test, unix))]\n\
         pub struct Hidden;\n\
         impl X for Y {\n    type Out = u8;\n}\npub type Three<T> = Vec<T>;\n",
    );
    let names: Vec<_> = source.public_types().into_iter().map(|(_, name)| name).collect();
    assert_eq!(names, ["One", "Two", "Three"]);
}
