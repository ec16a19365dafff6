//! `helix produce`: the lines of standard input become records, one each.
//! Reads on while earlier records are under way; ends when all of them have their ack. The first
//! batch that fails ends it: nothing that is not under way by then is sent.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::IsTerminal;

use anyhow::Context;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use helix_client::partitioner::{Sticky, of_key};
use helix_client::proto::batch::record_bytes;
use helix_client::proto::log::v1::{Durability, Record, Topic};
use helix_client::{Ack, Client, Producer, ProducerOptions};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, BufReader};

use crate::args::{Global, ProduceArgs};
use crate::connect::connect;
use crate::exit::{Exit, Failure, interrupted};
use crate::output::Output;
use crate::units;

/// Longest line: no topic takes larger records.
const LINE_BYTES_MAX: usize = 8 << 20;

/// Partitions named in the summary for people.
const PARTITIONS_NAMED_MAX: usize = 8;

/// Bytes of records without a key that go to one partition before the next one has its turn.
const STICKY_BYTES: usize = 256 << 10;

pub(crate) async fn run(global: &Global, args: &ProduceArgs) -> anyhow::Result<()> {
    let client = connect(global).await?;
    let topic = client.admin().topic(&args.topic).await;
    let topic = topic.with_context(|| format!("look up the topic {}", args.topic))?;
    if std::io::stdin().is_terminal() && !global.quiet {
        eprintln!("one record per line; Ctrl-D ends");
    }
    let mut sender = Sender::new(&client, args, &topic)?;
    let mut summary = Summary::new(&args.topic);
    let outcome = sender.send_all(&mut summary).await;
    // What was acked is said in any case.
    if global.output.is_json() {
        Output { format: global.output }.show(&summary)?;
    } else if !global.quiet {
        eprintln!("{}", summary.text());
    }
    outcome
}

/// Reads, sends, and waits for acks.
struct Sender<'a> {
    args: &'a ProduceArgs,
    producer: Producer,
    partition_count: u32,
    sticky: Sticky,
}

impl<'a> Sender<'a> {
    fn new(client: &Client, args: &'a ProduceArgs, topic: &Topic) -> anyhow::Result<Self> {
        let defaults = ProducerOptions::default();
        let allowed = topic.config.and_then(|config| config.max_batch_bytes);
        let allowed = allowed.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
        let options = ProducerOptions {
            durability: args.durability.map_or(Durability::Unspecified, Into::into),
            batch_bytes: defaults.batch_bytes.min(allowed),
            stops_at_failure: true,
            ..defaults
        };
        let partition_count = u32::try_from(topic.partitions.len())?;
        let producer = client.producer(options);
        Ok(Self { args, producer, partition_count, sticky: Sticky::default() })
    }

