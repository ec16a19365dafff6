//! JWTs name callers, whose rules are those of their principal.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use helix_client::AccessGrant;
use helix_proto::log::v1::{
    AccessRole, CallerSource, ErrorReason, HealthReason, SubscribeRequest, WhoAmIRequest,
};
use helix_server::config::{AuthSetting, ServerConfig};
use helix_server::metrics::MetricsPage;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};
use tempfile::TempDir;
use tonic::Status;

use super::calls::{call, examples};
use super::{GuardedServer, role, with_token};
use crate::captured_log::CapturedLog;
use crate::support::{earliest, reason, soon};
use crate::trio::until;

const ISSUER: &str = "https://id.example";

/// Time of expiry of valid JWTs, in 2100.
const LATE_S: u64 = 4_102_444_800;

/// Keys and JWTs that another implementation made.
fn vectors() -> Value {
    serde_json::from_str(include_str!("../../../src/access/jwt/vectors.json")).unwrap()
}

/// An issuer with one key.
struct Issuer(Ed25519KeyPair);

impl Issuer {
    fn new(seed: u8) -> Self {
        Self(Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap())
    }

    fn jwks(&self) -> Vec<u8> {
        let x = URL_SAFE_NO_PAD.encode(self.0.public_key());
        let key = json!({ "kty": "OKP", "crv": "Ed25519", "kid": "k", "x": x });
        json!({ "keys": [key] }).to_string().into_bytes()
    }

    /// Signs the claims of a valid JWT of a subject, changed to these.
    fn jwt(&self, subject: &str, changed: &Value) -> String {
        let mut claims = json!({ "iss": ISSUER, "aud": "helix", "sub": subject, "exp": LATE_S });
        for (name, value) in changed.as_object().unwrap() {
            claims[name] = value.clone();
        }
        let part = |json: &Value| URL_SAFE_NO_PAD.encode(json.to_string());
        let signed = format!("{}.{}", part(&json!({ "alg": "EdDSA", "kid": "k" })), part(&claims));
        let signature = URL_SAFE_NO_PAD.encode(self.0.sign(signed.as_bytes()));
        format!("{signed}.{signature}")
    }
}

/// A server that accepts JWTs.
struct JwtServer {
    guarded: GuardedServer,
    directory: TempDir,
}

impl JwtServer {
    async fn start(jwks: &[u8]) -> Self {
        Self::start_with(jwks, ServerConfig::in_memory()).await
    }

    async fn start_with(jwks: &[u8], config: ServerConfig) -> Self {
        let directory = tempfile::tempdir().unwrap();
        write(&directory, jwks);
        let guarded = GuardedServer::start_with(ServerConfig {
            auth: AuthSetting::Required,
            jwt_jwks: Some(directory.path().join("jwks.json")),
            jwt_issuer: Some(ISSUER.to_owned()),
            jwt_audience: Some("helix".to_owned()),
            ..config
        })
        .await;
        Self { guarded, directory }
    }

    /// Replaces the keys, and does not wait until the server polls the file.
    fn replace(&self, jwks: &[u8]) {
        write(&self.directory, jwks);
        self.guarded.server.running.node().jwt().unwrap().reload(Ok(jwks.to_vec()));
    }

    /// Returns whether health reports the keys.
    async fn has_issue(&self) -> bool {
        let issues = self.guarded.admin().health().await.unwrap().issues;
        issues.iter().any(|issue| issue.reason() == HealthReason::JwtKeys)
    }
}

#[allow(clippy::disallowed_methods)]
fn write(directory: &TempDir, jwks: &[u8]) {
    let new = directory.path().join("new");
    std::fs::write(&new, jwks).unwrap();
    std::fs::rename(new, directory.path().join("jwks.json")).unwrap();
}

