//! Reads one partition within a call, up to its end and the call's budget.
//! Shared by Fetch and Subscribe.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use helix_proto::batch::{self, ScanError};
use helix_proto::log::v1::{
    OutOfRangePolicy, PartitionRecords, PartitionStart, PartitionWatermarks, ReadLimits,
    ReadSource, Record, StoredBatch, StoredRecord,
};
use prost::Message;
use tonic::Status;

use super::batch_part::{BatchPart, stored_batch};
use super::decompressors::Decompressors;
use super::positions::ReadPosition;
use super::read_form::{ReadForm, ReadSources};
use super::status::{partition_path, status_at};
use super::{time, wire_watermarks};
use crate::call::LoadPermit;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::limits::{COMMIT_WAIT_MAX, DECOMPRESS_IN_PLACE_BYTES, PARTITIONS_PER_CALL_MAX};
use crate::log::{PartitionId, PartitionKey, TopicInfo, Watermarks};
use crate::node::{LocatedPartition, Node};
use crate::shard::{ReadBatch, ReadFrom, Shard};

/// Approximate overhead of a record in a response: offset, time, framing.
pub(super) const STORED_RECORD_EXTRA_BYTES: usize = 24;

/// Memory that a decoded header takes at least, beyond its encoded size.
const HEADER_EXTRA_BYTES: usize = 64;

/// Records and bytes that a call may still return, over all of its partitions.
#[derive(Debug)]
pub(super) struct ReadBudget {
    records: u64,
    bytes: u64,
    is_untouched: bool,
}

impl ReadBudget {
    /// Creates the budget from the client's limits, `bytes_default` and `bytes_max`.
    ///
    /// A call returns at least one batch, so 0 bytes count as 1.
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

    /// Takes `bytes` from the budget; returns false if it is too small.
    ///
    /// Always admits the first batch. Otherwise a reader with a small budget would never progress.
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

/// Options of a read call that apply to all of its partitions.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartitionReadOptions {
    from: ReadFrom,
    clamps: bool,
    form: ReadForm,
    until_us: Option<u64>,
}

impl PartitionReadOptions {
    pub(super) fn new(
        source: i32,
        out_of_range: i32,
        limits: &ReadLimits,
        form: ReadForm,
    ) -> Result<Self> {
        let unknown = |field, value: i32| Error::InvalidArgument {
            field,
            what: format!("{value} is unknown to this version"),
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
        Ok(Self { from, clamps: policy == OutOfRangePolicy::Clamp, form, until_us })
    }
}

/// Reads one partition from an offset on.
pub(super) struct PartitionReader {
    sources: ReadSources,
    topic: Arc<TopicInfo>,
    number: u32,
    partition: PartitionId,
    shard: Arc<Shard>,
    options: PartitionReadOptions,
    until_offset: u64,
    /// First offset that is not yet read.
    offset: u64,
    /// First offset that is not yet in a response.
    unreturned: u64,
    watermarks: Watermarks,
    is_done: bool,
    /// Bytes sent for each stored byte of the last batches, rounded down, at least 1: more than 1
    /// if they were decompressed. The next read asks for no more stored bytes than it can send.
    expansion: usize,
}

/// Records or batches that one read returned.
#[derive(Debug, Default)]
pub(super) struct FoundRecords {
    pub(super) records: Vec<StoredRecord>,
    pub(super) batches: Vec<StoredBatch>,
    pub(super) bytes: u64,
    /// Kept until the client has read the response.
    pub(super) permit: Option<LoadPermit>,
}

impl FoundRecords {
    pub(super) fn is_empty(&self) -> bool {
        self.records.is_empty() && self.batches.is_empty()
    }

    /// Returns the number of records; counts all records of an encoded batch.
    pub(super) fn record_count(&self) -> u64 {
        let encoded = self.batches.iter().filter_map(|stored| stored.batch.as_ref());
        self.records.len() as u64 + encoded.map(|it| u64::from(it.record_count)).sum::<u64>()
    }

