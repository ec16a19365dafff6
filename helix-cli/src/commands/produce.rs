//! `helix produce`: appends each line of standard input as a record.
//! Sends records while earlier ones await their acks, and ends when all are acked. After the first
//! failed batch, no further records are sent.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::IsTerminal;
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use helix_client::proto::log::v1::{Durability, Record, Topic};
use helix_client::{Ack, Client, DeliveryFuture, Error, Producer, ProducerOptions};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, BufReader};

use crate::args::{GlobalArgs, ProduceArgs};
use crate::connect::connect;
use crate::durability::durability_name;
use crate::exit::{self, CliError, Exit};
use crate::interrupt::{interrupted, interrupted_again};
use crate::output::{Output, message};
use crate::units;

/// Maximum length of a line; no topic accepts larger records.
const LINE_BYTES_MAX: usize = 8 << 20;

/// Maximum number of partitions listed in the text summary.
const PARTITIONS_LISTED_MAX: usize = 8;

/// Age of the topic's number of partitions from which it is looked up again.
const PARTITION_COUNT_AGE_MAX: Duration = Duration::from_secs(2);

pub(crate) async fn run(global: &GlobalArgs, args: &ProduceArgs) -> anyhow::Result<()> {
    let (client, topic) = tokio::select! {
        found = find_topic(global, args) => found?,
        () = interrupted() => return Err(CliError::interrupted().into()),
    };
    if std::io::stdin().is_terminal() && !global.quiet {
        message!("one record per line; end with Ctrl-D");
    }
    let sender = LineSender::new(&client, args, &topic);
    let mut summary = ProduceSummary::new(&args.topic);
    let outcome = sender.send_all(&mut summary).await;
    // Acked records are reported even after a failure.
    if global.output.is_json() {
        return Output { format: global.output }.show_with_verdict(&summary, outcome);
    }
    if !global.quiet {
        message!("{}", summary.text());
    }
    outcome
}

async fn find_topic(global: &GlobalArgs, args: &ProduceArgs) -> anyhow::Result<(Client, Topic)> {
    let client = connect(global).await?;
    let topic = client.admin().topic(&args.topic).await;
    let topic = topic.with_context(|| format!("look up topic {}", args.topic))?;
    Ok((client, topic))
}

/// Sends the lines and waits for the acks.
struct LineSender<'a> {
    args: &'a ProduceArgs,
    producer: Producer,
}

impl<'a> LineSender<'a> {
    fn new(client: &Client, args: &'a ProduceArgs, topic: &Topic) -> Self {
        let defaults = ProducerOptions::default();
        let allowed = topic.config.and_then(|config| config.max_batch_bytes);
        let allowed = allowed.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
        let options = ProducerOptions {
            durability: args.durability.map_or(Durability::Unspecified, Into::into),
            compression: args.compression.into(),
            batch_bytes: defaults.batch_bytes.min(allowed),
            stops_at_failure: true,
            partition_count_age_max: PARTITION_COUNT_AGE_MAX,
            ..defaults
        };
        Self { args, producer: client.producer(options) }
    }

