//! Tokens of the clients of a node that checks its callers.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use helix_client::{AccessGrant, Admin, Client, Config, TokenSource};
use helix_proto::log::v1::{AccessRole, PrincipalQuota, RoleGrant};
use tokio::time::{Instant, sleep};

use super::TOPIC;

/// Longest wait for the first token.
const FIRST_TOKEN_MAX: Duration = Duration::from_secs(60);

const ABUSIVE: &str = "abusive";
const PROBE: &str = "probe";

/// Tokens of two principals; none if callers are not checked.
#[derive(Debug, Default)]
pub(super) struct ClientTokens {
    pub(super) probe: TokenSource,
    /// Of all abusive clients together.
    pub(super) abusive: TokenSource,
    /// The value of the header `authorization` with that token.
    pub(super) abusive_header: Option<String>,
    /// Of one well-behaved neighbour each.
    pub(super) neighbours: Vec<TokenSource>,
}

/// Principals of a node that checks its callers, beside the probe client.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CheckedCallers {
    /// Quota of the abusive clients, in MiB of requests per second.
    pub(crate) quota_mib: Option<u64>,
    /// Number of neighbours.
    pub(crate) neighbours: usize,
}

impl ClientTokens {
    /// Makes the tokens with the node's first one.
    pub(super) async fn make(
        address: SocketAddr,
        first: &Path,
        callers: CheckedCallers,
    ) -> anyhow::Result<Self> {
        let admin = administrator(address, first).await?;
        let mut tokens = Self { probe: make_token(&admin, PROBE).await?.0, ..Self::default() };
        let (abusive, text) = make_token(&admin, ABUSIVE).await?;
        (tokens.abusive, tokens.abusive_header) = (abusive, Some(format!("Bearer {text}")));
        for number in 1..=callers.neighbours {
            tokens.neighbours.push(make_token(&admin, &format!("neighbour-{number}")).await?.0);
        }
        let Some(quota_mib) = callers.quota_mib else { return Ok(tokens) };
        let quota = PrincipalQuota {
            principal: ABUSIVE.to_owned(),
            bytes_in_per_second: quota_mib << 20,
            ..PrincipalQuota::default()
        };
        admin.set_quota(&quota).await.context("set the quota")?;
        Ok(tokens)
    }
}

/// Waits for the token that a new node writes.
async fn administrator(address: SocketAddr, first: &Path) -> anyhow::Result<Admin> {
    let deadline = Instant::now() + FIRST_TOKEN_MAX;
    loop {
        if let Ok(token) = TokenSource::file(first) {
            let config = Config { token, ..Config::new([address.to_string()]) };
            let admin = Client::new(config)?.admin();
            if admin.who_am_i().await.is_ok() {
                return Ok(admin);
            }
        }
        ensure!(Instant::now() < deadline, "the node made no token within {FIRST_TOKEN_MAX:?}");
        sleep(Duration::from_millis(50)).await;
    }
}

/// Makes a token of a principal that may append to the topic and read it.
async fn make_token(admin: &Admin, principal: &str) -> anyhow::Result<(TokenSource, String)> {
    let role = |role: AccessRole| RoleGrant {
        role: role.into(),
        name: TOPIC.to_owned(),
        ..RoleGrant::default()
    };
    let roles = vec![role(AccessRole::Producer), role(AccessRole::Consumer)];
    let grant = AccessGrant { roles, ..AccessGrant::default() };
    let made = admin.create_token(principal, None, &grant).await;
    let made = made.with_context(|| format!("make a token for {principal}"))?;
    Ok((TokenSource::fixed(&made.token)?, made.token))
}
