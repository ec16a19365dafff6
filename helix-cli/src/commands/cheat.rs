//! `helix cheat`: examples of everything, on one page. Each of them is run by a test.

use anyhow::Context;

use crate::output;

/// The page. A line that begins with four spaces is a command; `#` begins what is said about it.
pub(crate) const PAGE: &str = include_str!("cheat.txt");

pub(crate) fn run() -> anyhow::Result<()> {
    output::write(PAGE.as_bytes()).context("print the page")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::Cli;

    /// The calls of this program on the page, as words. Quotes are single and stand around a word.
    fn calls() -> Vec<Vec<String>> {
        let commands = PAGE.lines().filter_map(|line| line.strip_prefix("    "));
        let commands = commands.map(|line| line.split("  #").next().unwrap_or_default().trim());
        let pipes = commands.flat_map(|line| line.split(" | "));
        let calls = pipes.filter(|call| call.starts_with("helix "));
        let calls = calls.map(|call| call.split(" > ").next().unwrap_or_default());
        calls.map(words).collect()
    }

    fn words(call: &str) -> Vec<String> {
        let mut words = Vec::new();
        for (place, part) in call.split('\'').enumerate() {
            match place % 2 {
                0 => words.extend(part.split_whitespace().map(str::to_owned)),
                _ => words.push(part.to_owned()),
            }
        }
        words
    }

    #[test]
    fn every_example_is_a_command_of_this_program() {
        let calls = calls();
        assert!(calls.len() > 40, "{}", calls.len());
        for call in calls {
            if let Err(error) = Cli::try_parse_from(&call) {
                panic!("{call:?}: {error}");
            }
        }
    }

    #[test]
    fn the_page_fits_a_terminal() {
        assert!(PAGE.lines().all(|line| line.chars().count() <= 100));
    }
}
