//! Public keys of an issuer: a JSON Web Key Set (RFC 7517, RFC 7518, RFC 8037).

use std::fmt;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents,
    UnparsedPublicKey,
};
use serde_json::{Map, Value};

use super::{JWKS_BYTES_MAX, JWKS_KEYS_MAX, points};
use crate::quote::quote;

/// Bytes of an RSA modulus: 2048 to 8192 bits.
const MODULUS_BYTES: std::ops::RangeInclusive<usize> = 256..=1024;

/// Largest RSA exponent with which ring verifies; the usual one is 65537.
const EXPONENT_MAX: u64 = (1 << 33) - 1;

/// Bytes of the id of a key.
const KEY_ID_BYTES_MAX: usize = 256;

/// Reason why a JWKS is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JwksError {
    #[error("has {bytes} bytes, the limit is {max}", max = JWKS_BYTES_MAX)]
    TooLarge { bytes: usize },
    #[error("is not a JWKS: write JSON with a list \"keys\" of objects")]
    Malformed,
    #[error("has {keys} keys, the limit is {max}", max = JWKS_KEYS_MAX)]
    TooManyKeys { keys: usize },
    /// It is left out while the set has another key.
    #[error("the key {key} is not valid: {what}")]
    InvalidKey { key: String, what: &'static str },
    #[error(
        "has no key that verifies signatures with RS256, ES256 or EdDSA; use RSA, EC with P-256, \
         or OKP with Ed25519"
    )]
    NoKey,
}

/// Algorithm of a signature. The type of the key decides it, never the JWT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JwtAlgorithm {
    /// RSA with PKCS #1 v1.5 and SHA-256.
    Rs256,
    /// ECDSA with P-256 and SHA-256.
    Es256,
    /// Ed25519.
    EdDsa,
}

impl JwtAlgorithm {
    pub(super) fn parse(name: &str) -> Option<Self> {
        [Self::Rs256, Self::Es256, Self::EdDsa].into_iter().find(|it| it.as_str() == name)
    }

    /// Returns the name in JWTs and keys.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rs256 => "RS256",
            Self::Es256 => "ES256",
            Self::EdDsa => "EdDSA",
        }
    }
}

/// A public key with its id.
#[derive(Clone, PartialEq, Eq)]
pub struct JwtKey {
    id: Option<String>,
    material: KeyMaterial,
}

#[derive(Clone, PartialEq, Eq)]
enum KeyMaterial {
    /// Modulus and exponent, big-endian without leading zeroes.
    Rsa {
        modulus: Vec<u8>,
        exponent: Vec<u8>,
    },
    /// Uncompressed point.
    P256(Vec<u8>),
    Ed25519(Vec<u8>),
}

impl fmt::Debug for JwtKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JwtKey({:?}, {})", self.id, self.algorithm().as_str())
    }
}

impl JwtKey {
    pub fn algorithm(&self) -> JwtAlgorithm {
        match self.material {
            KeyMaterial::Rsa { .. } => JwtAlgorithm::Rs256,
            KeyMaterial::P256(_) => JwtAlgorithm::Es256,
            KeyMaterial::Ed25519(_) => JwtAlgorithm::EdDsa,
        }
    }

    /// Returns whether the signature of the message is that of this key.
    pub fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        let verified = match &self.material {
            KeyMaterial::Rsa { modulus, exponent } => {
                let key = RsaPublicKeyComponents { n: modulus, e: exponent };
                key.verify(&RSA_PKCS1_2048_8192_SHA256, message, signature)
            }
            KeyMaterial::P256(point) => {
                let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point);
                key.verify(message, signature)
            }
            KeyMaterial::Ed25519(point) => {
                UnparsedPublicKey::new(&ED25519, point).verify(message, signature)
            }
        };
        verified.is_ok()
    }

    /// Reads a key; `None` if it is for another use or of another algorithm.
    fn parse(key: &Map<String, Value>) -> Result<Option<Self>, JwksError> {
        let text = |name: &str| key.get(name).and_then(Value::as_str);
        let id = text("kid").map(str::to_owned);
        let invalid = |what| {
            let key = id
                .as_deref()
                .map_or_else(|| "without an id".to_owned(), |id| quote(id).to_string());
            JwksError::InvalidKey { key, what }
        };
        if id.as_ref().is_some_and(|id| id.len() > KEY_ID_BYTES_MAX) {
            return Err(invalid("its id has more than 256 bytes"));
        }
        let is_for_signatures = key.get("use").is_none_or(|it| it.as_str() == Some("sig"));
        let verifies = |operations: &Value| {
            let verify = Value::from("verify");
            operations.as_array().is_some_and(|operations| operations.contains(&verify))
        };
        let is_for_verification = key.get("key_ops").is_none_or(verifies);
        if !is_for_signatures || !is_for_verification {
            return Ok(None);
        }
        let bytes = |name: &str| text(name).and_then(|text| URL_SAFE_NO_PAD.decode(text).ok());
        let material = match (text("kty"), text("crv")) {
            (Some("RSA"), _) => {
                let (modulus, exponent) = bytes("n").zip(bytes("e")).ok_or_else(|| {
                    invalid("an RSA key needs n and e in base64url without padding")
                })?;
                let (modulus, exponent) = (without_zeroes(&modulus), without_zeroes(&exponent));
                if !MODULUS_BYTES.contains(&modulus.len()) {
                    return Err(invalid("an RSA key has 2048 to 8192 bits"));
                }
                let is_odd = |number: &[u8]| number.last().is_some_and(|last| last % 2 == 1);
                if !is_odd(modulus) {
                    return Err(invalid("the modulus of an RSA key is odd"));
                }
                let is_small = exponent.len() <= 8
                    && exponent.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
                        <= EXPONENT_MAX;
                if !is_odd(exponent) || exponent == [1] || !is_small {
                    return Err(invalid("the exponent of an RSA key is odd, 3 to 2^33 - 1"));
                }
                KeyMaterial::Rsa { modulus: modulus.to_vec(), exponent: exponent.to_vec() }
            }
            (Some("EC"), Some("P-256")) => {
                let coordinates = bytes("x").zip(bytes("y"));
                let (x, y): ([u8; 32], [u8; 32]) = coordinates
                    .and_then(|(x, y)| Some((x.try_into().ok()?, y.try_into().ok()?)))
                    .ok_or_else(|| invalid("a P-256 key needs x and y of 32 bytes in base64url"))?;
                if !points::is_on_p256(&x, &y) {
                    return Err(invalid("its x and y are no point of the curve P-256"));
                }
                // 4 begins an uncompressed point (SEC 1, section 2.3.3).
                KeyMaterial::P256([[4].as_slice(), x.as_slice(), y.as_slice()].concat())
            }
            (Some("OKP"), Some("Ed25519")) => {
                let x = bytes("x").and_then(|x| <[u8; 32]>::try_from(x).ok());
                let x = x.ok_or_else(|| invalid("an Ed25519 key needs x of 32 bytes"))?;
                if !points::is_ed25519_key(&x) {
                    return Err(invalid("its x is no point of Ed25519, or one of small order"));
                }
                KeyMaterial::Ed25519(x.to_vec())
            }
            // Also "oct": a secret that issuer and node share would let the node make JWTs.
            _ => return Ok(None),
        };
        let key_of = Self { id, material };
        let is_of_algorithm = |name: &Value| name.as_str() == Some(key_of.algorithm().as_str());
        Ok(key.get("alg").is_none_or(is_of_algorithm).then_some(key_of))
    }
}

