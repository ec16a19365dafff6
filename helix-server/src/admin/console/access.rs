//! Access: the caller, the principals with their rules, tokens and quotas, and the calls that this
//! node has refused. Five calls, each with one page of rows. A caller without the right to a part
//! sees why.

use askama::Template;
use helix_proto::log::v1::{
    AccessRule, ListAccessRequest, ListQuotasRequest, ListRefusedCallsRequest, ListTokensRequest,
    PrincipalAccess, QuotaUsage, RefusedCall, TokenInfo, WhoAmIRequest,
};
use helix_proto::units;
use hyper::{Response, StatusCode};

use super::PageRequest;
use super::caller::{self, FailedCall};
use super::form::encode;
use super::page::{AdminBody, PageFailure, PageFrame, ROWS_PER_PAGE, html, shown, time};
use crate::access::AuthMode;

#[derive(Template)]
#[template(path = "access.html")]
struct AccessPage {
    frame: PageFrame,
    mode: &'static str,
    who: String,
    principal: String,
    principals: AccessPart<PrincipalRow>,
    tokens: AccessPart<TokenRow>,
    quotas: AccessPart<QuotaRow>,
    refused: AccessPart<RefusedRow>,
}

/// One list of the page, or why it is not shown.
struct AccessPart<T> {
    rows: Vec<T>,
    next: String,
    refused: String,
}

struct PrincipalRow {
    principal: String,
    rules: Vec<String>,
    more_rules: usize,
}

struct TokenRow {
    id: String,
    principal: String,
    created: String,
    expires: String,
}

struct QuotaRow {
    principal: String,
    bytes_in: String,
    bytes_out: String,
    requests: String,
    connections: String,
    throttled: String,
}

/// A call that this node has refused.
struct RefusedRow {
    at: String,
    principal: String,
    peer: String,
    user_agent: String,
    method: String,
    right: String,
    reason: String,
}

/// Refused calls that are shown.
const REFUSED_MAX: usize = 50;

/// Rules of one principal that are shown.
const RULES_MAX: usize = 20;

/// Shows the page.
pub(super) async fn show(page: &PageRequest) -> Result<Response<AdminBody>, PageFailure> {
    let caller = &page.caller;
    let principal = page.query.get("principal");
    let token = |field: &str| page.query.get(field).to_owned();
    let next = |field: &str, token: &str| match token {
        "" => String::new(),
        token => {
            format!("/console/access?principal={}&{field}={}", encode(principal), encode(token))
        }
    };
    let mut access = caller::access(caller.local());
    let who = access.who_am_i(caller.request(WhoAmIRequest {})).await?.into_inner();
    let principals = access.list_access(caller.request(ListAccessRequest {
        principal: principal.to_owned(),
        page_size: ROWS_PER_PAGE,
        page_token: token("principals"),
    }));
    let principals = part(principals.await, |found| {
        (
            found.principals.iter().map(principal_row).collect(),
            next("principals", &found.next_page_token),
        )
    })?;
    let tokens = access.list_tokens(caller.request(ListTokensRequest {
        principal: principal.to_owned(),
        page_size: ROWS_PER_PAGE,
        page_token: token("tokens"),
    }));
    let tokens = part(tokens.await, |found| {
        (found.tokens.iter().map(token_row).collect(), next("tokens", &found.next_page_token))
    })?;
    let quotas = access.list_quotas(caller.request(ListQuotasRequest {
        principal: principal.to_owned(),
        page_size: ROWS_PER_PAGE,
        page_token: token("quotas"),
    }));
    let quotas = part(quotas.await, |found| {
        (found.quotas.iter().map(quota_row).collect(), next("quotas", &found.next_page_token))
    })?;
    let refused = access.list_refused_calls(caller.request(ListRefusedCallsRequest {}));
    let refused = part(refused.await, |found| {
        let is_of = |call: &&RefusedCall| principal.is_empty() || call.principal == principal;
        let calls = found.calls.iter().filter(is_of).take(REFUSED_MAX);
        (calls.map(refused_row).collect(), String::new())
    })?;
    let shown_page = AccessPage {
        frame: page.frame("Access", "access"),
        mode: match page.node.auth_mode() {
            AuthMode::Off => "off: every caller may do everything, and the rules below do nothing",
            AuthMode::Optional => "optional: only callers with credentials are held to rules",
            AuthMode::Required => "required: every caller needs credentials and rules",
        },
        who: match who.principal.as_str() {
            "" => "You call without credentials.".to_owned(),
            principal => format!("You are {}.", shown(principal)),
        },
        principal: shown(principal),
        principals,
        tokens,
        quotas,
        refused,
    };
    html(StatusCode::OK, &shown_page)
}

