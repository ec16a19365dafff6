//! Callers of a node: their principal, from a token, a JWT or a client certificate, and their
//! rules.

use std::fmt::{self, Display};
use std::sync::Arc;

use helix_tls::CertificateNames;
use tokio::time::{Instant, sleep_until};

use super::Node;
use super::quota::QuotaMeter;
use crate::clock::Clock;
use crate::error::Error;
use crate::jwt::{JwtLogin, JwtVerifier};
use crate::limits::TOKEN_REFRESH_INTERVAL;
use crate::log::{AccessOperation, AccessResource};
use crate::log::{
    AccessState, JwtError, PresentedToken, ProducerOwner, ResourceKind, RuleSet, TokenError,
    TokenRecord, is_principal_name,
};

/// Treatment of callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AuthMode {
    /// Every caller may do everything; credentials are ignored.
    #[default]
    Off,
    /// A caller without credentials may do everything. Credentials must be valid, and their
    /// principal is held to its rules. For a rolling change.
    Optional,
    /// Every caller needs valid credentials, and may do what its rules allow.
    Required,
}

/// Name of a caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal(Arc<str>);

impl Principal {
    /// Returns the principal of a token.
    fn of_token(token: &TokenRecord) -> Self {
        Self(token.principal.as_str().into())
    }

    /// Returns the principal of a verified JWT.
    fn of_jwt(login: &JwtLogin) -> Self {
        Self(login.principal().clone())
    }

