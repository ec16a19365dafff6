//! Generated tables in the documentation, each between two marker comments. Tests check them;
//! `HELIX_BLESS=1 cargo test -p helix-server --lib reference` updates them.

// Reads the documentation, and writes it on request.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the path of a file in `docs/`.
pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name)
}

/// Checks the table between the markers for `what` on a page, or updates it.
pub(crate) fn expect_table(page: &str, what: &str, head: &str, rows: impl Iterator<Item = String>) {
    let table: String = std::iter::once(head.to_owned()).chain(rows).collect();
    let (path, page) = (path(page), fs::read_to_string(path(page)).unwrap());
    let marker = |text: &str| format!("<!-- {text} -->\n");
    let begin = marker(&format!("{what}: made from the code"));
    let start = page.find(&begin).expect("the page has its start marker") + begin.len();
    let end = page.find(&marker(&format!("end of {what}"))).expect("the page has its end marker");
    if std::env::var_os("HELIX_BLESS").is_some() {
        fs::write(&path, [&page[..start], &table, &page[end..]].concat()).unwrap();
        return;
    }
    assert_eq!(&page[start..end], table, "HELIX_BLESS=1 updates the table");
}
