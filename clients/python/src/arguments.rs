//! Arguments from Python: bytes, records, positions and settings.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use helix_client::proto::log::v1::{Durability, Header, Record};
use helix_client::{AssignedPartition, Compression, Position, StartPolicy};
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyString, PyTuple};

use crate::failure::Failed;

/// A partition as Python has it: topic, partition, topic id.
pub(crate) type PartitionTuple = (String, u32, u64);

pub(crate) fn partition((topic, partition, topic_id): PartitionTuple) -> AssignedPartition {
    AssignedPartition { topic, partition, topic_id }
}

pub(crate) fn partition_tuple(partition: &AssignedPartition) -> PartitionTuple {
    (partition.topic.clone(), partition.partition, partition.topic_id)
}

/// Converts `bytes`, text as UTF-8, and other values that `bytes()` takes.
pub(crate) fn bytes(value: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Ok(Bytes::copy_from_slice(bytes.as_bytes()));
    }
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(Bytes::copy_from_slice(text.to_str()?.as_bytes()));
    }
    if let Ok(bytes) = value.cast::<PyByteArray>() {
        return Ok(bytes.to_vec().into());
    }
    let is_buffer = value.get_type().name()?.to_str()? == "memoryview";
    if is_buffer {
        let copied = value.call_method0(intern!(value.py(), "tobytes"))?;
        return Ok(Bytes::copy_from_slice(copied.cast::<PyBytes>()?.as_bytes()));
    }
    let kind = value.get_type().name()?;
    Err(PyTypeError::new_err(format!("expected bytes or str, got {kind}")))
}

