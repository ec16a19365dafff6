//! `helix token`, `helix acl` and `helix whoami`: tokens, rules, and the caller's own.

use std::time::Duration;

use anyhow::Context;
use helix_client::AccessGrant;
use helix_client::proto::log::v1 as proto;
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{AclChangeArgs, AclSubcommand, GlobalArgs, TokenSubcommand, rule_text};
use crate::clock;
use crate::connect::connect;
use crate::exit::{CliError, Exit};
use crate::output::{Output, message};

/// A new token.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct NewTokenRow {
    /// Principal
    principal: String,
    /// Id of the token
    token_id: String,
    /// Time from which the token is refused; absent if it does not expire
    expires_at: Option<String>,
    /// The token with its secret, which is stored nowhere
    token: String,
}

/// A token, without its secret.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TokenRow {
    /// Id of the token
    token_id: String,
    /// Principal
    principal: String,
    /// Time of its creation
    created_at: Option<String>,
    /// Time from which the token is refused; absent if it does not expire
    expires_at: Option<String>,
}

/// Tokens that were revoked.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RevokedTokens {
    /// Number of tokens
    revoked: u32,
}

/// A rule of a principal.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RuleRow {
    /// Principal
    principal: String,
    /// Resource and operations, as `helix acl allow` takes them
    rule: String,
}

/// Result of a test of rules.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct AccessVerdict {
    /// True if the rules allow it
    is_allowed: bool,
    /// The rule that allows it, or why none does
    detail: String,
}

/// The caller of this command.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CallerRow {
    /// Principal; empty without credentials
    principal: String,
    /// Credentials that name the principal: token, certificate, jwt or none
    source: &'static str,
    /// True if the node checks rights; else the caller may do everything
    is_restricted: bool,
    /// Id of the token; empty without one
    token_id: String,
    /// Time from which the token is refused; absent if it does not expire
    expires_at: Option<String>,
    /// Rules of the principal
    rules: Vec<String>,
}

pub(crate) async fn run_token(
    global: &GlobalArgs,
    command: &TokenSubcommand,
) -> anyhow::Result<()> {
    let admin = connect(global).await?.admin();
    let output = Output { format: global.output };
    match command {
        TokenSubcommand::Create { principal, rules, roles, expires } => {
            let expires_at = expires.map(expiry).transpose()?;
            let grant = AccessGrant { rules: rules.clone(), roles: roles.clone() };
            let created = admin.create_token(principal, expires_at, &grant).await;
            let created = created.with_context(|| format!("create a token for {principal}"))?;
            let info = created.info.unwrap_or_default();
            let row = NewTokenRow {
                principal: info.principal,
                token_id: info.token_id,
                expires_at: shown(info.expires_at),
                token: created.token,
            };
            if !global.quiet && !global.output.is_json() {
                message!("the token is shown only now: store it, then use it with --token-file");
            }
            output.show_as(&row, || format!("{}\n", row.token))
        }
        TokenSubcommand::List { principal } => {
            let tokens = admin.tokens(principal.as_deref()).await.context("list tokens")?;
            if tokens.is_empty() && !global.quiet {
                message!("no tokens");
            }
            output.show(&tokens.into_iter().map(TokenRow::from).collect::<Vec<_>>())
        }
        TokenSubcommand::Revoke { token_id, all_of } => {
            let revoked = match (token_id, all_of) {
                (Some(id), _) => {
                    let revoked = admin.revoke_token(id).await;
                    revoked.with_context(|| format!("revoke token {id}"))?;
                    1
                }
                (None, principal) => {
                    let principal = principal.as_deref().unwrap_or_default();
                    let revoked = admin.revoke_tokens(principal).await;
                    revoked.with_context(|| format!("revoke the tokens of {principal}"))?
                }
            };
            output.show(&RevokedTokens { revoked })
        }
    }
}

