//! Protocol version of the cluster. Shard 0's leader raises it once every member supports the next
//! one.

use std::time::Duration;

use super::client::Cluster;
use crate::error::Result;
use crate::log::ClusterCommand;

impl Cluster {
    /// Returns the cluster's protocol version, which every member supports.
    pub fn protocol(&self) -> u32 {
        self.machine().protocol()
    }

    /// Waits until the cluster uses this protocol version, at most `wait_max`. Returns whether it
    /// does. A new cluster raises its version soon after it has formed.
    pub async fn wait_protocol(&self, version: u32, wait_max: Duration) -> bool {
        let mut changes = self.machine().watch();
        let reached =
            async { while self.protocol() < version && changes.changed().await.is_ok() {} };
        // Ignored: the version decides.
        let _ = tokio::time::timeout(wait_max, reached).await;
        self.protocol() >= version
    }

    /// Returns an error text if this program does not support the cluster's protocol version.
    pub fn protocol_mismatch(&self) -> Option<String> {
        let versions = self.hub.versions();
        let (is_new, protocol) =
            self.machine().read(|state| (state.shards().is_empty(), state.protocol()));
        // A cluster that is being formed starts with a version that its nodes support.
        (!is_new && !versions.contains(protocol)).then(|| {
            format!(
                "the cluster uses protocol version {protocol}, but this Helix, {}, speaks \
                 {versions}; \
                 start a release that speaks {protocol}",
                env!("CARGO_PKG_VERSION")
            )
        })
    }

    /// Starts a new cluster with the oldest version that this program supports. Runs on shard 0's
    /// leader.
    pub(super) async fn set_initial_protocol(&self) -> Result<()> {
        let version = self.hub.versions().oldest;
        let is_new = self.machine().read(|state| state.shards().is_empty());
        if is_new && version > self.protocol() {
            self.command(ClusterCommand::RaiseProtocol { version }).await?;
        }
        Ok(())
    }

    /// Raises the protocol to the newest version that all members support.
    /// Runs on shard 0's leader. Returns whether there is nothing more to do until a connection
    /// changes. The version is not raised while a member is disconnected, since it may return with
    /// any program version.
    pub async fn raise_protocol(&self) -> bool {
        if !self.replica().is_ready() {
            return false;
        }
        let peers = self.hub.peers();
        let supported = |node_id: u64| {
            let peer = peers.iter().find(|peer| peer.node_id == node_id)?;
            peer.protocol.filter(|_| peer.connected)
        };
        let members = self.members_now();
        let others = members.iter().map(|it| it.node_id).filter(|id| *id != self.node_id());
        let own = Some(self.hub.versions().newest);
        // `None` if a member is disconnected.
        let common = others.map(supported).fold(own, |least, newest| Some(least?.min(newest?)));
        let Some(version) = common.filter(|version| *version > self.protocol()) else {
            return true;
        };
        match self.command(ClusterCommand::RaiseProtocol { version }).await {
            Ok(_) => {
                tracing::info!(version, "raised the protocol version: every member supports it")
            }
            Err(error) => tracing::debug!(%error, "cannot raise the protocol version yet"),
        }
        self.protocol() >= version
    }

    /// Commits an entry in shard 0 that changes nothing: it raises the version to what it is.
    ///
    /// # Errors
    /// Those of [`Self::command`].
    pub async fn probe(&self) -> Result<()> {
        let version = self.protocol();
        self.command(ClusterCommand::RaiseProtocol { version }).await.map(drop)
    }
}
