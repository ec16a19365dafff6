//! Ports for nodes and proxies, below the ephemeral range.
//!
//! Otherwise a client could take the port of a node that is down as its local port.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Context;

const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// Number of ports handed out, so that no port is handed out twice.
static TAKEN: AtomicU32 = AtomicU32::new(0);

/// Listens on a free loopback port.
pub(crate) fn listen() -> anyhow::Result<TcpListener> {
    // Concurrent runs start at different ports to avoid collisions.
    let first = std::process::id().wrapping_mul(101);
    (0..COUNT)
        .map(|_| first.wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed)) % u32::from(COUNT))
        .filter_map(|port_offset| u16::try_from(port_offset).ok())
        .find_map(|port_offset| TcpListener::bind((Ipv4Addr::LOCALHOST, FIRST + port_offset)).ok())
        .context("no free port on 127.0.0.1")
}

/// Returns the address of a loopback port that is free now.
pub(crate) fn free() -> anyhow::Result<SocketAddr> {
    Ok(listen()?.local_addr()?)
}
