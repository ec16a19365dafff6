//! Single appends: one batch to a partition's leader.
//!
//! The caller supplies identity and sequence; `producer` and `session` manage them.

use helix_proto::batch;
use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{
    AppendAck, AppendCondition, AppendRequest, Batch, BatchFormat, Durability, EncodedBatch,
    ErrorReason, ProducerIdentity, Record, StageTime, Watermarks,
};
use tokio::time::Instant;
use tonic::Code;

use crate::call_spec::{CallSpec, Repeat};
use crate::client::{CallAttempts, Client};
use crate::compression::BatchCompressor;
use crate::error::{Error, Result};
use crate::topic::TopicRef;

/// Acknowledgement of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// Offset of the first record. None with LEADER_WRITTEN and NONE, except for a duplicate that
    /// the leader knows.
    pub first_offset: Option<u64>,
    /// Offset after the last record. None if `first_offset` is.
    pub next_offset: Option<u64>,
    /// The batch had already been applied; the offsets are those of the first copy.
    pub duplicate: bool,
    /// Durability reached.
    pub durability: Durability,
    /// State of the partition after this batch, or after a later one acked with it.
    pub watermarks: Option<Watermarks>,
    /// Id of the topic; 0 if the service does not state it.
    pub topic_id: u64,
}

impl Ack {
    pub(crate) fn new(ack: &AppendAck, watermarks: Option<Watermarks>, topic_id: u64) -> Self {
        Self {
            first_offset: ack.first_offset,
            next_offset: ack.next_offset,
            duplicate: ack.duplicate,
            durability: ack.durability(),
            watermarks,
            topic_id,
        }
    }
}

/// Durability and condition of an append. Defaults to the topic's durability and no condition.
#[derive(Debug, Clone, Default)]
pub struct AppendOptions {
    /// Durability to wait for. Default: `Unspecified`, the topic's own default.
    pub durability: Durability,
    /// Required offset of the first record, and required fencing token (up to 64 bytes).
    /// Default: none.
    pub condition: Option<AppendCondition>,
}

impl AppendOptions {
    /// Returns options with this durability and no condition.
    pub fn durability(durability: Durability) -> Self {
        Self { durability, condition: None }
    }

    /// Adds the condition that the batch's first record gets this offset.
    ///
    /// Otherwise the append fails with `EXPECTED_OFFSET_MISMATCH`, and the error's `next_offset`
    /// has the actual offset.
    #[must_use]
    pub fn expecting(mut self, offset: u64) -> Self {
        self.condition.get_or_insert_default().expected_offset = Some(offset);
        self
    }

    /// Adds the condition that this fencing token is in force; an empty token requires none.
    ///
    /// Otherwise the append fails with `FENCED`.
    #[must_use]
    pub fn fenced_by(mut self, token: impl Into<String>) -> Self {
        self.condition.get_or_insert_default().fencing_token = Some(token.into());
        self
    }

    fn expected_offset(&self) -> Option<u64> {
        self.condition.as_ref()?.expected_offset
    }
}

/// A batch, or records to build one from.
pub trait IntoBatch {
    /// True if it is a batch already, which is sent as it is, unless its topic takes only batches
    /// of another version: then it is converted. Batches that are built from records are compressed
    /// as the options say.
    const IS_ENCODED: bool = false;

    /// Returns the batch; records become an uncompressed one.
    fn into_batch(self) -> EncodedBatch;
}

impl IntoBatch for EncodedBatch {
    const IS_ENCODED: bool = true;

    fn into_batch(self) -> EncodedBatch {
        self
    }
}

/// Shares the payload without a copy.
impl IntoBatch for &EncodedBatch {
    const IS_ENCODED: bool = true;

    fn into_batch(self) -> EncodedBatch {
        self.clone()
    }
}

impl IntoBatch for &[Record] {
    fn into_batch(self) -> EncodedBatch {
        batch::encode(self)
    }
}

impl IntoBatch for &Vec<Record> {
    fn into_batch(self) -> EncodedBatch {
        batch::encode(self)
    }
}

impl Client {
    /// Appends one batch without a producer identity; records are not compressed.
    /// Unordered with respect to other calls.
    ///
    /// Retries only while it is certain that the batch was not applied. For bulk tools and
    /// benchmarks; use [`Client::producer`] for safe retries. If the future is dropped, the batch
    /// may or may not be applied.
    ///
    /// # Errors
    /// The service's rejection. With `may_have_applied` the outcome is unknown: sending the batch
    /// again may store it twice.
    pub async fn append(
        &self,
        topic: &str,
        partition: u32,
        batch: impl IntoBatch,
        options: &AppendOptions,
    ) -> Result<Ack> {
        let since = Instant::now();
        let format = self.batch_format(topic, since).await?;
        let batch = BatchCompressor::default().build(batch, format)?;
        self.append_as((topic.into(), partition), &batch, options, None, since).await
    }

    /// Like [`Client::append`], and returns the stages of the append on the leader with their
    /// times. Empty from nodes before version 0.2.
    ///
    /// # Errors
    /// As of [`Client::append`].
    pub async fn append_with_stages(
        &self,
        topic: &str,
        partition: u32,
        batch: impl IntoBatch,
        options: &AppendOptions,
    ) -> Result<(Ack, Vec<StageTime>)> {
        let since = Instant::now();
        let format = self.batch_format(topic, since).await?;
        let batch = BatchCompressor::default().build(batch, format)?;
        let place = (topic.into(), partition);
        self.append_reporting(place, &batch, options, None, true, since).await
    }