fn optional_bytes(value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Bytes>> {
    value.filter(|value| !value.is_none()).map(bytes).transpose()
}

fn headers(value: &Bound<'_, PyAny>) -> PyResult<Vec<Header>> {
    let pairs = match value.call_method0(intern!(value.py(), "items")) {
        Ok(items) => items,
        Err(_) => value.clone(),
    };
    let header = |pair: PyResult<Bound<'_, PyAny>>| {
        let (name, value): (String, Bound<'_, PyAny>) = pair?.extract()?;
        Ok(Header { name, value: bytes(&value)? })
    };
    pairs.try_iter()?.map(header).collect()
}

/// Builds a record of its parts.
pub(crate) fn record(
    value: Option<&Bound<'_, PyAny>>,
    key: Option<&Bound<'_, PyAny>>,
    record_headers: Option<&Bound<'_, PyAny>>,
    event_time: Option<&Bound<'_, PyAny>>,
) -> PyResult<Record> {
    let present = |it: &&Bound<'_, PyAny>| !it.is_none();
    let event_time = event_time.filter(present).map(|time| -> PyResult<_> {
        let time = time
            .extract::<SystemTime>()
            .map_err(|_| PyTypeError::new_err("event_time must be a datetime with a time zone"))?;
        Ok(time.into())
    });
    Ok(Record {
        key: optional_bytes(key)?,
        value: optional_bytes(value)?,
        headers: record_headers.filter(present).map_or_else(|| Ok(Vec::new()), headers)?,
        event_time: event_time.transpose()?,
    })
}

/// Converts the number of a partition.
pub(crate) fn partition_number(number: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u32>> {
    let Some(number) = number.filter(|number| !number.is_none()) else { return Ok(None) };
    let invalid = |_| {
        let message = format!("partition is {number}; it must be a number of 0 or more, or None");
        PyErr::from(Failed::Argument(message))
    };
    number.extract().map(Some).map_err(invalid)
}

/// A record to send, and the partition that it names.
pub(crate) struct RecordArgument {
    pub(crate) record: Record,
    pub(crate) partition: Option<u32>,
}

/// Converts an element of a list of records: a value, a tuple of key and value, or an object with
/// the attributes of `NewRecord`.
pub(crate) fn record_of(item: &Bound<'_, PyAny>) -> PyResult<RecordArgument> {
    let py = item.py();
    let plain = |record| RecordArgument { record, partition: None };
    if item.is_instance_of::<PyBytes>() || item.is_instance_of::<PyString>() {
        return Ok(plain(record(Some(item), None, None, None)?));
    }
    if let Ok(pair) = item.cast::<PyTuple>() {
        let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = pair.extract()?;
        return Ok(plain(record(Some(&value), Some(&key), None, None)?));
    }
    let Ok(value) = item.getattr(intern!(py, "value")) else {
        return Ok(plain(record(Some(item), None, None, None)?));
    };
    let key = item.getattr(intern!(py, "key"))?;
    let headers = item.getattr(intern!(py, "headers"))?;
    let event_time = item.getattr(intern!(py, "event_time"))?;
    let partition = match item.get_type().name()?.to_str()? {
        "NewRecord" => partition_number(Some(&item.getattr(intern!(py, "partition"))?))?,
        // The partition of a record that was read says nothing of where a copy goes.
        _ => None,
    };
    let record = record(Some(&value), Some(&key), Some(&headers), Some(&event_time))?;
    Ok(RecordArgument { record, partition })
}

/// A start position as `helix._starts` writes it: kind, number and text.
pub(crate) type PositionTuple = (String, u64, String);

pub(crate) fn position((kind, number, text): PositionTuple) -> Result<Position, Failed> {
    Ok(match kind.as_str() {
        "earliest" => Position::Earliest,
        "latest" => Position::Latest,
        "offset" => Position::Offset(number),
        "tail" => Position::Tail(number),
        "timestamp" => Position::Timestamp(UNIX_EPOCH + Duration::from_nanos(number)),
        "committed" => Position::Committed(text),
        _ => return Err(Failed::Argument(format!("unknown start position {kind:?}"))),
    })
}

pub(crate) fn start_policy(name: &str) -> Result<StartPolicy, Failed> {
    Ok(match name {
        "safe" => StartPolicy::Safe,
        "fail" => StartPolicy::Fail,
        "earliest" => StartPolicy::Earliest,
        "latest" => StartPolicy::Latest,
        _ => return Err(unknown("start", name, "safe, fail, earliest, latest")),
    })
}

pub(crate) fn durability(name: Option<&str>) -> Result<Durability, Failed> {
    Ok(match name {
        None => Durability::Unspecified,
        Some("quorum-synced") => Durability::QuorumSynced,
        Some("quorum-written") => Durability::QuorumWritten,
        Some("leader-written") => Durability::LeaderWritten,
        Some("none") => Durability::None,
        Some(name) => {
            let known = "quorum-synced, quorum-written, leader-written, none";
            return Err(unknown("durability", name, known));
        }
    })
}

pub(crate) fn durability_name(durability: Durability) -> Option<&'static str> {
    Some(match durability {
        Durability::Unspecified => return None,
        Durability::QuorumSynced => "quorum-synced",
        Durability::QuorumWritten => "quorum-written",
        Durability::LeaderWritten => "leader-written",
        Durability::None => "none",
    })
}

pub(crate) fn compression(name: &str) -> Result<Compression, Failed> {
    Ok(match name {
        "none" => Compression::None,
        "lz4" => Compression::Lz4,
        "zstd" => Compression::Zstd,
        "adaptive" => Compression::Adaptive,
        _ => return Err(unknown("compression", name, "none, lz4, zstd, adaptive")),
    })
}

/// Converts seconds.
pub(crate) fn seconds(what: &str, value: f64) -> Result<Duration, Failed> {
    Duration::try_from_secs_f64(value).map_err(|_| {
        Failed::Argument(format!("{what} is {value} s; it must be a time of zero or more seconds"))
    })
}

fn unknown(what: &str, name: &str, known: &str) -> Failed {
    Failed::Argument(format!("unknown {what} {name:?}; use one of: {known}"))
}
