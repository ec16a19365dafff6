//! JWTs of an OIDC issuer, which name a caller (RFC 7519, RFC 8725).
//!
//! - `keys`: the issuer's public keys, from a JWKS (RFC 7517). The type of a key decides its
//!   algorithm.
//! - `points`: whether the bytes of a key are a point of its curve.
//! - `token`: the parts of a JWT (RFC 7515), and its claims.
//! - `verifier`: keeps the keys and the JWTs that were verified with them.
//!
//! Pure but for the locks of the verifier: `config/jwt.rs` reads the file, `server/jwt.rs` polls it
//! (docs/decisions/0043).

mod keys;
mod points;
#[cfg(test)]
mod tests;
mod token;
mod verifier;

use std::time::Duration;

pub use keys::{JwksError, JwtAlgorithm, JwtKey, JwtKeySet};
pub use verifier::{JwksStatus, JwtLogin, JwtRules, JwtVerifier};

/// Bytes of a JWT. Headers of a call have 8 KiB together.
pub const JWT_BYTES_MAX: usize = 6 << 10;

/// Bytes of the file of a JWKS.
pub const JWKS_BYTES_MAX: usize = 256 << 10;

/// Keys of a JWKS.
pub const JWKS_KEYS_MAX: usize = 100;

/// Verified JWTs that a node remembers; the oldest makes way. Each takes less than 1 KiB.
pub const JWT_CACHE_MAX: usize = 4_096;

/// Difference between the clocks of issuer and node that a JWT may have: it is accepted so long
/// before it is valid, and after it has expired.
pub const JWT_LEEWAY: Duration = Duration::from_secs(60);
