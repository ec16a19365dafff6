//! What a batch may demand of its partition, judged at the batch's place in the log.
//! Two writers that meet there cannot both be right, whatever each believed before.

use std::fmt::{self, Display};
use std::sync::Arc;

use super::{Partition, Refusal};

/// Longest fencing token.
pub const FENCING_TOKEN_BYTES_MAX: usize = 64;

/// Names who may append to a partition. The empty one is none: it names nobody.
/// Invariant: at most [`FENCING_TOKEN_BYTES_MAX`] bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FencingToken(Arc<str>);

impl FencingToken {
    /// `None` where the text is too long.
    pub fn new(text: &str) -> Option<Self> {
        (text.len() <= FENCING_TOKEN_BYTES_MAX).then(|| Self(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// # Errors
    /// Another token is in force than the one that must be.
    pub(super) fn demand(&self, expected: Option<&Self>) -> Result<(), Refusal> {
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

/// What must hold for a batch to count. The default demands nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Condition {
    /// Offset that the first record gets.
    pub expected_offset: Option<u64>,
    /// Token in force; the empty one demands that there is none.
    pub fencing_token: Option<FencingToken>,
}

impl Condition {
    pub fn is_empty(&self) -> bool {
        self.expected_offset.is_none() && self.fencing_token.is_none()
    }

    /// The token comes first: who is fenced has nothing more to find out from offsets.
    ///
    /// # Errors
    /// What does not hold, with what does.
    pub(super) fn check(&self, partition: &Partition) -> Result<(), Refusal> {
        partition.fencing_token.demand(self.fencing_token.as_ref())?;
        match self.expected_offset {
            Some(expected) if expected != partition.next_offset => {
                Err(mismatch(expected, partition))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// A refusal that is certain before the batch has a place in the log: offsets only grow, so
    /// one that is given away already cannot be had any more.
    pub(super) fn is_lost(&self, partition: &Partition) -> Option<Refusal> {
        let expected = self.expected_offset.filter(|offset| *offset < partition.next_offset)?;
        Some(mismatch(expected, partition))
    }
}

fn mismatch(expected: u64, partition: &Partition) -> Refusal {
    Refusal::OffsetMismatch { expected, watermarks: partition.watermarks() }
}
