//! Cases of ReportGatewayMembers. None leaves a report.

use helix_proto::log::v1::{
    ErrorReason as R, GatewayMember, GroupState, ReportGatewayMembersRequest, TopicPartition,
};
use prost_types::Duration;

use super::Expected::{Fine, Refused};
use super::{FieldCase, InvalidCall};

fn report() -> ReportGatewayMembersRequest {
    ReportGatewayMembersRequest {
        group: "reported".to_owned(),
        gateway: "gw:9292".to_owned(),
        state: GroupState::Stable.into(),
        members: vec![member("k1")],
        valid_for: Some(Duration { seconds: 10, nanos: 0 }),
    }
}

fn member(id: &str) -> GatewayMember {
    GatewayMember { member_id: id.to_owned(), ..GatewayMember::default() }
}

fn with_member(member: GatewayMember) -> InvalidCall {
    call(ReportGatewayMembersRequest { members: vec![member], ..report() })
}

fn call(request: ReportGatewayMembersRequest) -> InvalidCall {
    InvalidCall::ReportGatewayMembers(request)
}

/// Returns the cases; `taken` is a group with a native member.
pub(super) fn all(taken: &str) -> Vec<FieldCase> {
    let long = "x".repeat(129);
    let with_gateway = |gateway: &str| {
        call(ReportGatewayMembersRequest { gateway: gateway.to_owned(), ..report() })
    };
    let with_group =
        |group: &str| call(ReportGatewayMembersRequest { group: group.to_owned(), ..report() });
    let with_state = |state: i32| call(ReportGatewayMembersRequest { state, ..report() });
    let with_time = |seconds: i64| {
        let valid_for = Some(Duration { seconds, nanos: 0 });
        call(ReportGatewayMembersRequest { valid_for, ..report() })
    };
    let with_members = |members| call(ReportGatewayMembersRequest { members, ..report() });
    let partition = TopicPartition { topic: "default".to_owned(), partition: 0, topic_id: 0 };
    let many =
        (0..10_001).map(|partition| TopicPartition { partition, ..TopicPartition::default() });
    let invalid = |what| Refused(R::InvalidArgument, what);
    vec![
        (&["ReportGatewayMembersRequest.group"], with_group(""), invalid("group")),
        (
            &["ReportGatewayMembersRequest.group"],
            with_group(taken),
            Refused(R::GroupNotEmpty, "\"m1\""),
        ),
        (&["ReportGatewayMembersRequest.gateway"], with_gateway(""), invalid("not 0")),
        (&["ReportGatewayMembersRequest.gateway"], with_gateway(&long), invalid("not 129")),
        (&["ReportGatewayMembersRequest.state"], with_state(1), invalid("STABLE")),
        (&["ReportGatewayMembersRequest.state"], with_state(77), invalid("STABLE")),
        (&["ReportGatewayMembersRequest.valid_for"], with_time(0), invalid("1s to 60s")),
        (&["ReportGatewayMembersRequest.valid_for"], with_time(61), invalid("1s to 60s")),
        (&["ReportGatewayMembersRequest.valid_for"], with_time(-1), invalid("valid_for")),
        (
            &["ReportGatewayMembersRequest.valid_for"],
            call(ReportGatewayMembersRequest { valid_for: None, ..report() }),
            // No report of this gateway ends.
            Fine,
        ),
        (
            &["ReportGatewayMembersRequest.members"],
            with_members(vec![member("k1"), member("k1")]),
            invalid("named twice"),
        ),
        (
            &["ReportGatewayMembersRequest.members"],
            with_members((0..1_001).map(|id| member(&id.to_string())).collect()),
            invalid("at most 1000"),
        ),
        (&["GatewayMember.member_id"], with_member(member("")), invalid("member_id")),
        (&["GatewayMember.member_id"], with_member(member(&long)), invalid("member_id")),
        (
            &["GatewayMember.static_name"],
            with_member(GatewayMember { static_name: long.clone(), ..member("k1") }),
            invalid("static_name"),
        ),
        (
            &["GatewayMember.client_name"],
            with_member(GatewayMember { client_name: long, ..member("k1") }),
            invalid("client_name"),
        ),
        (
            &["GatewayMember.partitions"],
            with_member(GatewayMember {
                partitions: vec![partition.clone(), partition],
                ..member("k1")
            }),
            invalid("named twice"),
        ),
        (
            &["GatewayMember.partitions"],
            with_member(GatewayMember { partitions: many.collect(), ..member("k1") }),
            invalid("at most 10000"),
        ),
    ]
}
