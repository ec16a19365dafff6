//! Shares of the node's calls: one for each principal, and one for each address of clients without
//! credentials.
//!
//! A single principal may have all calls but a reserve. Within the reserve it may have as many as
//! are free after them, as a connection may. Its connections with few calls may have half of the
//! reserve, so that a few connections with many calls never stop the others of a principal or an
//! address. `docs/limits.md` shows what that leaves for others.

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, Weak};

use super::{ClientConnection, ClientLoad};
use crate::access::{CallShare, CallSlot, Caller};
use crate::error::{Error, Result};
use crate::limits;
use crate::sync;

/// Address of a client, for the log and for its share of the calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientAddress {
    Tcp(SocketAddr),
    /// A client on this machine; its socket has no address.
    Unix,
    /// The console, on behalf of a browser at this address.
    Console(SocketAddr),
}

impl ClientAddress {
    /// Returns the part of the address that has a share of the calls; `None` for this machine.
    ///
    /// One client of IPv6 usually has all addresses of a prefix of 64 bits.
    fn network(self) -> Option<IpAddr> {
        let (Self::Tcp(addr) | Self::Console(addr)) = self else { return None };
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
            Self::Console(addr) => write!(f, "console:{addr}"),
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
    /// `of_connection` are the calls that were open on the connection.
    ///
    /// # Errors
    /// [`Error::Throttled`] if the share is used up.
    pub fn share_call(&self, share: &Arc<CallShare>, of_connection: usize) -> Result<CallSlot> {
        let (slot, open) = share.open();
        let free = self.calls.available_permits();
        let has_few = of_connection < limits::CALLS_PER_CONNECTION_MIN;
        let part = if has_few { 2 } else { 1 } * limits::CALLS_RESERVE_PART;
        let reserve = self.shares.calls / part;
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
        share.map(|share| self.load().share_call(share, self.call_count())).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::super::CallMemory;
    use super::super::LoadPermit;
    use super::*;
    use crate::memory::{MEMORY_LIMIT_MIN, MemoryShares};

    fn with_calls(calls: usize) -> Arc<ClientLoad> {
        ClientLoad::new(MemoryShares { calls, ..MemoryShares::of(MEMORY_LIMIT_MIN) })
    }

    /// Opens calls, each as the first of its connection, until one is refused.
    fn open_all(load: &ClientLoad, share: &Arc<CallShare>) -> Vec<(LoadPermit, CallSlot)> {
        let open = || {
            let permit = load.acquire_call(0).ok()?;
            Some((permit, load.share_call(share, usize::MAX).ok()?))
        };
        std::iter::from_fn(open).collect()
    }

    /// Opens a call without credentials.
    fn open(connection: &Arc<ClientConnection>) -> Result<Arc<CallMemory>> {
        let permit = connection.acquire_call()?;
        let slot = connection.share_call(None)?;
        Ok(CallMemory::of_caller(connection.load(), connection, Some(permit), slot, None))
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
            drop((load.share_call(&other, usize::MAX).unwrap(), permit));
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

    fn connect(load: &Arc<ClientLoad>, address: &str) -> Arc<ClientConnection> {
        let connection = load.connect().unwrap();
        connection.set_peer(address.parse::<SocketAddr>().unwrap().into());
        connection
    }

    fn open_most(connection: &Arc<ClientConnection>) -> Vec<Arc<CallMemory>> {
        std::iter::from_fn(|| open(connection).ok()).collect()
    }

    #[test]
    fn calls_without_credentials_count_for_their_address() {
        let load = with_calls(1_024);
        let open_connections = |address: &str| -> Vec<_> {
            (0..100).map(|_| open_most(&connect(&load, address))).collect()
        };
        let count = |calls: &[Vec<_>]| calls.iter().map(Vec::len).sum::<usize>();
        let first = open_connections("192.0.2.1:1");
        // Connections with few calls go on where the others stop.
        assert_eq!(count(&first), 1_024 - 64);
        let refusal = open(&connect(&load, "192.0.2.1:2")).unwrap_err();
        assert!(refusal.to_string().contains("calls from this client address"), "{refusal}");
        let second = open_connections("192.0.2.2:1");
        assert_eq!(count(&second), 32);
        open(&connect(&load, "192.0.2.3:1")).unwrap();
    }

    #[test]
    fn connections_with_many_calls_leave_some_to_others_of_their_address() {
        let load = with_calls(1_024);
        let silent: Vec<_> = (0..5).map(|_| open_most(&connect(&load, "192.0.2.1:1"))).collect();
        assert!(silent[0].len() > 500 && silent[4].len() >= 16);
        let other = connect(&load, "192.0.2.1:2");
        for _ in 0..1_000 {
            let calls: Vec<_> =
                (0..limits::CALLS_PER_CONNECTION_MIN).map(|_| open(&other).unwrap()).collect();
            drop(calls);
        }
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
