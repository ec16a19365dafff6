//! The audit log has changes, denials and failed logins, and no log line has a secret.

use helix_client::{AccessGrant, NewTopic};
use helix_proto::log::v1::access_service_client::AccessServiceClient;
use helix_proto::log::v1::topic_service_client::TopicServiceClient;
use helix_proto::log::v1::{DeleteTopicRequest, WhoAmIRequest};
use helix_server::config::AuthSetting;
use tonic::service::interceptor::InterceptedService;

use super::{GuardedServer, TokenInterceptor, with_token};
use crate::captured_log::CapturedLog;

/// Returns whether a line of the audit log has all of these parts.
fn has_line(log: &CapturedLog, parts: &[&str]) -> bool {
    let text = log.text();
    let mut lines = text.lines().filter(|line| line.contains(" audit: "));
    lines.any(|line| parts.iter().all(|part| line.contains(part)))
}

// On one thread, because the log of that thread is captured.
#[tokio::test]
async fn the_audit_log_has_changes_denials_and_failed_logins_but_no_secret() {
    let (log, _guard) = CapturedLog::capture();
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    let guest = guarded.token("guest", &AccessGrant::default()).await;
    guarded.admin().create_topic(&NewTopic::new("orders", 1)).await.unwrap();
    // The library would look the topic up first, which is denied too.
    let mut topics = TopicServiceClient::new(with_token(&guarded.server.channel, &guest));
    let delete = DeleteTopicRequest { name: "orders".to_owned(), topic_id: 0 };
    topics.delete_topic(delete).await.unwrap_err();
    let id_and_secret = guest.strip_prefix("helix_").unwrap();
    let unknown = format!("helix_0000000000000001{}", &id_and_secret[16..]);
    let password = "Basic aHVudGVyMjpodW50ZXIy";
    for header in [format!("Bearer {unknown}"), password.to_owned()] {
        let channel = guarded.server.channel.clone();
        let channel = InterceptedService::new(channel, TokenInterceptor(Some(header)));
        AccessServiceClient::new(channel).who_am_i(WhoAmIRequest {}).await.unwrap_err();
    }

    let created = ["control", "admin", "TopicService/CreateTopic", "create topic orders", "OK"];
    let made = ["control", "admin", "AccessService/CreateToken", "admin cluster", "OK"];
    let denied = ["denial", "guest", "TopicService/DeleteTopic", "delete topic orders"];
    let failed = ["login", "AccessService/WhoAmI", "127.0.0.1"];
    for parts in [&created[..], &made, &denied, &failed] {
        assert!(has_line(&log, parts), "no line with {parts:?} in {}", log.text());
    }
    // Each failed operation has one line: that of its denial.
    assert!(!has_line(&log, &["control", "DeleteTopic"]), "{}", log.text());
    let text = log.text();
    for token in [&guarded.admin_token, &guest, &unknown] {
        let secret = token.rsplit('_').next().unwrap();
        assert_eq!(secret.len(), 64);
        assert!(!text.contains(&secret[..8]), "a secret is in the log: {text}");
    }
    assert!(!text.contains(&password[6..]), "a password is in the log: {text}");
}
