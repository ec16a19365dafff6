//! Sessions of browsers that signed in: a random id in a cookie stands for a token, which stays in
//! this process. Sessions are lost with the process, and bounded in number and age.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hyper::header::{COOKIE, HeaderMap};
use rand::Rng;
use rand::rngs::StdRng;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::time::Instant;

use crate::{random, sync};

/// Sessions in memory; a further one replaces the least recently used one.
const SESSIONS_MAX: usize = 256;

/// Age at which a session ends, and the time without a request.
pub(super) const SESSION_AGE_MAX: Duration = Duration::from_secs(8 * 3600);
const SESSION_IDLE_MAX: Duration = Duration::from_secs(3600);

/// Bytes of a random id.
const ID_BYTES: usize = 32;

/// Bytes of a token that may be signed in with, as of a header of the API.
pub(super) const TOKEN_BYTES_MAX: usize = 8 << 10;

/// A browser that signed in.
pub(super) struct BrowserSession {
    pub(super) token: Box<str>,
    pub(super) principal: Box<str>,
    /// Token that a change must carry, which pages of other sites cannot read.
    pub(super) form_token: String,
}

struct OpenSession {
    session: Arc<BrowserSession>,
    created: Instant,
    used: Instant,
}

/// The open sessions.
pub(super) struct SessionTable {
    /// By the hash of the id, so that a lookup does not compare ids byte by byte.
    open: Mutex<HashMap<[u8; 32], OpenSession>>,
    random: Mutex<StdRng>,
    cookie: String,
    /// Form token of browsers without a session.
    pub(super) open_form_token: String,
}

impl SessionTable {
    /// Creates the table of the console at this address. Cookies do not differ by port, so that
    /// their names do.
    pub(super) fn new(listener: SocketAddr) -> Self {
        let random = Mutex::new(random::from_system());
        let open_form_token = new_id(&random);
        let cookie = format!("helix-console-{}", listener.port());
        Self { open: Mutex::default(), random, cookie, open_form_token }
    }

    /// Opens a session and returns the value of its `Set-Cookie` header.
    pub(super) fn open(&self, token: &str, principal: &str, is_encrypted: bool) -> String {
        let id = new_id(&self.random);
        let session = Arc::new(BrowserSession {
            token: token.into(),
            principal: principal.into(),
            form_token: new_id(&self.random),
        });
        let now = Instant::now();
        let mut open = sync::lock(&self.open);
        open.retain(|_, session| session.is_open(now));
        if open.len() >= SESSIONS_MAX {
            let oldest = open.iter().min_by_key(|(_, session)| session.used).map(|(key, _)| *key);
            oldest.map(|key| open.remove(&key));
        }
        open.insert(hash(&id), OpenSession { session, created: now, used: now });
        self.cookie(&id, SESSION_AGE_MAX.as_secs(), is_encrypted)
    }

    /// Returns the session of a request, if it has one.
    pub(super) fn find(&self, headers: &HeaderMap) -> Option<Arc<BrowserSession>> {
        let key = hash(self.id_of(headers)?);
        let now = Instant::now();
        let mut open = sync::lock(&self.open);
        let found = open.get_mut(&key)?;
        if !found.is_open(now) {
            open.remove(&key);
            return None;
        }
        found.used = now;
        Some(found.session.clone())
    }

    /// Closes the session of a request, and returns the value of the `Set-Cookie` header that
    /// removes its cookie.
    pub(super) fn close(&self, headers: &HeaderMap, is_encrypted: bool) -> String {
        if let Some(id) = self.id_of(headers) {
            sync::lock(&self.open).remove(&hash(id));
        }
        self.cookie("", 0, is_encrypted)
    }

    fn id_of<'a>(&self, headers: &'a HeaderMap) -> Option<&'a str> {
        let cookies = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
        let mut pairs = cookies.flat_map(|cookies| cookies.split(';'));
        pairs.find_map(|pair| {
            let (name, value) = pair.trim().split_once('=')?;
            (name == self.cookie).then_some(value)
        })
    }

    fn cookie(&self, id: &str, seconds: u64, is_encrypted: bool) -> String {
        let name = &self.cookie;
        let secure = if is_encrypted { "; Secure" } else { "" };
        format!("{name}={id}; Path=/console; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}")
    }
}

impl OpenSession {
    fn is_open(&self, now: Instant) -> bool {
        now - self.created < SESSION_AGE_MAX && now - self.used < SESSION_IDLE_MAX
    }
}

/// Compares form tokens in a time that does not depend on their bytes.
pub(super) fn is_equal(one: &str, other: &str) -> bool {
    one.as_bytes().ct_eq(other.as_bytes()).into()
}

fn new_id(random: &Mutex<StdRng>) -> String {
    let mut bytes = [0; ID_BYTES];
    sync::lock(random).fill_bytes(&mut bytes);
    URL_SAFE_NO_PAD.encode(bytes)
}

fn hash(id: &str) -> [u8; 32] {
    Sha256::digest(id).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> SessionTable {
        SessionTable::new(SocketAddr::from(([127, 0, 0, 1], 9644)))
    }

    fn sent(cookie: &str) -> HeaderMap {
        let (pair, _) = cookie.split_once(';').unwrap();
        HeaderMap::from_iter([(COOKIE, format!("other=1; {pair}").parse().unwrap())])
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_end_by_sign_out_and_by_age() {
        let table = table();
        let cookie = table.open("hlx_1", "alice", false);
        assert!(cookie.starts_with("helix-console-9644="), "{cookie}");
        assert!(cookie.ends_with("; HttpOnly; SameSite=Strict"), "{cookie}");
        assert!(table.open("hlx_1", "alice", true).ends_with("; Secure"));
        assert_eq!(&*table.find(&sent(&cookie)).unwrap().token, "hlx_1");
        assert!(table.find(&HeaderMap::new()).is_none());
        assert!(table.find(&sent("helix-console-9644=guess;")).is_none());
        assert!(table.find(&sent(&cookie.replace("9644", "9645"))).is_none(), "of another port");
        table.close(&sent(&cookie), false);
        assert!(table.find(&sent(&cookie)).is_none());

        let idle = table.open("hlx_2", "bob", false);
        tokio::time::advance(SESSION_IDLE_MAX).await;
        assert!(table.find(&sent(&idle)).is_none());
        let busy = table.open("hlx_3", "eve", false);
        let step = SESSION_IDLE_MAX / 2;
        let mut age = Duration::ZERO;
        while age + step < SESSION_AGE_MAX {
            tokio::time::advance(step).await;
            age += step;
            assert!(table.find(&sent(&busy)).is_some(), "{age:?}");
        }
        tokio::time::advance(step).await;
        assert!(table.find(&sent(&busy)).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_sessions_is_bounded() {
        let table = table();
        let first = table.open("t", "p", false);
        let second = table.open("t", "p", false);
        for _ in 2..SESSIONS_MAX {
            tokio::time::advance(Duration::from_secs(1)).await;
            table.open("t", "p", false);
        }
        assert!(table.find(&sent(&first)).is_some());
        table.open("t", "p", false);
        assert!(table.find(&sent(&first)).is_some());
        assert!(table.find(&sent(&second)).is_none(), "not used for longest");
        assert_eq!(sync::lock(&table.open).len(), SESSIONS_MAX);
    }

    #[test]
    fn ids_differ() {
        let table = table();
        let ids: std::collections::BTreeSet<_> =
            (0..100).map(|_| table.open("t", "p", false)).collect();
        assert_eq!(ids.len(), 100);
        assert!(is_equal("a", "a") && !is_equal("a", "b") && !is_equal("a", ""));
    }
}
