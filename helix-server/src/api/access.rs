//! AccessService: tokens, rules, and the caller of a call.

use std::sync::Arc;

use helix_proto::log::v1::access_service_server::AccessService;
use helix_proto::log::v1::{
    self as wire, AllowAccessRequest, AllowAccessResponse, CallerSource, CreateTokenRequest,
    CreateTokenResponse, ListAccessRequest, ListAccessResponse, ListQuotasRequest,
    ListQuotasResponse, ListRefusedCallsRequest, ListRefusedCallsResponse, ListTokensRequest,
    ListTokensResponse, PrincipalAccess, RemoveAccessRequest, RemoveAccessResponse,
    RevokeTokenRequest, RevokeTokenResponse, SetQuotaRequest, SetQuotaResponse, TestAccessRequest,
    TestAccessResponse, TokenInfo, WhoAmIRequest, WhoAmIResponse,
};
use tonic::{Request, Response, Status};

use super::access_rules::{
    check_matchable, check_principal, kind_of, operation_of, requested_rules, wire_rules,
};
use super::authorize::{authorize_change, authorize_request};
use super::page::{cut_page, page_size};
use super::{call_memory, recheck, reserve_response, time};
use crate::access::Credentials;
use crate::access::audit::RefusedCall;
use crate::call::CallMemory;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::limits::{
    PRINCIPAL_LISTED_BYTES, PRINCIPALS_PER_PAGE_DEFAULT, PRINCIPALS_PER_PAGE_MAX,
    TOKEN_DESCRIBED_BYTES, TOKENS_PER_PAGE_DEFAULT, TOKENS_PER_PAGE_MAX,
};
use crate::log::{
    AccessCommand, AccessResource, BearerToken, CreateToken, PrincipalRules, RuleSet, TokenRecord,
};
use crate::node::Node;

/// Last microsecond of the year 9999, the largest time of a `google.protobuf.Timestamp`.
const TIMESTAMP_MAX_US: u64 = 253_402_300_799_999_999;

pub(crate) struct AccessHandler {
    node: Arc<Node>,
}

impl AccessHandler {
    pub(crate) fn new(node: &Arc<Node>) -> Self {
        Self { node: node.clone() }
    }

    pub(super) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    fn who_am_i(&self, call: Option<&CallMemory>) -> Result<WhoAmIResponse> {
        let caller = call.and_then(CallMemory::access).and_then(|access| access.caller());
        let Some(caller) = caller else { return Ok(WhoAmIResponse::default()) };
        let caller = self.node.renewed(caller)?;
        let (source, token_id) = match caller.credentials() {
            Credentials::Certificate => (CallerSource::Certificate, String::new()),
            Credentials::Token(token) => (CallerSource::Token, shown_id(token.id)),
            Credentials::Jwt(_) => (CallerSource::Jwt, String::new()),
        };
        Ok(WhoAmIResponse {
            principal: caller.principal().to_string(),
            token_id,
            expires_at: caller.credentials().expires_at_us().map(time::to_timestamp),
            rules: wire_rules(caller.rules()),
            is_restricted: true,
            source: source.into(),
        })
    }

    async fn create_token(&self, request: CreateTokenRequest) -> Result<CreateTokenResponse> {
        let now_us = self.node.clock().now_us();
        let expires_at_us = match request.expires_at {
            Some(expires_at) => time::from_timestamp("expires_at", expires_at)?,
            None => 0,
        };
        if request.expires_at.is_some() && expires_at_us <= now_us {
            let what = "is in the past by this node's clock".to_owned();
            return Err(Error::InvalidArgument { field: "expires_at", what });
        }
        if expires_at_us > TIMESTAMP_MAX_US {
            let what = "is after the year 9999; leave it out for a token that does not expire";
            return Err(Error::InvalidArgument { field: "expires_at", what: what.to_owned() });
        }
        let rules = requested_rules(&request.rules, &request.roles)?;
        check_matchable(&rules)?;
        check_principal("principal", &request.principal)?;
        let token = BearerToken::from_random(|| self.node.random_u64());
        let random = || self.node.random_u64();
        let record = TokenRecord::new(&token, request.principal, random, now_us, expires_at_us);
        let info = Some(token_info(&record));
        let create = CreateToken { token: Some(record), rules, is_first: false };
        self.node.cluster().change_access(AccessCommand::CreateToken(create)).await?;
        Ok(CreateTokenResponse { token: token.reveal(), info })
    }

    async fn list_tokens(
        &self,
        request: &ListTokensRequest,
        call: Option<&CallMemory>,
    ) -> Result<ListTokensResponse> {
        let page_size = page_size(request.page_size, TOKENS_PER_PAGE_DEFAULT, TOKENS_PER_PAGE_MAX)?;
        let after = match request.page_token.as_str() {
            "" => 0,
            token => parse_id("page_token", token)?,
        };
        self.node.cluster().catch_up().await?;
        reserve_response(call, page_size * TOKEN_DESCRIBED_BYTES).await?;
        let access = self.node.cluster().machine().access();
        let is_listed = |token: &&Arc<TokenRecord>| {
            let is_of = request.principal.is_empty() || token.principal == request.principal;
            token.id > after && is_of
        };
        let found = access.tokens().filter(is_listed).take(page_size + 1);
        let mut tokens: Vec<TokenInfo> = found.map(|token| token_info(token)).collect();
        let next_page_token = cut_page(&mut tokens, page_size, |token| token.token_id.clone());
        Ok(ListTokensResponse { tokens, next_page_token })
    }

