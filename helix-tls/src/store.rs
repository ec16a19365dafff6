//! The certificates in use, read again when their files change.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use rustls::client::{ResolvesClientCert, verify_server_cert_signed_by_trust_anchor};
use rustls::pki_types::UnixTime;
use rustls::server::{ClientHello, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, RootCertStore, SignatureScheme};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::certificate::{CertificateInfo, CertificateKind, CertificateNames};
use crate::error::TlsFilesError;
use crate::files::{CertificateFiles, FileContents, FoundCertificate};
use crate::identity::NodeIdentity;
use crate::provider;

/// Interval at which [`CertificateStore::watch`] reads the files.
pub const RELOAD_INTERVAL: Duration = Duration::from_secs(5);

/// The node that the certificate must be for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRule {
    /// Id of this node.
    pub node_id: u64,
    /// Name of its cluster; `None` accepts any.
    pub cluster: Option<String>,
}

/// A certificate with its key, and the CAs that are trusted with it.
pub struct TrustedSet {
    pub(crate) own: Option<OwnKey>,
    pub(crate) ca: Arc<RootCertStore>,
    pub(crate) client_ca: Arc<RootCertStore>,
    infos: Vec<CertificateInfo>,
    identity: Result<NodeIdentity, String>,
    contents: FileContents,
}

/// The key of this process, whatever server name or CA the other side asks for.
#[derive(Debug, Clone)]
pub(crate) struct OwnKey(Arc<CertifiedKey>);

impl ResolvesServerCert for OwnKey {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

impl ResolvesClientCert for OwnKey {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl fmt::Debug for TrustedSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrustedSet").field("certificates", &self.infos).finish_non_exhaustive()
    }
}

impl TrustedSet {
    /// Returns the certificates of the set.
    pub fn certificates(&self) -> &[CertificateInfo] {
        &self.infos
    }

    /// Returns the node of the own certificate.
    ///
    /// # Errors
    /// There is no own certificate, or it names no node.
    pub fn identity(&self) -> Result<&NodeIdentity, String> {
        self.identity.as_ref().map_err(Clone::clone)
    }

    fn parse(
        files: &CertificateFiles,
        rule: Option<&NodeRule>,
        contents: FileContents,
    ) -> Result<Self, TlsFilesError> {
        let parsed = files.parse(&contents)?;
        let mut infos = Vec::new();
        let mut identity = Err("this process has no certificate".to_owned());
        let own = match (parsed.own, &files.certificate, &files.key) {
            (Some((chain, key)), Some(path), Some(key_path)) => {
                for (index, certificate) in chain.iter().enumerate() {
                    let kind = match index {
                        0 => CertificateKind::Own,
                        _ => CertificateKind::Intermediate,
                    };
                    let info = CertificateInfo::of(kind, &certificate.der);
                    infos.push(info.map_err(|what| certificate.error(&what))?);
                }
                let names = chain
                    .first()
                    .map(|leaf| CertificateNames::of(&leaf.der).map_err(|what| leaf.error(&what)));
                let names = names.transpose()?.unwrap_or_default();
                let chain = chain.into_iter().map(|certificate| certificate.der).collect();
                identity = NodeIdentity::of(&names);
                check_rule(path, rule, &identity)?;
                let key = CertifiedKey::from_der(chain, key, &provider())
                    .map_err(|error| key_error(path, key_path, &error))?;
                Some(OwnKey(Arc::new(key)))
            }
            _ => None,
        };
        let ca = roots(CertificateKind::Ca, &parsed.ca, &mut infos)?;
        let client_ca = match files.client_ca.is_empty() {
            true => ca.clone(),
            false => {
                let kind = CertificateKind::ClientCa;
                roots(kind, &parsed.client_ca, &mut infos)?
            }
        };
        Ok(Self { own, ca, client_ca, infos, identity, contents })
    }

    /// Returns the own certificate if it has expired.
    fn expired(&self) -> Option<&CertificateInfo> {
        self.own_info().filter(|info| info.seconds_left() < 0)
    }

    fn own_info(&self) -> Option<&CertificateInfo> {
        self.infos.iter().find(|info| info.kind == CertificateKind::Own)
    }

    /// Checks that this set may replace the one before.
    ///
    /// # Errors
    /// It has another own certificate, which other processes would refuse now; or the CAs of a node
    /// did not sign its own certificate, with which it could not join its cluster after a restart.
    fn check_successor_of(
        &self,
        before: &Self,
        files: &CertificateFiles,
        rule: Option<&NodeRule>,
    ) -> Result<(), TlsFilesError> {
        let (Some(own), Some(path)) = (self.own_info(), &files.certificate) else { return Ok(()) };
        if self.contents.has_certificate_of(&before.contents) {
            // It may have expired by now, which must not keep a new CA out.
            let checked = rule.map_or(Ok(()), |_| self.check_chain(self.last_valid()));
            let path = files.ca.first().unwrap_or(path);
            return checked.map_err(|what| {
                let what = format!("the certificate of this node {what}");
                TlsFilesError::new(path, what)
            });
        }
        if own.seconds_left() < 0 {
            return Err(TlsFilesError::new(path, "the new certificate has expired already"));
        }
        if own.is_early() {
            let what = "the new certificate is not valid yet; it is taken once it is, else check \
                        the clock";
            return Err(TlsFilesError::new(path, what));
        }
        if rule.is_some() {
            self.check_chain(UnixTime::now()).map_err(|what| TlsFilesError::new(path, what))?;
        }
        Ok(())
    }