/// Returns a part of the page; a call that the caller may not make becomes a text.
fn part<R, T>(
    called: Result<tonic::Response<R>, tonic::Status>,
    rows: impl FnOnce(R) -> (Vec<T>, String),
) -> Result<AccessPart<T>, PageFailure> {
    match called {
        Ok(response) => {
            let (rows, next) = rows(response.into_inner());
            Ok(AccessPart { rows, next, refused: String::new() })
        }
        Err(status) => {
            let failed = FailedCall::from(status);
            match failed.status {
                StatusCode::FORBIDDEN => {
                    let refused = shown(&failed.message);
                    Ok(AccessPart { rows: Vec::new(), next: String::new(), refused })
                }
                _ => Err(failed.into()),
            }
        }
    }
}

fn refused_row(call: &RefusedCall) -> RefusedRow {
    RefusedRow {
        at: time(call.time.as_ref()),
        principal: shown(&call.principal),
        peer: shown(&call.peer),
        user_agent: shown(&call.user_agent),
        method: shown(call.method.strip_prefix("helix.log.v1.").unwrap_or(&call.method)),
        right: shown(&call.right),
        reason: shown(&call.reason),
    }
}

fn principal_row(access: &PrincipalAccess) -> PrincipalRow {
    PrincipalRow {
        principal: shown(&access.principal),
        rules: access.rules.iter().take(RULES_MAX).map(rule_text).collect(),
        more_rules: access.rules.len().saturating_sub(RULES_MAX),
    }
}

/// Returns a rule in the form of the command line: `topic:orders-*=read,write`.
fn rule_text(rule: &AccessRule) -> String {
    let kind = rule.resource_kind().as_str_name().trim_start_matches("RESOURCE_KIND_");
    let operations = rule.operations().map(|operation| {
        operation.as_str_name().trim_start_matches("ACCESS_OPERATION_").to_lowercase()
    });
    let operations: Vec<String> = operations.collect();
    let star = if rule.is_prefix { "*" } else { "" };
    let resource = match (rule.name.as_str(), rule.is_prefix) {
        ("", false) => kind.to_lowercase(),
        (name, _) => format!("{}:{}{star}", kind.to_lowercase(), shown(name)),
    };
    format!("{resource}={}", operations.join(","))
}

fn token_row(token: &TokenInfo) -> TokenRow {
    TokenRow {
        id: shown(&token.token_id),
        principal: shown(&token.principal),
        created: time(token.created_at.as_ref()),
        expires: token.expires_at.as_ref().map_or("never".to_owned(), |at| time(Some(at))),
    }
}

fn quota_row(usage: &QuotaUsage) -> QuotaRow {
    let quota = usage.quota.clone().unwrap_or_default();
    let limit = |number: u64, text: String| if number == 0 { "unlimited".to_owned() } else { text };
    let rate = |bytes: u64| limit(bytes, format!("{}/s", units::bytes(bytes)));
    let requests = quota.requests_per_second;
    let connections = u64::from(quota.connections);
    let open = units::count(usage.connection_count.into());
    QuotaRow {
        principal: shown(&quota.principal),
        bytes_in: rate(quota.bytes_in_per_second),
        bytes_out: rate(quota.bytes_out_per_second),
        requests: limit(requests, format!("{}/s", units::count(requests))),
        connections: format!("{open} of {}", limit(connections, units::count(connections))),
        throttled: units::count(usage.throttled_count),
    }
}

#[cfg(test)]
mod tests {
    use helix_proto::log::v1::{AccessOperation, ResourceKind};

    use super::*;

    #[test]
    fn rules_have_the_form_of_the_command_line() {
        let rule = |kind: ResourceKind, name: &str, is_prefix| AccessRule {
            resource_kind: kind.into(),
            name: name.to_owned(),
            is_prefix,
            operations: vec![AccessOperation::Read.into(), AccessOperation::Write.into()],
        };
        assert_eq!(rule_text(&rule(ResourceKind::Topic, "a-", true)), "topic:a-*=read,write");
        assert_eq!(rule_text(&rule(ResourceKind::Topic, "", true)), "topic:*=read,write");
        assert_eq!(rule_text(&rule(ResourceKind::Group, "b", false)), "group:b=read,write");
        assert_eq!(rule_text(&rule(ResourceKind::Cluster, "", false)), "cluster=read,write");
    }
}
