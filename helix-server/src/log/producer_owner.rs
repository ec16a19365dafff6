//! Owners of producer identities, and checksums of batches, as rows and heads keep them.

use std::fmt::{self, Debug};
use std::num::NonZeroU32;

use sha2::{Digest, Sha256};

/// Owner of a producer identity: a hash of the principal that called InitProducer.
///
/// Equal on every node and in every version, since logs and checkpoints have it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ProducerOwner([u8; Self::BYTES]);

impl ProducerOwner {
    pub const BYTES: usize = 16;

    /// All callers without credentials. Identities from before protocol version
    /// [`PRODUCER_OWNERS`](crate::protocol::PRODUCER_OWNERS) have this owner too.
    pub const ANONYMOUS: Self = Self([0; Self::BYTES]);

    /// The service itself, for append streams without an identity. No caller has it.
    pub const SESSION: Self = Self([0xff; Self::BYTES]);

    /// Returns the owner that stands for a principal.
    pub fn of(principal: &str) -> Self {
        let hash = Sha256::new().chain_update("helix producer owner\0").chain_update(principal);
        let hash: [u8; 32] = hash.finalize().into();
        Self(*hash.first_chunk().expect("a SHA-256 hash has 32 bytes"))
    }

    pub fn is_anonymous(self) -> bool {
        self == Self::ANONYMOUS
    }

    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes for an optional field: none for the anonymous owner.
    pub fn to_field(self) -> Vec<u8> {
        if self.is_anonymous() { Vec::new() } else { self.0.to_vec() }
    }

    /// Returns the owner of an optional field; `None` if its length is wrong.
    pub fn from_field(field: &[u8]) -> Option<Self> {
        match field {
            [] => Some(Self::ANONYMOUS),
            // One form only, so that equal states have equal bytes.
            field => field.try_into().ok().map(Self).filter(|owner| !owner.is_anonymous()),
        }
    }
}

impl Debug for ProducerOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "owner {a:02x}{b:02x}{c:02x}{d:02x}")
    }
}

/// Checksum of an appended batch: its producer's own CRC-32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchChecksum(NonZeroU32);

impl BatchChecksum {
    /// Returns the checksum of a batch with this CRC. The CRC 0 counts as the greatest one, so that
    /// 0 is free to stand for no checksum.
    pub fn of_crc(crc: u32) -> Self {
        Self(NonZeroU32::new(crc).unwrap_or(NonZeroU32::MAX))
    }

    pub fn get(self) -> u32 {
        self.0.get()
    }

    /// Returns the checksum of a field; `None` for 0.
    pub fn from_field(field: u32) -> Option<Self> {
        NonZeroU32::new(field).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_of_a_principal_is_stable() {
        // Logs and checkpoints of released versions have these bytes.
        let expected = [
            0x7c, 0x95, 0x98, 0x01, 0x64, 0x3d, 0xfc, 0x08, 0xbb, 0x6f, 0x82, 0xc3, 0x11, 0x76,
            0xca, 0xa5,
        ];
        assert_eq!(ProducerOwner::of("alice").as_bytes(), &expected);
        assert_ne!(ProducerOwner::of("bob"), ProducerOwner::of("alice"));
    }

    #[test]
    fn fields_have_one_form() {
        let alice = ProducerOwner::of("alice");
        for owner in [alice, ProducerOwner::ANONYMOUS, ProducerOwner::SESSION] {
            assert_eq!(ProducerOwner::from_field(&owner.to_field()), Some(owner));
        }
        for wrong in [&[0; 16][..], &[1; 15], &[1; 17]] {
            assert_eq!(ProducerOwner::from_field(wrong), None);
        }
        assert_eq!(BatchChecksum::from_field(0), None);
        assert_eq!(BatchChecksum::of_crc(0), BatchChecksum::of_crc(u32::MAX));
        let seven = BatchChecksum::of_crc(7);
        assert_eq!(BatchChecksum::from_field(seven.get()), Some(seven));
    }
}
