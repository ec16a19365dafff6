//! Targets for access control: tokens, JWTs, rules, and files of certificates.

use std::cell::RefCell;
use std::io::{Seek, Write};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use clap::{Args, Command, FromArgMatches};
use helix_server::access::Principal;
use helix_server::access::jwt::{JwtKeySet, JwtRules, JwtVerifier};
use helix_server::log::{
    AccessCommand, AccessOperation, AccessResource, AccessRule, AccessState, BearerToken,
    PresentedToken, PrincipalRules, RULES_PER_PRINCIPAL_MAX, ResourceKind, is_principal_name,
};
use helix_tls::{
    CertificateFiles, CertificateInfo, CertificateKind, CertificateNames, CertificateStore,
    NodeIdentity,
};
use ring::signature::{Ed25519KeyPair, KeyPair};
use tempfile::NamedTempFile;

use crate::access_args::{AclChangeArgs, rule_text};
use crate::input::Input;
use crate::texts;

const NOW_US: u64 = 2_000_000_000_000_000;

/// Bytes of a token's text before its secret.
const SECRET_AT: usize = "helix_".len() + 16 + "_".len();

/// Bytes of the text of an error.
const ERROR_BYTES_MAX: usize = 1 << 10;

thread_local! {
    static SIGNER: Ed25519KeyPair = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap();
    static VERIFIER: JwtVerifier = verifier(&jwks()).unwrap();
    static FILE: RefCell<NamedTempFile> = RefCell::new(texts::file());
}

/// Returns the keys of the signer, as its issuer publishes them.
fn jwks() -> Vec<u8> {
    let x = SIGNER.with(|signer| URL_SAFE_NO_PAD.encode(signer.public_key()));
    let key = serde_json::json!({ "kty": "OKP", "crv": "Ed25519", "kid": "ed-1", "x": x });
    serde_json::json!({ "keys": [key] }).to_string().into_bytes()
}

fn verifier(jwks: &[u8]) -> Option<JwtVerifier> {
    let rules = JwtRules {
        issuer: "https://id.example".to_owned(),
        audience: "helix".to_owned(),
        principal_claim: "sub".to_owned(),
        principal_prefix: "jwt:".to_owned(),
    };
    match JwtVerifier::new(rules, jwks) {
        Ok(verifier) => Some(verifier),
        Err(error) => {
            assert!(error.to_string().len() <= ERROR_BYTES_MAX, "{error}");
            None
        }
    }
}

fn verify(verifier: &JwtVerifier, jwt: &str) {
    match verifier.verify(jwt, NOW_US) {
        Ok(login) => {
            let principal = login.principal();
            assert!(is_principal_name(principal) && principal.starts_with("jwt:"), "{principal}");
            assert!(login.refused_us() > NOW_US && verifier.is_current(&login, NOW_US));
            assert_eq!(verifier.verify(jwt, NOW_US).as_ref(), Ok(&login));
            assert!(verifier.verify(jwt, login.refused_us()).is_err());
        }
        Err(error) => assert!(error.to_string().len() <= ERROR_BYTES_MAX, "{error}"),
    }
}

/// Target `token`: the authorization header of a call. A token that is read is written back equal.
pub(crate) fn token(input: &[u8]) {
    match PresentedToken::from_header(input) {
        Ok(PresentedToken::Cluster(token)) => {
            let text = token.reveal();
            let again = BearerToken::parse(&text).expect("a token's own form");
            assert_eq!((again.id(), again.reveal()), (token.id(), text.clone()));
            assert!(!format!("{token:?}").contains(&text[SECRET_AT..]));
        }
        Ok(PresentedToken::Jwt(jwt)) => {
            assert!(BearerToken::parse(jwt).is_none(), "no text is both");
            VERIFIER.with(|verifier| verify(verifier, jwt));
        }
        Err(_) => {}
    }
}

/// Target `jwt`: the text of a JWT, a JWKS, or a header and claims that are signed.
pub(crate) fn jwt(input: &[u8]) {
    let mut input = Input(input);
    match input.below(3) {
        0 => {
            let Ok(text) = std::str::from_utf8(input.0) else { return };
            VERIFIER.with(|verifier| verify(verifier, text));
        }
        1 => {
            let Some(verifier) = verifier(input.0) else { return };
            let keys = JwtKeySet::parse(input.0).expect("the verifier has it");
            assert!(!keys.is_empty());
            // Keys that no signature was made for verify nothing.
            let header = r#"{"alg":"RS256"}"#;
            for header in [header, &header.replace("RS", "ES"), &header.replace("RS256", "EdDSA")] {
                let part = |text: &str| URL_SAFE_NO_PAD.encode(text);
                let jwt = format!("{}.{}.{}", part(header), part("{}"), part(&"x".repeat(64)));
                assert!(verifier.verify(&jwt, NOW_US).is_err());
            }
        }
        _ => {
            let header = match input.some_bytes() {
                [] => br#"{"alg":"EdDSA","kid":"ed-1"}"#.as_slice(),
                header => header,
            };
            let part = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
            let signed = format!("{}.{}", part(header), part(input.0));
            let signature = SIGNER.with(|signer| signer.sign(signed.as_bytes()));
            let jwt = format!("{signed}.{}", part(signature.as_ref()));
            VERIFIER.with(|verifier| verify(verifier, &jwt));
        }
    }
}

