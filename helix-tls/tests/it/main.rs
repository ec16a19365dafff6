//! Handshakes of acceptors and connectors over connections in memory, and reloads of files.

// Tests unwrap: the panic is the report.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use helix_tls::issue::{CertificateAuthority, IssuedPair};
use helix_tls::{
    AcceptedSocket, Acceptor, AcceptorOptions, CallerCa, CertificateFiles, CertificateKind,
    CertificateNames, CertificateStore, ClientAuth, Connector, HandshakeError, NodeRule,
    PlaintextRule, ServerRule, TlsSocket,
};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::time::Instant;

const HOSTS: [&str; 2] = ["n1.example", "127.0.0.1"];

/// A directory with the files of several CAs.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        files.put("a", &CertificateAuthority::create("alpha", 30).unwrap());
        files.put("b", &CertificateAuthority::create("beta", 30).unwrap());
        // Another CA of a cluster with the same name.
        files.put("a2", &CertificateAuthority::create("alpha", 30).unwrap());
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn put(&self, name: &str, pair: &IssuedPair) {
        std::fs::write(self.path(&format!("{name}.pem")), &pair.certificate).unwrap();
        std::fs::write(self.path(&format!("{name}.key")), &pair.key).unwrap();
    }

    fn ca(&self, name: &str) -> CertificateAuthority {
        let read =
            |suffix: &str| std::fs::read_to_string(self.path(&format!("{name}.{suffix}"))).unwrap();
        CertificateAuthority::open(&read("pem"), &read("key")).unwrap()
    }

    /// Makes a certificate of a node.
    fn node(&self, name: &str, ca: &str, node_id: u64, days: u32) {
        self.put(name, &self.ca(ca).node(node_id, &HOSTS.map(str::to_owned), days).unwrap());
    }

    fn files(&self, name: &str, ca: &[&str]) -> CertificateFiles {
        let own = |suffix: &str| (!name.is_empty()).then(|| self.path(&format!("{name}.{suffix}")));
        CertificateFiles {
            certificate: own("pem"),
            key: own("key"),
            ca: ca.iter().map(|ca| self.path(&format!("{ca}.pem"))).collect(),
            client_ca: Vec::new(),
        }
    }

    fn store(&self, name: &str, ca: &[&str]) -> Arc<CertificateStore> {
        CertificateStore::open(self.files(name, ca), None).unwrap()
    }
}

fn options(client_auth: ClientAuth, plaintext: PlaintextRule) -> AcceptorOptions {
    AcceptorOptions {
        port: "test",
        client_auth,
        caller_ca: CallerCa::Clients,
        plaintext,
        protocol: helix_tls::ALPN_H2,
        deadline: Duration::from_secs(5),
        handshakes_max: 8,
    }
}

fn acceptor(store: &Arc<CertificateStore>, client_auth: ClientAuth) -> Acceptor {
    Acceptor::new(store.clone(), options(client_auth, PlaintextRule::Refuse)).unwrap()
}

type Accepted = Result<AcceptedSocket<DuplexStream>, HandshakeError>;
type Connected = Result<TlsSocket<DuplexStream>, HandshakeError>;

/// Makes a handshake, and sends a byte each way so that late alerts arrive.
async fn shake(acceptor: &Acceptor, connector: &Connector, host: &str) -> (Accepted, Connected) {
    let (near, far) = duplex(64 << 10);
    let accepting = async {
        let mut accepted = acceptor.accept(far, "client").await?;
        accepted.socket.write_all(b"x").await.unwrap();
        accepted.socket.flush().await.unwrap();
        Ok(accepted)
    };
    let connecting = async {
        let mut socket = connector.connect(near, host).await?;
        match socket.read_u8().await {
            Ok(_) => Ok(socket),
            Err(error) => Err(HandshakeError::Ended(error)),
        }
    };
    tokio::join!(accepting, connecting)
}

fn said(result: Result<impl Sized, HandshakeError>) -> String {
    match result {
        Ok(_) => "ok".to_owned(),
        Err(HandshakeError::Ended(error)) => {
            helix_tls::describe_tls_error(&error).unwrap_or_else(|| error.to_string())
        }
        Err(error) => error.to_string(),
    }
}

