//! Signs the batches of producers with the owner of their identity and with their checksum.

use crate::access::AuthMode;
use crate::call::CallMemory;
use crate::log::{BatchChecksum, ProducerOwner, ProducerStamp};
use crate::node::Node;
use crate::protocol;
use crate::shard::FlowShare;

/// Caller of an append, and owner of the identities that it uses.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchSigner {
    caller: ProducerOwner,
    owner: ProducerOwner,
    /// False while a member of the cluster may not know owners and checksums.
    is_active: bool,
}

impl BatchSigner {
    /// Returns the signer for the caller of a call. Costs no hash: the caller has it.
    pub(super) fn of(node: &Node, call: Option<&CallMemory>) -> Self {
        let is_active = node.cluster().protocol() >= protocol::PRODUCER_OWNERS;
        let access = match node.auth_mode() {
            AuthMode::Off => None,
            AuthMode::Optional | AuthMode::Required => call.and_then(CallMemory::access),
        };
        let caller = access.and_then(|access| access.caller());
        let caller = caller.map_or(ProducerOwner::ANONYMOUS, |caller| caller.owner());
        let owner = if is_active { caller } else { ProducerOwner::ANONYMOUS };
        Self { caller, owner, is_active }
    }

    /// Returns the owner of identities that the caller gets.
    pub(super) fn owner(self) -> ProducerOwner {
        self.owner
    }

    /// Returns the caller's share of the log.
    pub(super) fn share(self) -> FlowShare {
        FlowShare::new(*self.caller.as_bytes())
    }

    /// Returns the signer for the service's own identity of an append stream.
    pub(super) fn of_session(self) -> Self {
        let owner = if self.is_active { ProducerOwner::SESSION } else { self.owner };
        Self { owner, ..self }
    }

    /// Adds the owner and the checksum of a batch with this CRC.
    pub(super) fn sign(self, stamp: ProducerStamp, crc: u32) -> ProducerStamp {
        let checksum = self.is_active.then(|| BatchChecksum::of_crc(crc));
        ProducerStamp { owner: self.owner, checksum, ..stamp }
    }
}
