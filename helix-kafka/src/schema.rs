//! Checks the bytes of a request against its schema, before the generated decoders read them.
//!
//! The decoders of the crate `kafka-protocol` reserve memory for as many elements as the bytes
//! state. A request of a few bytes could state two billion. So every count and every length is
//! compared with the bytes that are left here, and the whole request is walked once. It allocates
//! nothing.

mod requests;

pub use requests::{ADMIN, CONSUME, GROUPS, SECURITY};

/// Most elements of all lists in one request. A list of every partition of a large cluster has
/// fewer.
pub const ELEMENTS_MAX: usize = 200_000;

/// Most tagged fields of one structure. Kafka defines fewer than ten.
const TAGGED_FIELDS_MAX: u32 = 64;

/// Type of a field.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// A number, a boolean or an id: this many bytes.
    Fixed(usize),
    /// A string, which may be null.
    Text,
    /// Bytes, which may be null.
    Bytes,
    /// A list, which may be null.
    List(&'static Kind),
    /// A structure.
    Struct(&'static [Field]),
}

/// A field, and the versions of the request that have it.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    since: i16,
    until: i16,
    kind: Kind,
}

impl Field {
    /// A field of every version.
    pub const fn always(kind: Kind) -> Self {
        Self { since: 0, until: i16::MAX, kind }
    }

    /// A field from this version on.
    pub const fn since(since: i16, kind: Kind) -> Self {
        Self { since, until: i16::MAX, kind }
    }

    /// A field of these versions, both included.
    pub const fn between(since: i16, until: i16, kind: Kind) -> Self {
        Self { since, until, kind }
    }
}

/// Defect of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SchemaError {
    /// A field ends beyond the request.
    #[error("a field needs {needed} bytes at byte {at}, but {left} are left")]
    Truncated {
        /// Bytes of the field.
        needed: u64,
        /// Position.
        at: usize,
        /// Bytes left.
        left: usize,
    },
    /// A length is negative, and does not stand for null.
    #[error("a length at byte {at} is {length}; it must be -1 or more")]
    NegativeLength {
        /// Position.
        at: usize,
        /// Length.
        length: i32,
    },
    /// A variable-length integer has more than five bytes.
    #[error("a number at byte {at} has more than 32 bits")]
    LongNumber {
        /// Position.
        at: usize,
    },
    /// A list states more elements than bytes are left.
    #[error("a list at byte {at} has {count} elements, but {left} bytes are left")]
    LongList {
        /// Position.
        at: usize,
        /// Elements.
        count: u64,
        /// Bytes left.
        left: usize,
    },
    /// All lists together have too many elements.
    #[error("the request has more than {ELEMENTS_MAX} list elements")]
    ManyElements,
    /// A structure has too many tagged fields.
    #[error("a structure has {0} tagged fields; the limit is {TAGGED_FIELDS_MAX}")]
    ManyTaggedFields(u32),
}

/// Checks the body of a request. Returns the number of its list elements.
///
/// Bytes after the last field are ignored, as in Kafka: librdkafka sends three of them in requests
/// for the metadata of all topics.
///
/// # Errors
/// The first defect.
pub fn check_body(
    body: &[u8],
    fields: &[Field],
    version: i16,
    is_flexible: bool,
) -> Result<usize, SchemaError> {
    let mut walk = SchemaWalk { bytes: body, at: 0, version, is_flexible, elements: 0 };
    walk.fields(fields)?;
    Ok(walk.elements)
}

/// Skips the tagged fields at the start of `bytes`. Returns their length.
///
/// # Errors
/// The first defect.
pub fn tagged_fields_len(bytes: &[u8]) -> Result<usize, SchemaError> {
    let mut walk = SchemaWalk { bytes, at: 0, version: 0, is_flexible: true, elements: 0 };
    walk.tagged_fields()?;
    Ok(walk.at)
}

struct SchemaWalk<'a> {
    bytes: &'a [u8],
    at: usize,
    version: i16,
    is_flexible: bool,
    elements: usize,
}

impl SchemaWalk<'_> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn skip(&mut self, needed: u64) -> Result<(), SchemaError> {
        let left = self.left();
        match usize::try_from(needed) {
            Ok(count) if count <= left => {
                self.at += count;
                Ok(())
            }
            _ => Err(SchemaError::Truncated { needed, at: self.at, left }),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], SchemaError> {
        let at = self.at;
        self.skip(N as u64)?;
        let mut array = [0; N];
        array.copy_from_slice(&self.bytes[at..self.at]);
        Ok(array)
    }

    fn varint(&mut self) -> Result<u32, SchemaError> {
        let at = self.at;
        let mut value = 0u64;
        for shift in [0, 7, 14, 21, 28] {
            let [byte] = self.array()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return u32::try_from(value).map_err(|_| SchemaError::LongNumber { at });
            }
        }
        Err(SchemaError::LongNumber { at })
    }

    /// Reads a length: `None` for null.
    fn length(&mut self, is_short: bool) -> Result<Option<u64>, SchemaError> {
        if self.is_flexible {
            return Ok(self.varint()?.checked_sub(1).map(u64::from));
        }
        let at = self.at;
        let length = match is_short {
            true => i32::from(i16::from_be_bytes(self.array()?)),
            false => i32::from_be_bytes(self.array()?),
        };
        match length {
            -1 => Ok(None),
            _ => match u64::try_from(length) {
                Ok(length) => Ok(Some(length)),
                Err(_) => Err(SchemaError::NegativeLength { at, length }),
            },
        }
    }

    fn fields(&mut self, fields: &[Field]) -> Result<(), SchemaError> {
        for field in fields {
            if (field.since..=field.until).contains(&self.version) {
                self.value(&field.kind)?;
            }
        }
        if self.is_flexible { self.tagged_fields() } else { Ok(()) }
    }

    fn value(&mut self, kind: &Kind) -> Result<(), SchemaError> {
        match *kind {
            Kind::Fixed(bytes) => self.skip(bytes as u64),
            Kind::Text => {
                let length = self.length(true)?;
                self.skip(length.unwrap_or(0))
            }
            Kind::Bytes => {
                let length = self.length(false)?;
                self.skip(length.unwrap_or(0))
            }
            Kind::Struct(fields) => self.fields(fields),
            Kind::List(element) => {
                let at = self.at;
                let count = self.length(false)?.unwrap_or(0);
                let left = self.left();
                // Every element has at least one byte.
                if count > left as u64 {
                    return Err(SchemaError::LongList { at, count, left });
                }
                for _ in 0..count {
                    self.elements += 1;
                    if self.elements > ELEMENTS_MAX {
                        return Err(SchemaError::ManyElements);
                    }
                    self.value(element)?;
                }
                Ok(())
            }
        }
    }

    fn tagged_fields(&mut self) -> Result<(), SchemaError> {
        let count = self.varint()?;
        if count > TAGGED_FIELDS_MAX {
            return Err(SchemaError::ManyTaggedFields(count));
        }
        for _ in 0..count {
            self.varint()?;
            let size = self.varint()?;
            self.skip(u64::from(size))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
