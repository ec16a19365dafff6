//! Conditions of appends, which apply checks at the batch's position in the log.
//! Of two writers that expect the same offset, at most one succeeds.

use std::fmt::{self, Display};
use std::sync::Arc;

use super::{Partition, Refusal};

/// Longest fencing token, in bytes.
pub const FENCING_TOKEN_BYTES_MAX: usize = 64;

/// Names the writer that may append to a partition. The empty token stands for none.
/// Invariant: at most [`FENCING_TOKEN_BYTES_MAX`] bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FencingToken(Arc<str>);

impl FencingToken {
    /// Returns `None` where the text is too long.
    pub fn new(text: &str) -> Option<Self> {
        (text.len() <= FENCING_TOKEN_BYTES_MAX).then(|| Self(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks the token in force against the expected one.
    pub(super) fn check(&self, expected: Option<&Self>) -> Result<(), Refusal> {
        match expected {
            Some(expected) if expected != self => Err(Refusal::Fenced { in_force: self.clone() }),
            Some(_) | None => Ok(()),
        }
    }
}

impl Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

/// Conditions that must hold for a batch to be appended. The default has none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Condition {
    /// Offset that the first record must get.
    pub expected_offset: Option<u64>,
    /// Token that must be in force; the empty one requires that there is none.
    pub fencing_token: Option<FencingToken>,
}

impl Condition {
    pub fn is_empty(&self) -> bool {
        self.expected_offset.is_none() && self.fencing_token.is_none()
    }

    /// Checks the token, then the offset: a fenced writer has no use for offsets.
    pub(super) fn check(&self, partition: &Partition) -> Result<(), Refusal> {
        partition.fencing_token.check(self.fencing_token.as_ref())?;
        match self.expected_offset {
            Some(expected) if expected != partition.next_offset => {
                Err(mismatch(expected, partition))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Returns a refusal that is certain before the batch is in the log: offsets only grow, so an
    /// expected offset below the next one can never hold again.
    pub(super) fn certain_refusal(&self, partition: &Partition) -> Option<Refusal> {
        let expected = self.expected_offset.filter(|offset| *offset < partition.next_offset)?;
        Some(mismatch(expected, partition))
    }
}

fn mismatch(expected: u64, partition: &Partition) -> Refusal {
    Refusal::OffsetMismatch { expected, watermarks: partition.watermarks() }
}