pub(crate) async fn run_acl(global: &GlobalArgs, command: &AclSubcommand) -> anyhow::Result<()> {
    let admin = connect(global).await?.admin();
    let output = Output { format: global.output };
    match command {
        AclSubcommand::Allow(args) => {
            let allowed = admin.allow_access(&args.principal, &grant(args)).await;
            let access = allowed.with_context(|| format!("allow {} access", args.principal))?;
            output.show(&rows(access))
        }
        AclSubcommand::Remove(args) => {
            let removed = admin.remove_access(&args.principal, &grant(args)).await;
            let access = removed.with_context(|| format!("remove access of {}", args.principal))?;
            if access.rules.is_empty() && !global.quiet {
                message!("{} has no rules left", args.principal);
            }
            // Also with --quiet: the principal still has what was to be taken.
            for left in rights_left(args, &access.rules) {
                message!("warning: {} {left}", args.principal);
            }
            output.show(&rows(access))
        }
        AclSubcommand::List { principal } => {
            let access = admin.access(principal.as_deref()).await.context("list rules")?;
            if access.is_empty() && !global.quiet {
                message!("no rules");
            }
            output.show(&access.into_iter().flat_map(rows).collect::<Vec<_>>())
        }
        AclSubcommand::Test { principal, operation, resource } => {
            let tested = if resource.is_prefix {
                let failure = CliError::new(Exit::Usage, "name one resource, without `*`");
                return Err(failure.hint("helix acl test alice read topic:orders").into());
            } else {
                admin.test_access(principal, *operation, resource.kind, &resource.name).await
            };
            let proto::TestAccessResponse { is_allowed, detail } =
                tested.with_context(|| format!("test the access of {principal}"))?;
            let verdict = match is_allowed {
                true => Ok(()),
                false => {
                    let failure = CliError::new(Exit::Error, format!("{principal} is denied"));
                    Err(failure.why(detail.clone()).into())
                }
            };
            output.show_with_verdict(&AccessVerdict { is_allowed, detail }, verdict)
        }
    }
}

pub(crate) async fn who_am_i(global: &GlobalArgs) -> anyhow::Result<()> {
    let admin = connect(global).await?.admin();
    let caller = admin.who_am_i().await.context("ask for the principal")?;
    let source = match caller.source() {
        proto::CallerSource::Unspecified => "none",
        proto::CallerSource::Token => "token",
        proto::CallerSource::Certificate => "certificate",
        proto::CallerSource::Jwt => "jwt",
    };
    let row = CallerRow {
        source,
        is_restricted: caller.is_restricted,
        expires_at: shown(caller.expires_at),
        rules: caller.rules.iter().map(rule_text).collect(),
        principal: caller.principal,
        token_id: caller.token_id,
    };
    Output { format: global.output }.show(&row)
}

/// Latest expiry of a token: the end of the year 9999, as of a `google.protobuf.Timestamp`.
const EXPIRES_MAX_S: i64 = 253_402_300_799;

/// Returns the time from which a token is refused.
fn expiry(after: Duration) -> anyhow::Result<prost_types::Timestamp> {
    let time = clock::now().checked_add(after).map(prost_types::Timestamp::from);
    time.filter(|time| (0..=EXPIRES_MAX_S).contains(&time.seconds)).ok_or_else(|| {
        let failure = CliError::new(Exit::Usage, "the token would expire after the year 9999");
        failure.hint("leave out --expires for a token that does not expire").into()
    })
}

/// Returns the operations of `args` that remaining rules still allow, with the rule.
fn rights_left(args: &AclChangeArgs, remaining: &[proto::AccessRule]) -> Vec<String> {
    let mut left = Vec::new();
    for removed in args.rules.iter().cloned().chain(args.roles.iter().flat_map(rules_of)) {
        for operation in removed.operations() {
            let rule = remaining.iter().find(|rule| covers(rule, &removed, operation));
            if let Some(rule) = rule {
                let right =
                    proto::AccessRule { operations: vec![operation.into()], ..removed.clone() };
                let (right, rule) = (rule_text(&right), rule_text(rule));
                left.push(format!("still has {right}, by the rule {rule}"));
            }
        }
    }
    left
}

