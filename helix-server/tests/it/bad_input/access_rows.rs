//! Cases of AccessService.

use helix_proto::log::v1::{
    AccessOperation, AccessRole, AccessRule, AllowAccessRequest, CreateTokenRequest,
    ErrorReason as R, ListAccessRequest, ListQuotasRequest, ListTokensRequest, PrincipalQuota,
    RemoveAccessRequest, ResourceKind, RevokeTokenRequest, RoleGrant, SetQuotaRequest,
    TestAccessRequest,
};
use prost_types::Timestamp;

use super::Expected::{Fine, Refused};
use super::{FieldCase, InvalidCall};

fn rule() -> AccessRule {
    AccessRule {
        resource_kind: ResourceKind::Topic.into(),
        name: "orders".to_owned(),
        is_prefix: false,
        operations: vec![AccessOperation::Read.into()],
    }
}

fn grant() -> RoleGrant {
    let name = "orders".to_owned();
    RoleGrant { role: AccessRole::Consumer.into(), name, is_prefix: false }
}

fn allow(rule: AccessRule) -> InvalidCall {
    InvalidCall::AllowAccess(AllowAccessRequest {
        principal: "bad-input".to_owned(),
        rules: vec![rule],
        ..AllowAccessRequest::default()
    })
}

fn allow_role(grant: RoleGrant) -> InvalidCall {
    InvalidCall::AllowAccess(AllowAccessRequest {
        principal: "bad-input".to_owned(),
        roles: vec![grant],
        ..AllowAccessRequest::default()
    })
}

pub(super) fn all() -> Vec<FieldCase> {
    [rules(), tokens(), huge(), lists(), quotas()].into_iter().flatten().collect()
}

fn rules() -> Vec<FieldCase> {
    let invalid = |words| Refused(R::InvalidArgument, words);
    let named =
        |name: &str, is_prefix| allow(AccessRule { name: name.to_owned(), is_prefix, ..rule() });
    let operations = |operations| allow(AccessRule { operations, ..rule() });
    let remove = |principal: &str, count, roles| {
        InvalidCall::RemoveAccess(RemoveAccessRequest {
            principal: principal.to_owned(),
            rules: vec![rule(); count],
            roles,
        })
    };
    let nameless = InvalidCall::AllowAccess(AllowAccessRequest {
        rules: vec![rule()],
        ..AllowAccessRequest::default()
    });
    let empty = InvalidCall::AllowAccess(AllowAccessRequest {
        principal: "bad-input".to_owned(),
        ..AllowAccessRequest::default()
    });
    let wrong_role = RoleGrant { role: 99, ..grant() };
    let nameless_role = RoleGrant { name: String::new(), ..grant() };
    let whole = RoleGrant { role: AccessRole::Admin.into(), is_prefix: true, ..grant() };
    vec![
        (
            &["AccessRule.resource_kind"],
            allow(AccessRule { resource_kind: 99, ..rule() }),
            invalid("resource_kind: is required"),
        ),
        (&["AccessRule.name"], named("", false), invalid("rules: the name of a topic")),
        (&["AccessRule.name"], named("a*", false), invalid("without '*'")),
        (&["AccessRule.name"], named("a/b", false), invalid("no topic can have the name")),
        (&["AccessRule.is_prefix"], named("a b", true), invalid("no topic can have the name")),
        (&["AccessRule.is_prefix"], named("a\u{0}", true), invalid("rules: the name of a topic")),
        (&["AccessRule.operations"], operations(Vec::new()), invalid("operations of a topic are")),
        (&["AccessRule.operations"], operations(vec![99]), invalid("operation: is required")),
        (
            &["AccessRule.operations"],
            operations(vec![AccessOperation::Commit.into()]),
            invalid("operations of a topic are: read"),
        ),
        (&["AllowAccessRequest.principal"], nameless, invalid("principal: must have 1..=255")),
        (&["AllowAccessRequest.rules"], empty, invalid("rules: name at least one")),
        (
            &["AllowAccessRequest.roles", "RoleGrant.role"],
            allow_role(wrong_role),
            invalid("roles.role: is required"),
        ),
        (&["RoleGrant.name"], allow_role(nameless_role), invalid("roles.name: is required")),
        (&["RoleGrant.is_prefix"], allow_role(whole), invalid("roles.name: must be empty")),
        (
            &["RemoveAccessRequest.principal"],
            remove("a b", 1, Vec::new()),
            invalid("principal: must have 1..=255"),
        ),
        (
            &["RemoveAccessRequest.rules"],
            remove("bad-input", 101, Vec::new()),
            invalid("rules: must be at most 100"),
        ),
        (
            &["RemoveAccessRequest.roles"],
            remove("bad-input", 0, vec![grant(); 101]),
            invalid("rules: must be at most 100"),
        ),
    ]
}