#[tokio::test]
async fn a_server_is_verified_by_ca_name_and_time() {
    let files = Files::new();
    files.node("n1", "a", 1, 30);
    files.node("old", "a", 1, 0);
    let trusting = Connector::new(files.store("", &["a"]), ServerRule::HostName).unwrap();
    let other = Connector::new(files.store("", &["b"]), ServerRule::HostName).unwrap();
    let both = Connector::new(files.store("", &["b", "a"]), ServerRule::HostName).unwrap();
    let n1 = acceptor(&files.store("n1", &["a"]), ClientAuth::Off);
    let old = acceptor(&files.store("old", &["a"]), ClientAuth::Off);
    for connector in [&trusting, &both] {
        for host in HOSTS {
            let (accepted, connected) = shake(&n1, connector, host).await;
            assert_eq!((said(connected), accepted.unwrap().names), ("ok".to_owned(), None));
        }
    }
    let (accepted, connected) = shake(&n1, &other, "127.0.0.1").await;
    assert!(said(connected).contains("signed by no CA that this side trusts"));
    assert!(said(accepted).contains("trusts no CA that signed this side's"));
    let (_, connected) = shake(&n1, &trusting, "n2.example").await;
    let said_of_name = said(connected);
    assert!(said_of_name.contains("not for n2.example"), "{said_of_name}");
    assert!(said_of_name.contains("n1.example"), "{said_of_name}");
    let (_, connected) = shake(&old, &trusting, "127.0.0.1").await;
    assert!(said(connected).contains("has expired"));
    assert_eq!(n1.counts()[..2], [("succeeded", 4), ("failed", 2)]);
}

#[tokio::test]
async fn a_client_is_verified_if_that_is_set() {
    let files = Files::new();
    files.node("n1", "a", 1, 30);
    files.put("app", &files.ca("a").client("app-1", 30).unwrap());
    files.put("late", &files.ca("a").client("app-1", 0).unwrap());
    files.put("stranger", &files.ca("b").client("app-1", 30).unwrap());
    let client =
        |name: &str| Connector::new(files.store(name, &["a"]), ServerRule::HostName).unwrap();
    let required = acceptor(&files.store("n1", &["a"]), ClientAuth::Required);
    let optional = acceptor(&files.store("n1", &["a"]), ClientAuth::Optional);
    let off = acceptor(&files.store("n1", &["a"]), ClientAuth::Off);
    for (port, name, of_client, of_server) in [
        (&required, "app", "ok", "ok"),
        (&optional, "app", "ok", "ok"),
        (&off, "app", "ok", "ok"),
        (&optional, "", "ok", "ok"),
        (&off, "stranger", "ok", "ok"),
        (&required, "", "requires a client certificate", "presents no certificate"),
        (&required, "late", "it has expired", "has expired"),
        (&optional, "late", "it has expired", "has expired"),
        (&required, "stranger", "trusts no CA", "signed by no CA"),
        (&optional, "stranger", "trusts no CA", "signed by no CA"),
    ] {
        let (accepted, connected) = shake(port, &client(name), "127.0.0.1").await;
        let names = accepted.as_ref().ok().and_then(|accepted| accepted.names.clone());
        let (server, client) = (said(accepted), said(connected));
        assert!(client.contains(of_client) && server.contains(of_server), "{client} / {server}");
        let is_named = name == "app" && !std::ptr::eq(port, &off);
        assert_eq!(names.is_some(), is_named);
        if let Some(names) = names {
            assert_eq!(names.shown_name(), Some("app-1"));
        }
    }
}

#[tokio::test]
async fn a_node_is_verified_by_cluster_and_node_id() {
    let files = Files::new();
    files.node("n1", "a", 1, 30);
    files.node("n2", "a", 2, 30);
    files.node("x2", "b", 2, 30);
    files.put("app", &files.ca("a").client("app-1", 30).unwrap());
    let n1 = Connector::new(files.store("n1", &["a", "b"]), ServerRule::Node).unwrap();
    let n2 = acceptor(&files.store("n2", &["a"]), ClientAuth::Required);
    let x2 = acceptor(&files.store("x2", &["a", "b"]), ClientAuth::Required);
    let (accepted, connected) = shake(&n2, &n1, "node-2").await;
    assert_eq!(said(connected), "ok");
    let uri = "helix://cluster/alpha/node/1";
    assert_eq!(accepted.unwrap().names.unwrap().shown_name(), Some(uri));
    let (_, connected) = shake(&n2, &n1, "node-3").await;
    let said_of_node = said(connected);
    assert!(said_of_node.contains("node 3 was dialed"), "{said_of_node}");
    assert!(said_of_node.contains("is for node 2"), "{said_of_node}");
    let (_, connected) = shake(&x2, &n1, "node-2").await;
    let said_of_cluster = said(connected);
    assert!(said_of_cluster.contains("cluster \"beta\""), "{said_of_cluster}");
    let error = Connector::new(files.store("app", &["a"]), ServerRule::Node).unwrap_err();
    assert!(error.contains("names no node"), "{error}");
}

