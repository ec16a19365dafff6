//! Background work: preparing, sealing and freeing segments, and scrubbing.

pub(crate) mod keeper;
pub(crate) mod scrub;
