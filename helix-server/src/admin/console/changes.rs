//! Changes: what a form sends, as a call of the API. Each failure names the command that does the
//! same. Deletions need the name typed, as on the command line; seeks are shown before they are
//! made.

use std::collections::BTreeMap;

use askama::Template;
use futures_util::future::try_join_all;
use helix_proto::log::v1::start_position::Position;
use helix_proto::log::v1::{
    AddPartitionsRequest, CommittedOffset, CreateTopicRequest, DeleteGroupRequest,
    DeleteTopicRequest, GetOffsetsRequest, ResolveOffsetsRequest, SeekGroupRequest,
    SeekGroupResponse, SetDrainingRequest, Topic, TopicPartition, TransferLeaderRequest,
    UpdateTopicRequest,
};
use helix_proto::units;
use hyper::{Response, StatusCode};
use prost_types::FieldMask;

use super::PageRequest;
use super::caller;
use super::form::FormFields;
use super::page::{AdminBody, PageFailure, PageFrame, argument, html, redirect, shown};
use super::{position, settings_form, topic};
use crate::clock::Clock;

/// Partitions of one seek: the limit of the API.
const SEEK_PARTITIONS_MAX: usize = 1_000;

/// Offsets that a page of a seek shows.
const SEEK_ROWS_MAX: usize = 100;

/// Longest text of a seek for the history, in bytes.
const BY_BYTES_MAX: usize = 64;

#[derive(Template)]
#[template(path = "seek.html")]
struct SeekPage {
    frame: PageFrame,
    group: String,
    topic: String,
    to: String,
    partitions: String,
    is_undo: bool,
    epoch: String,
    rows: Vec<SeekRow>,
    more_rows: usize,
    command: String,
}

struct SeekRow {
    topic: String,
    partition: u32,
    from: String,
    to: String,
}

/// Makes the change that a form at this path asks for.
pub(super) async fn change(
    page: &PageRequest,
    segments: &[&str],
    form: &FormFields,
) -> Result<Response<AdminBody>, PageFailure> {
    match segments {
        ["topics"] => create(page, form).await,
        ["topics", name, "alter"] => alter(page, name, form).await,
        ["topics", name, "partitions"] => add_partitions(page, name, form).await,
        ["topics", name, "delete"] => delete_topic(page, name, form).await,
        ["groups", name, "seek"] => seek(page, name, form, false).await,
        ["groups", name, "undo"] => seek(page, name, form, true).await,
        ["groups", name, "delete"] => delete_group(page, name, form).await,
        ["transfer"] => transfer(page, form).await,
        ["drain"] => drain(page, form).await,
        _ => Err(PageFailure::not_found()),
    }
}

/// A change that is being made: the page it belongs to, and the command that does the same.
struct Attempt {
    path: String,
    name: String,
    command: String,
}

impl Attempt {
    fn new(path: impl Into<String>, name: impl Into<String>, command: String) -> Self {
        Self { path: path.into(), name: name.into(), command }
    }

    fn of_topic(name: &str, command: String) -> Self {
        Self::new(format!("/console/topics/{name}"), format!("topic {}", shown(name)), command)
    }

    fn of_group(name: &str, command: String) -> Self {
        Self::new(format!("/console/groups/{name}"), format!("group {}", shown(name)), command)
    }

    fn of_cluster(command: String) -> Self {
        Self::new("/console/", "the cluster", command)
    }

    /// Adds the command and the way back to a failure.
    fn failed(&self, failure: impl Into<PageFailure>) -> PageFailure {
        let command = shown(&self.command);
        PageFailure { command, ..failure.into().back_to(&*self.path, &*self.name) }
    }

    fn refused(&self, what: impl Into<String>) -> PageFailure {
        self.failed(PageFailure::bad(what))
    }

    /// Returns the redirect to the page of the change, which then says that it is done.
    fn done(&self, code: &str) -> Response<AdminBody> {
        redirect(StatusCode::SEE_OTHER, &format!("{}?done={code}", self.path))
    }

    /// Checks that the form has the name typed again.
    fn confirmed(&self, form: &FormFields, name: &str) -> Result<(), PageFailure> {
        match form.get("confirm") == name {
            true => Ok(()),
            false => {
                let what = format!("type {} to confirm; nothing was changed", shown(name));
                Err(self.refused(what))
            }
        }
    }
}

