//! The standard services health and reflection, and calls that do not exist.

use std::future::poll_fn;

use tokio_stream::StreamExt;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::Channel;
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::{v1, v1alpha};

use crate::support::{TestServer, soon};

/// Health of the whole node and of each implemented service.
pub(crate) async fn serving(channel: &Channel) -> [bool; 6] {
    let mut serving = [false; 6];
    let names = ["", "Cluster", "Consume", "Topic", "Produce", "Group"];
    for (name, serving) in names.into_iter().zip(&mut serving) {
        let service = full_name(name);
        let request = HealthCheckRequest { service };
        let answer = HealthClient::new(channel.clone()).check(request).await.unwrap().into_inner();
        *serving = answer.status() == ServingStatus::Serving;
    }
    serving
}

fn full_name(service: &str) -> String {
    if service.is_empty() { String::new() } else { format!("helix.log.v1.{service}Service") }
}

#[tokio::test]
async fn each_service_has_a_health_status() {
    let server = TestServer::in_memory().await;
    assert_eq!(serving(&server.channel).await, [true; 6]);
    let mut health = HealthClient::new(server.channel.clone());
    let long = "x".repeat(1_000_000);
    for service in ["Produce", "helix.log.v1.OtherService", &long] {
        let request = HealthCheckRequest { service: service.to_owned() };
        let refused = health.check(request.clone()).await.unwrap_err();
        assert_eq!(refused.code(), Code::NotFound);
        assert!(refused.message().contains("ask for helix.log.v1.ProduceService"), "{refused}");
        let mut watch = health.watch(request).await.unwrap().into_inner();
        let said = soon(watch.message()).await.unwrap().unwrap();
        assert_eq!(said.status(), ServingStatus::ServiceUnknown);
    }
}

#[tokio::test]
async fn health_watch_reports_shutdown() {
    let server = TestServer::in_memory().await;
    let mut health = HealthClient::new(server.channel.clone());
    let mut watches = Vec::new();
    for service in ["", "Produce"] {
        let request = HealthCheckRequest { service: full_name(service) };
        watches.push(health.watch(request).await.unwrap().into_inner());
    }
    for watch in &mut watches {
        let said = soon(watch.message()).await.unwrap().unwrap();
        assert_eq!(said.status(), ServingStatus::Serving);
    }
    let TestServer { running, .. } = server;
    let stop = tokio::spawn(running.shutdown());
    for watch in &mut watches {
        let said = soon(watch.message()).await.unwrap().unwrap();
        assert_eq!(said.status(), ServingStatus::NotServing);
        assert!(soon(watch.message()).await.unwrap().is_none(), "then it ends");
    }
    drop((health, watches));
    soon(stop).await.unwrap();
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
async fn unknown_method_is_unimplemented() {
    let mut server = TestServer::in_memory().await;
    let paths = [
        "ProduceService/Nothing",
        "ProduceService/",
        "ConsumeService/Append",
        "TopicService/Nothing",
        "GroupService/Nothing",
        "GroupService/",
        "NoService/Append",
        "Append",
    ];
    for path in paths {
        let request = http::Request::post(format!("http://node/helix.log.v1.{path}"))
            .header(http::header::CONTENT_TYPE, "application/grpc")
            .body(Body::empty())
            .unwrap();
        poll_fn(|context| server.channel.poll_ready(context)).await.unwrap();
        let answer = soon(server.channel.call(request)).await.unwrap();
        let status = Status::from_header_map(answer.headers());
        assert_eq!(status.map(|status| status.code()), Some(Code::Unimplemented), "{path}");
    }
}
