//! TLS of a server's ports as clients and nodes see it: who is served, rotation, rolling changes.

// The tests write the files of certificates.
#![allow(clippy::disallowed_methods)]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use helix_client::{Client, Config, ProducerOptions, TlsOptions};
use helix_proto::log::v1::{GetHealthRequest, Record};
use helix_proto::raft::v1 as raft;
use helix_proto::raft::v1::peer_service_client::PeerServiceClient;
use helix_server::config::{AdminAddr, ClientCertificates, ServerConfig, TlsUse};
use helix_server::server::{RunningServer, Server};
use helix_tls::issue::{CertificateAuthority, IssuedPair};
use helix_tls::{CertificateFiles, CertificateStore, Connector, HandshakeError, ServerRule};
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Status;
use tonic::codegen::http::Uri;
use tonic::transport::Endpoint;
use tower::service_fn;

use crate::support::soon;
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
async fn metadata(server: &RunningServer, tls: Option<TlsOptions>) -> Result<(), String> {
    let request_timeout = Duration::from_millis(500);
    let config = Config::new([server.local_addr().to_string()]);
    let connecting = Client::connect(Config { tls, request_timeout, ..config });
    connecting.await.map(drop).map_err(|error| {
        assert!(!error.may_have_applied, "{error}");
        error.to_string()
    })
}

