//! The first token of a cluster: without it no caller could make one.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Node;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::log::{
    AccessCommand, AccessOperation, AccessRule, BearerToken, CreateToken, ResourceKind, TokenRecord,
};
use crate::protocol;

/// Principal of the first token.
pub const FIRST_PRINCIPAL: &str = "admin";

/// Delay before a failed step is retried.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// Place for the first token, which only the operator may read.
pub trait TokenFile: Send + Sync + 'static {
    /// Stores the token durably, in place of an earlier one.
    ///
    /// # Errors
    /// The file cannot be written.
    fn store(&self, token: &str) -> io::Result<()>;

    /// Returns the token that was stored; `None` if there is none.
    fn load(&self) -> Option<String>;

    /// Removes the token that was stored.
    fn remove(&self);

    /// Returns the place, for the log.
    fn describe(&self) -> String;
}

/// Makes the first token, as shard 0's leader, unless the cluster ever had one.
///
/// The file is written before the token exists, so that no crash leaves a cluster with a token that
/// was stored nowhere. Returns once the cluster has a token, or the node is gone.
pub async fn make_first_token(node: Weak<Node>, file: Box<dyn TokenFile>) {
    let Some((mut versions, mut leadership, draining)) = node.upgrade().map(|node| {
        let cluster = &node.cluster;
        (cluster.machine().watch(), cluster.watch_leadership(), node.draining.clone())
    }) else {
        return;
    };
    let mut stored = None;
    loop {
        let Some(node) = node.upgrade() else { return };
        // Marked first, so that a change during the step triggers another one.
        versions.mark_unchanged();
        let is_settled = match node.store_first_token(&*file, &mut stored).await {
            Ok(is_settled) => is_settled,
            Err(error @ Error::StorageFailed { .. }) => {
                tracing::warn!(%error, "cannot make the first token yet");
                false
            }
            // Most attempts fail because there is no leader yet.
            Err(error) => {
                tracing::debug!(%error, "cannot make the first token yet");
                false
            }
        };
        drop(node);
        if is_settled {
            return;
        }
        tokio::select! {
            biased;
            () = draining.cancelled() => return,
            changed = versions.changed() => if changed.is_err() { return },
            changed = leadership.changed() => if !changed { return },
            () = tokio::time::sleep(RETRY_DELAY) => {}
        }
    }
}

/// The token that this node proposes, with its record. Every attempt proposes the same record,
/// since an attempt without a response may still take effect.
struct FirstToken {
    token: BearerToken,
    record: TokenRecord,
}

impl Node {
    /// Returns whether the cluster has a token. `stored` is the token in the file.
    async fn store_first_token(
        self: &Arc<Self>,
        file: &dyn TokenFile,
        stored: &mut Option<FirstToken>,
    ) -> Result<bool> {
        let cluster = &self.cluster;
        if cluster.machine().access().has_had_tokens() {
            self.settle_first_token(file, stored.is_some()).await?;
            return Ok(true);
        }
        if !cluster.is_leader() || cluster.protocol() < protocol::ACCESS {
            return Ok(false);
        }
        // A new leader may not have applied the entries of the one before it.
        cluster.catch_up().await?;
        if cluster.machine().access().has_had_tokens() {
            self.settle_first_token(file, stored.is_some()).await?;
            return Ok(true);
        }
        let record = match stored {
            Some(first) => first.record.clone(),
            None => {
                let first = self.new_first_token();
                let written = file.store(&first.token.reveal());
                written.map_err(|error| Error::StorageFailed {
                    what: format!("cannot write the first token to {}: {error}", file.describe()),
                    may_have_applied: false,
                })?;
                stored.insert(first).record.clone()
            }
        };
        let admin = AccessRule::new(ResourceKind::Cluster, "", false, &[AccessOperation::Admin]);
        let create = CreateToken { token: Some(record), rules: vec![admin], is_first: true };
        match cluster.change_access(AccessCommand::CreateToken(create)).await {
            // Refused: another node was first.
            Ok(()) | Err(Error::InvalidArgument { .. }) => cluster.catch_up().await?,
            Err(error) => return Err(error),
        }
        if !cluster.machine().access().has_had_tokens() {
            return Ok(false);
        }
        self.settle_first_token(file, true).await?;
        Ok(true)
    }

    fn new_first_token(&self) -> FirstToken {
        let token = BearerToken::from_random(|| self.random_u64());
        let now_us = self.clock.now_us();
        let record = TokenRecord::new(&token, FIRST_PRINCIPAL, || self.random_u64(), now_us, 0);
        FirstToken { token, record }
    }

    /// Removes the file if the cluster has a token, but not the one in the file: another node was
    /// first, perhaps after this one had crashed.
    async fn settle_first_token(&self, file: &dyn TokenFile, is_stored: bool) -> Result<()> {
        let Some(found) = file.load().and_then(|text| BearerToken::parse(&text)) else {
            return Ok(());
        };
        let is_known = || self.cluster.machine().access().token(found.id()).is_some();
        if !is_known() {
            // This node's copy may be older than a token that the operator put there.
            self.cluster.catch_up().await?;
        }
        if !is_known() {
            file.remove();
        } else if is_stored {
            tracing::warn!(
                file = file.describe(),
                principal = FIRST_PRINCIPAL,
                "wrote the first administrator's token; make tokens of your own with it, then \
                 revoke it and remove the file"
            );
        }
        Ok(())
    }
}
