//! Subscriptions.

use std::sync::Arc;

use helix_client::{Event, Records, Result as ClientResult, Subscription};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::batch::Batch;
use crate::cell::{EventReader, ReaderCell, close};
use crate::operation::Mode;
use crate::process::OwnedByProcess;

/// An open subscription.
#[pyclass(module = "helix._helix", frozen)]
pub(crate) struct NativeStream {
    cell: Arc<OwnedByProcess<ReaderCell<Subscription>>>,
    mode: Mode,
}

impl EventReader for Subscription {
    type Event = Option<ClientResult<Event<Records>>>;

    fn next_event(&mut self) -> impl Future<Output = Self::Event> + Send {
        self.next()
    }
}

impl NativeStream {
    pub(crate) fn new(subscription: Subscription, mode: Mode) -> Self {
        Self { cell: Arc::new(OwnedByProcess::new(ReaderCell::new(subscription))), mode }
    }

    fn next_with(
        &self,
        py: Python<'_>,
        convert: fn(Python<'_>, Event<Records>) -> PyResult<Py<PyAny>>,
        is_wanted: fn(&Event<Records>) -> bool,
    ) -> PyResult<Py<PyAny>> {
        self.cell.get()?;
        let cell = self.cell.clone();
        let next = async move {
            let cell = cell.get()?;
            loop {
                match cell.next().await.flatten() {
                    Some(Ok(event)) if !is_wanted(&event) => {}
                    Some(event) => return Ok(Some(event?)),
                    None => return Ok(None),
                }
            }
        };
        self.mode.run_with(py, next, move |py, event: Option<Event<Records>>| match event {
            Some(event) => convert(py, event),
            None => Ok(py.None()),
        })
    }
}

#[pymethods]
impl NativeStream {
    /// Returns the next batch with records, or `None` at the end.
    fn next_batch(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let is_wanted = |event: &Event<Records>| matches!(event, Event::Data(_));
        self.next_with(py, event_value, is_wanted)
    }

    /// Returns the next event as its kind and fields, or `None` at the end.
    fn next_event(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.next_with(py, event_tuple, |_| true)
    }

    fn close(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.cell.get()?;
        let cell = self.cell.clone();
        self.mode.run(py, async move {
            close(cell.get()?).await;
            Ok(())
        })
    }
}

fn event_value(py: Python<'_>, event: Event<Records>) -> PyResult<Py<PyAny>> {
    match event {
        Event::Data(records) => Batch::new(py, records)?.into_py_any(py),
        other => event_tuple(py, other),
    }
}

fn event_tuple(py: Python<'_>, event: Event<Records>) -> PyResult<Py<PyAny>> {
    match event {
        Event::Data(records) => ("data", Batch::new(py, records)?).into_py_any(py),
        Event::CaughtUp { topic, partition, watermarks } => {
            ("caught_up", topic, partition, 0u64, watermarks.high_watermark).into_py_any(py)
        }
        Event::Heartbeat(partitions) => {
            let marks = partitions.into_iter().map(|it| {
                let end = it.watermarks.unwrap_or_default().high_watermark;
                ((it.topic, it.partition, it.topic_id), end)
            });
            ("heartbeat", marks.collect::<Vec<_>>()).into_py_any(py)
        }
        Event::Restarted { topic, partition, old_topic_id, topic_id } => {
            ("restarted", topic, partition, old_topic_id, topic_id).into_py_any(py)
        }
    }
}
