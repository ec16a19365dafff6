//! One self-contained page of results: tables, plots, commands, machine and versions.

use std::fmt::Write as _;

use anyhow::Result;
use serde_json::Value;

use crate::figures::{self, NamedResult};
use crate::format::{escaped, grouped};
use crate::limits::KnownLimits;
use crate::table;

const STYLE: &str = "body{font:15px sans-serif;max-width:72em;margin:2em auto;padding:0 1em;\
    color:#222}table{border-collapse:collapse;margin:1em 0}th,td{padding:.25em .7em;\
    text-align:right;border-bottom:1px solid #ddd}code{background:#f3f3f3;padding:.1em .3em}\
    svg{max-width:100%;height:auto}";

/// Places of the server's version in results of all modes.
const VERSIONS: [&str; 4] = [
    "/server_version",
    "/rows/0/run/server_version",
    "/steps/0/run/server_version",
    "/nodes/0/version",
];

/// Places of the durability in results of all modes.
const DURABILITIES: [&str; 5] = [
    "/durability",
    "/rows/0/run/durability",
    "/steps/0/run/durability",
    "/server/durability",
    "/throughput/0/durability",
];

/// Places of the nodes' disk in results of all modes.
const DISKS: [&str; 5] = [
    "/disk",
    "/nodes/0/disk",
    "/rows/0/run/nodes/0/disk",
    "/steps/0/run/nodes/0/disk",
    "/runs/0/server/nodes/0/disk",
];

/// Returns the page. `limits` are further results that tables compare with.
///
/// # Errors
/// A result has no table or no plot.
pub(crate) fn page(results: &[NamedResult], limits: &[Value]) -> Result<String> {
    let values: Vec<Value> = results.iter().map(|named| named.result.clone()).collect();
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <title>Helix benchmarks</title>\n<style>{STYLE}</style>\n<h1>Helix benchmarks</h1>\n"
    );
    let common = common_machine(results);
    // Ignored: writing to a string does not fail.
    let _ = writeln!(out, "<p>Machine: {}</p>", stated(&common));
    for table in table::tables_of_all(&values, limits)? {
        out += &table.html();
    }
    for figure in figures::figures(results)? {
        out += &figure.svg();
    }
    let known_limits = KnownLimits::among(values.iter().chain(limits));
    if let Some(log) = known_limits.log("write", &Value::from("disk")) {
        // Ignored: writing to a string does not fail.
        let _ = writeln!(out, "<p>Sequential writes of the log alone: {} MB/s</p>", grouped(log));
    }
    out += "<h2>Runs</h2>\n<ul>\n";
    for named in results {
        // Ignored: writing to a string does not fail.
        let _ = writeln!(out, "<li>{}</li>", run(named, &common));
    }
    out += "</ul>\n";
    Ok(out)
}

/// Describes a run, with what differs from the machine of the page.
fn run(named: &NamedResult, common: &[String; 3]) -> String {
    let run = format!(
        "{}: <code>{}</code>; server {}, durability {}",
        escaped(&named.name),
        text(&named.result["command"]),
        text(&find(&named.result, &VERSIONS)),
        text(&find(&named.result, &DURABILITIES)),
    );
    let machine = machine(&named.result).into_iter().zip(common);
    let differing = machine.filter(|(part, common)| part != *common).map(|(part, _)| part);
    let parts: Vec<String> = std::iter::once(run).chain(differing).collect();
    stated(&parts)
}