async fn refused(guarded: &GuardedServer, jwt: &str) -> Status {
    let refused = guarded.access(jwt).who_am_i(WhoAmIRequest {}).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::Unauthenticated);
    assert!(!refused.message().contains(jwt), "{}", refused.message());
    refused
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_jwt_names_a_caller_with_the_rules_of_its_principal() {
    let vectors = vectors();
    let server = JwtServer::start(vectors["jwks"].to_string().as_bytes()).await;
    let guarded = &server.guarded;
    let producer = role(AccessRole::Producer, "default");
    // Not the same principal: an issuer cannot name those of tokens.
    guarded.token("alice", &producer).await;
    for (algorithm, jwt) in vectors["tokens"].as_object().unwrap() {
        let jwt = jwt.as_str().unwrap();
        let caller = guarded.access(jwt).who_am_i(WhoAmIRequest {}).await.unwrap().into_inner();
        assert_eq!(caller.principal, "jwt:alice", "{algorithm}");
        assert_eq!(caller.source(), CallerSource::Jwt);
        assert!(caller.token_id.is_empty() && caller.rules.is_empty() && caller.is_restricted);
        let expires_at = caller.expires_at.unwrap().seconds;
        assert_eq!(expires_at, (LATE_S + 60) as i64, "with the leeway");
        let denied = guarded.client(jwt).admin().delete_topic("default").await.unwrap_err();
        assert_eq!(denied.reason, Some(ErrorReason::PermissionDenied));
    }
    let admin = guarded.admin();
    admin.allow_access("jwt:alice", &producer).await.unwrap();
    let jwt = vectors["tokens"]["ES256"].as_str().unwrap();
    let append = examples("default").into_iter().find(|it| it.method == "ProduceService/Append");
    let append = append.unwrap();
    call(with_token(&guarded.server.channel, jwt), &append).await.unwrap();
    let caller = guarded.client(&guarded.admin_token).admin().who_am_i().await.unwrap();
    assert_eq!(caller.source(), CallerSource::Token);
}

