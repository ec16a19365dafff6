//! TLS of a server's ports, as clients and nodes see it.

// The tests write the files of certificates.
#![allow(clippy::disallowed_methods)]

mod cluster;
mod matrix;
mod nodes;
mod principal;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use helix_client::{Client, Config, TlsOptions};
use helix_proto::log::v1::{HealthIssue, HealthReason};
use helix_server::config::{AdminAddr, ClientCertificates, ServerConfig, TlsUse};
use helix_server::limits::TLS_HANDSHAKE_WAIT_MAX;
use helix_server::server::{RunningServer, Server};
use helix_tls::issue::{CertificateAuthority, IssuedPair};
use helix_tls::{CertificateFiles, CertificateStore, Connector, HandshakeError, ServerRule};
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::Code;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::admin::metrics;
use crate::captured_log::CapturedLog;
use crate::support::{PATIENCE, soon};
use crate::trio::{NODES, free_port, until};

/// A directory with the certificates of a cluster.
struct Certificates(TempDir);

impl Certificates {
    fn new() -> Self {
        let certificates = Self(tempfile::tempdir().unwrap());
        certificates.put("ca", &CertificateAuthority::create("test", 30).unwrap());
        certificates.put("other-ca", &CertificateAuthority::create("other", 30).unwrap());
        certificates.issue("ca");
        certificates
    }

