//! Says which planted bug is alive in this process: the one that HELIX_BUG names, or none.
//! Nothing but a copy of the tree, made by `testing/sim/bugs.sh`, is ever built with it.

use std::sync::OnceLock;

pub fn is(name: &str) -> bool {
    static ALIVE: OnceLock<String> = OnceLock::new();
    ALIVE.get_or_init(|| std::env::var("HELIX_BUG").unwrap_or_default()) == name
}
