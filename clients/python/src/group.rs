//! Members of consumer groups.
//!
//! The Rust client takes a batch for handled once the next event is requested. Python may stop
//! within a batch; `handled` then states how far it came, so that nothing beyond it is committed.

use std::collections::BTreeSet;
use std::sync::Arc;

use helix_client::{
    AssignedPartition, GroupConsumer, GroupEvent, OffsetToCommit, Records, Result as ClientResult,
};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::arguments::{PartitionTuple, partition, partition_tuple};
use crate::batch::Batch;
use crate::cell::{EventReader, ReaderCell, close, with_open};
use crate::failure::Failed;
use crate::operation::Mode;
use crate::process::OwnedByProcess;

/// Names the handle in errors.
const WHAT: &str = "group consumer";

/// A member of a consumer group.
#[pyclass(module = "helix._helix", frozen)]
pub(crate) struct NativeGroup {
    cell: Arc<OwnedByProcess<ReaderCell<Member>>>,
    mode: Mode,
    #[pyo3(get)]
    member_id: String,
}

struct Member {
    consumer: GroupConsumer,
    is_auto_commit: bool,
    /// The last batch, until the next event.
    in_hand: Option<BatchInHand>,
    /// Partitions with records that were delivered since the last commit.
    delivered: BTreeSet<AssignedPartition>,
}

struct BatchInHand {
    partition: AssignedPartition,
    end: u64,
}

impl EventReader for Member {
    type Event = Option<ClientResult<GroupEvent<Records>>>;

    async fn next_event(&mut self) -> Self::Event {
        let event = self.consumer.next().await;
        // Reached only with an event: until then, the call may be repeated.
        self.in_hand = None;
        if let Some(Ok(GroupEvent::Data(records))) = &event {
            let partition = AssignedPartition::from(records);
            self.delivered.insert(partition.clone());
            self.in_hand = Some(BatchInHand { partition, end: records.next_offset });
        }
        event
    }
}

impl Member {
    /// Returns the batch in hand if only a part of it is handled.
    fn partly_handled(&self, handled: Option<u64>) -> Option<(AssignedPartition, u64)> {
        let (in_hand, handled) = (self.in_hand.as_ref()?, handled?);
        (handled < in_hand.end).then(|| (in_hand.partition.clone(), handled))
    }

    /// Commits what was delivered, but of the batch in hand only what is below `handled`.
    async fn commit(&mut self, handled: Option<u64>) -> Result<(), Failed> {
        let Some((partly, handled)) = self.partly_handled(handled) else {
            self.consumer.commit_sync().await?;
            self.delivered.clear();
            return Ok(());
        };
        let offset = |it: &AssignedPartition| match *it == partly {
            true => Some(handled),
            false => self.consumer.position(it),
        };
        let offsets: Vec<_> = self
            .delivered
            .iter()
            .filter_map(|it| Some(OffsetToCommit::new(it.clone(), offset(it)?)))
            .collect();
        self.consumer.commit_offsets(offsets).await?;
        self.delivered.retain(|it| *it == partly);
        Ok(())
    }

    /// Ends the membership. Of the batch in hand, what is not handled is read again by the group.
    async fn close(mut self, handled: Option<u64>, leaves: bool) -> Result<(), Failed> {
        if let Some((partly, handled)) = self.partly_handled(handled) {
            let committed = match self.is_auto_commit {
                true => {
                    let offset = OffsetToCommit::new(partly.clone(), handled);
                    self.consumer.commit_offsets([offset]).await
                }
                false => Ok(()),
            };
            // Fails only if the partition is lost: then nothing of it is committed either.
            let _ = self.consumer.seek(&partly, handled);
            let closed =
                if leaves { self.consumer.leave().await } else { self.consumer.close().await };
            committed?;
            return Ok(closed?);
        }
        Ok(if leaves { self.consumer.leave().await } else { self.consumer.close().await }?)
    }
}

impl NativeGroup {
    pub(crate) fn new(consumer: GroupConsumer, is_auto_commit: bool, mode: Mode) -> Self {
        let member_id = consumer.member_id().to_owned();
        let (in_hand, delivered) = (None, BTreeSet::new());
        let member = Member { consumer, is_auto_commit, in_hand, delivered };
        Self { cell: Arc::new(OwnedByProcess::new(ReaderCell::new(member))), mode, member_id }
    }

    /// Runs a short call of the consumer.
    fn call<R>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut GroupConsumer) -> ClientResult<R> + Send + 'static,
    ) -> PyResult<Py<PyAny>>
    where
        R: for<'py> IntoPyObject<'py> + Send + 'static,
    {
        self.cell.get()?;
        let cell = self.cell.clone();
        self.mode.run(py, async move {
            let mut member = cell.get()?.take_turn().await;
            let member = member.as_mut().ok_or(Failed::Closed(WHAT))?;
            Ok(call(&mut member.consumer)?)
        })
    }
}

