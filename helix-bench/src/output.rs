//! Output of a result: a table on standard output, JSON there or in a file.
//!
//! The file is opened before the run, so that no run is wasted.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::progress;

/// Destination of a result.
#[derive(Debug)]
pub(crate) enum ReportOutput {
    Table,
    Json,
    /// The table on standard output, and JSON in a file.
    Both(File, String),
}

impl ReportOutput {
    /// Opens the destination.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn open(json: Option<&Path>) -> Result<Self> {
        match json {
            None => Ok(Self::Table),
            Some(path) if path == Path::new("-") => {
                progress::silence();
                Ok(Self::Json)
            }
            Some(path) => {
                // The old contents stay until the new ones are written.
                let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
                let name = path.display().to_string();
                Ok(Self::Both(opened.with_context(|| format!("--json {name}"))?, name))
            }
        }
    }

    /// Writes the result.
    ///
    /// # Errors
    /// The result could not be written. A closed standard output is not an error.
    pub(crate) fn deliver(
        self,
        result: &impl Serialize,
        table: impl FnOnce() -> String,
    ) -> Result<()> {
        match self {
            Self::Table => print(&table()),
            Self::Json => print(&json(result)?),
            Self::Both(file, name) => {
                // The file first, because standard output may fail.
                replace(&file, &json(result)?).with_context(|| format!("write {name}"))?;
                print(&table())
            }
        }
    }
}

/// Prints to standard output.
///
/// # Errors
/// Writing failed, except because the reader has closed the pipe.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    unless_closed(written).context("write to standard output")
}

fn unless_closed(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

fn json(result: &impl Serialize) -> Result<String> {
    let text = serde_json::to_string_pretty(result).context("write JSON")?;
    Ok(text + "\n")
}

fn replace(mut file: &File, text: &str) -> io::Result<()> {
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_pipe_is_not_an_error() {
        assert!(unless_closed(Err(ErrorKind::BrokenPipe.into())).is_ok());
        assert!(unless_closed(Err(ErrorKind::StorageFull.into())).is_err());
    }

    #[test]
    fn unwritable_file_is_reported_before_the_run() {
        let dir = tempfile::tempdir().unwrap();
        assert!(ReportOutput::open(Some(&dir.path().join("none/result"))).is_err());
        let path = dir.path().join("result");
        for result in ["a long one", "short"] {
            let ReportOutput::Both(file, _) = ReportOutput::open(Some(&path)).unwrap() else {
                panic!()
            };
            replace(&file, &json(&result).unwrap()).unwrap();
            let mut written = String::new();
            io::Read::read_to_string(
                &mut OpenOptions::new().read(true).open(&path).unwrap(),
                &mut written,
            )
            .unwrap();
            assert_eq!(written, format!("{result:?}\n"));
        }
    }
}