    async fn send_all(&mut self, summary: &mut Summary) -> anyhow::Result<()> {
        let mut lines = Lines::new(BufReader::new(tokio::io::stdin()));
        let mut acks = FuturesOrdered::new();
        let stop = interrupted();
        tokio::pin!(stop);
        let mut outcome = Ok(());
        let mut failed = None;
        while outcome.is_ok() && failed.is_none() {
            tokio::select! {
                Some((place, ack)) = acks.next(), if !acks.is_empty() => {
                    summary.add(place, ack, &mut failed);
                }
                line = lines.next() => match line {
                    Ok(Some(line)) => {
                        let (partition, record) = self.place(line);
                        let place = Place { line: lines.count, partition };
                        let sent = self.producer.send_to(&self.args.topic, partition, record);
                        tokio::select! {
                            sent = sent => match sent {
                                Ok(sent) => acks.push_back(async move { (place, sent.await) }),
                                Err(error) => Failed::add(&mut failed, place, error),
                            },
                            () = &mut stop => outcome = Err(Failure::interrupted().into()),
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        outcome = Err(error).with_context(|| format!("line {}", lines.count + 1));
                    }
                },
                () = &mut stop => outcome = Err(Failure::interrupted().into()),
            }
        }
        // What is under way comes to its end, well or not; the first failure counts.
        let stop = interrupted();
        tokio::pin!(stop);
        loop {
            tokio::select! {
                ack = acks.next() => match ack {
                    Some((place, ack)) => summary.add(place, ack, &mut failed),
                    None => break,
                },
                // A second time: whoever asks does not want to wait.
                () = &mut stop => {
                    outcome = outcome.and(Err(Failure::interrupted().into()));
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

    /// Makes a record of a line and chooses its partition.
    fn place(&mut self, line: Vec<u8>) -> (u32, Record) {
        let (key, value) = split(Bytes::from(line), self.args.key_separator.as_deref());
        let record = Record { key, value: Some(value), ..Record::default() };
        let partition = match (self.args.partition, &record.key) {
            (Some(partition), _) => partition,
            (None, Some(key)) => of_key(key, self.partition_count),
            (None, None) => {
                self.sticky.next(record_bytes(&record), STICKY_BYTES, self.partition_count)
            }
        };
        (partition, record)
    }
}

/// Where a record comes from, and where it goes.
#[derive(Debug, Clone, Copy)]
struct Place {
    /// Lines count from 1.
    line: u64,
    partition: u32,
}

/// The batch that has failed first, and with it all that was not under way.
#[derive(Debug)]
struct Failed {
    error: helix_client::Error,
    partition: u32,
    first_line: u64,
    last_line: u64,
    line_count: u64,
}

impl Failed {
    /// Notes another failure. The first of those counts that are not there because of another.
    fn add(
        failed: &mut Option<Self>,
        Place { line, partition }: Place,
        error: helix_client::Error,
    ) {
        match failed {
            Some(first) if first.partition == partition && first.error.message == error.message => {
                first.last_line = line;
                first.line_count += 1;
            }
            Some(first) if error.is_of_an_earlier_batch || !first.error.is_of_an_earlier_batch => {}
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

/// Key and value of a line.
fn split(line: Bytes, separator: Option<&str>) -> (Option<Bytes>, Bytes) {
    let Some(separator) = separator.map(str::as_bytes) else { return (None, line) };
    match line.windows(separator.len()).position(|window| window == separator) {
        Some(place) => (Some(line.slice(..place)), line.slice(place + separator.len()..)),
        None => (None, line),
    }
}

/// The lines of an input, without their newlines, of any bytes.
struct Lines<R> {
    input: R,
    line: Vec<u8>,
    /// How many there were.
    count: u64,
}

impl<R: AsyncBufRead + Unpin> Lines<R> {
    fn new(input: R) -> Self {
        Self { input, line: Vec::new(), count: 0 }
    }

    /// The next line; a last one need not end with a newline. Cancel safe.
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
                let what = format!("a line has more than {LINE_BYTES_MAX} bytes");
                let failure = Failure::new(Exit::Error, what);
                return Err(failure.why("each line is one record").into());
            }
            if newline.is_some() {
                return Ok(Some(std::mem::take(&mut self.line)));
            }
        }
    }
}

/// What was acked.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Summary {
    topic: String,
    record_count: u64,
    /// The weakest that was reached. None: nothing was acked.
    durability: Option<&'static str>,
    partitions: Vec<PartitionSummary>,
    /// First line of the batch that failed. None: none has, or its lines were not sent.
    failed_line: Option<u64>,
    /// Records of later lines among `record_count`, which were under way by then.
    acked_behind: u64,
    #[serde(skip)]
    weakest: i32,
    /// Place of each partition in `partitions`.
    #[serde(skip)]
    places: BTreeMap<u32, usize>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PartitionSummary {
    partition: u32,
    record_count: u64,
    /// Of the first record. None where acks carry no offsets.
    first_offset: Option<u64>,
    /// One past the last record; others may have written in between.
    next_offset: Option<u64>,
}

impl Summary {
    fn new(topic: &str) -> Self {
        Self {
            topic: topic.to_owned(),
            record_count: 0,
            durability: None,
            partitions: Vec::new(),
            failed_line: None,
            acked_behind: 0,
            weakest: 0,
            places: BTreeMap::new(),
        }
    }

    fn add(&mut self, place: Place, ack: helix_client::Result<Ack>, failed: &mut Option<Failed>) {
        match ack {
            Ok(ack) => {
                self.acked_behind += u64::from(failed.is_some());
                self.add_ack(place.partition, &ack);
            }
            Err(error) => {
                Failed::add(failed, place, error);
                // In the order of the lines: if this one is the first now, nothing is behind it.
                if failed.as_ref().is_some_and(|failed| failed.first_line == place.line) {
                    self.acked_behind = 0;
                }
            }
        }
    }

    fn add_ack(&mut self, partition: u32, ack: &Ack) {
        self.record_count += 1;
        // The enum counts from the strongest.
        if i32::from(ack.durability) > self.weakest {
            self.weakest = ack.durability.into();
            self.durability = Some(durability_name(ack.durability));
        }
        let place = *self.places.entry(partition).or_insert(self.partitions.len());
        if place == self.partitions.len() {
            self.partitions.push(PartitionSummary {
                partition,
                record_count: 0,
                first_offset: ack.first_offset,
                next_offset: None,
            });
        }
        let summary = &mut self.partitions[place];
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
        let places = self.partitions.iter().take(PARTITIONS_NAMED_MAX);
        let places: Vec<_> = places.map(PartitionSummary::text).collect();
        text = format!("{text}: {}", places.join(", "));
        let more = self.partitions.len().saturating_sub(PARTITIONS_NAMED_MAX);
        if more > 0 {
            let _ = write!(text, " and {more} more partitions");
        }
        if let (Some(line), 1..) = (self.failed_line, self.acked_behind) {
            let behind = units::count(self.acked_behind);
            let _ = write!(text, "; {behind} of them from lines behind line {line}, which failed");
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

/// Name of a durability without its prefix: `QUORUM_SYNCED`.
pub(crate) fn durability_name(durability: Durability) -> &'static str {
    let name = durability.as_str_name();
    name.strip_prefix("DURABILITY_").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use helix_proto::error as wire;
    use helix_proto::log::v1::ErrorReason;

    use super::*;

    async fn lines(input: &[u8]) -> Vec<Vec<u8>> {
        // Small buffer: lines cross its end.
        let mut lines = Lines::new(BufReader::with_capacity(3, input));
        let mut all = Vec::new();
        while let Some(line) = lines.next().await.unwrap() {
            all.push(line);
        }
        all
    }

    #[tokio::test]
    async fn every_line_is_a_record_of_any_bytes() {
        assert!(lines(b"").await.is_empty());
        assert_eq!(lines(b"hello\n").await, [b"hello"]);
        assert_eq!(lines(b"hello\n\nlast").await, [&b"hello"[..], b"", b"last"]);
        assert_eq!(lines(b"\xFF\x00\r\n").await, [b"\xFF\x00\r"]);
    }

    #[test]
    fn keys_stand_before_the_first_separator() {
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
    fn the_summary_says_where_the_records_are() {
        let mut summary = Summary::new("orders");
        assert_eq!(summary.text(), "nothing was appended to orders");
        let ack = |offset: u64| {
            Ok(Ack {
                first_offset: Some(offset),
                next_offset: Some(offset + 1),
                duplicate: false,
                durability: Durability::QuorumSynced,
                watermarks: None,
            })
        };
        let mut failed = None;
        for (line, partition, offset) in [(1, 2, 7), (2, 0, 4), (3, 2, 8), (4, 2, 9)] {
            summary.add(Place { line, partition }, ack(offset), &mut failed);
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
    fn the_batch_that_failed_first_is_named_by_its_lines() {
        let refusal = |reason, message: &str, is_of_an_earlier_batch| {
            let status = wire::to_status(&wire::detail(reason), message, None);
            let mut failure = (*helix_client::Error::from(status)).clone();
            failure.is_of_an_earlier_batch = is_of_an_earlier_batch;
            helix_client::Error::from(failure)
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
            let error = refusal(ErrorReason::BatchTooLarge, message, is_later);
            Failed::add(&mut failed, Place { line, partition }, error);
        }
        let error = failed.unwrap().into_error().unwrap_err();
        assert_eq!(error.to_string(), "2 of the lines 5 to 7, one batch");
        assert!(format!("{error:#}").contains("too large"), "{error:#}");
    }
}
