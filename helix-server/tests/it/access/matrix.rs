//! Every method with every kind of credentials gives the documented error, and an error shows
//! nothing about topics that exist.

use std::collections::BTreeSet;

use helix_client::AccessGrant;
use helix_proto::log::v1::access_service_client::AccessServiceClient;
use helix_proto::log::v1::{ErrorReason, WhoAmIRequest};
use helix_server::config::AuthSetting;
use prost::Message;
use tonic::service::interceptor::InterceptedService;
use tonic::{Code, Status};

use super::calls::{ExampleCall, call, call_path, examples};
use super::{GuardedServer, TokenInterceptor, WithToken, expiring_token, rules, with_token};
use crate::support::reason;
use crate::trio::until;

const DENIALS: [ErrorReason; 2] = [ErrorReason::Unauthenticated, ErrorReason::PermissionDenied];

fn is_denied(outcome: &Result<(), Status>) -> bool {
    outcome.as_ref().is_err_and(|status| DENIALS.contains(&reason(status)))
}

fn described_methods() -> BTreeSet<String> {
    let files = prost_types::FileDescriptorSet::decode(helix_proto::FILE_DESCRIPTOR_SET).unwrap();
    let public = files.file.iter().filter(|file| file.package() == "helix.log.v1");
    let services = public.flat_map(|file| file.service.clone());
    let paths = services.flat_map(|service| {
        let name = service.name().to_owned();
        service.method.into_iter().map(move |method| format!("{name}/{}", method.name()))
    });
    paths.collect()
}

fn with_header(guarded: &GuardedServer, header: Option<&str>) -> WithToken {
    let header = header.map(str::to_owned);
    InterceptedService::new(guarded.server.channel.clone(), TokenInterceptor(header))
}

/// A token that has expired, once it is refused for that.
async fn expired_token(guarded: &GuardedServer) -> String {
    let token = expiring_token(guarded, "late").await;
    until("the token has expired", async || {
        let refused = guarded.access(&token).who_am_i(WhoAmIRequest {}).await.err()?;
        refused.message().contains("expired").then_some(())
    })
    .await;
    token
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_method_refuses_invalid_credentials() {
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    let expired = expired_token(&guarded).await;
    let revoked = guarded.token("gone", &AccessGrant::default()).await;
    guarded.admin().revoke_tokens("gone").await.unwrap();
    let forged = format!("{}0", &revoked[..revoked.len() - 1]);
    let cases = [
        (None, "no token was sent"),
        (Some("Bearer helix_".to_owned()), "not \"Bearer\""),
        (Some("Basic YWxpY2U6".to_owned()), "not \"Bearer\""),
        (Some(format!("Bearer {expired}")), "expired"),
        (Some(format!("Bearer {revoked}")), "unknown or was revoked"),
        (Some(format!("Bearer {forged}")), "unknown or was revoked"),
    ];
    let calls = examples("default");
    let known: BTreeSet<String> = calls.iter().map(|call| call.method.to_owned()).collect();
    assert_eq!(known, described_methods(), "every method has an example");
    for (header, why) in cases {
        for example in &calls {
            let refused = call(with_header(&guarded, header.as_deref()), example).await;
            let refused = refused.unwrap_err();
            assert_eq!(refused.code(), Code::Unauthenticated, "{} {header:?}", example.method);
            assert_eq!(reason(&refused), ErrorReason::Unauthenticated);
            assert!(refused.message().contains(why), "{}: {}", example.method, refused.message());
            assert!(!refused.message().contains("helix_0"), "{}", refused.message());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_need_no_credentials_and_reflection_does() {
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    let none = || with_header(&guarded, None);
    call_path(none(), "/grpc.health.v1.Health/Check", &[]).await.unwrap();
    let list = [0x3a, 0];
    for version in ["v1", "v1alpha"] {
        let path = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
        let refused = call_path(none(), &path, &list).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unauthenticated);
        let admin = with_token(&guarded.server.channel, &guarded.admin_token);
        call_path(admin, &path, &list).await.unwrap();
    }
    let refused = call_path(none(), "/helix.log.v1.TopicService/Nothing", &[]).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_method_needs_exactly_its_rights() {
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    let none = AccessGrant::default();
    let guest = guarded.token("guest", &none).await;
    for (number, example) in examples("default").into_iter().enumerate() {
        let method = example.method;
        let as_guest = call(with_token(&guarded.server.channel, &guest), &example).await;
        let needs = &example.needs.rules;
        assert_eq!(is_denied(&as_guest), !needs.is_empty(), "{method}: {as_guest:?}");
        if let Err(status) = as_guest.as_ref()
            && !needs.is_empty()
        {
            assert_eq!(status.code(), Code::PermissionDenied);
            let text = status.message();
            assert!(text.starts_with("principal \"guest\" may not "), "{text}");
        }
        // Each right alone is not enough if several are needed.
        for missing in 0..if needs.len() > 1 { needs.len() } else { 0 } {
            let mut some = needs.clone();
            some.remove(missing);
            let principal = format!("partly-{number}-{missing}");
            let token = guarded.token(&principal, &rules(&some)).await;
            let refused = call(with_token(&guarded.server.channel, &token), &example).await;
            assert!(is_denied(&refused), "{method} without right {missing}: {refused:?}");
        }
        let principal = format!("right-{number}");
        let token = guarded.token(&principal, &example.needs).await;
        let allowed = call(with_token(&guarded.server.channel, &token), &example).await;
        assert!(!is_denied(&allowed), "{method}: {allowed:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denial_does_not_tell_whether_a_topic_exists() {
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    let guest = guarded.token("guest", &AccessGrant::default()).await;
    let outcome = async |example: &ExampleCall| {
        let refused = call(with_token(&guarded.server.channel, &guest), example).await.err()?;
        Some((refused.code(), refused.message().to_owned(), refused.details().len()))
    };
    for (existing, missing) in examples("default").iter().zip(&examples("missing")) {
        let (existing, missing) = (outcome(existing).await, outcome(missing).await);
        let hidden =
            existing.map(|(code, text, bytes)| (code, text.replace("default", "missing"), bytes));
        assert_eq!(hidden, missing);
    }
    // The same for the names of topics in routing data: an invisible topic is an unknown one.
    let mut access = AccessServiceClient::new(with_token(&guarded.server.channel, &guest));
    let caller = access.who_am_i(WhoAmIRequest {}).await.unwrap().into_inner();
    assert_eq!((caller.principal.as_str(), caller.rules), ("guest", Vec::new()));
}