/// Target `rules`: rules of the command line print as they are written; commands keep the state
/// within its limits, and do what they say.
pub(crate) fn rules(input: &[u8]) {
    let mut input = Input(input);
    if input.one_in(2) {
        if let Ok(text) = std::str::from_utf8(input.0) {
            argument(text);
        }
        return;
    }
    let mut state = AccessState::default();
    while !input.is_empty() {
        let principal = match input.below(4) {
            0 => String::from_utf8_lossy(input.some_bytes()).into_owned(),
            known => format!("p{known}"),
        };
        let rules = (0..input.below(5)).map(|_| rule(&mut input)).collect();
        let change = PrincipalRules { principal, rules };
        let command = match input.one_in(2) {
            true => AccessCommand::Allow(change.clone()),
            false => AccessCommand::Remove(change.clone()),
        };
        let before = state.clone();
        let checked = AccessState::check(&command);
        let applied = state.apply(&command);
        assert!(checked.is_ok() || applied.is_err(), "{command:?}");
        if !matches!(applied, Ok(true)) {
            assert_eq!(state, before);
        }
        if applied.is_ok() {
            expect_rules(&state, &command, &change);
        }
    }
}

fn expect_rules(state: &AccessState, command: &AccessCommand, change: &PrincipalRules) {
    let set = state.rules_of(&change.principal).cloned().unwrap_or_default();
    assert!(set.rules().len() <= RULES_PER_PRINCIPAL_MAX);
    for rule in &change.rules {
        let kind = ResourceKind::from_number(rule.kind).expect("a rule that was checked");
        for operation in rule.operation_set().iter() {
            let is_same = |known: &&AccessRule| {
                (known.kind, &known.name, known.is_prefix)
                    == (rule.kind, &rule.name, rule.is_prefix)
            };
            let known = set.rules().iter().find(is_same);
            let has = known.is_some_and(|known| known.operation_set().contains(operation));
            let is_allowed = matches!(command, AccessCommand::Allow(_));
            assert_eq!(has, is_allowed, "{rule} after {command:?}");
            if is_allowed {
                assert!(set.allows(operation, AccessResource::new(kind, &rule.name)));
                assert!(set.allows_some(AccessOperation::Describe, kind));
            }
        }
    }
}

fn rule(input: &mut Input<'_>) -> AccessRule {
    let kind = input.below(6) as u32;
    let name = String::from_utf8_lossy(input.some_bytes()).into_owned();
    let is_prefix = input.one_in(2);
    let operations = match input.one_in(4) {
        true => input.number() as u32,
        false => {
            let of_kind = ResourceKind::from_number(kind).map_or(0, |kind| kind.operations().0);
            of_kind & u32::from(input.u8())
        }
    };
    AccessRule { kind, name, is_prefix, operations }
}

fn argument(text: &str) {
    let parse = |text: &str| {
        let command = AclChangeArgs::augment_args(Command::new("helix").no_binary_name(true));
        let matches = command.try_get_matches_from(["alice", "--", text]).ok()?;
        AclChangeArgs::from_arg_matches(&matches).ok()
    };
    let Some(parsed) = parse(text) else { return };
    for rule in &parsed.rules {
        let printed = rule_text(rule);
        let again = parse(&printed).unwrap_or_else(|| panic!("{printed:?} of {text:?}"));
        assert_eq!(again.rules, std::slice::from_ref(rule), "{printed:?}");
    }
}

/// Target `certificates`: a file that is certificate, key and CA at once, or one certificate.
pub(crate) fn certificates(input: &[u8]) {
    let mut input = Input(input);
    if input.one_in(2) {
        return certificate(input.0);
    }
    FILE.with_borrow_mut(|file| {
        file.as_file_mut().set_len(0).unwrap();
        file.rewind().unwrap();
        file.write_all(input.0).unwrap();
        let path = file.path().to_owned();
        let files = CertificateFiles {
            certificate: Some(path.clone()),
            key: Some(path.clone()),
            ca: vec![path],
            client_ca: Vec::new(),
        };
        match CertificateStore::open(files, None) {
            Ok(store) => {
                assert!(store.current().certificates().len() >= 2, "its own, and as a CA");
                store.refresh();
                assert_eq!(store.status().error, None);
            }
            Err(error) => assert!(error.to_string().len() <= ERROR_BYTES_MAX, "{error}"),
        }
    });
}

fn certificate(der: &[u8]) {
    let info = CertificateInfo::of(CertificateKind::Own, der);
    let Ok(names) = CertificateNames::of(der) else { return };
    let info = info.expect("a certificate with names");
    assert!(info.serial.len() <= 64, "{info:?}");
    let _ = info.seconds_left();
    if let Ok(identity) = NodeIdentity::of(&names) {
        assert!(names.uris.contains(&identity.to_string()));
    }
    if let Ok(principal) = Principal::from_certificate(&names) {
        assert!(is_principal_name(principal.as_str()), "{principal}");
    }
}
