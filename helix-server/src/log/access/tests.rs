//! Rules against a simple model, tokens, and the state over commands, checkpoints and limits.

use prost::Message;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::log::{ClusterCommand, ClusterReply, Head};
use crate::records::AccessRecord;
use bytes::BytesMut;

fn counter() -> impl FnMut() -> u64 {
    let mut next = 0x1234_5678_9abc_def0_u64;
    move || {
        next = next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        next
    }
}

fn token(principal: &str) -> (BearerToken, TokenRecord) {
    let mut random = counter();
    let skipped = principal.len();
    (0..skipped).for_each(|_| {
        random();
    });
    let token = BearerToken::from_random(&mut random);
    let record = TokenRecord::new(&token, principal, random, 5, 0);
    (token, record)
}

fn create(record: TokenRecord, rules: &[AccessRule], is_first: bool) -> AccessCommand {
    AccessCommand::CreateToken(CreateToken { token: Some(record), rules: rules.to_vec(), is_first })
}

fn allow(principal: &str, rules: &[AccessRule]) -> AccessCommand {
    AccessCommand::Allow(PrincipalRules { principal: principal.to_owned(), rules: rules.to_vec() })
}

fn remove(principal: &str, rules: &[AccessRule]) -> AccessCommand {
    AccessCommand::Remove(PrincipalRules { principal: principal.to_owned(), rules: rules.to_vec() })
}

fn topic(name: &str, is_prefix: bool, operations: &[AccessOperation]) -> AccessRule {
    AccessRule::new(ResourceKind::Topic, name, is_prefix, operations)
}

/// The model: every pair of operation and name that a list of rules allows, rule by rule.
fn model_allows(
    rules: &[(ResourceKind, String, bool, AccessOperation)],
    operation: AccessOperation,
    kind: ResourceKind,
    name: &str,
) -> bool {
    for (rule_kind, pattern, is_prefix, allowed) in rules {
        if *rule_kind == ResourceKind::Cluster && *allowed == AccessOperation::Admin {
            return true;
        }
        let is_named = match is_prefix {
            true => {
                name.as_bytes().iter().zip(pattern.as_bytes()).all(|(a, b)| a == b)
                    && name.len() >= pattern.len()
            }
            false => name == pattern,
        };
        let is_allowed = *allowed == operation
            || *allowed == AccessOperation::Admin
            || operation == AccessOperation::Describe;
        if *rule_kind == kind && is_named && is_allowed {
            return true;
        }
    }
    false
}

#[test]
fn rules_match_as_a_simple_model_of_them() {
    let mut random = StdRng::seed_from_u64(42);
    let letters = ["a", "b", "-"];
    let name = |random: &mut StdRng| {
        let length = random.random_range(0..4);
        (0..length).map(|_| letters[random.random_range(0..3)]).collect::<String>()
    };
    let mut allowed = 0;
    for round in 0..4_000 {
        let mut state = AccessState::default();
        let mut model: Vec<(ResourceKind, String, bool, AccessOperation)> = Vec::new();
        for _ in 0..random.random_range(1..12) {
            let kind = ResourceKind::ALL[random.random_range(0..4)];
            let is_cluster = kind == ResourceKind::Cluster;
            let is_prefix = !is_cluster && random.random_range(0..2) == 0;
            let pattern = if is_cluster { String::new() } else { name(&mut random) };
            let operation = AccessOperation::ALL[random.random_range(0..8)];
            // Administrators of the cluster would hide everything else.
            let is_rare = is_cluster && operation == AccessOperation::Admin && round % 20 != 0;
            let rule = AccessRule::new(kind, pattern.clone(), is_prefix, &[operation]);
            let entry = (kind, pattern, is_prefix, operation);
            if random.random_range(0..4) == 0 {
                let removed = state.apply(&remove("p", std::slice::from_ref(&rule)));
                if removed.is_ok() {
                    model.retain(|known| *known != entry);
                }
            } else if !is_rare && state.apply(&allow("p", &[rule])).is_ok() {
                model.push(entry);
            }
        }
        let rules = state.rules_of("p").cloned().unwrap_or_default();
        for _ in 0..40 {
            let kind = ResourceKind::ALL[random.random_range(0..4)];
            let name =
                if kind == ResourceKind::Cluster { String::new() } else { name(&mut random) };
            let operation = AccessOperation::ALL[random.random_range(0..8)];
            let expected = model_allows(&model, operation, kind, &name);
            let found = rules.allows(operation, AccessResource::new(kind, &name));
            assert_eq!(found, expected, "{operation} {kind:?} {name:?}: {model:?}");
            allowed += usize::from(found);
            // A right on a prefix is a right on each name with it.
            if rules.allows_prefix(operation, kind, &name) {
                let longer = format!("{name}ab");
                let resource = AccessResource::new(kind, &longer);
                assert!(kind == ResourceKind::Cluster || rules.allows(operation, resource));
            }
            if found {
                assert!(rules.allows_some(operation, kind));
            }
        }
    }
    assert!(allowed > 5_000, "{allowed}");
}

