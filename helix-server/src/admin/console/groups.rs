//! The list of groups with their lag: one page of the names with a prefix. One call.

use askama::Template;
use helix_proto::log::v1::{GroupState, GroupSummary, ListGroupsRequest};
use helix_proto::units;
use hyper::{Response, StatusCode};

use super::PageRequest;
use super::caller;
use super::form::encode;
use super::page::{AdminBody, PageFailure, PageFrame, ROWS_PER_PAGE, html, shown};

#[derive(Template)]
#[template(path = "groups.html")]
struct GroupsPage {
    frame: PageFrame,
    prefix: String,
    rows: Vec<ListedGroupRow>,
    next: String,
    is_first: bool,
}

/// A group in a list.
pub(super) struct ListedGroupRow {
    pub(super) name: String,
    pub(super) state: &'static str,
    pub(super) members: u32,
    pub(super) lag: String,
    pub(super) has_lag: bool,
    pub(super) note: String,
}

/// Shows the page.
pub(super) async fn show(page: &PageRequest) -> Result<Response<AdminBody>, PageFailure> {
    let prefix = page.query.get("prefix");
    let after = page.query.get("after");
    let request = page.caller.request(ListGroupsRequest {
        page_size: ROWS_PER_PAGE,
        page_token: after.to_owned(),
        prefix: prefix.to_owned(),
        ..ListGroupsRequest::default()
    });
    let found = caller::groups(page.caller.local()).list_groups(request).await?.into_inner();
    let next = match found.next_page_token.as_str() {
        "" => String::new(),
        token => format!("/console/groups?prefix={}&after={}", encode(prefix), encode(token)),
    };
    let shown_page = GroupsPage {
        frame: PageFrame { refresh_seconds: 5, ..page.frame("Groups", "groups") },
        prefix: prefix.to_owned(),
        rows: found.groups.iter().map(group_row).collect(),
        next,
        is_first: after.is_empty(),
    };
    html(StatusCode::OK, &shown_page)
}

pub(super) fn group_row(group: &GroupSummary) -> ListedGroupRow {
    let lag = group.total_lag.saturating_add(group.uncommitted_lag);
    ListedGroupRow {
        name: shown(&group.group),
        state: state_name(group.state()),
        members: group.member_count,
        lag: units::count(lag),
        has_lag: lag > 0,
        note: note(group),
    }
}

/// Returns what the lag does not say.
fn note(group: &GroupSummary) -> String {
    let mut notes = Vec::new();
    if group.total_lost > 0 {
        let lost = units::counted(group.total_lost, "offset");
        notes.push(format!("{lost} deleted before it was read"));
    }
    if group.uncommitted_lag > 0 {
        notes.push(format!(
            "{} in partitions without a commit",
            units::count(group.uncommitted_lag)
        ));
    }
    if group.unsubscribed_lag > 0 {
        let unread = units::counted(group.unsubscribed_lag, "record");
        notes.push(format!("{unread} in topics that it no longer reads"));
    }
    if group.unknown_lags > 0 {
        notes.push(format!(
            "{} whose end this node does not know",
            units::counted(group.unknown_lags.into(), "partition")
        ));
    }
    notes.join("; ")
}

/// Returns the name of a state, in lower case.
pub(super) fn state_name(state: GroupState) -> &'static str {
    match state {
        GroupState::Empty => "empty",
        GroupState::Assigning => "assigning",
        GroupState::Reconciling => "reconciling",
        GroupState::Stable => "stable",
        GroupState::Unspecified => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_name_all_that_the_lag_leaves_out() {
        assert_eq!(note(&GroupSummary::default()), "");
        let group = GroupSummary {
            total_lost: 1,
            uncommitted_lag: 2,
            unsubscribed_lag: 3_000,
            unknown_lags: 4,
            ..GroupSummary::default()
        };
        assert_eq!(
            note(&group),
            "1 offset deleted before it was read; 2 in partitions without a commit; 3,000 records \
             in topics that it no longer reads; 4 partitions whose end this node does not know"
        );
        assert_eq!(group_row(&group).lag, "2");
    }
}
