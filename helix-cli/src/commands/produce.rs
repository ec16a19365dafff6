//! `helix produce`: appends the records of its input to a topic.
//! Sends records while earlier ones await their acks, and ends when all are acked. After the first
//! failed batch, no further records are sent.

pub(crate) mod input;
mod journal;
mod json_record;
mod named;
pub(crate) mod summary;

use std::io::{IsTerminal, stdin};
use std::time::Duration;

use anyhow::Context;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesOrdered;
use helix_client::proto::log::v1::{Durability, Topic};
use helix_client::{Ack, Client, DeliveryFuture, Error, Producer, ProducerOptions};

use crate::args::{GlobalArgs, ProduceArgs};
use crate::connect::connect;
use crate::exit::{self, CliError, Exit};
use crate::interrupt::{interrupted, interrupted_again};
use crate::output::{Output, message};
use crate::progress::ProgressLine;
use input::{InputRecord, RecordInput};
use named::{NamedRun, NextRecord};
use summary::{FailedBatch, LineTarget, ProduceSummary};

/// Age of the topic's number of partitions from which it is looked up again.
const PARTITION_COUNT_AGE_MAX: Duration = Duration::from_secs(2);

pub(crate) async fn run(global: &GlobalArgs, args: &ProduceArgs) -> anyhow::Result<()> {
    let input = RecordInput::open(args)?;
    let prepared = async {
        let (client, topic) = find_topic(global, args).await?;
        RecordSender::new(&client, args, &topic).await
    };
    let mut sender = tokio::select! {
        sender = prepared => sender?,
        () = interrupted() => return Err(CliError::interrupted().into()),
    };
    let is_typed = input.is_standard_input() && stdin().is_terminal();
    if is_typed && !global.quiet {
        message!("one record per line; end with Ctrl-D");
    }
    let mut summary = ProduceSummary::new(&args.topic);
    let mut progress = match is_typed {
        true => ProgressLine::hidden(),
        false => ProgressLine::new(global, "appending to"),
    };
    let outcome = sender.send_all(input, &mut summary, &mut progress).await;
    drop(progress);
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

/// Returns what to do after a run with records of an unknown outcome.
pub(crate) fn hint_after_unknown_outcome(args: &ProduceArgs) -> String {
    let topic = &args.topic;
    match &args.producer {
        Some(name) => format!(
            "helix produce {topic} --producer {name} --resume   with the same input and options: \
             appends only what is missing"
        ),
        None => format!(
            "helix consume {topic} --from -10 -o wide   to look for the last records; the same \
             command again would append them twice\n\
             helix produce {topic} --producer NAME   can be resumed without doubles"
        ),
    }
}

/// Sends the records and waits for the acks.
struct RecordSender<'a> {
    args: &'a ProduceArgs,
    producer: Producer,
    /// With --producer.
    named: Option<NamedRun>,
}

/// The target of a record, and its ack unless an earlier run had appended it.
type SentRecord = (LineTarget, Result<Option<DeliveryFuture>, Error>);

impl<'a> RecordSender<'a> {
    async fn new(client: &Client, args: &'a ProduceArgs, topic: &Topic) -> anyhow::Result<Self> {
        let defaults = ProducerOptions::default();
        let allowed = topic.config.as_ref().and_then(|config| config.max_batch_bytes);
        let allowed = allowed.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
        let mut options = ProducerOptions {
            durability: args.durability.map_or(Durability::Unspecified, Into::into),
            compression: args.compression.into(),
            batch_bytes: defaults.batch_bytes.min(allowed),
            stops_at_failure: true,
            partition_count_age_max: PARTITION_COUNT_AGE_MAX,
            name: args.producer.clone().unwrap_or_default(),
            ..defaults
        };
        let Some(name) = &args.producer else {
            return Ok(Self { args, producer: client.producer(options), named: None });
        };
        if args.resume {
            let mut named = NamedRun::load(name, topic)?;
            options.identity = Some(named.identity());
            let producer = client.producer(options);
            named.compare(&producer, &args.topic).await?;
            return Ok(Self { args, producer, named: Some(named) });
        }
        let producer = client.producer(options);
        let named = NamedRun::start(name, &producer, topic).await?;
        Ok(Self { args, producer, named: Some(named) })
    }