#[pymethods]
impl NativeGroup {
    /// Returns the next event as its kind and content, or `None` at the end.
    fn next_event(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.cell.get()?;
        let cell = self.cell.clone();
        let next = async move {
            match cell.get()?.next().await.flatten() {
                Some(event) => Ok(Some(event?)),
                None => Ok(None),
            }
        };
        self.mode.run_with(py, next, |py, event| match event {
            Some(event) => event_tuple(py, event),
            None => Ok(py.None()),
        })
    }

    /// Commits what was delivered, and waits until it is durable. `handled` limits the last batch.
    fn commit(&self, py: Python<'_>, handled: Option<u64>) -> PyResult<Py<PyAny>> {
        self.cell.get()?;
        let cell = self.cell.clone();
        self.mode.run(py, async move {
            with_open(cell.get()?, WHAT, async |member: &mut Member| member.commit(handled).await)
                .await
        })
    }

    /// Commits these offsets, with a text for each.
    fn commit_offsets(
        &self,
        py: Python<'_>,
        offsets: Vec<(PartitionTuple, u64, String)>,
    ) -> PyResult<Py<PyAny>> {
        self.cell.get()?;
        let offset = |(of, offset, metadata)| OffsetToCommit {
            metadata,
            ..OffsetToCommit::new(partition(of), offset)
        };
        let offsets: Vec<_> = offsets.into_iter().map(offset).collect();
        let cell = self.cell.clone();
        self.mode.run(py, async move {
            with_open(cell.get()?, WHAT, async |member: &mut Member| {
                Ok(member.consumer.commit_offsets(offsets).await?)
            })
            .await
        })
    }

    fn pause(&self, py: Python<'_>, partitions: Vec<PartitionTuple>) -> PyResult<Py<PyAny>> {
        let partitions: Vec<_> = partitions.into_iter().map(partition).collect();
        self.call(py, move |consumer| consumer.pause(&partitions))
    }

    fn resume(&self, py: Python<'_>, partitions: Vec<PartitionTuple>) -> PyResult<Py<PyAny>> {
        let partitions: Vec<_> = partitions.into_iter().map(partition).collect();
        self.call(py, move |consumer| consumer.resume(&partitions))
    }

    fn seek(&self, py: Python<'_>, of: PartitionTuple, offset: u64) -> PyResult<Py<PyAny>> {
        let of = partition(of);
        self.call(py, move |consumer| consumer.seek(&of, offset))
    }

    fn assignment(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.call(py, |consumer| {
            Ok(consumer.assignment().iter().map(partition_tuple).collect::<Vec<_>>())
        })
    }

    fn position(&self, py: Python<'_>, of: PartitionTuple) -> PyResult<Py<PyAny>> {
        let of = partition(of);
        self.call(py, move |consumer| Ok(consumer.position(&of)))
    }

    /// Returns whether the assignment is settled, the unmatched topics, and the buffered bytes.
    fn state(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.call(py, |consumer| {
            let unmatched = consumer.unmatched_topics();
            Ok((consumer.is_settled(), unmatched, consumer.buffered_bytes()))
        })
    }

    /// Commits what is handled unless automatic commits are off, and ends the membership.
    fn close(&self, py: Python<'_>, handled: Option<u64>, leaves: bool) -> PyResult<Py<PyAny>> {
        self.cell.get()?;
        let cell = self.cell.clone();
        self.mode.run(py, async move {
            match close(cell.get()?).await {
                Some(member) => member.close(handled, leaves).await,
                None => Ok(()),
            }
        })
    }
}

fn event_tuple(py: Python<'_>, event: GroupEvent<Records>) -> PyResult<Py<PyAny>> {
    let tuples = |partitions: Vec<AssignedPartition>| {
        partitions.iter().map(partition_tuple).collect::<Vec<_>>()
    };
    match event {
        GroupEvent::Data(records) => ("data", Batch::new(py, records)?).into_py_any(py),
        GroupEvent::CaughtUp { partition, watermarks } => {
            let AssignedPartition { topic, partition, topic_id } = partition;
            ("caught_up", topic, partition, topic_id, watermarks.high_watermark).into_py_any(py)
        }
        GroupEvent::Assigned(partitions) => ("assigned", tuples(partitions)).into_py_any(py),
        GroupEvent::Revoked(partitions) => ("revoked", tuples(partitions)).into_py_any(py),
        GroupEvent::Lost(partitions) => ("lost", tuples(partitions)).into_py_any(py),
    }
}