#[tokio::test]
async fn plaintext_is_served_or_refused_with_the_reason() {
    let files = Files::new();
    files.node("n1", "a", 1, 30);
    let store = files.store("n1", &["a"]);
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let strict = acceptor(&store, ClientAuth::Off);
    let (mut near, far) = duplex(1 << 10);
    let client = async {
        near.write_all(preface).await.unwrap();
        near.shutdown().await.unwrap();
        let mut response = Vec::new();
        near.read_to_end(&mut response).await.unwrap();
        response
    };
    let (accepted, response) = tokio::join!(strict.accept(far, "client"), client);
    assert!(matches!(accepted, Err(HandshakeError::Plaintext)));
    assert!(response.ends_with(b"this port requires TLS"));
    let lenient = options(ClientAuth::Off, PlaintextRule::Accept);
    let lenient = Acceptor::new(store, lenient).unwrap();
    let (mut near, far) = duplex(1 << 10);
    near.write_all(preface).await.unwrap();
    let mut accepted = lenient.accept(far, "client").await.unwrap();
    assert!(!accepted.socket.is_encrypted());
    let mut read = vec![0; preface.len()];
    accepted.socket.read_exact(&mut read).await.unwrap();
    assert_eq!(read, preface);
    let client = Connector::new(files.store("", &["a"]), ServerRule::HostName).unwrap();
    let (accepted, connected) = shake(&lenient, &client, "127.0.0.1").await;
    assert_eq!(said(connected), "ok");
    assert!(accepted.unwrap().socket.is_encrypted());
    // A server without TLS answers a handshake with HTTP/2 settings.
    let (near, mut far) = duplex(1 << 10);
    far.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
    let error = client.connect(near, "127.0.0.1").await.unwrap_err();
    assert!(matches!(error, HandshakeError::Plaintext), "{error}");
}

