//! TLS of the ports of one server, from its settings.

use std::sync::Arc;

use helix_tls::{
    Acceptor, AcceptorOptions, CallerCa, CertificateFiles, CertificateStore, ClientAuth, Connector,
    ServerRule,
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::StartError;
use crate::admin::ConsoleDial;
use crate::config::{ClientCertificates, ServerConfig, TlsUse};
use crate::limits;
use crate::node::{NodeTls, PeerTls};

/// TLS of each port; `None` where it is off.
#[derive(Debug, Default)]
pub(super) struct PortsTls {
    pub(super) store: Option<Arc<CertificateStore>>,
    pub(super) clients: Option<Arc<Acceptor>>,
    pub(super) peers: Option<PeerTls>,
    pub(super) admin: Option<Arc<Acceptor>>,
    /// How the console dials the clients' ports of other nodes.
    pub(super) console_dial: ConsoleDial,
}

impl PortsTls {
    /// Reads the certificates.
    pub(super) fn open(config: &ServerConfig) -> Result<Self, StartError> {
        let tls = |error: helix_tls::TlsFilesError| StartError::Tls(error.to_string());
        let Some(store) = config.open_certificates().map_err(tls)? else {
            return Ok(Self::default());
        };
        let acceptor = |options: AcceptorOptions| {
            Acceptor::new(store.clone(), options).map(Arc::new).map_err(StartError::Tls)
        };
        let clients = match config.client_tls() {
            TlsUse::Off => None,
            tls => Some(acceptor(AcceptorOptions {
                handshakes_max: limits::TLS_HANDSHAKES_MAX,
                ..config.acceptor_options("clients", tls, config.tls_client_auth.into())
            })?),
        };
        let peers = match config.peer_tls() {
            TlsUse::Off => None,
            _ if config.peers.is_empty() => None,
            tls => Some(PeerTls {
                acceptor: acceptor(AcceptorOptions {
                    caller_ca: CallerCa::Nodes,
                    ..config.acceptor_options("peers", tls, ClientAuth::Required)
                })?,
                connector: Arc::new(
                    Connector::new(store.clone(), ServerRule::Node).map_err(StartError::Tls)?,
                ),
                allows_plaintext: tls == TlsUse::Optional,
            }),
        };
        let admin = match config.tls_admin {
            TlsUse::Off => None,
            tls => Some(acceptor(AcceptorOptions {
                protocol: helix_tls::ALPN_HTTP1,
                ..config.acceptor_options("admin", tls, ClientAuth::Off)
            })?),
        };
        let console_dial = console_dial(config)?;
        Ok(Self { store: Some(store), clients, peers, admin, console_dial })
    }

    /// Returns what the node reports about its certificates and handshakes.
    pub(super) fn report(&self) -> Option<NodeTls> {
        let peers = self.peers.as_ref().map(|peers| &peers.acceptor);
        let acceptors = self.clients.iter().chain(peers).chain(&self.admin).cloned().collect();
        Some(NodeTls { store: self.store.clone()?, acceptors })
    }

    /// Reads the files again when they change, until the guard is dropped.
    pub(super) fn watch(&self) -> Option<DropGuard> {
        let stop = CancellationToken::new();
        let watching = self.store.clone()?.watch();
        tokio::spawn(stop.clone().run_until_cancelled_owned(watching));
        Some(stop.drop_guard())
    }
}

/// Returns how the console dials other nodes: with TLS, as a client without a certificate.
///
/// The node's own certificate is not used: the other node would take it for the caller's.
fn console_dial(config: &ServerConfig) -> Result<ConsoleDial, StartError> {
    if config.tls_client_auth == ClientCertificates::Required {
        return Ok(ConsoleDial::Never("nodes require certificates of clients"));
    }
    let Some(ca) = config.tls_ca.clone() else {
        return Ok(ConsoleDial::Never("this node has no --tls-ca to verify other nodes with"));
    };
    let files = CertificateFiles { ca: vec![ca], ..CertificateFiles::default() };
    let store = CertificateStore::open(files, None);
    let store = store.map_err(|error| StartError::Tls(error.to_string()))?;
    let connector = Connector::new(store, ServerRule::HostName).map_err(StartError::Tls)?;
    Ok(ConsoleDial::Tls(Arc::new(connector)))
}