/// Returns the host of a run, the disk and its speed. An unknown part is empty.
fn machine(result: &Value) -> [String; 3] {
    let machine = &result["machine"];
    let host = match machine {
        Value::Null => String::new(),
        machine => format!(
            "{} cores of {}, {} {}, kernel {}",
            text(&machine["cores"]),
            text(&machine["cpu"]),
            text(&machine["os"]),
            text(&machine["arch"]),
            text(&machine["kernel"]),
        ),
    };
    let disk = match find(result, &DISKS) {
        Value::Null => machine["disk"].clone(),
        disk => disk,
    };
    let model = match &disk["model"] {
        Value::Null => &disk["device"],
        model => model,
    };
    let disk = match &disk {
        Value::Null => String::new(),
        disk => format!("{} on {}", text(&disk["file_system"]), text(model)),
    };
    let nodes_disk = &machine["nodes_disk"];
    let speed = match nodes_disk["sequential_write_mb_per_sec"].as_f64() {
        None => String::new(),
        Some(mb_per_sec) => format!(
            "the nodes' disk: sequential writes {} MB/s, sync p50 {} us, p99 {} us",
            grouped(mb_per_sec),
            text(&nodes_disk["sync_p50_us"]),
            text(&nodes_disk["sync_p99_us"])
        ),
    };
    [host, disk, speed]
}

/// Returns the machine of a page: each part is that of the first result that knows it.
///
/// The runs of a page are mostly of one machine, so each run states only what differs.
fn common_machine(results: &[NamedResult]) -> [String; 3] {
    let machines: Vec<_> = results.iter().map(|named| machine(&named.result)).collect();
    std::array::from_fn(|part| {
        let mut known = machines.iter().map(|machine| &machine[part]);
        known.find(|text| !text.is_empty()).cloned().unwrap_or_default()
    })
}

/// Joins the parts that are not empty.
fn stated(parts: &[String]) -> String {
    let known: Vec<&str> =
        parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    known.join("; ")
}

/// Returns the first value that a result has at one of the places.
fn find(result: &Value, places: &[&str]) -> Value {
    let found = places.iter().find_map(|place| result.pointer(place));
    found.cloned().unwrap_or(Value::Null)
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => escaped(text),
        Value::Null => "unknown".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_has_tables_plots_and_the_machine() {
        let run = serde_json::json!({
            "command": "helix-bench write --clients 4 > x", "records_per_sec": 1000.0,
            "mb_per_sec": 1.0, "errors": 0, "node_count": 1, "storage": "memory",
            "server_version": "0.1.0", "durability": "quorum-written",
            "latency_us": { "p50": 100.0, "p99": 200.0, "p999": 300.0 },
            "load": { "mode": "write", "clients": 4, "size": 1024, "batch_size": 100 },
            "nodes": [{ "disk": { "file_system": "ext4", "device": "/dev/a", "model": "a disk" } }],
            "machine": {
                "cores": 2, "cpu": "a CPU", "os": "linux", "arch": "x86_64", "kernel": "6.1",
                "nodes_disk": {
                    "sequential_write_mb_per_sec": 500.0, "sync_p50_us": 70, "sync_p99_us": 170,
                },
            },
        });
        let log = serde_json::json!({ "mode": "wal", "storage": "disk", "mb_per_sec": 512.0 });
        let one = NamedResult { name: "one".to_owned(), result: run.clone() };
        let page = page(&[one], &[log]).unwrap();
        assert!(page.contains("the log alone: 512 MB/s</p>"), "{page}");
        assert!(page.contains("<td>1 KiB x 100</td>"), "{page}");
        assert_eq!(page.matches("<svg ").count(), 2);
        assert!(page.contains(
            "<p>Machine: 2 cores of a CPU, linux x86_64, kernel 6.1; ext4 on a disk; the nodes' \
             disk: sequential writes 500 MB/s, sync p50 70 us, p99 170 us</p>"
        ));
        assert!(page.contains(
            "<li>one: <code>helix-bench write --clients 4 &gt; x</code>; server 0.1.0, durability \
             quorum-written</li>"
        ));

        // Most results lack the speed of the disk.
        let mut result = run.clone();
        result["machine"]["kernel"] = "6.2".into();
        result["machine"]["nodes_disk"] = Value::Null;
        let common = machine(&run);
        let other = NamedResult { name: "other".to_owned(), result };
        let line = super::run(&other, &common);
        assert!(line.ends_with("quorum-written; 2 cores of a CPU, linux x86_64, kernel 6.2"));
        let one = NamedResult { name: "one".to_owned(), result: run };
        assert_eq!(common_machine(&[other, one])[2], common[2]);
    }
}