fn tokens() -> Vec<FieldCase> {
    let invalid = |words| Refused(R::InvalidArgument, words);
    let create = |request| InvalidCall::CreateToken(request);
    let base = || CreateTokenRequest {
        principal: "bad-input".to_owned(),
        ..CreateTokenRequest::default()
    };
    let expires = |seconds, nanos| {
        let expires_at = Some(Timestamp { seconds, nanos });
        create(CreateTokenRequest { expires_at, ..base() })
    };
    let revoke = |token_id: &str, principal: &str| {
        let (token_id, principal) = (token_id.to_owned(), principal.to_owned());
        InvalidCall::RevokeToken(RevokeTokenRequest { token_id, principal })
    };
    vec![
        (
            &["CreateTokenRequest.principal"],
            create(CreateTokenRequest { principal: "x".repeat(256), ..base() }),
            invalid("principal: must have 1..=255"),
        ),
        (
            &["CreateTokenRequest.principal"],
            create(CreateTokenRequest { principal: "bob*".to_owned(), ..base() }),
            invalid("principal: names of principals are exact"),
        ),
        (&["CreateTokenRequest.expires_at"], expires(1, 0), invalid("expires_at: is in the past")),
        (
            &["CreateTokenRequest.expires_at"],
            expires(253_402_300_800, 0),
            invalid("expires_at: is after the year 9999"),
        ),
        (&["CreateTokenRequest.expires_at"], expires(i64::MAX, i32::MAX), invalid("expires_at")),
        (
            &["CreateTokenRequest.rules"],
            create(CreateTokenRequest { rules: vec![rule(); 101], ..base() }),
            invalid("rules: must be at most 100"),
        ),
        (
            &["CreateTokenRequest.roles"],
            create(CreateTokenRequest { roles: vec![RoleGrant::default()], ..base() }),
            invalid("roles.role: is required"),
        ),
        (&["RevokeTokenRequest.token_id"], revoke("", ""), invalid("token_id: give a token_id")),
        (&["RevokeTokenRequest.token_id"], revoke("+123456789abcdef", ""), invalid("16 hexa")),
        (
            &["RevokeTokenRequest.token_id"],
            revoke("0123456789abcdef", ""),
            Refused(R::TokenNotFound, "0123456789abcdef"),
        ),
        (&["RevokeTokenRequest.principal"], revoke("", "a b"), invalid("principal: must have")),
    ]
}

/// Texts that would make a command larger than an entry of the log may be.
fn huge() -> Vec<FieldCase> {
    let invalid = |words| Refused(R::InvalidArgument, words);
    let text = "x".repeat(100 << 10);
    let create = CreateTokenRequest { principal: text.clone(), ..CreateTokenRequest::default() };
    let create_with = CreateTokenRequest {
        principal: "bad-input".to_owned(),
        rules: vec![AccessRule { name: text.clone(), ..rule() }],
        ..CreateTokenRequest::default()
    };
    let allow_to = AllowAccessRequest {
        principal: text.clone(),
        rules: vec![rule()],
        ..AllowAccessRequest::default()
    };
    let remove_of = RemoveAccessRequest {
        principal: text.clone(),
        rules: vec![rule()],
        ..RemoveAccessRequest::default()
    };
    let remove = RemoveAccessRequest {
        principal: "bad-input".to_owned(),
        roles: vec![RoleGrant { name: text.clone(), ..grant() }],
        ..RemoveAccessRequest::default()
    };
    let revoke = RevokeTokenRequest { token_id: String::new(), principal: text.clone() };
    let (principal, name) = ("principal: must have 1..=255", "rules: the name of a topic");
    vec![
        (&["CreateTokenRequest.principal"], InvalidCall::CreateToken(create), invalid(principal)),
        (&["CreateTokenRequest.rules"], InvalidCall::CreateToken(create_with), invalid(name)),
        (&["AllowAccessRequest.principal"], InvalidCall::AllowAccess(allow_to), invalid(principal)),
        (&["AccessRule.name"], allow(AccessRule { name: text.clone(), ..rule() }), invalid(name)),
        (&["RoleGrant.name"], allow_role(RoleGrant { name: text, ..grant() }), invalid(name)),
        (
            &["RemoveAccessRequest.principal"],
            InvalidCall::RemoveAccess(remove_of),
            invalid(principal),
        ),
        (&["RemoveAccessRequest.roles"], InvalidCall::RemoveAccess(remove), invalid(name)),
        (&["RevokeTokenRequest.principal"], InvalidCall::RevokeToken(revoke), invalid(principal)),
    ]
}

