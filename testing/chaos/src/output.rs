//! Output of the program. A line of the log that cannot be written is lost; `println!` would panic
//! in the middle of a run.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

/// Writes a line to standard output, if it takes one.
pub(crate) fn print(line: impl Display) {
    // Ignored: a run continues without its log.
    let _ = io::stdout().write_all(format!("{line}\n").as_bytes());
}

/// Writes a line to standard error, if it takes one.
pub(crate) fn print_error(line: impl Display) {
    // Ignored: a run continues without its log.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Writes the result of a run to standard output.
///
/// # Errors
/// The write failed. A reader that has closed the pipe is no error.
pub(crate) fn print_result(line: impl Display) -> io::Result<()> {
    match io::stdout().write_all(format!("{line}\n").as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}
