//! Appends long payloads to a group's buffer with non-temporal stores, which bypass the CPU caches.
//!
//! This is the only unsafe code of the log.
//!
//! Only the device reads a group, and the buffer is overwritten as soon as it has done so. Ordinary
//! stores must first load each line of the buffer into the cache of this CPU. Behind a virtual disk
//! the line is probably in the cache of the host CPU that read it last, and copying 100 KiB can
//! take 25 to 55 µs instead of 5 to 10 (`docs/decisions/0031-non-temporal-stores.md`).
#![allow(unsafe_code)]

/// Shorter payloads are copied with ordinary stores.
///
/// With entries of 1 KiB the log alone is slower than with an ordinary copy while that is fast. A
/// node, measured from 2 KiB on, gains nothing from shorter ones.
#[cfg(target_arch = "x86_64")]
const LEN_MIN: usize = 4 << 10;

/// Appends like `out.extend_from_slice(bytes)`.
pub(crate) fn append(out: &mut Vec<u8>, bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= LEN_MIN {
        out.reserve(bytes.len());
        let (room, _) = out.spare_capacity_mut().split_at_mut(bytes.len());
        store(room, bytes);
        // SAFETY: as many bytes of its capacity as are added were written by `store`.
        unsafe { out.set_len(out.len() + bytes.len()) };
        return;
    }
    out.extend_from_slice(bytes);
}

/// Writes all of `to`, which is as long as `from`.
#[cfg(target_arch = "x86_64")]
fn store(to: &mut [std::mem::MaybeUninit<u8>], from: &[u8]) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    const WORD: usize = 16;

    assert_eq!(to.len(), from.len());
    let before = to.as_ptr().align_offset(LINE).min(to.len());
    let (to_before, to) = to.split_at_mut(before);
    let (from_before, from) = from.split_at(before);
    let (to_lines, to_behind) = to.as_chunks_mut::<LINE>();
    let (from_lines, from_behind) = from.as_chunks::<LINE>();
    to_before.write_copy_of_slice(from_before);
    for (to, from) in to_lines.iter_mut().zip(from_lines) {
        for at in (0..LINE).step_by(WORD) {
            // SAFETY: `at` and the WORD bytes behind it are within both lines. `to` begins at a
            // multiple of LINE and so of WORD, as the store asks for; the load takes any address.
            // Every x86-64 has both (SSE2).
            unsafe {
                let word = _mm_loadu_si128(from.as_ptr().add(at).cast());
                _mm_stream_si128(to.as_mut_ptr().add(at).cast(), word);
            }
        }
    }
    // Non-temporal stores are not ordered with other stores. The fence makes them visible before
    // anything that follows, on every CPU.
    // SAFETY: every x86-64 has it (SSE).
    unsafe { _mm_sfence() };
    to_behind.write_copy_of_slice(from_behind);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appends_like_an_ordinary_copy() {
        let source: Vec<u8> = (0..20_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        let lens = [0, 1, 4095, 4096, 4097, 4096 + 63, 4096 + 64, 4096 + 65, 10_007];
        for (start, from) in (0..70).flat_map(|start| [0, 1, 15, 33].map(|from| (start, from))) {
            for len in lens {
                let mut out = Vec::with_capacity(start + len);
                out.resize(start, 0xaa);
                let mut plain = out.clone();
                for bytes in [&source[from..from + len], &source[..9], &source[from..]] {
                    append(&mut out, bytes);
                    plain.extend_from_slice(bytes);
                    assert!(out == plain, "{len} bytes from {from} on behind {start}");
                }
            }
        }
    }

    #[test]
    fn writes_only_the_appended_range() {
        let source = [7; 8192];
        for (start, len) in (0..64).flat_map(|start| (4096..4230).map(move |len| (start, len))) {
            let mut out = vec![0xaa; start + len + 100];
            out.truncate(start);
            append(&mut out, &source[..len]);
            assert_eq!(out.len(), start + len);
            // SAFETY: all of them were written when the vector was made.
            unsafe { out.set_len(start + len + 100) };
            let is = |range: std::ops::Range<usize>, byte| out[range].iter().all(|&b| b == byte);
            let end = start + len;
            assert!(is(0..start, 0xaa) && is(start..end, 7) && is(end..end + 100, 0xaa));
        }
    }
}