fn lists() -> Vec<FieldCase> {
    let invalid = |words| Refused(R::InvalidArgument, words);
    let tokens = |page_size, page_token: &str, principal: &str| {
        let (page_token, principal) = (page_token.to_owned(), principal.to_owned());
        InvalidCall::ListTokens(ListTokensRequest { principal, page_size, page_token })
    };
    let access = |page_size, page_token: &str, principal: &str| {
        let (page_token, principal) = (page_token.to_owned(), principal.to_owned());
        InvalidCall::ListAccess(ListAccessRequest { principal, page_size, page_token })
    };
    let test = |operation, resource_kind, name: &str| {
        InvalidCall::TestAccess(TestAccessRequest {
            principal: "\u{0}".to_owned(),
            operation,
            resource_kind,
            name: name.to_owned(),
        })
    };
    vec![
        (&["ListTokensRequest.principal"], tokens(i32::MAX, "", "\u{0}"), Fine),
        (&["ListTokensRequest.page_size"], tokens(-1, "", ""), invalid("page_size")),
        (&["ListTokensRequest.page_token"], tokens(0, "x", ""), invalid("page_token")),
        (&["ListAccessRequest.principal"], access(i32::MAX, "", "\u{0}"), Fine),
        (&["ListAccessRequest.page_size"], access(-1, "", ""), invalid("page_size")),
        (&["ListAccessRequest.page_token"], access(0, "\u{0}", ""), Fine),
        (&["TestAccessRequest.operation"], test(99, 1, "a"), invalid("operation: is required")),
        (&["TestAccessRequest.resource_kind"], test(1, 99, "a"), invalid("resource_kind")),
        (&["TestAccessRequest.principal", "TestAccessRequest.name"], test(1, 1, "\u{0}*"), Fine),
    ]
}

fn quotas() -> Vec<FieldCase> {
    let invalid = |words| Refused(R::InvalidArgument, words);
    let set = |change: fn(&mut PrincipalQuota)| {
        let mut quota = PrincipalQuota {
            principal: "bad-input".to_owned(),
            connections: 7,
            ..PrincipalQuota::default()
        };
        change(&mut quota);
        InvalidCall::SetQuota(SetQuotaRequest { quota: Some(quota) })
    };
    let list = |page_size, page_token: &str| {
        let (principal, page_token) = ("\u{0}".to_owned(), page_token.to_owned());
        InvalidCall::ListQuotas(ListQuotasRequest { principal, page_size, page_token })
    };
    let unset = InvalidCall::SetQuota(SetQuotaRequest::default());
    vec![
        (&["SetQuotaRequest.quota"], unset, invalid("quota: must be set")),
        (
            &["PrincipalQuota.principal"],
            set(|it| it.principal = "a b".to_owned()),
            invalid("quota.principal: must be a principal"),
        ),
        (
            &["PrincipalQuota.bytes_in_per_second"],
            set(|it| it.bytes_in_per_second = 65_535),
            invalid("quota.bytes_in_per_second: 65535 is out of range 65536..="),
        ),
        (
            &["PrincipalQuota.bytes_out_per_second"],
            set(|it| it.bytes_out_per_second = u64::MAX),
            invalid("quota.bytes_out_per_second: 18446744073709551615 is out of range"),
        ),
        (
            &["PrincipalQuota.requests_per_second"],
            set(|it| it.requests_per_second = u64::MAX),
            invalid("quota.requests_per_second: must be at most"),
        ),
        (&["PrincipalQuota.connections"], set(|it| it.connections = u32::MAX), Fine),
        (&["ListQuotasRequest.page_size"], list(-1, ""), invalid("page_size")),
        (
            &["ListQuotasRequest.principal", "ListQuotasRequest.page_token"],
            list(i32::MAX, "\u{0}"),
            Fine,
        ),
    ]
}
