//! One partition being read within a call: where it is, where it ends, and how far the call's
//! budget reaches. Shared by Fetch and Subscribe.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use helix_proto::batch::{self, ScanError};
use helix_proto::log::v1::{
    EncodedBatch, OutOfRangePolicy, PartitionRecords, PartitionStart, PartitionWatermarks,
    ReadLimits, ReadSource, Record, StoredBatch, StoredRecord,
};
use prost::Message;
use tonic::Status;

use super::positions::Position;
use super::status::status_at;
use super::{time, wire_watermarks};
use crate::error::{Error, Result};
use crate::limits::{COMMIT_WAIT_MAX, PARTITIONS_PER_CALL_MAX, PLAIN_FACTOR};
use crate::load::{Load, Room};
use crate::log::{PartitionId, Watermarks};
use crate::node::Node;
use crate::shard::{ReadBatch, ReadFrom, Shard};

/// About what a record costs in an answer beside itself: its offset, its time, its framing.
const STORED_RECORD_EXTRA_BYTES: usize = 24;

/// What a decoded header takes at least, however little it took on the wire.
const HEADER_EXTRA_BYTES: usize = 64;

/// What a call may still return, over all of its partitions.
#[derive(Debug)]
pub(super) struct Budget {
    records: u64,
    bytes: u64,
    is_untouched: bool,
}

impl Budget {
    /// The client's limits; `bytes_default` where it named none, and at most `bytes_max`. At least
    /// one batch is returned whatever the bytes, so that none of them are as one.
    pub(super) fn new(limits: &ReadLimits, bytes_default: u64, bytes_max: u64) -> Self {
        Self {
            records: limits.max_records.unwrap_or(u64::MAX),
            bytes: limits.max_bytes.unwrap_or(bytes_default).clamp(1, bytes_max),
            is_untouched: true,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn is_spent(&self) -> bool {
        self.records == 0 || self.bytes == 0
    }

    /// Whether there is room for this much. The first of all always gets in, however large, or a
    /// reader with a small budget would stand still for ever.
    fn admit(&mut self, bytes: usize) -> bool {
        let bytes = bytes as u64;
        if bytes > self.bytes && !self.is_untouched {
            self.bytes = 0;
            return false;
        }
        self.bytes = self.bytes.saturating_sub(bytes);
        self.is_untouched = false;
        true
    }
}

/// What a call says about all of its partitions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    from: ReadFrom,
    clamps: bool,
    is_encoded: bool,
    until_us: Option<u64>,
}

impl Terms {
    pub(super) fn new(
        source: i32,
        out_of_range: i32,
        limits: &ReadLimits,
        is_encoded: bool,
    ) -> Result<Self> {
        let unknown = |field, value: i32| Error::InvalidArgument {
            field,
            what: format!("{value} is not known to this version"),
        };
        let from = match ReadSource::try_from(source) {
            Ok(ReadSource::Unspecified) => ReadFrom::Leader,
            Ok(ReadSource::AnyReplica) => ReadFrom::AnyReplica,
            Err(_) => return Err(unknown("source", source)),
        };
        let policy = OutOfRangePolicy::try_from(out_of_range)
            .map_err(|_| unknown("out_of_range", out_of_range))?;
        let until = limits.until_timestamp;
        let until_us =
            until.map(|until| time::from_timestamp("limits.until_timestamp", until)).transpose()?;
        Ok(Self { from, clamps: policy == OutOfRangePolicy::Clamp, is_encoded, until_us })
    }
}

pub(super) struct Reader {
    load: Arc<Load>,
    topic: String,
    number: u32,
    partition: PartitionId,
    shard: Arc<Shard>,
    terms: Terms,
    until_offset: u64,
    /// First offset that is not yet read.
    offset: u64,
    /// First offset that is not yet in an answer.
    unanswered: u64,
    watermarks: Watermarks,
    is_done: bool,
}

/// What one read found.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) records: Vec<StoredRecord>,
    pub(super) batches: Vec<StoredBatch>,
    pub(super) bytes: u64,
    /// Held until the answer is taken.
    pub(super) room: Option<Room>,
}

