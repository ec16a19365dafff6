//! Changes of tokens and rules: commands to shard 0 that this node has applied when they return.

use super::client::{Cluster, unexpected};
use crate::error::{Error, Result};
use crate::limits::ACCESS_WAIT_MAX;
use crate::log::{AccessCommand, AccessState, ClusterCommand, ClusterReply};
use crate::protocol;

impl Cluster {
    /// Changes tokens or rules, and waits until this node has applied the change.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a field is invalid, if a limit is reached, or while a member
    /// of the cluster runs a version without access control.
    pub async fn change_access(&self, command: AccessCommand) -> Result<()> {
        // An entry that the log cannot hold would stop shard 0, so this cannot wait for apply.
        if let Err(ClusterReply::Invalid { field, what }) = AccessState::check(&command) {
            return Err(Error::InvalidArgument { field, what });
        }
        if !self.wait_protocol(protocol::ACCESS, ACCESS_WAIT_MAX).await {
            return Err(Error::InvalidArgument {
                field: "request",
                what: format!(
                    "access control needs protocol version {}, but the cluster uses {} until all \
                     nodes are upgraded",
                    protocol::ACCESS,
                    self.protocol()
                ),
            });
        }
        match self.command(ClusterCommand::Access(command)).await? {
            ClusterReply::Done => self.catch_up().await,
            ClusterReply::Invalid { field, what } => Err(Error::InvalidArgument { field, what }),
            other => Err(unexpected(&other)),
        }
    }
}
