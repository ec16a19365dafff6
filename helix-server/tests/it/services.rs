//! The services around Helix's own: health and reflection. And Groups, which only answer.

use helix_proto::log::v1::group_service_client::GroupServiceClient;
use helix_proto::log::v1::{ErrorReason, GetOffsetsRequest, HeartbeatRequest, ListGroupsRequest};
use tokio_stream::StreamExt;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::{v1, v1alpha};

use crate::support::{TestServer, reason, soon};

#[tokio::test]
async fn health_is_serving() {
    let server = TestServer::in_memory().await;
    let mut health = HealthClient::new(server.channel.clone());
    let answer = health.check(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!(answer.status(), ServingStatus::Serving);
}

#[tokio::test]
async fn reflection_lists_the_services_in_both_versions() {
    let server = TestServer::in_memory().await;
    let expected = ["Produce", "Consume", "Group", "Topic", "Cluster"]
        .map(|service| format!("helix.log.v1.{service}Service"));

    let mut client =
        v1::server_reflection_client::ServerReflectionClient::new(server.channel.clone());
    let list = v1::server_reflection_request::MessageRequest::ListServices(String::new());
    let request = v1::ServerReflectionRequest { host: String::new(), message_request: Some(list) };
    let answers = client.server_reflection_info(tokio_stream::once(request)).await.unwrap();
    let answer = soon(answers.into_inner().next()).await.unwrap().unwrap();
    let Some(v1::server_reflection_response::MessageResponse::ListServicesResponse(listed)) =
        answer.message_response
    else {
        panic!("{answer:?}");
    };
    let names: Vec<String> = listed.service.into_iter().map(|service| service.name).collect();
    for service in &expected {
        assert!(names.contains(service), "{names:?}");
    }

    let mut client =
        v1alpha::server_reflection_client::ServerReflectionClient::new(server.channel.clone());
    let symbol = v1alpha::server_reflection_request::MessageRequest::FileContainingSymbol(
        "helix.log.v1.StoredBatch".to_owned(),
    );
    let request =
        v1alpha::ServerReflectionRequest { host: String::new(), message_request: Some(symbol) };
    let answers = client.server_reflection_info(tokio_stream::once(request)).await.unwrap();
    let answer = soon(answers.into_inner().next()).await.unwrap().unwrap();
    assert!(matches!(
        answer.message_response,
        Some(v1alpha::server_reflection_response::MessageResponse::FileDescriptorResponse(_))
    ));
}

#[tokio::test]
async fn groups_answer_that_they_are_not_there_yet() {
    let server = TestServer::in_memory().await;
    let mut groups = GroupServiceClient::new(server.channel.clone());
    let heartbeat = groups.heartbeat(HeartbeatRequest::default()).await.unwrap_err();
    assert_eq!(reason(&heartbeat), ErrorReason::Unimplemented);
    let offsets = groups.get_offsets(GetOffsetsRequest::default()).await.unwrap_err();
    assert_eq!(reason(&offsets), ErrorReason::Unimplemented);
    let list = groups.list_groups(ListGroupsRequest::default()).await.unwrap_err();
    assert_eq!(reason(&list), ErrorReason::Unimplemented);
}
