//! `helix cheat`: a page of examples. A test runs each of them.

use anyhow::Context;

use crate::output;

/// The page. Lines indented by four spaces are commands; `#` starts a comment.
pub(crate) const PAGE: &str = include_str!("cheat.txt");

pub(crate) fn run() -> anyhow::Result<()> {
    output::write(PAGE.as_bytes()).context("print the page")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::Cli;

    /// Returns the `helix` commands of the page as words. Only single quotes around words occur.
    fn commands() -> Vec<Vec<String>> {
        let lines = PAGE.lines().filter_map(|line| line.strip_prefix("    "));
        let lines = lines.map(|line| line.split("  #").next().unwrap_or_default().trim());
        let pipes = lines.flat_map(|line| line.split(" | "));
        let commands = pipes.filter(|command| command.starts_with("helix "));
        let commands = commands.map(|command| command.split(" > ").next().unwrap_or_default());
        commands.map(words).collect()
    }

    fn words(command: &str) -> Vec<String> {
        let mut words = Vec::new();
        for (index, part) in command.split('\'').enumerate() {
            match index % 2 {
                0 => words.extend(part.split_whitespace().map(str::to_owned)),
                _ => words.push(part.to_owned()),
            }
        }
        words
    }

    #[test]
    fn every_example_parses() {
        let commands = commands();
        assert!(commands.len() > 40, "{}", commands.len());
        for command in commands {
            if let Err(error) = Cli::try_parse_from(&command) {
                panic!("{command:?}: {error}");
            }
        }
    }

    #[test]
    fn page_fits_100_columns() {
        assert!(PAGE.lines().all(|line| line.chars().count() <= 100));
    }
}