fn without_zeroes(bytes: &[u8]) -> &[u8] {
    let zeroes = bytes.iter().take_while(|byte| **byte == 0).count();
    &bytes[zeroes..]
}

/// Result of the choice of a key.
#[derive(Debug)]
pub(super) enum ChosenKey<'a> {
    Found(&'a Arc<JwtKey>),
    /// Keys with this id are of other algorithms.
    OtherAlgorithm,
    Unknown,
}

/// The keys of an issuer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JwtKeySet {
    keys: Vec<Arc<JwtKey>>,
    /// Descriptions of the keys that are not valid.
    invalid: Vec<String>,
}

impl JwtKeySet {
    /// Parses a JWKS. Keys for other uses, of other algorithms and invalid ones are left out
    /// (RFC 7517, section 5): a key that an issuer adds must not end the rotation of its others.
    ///
    /// # Errors
    /// [`JwksError`]
    pub fn parse(json: &[u8]) -> Result<Self, JwksError> {
        if json.len() > JWKS_BYTES_MAX {
            return Err(JwksError::TooLarge { bytes: json.len() });
        }
        let document: Value = serde_json::from_slice(json).map_err(|_| JwksError::Malformed)?;
        let listed = document.get("keys").and_then(Value::as_array);
        let listed = listed.ok_or(JwksError::Malformed)?;
        if listed.len() > JWKS_KEYS_MAX {
            return Err(JwksError::TooManyKeys { keys: listed.len() });
        }
        let mut set = Self::default();
        let mut first_error = None;
        for key in listed {
            let no_object = || JwksError::InvalidKey {
                key: "without an id".to_owned(),
                what: "it is no JSON object",
            };
            let parsed = key.as_object().ok_or_else(no_object).and_then(JwtKey::parse);
            match parsed.and_then(|key| key.map(|key| set.add(key)).transpose()) {
                Ok(_) => {}
                Err(error) => {
                    set.invalid.push(error.to_string());
                    first_error.get_or_insert(error);
                }
            }
        }
        match set.keys.is_empty() {
            true => Err(first_error.unwrap_or(JwksError::NoKey)),
            false => Ok(set),
        }
    }

    fn add(&mut self, key: JwtKey) -> Result<(), JwksError> {
        let is_same =
            |other: &Arc<JwtKey>| other.id == key.id && other.algorithm() == key.algorithm();
        if let Some(id) = key.id.as_ref().filter(|_| self.keys.iter().any(is_same)) {
            let what = "another key has its id and algorithm";
            return Err(JwksError::InvalidKey { key: quote(id).to_string(), what });
        }
        self.keys.push(Arc::new(key));
        Ok(())
    }

    /// Logs the keys that are not valid.
    pub(super) fn log_invalid(&self) {
        for what in &self.invalid {
            tracing::warn!("left out a JWT key: {what}");
        }
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns whether the set has this key with this id.
    pub fn contains(&self, key: &JwtKey) -> bool {
        self.keys.iter().any(|known| **known == *key)
    }

    /// Returns the key of a JWT with this id and algorithm. A JWT without an id has a key if only
    /// one is of its algorithm.
    pub(super) fn choose(
        &self,
        id: Option<&str>,
        algorithm: Option<JwtAlgorithm>,
    ) -> ChosenKey<'_> {
        let named = self.keys.iter().filter(|key| id.is_none() || key.id.as_deref() == id);
        let mut of_algorithm = named.clone().filter(|key| Some(key.algorithm()) == algorithm);
        match (of_algorithm.next(), of_algorithm.next(), named.count()) {
            (Some(key), None, _) => ChosenKey::Found(key),
            (None, _, 1..) => ChosenKey::OtherAlgorithm,
            _ => ChosenKey::Unknown,
        }
    }
}
