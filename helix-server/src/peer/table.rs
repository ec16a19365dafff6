//! The table of peers. openraft's network holds it and not the [`Hub`](super::Hub), which holds
//! the shards: there is no reference cycle.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard};

use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::connection::lane::PeerLane;
use super::connection::peer::Peer;
use super::copy_rate::CopyRate;
use super::dialer::Dialer;
use super::limits::{COPY_BURST, FETCHES_MAX};
use super::local::LocalNode;
use super::throttle::Throttle;
use crate::limits::COPY_RATE_MAX;
use crate::sync;

/// The peers of this node, and the state that their connections share.
pub(super) struct PeerTable {
    pub(super) local: Arc<LocalNode>,
    peers: RwLock<BTreeMap<u64, Arc<Peer>>>,
    pub(super) dialer: Arc<dyn Dialer>,
    /// Limits copies over all peers and shards: the catch-up lane, and records of splits.
    pub(super) throttle: Throttle,
    /// Chooses the rate of `throttle`.
    pub(super) copy_rate: Mutex<CopyRate>,
    pub(super) closed: CancellationToken,
    /// Permits for shards that fetch records.
    pub(super) fetch_permits: Semaphore,
}

impl PeerTable {
    pub(super) fn new(local: LocalNode, dialer: Arc<dyn Dialer>) -> Self {
        Self {
            local: Arc::new(local),
            peers: RwLock::default(),
            dialer,
            throttle: Throttle::new(COPY_RATE_MAX, COPY_BURST),
            copy_rate: Mutex::new(CopyRate::new(COPY_RATE_MAX)),
            closed: CancellationToken::new(),
            fetch_permits: Semaphore::new(FETCHES_MAX),
        }
    }

    pub(super) fn peer(&self, node: u64) -> Option<Arc<Peer>> {
        self.all().get(&node).cloned()
    }

    pub(super) fn all(&self) -> RwLockReadGuard<'_, BTreeMap<u64, Arc<Peer>>> {
        sync::read(&self.peers)
    }

    /// Replaces the peers and returns the ids of those that were removed.
    /// Dials new peers, and peers with a new address again; this node itself is skipped.
    pub(super) fn set_peers(&self, addresses: &BTreeMap<u64, String>) -> Vec<u64> {
        let mut removed = Vec::new();
        let mut peers = sync::write(&self.peers);
        peers.retain(|id, peer| {
            let stays = addresses.get(id) == Some(&peer.address);
            if !stays {
                peer.closed.cancel();
                removed.extend((!addresses.contains_key(id)).then_some(*id));
            }
            stays
        });
        for (&id, address) in addresses {
            if id == self.local.node_id || peers.contains_key(&id) {
                continue;
            }
            let closed = self.closed.child_token();
            let peer = Arc::new(Peer::new(id, address.clone(), self.dialer.clone(), closed));
            for lane in PeerLane::ALL {
                tokio::spawn(Arc::clone(&peer).keep_open(lane, Arc::clone(&self.local)));
            }
            peers.insert(id, peer);
        }
        removed
    }
}
