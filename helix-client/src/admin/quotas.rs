//! Administration of quotas.

use helix_proto::log::v1::{ListQuotasRequest, PrincipalQuota, QuotaUsage, SetQuotaRequest};

use super::{Admin, all_pages};
use crate::call_spec::{CallSpec, Repeat};
use crate::error::Result;

/// Quotas per page when all are listed.
const PAGE_QUOTAS: i32 = 1000;

/// Every method fails with `PERMISSION_DENIED` for a caller that is not an administrator of the
/// cluster.
impl Admin {
    /// Sets the quota of a principal, or of `*` for all without one. Limits of 0 remove it.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if a field is invalid or the cluster has too many quotas.
    pub async fn set_quota(&self, quota: &PrincipalQuota) -> Result<()> {
        let call = CallSpec::new("set quota", Repeat::Always);
        let response = self.client.call_any(call, |node| {
            let request = SetQuotaRequest { quota: Some(quota.clone()) };
            async move { node.access().set_quota(request).await }
        });
        response.await.map(|_| ())
    }

    /// Returns the quota of a principal, or all for `None`, with their use on the node that
    /// responds.
    ///
    /// # Errors
    /// The last failure if no node responds within the request timeout.
    pub async fn quotas(&self, principal: Option<&str>) -> Result<Vec<QuotaUsage>> {
        let principal = principal.unwrap_or_default();
        all_pages(|page_token| async move {
            let call = CallSpec::new("list quotas", Repeat::Read);
            let response = self.client.call_any(call, |node| {
                let request = ListQuotasRequest {
                    principal: principal.to_owned(),
                    page_size: PAGE_QUOTAS,
                    page_token: page_token.clone(),
                };
                async move { node.access().list_quotas(request).await }
            });
            let page = response.await?;
            Ok((page.quotas, page.next_page_token))
        })
        .await
    }
}
