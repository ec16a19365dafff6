//! `helix quota`: limits of principals.

use anyhow::Context;
use helix_client::proto::log::v1::{PrincipalQuota, QuotaUsage};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{GlobalArgs, QuotaSubcommand};
use crate::connect::connect;
use crate::output::{Output, message};

/// A quota, and its use on the node that responds.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct QuotaRow {
    /// Principal, or * for every principal without a quota of its own
    principal: String,
    /// Bytes of requests per second; absent if there is no limit
    bytes_in_per_second: Option<u64>,
    /// Bytes of records read per second; absent if there is no limit
    bytes_out_per_second: Option<u64>,
    /// Calls per second; absent if there is no limit
    requests_per_second: Option<u64>,
    /// Connections that may be open at once; absent if there is no limit
    connections_max: Option<u32>,
    /// Open connections
    connections: u32,
    /// Calls refused and streams delayed since the node started
    throttled: u64,
}

pub(crate) async fn run(global: &GlobalArgs, command: &QuotaSubcommand) -> anyhow::Result<()> {
    let admin = connect(global).await?.admin();
    let output = Output { format: global.output };
    let list = async |principal: Option<&str>| {
        let quotas = admin.quotas(principal).await.context("list quotas")?;
        anyhow::Ok(quotas.into_iter().map(QuotaRow::from).collect::<Vec<_>>())
    };
    match command {
        QuotaSubcommand::Set(args) => {
            let quota = PrincipalQuota {
                principal: args.principal.clone(),
                bytes_in_per_second: args.bytes_in.unwrap_or(0),
                bytes_out_per_second: args.bytes_out.unwrap_or(0),
                requests_per_second: args.requests.unwrap_or(0),
                connections: args.connections.unwrap_or(0),
            };
            let set = admin.set_quota(&quota).await;
            set.with_context(|| format!("set the quota of {}", args.principal))?;
            output.show(&list(Some(&args.principal)).await?)
        }
        QuotaSubcommand::Remove { principal } => {
            let removed = PrincipalQuota { principal: principal.clone(), ..Default::default() };
            let set = admin.set_quota(&removed).await;
            set.with_context(|| format!("remove the quota of {principal}"))?;
            if !global.quiet {
                message!("{principal} has no quota of its own");
            }
            output.show(&list(Some(principal)).await?)
        }
        QuotaSubcommand::List { principal } => {
            let quotas = list(principal.as_deref()).await?;
            if quotas.is_empty() && !global.quiet {
                message!("no quotas");
            }
            output.show(&quotas)
        }
    }
}

impl From<QuotaUsage> for QuotaRow {
    fn from(usage: QuotaUsage) -> Self {
        let quota = usage.quota.unwrap_or_default();
        let limit = |value: u64| (value > 0).then_some(value);
        Self {
            principal: quota.principal,
            bytes_in_per_second: limit(quota.bytes_in_per_second),
            bytes_out_per_second: limit(quota.bytes_out_per_second),
            requests_per_second: limit(quota.requests_per_second),
            connections_max: (quota.connections > 0).then_some(quota.connections),
            connections: usage.connection_count,
            throttled: usage.throttled_count,
        }
    }
}
