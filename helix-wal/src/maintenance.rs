//! Background work: preparing, sealing and freeing segments, scrubbing and repair in place.

pub(crate) mod keeper;
pub(crate) mod scrub;
pub(crate) mod segment_damage;
pub(crate) mod segment_repair;
