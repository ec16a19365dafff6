//! Commands on stored results: plots, tables and a page.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use serde_json::Value;

use crate::figures::{self, NamedResult};
use crate::result_file::read_result;
use crate::{html, output, progress, table};

/// Flags of `plot`.
#[derive(Debug, Clone, Args)]
pub(crate) struct PlotArgs {
    /// Results in JSON; those of one mode share a plot
    #[arg(required = true, value_name = "RESULT.json")]
    results: Vec<PathBuf>,
    /// Directory to write pictures to
    #[arg(long, default_value = ".")]
    dir: PathBuf,
}

/// Flags of `report`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReportArgs {
    /// Results in JSON
    #[arg(required = true, value_name = "RESULT.json")]
    results: Vec<PathBuf>,
    #[command(flatten)]
    limits: LimitArgs,
    /// HTML file to write
    #[arg(long, short, default_value = "report.html", value_name = "FILE")]
    output: PathBuf,
}

/// Flags of `tables`.
#[derive(Debug, Clone, Args)]
pub(crate) struct TablesArgs {
    /// Results in JSON
    #[arg(required = true, value_name = "RESULT.json")]
    results: Vec<PathBuf>,
    #[command(flatten)]
    limits: LimitArgs,
}

/// Results that others are compared with.
#[derive(Debug, Clone, Args)]
struct LimitArgs {
    /// Result of `ceiling` or `wal`; tables get the ratio to the lower limit
    #[arg(long = "limit", value_name = "RESULT.json")]
    limits: Vec<PathBuf>,
}

impl LimitArgs {
    fn read(&self) -> Result<Vec<Value>> {
        self.limits.iter().map(|path| read_result(path)).collect()
    }
}

/// Draws plots of stored results.
///
/// # Errors
/// A result cannot be read or has no plot, or a plot cannot be written.
pub(crate) fn plot(args: &PlotArgs) -> Result<u8> {
    figures::draw(&named_results(&args.results)?, &args.dir)?;
    Ok(0)
}

/// Writes a page of stored results.
///
/// # Errors
/// A result cannot be read or has no table, or the page cannot be written.
pub(crate) fn report(args: &ReportArgs) -> Result<u8> {
    let results = named_results(&args.results)?;
    for (path, named) in args.results.iter().zip(&results) {
        check(path, &named.result)?;
    }
    let page = html::page(&results, &args.limits.read()?)?;
    figures::write_file(&args.output, page.as_bytes())?;
    progress::step(&format!("wrote {}", args.output.display()));
    Ok(0)
}

/// Prints the tables of stored results.
///
/// # Errors
/// A result cannot be read or has no table.
pub(crate) fn tables(args: &TablesArgs) -> Result<u8> {
    let results = args.results.iter().map(|path| read_result(path)).collect::<Result<Vec<_>>>()?;
    for (path, result) in args.results.iter().zip(&results) {
        check(path, result)?;
    }
    for table in table::tables_of_all(&results, &args.limits.read()?)? {
        output::print(&format!("{}\n", table.markdown()))?;
    }
    Ok(0)
}

/// Checks that a result has a table.
///
/// # Errors
/// Names the file of a result without one.
fn check(path: &Path, result: &Value) -> Result<()> {
    table::check(result).with_context(|| path.display().to_string())
}

fn named_results(paths: &[PathBuf]) -> Result<Vec<NamedResult>> {
    paths.iter().map(|path| named_result(path)).collect()
}

/// Names a result by its file.
fn named_result(path: &Path) -> Result<NamedResult> {
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let result = read_result(path)?;
    // Charts of a mode with rows have the mode in their titles.
    let mode = format!("{}-", result["mode"].as_str().unwrap_or_default());
    let name = match name.strip_prefix(&mode) {
        Some(name) if !result["load"].is_object() => name.to_owned(),
        _ => name,
    };
    Ok(NamedResult { name, result })
}
