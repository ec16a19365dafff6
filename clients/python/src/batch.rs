//! Batches of records as Python sees them. Records are decoded together, in Rust; a Python object
//! of a record is made when it is asked for, and refers to its batch.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use helix_client::{ConsumedRecord, Records};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::arguments::PartitionTuple;

/// Records of one partition, oldest first.
#[pyclass(module = "helix._helix", frozen, sequence)]
pub(crate) struct Batch {
    records: Vec<ConsumedRecord>,
    #[pyo3(get)]
    topic: Py<PyString>,
    #[pyo3(get)]
    partition: u32,
    #[pyo3(get)]
    topic_id: u64,
    /// Offset to read next.
    #[pyo3(get)]
    next_offset: u64,
    #[pyo3(get)]
    log_start_offset: u64,
    #[pyo3(get)]
    high_watermark: u64,
    /// First offset, count and message of batches that were skipped.
    #[pyo3(get)]
    undecodable: Vec<(u64, u32, String)>,
}

impl Batch {
    pub(crate) fn new(py: Python<'_>, records: Records) -> PyResult<Py<Self>> {
        let undecodable = records.undecodable.into_iter();
        let batch = Self {
            records: records.records,
            topic: PyString::new(py, &records.topic).unbind(),
            partition: records.partition,
            topic_id: records.topic_id,
            next_offset: records.next_offset,
            log_start_offset: records.watermarks.log_start_offset,
            high_watermark: records.watermarks.high_watermark,
            undecodable: undecodable
                .map(|it| (it.first_offset, it.record_count, it.message))
                .collect(),
        };
        Py::new(py, batch)
    }

    /// Joins one column of bytes: validity bits, 64-bit ends, and the bytes of all records.
    fn bytes_column<'py>(
        &self,
        py: Python<'py>,
        of: impl Fn(&ConsumedRecord) -> Option<&Bytes>,
    ) -> BytesColumn<'py> {
        let total = self.records.iter().filter_map(&of).map(Bytes::len).sum();
        let mut validity = vec![0u8; self.records.len().div_ceil(8)];
        let mut ends = Vec::with_capacity((self.records.len() + 1) * 8);
        let mut data = Vec::with_capacity(total);
        ends.extend_from_slice(&0i64.to_le_bytes());
        for (index, record) in self.records.iter().enumerate() {
            if let Some(bytes) = of(record) {
                validity[index / 8] |= 1 << (index % 8);
                data.extend_from_slice(bytes);
            }
            ends.extend_from_slice(&(data.len() as i64).to_le_bytes());
        }
        (PyBytes::new(py, &validity), PyBytes::new(py, &ends), PyBytes::new(py, &data))
    }

    fn times_column<'py>(
        &self,
        py: Python<'py>,
        of: impl Fn(&ConsumedRecord) -> Option<SystemTime>,
    ) -> (Bound<'py, PyBytes>, Bound<'py, PyBytes>) {
        let mut validity = vec![0u8; self.records.len().div_ceil(8)];
        let mut times = Vec::with_capacity(self.records.len() * 8);
        for (index, record) in self.records.iter().enumerate() {
            // A time that 64 bits of nanoseconds cannot express is left out.
            let nanos = of(record).and_then(|time| i64::try_from(nanos(time)).ok());
            if nanos.is_some() {
                validity[index / 8] |= 1 << (index % 8);
            }
            times.extend_from_slice(&nanos.unwrap_or_default().to_le_bytes());
        }
        (PyBytes::new(py, &validity), PyBytes::new(py, &times))
    }
}

type BytesColumn<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>, Bound<'py, PyBytes>);

fn nanos(time: SystemTime) -> i128 {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => i128::try_from(since.as_nanos()).unwrap_or(i128::MAX),
        Err(before) => i128::try_from(before.duration().as_nanos()).map_or(i128::MIN, |it| -it),
    }
}

#[pymethods]
impl Batch {
    fn __len__(&self) -> usize {
        self.records.len()
    }

    fn __getitem__(slf: Py<Self>, py: Python<'_>, index: isize) -> PyResult<Record> {
        let count = slf.get().records.len();
        let index = if index < 0 { index + count as isize } else { index };
        match usize::try_from(index) {
            Ok(index) if index < count => Ok(Record { batch: slf.clone_ref(py), index }),
            _ => Err(PyIndexError::new_err("there is no such record in the batch")),
        }
    }

    fn __iter__(slf: Py<Self>) -> BatchIterator {
        BatchIterator { batch: slf, next: AtomicUsize::new(0) }
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let first = self.records.first().map_or(self.next_offset, |record| record.offset);
        let (topic, partition, count) = (&self.topic, self.partition, self.records.len());
        let topic = topic.bind(py).to_string_lossy();
        format!("<Batch {topic}/{partition} records={count} first_offset={first}>")
    }

