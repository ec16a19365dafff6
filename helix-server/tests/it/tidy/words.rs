//! Comments, texts, test names and docs use the words of CONTRIBUTING.md's table, and comments open
//! with their subject.

use super::source::{SourceFile, expect_none, pages, protos, sources};

/// Forms of words to avoid, and the words to write instead.
///
/// A `.` at the end of a form stands for the end of a clause.
const WORDS: &[(&[&str], &str)] = &[
    (&["folder", "folders"], "directory, data directory"),
    (&["processor", "processors"], "CPU"),
    (&["anew"], "again, re-initialized"),
    (&["for ever"], "permanently, without end"),
    (&["in vain"], "without effect"),
    (&["any more."], "no longer"),
    (&["by itself", "by themselves", "by himself"], "automatically, alone"),
    (&["of its own accord", "of their own accord"], "automatically"),
    (
        &["whoever", "whomever", "nobody", "anybody", "somebody", "everybody", "for whom", "whom"],
        "client, caller, reader, follower, operator, node",
    ),
    (&["one that", "those who"], "the noun: a node that, a batch that"),
    (&["the way of a record"], "append path, read path"),
    (&["reign", "reigns", "reigned"], "leadership, term"),
    (&["heir", "heirs"], "successor"),
    (&["the lead"], "leadership"),
    (&["fellow", "fellows"], "node of the same cluster, peer"),
    (&["stranger", "strangers"], "node of another cluster, unknown node"),
    (
        &[
            "room for",
            "no room",
            "has room",
            "have room",
            "had room",
            "make room",
            "makes room",
            "made room",
            "making room",
            "with room",
            "without room",
            "room on",
        ],
        "capacity, permit, disk space, module",
    ),
    (&["take a look", "takes a look", "took a look"], "checks, polls"),
    (&["every so often"], "periodically, at an interval"),
    (
        &[
            "is told",
            "are told",
            "was told",
            "were told",
            "be told",
            "been told",
            "being told",
            "get told",
            "gets told",
        ],
        "is notified, is rejected, receives",
    ),
    (
        &["put aside", "puts aside", "putting aside", "begin anew", "begins anew", "filled anew"],
        "quarantined, set aside, rebuilt",
    ),
    (&["cut off", "cuts off", "cutting off"], "partitioned, isolated, truncated"),
    (
        &["turned away", "turns away", "turn away", "turning away", "sent away"],
        "rejected, redirected",
    ),
];

/// Words that are meant: file (a prefix), form, reason.
const ALLOWED: &[(&str, &str, &str)] = &[
    ("CONTRIBUTING.md", "stranger", "the reader, in the rule of the language"),
    // The lists below are the rule itself.
    ("helix-server/tests/it/tidy/words.rs", "", "the list of the words"),
];

/// Clauses that no comment opens with.
const OPENERS: [&[&str]; 6] =
    [&["what"], &["who"], &["whoever"], &["whether"], &["how", "far"], &["how", "many"]];

/// A word in lower case, with its line.
struct Word {
    text: String,
    line: usize,
    /// Punctuation follows: a phrase ends here.
    is_last: bool,
}

/// Words of lines of prose, without code in backticks, links' targets and format captures.
fn words<'a>(first_line: usize, lines: impl Iterator<Item = &'a str>) -> Vec<Word> {
    let mut words: Vec<Word> = Vec::new();
    let end_phrase = |words: &mut Vec<Word>| {
        if let Some(last) = words.last_mut() {
            last.is_last = true;
        }
    };
    let (mut in_code, mut in_block) = (false, false);
    for (line, text) in (first_line..).zip(lines) {
        if text.trim_start().starts_with("```") {
            in_block = !in_block;
            end_phrase(&mut words);
            continue;
        }
        if in_block {
            continue;
        }
        if text.trim().is_empty() {
            in_code = false;
            end_phrase(&mut words);
        }
        let mut word = String::new();
        let mut nested = 0_usize;
        let mut chars = text.chars().chain([' ']).peekable();
        while let Some(c) = chars.next() {
            let is_code = in_code || nested > 0;
            if c.is_alphanumeric() && !is_code || (c == '\'' && !word.is_empty() && !is_code) {
                word.extend(c.to_lowercase());
                continue;
            }
            if !word.is_empty() {
                let text = std::mem::take(&mut word);
                words.push(Word { text, line, is_last: false });
            }
            match c {
                '`' => in_code = !in_code,
                '{' => nested += 1,
                '}' => nested = nested.saturating_sub(1),
                ']' if chars.peek() == Some(&'(') && !is_code => {
                    // The target of a link.
                    while chars.next_if(|c| *c != ')').is_some() {}
                }
                _ => {}
            }
            if !c.is_whitespace() && c != '*' && c != '_' {
                end_phrase(&mut words);
            }
        }
    }
    end_phrase(&mut words);
    words
}

