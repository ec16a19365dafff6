//! Changes of a group's offsets: `helix group seek` and `helix group reset`.

use std::collections::BTreeMap;

use anyhow::Context;
use helix_client::proto::log::v1::{CommitStatus, CommittedOffset, OffsetAndLag, TopicPartition};
use helix_client::{Client, ReadSource, SeekOptions, TopicRef};

use super::rows::SoughtRow;
use crate::args::{GroupResetArgs, GroupSeekArgs, OffsetChangeArgs};
use crate::offset_lookup::{self, PartitionBounds};
use crate::position::PositionArg;

/// Longest text of a seek that the service accepts, in bytes.
const BY_BYTES_MAX: usize = 64;

/// Most partitions in one call.
const PARTITIONS_MAX: usize = 1000;

pub(super) async fn seek(client: &Client, args: &GroupSeekArgs) -> anyhow::Result<Vec<SoughtRow>> {
    let GroupSeekArgs { group, topic, to, partitions, undo, change } = args;
    let context = || format!("seek {group}");
    let options = options(change);
    if *undo {
        let topics: Vec<&str> = topic.as_deref().into_iter().collect();
        let undone = client.admin().undo_group_seek(group, &topics, &options).await;
        return Ok(rows(undone.with_context(context)?));
    }
    let (Some(topic), Some(to)) = (topic, to) else { anyhow::bail!("no topic or no position") };
    let offsets = resolve(client, topic, partitions, to).await?;
    send(client, group, &offsets, &options).await.with_context(context)
}

pub(super) async fn reset(
    client: &Client,
    args: &GroupResetArgs,
) -> anyhow::Result<Vec<SoughtRow>> {
    let GroupResetArgs { group, to, unreadable, change } = args;
    let context = || format!("reset {group}");
    let committed = client.admin().group_offsets(group, &[]).await.with_context(context)?;
    let mut topics: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for partition in committed.into_iter().filter(|it| is_selected(it, *unreadable)) {
        let partition = partition.committed.and_then(|it| it.partition).unwrap_or_default();
        topics.entry(partition.topic).or_default().push(partition.partition);
    }
    let mut offsets = Vec::new();
    for (topic, partitions) in &topics {
        offsets.extend(resolve(client, topic, partitions, to).await?);
    }
    send(client, group, &offsets, &options(change)).await.with_context(context)
}

/// Returns whether a reset changes a committed offset.
fn is_selected(offset: &OffsetAndLag, only_unreadable: bool) -> bool {
    match offset.status() {
        CommitStatus::TopicDeleted => false,
        CommitStatus::BelowLogStart | CommitStatus::AboveHighWatermark => true,
        CommitStatus::Valid | CommitStatus::Unknown | CommitStatus::Unspecified => !only_unreadable,
    }
}

/// Resolves a position in partitions of a topic; an empty list selects all.
async fn resolve(
    client: &Client,
    name: &str,
    partitions: &[u32],
    to: &PositionArg,
) -> anyhow::Result<Vec<CommittedOffset>> {
    let topic = offset_lookup::topic(client, name).await?;
    let source = ReadSource::Leader;
    let bounds = offset_lookup::partition_bounds(client, topic, partitions, source).await?;
    let offsets = match to {
        // Not moved into the bounds: the service refuses an offset that cannot be read.
        PositionArg::Offset(offset) => vec![*offset; bounds.len()],
        to => offset_lookup::existing_offsets(client, topic, &bounds, to).await?,
    };
    let offset = |(bounds, offset): (&PartitionBounds, u64)| new_offset(topic, *bounds, offset);
    Ok(bounds.iter().zip(offsets).map(offset).collect())
}

fn new_offset(topic: TopicRef<'_>, bounds: PartitionBounds, offset: u64) -> CommittedOffset {
    let partition = TopicPartition {
        topic: topic.name.to_owned(),
        partition: bounds.partition,
        topic_id: topic.id,
    };
    CommittedOffset { partition: Some(partition), offset, metadata: String::new() }
}

/// Sends seeks, each of one topic and as many partitions as a call may have.
async fn send(
    client: &Client,
    group: &str,
    offsets: &[CommittedOffset],
    options: &SeekOptions,
) -> anyhow::Result<Vec<SoughtRow>> {
    let topic = |offset: &CommittedOffset| offset.partition.as_ref().map(|it| it.topic_id);
    let mut sought = Vec::new();
    for of_topic in offsets.chunk_by(|one, other| topic(one) == topic(other)) {
        for part in of_topic.chunks(PARTITIONS_MAX) {
            let done = sought.len();
            let sent = client.admin().seek_group(group, part, options).await;
            let sent = match done {
                0 => sent?,
                _ => sent.with_context(|| format!("after {done} partitions were changed"))?,
            };
            sought.extend(rows(sent));
        }
    }
    Ok(sought)
}

fn rows(sought: Vec<helix_client::proto::log::v1::SoughtOffset>) -> Vec<SoughtRow> {
    sought.into_iter().map(SoughtRow::from).collect()
}

fn options(change: &OffsetChangeArgs) -> SeekOptions {
    let by = change.by.clone().unwrap_or_else(user_name);
    SeekOptions { by, validate_only: change.dry_run }
}

/// Returns the name of the user, for the history.
fn user_name() -> String {
    let name = std::env::var("USER").unwrap_or_default();
    let mut end = name.len().min(BY_BYTES_MAX);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resets_all_or_only_unreadable_offsets_of_existing_topics() {
        let offset =
            |status: CommitStatus| OffsetAndLag { status: status.into(), ..Default::default() };
        for (status, all, unreadable) in [
            (CommitStatus::Valid, true, false),
            (CommitStatus::BelowLogStart, true, true),
            (CommitStatus::AboveHighWatermark, true, true),
            (CommitStatus::TopicDeleted, false, false),
        ] {
            let offset = offset(status);
            let selected = (is_selected(&offset, false), is_selected(&offset, true));
            assert_eq!(selected, (all, unreadable), "{status:?}");
        }
    }
}
