//! Exit codes and error output.
//!
//! An error has up to three parts: what failed, a possible cause, and a hint.

use std::fmt;

use anyhow::Error;

/// The run failed, or no request succeeded.
pub(crate) const FAILED: u8 = 1;
/// The command line is invalid.
pub(crate) const USAGE: u8 = 2;
/// Acked records are missing or changed.
pub(crate) const NOT_AS_ACKED: u8 = 11;
/// The user or the system requested a stop.
pub(crate) const INTERRUPTED: u8 = 130;

/// Failure with an exit code, a cause and a hint.
#[derive(Debug, Default)]
pub(crate) struct BenchFailure {
    pub(crate) code: u8,
    pub(crate) what: String,
    pub(crate) why: String,
    pub(crate) hint: String,
}

impl fmt::Display for BenchFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.what)
    }
}

impl std::error::Error for BenchFailure {}

/// Creates an error about the command line.
pub(crate) fn usage(what: impl fmt::Display) -> Error {
    let what = format!("{what:#}");
    BenchFailure { code: USAGE, what, ..BenchFailure::default() }.into()
}

/// Returns the exit code of an error.
pub(crate) fn code(error: &Error) -> u8 {
    error.downcast_ref::<BenchFailure>().map_or(FAILED, |failure| failure.code)
}

/// Returns the text for standard error, with a trailing newline.
pub(crate) fn text(error: &Error) -> String {
    let mut text = format!("error: {error:#}\n");
    if let Some(BenchFailure { why, hint, .. }) = error.downcast_ref() {
        for (label, part) in [("why", why), ("try", hint)] {
            if !part.is_empty() {
                text += &format!("  {label}: {}\n", part.replace('\n', "\n       "));
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn error_has_a_code_and_a_hint() {
        let failure = BenchFailure {
            code: FAILED,
            what: "connect to here".to_owned(),
            why: "connection refused".to_owned(),
            hint: "one\ntwo".to_owned(),
        };
        let error = Err::<(), _>(failure).context("run").unwrap_err();
        assert_eq!(code(&error), FAILED);
        let expected =
            "error: run: connect to here\n  why: connection refused\n  try: one\n       two\n";
        assert_eq!(text(&error), expected);
        let error = usage("--clients must be at least 1");
        assert_eq!((code(&error), code(&anyhow!("other"))), (USAGE, FAILED));
        assert_eq!(text(&error), "error: --clients must be at least 1\n");
    }
}
