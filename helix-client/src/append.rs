//! One append, as it is: a batch to a partition's leader, with what the caller says about it.
//! Identities and sequences are the caller's; `producer` and `session` keep them.

use helix_proto::log::v1::batch::Form;
use helix_proto::log::v1::{
    AppendAck, AppendCondition, AppendRequest, Batch, Durability, EncodedBatch, ErrorReason,
    ProducerIdentity, Record, Watermarks,
};
use helix_proto::{appends, batch};
use tokio::time::Instant;
use tonic::Code;

use crate::client::{Call, Client};
use crate::error::{Error, Result};
use crate::retry::Repeat;

/// What has become of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// Offset of the first record. None with LEADER_WRITTEN and NONE, save for a duplicate that the
    /// leader knows.
    pub first_offset: Option<u64>,
    /// Offset after the last record. None where `first_offset` is.
    pub next_offset: Option<u64>,
    /// The batch had been applied before; the offsets are the first ones.
    pub duplicate: bool,
    /// Durability reached.
    pub durability: Durability,
    /// State of the partition after this batch, or after one acked together with it.
    pub watermarks: Option<Watermarks>,
}

impl Ack {
    pub(crate) fn new(ack: &AppendAck, watermarks: Option<Watermarks>) -> Self {
        Self {
            first_offset: ack.first_offset,
            next_offset: ack.next_offset,
            duplicate: ack.duplicate,
            durability: ack.durability(),
            watermarks,
        }
    }
}

/// What an append asks for beyond storing the batch. The default is the topic's durability and
/// nothing else.
#[derive(Debug, Clone, Default)]
pub struct AppendOptions {
    /// Durability to wait for. Default: `Unspecified`, the topic's own default.
    pub durability: Durability,
    /// Offset that the first record must get, and fencing token (up to 64 bytes) that must hold.
    /// Default: none.
    pub condition: Option<AppendCondition>,
}

impl AppendOptions {
    /// Options with this durability and no condition.
    pub fn durability(durability: Durability) -> Self {
        Self { durability, condition: None }
    }

    /// As these, on the condition that the batch's first record gets this offset. If it would get
    /// another one the batch is refused with `EXPECTED_OFFSET_MISMATCH`, and the error says which
    /// in `next_offset`.
    #[must_use]
    pub fn expecting(mut self, offset: u64) -> Self {
        self.condition.get_or_insert_default().expected_offset = Some(offset);
        self
    }

    /// As these, on the condition that this fencing token is in force (empty: that none is). If
    /// another one is the batch is refused with `FENCED`.
    #[must_use]
    pub fn fenced_by(mut self, token: impl Into<String>) -> Self {
        self.condition.get_or_insert_default().fencing_token = Some(token.into());
        self
    }

    fn expected_offset(&self) -> Option<u64> {
        self.condition.as_ref()?.expected_offset
    }
}

/// Something that can be appended: a built batch, or records to build one from.
pub trait IntoBatch {
    /// The batch; an uncompressed one if it has to be built.
    fn into_batch(self) -> EncodedBatch;
}

impl IntoBatch for EncodedBatch {
    fn into_batch(self) -> EncodedBatch {
        self
    }
}

/// Costs no copy of the payload.
impl IntoBatch for &EncodedBatch {
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
    /// Appends one batch without producer identity: sent again only while it is certain that it
    /// was not applied. Does not keep order with other calls. For bulk tools and benchmarks;
    /// [`Client::producer`] is what repeats safely.
    ///
    /// Dropping the future leaves open whether the batch is applied.
    ///
    /// # Errors
    /// The service's refusal, or an error with `may_have_applied` if the outcome is not known.
    pub async fn append(
        &self,
        topic: &str,
        partition: u32,
        batch: impl IntoBatch,
        options: &AppendOptions,
    ) -> Result<Ack> {
        let batch = batch.into_batch();
        self.append_as((topic, partition), &batch, options, None, Instant::now()).await
    }

    /// Appends one batch, with an identity and the sequence of its first record if there is one.
    /// The deadline counts from `since`.
    pub(crate) async fn append_as(
        &self,
        (topic, partition): (&str, u32),
        batch: &EncodedBatch,
        options: &AppendOptions,
        identity: Option<(ProducerIdentity, u64)>,
        since: Instant,
    ) -> Result<Ack> {
        self.check_size(batch)?;
        if since.elapsed() >= self.config().request_timeout {
            // It has waited for others for so long: it goes their way, unsent.
            return Err(Error::timed_out("append").with_may_have_applied(false));
        }
        let repeat = match identity {
            Some(_) => Repeat::Always,
            None => Repeat::UnlessApplied,
        };
        let call = Call { since, ..Call::new("append", repeat) };
        let appending = self.call_leader((topic, partition), call, |connection| {
            // The payload is shared, not copied, so that a retry costs only the request.
            let request = AppendRequest {
                topic: topic.to_owned(),
                partition,
                batch: Some(Batch { form: Some(Form::Encoded(batch.clone())) }),
                durability: options.durability.into(),
                producer: identity.map(|(producer, _)| producer),
                first_sequence: identity.map(|(_, sequence)| sequence),
                condition: options.condition.clone(),
            };
            async move { connection.produce().append(appends::append(request)).await }
        });
        let answer = appending.await.map_err(|error| match options.expected_offset() {
            // The verdict of the last attempt: no earlier one was applied before it, or it had
            // been a duplicate, and none can be any more, since the offset is given away.
            Some(expected) if identity.is_some() && error.is_beyond(expected) => {
                error.with_may_have_applied(false)
            }
            _ => error,
        })?;
        let ack = answer.ack.ok_or_else(|| {
            Error::client(Code::Internal, "answer without ack").with_may_have_applied(true)
        })?;
        Ok(Ack::new(&ack, answer.watermarks))
    }

    /// Refuses a batch that no message could carry, before anything of it is sent: a node that
    /// meets one breaks off, and could not say that it has not applied it.
    fn check_size(&self, batch: &EncodedBatch) -> Result<()> {
        let message_bytes_max = self.config().transport.message_bytes_max;
        let limit = message_bytes_max.saturating_sub(MESSAGE_BYTES_BESIDE_BATCH);
        too_large(batch.payload.len(), limit).map_or(Ok(()), Err)
    }
}

/// What a message has beside a batch's payload, at most: names, a token, and numbers.
const MESSAGE_BYTES_BESIDE_BATCH: usize = 4 << 10;

/// The refusal of a payload that is larger than what is taken.
pub(crate) fn too_large(payload_bytes: usize, limit: usize) -> Option<Error> {
    (payload_bytes > limit).then(|| {
        let what = format!("a batch of {payload_bytes} bytes; at most {limit} are taken");
        Error::known(ErrorReason::BatchTooLarge, what).with_limit(limit as u64)
    })
}
