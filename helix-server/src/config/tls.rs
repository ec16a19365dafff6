//! Settings of TLS: which ports use it, and the files of the certificates.

use helix_tls::{
    AcceptorOptions, CertificateFiles, CertificateStore, ClientAuth, NodeRule, PlaintextRule,
    TlsFilesError, check_cluster_name,
};

use super::ServerConfig;
use super::check::ConfigProblems;
use crate::limits;

/// Use of TLS on a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TlsUse {
    /// Connections have no TLS.
    Off,
    /// The first byte of a connection decides.
    Optional,
    /// Connections without TLS are refused.
    Required,
}

/// Certificates of clients on a port with TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ClientCertificates {
    /// None is requested.
    Off,
    /// A certificate that is presented must be valid.
    Optional,
    /// A valid certificate is required.
    Required,
}

impl From<ClientCertificates> for ClientAuth {
    fn from(certificates: ClientCertificates) -> Self {
        match certificates {
            ClientCertificates::Off => Self::Off,
            ClientCertificates::Optional => Self::Optional,
            ClientCertificates::Required => Self::Required,
        }
    }
}

impl TlsUse {
    /// Returns the rule for connections without TLS.
    pub fn plaintext(self) -> PlaintextRule {
        match self {
            Self::Required => PlaintextRule::Refuse,
            Self::Off | Self::Optional => PlaintextRule::Accept,
        }
    }
}

/// Hexadecimal digits of a cluster's id, which `--cluster-id` also accepts.
const CLUSTER_ID_DIGITS: usize = 32;

impl ServerConfig {
    /// Returns the files of the certificates; `None` without a certificate of this node.
    pub fn certificate_files(&self) -> Option<CertificateFiles> {
        self.tls_cert.as_ref()?;
        Some(CertificateFiles {
            certificate: self.tls_cert.clone(),
            key: self.tls_key.clone(),
            ca: self.tls_ca.iter().cloned().collect(),
            client_ca: self.tls_client_ca.iter().cloned().collect(),
        })
    }

    /// Returns the use of TLS on the clients' port.
    pub fn client_tls(&self) -> TlsUse {
        self.tls_clients.unwrap_or(self.default_tls())
    }

    /// Returns the use of TLS on the peer port.
    pub fn peer_tls(&self) -> TlsUse {
        self.tls_peers.unwrap_or(self.default_tls())
    }

    fn default_tls(&self) -> TlsUse {
        if self.tls_cert.is_some() { TlsUse::Required } else { TlsUse::Off }
    }

    /// Returns the most TLS handshakes that are open at once, over all ports.
    pub(crate) fn tls_handshakes_max(&self) -> u64 {
        let of_nodes = limits::TLS_HANDSHAKES_OF_NODES_MAX;
        let ports = [
            (self.client_tls() != TlsUse::Off, limits::TLS_HANDSHAKES_MAX),
            (self.peer_tls() != TlsUse::Off && !self.peers.is_empty(), of_nodes),
            (self.tls_admin != TlsUse::Off && self.admin_listen_addr().is_some(), of_nodes),
        ];
        ports.into_iter().map(|(is_open, max)| if is_open { max as u64 } else { 0 }).sum()
    }

