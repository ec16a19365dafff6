//! Certificates of the node and handshakes of its ports, for health and metrics.

use std::sync::Arc;

use helix_tls::{Acceptor, CertificateInfo, CertificateKind, CertificateStore};

use super::Node;
use crate::limits::CERTIFICATE_WARNING;

/// TLS of a node.
#[derive(Debug)]
pub struct NodeTls {
    pub store: Arc<CertificateStore>,
    /// Of each port with TLS.
    pub acceptors: Vec<Arc<Acceptor>>,
}

impl NodeTls {
    /// Returns warnings for the operator: certificates that expire soon, or files that are not
    /// valid.
    pub fn warnings(&self) -> Vec<String> {
        let set = self.store.current();
        let certificates = set.certificates();
        // Of several CAs the last one to expire matters.
        let is_last_ca = |info: &CertificateInfo| {
            let same = certificates.iter().filter(|other| other.kind == info.kind);
            same.map(|other| other.not_after).max() == Some(info.not_after)
        };
        let warning = CERTIFICATE_WARNING.as_secs() as i64;
        let soon = certificates.iter().filter(|info| info.seconds_left() < warning);
        let soon = soon.filter(|info| {
            !matches!(info.kind, CertificateKind::Ca | CertificateKind::ClientCa)
                || is_last_ca(info)
        });
        let expiring = soon.map(|info| {
            let CertificateInfo { kind, name, serial, .. } = info;
            let kind = kind.as_str();
            match info.seconds_left() {
                left @ 0.. => format!(
                    "the {kind} certificate {name:?} (serial {serial}) expires in {} days; replace \
                     its file",
                    left / 86_400
                ),
                _ => format!(
                    "the {kind} certificate {name:?} (serial {serial}) has expired; replace its \
                     file"
                ),
            }
        });
        let error = self.store.status().error;
        let invalid = error.map(|error| {
            format!("the new certificates are not valid, the ones before are in use: {error}")
        });
        expiring.chain(invalid).collect()
    }
}

impl Node {
    /// Sets what the node reports about TLS.
    pub fn set_tls(&self, tls: NodeTls) {
        // Ignored: a node is served once.
        let _ = self.tls.set(tls);
    }

    /// Returns TLS of this node; `None` if it is off.
    pub fn tls(&self) -> Option<&NodeTls> {
        self.tls.get()
    }
}
