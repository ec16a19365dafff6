//! The largest rate of copies.

/// Advice for a rate below the least one.
pub(super) const TOO_LOW: &str =
    "choose at least 1MiB; `helix cluster pause-moves` stops moves, and recovery always copies";
