//! ListGroups: the groups of the cluster, with the sums of their lag.

use std::collections::BTreeMap;
use std::sync::Arc;

use helix_proto::log::v1::{GroupSummary, ListGroupsRequest, ListGroupsResponse};

use super::authorize::Visibility;
use super::group::GroupHandler;
use super::group_describe;
use super::group_lag::{learn_ends, uncommitted_lag};
use super::page::{cut_page, page_size};
use crate::error::Result;
use crate::limits::{GROUPS_PER_PAGE_DEFAULT, GROUPS_PER_PAGE_MAX};
use crate::log::{ConsumerGroup, OffsetLag};
use crate::shard::{GatewayGroup, Shard};

/// Source of the state of a listed group.
enum ListedFrom {
    Here(Arc<Shard>),
    Elsewhere(Arc<ConsumerGroup>),
}

impl GroupHandler {
    pub(super) async fn list(
        &self,
        request: ListGroupsRequest,
        visible: &Visibility,
    ) -> Result<ListGroupsResponse> {
        let page_size = page_size(request.page_size, GROUPS_PER_PAGE_DEFAULT, GROUPS_PER_PAGE_MAX)?;
        let (after, prefix) = (request.page_token.as_str(), request.prefix.as_str());
        let topic = request.topic.as_str();
        // An empty name selects the groups of all topics.
        let reads = |group: &ConsumerGroup| {
            let is_it = |name: &str| name == topic && visible.sees_topic(name);
            topic.is_empty() || group.topic_names().any(|(_, name)| is_it(name))
        };
        let mut found: BTreeMap<Arc<str>, ListedFrom> = BTreeMap::new();
        for shard in self.node.shards() {
            let names: Vec<Arc<str>> = shard.read_groups(|groups| {
                // Sorted by name.
                let found = groups.after(after).skip_while(|(name, _)| &***name < prefix);
                let found = found.take_while(|(name, _)| name.starts_with(prefix));
                let found = found.filter(|(name, _)| visible.sees_group(name));
                let found = found.filter(|(_, group)| reads(group));
                found.take(page_size + 1).map(|(name, _)| name.clone()).collect()
            });
            let sees = |name: &str| name.starts_with(prefix) && visible.sees_group(name);
            // Groups that a gateway has reported, and that have no offsets yet, read no topic.
            let reported = match topic.is_empty() {
                true => shard.gateway_groups().names_after(after, page_size + 1, sees),
                false => Vec::new(),
            };
            let names = names.into_iter().chain(reported);
            found.extend(names.map(|name| (name, ListedFrom::Here(shard.clone()))));
        }
        let lists = |name: &str, group: &ConsumerGroup| visible.sees_group(name) && reads(group);
        for (name, group) in self.remote_groups(after, prefix, page_size + 1, lists).await? {
            found.insert(name.into(), ListedFrom::Elsewhere(Arc::new(group)));
        }
        let mut found: Vec<_> = found.into_iter().collect();
        let next_page_token = cut_page(&mut found, page_size, |(name, _)| name.to_string());
        let mut groups = Vec::new();
        for (name, from) in found {
            let (known, of_gateway) = match from {
                ListedFrom::Here(shard) => (
                    shard.read_groups(|groups| groups.snapshot(&name)),
                    shard.gateway_groups().get(&name),
                ),
                ListedFrom::Elsewhere(group) => (Some(group), None),
            };
            let Some(group) = known.or_else(|| of_gateway.as_ref().map(|_| Arc::default())) else {
                continue;
            };
            let of_gateway = of_gateway.filter(|_| group.members().len() == 0);
            let in_topic =
                |name: &str| visible.sees_topic(name) && (topic.is_empty() || name == topic);
            learn_ends(&self.node, &group, in_topic).await;
            let uncommitted_lag = uncommitted_lag(&self.node, &group, in_topic);
            let summary = self.summary(&name, &group, of_gateway.as_deref(), in_topic);
            groups.push(GroupSummary { uncommitted_lag, ..summary });
        }
        Ok(ListGroupsResponse { groups, next_page_token })
    }

    /// Returns groups after a name that `lists` accepts, in shards without a replica here.
    ///
    /// Returns at least `count` groups with this prefix, if there are that many.
    async fn remote_groups(
        &self,
        after: &str,
        prefix: &str,
        count: usize,
        lists: impl Fn(&str, &ConsumerGroup) -> bool,
    ) -> Result<Vec<(String, ConsumerGroup)>> {
        let mut after = after.to_owned();
        let mut listed: Vec<(String, ConsumerGroup)> = Vec::new();
        loop {
            let pages = self.node.remote_groups(&after, count).await?;
            // A shard may have more groups than its page, so only names up to the end of the
            // shortest page are complete.
            let ends = pages.iter().filter_map(|page| page.last()).map(|(name, _)| name);
            let Some(end) = ends.min().cloned() else { return Ok(listed) };
            after = end;
            let is_new = pages.into_iter().flatten().filter(|(name, _)| *name <= after);
            listed.extend(
                is_new.filter(|(name, group)| name.starts_with(prefix) && lists(name, group)),
            );
            let is_past = after.as_str() > prefix && !after.starts_with(prefix);
            if is_past || listed.len() >= count {
                return Ok(listed);
            }
        }
    }

    fn summary(
        &self,
        name: &str,
        group: &ConsumerGroup,
        of_gateway: Option<&GatewayGroup>,
        counts: impl Fn(&str) -> bool,
    ) -> GroupSummary {
        let member_count = of_gateway.map_or(group.members().len(), |it| it.members.len());
        let mut summary = GroupSummary {
            group: name.to_owned(),
            member_count: u32::try_from(member_count).unwrap_or(u32::MAX),
            state: group_describe::state_of(group, of_gateway).into(),
            gateway: of_gateway.map(|it| it.gateway.clone()).unwrap_or_default(),
            ..GroupSummary::default()
        };
        // Topic of the last row, as rows are sorted by topic: the id, and whether no member reads
        // it.
        let mut known: Option<(u64, Option<bool>)> = None;
        for (key, row) in group.offsets() {
            let Some(offset) = row.offset() else { continue };
            if known.is_none_or(|(id, _)| id != key.topic_id) {
                let topic = self.node.topic_of(key.topic_id);
                let topic = topic.filter(|topic| counts(&topic.name));
                known = Some((key.topic_id, topic.map(|it| group.has_left(&it.name))));
            }
            let Some((_, Some(is_unread))) = known else { continue };
            match self.node.known_watermarks(key, offset) {
                None => summary.unknown_lags += 1,
                Some(bounds) => {
                    let OffsetLag { lag, lost } = OffsetLag::new(offset, bounds);
                    if is_unread {
                        summary.unsubscribed_lag += lag;
                    } else {
                        summary.total_lag += lag;
                        summary.total_lost += lost;
                    }
                }
            }
        }
        summary
    }
}
