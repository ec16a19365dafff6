//! Bearer tokens: the secret that a client sends, and the salted hash that shard 0 stores.

use std::fmt::{self, Debug};

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::jwt_error::JwtError;
pub use crate::records::TokenRecord;

/// Bytes of a token's secret.
const SECRET_BYTES: usize = 32;

/// Bytes of a token's salt.
const SALT_BYTES: usize = 16;

const PREFIX: &str = "helix_";
const ID_DIGITS: usize = 16;
const SECRET_DIGITS: usize = 2 * SECRET_BYTES;

/// A bearer token, "helix_ID_SECRET" with lower-case hexadecimal digits. It never prints its
/// secret, except by [`BearerToken::reveal`].
#[derive(Clone)]
pub struct BearerToken {
    id: u64,
    secret: [u8; SECRET_BYTES],
}

/// Reason why the credentials of a call are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error(
        "no token was sent, and no client certificate; set one with --token-file, HELIX_TOKEN or \
         --tls-cert"
    )]
    Missing,
    #[error("{0}; use another certificate, or a token")]
    Certificate(String),
    #[error(
        "the authorization header is not \"Bearer\" and a token of this cluster's form, or a JWT"
    )]
    Malformed,
    #[error("the token is unknown or was revoked; ask an administrator for another one")]
    Unknown,
    #[error(
        "token {id:016x} expired {ago_s} s ago by this node's clock; ask an administrator for \
         another one"
    )]
    Expired { id: u64, ago_s: u64 },
    #[error(transparent)]
    Jwt(#[from] JwtError),
}

impl TokenError {
    /// Returns the reason's name for metrics and the audit log.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Certificate(_) => "certificate",
            Self::Malformed => "malformed",
            Self::Unknown => "unknown",
            Self::Expired { .. } => "expired",
            Self::Jwt(error) => error.name(),
        }
    }
}

impl BearerToken {
    /// Makes a token from random numbers; 0 is no id.
    pub fn from_random(mut random: impl FnMut() -> u64) -> Self {
        let id = random().max(1);
        let mut secret = [0; SECRET_BYTES];
        for part in secret.chunks_exact_mut(8) {
            part.copy_from_slice(&random().to_le_bytes());
        }
        Self { id, secret }
    }

    pub fn parse(text: &str) -> Option<Self> {
        let (id, secret) = text.strip_prefix(PREFIX)?.split_once('_')?;
        if id.len() != ID_DIGITS || secret.len() != SECRET_DIGITS {
            return None;
        }
        let mut bytes = [0; SECRET_BYTES];
        decode_hex(secret.as_bytes(), &mut bytes)?;
        let mut id_bytes = [0; ID_DIGITS / 2];
        decode_hex(id.as_bytes(), &mut id_bytes)?;
        Some(Self { id: u64::from_be_bytes(id_bytes), secret: bytes })
    }

    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the token as text, with its secret.
    pub fn reveal(&self) -> String {
        let secret: String = self.secret.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{PREFIX}{:016x}_{secret}", self.id)
    }

    fn hash(&self, salt: &[u8]) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(salt);
        hash.update(self.id.to_be_bytes());
        hash.update(self.secret);
        hash.finalize().into()
    }
}

/// The token of a call, by its form.
#[derive(Clone)]
pub enum PresentedToken<'a> {
    /// A token of this cluster.
    Cluster(BearerToken),
    /// Three parts with dots between them, as a JWT has; a token of a cluster has no dot.
    Jwt(&'a str),
}

impl<'a> PresentedToken<'a> {
    /// Parses the token of an authorization header, "Bearer helix_..." or "Bearer A.B.C". Does not
    /// allocate.
    ///
    /// # Errors
    /// [`TokenError::Malformed`] for anything else.
    pub fn from_header(header: &'a [u8]) -> Result<Self, TokenError> {
        let text = std::str::from_utf8(header).map_err(|_| TokenError::Malformed)?;
        let (scheme, token) = text.split_once(' ').ok_or(TokenError::Malformed)?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(TokenError::Malformed);
        }
        let token = token.trim_matches(' ');
        if token.bytes().filter(|byte| *byte == b'.').count() == 2 {
            return Ok(Self::Jwt(token));
        }
        BearerToken::parse(token).map(Self::Cluster).ok_or(TokenError::Malformed)
    }
}

impl Debug for PresentedToken<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cluster(token) => Debug::fmt(token, f),
            Self::Jwt(_) => f.write_str("Jwt(hidden)"),
        }
    }
}

impl Debug for BearerToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BearerToken({:016x})", self.id)
    }
}

fn decode_hex(digits: &[u8], bytes: &mut [u8]) -> Option<()> {
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = value(pair[0])? << 4 | value(pair[1])?;
    }
    Some(())
}

impl TokenRecord {
    /// Returns the record of a token, with a salt of random numbers.
    pub fn new(
        token: &BearerToken,
        principal: impl Into<String>,
        mut random: impl FnMut() -> u64,
        created_at_us: u64,
        expires_at_us: u64,
    ) -> Self {
        let mut salt = vec![0; SALT_BYTES];
        for part in salt.chunks_exact_mut(8) {
            part.copy_from_slice(&random().to_le_bytes());
        }
        let hash = token.hash(&salt).to_vec();
        let principal = principal.into();
        Self { id: token.id, principal, salt, hash, created_at_us, expires_at_us }
    }

    /// Returns whether this is the record of the token. Takes the same time for every secret.
    pub fn is_of(&self, token: &BearerToken) -> bool {
        self.id == token.id && bool::from(token.hash(&self.salt).ct_eq(&self.hash))
    }

    /// Checks that the token has not expired.
    ///
    /// # Errors
    /// [`TokenError::Expired`].
    pub fn check_expiry(&self, now_us: u64) -> Result<(), TokenError> {
        if self.expires_at_us == 0 || now_us < self.expires_at_us {
            return Ok(());
        }
        let ago_s = (now_us - self.expires_at_us) / 1_000_000;
        Err(TokenError::Expired { id: self.id, ago_s })
    }

    pub(super) fn is_valid(&self) -> bool {
        self.id != 0 && self.salt.len() == SALT_BYTES && self.hash.len() == 32
    }
}

impl Debug for TokenRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenRecord")
            .field("id", &format_args!("{:016x}", self.id))
            .field("principal", &self.principal)
            .field("expires_at_us", &self.expires_at_us)
            .finish_non_exhaustive()
    }
}
