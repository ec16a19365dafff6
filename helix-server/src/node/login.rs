//! Finds the caller of a request from its token, its JWT or its client certificate.

use std::sync::Arc;

use tokio::time::{Instant, sleep_until};

use super::Node;
use crate::access::{AuthMode, Caller, Credentials, JwtVerifier, Principal, QuotaMeter};
use crate::clock::Clock;
use crate::error::Error;
use crate::limits::TOKEN_REFRESH_INTERVAL;
use crate::log::{AccessState, JwtError, PresentedToken, TokenError};

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
                    Ok(Some(self.caller(principal.clone(), credentials, access)))
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
        Ok(Some(self.caller(principal, credentials, access)))
    }

    fn caller(
        &self,
        principal: Principal,
        credentials: Credentials,
        access: Arc<AccessState>,
    ) -> Caller {
        let newest = || self.cluster.machine().access();
        let meter = self.quota_meters.meter(principal.as_str(), newest);
        Caller::new(principal, credentials, access, meter)
    }

    /// Returns whether the caller's rules are the newest, and its token or JWT is still valid. Does
    /// not allocate.
    pub fn is_current(&self, caller: &Caller) -> bool {
        let is_valid = match caller.credentials() {
            Credentials::Certificate => true,
            // The clock costs more than the rest of the check.
            Credentials::Token(token) if token.expires_at_us == 0 => true,
            Credentials::Token(token) => token.check_expiry(self.clock.now_us()).is_ok(),
            Credentials::Jwt(login) => {
                let now_us = self.clock.now_us();
                self.jwt().is_some_and(|verifier| verifier.is_current(login, now_us))
            }
        };
        is_valid && self.cluster.machine().is_current(caller.access())
    }

    /// Returns the caller with its rules of now.
    ///
    /// # Errors
    /// [`TokenError`] if its token or JWT has expired, or if the token or the key of the JWT was
    /// removed.
    pub fn renewed(&self, caller: &Caller) -> Result<Caller, TokenError> {
        let access = self.cluster.machine().access();
        let now_us = self.clock.now_us();
        let credentials = match caller.credentials() {
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
        Ok(self.caller(caller.principal().clone(), credentials, access))
    }
}