#[test]
fn a_token_survives_its_text_and_hides_its_secret() {
    let (token, record) = token("alice");
    let text = token.reveal();
    let parsed = BearerToken::parse(&text).unwrap();
    assert_eq!((parsed.id(), parsed.reveal()), (token.id(), text.clone()));
    assert!(record.is_of(&parsed));
    let secret = text.rsplit('_').next().unwrap();
    assert_eq!(secret.len(), 64);
    let shown = format!("{token:?} {record:?} {:?}", create(record.clone(), &[], false));
    assert!(!shown.contains(&secret[..8]), "{shown}");
    let hash: String = record.hash.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(!shown.contains(&hash[..8]) && !shown.contains(&format!("{:?}", record.hash)));
    for header in [format!("Bearer {text}"), format!("bearer   {text} ")] {
        let presented = PresentedToken::from_header(header.as_bytes()).unwrap();
        assert!(!format!("{presented:?}").contains(secret));
        assert!(matches!(presented, PresentedToken::Cluster(parsed) if parsed.id() == token.id()));
    }
}

#[test]
fn a_token_of_three_parts_is_a_jwt() {
    let presented = PresentedToken::from_header(b"Bearer eyJh.eyJz.c2ln").unwrap();
    assert!(!format!("{presented:?}").contains("eyJ"), "{presented:?}");
    assert!(matches!(presented, PresentedToken::Jwt("eyJh.eyJz.c2ln")));
    for other in ["Bearer a.b", "Bearer a.b.c.d", "Basic a.b.c", "a.b.c"] {
        let refused = PresentedToken::from_header(other.as_bytes()).unwrap_err();
        assert_eq!(refused, TokenError::Malformed, "{other}");
    }
}

#[test]
fn every_changed_character_of_a_token_is_refused() {
    let (token, record) = token("alice");
    let text = token.reveal();
    for at in 0..text.len() {
        for other in ["0", "f", "g", "_", "F", " ", "é"] {
            let changed = [&text[..at], other, &text[at + 1..]].concat();
            if changed != text {
                let is_accepted = BearerToken::parse(&changed).is_some_and(|it| record.is_of(&it));
                assert!(!is_accepted, "{at} {other}");
            }
        }
        assert!(BearerToken::parse(&text[..at]).is_none());
    }
    let headers = ["", "Bearer", "Bearer ", "Basic YTpi", "Bearer helix_1_2"];
    for header in headers.map(str::as_bytes).into_iter().chain([&[0xff, 0xfe, b' '][..]]) {
        assert_eq!(PresentedToken::from_header(header).unwrap_err(), TokenError::Malformed);
    }
}

#[test]
fn a_token_is_valid_until_its_time_or_its_revocation() {
    let mut state = AccessState::default();
    let (token, record) = token("alice");
    let record = TokenRecord { expires_at_us: 5_000_000, ..record };
    assert_eq!(state.verify(&token, 0).unwrap_err(), TokenError::Unknown);
    assert_eq!(state.apply(&create(record.clone(), &[], false)), Ok(true));
    assert_eq!(state.apply(&create(record, &[], false)), Ok(false), "repeated");
    assert_eq!(state.verify(&token, 4_999_999).unwrap().principal, "alice");
    let expired = state.verify(&token, 8_000_000).unwrap_err();
    assert_eq!(expired, TokenError::Expired { id: token.id(), ago_s: 3 });
    assert_eq!(state.apply(&AccessCommand::RevokeToken(token.id())), Ok(true));
    assert_eq!(state.apply(&AccessCommand::RevokeToken(token.id())), Ok(false));
    assert_eq!(state.verify(&token, 0).unwrap_err(), TokenError::Unknown);
    assert!(state.has_had_tokens());
}

