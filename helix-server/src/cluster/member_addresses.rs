//! Peer addresses of the members, as recorded in one node's copy of the cluster's state. A node
//! that has lost its copy gets them from other nodes, because the addresses may have changed since
//! it was configured. It takes part in nothing before it has found the other nodes.

use std::collections::BTreeMap;

use super::state::ClusterState;
use crate::records::MemberAddress;
pub use crate::records::MemberAddresses;

impl MemberAddress {
    fn of(state: &ClusterState, node_id: u64) -> Self {
        let known = |address: &String| !address.is_empty();
        let commanded = state.members().get(node_id).map(|member| member.peer_addr.clone());
        let announced = state.node(node_id).map(|node| node.peer_addr.clone());
        Self { node_id, commanded: commanded.filter(known), announced: announced.filter(known) }
    }

    fn address(self, seeds: &BTreeMap<u64, String>) -> Option<String> {
        self.commanded.or_else(|| seeds.get(&self.node_id).cloned()).or(self.announced)
    }
}

impl MemberAddresses {
    pub(super) fn of(state: &ClusterState) -> Self {
        let members = state.members().iter();
        let members = members.map(|member| MemberAddress::of(state, member.node_id)).collect();
        Self { version: state.version(), members }
    }

    pub(super) fn is_newer(&self, other: &Self) -> bool {
        self.version > other.version
    }

    /// Returns the addresses at which a node with these `seeds` dials the members, itself included.
    pub(super) fn addresses(self, seeds: &BTreeMap<u64, String>) -> BTreeMap<u64, String> {
        if self.members.is_empty() {
            return seeds.clone();
        }
        let members = self.members.into_iter();
        members.filter_map(|it| Some((it.node_id, it.address(seeds)?))).collect()
    }
}

/// Returns the address at which a node with these `seeds` dials another node. An address set by a
/// command has precedence over the seed, and the seed over the announced address.
pub(super) fn address(
    state: &ClusterState,
    seeds: &BTreeMap<u64, String>,
    node_id: u64,
) -> Option<String> {
    MemberAddress::of(state, node_id).address(seeds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(version: u64, members: &[(u64, Option<&str>, Option<&str>)]) -> MemberAddresses {
        let member = |&(node_id, commanded, announced): &(u64, Option<&str>, Option<&str>)| {
            let (commanded, announced) =
                (commanded.map(str::to_owned), announced.map(str::to_owned));
            MemberAddress { node_id, commanded, announced }
        };
        MemberAddresses { version, members: members.iter().map(member).collect() }
    }

    #[test]
    fn commanded_address_precedes_seed_and_seed_precedes_announced() {
        let seeds = BTreeMap::from([(1, "s1".to_owned()), (2, "s2".to_owned())]);
        assert_eq!(addresses(3, &[]).addresses(&seeds), seeds, "the members were never changed");
        let rows = [
            (1, Some("c1"), Some("a1")),
            (2, None, Some("a2")),
            (3, None, Some("a3")),
            (4, None, None),
        ];
        let expected = [(1, "c1"), (2, "s2"), (3, "a3")].map(|(id, it)| (id, it.to_owned()));
        assert_eq!(addresses(3, &rows).addresses(&seeds), expected.into());
        assert!(
            addresses(4, &[]).is_newer(&addresses(3, &rows))
                && !addresses(3, &[]).is_newer(&addresses(3, &rows))
        );
    }
}