    /// Makes the certificates of the nodes and of a client with a CA.
    fn issue(&self, ca: &str) {
        let ca = self.ca(ca);
        for node in NODES {
            self.put(&format!("node-{node}"), &node_pair(&ca, node));
        }
        self.put("client", &ca.client("app-1", 30).unwrap());
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn put(&self, name: &str, pair: &IssuedPair) {
        self.write(&format!("{name}.key"), &pair.key);
        self.write(&format!("{name}.pem"), &pair.certificate);
    }

    /// Replaces a file atomically, as tools do.
    fn write(&self, name: &str, text: &str) {
        let temporary = self.path(&format!("{name}.tmp"));
        std::fs::write(&temporary, text).unwrap();
        std::fs::rename(temporary, self.path(name)).unwrap();
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    fn ca(&self, name: &str) -> CertificateAuthority {
        let pem = self.read(&format!("{name}.pem"));
        CertificateAuthority::open(&pem, &self.read(&format!("{name}.key"))).unwrap()
    }

    fn client(&self, name: &str, ca: &str) -> TlsOptions {
        let options = TlsOptions::new(self.path(&format!("{ca}.pem")));
        match name {
            "" => options,
            name => options.with_certificate(
                self.path(&format!("{name}.pem")),
                self.path(&format!("{name}.key")),
            ),
        }
    }

    /// Returns a connector with these files that takes any server of a CA: only nodes verify nodes.
    fn connector(&self, name: &str, ca: &str) -> Connector {
        let own = |suffix: &str| (!name.is_empty()).then(|| self.path(&format!("{name}.{suffix}")));
        let files = CertificateFiles {
            certificate: own("pem"),
            key: own("key"),
            ca: vec![self.path(&format!("{ca}.pem"))],
            client_ca: Vec::new(),
        };
        let store = CertificateStore::open(files, None).unwrap();
        Connector::new(store, ServerRule::HostName).unwrap()
    }

    /// Returns a channel to an address whose connections have these files, and expect that host.
    fn channel(&self, name: &str, ca: &str, addr: SocketAddr, host: &'static str) -> Channel {
        let connector = Arc::new(self.connector(name, ca));
        let dial = service_fn(move |uri: Uri| {
            let connector = connector.clone();
            async move {
                let stream = TcpStream::connect(uri.authority().unwrap().as_str()).await?;
                let connected = connector.connect(stream, host).await;
                connected.map(TokioIo::new).map_err(HandshakeError::into_io)
            }
        });
        let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
        endpoint.connect_with_connector_lazy(dial)
    }

    /// Adds the certificate of a node to its configuration.
    fn node(&self, node: u64, config: ServerConfig) -> ServerConfig {
        ServerConfig {
            tls_cert: Some(self.path(&format!("node-{node}.pem"))),
            tls_key: Some(self.path(&format!("node-{node}.key"))),
            tls_ca: Some(self.path("ca.pem")),
            ..config
        }
    }
}

fn node_pair(ca: &CertificateAuthority, node: u64) -> IssuedPair {
    ca.node(node, &["127.0.0.1".to_owned()], 30).unwrap()
}

/// Fetches metadata as a client with these options, and returns its error.
async fn metadata(
    server: &RunningServer,
    tls: Option<TlsOptions>,
) -> Result<(), helix_client::Error> {
    let config = Config::new([server.local_addr().to_string()]);
    let connecting = Client::connect(Config { tls, request_timeout: PATIENCE, ..config });
    connecting.await.map(drop).inspect_err(|error| assert!(!error.may_have_applied, "{error}"))
}

/// Attempts of each kind: a reason that a race loses now and then is found.
const ATTEMPTS: usize = 200;

/// Checks that each attempt of a client with these options is refused for this reason, with one
/// code, whatever the order is in which the connection is opened, used and closed.
async fn refused(server: &RunningServer, tls: Option<TlsOptions>, why: &str) {
    let address = server.local_addr().to_string();
    for attempt in 0..ATTEMPTS {
        let client = Client::new(Config { tls: tls.clone(), ..Config::new([address.clone()]) });
        let outcome = client.unwrap().admin().node_status(Some(&address)).await;
        let error = outcome.unwrap_err();
        assert!(error.message.contains(why), "attempt {attempt}: {error}, not {why:?}");
        assert!(error.is_tls_failure && !error.may_have_applied, "attempt {attempt}: {error}");
        assert_eq!(error.code, Code::Unavailable, "attempt {attempt}: {error}");
    }
}

#[tokio::test]
async fn only_clients_with_valid_certificates_are_served() {
    let certificates = Certificates::new();
    certificates.put("late", &certificates.ca("ca").client("app-1", 0).unwrap());
    certificates.put("stranger", &certificates.ca("other-ca").client("app-1", 30).unwrap());
    let config = ServerConfig {
        tls_client_auth: ClientCertificates::Required,
        ..certificates.node(1, ServerConfig::in_memory())
    };
    let server = Server::start(config).await.unwrap();
    let client = |name: &str, ca: &str| Some(certificates.client(name, ca));
    metadata(&server, client("client", "ca")).await.unwrap();
    refused(&server, None, "the node requires TLS").await;
    refused(&server, client("", "ca"), "requires a client certificate").await;
    refused(&server, client("late", "ca"), "has expired").await;
    refused(&server, client("stranger", "ca"), "trusts no CA that signed").await;
    refused(&server, client("client", "other-ca"), "no CA that this side trusts").await;
    let wrong_name = TlsOptions {
        server_name: Some("n9.example".to_owned()),
        ..certificates.client("client", "ca")
    };
    refused(&server, Some(wrong_name), "is for 127.0.0.1, not for n9.example").await;
    server.shutdown().await;
    let plain = Server::start(ServerConfig::in_memory()).await.unwrap();
    refused(&plain, client("client", "ca"), "does not speak TLS").await;
    plain.shutdown().await;
}

#[tokio::test]
async fn an_optional_port_serves_clients_with_and_without_tls() {
    let certificates = Certificates::new();
    let config = ServerConfig {
        tls_clients: Some(TlsUse::Optional),
        ..certificates.node(1, ServerConfig::in_memory())
    };
    let server = Server::start(config).await.unwrap();
    metadata(&server, None).await.unwrap();
    metadata(&server, Some(certificates.client("", "ca"))).await.unwrap();
    let distrusting = certificates.client("", "other-ca");
    refused(&server, Some(distrusting), "no CA that this side trusts").await;
    server.shutdown().await;
}

#[tokio::test]
async fn a_unix_socket_has_no_tls() {
    let certificates = Certificates::new();
    let path = certificates.path("helix.sock");
    let listen_socket = Some(path.clone());
    let config = certificates.node(1, ServerConfig { listen_socket, ..ServerConfig::in_memory() });
    let server = Server::start(config).await.unwrap();
    refused(&server, None, "the node requires TLS").await;
    // The options of TLS are for other nodes.
    for tls in [None, Some(certificates.client("", "ca"))] {
        let config = Config::new([format!("unix:{}", path.display())]);
        Client::connect(Config { tls, ..config }).await.unwrap();
    }
    server.shutdown().await;
}

#[tokio::test]
async fn check_config_finds_a_ca_that_did_not_sign_the_own_certificate() {
    let certificates = Certificates::new();
    let check = async |ca: &str, peers: &[&str]| {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_helix-server"));
        for (flag, name) in [("tls-cert", "node-1.pem"), ("tls-key", "node-1.key"), ("tls-ca", ca)]
        {
            command.arg(format!("--{flag}")).arg(certificates.path(name));
        }
        let output = command.arg("--check-config").args(peers).output();
        let output = soon(output).await.unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let peers = ["--peer", "2=n2:9192", "--peer", "3=n3:9192"];
    assert_eq!(check("ca.pem", &peers).await, (Some(0), String::new()));
    assert_eq!(check("ca.pem", &[]).await, (Some(0), String::new()));
    let (code, said) = check("other-ca.pem", &peers).await;
    assert!(code == Some(2) && said.contains("is signed by no CA of the CA file"), "{said}");
    assert!(said.contains("other-ca.pem"), "{said}");
    let (code, said) = check("other-ca.pem", &[]).await;
    assert!(code == Some(0) && said.contains("warning: --tls-ca"), "{said}");
    certificates.write("joined.pem", &format!("x{}", certificates.read("ca.pem")));
    let (code, said) = check("joined.pem", &peers).await;
    assert!(code == Some(2) && said.contains("joined.pem: line 1: "), "{said}");
}

#[tokio::test]
async fn a_client_takes_new_certificates_when_it_connects_again() {
    let certificates = Certificates::new();
    let config = ServerConfig {
        listen_addr: ([127, 0, 0, 1], free_port()).into(),
        tls_client_auth: ClientCertificates::Required,
        ..certificates.node(1, ServerConfig::in_memory())
    };
    let server = Server::start(config.clone()).await.unwrap();
    let client = Config::new([server.local_addr().to_string()])
        .with_tls(certificates.client("client", "ca"));
    let client = Client::connect(client).await.unwrap();
    // Neither side trusts the certificates of before.
    certificates.put("ca-1", &CertificateAuthority::create("test", 30).unwrap());
    certificates.issue("ca-1");
    certificates.write("ca.pem", &certificates.read("ca-1.pem"));
    server.shutdown().await;
    let server = Server::start(config).await.unwrap();
    until("the client is served again", async || client.admin().topics("").await.ok()).await;
    server.shutdown().await;
}

#[tokio::test]
async fn half_open_handshakes_leave_others_served() {
    let certificates = Certificates::new();
    let server = Server::start(certificates.node(1, ServerConfig::in_memory())).await.unwrap();
    let begun = Instant::now();
    let mut half_open = Vec::new();
    for number in 0..600 {
        let mut stream = TcpStream::connect(server.local_addr()).await.unwrap();
        if number % 2 == 0 {
            // The start of a handshake.
            stream.write_all(&[0x16, 3, 1, 0x40, 0, 1]).await.unwrap();
        }
        half_open.push(stream);
    }
    metadata(&server, Some(certificates.client("", "ca"))).await.unwrap();
    assert!(begun.elapsed() < TLS_HANDSHAKE_WAIT_MAX, "before the first of them has timed out");
    assert!(server.load().connection_count() <= 1, "a handshake is no connection");
    // The oldest ones had to make way.
    let mut byte = [0; 1];
    let ended = soon(half_open[0].read(&mut byte)).await;
    assert!(matches!(ended, Ok(0) | Err(_)));
    server.shutdown().await;
}

/// Sends a request over TLS and HTTP/1.1, as tools that fetch metrics do, and returns the response.
async fn request_over_tls(addr: SocketAddr, ca: &str, request: &[u8]) -> String {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider);
    let mut config = config
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![helix_tls::ALPN_HTTP1.to_vec()];
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let stream = TcpStream::connect(addr).await.unwrap();
    let connecting = TlsConnector::from(Arc::new(config)).connect(name, stream);
    let mut stream = soon(connecting).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut response = Vec::new();
    // Ignored: a server may close a connection without the alert that ends TLS.
    let _ = soon(stream.read_to_end(&mut response)).await;
    String::from_utf8(response).unwrap()
}

#[tokio::test]
async fn the_admin_port_has_tls_if_that_is_set() {
    let certificates = Certificates::new();
    let config = ServerConfig {
        tls_admin: TlsUse::Required,
        admin_addr: Some(AdminAddr::At("127.0.0.1:0".parse().unwrap())),
        ..certificates.node(1, ServerConfig::in_memory())
    };
    let server = Server::start(config).await.unwrap();
    let get = b"GET /metrics HTTP/1.1\r\nhost: n1\r\n\r\n";
    let mut plain = TcpStream::connect(server.admin_addr().unwrap()).await.unwrap();
    plain.write_all(get).await.unwrap();
    let mut response = String::new();
    plain.read_to_string(&mut response).await.unwrap();
    assert!(response.starts_with("HTTP/1.1 400 ") && response.contains("requires TLS"));
    let ca = certificates.read("ca.pem");
    let page = request_over_tls(server.admin_addr().unwrap(), &ca, get).await;
    assert!(page.starts_with("HTTP/1.1 200 "), "{page}");
    let handshakes = "helix_tls_handshakes_total{port=\"admin\",result=\"succeeded\"} 1";
    assert!(page.lines().any(|line| line.starts_with(handshakes)), "{page}");
    let files =
        CertificateFiles { ca: vec![certificates.path("ca.pem")], ..CertificateFiles::default() };
    let store = CertificateStore::open(files, None).unwrap();
    let connector = Connector::new(store, ServerRule::HostName).unwrap();
    // The connector offers HTTP/2 only, which the admin port does not speak.
    let stream = TcpStream::connect(server.admin_addr().unwrap()).await.unwrap();
    let error = connector.connect(stream, "127.0.0.1").await.unwrap_err();
    assert!(error.to_string().contains("another protocol"), "{error}");
    // The refusal is counted once the refused client has gone.
    drop(plain);
    until("the refusal is counted", async || {
        let acceptors = &server.node().tls().unwrap().acceptors;
        let admin = acceptors.iter().find(|acceptor| acceptor.port() == "admin").unwrap();
        admin.counts().contains(&("plaintext", 1)).then_some(())
    })
    .await;
    server.shutdown().await;
}

#[tokio::test]
async fn health_log_and_metrics_have_expiry_and_failed_reloads() {
    let (log, _guard) = CapturedLog::capture();
    let certificates = Certificates::new();
    let short = certificates.ca("ca").node(1, &["127.0.0.1".to_owned()], 10).unwrap();
    certificates.put("node-1", &short);
    let config = ServerConfig {
        admin_addr: Some(AdminAddr::At("127.0.0.1:0".parse().unwrap())),
        ..certificates.node(1, ServerConfig::in_memory())
    };
    let server = Server::start(config).await.unwrap();
    let tls = || Some(certificates.client("", "ca"));
    let config = Config::new([server.local_addr().to_string()]);
    let admin = Client::new(Config { tls: tls(), ..config }).unwrap().admin();
    let warnings = async || {
        let issues = admin.health().await.unwrap().issues;
        let of_tls = |issue: &HealthIssue| issue.reason() == HealthReason::Certificate;
        issues.into_iter().filter(of_tls).map(|issue| issue.message).collect::<Vec<_>>()
    };
    let sample = async |name: &str| {
        let samples = metrics(server.admin_addr().unwrap()).await;
        let of_name = samples.iter().find(|(sample, _)| sample.starts_with(name));
        *of_name.unwrap_or_else(|| panic!("no {name} in {samples:?}")).1
    };
    let said = warnings().await;
    assert!(said.len() == 1 && said[0].contains("expires in "), "{said:?}");
    let left = sample("helix_certificate_expiry_seconds{kind=\"own\"").await;
    assert!((9.0..=10.0).contains(&(left / 86_400.0)), "{left}");
    assert_eq!(sample("helix_certificate_reload_failed").await, 0.0);
    let started_at = sample("helix_certificate_reload_timestamp_seconds").await;
    assert!(started_at > 0.0);

    certificates.write("node-1.key", &certificates.read("client.key"));
    let store = &server.node().tls().unwrap().store;
    // A problem counts once a second look finds it too.
    store.refresh();
    store.refresh();
    let said = warnings().await;
    let expected = "node-1.key: is not the private key of";
    assert!(said.iter().any(|what| what.contains(expected)), "{said:?}");
    assert!(log.text().contains(expected), "{}", log.text());
    assert_eq!(sample("helix_certificate_reload_failed").await, 1.0);
    assert_eq!(sample("helix_certificate_reloads_total{result=\"failed\"}").await, 1.0);
    metadata(&server, tls()).await.expect("the pair before is still in use");

    certificates.put("node-1", &node_pair(&certificates.ca("ca"), 1));
    store.refresh();
    assert_eq!(warnings().await, [""; 0]);
    assert_eq!(sample("helix_certificate_reload_failed").await, 0.0);
    assert_eq!(sample("helix_certificate_reloads_total{result=\"succeeded\"}").await, 1.0);
    assert!(sample("helix_certificate_reload_timestamp_seconds").await >= started_at);
    assert!(sample("helix_certificate_expiry_seconds{kind=\"own\"").await > left);
    metadata(&server, tls()).await.unwrap();
    let handshakes = sample("helix_tls_handshakes_total{port=\"clients\",result=\"succeeded\"}");
    assert!(handshakes.await >= 3.0);
    server.shutdown().await;
}