    /// Returns the present, or the last time at which the own chain was valid if that is earlier.
    fn last_valid(&self) -> UnixTime {
        let is_own = |info: &&CertificateInfo| {
            matches!(info.kind, CertificateKind::Own | CertificateKind::Intermediate)
        };
        let ends = self.infos.iter().filter(is_own).map(|info| info.not_after);
        let last = ends.min().and_then(|end| u64::try_from(end).ok()).unwrap_or(u64::MAX);
        let now = UnixTime::now().as_secs();
        UnixTime::since_unix_epoch(Duration::from_secs(now.min(last)))
    }

    /// Checks that the CAs of a node signed its certificate, at the last time at which that was
    /// valid.
    ///
    /// # Errors
    /// The reason for which other nodes with these CAs would refuse it.
    pub fn check_own_issuer(&self) -> Result<(), String> {
        self.check_chain(self.last_valid())
    }

    /// Checks that nodes with the same CAs accept the own certificate, of a server and of a client.
    /// Only nodes trust the CAs that they verify others with.
    ///
    /// # Errors
    /// The reason for which they would refuse it.
    fn check_chain(&self, now: UnixTime) -> Result<(), String> {
        let Some(OwnKey(own)) = &self.own else { return Ok(()) };
        let [leaf, intermediates @ ..] = own.cert.as_slice() else { return Ok(()) };
        let provider = provider();
        let algorithms = provider.signature_verification_algorithms.all;
        let as_server = ParsedCertificate::try_from(leaf).and_then(|leaf| {
            verify_server_cert_signed_by_trust_anchor(
                &leaf,
                &self.ca,
                intermediates,
                now,
                algorithms,
            )
        });
        as_server.map_err(|error| chain_error(&error))?;
        let verifier = WebPkiClientVerifier::builder_with_provider(self.ca.clone(), provider);
        let verifier = verifier.build().map_err(|error| format!("cannot be verified: {error}"))?;
        let as_client = verifier.verify_client_cert(leaf, intermediates, now);
        as_client.map(drop).map_err(|error| chain_error(&error))
    }
}

fn chain_error(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        ) => "is signed by no CA of the CA file, so other nodes would refuse it; put the new CA \
             into the CA file first, and intermediate certificates after the certificate"
            .to_owned(),
        rustls::Error::InvalidCertificate(
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. },
        ) => "needs the extended key usages serverAuth and clientAuth".to_owned(),
        error => format!("would be refused by other nodes: {error}"),
    }
}

fn check_rule(
    path: &Path,
    rule: Option<&NodeRule>,
    identity: &Result<NodeIdentity, String>,
) -> Result<(), TlsFilesError> {
    let Some(rule) = rule else { return Ok(()) };
    let wrong = |what: String| TlsFilesError::new(path, what);
    let identity = identity.as_ref().map_err(|what| wrong(what.clone()))?;
    if identity.node_id != rule.node_id {
        let (theirs, own) = (identity.node_id, rule.node_id);
        return Err(wrong(format!("is for node {theirs}, and this is node {own}")));
    }
    match &rule.cluster {
        Some(cluster) if *cluster != identity.cluster => {
            let theirs = &identity.cluster;
            Err(wrong(format!("is for cluster {theirs:?}, and this node is in {cluster:?}")))
        }
        _ => Ok(()),
    }
}

fn key_error(path: &Path, key_path: &Path, error: &rustls::Error) -> TlsFilesError {
    match error {
        rustls::Error::InconsistentKeys(_) => {
            let path = path.display();
            TlsFilesError::new(key_path, format!("is not the private key of {path}"))
        }
        _ => TlsFilesError::new(
            key_path,
            "the private key is not usable; use ECDSA P-256 or P-384, Ed25519, or RSA of 2048 to \
             8192 bits",
        ),
    }
}

fn roots(
    kind: CertificateKind,
    certificates: &[FoundCertificate],
    infos: &mut Vec<CertificateInfo>,
) -> Result<Arc<RootCertStore>, TlsFilesError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates {
        let info = CertificateInfo::of(kind, &certificate.der);
        infos.push(info.map_err(|what| certificate.error(&what))?);
        store
            .add(certificate.der.clone())
            .map_err(|error| certificate.error(&format!("is no CA: {error}")))?;
    }
    Ok(Arc::new(store))
}

/// Reloads since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReloadStatus {
    /// Sets that were taken, without the first one.
    pub succeeded: u64,
    /// Sets that were not valid.
    pub failed: u64,
    /// Time of the last reload, in seconds since the Unix epoch; of the start if there was none.
    pub last_at: i64,
    /// Problem of the files, while they are not valid; the set before is in use.
    pub error: Option<String>,
}

