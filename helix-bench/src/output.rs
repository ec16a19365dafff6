//! Output of a result: a table on standard output, JSON there or in a file.
//!
//! The file is opened before the run, so that no run is wasted.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::Serialize;
use serde_json::Value;

use crate::disk::MeasuredDisk;
use crate::figures::{self, NamedResult};
use crate::host::{HostInfo, command_line};
use crate::options::OutputOptions;
use crate::{exit, interrupt, progress, table};

/// Result of a mode.
pub(crate) trait ModeResult: Serialize + JsonSchema {
    /// Returns the name of the mode, by which tables and plots recognise a result.
    fn mode(&self) -> &'static str;

    /// Returns the exit code of the run.
    fn exit_code(&self) -> u8;

    /// Returns the result for a terminal.
    ///
    /// Made from the JSON, so that a stored result gives the same.
    ///
    /// # Errors
    /// The mode has no table.
    fn text(&self, json: &Value) -> Result<String> {
        table::plain(json)
    }
}

/// Version of the format of results.
const SCHEMA: u32 = 1;

/// Result of a run: what the results of all modes have in common, and what its mode adds.
#[derive(Debug, Serialize, JsonSchema)]
struct ResultDocument<'a, R> {
    /// Version of the format.
    schema: u32,
    /// Command or load that was run.
    mode: &'static str,
    /// Command line of the run.
    command: String,
    /// The run was asked to stop: the result is of what was measured until then.
    interrupted: bool,
    client_version: &'static str,
    machine: HostInfo,
    #[serde(flatten)]
    result: &'a R,
}

impl<'a, R: ModeResult> ResultDocument<'a, R> {
    fn new(result: &'a R, nodes_disk: Option<MeasuredDisk>) -> Self {
        Self {
            schema: SCHEMA,
            mode: result.mode(),
            command: command_line(),
            interrupted: interrupt::is_requested(),
            client_version: env!("CARGO_PKG_VERSION"),
            machine: HostInfo { nodes_disk, ..HostInfo::here() },
            result,
        }
    }
}

/// Returns the JSON Schema of the results of a mode.
pub(crate) fn schema_of<R: ModeResult + 'static>() -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let settings = settings.with(|settings| settings.inline_subschemas = true);
    let generator = settings.into_generator();
    let mut schema = generator.into_root_schema_for::<ResultDocument<'static, R>>();
    // Type names are internal.
    schema.remove("title");
    schema.into()
}

/// Destinations of a result.
#[derive(Debug)]
pub(crate) struct ReportOutput {
    destination: Destination,
    /// Directory of the plots.
    plot: Option<PathBuf>,
    nodes_disk: Option<MeasuredDisk>,
}

#[derive(Debug)]
enum Destination {
    Table,
    Json,
    /// The table on standard output, and JSON in a file.
    Both(File, String),
}

impl ReportOutput {
    /// Opens the destinations.
    ///
    /// # Errors
    /// The file cannot be written, or the result of the nodes' disk cannot be read.
    pub(crate) fn open(options: &OutputOptions) -> Result<Self> {
        let nodes_disk = options.nodes_disk.as_deref().map(MeasuredDisk::of_result).transpose();
        let nodes_disk = nodes_disk.map_err(exit::usage)?;
        let destination = match &options.json {
            None => Destination::Table,
            Some(path) if path == Path::new("-") => {
                progress::silence();
                Destination::Json
            }
            Some(path) => {
                // The old contents stay until the new ones are written.
                let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
                let name = path.display().to_string();
                Destination::Both(opened.with_context(|| format!("--json {name}"))?, name)
            }
        };
        Ok(Self { destination, plot: options.plot.clone(), nodes_disk })
    }

    /// Writes the result and its plots, and returns the exit code of the run.
    ///
    /// # Errors
    /// The result could not be written. A closed standard output is not an error.
    pub(crate) fn deliver(self, result: &impl ModeResult) -> Result<u8> {
        let document = ResultDocument::new(result, self.nodes_disk.clone());
        let value = serde_json::to_value(&document).context("write JSON")?;
        let mut text = result.text(&value)?;
        if document.interrupted {
            text += "note: interrupted: this is what was measured until then\n";
        }
        self.write(&document, &text)?;
        self.draw(value)?;
        Ok(exit_code(result.exit_code(), document.interrupted))
    }

    /// Writes the plots of a result, if they were asked for.
    ///
    /// # Errors
    /// A plot could not be written.
    pub(crate) fn draw(&self, result: Value) -> Result<()> {
        match &self.plot {
            Some(dir) => figures::draw(&[NamedResult { name: String::new(), result }], dir),
            None => Ok(()),
        }
    }

    /// Writes the JSON of a result, and its text for a terminal.
    ///
    /// # Errors
    /// As [`Self::deliver`].
    pub(crate) fn write(&self, result: &impl Serialize, text: &str) -> Result<()> {
        match &self.destination {
            Destination::Table => print(text),
            Destination::Json => print(&json(result)?),
            Destination::Both(file, name) => {
                // The file first, because standard output may fail.
                replace(file, &json(result)?).with_context(|| format!("write {name}"))?;
                print(text)
            }
        }
    }
}

/// Returns the exit code of a run. That of lost records comes before that of an interruption.
pub(crate) fn exit_code(of_result: u8, interrupted: bool) -> u8 {
    if interrupted && of_result != exit::NOT_AS_ACKED { exit::INTERRUPTED } else { of_result }
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
    fn interruption_does_not_hide_lost_records() {
        assert_eq!((exit_code(0, false), exit_code(1, true)), (0, exit::INTERRUPTED));
        assert_eq!(exit_code(exit::NOT_AS_ACKED, true), exit::NOT_AS_ACKED);
    }

    #[test]
    fn unwritable_file_is_reported_before_the_run() {
        let dir = tempfile::tempdir().unwrap();
        let open = |path: &Path| {
            let json = Some(path.to_owned());
            ReportOutput::open(&OutputOptions { json, ..OutputOptions::default() })
        };
        assert!(open(&dir.path().join("none/result")).is_err());
        let path = dir.path().join("result");
        for result in ["a long one", "short"] {
            let Destination::Both(file, _) = open(&path).unwrap().destination else { panic!() };
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
