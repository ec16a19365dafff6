//! The allocator of Helix's programs, and how they use memory of the system.
//!
//! Programs that embed a node choose their own allocator, so only binaries use this crate.

/// Time after which the allocator returns freed memory to the system, in milliseconds.
///
/// A node with memory storage frees its oldest payloads at the pace of its appends. Memory that is
/// returned meanwhile costs a page fault for each 4 KiB of the next payloads: 6 to 12 per append of
/// 100 KiB, against none with this delay ([0059]).
///
/// [0059]: ../docs/decisions/0059-freed-memory-stays.md
pub const KEEP_MS: u32 = 30_000;

/// Allocator of the programs.
pub use mimalloc::MiMalloc as Allocator;

/// Prepares the memory of a program that runs a node or measures one. Call it first in `main`.
///
/// The process uses pages of 4 KiB only, so that it never waits while 2 MiB are zero-filled, and
/// the allocator keeps freed memory for [`KEEP_MS`]. `MIMALLOC_PURGE_DELAY` of the environment
/// overrides that. Where the kernel has no setting of the page size, that part has no effect.
pub fn prepare() {
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
        purge_delay::set(KEEP_MS);
    }
}

#[allow(unsafe_code)]
mod purge_delay {
    #[cfg(test)]
    use libmimalloc_sys::mi_option_get;
    use libmimalloc_sys::{mi_option_set, mi_option_t};

    /// Number of `mi_option_purge_delay` in `mimalloc.h`, which the bindings do not name.
    const OPTION: mi_option_t = 15;

    pub(crate) fn set(milliseconds: u32) {
        // SAFETY: the option exists. The caller has no other thread that could read it meanwhile.
        unsafe { mi_option_set(OPTION, milliseconds.into()) }
    }

    #[cfg(test)]
    pub(crate) fn get() -> i64 {
        // SAFETY: the option exists, and reading it changes nothing.
        unsafe { mi_option_get(OPTION) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_the_option_is_that_of_the_purge_delay() {
        // 1 s is the default of the purge delay, and of no option beside it.
        assert_eq!(purge_delay::get(), 1_000);
        prepare();
        assert_eq!(purge_delay::get(), i64::from(KEEP_MS));
    }
}
