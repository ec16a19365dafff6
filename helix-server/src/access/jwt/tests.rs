//! JWTs of other implementations, and JWTs that must be refused.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};

use super::*;
use crate::log::JwtError;

/// Keys and JWTs that another implementation made: of alice, until 2100.
const VECTORS: &str = include_str!("vectors.json");

const NOW_S: u64 = 2_000_000_000;
const NOW_US: u64 = NOW_S * 1_000_000;

fn vectors() -> Value {
    serde_json::from_str(VECTORS).unwrap()
}

fn rules() -> JwtRules {
    JwtRules {
        issuer: "https://id.example".to_owned(),
        audience: "helix".to_owned(),
        principal_claim: "sub".to_owned(),
        principal_prefix: "jwt:".to_owned(),
    }
}

fn verifier(jwks: &Value) -> JwtVerifier {
    JwtVerifier::new(rules(), jwks.to_string().as_bytes()).unwrap()
}

/// The signer of JWTs whose key has an id.
struct Issuer {
    pair: Ed25519KeyPair,
    id: &'static str,
}

impl Issuer {
    fn new(id: &'static str, seed: u8) -> Self {
        Self { pair: Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap(), id }
    }

    fn key(&self) -> Value {
        let x = URL_SAFE_NO_PAD.encode(self.pair.public_key());
        json!({ "kty": "OKP", "crv": "Ed25519", "kid": self.id, "x": x })
    }

    fn jwks(&self) -> Value {
        json!({ "keys": [self.key()] })
    }