    pub(super) fn append(&mut self, later: Self) {
        self.records.extend(later.records);
        self.batches.extend(later.batches);
        self.bytes += later.bytes;
        match (&mut self.permit, later.permit) {
            (Some(permit), Some(later)) => permit.merge(later),
            (permit @ None, later) => *permit = later,
            (Some(_), None) => {}
        }
    }
}

/// Opens every partition that a call names; returns the readers and their permit.
pub(super) async fn open_all(
    node: &Node,
    sources: &ReadSources,
    starts: Vec<PartitionStart>,
    options: PartitionReadOptions,
) -> Result<(Vec<PartitionReader>, LoadPermit), Status> {
    check_count(starts.len())?;
    let permit = sources.load.acquire_partitions(starts.len())?;
    let mut seen = HashSet::with_capacity(starts.len());
    let mut readers = Vec::with_capacity(starts.len());
    for start in starts {
        let topic = start.topic.clone();
        let number = start.partition;
        let reader = PartitionReader::open(node, sources, start, options)
            .await
            .map_err(|error| status_at(&error, &topic, number))?;
        if !seen.insert(reader.partition) {
            let twice = Error::InvalidArgument {
                field: "partitions",
                what: format!("{} is named twice", partition_path(&topic, number)),
            };
            return Err(twice.into());
        }
        readers.push(reader);
    }
    Ok((readers, permit))
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

impl PartitionReader {
    async fn open(
        node: &Node,
        sources: &ReadSources,
        start: PartitionStart,
        options: PartitionReadOptions,
    ) -> Result<Self> {
        let position = ReadPosition::parse(start.start)?;
        let located = node.find(&start.topic, start.topic_id, start.partition).await?;
        let topic = located.topic.clone();
        match Self::open_at(node, sources, located, position, start.until_offset, options).await {
            Err(error) if start.topic_id > 0 => Err(node.explain_deleted(&topic, error).await),
            opened => opened,
        }
    }

    async fn open_at(
        node: &Node,
        sources: &ReadSources,
        located: LocatedPartition,
        position: ReadPosition,
        until_offset: Option<u64>,
        options: PartitionReadOptions,
    ) -> Result<Self> {
        located.shard.ready_for(options.from).await?;
        let watermarks = located.shard.watermarks_for(located.partition, options.from)?;
        let offset = position.offset(node, &located, watermarks, options.from).await?;
        // Without an end the reader is never done, not even at offset u64::MAX.
        let is_done = until_offset.is_some_and(|until_offset| offset >= until_offset);
        let until_offset = until_offset.unwrap_or(u64::MAX);
        Ok(Self {
            sources: sources.clone(),
            topic: located.topic,
            number: located.number,
            partition: located.partition,
            shard: located.shard,
            options,
            until_offset,
            offset,
            unreturned: offset,
            watermarks,
            is_done,
            expansion: 1,
        })
    }

    pub(super) fn shard(&self) -> &Arc<Shard> {
        &self.shard
    }

    pub(super) fn partition(&self) -> PartitionId {
        self.partition
    }

    /// Returns true once the reader has reached its end.
    pub(super) fn is_done(&self) -> bool {
        self.is_done
    }

    /// Returns true if the last read reached the end of the partition.
    pub(super) fn is_at_end(&self) -> bool {
        self.offset >= self.watermarks.high_watermark
    }

    /// Returns true if no response says yet how far the reader has come.
    pub(super) fn has_moved(&self) -> bool {
        self.offset > self.unreturned
    }

    /// Returns true if the reader ends at a time, so it may be done without another append.
    pub(super) fn ends_at_time(&self) -> bool {
        self.options.until_us.is_some()
    }

    pub(super) fn key(&self) -> PartitionKey {
        PartitionKey { topic_id: self.topic.id, number: self.number }
    }

    pub(super) fn topic(&self) -> &TopicInfo {
        &self.topic
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn watermarks(&self) -> Watermarks {
        self.watermarks
    }

    /// Returns the status of a failed read.
    ///
    /// A reader stays with the topic that it was opened for, so the status says what became of it.
    pub(super) async fn failed(&self, node: &Node, error: Error) -> Status {
        let error = node.explain_deleted(&self.topic, error).await;
        status_at(&error, &self.topic.name, self.number)
    }

    /// Reads the partition's current watermarks.
    pub(super) fn current_watermarks(&self) -> Result<PartitionWatermarks> {
        let watermarks = self.shard.watermarks_for(self.partition, self.options.from)?;
        Ok(PartitionWatermarks {
            topic: self.topic.name.clone(),
            partition: self.number,
            watermarks: Some(wire_watermarks(watermarks)),
            topic_id: self.topic.id,
        })
    }

    /// Builds a response from all that was read since the last one.
    pub(super) fn response(&mut self, found: FoundRecords) -> PartitionRecords {
        PartitionRecords {
            start_offset: std::mem::replace(&mut self.unreturned, self.offset),
            topic: self.topic.name.clone(),
            topic_id: self.topic.id,
            partition: self.number,
            records: found.records,
            batches: found.batches,
            next_offset: self.offset,
            watermarks: Some(wire_watermarks(self.watermarks)),
        }
    }

    /// Reads the next records, within `budget` and `bytes_max`.
    ///
    /// Returns none at the end of the partition, when done, and when the budget is spent.
    pub(super) async fn read(
        &mut self,
        node: &Node,
        budget: &mut ReadBudget,
        bytes_max: usize,
    ) -> Result<FoundRecords, Status> {
        // A removed node has no newer records, and would serve old ones permanently.
        node.check_member()?;
        let from = self.offset;
        match self.read_next(budget, bytes_max, node.clock().now_us()).await {
            Ok(found) => {
                if let Some(tracer) = node.tracer().filter(|_| !found.is_empty()) {
                    tracer.on_read(self.partition.0, from..self.offset);
                }
                Ok(found)
            }
            Err(error) => Err(self.failed(node, error).await),
        }
    }

    async fn read_next(
        &mut self,
        budget: &mut ReadBudget,
        bytes_max: usize,
        now_us: u64,
    ) -> Result<FoundRecords> {
        let mut found = FoundRecords::default();
        if self.is_done || budget.is_spent() {
            return Ok(found);
        }
        let bytes_max = self.sources.load.response_bytes_max(bytes_max);
        let bytes = usize::try_from(budget.bytes()).unwrap_or(usize::MAX).min(bytes_max);
        let (batches, mut permit) = self.read_admitted(bytes).await?;
        let mut in_place_bytes = 0;
        for batch in batches {
            if self.options.until_us.is_some_and(|until_us| batch.append_time_us >= until_us) {
                self.is_done = true;
                break;
            }
            let batch = self.convert(batch, &mut in_place_bytes).await?;
            let has_capacity = if self.options.form.is_encoded() {
                self.take_encoded(batch, budget, &mut found)
            } else {
                self.take_records(&batch, budget, bytes_max, &mut found)?
            };
            if !has_capacity {
                break;
            }
        }
        self.is_done |= self.offset >= self.until_offset || self.has_passed_end_time(now_us);
        if let Some(permit) = &mut permit
            && found.bytes > 0
        {
            let bytes = usize::try_from(found.bytes).unwrap_or(usize::MAX);
            permit.shrink_to(bytes.saturating_mul(self.options.form.memory_factor()));
        }
        found.permit = permit.filter(|_| found.bytes > 0);
        Ok(found)
    }

    /// Returns the batch in the form that the reader gets.
    ///
    /// Yields after each `DECOMPRESS_IN_PLACE_BYTES` that the read decompresses on this thread;
    /// `in_place_bytes` counts them.
    async fn convert(&self, batch: ReadBatch, in_place_bytes: &mut usize) -> Result<ReadBatch> {
        let form = self.options.form;
        if !form.must_convert(&batch) {
            return Ok(batch);
        }
        let ReadSources { decompressors, .. } = &self.sources;
        // Boxed to keep the future of uncompressed reads small.
        Box::pin(async {
            if Decompressors::is_in_place(batch.uncompressed_bytes) {
                *in_place_bytes += batch.uncompressed_bytes as usize;
                if *in_place_bytes > DECOMPRESS_IN_PLACE_BYTES {
                    *in_place_bytes = batch.uncompressed_bytes as usize;
                    tokio::task::yield_now().await;
                }
            }
            form.convert(batch, decompressors, &self.shard).await
        })
        .await
    }

    /// Reads batches and acquires the permit for them.
    ///
    /// Acquires it after the read, since a read that waits for the disk would otherwise withhold
    /// bytes from others. Without free bytes it drops the batches, waits for the permit, and reads
    /// them again.
    async fn read_admitted(
        &mut self,
        bytes_max: usize,
    ) -> Result<(Vec<ReadBatch>, Option<LoadPermit>)> {
        let mut acquired: Option<LoadPermit> = None;
        let form = self.options.form;
        let size = |batches: &[ReadBatch]| batches.iter().map(|it| form.memory(it)).sum::<usize>();
        loop {
            let mut batches = self.read_stored((bytes_max / self.expansion).max(1)).await?;
            self.truncate_to_sent_bytes(&mut batches, bytes_max);
            if let Some(permit) = acquired.take() {
                while batches.len() > 1 && size(&batches) > permit.bytes() {
                    batches.pop();
                }
                if size(&batches) <= permit.bytes() {
                    return Ok((batches, Some(permit)));
                }
            }
            let bytes = size(&batches);
            if bytes == 0 {
                return Ok((batches, None));
            }
            if let Some(permit) = self.sources.load.try_acquire_response(bytes) {
                return Ok((batches, Some(permit)));
            }
            drop(batches);
            acquired = Some(self.sources.load.acquire_response(bytes).await?);
        }
    }

    /// Drops the batches that would not fit after decompression, except for the first one.
    fn truncate_to_sent_bytes(&mut self, batches: &mut Vec<ReadBatch>, bytes_max: usize) {
        let form = self.options.form;
        let (mut stored, mut sent, mut count) = (0, 0, 0);
        for batch in batches.iter() {
            let bytes = form.sent_bytes(batch);
            if bytes > batch.payload.len() && count > 0 && sent + bytes > bytes_max {
                break;
            }
            stored += batch.payload.len();
            sent += bytes;
            count += 1;
        }
        batches.truncate(count);
        if let Some(expansion) = sent.checked_div(stored) {
            self.expansion = expansion.max(1);
        }
    }

    async fn read_stored(&mut self, bytes_max: usize) -> Result<Vec<ReadBatch>> {
        let until = (self.until_offset < u64::MAX).then_some(self.until_offset);
        loop {
            match self
                .shard
                .read(self.partition, self.offset, until, bytes_max, self.options.from)
                .await
            {
                Ok(read) => {
                    self.watermarks = read.watermarks;
                    if read.batches.is_empty() && read.next_offset > self.offset {
                        // A gap that compaction has left: the records are behind it.
                        self.offset = read.next_offset;
                        if self.offset < self.until_offset && !self.is_at_end() {
                            continue;
                        }
                    }
                    return Ok(read.batches);
                }
                // Also if retention overtakes a slow reader.
                Err(Error::OffsetOutOfRange { watermarks, .. }) if self.options.clamps => {
                    self.watermarks = watermarks;
                    let Watermarks { log_start, high_watermark } = watermarks;
                    let nearest = self.offset.clamp(log_start, high_watermark);
                    if self.unreturned == self.offset {
                        self.unreturned = nearest;
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

    /// Returns true if no later append can have a time before the client's end time.
    ///
    /// A batch may be stamped up to [`COMMIT_WAIT_MAX`] before its commit.
    fn has_passed_end_time(&self, now_us: u64) -> bool {
        let commit_us = u64::try_from(COMMIT_WAIT_MAX.as_micros()).expect("some seconds");
        self.options.until_us.is_some_and(|until_us| {
            self.is_at_end() && now_us >= until_us.saturating_add(commit_us)
        })
    }

    /// Takes a batch as it is stored. Returns false once the budget is spent.
    fn take_encoded(
        &mut self,
        batch: ReadBatch,
        budget: &mut ReadBudget,
        found: &mut FoundRecords,
    ) -> bool {
        let bytes = self.options.form.sent_bytes(&batch);
        if batch.first_offset >= self.until_offset || !budget.admit(bytes) {
            return false;
        }
        let end = batch.end_offset();
        budget.records = budget.records.saturating_sub(batch.record_count_from(self.offset));
        found.bytes += bytes as u64;
        self.offset = end.min(self.until_offset);
        found.batches.push(stored_batch(batch));
        !budget.is_spent()
    }

    /// Takes the requested records of a batch. Returns false once the budget is spent.
    ///
    /// Stops before an invalid record; fails only if the response would begin with it.
    fn take_records(
        &mut self,
        stored: &ReadBatch,
        budget: &mut ReadBudget,
        bytes_max: usize,
        found: &mut FoundRecords,
    ) -> Result<bool> {
        let append_time = time::to_timestamp(stored.append_time_us);
        let capacity = budget.bytes.min((bytes_max as u64).saturating_sub(found.bytes));
        let part = BatchPart::of(stored, self.offset..self.until_offset, budget.records, capacity);
        let ranges = batch::walk(&part.payload, usize::MAX);
        for (number, range) in (part.first_number..).zip(ranges) {
            let offset = stored.offset_of(number);
            if offset < self.offset {
                continue;
            }
            if offset >= self.until_offset {
                break;
            }
            let (range, record) = match decode(&part.payload, range) {
                Ok(decoded) => decoded,
                Err(_) if self.offset > self.unreturned => return Ok(false),
                Err(why) => return Err(Error::NotARecord { offset, why }),
            };
            let headers = record.headers.len() * HEADER_EXTRA_BYTES;
            let bytes = range.len() + STORED_RECORD_EXTRA_BYTES + headers;
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
        if !part.is_truncated {
            // Behind a gap at its end, too.
            self.offset = stored.end_offset().min(self.until_offset).max(self.offset);
        }
        Ok(!part.is_truncated && !budget.is_spent())
    }
}

/// Decodes the record at `range`.
///
/// Fails if the producer sent an invalid record to a topic that does not validate them.
fn decode(
    payload: &Bytes,
    range: Result<Range<usize>, ScanError>,
) -> Result<(Range<usize>, Record), String> {
    let range = range.map_err(|error| error.to_string())?;
    let record = Record::decode(payload.slice(range.clone()));
    Ok((range, record.map_err(|error| error.to_string())?))
}
