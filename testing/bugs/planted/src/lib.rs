//! Switches of the planted bugs: `HELIX_BUG` names the enabled one, if any.
//! Only copies of the tree that `testing/bugs/run.sh` makes are built with this crate.

use std::sync::OnceLock;

/// Returns whether the bug of this name is enabled in this process.
pub fn is(name: &str) -> bool {
    static ENABLED: OnceLock<String> = OnceLock::new();
    ENABLED.get_or_init(|| std::env::var("HELIX_BUG").unwrap_or_default()) == name
}
