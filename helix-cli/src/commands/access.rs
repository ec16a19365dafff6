//! `helix token`, `helix acl` and `helix whoami`: tokens, rules, and the caller's own.

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
            let expires_at = expires.map(|time| prost_types::Timestamp::from(clock::now() + time));
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
