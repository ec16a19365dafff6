//! Control calls: topics, offsets, groups, and the cluster.

use std::future::Future;

use helix_client::{Admin, NewTopic, Result as ClientResult, SeekOptions, TopicRef};
use helix_proto::log::v1::{CommittedOffset, TopicPartition};
use pyo3::prelude::*;

use crate::arguments::{PartitionTuple, PositionTuple, position, seconds};
use crate::client::NativeClient;
use crate::operation::on_runtime;
use crate::rows::{
    CallerRow, ClusterRow, GroupOffsetRow, GroupRow, GroupSummaryRow, HealthRow, SoughtRow,
    TopicConfigRow, TopicRow,
};

impl NativeClient {
    /// Runs a control call, and converts its result to a row.
    fn admin<T, F>(&self, py: Python<'_>, call: impl FnOnce(Admin) -> F) -> PyResult<Py<PyAny>>
    where
        F: Future<Output = ClientResult<T>> + Send + 'static,
        T: for<'py> IntoPyObject<'py> + Send + 'static,
    {
        let calling = call(self.client.get()?.admin());
        self.mode.run(py, on_runtime(async move { Ok(calling.await?) }))
    }
}

fn rows<T, R: From<T>>(of: Vec<T>) -> Vec<R> {
    of.into_iter().map(R::from).collect()
}

fn offsets(of: Vec<(PartitionTuple, u64, String)>) -> Vec<CommittedOffset> {
    let offset = |((topic, partition, topic_id), offset, metadata)| CommittedOffset {
        partition: Some(TopicPartition { topic, partition, topic_id }),
        offset,
        metadata,
    };
    of.into_iter().map(offset).collect()
}

fn names(of: &[String]) -> Vec<&str> {
    of.iter().map(String::as_str).collect()
}

#[pymethods]
impl NativeClient {
    fn create_topic(
        &self,
        py: Python<'_>,
        name: String,
        partition_count: u32,
        replication_factor: u32,
        config: TopicConfigRow,
        validate_only: bool,
    ) -> PyResult<Py<PyAny>> {
        let config = config.into_config()?;
        let topic = NewTopic { name, partition_count, replication_factor, config, validate_only };
        self.admin(py, |admin| async move { Ok(TopicRow::from(admin.create_topic(&topic).await?)) })
    }

    fn get_topic(&self, py: Python<'_>, name: String) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move { Ok(TopicRow::from(admin.topic(&name).await?)) })
    }

    fn list_topics(&self, py: Python<'_>, prefix: String) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move { Ok(rows::<_, TopicRow>(admin.topics(&prefix).await?)) })
    }

    fn update_topic(
        &self,
        py: Python<'_>,
        name: String,
        topic_id: u64,
        config: TopicConfigRow,
        fields: Vec<String>,
    ) -> PyResult<Py<PyAny>> {
        let config = config.into_config()?;
        self.admin(py, |admin| async move {
            let topic = TopicRef::with_id(&name, topic_id);
            Ok(TopicRow::from(admin.update_topic(topic, &config, &names(&fields)).await?))
        })
    }

