//! Administration of consumer groups: lists, descriptions, commits without a member, seeks.

use std::collections::BTreeMap;

use helix_proto::log::v1::{
    CommitOffsetsRequest, CommittedOffset, DeleteGroupRequest, DescribeGroupRequest,
    DescribeGroupResponse, ErrorReason, ForgetGroupTopicRequest, GetOffsetsRequest, GroupSummary,
    ListGroupsRequest, OffsetAndLag, ReportGatewayMembersRequest, SeekGroupRequest, SoughtOffset,
    TopicPartition,
};

use super::{Admin, all_pages};
use crate::call_spec::{CallSpec, Repeat};
use crate::consumer::Position;
use crate::error::Result;
use crate::topic::TopicRef;

/// Groups per page when all are listed.
const PAGE_GROUPS: i32 = 1000;

/// Partitions per seek, below the service's limits also with the longest topic name.
const SEEK_PARTITIONS: usize = 1000;

/// Repeats of a seek or deletion that another change of the group overtook.
const OVERTAKEN_MAX: u32 = 3;

/// Settings of a seek.
#[derive(Debug, Clone, Default)]
pub struct SeekOptions {
    /// Text for the history: the operator, or the reason. Up to 64 bytes.
    pub by: String,
    /// Only return what would change.
    pub validate_only: bool,
}

