//! Nodes that other nodes refuse: both sides have the reason, and health has it.

use std::net::SocketAddr;

use helix_client::{Client, Config};
use helix_proto::log::v1::{GetHealthRequest, HealthReason, MembershipPhase, RemoveNodeRequest};
use helix_proto::raft::v1 as raft;
use helix_proto::raft::v1::peer_service_client::PeerServiceClient;
use helix_server::config::{ClientCertificates, ServerConfig};
use helix_server::protocol::ProtocolVersions;
use helix_server::server::{RunningServer, Server};
use helix_tls::CertificateNames;
use helix_tls::issue::CertificateAuthority;
use tonic::Status;
use tonic::transport::Channel;

use super::cluster::SecureTrio;
use super::{Certificates, metadata, node_pair, refused};
use crate::support::soon;
use crate::trio::until;

/// Returns a client of node 1's peer port whose connections have these files.
fn peer_client(trio: &SecureTrio, name: &str, ca: &str) -> PeerServiceClient<Channel> {
    let addr = SocketAddr::from(([127, 0, 0, 1], trio.peer_ports[0]));
    PeerServiceClient::new(trio.certificates.channel(name, ca, addr, "127.0.0.1"))
}

/// Says hello to node 1 over a connection with these files, as if from `from_node`.
async fn hello(trio: &SecureTrio, name: &str, ca: &str, from_node: u64) -> Result<(), Status> {
    let request = raft::HelloRequest { from_node, to_node: 1, ..Default::default() };
    peer_client(trio, name, ca).hello(request).await.map(drop)
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

/// Returns the last error of a node's connection to another one.
fn last_error(server: &RunningServer, peer: u64) -> Option<String> {
    let peers = server.node().peers();
    peers.into_iter().find(|status| status.node_id == peer)?.last_error
}

/// Returns the messages of the health issues that the first node reports.
async fn health_messages(trio: &SecureTrio) -> Vec<String> {
    let config = Config::new([trio.addresses()[0].clone()])
        .with_tls(trio.certificates.client("client", "ca"));
    let client = Client::connect(config).await.unwrap();
    let connection = client.route("default", 0).await.unwrap().connection;
    let health =
        connection.cluster().get_health(GetHealthRequest::default()).await.unwrap().into_inner();
    health.issues.into_iter().map(|issue| issue.message).collect()
}

/// Restarts node 3 with the certificate `x3` and these CAs, and expects that it is refused: `seen`
/// is the reason at the others, `told` the reason at node 3.
async fn expect_refusal(
    trust: &str,
    issue: impl Fn(&Certificates),
    own_trust: &str,
    seen: &str,
    told: &str,
) {
    let mut trio = SecureTrio::start(|certificates, node, config| {
        let both = [certificates.read("ca.pem"), certificates.read("other-ca.pem")].concat();
        certificates.write("both.pem", &both);
        let tls_ca = Some(certificates.path(trust));
        ServerConfig { tls_ca, ..certificates.node(node, config) }
    })
    .await;
    trio.connected().await;
    issue(&trio.certificates);
    let config = ServerConfig {
        tls_cert: Some(trio.certificates.path("x3.pem")),
        tls_key: Some(trio.certificates.path("x3.key")),
        tls_ca: Some(trio.certificates.path(own_trust)),
        ..trio.config(3)
    };
    trio.servers[2].take().unwrap().shutdown().await;
    let node = soon(Server::start(config)).await.unwrap();
    until("each side has the reason", async || {
        let errors = [last_error(trio.server(1), 3)?, last_error(&node, 1)?];
        let has_both = errors[0].contains(seen) && errors[1].contains(told);
        if !has_both {
            eprintln!("not yet {seen:?} and {told:?}: {errors:?}");
        }
        has_both.then_some(())
    })
    .await;
    until("health has the reason", async || {
        let issues = health_messages(&trio).await;
        issues.iter().any(|what| what.contains(seen)).then_some(())
    })
    .await;
    node.shutdown().await;
    trio.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_another_ca_is_refused_with_the_reason_on_both_sides() {
    let issue = |certificates: &Certificates| {
        certificates.put("x3", &node_pair(&certificates.ca("other-ca"), 3));
    };
    expect_refusal("ca.pem", issue, "other-ca.pem", "signed by no CA", "signed by no CA").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_another_cluster_is_refused_with_the_reason_on_both_sides() {
    let issue = |certificates: &Certificates| {
        certificates.put("x3", &node_pair(&certificates.ca("other-ca"), 3));
    };
    let seen = "is for node 3 of cluster \"other\", and this node is in cluster \"test\"";
    let told = "is for node 1 of cluster \"test\", and this node is in cluster \"other\"";
    expect_refusal("both.pem", issue, "both.pem", seen, told).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_an_expired_certificate_is_refused_with_the_reason_on_both_sides() {
    let issue = |certificates: &Certificates| {
        let pair = certificates.ca("ca").node(3, &["127.0.0.1".to_owned()], 0).unwrap();
        certificates.put("x3", &pair);
    };
    let told = "rejects this side's certificate: it has expired";
    expect_refusal("ca.pem", issue, "ca.pem", "the other side has expired", told).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_node_is_refused_although_its_certificate_is_valid() {
    let mut trio =
        SecureTrio::start(|certificates, node, config| certificates.node(node, config)).await;
    trio.connected().await;
    let config = Config::new(trio.addresses()[..2].to_vec())
        .with_tls(trio.certificates.client("client", "ca"));
    let admin = Client::new(config).unwrap().admin();
    let removal = RemoveNodeRequest {
        node_id: 3,
        allow_fewer_replicas: true,
        ..RemoveNodeRequest::default()
    };
    let change = admin.remove_node_with(removal).await.unwrap().unwrap();
    until("the node is removed", async || {
        let change = admin.membership_change(change.id).await.ok()?;
        (change.phase() == MembershipPhase::Done).then_some(())
    })
    .await;
    until("the removed node has the reason", async || {
        trio.server(3).node().removed().map(|why| assert!(why.contains("was removed"), "{why}"))
    })
    .await;
    // The same certificate still makes the handshake, so the caller gets the reason as a status.
    let opened = hello(&trio, "node-3", "ca", 3).await;
    assert!(opened.is_ok(), "{opened:?}: hello tells a removed node that it is one");
    // Only that: no call and no stream of Raft messages is served to it.
    let mut client = peer_client(&trio, "node-3", "ca");
    let request = raft::HelloRequest { from_node: 3, to_node: 1, ..Default::default() };
    let cluster = client.hello(request).await.unwrap().into_inner().cluster;
    let is_refused = |status: &Status| {
        let is_removed = status.message().contains("was removed from this cluster");
        is_removed && status.code() == tonic::Code::FailedPrecondition
    };
    until("a call of the removed node is refused", async || {
        let call = raft::CallRequest { from_node: 3, to_node: 1, ..Default::default() };
        client.call(call).await.err().filter(is_refused)
    })
    .await;
    let opening = raft::Opening {
        version_min: ProtocolVersions::OWN.oldest,
        version_max: ProtocolVersions::OWN.newest,
        cluster,
        from_node: 3,
        to_node: 1,
        lane: raft::Lane::Live.into(),
        ..Default::default()
    };
    let message = Some(raft::exchange_request::Message::Opening(opening));
    let opening = futures_util::stream::iter([raft::ExchangeRequest { message }]);
    let status = client.exchange(opening).await.map(drop).unwrap_err();
    assert!(is_refused(&status), "{status}");
    let removed = trio.servers[2].take().unwrap();
    let mut config = Config::new([removed.local_addr().to_string()])
        .with_tls(trio.certificates.client("client", "ca"));
    config.leave_removed_nodes = false;
    let connection = Client::new(config).unwrap().admin();
    let issues = connection.health().await.unwrap().issues;
    assert!(issues.iter().any(|issue| issue.reason() == HealthReason::Removed), "{issues:?}");
    removed.shutdown().await;
    trio.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_is_for_no_node_is_refused_before_a_request_is_read() {
    let trio =
        SecureTrio::start(|certificates, node, config| certificates.node(node, config)).await;
    trio.connected().await;
    let certificates = &trio.certificates;
    let names = CertificateNames {
        uris: vec!["helix://cluster/elsewhere/node/2".to_owned()],
        ..CertificateNames::default()
    };
    // Of the CA that nodes trust, for a node of another cluster.
    let foreign = certificates.ca("ca").client_with_names(&names, 30).unwrap();
    certificates.put("foreign", &foreign);
    certificates.put("untrusted", &node_pair(&certificates.ca("other-ca"), 2));
    for (name, what) in [("foreign", "of cluster \"elsewhere\""), ("client", "names no node")] {
        let mut client = peer_client(&trio, name, "ca");
        // A request without a message: it is refused, and nothing waits for the rest.
        let status = soon(client.exchange(tokio_stream::pending())).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::FailedPrecondition, "{status}");
        assert!(status.message().contains(what), "{status}");
        assert!(status.message().contains("is no node of this cluster"), "{status}");
    }
    let error = hello(&trio, "untrusted", "ca", 2).await.unwrap_err();
    assert!(format!("{error:?}").contains("trusts no CA that signed"), "{error:?}");
    trio.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ca_of_clients_makes_no_node_and_that_of_nodes_no_client() {
    let trio = SecureTrio::start(|certificates, node, config| {
        if node == 1 {
            // The name of the cluster does not matter, only the CA.
            let ca = CertificateAuthority::create("test", 30).unwrap();
            certificates.put("clients-ca", &ca);
            let ca = certificates.ca("clients-ca");
            certificates.put("forged", &node_pair(&ca, 2));
            certificates.put("app", &ca.client("app-1", 30).unwrap());
        }
        ServerConfig {
            tls_client_ca: Some(certificates.path("clients-ca.pem")),
            tls_client_auth: ClientCertificates::Required,
            ..certificates.node(node, config)
        }
    })
    .await;
    trio.connected().await;
    hello(&trio, "node-2", "ca", 2).await.unwrap();
    let error = hello(&trio, "forged", "ca", 2).await.unwrap_err();
    assert!(format!("{error:?}").contains("trusts no CA that signed"), "{error:?}");
    let client = |name| Some(trio.certificates.client(name, "ca"));
    metadata(trio.server(1), client("app")).await.unwrap();
    refused(trio.server(1), client("client"), "trusts no CA that signed").await;
    trio.shutdown().await;
}
