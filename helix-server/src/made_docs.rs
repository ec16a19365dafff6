//! Tables in the documentation that are made from the code, between two marks. A test holds each to
//! it; `HELIX_BLESS=1 cargo test -p helix-server --lib reference` writes them anew.

// The documentation is read, and written where that is asked for.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::path::{Path, PathBuf};

pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name)
}

/// The page has this between the marks for `what`.
pub(crate) fn expect_table(page: &str, what: &str, head: &str, rows: impl Iterator<Item = String>) {
    let table: String = std::iter::once(head.to_owned()).chain(rows).collect();
    let (path, page) = (path(page), fs::read_to_string(path(page)).unwrap());
    let mark = |text: &str| format!("<!-- {text} -->\n");
    let begin = mark(&format!("{what}: made from the code"));
    let start = page.find(&begin).expect("the page has its mark") + begin.len();
    let end = page.find(&mark(&format!("end of {what}"))).expect("the page has its end mark");
    if std::env::var_os("HELIX_BLESS").is_some() {
        fs::write(&path, [&page[..start], &table, &page[end..]].concat()).unwrap();
        return;
    }
    assert_eq!(&page[start..end], table, "HELIX_BLESS=1 writes the table anew");
}