    async fn send_all(&self, summary: &mut ProduceSummary) -> anyhow::Result<()> {
        let mut lines = InputLines::new(BufReader::new(tokio::io::stdin()));
        let mut acks = FuturesOrdered::new();
        let stop = interrupted();
        tokio::pin!(stop);
        let mut outcome = Ok(());
        let mut failed = None;
        while outcome.is_ok() && failed.is_none() {
            tokio::select! {
                Some((target, ack)) = acks.next(), if !acks.is_empty() => {
                    summary.add(target, ack, &mut failed);
                }
                line = lines.next() => match line {
                    Ok(Some(line)) => {
                        let number = lines.count;
                        tokio::select! {
                            (target, sent) = self.send(number, line) => match sent {
                                Ok(sent) => acks.push_back(async move { (target, sent.await) }),
                                Err(error) => FailedBatch::add(&mut failed, target, error),
                            },
                            () = &mut stop => outcome = Err(CliError::interrupted().into()),
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        outcome = Err(error).with_context(|| format!("line {}", lines.count + 1));
                    }
                },
                () = &mut stop => outcome = Err(CliError::interrupted().into()),
            }
        }
        // Waits for the records in flight; the first failure is reported.
        let is_interrupted =
            outcome.as_ref().is_err_and(|error| exit::of(error) == Exit::Interrupted);
        let stop =
            async { if is_interrupted { interrupted_again().await } else { interrupted().await } };
        tokio::pin!(stop);
        loop {
            tokio::select! {
                ack = acks.next() => match ack {
                    Some((target, ack)) => summary.add(target, ack, &mut failed),
                    None => break,
                },
                // A second interrupt ends the wait, or the first one after the end of the input.
                () = &mut stop => {
                    outcome = outcome.and(Err(CliError::interrupted().into()));
                    break;
                }
            }
        }
        if let Some(failed) = failed {
            summary.failed_line = Some(failed.first_line);
            outcome = outcome.and(failed.into_error());
        }
        outcome.with_context(|| format!("append to {}", self.args.topic))
    }

    /// Makes a record from a line, selects its partition and queues it.
    async fn send(&self, line: u64, text: Vec<u8>) -> (LineTarget, Result<DeliveryFuture, Error>) {
        let (key, value) = split(Bytes::from(text), self.args.key_separator.as_deref());
        let record = Record { key, value: Some(value), ..Record::default() };
        let topic = &self.args.topic;
        let partition = match self.args.partition {
            Some(partition) => partition,
            None => match self.producer.select_partition(topic, &record).await {
                Ok(partition) => partition,
                Err(error) => return (LineTarget { line, partition: 0 }, Err(error)),
            },
        };
        let target = LineTarget { line, partition };
        (target, self.producer.send_to(topic, partition, record).await)
    }
}

/// The line of a record and its target partition.
#[derive(Debug, Clone, Copy)]
struct LineTarget {
    /// Line number, starting at 1.
    line: u64,
    partition: u32,
}

/// The first failed batch and its lines.
#[derive(Debug)]
struct FailedBatch {
    error: Error,
    partition: u32,
    first_line: u64,
    last_line: u64,
    line_count: u64,
}

impl FailedBatch {
    /// Records a failure. The first failure that no earlier batch caused is kept.
    fn add(failed: &mut Option<Self>, LineTarget { line, partition }: LineTarget, error: Error) {
        match failed {
            Some(first) if first.partition == partition && first.error.message == error.message => {
                first.last_line = line;
                first.line_count += 1;
            }
            Some(first) if error.is_from_earlier_batch || !first.error.is_from_earlier_batch => {}
            _ => {
                let (first_line, last_line, line_count) = (line, line, 1);
                *failed = Some(Self { error, partition, first_line, last_line, line_count });
            }
        }
    }

    fn into_error(self) -> anyhow::Result<()> {
        let Self { first_line: first, last_line: last, line_count: count, .. } = self;
        Err(self.error).with_context(|| match count {
            1 => format!("line {first}"),
            _ if last - first + 1 == count => format!("lines {first} to {last}, one batch"),
            _ => format!("{} of the lines {first} to {last}, one batch", units::count(count)),
        })
    }
}

/// Splits a line into key and value.
fn split(line: Bytes, separator: Option<&str>) -> (Option<Bytes>, Bytes) {
    let Some(separator) = separator.map(str::as_bytes) else { return (None, line) };
    match line.windows(separator.len()).position(|window| window == separator) {
        Some(start) => (Some(line.slice(..start)), line.slice(start + separator.len()..)),
        None => (None, line),
    }
}

/// Reads lines of arbitrary bytes, without their newlines.
struct InputLines<R> {
    input: R,
    line: Vec<u8>,
    /// Number of lines read.
    count: u64,
}

impl<R: AsyncBufRead + Unpin> InputLines<R> {
    fn new(input: R) -> Self {
        Self { input, line: Vec::new(), count: 0 }
    }

    /// Returns the next line; the last one may lack a newline. Cancel safe.
    async fn next(&mut self) -> anyhow::Result<Option<Vec<u8>>> {
        let line = self.read().await?;
        self.count += u64::from(line.is_some());
        Ok(line)
    }

