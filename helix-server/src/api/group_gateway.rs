//! ReportGatewayMembers: members of other protocols, which a gateway assigns.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use helix_proto::log::v1::{GatewayMember, GroupState, ReportGatewayMembersRequest};
use tokio::time::Instant;

use super::group::{GroupHandler, check_group};
use super::time;
use crate::error::{Error, Result};
use crate::limits::{GATEWAY_REPORT_MAX, GATEWAY_REPORT_MIN, GATEWAY_TEXT_BYTES_MAX};
use crate::log::{MEMBERS_PER_GROUP_MAX, PARTITIONS_PER_GROUP_MAX, Refusal};
use crate::shard::{GatewayGroup, GatewayGroupState, ReportedMember, Shard};

impl GroupHandler {
    pub(super) async fn report_gateway(&self, request: ReportGatewayMembersRequest) -> Result<()> {
        check_group(&request.group)?;
        check_text("gateway", &request.gateway, 1)?;
        let group = request.group.as_str();
        let Some(valid_for) = request.valid_for else {
            let shard = match self.node.find_group(group).await {
                Err(Error::GroupNotFound { .. }) => return Ok(()),
                found => found?,
            };
            ready(&shard).await?;
            shard.gateway_groups().end(group, &request.gateway);
            return Ok(());
        };
        let report = GatewayGroup {
            state: state(request.state())?,
            valid_for: valid_time(valid_for)?,
            members: self.members(request.members)?,
            reported_at: Instant::now(),
            gateway: request.gateway,
        };
        let shard = self.node.find_or_place_group(group).await?;
        ready(&shard).await?;
        let no_members = |groups: &crate::log::GroupTable| match groups.get(group) {
            Some(group) => group.check_no_members(),
            None => Ok(()),
        };
        shard.read_groups(no_members).map_err(Refusal::from)?;
        shard.gateway_groups().put(group, report).map_err(Refusal::from)?;
        Ok(())
    }

    fn members(&self, members: Vec<GatewayMember>) -> Result<Vec<ReportedMember>> {
        if members.len() > MEMBERS_PER_GROUP_MAX {
            let what = format!("must be at most {MEMBERS_PER_GROUP_MAX}, not {}", members.len());
            return Err(Error::InvalidArgument { field: "members", what });
        }
        let count: usize = members.iter().map(|member| member.partitions.len()).sum();
        if count > PARTITIONS_PER_GROUP_MAX {
            let what = format!("must be at most {PARTITIONS_PER_GROUP_MAX} for all members");
            return Err(Error::InvalidArgument { field: "members.partitions", what });
        }
        let mut seen = BTreeSet::new();
        let mut reported = Vec::with_capacity(members.len());
        for member in members {
            check_text("members.member_id", &member.member_id, 1)?;
            check_text("members.static_name", &member.static_name, 0)?;
            check_text("members.client_name", &member.client_name, 0)?;
            let id: Arc<str> = member.member_id.into();
            if !seen.insert(id.clone()) {
                let what = format!("member {id:?} is named twice");
                return Err(Error::InvalidArgument { field: "members", what });
            }
            reported.push(ReportedMember {
                id,
                static_name: member.static_name,
                client_name: member.client_name,
                partitions: self.keys("members.partitions", &member.partitions)?,
            });
        }
        reported.sort_unstable_by(|a, b| a.id.cmp(&b.id));
        Ok(reported)
    }
}

/// Checks that no gateway has members in a group, as far as its coordinator knows.
///
/// # Errors
/// [`Error::GatewayMembers`].
pub(super) fn check_no_gateway(shard: &Shard, group: &str) -> Result<()> {
    // Reports that a former leader received are outdated.
    let Some(report) = shard.gateway_groups().get(group).filter(|_| shard.is_leader()) else {
        return Ok(());
    };
    let first = report.members.iter().take(10).map(|member| member.id.to_string()).collect();
    Err(Error::GatewayMembers {
        gateway: report.gateway.clone(),
        count: report.members.len(),
        first,
    })
}

async fn ready(shard: &Shard) -> Result<()> {
    match shard.ready().await {
        Ok(()) => Ok(()),
        Err(error) => Err(shard.redirect(error).await),
    }
}

fn state(state: GroupState) -> Result<GatewayGroupState> {
    match state {
        GroupState::Assigning => Ok(GatewayGroupState::Assigning),
        GroupState::Reconciling => Ok(GatewayGroupState::Reconciling),
        GroupState::Stable => Ok(GatewayGroupState::Stable),
        GroupState::Unspecified | GroupState::Empty => {
            let what = "must be ASSIGNING, RECONCILING or STABLE".to_owned();
            Err(Error::InvalidArgument { field: "state", what })
        }
    }
}

pub(super) fn wire_state(state: GatewayGroupState) -> GroupState {
    match state {
        GatewayGroupState::Assigning => GroupState::Assigning,
        GatewayGroupState::Reconciling => GroupState::Reconciling,
        GatewayGroupState::Stable => GroupState::Stable,
    }
}

fn valid_time(valid_for: prost_types::Duration) -> Result<Duration> {
    let valid_for = time::from_duration("valid_for", valid_for)?;
    if (GATEWAY_REPORT_MIN..=GATEWAY_REPORT_MAX).contains(&valid_for) {
        return Ok(valid_for);
    }
    let what =
        format!("must be {GATEWAY_REPORT_MIN:?} to {GATEWAY_REPORT_MAX:?}, not {valid_for:?}");
    Err(Error::InvalidArgument { field: "valid_for", what })
}

fn check_text(field: &'static str, text: &str, bytes_min: usize) -> Result<()> {
    if (bytes_min..=GATEWAY_TEXT_BYTES_MAX).contains(&text.len()) {
        return Ok(());
    }
    let length = text.len();
    let what = format!("must have {bytes_min} to {GATEWAY_TEXT_BYTES_MAX} bytes, not {length}");
    Err(Error::InvalidArgument { field, what })
}
