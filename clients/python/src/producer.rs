//! Producers of one topic.

use std::sync::Arc;

use helix_client::proto::log::v1::Record;
use helix_client::{Ack, AppendOptions, Client, Producer, ProducerOptions};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::arguments::{
    RecordArgument, durability, durability_name, partition_number, record, record_of,
};
use crate::failure::Failed;
use crate::operation::{Done, Mode, on_runtime};
use crate::posting::{Placed, Posting};
use crate::process::OwnedByProcess;

/// Appends to the partitions of one topic.
#[pyclass(module = "helix._helix", frozen)]
pub(crate) struct NativeProducer {
    handle: Arc<OwnedByProcess<Handle>>,
    topic: String,
    mode: Mode,
    default_durability: Option<&'static str>,
}

struct Handle {
    producer: Producer,
    posting: Posting,
}

impl NativeProducer {
    /// Creates a producer. Needs the context of the runtime.
    pub(crate) fn new(
        client: &Client,
        topic: String,
        options: ProducerOptions,
        mode: Mode,
    ) -> Self {
        let default_durability = durability_name(options.durability);
        let buffer_bytes = options.buffer_bytes;
        let producer = client.producer(options);
        let posting = Posting::start(producer.clone(), topic.clone(), buffer_bytes);
        let handle = Arc::new(OwnedByProcess::new(Handle { producer, posting }));
        Self { handle, topic, mode, default_durability }
    }
}

/// An ack as Python gets it: partition, offset, end, durability, duplicate, topic id.
type AckTuple = (u32, Option<u64>, Option<u64>, Option<&'static str>, bool, u64);

fn ack_tuple((partition, ack): Placed) -> AckTuple {
    let Ack { first_offset, next_offset, durability, duplicate, topic_id, .. } = ack;
    (partition, first_offset, next_offset, durability_name(durability), duplicate, topic_id)
}

#[pymethods]
impl NativeProducer {
    /// Queues a record and waits for its ack.
    #[pyo3(signature = (value, key, headers, event_time, partition))]
    fn send(
        &self,
        py: Python<'_>,
        value: Option<Bound<'_, PyAny>>,
        key: Option<Bound<'_, PyAny>>,
        headers: Option<Bound<'_, PyAny>>,
        event_time: Option<Bound<'_, PyAny>>,
        partition: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let handle = self.handle.get()?;
        let parts = (value.as_ref(), key.as_ref(), headers.as_ref(), event_time.as_ref());
        let record = record(parts.0, parts.1, parts.2, parts.3)?;
        let partition = partition_number(partition.as_ref())?;
        let sending = handle.posting.send(RecordArgument { record, partition });
        self.mode.run(py, async move { Ok(ack_tuple(sending.await?)) })
    }

    /// Queues a record. Returns an awaitable that ends once another record has capacity.
    #[pyo3(signature = (value, key, headers, event_time, partition))]
    fn post(
        &self,
        py: Python<'_>,
        value: Option<Bound<'_, PyAny>>,
        key: Option<Bound<'_, PyAny>>,
        headers: Option<Bound<'_, PyAny>>,
        event_time: Option<Bound<'_, PyAny>>,
        partition: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let posting = &self.handle.get()?.posting;
        let parts = (value.as_ref(), key.as_ref(), headers.as_ref(), event_time.as_ref());
        let record = record(parts.0, parts.1, parts.2, parts.3)?;
        let partition = partition_number(partition.as_ref())?;
        let mut waiting = Some(RecordArgument { record, partition });
        // Another thread may take the capacity that a blocking call has waited for.
        while posting.post(std::iter::from_fn(|| waiting.take()))? == 0 {
            if self.mode == Mode::Async {
                return Err(Failed::BufferFull { limit: posting.bytes_max() }.into());
            }
            self.capacity(py)?;
        }
        match self.mode {
            Mode::Blocking => Ok(py.None()),
            Mode::Async if posting.is_full() => self.capacity(py),
            Mode::Async => Done::get(py),
        }
    }

    /// Queues records of a list from an index on until the buffer is full. Returns their number.
    fn post_many(&self, records: Bound<'_, PyList>, start: usize) -> PyResult<usize> {
        let posting = &self.handle.get()?.posting;
        let items = records.iter().skip(start).map(|item| record_of(&item));
        let converted: Vec<_> = items.collect::<PyResult<_>>()?;
        Ok(posting.post(converted)?)
    }

    /// Waits until the buffer takes another record.
    fn capacity(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.mode.run(py, self.handle.get()?.posting.capacity())
    }

    /// Appends records to a partition as one batch.
    #[pyo3(signature = (records, partition, *, expected_offset, fencing_token, durability_name))]
    fn append(
        &self,
        py: Python<'_>,
        records: Bound<'_, PyList>,
        partition: u32,
        expected_offset: Option<u64>,
        fencing_token: Option<String>,
        durability_name: Option<&str>,
    ) -> PyResult<Py<PyAny>> {
        let producer = self.handle.get()?.producer.clone();
        let items = records.iter().map(|item| Ok(record_of(&item)?.record));
        let records: Vec<Record> = items.collect::<PyResult<_>>()?;
        let stated = durability_name.or(self.default_durability);
        let mut options = AppendOptions::durability(durability(stated)?);
        if let Some(offset) = expected_offset {
            options = options.expecting(offset);
        }
        if let Some(token) = fencing_token {
            options = options.fenced_by(token);
        }
        let topic = self.topic.clone();
        let appending = async move {
            let ack = producer.append_with(&topic, partition, &records, &options).await?;
            Ok(ack_tuple((partition, ack)))
        };
        self.mode.run(py, on_runtime(appending))
    }

    /// Waits for the acks of everything that was queued, and reports failures of posted records.
    fn flush(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.mode.run(py, self.handle.get()?.posting.flush())
    }

    /// Refuses more records. Those that were queued are still sent.
    fn close(&self) -> PyResult<()> {
        self.handle.get()?.posting.close();
        Ok(())
    }

    /// Returns producer id and epoch; `None` without an identity.
    fn identity(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let producer = self.handle.get()?.producer.clone();
        self.mode.run_with(
            py,
            on_runtime(async move { Ok(producer.identity().await?) }),
            |py, identity| identity.map(|it| (it.producer_id, it.epoch)).into_py_any(py),
        )
    }

    /// Returns the sequence of the next record of this producer in a partition.
    fn next_sequence(&self, py: Python<'_>, partition: u32) -> PyResult<Py<PyAny>> {
        let producer = self.handle.get()?.producer.clone();
        let topic = self.topic.clone();
        let asking = async move { Ok(producer.next_sequence(&topic, partition).await?) };
        self.mode.run(py, on_runtime(asking))
    }
}