    /// Offset of the first record; `next_offset` if there is none.
    #[getter]
    fn first_offset(&self) -> u64 {
        self.records.first().map_or(self.next_offset, |record| record.offset)
    }

    #[getter]
    fn topic_partition(&self, py: Python<'_>) -> PyResult<PartitionTuple> {
        Ok((self.topic.bind(py).to_str()?.to_owned(), self.partition, self.topic_id))
    }

    fn values<'py>(&self, py: Python<'py>) -> Vec<Option<Bound<'py, PyBytes>>> {
        let values = self.records.iter().map(|record| record.value.as_ref());
        values.map(|value| value.map(|value| PyBytes::new(py, value))).collect()
    }

    fn keys<'py>(&self, py: Python<'py>) -> Vec<Option<Bound<'py, PyBytes>>> {
        let keys = self.records.iter().map(|record| record.key.as_ref());
        keys.map(|key| key.map(|key| PyBytes::new(py, key))).collect()
    }

    fn offsets(&self) -> Vec<u64> {
        self.records.iter().map(|record| record.offset).collect()
    }

    /// Returns the buffers of an Arrow table: see `helix.arrow`.
    fn _columns<'py>(&self, py: Python<'py>) -> BatchColumns<'py> {
        let offsets: Vec<u8> =
            self.records.iter().flat_map(|record| record.offset.to_le_bytes()).collect();
        BatchColumns {
            offsets: PyBytes::new(py, &offsets),
            append_times: self.times_column(py, |record| Some(record.append_time)),
            event_times: self.times_column(py, |record| record.event_time),
            keys: self.bytes_column(py, |record| record.key.as_ref()),
            values: self.bytes_column(py, |record| record.value.as_ref()),
        }
    }
}

#[derive(IntoPyObject)]
struct BatchColumns<'py> {
    offsets: Bound<'py, PyBytes>,
    append_times: (Bound<'py, PyBytes>, Bound<'py, PyBytes>),
    event_times: (Bound<'py, PyBytes>, Bound<'py, PyBytes>),
    keys: BytesColumn<'py>,
    values: BytesColumn<'py>,
}

/// Iterates over a batch, and knows how far it is.
#[pyclass(module = "helix._helix", frozen)]
pub(crate) struct BatchIterator {
    batch: Py<Batch>,
    next: AtomicUsize,
}

#[pymethods]
impl BatchIterator {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> Option<Record> {
        let index = self.next.load(Ordering::Relaxed);
        if index >= self.batch.get().records.len() {
            return None;
        }
        self.next.store(index + 1, Ordering::Relaxed);
        Some(Record { batch: self.batch.clone_ref(py), index })
    }

    /// Offset after the last record that was returned.
    #[getter]
    fn position(&self) -> u64 {
        let (batch, next) = (self.batch.get(), self.next.load(Ordering::Relaxed));
        batch.records.get(next).map_or(batch.next_offset, |record| record.offset)
    }

    /// Offset of the last record that was returned; that of the first before.
    #[getter]
    fn last_offset(&self) -> u64 {
        let last = self.next.load(Ordering::Relaxed).saturating_sub(1);
        let batch = self.batch.get();
        batch.records.get(last).map_or(batch.next_offset, |record| record.offset)
    }
}

/// A record that was read.
#[pyclass(module = "helix._helix", frozen)]
pub(crate) struct Record {
    batch: Py<Batch>,
    index: usize,
}

impl Record {
    fn get(&self) -> &ConsumedRecord {
        &self.batch.get().records[self.index]
    }
}

#[pymethods]
impl Record {
    #[getter]
    fn topic(&self, py: Python<'_>) -> Py<PyString> {
        self.batch.get().topic.clone_ref(py)
    }

    #[getter]
    fn partition(&self) -> u32 {
        self.batch.get().partition
    }

    #[getter]
    fn topic_id(&self) -> u64 {
        self.batch.get().topic_id
    }

    #[getter]
    fn offset(&self) -> u64 {
        self.get().offset
    }

    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.get().key.as_ref().map(|key| PyBytes::new(py, key))
    }

    #[getter]
    fn value<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.get().value.as_ref().map(|value| PyBytes::new(py, value))
    }

    #[getter]
    fn headers<'py>(&self, py: Python<'py>) -> Vec<(String, Bound<'py, PyBytes>)> {
        let headers = self.get().headers.iter();
        headers.map(|it| (it.name.clone(), PyBytes::new(py, &it.value))).collect()
    }

    #[getter]
    fn append_time(&self) -> SystemTime {
        self.get().append_time
    }

    #[getter]
    fn event_time(&self) -> Option<SystemTime> {
        self.get().event_time
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let batch = self.batch.get();
        let topic = batch.topic.bind(py).to_string_lossy();
        format!("<Record {topic}/{} offset={}>", batch.partition, self.get().offset)
    }
}
