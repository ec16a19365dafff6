//! Shares of the node's calls: one for each principal, and one for each address of clients without
//! credentials.
//!
//! A single principal may have all calls but a reserve. Within the reserve it may have as many as
//! are free after them, as a connection may. `docs/limits.md` shows what that leaves for others.

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, Weak};

use super::{ClientConnection, ClientLoad};
use crate::error::{Error, Result};
use crate::limits;
use crate::node::{CallShare, CallSlot, Caller};
use crate::sync;

/// Address of a client, for the log and for its share of the calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAddress {
    Tcp(SocketAddr),
    /// A client on this machine; its socket has no address.
    Unix,
}

impl ClientAddress {
    /// Returns the part of the address that has a share of the calls; `None` for this machine.
    ///
    /// One client of IPv6 usually has all addresses of a prefix of 64 bits.
    fn network(self) -> Option<IpAddr> {
        let Self::Tcp(addr) = self else { return None };
        match addr.ip().to_canonical() {
            ip if ip.is_loopback() => None,
            IpAddr::V6(ip) => Some(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into()),
            ip => Some(ip),
        }
    }
}

impl From<SocketAddr> for ClientAddress {
    fn from(addr: SocketAddr) -> Self {
        Self::Tcp(addr)
    }
}

impl Display for ClientAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(addr) => addr.fmt(f),
            Self::Unix => f.write_str("unix"),
        }
    }
}

/// The shares of the addresses that have open connections, and of some that no longer have any.
#[derive(Debug, Default)]
pub(super) struct AddressShares(Mutex<HashMap<Option<IpAddr>, Weak<CallShare>>>);

impl AddressShares {
    /// Returns the share of an address, which a connection keeps.
    fn share(&self, address: ClientAddress) -> Arc<CallShare> {
        let network = address.network();
        let mut shares = sync::lock(&self.0);
        if let Some(share) = shares.get(&network).and_then(Weak::upgrade) {
            return share;
        }
        if shares.len() == shares.capacity() {
            shares.retain(|_, share| share.strong_count() > 0);
        }
        let share = CallShare::of_address();
        shares.insert(network, Arc::downgrade(&share));
        share
    }
}

impl ClientLoad {
    /// Returns the share of the calls that clients without credentials at this address have.
    pub(super) fn address_share(&self, address: ClientAddress) -> Arc<CallShare> {
        self.address_shares.share(address)
    }

    /// Counts a call, which already has its permit, in the share of its principal or address.
    ///
    /// The own permit comes first, so that calls that begin at the same time see each other.
    ///
    /// # Errors
    /// [`Error::Throttled`] if the share is used up.
    pub fn share_call(&self, share: &Arc<CallShare>) -> Result<CallSlot> {
        let (slot, open) = share.open();
        let free = self.calls.available_permits();
        let reserve = self.shares.calls / limits::CALLS_RESERVE_PART;
        if free < reserve && open > free && open > limits::CALLS_PER_PRINCIPAL_MIN {
            self.events.principal_calls_refused.add();
            return Err(Error::throttled(share.what()));
        }
        Ok(slot)
    }
}