#[test]
fn the_first_token_is_made_once() {
    let mut state = AccessState::default();
    let ((_, first), (_, second)) = (token("a"), token("bb"));
    assert_eq!(state.apply(&create(first.clone(), &[], true)), Ok(true));
    assert_eq!(state.apply(&create(first, &[], true)), Ok(false), "repeated");
    assert!(state.apply(&create(second.clone(), &[], true)).is_err());
    state.apply(&AccessCommand::RevokeTokens("a".to_owned())).unwrap();
    assert!(state.apply(&create(second.clone(), &[], true)).is_err(), "also after it was revoked");
    assert_eq!(state.apply(&create(second, &[], false)), Ok(true));
}

#[test]
fn rules_of_one_target_are_merged_and_removed_by_operation() {
    use AccessOperation::{Read, Write};
    let mut state = AccessState::default();
    assert_eq!(state.apply(&allow("p", &[topic("a", false, &[Read])])), Ok(true));
    assert_eq!(state.apply(&allow("p", &[topic("a", false, &[Read])])), Ok(false));
    state.apply(&allow("p", &[topic("a", true, &[Read]), topic("a", false, &[Write])])).unwrap();
    let rules = |state: &AccessState| state.rules_of("p").unwrap().rules().to_vec();
    assert_eq!(rules(&state), [topic("a", false, &[Read, Write]), topic("a", true, &[Read])]);
    state.apply(&remove("p", &[topic("a", false, &[Read])])).unwrap();
    assert_eq!(rules(&state), [topic("a", false, &[Write]), topic("a", true, &[Read])]);
    let rest = [topic("a", false, &[Write]), topic("a", true, &[Read, Write])];
    assert_eq!(state.apply(&remove("p", &rest)), Ok(true));
    assert_eq!(state.apply(&remove("p", &rest)), Ok(false));
    assert!(state.rules_of("p").is_none());
}

#[test]
fn invalid_commands_change_nothing() {
    use AccessOperation::{Commit, Create, Read};
    let mut state = AccessState::default();
    let (_, record) = token("alice");
    let group = |name: &str| AccessRule::new(ResourceKind::Group, name, false, &[Read]);
    let wrong_rules = [
        AccessRule { kind: 9, ..topic("a", false, &[Read]) },
        AccessRule { operations: 0, ..topic("a", false, &[]) },
        AccessRule { operations: 1 << 20, ..topic("a", false, &[]) },
        topic("", false, &[Read]),
        topic("a*", true, &[Read]),
        topic("a b", false, &[Read]),
        topic(&"x".repeat(256), true, &[Read]),
        topic("a", false, &[Commit]),
        AccessRule { operations: Create as u32, ..group("a") },
        AccessRule::new(ResourceKind::Cluster, "a", false, &[AccessOperation::Admin]),
        AccessRule::new(ResourceKind::Cluster, "", true, &[AccessOperation::Admin]),
    ];
    for rule in wrong_rules {
        let refused = state.apply(&allow("p", std::slice::from_ref(&rule)));
        assert!(matches!(refused, Err(ClusterReply::Invalid { field: "rules", .. })), "{rule:?}");
        assert!(state.apply(&create(record.clone(), &[rule], false)).is_err());
    }
    for principal in ["", "a b", "é", &"x".repeat(PRINCIPAL_BYTES_MAX + 1)] {
        assert!(state.apply(&allow(principal, &[topic("a", false, &[Read])])).is_err());
    }
    for broken in [
        TokenRecord { id: 0, ..record.clone() },
        TokenRecord { salt: Vec::new(), ..record.clone() },
        TokenRecord { hash: vec![0; 31], ..record.clone() },
        TokenRecord { principal: String::new(), ..record.clone() },
    ] {
        assert!(state.apply(&create(broken, &[], false)).is_err());
    }
    assert!(state.is_empty() && state == AccessState::default());
    state.apply(&create(record.clone(), &[], false)).unwrap();
    let other = TokenRecord { principal: "bob".to_owned(), ..record };
    assert!(state.apply(&create(other, &[], false)).is_err(), "an id names one token");
}