    async fn read(&mut self) -> anyhow::Result<Option<Vec<u8>>> {
        loop {
            let bytes = self.input.fill_buf().await.context("read standard input")?;
            if bytes.is_empty() {
                let is_line = !self.line.is_empty();
                return Ok(is_line.then(|| std::mem::take(&mut self.line)));
            }
            let newline = bytes.iter().position(|byte| *byte == b'\n');
            let end = newline.unwrap_or(bytes.len());
            self.line.extend_from_slice(&bytes[..end]);
            self.input.consume(newline.map_or(end, |newline| newline + 1));
            if self.line.len() > LINE_BYTES_MAX {
                let what = format!("a line exceeds {LINE_BYTES_MAX} bytes");
                let failure = CliError::new(Exit::Error, what);
                return Err(failure.why("each line is one record").into());
            }
            if newline.is_some() {
                return Ok(Some(std::mem::take(&mut self.line)));
            }
        }
    }
}

/// Summary of the acked records.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ProduceSummary {
    topic: String,
    record_count: u64,
    /// Weakest durability of all acks. None if no record was acked.
    durability: Option<&'static str>,
    partitions: Vec<PartitionSummary>,
    /// First line of the failed batch. None if no batch failed or its lines were not sent.
    failed_line: Option<u64>,
    /// Acked records from lines after the failed one, which were in flight at the failure.
    acked_behind: u64,
    #[serde(skip)]
    weakest: i32,
    /// Index of each partition in `partitions`.
    #[serde(skip)]
    indexes: BTreeMap<u32, usize>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PartitionSummary {
    partition: u32,
    record_count: u64,
    /// Offset of the first record. None if acks carry no offsets.
    first_offset: Option<u64>,
    /// One past the last record; other clients may have appended in between.
    next_offset: Option<u64>,
}

impl ProduceSummary {
    fn new(topic: &str) -> Self {
        Self {
            topic: topic.to_owned(),
            record_count: 0,
            durability: None,
            partitions: Vec::new(),
            failed_line: None,
            acked_behind: 0,
            weakest: 0,
            indexes: BTreeMap::new(),
        }
    }

    fn add(
        &mut self,
        target: LineTarget,
        ack: helix_client::Result<Ack>,
        failed: &mut Option<FailedBatch>,
    ) {
        match ack {
            Ok(ack) => {
                self.acked_behind += u64::from(failed.is_some());
                self.add_ack(target.partition, &ack);
            }
            Err(error) => {
                FailedBatch::add(failed, target, error);
                // Results arrive in line order: no acked line follows a new first failure.
                if failed.as_ref().is_some_and(|failed| failed.first_line == target.line) {
                    self.acked_behind = 0;
                }
            }
        }
    }

    fn add_ack(&mut self, partition: u32, ack: &Ack) {
        self.record_count += 1;
        // Larger enum numbers are weaker.
        if i32::from(ack.durability) > self.weakest {
            self.weakest = ack.durability.into();
            self.durability = Some(durability_name(ack.durability));
        }
        let index = *self.indexes.entry(partition).or_insert(self.partitions.len());
        if index == self.partitions.len() {
            self.partitions.push(PartitionSummary {
                partition,
                record_count: 0,
                first_offset: ack.first_offset,
                next_offset: None,
            });
        }
        let summary = &mut self.partitions[index];
        summary.record_count += 1;
        summary.next_offset = ack.next_offset;
    }