/// Every method also fails with the last failure if no node, or the group's coordinator, can be
/// reached within the request timeout.
impl Admin {
    /// Returns all groups, ordered by name, as some node knows them; it may lag.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn groups(&self) -> Result<Vec<GroupSummary>> {
        all_pages(|page_token| async move { self.groups_page(PAGE_GROUPS, &page_token).await })
            .await
    }

    /// Returns all groups, ordered by name, with the members that gateways have in them.
    ///
    /// Only the coordinator of a group knows these, so every node is asked. A node that does not
    /// respond is left out.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn groups_with_gateways(&self) -> Result<Vec<GroupSummary>> {
        let groups = self.groups().await?;
        let mut by_name: BTreeMap<String, GroupSummary> =
            groups.into_iter().map(|group| (group.group.clone(), group)).collect();
        let nodes = self.metadata(&[""]).await?.nodes;
        let lists = nodes.iter().map(|node| {
            all_pages(move |page_token| async move {
                let mut client = self.client.shared.routing.node(&node.endpoint)?.group();
                let request =
                    ListGroupsRequest { page_size: PAGE_GROUPS, page_token, ..Default::default() };
                let page = self.once("list groups", client.list_groups(request)).await?;
                Ok((page.groups, page.next_page_token))
            })
        });
        let lists = futures_util::future::join_all(lists).await;
        for group in lists.into_iter().flatten().flatten() {
            if !group.gateway.is_empty() {
                by_name.insert(group.group.clone(), group);
            }
        }
        Ok(by_name.into_values().collect())
    }

    /// Reports the members that a gateway has in a group. For gateways of other protocols.
    ///
    /// # Errors
    /// `GROUP_NOT_EMPTY` if the group has members of this API; `INVALID_ARGUMENT` beyond the limits
    /// of a report.
    pub async fn report_gateway_members(&self, report: ReportGatewayMembersRequest) -> Result<()> {
        let call = CallSpec::new("report gateway members", Repeat::Always);
        let response = self.client.call_coordinator(&report.group, call, |node| {
            let request = report.clone();
            async move { node.group().report_gateway_members(request).await }
        });
        response.await.map(|_| ())
    }

    /// Returns a page of groups and the token of the next page, which is empty at the end.
    ///
    /// The empty token begins. The service may return fewer than `page_size` groups.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if `page_size` is negative.
    pub async fn groups_page(
        &self,
        page_size: i32,
        page_token: &str,
    ) -> Result<(Vec<GroupSummary>, String)> {
        let call = CallSpec::new("list groups", Repeat::Read);
        let page = self.client.call_any(call, |node| {
            let request = ListGroupsRequest {
                page_size,
                page_token: page_token.to_owned(),
                ..Default::default()
            };
            async move { node.group().list_groups(request).await }
        });
        let page = page.await?;
        Ok((page.groups, page.next_page_token))
    }

    /// Describes a group: members, epochs, and for each partition why no records arrive.
    ///
    /// With `include_history`, also the last changes of each committed offset. A large group takes
    /// several calls; its state and epochs are those of the first one.
    ///
    /// # Errors
    /// `GROUP_NOT_FOUND`.
    pub async fn describe_group(
        &self,
        group: &str,
        include_history: bool,
    ) -> Result<DescribeGroupResponse> {
        let pages = all_pages(|page_token| async move {
            let page = self.describe_group_page(group, include_history, 0, &page_token);
            let mut page = page.await?;
            let next = std::mem::take(&mut page.next_page_token);
            Ok((vec![page], next))
        });
        let mut pages = pages.await?.into_iter();
        let mut whole = pages.next().unwrap_or_default();
        for page in pages {
            whole.members.extend(page.members);
            whole.partitions.extend(page.partitions);
        }
        Ok(whole)
    }

    /// Describes a group, with a page of its members and partitions.
    ///
    /// The empty token begins, and `next_page_token` is empty at the end. The service may return
    /// fewer than `page_size` rows; 0 lets it choose.
    ///
    /// # Errors
    /// `GROUP_NOT_FOUND`; `INVALID_ARGUMENT` if `page_size` is negative or the token is not one of
    /// a response.
    pub async fn describe_group_page(
        &self,
        group: &str,
        include_history: bool,
        page_size: i32,
        page_token: &str,
    ) -> Result<DescribeGroupResponse> {
        let call = CallSpec::new("describe group", Repeat::Read);
        let response = self.client.call_coordinator(group, call, |node| {
            let request = DescribeGroupRequest {
                group: group.to_owned(),
                include_history,
                page_size,
                page_token: page_token.to_owned(),
            };
            async move { node.group().describe_group(request).await }
        });
        response.await
    }

    /// Returns the committed offsets of a group with their lag. An empty list selects all topics.
    ///
    /// Many offsets take several calls.
    ///
    /// # Errors
    /// `GROUP_NOT_FOUND`.
    pub async fn group_offsets(&self, group: &str, topics: &[&str]) -> Result<Vec<OffsetAndLag>> {
        let topics: Vec<_> = topics.iter().map(|&topic| topic.to_owned()).collect();
        let topics = &topics;
        all_pages(|page_token| async move {
            let call = CallSpec::new("get group offsets", Repeat::Read);
            let page = self.client.call_coordinator(group, call, |node| {
                let request = GetOffsetsRequest {
                    group: group.to_owned(),
                    topics: topics.clone(),
                    page_token: page_token.clone(),
                    ..GetOffsetsRequest::default()
                };
                async move { node.group().get_offsets(request).await }
            });
            let page = page.await?;
            Ok((page.offsets, page.next_page_token))
        })
        .await
    }

    /// Returns the state of a group's offsets for [`Admin::commit_group_offsets_after`], also of a
    /// group that does not exist. `None` until every node of the cluster orders commits.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn group_offsets_epoch(&self, group: &str) -> Result<Option<u64>> {
        let call = CallSpec::new("get group offsets", Repeat::Read);
        let page = self.client.call_coordinator(group, call, |node| {
            let request = GetOffsetsRequest {
                group: group.to_owned(),
                page_size: 1,
                allow_missing: true,
                ..GetOffsetsRequest::default()
            };
            async move { node.group().get_offsets(request).await }
        });
        match page.await {
            // A node of an earlier version.
            Err(error) if error.is(ErrorReason::GroupNotFound) => Ok(None),
            page => Ok(page?.offsets_epoch),
        }
    }

    /// Commits offsets of a group without members, all or none. Creates the group.
    ///
    /// Follows the group's state at the call. A late copy of an attempt changes nothing after a
    /// seek, a deletion or another commit. [`Admin::commit_group_offsets_after`] also protects what
    /// the caller has read before the call.
    ///
    /// # Errors
    /// `GROUP_NOT_EMPTY` if the group has members, which `member_ids` of the error names;
    /// `OFFSET_OUT_OF_RANGE` beyond the end of a partition; `STALE_COMMIT` if the offsets were
    /// changed during the call; `TOPIC_NOT_FOUND`, `PARTITION_NOT_FOUND`, `TOPIC_RECREATED`,
    /// `GROUP_LIMIT_REACHED`.
    pub async fn commit_group_offsets(
        &self,
        group: &str,
        offsets: &[CommittedOffset],
    ) -> Result<()> {
        let epoch = self.group_offsets_epoch(group).await?;
        self.commit_group_offsets_after(group, offsets, epoch).await.map(|_| ())
    }

    /// Like [`Admin::commit_group_offsets`], for offsets that follow a known state. Returns the
    /// state for the next commit.
    ///
    /// # Errors
    /// As [`Admin::commit_group_offsets`]; `STALE_COMMIT` if these offsets were changed since that
    /// state, or the group was sought, deleted or given to members.
    pub async fn commit_group_offsets_after(
        &self,
        group: &str,
        offsets: &[CommittedOffset],
        offsets_epoch: Option<u64>,
    ) -> Result<Option<u64>> {
        let call = CallSpec::new("commit group offsets", Repeat::Always);
        let response = self.client.call_coordinator(group, call, |node| {
            let request = CommitOffsetsRequest {
                group: group.to_owned(),
                offsets: offsets.to_vec(),
                offsets_epoch,
                ..CommitOffsetsRequest::default()
            };
            async move { node.group().commit_offsets(request).await }
        });
        Ok(response.await?.offsets_epoch)
    }

    /// Forgets a group's offsets in a topic, which may be deleted. Returns what was forgotten.
    ///
    /// Id 0 of the topic means every topic of the name that the group remembers.
    ///
    /// # Errors
    /// `GROUP_NOT_FOUND`; `GROUP_NOT_EMPTY` while members subscribe to the topic or have partitions
    /// of it; `UNIMPLEMENTED` until every node of the cluster is upgraded.
    pub async fn forget_group_topic(
        &self,
        group: &str,
        topic: impl Into<TopicRef<'_>>,
        validate_only: bool,
    ) -> Result<Vec<CommittedOffset>> {
        let TopicRef { name, id } = topic.into();
        let forget = |offsets_epoch| async move {
            let call = CallSpec::new("forget group topic", Repeat::Always);
            let response = self.client.call_coordinator(group, call, |node| {
                let request = ForgetGroupTopicRequest {
                    group: group.to_owned(),
                    topic: name.to_owned(),
                    topic_id: id,
                    validate_only,
                    offsets_epoch,
                };
                async move { node.group().forget_group_topic(request).await }
            });
            response.await.map(|response| response.offsets)
        };
        self.after_current_state(group, forget).await
    }

    /// Sends a change of a group that follows its state at the call, so that a late copy of an
    /// attempt changes nothing after a later change. Repeats a change that was overtaken.
    async fn after_current_state<T, F>(
        &self,
        group: &str,
        send: impl Fn(Option<u64>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let mut repeats = 0;
        loop {
            let epoch = self.group_offsets_epoch(group).await?;
            match send(epoch).await {
                Err(error)
                    if error.is(ErrorReason::StaleCommit)
                        && !error.may_have_applied
                        && repeats < OVERTAKEN_MAX =>
                {
                    repeats += 1;
                }
                result => return result,
            }
        }
    }

    /// Sets offsets of a group without members, all or none. Creates the group.
    ///
    /// Not repeated if the outcome of an attempt is unknown: a second seek would make the first one
    /// the offset that [`Admin::undo_group_seek`] restores. Such an attempt has no effect if it
    /// arrives after a later seek or deletion.
    ///
    /// # Errors
    /// As [`Admin::commit_group_offsets`]; `OFFSET_OUT_OF_RANGE` if an offset is neither readable
    /// nor the high watermark.
    pub async fn seek_group(
        &self,
        group: &str,
        offsets: &[CommittedOffset],
        options: &SeekOptions,
    ) -> Result<Vec<SoughtOffset>> {
        let request =
            SeekGroupRequest { offsets: offsets.to_vec(), ..seek_request(group, options) };
        self.send_seek(request).await
    }

    /// Takes back the last seek of each partition in `topics`; an empty list selects all topics.
    ///
    /// Taking back twice restores the seek. Metadata stays as it is. Returns the changed
    /// partitions.
    ///
    /// # Errors
    /// `GROUP_NOT_FOUND`; `GROUP_NOT_EMPTY` as for [`Admin::seek_group`]; `OFFSET_OUT_OF_RANGE` if
    /// an earlier offset is no longer readable.
    pub async fn undo_group_seek(
        &self,
        group: &str,
        topics: &[&str],
        options: &SeekOptions,
    ) -> Result<Vec<SoughtOffset>> {
        let request = SeekGroupRequest {
            undo: true,
            topics: topics.iter().map(|&topic| topic.to_owned()).collect(),
            ..seek_request(group, options)
        };
        self.send_seek(request).await
    }

    /// Sets the offsets of a group without members to a position in partitions of a topic.
    ///
    /// An empty list selects all partitions. More than 1,000 partitions take several calls; if one
    /// fails, the earlier ones stand.
    ///
    /// # Errors
    /// As [`Admin::seek_group`].
    pub async fn reset_group(
        &self,
        group: &str,
        topic: impl Into<TopicRef<'_>>,
        partitions: &[u32],
        position: &Position,
        options: &SeekOptions,
    ) -> Result<Vec<SoughtOffset>> {
        let TopicRef { name, id } = topic.into();
        let topic = match id {
            0 => TopicRef::with_id(name, self.topic(name).await?.topic_id),
            _ => TopicRef::with_id(name, id),
        };
        let resolved = self.resolve_offsets(topic, partitions, position).await?;
        let offset = |partition, offset| CommittedOffset {
            partition: Some(TopicPartition {
                topic: name.to_owned(),
                partition,
                topic_id: topic.id,
            }),
            offset,
            metadata: String::new(),
        };
        let offsets: Vec<_> =
            resolved.iter().map(|found| offset(found.partition, found.offset)).collect();
        let mut sought = Vec::new();
        for part in offsets.chunks(SEEK_PARTITIONS) {
            sought.extend(self.seek_group(group, part, options).await?);
        }
        Ok(sought)
    }

    async fn send_seek(&self, request: SeekGroupRequest) -> Result<Vec<SoughtOffset>> {
        let repeat = if request.validate_only { Repeat::Read } else { Repeat::UnlessApplied };
        let request = &request;
        let seek = |offsets_epoch| async move {
            let call = CallSpec::new("seek group", repeat);
            let response = self.client.call_coordinator(&request.group, call, |node| {
                let request = SeekGroupRequest { offsets_epoch, ..request.clone() };
                async move { node.group().seek_group(request).await }
            });
            response.await.map(|response| response.offsets)
        };
        self.after_current_state(&request.group, seek).await
    }

    /// Deletes a group without members, with its offsets.
    ///
    /// # Errors
    /// `GROUP_NOT_FOUND`; `GROUP_NOT_EMPTY` if the group has members.
    pub async fn delete_group(&self, group: &str) -> Result<()> {
        let delete = |offsets_epoch| async move {
            let call = CallSpec::new("delete group", Repeat::Always);
            let response = self.client.call_coordinator(group, call, |node| {
                let request = DeleteGroupRequest { group: group.to_owned(), offsets_epoch };
                async move { node.group().delete_group(request).await }
            });
            response.await
        };
        match self.after_current_state(group, delete).await {
            // An attempt without a response has deleted it.
            Err(error) if error.may_have_applied && error.is(ErrorReason::GroupNotFound) => Ok(()),
            result => result.map(|_| ()),
        }
    }
}

/// Returns a request without its goal.
fn seek_request(group: &str, options: &SeekOptions) -> SeekGroupRequest {
    let SeekOptions { by, validate_only } = options.clone();
    SeekGroupRequest { group: group.to_owned(), by, validate_only, ..SeekGroupRequest::default() }
}