    async fn send_all(
        &mut self,
        mut input: RecordInput,
        summary: &mut ProduceSummary,
        progress: &mut ProgressLine,
    ) -> anyhow::Result<()> {
        let mut acks = PendingAcks::new();
        let stop = interrupted();
        tokio::pin!(stop);
        let mut outcome = Ok(());
        let mut failed = None;
        let mut read = 0;
        while outcome.is_ok() && failed.is_none() {
            tokio::select! {
                Some((target, ack)) = acks.next(), if !acks.is_empty() => {
                    summary.add(target, ack, &mut failed);
                }
                record = input.next() => match record {
                    Ok(Some(record)) => {
                        let number = input.count();
                        note_progress(&input, &self.args.topic, &mut read, progress);
                        tokio::select! {
                            sent = self.send(number, record) => match sent {
                                Ok(sent) => queue(sent, &mut acks, summary, &mut failed),
                                Err(error) => outcome = Err(error),
                            },
                            () = &mut stop => outcome = Err(CliError::interrupted().into()),
                        }
                    }
                    Ok(None) => {
                        let named = self.named.as_mut();
                        outcome = named.map_or(Ok(()), |named| named.held(true).map(drop));
                        break;
                    }
                    Err(error) => {
                        outcome = Err(error).with_context(|| format!("line {}", input.count()));
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
                    summary.add_uncertain(acks.len() as u64);
                    outcome = outcome.and(Err(CliError::interrupted().into()));
                    break;
                }
            }
        }
        if let (Some(named), None, Ok(())) = (&mut self.named, &failed, &outcome) {
            outcome = named.finish();
        }
        if let Some(failed) = failed {
            summary.failed_line = Some(failed.first_line);
            outcome = outcome.and(failed.into_error());
        }
        outcome.with_context(|| format!("append to {}", self.args.topic))
    }

    /// Selects the partition of a record and queues it, with the records that waited for it.
    ///
    /// # Errors
    /// The input of a resumed run is not that of the run before.
    async fn send(&mut self, line: u64, input: InputRecord) -> anyhow::Result<Vec<SentRecord>> {
        let InputRecord { partition, record } = input;
        let topic = &self.args.topic;
        let partition = match (self.args.partition.or(partition), &self.named) {
            (Some(partition), _) => partition,
            (None, Some(named)) => named.partition(line, &record),
            (None, None) => match self.producer.select_partition(topic, &record).await {
                Ok(partition) => partition,
                Err(error) => return Ok(vec![(LineTarget { line, partition: 0 }, Err(error))]),
            },
        };
        let target = LineTarget { line, partition };
        let Some(named) = &mut self.named else {
            let sent = self.producer.send_to(topic, partition, record).await.map(Some);
            return Ok(vec![(target, sent)]);
        };
        let mut sent: Vec<SentRecord> = Vec::new();
        let records = match named.next(target, record)? {
            NextRecord::Appended => {
                sent.push((target, Ok(None)));
                named.held(false)?
            }
            NextRecord::Held => Vec::new(),
            NextRecord::Send(records) => records,
        };
        for (target, record) in records {
            let queued = self.producer.send_to(topic, target.partition, record).await.map(Some);
            sent.push((target, queued));
        }
        Ok(sent)
    }
}

/// Shows how much of the input is read. What was read is acked soon: records in flight are few.
fn note_progress(input: &RecordInput, topic: &str, read: &mut u64, progress: &mut ProgressLine) {
    let (bytes_read, size) = input.bytes_read();
    if let Some(size) = size {
        progress.set_work(bytes_read, size);
    }
    progress.add(topic, 1, bytes_read - std::mem::replace(read, bytes_read));
}

type PendingAcks = FuturesOrdered<BoxFuture<'static, (LineTarget, Result<Ack, Error>)>>;

/// Queues the acks of sent records.
fn queue(
    sent: Vec<SentRecord>,
    acks: &mut PendingAcks,
    summary: &mut ProduceSummary,
    failed: &mut Option<FailedBatch>,
) {
    for (target, sent) in sent {
        match sent {
            Ok(Some(sent)) => acks.push_back(Box::pin(async move { (target, sent.await) })),
            Ok(None) => summary.add_resumed(),
            Err(error) => FailedBatch::add(failed, target, error),
        }
    }
}