    /// Returns the principal of a verified client certificate.
    ///
    /// The first kind of names that the certificate has decides: URI, then DNS, then the common
    /// name. It must have exactly one name of that kind, so that the order of names in a
    /// certificate never decides about rights. A DNS name with a wildcard names no caller.
    ///
    /// # Errors
    /// A text that says which name is missing, ambiguous or invalid.
    pub fn from_certificate(names: &CertificateNames) -> Result<Self, String> {
        let CertificateNames { uris, dns, common_names } = names;
        let (kind, name) = match (uris.as_slice(), dns.as_slice(), common_names.as_slice()) {
            ([uri], _, _) => ("URI", uri),
            ([], [dns], _) => ("DNS name", dns),
            ([], [], [name]) => ("common name", name),
            ([], [], []) => {
                return Err("the client certificate has no URI, DNS name or common name".to_owned());
            }
            ([], [], several) => return Err(ambiguous("common names", several)),
            ([], several, _) => return Err(ambiguous("DNS names", several)),
            (several, ..) => return Err(ambiguous("URIs", several)),
        };
        if !is_principal_name(name) || kind == "DNS name" && name.contains('*') {
            return Err(format!(
                "the {kind} {name:?} of the client certificate names no principal"
            ));
        }
        Ok(Self(name.as_str().into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn ambiguous(kind: &str, names: &[String]) -> String {
    format!("the client certificate has {} {kind}, so its principal is ambiguous", names.len())
}

/// Proof of a caller's principal.
#[derive(Debug, Clone)]
pub enum Credentials {
    /// Verified when the connection was opened.
    Certificate,
    Token(Arc<TokenRecord>),
    Jwt(Arc<JwtLogin>),
}

impl Credentials {
    /// Returns the time from which they are refused, in microseconds since the Unix epoch; `None`
    /// if they do not expire.
    pub fn expires_at_us(&self) -> Option<u64> {
        match self {
            Self::Certificate => None,
            Self::Token(token) => Some(token.expires_at_us).filter(|at| *at > 0),
            Self::Jwt(login) => Some(login.refused_us()),
        }
    }
}

/// A caller with its rules, as of one state of access control.
#[derive(Debug, Clone)]
pub struct Caller {
    principal: Principal,
    owner: ProducerOwner,
    credentials: Credentials,
    rules: Arc<RuleSet>,
    access: Arc<AccessState>,
    meter: Arc<QuotaMeter>,
}

impl Caller {
    fn new(
        node: &Node,
        principal: Principal,
        credentials: Credentials,
        access: Arc<AccessState>,
    ) -> Self {
        let rules = access.rules_of(principal.as_str()).cloned().unwrap_or_default();
        let newest = || node.cluster.machine().access();
        let meter = node.quota_meters.meter(principal.as_str(), newest);
        let owner = ProducerOwner::of(principal.as_str());
        Self { principal, owner, credentials, rules, access, meter }
    }

    /// Returns the meter of the principal's quota, which its connections share.
    pub fn meter(&self) -> &Arc<QuotaMeter> {
        &self.meter
    }

    pub fn principal(&self) -> &Principal {
        &self.principal
    }

    /// Returns the owner of the producer identities that the principal gets.
    pub fn owner(&self) -> ProducerOwner {
        self.owner
    }

    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    pub fn rules(&self) -> &Arc<RuleSet> {
        &self.rules
    }

    pub fn may(&self, operation: AccessOperation, resource: AccessResource<'_>) -> bool {
        self.rules.allows(operation, resource)
    }

    /// Returns whether every topic is visible to the caller.
    pub fn sees_all_topics(&self) -> bool {
        self.rules.allows_prefix(AccessOperation::Describe, ResourceKind::Topic, "")
    }
}

/// The last time that this node brought its tokens up to date, and whether it could.
#[derive(Debug, Default)]
pub(super) struct TokenRefresh(tokio::sync::Mutex<Option<(Instant, bool)>>);

impl Node {
    /// Brings this node's tokens up to date, for a token that it does not know. Callers share one
    /// request to shard 0's leader, so that wrong tokens cannot load it.
    ///
    /// # Errors
    /// [`Error::NoLeader`] if this node cannot learn them now.
    pub async fn refresh_tokens(&self) -> Result<(), Error> {
        let asked = Instant::now();
        let mut last = self.token_refresh.0.lock().await;
        if let Some((began, is_fresh)) = *last {
            if began >= asked {
                return if is_fresh { Ok(()) } else { Err(Error::NoLeader { shard: 0 }) };
            }
            sleep_until(began + TOKEN_REFRESH_INTERVAL).await;
        }
        let began = Instant::now();
        let caught_up = self.cluster.catch_up().await;
        *last = Some((began, caught_up.is_ok()));
        caught_up
    }

    /// Returns the meter of a principal that has called this node.
    pub fn quota_meter(&self, principal: &str) -> Option<Arc<QuotaMeter>> {
        self.quota_meters.known(principal)
    }

    /// Counts a call that was refused, or a stream that is delayed.
    pub fn note_over_quota(&self, error: &Error) {
        if let Error::OverQuota { kind, .. } = error {
            self.metrics().on_over_quota(kind);
        }
    }

    pub fn auth_mode(&self) -> AuthMode {
        self.settings.auth
    }

    /// Returns the verifier of JWTs; `None` if this node accepts none.
    pub fn jwt(&self) -> Option<&Arc<JwtVerifier>> {
        self.settings.jwt.as_ref()
    }

    /// Returns the caller of a request with this authorization header, on a connection with this
    /// principal of its client certificate. The header decides if there are both. `None` for a
    /// caller without credentials.
    ///
    /// # Errors
    /// [`TokenError`] if the header has no valid token.
    pub fn login(
        &self,
        header: Option<&[u8]>,
        certificate: Option<&Result<Principal, String>>,
    ) -> Result<Option<Caller>, TokenError> {
        let access = self.cluster.machine().access();
        let Some(header) = header else {
            return match certificate {
                Some(Ok(principal)) => {
                    let credentials = Credentials::Certificate;
                    Ok(Some(Caller::new(self, principal.clone(), credentials, access)))
                }
                Some(Err(what)) => Err(TokenError::Certificate(what.clone())),
                None => Ok(None),
            };
        };
        let now_us = self.clock.now_us();
        let (principal, credentials) = match PresentedToken::from_header(header)? {
            PresentedToken::Cluster(token) => {
                let token = access.verify(&token, now_us)?.clone();
                (Principal::of_token(&token), Credentials::Token(token))
            }
            PresentedToken::Jwt(jwt) => {
                let login = self.jwt().ok_or(JwtError::Off)?.verify(jwt, now_us)?;
                (Principal::of_jwt(&login), Credentials::Jwt(login))
            }
        };
        Ok(Some(Caller::new(self, principal, credentials, access)))
    }

    /// Returns whether the caller's rules are the newest, and its token or JWT is still valid. Does
    /// not allocate.
    pub fn is_current(&self, caller: &Caller) -> bool {
        let is_valid = match &caller.credentials {
            Credentials::Certificate => true,
            // The clock costs more than the rest of the check.
            Credentials::Token(token) if token.expires_at_us == 0 => true,
            Credentials::Token(token) => token.check_expiry(self.clock.now_us()).is_ok(),
            Credentials::Jwt(login) => {
                let now_us = self.clock.now_us();
                self.jwt().is_some_and(|verifier| verifier.is_current(login, now_us))
            }
        };
        is_valid && self.cluster.machine().is_current(&caller.access)
    }

    /// Returns the caller with its rules of now.
    ///
    /// # Errors
    /// [`TokenError`] if its token or JWT has expired, or if the token or the key of the JWT was
    /// removed.
    pub fn renewed(&self, caller: &Caller) -> Result<Caller, TokenError> {
        let access = self.cluster.machine().access();
        let now_us = self.clock.now_us();
        let credentials = match &caller.credentials {
            Credentials::Certificate => Credentials::Certificate,
            Credentials::Token(token) => {
                let known = access.token(token.id).filter(|known| *known == token);
                known.ok_or(TokenError::Unknown)?.check_expiry(now_us)?;
                Credentials::Token(token.clone())
            }
            Credentials::Jwt(login) => {
                Credentials::Jwt(self.jwt().ok_or(JwtError::Off)?.renew(login, now_us)?)
            }
        };
        Ok(Caller::new(self, caller.principal.clone(), credentials, access))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn principal(uris: &[&str], dns: &[&str], common: &[&str]) -> Result<String, String> {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let names =
            CertificateNames { uris: owned(uris), dns: owned(dns), common_names: owned(common) };
        Principal::from_certificate(&names).map(|it| it.to_string())
    }

    #[test]
    fn the_first_kind_of_names_of_a_certificate_decides() {
        let uri = "spiffe://example.org/orders";
        assert_eq!(principal(&[uri], &["a.example.org"], &["x"]).unwrap(), uri);
        assert_eq!(principal(&[], &["a.example.org"], &["x"]).unwrap(), "a.example.org");
        assert_eq!(principal(&[], &[], &["alice"]).unwrap(), "alice");
        assert!(principal(&[], &[], &[]).unwrap_err().contains("no URI"));
    }

    #[test]
    fn an_ambiguous_or_invalid_certificate_has_no_principal() {
        assert!(principal(&[], &[], &["a", "b"]).unwrap_err().contains("2 common names"));
        assert!(principal(&["a:1", "a:2"], &[], &["x"]).unwrap_err().contains("2 URIs"));
        assert!(principal(&[], &["a", "b"], &["x"]).unwrap_err().contains("2 DNS names"));
        assert!(principal(&[], &["*.example.org"], &[]).is_err());
        assert!(principal(&[], &[], &["Alice Smith"]).is_err());
        assert!(principal(&[], &[], &[""]).is_err());
        assert!(principal(&[], &[], &[&"x".repeat(256)]).is_err());
        assert!(principal(&[&"é".repeat(3)], &["a"], &[]).is_err(), "no fall back to the DNS name");
    }
}