    async fn revoke(&self, request: RevokeTokenRequest) -> Result<RevokeTokenResponse> {
        let RevokeTokenRequest { token_id, principal } = request;
        if token_id.is_empty() == principal.is_empty() {
            let what = "give a token_id or a principal".to_owned();
            return Err(Error::InvalidArgument { field: "token_id", what });
        }
        let cluster = self.node.cluster();
        cluster.catch_up().await?;
        let access = cluster.machine().access();
        let (command, count) = if principal.is_empty() {
            let id = parse_id("token_id", &token_id)?;
            if access.token(id).is_none() {
                return Err(Error::TokenNotFound { id: token_id });
            }
            (AccessCommand::RevokeToken(id), 1)
        } else {
            let count = access.tokens().filter(|token| token.principal == principal).count();
            (AccessCommand::RevokeTokens(principal), count)
        };
        cluster.change_access(command).await?;
        let revoked_count = u32::try_from(count).unwrap_or(u32::MAX);
        Ok(RevokeTokenResponse { revoked_count })
    }

    /// Checks new rules, and adds them to those of a principal.
    async fn allow(&self, request: AllowAccessRequest) -> Result<AllowAccessResponse> {
        let AllowAccessRequest { principal, rules, roles } = request;
        check_matchable(&requested_rules(&rules, &roles)?)?;
        check_principal("principal", &principal)?;
        let access = self.change_rules(principal, (&rules, &roles), AccessCommand::Allow).await?;
        Ok(AllowAccessResponse { access })
    }

    /// Changes the rules of a principal, and returns the rules after it.
    async fn change_rules(
        &self,
        principal: String,
        rules: (&[wire::AccessRule], &[wire::RoleGrant]),
        command: impl FnOnce(PrincipalRules) -> AccessCommand,
    ) -> Result<Option<PrincipalAccess>> {
        let rules = requested_rules(rules.0, rules.1)?;
        if rules.is_empty() {
            let what = "name at least one rule or role".to_owned();
            return Err(Error::InvalidArgument { field: "rules", what });
        }
        let change = PrincipalRules { principal: principal.clone(), rules };
        self.node.cluster().change_access(command(change)).await?;
        let access = self.node.cluster().machine().access();
        let rules = access.rules_of(&principal).map(|rules| wire_rules(rules));
        Ok(Some(PrincipalAccess { principal, rules: rules.unwrap_or_default() }))
    }

    async fn list_access(
        &self,
        request: &ListAccessRequest,
        call: Option<&CallMemory>,
    ) -> Result<ListAccessResponse> {
        let page_size =
            page_size(request.page_size, PRINCIPALS_PER_PAGE_DEFAULT, PRINCIPALS_PER_PAGE_MAX)?;
        self.node.cluster().catch_up().await?;
        reserve_response(call, page_size * PRINCIPAL_LISTED_BYTES).await?;
        let access = self.node.cluster().machine().access();
        let is_listed = |(name, _): &(&Arc<str>, &Arc<RuleSet>)| {
            let is_asked = request.principal.is_empty() || ***name == *request.principal;
            is_asked && ***name > *request.page_token
        };
        let found = access.principals().filter(is_listed).take(page_size + 1);
        let mut principals: Vec<PrincipalAccess> = found
            .map(|(name, rules)| PrincipalAccess {
                principal: name.to_string(),
                rules: wire_rules(rules),
            })
            .collect();
        let next_page_token = cut_page(&mut principals, page_size, |it| it.principal.clone());
        Ok(ListAccessResponse { principals, next_page_token })
    }

    async fn test(&self, request: &TestAccessRequest) -> Result<TestAccessResponse> {
        let kind = kind_of(request.resource_kind)?;
        let operation = operation_of(request.operation)?;
        let resource = AccessResource::new(kind, &request.name);
        self.node.cluster().catch_up().await?;
        let access = self.node.cluster().machine().access();
        let rules = access.rules_of(&request.principal).cloned().unwrap_or_default();
        let rule = rules.allowing(operation, resource);
        let detail = match rule {
            Some(rule) => format!("the rule `{rule}` allows it"),
            None if rules.rules().is_empty() => "the principal has no rules".to_owned(),
            None => format!("none of {} rules allows it", rules.rules().len()),
        };
        Ok(TestAccessResponse { is_allowed: rule.is_some(), detail })
    }
}

fn shown_id(id: u64) -> String {
    format!("{id:016x}")
}