    fn add_partitions(
        &self,
        py: Python<'_>,
        name: String,
        topic_id: u64,
        partition_count: u32,
    ) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move {
            let topic = TopicRef::with_id(&name, topic_id);
            Ok(TopicRow::from(admin.add_partitions(topic, partition_count).await?))
        })
    }

    fn delete_topic(&self, py: Python<'_>, name: String, topic_id: u64) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move {
            admin.delete_topic(TopicRef::with_id(&name, topic_id)).await
        })
    }

    /// Deletes records below an offset. Returns log start and high watermark.
    fn trim(
        &self,
        py: Python<'_>,
        name: String,
        topic_id: u64,
        partition: u32,
        offset: u64,
    ) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move {
            let topic = TopicRef::with_id(&name, topic_id);
            let marks = admin.trim(topic, partition, offset).await?;
            Ok((marks.log_start_offset, marks.high_watermark))
        })
    }

    fn set_fencing_token(
        &self,
        py: Python<'_>,
        name: String,
        partition: u32,
        expected: Option<String>,
        token: String,
    ) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move {
            let topic = TopicRef::from(&name);
            admin.set_fencing_token(topic, partition, expected.as_deref(), &token).await?;
            Ok(())
        })
    }

    /// Returns partition, offset, log start and high watermark for each partition.
    fn resolve_offsets(
        &self,
        py: Python<'_>,
        name: String,
        topic_id: u64,
        partitions: Vec<u32>,
        at: PositionTuple,
    ) -> PyResult<Py<PyAny>> {
        let at = position(at)?;
        self.admin(py, |admin| async move {
            let topic = TopicRef::with_id(&name, topic_id);
            let resolved = admin.resolve_offsets(topic, &partitions, &at).await?;
            let rows = resolved.into_iter().map(|it| {
                let marks = it.watermarks.unwrap_or_default();
                (it.partition, it.offset, marks.log_start_offset, marks.high_watermark)
            });
            Ok(rows.collect::<Vec<_>>())
        })
    }

    fn list_groups(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move { Ok(rows::<_, GroupSummaryRow>(admin.groups().await?)) })
    }

    fn describe_group(&self, py: Python<'_>, group: String, history: bool) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move {
            Ok(GroupRow::from(admin.describe_group(&group, history).await?))
        })
    }

    fn group_offsets(
        &self,
        py: Python<'_>,
        group: String,
        topics: Vec<String>,
    ) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move {
            Ok(rows::<_, GroupOffsetRow>(admin.group_offsets(&group, &names(&topics)).await?))
        })
    }

    fn commit_group_offsets(
        &self,
        py: Python<'_>,
        group: String,
        committed: Vec<(PartitionTuple, u64, String)>,
    ) -> PyResult<Py<PyAny>> {
        let committed = offsets(committed);
        self.admin(py, |admin| async move { admin.commit_group_offsets(&group, &committed).await })
    }

    fn seek_group(
        &self,
        py: Python<'_>,
        group: String,
        sought: Vec<(PartitionTuple, u64, String)>,
        by: String,
        validate_only: bool,
    ) -> PyResult<Py<PyAny>> {
        let (sought, options) = (offsets(sought), SeekOptions { by, validate_only });
        self.admin(py, |admin| async move {
            Ok(rows::<_, SoughtRow>(admin.seek_group(&group, &sought, &options).await?))
        })
    }

    fn reset_group(
        &self,
        py: Python<'_>,
        group: String,
        topic: String,
        partitions: Vec<u32>,
        at: PositionTuple,
        by: String,
        validate_only: bool,
    ) -> PyResult<Py<PyAny>> {
        let (at, options) = (position(at)?, SeekOptions { by, validate_only });
        self.admin(py, |admin| async move {
            let sought = admin.reset_group(&group, &topic, &partitions, &at, &options).await?;
            Ok(rows::<_, SoughtRow>(sought))
        })
    }

    fn undo_group_seek(
        &self,
        py: Python<'_>,
        group: String,
        topics: Vec<String>,
        by: String,
        validate_only: bool,
    ) -> PyResult<Py<PyAny>> {
        let options = SeekOptions { by, validate_only };
        self.admin(py, |admin| async move {
            let sought = admin.undo_group_seek(&group, &names(&topics), &options).await?;
            Ok(rows::<_, SoughtRow>(sought))
        })
    }

    fn delete_group(&self, py: Python<'_>, group: String) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move { admin.delete_group(&group).await })
    }

    fn health(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move { Ok(HealthRow::from(admin.health().await?)) })
    }

    /// Returns nodes and shards.
    fn describe_cluster(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move { Ok(ClusterRow::from(admin.metadata(&[""]).await?)) })
    }

    fn wait_ready(&self, py: Python<'_>, timeout: f64) -> PyResult<Py<PyAny>> {
        let limit = seconds("timeout", timeout)?;
        self.admin(py, |admin| async move { admin.ready(limit).await })
    }

    fn who_am_i(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.admin(py, |admin| async move { Ok(CallerRow::from(admin.who_am_i().await?)) })
    }
}
