//! Where a result goes: a table on standard output, JSON there or in a file.
//! The file is opened before the run, so that a run is not made for nothing.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

/// Where a result goes.
#[derive(Debug)]
pub(crate) enum Output {
    Table,
    Json,
    /// The table, and the JSON into a file.
    Both(File, String),
}

impl Output {
    /// # Errors
    /// Why the file cannot be written.
    pub(crate) fn open(json: Option<&Path>) -> Result<Self> {
        match json {
            None => Ok(Self::Table),
            Some(path) if path == Path::new("-") => Ok(Self::Json),
            Some(path) => {
                // What is in it stays until there is something to take its place.
                let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
                let name = path.display().to_string();
                Ok(Self::Both(opened.with_context(|| format!("--json {name}"))?, name))
            }
        }
    }

    /// # Errors
    /// Why the result could not be written. That nobody reads standard output any more is none.
    pub(crate) fn deliver(
        self,
        result: &impl Serialize,
        table: impl FnOnce() -> String,
    ) -> Result<()> {
        match self {
            Self::Table => print(&table()),
            Self::Json => print(&json(result)?),
            Self::Both(file, name) => {
                // The file first: standard output may fail.
                replace(&file, &json(result)?).with_context(|| format!("write {name}"))?;
                print(&table())
            }
        }
    }
}

/// # Errors
/// Why it could not be written, except that whoever reads has seen enough.
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
    fn a_reader_that_has_seen_enough_is_no_error() {
        assert!(unless_closed(Err(ErrorKind::BrokenPipe.into())).is_ok());
        assert!(unless_closed(Err(ErrorKind::StorageFull.into())).is_err());
    }

    #[test]
    fn a_file_that_cannot_be_written_is_said_before_the_run() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Output::open(Some(&folder.path().join("none/result"))).is_err());
        let path = folder.path().join("result");
        for result in ["a long one", "short"] {
            let Output::Both(file, _) = Output::open(Some(&path)).unwrap() else { panic!() };
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