async fn create(page: &PageRequest, form: &FormFields) -> Result<Response<AdminBody>, PageFailure> {
    let name = form.get("name");
    let changes = settings_form::parse(form);
    let arguments = changes.as_ref().map_or("", |changes| &changes.arguments);
    let count = Some(form.get("partitions")).filter(|it| !it.is_empty()).unwrap_or("1");
    let command = format!(
        "helix topic create {} --partitions {}{arguments}",
        argument(name),
        argument(count)
    );
    let attempt = Attempt::new("/console/topics", "topics", command);
    let changes = changes.map_err(|what| attempt.refused(what))?;
    let partition_count = small_number(form, "partitions", 1).map_err(|it| attempt.refused(it))?;
    let request = page.caller.request(CreateTopicRequest {
        name: name.to_owned(),
        partition_count,
        config: Some(changes.config),
        ..CreateTopicRequest::default()
    });
    let created = caller::topics(page.caller.local()).create_topic(request).await;
    created.map_err(|status| attempt.failed(status))?;
    Ok(Attempt { path: format!("/console/topics/{name}"), ..attempt }.done("created"))
}

async fn alter(
    page: &PageRequest,
    name: &str,
    form: &FormFields,
) -> Result<Response<AdminBody>, PageFailure> {
    let changes = settings_form::parse(form);
    let arguments = changes.as_ref().map_or("", |changes| &changes.arguments);
    let attempt = Attempt::of_topic(name, format!("helix topic alter {name}{arguments}"));
    let changes = changes.map_err(|what| attempt.refused(what))?;
    if changes.mask.is_empty() {
        return Err(attempt.refused("enter a new value for at least one setting"));
    }
    let request = page.caller.request(UpdateTopicRequest {
        name: name.to_owned(),
        config: Some(changes.config),
        update_mask: Some(FieldMask { paths: changes.mask }),
        topic_id: topic_id(form).map_err(|what| attempt.refused(what))?,
    });
    let altered = caller::topics(page.caller.local()).update_topic(request).await;
    altered.map_err(|status| attempt.failed(status))?;
    Ok(attempt.done("altered"))
}

async fn add_partitions(
    page: &PageRequest,
    name: &str,
    form: &FormFields,
) -> Result<Response<AdminBody>, PageFailure> {
    let total = form.get("total");
    let command = format!("helix topic add-partitions {name} --total {}", argument(total));
    let attempt = Attempt::of_topic(name, command);
    let request = page.caller.request(AddPartitionsRequest {
        name: name.to_owned(),
        partition_count: small_number(form, "total", 0).map_err(|it| attempt.refused(it))?,
        topic_id: topic_id(form).map_err(|what| attempt.refused(what))?,
    });
    let added = caller::topics(page.caller.local()).add_partitions(request).await;
    added.map_err(|status| attempt.failed(status))?;
    Ok(attempt.done("extended"))
}

async fn delete_topic(
    page: &PageRequest,
    name: &str,
    form: &FormFields,
) -> Result<Response<AdminBody>, PageFailure> {
    let attempt = Attempt::of_topic(name, format!("helix topic delete {name}"));
    attempt.confirmed(form, name)?;
    // Deletes the topic that the page showed, not a later one of the same name.
    let topic_id = topic_id(form).map_err(|what| attempt.refused(what))?;
    let request = page.caller.request(DeleteTopicRequest { name: name.to_owned(), topic_id });
    let deleted = caller::topics(page.caller.local()).delete_topic(request).await;
    deleted.map_err(|status| attempt.failed(status))?;
    Ok(Attempt { path: "/console/topics".to_owned(), ..attempt }.done("deleted"))
}

async fn delete_group(
    page: &PageRequest,
    name: &str,
    form: &FormFields,
) -> Result<Response<AdminBody>, PageFailure> {
    let attempt = Attempt::of_group(name, format!("helix group delete {name}"));
    attempt.confirmed(form, name)?;
    let offsets_epoch = offsets_epoch(page, name).await.map_err(|it| attempt.failed(it))?;
    let request = DeleteGroupRequest { group: name.to_owned(), offsets_epoch };
    let deleted = page.caller.routed(request, |channel, request| async move {
        caller::groups(channel).delete_group(request).await
    });
    deleted.await.map_err(|failed| attempt.failed(failed))?;
    Ok(Attempt { path: "/console/groups".to_owned(), ..attempt }.done("group-deleted"))
}