impl Found {
    pub(super) fn is_empty(&self) -> bool {
        self.records.is_empty() && self.batches.is_empty()
    }

    /// Records in it; those of an encoded batch all count, also before the offset that was asked.
    pub(super) fn record_count(&self) -> u64 {
        let encoded = self.batches.iter().filter_map(|stored| stored.batch.as_ref());
        self.records.len() as u64 + encoded.map(|it| u64::from(it.record_count)).sum::<u64>()
    }

    pub(super) fn append(&mut self, later: Self) {
        self.records.extend(later.records);
        self.batches.extend(later.batches);
        self.bytes += later.bytes;
        match (&mut self.room, later.room) {
            (Some(room), Some(later)) => room.merge(later),
            (room @ None, later) => *room = later,
            (Some(_), None) => {}
        }
    }
}

/// Opens every partition that a call names, and takes their places among all that are read.
pub(super) async fn open_all(
    node: &Node,
    starts: Vec<PartitionStart>,
    terms: Terms,
) -> Result<(Vec<Reader>, Room), Status> {
    check_count(starts.len())?;
    let places = node.load().partitions(starts.len())?;
    let mut seen = HashSet::with_capacity(starts.len());
    let mut readers = Vec::with_capacity(starts.len());
    for start in starts {
        let topic = start.topic.clone();
        let number = start.partition;
        let reader = Reader::open(node, start, terms)
            .await
            .map_err(|error| status_at(&error, &topic, number))?;
        if !seen.insert(reader.partition) {
            let twice = Error::InvalidArgument {
                field: "partitions",
                what: format!("{topic}/{number} is there twice"),
            };
            return Err(twice.into());
        }
        readers.push(reader);
    }
    Ok((readers, places))
}

fn check_count(partitions: usize) -> Result<()> {
    if (1..=PARTITIONS_PER_CALL_MAX).contains(&partitions) {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        field: "partitions",
        what: format!("must be 1..={PARTITIONS_PER_CALL_MAX} partitions, not {partitions}"),
    })
}

impl Reader {
    async fn open(node: &Node, start: PartitionStart, terms: Terms) -> Result<Self> {
        let position = Position::parse(start.start)?;
        let located = node.find(&start.topic, start.partition).await?;
        located.shard.ready_for(terms.from).await?;
        let watermarks = located.shard.watermarks(located.partition)?;
        let offset =
            position.offset(&located.shard, located.partition, watermarks, terms.from).await?;
        // Without an end nothing is done, not even at the last offset that a number can say.
        let is_done = start.until_offset.is_some_and(|until_offset| offset >= until_offset);
        let until_offset = start.until_offset.unwrap_or(u64::MAX);
        Ok(Self {
            load: node.load().clone(),
            topic: start.topic,
            number: start.partition,
            partition: located.partition,
            shard: located.shard,
            terms,
            until_offset,
            offset,
            unanswered: offset,
            watermarks,
            is_done,
        })
    }

    pub(super) fn shard(&self) -> &Arc<Shard> {
        &self.shard
    }

    pub(super) fn partition(&self) -> PartitionId {
        self.partition
    }

    /// Whether the client has everything up to where it wanted to stop.
    pub(super) fn is_done(&self) -> bool {
        self.is_done
    }

    /// Whether the last read saw the end of the partition.
    pub(super) fn is_at_end(&self) -> bool {
        self.offset >= self.watermarks.high_watermark
    }

    /// Whether this ends at a time, and so may be done although nothing is appended.
    pub(super) fn ends_in_time(&self) -> bool {
        self.terms.until_us.is_some()
    }

