//! Protocol version of the cluster. Shard 0's leader raises it once every member supports the next
//! one.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use helix_wal::Wal;
use tokio::time::timeout;

use super::client::Cluster;
use super::peer_messages::{PeerRequest, PeerResponse};
use crate::error::Result;
use crate::limits;
use crate::log::ClusterCommand;
use crate::protocol::RECORDED_VERSIONS;

impl Cluster {
    /// Returns the cluster's protocol version, which every member supports.
    pub fn protocol(&self) -> u32 {
        self.machine().protocol()
    }

    /// Returns the newest protocol version that this node speaks.
    pub fn newest_protocol(&self) -> u32 {
        self.hub.versions().newest
    }

    /// Waits until the cluster uses this protocol version, at most `wait_max`. Returns whether it
    /// does. A new cluster raises its version soon after it has formed.
    pub async fn wait_protocol(&self, version: u32, wait_max: Duration) -> bool {
        let mut changes = self.machine().watch();
        let reached =
            async { while self.protocol() < version && changes.changed().await.is_ok() {} };
        // Ignored: the version decides.
        let _ = timeout(wait_max, reached).await;
        self.protocol() >= version
    }

    /// Returns an error text if this program does not support the cluster's protocol version.
    pub fn protocol_mismatch(&self) -> Option<String> {
        let versions = self.hub.versions();
        let (is_new, protocol) =
            self.machine().read(|state| (state.shards().is_empty(), state.protocol()));
        // A cluster that is being formed starts with a version that its nodes support.
        (!is_new && !versions.contains(protocol))
            .then(|| versions.refusal("the cluster uses", protocol))
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
        let (members, common) = self.common_protocol();
        let Some(version) = common.filter(|version| *version > self.protocol()) else {
            return true;
        };
        if version >= RECORDED_VERSIONS {
            let is_recorded = self.record_everywhere(version, members.keys()).await;
            // Nodes may have come or restarted during the calls.
            if !is_recorded || self.common_protocol() != (members, Some(version)) {
                return false;
            }
        }
        match self.command(ClusterCommand::RaiseProtocol { version }).await {
            Ok(_) => {
                tracing::info!(version, "raised the protocol version: every member supports it")
            }
            Err(error) => tracing::debug!(%error, "cannot raise the protocol version yet"),
        }
        self.protocol() >= version
    }

    /// Returns the other members with their generations, and the newest version that all members
    /// speak. No version if a member is disconnected.
    fn common_protocol(&self) -> (BTreeMap<u64, u32>, Option<u32>) {
        let peers = self.hub.peers();
        let supported = |node_id: &u64| {
            let peer = peers.iter().find(|peer| peer.node_id == *node_id)?;
            peer.protocol.filter(|_| peer.connected)
        };
        let members = self.members_now();
        let members = members.iter().map(|it| (it.node_id, it.generation));
        let others: BTreeMap<u64, u32> = members.filter(|it| it.0 != self.node_id()).collect();
        let own = Some(self.newest_protocol());
        let supported = others.keys().map(supported);
        let common = supported.fold(own, |least, newest| Some(least?.min(newest?)));
        (others, common)
    }

    /// Lets every member record a protocol version. Returns whether all have.
    async fn record_everywhere(&self, version: u32, others: impl Iterator<Item = &u64>) -> bool {
        let request = PeerRequest::RecordProtocol(version).encode();
        let asked = others.map(|&node| {
            let request = request.clone();
            async move {
                let response = self.hub.call(node, request, limits::PROGRESS_WAIT_MAX).await;
                match PeerResponse::decode(response.map_err(|error| error.to_string())?)? {
                    PeerResponse::Version(recorded) if recorded == u64::from(version) => Ok(()),
                    PeerResponse::Unknown(why) => Err(why),
                    _ => Err("it sent an unexpected kind of response".to_owned()),
                }
                .map_err(|why| format!("node {node}: {why}"))
            }
        });
        let mut recorded = join_all(asked).await;
        recorded.push(self.record_protocol(version).await);
        let why = recorded.into_iter().find_map(Result::err);
        if let Some(why) = &why {
            tracing::debug!(version, %why, "cannot raise the protocol version yet");
        }
        why.is_none()
    }

    /// Returns this node's open logs that have not recorded a protocol version. The log of shard 0
    /// is the first, and does not need to be open.
    fn unrecorded_logs(&self, version: u32) -> Vec<Wal> {
        let shards = self.open_shards();
        let of_shards = shards.iter().map(|shard| shard.replica().wal()).filter(|it| it.is_open());
        let logs = [self.replica().wal().clone()].into_iter().chain(of_shards.cloned());
        logs.filter(|wal| wal.entries_version() < version).collect()
    }

    /// Records a protocol version in this node's logs. From then on, only programs that speak it
    /// start on this data. The log of shard 0 is the first that a start opens; the others have the
    /// version in case that this log is quarantined.
    async fn record_protocol(&self, version: u32) -> std::result::Result<(), String> {
        let logs = self.unrecorded_logs(version);
        if logs.is_empty() {
            return Ok(());
        }
        // Kept until the writes have ended, also if the caller does not wait so long.
        let Ok(only) = self.recording.clone().try_lock_owned() else {
            return Err("another recording is in progress".to_owned());
        };
        let record = move || {
            let _only = only;
            logs.iter().try_for_each(|wal| wal.raise_entries_version(version))
        };
        let replica = self.replica();
        let recorded = timeout(limits::PROGRESS_WAIT_MAX, replica.reads().wait(record)).await;
        let recorded = recorded.map_err(|_| "its disk did not respond in time".to_owned())?;
        recorded.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
    }

    pub(super) async fn local_record_protocol(&self, version: u32) -> PeerResponse {
        let versions = self.hub.versions();
        if !versions.contains(version) {
            // Perhaps it was restarted with another release since the sender last saw it.
            return PeerResponse::Unknown(format!("this node speaks {versions}"));
        }
        match self.record_protocol(version).await {
            Ok(()) => PeerResponse::Version(version.into()),
            Err(why) => PeerResponse::Unknown(why),
        }
    }

    /// Records the protocol version in use, which a node that joined later has not been asked to
    /// record. Returns whether it is recorded.
    pub async fn record_own_protocol(&self) -> bool {
        let version = self.protocol();
        if version < RECORDED_VERSIONS {
            return true;
        }
        let recorded = self.record_protocol(version).await;
        if let Err(why) = &recorded {
            tracing::debug!(version, %why, "cannot record the protocol version yet");
        }
        recorded.is_ok()
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
