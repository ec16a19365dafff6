//! Groups whose members a gateway reports: they are shown, and native members are refused.

use helix_proto::log::v1::{
    CommitOffsetsRequest, DeleteGroupRequest, DeliveryStatus, DescribeGroupRequest,
    DescribeGroupResponse, ErrorReason as R, GatewayMember, GroupState, GroupSummary,
    ListGroupsRequest, ReportGatewayMembersRequest,
};
use tonic::Status;

use crate::groups::{TestMember, commit_at, groups, leave, partition};
use crate::support::{TestServer, detail, on_both, reason};

/// Group of `TestMember`.
const GROUP: &str = "readers";

fn report(gateway: &str, members: &[(&str, &[u32])]) -> ReportGatewayMembersRequest {
    let member = |(id, numbers): &(&str, &[u32])| GatewayMember {
        member_id: (*id).to_owned(),
        client_name: "app /127.0.0.1".to_owned(),
        partitions: numbers.iter().map(|number| partition(*number)).collect(),
        ..GatewayMember::default()
    };
    ReportGatewayMembersRequest {
        group: GROUP.to_owned(),
        gateway: gateway.to_owned(),
        state: GroupState::Stable.into(),
        members: members.iter().map(member).collect(),
        valid_for: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
    }
}

async fn send(server: &TestServer, report: ReportGatewayMembersRequest) -> Result<(), Status> {
    groups(server).report_gateway_members(report).await.map(drop)
}

async fn end(server: &TestServer, gateway: &str) {
    let ended = ReportGatewayMembersRequest { valid_for: None, ..report(gateway, &[]) };
    send(server, ended).await.unwrap();
}

async fn describe(server: &TestServer) -> Result<DescribeGroupResponse, Status> {
    let request =
        DescribeGroupRequest { group: GROUP.to_owned(), ..DescribeGroupRequest::default() };
    Ok(groups(server).describe_group(request).await?.into_inner())
}

async fn listed(server: &TestServer) -> Vec<GroupSummary> {
    let request = ListGroupsRequest::default();
    groups(server).list_groups(request).await.unwrap().into_inner().groups
}

#[tokio::test]
async fn reported_members_are_shown_with_their_partitions() {
    on_both(async |server: TestServer| {
        send(&server, report("gw:1", &[("k2", &[1]), ("k1", &[0, 3])])).await.unwrap();
        let found = describe(&server).await.unwrap();
        assert_eq!((found.gateway.as_str(), found.state()), ("gw:1", GroupState::Stable));
        let members: Vec<_> =
            found.members.iter().map(|it| (it.member_id.as_str(), it.owned.len())).collect();
        assert_eq!(members, [("k1", 2), ("k2", 1)]);
        assert_eq!(found.members[0].client_name, "app /127.0.0.1");
        let owners: Vec<_> = found
            .partitions
            .iter()
            .map(|it| (it.partition.as_ref().unwrap().partition, it.owner.as_str()))
            .collect();
        assert_eq!(owners, [(0, "k1"), (1, "k2"), (3, "k1")]);
        assert!(found.partitions.iter().all(|it| it.status() == DeliveryStatus::NoNewRecords));
        let group = &listed(&server).await[0];
        assert_eq!((group.member_count, group.gateway.as_str()), (2, "gw:1"));
        // Another gateway takes over, and the first one ends nothing.
        send(&server, report("gw:2", &[("k1", &[])])).await.unwrap();
        end(&server, "gw:1").await;
        assert_eq!(describe(&server).await.unwrap().gateway, "gw:2");
        end(&server, "gw:2").await;
        assert_eq!(reason(&describe(&server).await.unwrap_err()), R::GroupNotFound);
        assert_eq!(listed(&server).await, []);
    })
    .await;
}

#[tokio::test]
async fn native_members_and_those_of_a_gateway_exclude_each_other() {
    on_both(async |server: TestServer| {
        send(&server, report("gw:1", &[("k1", &[0])])).await.unwrap();
        let mut native = TestMember::new("m1", &["default"]);
        let refused = native.beat(&server).await.unwrap_err();
        assert_eq!(reason(&refused), R::GroupNotEmpty);
        assert_eq!(detail(&refused).member_ids, ["k1"]);
        assert!(refused.message().contains("gateway \"gw:1\""), "{refused:?}");
        // Commits of the gateway have no member.
        let commit = CommitOffsetsRequest {
            group: GROUP.to_owned(),
            offsets: vec![commit_at(0, 0)],
            ..CommitOffsetsRequest::default()
        };
        groups(&server).commit_offsets(commit).await.unwrap();
        let delete = DeleteGroupRequest { group: GROUP.to_owned(), offsets_epoch: None };
        let refused = groups(&server).delete_group(delete.clone()).await.unwrap_err();
        assert_eq!(reason(&refused), R::GroupNotEmpty);
        end(&server, "gw:1").await;
        native.beat(&server).await.unwrap();
        let refused = send(&server, report("gw:1", &[("k1", &[])])).await.unwrap_err();
        assert_eq!(
            (reason(&refused), &*detail(&refused).member_ids),
            (R::GroupNotEmpty, &["m1".to_owned()][..])
        );
        let found = describe(&server).await.unwrap();
        assert_eq!((found.gateway.as_str(), found.members.len()), ("", 1));
        leave(&server, "m1").await;
        groups(&server).delete_group(delete).await.unwrap();
    })
    .await;
}
