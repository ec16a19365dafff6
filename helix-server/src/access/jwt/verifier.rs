//! Verifies JWTs with the keys of now, and remembers those that it has verified.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use super::keys::{JwksError, JwtKey, JwtKeySet};
use super::{JWT_CACHE_MAX, token};
use crate::log::{JwtError, is_principal_name};
use crate::sync;

/// Rules for the claims of a JWT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JwtRules {
    /// The claim `iss` must be this.
    pub issuer: String,
    /// The claim `aud` must be this, or have it.
    pub audience: String,
    /// Name of the claim with the principal.
    pub principal_claim: String,
    /// Comes before the claim in the name of the principal.
    pub principal_prefix: String,
}

/// A verified JWT.
#[derive(Debug, PartialEq, Eq)]
pub struct JwtLogin {
    principal: Arc<str>,
    /// Time from which it is refused, in microseconds since the Unix epoch.
    refused_us: u64,
    key: Arc<JwtKey>,
    /// Generation of the keys that have `key`.
    generation: u64,
}

impl JwtLogin {
    pub fn principal(&self) -> &Arc<str> {
        &self.principal
    }

    /// Returns the time from which the JWT is refused, in microseconds since the Unix epoch.
    pub fn refused_us(&self) -> u64 {
        self.refused_us
    }
}

/// Reloads of the keys since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JwksStatus {
    /// Sets of keys that were taken, without the first one.
    pub succeeded: u64,
    /// Files that were not valid.
    pub failed: u64,
    /// Problem of the file, while it is not valid; the keys before are in use.
    pub error: Option<String>,
}

/// Verifies the JWTs of one issuer.
pub struct JwtVerifier {
    rules: JwtRules,
    /// Generation of the keys; grows with each change of them.
    generation: AtomicU64,
    /// The same for tasks that wait for a change.
    changes: watch::Sender<u64>,
    state: Mutex<VerifierState>,
    status: Mutex<ReloadState>,
}

#[derive(Debug, Default)]
struct ReloadState {
    status: JwksStatus,
    /// Problem of the last poll. It counts if the next poll finds it too: a file may be replaced
    /// while it is read.
    pending: Option<String>,
}

impl ReloadState {
    fn accept(&mut self, is_new: bool) {
        self.pending = None;
        self.status.error = None;
        self.status.succeeded += u64::from(is_new);
    }

    /// Notes a problem. Returns whether it is to be logged.
    fn reject(&mut self, error: &str) -> bool {
        let is_lasting = self.pending.replace(error.to_owned()).is_some();
        let is_news = is_lasting && self.status.error.as_deref() != Some(error);
        if is_news {
            self.status.failed += 1;
            self.status.error = Some(error.to_owned());
        }
        is_news
    }
}

struct VerifierState {
    generation: u64,
    keys: Arc<JwtKeySet>,
    /// Verified with these keys, by the SHA-256 of the JWT.
    verified: HashMap<[u8; 32], Arc<JwtLogin>>,
    /// Oldest first.
    order: VecDeque<[u8; 32]>,
}

impl fmt::Debug for JwtVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JwtVerifier").field("rules", &self.rules).finish_non_exhaustive()
    }
}

impl JwtVerifier {
    /// Creates a verifier with the keys of a JWKS.
    ///
    /// # Errors
    /// [`JwksError`]
    pub fn new(rules: JwtRules, jwks: &[u8]) -> Result<Self, JwksError> {
        let keys = JwtKeySet::parse(jwks)?;
        keys.log_invalid();
        let state = VerifierState {
            generation: 0,
            keys: Arc::new(keys),
            verified: HashMap::new(),
            order: VecDeque::new(),
        };
        let (state, status) = (Mutex::new(state), Mutex::default());
        let (generation, changes) = (AtomicU64::new(0), watch::Sender::new(0));
        Ok(Self { rules, generation, changes, state, status })
    }