#[tokio::test]
async fn an_invalid_jwt_is_refused_at_once_counted_and_logged() {
    let (log, _guard) = CapturedLog::capture();
    let issuer = Issuer::new(1);
    let server = JwtServer::start(&issuer.jwks()).await;
    let guarded = &server.guarded;
    let valid = issuer.jwt("alice", &json!({}));
    guarded.access(&valid).who_am_i(WhoAmIRequest {}).await.unwrap();
    let cases = [
        ("jwt_expired", issuer.jwt("a", &json!({ "exp": 1_000_000_000 })), "expired"),
        ("jwt_early", issuer.jwt("a", &json!({ "nbf": LATE_S - 9 })), "is valid in"),
        ("jwt_issuer", issuer.jwt("a", &json!({ "iss": "https://x" })), "another issuer"),
        ("jwt_audience", issuer.jwt("a", &json!({ "aud": "x" })), "another audience"),
        ("jwt_principal", issuer.jwt("a b", &json!({})), "names no principal"),
        ("jwt_signature", Issuer::new(2).jwt("a", &json!({})), "signature of the JWT"),
        ("jwt_malformed", "a.b.c".to_owned(), "malformed"),
        ("jwt_too_large", issuer.jwt("a", &json!({ "x": "y".repeat(4_800) })), "the limit is"),
    ];
    for (_, jwt, why) in &cases {
        let refused = refused(guarded, jwt).await;
        assert!(refused.message().contains(why), "{why}: {}", refused.message());
    }
    let mut page = MetricsPage::default();
    guarded.server.running.node().metrics().write(&mut page);
    let (page, text) = (page.to_string(), log.text());
    for (name, jwt, _) in &cases {
        let line = format!("helix_failed_logins_total{{reason=\"{name}\"}} 1");
        assert!(page.lines().any(|found| found == line), "{line} is not in {page}");
        assert!(text.contains(&format!("result=\"{name}\"")), "{name}: {text}");
        assert!(!text.contains(jwt.as_str()), "{name}: {text}");
    }
    assert!(!text.contains(&valid), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_key_ends_calls_and_streams() {
    let issuer = Issuer::new(1);
    let server = JwtServer::start(&issuer.jwks()).await;
    let guarded = &server.guarded;
    let consumer = role(AccessRole::Consumer, "default");
    guarded.admin().allow_access("jwt:alice", &consumer).await.unwrap();
    let jwt = issuer.jwt("alice", &json!({}));
    guarded.access(&jwt).who_am_i(WhoAmIRequest {}).await.unwrap();
    let channel = with_token(&guarded.server.channel, &jwt);
    let mut consume =
        helix_proto::log::v1::consume_service_client::ConsumeServiceClient::new(channel);
    let request = SubscribeRequest { partitions: vec![earliest(0)], ..SubscribeRequest::default() };
    let mut stream = consume.subscribe(request).await.unwrap().into_inner();
    // A file that is not valid changes nothing but health, once a second poll finds it.
    for _ in 0..2 {
        server.replace(b"{}");
    }
    guarded.access(&jwt).who_am_i(WhoAmIRequest {}).await.unwrap();
    // Until the server's own poll has read the file, too.
    until("health reports the keys", async || server.has_issue().await.then_some(())).await;
    server.replace(&Issuer::new(2).jwks());
    let ended = soon(async {
        loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("the stream ended without a reason"),
                Err(status) => return status,
            }
        }
    })
    .await;
    assert_eq!(reason(&ended), ErrorReason::Unauthenticated);
    let refused = refused(guarded, &jwt).await;
    assert!(refused.message().contains("signature of the JWT"), "{}", refused.message());
    until("nothing is wrong", async || (!server.has_issue().await).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_method_refuses_jwts_that_are_not_valid() {
    let issuer = Issuer::new(1);
    let server = JwtServer::start(&issuer.jwks()).await;
    let guarded = &server.guarded;
    let without_rights = issuer.jwt("guest", &json!({}));
    let cases = [
        (issuer.jwt("a", &json!({ "exp": 1_000_000_000 })), "expired"),
        (Issuer::new(2).jwt("a", &json!({})), "signature of the JWT"),
        (issuer.jwt("a", &json!({ "aud": "x" })), "another audience"),
    ];
    for example in examples("default") {
        for (jwt, why) in &cases {
            let refused = call(with_token(&guarded.server.channel, jwt), &example).await;
            let refused = refused.unwrap_err();
            assert_eq!(reason(&refused), ErrorReason::Unauthenticated, "{}", example.method);
            assert!(refused.message().contains(why), "{}: {}", example.method, refused.message());
        }
        let as_guest = call(with_token(&guarded.server.channel, &without_rights), &example).await;
        if !example.needs.rules.is_empty() {
            let denied = as_guest.unwrap_err();
            assert_eq!(reason(&denied), ErrorReason::PermissionDenied, "{}", example.method);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_keys_accepts_no_jwt() {
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    let refused = refused(&guarded, &Issuer::new(1).jwt("alice", &json!({}))).await;
    assert!(refused.message().contains("set --jwt-jwks"), "{}", refused.message());
    // A token of the cluster still works on the same connection.
    guarded.token("billing", &AccessGrant::default()).await;
}

#[tokio::test]
async fn a_changed_file_is_read_without_a_restart() {
    let config = ServerConfig {
        jwt_principal_claim: "client_id".to_owned(),
        jwt_principal_prefix: String::new(),
        ..ServerConfig::in_memory()
    };
    let server = JwtServer::start_with(&Issuer::new(1).jwks(), config).await;
    let jwt = Issuer::new(2).jwt("x", &json!({ "client_id": "billing" }));
    refused(&server.guarded, &jwt).await;
    write(&server.directory, &Issuer::new(2).jwks());
    until("the new keys are in use", async || {
        let mut access = server.guarded.access(&jwt);
        let caller = access.who_am_i(WhoAmIRequest {}).await.ok()?.into_inner();
        assert_eq!(caller.principal, "billing", "the prefix is empty");
        Some(())
    })
    .await;
}
