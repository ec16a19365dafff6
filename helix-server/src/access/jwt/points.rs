//! Checks that the bytes of a public key are a point of its curve. Pure.
//!
//! The verification of a signature fails in the same way for a wrong signature and for a key that
//! is no point, so a set of keys is checked when it is read. Public keys are no secret: the
//! arithmetic may take any time.

use std::cmp::Ordering;

/// A number below 2^256: 64-bit digits, the least significant first.
type Number = [u64; 4];

/// 2^256 - 2^224 + 2^192 + 2^96 - 1, the field of P-256 (SEC 2, section 2.4.2).
const P256_FIELD: Number = [0xffff_ffff_ffff_ffff, 0x0000_0000_ffff_ffff, 0, 0xffff_ffff_0000_0001];

/// The coefficient b of P-256; a is -3.
const P256_B: Number =
    [0x3bce_3c3e_27d2_604b, 0x651d_06b0_cc53_b0f6, 0xb3eb_bd55_7698_86bc, 0x5ac6_35d8_aa3a_93e7];

/// 2^255 - 19, the field of Ed25519 (RFC 8032, section 5.1).
const ED25519_FIELD: Number = [0xffff_ffff_ffff_ffed, u64::MAX, u64::MAX, 0x7fff_ffff_ffff_ffff];

/// The coefficient d of Ed25519.
const ED25519_D: Number =
    [0x75eb_4dca_1359_78a3, 0x0070_0a4d_4141_d8ab, 0x8cc7_4079_7779_e898, 0x5203_6cee_2b6f_fe73];

/// Returns true if the coordinates, big-endian, are those of a point of P-256.
pub(super) fn is_on_p256(x: &[u8; 32], y: &[u8; 32]) -> bool {
    let field = Field(P256_FIELD);
    let (x, y) = (from_big_endian(x), from_big_endian(y));
    if !field.has(&x) || !field.has(&y) {
        return false;
    }
    // y^2 = x^3 - 3x + b
    let cube = field.mul(&field.mul(&x, &x), &x);
    let triple = field.add(&field.add(&x, &x), &x);
    let right = field.add(&field.sub(&cube, &triple), &P256_B);
    field.mul(&y, &y) == right
}

/// Returns true if the bytes are a point of Ed25519 (RFC 8032, section 5.1.3) that only one
/// signer can have: with a point of small order every signature can be forged.
pub(super) fn is_ed25519_key(encoded: &[u8; 32]) -> bool {
    let field = Field(ED25519_FIELD);
    let mut big_endian = *encoded;
    big_endian.reverse();
    // The highest bit is the sign of x.
    big_endian[0] &= 0x7f;
    let y = from_big_endian(&big_endian);
    if !field.has(&y) || has_small_order(&field, &y) {
        return false;
    }
    // x^2 = (y^2 - 1) / (d y^2 + 1), which has a root if the product of both is a square: then its
    // power by (p - 1) / 2 is 1 (Euler).
    let square = field.mul(&y, &y);
    let numerator = field.sub(&square, &ONE);
    let denominator = field.add(&field.mul(&ED25519_D, &square), &ONE);
    let half = halved(&field.sub(&[0; 4], &ONE));
    field.pow(&field.mul(&numerator, &denominator), &half) == ONE
}

const ONE: Number = [1, 0, 0, 0];

/// Returns true for the y of the points whose order divides 8. Those of order 1 and 2 have x = 0,
/// so y^2 = 1; those of order 4 have y = 0. Twice a point of order 8 has y = 0, so that
/// x^2 = -y^2 and 2 y^2 = 1 - d y^4.
fn has_small_order(field: &Field, y: &Number) -> bool {
    let square = field.mul(y, y);
    let twice = field.add(&square, &square);
    let right = field.sub(&ONE, &field.mul(&ED25519_D, &field.mul(&square, &square)));
    *y == [0; 4] || square == ONE || twice == right
}

/// Arithmetic modulo a prime.
struct Field(Number);

impl Field {
    /// Returns true if the number is reduced.
    fn has(&self, number: &Number) -> bool {
        compare(number, &self.0) == Ordering::Less
    }

    /// Adds two reduced numbers.
    fn add(&self, a: &Number, b: &Number) -> Number {
        let (sum, overflows) = plus(a, b);
        if overflows || !self.has(&sum) { minus(&sum, &self.0).0 } else { sum }
    }

    /// Subtracts two reduced numbers.
    fn sub(&self, a: &Number, b: &Number) -> Number {
        let (difference, borrows) = minus(a, b);
        if borrows { plus(&difference, &self.0).0 } else { difference }
    }