    /// Returns the login of a JWT. A JWT that was verified before costs a hash and no signature.
    ///
    /// # Errors
    /// [`JwtError`]
    pub fn verify(&self, jwt: &str, now_us: u64) -> Result<Arc<JwtLogin>, JwtError> {
        // Before the hash.
        if jwt.len() > super::JWT_BYTES_MAX {
            return Err(JwtError::TooLarge { bytes: jwt.len(), max: super::JWT_BYTES_MAX });
        }
        let hash: [u8; 32] = Sha256::digest(jwt.as_bytes()).into();
        let (generation, keys) = {
            let state = self.state();
            if let Some(login) = state.verified.get(&hash) {
                token::check_expiry(login.refused_us, now_us)?;
                return Ok(login.clone());
            }
            (state.generation, state.keys.clone())
        };
        let (claims, key) = token::verify_signature(jwt, &keys)?;
        let JwtRules { issuer, audience, principal_claim, principal_prefix } = &self.rules;
        if claims.get("iss").and_then(Value::as_str) != Some(issuer.as_str()) {
            return Err(JwtError::Issuer { expected: issuer.clone() });
        }
        if !token::names(claims.get("aud"), audience) {
            return Err(JwtError::Audience { expected: audience.clone() });
        }
        let refused_us = token::check_times(&claims, now_us)?;
        let name = claims.get(principal_claim).and_then(Value::as_str).filter(|it| !it.is_empty());
        let principal = name.map(|name| format!("{principal_prefix}{name}"));
        let principal = principal.filter(|name| is_principal_name(name));
        let principal =
            principal.ok_or_else(|| JwtError::Principal { claim: principal_claim.clone() })?;
        let login = Arc::new(JwtLogin { principal: principal.into(), refused_us, key, generation });
        self.state().remember(hash, &login);
        Ok(login)
    }

    /// Returns whether a login is as good as a new one. Does not allocate.
    pub fn is_current(&self, login: &JwtLogin, now_us: u64) -> bool {
        now_us < login.refused_us && login.generation == self.generation.load(Ordering::Acquire)
    }

    /// Returns a login with the keys of now.
    ///
    /// # Errors
    /// [`JwtError::Expired`], or [`JwtError::UnknownKey`] if its key was removed.
    pub fn renew(&self, login: &Arc<JwtLogin>, now_us: u64) -> Result<Arc<JwtLogin>, JwtError> {
        token::check_expiry(login.refused_us, now_us)?;
        let state = self.state();
        if login.generation == state.generation {
            return Ok(login.clone());
        }
        if !state.keys.contains(&login.key) {
            return Err(JwtError::UnknownKey { key: "the key".to_owned() });
        }
        let (principal, key) = (login.principal.clone(), login.key.clone());
        let JwtLogin { refused_us, .. } = **login;
        let generation = state.generation;
        Ok(Arc::new(JwtLogin { principal, refused_us, key, generation }))
    }

    /// Takes the contents of the JWKS file, or the reason why it could not be read. If they are
    /// not valid, the keys before stay in use. Other keys than before forget all verified JWTs.
    pub fn reload(&self, read: Result<Vec<u8>, String>) {
        let parsed = read
            .and_then(|json| JwtKeySet::parse(&json).map_err(|error| format!("the JWKS {error}")));
        let taken = match parsed {
            Ok(keys) => {
                let keys = Arc::new(keys);
                let is_new = self.take(&keys);
                sync::lock(&self.status).accept(is_new);
                is_new.then_some(keys)
            }
            Err(error) => {
                let is_news = sync::lock(&self.status).reject(&error);
                if is_news {
                    tracing::warn!("kept the JWT keys in use, the new ones fail: {error}");
                }
                None
            }
        };
        if let Some(keys) = taken {
            self.changes.send_replace(self.generation.load(Ordering::Acquire));
            keys.log_invalid();
            tracing::info!(keys = keys.len(), "took new JWT keys");
        }
    }

    /// Uses these keys. Returns whether they differ from those before.
    fn take(&self, keys: &Arc<JwtKeySet>) -> bool {
        let mut state = self.state();
        if state.keys == *keys {
            return false;
        }
        state.keys = keys.clone();
        state.generation += 1;
        state.verified.clear();
        state.order.clear();
        self.generation.store(state.generation, Ordering::Release);
        true
    }

    /// Returns a receiver that is notified when the keys change.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns the reloads since the start.
    pub fn status(&self) -> JwksStatus {
        sync::lock(&self.status).status.clone()
    }

    fn state(&self) -> MutexGuard<'_, VerifierState> {
        sync::lock(&self.state)
    }
}

impl VerifierState {
    /// Remembers a login, unless the keys have changed since.
    fn remember(&mut self, hash: [u8; 32], login: &Arc<JwtLogin>) {
        if login.generation != self.generation {
            return;
        }
        if self.verified.insert(hash, login.clone()).is_some() {
            return;
        }
        self.order.push_back(hash);
        if self.order.len() > JWT_CACHE_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.verified.remove(&oldest);
        }
    }
}

#[cfg(test)]
impl JwtVerifier {
    /// Returns the number of remembered JWTs.
    pub(super) fn remembered(&self) -> usize {
        self.state().verified.len()
    }
}
