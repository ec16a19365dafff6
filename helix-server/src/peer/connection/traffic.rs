//! Byte counters of the streams between this node and one peer.

use crate::metrics::Counter;

/// Encoded bytes of requests over all streams of a peer, without framing.
#[derive(Debug, Default)]
pub(in crate::peer) struct Traffic {
    pub(in crate::peer) sent: Counter,
    pub(in crate::peer) received: Counter,
}