#[test]
fn limits_hold_and_free_again() {
    let mut state = AccessState::default();
    let rules = |first: usize, count: usize| -> Vec<AccessRule> {
        let names = first..first + count;
        names.map(|n| topic(&format!("t{n}"), false, &[AccessOperation::Read])).collect()
    };
    assert!(state.apply(&allow("p", &rules(0, RULES_PER_COMMAND_MAX + 1))).is_err());
    for first in [0, 100] {
        state.apply(&allow("p", &rules(first, 100))).unwrap();
    }
    state.apply(&allow("p", &rules(200, 56))).unwrap();
    assert!(state.apply(&allow("p", &rules(256, 1))).is_err());
    state.apply(&remove("p", &rules(0, 1))).unwrap();
    state.apply(&allow("p", &rules(256, 1))).unwrap();
    let principals = (RULES_MAX - RULES_PER_PRINCIPAL_MAX) / 100;
    for number in 0..principals {
        state.apply(&allow(&format!("q{number}"), &rules(0, 100))).unwrap();
    }
    let rest = RULES_MAX - RULES_PER_PRINCIPAL_MAX - principals * 100;
    state.apply(&allow("r", &rules(0, rest))).unwrap();
    assert!(state.apply(&allow("s", &rules(0, 1))).is_err());
    state.apply(&remove("r", &rules(0, 1))).unwrap();
    state.apply(&allow("s", &rules(0, 1))).unwrap();
}

#[test]
fn commands_and_state_survive_encoding() {
    use AccessOperation::{Admin, Read};
    let mut state = AccessState::default();
    let (_, record) = token("alice");
    let admin = AccessRule::new(ResourceKind::Cluster, "", false, &[Admin]);
    let commands = [
        create(record, &[admin], true),
        allow("bob", &[topic("b", true, &[Read]), topic("a", false, &[Read])]),
        remove("bob", &[topic("b", true, &[Read])]),
        AccessCommand::RevokeTokens("carol".to_owned()),
        AccessCommand::RevokeToken(7),
        AccessCommand::SetQuota(QuotaLimits {
            principal: "*".to_owned(),
            bytes_in_per_second: 1 << 20,
            bytes_out_per_second: 1 << 21,
            requests_per_second: 100,
            connections: 7,
        }),
    ];
    for command in commands {
        let head = Head::Cluster(ClusterCommand::Access(command.clone()));
        let mut bytes = BytesMut::new();
        head.encode_to(&mut bytes);
        assert_eq!(Head::decode(&bytes).unwrap(), head);
        state.apply(&command).unwrap();
    }
    let restored = state.to_record().into_state().unwrap();
    assert_eq!(restored, state);
    assert_eq!(restored.rules_of("alice"), state.rules_of("alice"));
}

/// Fails if the encoding of a checkpoint or the hash of a token changes: both are permanent.
#[test]
fn a_checkpoint_has_the_bytes_of_its_first_release() {
    const GOLDEN: &str = "0a4108011205616c6963651a1011111111111111111111111111111111\
        2220c5709fee14437b8b410a12a8fbc50b35cf16b95e0cb7057cf3539bf6bf4d90f728053009\
        12180a05616c696365120f080112076f72646572732d180120031801";
    use AccessOperation::{Read, Write};
    let token = BearerToken::parse(&format!("helix_{:016x}_{}", 1, "22".repeat(32))).unwrap();
    let record = TokenRecord::new(&token, "alice", || 0x1111_1111_1111_1111, 5, 9);
    let mut state = AccessState::default();
    state.apply(&create(record, &[topic("orders-", true, &[Read, Write])], true)).unwrap();
    let bytes = state.to_record().encode_to_vec();
    let shown: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(shown, GOLDEN);
    let restored = AccessRecord::decode(&bytes[..]).unwrap().into_state().unwrap();
    assert_eq!(restored, state);
    assert!(restored.verify(&token, 8).is_ok());
}

#[test]
fn broken_checkpoints_are_refused() {
    let (_, record) = token("alice");
    let rules =
        |rules: &[AccessRule]| PrincipalRules { principal: "p".to_owned(), rules: rules.to_vec() };
    let (a, b) = (topic("a", false, &[AccessOperation::Read]), topic("b", false, &[]));
    let b = AccessRule { operations: AccessOperation::Write as u32, ..b };
    let broken = [
        AccessRecord { tokens: vec![record.clone(), record.clone()], ..AccessRecord::default() },
        AccessRecord {
            tokens: vec![TokenRecord { hash: Vec::new(), ..record }],
            ..AccessRecord::default()
        },
        AccessRecord { principals: vec![rules(&[])], ..AccessRecord::default() },
        AccessRecord {
            principals: vec![rules(&[b.clone(), a.clone()])],
            ..AccessRecord::default()
        },
        AccessRecord {
            principals: vec![rules(&[a.clone(), a.clone()])],
            ..AccessRecord::default()
        },
        AccessRecord { principals: vec![rules(&[a]), rules(&[b])], ..AccessRecord::default() },
    ];
    for record in broken {
        assert!(record.into_state().is_err());
    }
}
