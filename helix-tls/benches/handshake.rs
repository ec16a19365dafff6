//! Handshakes over a connection in memory: both sides together, on one thread.
//!
//! `full` has a new session, `resumed` that of an earlier handshake of the same client. Each reads
//! the first byte of the server, so that the session ticket has arrived.

#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use helix_tls::issue::{CertificateAuthority, IssuedPair};
use helix_tls::{
    Acceptor, AcceptorOptions, CallerCa, CertificateFiles, CertificateStore, ClientAuth, Connector,
    PlaintextRule, ServerRule,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio::runtime;

const HOST: &str = "n1.example";

fn put(directory: &Path, name: &str, pair: &IssuedPair) {
    std::fs::write(directory.join(format!("{name}.pem")), &pair.certificate).unwrap();
    std::fs::write(directory.join(format!("{name}.key")), &pair.key).unwrap();
}

fn store(directory: &Path, name: &str) -> Arc<CertificateStore> {
    let files = CertificateFiles {
        certificate: Some(directory.join(format!("{name}.pem"))),
        key: Some(directory.join(format!("{name}.key"))),
        ca: vec![directory.join("ca.pem")],
        client_ca: Vec::new(),
    };
    CertificateStore::open(files, None).unwrap()
}

async fn shake(acceptor: &Acceptor, connector: &Connector) {
    let (near, far) = duplex(64 << 10);
    let accepting = async {
        let mut accepted = acceptor.accept(far, "client").await.unwrap();
        accepted.socket.write_all(b"x").await.unwrap();
        accepted.socket.flush().await.unwrap();
        accepted
    };
    let connecting = async {
        let mut socket = connector.connect(near, HOST).await.unwrap();
        assert_eq!(socket.read_u8().await.unwrap(), b'x');
        socket
    };
    tokio::join!(accepting, connecting);
}

fn handshake(criterion: &mut Criterion) {
    let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let pair = CertificateAuthority::create("bench", 30).unwrap();
    put(directory, "ca", &pair);
    let ca = CertificateAuthority::open(&pair.certificate, &pair.key).unwrap();
    put(directory, "node", &ca.node(1, &[HOST.to_owned()], 30).unwrap());
    put(directory, "client", &ca.client("app", 30).unwrap());
    let (node, client) = (store(directory, "node"), store(directory, "client"));
    let mut group = criterion.benchmark_group("handshake");
    group.throughput(Throughput::Elements(1));
    for (name, client_auth) in [("server", ClientAuth::Off), ("mutual", ClientAuth::Required)] {
        let options = AcceptorOptions {
            port: "bench",
            client_auth,
            caller_ca: CallerCa::Clients,
            plaintext: PlaintextRule::Refuse,
            protocol: helix_tls::ALPN_H2,
            deadline: Duration::from_secs(5),
            handshakes_max: 8,
        };
        let acceptor = Acceptor::new(node.clone(), options).unwrap();
        let connector = || Connector::new(client.clone(), ServerRule::HostName).unwrap();
        group.bench_function(format!("{name}/full"), |bench| {
            bench.iter_batched(
                connector,
                |connector| runtime.block_on(shake(&acceptor, &connector)),
                BatchSize::SmallInput,
            );
        });
        let known = connector();
        runtime.block_on(shake(&acceptor, &known));
        group.bench_function(format!("{name}/resumed"), |bench| {
            bench.iter(|| runtime.block_on(shake(&acceptor, &known)));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    targets = handshake
}
criterion_main!(benches);