impl ClientConnection {
    /// Counts a call of this caller, or of the client's address if there is none.
    ///
    /// # Errors
    /// As of [`ClientLoad::share_call`].
    pub fn share_call(&self, caller: Option<&Caller>) -> Result<Option<CallSlot>> {
        let of_caller = caller.map(|caller| caller.meter().call_share());
        let share = of_caller.or_else(|| self.address_share());
        share.map(|share| self.load().share_call(share)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{MEMORY_LIMIT_MIN, MemoryShares};
    use crate::transport::load::LoadPermit;

    fn with_calls(calls: usize) -> Arc<ClientLoad> {
        ClientLoad::new(MemoryShares { calls, ..MemoryShares::of(MEMORY_LIMIT_MIN) })
    }

    /// Opens calls, each as the first of its connection, until one is refused.
    fn open_all(load: &ClientLoad, share: &Arc<CallShare>) -> Vec<(LoadPermit, CallSlot)> {
        let open = || {
            let permit = load.acquire_call(0).ok()?;
            Some((permit, load.share_call(share).ok()?))
        };
        std::iter::from_fn(open).collect()
    }

    /// Opens a call without credentials.
    fn open(connection: &ClientConnection) -> Result<(LoadPermit, Option<CallSlot>)> {
        let permit = connection.load().acquire_call(0)?;
        Ok((permit, connection.share_call(None)?))
    }

    fn refused(load: &ClientLoad) -> u64 {
        load.events().principal_calls_refused.get()
    }

    #[test]
    fn principals_leave_the_reserve_and_then_half_of_what_they_find() {
        let load = with_calls(1_024);
        let mut held = Vec::new();
        let least = limits::CALLS_PER_PRINCIPAL_MIN;
        for (number, most) in [896, 64, 32, 16, least].into_iter().enumerate() {
            let opened = open_all(&load, &CallShare::of_principal());
            assert_eq!(opened.len(), most);
            assert_eq!(refused(&load), number.min(3) as u64 + 1, "the last ones found none free");
            held.push(opened);
        }
        let permit = load.acquire_call(0);
        assert!(matches!(permit, Err(Error::Throttled { what: "calls of this node", .. })));
        // All others gone, one principal has all but the reserve again.
        held.clear();
        assert_eq!(open_all(&load, &CallShare::of_principal()).len(), 896);
    }

    #[test]
    fn a_principal_within_the_reserve_has_at_most_as_many_calls_as_are_free_after_them() {
        for calls in 1_000..1_024 {
            let load = with_calls(calls);
            let reserve = calls / limits::CALLS_RESERVE_PART;
            let first = open_all(&load, &CallShare::of_principal());
            assert_eq!(first.len(), calls - reserve);
            let second = open_all(&load, &CallShare::of_principal());
            assert_eq!(second.len(), reserve / 2, "{calls} calls");
            assert!(second.len() <= load.calls.available_permits(), "{calls} calls");
        }
    }

    #[test]
    fn a_principal_with_few_calls_is_served_beside_one_with_all_it_may_have() {
        let load = with_calls(1_024);
        let _most = open_all(&load, &CallShare::of_principal());
        let other = CallShare::of_principal();
        for _ in 0..1_000 {
            let permit = load.acquire_call(0).unwrap();
            drop((load.share_call(&other).unwrap(), permit));
        }
    }

    #[test]
    fn connections_of_an_address_share_its_calls() {
        let load = with_calls(1_024);
        let connect = |address: &str| {
            let connection = load.connect().unwrap();
            let address = address.parse::<SocketAddr>();
            connection.set_peer(address.map_or(ClientAddress::Unix, ClientAddress::from));
            connection
        };
        let is_shared = |one: &str, other: &str| {
            let (one, other) = (connect(one), connect(other));
            Arc::ptr_eq(one.address_share().unwrap(), other.address_share().unwrap())
        };
        assert!(is_shared("192.0.2.1:1000", "192.0.2.1:2000"));
        assert!(is_shared("192.0.2.1:1000", "[::ffff:192.0.2.1]:1000"));
        assert!(is_shared("[2001:db8:1:2::1]:1000", "[2001:db8:1:2:3::9]:1000"));
        assert!(is_shared("127.0.0.1:1000", "127.0.0.2:1000"));
        assert!(is_shared("127.0.0.1:1000", "[::1]:1000"));
        assert!(is_shared("127.0.0.1:1000", "unix"));
        assert!(!is_shared("192.0.2.1:1000", "192.0.2.2:1000"));
        assert!(!is_shared("[2001:db8:1:2::1]:1000", "[2001:db8:1:3::1]:1000"));
        assert!(!is_shared("192.0.2.1:1000", "unix"));
    }

    #[test]
    fn calls_without_credentials_count_for_their_address() {
        let load = with_calls(64);
        let connect = |address: &str| {
            let connection = load.connect().unwrap();
            connection.set_peer(address.parse::<SocketAddr>().unwrap().into());
            connection
        };
        let [first, second, other] = ["192.0.2.1:1", "192.0.2.1:2", "192.0.2.2:1"].map(connect);
        let most: Vec<_> = std::iter::from_fn(|| open(&first).ok()).collect();
        assert_eq!(most.len(), 64 - 64 / limits::CALLS_RESERVE_PART);
        let refusal = open(&second).unwrap_err();
        assert!(refusal.to_string().contains("calls from this client address"), "{refusal}");
        open(&other).unwrap();
    }

    #[test]
    fn shares_of_closed_connections_are_dropped() {
        let shares = AddressShares::default();
        for number in 0..100_000_u32 {
            let ip = IpAddr::from(number.to_be_bytes());
            shares.share(SocketAddr::new(ip, 1).into());
        }
        assert!(sync::lock(&shares.0).len() < 100);
    }
}
