//! Options that several modes share: cluster, rows, output, and value formats.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use helix_client::contexts::{ChosenCluster, ClusterChoice, ContextTls};
use helix_proto::address;
use schemars::JsonSchema;
use serde::Serialize;

use crate::completion;
use crate::exit::BenchFailure;

/// Longest duration that may be given; adding it to a point in time must not overflow.
const DURATION_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// Cluster to measure, selected as `helix` selects it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub(crate) struct TargetOptions {
    /// Nodes to contact first [env: HELIX_ADDR] [default: the context's, or 127.0.0.1:9092]
    #[arg(
        long,
        value_name = "HOST:PORT,..",
        value_delimiter = ',',
        value_parser = parse_address
    )]
    pub(crate) addr: Vec<String>,
    /// Context to use, as added with `helix context add`
    #[arg(long, value_name = "NAME", add = completion::contexts())]
    context: Option<String>,
    /// File with the token of the clients [env: HELIX_TOKEN_FILE, or HELIX_TOKEN with the token]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// CAs of the nodes, PEM; turns TLS on [env: HELIX_TLS_CA]
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// Certificate of the clients, PEM [env: HELIX_TLS_CERT]
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate, PEM [env: HELIX_TLS_KEY]
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// Name that the certificates of all nodes must have
    #[arg(long, value_name = "NAME")]
    tls_server_name: Option<String>,
}

impl TargetOptions {
    /// Returns the options that name one node.
    pub(crate) fn of_node(address: &str) -> Self {
        Self { addr: vec![address.to_owned()], ..Self::default() }
    }

    /// Chooses the cluster from the options, the contexts and the environment.
    ///
    /// # Errors
    /// A setting is not valid, or names nothing.
    pub(crate) fn choose(&self) -> Result<ChosenCluster> {
        let choice = ClusterChoice {
            addr: self.addr.clone(),
            context: self.context.clone(),
            token_file: self.token_file.clone(),
            rack: None,
            tls: ContextTls {
                ca: self.tls_ca.clone(),
                cert: self.tls_cert.clone(),
                key: self.tls_key.clone(),
                server_name: self.tls_server_name.clone(),
            },
        };
        Ok(choice.resolve().map_err(BenchFailure::from)?)
    }
}

/// Destinations of a result.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct OutputOptions {
    /// Write the result to this file as JSON; "-" prints JSON, not the table
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write plots to this directory, as SVG, and as PNG in a build with the feature `png`
    #[arg(long, value_name = "DIR")]
    pub(crate) plot: Option<PathBuf>,
    /// Result of `wal` on the disk of the nodes, which the JSON then describes
    #[arg(long, value_name = "RESULT.json")]
    pub(crate) nodes_disk: Option<PathBuf>,
}

/// Options of a mode that measures several rows on topics of its own.
#[derive(Debug, Clone, Args)]
pub(crate) struct RowOptions {
    #[command(flatten)]
    pub(crate) cluster: TargetOptions,
    /// Length of the measured phase of a row
    #[arg(long, default_value = "10s", value_parser = duration)]
    pub(crate) duration: Duration,
    /// Length of the warm-up of a row, which is not measured
    #[arg(long, default_value = "1s", value_parser = duration)]
    pub(crate) warmup: Duration,
    /// Ack to wait for, as for `write` [default: all]
    #[arg(long, value_name = "all|quorum-written|1|none")]
    pub(crate) acks: Option<AckLevel>,
    /// Replicas of the created topics [default: the cluster's]
    #[arg(long, value_name = "COUNT")]
    pub(crate) replication_factor: Option<u32>,
    /// Seed of payloads and retries
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Runtime threads of this process [default: one per core]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
    #[command(flatten)]
    pub(crate) output: OutputOptions,
}

/// Ack level that a write waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, JsonSchema)]
pub(crate) enum AckLevel {
    #[value(name = "all")]
    #[serde(rename = "all")]
    All,
    #[value(name = "quorum-written")]
    #[serde(rename = "quorum-written")]
    QuorumWritten,
    #[value(name = "1")]
    #[serde(rename = "1")]
    One,
    #[value(name = "none", alias = "0")]
    #[serde(rename = "none")]
    None,
}

impl AckLevel {
    /// Returns the value as written on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::QuorumWritten => "quorum-written",
            Self::One => "1",
            Self::None => "none",
        }
    }
}

/// Parses the address of a node; the port may be missing.
pub(crate) fn parse_address(text: &str) -> std::result::Result<String, String> {
    address::parse(text, Some(address::PORT_DEFAULT))
}

/// Parses "1500ms", "2s", "1m" or "1h"; a bare number counts seconds.
pub(crate) fn duration(text: &str) -> std::result::Result<Duration, String> {
    let (number, unit) = split_unit(text);
    let seconds = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err("expected a number and us, ms, s, m or h".to_owned()),
    };
    let number: f64 = number.parse().map_err(|_| "expected a number first".to_owned())?;
    let duration = Duration::try_from_secs_f64(number * seconds).map_err(|error| error.to_string());
    match duration? {
        duration if duration > DURATION_MAX => Err("at most 365 days".to_owned()),
        duration => Ok(duration),
    }
}

/// Parses "1024", "64KiB", "1MiB" or "2GB".
pub(crate) fn bytes(text: &str) -> std::result::Result<usize, String> {
    let (number, unit) = split_unit(text);
    let factor: usize = match unit {
        "" | "B" => 1,
        "KB" | "kB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err("expected a number and B, KiB, MiB, GiB, KB, MB or GB".to_owned()),
    };
    let number: usize = number.parse().map_err(|_| "expected a whole number first".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "too large".to_owned())
}

fn split_unit(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        cluster: TargetOptions,
    }

    #[test]
    fn durations_and_sizes_have_units() {
        assert_eq!(duration("1500ms"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert!(duration("2d").is_err() && duration("-1s").is_err() && duration("s").is_err());
        assert!(duration("1e18s").is_err());
        assert_eq!(bytes("64KiB"), Ok(65536));
        assert_eq!(bytes("2GB"), Ok(2_000_000_000));
        assert!(bytes("1.5MiB").is_err() && bytes("99999999999GiB").is_err());
    }

    #[test]
    fn addresses_are_checked_where_they_are_given() {
        let parse = |addr| Flags::try_parse_from(["helix-bench", "--addr", addr]);
        let addr = parse("n1, http://n2:1").unwrap().cluster.choose().unwrap().addr;
        assert_eq!(addr, ["n1:9092", "n2:1"]);
        for wrong in ["n1:99999", "n1:", "n1:0", "n1,,n2", "http://n1/a"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ack_names_round_trip() {
        for acks in AckLevel::value_variants() {
            assert_eq!(AckLevel::from_str(acks.name(), false), Ok(*acks));
            assert_eq!(serde_json::to_value(acks).unwrap(), acks.name());
        }
        assert_eq!(AckLevel::from_str("0", false), Ok(AckLevel::None));
    }
}