fn parse_id(field: &'static str, text: &str) -> Result<u64> {
    let is_id = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let id = u64::from_str_radix(text, 16).ok().filter(|_| is_id);
    id.ok_or_else(|| Error::InvalidArgument {
        field,
        what: "must be 16 hexadecimal digits, as `helix token list` shows them".to_owned(),
    })
}

fn expiry(token: &TokenRecord) -> Option<prost_types::Timestamp> {
    (token.expires_at_us > 0).then(|| time::to_timestamp(token.expires_at_us))
}

/// Returns the calls that this node has refused last.
fn refused_calls(node: &Node) -> ListRefusedCallsResponse {
    let now_us = node.clock().now_us();
    let call = |refused: RefusedCall| {
        let ago = u64::try_from(refused.at.elapsed().as_micros()).unwrap_or(u64::MAX);
        let RefusedCall { principal, peer, user_agent, method, resource, result, .. } = refused;
        wire::RefusedCall {
            time: Some(time::to_timestamp(now_us.saturating_sub(ago))),
            principal,
            peer,
            user_agent,
            method,
            right: resource,
            reason: result,
        }
    };
    let calls = node.audit().refused().into_iter().map(call).collect();
    ListRefusedCallsResponse { calls, node_id: node.cluster().node_id() }
}

fn token_info(token: &TokenRecord) -> TokenInfo {
    TokenInfo {
        token_id: shown_id(token.id),
        principal: token.principal.clone(),
        created_at: Some(time::to_timestamp(token.created_at_us)),
        expires_at: expiry(token),
    }
}

#[tonic::async_trait]
impl AccessService for AccessHandler {
    async fn who_am_i(
        &self,
        request: Request<WhoAmIRequest>,
    ) -> Result<Response<WhoAmIResponse>, Status> {
        authorize_request(&self.node, &request)?;
        let call = call_memory(&request);
        Ok(Response::new(self.who_am_i(call.as_deref())?))
    }

    async fn create_token(
        &self,
        request: Request<CreateTokenRequest>,
    ) -> Result<Response<CreateTokenResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        Ok(Response::new(self.create_token(request.into_inner()).await?))
    }

    async fn list_tokens(
        &self,
        request: Request<ListTokensRequest>,
    ) -> Result<Response<ListTokensResponse>, Status> {
        let call = call_memory(&request);
        let (call, request) = (call.as_deref(), request.get_ref());
        let list = || self.list_tokens(request, call);
        Ok(Response::new(recheck::read(&self.node, call, request, list).await?))
    }

    async fn revoke_token(
        &self,
        request: Request<RevokeTokenRequest>,
    ) -> Result<Response<RevokeTokenResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        Ok(Response::new(self.revoke(request.into_inner()).await?))
    }

    async fn allow_access(
        &self,
        request: Request<AllowAccessRequest>,
    ) -> Result<Response<AllowAccessResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        Ok(Response::new(self.allow(request.into_inner()).await?))
    }

    async fn remove_access(
        &self,
        request: Request<RemoveAccessRequest>,
    ) -> Result<Response<RemoveAccessResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        let RemoveAccessRequest { principal, rules, roles } = request.into_inner();
        let access = self.change_rules(principal, (&rules, &roles), AccessCommand::Remove).await?;
        Ok(Response::new(RemoveAccessResponse { access }))
    }

    async fn list_access(
        &self,
        request: Request<ListAccessRequest>,
    ) -> Result<Response<ListAccessResponse>, Status> {
        let call = call_memory(&request);
        let (call, request) = (call.as_deref(), request.get_ref());
        let list = || self.list_access(request, call);
        Ok(Response::new(recheck::read(&self.node, call, request, list).await?))
    }

    async fn test_access(
        &self,
        request: Request<TestAccessRequest>,
    ) -> Result<Response<TestAccessResponse>, Status> {
        let call = call_memory(&request);
        let (call, request) = (call.as_deref(), request.get_ref());
        let test = || self.test(request);
        Ok(Response::new(recheck::read(&self.node, call, request, test).await?))
    }

    async fn set_quota(
        &self,
        request: Request<SetQuotaRequest>,
    ) -> Result<Response<SetQuotaResponse>, Status> {
        authorize_change(&self.node, &request).await?;
        Ok(Response::new(self.set_quota(request.into_inner()).await?))
    }

    async fn list_quotas(
        &self,
        request: Request<ListQuotasRequest>,
    ) -> Result<Response<ListQuotasResponse>, Status> {
        let call = call_memory(&request);
        let (call, request) = (call.as_deref(), request.get_ref());
        let list = || self.list_quotas(request, call);
        Ok(Response::new(recheck::read(&self.node, call, request, list).await?))
    }

    async fn list_refused_calls(
        &self,
        request: Request<ListRefusedCallsRequest>,
    ) -> Result<Response<ListRefusedCallsResponse>, Status> {
        let call = call_memory(&request);
        let list = || async { Ok::<_, Error>(refused_calls(&self.node)) };
        let listed = recheck::read(&self.node, call.as_deref(), request.get_ref(), list);
        Ok(Response::new(listed.await?))
    }
}
