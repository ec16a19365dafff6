//! How the program ends when something is wrong: the code, and what is said.
//! An error has up to three parts: what failed, why that may be, and what to try.

use std::fmt;

use anyhow::Error;

/// Something failed, or not one request succeeded.
pub(crate) const FAILED: u8 = 1;
/// The command line asks for what does not exist or makes no sense.
pub(crate) const USAGE: u8 = 2;
/// What was acked is not there, or not as it was acked.
pub(crate) const NOT_AS_ACKED: u8 = 11;
/// The user, or the system, asked to stop.
pub(crate) const INTERRUPTED: u8 = 130;

/// A failure that says more than what went wrong.
#[derive(Debug, Default)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) what: String,
    pub(crate) why: String,
    pub(crate) hint: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.what)
    }
}

impl std::error::Error for Failure {}

/// Something wrong with the command line.
pub(crate) fn usage(what: impl fmt::Display) -> Error {
    let what = format!("{what:#}");
    Failure { code: USAGE, what, ..Failure::default() }.into()
}

/// The code that goes with an error.
pub(crate) fn code(error: &Error) -> u8 {
    error.downcast_ref::<Failure>().map_or(FAILED, |failure| failure.code)
}

/// The text for standard error, with a newline at its end.
pub(crate) fn text(error: &Error) -> String {
    let mut text = format!("error: {error:#}\n");
    if let Some(Failure { why, hint, .. }) = error.downcast_ref() {
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
    fn an_error_has_its_code_and_says_what_to_try() {
        let failure = Failure {
            code: FAILED,
            what: "connect to here".to_owned(),
            why: "nobody listens".to_owned(),
            hint: "one\ntwo".to_owned(),
        };
        let error = Err::<(), _>(failure).context("run").unwrap_err();
        assert_eq!(code(&error), FAILED);
        let said = "error: run: connect to here\n  why: nobody listens\n  try: one\n       two\n";
        assert_eq!(text(&error), said);
        let error = usage("--clients must be at least 1");
        assert_eq!((code(&error), code(&anyhow!("other"))), (USAGE, FAILED));
        assert_eq!(text(&error), "error: --clients must be at least 1\n");
    }
}