#[tokio::test]
async fn an_invalid_record_is_not_plaintext() {
    let files = Files::new();
    files.node("n1", "a", 1, 30);
    let store = files.store("n1", &["a"]);
    for plaintext in [PlaintextRule::Refuse, PlaintextRule::Accept] {
        let port = Acceptor::new(store.clone(), options(ClientAuth::Off, plaintext)).unwrap();
        // The type of a handshake, and no version of TLS.
        for record in [[0x16, b'P', b'R', b'I', b' '], [0x16, 3, 1, 0xff, 0xff]] {
            let (mut near, far) = duplex(1 << 10);
            near.write_all(&record).await.unwrap();
            near.shutdown().await.unwrap();
            let error = port.accept(far, "client").await.unwrap_err();
            assert!(matches!(error, HandshakeError::Rejected(_)), "{error:?}");
            assert!(error.to_string().contains("invalid TLS record"), "{error}");
        }
        let counts = port.counts();
        assert!(
            counts.contains(&("failed", 2)) && counts.contains(&("plaintext", 0)),
            "{counts:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn half_open_handshakes_make_way_and_end() {
    let files = Files::new();
    files.node("n1", "a", 1, 30);
    let port = Arc::new(acceptor(&files.store("n1", &["a"]), ClientAuth::Off));
    let mut silent = Vec::new();
    for _ in 0..100 {
        let (near, far) = duplex(1 << 10);
        let port = port.clone();
        silent.push((near, tokio::spawn(async move { port.accept(far, "client").await.err() })));
    }
    // The runtime runs some tasks in each turn.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    let client = Connector::new(files.store("", &["a"]), ServerRule::HostName).unwrap();
    let (accepted, connected) = shake(&port, &client, "127.0.0.1").await;
    assert_eq!((said(accepted), said(connected)), ("ok".to_owned(), "ok".to_owned()));
    let (mut displaced, mut timed_out) = (0, 0);
    for (_near, handshake) in silent {
        match handshake.await.unwrap() {
            Some(HandshakeError::Displaced) => displaced += 1,
            Some(HandshakeError::TimedOut) => timed_out += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((displaced, timed_out), (93, 7));
}

#[tokio::test]
async fn ten_thousand_silent_connections_leave_others_served() {
    const SILENT: u64 = 10_000;
    const OPEN_MAX: usize = 256;
    let files = Files::new();
    files.node("n1", "a", 1, 30);
    let store = files.store("n1", &["a"]);
    let deadline = Duration::from_secs(600);
    let options = options(ClientAuth::Off, PlaintextRule::Refuse);
    let options = AcceptorOptions { deadline, handshakes_max: OPEN_MAX, ..options };
    let port = Arc::new(Acceptor::new(store, options).unwrap());
    let client = Connector::new(files.store("", &["a"]), ServerRule::HostName).unwrap();
    let (mut silent, started) = (Vec::new(), Arc::new(AtomicU64::new(0)));
    for number in 1..=SILENT {
        let (mut near, far) = duplex(64);
        if number % 2 == 0 {
            // The start of a handshake.
            near.write_all(&[0x16, 3, 1, 0x40, 0, 1]).await.unwrap();
        }
        let (accepting, starting) = (port.clone(), started.clone());
        tokio::spawn(async move {
            starting.fetch_add(1, Ordering::Relaxed);
            accepting.accept(far, "client").await.err()
        });
        silent.push(near);
        if number % 1_000 == 0 {
            // Handshakes that start after the good one would displace it.
            while started.load(Ordering::Relaxed) < number {
                tokio::task::yield_now().await;
            }
            let served = shake(&port, &client, "127.0.0.1");
            let served = tokio::time::timeout(Duration::from_secs(10), served).await;
            let (accepted, connected) = served.expect("a good client is served in time");
            assert_eq!((said(accepted), said(connected)), ("ok".to_owned(), "ok".to_owned()));
        }
    }
    let count = |result: &str| port.counts().iter().find(|it| it.0 == result).unwrap().1;
    assert_eq!((count("succeeded"), count("timed_out"), count("failed")), (10, 0, 0));
    assert!(count("displaced") >= SILENT - OPEN_MAX as u64 - 1_000, "{}", count("displaced"));
}

#[tokio::test]
async fn another_ca_of_the_same_name_is_named_as_the_cause() {
    let files = Files::new();
    let same_name = |_| {
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, "CA");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let uri = "helix://cluster/alpha".try_into().unwrap();
        params.subject_alt_names = vec![rcgen::SanType::URI(uri)];
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().pem();
        (certificate, key.serialize_pem())
    };
    for (name, (certificate, key)) in ["c1", "c2"].map(|name| (name, same_name(name))) {
        std::fs::write(files.path(&format!("{name}.pem")), certificate).unwrap();
        std::fs::write(files.path(&format!("{name}.key")), key).unwrap();
    }
    files.node("n1", "c1", 1, 30);
    let port = acceptor(&files.store("n1", &["c1"]), ClientAuth::Required);
    let distrusting = Connector::new(files.store("", &["c2"]), ServerRule::HostName).unwrap();
    let (accepted, connected) = shake(&port, &distrusting, "127.0.0.1").await;
    assert!(said(connected).contains("signed by no CA that this side trusts"));
    assert!(said(accepted).contains("trusts no CA that signed"));
    files.node("n2", "c2", 2, 30);
    let distrusted = Connector::new(files.store("n2", &["c1"]), ServerRule::HostName).unwrap();
    let (accepted, connected) = shake(&port, &distrusted, "127.0.0.1").await;
    assert!(said(accepted).contains("signed by no CA that this side trusts"));
    assert!(said(connected).contains("trusts no CA that signed"));
}

/// Makes a certificate that an intermediate CA signs, and its root `NAME-root.pem`. The certificate
/// and that of the intermediate CA expire after these seconds.
fn put_chain(files: &Files, name: &str, leaf_left: u64, intermediate_left: u64) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let params = |role: &str, left: u64| {
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, format!("{role} of {name}"));
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(now + left);
        params
    };
    let ca = |role: &str, left: u64| {
        let mut params = params(role, left);
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params
    };
    let key = || rcgen::KeyPair::generate().unwrap();
    let (root_params, root_key) = (ca("root", 3600), key());
    let root_pem = root_params.self_signed(&root_key).unwrap().pem();
    let root = rcgen::Issuer::new(root_params, root_key);
    let (ca_params, ca_key) = (ca("intermediate", intermediate_left), key());
    let ca_pem = ca_params.signed_by(&ca_key, &root).unwrap().pem();
    let intermediate = rcgen::Issuer::new(ca_params, ca_key);
    let mut leaf_params = params("leaf", leaf_left);
    leaf_params.subject_alt_names = vec![rcgen::SanType::IpAddress("127.0.0.1".parse().unwrap())];
    let leaf_key = key();
    let leaf_pem = leaf_params.signed_by(&leaf_key, &intermediate).unwrap().pem();
    std::fs::write(files.path(&format!("{name}-root.pem")), root_pem).unwrap();
    std::fs::write(files.path(&format!("{name}.pem")), leaf_pem + &ca_pem).unwrap();
    std::fs::write(files.path(&format!("{name}.key")), leaf_key.serialize_pem()).unwrap();
}

/// Makes handshakes, of which the first succeeds, until a side rejects the other. Returns why.
async fn first_rejection(port: Acceptor, connector: Connector) -> String {
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut succeeded = 0;
    loop {
        let (near, far) = duplex(64 << 10);
        let connecting = connector.connect(near, "127.0.0.1");
        match tokio::join!(port.accept(far, "client"), connecting) {
            (Ok(_), Ok(_)) => succeeded += 1,
            (Err(HandshakeError::Rejected(why)), _) | (_, Err(HandshakeError::Rejected(why))) => {
                assert!(succeeded > 0, "{why}");
                return why;
            }
            other => panic!("{other:?}"),
        }
        assert!(Instant::now() < deadline, "{succeeded} handshakes, and none was rejected");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn sessions_are_not_resumed_after_a_certificate_of_the_chain_has_expired() {
    let files = Files::new();
    files.node("n1", "a", 1, 30);
    files.put("app", &files.ca("a").client("app-1", 30).unwrap());
    let mut rejections = Vec::new();
    for (name, leaf_left, intermediate_left) in [("leaf", 4, 3600), ("intermediate", 3600, 4)] {
        put_chain(&files, name, leaf_left, intermediate_left);
        let root = format!("{name}-root");
        // The server's chain expires, then the client's.
        let port = acceptor(&files.store(name, &["a"]), ClientAuth::Required);
        let client = Connector::new(files.store("app", &[&root]), ServerRule::HostName).unwrap();
        rejections.push(first_rejection(port, client));
        let port = acceptor(&files.store("n1", &[&root]), ClientAuth::Required);
        let client = Connector::new(files.store(name, &["a"]), ServerRule::HostName).unwrap();
        rejections.push(first_rejection(port, client));
    }
    for why in futures_util::future::join_all(rejections).await {
        assert!(why.contains("the other side has expired"), "{why}");
    }
}

/// Replaces a file as tools do: by another one of the same name.
fn replace(path: &Path, with: &Path) {
    let temporary = path.with_extension("new");
    std::fs::copy(with, &temporary).unwrap();
    std::fs::rename(temporary, path).unwrap();
}

#[tokio::test]
async fn new_files_are_taken_as_a_pair_or_not_at_all() {
    let files = Files::new();
    files.node("own", "a", 1, 30);
    files.node("next", "a", 1, 20);
    files.node("two", "a", 2, 20);
    files.node("late", "a", 1, 0);
    let rule = NodeRule { node_id: 1, cluster: Some("alpha".to_owned()) };
    let open = |name: &str| CertificateStore::open(files.files(name, &["a"]), Some(rule.clone()));
    let store = open("own").unwrap();
    let said_of_two = open("two").unwrap_err().to_string();
    assert!(said_of_two.contains("is for node 2, and this is node 1"), "{said_of_two}");
    let serial = || store.current().certificates()[0].serial.clone();
    let first = serial();
    let (certificate, key) = (files.path("own.pem"), files.path("own.key"));
    // The certificate arrives before its key: it is not used, and that is no failure yet.
    replace(&certificate, &files.path("next.pem"));
    store.refresh();
    assert_eq!((serial(), store.status().failed, store.status().error), (first.clone(), 0, None));
    replace(&key, &files.path("next.key"));
    store.refresh();
    let second = serial();
    assert_ne!(second, first);
    assert_eq!((store.status().succeeded, store.status().failed), (1, 0));
    for (pem, secret, what) in [
        ("two", "two", "is for node 2"),
        ("late", "late", "has expired already"),
        ("two", "next", "is for node 2"),
        ("next", "two", "is not the private key of"),
        ("ca", "next", "cannot be read"),
    ] {
        std::fs::remove_file(&certificate).unwrap();
        if pem != "ca" {
            replace(&certificate, &files.path(&format!("{pem}.pem")));
        }
        replace(&key, &files.path(&format!("{secret}.key")));
        store.refresh();
        store.refresh();
        let error = store.status().error.unwrap();
        assert!(error.contains(what), "{error}");
        assert_eq!(serial(), second);
        // The same problem counts once.
        let failed = store.status().failed;
        store.refresh();
        assert_eq!(store.status().failed, failed);
    }
    replace(&certificate, &files.path("next.pem"));
    replace(&key, &files.path("next.key"));
    store.refresh();
    assert_eq!(store.status().error, None);
}

#[test]
fn a_certificate_is_taken_once_it_is_valid() {
    let files = Files::new();
    files.node("own", "a", 1, 30);
    let store = files.store("own", &["a"]);
    let serial = || store.current().certificates()[0].serial.clone();
    let first = serial();
    let put = |valid_after: i64| {
        let mut params = rcgen::CertificateParams::default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let from = now.checked_add_signed(valid_after).unwrap();
        params.not_before = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(from);
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().pem();
        files.put("own", &IssuedPair { certificate, key: key.serialize_pem() });
    };
    put(3600);
    store.refresh();
    store.refresh();
    let error = store.status().error.unwrap();
    assert!(error.contains("own.pem: the new certificate is not valid yet"), "{error}");
    assert_eq!((serial(), store.status().failed), (first.clone(), 1));
    store.refresh();
    assert_eq!(store.status().failed, 1, "the same problem counts once");
    put(-60);
    store.refresh();
    assert_eq!(store.status().error, None);
    assert_ne!(serial(), first);
}

#[test]
fn a_certificate_that_other_nodes_would_refuse_is_not_taken() {
    let files = Files::new();
    files.node("own", "a", 1, 30);
    files.node("next", "a2", 1, 30);
    let rule = NodeRule { node_id: 1, cluster: Some("alpha".to_owned()) };
    let store = CertificateStore::open(files.files("own", &["a"]), Some(rule)).unwrap();
    let serial = || store.current().certificates()[0].serial.clone();
    let take = |name: &str| {
        for suffix in ["pem", "key"] {
            let own = files.path(&format!("own.{suffix}"));
            replace(&own, &files.path(&format!("{name}.{suffix}")));
        }
        store.refresh();
        store.refresh();
    };
    let read = |name: &str| std::fs::read_to_string(files.path(name)).unwrap();
    let first = serial();
    take("next");
    let error = store.status().error.unwrap();
    assert!(error.contains("own.pem: is signed by no CA of the CA file"), "{error}");
    assert_eq!((serial(), store.status().failed), (first.clone(), 1));
    // The documented order: the new CA first.
    let (old_ca, new_ca) = (read("a.pem"), read("a2.pem"));
    std::fs::write(files.path("a.pem"), format!("{old_ca}{new_ca}")).unwrap();
    store.refresh();
    assert_eq!((store.status().succeeded, store.status().error), (1, None));
    assert_ne!(serial(), first);
    let names = CertificateNames {
        uris: vec!["helix://cluster/alpha/node/1".to_owned()],
        ..CertificateNames::default()
    };
    files.put("client-only", &files.ca("a2").client_with_names(&names, 30).unwrap());
    let second = serial();
    take("client-only");
    let error = store.status().error.unwrap();
    assert!(error.contains("needs the extended key usages"), "{error}");
    assert_eq!(serial(), second);
    take("next");
    // The CA that signed the own certificate is not removed, nor replaced by an unrelated one.
    let third = serial();
    files.put("unrelated", &CertificateAuthority::create("alpha", 30).unwrap());
    for ca in [&old_ca, &read("unrelated.pem")] {
        std::fs::write(files.path("a.pem"), ca).unwrap();
        store.refresh();
        store.refresh();
        let error = store.status().error.unwrap();
        let what = "a.pem: the certificate of this node is signed by no CA of the CA file";
        assert!(error.contains(what), "{error}");
        assert_eq!((serial(), store.current().certificates().len()), (third.clone(), 3));
    }
    // The last step of the documented order: a CA that signed nothing in use is removed.
    std::fs::write(files.path("a.pem"), new_ca).unwrap();
    store.refresh();
    assert_eq!((store.status().succeeded, store.status().error), (2, None));
    assert_eq!(store.current().certificates().len(), 2);
}

#[test]
fn a_certificate_that_has_expired_keeps_no_new_ca_out() {
    let files = Files::new();
    files.node("own", "a", 1, 0);
    let rule = NodeRule { node_id: 1, cluster: Some("alpha".to_owned()) };
    let store = CertificateStore::open(files.files("own", &["a"]), Some(rule)).unwrap();
    let read = |name: &str| std::fs::read_to_string(files.path(name)).unwrap();
    store.current().check_own_issuer().unwrap();
    let both = format!("{}{}", read("a.pem"), read("a2.pem"));
    std::fs::write(files.path("a.pem"), both).unwrap();
    store.refresh();
    assert_eq!((store.status().succeeded, store.status().error), (1, None));
    replace(&files.path("a.pem"), &files.path("a2.pem"));
    store.refresh();
    store.refresh();
    assert!(store.status().error.unwrap().contains("signed by no CA"));
}

#[test]
fn a_new_ca_is_taken_beside_an_expired_certificate() {
    let files = Files::new();
    files.node("own", "a", 1, 0);
    let store = files.store("own", &["a"]);
    let ca = || store.current().certificates()[1].serial.clone();
    let first = ca();
    replace(&files.path("a.pem"), &files.path("a2.pem"));
    store.refresh();
    assert_eq!((store.status().succeeded, store.status().error), (1, None));
    assert_ne!(ca(), first);
    // Another certificate that has expired replaces nothing.
    files.node("own", "b", 1, 0);
    store.refresh();
    store.refresh();
    let error = store.status().error.unwrap();
    assert!(error.contains("has expired already"), "{error}");
}

#[tokio::test]
async fn a_rotation_affects_new_connections_only() {
    let files = Files::new();
    files.node("own", "a", 1, 30);
    files.node("next", "a2", 1, 30);
    let store = files.store("own", &["a"]);
    let port = acceptor(&store, ClientAuth::Off);
    let old = Connector::new(files.store("", &["a"]), ServerRule::HostName).unwrap();
    let new = Connector::new(files.store("", &["a2"]), ServerRule::HostName).unwrap();
    let (accepted, connected) = shake(&port, &old, "127.0.0.1").await;
    let (mut server, mut client) = (accepted.unwrap().socket, connected.unwrap());
    replace(&files.path("own.pem"), &files.path("next.pem"));
    replace(&files.path("own.key"), &files.path("next.key"));
    store.refresh();
    // A session of before the rotation is not resumed.
    assert!(said(shake(&port, &old, "127.0.0.1").await.1).contains("signed by no CA"));
    assert_eq!(said(shake(&port, &new, "127.0.0.1").await.1), "ok");
    server.write_all(b"y").await.unwrap();
    server.flush().await.unwrap();
    assert_eq!(client.read_u8().await.unwrap(), b'y');
}

#[tokio::test]
async fn an_accepted_connection_buffers_little_that_its_client_has_not_read() {
    let files = Files::new();
    files.node("n1", "a", 1, 30);
    let port = acceptor(&files.store("n1", &["a"]), ClientAuth::Off);
    let client = Connector::new(files.store("", &["a"]), ServerRule::HostName).unwrap();
    let (accepted, connected) = shake(&port, &client, "127.0.0.1").await;
    let (mut server, _client) = (accepted.unwrap().socket, connected.unwrap());
    let part = [0; 16 << 10];
    let mut written = 0;
    while let Some(bytes) = futures_util::FutureExt::now_or_never(server.write(&part)) {
        written += bytes.unwrap();
    }
    // The connection in memory holds 64 KiB; rustls would buffer as much by default.
    assert!((64 << 10..112 << 10).contains(&written), "{written}");
}

#[test]
fn secrets_are_never_shown() {
    let files = Files::new();
    files.node("n1", "a", 1, 30);
    let key = std::fs::read_to_string(files.path("n1.key")).unwrap();
    let secret = key.lines().nth(1).unwrap();
    let bytes = format!("{:?}", &key.as_bytes()[28..36]);
    let store = files.store("n1", &["a"]);
    let pair = files.ca("a").client("app", 1).unwrap();
    let shown = format!("{store:?} {:?} {pair:?} {:?}", store.current(), files.ca("a"));
    assert!(!shown.contains(secret) && !shown.contains("PRIVATE KEY"), "{shown}");
    assert!(!shown.contains(bytes.trim_matches(['[', ']'])), "{shown}");
    // A key in the place of a certificate is not shown either.
    let wrong =
        CertificateFiles { certificate: Some(files.path("n1.key")), ..files.files("n1", &["a"]) };
    let error = CertificateStore::open(wrong, None).unwrap_err().to_string();
    assert!(error.contains("has no certificate") && !error.contains(secret), "{error}");
}

#[test]
fn files_that_are_not_certificates_are_rejected() {
    let files = Files::new();
    files.node("n1", "a", 1, 30);
    let broken = files.path("broken.pem");
    let open = |contents: &[u8]| {
        std::fs::write(&broken, contents).unwrap();
        let files = CertificateFiles { ca: vec![broken.clone()], ..CertificateFiles::default() };
        CertificateStore::open(files, None).map(drop)
    };
    let pem = std::fs::read(files.path("a.pem")).unwrap();
    open(&pem).unwrap();
    for contents in [
        &b""[..],
        b"hello",
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
        &vec![b'\n'; (1 << 20) + 1],
    ] {
        open(contents).unwrap_err();
    }
    // Each certificate of a file is taken, or the line says what is wrong.
    let text = String::from_utf8(pem.clone()).unwrap();
    let second = std::fs::read_to_string(files.path("a2.pem")).unwrap();
    let last = text.lines().count();
    let taken = |contents: &str| {
        std::fs::write(&broken, contents).unwrap();
        let files = CertificateFiles { ca: vec![broken.clone()], ..CertificateFiles::default() };
        CertificateStore::open(files, None).map(|store| store.current().certificates().len())
    };
    assert_eq!(taken(&format!("\u{feff}{text}{second}")), Ok(2));
    assert_eq!(taken(&format!("  {text}{second}")), Ok(2));
    for (contents, line) in [
        (format!("{}{second}", text.trim_end()), last),
        (format!("{text}{}", second.replace("CERTIFICATE", "TRUSTED CERTIFICATE")), last + 1),
        (format!("{text}{}", second.replace("CERTIFICATE", "X509 CRL")), last + 1),
        (format!("{text}{}", second.replacen("-----BEGIN CERTIFICATE-----\n", "", 1)), last + 1),
    ] {
        let error = taken(&contents).unwrap_err();
        let expected = format!("broken.pem: line {line}: ");
        assert!(error.to_string().contains(&expected), "{expected}: {error}");
    }
    // Bytes that were damaged one after another are rejected or accepted, without a panic.
    for at in 0..pem.len() {
        let mut damaged = pem.clone();
        damaged[at] ^= 1;
        let _ = open(&damaged);
    }
    let ca = files.store("n1", &["a"]).current();
    let kinds: Vec<_> = ca.certificates().iter().map(|info| info.kind).collect();
    assert_eq!(kinds, [CertificateKind::Own, CertificateKind::Ca]);
}

#[test]
fn a_key_is_the_only_one_of_its_file_and_may_stand_beside_its_certificate() {
    let files = Files::new();
    files.node("n1", "a", 1, 30);
    let read = |name: &str| std::fs::read_to_string(files.path(name)).unwrap();
    let open = |key: String| {
        std::fs::write(files.path("n1.key"), key).unwrap();
        CertificateStore::open(files.files("n1", &["a"]), None).map(drop)
    };
    let (key, certificate) = (read("n1.key"), read("n1.pem"));
    let parameters = "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----";
    open(format!("{certificate}{key}")).unwrap();
    open(format!("{parameters}\n{key}")).unwrap();
    for (wrong, what) in [
        (format!("{key}{key}"), "is a second private key"),
        (format!("{certificate}{}", key.trim_start_matches('-')), "looks like a marker"),
        (format!("{}{certificate}", key.trim_end()), "must end with a line"),
        (key.replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY"), "without a password"),
        (format!("{key}{}", key.replace("PRIVATE KEY", "PUBLIC KEY")), "block PUBLIC KEY"),
    ] {
        let error = open(wrong).unwrap_err().to_string();
        assert!(error.contains("n1.key: line ") && error.contains(what), "{what}: {error}");
        let secret = key.lines().nth(1).unwrap();
        assert!(!error.contains(secret), "{error}");
    }
    // The certificate's file may have the key.
    std::fs::write(files.path("n1.pem"), format!("{key}{certificate}")).unwrap();
    open(key).unwrap();
}