    /// Returns the versions of batches that a topic takes.
    ///
    /// Looks up an unknown topic until that succeeds: a batch of another version is refused. The
    /// deadline counts from `since`. A topic that the caller does not find takes Helix's own: the
    /// append says whether it is missing or the caller lacks the right.
    ///
    /// # Errors
    /// The last failure at the deadline. Nothing was sent then.
    pub(crate) async fn batch_format(&self, topic: &str, since: Instant) -> Result<BatchFormat> {
        let routing = &self.shared.routing;
        if let Some(format) = routing.known_batch_format(topic) {
            return Ok(format);
        }
        let call = CallSpec { since, ..CallSpec::new("metadata", Repeat::Read) };
        let mut attempts = CallAttempts::new(&self.shared, call);
        loop {
            match attempts.within(routing.partition_count(topic)).await {
                Ok(_) => {
                    // Another call may have forgotten the topic again.
                    if let Some(format) = routing.known_batch_format(topic) {
                        return Ok(format);
                    }
                }
                Err(error) if error.reason == Some(ErrorReason::TopicNotFound) => {
                    return Ok(BatchFormat::Helix);
                }
                Err(error) => {
                    let error = attempts.judge(error, None)?;
                    attempts.pause(error).await?;
                }
            }
        }
    }

    /// Appends one batch, optionally with an identity and the sequence of its first record.
    ///
    /// A sequence above 0 belongs to a topic, whose id must be given.
    ///
    /// The deadline counts from `since`.
    pub(crate) async fn append_as(
        &self,
        (topic, partition): (TopicRef<'_>, u32),
        batch: &EncodedBatch,
        options: &AppendOptions,
        identity: Option<(ProducerIdentity, u64)>,
        since: Instant,
    ) -> Result<Ack> {
        let place = (topic, partition);
        let (ack, _) = self.append_reporting(place, batch, options, identity, false, since).await?;
        Ok(ack)
    }

    async fn append_reporting(
        &self,
        (topic, partition): (TopicRef<'_>, u32),
        batch: &EncodedBatch,
        options: &AppendOptions,
        identity: Option<(ProducerIdentity, u64)>,
        report_stages: bool,
        since: Instant,
    ) -> Result<(Ack, Vec<StageTime>)> {
        self.check_size(batch)?;
        if since.elapsed() >= self.config().request_timeout {
            // The batch spent its time waiting for earlier ones; fail it unsent.
            return Err(Error::timed_out("append").with_may_have_applied(false));
        }
        let repeat = match identity {
            Some(_) => Repeat::Always,
            None => Repeat::UnlessApplied,
        };
        let call = CallSpec { since, ..CallSpec::new("append", repeat) };
        let appending =
            self.call_leader_of(topic, partition, call, |connection, topic_id| {
                // The clone shares the payload, so a retry is cheap.
                let request = AppendRequest {
                    topic: topic.name.to_owned(),
                    partition,
                    batch: Some(Batch { form: Some(Form::Encoded(batch.clone())) }),
                    durability: options.durability.into(),
                    producer: identity.map(|(producer, _)| producer),
                    first_sequence: identity.map(|(_, sequence)| sequence),
                    condition: options.condition.clone(),
                    topic_id,
                    report_stages,
                };
                async move {
                    connection.produce().append(helix_transport::requests::append(request)).await
                }
            });
        let response = appending.await.map_err(|error| match options.expected_offset() {
            // The last attempt decides: an earlier applied attempt would have made it a
            // duplicate, and none can be applied later, since the offset is taken.
            Some(expected) if identity.is_some() && error.is_beyond(expected) => {
                error.with_may_have_applied(false)
            }
            _ => error,
        })?;
        let ack = response.ack.ok_or_else(|| {
            Error::client(Code::Internal, "the response has no ack").with_may_have_applied(true)
        })?;
        let ack = Ack::new(&ack, response.watermarks, response.topic_id);
        Ok((ack, response.stages))
    }

    /// Rejects a batch that exceeds the message limit before it is sent.
    ///
    /// A node resets a stream with such a message and cannot report that nothing was applied.
    fn check_size(&self, batch: &EncodedBatch) -> Result<()> {
        let message_bytes_max = self.config().transport.message_bytes_max;
        let limit = message_bytes_max.saturating_sub(MESSAGE_BYTES_BESIDE_BATCH);
        too_large(batch.payload.len(), limit).map_or(Ok(()), Err)
    }
}

/// Most bytes of an append request besides the batch's payload: names, a token, and numbers.
const MESSAGE_BYTES_BESIDE_BATCH: usize = 4 << 10;

/// Returns the error for a payload above the limit, or `None` if it is within.
pub(crate) fn too_large(payload_bytes: usize, limit: usize) -> Option<Error> {
    (payload_bytes > limit).then(|| {
        let what = format!("the batch has {payload_bytes} bytes; the limit is {limit}");
        Error::known(ErrorReason::BatchTooLarge, what).with_limit(limit as u64)
    })
}