/// Shows what a seek or an undo would change, or makes it if the form says so.
async fn seek(
    page: &PageRequest,
    group: &str,
    form: &FormFields,
    is_undo: bool,
) -> Result<Response<AdminBody>, PageFailure> {
    let (topic, to, partitions) = (form.get("topic"), form.get("to"), form.get("partitions"));
    let selected = match partitions {
        "" => String::new(),
        partitions => format!(" -p {}", argument(partitions)),
    };
    let command = match (is_undo, topic) {
        (true, "") => format!("helix group seek {group} --undo"),
        (true, topic) => format!("helix group seek {group} {} --undo", argument(topic)),
        (false, topic) => {
            format!("helix group seek {group} {} --to={}{selected}", argument(topic), argument(to))
        }
    };
    let attempt = Attempt::of_group(group, command);
    let is_confirmed = form.get("confirm") == "yes";
    let epoch = match (is_confirmed, form.get("epoch")) {
        // The change is refused if the offsets have changed since they were shown.
        (true, epoch) => epoch.parse().ok(),
        (false, _) => offsets_epoch(page, group).await.map_err(|it| attempt.failed(it))?,
    };
    let request = SeekGroupRequest {
        group: group.to_owned(),
        by: author(page),
        validate_only: !is_confirmed,
        offsets_epoch: epoch,
        ..SeekGroupRequest::default()
    };
    let request = match is_undo {
        true => {
            let topics = Some(topic.to_owned()).filter(|it| !it.is_empty()).into_iter().collect();
            SeekGroupRequest { undo: true, topics, ..request }
        }
        false => {
            let offsets = new_offsets(page, topic, partitions, to).await;
            let offsets = offsets.map_err(|failure| attempt.failed(failure))?;
            SeekGroupRequest { offsets, ..request }
        }
    };
    let sought = page.caller.routed(request, |channel, request| async move {
        caller::groups(channel).seek_group(request).await
    });
    let sought = sought.await.map_err(|failed| attempt.failed(failed))?;
    if is_confirmed {
        return Ok(attempt.done(if is_undo { "undone" } else { "sought" }));
    }
    let shown_page = SeekPage {
        frame: page.frame(format!("Seek {}", shown(group)), "groups"),
        group: shown(group),
        topic: topic.to_owned(),
        to: to.to_owned(),
        partitions: partitions.to_owned(),
        is_undo,
        epoch: epoch.map_or_else(String::new, |epoch| epoch.to_string()),
        more_rows: sought.offsets.len().saturating_sub(SEEK_ROWS_MAX),
        rows: seek_rows(&sought),
        command: shown(&attempt.command),
    };
    html(StatusCode::OK, &shown_page)
}

fn seek_rows(sought: &SeekGroupResponse) -> Vec<SeekRow> {
    let offset = |offset: Option<u64>| offset.map_or("none".to_owned(), units::count);
    let rows = sought.offsets.iter().take(SEEK_ROWS_MAX).map(|it| SeekRow {
        topic: it.partition.as_ref().map_or_else(String::new, |at| shown(&at.topic)),
        partition: it.partition.as_ref().map_or(0, |at| at.partition),
        from: offset(it.from),
        to: offset(it.to),
    });
    rows.collect()
}

/// Returns the state of a group's offsets, which a change follows.
async fn offsets_epoch(page: &PageRequest, group: &str) -> Result<Option<u64>, PageFailure> {
    let request = GetOffsetsRequest {
        group: group.to_owned(),
        page_size: 1,
        allow_missing: true,
        ..GetOffsetsRequest::default()
    };
    let found = page.caller.routed(request, |channel, request| async move {
        caller::groups(channel).get_offsets(request).await
    });
    Ok(found.await?.offsets_epoch)
}

/// Resolves a position in partitions of a topic to offsets: one call to each leader.
async fn new_offsets(
    page: &PageRequest,
    name: &str,
    partitions: &str,
    to: &str,
) -> Result<Vec<CommittedOffset>, PageFailure> {
    let position = position::parse(to, page.node.clock().now_us()).map_err(PageFailure::bad)?;
    let topic = topic::get(page, name).await?;
    let numbers = selected(partitions, &topic).map_err(PageFailure::bad)?;
    let offset = |partition: u32, offset: u64| CommittedOffset {
        partition: Some(TopicPartition {
            topic: topic.name.clone(),
            partition,
            topic_id: topic.topic_id,
        }),
        offset,
        metadata: String::new(),
    };
    if let Position::Offset(to) = position {
        // Not moved into the bounds: the service refuses an offset that cannot be read.
        return Ok(numbers.into_iter().map(|number| offset(number, to)).collect());
    }
    let mut by_leader: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for number in numbers {
        let partition = topic.partitions.get(number as usize);
        let leader = partition.and_then(|partition| partition.leader.as_ref());
        by_leader.entry(leader.map_or("", |it| &it.endpoint)).or_default().push(number);
    }
    let resolve = |partitions: Vec<u32>| {
        let request = ResolveOffsetsRequest {
            topic: topic.name.clone(),
            topic_id: topic.topic_id,
            partitions,
            position: position::start(position.clone()),
        };
        page.caller.routed(request, |channel, request| async move {
            caller::consume(channel).resolve_offsets(request).await
        })
    };
    // Begins at this node, which names the leader if it is another one.
    let resolved = try_join_all(by_leader.into_values().map(resolve)).await?;
    let mut offsets: Vec<CommittedOffset> = resolved
        .into_iter()
        .flat_map(|resolved| resolved.offsets)
        .map(|resolved| offset(resolved.partition, resolved.offset))
        .collect();
    offsets.sort_by_key(|offset| offset.partition.as_ref().map(|at| at.partition));
    Ok(offsets)
}