/// Line and form of each word to avoid, with the words to write instead.
fn avoided(words: &[Word]) -> Vec<(usize, &'static str, &'static str)> {
    let mut found = Vec::new();
    for (forms, instead) in WORDS {
        for form in *forms {
            let phrase: Vec<&str> = form.trim_end_matches('.').split(' ').collect();
            for window in words.windows(phrase.len()) {
                let is_equal = window.iter().map(|word| &word.text).eq(&phrase);
                let (last, inner) = window.split_last().expect("a form has a word");
                let is_whole = inner.iter().all(|word| !word.is_last);
                if is_equal && is_whole && (!form.ends_with('.') || last.is_last) {
                    found.push((window[0].line, *form, *instead));
                }
            }
        }
    }
    found
}

fn is_allowed(path: &str, form: &str) -> bool {
    let matches = |allowed: &str| allowed.is_empty() || allowed == form;
    ALLOWED.iter().any(|(prefix, allowed, _)| path.starts_with(prefix) && matches(allowed))
}

fn violations(path: &str, words: &[Word]) -> Vec<String> {
    let found = avoided(words).into_iter().filter(|(_, form, _)| !is_allowed(path, form));
    found
        .map(|(line, form, instead)| {
            format!("{path}:{line} \"{}\": write {instead}", form.trim_end_matches('.'))
        })
        .collect()
}

/// Strings without a space are names and data.
fn is_text(lines: &[String]) -> bool {
    lines.iter().any(|line| line.contains(' '))
}

#[test]
fn comments_and_strings_use_the_words_of_the_field() {
    let mut found = Vec::new();
    for source in sources().iter().chain(&protos()) {
        for prose in source.prose() {
            if prose.is_comment || is_text(&prose.lines) {
                let lines = prose.lines.iter().map(String::as_str);
                found.extend(violations(&source.path, &words(prose.line, lines)));
            }
        }
    }
    expect_none("comments and strings use the words of CONTRIBUTING.md", found);
}

#[test]
fn function_names_use_the_words_of_the_field() {
    let mut found = Vec::new();
    for source in sources() {
        for (line, name) in source.functions() {
            let name = name.replace('_', " ");
            found.extend(violations(&source.path, &words(line, [name.as_str()].into_iter())));
        }
    }
    expect_none("function names use the words of CONTRIBUTING.md", found);
}

/// Lines of a page, without the table of words of CONTRIBUTING.md.
fn page_lines(page: &SourceFile) -> impl Iterator<Item = &str> {
    let mut in_table = false;
    page.text.lines().map(move |line| {
        in_table = line.starts_with('|') && (in_table || line.starts_with("| write | not |"));
        if in_table { "" } else { line }
    })
}

#[test]
fn docs_use_the_words_of_the_field() {
    let mut found = Vec::new();
    for page in pages() {
        found.extend(violations(&page.path, &words(1, page_lines(&page))));
    }
    expect_none("docs use the words of CONTRIBUTING.md", found);
}

#[test]
fn comments_open_with_their_subject() {
    let mut found = Vec::new();
    for source in sources().iter().chain(&protos()) {
        for prose in source.prose().iter().filter(|prose| prose.is_comment) {
            let words = words(prose.line, prose.lines.iter().map(String::as_str));
            let opens = |opener: &&[&str]| {
                words.len() > opener.len() && opener.iter().zip(&words).all(|(a, b)| *a == b.text)
            };
            let is_code = prose.lines[0].trim_start().starts_with(['`', '#', '|']);
            if let Some(opener) = OPENERS.iter().find(|opener| opens(opener) && !is_code) {
                let opener = opener.join(" ");
                let line = prose.line;
                found.push(format!("{}:{line} \"{opener}\": open with the subject", source.path));
            }
        }
    }
    expect_none("no comment opens with a clause", found);
}

#[test]
fn finds_phrases_across_lines_and_not_across_clauses() {
    let find = |text: &str| -> Vec<(usize, &str)> {
        let words = words(1, text.lines());
        avoided(&words).into_iter().map(|(line, form, _)| (line, form)).collect()
    };
    assert_eq!(find("It is cut\noff here."), [(1, "cut off")]);
    assert_eq!(find("It is cut, off it goes."), []);
    assert_eq!(find("Not any more, any more records."), [(1, "any more.")]);
    assert_eq!(find("A `folder` in a {folder} of [a](folder/x.md)."), []);
    assert_eq!(find("Two Folders."), [(1, "folders")]);
}
