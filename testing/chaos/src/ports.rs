//! Ports for nodes and proxies, below those that systems give to outgoing connections: a client
//! that dials a node which is down cannot take its port meanwhile.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Context;

const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// How many were handed out, so that none is handed out twice before it is listened on.
static TAKEN: AtomicU32 = AtomicU32::new(0);

/// A listener on a loopback port that nobody had.
pub(crate) fn listen() -> anyhow::Result<TcpListener> {
    // Different runs begin at different places, so that they do not meet.
    let first = std::process::id().wrapping_mul(101);
    (0..COUNT)
        .map(|_| first.wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed)) % u32::from(COUNT))
        .filter_map(|place| u16::try_from(place).ok())
        .find_map(|place| TcpListener::bind((Ipv4Addr::LOCALHOST, FIRST + place)).ok())
        .context("no free port on 127.0.0.1")
}

/// The address of a loopback port that nobody has now.
pub(crate) fn free() -> anyhow::Result<SocketAddr> {
    Ok(listen()?.local_addr()?)
}
