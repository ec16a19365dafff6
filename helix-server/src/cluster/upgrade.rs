//! The protocol of the cluster: raised by shard 0's leader once every member speaks the next one.

use super::door::Cluster;
use super::state::ClusterState;
use crate::error::Result;
use crate::log::ClusterCommand;

impl Cluster {
    /// What may go into logs: every member speaks this version.
    pub fn protocol(&self) -> u32 {
        self.machine().read(ClusterState::protocol)
    }

    /// Why this program cannot be a part of the cluster, if it does not speak its protocol.
    pub fn unspoken(&self) -> Option<String> {
        let versions = self.hub.versions();
        let (is_new, protocol) =
            self.machine().read(|state| (state.shards().is_empty(), state.protocol()));
        // A cluster that is only being formed begins with what its nodes speak.
        (!is_new && !versions.contains(protocol)).then(|| {
            format!(
                "its cluster uses protocol version {protocol}, and this Helix, {}, speaks \
                 {versions}: start one that speaks {protocol}",
                env!("CARGO_PKG_VERSION")
            )
        })
    }

    /// For the leader of a cluster that is being formed: the oldest version that this program
    /// speaks is what it begins with.
    pub(super) async fn begin_protocol(&self) -> Result<()> {
        let version = self.hub.versions().oldest;
        let is_new = self.machine().read(|state| state.shards().is_empty());
        if is_new && version > self.protocol() {
            self.command(ClusterCommand::RaiseProtocol { version }).await?;
        }
        Ok(())
    }

    /// For shard 0's leader: raises the protocol to the newest version that all members speak.
    /// Whether there is nothing to do before a connection changes. A member that is away may come
    /// back with any program, so nothing is raised without it.
    pub async fn raise_protocol(&self) -> bool {
        if !self.replica().is_ready() {
            return false;
        }
        let peers = self.hub.peers();
        let spoken = |node_id: u64| {
            let peer = peers.iter().find(|peer| peer.node_id == node_id)?;
            peer.protocol.filter(|_| peer.connected)
        };
        let members = self.members_now();
        let others = members.iter().map(|it| it.node_id).filter(|id| *id != self.node_id());
        let own = Some(self.hub.versions().newest);
        // None where a member is away.
        let common = others.map(spoken).fold(own, |least, spoken| Some(least?.min(spoken?)));
        let Some(version) = common.filter(|version| *version > self.protocol()) else {
            return true;
        };
        match self.command(ClusterCommand::RaiseProtocol { version }).await {
            Ok(_) => tracing::info!(version, "every node speaks this protocol version: it is used"),
            Err(error) => tracing::debug!(%error, "the protocol is not raised yet"),
        }
        self.protocol() >= version
    }
}