    pub(super) fn topic(&self) -> &str {
        &self.topic
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn watermarks(&self) -> Watermarks {
        self.watermarks
    }

    pub(super) fn status(&self, error: &Error) -> Status {
        status_at(error, &self.topic, self.number)
    }

    /// The partition's state now.
    pub(super) fn state(&mut self) -> Result<PartitionWatermarks, Status> {
        let watermarks =
            self.shard.watermarks(self.partition).map_err(|error| self.status(&error))?;
        Ok(PartitionWatermarks {
            topic: self.topic.clone(),
            partition: self.number,
            watermarks: Some(wire_watermarks(watermarks)),
        })
    }

    /// Everything that was read since the last answer.
    pub(super) fn answer(&mut self, found: Found) -> PartitionRecords {
        PartitionRecords {
            start_offset: std::mem::replace(&mut self.unanswered, self.offset),
            topic: self.topic.clone(),
            partition: self.number,
            records: found.records,
            batches: found.batches,
            next_offset: self.offset,
            watermarks: Some(wire_watermarks(self.watermarks)),
        }
    }

    /// Reads on, as far as `budget` and `bytes_max` reach. Finds nothing at the end of the
    /// partition, when done, and when the budget is spent.
    pub(super) async fn read(
        &mut self,
        budget: &mut Budget,
        bytes_max: usize,
        now_us: u64,
    ) -> Result<Found, Status> {
        let mut found = Found::default();
        if self.is_done || budget.is_spent() {
            return Ok(found);
        }
        let bytes_max = self.load.answer_bytes_max(bytes_max);
        let bytes = usize::try_from(budget.bytes()).unwrap_or(usize::MAX).min(bytes_max);
        let (batches, mut room) = self.read_within(bytes).await?;
        for batch in batches {
            if self.terms.until_us.is_some_and(|until_us| batch.append_time_us >= until_us) {
                self.is_done = true;
                break;
            }
            let goes_on = if self.terms.is_encoded {
                self.take_encoded(batch, budget, &mut found)
            } else {
                self.take_records(&batch, budget, bytes_max, &mut found)
                    .map_err(|error| self.status(&error))?
            };
            if !goes_on {
                break;
            }
        }
        self.is_done |= self.offset >= self.until_offset || self.has_passed(now_us);
        if let Some(room) = &mut room
            && found.bytes > 0
        {
            let bytes = usize::try_from(found.bytes).unwrap_or(usize::MAX);
            room.shrink_to(bytes.saturating_mul(self.factor()));
        }
        found.room = room.filter(|_| found.bytes > 0);
        Ok(found)
    }

    /// Reads what there is room for. Read first and counted then, since a read that waits for the
    /// disk would else keep room from others; only what finds none is dropped, and read again when
    /// there is.
    async fn read_within(
        &mut self,
        bytes_max: usize,
    ) -> Result<(Vec<ReadBatch>, Option<Room>), Status> {
        let mut promised: Option<Room> = None;
        loop {
            let read = self.read_stored(bytes_max).await;
            let mut batches = read.map_err(|error| self.status(&error))?;
            let size = |batches: &[ReadBatch]| {
                batches.iter().map(|batch| batch.payload.len()).sum::<usize>() * self.factor()
            };
            if let Some(room) = promised.take() {
                while batches.len() > 1 && size(&batches) > room.bytes() {
                    batches.pop();
                }
                if size(&batches) <= room.bytes() {
                    return Ok((batches, Some(room)));
                }
            }
            let bytes = size(&batches);
            if bytes == 0 {
                return Ok((batches, None));
            }
            if let Some(room) = self.load.answer_now(bytes) {
                return Ok((batches, Some(room)));
            }
            drop(batches);
            promised = Some(self.load.answer(bytes).await.map_err(|error| self.status(&error))?);
        }
    }

    /// What an answer takes until it is sent, for each of its bytes.
    fn factor(&self) -> usize {
        if self.terms.is_encoded { 1 } else { PLAIN_FACTOR }
    }

    async fn read_stored(&mut self, bytes_max: usize) -> Result<Vec<ReadBatch>> {
        let until = (self.until_offset < u64::MAX).then_some(self.until_offset);
        loop {
            match self
                .shard
                .read(self.partition, self.offset, until, bytes_max, self.terms.from)
                .await
            {
                Ok(read) => {
                    self.watermarks = read.watermarks;
                    return Ok(read.batches);
                }
                // Also when retention overtakes a slow reader.
                Err(Error::OffsetOutOfRange { watermarks, .. }) if self.terms.clamps => {
                    self.watermarks = watermarks;
                    let Watermarks { log_start, high_watermark } = watermarks;
                    let nearest = self.offset.clamp(log_start, high_watermark);
                    if self.unanswered == self.offset {
                        self.unanswered = nearest;
                    }
                    self.offset = nearest;
                    if self.offset >= self.until_offset {
                        return Ok(Vec::new());
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether nothing can be appended any more that is older than where the client wants to stop:
    /// a batch may have been stamped as long before its commit as a commit can take.
    fn has_passed(&self, now_us: u64) -> bool {
        let commit_us = u64::try_from(COMMIT_WAIT_MAX.as_micros()).expect("some seconds");
        self.terms.until_us.is_some_and(|until_us| {
            self.is_at_end() && now_us >= until_us.saturating_add(commit_us)
        })
    }

    /// Takes a batch as it is stored. False when the budget ends before or with it.
    fn take_encoded(&mut self, batch: ReadBatch, budget: &mut Budget, found: &mut Found) -> bool {
        if batch.first_offset >= self.until_offset || !budget.admit(batch.payload.len()) {
            return false;
        }
        let end = batch.first_offset + u64::from(batch.record_count);
        budget.records = budget.records.saturating_sub(end.saturating_sub(self.offset));
        found.bytes += batch.payload.len() as u64;
        self.offset = end.min(self.until_offset);
        found.batches.push(stored_batch(batch));
        !budget.is_spent()
    }

    /// Takes the records of a batch that the client wants. False when the budget ends within it,
    /// and before what is no record: only an answer that would begin with that is an error.
    fn take_records(
        &mut self,
        stored: &ReadBatch,
        budget: &mut Budget,
        bytes_max: usize,
        found: &mut Found,
    ) -> Result<bool> {
        let append_time = time::to_timestamp(stored.append_time_us);
        let places = batch::walk(&stored.payload, usize::MAX);
        for (offset, place) in (stored.first_offset..).zip(places) {
            if offset < self.offset {
                continue;
            }
            if offset >= self.until_offset {
                break;
            }
            let (place, record) = match decode(&stored.payload, place) {
                Ok(decoded) => decoded,
                Err(_) if self.offset > self.unanswered => return Ok(false),
                Err(why) => return Err(Error::NotARecord { offset, why }),
            };
            let headers = record.headers.len() * HEADER_EXTRA_BYTES;
            let bytes = place.len() + STORED_RECORD_EXTRA_BYTES + headers;
            let is_full =
                !found.records.is_empty() && found.bytes + bytes as u64 > bytes_max as u64;
            if is_full || budget.records == 0 || !budget.admit(bytes) {
                return Ok(false);
            }
            found.records.push(StoredRecord {
                offset,
                append_time: Some(append_time),
                record: Some(record),
            });
            found.bytes += bytes as u64;
            budget.records -= 1;
            self.offset = offset + 1;
        }
        Ok(!budget.is_spent())
    }
}

/// Fails on what a producer sent instead of a record: the insides of records are not looked at when
/// they come in.
fn decode(
    payload: &Bytes,
    place: Result<Range<usize>, ScanError>,
) -> Result<(Range<usize>, Record), String> {
    let place = place.map_err(|error| error.to_string())?;
    let record = Record::decode(payload.slice(place.clone()));
    Ok((place, record.map_err(|error| error.to_string())?))
}

fn stored_batch(batch: ReadBatch) -> StoredBatch {
    let uncompressed_bytes = u32::try_from(batch.payload.len()).expect("a batch is below 4 GiB");
    StoredBatch {
        first_offset: batch.first_offset,
        append_time: Some(time::to_timestamp(batch.append_time_us)),
        offset_deltas: Vec::new(),
        batch: Some(EncodedBatch {
            version: batch.version,
            record_count: batch.record_count,
            compression: batch.compression,
            crc32: batch.crc,
            uncompressed_bytes,
            payload: batch.payload,
        }),
    }
}
