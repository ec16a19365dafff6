//! The program of a member: reads as a member of the group, and reports on standard output what it
//! receives. It leaves the group when standard input closes.

use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use helix_client::{AutoCommit, Client, Config, GroupEvent, Records, TlsOptions};
use helix_proto::log::v1::ErrorReason;
use tokio::sync::oneshot;
use tracing::{Level, info};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::GROUP;
use crate::output::print_result;
use crate::workload::TOPIC;

/// Often, so that a killed member has commits that are neither old nor complete.
const COMMIT_INTERVAL: Duration = Duration::from_millis(300);

/// Line that says that the member has lost its partitions.
pub(super) const LOST: &str = "lost";

/// Options of a member.
#[derive(Debug, Clone, Args)]
pub struct GroupMemberArgs {
    /// Nodes to contact first
    #[arg(long, value_delimiter = ',', required = true)]
    endpoints: Vec<String>,

    /// Session timeout in milliseconds
    #[arg(long)]
    session_timeout_ms: u64,

    /// CAs of the nodes; turns TLS on
    #[arg(long)]
    ca: Option<PathBuf>,
}

/// Reads until standard input closes, and leaves the group.
///
/// # Errors
/// The consumer has ended, or standard output was closed.
pub(crate) async fn run(args: GroupMemberArgs) -> anyhow::Result<()> {
    let tls = args.ca.map(TlsOptions::new);
    let client = Client::new(Config { tls, ..Config::new(args.endpoints) })?;
    let mut consumer = client
        .consumer_group(GROUP)
        .topics([TOPIC])
        .session_timeout(Duration::from_millis(args.session_timeout_ms))
        .auto_commit(AutoCommit::Every(COMMIT_INTERVAL))
        .join();
    let mut is_closed = input_closed();
    loop {
        let event = tokio::select! {
            event = consumer.next() => event.context("the consumer has ended")?,
            _ = &mut is_closed => break,
        };
        match event {
            // The next call says that they are done with, and may be committed.
            Ok(GroupEvent::Data(records)) => report(&records)?,
            Ok(GroupEvent::CaughtUp { .. }) => {}
            Ok(event) => {
                info!(?event, "the partitions have changed");
                if matches!(event, GroupEvent::Lost(_)) {
                    print_result(LOST)?;
                }
            }
            Err(error) if is_fenced(&error) => info!(%error, "continuing"),
            Err(error) => return Err(error.into()),
        }
    }
    match consumer.close().await {
        Err(error) if !is_fenced(&error) => Err(error).context("leave the group"),
        _ => Ok(()),
    }
}

/// Logs what the client does, as evidence. Standard output has the records.
pub(crate) fn log_to_stderr() {
    let levels = Targets::new().with_default(Level::INFO).with_target("helix_client", Level::DEBUG);
    let lines = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(io::stderr);
    tracing_subscriber::registry().with(lines.with_filter(levels)).init();
}

/// A commit of a partition that the member has lost meanwhile.
fn is_fenced(error: &helix_client::Error) -> bool {
    error.is(ErrorReason::PartitionNotOwned) || error.is(ErrorReason::UnknownMember)
}

/// Writes a line: the partition, the offset of the first record, and the value of each.
fn report(records: &Records) -> anyhow::Result<()> {
    let Some(first) = records.records.first() else { return Ok(()) };
    let mut line = format!("{} {}", records.partition, first.offset);
    for (record, offset) in records.records.iter().zip(first.offset..) {
        ensure!(record.offset == offset, "offset {} follows {}", record.offset, offset - 1);
        let value = record.value.as_deref().context("a record has no value")?;
        line.push(' ');
        line.push_str(str::from_utf8(value).context("a value is no text")?);
    }
    Ok(print_result(line)?)
}

fn input_closed() -> oneshot::Receiver<()> {
    let (closed, is_closed) = oneshot::channel();
    thread::spawn(move || {
        // An error ends the wait just as the end of the input does.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        drop(closed);
    });
    is_closed
}
