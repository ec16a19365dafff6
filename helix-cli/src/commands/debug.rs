//! `helix debug bundle`: one archive with what is needed to find the cause of a problem.
//! Parts that cannot be had are listed in the result; they do not prevent the others.

mod archive;
mod redaction;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use futures_util::future::join_all;
use prost_types::Timestamp;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::cluster::health::ClusterHealth;
use super::cluster::snapshot::ClusterSnapshot;
use super::cluster::tables;
use super::group::rows::GroupRow;
use super::topic::TopicRow;
use super::wal;
use crate::args::{BundleArgs, DebugSubcommand, GlobalArgs};
use crate::connect::connect_for_checks;
use crate::exit::{CliError, Exit};
use crate::output::Output;
use crate::{clock, files};
use archive::Archive;

/// Limit of the request for the metrics of a node.
const METRICS_MAX: Duration = Duration::from_secs(3);

/// Maximum size of the metrics of a node, and of the end of a log.
const PART_BYTES_MAX: usize = 16 << 20;

/// Lines of a log that are kept.
const LOG_LINES_MAX: usize = 5_000;

/// Words in the names of settings whose values are hidden.
const SECRET_WORDS: [&str; 4] = ["token", "secret", "password", "key"];

/// The written archive.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct BundleReport {
    /// The archive
    file: String,
    /// Files in it
    files: Vec<String>,
    /// Parts that could not be had, and why
    missing_parts: Vec<String>,
}

pub(crate) async fn run(global: &GlobalArgs, command: &DebugSubcommand) -> anyhow::Result<()> {
    let DebugSubcommand::Bundle(args) = command;
    let now = Timestamp::from(clock::now());
    let name = now.to_string().replace(':', "").chars().take(17).collect::<String>();
    let path = args.file.clone().unwrap_or_else(|| PathBuf::from(format!("helix-{name}.tar")));
    if !args.force && files::exists(&path) {
        let failure = CliError::new(Exit::Precondition, format!("{} exists", path.display()));
        return Err(failure.hint("choose another name, or --force to replace it").into());
    }
    let mut bundle = Bundle::new(format!("helix-{name}"), now.seconds);
    bundle.add_versions(global);
    bundle.add_cluster(global).await;
    bundle.add_metrics(&args.admin_addr).await;
    bundle.add_local(args);
    let Bundle { archive, files, missing_parts, .. } = bundle;
    let written = files::replace(&path, &archive.finish());
    written.with_context(|| format!("write {}", path.display()))?;
    let report = BundleReport { file: path.display().to_string(), files, missing_parts };
    let verdict = match report.missing_parts.len() {
        0 => Ok(()),
        count => {
            let what = format!("{count} parts are missing in {}", report.file);
            let why = report.missing_parts.join("\n");
            Err(CliError::new(Exit::Partly, what).why(why).into())
        }
    };
    let shown = Output { format: global.output }.show(&report);
    verdict.and(shown)
}

/// An archive in progress.
struct Bundle {
    directory: String,
    archive: Archive,
    files: Vec<String>,
    missing_parts: Vec<String>,
}

impl Bundle {
    fn new(directory: String, seconds: i64) -> Self {
        let time = u64::try_from(seconds).unwrap_or(0);
        let (files, missing_parts) = Default::default();
        Self { directory, archive: Archive::new(time), files, missing_parts }
    }

    fn add(&mut self, name: &str, content: anyhow::Result<Vec<u8>>) {
        let added = content
            .and_then(|content| self.archive.add(&format!("{}/{name}", self.directory), &content));
        match added {
            Ok(()) => self.files.push(name.to_owned()),
            Err(error) => self.missing_parts.push(format!("{name}: {error:#}")),
        }
    }

    fn add_json(&mut self, name: &str, content: &impl Serialize) {
        self.add(name, serde_json::to_vec_pretty(content).map_err(Into::into));
    }

    fn add_versions(&mut self, global: &GlobalArgs) {
        let text = format!(
            "helix {} {}\nsystem {} {}\naddresses {} ({})\n",
            env!("CARGO_PKG_VERSION"),
            env!("HELIX_COMMIT"),
            std::env::consts::OS,
            std::env::consts::ARCH,
            global.addr.join(","),
            global.addr_source,
        );
        self.add("versions.txt", Ok(text.into_bytes()));
    }

    async fn add_cluster(&mut self, global: &GlobalArgs) {
        match ClusterSnapshot::take(global).await {
            Ok(snapshot) => {
                self.add_json("cluster.json", &tables::info(&snapshot));
                self.add_json("nodes.json", &tables::nodes(&snapshot));
                self.add_json("shards.json", &tables::shards(&snapshot));
                self.add_json("health.json", &ClusterHealth::of(&snapshot));
            }
            Err(error) => self.add("cluster.json", Err(error)),
        }
        self.add_topics_and_groups(global).await;
    }