    fn sign(&self, header: &Value, claims: &Value) -> String {
        let part = |json: &Value| URL_SAFE_NO_PAD.encode(json.to_string());
        let signed = format!("{}.{}", part(header), part(claims));
        let signature = self.pair.sign(signed.as_bytes());
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    /// Signs these claims, over those of a valid JWT; null removes one.
    fn jwt(&self, changed: &Value) -> String {
        let mut claims = json!({
            "iss": "https://id.example", "aud": "helix", "sub": "alice", "exp": NOW_S + 600,
        });
        for (name, value) in changed.as_object().unwrap() {
            match value {
                Value::Null => drop(claims.as_object_mut().unwrap().remove(name)),
                value => claims[name] = value.clone(),
            }
        }
        self.sign(&json!({ "alg": "EdDSA", "kid": self.id }), &claims)
    }
}

fn refused(verifier: &JwtVerifier, jwt: &str) -> JwtError {
    let error = verifier.verify(jwt, NOW_US).unwrap_err();
    assert!(jwt.is_empty() || !error.to_string().contains(jwt), "{error}");
    error
}

#[test]
fn jwts_of_another_implementation_are_verified_with_each_algorithm() {
    let vectors = vectors();
    let verifier = verifier(&vectors["jwks"]);
    let tokens = vectors["tokens"].as_object().unwrap();
    assert_eq!(tokens.len(), 3);
    for (algorithm, jwt) in tokens {
        let jwt = jwt.as_str().unwrap();
        let login = verifier.verify(jwt, NOW_US).unwrap_or_else(|it| panic!("{algorithm}: {it}"));
        assert_eq!(&**login.principal(), "jwt:alice");
        assert_eq!(login.refused_us(), (4_102_444_800 + 60) * 1_000_000);
        // Another last byte of the signature. The digits of its end may have unused bits.
        let at = jwt.len() - 4;
        let other = if jwt.as_bytes()[at] == b'A' { "B" } else { "A" };
        let forged = [&jwt[..at], other, &jwt[at + 1..]].concat();
        assert_eq!(refused(&verifier, &forged), JwtError::Signature, "{algorithm}");
        let (signed, signature) = jwt.rsplit_once('.').unwrap();
        let extended = format!("{signed}A.{signature}");
        assert_eq!(refused(&verifier, &extended), JwtError::Signature, "{algorithm}");
        for signature in ["", "AAAA"] {
            let short = format!("{signed}.{signature}");
            assert_eq!(refused(&verifier, &short), JwtError::Signature, "{algorithm}");
        }
    }
}

#[test]
fn the_key_decides_the_algorithm() {
    let issuer = Issuer::new("k", 1);
    let verifier = verifier(&issuer.jwks());
    let claims = json!({ "iss": "https://id.example", "aud": "helix", "sub": "a", "exp": NOW_S });
    for name in ["none", "None", "HS256", "RS256", "ES256", "eddsa", ""] {
        for header in [json!({ "alg": name, "kid": "k" }), json!({ "alg": name })] {
            let jwt = issuer.sign(&header, &claims);
            let algorithm = JwtError::Algorithm { name: format!("{name:?}") };
            assert_eq!(refused(&verifier, &jwt), algorithm);
            let (signed, _) = jwt.rsplit_once('.').unwrap();
            assert_eq!(refused(&verifier, &format!("{signed}.")), algorithm);
        }
    }
    // A secret is no key of a JWKS, so no key of HS256 can come to be.
    let secret = json!({ "keys": [{ "kty": "oct", "kid": "k", "k": "AAAA" }] });
    assert_eq!(JwtKeySet::parse(secret.to_string().as_bytes()), Err(JwksError::NoKey));
}

#[test]
fn keys_are_chosen_by_id_or_by_being_the_only_one() {
    let (first, second) = (Issuer::new("first", 1), Issuer::new("second", 2));
    let both = verifier(&json!({ "keys": [first.key(), second.key()] }));
    both.verify(&second.jwt(&json!({})), NOW_US).unwrap();
    let unknown = Issuer::new("third", 1).jwt(&json!({}));
    assert_eq!(refused(&both, &unknown).name(), "jwt_unknown_key");
    assert!(refused(&both, &unknown).to_string().contains("the key \"third\""));
    // The id of another key.
    let wrong = Issuer::new("second", 1).jwt(&json!({}));
    assert_eq!(refused(&both, &wrong), JwtError::Signature);
    let claims = json!({ "iss": "https://id.example", "aud": "helix", "sub": "a", "exp": NOW_S });
    let unnamed = first.sign(&json!({ "alg": "EdDSA" }), &claims);
    assert_eq!(refused(&both, &unnamed).name(), "jwt_unknown_key");
    verifier(&first.jwks()).verify(&unnamed, NOW_US).unwrap();
}

#[test]
fn claims_are_checked() {
    let issuer = Issuer::new("k", 1);
    let verifier = verifier(&issuer.jwks());
    let accepted = [
        json!({}),
        json!({ "aud": ["other", "helix"] }),
        json!({ "nbf": NOW_S + 59, "iat": NOW_S + 1_000 }),
        json!({ "exp": NOW_S - 59 }),
        json!({ "exp": NOW_S as f64 + 0.5 }),
    ];
    for claims in &accepted {
        let login = verifier.verify(&issuer.jwt(claims), NOW_US);
        assert_eq!(&**login.unwrap().principal(), "jwt:alice", "{claims}");
    }
    for (claims, name) in [
        (json!({ "iss": "https://id.example/" }), "jwt_issuer"),
        (json!({ "iss": ["https://id.example"] }), "jwt_issuer"),
        (json!({ "iss": null }), "jwt_issuer"),
        (json!({ "aud": "Helix" }), "jwt_audience"),
        (json!({ "aud": ["other", ["helix"]] }), "jwt_audience"),
        (json!({ "aud": null }), "jwt_audience"),
        (json!({ "exp": NOW_S - 61 }), "jwt_expired"),
        (json!({ "exp": null }), "jwt_malformed"),
        (json!({ "exp": "2100" }), "jwt_malformed"),
        (json!({ "exp": -1 }), "jwt_malformed"),
        (json!({ "exp": 1e300 }), "jwt_malformed"),
        (json!({ "nbf": NOW_S + 61 }), "jwt_early"),
        (json!({ "nbf": "now" }), "jwt_malformed"),
        (json!({ "sub": null }), "jwt_principal"),
        (json!({ "sub": "" }), "jwt_principal"),
        (json!({ "sub": 17 }), "jwt_principal"),
        (json!({ "sub": "two words" }), "jwt_principal"),
        (json!({ "sub": "x".repeat(252) }), "jwt_principal"),
    ] {
        assert_eq!(refused(&verifier, &issuer.jwt(&claims)).name(), name, "{claims}");
    }
    assert_eq!(verifier.remembered(), accepted.len(), "only accepted ones are remembered");
    let said = refused(&verifier, &issuer.jwt(&json!({ "exp": NOW_S - 100 })));
    assert_eq!(said, JwtError::Expired { ago_s: 100 });
}

#[test]
fn malformed_and_oversized_jwts_are_refused() {
    let issuer = Issuer::new("k", 1);
    let verifier = verifier(&issuer.jwks());
    let jwt = issuer.jwt(&json!({}));
    let (signed, signature) = jwt.rsplit_once('.').unwrap();
    let (header, claims) = signed.split_once('.').unwrap();
    for malformed in [
        String::new(),
        "..".to_owned(),
        signed.to_owned(),
        format!("{jwt}.{signature}"),
        format!("{signed}.{signature}="),
        format!("{signed}.!"),
        format!("{header}=.{claims}.{signature}"),
        format!("e30.{claims}.{signature}"),
        format!("W10.{claims}.{signature}"),
        format!("{}.{claims}.{signature}", "A".repeat(1_025)),
        issuer.sign(&json!({ "alg": "EdDSA", "kid": 7 }), &json!({})),
        issuer.sign(&json!({ "alg": "EdDSA", "kid": "k", "crit": ["exp"] }), &json!({})),
        issuer.sign(&json!({ "alg": "EdDSA", "kid": "k" }), &json!([])),
    ] {
        assert_eq!(refused(&verifier, &malformed).name(), "jwt_malformed", "{malformed}");
    }
    let deep = format!("{}{}", "[".repeat(2_000), "]".repeat(2_000));
    let deep = format!("{}.{claims}.{signature}", URL_SAFE_NO_PAD.encode(deep));
    assert_eq!(refused(&verifier, &deep).name(), "jwt_malformed");
    let large = issuer.jwt(&json!({ "groups": "x".repeat(JWT_BYTES_MAX) }));
    assert_eq!(refused(&verifier, &large).name(), "jwt_too_large");
}

#[test]
fn a_removed_key_refuses_its_jwts_at_the_reload() {
    let (kept, removed) = (Issuer::new("kept", 1), Issuer::new("removed", 2));
    let verifier = verifier(&json!({ "keys": [kept.key(), removed.key()] }));
    let of_kept = verifier.verify(&kept.jwt(&json!({})), NOW_US).unwrap();
    let of_removed = verifier.verify(&removed.jwt(&json!({})), NOW_US).unwrap();
    let reload = |jwks: &Value| verifier.reload(Ok(jwks.to_string().into_bytes()));
    reload(&kept.jwks());
    for login in [&of_kept, &of_removed] {
        assert!(!verifier.is_current(login, NOW_US));
    }
    assert_eq!(refused(&verifier, &removed.jwt(&json!({}))).name(), "jwt_unknown_key");
    assert_eq!(verifier.renew(&of_removed, NOW_US).unwrap_err().name(), "jwt_unknown_key");
    let renewed = verifier.renew(&of_kept, NOW_US).unwrap();
    assert!(verifier.is_current(&renewed, NOW_US));
    // The same id with another key.
    reload(&Issuer::new("kept", 3).jwks());
    assert_eq!(verifier.renew(&renewed, NOW_US).unwrap_err().name(), "jwt_unknown_key");
    assert_eq!(refused(&verifier, &kept.jwt(&json!({}))), JwtError::Signature);
}

#[test]
fn an_invalid_file_keeps_the_keys() {
    let issuer = Issuer::new("k", 1);
    let verifier = verifier(&issuer.jwks());
    let login = verifier.verify(&issuer.jwt(&json!({})), NOW_US).unwrap();
    for _ in 0..3 {
        verifier.reload(Ok(b"{".to_vec()));
    }
    // A key that can verify nothing: no point of its curve.
    let mut wrong = issuer.jwks();
    wrong["keys"][0]["x"] = json!(URL_SAFE_NO_PAD.encode([0; 32]));
    let wrong = wrong.to_string().into_bytes();
    assert!(JwtVerifier::new(rules(), &wrong).is_err(), "no node starts with it either");
    for _ in 0..2 {
        verifier.reload(Ok(wrong.clone()));
    }
    let said = verifier.status().error.unwrap();
    assert!(said.contains("no point of Ed25519"), "{said}");
    verifier.reload(Err("cannot be read".to_owned()));
    assert!(verifier.is_current(&login, NOW_US));
    let JwksStatus { succeeded, failed, error } = verifier.status();
    assert_eq!((succeeded, failed), (0, 3), "each problem counts once");
    assert_eq!(error.as_deref(), Some("cannot be read"));
    verifier.reload(Ok(issuer.jwks().to_string().into_bytes()));
    assert_eq!(verifier.status(), JwksStatus { failed: 3, ..JwksStatus::default() });
    // A problem of one poll is that of a file that is being replaced.
    verifier.reload(Ok(Vec::new()));
    verifier.reload(Ok(issuer.jwks().to_string().into_bytes()));
    assert_eq!(verifier.status(), JwksStatus { failed: 3, ..JwksStatus::default() });
}

#[test]
fn a_verified_jwt_is_remembered_until_it_expires() {
    let issuer = Issuer::new("k", 1);
    let verifier = verifier(&issuer.jwks());
    let jwt = issuer.jwt(&json!({}));
    let login = verifier.verify(&jwt, NOW_US).unwrap();
    let again = verifier.verify(&jwt, NOW_US).unwrap();
    assert!(std::sync::Arc::ptr_eq(&login, &again), "the signature was verified again");
    assert_eq!(verifier.remembered(), 1);
    let end_us = login.refused_us();
    assert!(verifier.is_current(&login, end_us - 1) && !verifier.is_current(&login, end_us));
    assert_eq!(verifier.verify(&jwt, end_us).unwrap_err(), JwtError::Expired { ago_s: 60 });
    assert_eq!(verifier.renew(&login, end_us).unwrap_err(), JwtError::Expired { ago_s: 60 });
    // A clock that was set back makes it valid again.
    verifier.verify(&jwt, end_us - 1).unwrap();
}

#[test]
fn remembered_jwts_are_bounded() {
    let issuer = Issuer::new("k", 1);
    let verifier = verifier(&issuer.jwks());
    for number in 0..JWT_CACHE_MAX + 5 {
        verifier.verify(&issuer.jwt(&json!({ "jti": number })), NOW_US).unwrap();
    }
    assert_eq!(verifier.remembered(), JWT_CACHE_MAX);
}

#[test]
fn keys_for_other_uses_and_invalid_ones_are_left_out() {
    let parse = |keys: Value| JwtKeySet::parse(json!({ "keys": keys }).to_string().as_bytes());
    let known = vectors()["jwks"]["keys"].as_array().unwrap().clone();
    let other = |index: usize, name: &str, value: Value| {
        let mut key = known[index].clone();
        key[name] = value;
        key
    };
    assert_eq!(parse(json!(known)).unwrap().len(), 3);
    for left_out in [
        other(0, "use", json!("enc")),
        other(0, "key_ops", json!(["encrypt"])),
        other(0, "alg", json!("RS512")),
        other(1, "crv", json!("P-521")),
        other(2, "crv", json!("X25519")),
        other(2, "kty", json!("oct")),
    ] {
        assert_eq!(parse(json!([left_out])), Err(JwksError::NoKey));
        assert_eq!(parse(json!([left_out, known[1]])).map(|it| !it.is_empty()), Ok(true));
    }
    for invalid in [
        other(0, "kid", json!("x".repeat(257))),
        other(0, "n", json!("AQAB")),
        other(0, "e", json!("")),
        other(0, "e", json!("AQAB=")),
        other(0, "e", json!("AQ")),
        other(0, "e", json!("AQAA")),
        other(0, "e", json!("AgAAAAE")),
        other(0, "n", json!(URL_SAFE_NO_PAD.encode([0xfe; 256]))),
        other(0, "n", json!(URL_SAFE_NO_PAD.encode([0xff; 255]))),
        other(1, "x", json!("AQAB")),
        other(1, "x", known[1]["y"].clone()),
        other(1, "y", json!(URL_SAFE_NO_PAD.encode([0; 32]))),
        other(2, "x", json!(URL_SAFE_NO_PAD.encode([0; 32]))),
        other(2, "x", json!(URL_SAFE_NO_PAD.encode([0xff; 32]))),
        other(1, "y", json!(7)),
        other(2, "x", json!("AQAB")),
        other(2, "kid", json!("x".repeat(257))),
    ] {
        let refused = parse(json!([invalid])).unwrap_err();
        assert!(matches!(refused, JwksError::InvalidKey { .. }), "{invalid}: {refused}");
        assert!(refused.to_string().len() < 400, "{refused}");
        // It is left out while there is another one.
        assert_eq!(parse(json!([invalid, known[1]])).unwrap().len(), 1);
    }
    assert_eq!(parse(json!([7, known[2], known[2]])).unwrap().len(), 1, "the same id");
    assert_eq!(parse(json!([])), Err(JwksError::NoKey));
    assert_eq!(parse(json!(7)), Err(JwksError::Malformed));
    assert!(matches!(parse(json!([7])), Err(JwksError::InvalidKey { .. })));
    let many = vec![other(0, "use", json!("enc")); JWKS_KEYS_MAX + 1];
    assert_eq!(parse(json!(many)), Err(JwksError::TooManyKeys { keys: JWKS_KEYS_MAX + 1 }));
    let large = vec![b' '; JWKS_BYTES_MAX + 1];
    assert!(matches!(JwtKeySet::parse(&large), Err(JwksError::TooLarge { .. })));
}
