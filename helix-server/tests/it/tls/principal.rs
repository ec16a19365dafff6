//! The principal of a call comes from the client certificate, unless the call has a token.

use helix_client::{AccessGrant, Admin, Client, Config, ProducerOptions, TokenSource};
use helix_proto::log::v1::{AccessRole, ErrorReason, Record, RoleGrant};
use helix_server::config::{AuthSetting, ClientCertificates, ServerConfig};
use helix_server::server::{RunningServer, Server};
use helix_tls::CertificateNames;

use super::Certificates;
use crate::trio::until;

/// A server that checks its callers by certificates or tokens.
pub(super) struct CheckedServer {
    pub(super) certificates: Certificates,
    pub(super) server: RunningServer,
    pub(super) admin: Admin,
}

impl CheckedServer {
    pub(super) async fn start() -> Self {
        let certificates = Certificates::new();
        let token = certificates.path("admin-token");
        let config = ServerConfig {
            auth: AuthSetting::Required,
            admin_token_file: Some(token.clone()),
            tls_client_auth: ClientCertificates::Optional,
            ..certificates.node(1, ServerConfig::in_memory())
        };
        let server = Server::start(config).await.unwrap();
        let config = Config {
            tls: Some(certificates.client("", "ca")),
            ..Config::new([server.local_addr().to_string()])
        };
        let admin = until("the first token works", async || {
            let token = TokenSource::file(&token).ok()?;
            let admin = Client::new(Config { token, ..config.clone() }).unwrap().admin();
            admin.who_am_i().await.ok()?;
            Some(admin)
        })
        .await;
        Self { certificates, server, admin }
    }

    /// Makes a client certificate with these names, and returns a client with it.
    fn client(&self, names: &CertificateNames, token: TokenSource) -> Client {
        let pair = self.certificates.ca("ca").client_with_names(names, 30).unwrap();
        self.certificates.put("caller", &pair);
        self.client_of("caller", token)
    }

    fn client_of(&self, certificate: &str, token: TokenSource) -> Client {
        let tls = Some(self.certificates.client(certificate, "ca"));
        let config = Config::new([self.server.local_addr().to_string()]);
        Client::new(Config { tls, token, ..config }).unwrap()
    }
}

pub(super) fn names(uris: &[&str], dns: &[&str], common_names: &[&str]) -> CertificateNames {
    let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    CertificateNames { uris: owned(uris), dns: owned(dns), common_names: owned(common_names) }
}

async fn append(client: &Client) -> Result<(), Option<ErrorReason>> {
    let record = Record { value: Some("x".into()), ..Record::default() };
    let producer = client.producer(ProducerOptions::default());
    producer.append("default", 0, &[record][..]).await.map(drop).map_err(|error| error.reason)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_name_callers_whose_rules_are_checked() {
    let checked = CheckedServer::start().await;
    let producer = RoleGrant {
        role: AccessRole::Producer.into(),
        name: "default".to_owned(),
        is_prefix: false,
    };
    let grant = AccessGrant { roles: vec![producer], ..AccessGrant::default() };
    checked.admin.allow_access("app-1", &grant).await.unwrap();
    let uri = "spiffe://example.org/app-2";
    for (names, principal) in [
        (names(&[uri], &["a.example.org"], &["app-1"]), uri),
        (names(&[], &["a.example.org"], &["app-1"]), "a.example.org"),
        (names(&[], &[], &["app-1"]), "app-1"),
    ] {
        let client = checked.client(&names, TokenSource::none());
        let caller = client.admin().who_am_i().await.unwrap();
        assert_eq!((caller.principal.as_str(), caller.is_restricted), (principal, true));
        assert!(caller.token_id.is_empty());
        let appended = append(&client).await;
        match principal {
            "app-1" => assert_eq!(appended, Ok(())),
            _ => assert_eq!(appended, Err(Some(ErrorReason::PermissionDenied)), "{principal}"),
        }
    }
    // A node's certificate names a caller too, which has no rights of its own.
    let node = checked.client_of("node-1", TokenSource::none());
    let caller = node.admin().who_am_i().await.unwrap();
    assert_eq!(caller.principal, "helix://cluster/test/node/1");
    assert_eq!(append(&node).await, Err(Some(ErrorReason::PermissionDenied)));
    // A change of rules holds for the open connection.
    let client = checked.client(&names(&[], &[], &["app-1"]), TokenSource::none());
    append(&client).await.unwrap();
    checked.admin.remove_access("app-1", &grant).await.unwrap();
    until("the right is gone", async || {
        (append(&client).await == Err(Some(ErrorReason::PermissionDenied))).then_some(())
    })
    .await;
    checked.server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_precedes_the_certificate_and_replaces_one_without_a_principal() {
    let checked = CheckedServer::start().await;
    let made = checked.admin.create_token("billing", None, &AccessGrant::default()).await.unwrap();
    let token = || TokenSource::fixed(&made.token).unwrap();
    let ambiguous = names(&[], &["a.example.org", "b.example.org"], &["app-1"]);
    for certificate in [&names(&[], &[], &["app-1"]), &ambiguous] {
        let caller = checked.client(certificate, token()).admin().who_am_i().await.unwrap();
        assert_eq!(caller.principal, "billing");
        assert!(!caller.token_id.is_empty());
    }
    for (names, why) in [
        (&ambiguous, "the client certificate has 2 DNS names"),
        (&names(&[], &[], &["Alice Smith"]), "names no principal"),
        (&names(&[], &[], &[]), "has no URI, DNS name or common name"),
    ] {
        let client = checked.client(names, TokenSource::none());
        let error = client.admin().who_am_i().await.unwrap_err();
        assert_eq!(error.reason, Some(ErrorReason::Unauthenticated));
        assert!(error.to_string().contains(why), "{error}");
    }
    let anonymous = checked.client_of("", TokenSource::none());
    let error = anonymous.admin().who_am_i().await.unwrap_err();
    assert_eq!(error.reason, Some(ErrorReason::Unauthenticated));
    assert!(error.to_string().contains("no token was sent, and no client certificate"), "{error}");
    checked.server.shutdown().await;
}