    /// Adds the rows of `helix topic list` and `helix group list`.
    async fn add_topics_and_groups(&mut self, global: &GlobalArgs) {
        let admin = match connect_for_checks(global).await {
            Ok(client) => client.admin(),
            Err(error) => return self.add("topics.json", Err(error)),
        };
        let (topics, groups) = tokio::join!(admin.topics(""), admin.groups());
        match topics {
            Ok(all) => {
                let rows: Vec<TopicRow> = all.into_iter().map(TopicRow::from).collect();
                self.add_json("topics.json", &rows);
            }
            Err(error) => self.add("topics.json", Err(error.into())),
        }
        match groups {
            Ok(all) => {
                let rows: Vec<GroupRow> = all.into_iter().map(GroupRow::from).collect();
                self.add_json("groups.json", &rows);
            }
            Err(error) => self.add("groups.json", Err(error.into())),
        }
    }

    async fn add_metrics(&mut self, addresses: &[String]) {
        let pages = join_all(addresses.iter().map(|address| get_metrics(address))).await;
        for (address, page) in addresses.iter().zip(pages) {
            self.add(&format!("metrics-{}.txt", file_name(address)), page);
        }
    }

    /// Adds what is on this machine: settings, the ends of logs, and the state of a stopped log.
    fn add_local(&mut self, args: &BundleArgs) {
        if let Some(path) = &args.config {
            let text = files::read_text(path).context("read the file");
            let text = text.and_then(|text| text.context("the file does not exist"));
            self.add("server.toml", text.map(|text| hide_secrets(&text).into_bytes()));
        }
        for path in &args.log {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            let name = format!("log-{}", file_name(&name.unwrap_or_default()));
            self.add(&name, last_lines(path));
        }
        if let Some(directory) = &args.data_dir {
            match wal::inspect(directory) {
                Ok(logs) => self.add_json("wal.json", &logs),
                Err(error) => self.add("wal.json", Err(error)),
            }
        }
    }
}

/// Returns the end of a log.
fn last_lines(path: &Path) -> anyhow::Result<Vec<u8>> {
    let content = files::read_end(path, PART_BYTES_MAX).context("read the log")?;
    let starts = content.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
    let start = starts.map(|(index, _)| index + 1).nth(LOG_LINES_MAX).unwrap_or(0);
    Ok(redaction::hide_in_log(&String::from_utf8_lossy(&content[start..])).into_bytes())
}

/// Gets the metrics from the admin port of a node.
async fn get_metrics(address: &str) -> anyhow::Result<Vec<u8>> {
    let request = format!("GET /metrics HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    let response = timeout(METRICS_MAX, async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut response = Vec::new();
        stream.take(PART_BYTES_MAX as u64).read_to_end(&mut response).await?;
        Ok::<_, std::io::Error>(response)
    });
    let response = response.await.context("no response in time")?.context("get the metrics")?;
    let body = response.windows(4).position(|it| it == b"\r\n\r\n").map(|start| start + 4);
    let is_found = response.starts_with(b"HTTP/1.1 200");
    match body.filter(|_| is_found) {
        Some(start) => Ok(response[start..].to_vec()),
        None => anyhow::bail!("the address is not the admin port of a node"),
    }
}

/// Hides the values of settings that may be secret.
fn hide_secrets(text: &str) -> String {
    let hidden = |line: &str| match line.split_once('=') {
        Some((name, _)) if SECRET_WORDS.iter().any(|word| name.to_lowercase().contains(word)) => {
            format!("{}= \"(hidden)\"", name)
        }
        _ => line.to_owned(),
    };
    text.lines().map(|line| hidden(line) + "\n").collect()
}

/// Returns a text as part of a file name.
fn file_name(text: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-');
    text.chars().map(|letter| if is_plain(letter) { letter } else { '-' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hides_values_that_may_be_secret() {
        let text = "node_id = 1\nadmin_token_file = \"/t\"\n# a comment\nTLS_KEY=\"x\"\n";
        let hidden = hide_secrets(text);
        assert!(hidden.contains("node_id = 1\n") && hidden.contains("# a comment\n"), "{hidden}");
        assert!(!hidden.contains("/t") && !hidden.contains("\"x\""), "{hidden}");
    }

    #[test]
    fn keeps_the_last_lines_of_a_log() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let lines: String = (0..LOG_LINES_MAX + 10).map(|line| format!("line {line}\n")).collect();
        files::replace(file.path(), lines.as_bytes()).unwrap();
        let kept = String::from_utf8(last_lines(file.path()).unwrap()).unwrap();
        assert_eq!(kept.lines().count(), LOG_LINES_MAX);
        assert!(kept.starts_with("line 10\n"), "{}", &kept[..20]);
    }

    #[test]
    fn missing_parts_are_listed() {
        let mut bundle = Bundle::new("b".to_owned(), 7);
        bundle.add("one.txt", Ok(b"1".to_vec()));
        bundle.add("two.txt", Err(anyhow::anyhow!("no")));
        assert_eq!(
            (bundle.files, bundle.missing_parts),
            (vec!["one.txt".to_owned()], vec!["two.txt: no".to_owned()])
        );
    }
}
