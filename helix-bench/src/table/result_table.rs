//! Table of a result, as text, HTML or Markdown.

use std::fmt::Write as _;

use crate::format::{escaped, grouped, known};
use crate::limits::LoadLimits;

/// Longest line of a title in Markdown.
const MARKDOWN_CHARS_MAX: usize = 100;

/// Table with a title and notes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResultTable {
    pub(super) title: String,
    pub(super) columns: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
    pub(super) notes: Vec<String>,
}

impl ResultTable {
    /// Returns the table for a terminal, with right-aligned columns.
    pub(crate) fn plain(&self) -> String {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.chain([self.columns[column].chars().count()]).max().unwrap_or_default()
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let line = |cells: &mut dyn Iterator<Item = &str>| {
            let cells = cells.zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
            cells.collect::<Vec<_>>().join("  ")
        };
        // Ignored throughout: writing to a string does not fail.
        let mut out = self.heading();
        let _ = writeln!(out, "{}", line(&mut self.columns.iter().copied()));
        for row in &self.rows {
            let _ = writeln!(out, "{}", line(&mut row.iter().map(String::as_str)));
        }
        for note in &self.notes {
            let _ = writeln!(out, "note: {note}");
        }
        out
    }

    /// Returns the table as HTML, with the notes.
    pub(crate) fn html(&self) -> String {
        let row = |cells: &mut dyn Iterator<Item = &str>, tag: &str| {
            let cells = cells.map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell)));
            format!("<tr>{}</tr>\n", cells.collect::<String>())
        };
        let mut out = format!("<p>{}</p>\n<table>\n", escaped(&self.title));
        out += &row(&mut self.columns.iter().copied(), "th");
        for cells in &self.rows {
            out += &row(&mut cells.iter().map(String::as_str), "td");
        }
        out += "</table>\n";
        for note in &self.notes {
            // Ignored: writing to a string does not fail.
            let _ = writeln!(out, "<p>Note: {}</p>", escaped(note));
        }
        out
    }

    /// Adds the limits of each row, with its ratio to the lower one.
    pub(super) fn add_limits(&mut self, of_rows: impl Iterator<Item = (LoadLimits, Option<f64>)>) {
        self.columns.extend(["ceiling MB/s", "log MB/s", "of the lower"]);
        for (row, (limits, mb_per_sec)) in self.rows.iter_mut().zip(of_rows) {
            let speed = |limit: Option<f64>| limit.map_or_else(|| "-".to_owned(), grouped);
            let ratio = known(limits.ratio(mb_per_sec), 2);
            row.extend([speed(limits.ceiling), speed(limits.log), ratio]);
        }
    }

    /// Reports whether a table has the same title and columns, and no row of the same name.
    pub(super) fn suits(&self, other: &Self) -> bool {
        let has_row = |name: &String| self.rows.iter().any(|row| row.first() == Some(name));
        self.title == other.title
            && self.columns == other.columns
            && !other.rows.iter().filter_map(|row| row.first()).any(has_row)
    }

    pub(super) fn append(&mut self, other: Self) {
        self.rows.extend(other.rows);
        for note in other.notes {
            if !self.notes.contains(&note) {
                self.notes.push(note);
            }
        }
    }

    fn heading(&self) -> String {
        if self.title.is_empty() { String::new() } else { format!("{}\n\n", self.title) }
    }

    /// Returns the table as Markdown, without the notes.
    pub(crate) fn markdown(&self) -> String {
        let heading = wrapped(&self.heading());
        let mut out = format!("{heading}| {} |\n", self.columns.join(" | "));
        // Ignored throughout: writing to a string does not fail.
        let _ = writeln!(out, "|{}", "---|".repeat(self.columns.len()));
        for row in &self.rows {
            let _ = writeln!(out, "| {} |", row.join(" | "));
        }
        out
    }
}

/// Breaks lines between words.
fn wrapped(text: &str) -> String {
    let mut out = String::new();
    let mut column = 0;
    for word in text.split_inclusive(' ') {
        if column + word.trim_end().chars().count() > MARKDOWN_CHARS_MAX {
            out.truncate(out.trim_end().len());
            out.push('\n');
            column = 0;
        }
        out.push_str(word);
        column += word.chars().count();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_titles_are_wrapped() {
        let text = wrapped(&"word ".repeat(50));
        assert!(text.lines().all(|line| line.len() <= 100 && !line.ends_with("  ")), "{text}");
        assert_eq!(text.split_whitespace().count(), 50);
        assert_eq!(wrapped("short\n\n"), "short\n\n");
    }
}