    fn text(&self) -> String {
        let records = match self.record_count {
            0 => return format!("nothing was appended to {}", self.topic),
            1 => "1 record".to_owned(),
            count => format!("{} records", units::count(count)),
        };
        let mut text = format!("{records} to {}", self.topic);
        if let Some(durability) = self.durability {
            // Writing to a string cannot fail.
            let _ = write!(text, " ({durability})");
        }
        let listed = self.partitions.iter().take(PARTITIONS_LISTED_MAX);
        let listed: Vec<_> = listed.map(PartitionSummary::text).collect();
        text = format!("{text}: {}", listed.join(", "));
        let more = self.partitions.len().saturating_sub(PARTITIONS_LISTED_MAX);
        if more > 0 {
            let _ = write!(text, " and {more} more partitions");
        }
        if let (Some(line), 1..) = (self.failed_line, self.acked_behind) {
            let behind = units::count(self.acked_behind);
            let _ = write!(text, "; {behind} of them from lines after line {line}, which failed");
        }
        text
    }
}

impl PartitionSummary {
    fn text(&self) -> String {
        let partition = self.partition;
        match (self.first_offset, self.next_offset) {
            (Some(first), Some(next)) if next == first + 1 => {
                format!("partition {partition} offset {first}")
            }
            (Some(first), Some(next)) => {
                format!("partition {partition} offsets {first} to {}", next - 1)
            }
            _ => format!("partition {partition}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use helix_proto::error as wire;
    use helix_proto::log::v1::ErrorReason;

    use super::*;

    async fn lines(input: &[u8]) -> Vec<Vec<u8>> {
        // A small buffer makes lines span several reads.
        let mut lines = InputLines::new(BufReader::with_capacity(3, input));
        let mut all = Vec::new();
        while let Some(line) = lines.next().await.unwrap() {
            all.push(line);
        }
        all
    }

    #[tokio::test]
    async fn reads_lines_of_arbitrary_bytes() {
        assert!(lines(b"").await.is_empty());
        assert_eq!(lines(b"hello\n").await, [b"hello"]);
        assert_eq!(lines(b"hello\n\nlast").await, [&b"hello"[..], b"", b"last"]);
        assert_eq!(lines(b"\xFF\x00\r\n").await, [b"\xFF\x00\r"]);
    }

    #[test]
    fn key_ends_at_the_first_separator() {
        let parts = |line: &'static str, separator| {
            let (key, value) = split(Bytes::from_static(line.as_bytes()), separator);
            let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
            (key.map(text), text(value))
        };
        assert_eq!(parts("a:b:c", None), (None, "a:b:c".to_owned()));
        assert_eq!(parts("a:b:c", Some(":")), (Some("a".to_owned()), "b:c".to_owned()));
        assert_eq!(parts("a=>b", Some("=>")), (Some("a".to_owned()), "b".to_owned()));
        assert_eq!(parts(":b", Some(":")), (Some(String::new()), "b".to_owned()));
        assert_eq!(parts("ab", Some(":")), (None, "ab".to_owned()));
    }

    #[test]
    fn summary_lists_partitions_and_offsets() {
        let mut summary = ProduceSummary::new("orders");
        assert_eq!(summary.text(), "nothing was appended to orders");
        let ack = |offset: u64| {
            Ok(Ack {
                first_offset: Some(offset),
                next_offset: Some(offset + 1),
                duplicate: false,
                durability: Durability::QuorumSynced,
                watermarks: None,
                topic_id: 1,
            })
        };
        let mut failed = None;
        for (line, partition, offset) in [(1, 2, 7), (2, 0, 4), (3, 2, 8), (4, 2, 9)] {
            summary.add(LineTarget { line, partition }, ack(offset), &mut failed);
        }
        assert!(failed.is_none());
        assert_eq!(
            summary.text(),
            "4 records to orders (QUORUM_SYNCED): partition 2 offsets 7 to 9, partition 0 offset 4"
        );
        let expected = concat!(
            r#"{"topic":"orders","record_count":4,"durability":"QUORUM_SYNCED","partitions":["#,
            r#"{"partition":2,"record_count":3,"first_offset":7,"next_offset":10},"#,
            r#"{"partition":0,"record_count":1,"first_offset":4,"next_offset":5}],"#,
            r#""failed_line":null,"acked_behind":0}"#
        );
        assert_eq!(serde_json::to_string(&summary).unwrap(), expected);
    }

    #[test]
    fn reports_lines_of_the_first_failed_batch() {
        let error_of = |reason, message: &str, is_from_earlier_batch| {
            let status = wire::to_status(&wire::detail(reason), message, None);
            let mut failure = (*Error::from(status)).clone();
            failure.is_from_earlier_batch = is_from_earlier_batch;
            Error::from(failure)
        };
        let mut failed = None;
        for (line, partition, message, is_later) in [
            (3, 1, "an earlier batch failed: too large", true),
            (5, 0, "too large", false),
            (6, 1, "an earlier batch failed: too large", true),
            (7, 0, "too large", false),
            (8, 0, "an earlier batch failed: too large", true),
            (9, 2, "gone", false),
        ] {
            let error = error_of(ErrorReason::BatchTooLarge, message, is_later);
            FailedBatch::add(&mut failed, LineTarget { line, partition }, error);
        }
        let error = failed.unwrap().into_error().unwrap_err();
        assert_eq!(error.to_string(), "2 of the lines 5 to 7, one batch");
        assert!(format!("{error:#}").contains("too large"), "{error:#}");
    }
}