/// Waits until a client with these options is refused for this reason.
///
/// A connection may end before its request is sent, whose error is then only that.
async fn refused(server: &RunningServer, tls: Option<TlsOptions>, why: &str) {
    until(why, async || {
        let error = metadata(server, tls.clone()).await.unwrap_err();
        let is_known = error.contains(why);
        if !is_known {
            eprintln!("not yet {why:?}: {error}");
        }
        is_known.then_some(())
    })
    .await;
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
    refused(&server, Some(wrong_name), "not for n9.example").await;
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
async fn half_open_handshakes_leave_others_served() {
    let certificates = Certificates::new();
    let server = Server::start(certificates.node(1, ServerConfig::in_memory())).await.unwrap();
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
    assert!(server.load().connection_count() <= 1, "a handshake is no connection");
    // The oldest ones had to make way.
    let mut byte = [0; 1];
    let ended = soon(half_open[0].read(&mut byte)).await;
    assert!(matches!(ended, Ok(0) | Err(_)));
    server.shutdown().await;
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
    until("the metrics have certificates and the refusal", async || {
        let page = metrics(&server);
        let wanted =
            ["helix_certificate_expiry_seconds{kind=\"own\"", "admin result=\"plaintext\"} 1"];
        wanted.iter().all(|name| page.contains(name)).then_some(())
    })
    .await;
    server.shutdown().await;
}

/// Returns the lines of TLS of the metrics, as the admin port shows them.
fn metrics(server: &RunningServer) -> String {
    let tls = server.node().tls().unwrap();
    let mut page = String::new();
    for info in tls.store.current().certificates() {
        page += &format!(
            "helix_certificate_expiry_seconds{{kind=\"{}\"}} {}\n",
            info.kind.as_str(),
            info.seconds_left()
        );
    }
    for acceptor in &tls.acceptors {
        for (result, count) in acceptor.counts() {
            page += &format!("{} result=\"{result}\"}} {count}\n", acceptor.port());
        }
    }
    page
}

/// Three nodes in this process.
struct SecureTrio {
    certificates: Certificates,
    directory: TempDir,
    client_ports: [u16; 3],
    peer_ports: [u16; 3],
    servers: Vec<Option<RunningServer>>,
}

impl SecureTrio {
    /// Starts the nodes; `change` completes their configurations.
    async fn start(change: impl Fn(&Certificates, u64, ServerConfig) -> ServerConfig) -> Self {
        let mut trio = Self {
            certificates: Certificates::new(),
            directory: tempfile::tempdir().unwrap(),
            client_ports: NODES.map(|_| free_port()),
            peer_ports: NODES.map(|_| free_port()),
            servers: Vec::new(),
        };
        let configs = NODES.map(|node| change(&trio.certificates, node, trio.config(node)));
        let started = configs.map(|config| tokio::spawn(Server::start(config)));
        for started in started {
            trio.servers.push(Some(soon(started).await.unwrap().unwrap()));
        }
        trio
    }

    fn config(&self, node: u64) -> ServerConfig {
        let index = node as usize - 1;
        let address = |port: u16| format!("127.0.0.1:{port}");
        let peers = NODES.map(|id| (id, address(self.peer_ports[id as usize - 1])));
        ServerConfig {
            node_id: node,
            listen_addr: address(self.client_ports[index]).parse().unwrap(),
            peer_addr: address(self.peer_ports[index]).parse().unwrap(),
            peers: peers.to_vec(),
            ..ServerConfig::in_dir(self.directory.path().join(format!("n{node}")))
        }
    }

    fn addresses(&self) -> Vec<String> {
        self.client_ports.iter().map(|port| format!("127.0.0.1:{port}")).collect()
    }

    fn server(&self, node: u64) -> &RunningServer {
        self.servers[node as usize - 1].as_ref().unwrap()
    }

    /// Restarts a node with another configuration, and waits until the others reach it.
    async fn restart(&mut self, node: u64, config: ServerConfig) {
        let stopped = self.servers[node as usize - 1].take().unwrap();
        stopped.shutdown().await;
        let started = soon(Server::start(config)).await.unwrap();
        self.servers[node as usize - 1] = Some(started);
        self.connected().await;
    }

    async fn connected(&self) {
        until("all nodes are connected and have leaders", async || {
            let is_connected = |node| {
                let node = self.server(node).node();
                node.unready().is_empty() && node.peers().iter().all(|peer| peer.connected)
            };
            NODES.into_iter().all(is_connected).then_some(())
        })
        .await;
    }

    async fn shutdown(self) {
        for server in self.servers.into_iter().flatten() {
            server.shutdown().await;
        }
    }
}

/// Appends records until it is stopped; every append must succeed after its retries.
struct Writer {
    stop: Arc<AtomicBool>,
    appended: Arc<AtomicU64>,
    task: tokio::task::JoinHandle<()>,
}

impl Writer {
    fn start(addresses: Vec<String>, tls: Option<TlsOptions>) -> Self {
        let (stop, appended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count) = (stop.clone(), appended.clone());
        let task = tokio::spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                // A new client makes new connections, as after a restart of a program.
                let client =
                    Client::new(Config { tls: tls.clone(), ..Config::new(addresses.clone()) });
                // Certificate and key are being replaced: the files do not fit for a moment.
                let Ok(client) = client else {
                    tokio::task::yield_now().await;
                    continue;
                };
                let producer = client.producer(ProducerOptions::default());
                for _ in 0..10 {
                    let record = Record { value: Some("x".into()), ..Record::default() };
                    producer.send("default", record).await.unwrap().await.unwrap();
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Self { stop, appended, task }
    }

    /// Waits until more records are appended.
    async fn progress(&self) {
        let before = self.appended.load(Ordering::Relaxed);
        until("records are appended", async || {
            (self.appended.load(Ordering::Relaxed) > before + 20).then_some(())
        })
        .await;
    }

    async fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        soon(self.task).await.unwrap();
        self.appended.load(Ordering::Relaxed)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_and_the_ca_rotate_twice_under_load() {
    let trio = SecureTrio::start(|certificates, node, config| ServerConfig {
        tls_client_auth: ClientCertificates::Required,
        ..certificates.node(node, config)
    })
    .await;
    trio.connected().await;
    let tls = trio.certificates.client("client", "ca");
    let writer = Writer::start(trio.addresses(), Some(tls));
    writer.progress().await;
    let reloads = |node| {
        let status = trio.server(node).node().tls().unwrap().store.status();
        assert_eq!((status.failed, status.error), (0, None));
        status.succeeded
    };
    let mut done = NODES.map(reloads);
    let mut taken = async |what: &str| {
        until(what, async || {
            NODES.into_iter().all(|node| reloads(node) > done[node as usize - 1]).then_some(())
        })
        .await;
        done = NODES.map(reloads);
        writer.progress().await;
    };
    for round in 0..2 {
        let next = format!("ca-{round}");
        trio.certificates.put(&next, &CertificateAuthority::create("test", 30).unwrap());
        // 1. Every process trusts both CAs.
        let (old, new) =
            (trio.certificates.read("ca.pem"), trio.certificates.read(&format!("{next}.pem")));
        trio.certificates.write("ca.pem", &format!("{old}{new}"));
        taken("nodes trust the new CA").await;
        // 2. Every process has a certificate of the new CA.
        trio.certificates.issue(&next);
        taken("nodes have new certificates").await;
        // 3. No process trusts the old one.
        trio.certificates.write("ca.pem", &new);
        taken("nodes no longer trust the old CA").await;
    }
    assert!(writer.stop().await > 100);
    trio.connected().await;
    trio.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_changes_from_plaintext_to_mutual_tls_while_it_serves() {
    let mut trio = SecureTrio::start(|_, _, config| config).await;
    trio.connected().await;
    let plain = Writer::start(trio.addresses(), None);
    plain.progress().await;
    let optional = |certificates: &Certificates, node, config| ServerConfig {
        tls_clients: Some(TlsUse::Optional),
        tls_peers: Some(TlsUse::Optional),
        ..certificates.node(node, config)
    };
    for node in NODES {
        let config = optional(&trio.certificates, node, trio.config(node));
        trio.restart(node, config).await;
        plain.progress().await;
    }
    let tls = trio.certificates.client("client", "ca");
    let encrypted = Writer::start(trio.addresses(), Some(tls.clone()));
    encrypted.progress().await;
    plain.stop().await;
    for node in NODES {
        let config = ServerConfig {
            tls_client_auth: ClientCertificates::Required,
            ..trio.certificates.node(node, trio.config(node))
        };
        trio.restart(node, config).await;
        encrypted.progress().await;
    }
    refused(trio.server(2), None, "the node requires TLS").await;
    encrypted.stop().await;
    trio.shutdown().await;
}

/// Says hello to a node over a connection with these files, as if from `from_node`.
async fn hello(trio: &SecureTrio, name: &str, ca: &str, from_node: u64) -> Result<(), Status> {
    let certificates = &trio.certificates;
    let files = CertificateFiles {
        certificate: Some(certificates.path(&format!("{name}.pem"))),
        key: Some(certificates.path(&format!("{name}.key"))),
        ca: vec![certificates.path(&format!("{ca}.pem"))],
        client_ca: Vec::new(),
    };
    let store = CertificateStore::open(files, None).unwrap();
    // Only nodes verify nodes; this caller takes any server.
    let connector = Arc::new(Connector::new(store, ServerRule::HostName).unwrap());
    let dial = service_fn(move |uri: Uri| {
        let connector = connector.clone();
        async move {
            let stream = TcpStream::connect(uri.authority().unwrap().as_str()).await?;
            let connected = connector.connect(stream, "127.0.0.1").await;
            connected.map(TokioIo::new).map_err(HandshakeError::into_io)
        }
    });
    let address = format!("http://127.0.0.1:{}", trio.peer_ports[0]);
    let channel = Endpoint::from_shared(address).unwrap().connect_with_connector_lazy(dial);
    let request = raft::HelloRequest { from_node, to_node: 1, ..Default::default() };
    PeerServiceClient::new(channel).hello(request).await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_cannot_speak_as_another_one() {
    let trio =
        SecureTrio::start(|certificates, node, config| certificates.node(node, config)).await;
    trio.connected().await;
    let certificates = &trio.certificates;
    certificates.put("x2", &node_pair(&certificates.ca("other-ca"), 2));
    let same_ca = certificates.ca("ca");
    certificates.put("late", &same_ca.node(2, &["127.0.0.1".to_owned()], 0).unwrap());
    hello(&trio, "node-2", "ca", 2).await.unwrap();
    for (name, from_node, what) in [
        ("node-2", 3, "its certificate is for node 2, and it cannot be node 3"),
        ("client", 2, "names no node"),
    ] {
        let status = hello(&trio, name, "ca", from_node).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::FailedPrecondition);
        assert!(status.message().contains(what), "{status}");
    }
    for (name, what) in [("x2", "trusts no CA that signed"), ("late", "has expired")] {
        let error = hello(&trio, name, "ca", 2).await.unwrap_err();
        assert!(format!("{error:?}").contains(what), "{error:?}");
    }
    let mut wrong = trio.config(3);
    wrong.tls_cert = Some(certificates.path("node-2.pem"));
    wrong.tls_key = Some(certificates.path("node-2.key"));
    wrong.tls_ca = Some(certificates.path("ca.pem"));
    let error = wrong.validate().unwrap_err().to_string();
    assert!(error.contains("is for node 2, and this is node 3"), "{error}");
    trio.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_another_ca_is_refused_with_the_reason_on_both_sides() {
    let mut trio =
        SecureTrio::start(|certificates, node, config| certificates.node(node, config)).await;
    trio.connected().await;
    let certificates = &trio.certificates;
    certificates.put("x3", &node_pair(&certificates.ca("other-ca"), 3));
    let config = ServerConfig {
        tls_cert: Some(certificates.path("x3.pem")),
        tls_key: Some(certificates.path("x3.key")),
        tls_ca: Some(certificates.path("other-ca.pem")),
        ..trio.config(3)
    };
    trio.servers[2].take().unwrap().shutdown().await;
    let node = soon(Server::start(config)).await.unwrap();
    let last_error = |server: &RunningServer, peer: u64| {
        let peers = server.node().peers();
        peers.into_iter().find(|status| status.node_id == peer)?.last_error
    };
    until("each side names the CA", async || {
        let seen = [last_error(&node, 1)?, last_error(trio.server(1), 3)?];
        seen.iter().all(|what| what.contains("CA")).then_some(())
    })
    .await;
    let config = Config::new([trio.addresses()[0].clone()])
        .with_tls(trio.certificates.client("client", "ca"));
    let client = Client::connect(config).await.unwrap();
    let connection = client.route("default", 0).await.unwrap().connection;
    let health = connection.cluster().get_health(GetHealthRequest {}).await.unwrap().into_inner();
    let issues: Vec<_> = health.issues.iter().map(|issue| issue.message.clone()).collect();
    assert!(issues.iter().any(|what| what.contains("CA")), "{issues:?}");
    node.shutdown().await;
    trio.shutdown().await;
}
