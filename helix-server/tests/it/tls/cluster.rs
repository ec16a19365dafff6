//! Rotation and rolling changes of three nodes that serve meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use helix_client::{Client, Config, ProducerOptions, TlsOptions};
use helix_proto::log::v1::Record;
use helix_server::config::{ClientCertificates, ServerConfig, TlsUse};
use helix_server::server::{RunningServer, Server};
use helix_tls::issue::CertificateAuthority;
use tempfile::TempDir;
use tokio::net::TcpStream;

use super::{Certificates, refused};
use crate::support::soon;
use crate::trio::{NODES, free_port, until};

/// Three nodes in this process.
pub(super) struct SecureTrio {
    pub(super) certificates: Certificates,
    directory: TempDir,
    client_ports: [u16; 3],
    pub(super) peer_ports: [u16; 3],
    pub(super) servers: Vec<Option<RunningServer>>,
}

impl SecureTrio {
    /// Starts the nodes; `change` completes their configurations.
    pub(super) async fn start(
        change: impl Fn(&Certificates, u64, ServerConfig) -> ServerConfig,
    ) -> Self {
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

    pub(super) fn config(&self, node: u64) -> ServerConfig {
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

    pub(super) fn addresses(&self) -> Vec<String> {
        self.client_ports.iter().map(|port| format!("127.0.0.1:{port}")).collect()
    }

    pub(super) fn server(&self, node: u64) -> &RunningServer {
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

    pub(super) async fn connected(&self) {
        until("all nodes are connected and have leaders", async || {
            let is_connected = |node| {
                let node = self.server(node).node();
                node.unready().is_empty() && node.peers().iter().all(|peer| peer.connected)
            };
            NODES.into_iter().all(is_connected).then_some(())
        })
        .await;
    }

    pub(super) async fn shutdown(self) {
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
    /// Starts a writer that makes a new client for every few records, as programs that restart.
    fn start(addresses: Vec<String>, tls: Option<TlsOptions>) -> Self {
        Self::with_clients_of(10, addresses, tls)
    }

    /// Starts a writer that keeps its client, and so its connections.
    fn lasting(addresses: Vec<String>, tls: Option<TlsOptions>) -> Self {
        Self::with_clients_of(u64::MAX, addresses, tls)
    }

    fn with_clients_of(records: u64, addresses: Vec<String>, tls: Option<TlsOptions>) -> Self {
        let (stop, appended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count) = (stop.clone(), appended.clone());
        let task = tokio::spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                let client =
                    Client::new(Config { tls: tls.clone(), ..Config::new(addresses.clone()) });
                // Certificate and key are being replaced: the files do not fit for a moment.
                let Ok(client) = client else {
                    tokio::task::yield_now().await;
                    continue;
                };
                let producer = client.producer(ProducerOptions::default());
                let mut left = records;
                while left > 0 && !stopped.load(Ordering::Relaxed) {
                    let record = Record { value: Some("x".into()), ..Record::default() };
                    producer.send("default", record).await.unwrap().await.unwrap();
                    count.fetch_add(1, Ordering::Relaxed);
                    left -= 1;
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
    let first = trio.certificates.ca("ca").client("app-1", 30).unwrap();
    trio.certificates.put("first", &first);
    let tls = trio.certificates.client("client", "ca");
    let writer = Writer::start(trio.addresses(), Some(tls.clone()));
    let lasting = Writer::lasting(trio.addresses(), Some(tls));
    writer.progress().await;
    lasting.progress().await;
    let reloads = |node| {
        let status = trio.server(node).node().tls().unwrap().store.status();
        assert_eq!((status.failed, status.error), (0, None));
        status.succeeded
    };
    let mut done = NODES.map(reloads);
    // In the first round the nodes poll their files.
    let mut taken = async |round: i32, what: &str| {
        if round > 0 {
            for node in NODES {
                trio.server(node).node().tls().unwrap().store.refresh();
            }
        }
        until(what, async || {
            NODES.into_iter().all(|node| reloads(node) > done[node as usize - 1]).then_some(())
        })
        .await;
        done = NODES.map(reloads);
        writer.progress().await;
        lasting.progress().await;
    };
    for round in 0..2 {
        let next = format!("ca-{round}");
        trio.certificates.put(&next, &CertificateAuthority::create("test", 30).unwrap());
        // 1. Every process trusts both CAs.
        let (old, new) =
            (trio.certificates.read("ca.pem"), trio.certificates.read(&format!("{next}.pem")));
        trio.certificates.write("ca.pem", &format!("{old}{new}"));
        taken(round, "nodes trust the new CA").await;
        // 2. Every process has a certificate of the new CA.
        trio.certificates.issue(&next);
        taken(round, "nodes have new certificates").await;
        // 3. No process trusts the old one.
        trio.certificates.write("ca.pem", &new);
        taken(round, "nodes no longer trust the old CA").await;
    }
    assert!(writer.stop().await + lasting.stop().await > 200);
    trio.connected().await;
    // The CAs before are no longer trusted, although their certificates are still valid.
    for node in NODES {
        let first = trio.certificates.client("first", "ca");
        refused(trio.server(node), Some(first), "trusts no CA that signed").await;
    }
    trio.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_waits_for_its_peers_takes_new_certificates() {
    let certificates = Certificates::new();
    let directory = tempfile::tempdir().unwrap();
    let peers = NODES.map(|node| (node, format!("127.0.0.1:{}", free_port())));
    let config = ServerConfig {
        node_id: 1,
        peer_addr: peers[0].1.parse().unwrap(),
        peers: peers.to_vec(),
        ..ServerConfig::in_dir(directory.path())
    };
    let starting = tokio::spawn(Server::start(certificates.node(1, config)));
    let connected = async |ca: &str| {
        let stream = TcpStream::connect(&peers[0].1).await.ok()?;
        let connector = certificates.connector("node-2", ca);
        connector.connect(stream, "127.0.0.1").await.ok().map(drop)
    };
    until("the node serves its peer port", async || connected("ca").await).await;
    certificates.put("next-ca", &CertificateAuthority::create("test", 30).unwrap());
    certificates.issue("next-ca");
    certificates.write("ca.pem", &certificates.read("next-ca.pem"));
    until("the node has the new certificate", async || connected("next-ca").await).await;
    assert!(!starting.is_finished(), "the node waits for its peers");
    starting.abort();
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