/// Parses a list of partitions, `0,3-5`; an empty one has all.
fn selected(text: &str, topic: &Topic) -> Result<Vec<u32>, String> {
    let count = u32::try_from(topic.partitions.len()).unwrap_or(u32::MAX);
    let mut numbers = Vec::new();
    let ranges = text.split(',').map(str::trim).filter(|range| !range.is_empty());
    for range in ranges {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let number = |text: &str| text.trim().parse().ok().filter(|number: &u32| *number < count);
        let (Some(first), Some(last)) = (number(first), number(last)) else {
            let shown = crate::quote::quote(range);
            return Err(format!(
                "{shown} is not a partition of 0..{count}, or a range N-M of them"
            ));
        };
        numbers.extend((first..=last).take(SEEK_PARTITIONS_MAX + 1));
        if numbers.len() > SEEK_PARTITIONS_MAX {
            break;
        }
    }
    if numbers.is_empty() {
        numbers = (0..count).take(SEEK_PARTITIONS_MAX + 1).collect();
    }
    numbers.sort_unstable();
    numbers.dedup();
    if numbers.len() > SEEK_PARTITIONS_MAX {
        return Err(format!(
            "a seek has at most {SEEK_PARTITIONS_MAX} partitions here; name fewer, or use the \
             command line"
        ));
    }
    Ok(numbers)
}

/// Returns the text for the history of offsets.
fn author(page: &PageRequest) -> String {
    let principal = page.session.as_ref().map_or("console", |session| &*session.principal);
    crate::quote::cut(principal, BY_BYTES_MAX).to_owned()
}

async fn transfer(
    page: &PageRequest,
    form: &FormFields,
) -> Result<Response<AdminBody>, PageFailure> {
    let (shard, to) = (form.get("shard"), form.get("to"));
    let to_node = if to.is_empty() { String::new() } else { format!(" --to {}", argument(to)) };
    let command = format!("helix cluster transfer-leader --shard {}{to_node}", argument(shard));
    let attempt = Attempt::of_cluster(command);
    let request = TransferLeaderRequest {
        shard_id: small_number(form, "shard", 0).map_err(|what| attempt.refused(what))?,
        target_node_id: form.number("to", 0, u64::MAX).map_err(|what| attempt.refused(what))?,
    };
    let transferred = page.caller.routed(request, |channel, request| async move {
        caller::cluster(channel).transfer_leader(request).await
    });
    transferred.await.map_err(|failed| attempt.failed(failed))?;
    Ok(attempt.done("transferred"))
}

async fn drain(page: &PageRequest, form: &FormFields) -> Result<Response<AdminBody>, PageFailure> {
    let draining = form.get("draining") == "yes";
    let verb = if draining { "drain" } else { "undrain" };
    let command = format!("helix cluster {verb} {}", argument(form.get("node")));
    let attempt = Attempt::of_cluster(command);
    let node_id = form.number("node", 0, u64::MAX).map_err(|what| attempt.refused(what))?;
    let request = SetDrainingRequest { node_id, draining, validate_only: false };
    let changed = page.caller.routed(request, |channel, request| async move {
        caller::cluster(channel).set_draining(request).await
    });
    changed.await.map_err(|failed| attempt.failed(failed))?;
    Ok(attempt.done(if draining { "draining" } else { "undrained" }))
}

fn small_number(form: &FormFields, field: &str, default: u64) -> Result<u32, String> {
    let number = form.number(field, default, u32::MAX.into())?;
    Ok(u32::try_from(number).unwrap_or(u32::MAX))
}

fn topic_id(form: &FormFields) -> Result<u64, String> {
    form.number("topic_id", 0, u64::MAX)
}

#[cfg(test)]
mod tests {
    use helix_proto::log::v1::PartitionInfo;

    use super::*;

    #[test]
    fn lists_of_partitions_are_those_of_the_topic() {
        let topic = Topic { partitions: vec![PartitionInfo::default(); 2_000], ..Topic::default() };
        assert_eq!(selected("3, 0-2,2", &topic), Ok(vec![0, 1, 2, 3]));
        assert_eq!(selected("1999", &topic), Ok(vec![1_999]));
        for wrong in ["2000", "x", "1-", "-1", "0-4294967295", "1-2-3"] {
            assert!(selected(wrong, &topic).unwrap_err().contains("0..2000"), "{wrong}");
        }
        assert!(selected("", &topic).unwrap_err().contains("at most 1000"));
        assert!(selected("0-1999", &topic).unwrap_err().contains("at most 1000"));
        let small = Topic { partitions: vec![PartitionInfo::default(); 2], ..Topic::default() };
        assert_eq!(selected("", &small), Ok(vec![0, 1]));
    }
}
