//! Quotas of principals: changes, and their use on this node.

use helix_proto::log::v1::{
    ListQuotasRequest, ListQuotasResponse, PrincipalQuota, QuotaUsage, SetQuotaRequest,
    SetQuotaResponse,
};

use super::access::AccessHandler;
use super::access_rules::check_principal;
use super::page::{cut_page, page_size};
use super::reserve_response;
use crate::call::CallMemory;
use crate::error::{Error, Result};
use crate::limits::{QUOTA_LISTED_BYTES, QUOTAS_PER_PAGE_DEFAULT, QUOTAS_PER_PAGE_MAX};
use crate::log::{AccessCommand, QuotaLimits};
use crate::node::Node;

impl AccessHandler {
    pub(super) async fn set_quota(&self, request: SetQuotaRequest) -> Result<SetQuotaResponse> {
        let quota = request.quota.ok_or_else(|| Error::InvalidArgument {
            field: "quota",
            what: "must be set".to_owned(),
        })?;
        let PrincipalQuota { principal, bytes_in_per_second, bytes_out_per_second, .. } = quota;
        let limits = QuotaLimits {
            principal,
            bytes_in_per_second,
            bytes_out_per_second,
            requests_per_second: quota.requests_per_second,
            connections: quota.connections,
        };
        // A quota without limits removes one.
        if !limits.is_unlimited() {
            check_principal("quota.principal", &limits.principal)?;
        }
        self.node().cluster().change_access(AccessCommand::SetQuota(limits)).await?;
        Ok(SetQuotaResponse {})
    }

    pub(super) async fn list_quotas(
        &self,
        request: &ListQuotasRequest,
        call: Option<&CallMemory>,
    ) -> Result<ListQuotasResponse> {
        let page_size = page_size(request.page_size, QUOTAS_PER_PAGE_DEFAULT, QUOTAS_PER_PAGE_MAX)?;
        self.node().cluster().catch_up().await?;
        reserve_response(call, page_size * QUOTA_LISTED_BYTES).await?;
        let access = self.node().cluster().machine().access();
        let is_listed = |limits: &&std::sync::Arc<QuotaLimits>| {
            let is_of = request.principal.is_empty() || limits.principal == request.principal;
            limits.principal > request.page_token && is_of
        };
        let mut found: Vec<_> = access.quotas().filter(is_listed).take(page_size + 1).collect();
        let next_page_token = cut_page(&mut found, page_size, |limits| limits.principal.clone());
        let quotas = found.into_iter().map(|limits| usage(self.node(), limits)).collect();
        Ok(ListQuotasResponse { quotas, next_page_token })
    }
}

fn usage(node: &Node, limits: &QuotaLimits) -> QuotaUsage {
    let meter = node.quota_meter(&limits.principal);
    QuotaUsage {
        quota: Some(PrincipalQuota {
            principal: limits.principal.clone(),
            bytes_in_per_second: limits.bytes_in_per_second,
            bytes_out_per_second: limits.bytes_out_per_second,
            requests_per_second: limits.requests_per_second,
            connections: limits.connections,
        }),
        connection_count: meter.as_ref().map_or(0, |meter| meter.connection_count()),
        throttled_count: meter.as_ref().map_or(0, |meter| meter.throttled_count()),
    }
}
