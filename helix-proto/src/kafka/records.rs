//! The records of a Kafka batch, read where they are.

use super::{KafkaBatchError, NO_TIMESTAMP};

/// Most bytes of a varint of 32 and of 64 bits.
const VARINT_BYTES_MAX: usize = 5;
const VARLONG_BYTES_MAX: usize = 10;

/// A record of a Kafka batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KafkaRecord<'a> {
    /// Distance of its offset from the batch's first one.
    pub offset_delta: u32,
    /// Milliseconds since the Unix epoch; [`NO_TIMESTAMP`] without one.
    pub timestamp: i64,
    /// Key; null and empty differ.
    pub key: Option<&'a [u8]>,
    /// Value; null and empty differ.
    pub value: Option<&'a [u8]>,
    /// Headers, already checked.
    pub headers: KafkaHeaders<'a>,
    /// The whole record with its length, for copies.
    pub bytes: &'a [u8],
}

impl KafkaRecord<'_> {
    /// Returns the timestamp, unless the record has none.
    pub fn timestamp(&self) -> Option<i64> {
        (self.timestamp != NO_TIMESTAMP).then_some(self.timestamp)
    }
}

/// A header of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KafkaHeader<'a> {
    /// Name. Names may repeat.
    pub name: &'a str,
    /// Value; null and empty differ.
    pub value: Option<&'a [u8]>,
}

/// Iterates over the headers of a record, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KafkaHeaders<'a> {
    /// Bytes of the headers that are left.
    bytes: &'a [u8],
    left: u32,
}

impl<'a> Iterator for KafkaHeaders<'a> {
    type Item = KafkaHeader<'a>;

    fn next(&mut self) -> Option<KafkaHeader<'a>> {
        self.left = self.left.checked_sub(1)?;
        let mut fields = Fields { rest: self.bytes };
        // The record was checked, so there is a header.
        let header = fields.header().ok()?;
        self.bytes = fields.rest;
        Some(header)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // Each takes at least two bytes, so the number is no larger than half of the bytes.
        (0, Some(self.left as usize))
    }
}

/// Iterates over the records of a batch without allocating.
///
/// Checks that there are as many as stated, that their offsets ascend up to the last one, and that
/// each is complete. The iterator ends after the first error.
#[derive(Debug, Clone)]
pub struct KafkaRecords<'a> {
    section: &'a [u8],
    position: usize,
    stated: u32,
    found: u32,
    /// Offset delta that the next record has at least.
    next_delta: u32,
    last_delta: u32,
    base_timestamp: i64,
    /// Timestamp of all records, if the server has set it.
    append_time: Option<i64>,
    is_over: bool,
}

impl<'a> KafkaRecords<'a> {
    pub(super) fn new(
        section: &'a [u8],
        stated: u32,
        last_delta: u32,
        base_timestamp: i64,
        append_time: Option<i64>,
    ) -> Self {
        Self {
            section,
            position: 0,
            stated,
            found: 0,
            next_delta: 0,
            last_delta,
            base_timestamp,
            append_time,
            is_over: false,
        }
    }

    fn step(&mut self) -> Result<KafkaRecord<'a>, KafkaBatchError> {
        let start = self.position;
        let error = |what| KafkaBatchError::Record { record: self.found, byte: start, what };
        let mut fields = Fields { rest: &self.section[start..] };
        let length = fields.varint().map_err(error)?;
        let length = usize::try_from(length).map_err(|_| error("its length is negative"))?;
        let content = fields.take(length).map_err(error)?;
        self.position = self.section.len() - fields.rest.len();
        let mut fields = Fields { rest: content };
        let record = self.record(&mut fields, start).map_err(error)?;
        if !fields.rest.is_empty() {
            return Err(error("bytes follow its headers"));
        }
        self.found += 1;
        self.next_delta = record.offset_delta.saturating_add(1);
        Ok(record)
    }

    fn record(
        &self,
        fields: &mut Fields<'a>,
        start: usize,
    ) -> Result<KafkaRecord<'a>, &'static str> {
        // Attributes: none are defined.
        fields.take(1)?;
        let timestamp = self
            .base_timestamp
            .checked_add(fields.varlong()?)
            .ok_or("its timestamp exceeds 64 bits")?;
        let offset_delta =
            u32::try_from(fields.varint()?).map_err(|_| "its offset delta is negative")?;
        if offset_delta < self.next_delta || offset_delta > self.last_delta {
            return Err("its offset delta is not between the previous one and lastOffsetDelta");
        }
        let key = fields.nullable()?;
        let value = fields.nullable()?;
        let count = u32::try_from(fields.varint()?).map_err(|_| "its header count is negative")?;
        let headers = KafkaHeaders { bytes: fields.rest, left: count };
        for _ in 0..count {
            fields.header()?;
        }
        Ok(KafkaRecord {
            offset_delta,
            timestamp: self.append_time.unwrap_or(timestamp),
            key,
            value,
            headers,
            bytes: &self.section[start..self.position],
        })
    }
}

impl<'a> Iterator for KafkaRecords<'a> {
    type Item = Result<KafkaRecord<'a>, KafkaBatchError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let left = self.section.len() - self.position;
        let (stated, found) = (self.stated, self.found);
        let step = match (found == stated, left) {
            (true, 0) => {
                self.is_over = true;
                return None;
            }
            (true, bytes) => Err(KafkaBatchError::TooMany { stated, bytes }),
            (false, 0) => Err(KafkaBatchError::TooFew { stated, found }),
            (false, _) => self.step(),
        };
        self.is_over = step.is_err();
        Some(step)
    }
}

/// Reads the fields of a record.
struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.rest.split_at_checked(bytes).ok_or("it is truncated")?;
        self.rest = rest;
        Ok(taken)
    }

    /// Reads a zigzag varint of 64 bits.
    fn varlong(&mut self) -> Result<i64, &'static str> {
        let value = self.unsigned(VARLONG_BYTES_MAX)?;
        let value = u64::try_from(value).map_err(|_| "a varint has more than 64 bits")?;
        Ok((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
    }

    /// Reads a zigzag varint of 32 bits.
    fn varint(&mut self) -> Result<i32, &'static str> {
        let value = self.unsigned(VARINT_BYTES_MAX)?;
        let value = u32::try_from(value).map_err(|_| "a varint has more than 32 bits")?;
        Ok((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
    }

    fn unsigned(&mut self, bytes_max: usize) -> Result<u128, &'static str> {
        let mut value = 0_u128;
        for (index, byte) in self.rest.iter().take(bytes_max).enumerate() {
            value |= u128::from(byte & 0x7F) << (7 * index);
            if byte & 0x80 == 0 {
                self.rest = &self.rest[index + 1..];
                return Ok(value);
            }
        }
        match self.rest.len() < bytes_max {
            true => Err("it is truncated"),
            false => Err("a varint is too long"),
        }
    }

    /// Reads bytes behind their length, where -1 means null.
    fn nullable(&mut self) -> Result<Option<&'a [u8]>, &'static str> {
        match self.varint()? {
            -1 => Ok(None),
            length => {
                let length = usize::try_from(length).map_err(|_| "a length is negative")?;
                self.take(length).map(Some)
            }
        }
    }

    fn header(&mut self) -> Result<KafkaHeader<'a>, &'static str> {
        let name = self.nullable()?.ok_or("a header has no name")?;
        let name = std::str::from_utf8(name).map_err(|_| "a header name is not UTF-8")?;
        Ok(KafkaHeader { name, value: self.nullable()? })
    }
}
