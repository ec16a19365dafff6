//! The addresses at which this node dials the other members.

use super::client::Cluster;
use super::member_addresses::{MemberAddresses, address};
use crate::sync;

impl Cluster {
    /// Returns the address at which this node dials another one; for itself, its announced address.
    pub(super) fn address_of(&self, node_id: u64) -> Option<String> {
        self.machine().read(|state| address(state, &self.seeds, node_id))
    }

    /// Dials the members at the newest known addresses: this node's own, or those reported to it.
    pub fn dial_members(&self) {
        let own = self.machine().read(MemberAddresses::of);
        let reported = sync::lock(&self.reported_addresses).clone();
        let newest = if reported.is_newer(&own) { reported } else { own };
        let mut addresses = newest.addresses(&self.seeds);
        addresses.remove(&self.node_id());
        if addresses != self.hub.addresses() {
            self.hub.set_peers(&addresses);
        }
    }

    /// Accepts the addresses that another node reports, and uses them while this node's own state
    /// is older.
    pub fn merge_addresses(&self, addresses: &MemberAddresses) {
        let mut reported = sync::lock(&self.reported_addresses);
        if !addresses.is_newer(&reported) {
            return;
        }
        reported.clone_from(addresses);
        drop(reported);
        self.dial_members();
    }
}
