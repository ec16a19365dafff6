//! Authentication and authorization, as clients meet them.

mod audit;
mod call_shares;
pub(crate) mod calls;
mod jwt;
mod matrix;
mod nodes;
mod producers;
mod quotas;
mod views;
mod waits;

use std::path::Path;
use std::time::Duration;

use helix_client::{AccessGrant, Admin, Client, Config, TokenSource};
use helix_proto::log::v1::access_service_client::AccessServiceClient;
use helix_proto::log::v1::{
    AccessOperation, AccessRole, AccessRule, CreateTokenRequest, ErrorReason, ResourceKind,
    RevokeTokenRequest, RoleGrant, WhoAmIRequest,
};
use helix_server::config::{AuthSetting, ServerConfig};
use tempfile::TempDir;
use tonic::metadata::MetadataValue;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Request, Status};

use crate::support::{TestServer, reason};
use crate::trio::until;

/// A server that checks its callers, and the token of its administrator.
pub(crate) struct GuardedServer {
    pub(crate) server: TestServer,
    pub(crate) admin_token: String,
    _directory: TempDir,
}

/// A service client whose calls carry a token.
pub(crate) type WithToken = InterceptedService<Channel, TokenInterceptor>;

#[derive(Clone)]
pub(crate) struct TokenInterceptor(pub(crate) Option<String>);

impl tonic::service::Interceptor for TokenInterceptor {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(header) = &self.0 {
            request
                .metadata_mut()
                .insert("authorization", MetadataValue::try_from(header).unwrap());
        }
        Ok(request)
    }
}

fn with_token(channel: &Channel, token: &str) -> WithToken {
    let header = format!("Bearer {token}");
    InterceptedService::new(channel.clone(), TokenInterceptor(Some(header)))
}

impl GuardedServer {
    async fn start(auth: AuthSetting) -> Self {
        Self::start_with(ServerConfig { auth, ..ServerConfig::in_memory() }).await
    }

    pub(crate) async fn start_with(config: ServerConfig) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("first-token");
        let admin_token_file = Some(path.clone());
        let server = TestServer::start(ServerConfig { admin_token_file, ..config }, None).await;
        let admin_token = first_token(&server, &path).await;
        Self { server, admin_token, _directory: directory }
    }

    fn client(&self, token: &str) -> Client {
        client_of(&self.server, TokenSource::fixed(token).unwrap())
    }

    fn admin(&self) -> Admin {
        self.client(&self.admin_token).admin()
    }

    /// Makes a token of a principal with these rules and roles.
    pub(crate) async fn token(&self, principal: &str, grant: &AccessGrant) -> String {
        self.admin().create_token(principal, None, grant).await.unwrap().token
    }

    fn access(&self, token: &str) -> AccessServiceClient<WithToken> {
        AccessServiceClient::new(with_token(&self.server.channel, token))
    }
}

fn client_of(server: &TestServer, token: TokenSource) -> Client {
    let address = server.running.local_addr().to_string();
    Client::new(Config { token, seed: Some(1), ..Config::new([address]) }).unwrap()
}

/// Waits until the first token was written and is accepted.
async fn first_token(server: &TestServer, path: &Path) -> String {
    until("the first token is in its file and accepted", async || {
        #[allow(clippy::disallowed_methods)]
        let token = std::fs::read_to_string(path).ok()?;
        let token = token.trim().to_owned();
        let mut access = AccessServiceClient::new(with_token(&server.channel, &token));
        access.who_am_i(WhoAmIRequest {}).await.ok()?;
        Some(token)
    })
    .await
}

fn rule(kind: ResourceKind, name: &str, operations: &[AccessOperation]) -> AccessRule {
    let prefix = name.strip_suffix('*');
    AccessRule {
        resource_kind: kind.into(),
        name: prefix.unwrap_or(name).to_owned(),
        is_prefix: prefix.is_some(),
        operations: operations.iter().map(|it| (*it).into()).collect(),
    }
}

fn rules(rules: &[AccessRule]) -> AccessGrant {
    AccessGrant { rules: rules.to_vec(), ..AccessGrant::default() }
}

