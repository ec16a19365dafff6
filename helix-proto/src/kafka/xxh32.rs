//! xxHash of 32 bits with seed 0: the checksum of LZ4 frames.
//!
//! See <https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md>.

const PRIME_1: u32 = 0x9E37_79B1;
const PRIME_2: u32 = 0x85EB_CA77;
const PRIME_3: u32 = 0xC2B2_AE3D;
const PRIME_4: u32 = 0x27D4_EB2F;
const PRIME_5: u32 = 0x1656_67B1;

const STRIPE_BYTES: usize = 16;

/// Returns the hash of `bytes`.
pub(super) fn xxh32(bytes: &[u8]) -> u32 {
    let (stripes, tail) = bytes.as_chunks::<STRIPE_BYTES>();
    let mut hash = if stripes.is_empty() { PRIME_5 } else { hash_stripes(stripes) };
    // The specification adds the length modulo 2^32.
    hash = hash.wrapping_add(bytes.len() as u32);
    let (words, tail) = tail.as_chunks::<4>();
    for word in words {
        hash = hash.wrapping_add(u32::from_le_bytes(*word).wrapping_mul(PRIME_3));
        hash = hash.rotate_left(17).wrapping_mul(PRIME_4);
    }
    for byte in tail {
        hash = hash.wrapping_add(u32::from(*byte).wrapping_mul(PRIME_5));
        hash = hash.rotate_left(11).wrapping_mul(PRIME_1);
    }
    hash = (hash ^ (hash >> 15)).wrapping_mul(PRIME_2);
    hash = (hash ^ (hash >> 13)).wrapping_mul(PRIME_3);
    hash ^ (hash >> 16)
}

fn hash_stripes(stripes: &[[u8; STRIPE_BYTES]]) -> u32 {
    let first = PRIME_1.wrapping_add(PRIME_2);
    let mut lanes = [first, PRIME_2, 0, 0_u32.wrapping_sub(PRIME_1)];
    for stripe in stripes {
        let (words, _) = stripe.as_chunks::<4>();
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane = lane.wrapping_add(u32::from_le_bytes(*word).wrapping_mul(PRIME_2));
            *lane = lane.rotate_left(13).wrapping_mul(PRIME_1);
        }
    }
    let [a, b, c, d] = lanes;
    let sum = a.rotate_left(1).wrapping_add(b.rotate_left(7));
    sum.wrapping_add(c.rotate_left(12)).wrapping_add(d.rotate_left(18))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_match_another_implementation() {
        // python3: xxhash.xxh32(bytes).intdigest()
        assert_eq!(xxh32(b""), 0x02CC_5D05);
        assert_eq!(xxh32(b"a"), 0x550D_7456);
        assert_eq!(xxh32(b"abc"), 0x32D1_53FF);
    }
}