    /// Multiplies two reduced numbers, by doubling and adding.
    fn mul(&self, a: &Number, b: &Number) -> Number {
        bits(b).fold([0; 4], |product, bit| {
            let twice = self.add(&product, &product);
            if bit { self.add(&twice, a) } else { twice }
        })
    }

    fn pow(&self, base: &Number, exponent: &Number) -> Number {
        bits(exponent).fold(ONE, |power, bit| {
            let square = self.mul(&power, &power);
            if bit { self.mul(&square, base) } else { square }
        })
    }
}

/// Returns the bits of a number, the most significant first.
fn bits(number: &Number) -> impl Iterator<Item = bool> + '_ {
    number.iter().rev().flat_map(|digit| (0..64).rev().map(move |bit| digit >> bit & 1 == 1))
}

fn compare(a: &Number, b: &Number) -> Ordering {
    a.iter().rev().cmp(b.iter().rev())
}

fn plus(a: &Number, b: &Number) -> (Number, bool) {
    let mut carry = false;
    let mut sum = [0; 4];
    for (digit, (a, b)) in sum.iter_mut().zip(a.iter().zip(b)) {
        let (part, first) = a.overflowing_add(*b);
        let (part, second) = part.overflowing_add(carry.into());
        (*digit, carry) = (part, first || second);
    }
    (sum, carry)
}

fn minus(a: &Number, b: &Number) -> (Number, bool) {
    let mut borrow = false;
    let mut difference = [0; 4];
    for (digit, (a, b)) in difference.iter_mut().zip(a.iter().zip(b)) {
        let (part, first) = a.overflowing_sub(*b);
        let (part, second) = part.overflowing_sub(borrow.into());
        (*digit, borrow) = (part, first || second);
    }
    (difference, borrow)
}

fn halved(number: &Number) -> Number {
    let [a, b, c, d] = *number;
    [a >> 1 | b << 63, b >> 1 | c << 63, c >> 1 | d << 63, d >> 1]
}

fn from_big_endian(bytes: &[u8; 32]) -> Number {
    let mut number = [0; 4];
    for (digit, chunk) in number.iter_mut().zip(bytes.rchunks(8)) {
        *digit = chunk.iter().fold(0, |digit, byte| digit << 8 | u64::from(*byte));
    }
    number
}

#[cfg(test)]
mod tests {
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair};

    use super::*;

    fn bytes(hex: &str) -> [u8; 32] {
        let digits = (0..64).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap());
        digits.collect::<Vec<u8>>().try_into().unwrap()
    }

    #[test]
    fn keys_that_ring_makes_are_points_and_their_neighbours_are_not() {
        let random = SystemRandom::new();
        for _ in 0..8 {
            let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
            let pkcs8 = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
            let pair = EcdsaKeyPair::from_pkcs8(algorithm, pkcs8.as_ref(), &random).unwrap();
            let point = pair.public_key().as_ref();
            let x: [u8; 32] = point[1..33].try_into().unwrap();
            let mut y: [u8; 32] = point[33..].try_into().unwrap();
            assert!(is_on_p256(&x, &y));
            y[31] ^= 1;
            assert!(!is_on_p256(&x, &y));
            let pkcs8 = Ed25519KeyPair::generate_pkcs8(&random).unwrap();
            let pair = Ed25519KeyPair::from_pkcs8(pkcs8.as_ref()).unwrap();
            assert!(is_ed25519_key(pair.public_key().as_ref().try_into().unwrap()));
        }
        assert!(!is_on_p256(&[0; 32], &[0; 32]));
        assert!(!is_on_p256(&[0xff; 32], &[0xff; 32]));
    }

    #[test]
    fn about_half_of_all_encodings_are_points_of_ed25519() {
        let is_key = |second: u8| {
            let mut encoded = [7; 32];
            encoded[1] = second;
            is_ed25519_key(&encoded)
        };
        let points = (0..=255).filter(|second| is_key(*second)).count();
        assert!((90..166).contains(&points), "{points}");
    }

    #[test]
    fn points_of_small_order_are_no_keys() {
        for (encoded, order) in [
            ("0100000000000000000000000000000000000000000000000000000000000000", 1),
            ("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f", 2),
            ("0000000000000000000000000000000000000000000000000000000000000000", 4),
            ("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05", 8),
            ("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a", 8),
        ] {
            let mut encoded = bytes(encoded);
            assert!(!is_ed25519_key(&encoded), "order {order}");
            encoded[31] |= 0x80;
            assert!(!is_ed25519_key(&encoded), "order {order}, other sign");
        }
        // Not below the field: 2^255 - 19 is 0 again.
        let not_reduced = "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f";
        assert!(!is_ed25519_key(&bytes(not_reduced)));
    }
}
