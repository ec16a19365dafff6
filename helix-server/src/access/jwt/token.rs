//! The parts of a JWT: a signed JSON object in the compact form (RFC 7515, section 3.1).

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value};

use super::keys::{ChosenKey, JwtAlgorithm, JwtKey, JwtKeySet};
use super::{JWT_BYTES_MAX, JWT_LEEWAY};
use crate::log::JwtError;
use crate::quote::quote;

/// Bytes of the encoded header, which is parsed before the signature is verified.
const HEADER_BYTES_MAX: usize = 1 << 10;

/// Seconds of the largest time, in the year 33658.
const SECONDS_MAX: f64 = 1e12;

/// Splits a JWT, chooses its key by its header and verifies its signature. Returns its claims,
/// which are those of the issuer but not yet checked, and the key.
///
/// # Errors
/// [`JwtError`]
pub(super) fn verify_signature(
    token: &str,
    keys: &JwtKeySet,
) -> Result<(Map<String, Value>, Arc<JwtKey>), JwtError> {
    if token.len() > JWT_BYTES_MAX {
        return Err(JwtError::TooLarge { bytes: token.len(), max: JWT_BYTES_MAX });
    }
    let parts = token.rsplit_once('.').and_then(|(signed, signature)| {
        let (header, claims) = signed.split_once('.')?;
        (!claims.contains('.')).then_some((signed, header, claims, signature))
    });
    let (signed, header, claims, signature) =
        parts.ok_or(JwtError::Malformed("it does not have three parts"))?;
    if header.len() > HEADER_BYTES_MAX {
        return Err(JwtError::Malformed("its header has more than 1 KiB"));
    }
    let header = object(header).ok_or(JwtError::Malformed("its header is no JSON object"))?;
    // Extensions that the issuer declares critical must be understood, and none is.
    if header.contains_key("crit") {
        return Err(JwtError::Malformed("it has critical extensions"));
    }
    let name = header.get("alg").and_then(Value::as_str);
    let name = name.ok_or(JwtError::Malformed("its header names no algorithm"))?;
    let id = match header.get("kid") {
        None => None,
        Some(id) => Some(id.as_str().ok_or(JwtError::Malformed("the id of its key is no text"))?),
    };
    // The key decides the algorithm, and the header only repeats it: so `none` and HS256, with a
    // public key as its secret, are never used.
    let key = match keys.choose(id, JwtAlgorithm::parse(name)) {
        ChosenKey::Found(key) => key,
        ChosenKey::OtherAlgorithm => {
            return Err(JwtError::Algorithm { name: quote(name).to_string() });
        }
        ChosenKey::Unknown => {
            let key = match id {
                Some(id) => format!("the key {}", quote(id)),
                None => "the unnamed key".to_owned(),
            };
            return Err(JwtError::UnknownKey { key });
        }
    };
    let signature = URL_SAFE_NO_PAD.decode(signature);
    let signature = signature.map_err(|_| JwtError::Malformed("its signature is no base64url"))?;
    if !key.verifies(signed.as_bytes(), &signature) {
        return Err(JwtError::Signature);
    }
    let claims = object(claims).ok_or(JwtError::Malformed("its claims are no JSON object"))?;
    Ok((claims, key.clone()))
}

fn object(encoded: &str) -> Option<Map<String, Value>> {
    let json = URL_SAFE_NO_PAD.decode(encoded).ok()?;
    match serde_json::from_slice(&json).ok()? {
        Value::Object(object) => Some(object),
        _ => None,
    }
}

/// Checks the times of a JWT. Returns the time from which it is refused, in microseconds since the
/// Unix epoch.
///
/// # Errors
/// [`JwtError::Expired`], [`JwtError::Early`], or [`JwtError::Malformed`] without a time of expiry.
pub(super) fn check_times(claims: &Map<String, Value>, now_us: u64) -> Result<u64, JwtError> {
    let leeway_us = JWT_LEEWAY.as_micros() as u64;
    let expires = claims.get("exp").ok_or(JwtError::Malformed("it has no time of expiry (exp)"))?;
    let expires_us = time_us(expires).ok_or(JwtError::Malformed("exp is no time"))?;
    let refused_us = expires_us.saturating_add(leeway_us);
    check_expiry(refused_us, now_us)?;
    if let Some(begins) = claims.get("nbf") {
        let begins_us = time_us(begins).ok_or(JwtError::Malformed("nbf is no time"))?;
        let left_us = begins_us.saturating_sub(leeway_us).saturating_sub(now_us);
        if left_us > 0 {
            return Err(JwtError::Early { in_s: left_us.div_ceil(1_000_000) });
        }
    }
    Ok(refused_us)
}

/// Checks that the time from which a JWT is refused has not come.
///
/// # Errors
/// [`JwtError::Expired`]
pub(super) fn check_expiry(refused_us: u64, now_us: u64) -> Result<(), JwtError> {
    if now_us < refused_us {
        return Ok(());
    }
    let leeway_us = JWT_LEEWAY.as_micros() as u64;
    Err(JwtError::Expired { ago_s: (now_us - refused_us).saturating_add(leeway_us) / 1_000_000 })
}

/// Returns a time in seconds since the Unix epoch, also with a fraction, as microseconds.
fn time_us(value: &Value) -> Option<u64> {
    let seconds = value.as_f64().filter(|seconds| (0.0..=SECONDS_MAX).contains(seconds))?;
    Some((seconds * 1e6) as u64)
}

/// Returns whether a claim is this text, or a list that has it.
pub(super) fn names(claim: Option<&Value>, expected: &str) -> bool {
    match claim {
        Some(Value::String(text)) => text == expected,
        Some(Value::Array(texts)) => texts.iter().any(|text| text.as_str() == Some(expected)),
        _ => false,
    }
}