    /// Returns the node that the certificate must be for, if nodes verify it.
    pub fn node_rule(&self) -> Option<NodeRule> {
        let is_verified = self.peer_tls() != TlsUse::Off && !self.peers.is_empty();
        let is_id = |name: &str| {
            name.len() == CLUSTER_ID_DIGITS && name.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        let cluster = self.cluster_id.clone().filter(|name| !is_id(name));
        is_verified.then_some(NodeRule { node_id: self.node_id, cluster })
    }

    /// Opens the store of the certificates; `None` without TLS.
    ///
    /// # Errors
    /// A file cannot be read or is not valid, or the files do not fit together.
    pub fn open_certificates(
        &self,
    ) -> Result<Option<std::sync::Arc<CertificateStore>>, TlsFilesError> {
        let files = self.certificate_files();
        files.map(|files| CertificateStore::open(files, self.node_rule())).transpose()
    }

    /// Checks that the CAs of `--tls-ca` signed the certificate of this node. Returns a warning if
    /// they did not and no other node verifies it.
    ///
    /// # Errors
    /// They did not, so that other nodes with these CAs would refuse this node.
    pub fn check_own_issuer(&self) -> Result<Option<String>, String> {
        let (Some(path), Ok(Some(certificates))) = (&self.tls_ca, self.open_certificates()) else {
            return Ok(None);
        };
        let Err(what) = certificates.current().check_own_issuer() else { return Ok(None) };
        let flag = format!("--tls-ca {}", path.display());
        match self.node_rule() {
            Some(_) => Err(format!("{flag}: the certificate of --tls-cert {what}")),
            None => Ok(Some(format!(
                "{flag}: the certificate of --tls-cert {what}; this node has no peers, so only \
                 clients that trust these CAs alone would refuse it"
            ))),
        }
    }

    pub(super) fn check_tls(&self, problems: &mut ConfigProblems) {
        let ports = [
            ("tls-clients", self.client_tls()),
            ("tls-peers", self.peer_tls()),
            ("tls-admin", self.tls_admin),
        ];
        let shown = |file: &Option<std::path::PathBuf>| {
            file.as_ref().map(|file| file.display().to_string()).unwrap_or_default()
        };
        if self.tls_cert.is_none() {
            for (flag, tls) in ports.into_iter().filter(|(_, tls)| *tls != TlsUse::Off) {
                let tls = format!("{tls:?}").to_lowercase();
                let what = "needs a certificate; set --tls-cert and --tls-key";
                problems.expect(false, flag, &tls, what);
            }
            let unused = [
                ("tls-key", &self.tls_key),
                ("tls-ca", &self.tls_ca),
                ("tls-client-ca", &self.tls_client_ca),
            ];
            for (flag, file) in unused.into_iter().filter(|(_, file)| file.is_some()) {
                problems.expect(false, flag, &shown(file), "has no effect without --tls-cert");
            }
        }
        let is_requested = self.tls_client_auth != ClientCertificates::Off;
        let auth = format!("{:?}", self.tls_client_auth).to_lowercase();
        problems.expect(
            !is_requested || self.client_tls() != TlsUse::Off,
            "tls-client-auth",
            &auth,
            match self.tls_cert {
                None => "certificates of clients need TLS; set --tls-cert and --tls-key",
                Some(_) => "certificates of clients need TLS; remove --tls-clients off",
            },
        );
        problems.expect(
            is_requested || self.tls_cert.is_none() || self.tls_client_ca.is_none(),
            "tls-client-ca",
            &shown(&self.tls_client_ca),
            "has no effect without certificates of clients; set --tls-client-auth required or \
             optional",
        );
        let is_mixed = self.tls_client_auth == ClientCertificates::Required
            && self.client_tls() == TlsUse::Optional;
        problems.expect(
            !is_mixed,
            "tls-client-auth",
            &auth,
            "clients without TLS have no certificate; set --tls-clients required",
        );
        if self.tls_cert.is_none() {
            return;
        }
        let cert = shown(&self.tls_cert);
        if self.tls_key.is_none() {
            return problems.expect(false, "tls-cert", &cert, "needs its key; set --tls-key");
        }
        if self.tls_ca.is_none() {
            let has_client_ca = self.tls_client_ca.is_some() || !is_requested;
            let what = "needs a CA; set --tls-ca or --tls-client-ca";
            problems.expect(has_client_ca, "tls-client-auth", &auth, what);
            let what = "nodes verify each other with a CA; set --tls-ca, or --tls-peers off";
            problems.expect(self.node_rule().is_none(), "tls-cert", &cert, what);
        }
        if let Some(NodeRule { cluster: Some(cluster), .. }) = self.node_rule() {
            let checked = check_cluster_name(&cluster);
            let what = checked.as_ref().err().cloned().unwrap_or_default();
            problems.expect(checked.is_ok(), "cluster-id", &cluster, &what);
        }
        if let Err(error) = self.open_certificates() {
            let flag = match Some(&error.path) {
                path if path == self.tls_key.as_ref() => "tls-key",
                path if path == self.tls_ca.as_ref() => "tls-ca",
                path if path == self.tls_client_ca.as_ref() => "tls-client-ca",
                _ => "tls-cert",
            };
            problems.expect(false, flag, &error.path.display(), &error.what);
        }
    }

    /// Returns the settings of a port's handshakes.
    pub(crate) fn acceptor_options(
        &self,
        port: &'static str,
        tls: TlsUse,
        client_auth: ClientAuth,
    ) -> AcceptorOptions {
        AcceptorOptions {
            port,
            client_auth,
            caller_ca: helix_tls::CallerCa::Clients,
            plaintext: tls.plaintext(),
            protocol: helix_tls::ALPN_H2,
            deadline: limits::TLS_HANDSHAKE_WAIT_MAX,
            handshakes_max: limits::TLS_HANDSHAKES_OF_NODES_MAX,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigError;

    fn problems(config: &ServerConfig) -> Vec<String> {
        config.validate().err().map_or(Vec::new(), |ConfigError { problems }| problems)
    }

    #[test]
    fn settings_of_tls_need_the_files() {
        let tls_cert = Some("/nowhere/node.pem".into());
        let said = problems(&ServerConfig { tls_cert: tls_cert.clone(), ..Default::default() });
        assert!(said[0].contains("set --tls-key"), "{said:?}");
        let tls_key = Some("/nowhere/node.key".into());
        let tls_ca = Some("/nowhere/ca.pem".into());
        let config = ServerConfig { tls_cert, tls_key, tls_ca, ..Default::default() };
        let said = problems(&config);
        assert!(said[0].starts_with("--tls-cert /nowhere/node.pem: cannot be read"), "{said:?}");
        let without_ca = ServerConfig { tls_ca: None, ..config.clone() };
        assert_eq!(problems(&without_ca), said, "files are read without a CA too");
        let alone = ServerConfig { tls_key: config.tls_key, ..Default::default() };
        assert!(problems(&alone)[0].contains("without --tls-cert"));
        let tls_client_ca = Some("/nowhere/clients.pem".into());
        let said = problems(&ServerConfig { tls_client_ca, ..Default::default() });
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].starts_with("--tls-client-ca /nowhere/clients.pem"), "{said:?}");
        assert!(said[0].contains("without --tls-cert"), "{said:?}");
        let tls_clients = Some(TlsUse::Optional);
        let said = problems(&ServerConfig { tls_clients, ..Default::default() });
        assert!(said[0].starts_with("--tls-clients optional: needs a certificate"), "{said:?}");
        let tls_client_auth = ClientCertificates::Required;
        let said = problems(&ServerConfig { tls_client_auth, ..Default::default() });
        assert!(said[0].contains("need TLS"), "{said:?}");
        let said = problems(&ServerConfig {
            tls_client_auth,
            tls_clients: Some(TlsUse::Off),
            tls_cert: Some("/nowhere/node.pem".into()),
            ..Default::default()
        });
        assert!(said[0].contains("remove --tls-clients off"), "{said:?}");
        let said = problems(&ServerConfig {
            tls_cert: Some("/nowhere/node.pem".into()),
            tls_client_ca: Some("/nowhere/clients.pem".into()),
            ..Default::default()
        });
        assert!(said[0].contains("set --tls-client-auth required"), "{said:?}");
    }

    #[test]
    fn handshakes_are_counted_for_the_ports_with_tls() {
        let plain = ServerConfig::in_memory();
        assert_eq!(plain.tls_handshakes_max(), 0);
        let tls_cert = Some("/nowhere/node.pem".into());
        let alone = ServerConfig { tls_cert, tls_admin: TlsUse::Required, ..plain };
        assert_eq!(alone.tls_handshakes_max(), 256, "it has neither peers nor an admin port");
        let peers = vec![(2, "n2:9192".to_owned())];
        let all = ServerConfig { peers, admin_addr: None, ..alone };
        assert_eq!(all.tls_handshakes_max(), 256 + 2 * 64);
    }

    #[test]
    fn a_cluster_id_in_digits_is_no_name_of_a_certificate() {
        let rule = |cluster: &str| {
            let config = ServerConfig {
                tls_peers: Some(TlsUse::Required),
                peers: vec![(2, "n2:9192".to_owned())],
                cluster_id: Some(cluster.to_owned()),
                ..Default::default()
            };
            config.node_rule().and_then(|rule| rule.cluster)
        };
        assert_eq!(rule("prod"), Some("prod".to_owned()));
        assert_eq!(rule("0123456789abcdef0123456789abcdef"), None);
    }
}