/// State of the reloads.
#[derive(Debug, Default)]
struct Reloads {
    status: ReloadStatus,
    /// Problem of the last poll. It counts if the next poll finds it too: files are replaced one
    /// after another.
    pending: Option<String>,
    checked_at: Option<Instant>,
}

/// The certificates of a process and the files that they come from.
#[derive(Debug)]
pub struct CertificateStore {
    files: CertificateFiles,
    rule: Option<NodeRule>,
    current: RwLock<Arc<TrustedSet>>,
    reloads: Mutex<Reloads>,
}

impl CertificateStore {
    /// Reads the files. With `rule` the certificate must be for that node.
    ///
    /// A certificate that has expired or is not valid yet is accepted here, so that a node starts.
    /// It is logged.
    ///
    /// # Errors
    /// A file cannot be read or is not valid, or the files do not fit together.
    pub fn open(
        files: CertificateFiles,
        rule: Option<NodeRule>,
    ) -> Result<Arc<Self>, TlsFilesError> {
        let set = TrustedSet::parse(&files, rule.as_ref(), files.read()?)?;
        if let Some(CertificateInfo { name, .. }) = set.expired() {
            tracing::error!(%name, "the certificate has expired; other processes will refuse it");
        }
        if let Some(CertificateInfo { name, .. }) = set.own_info().filter(|info| info.is_early()) {
            tracing::error!(%name, "the certificate is not valid yet; check the clock");
        }
        if rule.is_some()
            && let Err(what) = set.check_chain(UnixTime::now())
        {
            tracing::error!("the certificate {what}");
        }
        let reloads = Reloads {
            status: ReloadStatus { last_at: crate::unix_now(), ..ReloadStatus::default() },
            ..Reloads::default()
        };
        let current = RwLock::new(Arc::new(set));
        Ok(Arc::new(Self { files, rule, current, reloads: Mutex::new(reloads) }))
    }

    /// Returns the set in use.
    pub fn current(&self) -> Arc<TrustedSet> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the reloads since the start.
    pub fn status(&self) -> ReloadStatus {
        self.reloads().status.clone()
    }

    /// Reads the files every [`RELOAD_INTERVAL`] until it is dropped.
    pub async fn watch(self: Arc<Self>) {
        let mut tick = interval(RELOAD_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            self.refresh_aside().await;
        }
    }

    /// Like [`Self::refresh`], on a thread that may block: a stalled disk must not stall the
    /// runtime.
    async fn refresh_aside(self: &Arc<Self>) {
        let store = self.clone();
        #[expect(clippy::disallowed_methods, reason = "raft/blocking.rs is for logs")]
        let reading = tokio::task::spawn_blocking(move || store.refresh());
        // Ignored: the runtime is shutting down.
        let _ = reading.await;
    }

    /// Reads the files unless they were read within `age`. For clients, before they connect.
    pub async fn refresh_if_older(self: &Arc<Self>, age: Duration) {
        let is_recent = {
            let mut reloads = self.reloads();
            let is_recent = reloads.checked_at.is_some_and(|at| at.elapsed() < age);
            if !is_recent {
                reloads.checked_at = Some(Instant::now());
            }
            is_recent
        };
        if !is_recent {
            self.refresh_aside().await;
        }
    }

    /// Reads the files, and takes the new set if they have changed and are valid.
    pub fn refresh(&self) {
        let before = self.current();
        let read = self.files.read().and_then(|contents| {
            if contents == before.contents {
                return Ok(None);
            }
            let set = TrustedSet::parse(&self.files, self.rule.as_ref(), contents)?;
            set.check_successor_of(&before, &self.files, self.rule.as_ref())?;
            Ok(Some(set))
        });
        let mut reloads = self.reloads();
        match read {
            Ok(None) => {
                reloads.pending = None;
                reloads.status.error = None;
            }
            Ok(Some(set)) => {
                reloads.pending = None;
                reloads.status.error = None;
                reloads.status.succeeded += 1;
                reloads.status.last_at = crate::unix_now();
                let certificates = set.infos.len();
                let days = set.infos.iter().map(|info| info.seconds_left() / 86_400).min();
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(set);
                drop(reloads);
                tracing::info!(
                    certificates,
                    days_left = days.unwrap_or_default(),
                    "took new certificates for new connections"
                );
            }
            Err(error) => {
                let error = error.to_string();
                let is_lasting = reloads.pending.is_some();
                reloads.pending = Some(error.clone());
                if is_lasting && reloads.status.error.as_ref() != Some(&error) {
                    reloads.status.failed += 1;
                    reloads.status.last_at = crate::unix_now();
                    reloads.status.error = Some(error.clone());
                    drop(reloads);
                    tracing::warn!("kept the certificates in use, the new ones fail: {error}");
                }
            }
        }
    }

    fn reloads(&self) -> MutexGuard<'_, Reloads> {
        self.reloads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