fn role(role: AccessRole, name: &str) -> AccessGrant {
    let prefix = name.strip_suffix('*');
    let grant = RoleGrant {
        role: role.into(),
        name: prefix.unwrap_or(name).to_owned(),
        is_prefix: prefix.is_some(),
    };
    AccessGrant { roles: vec![grant], ..AccessGrant::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_token_is_an_administrator_in_a_private_file() {
    use std::os::unix::fs::PermissionsExt;

    let directory = tempfile::tempdir().unwrap();
    let config =
        ServerConfig { auth: AuthSetting::Required, ..ServerConfig::in_dir(directory.path()) };
    let server = TestServer::start(config.clone(), None).await;
    let path = directory.path().join("admin-token");
    let token = first_token(&server, &path).await;
    #[allow(clippy::disallowed_methods)]
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let admin = client_of(&server, TokenSource::file(&path).unwrap()).admin();
    let caller = admin.who_am_i().await.unwrap();
    assert_eq!((caller.principal.as_str(), caller.is_restricted), ("admin", true));
    let billing = role(AccessRole::Consumer, "default");
    let made = admin.create_token("billing", None, &billing).await.unwrap().token;
    let id = admin.tokens(Some("admin")).await.unwrap()[0].token_id.clone();
    admin.revoke_token(&id).await.unwrap();
    drop((admin, server.channel));
    server.running.shutdown().await;

    // A restart keeps tokens and rules, makes no second first token, and forgets no revocation.
    #[allow(clippy::disallowed_methods)]
    std::fs::remove_file(&path).unwrap();
    let server = TestServer::start(config, None).await;
    let mut old = AccessServiceClient::new(with_token(&server.channel, &token));
    let refused = old.who_am_i(WhoAmIRequest {}).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::Unauthenticated);
    let mut new = AccessServiceClient::new(with_token(&server.channel, &made));
    let caller = new.who_am_i(WhoAmIRequest {}).await.unwrap().into_inner();
    assert_eq!((caller.principal.as_str(), caller.rules.len()), ("billing", 1));
    assert!(!path.exists());
    server.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_are_ignored_while_callers_are_not_checked() {
    let server = TestServer::in_memory().await;
    let mut access = AccessServiceClient::new(with_token(&server.channel, "anything"));
    let caller = access.who_am_i(WhoAmIRequest {}).await.unwrap().into_inner();
    assert!(!caller.is_restricted && caller.principal.is_empty());
    // Tokens can be made before callers are checked.
    let request = CreateTokenRequest { principal: "a".to_owned(), ..CreateTokenRequest::default() };
    let created = access.create_token(request).await.unwrap().into_inner();
    assert!(created.token.starts_with("helix_") && created.token.len() == 6 + 16 + 1 + 64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn optional_checks_hold_only_callers_with_credentials() {
    let guarded = GuardedServer::start(AuthSetting::Optional).await;
    guarded.server.append(&["without credentials"]).await;
    let reader = guarded.token("reader", &role(AccessRole::Consumer, "default")).await;
    let client = guarded.client(&reader);
    let denied = client.admin().delete_topic("default").await.unwrap_err();
    assert_eq!(denied.reason, Some(ErrorReason::PermissionDenied));
    let wrong = guarded.access("helix_nothing").who_am_i(WhoAmIRequest {}).await.unwrap_err();
    assert_eq!(reason(&wrong), ErrorReason::Unauthenticated);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_listed_revoked_and_limited_in_time() {
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    let admin = guarded.admin();
    let none = AccessGrant::default();
    for _ in 0..3 {
        admin.create_token("batch", None, &none).await.unwrap();
    }
    let now = Duration::from_secs(3_600);
    #[allow(clippy::disallowed_methods)]
    let later = std::time::SystemTime::now() + now;
    let timed = admin.create_token("timed", Some(later.into()), &none).await.unwrap();
    assert!(timed.info.unwrap().expires_at.is_some());
    #[allow(clippy::disallowed_methods)]
    let past = std::time::SystemTime::now() - now;
    let refused = admin.create_token("timed", Some(past.into()), &none).await.unwrap_err();
    assert_eq!(refused.reason, Some(ErrorReason::InvalidArgument));
    assert_eq!(admin.tokens(None).await.unwrap().len(), 5);
    let of_batch = admin.tokens(Some("batch")).await.unwrap();
    assert_eq!(of_batch.len(), 3);
    admin.revoke_token(&of_batch[1].token_id).await.unwrap();
    let again = admin.revoke_token(&of_batch[1].token_id).await.unwrap_err();
    assert_eq!(again.reason, Some(ErrorReason::TokenNotFound));
    assert_eq!(admin.revoke_tokens("batch").await.unwrap(), 2);
    assert_eq!(admin.tokens(Some("batch")).await.unwrap(), []);
    // Pages continue after the last token.
    let page = |page_token: String| helix_proto::log::v1::ListTokensRequest {
        page_size: 1,
        page_token,
        ..helix_proto::log::v1::ListTokensRequest::default()
    };
    let mut access = guarded.access(&guarded.admin_token);
    let first = access.list_tokens(page(String::new())).await.unwrap().into_inner();
    let second = access.list_tokens(page(first.next_page_token)).await.unwrap().into_inner();
    assert_ne!(first.tokens[0].token_id, second.tokens[0].token_id);
    assert_eq!(second.next_page_token, "");
    let both = RevokeTokenRequest { token_id: "0".repeat(16), principal: "a".to_owned() };
    let refused = access.revoke_token(both).await.unwrap_err();
    assert_eq!(reason(&refused), ErrorReason::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_are_tested_listed_and_taken() {
    let guarded = GuardedServer::start(AuthSetting::Required).await;
    let admin = guarded.admin();
    use AccessOperation::{Describe, Read, Write};
    let topics = rules(&[rule(ResourceKind::Topic, "orders-*", &[Read, Write])]);
    let access = admin.allow_access("billing", &topics).await.unwrap();
    assert_eq!(access.rules, topics.rules);
    let test = async |operation, name: &str| {
        let tested = admin.test_access("billing", operation, ResourceKind::Topic, name).await;
        tested.unwrap()
    };
    let allowed = test(Describe, "orders-eu").await;
    assert!(allowed.is_allowed && allowed.detail.contains("topic:orders-*=read,write"));
    assert!(!test(Read, "orders").await.is_allowed);
    let write = rules(&[rule(ResourceKind::Topic, "orders-*", &[Write])]);
    admin.remove_access("billing", &write).await.unwrap();
    assert!(!test(Write, "orders-eu").await.is_allowed);
    assert!(test(Read, "orders-eu").await.is_allowed);
    let listed = admin.access(None).await.unwrap();
    let names: Vec<_> = listed.iter().map(|it| it.principal.as_str()).collect();
    assert_eq!(names, ["admin", "billing"]);
    admin.remove_access("billing", &topics).await.unwrap();
    assert_eq!(admin.access(Some("billing")).await.unwrap(), []);
    let wrong = rules(&[rule(ResourceKind::Topic, "a*b*", &[Read])]);
    let refused = admin.allow_access("billing", &wrong).await.unwrap_err();
    assert_eq!(refused.reason, Some(ErrorReason::InvalidArgument));
}

/// Longest time until a change arrives.
const SECOND: Duration = Duration::from_secs(1);

/// Expects the time that an attempt returns to be below a second. Attempts three times, since a
/// busy machine may stall for longer.
async fn expect_within_a_second(mut attempt: impl AsyncFnMut() -> Duration) {
    let mut times = Vec::new();
    while times.iter().min().is_none_or(|time| *time >= SECOND) {
        assert!(times.len() < 3, "{times:?}");
        times.push(attempt().await);
    }
}

/// Makes a token that expires soon.
async fn expiring_token(guarded: &GuardedServer, principal: &str) -> String {
    // Again if the machine stalls until it has expired.
    until("the token is made", async || {
        #[allow(clippy::disallowed_methods)]
        let soon = std::time::SystemTime::now() + Duration::from_millis(700);
        let none = AccessGrant::default();
        match guarded.admin().create_token(principal, Some(soon.into()), &none).await {
            Ok(made) => Some(made.token),
            Err(refused) => {
                assert_eq!(refused.reason, Some(ErrorReason::InvalidArgument), "{refused}");
                None
            }
        }
    })
    .await
}