/// Returns true if a rule allows the operation on a resource of another rule.
fn covers(
    rule: &proto::AccessRule,
    other: &proto::AccessRule,
    operation: proto::AccessOperation,
) -> bool {
    use proto::AccessOperation as O;
    let has = |operation: O| rule.operations().any(|it| it == operation);
    if rule.resource_kind() == proto::ResourceKind::Cluster && has(O::Admin) {
        return true;
    }
    let is_meant = match rule.is_prefix {
        true => other.name.starts_with(&rule.name),
        false => !other.is_prefix && other.name == rule.name,
    };
    let is_allowed = has(operation) || has(O::Admin) || operation == O::Describe;
    rule.resource_kind == other.resource_kind && is_meant && is_allowed
}

/// Returns the rules of a role that names resources; others are about all of them.
fn rules_of(grant: &proto::RoleGrant) -> Vec<proto::AccessRule> {
    use proto::{AccessOperation as O, AccessRole as R, ResourceKind as K};
    let rule = |kind: K, operations: &[O]| proto::AccessRule {
        resource_kind: kind.into(),
        name: grant.name.clone(),
        is_prefix: grant.is_prefix,
        operations: operations.iter().map(|it| (*it).into()).collect(),
    };
    match grant.role() {
        R::Producer => vec![rule(K::Topic, &[O::Write]), rule(K::Producer, &[O::Write])],
        R::Consumer => vec![rule(K::Topic, &[O::Read])],
        R::GroupMember => vec![rule(K::Group, &[O::Read, O::Commit])],
        R::Operator => vec![rule(K::Cluster, &[O::Alter, O::Describe])],
        R::Admin => vec![rule(K::Cluster, &[O::Admin])],
        R::Unspecified => Vec::new(),
    }
}

fn grant(args: &AclChangeArgs) -> AccessGrant {
    AccessGrant { rules: args.rules.clone(), roles: args.roles.clone() }
}

fn rows(access: proto::PrincipalAccess) -> Vec<RuleRow> {
    let proto::PrincipalAccess { principal, rules } = access;
    rules
        .iter()
        .map(|rule| RuleRow { principal: principal.clone(), rule: rule_text(rule) })
        .collect()
}

fn shown(time: Option<prost_types::Timestamp>) -> Option<String> {
    time.map(|time| time.to_string())
}

impl From<proto::TokenInfo> for TokenRow {
    fn from(token: proto::TokenInfo) -> Self {
        Self {
            token_id: token.token_id,
            principal: token.principal,
            created_at: shown(token.created_at),
            expires_at: shown(token.expires_at),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, CliCommand};

    fn args(line: &str) -> AclChangeArgs {
        let words = ["helix", "acl", "remove", "bob"].into_iter().chain(line.split(' '));
        match Cli::try_parse_from(words).unwrap().command {
            CliCommand::Acl(AclSubcommand::Remove(args)) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn rights_that_other_rules_still_give_are_named() {
        let left = |removed: &str, remaining: &str| {
            rights_left(&args(removed), &args(remaining).rules).join("; ")
        };
        let said = left("topic:orders=read,write", "topic:ord*=read group:orders=read");
        assert_eq!(said, "still has topic:orders=read, by the rule topic:ord*=read");
        assert!(left("topic:orders=read", "cluster=admin").contains("cluster=admin"));
        assert!(left("topic:a*=read", "topic:*=admin").contains("topic:*=admin"));
        assert!(left("topic:a=describe", "topic:a=write").contains("topic:a=describe"));
        assert!(left("--role consumer:a", "topic:*=read").contains("topic:a=read"));
        for (removed, remaining) in [
            ("topic:orders=read", "topic:orders=write"),
            ("topic:orders=read", "topic:order=read"),
            ("topic:ord*=read", "topic:orders=read"),
            ("topic:ord*=read", "topic:orders*=read"),
            ("group:a=commit", "topic:*=read"),
        ] {
            assert_eq!(left(removed, remaining), "", "{removed} and {remaining}");
        }
    }

    #[test]
    fn a_token_expires_within_the_years_of_a_timestamp() {
        assert!(expiry(Duration::from_secs(30 * 86_400)).is_ok());
        for days in [99_999_999_999_999, 3_000_000] {
            assert!(expiry(Duration::from_secs(days * 86_400)).is_err(), "{days}");
        }
        assert!(expiry(Duration::MAX).is_err());
    }
}
