//! Administration of access: tokens and rules.

use helix_proto::log::v1::{
    AccessOperation, AccessRule, AllowAccessRequest, CreateTokenRequest, CreateTokenResponse,
    ListAccessRequest, ListTokensRequest, PrincipalAccess, RemoveAccessRequest, ResourceKind,
    RevokeTokenRequest, RoleGrant, TestAccessRequest, TestAccessResponse, TokenInfo, WhoAmIRequest,
    WhoAmIResponse,
};

use super::{Admin, all_pages, required};
use crate::call_spec::{CallSpec, Repeat};
use crate::error::Result;

/// Tokens per page when all are listed.
const PAGE_TOKENS: i32 = 1000;

/// Principals per page when all are listed.
const PAGE_PRINCIPALS: i32 = 100;

/// Rules and roles to give to a principal, or to take from it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AccessGrant {
    /// Rules.
    pub rules: Vec<AccessRule>,
    /// Roles.
    pub roles: Vec<RoleGrant>,
}

/// Except for [`Admin::who_am_i`], every method fails with `PERMISSION_DENIED` for a caller that is
/// not an administrator of the cluster.
impl Admin {
    /// Returns the principal of this client, with its rules.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` if the cluster needs a token and this client has no valid one.
    pub async fn who_am_i(&self) -> Result<WhoAmIResponse> {
        let call = CallSpec::new("who am I", Repeat::Read);
        let response = self
            .client
            .call_any(call, |node| async move { node.access().who_am_i(WhoAmIRequest {}).await });
        response.await
    }

    /// Makes a token for a principal and adds rules to the principal. The response has the secret.
    ///
    /// Not repeated after an attempt with an unknown outcome, which may have made a token.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the principal, a rule or the time is invalid, or a limit is reached.
    pub async fn create_token(
        &self,
        principal: &str,
        expires_at: Option<prost_types::Timestamp>,
        grant: &AccessGrant,
    ) -> Result<CreateTokenResponse> {
        let call = CallSpec::new("create token", Repeat::UnlessApplied);
        let response = self.client.call_any(call, |node| {
            let request = CreateTokenRequest {
                principal: principal.to_owned(),
                expires_at,
                rules: grant.rules.clone(),
                roles: grant.roles.clone(),
            };
            async move { node.access().create_token(request).await }
        });
        response.await
    }

    /// Returns the tokens of a principal, or all for `None`, without their secrets.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn tokens(&self, principal: Option<&str>) -> Result<Vec<TokenInfo>> {
        let principal = principal.unwrap_or_default();
        all_pages(|page_token| async move {
            let call = CallSpec::new("list tokens", Repeat::Read);
            let response = self.client.call_any(call, |node| {
                let request = ListTokensRequest {
                    principal: principal.to_owned(),
                    page_size: PAGE_TOKENS,
                    page_token: page_token.clone(),
                };
                async move { node.access().list_tokens(request).await }
            });
            let page = response.await?;
            Ok((page.tokens, page.next_page_token))
        })
        .await
    }

    /// Revokes the token with this id.
    ///
    /// # Errors
    /// `TOKEN_NOT_FOUND`, also if an earlier attempt of this call has revoked it.
    pub async fn revoke_token(&self, token_id: &str) -> Result<()> {
        let request =
            RevokeTokenRequest { token_id: token_id.to_owned(), ..RevokeTokenRequest::default() };
        self.revoke(request).await.map(|_| ())
    }

    /// Revokes every token of a principal. Returns their number.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn revoke_tokens(&self, principal: &str) -> Result<u32> {
        let request =
            RevokeTokenRequest { principal: principal.to_owned(), ..RevokeTokenRequest::default() };
        self.revoke(request).await
    }

    async fn revoke(&self, request: RevokeTokenRequest) -> Result<u32> {
        let call = CallSpec::new("revoke token", Repeat::Always);
        let response = self.client.call_any(call, |node| {
            let request = request.clone();
            async move { node.access().revoke_token(request).await }
        });
        Ok(response.await?.revoked_count)
    }

    /// Adds rules to a principal. Returns its rules.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the principal or a rule is invalid, or a limit is reached.
    pub async fn allow_access(
        &self,
        principal: &str,
        grant: &AccessGrant,
    ) -> Result<PrincipalAccess> {
        let call = CallSpec::new("allow access", Repeat::Always);
        let response = self.client.call_any(call, |node| {
            let AccessGrant { rules, roles } = grant.clone();
            let request = AllowAccessRequest { principal: principal.to_owned(), rules, roles };
            async move { node.access().allow_access(request).await }
        });
        required(response.await?.access)
    }

    /// Takes operations from the rules of a principal. Returns its rules.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the principal or a rule is invalid.
    pub async fn remove_access(
        &self,
        principal: &str,
        grant: &AccessGrant,
    ) -> Result<PrincipalAccess> {
        let call = CallSpec::new("remove access", Repeat::Always);
        let response = self.client.call_any(call, |node| {
            let AccessGrant { rules, roles } = grant.clone();
            let request = RemoveAccessRequest { principal: principal.to_owned(), rules, roles };
            async move { node.access().remove_access(request).await }
        });
        required(response.await?.access)
    }

    /// Returns the rules of a principal, or of all that have some for `None`.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn access(&self, principal: Option<&str>) -> Result<Vec<PrincipalAccess>> {
        let principal = principal.unwrap_or_default();
        all_pages(|page_token| async move {
            let call = CallSpec::new("list access", Repeat::Read);
            let response = self.client.call_any(call, |node| {
                let request = ListAccessRequest {
                    principal: principal.to_owned(),
                    page_size: PAGE_PRINCIPALS,
                    page_token: page_token.clone(),
                };
                async move { node.access().list_access(request).await }
            });
            let page = response.await?;
            Ok((page.principals, page.next_page_token))
        })
        .await
    }

    /// Returns whether the rules of a principal allow an operation, and which one does.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the operation or the kind is not set.
    pub async fn test_access(
        &self,
        principal: &str,
        operation: AccessOperation,
        resource_kind: ResourceKind,
        name: &str,
    ) -> Result<TestAccessResponse> {
        let call = CallSpec::new("test access", Repeat::Read);
        let response = self.client.call_any(call, |node| {
            let request = TestAccessRequest {
                principal: principal.to_owned(),
                operation: operation.into(),
                resource_kind: resource_kind.into(),
                name: name.to_owned(),
            };
            async move { node.access().test_access(request).await }
        });
        response.await
    }
}
